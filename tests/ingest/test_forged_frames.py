"""Frames whose checksum is right and whose content is impossible: left out and named, and nobody else is blind for it."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sentinel.decision import Tick
from sentinel.ingest.follow import RunFollower
from sentinel.ingest.incarnation import SpoolRecord
from sentinel.ingest.liveness import LivenessTracker
from sentinel.ingest.steps import StepAssembler
from sentinel.ingest.trust import MAX_GAPS
from sentinel.judge.judge import Judge
from sentinel.judge.packs import RulePacks
from sentinel.messages import IMPOSSIBLE, START, Bye, EndStep, Health, Heartbeat
from sentinel.testing import Nan, SyntheticRun
from sentinel.wire.frame import FRAME_TYPES, FrameType, Header, Message, encode_frame, encode_message, run_id_of

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
STEPS = 8


class Judged:
    """What came of a run of two ranks, into whose second spool a frame was forged in the middle."""

    def __init__(self, run: SyntheticRun) -> None:
        self.problems: list[str] = []
        self.follower = RunFollower(run.directory, on_problem=self.problems.append)
        self.tracker = LivenessTracker()
        self.whole: dict[int, list[int]] = {}
        """Rank -> steps of which it is whole."""
        self.health: list[tuple[int, Health]] = []
        self.anomalies: list[Any] = []
        self.records: list[SpoolRecord] = []
        assembler = StepAssembler("run")
        judge = Judge(RulePacks([]).load())
        begun = time.process_time()
        while records := self.follower.poll():
            self.records += records
            assembler.take(records, 0.0)
            self.tracker.receive(records)
            self.tracker.look(0.1, self.follower.behind, is_caught_up=True)
            self.tracker.facts(assembler.attempts.newest, assembler.attempts.attempt_of)
            self._take(judge, assembler.close(0.0, self.follower.behind))
            assembler.snapshot()
        self._take(judge, assembler.finish(0.0))
        self.took_s = time.process_time() - begun

    def _take(self, judge: Judge, views: Any) -> None:
        for view in views:
            if not isinstance(view, Tick):
                self.anomalies += judge.judge(view.decision, view).anomalies
                self.health += view.health
                for part in view.parts:
                    if part.end_step is not None:
                        self.whole.setdefault(part.rank, []).append(view.step)


def header(run: SyntheticRun, frame_type: int, **changed: Any) -> Header:
    spool = run._ranks[1].spool
    assert spool is not None
    reported = Header(
        type=frame_type,
        incarnation=run.incarnation(1),
        run_id=run_id_of("run"),
        rank=1,
        seq=spool._seq + 1,
        attempt=0,
        step=run.step,
        layout_id=spool._layouts.id,
        wall_ns=1_800_000_000 * 10**9,
        mono_ns=10**9,
    )
    return msgspec.structs.replace(reported, **changed)


def forge(run: SyntheticRun, reported: Header, payload: bytes, *, is_counted: bool = True) -> None:
    """Put a frame into the spool of rank 1, as if the rank had written it."""
    head, body = encode_frame(reported, payload)
    run._append_raw(run._ranks[1], head + bytes(body))
    spool = run._ranks[1].spool
    if is_counted and spool is not None:
        spool._seq += 1


def judged(tmp_path: Path, put: Any) -> Judged:
    run = SyntheticRun(tmp_path / "run", dp=2, layers=1, d_model=8, elements=8, micro_steps=1)
    run.plant(Nan(step=STEPS - 1, module="layers.0.mlp", rank=0))
    run.write(STEPS // 2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    put(run)
    run.write(STEPS - STEPS // 2)
    run.end()
    found = Judged(run)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500 * 1024, "KiB"
    return found


def nested(depth: int) -> bytes:
    return b"\x81\xa8settings\x81\xa1a" + b"\x91" * depth + b"\x00"


def changed(run: SyntheticRun, path: tuple[Any, ...], value: Any) -> bytes:
    """Return the descriptor of rank 1 with one value in it replaced."""
    reported = msgspec.to_builtins(run.descriptor(1))
    at = reported
    for key in path[:-1]:
        if isinstance(at[key], tuple):
            at[key] = [list(one) if isinstance(one, tuple) else one for one in at[key]]
        at = at[key]
    at[path[-1]] = value
    return msgspec.msgpack.encode(reported)


DESCRIPTORS: list[tuple[tuple[Any, ...], Any]] = [
    (("place", "world_size"), 5 * 10**7),
    (("place", "rank"), 2**32 - 1),
    (("place", "rank"), 0),
    (("place", "pp_size"), 2**63),
    (("place", "schedule"), "v" * 10**6),
    (("chunks", 0, "depth"), 2**63),
    (("chunks", 0, "vpp_stage"), 2**40),
    (("chunks", 0, "offsets"), {"layers": 2**62}),
    (("tensors", 0, "id"), 2**24 - 1),
    (("tensors", 0, "id"), 1),
    (("tensors", 0, "shape"), [2**40] * 5),
    (("tensors", 0, "shape"), [-1]),
    (("tensors", 0, "site_pos"), 2**40),
    (("tensors", 0, "name"), "n" * 10**6),
    (("row_bytes",), 2**40),
    (("row_fields", 0), ["tensor", "<u4", 2**70 // 2**7]),
    (("row_fields", 0), ["tensor", "(9999999,9999999)f8", 0]),
    (("layer_offset",), 2**63),
    (("first_step",), 2**63),
]


@pytest.mark.parametrize(("path", "value"), DESCRIPTORS)
def test_an_impossible_descriptor_is_left_out_with_its_rows_and_named(path: Any, value: Any, tmp_path: Path) -> None:
    def put(run: SyntheticRun) -> None:
        forge(run, header(run, FrameType.DESCRIPTOR, layout_id=99), changed(run, path, value))

    found = judged(tmp_path, put)

    check(found)
    assert found.whole[1] == list(range(STEPS))


PAYLOADS: list[tuple[int, bytes]] = [
    (FrameType.DESCRIPTOR, nested(100)),
    (FrameType.DESCRIPTOR, nested(10**6)),
    (FrameType.HEALTH, b"\x81\xa1x" + b"\x91" * 10**6 + b"\x00"),
    (FrameType.END_STEP, b"\xde\xff\xff"),
    (FrameType.END_STEP, b"\x81\xa7samples\xdd\xff\xff\xff\xff"),
    (FrameType.CHANGE, msgspec.msgpack.encode({"base": 7, "base_offset": 2**63})),
    (FrameType.CHANGE, msgspec.msgpack.encode({"base": 2**40, "base_offset": 0})),
    (FrameType.HEARTBEAT, msgspec.msgpack.encode({"step": 2**63, "call_id": 0, "activity": "train"})),
    (FrameType.HEARTBEAT, msgspec.msgpack.encode({"step": 1, "call_id": 0, "activity": "t" * 10**6})),
    (FrameType.HEARTBEAT, msgspec.msgpack.encode({"step": 1, "call_id": 0, "activity": "train", "is_waiting": 77})),
    (FrameType.ACK, msgspec.msgpack.encode({"command": "c" * 10**6, "state": "armed", "step": 1})),
    (FrameType.ACK, msgspec.msgpack.encode({"command": "c", "state": "armed", "step": -(2**63)})),
    (FrameType.BYE, msgspec.msgpack.encode({"reason": "exit", "step": 2**63})),
    (FrameType.VECTOR, msgspec.msgpack.encode({"items": [{"tensor": 2**40, "statistic": "a", "axis": "b"}]})),
    (
        FrameType.VECTOR,
        msgspec.msgpack.encode({"items": [{"tensor": 1, "statistic": "a", "axis": "b", "shape": [2**40, 2**40]}]}),
    ),
    (FrameType.HEALTH, msgspec.msgpack.encode({"code": "x", "message": "y", "count": 2**63})),
    (FrameType.END_STEP, msgspec.msgpack.encode({"step": 4, "num_rows": -5, "num_calls": 0})),
    (FrameType.END_STEP, msgspec.msgpack.encode({"step": 4, "num_rows": 1, "num_calls": 0, "step_time_s": float("nan")})),
    (FrameType.END_STEP, encode_message(EndStep(step=7, num_rows=1, num_calls=1))),
    (FrameType.ROWS, bytes(77)),
    (FrameType.ROWS, b""),
]


@pytest.mark.parametrize(("frame_type", "payload"), PAYLOADS)
def test_an_impossible_payload_is_left_out_and_named(frame_type: int, payload: bytes, tmp_path: Path) -> None:
    found = judged(tmp_path, lambda run: forge(run, header(run, frame_type, row_count=5, layout_id=_layout(run)), payload))

    check(found)
    assert found.whole[1] == list(range(STEPS))


def _layout(run: SyntheticRun) -> int:
    spool = run._ranks[1].spool
    assert spool is not None
    return spool._layouts.id


HEADERS: list[dict[str, Any]] = [
    {"rank": 2**32 - 1},
    {"rank": 0},
    {"incarnation": b"x" * 16},
    {"step": 2**62},
    {"step": -5},
    {"step": 2**39},
    {"attempt": 2**31},
    {"seq": 2**63},
    {"seq": 2**50},
    {"seq": MAX_GAPS + 200},
    {"seq": 0},
    {"wall_ns": 2**63 - 1},
    {"mono_ns": -(2**63)},
]


@pytest.mark.parametrize("fields", HEADERS)
def test_an_impossible_header_is_left_out_and_named(fields: dict[str, Any], tmp_path: Path) -> None:
    def put(run: SyntheticRun) -> None:
        step = fields.get("step", run.step)
        reported = encode_message(EndStep(step=max(0, min(step, 2**40)), num_rows=0, num_calls=1))
        forge(run, header(run, FrameType.END_STEP, **fields), reported, is_counted=False)

    found = judged(tmp_path, put)

    check(found)
    assert found.whole[1] == list(range(STEPS))
    assert sorted(incarnation.rank for incarnation in found.follower.incarnations.values()) == [0, 1]


def check(found: Judged) -> None:
    """What holds whatever was forged: rank 0 is judged whole and its NaN is found, and rank 1's frame is named, once."""
    assert found.whole[0] == list(range(STEPS))
    assert any(one.rule == "non-finite" and one.rank == 0 for one in found.anomalies)
    [problem] = found.problems
    assert "rank 1: spool/r00001-" in problem
    assert "000000.spool at byte " in problem
    assert "the frame is left out" in problem
    assert [rank for rank, one in found.health if one.code == IMPOSSIBLE] == [1]
    [reported] = [one for one in found.anomalies if one.rule == "impossible-frame"]
    assert reported.rank == 1
    assert reported.message == problem
    assert found.took_s < 5.0


def test_a_restart_does_not_tell_of_an_impossible_frame_again(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path / "run", layers=1, d_model=8, elements=8, micro_steps=1)
    run.write(2)
    forge_into(run, 0)
    run.write(2)
    judge, reported = Judge(RulePacks([]).load()), []
    follower = RunFollower(run.directory, on_problem=lambda problem: None)
    assembler = StepAssembler("run")

    for _ in range(2):
        assembler.take(follower.poll(), 0.0)
        for view in assembler.close(0.0):
            assert not isinstance(view, Tick)
            reported += [one.event for one in judge.judge(view.decision, view).anomalies if one.rule == "impossible-frame"]
        again = Judge(RulePacks([]).load())
        again.restore(judge.snapshot())
        judge = again
        forge_into(run, 0)
        run.write(2)

    assert reported == ["onset"]


def forge_into(run: SyntheticRun, rank: int) -> None:
    """Have a rank write the end of a step that is none."""
    spool = run._ranks[rank].spool
    assert spool is not None
    spool.append(FrameType.END_STEP, b"\xc1", step=run.step)


def test_a_true_leap_is_believed(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path / "run", layers=1, d_model=8, elements=8, micro_steps=1)
    run.write(2)
    spool = run._ranks[0].spool
    assert spool is not None
    spool._seq += 100_000
    run.write(2)
    run.step = 5000
    run.write(2)
    run.end()

    found = Judged(run)

    assert found.whole[0] == [0, 1, 2, 3, 5000, 5001]
    assert found.problems == []
    assert found.follower.num_lost == 100_000


def test_a_leap_that_nothing_follows_yet_waits_and_the_end_of_the_run_believes_it(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path / "run", layers=1, d_model=8, elements=8, micro_steps=1)
    run.write(2)
    spool = run._ranks[0].spool
    assert spool is not None
    spool._seq += 100_000
    run.report(0, Heartbeat(step=2, call_id=0, activity="train"))
    follower = RunFollower(run.directory)

    assert not any(isinstance(one.message, Heartbeat) for one in follower.poll())
    assert [type(one.message) for one in follower.poll(final=True)] == [Heartbeat]


def test_a_rank_all_of_whose_ends_are_impossible_is_not_called_hung(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path / "run", dp=2, layers=1, d_model=8, elements=8, micro_steps=1)
    run.write(2)
    follower, tracker = RunFollower(run.directory, on_problem=lambda problem: None), LivenessTracker()
    tracker.receive(follower.poll())
    for _ in range(100):
        forge(run, header(run, FrameType.END_STEP), b"\xc1")
        tracker.receive(follower.poll())
        tracker.look(tracker.now + 1.0, (), is_caught_up=True)

    [_, one] = tracker.facts(0, lambda incarnation: 0)

    assert one.rank == 1
    assert tracker.now - one.moved_at <= 2.0


@pytest.mark.parametrize(
    "message",
    [Bye(reason="exit", step=3), Health(code="x", message="y"), Heartbeat(step=3, call_id=1, activity="train")],
)
def test_what_our_own_ranks_say_is_possible(message: Message, tmp_path: Path) -> None:
    found = judged(tmp_path, lambda run: forge(run, header(run, FRAME_TYPES[type(message)]), encode_message(message)))

    assert found.problems == []


@pytest.mark.parametrize("num_cases", [4_000, pytest.param(20_000, marks=pytest.mark.long)])
def test_thousands_of_forged_frames_blind_nobody(num_cases: int) -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/fuzz.py", "frames", "--cases", str(num_cases), "--seed", "1000"],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert f"{num_cases:,} cases" in done.stdout
    assert " 0 failed" in done.stdout


def of_world(run: SyntheticRun, rank: int, world_size: int) -> None:
    """Have a rank say, from its first frame on, that the run has so many ranks."""
    table = run._ranks[rank].table
    place = msgspec.structs.replace(table.descriptor.place, world_size=world_size)
    table.descriptor = msgspec.structs.replace(table.descriptor, place=place)


@pytest.mark.parametrize("attempt", [0, None])
@pytest.mark.parametrize(
    ("dp", "liar", "world_size"),
    [(2, 1, 8), (2, 0, 8), (4, 2, 3), (4, 0, 10**5), (3, 0, 2), (2, 0, 1), (3, 0, 1), (4, 1, 2)],
)
def test_a_rank_that_errs_about_the_number_of_ranks_opens_no_attempt_and_is_named(
    tmp_path: Path, dp: int, liar: int, world_size: int, attempt: int | None
) -> None:
    run = SyntheticRun(tmp_path / "run", dp=dp, layers=1, d_model=8, elements=8, micro_steps=1, attempt=attempt, ranks=())
    run.plant(Nan(step=STEPS - 1, module="layers.0.mlp", rank=0))
    of_world(run, liar, world_size)
    for rank in range(dp):
        run.start(rank)
    run.write(STEPS)
    run.end()
    found = Judged(run)

    assert found.whole == {rank: list(range(STEPS)) for rank in range(dp)}
    assert {one.attempt for one in found.anomalies} == {0}
    reported = [one for one in found.anomalies if one.rule == "impossible-frame"]
    assert [(one.rank, one.event) for one in reported] == [(liar, "onset")]
    assert f"rank {liar} says that the run has {world_size} ranks" in reported[0].message
    assert any(one.rule == "non-finite" and one.rank == 0 for one in found.anomalies)


@pytest.mark.parametrize(("starts", "is_one"), [(("aa", "aa"), True), (("aa", "bb"), False), (("", ""), False)])
def test_ranks_on_two_machines_are_of_one_attempt_where_they_agreed_with_one_rank_0(
    tmp_path: Path, starts: tuple[str, str], is_one: bool
) -> None:
    run = SyntheticRun(tmp_path / "run", dp=2, layers=1, d_model=8, elements=8, micro_steps=1, attempt=0, ranks=())
    of_world(run, 0, 1)
    for rank, start in enumerate(starts):
        table = run._ranks[rank].table
        environment = {"host": f"node{rank}"} | ({START: start} if start else {})
        table.descriptor = msgspec.structs.replace(table.descriptor, environment=environment)
        run.start(rank)
    run.write(STEPS)
    run.end()
    found = Judged(run)

    assert bool([one for one in found.anomalies if one.rule == "impossible-frame"]) is is_one


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (2, 1), (1, 2), (1, 4)])
def test_a_run_that_is_started_again_with_other_ranks_is_another_attempt_and_nobody_is_named(
    tmp_path: Path, before: int, after: int
) -> None:
    first = SyntheticRun(tmp_path / "run", dp=before, layers=1, d_model=8, elements=8, micro_steps=1, attempt=0)
    first.write(STEPS)
    second = SyntheticRun(
        tmp_path / "run", dp=after, layers=1, d_model=8, elements=8, micro_steps=1, attempt=0, first_step=STEPS, ranks=(),
        clock=first.clock,
    )  # fmt: skip
    second._num_incarnations = 50
    for rank in range(after):
        second.start(rank)
    second.write(STEPS)
    found = Judged(second)

    assert [one for one in found.anomalies if one.rule == "impossible-frame"] == []
    assert {rank: len(steps) for rank, steps in found.whole.items()} == {
        rank: STEPS * (2 if rank < min(before, after) else 1) for rank in range(max(before, after))
    }
