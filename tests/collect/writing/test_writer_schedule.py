"""When the writer thread beats, looks for commands, and wakes."""

from __future__ import annotations

import pytest

from sentinel.collect.writing.writer_schedule import IDLE_POLL_S, PULSE_S, WriterSchedule

S = 1_000_000_000


def test_a_heartbeat_is_due_once_an_interval() -> None:
    schedule = WriterSchedule(heartbeat_s=1.0)

    due = [now for now in range(0, 3 * S, S // 10) if schedule.is_heartbeat_due(now)]

    assert due == [0, S, 2 * S]


def test_commands_are_looked_for_more_often_while_something_is_trained() -> None:
    idle, training, stepping = WriterSchedule(), WriterSchedule(), WriterSchedule()
    training.activity = "train"
    looks = dict.fromkeys(("idle", "training", "stepping"), 0)
    for now in range(0, S, S // 100):
        stepping.note_step(now)
        for name, schedule in (("idle", idle), ("training", training), ("stepping", stepping)):
            looks[name] += schedule.is_look_due(now)

    assert looks == {"idle": 4, "training": 50, "stepping": 50}


@pytest.mark.parametrize(("took_ns", "expected_s"), [(2_000, 0.02), (500_000, 0.05), (80_000_000, IDLE_POLL_S)])
def test_a_folder_that_is_slow_to_look_at_is_asked_less_often(took_ns: int, expected_s: float) -> None:
    schedule = WriterSchedule()
    schedule.activity = "train"
    assert schedule.is_look_due(0)

    schedule.note_look(took_ns, 0)

    due = round(expected_s * S)
    assert [schedule.is_look_due(due - 1), schedule.is_look_due(due)] == [False, True]


def test_the_thread_sleeps_until_something_is_due_and_never_past_the_next_pulse() -> None:
    schedule = WriterSchedule(heartbeat_s=1.0)
    schedule.is_heartbeat_due(0)
    schedule.is_look_due(0)
    assert schedule.pause_s(0) == IDLE_POLL_S
    assert schedule.pause_s(S // 5) == pytest.approx(IDLE_POLL_S - 0.2)
    assert schedule.pause_s(2 * S) == 0.001

    schedule.activity = "train"
    assert schedule.pause_s(0) == PULSE_S
