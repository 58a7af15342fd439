from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from sentinel.command import EnableMonitoring
from sentinel.messages import Ack, Bye, EndStep, Health, Heartbeat
from sentinel.record import ROW_DTYPE, Flag, Kind
from sentinel.testing import FakeClock, SyntheticRun
from sentinel.wire import spool
from sentinel.wire.frame import Frame, FrameType, Message, decode_message
from sentinel.wire.handover import MAX_NOTES, Handover, StepBatch
from sentinel.wire.spool import SpoolReader

LIFE = bytes(range(16))


class Trainer:
    """A hand-over without its thread: `turn` is the writer's round."""

    def __init__(self, directory: Path, **more: object) -> None:
        self.clock = FakeClock()
        self.released: list[int] = []
        self.handover = Handover(directory, life=LIFE, run="run", rank=0, attempt=0, clock=self.clock, start=False, **more)  # type: ignore[arg-type]
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
        return SpoolReader(self.handover.spool.directory).poll()

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


def test_a_full_queue_drops_rows_counts_them_and_still_speaks(trainer: Trainer) -> None:
    results = [trainer.submit(step, num_rows=10) for step in range(6)]
    assert results == [True] * 4 + [False] * 2
    assert trainer.released == [4, 5], "a dropped buffer is given back at once"

    trainer.handover.turn()

    ends = trainer.ends()
    assert [(end.step, end.num_rows) for end in ends] == [(0, 10), (1, 10), (2, 10), (3, 10), (4, 0), (5, 0)]
    assert sum(end.num_dropped_rows for end in ends) == 20
    assert trainer.submit(6)
    trainer.handover.turn()
    assert trainer.ends()[-1].num_dropped_rows == 0, "told once"


def test_rows_the_caller_dropped_travel_with_the_next_end(trainer: Trainer) -> None:
    trainer.handover.count_dropped(17)
    trainer.submit(0)
    trainer.handover.turn()

    assert trainer.ends()[0].num_dropped_rows == 17


def test_rows_the_disk_refused_travel_with_the_end_that_arrives(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(spool.os, "writev", _no_space)
        for step in range(3):
            trainer.submit(step, num_rows=5)
        trainer.handover.turn()
    trainer.submit(3, num_rows=5)
    trainer.handover.turn()

    assert [(end.step, end.num_dropped_rows) for end in trainer.ends()] == [(3, 15)]
    assert [one.code for one in trainer.said() if isinstance(one, Health)] == ["disk_full"]


def test_the_queue_of_notes_is_bounded(trainer: Trainer) -> None:
    results = [trainer.handover.post(Health(code="x", message="")) for _ in range(MAX_NOTES + 10)]
    assert results == [True] * MAX_NOTES + [False] * 10

    trainer.handover.turn()

    told = [one for one in trainer.said() if isinstance(one, Health)]
    assert [(one.code, one.count) for one in told[MAX_NOTES:]] == [("writer_failed", 10)]


def test_a_failing_step_is_said_and_the_next_is_written(trainer: Trainer) -> None:
    def prepare() -> None:
        raise RuntimeError("device lost")

    trainer.submit(0, prepare=prepare)
    trainer.submit(1)
    trainer.handover.turn()

    assert [(end.step, end.num_rows, end.num_dropped_rows) for end in trainer.ends()] == [(0, 0, 3), (1, 3, 0)]
    told = [one for one in trainer.said() if isinstance(one, Health)]
    assert "device lost" in told[0].message
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
    assert taken == [], "not before 20 ms have passed"
    trainer.clock.advance(0.02)
    trainer.handover.turn()
    trainer.clock.advance(0.02)
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
    handover = Handover(tmp_path, life=LIFE, run="run", rank=0, queue_steps=50)
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
        go_on.wait(30)
        return writev(fd, buffers)

    monkeypatch.setattr(spool.os, "writev", stall)
    handover = Handover(tmp_path, life=LIFE, run="run", rank=0)
    rows = np.zeros(10, ROW_DTYPE)
    batch = StepBatch(step=0, rows=rows, num_rows=10, end_step=EndStep(step=0, num_rows=10, num_calls=10))
    handover.submit(batch)
    assert stalled.wait(30)

    begun = time.perf_counter()
    for _ in range(1000):
        handover.submit(batch)
    assert time.perf_counter() - begun < 5.0
    assert handover.num_dropped_batches > 900
    assert not handover.close(timeout_s=0.01)
    go_on.set()
    assert handover._thread is not None
    handover._thread.join(30)
    assert not handover._thread.is_alive()


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    handover = Handover(tmp_path, life=LIFE, run="run", rank=0)
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
