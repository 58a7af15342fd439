from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from sentinel.ingest import follow
from sentinel.ingest.arrivals import Arrivals
from sentinel.ingest.follow import RunFollower
from sentinel.ingest.incarnation import SpoolRecord
from sentinel.ingest.time_order import TimeOrder
from sentinel.messages import Bye, EndStep, Health
from sentinel.testing import SyntheticRun
from sentinel.wire import spool
from sentinel.wire.frame import FrameType, encode_message


def drain(follower: RunFollower, *, final: bool = False) -> list[SpoolRecord]:
    records: list[SpoolRecord] = []
    while found := follower.poll(final=final):
        records += found
    return records


def spoken(records: list[SpoolRecord]) -> list[tuple[int, int]]:
    """(rank, step) of the ends of steps."""
    return [(r.incarnation.rank, r.message.step) for r in records if isinstance(r.message, EndStep)]


def test_a_run_that_does_not_exist_yet_is_silent(run_dir: Path) -> None:
    assert RunFollower(run_dir).poll() == []


def test_ranks_are_found_as_they_appear(run_dir: Path) -> None:
    follower = RunFollower(run_dir)
    run = SyntheticRun(run_dir, dp=2, ranks=[0])
    run.write(1)
    assert spoken(drain(follower)) == [(0, 0)]
    run.start(1)
    run.write(1)

    assert sorted(spoken(drain(follower))) == [(0, 1), (1, 1)]
    assert len(follower.incarnations) == 2


def test_strange_folders_are_left_alone(run_dir: Path) -> None:
    SyntheticRun(run_dir).write(1)
    (run_dir / "spool" / "lost+found").mkdir()
    (run_dir / "spool" / "r1-zz").mkdir()

    assert len(spoken(drain(RunFollower(run_dir)))) == 1


def test_a_record_knows_its_descriptor_and_its_place(run_dir: Path) -> None:
    run = SyntheticRun(run_dir, file_bytes=30_000)
    run.write(5)
    records = drain(RunFollower(run_dir))

    assert {record.frame.file_index for record in records} == set(range(5))
    assert all(record.descriptor == run.descriptor(0) for record in records)
    for record in records:
        index, offset = record.begin
        data = (run.folder(0) / f"{index:06d}.spool").read_bytes()
        assert data[offset : offset + 4] == b"SNTL"


def test_what_is_heard_twice_is_dropped(run_dir: Path) -> None:
    run = SyntheticRun(run_dir)
    run.write(2)
    run.repeat_last(0)
    run.write(1)
    follower = RunFollower(run_dir)

    assert spoken(drain(follower)) == [(0, 0), (0, 1), (0, 2)]
    assert (follower.num_duplicates, follower.num_lost) == (2, 0)


def test_a_copied_folder_says_nothing_new(run_dir: Path) -> None:
    run = SyntheticRun(run_dir)
    run.write(2)
    follower = RunFollower(run_dir)
    drain(follower)
    shutil.copytree(run.folder(0), run_dir / "spool" / "r00000-00000000")

    assert drain(follower) == []
    assert follower.num_duplicates == 5


def test_reordered_frames_are_all_heard(run_dir: Path) -> None:
    run = SyntheticRun(run_dir)
    run.write(2)
    run.reverse_last(0)
    follower = RunFollower(run_dir)

    records = drain(follower)

    assert [record.frame.header.seq for record in records] == [1, 2, 3, 5, 4]
    assert (follower.num_duplicates, follower.num_lost) == (0, 0)


def test_torn_tail_is_cut(run_dir: Path) -> None:
    run = SyntheticRun(run_dir, dp=2)
    run.write(2)
    run.kill(1)
    follower = RunFollower(run_dir)

    assert sorted(spoken(drain(follower))) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert follower.num_torn == 0
    run.start(1)
    run.write(1)
    assert sorted(spoken(drain(follower, final=True))) == [(0, 2), (1, 2)]
    assert (follower.num_torn, follower.num_corrupt) == (1, 0)


def test_a_flipped_bit_costs_its_frame_and_is_counted(run_dir: Path) -> None:
    run = SyntheticRun(run_dir)
    run.write(1)
    run.flip_bit(0, from_end=600)
    run.write(1)
    follower = RunFollower(run_dir)

    records = drain(follower)

    assert spoken(records) == [(0, 0), (0, 1)]
    assert sum(record.frame.header.type == FrameType.ROWS for record in records) == 1
    assert (follower.num_corrupt, follower.num_lost) == (1, 1)


def test_rubbish_in_a_spool_is_said_once_with_its_place(run_dir: Path) -> None:
    problems: list[str] = []
    run = SyntheticRun(run_dir)
    run.write(1)
    run.flip_bit(0, from_end=600)
    run.write(1)
    follower = RunFollower(run_dir, on_problem=problems.append)
    drain(follower)
    run.flip_bit(0, from_end=600)
    run.write(1)
    drain(follower)

    assert len(problems) == 1
    assert run.folder(0).name in problems[0]
    assert "expected frames" in problems[0]


def test_rows_that_cannot_be_laid_out_are_said(run_dir: Path) -> None:
    problems: list[str] = []
    run = SyntheticRun(run_dir)
    strange = msgspec.structs.replace(run.descriptor(0), row_fields=(("tensor", "|O", 0),), row_bytes=136)
    run._write_message(run._ranks[0], FrameType.DESCRIPTOR, encode_message(strange), -1, 0)
    run.write(1)

    assert spoken(drain(RunFollower(run_dir, on_problem=problems.append))) == [(0, 0)]
    assert len(problems) == 2
    assert "r00000-" in problems[0]
    assert "descriptor frame 2: Expected `str` matching regex" in problems[0]
    assert "the frame is left out" in problems[0]
    assert "its tensors were never described" in problems[1]


def test_another_protocol_is_said_once_and_skipped(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problems: list[str] = []
    run = SyntheticRun(run_dir, dp=18)
    encode = spool.encode_frame
    with monkeypatch.context() as patch:
        patch.setattr(spool, "encode_frame", lambda header, payload: encode(header, payload, protocol=3))
        run.write(3, ranks=[17])
    follower = RunFollower(run_dir, on_problem=problems.append)
    drain(follower)

    assert len(problems) == 1
    assert problems[0].startswith("record from rank 17: expected protocol 2 at most, got 3; restart the trainer with ")
    assert follower.num_foreign == 6


def test_a_payload_that_is_not_its_type_is_counted(run_dir: Path) -> None:
    problems: list[str] = []
    run = SyntheticRun(run_dir)
    run._write_message(run._ranks[0], FrameType.HEALTH, b"\xc1", 0, 0)
    run.write(1)
    follower = RunFollower(run_dir, on_problem=problems.append)

    assert spoken(drain(follower)) == [(0, 0)]
    assert follower.num_undecodable == len(problems) == 1


@pytest.mark.parametrize(
    ("kind", "payload", "step", "num_rows", "expected"),
    [
        (FrameType.ROWS, b"abc", 0, 1, "expected 1 rows of 136 bytes, got 3 bytes"),
        (FrameType.ROWS, bytes(2 * 136), 0, 1000, "expected 1000 rows of 136 bytes, got 272 bytes"),
        (FrameType.ROWS, bytes(136), -5, 1, "expected a step in [0, "),
        (FrameType.END_STEP, encode_message(EndStep(step=2**62, num_rows=0, num_calls=0)), 2**62, 0, "expected a step in"),
        (FrameType.END_STEP, encode_message(EndStep(step=7777, num_rows=0, num_calls=0)), 0, 0, "got that of step 7777"),
    ],
)
def test_a_frame_that_contradicts_itself_is_skipped_and_said(
    run_dir: Path, kind: FrameType, payload: bytes, step: int, num_rows: int, expected: str
) -> None:
    problems: list[str] = []
    run = SyntheticRun(run_dir)
    run._write_message(run._ranks[0], kind, payload, step, num_rows)
    run.write(2)
    follower = RunFollower(run_dir, on_problem=problems.append)

    assert spoken(drain(follower)) == [(0, 0), (0, 1)]
    assert follower.num_undecodable == len(problems) == 1
    assert expected in problems[0]


def test_reading_goes_on_where_it_stood(run_dir: Path) -> None:
    run = SyntheticRun(run_dir, dp=2, file_bytes=20_000)
    run.write(5)
    follower = RunFollower(run_dir)
    drain(follower)
    positions = follower.positions()
    run.write(2)
    run.end()

    again = RunFollower(run_dir)
    again.restore(positions)
    records = drain(again)

    assert sorted(spoken(records)) == [(0, 5), (0, 6), (1, 5), (1, 6)]
    assert sum(isinstance(record.message, Bye) for record in records) == 2
    assert all(record.descriptor is not None for record in records)
    assert (again.num_lost, again.num_duplicates) == (0, 0)


def test_whoever_is_furthest_behind_is_read_first(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sentinel.ingest.follow.MIN_WINDOW_BYTES", 4096)
    monkeypatch.setattr("sentinel.ingest.follow.WINDOW_BYTES", 4096)
    monkeypatch.setattr("sentinel.ingest.follow.POLL_BYTES", 20_000)
    run = SyntheticRun(run_dir, dp=3)
    run.write(40)
    follower = RunFollower(run_dir)
    widest = 0
    while follower.poll():
        steps = [incarnation.last_step for incarnation in follower.incarnations.values()]
        widest = max(widest, max(steps) - min(steps))

    assert steps == [39, 39, 39]
    assert widest <= 2
    assert follower.behind == set()


def test_catching_up_sorts_what_it_read_once_a_poll_however_many_ranks_there_are(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SyntheticRun(run_dir, dp=40, layers=1, d_model=8, elements=2).write(6)
    num_sorted = [0]

    class Counted(TimeOrder):
        def due(self) -> list[SpoolRecord]:
            num_sorted[0] += len(self.waiting)
            return super().due()

    monkeypatch.setattr(follow, "TimeOrder", Counted)
    for name in ("WINDOW_BYTES", "MIN_WINDOW_BYTES"):
        monkeypatch.setattr(follow, name, 4096)
    records = drain(RunFollower(run_dir))

    assert len(spoken(records)) == 240
    assert num_sorted[0] <= 2 * len(records), "once, and not once for each rank"
    assert [one.time_ns for one in records] == sorted(one.time_ns for one in records)


def test_who_has_more_on_disk_is_known_to_be_behind(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sentinel.ingest.follow.POLL_BYTES", 1)
    monkeypatch.setattr("sentinel.ingest.follow.MIN_WINDOW_BYTES", 8192)
    run = SyntheticRun(run_dir, dp=2)
    run.write(10)
    follower = RunFollower(run_dir)

    follower.poll()

    assert follower.behind == {run.incarnation(0), run.incarnation(1)}


def test_health_of_a_life_is_heard(run_dir: Path) -> None:
    run = SyntheticRun(run_dir)
    run.report(0, Health(code="hook_failed", message="x"))

    assert [r.message.code for r in drain(RunFollower(run_dir)) if isinstance(r.message, Health)] == ["hook_failed"]


def test_a_final_poll_hands_out_what_waits_for_several_that_have_nothing_more(run_dir: Path) -> None:
    run = SyntheticRun(run_dir, dp=4)
    run.write(2)
    names = sorted(path.name for path in (run_dir / "spool").iterdir())
    # A join knows of more of three of them, which never comes.
    follower = RunFollower(run_dir, arrivals=lambda: Arrivals(frozenset(names[:3]), None))
    while follower.poll():
        pass
    run.write(1, ranks=[3])
    assert not follower.poll() and len(follower.behind) > 2

    last = []
    while found := follower.poll(final=True):
        last += found

    assert {record.incarnation.rank for record in last} == {3} and last[-1].frame.header.step == 2
    assert not follower.behind


def test_what_is_newer_is_not_handed_out_before_a_spool_that_waited_for_one_that_was_behind(run_dir: Path) -> None:
    run = SyntheticRun(run_dir, dp=3, ranks=[0, 1])
    on_the_way = frozenset({run.folder(0).name})
    follower = RunFollower(run_dir, arrivals=lambda: Arrivals(on_the_way))

    def write(rank: int, step: int) -> None:
        run.clock.advance(0.1)
        run.write_rank(rank, step)

    write(0, 0)
    write(1, 0)
    found = drain(follower)
    # What was on the way is here, and a third rank has begun that waits for nobody.
    on_the_way = frozenset()
    write(0, 1)
    write(1, 1)
    run.start(2)
    write(2, 1)
    found += drain(follower)

    assert spoken(found) == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 1)]
