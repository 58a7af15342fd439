"""A step made of digests is the step made of rows, and asks for these only where they are looked at one by one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from sentinel.anomaly import Anomaly
from sentinel.fleet.digest_book import DigestBook
from sentinel.fleet.packed_digest import decode_digest, encode_digest
from sentinel.ingest import away_rows, node_digest
from sentinel.ingest.away_rows import RowSource
from sentinel.ingest.digested_step import DigestedStep
from sentinel.ingest.follow import RunFollower
from sentinel.ingest.merge import ClosedStep
from sentinel.ingest.model_layout import ModelLayout
from sentinel.ingest.node_digest import DigestedRank, DigestMaker, NodeDigest
from sentinel.ingest.node_share import by_machine
from sentinel.ingest.step_parts import AwayFrame
from sentinel.ingest.steps import StepAssembler
from sentinel.judge.judge import Judge
from sentinel.messages import EndStep
from sentinel.record import BAD_ROW_DTYPE, Kind
from sentinel.rules.engine import Engine
from sentinel.rules.language.loader import load_pack
from sentinel.step_view import StepView
from sentinel.testing import BitFlip, BlowUp, LossJump, Nan, SyntheticRun
from sentinel.wire import spool_reader
from sentinel.wire.frame import HEADER_BYTES, Buffer, Frame, FrameType, peek, scan, without_rows
from sentinel.wire.spool_files import file_name, read_window
from sentinel.wire.spool_reader import SpoolReader

from ..support.closed_steps import FollowedRun, closed_steps, seen
from ..support.serving import small_run

KINDS = ("activation", "activation_in", "wgrad_unreduced")
LAYOUTS = {
    "dp4, two machines": {"pp": 1, "dp": 4, "layers": 2, "ranks_per_host": 2},
    "tp2 dp2, two machines": {"pp": 1, "dp": 2, "tp": 2, "layers": 2, "ranks_per_host": 2},
    "pp4, four machines": {"pp": 4, "dp": 1, "ranks_per_host": 1},
    "pp2 dp2, micro-steps": {"per_micro_step": True, "ranks_per_host": 2},
    "tp4, numbered otherwise, one machine": {"pp": 1, "dp": 1, "tp": 4, "layers": 2, "shuffle": True},
    "pp2 dp2, numbered otherwise, one machine": {"shuffle": True},
}


class Elsewhere(RowSource):
    """The spools of a run as their machines have them, and the digests that these made."""

    def __init__(self, run_dir: Path, steps: Sequence[ClosedStep], kinds: Collection[str] = KINDS) -> None:
        self.run_dir = run_dir
        self.asked: set[int] = set()
        """Steps of which all rows were asked for."""
        self.asked_some: dict[int, int] = {}
        """Step -> times that some of its rows were asked for."""
        self.num_some_bytes = 0
        self._book, self.num_bytes = DigestBook(), 0
        maker = DigestMaker(kinds)
        for view in steps:
            assert view.decision is not None
            of = {one.rank: one for one in view.decision.ranks}
            for own in by_machine(view.parts):
                # As a machine knows them: of its own ranks alone.
                layout = ModelLayout({part.rank: part.descriptor for part in own})
                ranks = [
                    DigestedRank(one.rank, one.incarnation, one.layout_id, one.last_seq, one.num_rows)
                    for one in (of[part.rank] for part in own)
                ]
                made = maker.make(view.step, layout.share_of(tuple(part.rank for part in own)), own, ranks)
                if made is not None:
                    data = encode_digest(made)
                    self.num_bytes += len(data)
                    self._book.add("node", decode_digest(data))

    def digest(self, step: int, of: tuple[tuple[bytes, int, int], ...], folders: Sequence[str] = ()) -> NodeDigest | None:
        return self._book.find("node", step, of)

    def fetch(self, frames: Sequence[AwayFrame]) -> Mapping[tuple[bytes, int], Buffer]:
        found: dict[tuple[bytes, int], Buffer] = {}
        steps = set[int]()
        for one in frames:
            data = (self.run_dir / "spool" / one.folder / file_name(one.file_index)).read_bytes()
            frame = scan(data[one.offset : one.offset + one.num_bytes])
            assert isinstance(frame, Frame) and frame.header.seq == one.seq
            found[one.incarnation, one.seq] = frame.payload
            if one.tensors:
                rows = found[one.incarnation, one.seq] = one.select(data[one.offset : one.offset + one.num_bytes])
                steps.add(frame.header.step)
                self.num_some_bytes += len(rows)
            else:
                self.asked.add(frame.header.step)
        for step in steps:
            self.asked_some[step] = self.asked_some.get(step, 0) + 1
        return found


def emptied(run_dir: Path, there: Path) -> int:
    """Copy the spools of a run without the rows in them; returns the bytes of the rows."""
    num_bytes = 0
    for path in sorted((run_dir / "spool").rglob("*.spool")):
        data, at, made = path.read_bytes(), 0, b""
        while (found := peek(data, at)) is not None:
            frame = data[at : at + found[1]]
            if found[0] == FrameType.ROWS:
                head = without_rows(frame)
                assert head is not None
                num_bytes += len(frame) - len(head)
                frame = head + bytes(len(frame) - len(head))
            made += frame
            at += found[1]
        target = there / path.relative_to(run_dir)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(made)
    return num_bytes


def of_digests(
    run: SyntheticRun, there: Path, kinds: Collection[str] = KINDS
) -> tuple[list[ClosedStep], list[ClosedStep], Elsewhere]:
    """Return the steps of a run as they are of rows, and as they are of digests."""
    whole = closed_steps(run.directory)
    emptied(run.directory, there)
    source = Elsewhere(run.directory, whole, kinds)
    followed = FollowedRun(there)
    followed.follower = RunFollower(there, on_problem=followed.problems.append)
    followed.assembler = StepAssembler(run.run, rows_from=source)
    followed.finish()
    assert not followed.problems
    return whole, followed.views, source


def test_where_rows_are_away_their_place_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = small_run(tmp_path / "run", layers=40)
    run.write(12)
    there = tmp_path / "there"
    num_bytes = emptied(run.directory, there)
    name = run.folder(1).name
    expected = [one.header for one in SpoolReader(run.folder(1)).poll()]
    wanted: list[int] = []

    def noted(path: str, offset: int, max_bytes: int) -> tuple[bytes, int] | None:
        found = read_window(path, offset, max_bytes)
        wanted.append(len(found[0]) if found else 0)
        return found

    monkeypatch.setattr(spool_reader, "read_window", noted)
    for window in (2**10, 64 * 2**10, 16 * 2**20):
        wanted.clear()
        reader, found = SpoolReader(there / "spool" / name), list[Frame]()
        while more := reader.poll(max_bytes=window):
            assert sum(memoryview(one.payload).nbytes for one in more) <= 2 * window + 2**16
            found += more
        assert [one.header for one in found] == expected and reader.is_caught_up
        assert not reader.num_corrupt_bytes and not reader.num_torn
        if window < num_bytes // 8:
            # The first window may lie over rows: who reads does not know yet that they are away.
            assert sum(wanted) < num_bytes // 8 + window, (window, sum(wanted))
    # A frame whose rows are not all there is waited for, wherever the window ends.
    path = there / "spool" / name / file_name(0)
    rows_at = next(at for at, one in enumerate(found) if one.num_bytes_away and one.header.step == 11)
    with path.open("r+b") as file:
        file.truncate(found[rows_at].offset_after - 1)
    reader, fewer = SpoolReader(there / "spool" / name), list[Frame]()
    while more := reader.poll(max_bytes=2**10):
        fewer += more
    assert [one.header for one in fewer] == expected[:rows_at]
    with path.open("r+b") as file:
        file.truncate(found[rows_at].offset_after)
    assert [one.header for one in reader.poll(max_bytes=2**10)] == [expected[rows_at]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [one if at % 2 == 0 else pytest.param(one, marks=pytest.mark.long) for at, one in enumerate(LAYOUTS)]
)
def test_steps_are_judged_of_digests_as_of_rows(tmp_path: Path, layout: str) -> None:
    run = small_run(tmp_path / "run", elements=64, **LAYOUTS[layout])
    skewed = BlowUp(step=20, module="layers.0.mlp", factor=4.0, for_steps=12, rank=3)
    run.plant(
        Nan(step=9, module=run.modules()[3], rank=0, micro_step=1), LossJump(step=13, factor=50.0), skewed,
        Nan(step=36, module=run.modules()[-1], is_skipped=False),
    )  # fmt: skip
    run.write(40)
    run.end()
    whole, made, source = of_digests(run, tmp_path / "there" / "run")
    assert len(whole) == len(made) == 40
    assert Engine(load_pack()).row_kinds == frozenset(KINDS)
    pack = load_pack()
    by_rows, by_digests, found = Judge(pack), Judge(pack), []
    for one, other in zip(whole, made, strict=True):
        assert other.num_rows == one.num_rows and isinstance(other, DigestedStep)
        expected = by_rows.judge(one.decision, one)
        assert by_digests.judge(other.decision, other) == expected
        found += [one.rule for one in expected.anomalies]
        assert other.stats.tobytes() == one.stats.tobytes() and other.is_bad.tobytes() == one.is_bad.tobytes()
        assert other.site_pos.tolist() == one.site_pos.tolist()
        bad = other.with_bad_rows()
        assert len(bad.bad_rows) == len(one.bad_rows) and (bad is other) == (not len(one.bad_rows))
        if len(one.bad_rows):
            for name in BAD_ROW_DTYPE.names or ():
                assert bad.rows[name][bad.bad_rows].tobytes() == one.rows[name][one.bad_rows].tobytes()
            assert bad.row_rank[bad.bad_rows].tolist() == one.row_rank[one.bad_rows].tolist()
        assert str(bad.scalars) == str(one.scalars) and bad.is_skipped == one.is_skipped and bad.health == one.health
    assert by_digests.snapshot() == by_rows.snapshot()
    assert "non-finite" in found and ("rank-skew-layers" in found or not layout.startswith("dp4"))
    # A NaN, a loss that jumps, and ranks that differ, are told of digests; of others the rows of some tensors are asked for.
    assert not source.asked and not source.asked_some.keys() & {9, 13, *range(36, 40)}
    assert all(times == 1 for times in source.asked_some.values()) and len(source.asked_some) < 6, source.asked_some
    # What was asked for, or is asked for now, is what it would have been.
    assert [seen(one) for one in made] == [seen(one) for one in whole]


def judged_alike(
    whole: Sequence[ClosedStep], made: Sequence[ClosedStep], rules: Sequence[str | Path] = ()
) -> list[list[Anomaly]]:
    """Judge the steps of rows and those of digests; return the anomalies of each step."""
    by_rows, by_digests, found = Judge(load_pack(rules)), Judge(load_pack(rules)), []
    for one, other in zip(whole, made, strict=True):
        expected = by_rows.judge(one.decision, one)
        assert by_digests.judge(other.decision, other) == expected, one.step
        assert other.stats.tobytes() == one.stats.tobytes() and other.present.tolist() == one.present.tolist()
        found.append(list(expected.anomalies))
    assert by_digests.snapshot() == by_rows.snapshot()
    return found


@pytest.mark.parametrize(
    ("layout", "rank"),
    [
        ({"pp": 1, "dp": 4, "layers": 2, "ranks_per_host": 4}, 2),
        ({"pp": 1, "dp": 4, "layers": 2, "ranks_per_host": 1}, 0),
        # Machines hold some of the same shards, and each some of its own.
        ({"pp": 1, "dp": 3, "tp": 2, "layers": 2, "ranks_per_host": 3}, 4),
    ],
    ids=["on one machine", "on machines of their own", "cut across machines"],
)
def test_of_copies_that_differ_for_good_their_rows_alone_are_asked_for(
    tmp_path: Path, layout: dict[str, int], rank: int
) -> None:
    run = small_run(tmp_path / "run", elements=64, **layout)
    run.plant(BitFlip(step=4, module="layers.0.mlp", rank=rank))
    run.write(12)
    run.end()
    whole, made, source = of_digests(run, tmp_path / "there" / "run")
    found = judged_alike(whole, made)
    (one,) = [
        anomaly
        for of_step in found
        for anomaly in of_step
        if anomaly.rule == "replica-divergence" and anomaly.event == "onset"
    ]
    assert (one.step, one.rank) == (4, rank)
    assert all(len(view.differing) == (step >= 4) for step, view in enumerate(made))
    assert not source.asked
    is_cut_across = layout.get("tp", 1) > 1
    # At the onset what that tensor did is looked at too.
    assert set(source.asked_some) == set(range(0 if is_cut_across else 4, 12)), source.asked_some
    assert all(times == 1 for step, times in source.asked_some.items() if step > 4)
    if not is_cut_across:
        assert source.num_some_bytes < sum(view.rows.nbytes for view in whole[4:]) // 20


@pytest.mark.parametrize("ranks_per_host", [1, 2, 4])
def test_copies_that_all_hold_a_nan_are_the_same_whatever_its_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks_per_host: int
) -> None:
    run = small_run(tmp_path / "run", elements=64, pp=1, dp=4, layers=2, ranks_per_host=ranks_per_host)
    run.plant(Nan(step=2, module=run.modules()[3], is_skipped=False))
    observe = run.observe

    def of_its_own(rank: int, step: int) -> tuple[npt.NDArray[np.void], EndStep]:
        rows, end = observe(rank, step)
        rows["checksum"][(rows["num_nan"] > 0) & (rows["checksum"] > 0)] += np.uint64(rank)
        # One copy is well where the others are not.
        (at, *_) = np.flatnonzero((rows["kind"] == Kind.PARAM) & (rows["num_nan"] > 0)).tolist() or [-1]
        if rank == 3 and step == 4 and at >= 0:
            rows["count"][at], rows["num_nan"][at] = rows["num_nan"][at], 0
        return rows, end

    monkeypatch.setattr(run, "observe", of_its_own)
    run.write(6)
    run.end()
    whole, made, source = of_digests(run, tmp_path / "there" / "run")
    judged_alike(whole, made)
    assert [len(view.differing) for view in made] == [0, 0, 0, 0, 1, 0]
    assert any(int(rows["checksum"].max()) for rows in (view.rows[view.rows["num_nan"] > 0] for view in whole[3:]))
    assert not source.asked and set(source.asked_some) == {4}


LIMIT = """
rules:
  - name: my-limit
    detector: AnomalyNan
    match: {kind: [wgrad, dgrad], statistic: [max]}
    args: {threshold: 1.0e+4}
    severity: critical
"""


@pytest.mark.parametrize("rules", ["limit", "msprobe"])
def test_rules_on_single_rows_ask_for_these_where_nodes_do_not_carry_them(tmp_path: Path, rules: str) -> None:
    given: list[str | Path] = [rules]
    if rules == "limit":
        given = [tmp_path / "limit.yaml"]
        (tmp_path / "limit.yaml").write_text(LIMIT)
    run = small_run(tmp_path / "run", elements=64, **LAYOUTS["tp2 dp2, two machines"])
    run.plant(BlowUp(step=5, module="layers.1.mlp", factor=1e6, kind="dgrad"))
    run.write(8)
    run.end()
    kinds = Engine(load_pack(given)).row_kinds
    assert {"wgrad", "dgrad"} <= kinds
    for carried in (KINDS, tuple(kinds)):
        whole, made, source = of_digests(run, tmp_path / str(len(carried)) / "run", carried)
        found = judged_alike(whole, made, given)
        assert any(one.rule in ("my-limit", "msprobe-turbulence") for one in found[5])
        assert not source.asked
        assert set(range(8)) == set(source.asked_some) if carried is KINDS else set(source.asked_some) <= {5}


@pytest.mark.parametrize("how", ["lost", "left out"])
def test_of_ranks_that_lost_rows_or_left_some_out_no_rows_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    run = small_run(tmp_path / "run", elements=64, **LAYOUTS["tp2 dp2, two machines"])
    observe = run.observe

    def less(rank: int, step: int) -> tuple[npt.NDArray[np.void], EndStep]:
        rows, end = observe(rank, step)
        if rank != 1 or step != 3:
            return rows, end
        rows = rows[rows["kind"] != Kind.DGRAD]
        return rows, end if how == "lost" else msgspec.structs.replace(end, num_rows=len(rows), left_out=("dgrad",))

    monkeypatch.setattr(run, "observe", less)
    run.write(6)
    run.end()
    whole, made, source = of_digests(run, tmp_path / "there" / "run")
    judged_alike(whole, made)
    is_grad = [one.index for one in whole[3].tensors if one.kind == "dgrad"]
    assert not whole[3].present[is_grad].all() and whole[2].present[is_grad].all()
    assert not source.asked and not source.asked_some


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_rows_of_some_tensors_are_asked_for_alone_and_once(tmp_path: Path, layout: str) -> None:
    run = small_run(tmp_path / "run", elements=64, **LAYOUTS[layout])
    run.write(3)
    run.end()
    (_, whole, _), (_, made, _), source = of_digests(run, tmp_path / "there" / "run")
    is_grad = [one.index for one in whole.tensors if one.kind == "dgrad"]
    is_weight = [one.index for one in whole.tensors if one.kind == "param"]
    is_carried = [one.index for one in whole.tensors if one.kind == "activation"]
    assert is_grad and is_weight and is_carried

    def of(view: StepView, at: int) -> list[tuple[bytes, int]]:
        places = (view.row_logical == at).nonzero()[0].tolist()
        return [(view.rows[one].tobytes(), int(view.row_rank[one])) for one in places]

    every = whole.rows.nbytes
    for wanted, times in ((is_carried, 0), ([*is_grad[:2], *is_carried[:1]], 1), (is_grad[:1], 1), (is_weight[-1:], 2)):
        some = made.with_rows_of(wanted)
        assert [of(some, at) for at in wanted] == [of(whole, at) for at in wanted] and all(of(some, at) for at in wanted)
        assert source.asked_some.get(1, 0) == times and not source.asked
        assert some.with_rows_of(wanted) is some and some.site_pos.tolist() == whole.site_pos.tolist()
    assert 0 < source.num_some_bytes < every // 3
    assert whole.with_rows_of(is_grad) is whole
    assert [of(made.with_rows_of(is_grad[:2]), at) for at in is_grad[:2]] == [of(whole, at) for at in is_grad[:2]]
    assert made.rows.tobytes() == whole.rows.tobytes() and source.asked == {1}


@pytest.mark.parametrize("change", ["other ranks", "ranks of the other machine", "more rows than tensors"])
def test_a_digest_that_lies_of_its_ranks_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    def lying(found: NodeDigest | None) -> NodeDigest | None:
        if found is None:
            return None
        others = {"other ranks": 100, "ranks of the other machine": 2 if found.ranks[0].rank == 0 else -2}.get(change, 0)
        ids = b"\xff" * 10**6 if not others else b""
        ranks = [msgspec.structs.replace(one, rank=one.rank + others, row_ids=one.row_ids or ids) for one in found.ranks]
        if not others:
            ranks = [msgspec.structs.replace(one, row_ids=one.row_ids + ids) for one in ranks]
        return msgspec.structs.replace(found, ranks=tuple(ranks))

    told = Elsewhere.digest
    monkeypatch.setattr(Elsewhere, "digest", lambda self, *said: lying(told(self, *said)))
    run = small_run(tmp_path / "run", elements=64, **LAYOUTS["dp4, two machines"])
    run.plant(Nan(step=1, module=run.modules()[3], phase="backward"))
    run.write(3)
    run.end()
    whole, made, source = of_digests(run, tmp_path / "there" / "run")
    judged_alike(whole, made)
    for other in made:
        assert isinstance(other, DigestedStep) == (change == "more rows than tensors") == (other.step not in source.asked)


def test_a_step_of_which_too_much_is_not_finite_has_no_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = small_run(tmp_path / "run", elements=64)
    run.plant(Nan(step=1, module=run.modules()[3], is_skipped=False))
    run.write(3)
    run.end()
    rows = sum(one.nbytes for one in (part.rows for part in closed_steps(run.directory)[0].parts))
    monkeypatch.setattr(node_digest, "MAX_CARRIED_BYTES", rows // 3)
    whole, made, source = of_digests(run, tmp_path / "there" / "run")
    assert [isinstance(one, DigestedStep) for one in made] == [True, False, False]
    judged_alike(whole, made)
    assert source.asked == {1, 2}


def test_the_rows_of_very_many_tensors_are_asked_for_with_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(away_rows, "MAX_SELECTED", 1)
    run = small_run(tmp_path / "run", elements=64)
    run.write(2)
    run.end()
    (_, whole), (_, made), source = of_digests(run, tmp_path / "there" / "run")
    wanted = [one.index for one in whole.tensors if one.kind == "dgrad"]
    some = made.with_rows_of(wanted)
    for at in wanted:
        assert some.rows[some.row_logical == at].tobytes() == whole.rows[whole.row_logical == at].tobytes()
    assert source.asked == {1}


def test_a_step_is_freed_with_its_last_reference(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", elements=64)
    run.plant(Nan(step=1, module=run.modules()[3], is_skipped=False))
    run.write(3)
    run.end()
    _, made, _ = of_digests(run, tmp_path / "there" / "run")
    judge, seen = Judge(load_pack()), []
    gc.collect()
    gc.disable()
    try:
        while made:
            view = made.pop(0)
            judge.judge(view.decision, view)
            some = view.with_rows_of([0])
            seen += [weakref.ref(one) for one in (view, view.with_bad_rows(), view.carrying(frozenset()), some)]
            del view
        with pytest.raises(ReferenceError, match="step 2"):
            _ = some.stats
        del some
        assert not [one for one in seen if one() is not None]
    finally:
        gc.enable()


def test_a_digest_of_other_frames_or_another_layout_is_not_used(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    run.write(1)
    run.end()
    (view,) = closed_steps(run.directory)
    source = Elsewhere(run.directory, [view])
    assert view.decision is not None
    of = tuple((one.incarnation, one.last_seq, one.num_rows) for one in view.decision.ranks)
    found = source.digest(0, of)
    assert found is not None and found.sums(view.layout.share_of((0, 1, 2, 3))) is not None
    assert source.digest(1, of) is None
    assert source.digest(0, of[:3]) is None
    assert source.digest(0, ((of[0][0], of[0][1], of[0][2] - 1), *of[1:])) is None
    assert found.sums(view.layout.share_of((0, 1, 2))) is None
    for change in (
        {"stats": found.stats[:-96]}, {"marks": found.marks + bytes(8)}, {"present": b""}, {"has_rows": found.has_rows * 2},
        {"is_native": not found.is_native}, {"share": bytes(16)}, {"is_bad": b""}, {"is_odd": b""}, {"bad": b"x"},
        {"is_lone": found.is_lone * 2}, {"first_ranks": b""},
        {"site_pos": found.site_pos + bytes(4)},
    ):  # fmt: skip
        assert msgspec.structs.replace(found, **change).sums(view.layout.share_of((0, 1, 2, 3))) is None


def test_only_whole_frames_of_rows_are_emptied(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    run.write(1)
    (path, *_) = sorted((run.directory / "spool").rglob("*.spool"))
    data, at, kinds = path.read_bytes(), 0, []
    while (found := peek(data, at)) is not None:
        frame = data[at : at + found[1]]
        head = without_rows(frame)
        kinds.append((found[0], head is not None))
        if head is not None:
            again = scan(head + bytes(len(frame) - HEADER_BYTES))
            before = scan(frame)
            assert isinstance(again, Frame) and isinstance(before, Frame)
            assert again.header == before.header and not again.payload
            assert again.num_bytes_away == memoryview(before.payload).nbytes
            assert without_rows(head + bytes(len(frame) - HEADER_BYTES)) is None
            assert without_rows(frame[:-1]) is None and without_rows(frame[:-1] + b"x") is None
        at += found[1]
    assert {is_rows for kind, is_rows in kinds if kind == FrameType.ROWS} == {True}
    assert not any(is_rows for kind, is_rows in kinds if kind != FrameType.ROWS)
