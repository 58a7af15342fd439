from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from sentinel.collect.writing import step_queue
from sentinel.collect.writing.handover import Handover
from sentinel.collect.writing.step_batch import StepBatch
from sentinel.collect.writing.step_queue import MAX_NOTES
from sentinel.command import EnableMonitoring
from sentinel.messages import Ack, Bye, EndStep, Health, Heartbeat
from sentinel.record import ROW_DTYPE, Flag, Kind
from sentinel.testing import FakeClock, SyntheticRun
from sentinel.wire import spool
from sentinel.wire.frame import Frame, FrameType, Message, decode_message
from sentinel.wire.spool_reader import SpoolReader

LIFE = bytes(range(16))


class Trainer:
    """A hand-over without its thread: `turn` is the writer's round."""

    def __init__(self, directory: Path, **more: object) -> None:
        self.clock = FakeClock()
        self.released: list[int] = []
        self.handover = Handover(
            directory, incarnation=LIFE, run="run", rank=0, attempt=0, clock=self.clock, start=False, **more
        )  # type: ignore[arg-type]
        self.directory = directory

    def submit(self, step: int, num_rows: int = 3, **more: object) -> bool:
        rows = np.zeros(num_rows, ROW_DTYPE)
        rows["tensor"], rows["micro_step"] = np.arange(num_rows), -1
        end = EndStep(step=step, num_rows=num_rows, num_calls=num_rows)
        batch = StepBatch(
            step=step, rows=rows, num_rows=num_rows, end_step=end, release=lambda: self.released.append(step), **more
        )  # type: ignore[arg-type]
        return self.handover.submit(batch)

    def frames(self) -> list[Frame]:
        reader, found = SpoolReader(self.handover.spool.directory), []
        while frames := reader.poll():
            found += frames
        return found

    def said(self) -> list[Message]:
        return [message for message in map(decode_message, self.frames()) if message is not None]

    def ends(self) -> list[EndStep]:
        return [message for message in self.said() if isinstance(message, EndStep)]


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path)


def test_a_step_is_written_rows_first_and_its_end_last(trainer: Trainer) -> None:
    assert trainer.submit(5)
    assert trainer.frames() == [], "nothing is written in the training thread"

    trainer.handover.turn()

    assert [frame.header.type for frame in trainer.frames()] == [FrameType.ROWS, FrameType.END_STEP]
    assert {frame.header.step for frame in trainer.frames()} == {5}
    assert trainer.ends()[0].num_rows == 3
    assert trainer.released == [5]


def test_micro_steps_are_folded_and_the_end_says_how_many_rows_there_are(trainer: Trainer) -> None:
    rows = np.zeros(4, ROW_DTYPE)
    rows["tensor"], rows["kind"], rows["micro_step"] = [7, 8, 7, 8], Kind.ACTIVATION, [0, 0, 1, 1]
    rows["count"], rows["mean"], rows["num_folded"] = 2, [1.0, 2.0, 3.0, 4.0], 1
    rows["call_id"], rows["bad_call_id"] = np.arange(4), 0xFFFFFFFF
    for step, per_micro_step in ((0, False), (1, True)):
        end = EndStep(step=step, num_rows=4, num_calls=4)
        trainer.handover.submit(
            StepBatch(step=step, rows=rows.copy(), num_rows=4, end_step=end, per_micro_step=per_micro_step)
        )

    trainer.handover.turn()

    folded, unfolded = (np.frombuffer(f.payload, ROW_DTYPE) for f in trainer.frames() if f.header.type == FrameType.ROWS)
    assert [end.num_rows for end in trainer.ends()] == [2, 4]
    assert folded["tensor"].tolist() == [7, 8]
    assert folded["mean"].tolist() == [2.0, 3.0]
    assert folded["micro_step"].tolist() == [-1, -1]
    assert (folded["flags"] & Flag.FOLDED).all()
    assert len(unfolded) == 4


def test_what_is_prepared_late_travels(trainer: Trainer) -> None:
    rows = np.zeros(1, ROW_DTYPE)
    rows["micro_step"] = -1
    threads = []

    def prepare() -> dict[str, float]:
        threads.append(threading.current_thread())
        rows["mean"] = 4.0
        return {"loss": 2.5}

    end = EndStep(step=0, num_rows=1, num_calls=1, scalars={"lr": 0.1})
    trainer.handover.submit(StepBatch(step=0, rows=rows, num_rows=1, end_step=end, prepare=prepare))
    assert threads == []
    trainer.handover.turn()

    assert np.frombuffer(trainer.frames()[0].payload, ROW_DTYPE)["mean"].tolist() == [4.0]
    assert trainer.ends()[0].scalars == {"lr": 0.1, "loss": 2.5}


def bordered(step: int, num_rows: int = 100) -> np.ndarray:
    """Rows of which the first is a border, the second a NaN at step 2, and the others are finite and ordinary."""
    rows = np.zeros(num_rows, ROW_DTYPE)
    rows["tensor"], rows["micro_step"], rows["flags"][0] = np.arange(num_rows), -1, Flag.BORDER
    rows["num_nan"][1] = step == 2
    return rows


def late(trainer: Trainer, num_steps: int, **more: object) -> list[bool]:
    """Submit steps that nobody writes."""
    results = []
    for step in range(num_steps):
        end = EndStep(step=step, num_rows=100, num_calls=100, scalars={"loss": float(step)})
        batch = StepBatch(
            step=step, rows=bordered(step), num_rows=100, end_step=end,
            release=lambda step=step: trainer.released.append(step), **more,
        )  # type: ignore[arg-type]  # fmt: skip
        results.append(trainer.handover.submit(batch))
    return results


def test_a_writer_late_by_two_seconds_of_steps_of_5_ms_loses_nothing(trainer: Trainer) -> None:
    assert all(trainer.submit(step, num_rows=2000) for step in range(400))

    trainer.handover.turn()

    assert [(end.step, end.num_rows, end.num_dropped_rows) for end in trainer.ends()] == [(s, 2000, 0) for s in range(400)]
    assert not [one for one in trainer.said() if isinstance(one, Health)], "nothing was lost, nothing is told"


def test_a_full_queue_cuts_finite_rows_of_the_oldest_steps_and_no_step(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, queue_bytes=10 * 13_600)
    results = late(trainer, 30)
    assert results == [True] * 10 + [False] * 20

    trainer.handover.turn()

    ends = trainer.ends()
    assert [(end.step, end.scalars["loss"]) for end in ends] == [(step, float(step)) for step in range(30)]
    cut = [end.step for end in ends if end.num_dropped_rows]
    assert cut == list(range(len(cut))), "the oldest steps, one after the other"
    assert 20 <= len(cut) <= 24
    assert all(end.num_rows + end.num_dropped_rows == 100 for end in ends), "counted on the step that lost them"
    assert all((end.num_finite_dropped, end.lost_to) == (end.num_dropped_rows, "writer") for end in ends[: len(cut)])
    rows = {f.header.step: np.frombuffer(f.payload, ROW_DTYPE) for f in trainer.frames() if f.header.type == FrameType.ROWS}
    assert rows[2]["tensor"].tolist() == [0, 1], "the border, and the NaN"
    assert rows[3]["tensor"].tolist() == [0]
    reported = [one for one in trainer.said() if isinstance(one, Health)]
    assert [(one.code, one.first_step, one.step, one.count) for one in reported] == [
        ("rows_dropped", 0, len(cut) - 1, len(cut))
    ]
    assert reported[0].num_rows == sum(end.num_dropped_rows for end in ends)
    assert trainer.handover.num_cut_steps == len(cut)


def test_rows_that_all_matter_are_dropped_newest_first_and_counted_as_unknown(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, queue_bytes=10 * 13_600)
    for step in range(30):
        rows = bordered(2)
        rows["num_nan"] = 1
        end = EndStep(step=step, num_rows=100, num_calls=100)
        trainer.handover.submit(StepBatch(step=step, rows=rows, num_rows=100, end_step=end))
    trainer.handover.turn()

    ends = trainer.ends()
    assert [end.step for end in ends] == list(range(30))
    assert all(end.num_rows == 100 for end in ends[:8]), "where it began is kept"
    assert all(end.num_rows + end.num_dropped_rows == 100 and not end.num_finite_dropped for end in ends)
    assert sum(end.num_rows == 0 for end in ends) >= 18


def test_rows_that_have_not_arrived_from_their_device_are_not_cut(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, queue_bytes=10 * 13_600)
    late(trainer, 30, complete=lambda: None, complete_early=lambda: False)
    trainer.handover.turn()

    assert [(end.step, end.num_rows) for end in trainer.ends()] == [(step, 100) for step in range(30)]


def test_a_buffer_is_given_back_while_its_step_waits(trainer: Trainer) -> None:
    late(trainer, 3)

    assert trainer.handover.free_buffer()
    assert trainer.released == [0]
    trainer.handover.turn()

    assert trainer.released == [0, 1, 2], "each once"
    assert [end.num_rows for end in trainer.ends()] == [100] * 3
    assert not trainer.handover.free_buffer()


def test_no_end_is_lost_however_many_steps_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_queue, "MAX_STEPS", 50)
    trainer = Trainer(tmp_path)
    late(trainer, 60)
    trainer.handover.turn()
    late_ends = trainer.ends()
    trainer.submit(60)
    trainer.handover.turn()

    assert [end.step for end in late_ends] == list(range(50))
    [reported] = [one for one in trainer.said() if isinstance(one, Health)]
    assert (reported.code, reported.first_step, reported.step, reported.count, reported.num_rows) == (
        "steps_dropped",
        50,
        59,
        10,
        1000,
    )


def test_rows_the_disk_refused_are_told_by_their_own_step(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(spool.os, "writev", _no_space)
        for step in range(3):
            trainer.submit(step, num_rows=5)
        trainer.handover.turn()
    trainer.submit(3, num_rows=5)
    trainer.handover.turn()

    ends = [(end.step, end.num_rows, end.num_dropped_rows, end.lost_to) for end in trainer.ends()]
    assert ends == [*((step, 0, 5, "disk") for step in range(3)), (3, 5, 0, "")], "no end is lost, each tells its own"
    assert [one.code for one in trainer.said() if isinstance(one, Health)] == ["disk_full"]


def test_the_queue_of_notes_is_bounded(trainer: Trainer) -> None:
    results = [trainer.handover.post(Health(code="x", message="")) for _ in range(MAX_NOTES + 10)]
    assert results == [True] * MAX_NOTES + [False] * 10

    trainer.handover.turn()

    reported = [one for one in trainer.said() if isinstance(one, Health)]
    assert [(one.code, one.count) for one in reported[MAX_NOTES:]] == [("writer_failed", 10)]


def test_a_failing_step_is_said_and_the_next_is_written(trainer: Trainer) -> None:
    def prepare() -> None:
        raise RuntimeError("device lost")

    trainer.submit(0, prepare=prepare)
    trainer.submit(1)
    trainer.handover.turn()

    assert [(end.step, end.num_rows, end.num_dropped_rows) for end in trainer.ends()] == [(0, 0, 3), (1, 3, 0)]
    reported = [one for one in trainer.said() if isinstance(one, Health)]
    assert "device lost" in reported[0].message
    assert trainer.released == [0, 1]


def test_a_descriptor_precedes_the_rows_that_need_it(trainer: Trainer, tmp_path: Path) -> None:
    descriptor = SyntheticRun(tmp_path / "other", ranks=[]).descriptor(0)
    trainer.submit(0, descriptor=descriptor, health=[Health(code="x", message="")])
    trainer.handover.turn()

    types = [frame.header.type for frame in trainer.frames()]
    assert types == [FrameType.DESCRIPTOR, FrameType.HEALTH, FrameType.ROWS, FrameType.END_STEP]
    assert len({frame.header.layout_id for frame in trainer.frames()}) == 1


def test_heartbeats_come_when_they_are_due(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, position=lambda: Heartbeat(step=2, call_id=9, activity="train"))
    for _ in range(30):
        trainer.handover.turn()
        trainer.clock.advance(0.1)

    assert trainer.said() == [Heartbeat(step=2, call_id=9, activity="train")] * 3


def test_commands_are_taken_and_answered(tmp_path: Path) -> None:
    taken: list[object] = []

    def obey(command: object) -> Ack:
        taken.append(command)
        return Ack(command="c1", state="armed", step=3)

    command = EnableMonitoring(id="c1", seq=1, at_step=9)
    trainer = Trainer(tmp_path, on_command=obey, position=lambda: Heartbeat(step=3, call_id=0, activity="train"))
    trainer.handover.turn()
    (tmp_path / "control").mkdir(mode=0o700)
    path = tmp_path / "control" / "000001.json"
    path.write_bytes(msgspec.json.encode(command))
    path.chmod(0o600)
    trainer.handover.turn()
    assert taken == [], "not before 50 ms have passed"
    trainer.clock.advance(0.05)
    trainer.handover.turn()
    trainer.clock.advance(0.05)
    trainer.handover.turn()

    assert taken == [command]
    assert trainer.said()[1:] == [Ack(command="c1", state="armed", step=3)]


def test_close_writes_what_is_queued_and_bye_last(trainer: Trainer) -> None:
    trainer.submit(7)
    assert trainer.handover.close("detached", health=[Health(code="late", message="")])

    assert trainer.said()[-1] == Bye(reason="detached", step=7)
    assert [type(one) for one in trainer.said()] == [EndStep, Health, Bye]
    assert trainer.handover.close() is True
    assert not trainer.submit(8)
    assert not trainer.handover.post(Health(code="x", message=""))


def test_the_thread_writes_and_ends(tmp_path: Path) -> None:
    handover = Handover(tmp_path, incarnation=LIFE, run="run", rank=0)
    rows = np.zeros(100, ROW_DTYPE)
    rows["micro_step"] = -1
    for step in range(20):
        end = EndStep(step=step, num_rows=100, num_calls=100)
        assert handover.submit(StepBatch(step=step, rows=rows.copy(), num_rows=100, end_step=end))

    assert handover.close(timeout_s=30.0)

    frames = SpoolReader(handover.spool.directory).poll()
    assert [f.header.step for f in frames if f.header.type == FrameType.END_STEP] == list(range(20))
    assert frames[-1].header.type == FrameType.BYE


def test_a_stalled_disk_stalls_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stalled, go_on = threading.Event(), threading.Event()
    writev = os.writev

    def stall(fd: int, buffers: list[bytes]) -> int:
        stalled.set()
        go_on.wait(240)
        return writev(fd, buffers)

    monkeypatch.setattr(spool.os, "writev", stall)
    handover = Handover(tmp_path, incarnation=LIFE, run="run", rank=0, queue_bytes=20_000)

    def step() -> StepBatch:
        end = EndStep(step=0, num_rows=10, num_calls=10)
        return StepBatch(step=0, rows=np.zeros(10, ROW_DTYPE), num_rows=10, end_step=end)

    handover.submit(step())
    assert stalled.wait(240)

    begun = time.perf_counter()
    for _ in range(1000):
        handover.submit(step())
    assert time.perf_counter() - begun < 5.0
    assert handover.num_cut_steps > 900
    assert not handover.close(timeout_s=0.01)
    go_on.set()
    assert handover._thread is not None
    handover._thread.join(30)
    assert not handover._thread.is_alive()


@pytest.mark.slow
def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    handover = Handover(tmp_path, incarnation=LIFE, run="run", rank=0)
    handover.post(Health(code="before", message=""))
    child = os.fork()
    if child == 0:
        is_quiet = not handover.post(Health(code="child", message="")) and not handover.submit(
            StepBatch(step=1, rows=np.zeros(1, ROW_DTYPE), num_rows=1)
        )
        handover.close()
        os._exit(0 if is_quiet else 1)
    _, status = os.waitpid(child, 0)
    handover.post(Health(code="after", message=""))
    handover.close(timeout_s=30.0)

    assert status == 0
    said = [decode_message(frame) for frame in SpoolReader(handover.spool.directory).poll()]
    assert [one.code for one in said if isinstance(one, Health)] == ["before", "after"]
    assert sum(isinstance(one, Bye) for one in said) == 1


def _no_space(fd: int, buffers: list[bytes]) -> int:
    raise OSError(28, "No space left on device")
