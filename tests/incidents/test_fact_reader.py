"""What diagnoses ask of a closed step, read from real rows: copies that differ, what lay before a NaN, sample ids."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from sentinel.incident import Incident
from sentinel.incidents.diagnosis import fact_reader
from sentinel.incidents.diagnosis.fact_reader import FactReader
from sentinel.ingest.merge import ClosedStep
from sentinel.ingest.model_layout import ModelLayout
from sentinel.judge.judge import Judge
from sentinel.messages import EndStep
from sentinel.record import ROW_DTYPE, Kind
from sentinel.rules.language.loader import load_pack
from sentinel.rules.watches.anomaly_records import moved_ranks
from sentinel.step_view import RankStep
from sentinel.testing import Nan, SyntheticRun

from ..support.anomalies import an_excursion

Change = Callable[[int, np.ndarray, EndStep], EndStep | None]


class Steps:
    """Steps of a synthetic run as the daemon has them, without a disk."""

    def __init__(self, folder: Path, *, dp: int, pp: int = 1) -> None:
        self.run = SyntheticRun(
            folder / "run", dp=dp, pp=pp, layers=3, d_model=32, elements=32, ranks=(), kinds=("param", "wgrad", "activation")
        )
        self._notified = {rank: self.run.descriptor(rank) for rank in range(self.run.num_ranks)}
        self._layout = ModelLayout(self._notified)

    def view(self, step: int, change: Change | None = None) -> ClosedStep:
        parts = []
        for rank, notified in self._notified.items():
            rows, end = self.run.observe(rank, step)
            rows = rows.copy()
            end = (change(rank, rows, end) if change is not None else None) or end
            parts.append(RankStep(rank=rank, descriptor=notified, rows=rows, end_step=end, time=float(step)))
        return ClosedStep(run="run", attempt=0, step=step, layout=self._layout, parts=parts)

    def judged(self, until: int, num_steps: int, change: Change | None) -> list[Incident]:
        """Judge `until` healthy steps, then some more with a change; returns all revisions."""
        judge, found = Judge(load_pack()), list[Incident]()
        for step in range(until + num_steps):
            found += judge.judge(None, self.view(step, change if step >= until else None)).incidents
        assert judge.num_rows_judged == self.run.rows_per_step * (until + num_steps)
        return found


def weight_row(steps: Steps, rank: int, rows: np.ndarray) -> int:
    return int(np.flatnonzero((rows["kind"] == Kind.PARAM) & (rows["count"] > 1000))[0])


def of(values: np.ndarray) -> np.void:
    row = np.zeros(1, ROW_DTYPE)
    centred = values - values.mean()
    row["count"], row["mean"], row["min"], row["max"] = len(values), values.mean(), values.min(), values.max()
    for k in (2, 3, 4):
        row[f"m{k}"] = (centred**k).sum()
    return row[0]


@pytest.mark.parametrize(
    ("what", "change", "differ"),
    [
        ("bit", "", 2**21),
        ("element", "times four", 2**24 + 999),
        ("element", "absurd", 12345),
        ("", "all of them", 2**20 + 77),
        ("", "all doubled", 2**26),
    ],
)
def test_what_parts_two_copies(tmp_path: Path, what: str, change: str, differ: int) -> None:
    steps, rng = Steps(tmp_path, dp=2), np.random.default_rng(3)
    well = rng.standard_normal(4096) * 0.05
    odd = well.copy()
    odd[7] *= {"times four": 4.0, "absurd": 1e9}.get(change, 1.0)
    if change.startswith("all"):
        odd = 2 * well if change == "all doubled" else well + rng.standard_normal(4096) * 0.01

    def differing(rank: int, rows: np.ndarray, end: EndStep) -> None:
        at = weight_row(steps, rank, rows)
        notified = of(odd if rank else well)
        for name in ("count", "mean", "m2", "m3", "m4", "min", "max"):
            rows[name][at] = notified[name]
        rows["checksum"][at] = 10**15 + (differ if rank else 0)

    facts = FactReader().read(steps.view(3, differing), (), ())

    (one,) = facts.divergences
    assert (one.change, one.is_sure, one.num_copies) == (what, False, 2), one.change_words
    assert facts.num_compared > 5 and facts.num_differing == 1
    assert (one.culprit == 1) is (change == "absurd")


def test_gradients_that_differ_with_a_weight_follow_from_it(tmp_path: Path) -> None:
    steps = Steps(tmp_path, dp=2)

    def differing(rank: int, rows: np.ndarray, end: EndStep, *, has_weight: bool) -> None:
        is_copy = rows["kind"] == Kind.WGRAD
        if has_weight:
            is_copy[weight_row(steps, rank, rows)] = True
        rows["checksum"][is_copy] = 10**15 + rank

    both = FactReader().read(steps.view(3, functools.partial(differing, has_weight=True)), (), ())
    gradients = FactReader().read(steps.view(3, functools.partial(differing, has_weight=False)), (), ())

    assert both.num_differing == 1 and {one.kind for one in both.divergences} == {"param", "wgrad"}
    assert gradients.num_differing > 8


def test_upstream_is_held_against_the_other_replicas(tmp_path: Path) -> None:
    steps = Steps(tmp_path, dp=3)
    steps.run.plant(Nan(step=4, module="layers.2.mlp", rank=1))

    def louder(rank: int, rows: np.ndarray, end: EndStep) -> None:
        if rank == 1:
            hit = (rows["kind"] == Kind.ACTIVATION) & (rows["site_pos"] < 3)
            for name, power in (("m2", 2), ("min", 1), ("max", 1)):
                rows[name][hit] *= 30.0**power

    (well,) = FactReader().read(steps.view(4), (), ()).first_bad
    (loud,) = FactReader().read(steps.view(4, louder), (), ()).first_bad

    assert (well.rank, well.name, well.num_bad, well.upstream.num_blocks) == (1, "layers.2.mlp", 1, 2)
    assert well.upstream.num_measured >= 9 and not well.upstream.unlike
    assert "rms of activation of embed" in loud.upstream.unlike
    assert FactReader().read(steps.view(3), (), ()).first_bad == ()


@pytest.mark.slow
def test_one_bit_on_one_of_two_replicas_is_hardware_and_weights_loaded_anew_are_the_program(tmp_path: Path) -> None:
    steps = Steps(tmp_path, dp=2)

    def flip(rank: int, rows: np.ndarray, end: EndStep) -> None:
        if rank == 1:
            rows["checksum"][weight_row(steps, rank, rows)] += np.uint64(2**9)

    def reload(rank: int, rows: np.ndarray, end: EndStep) -> None:
        if rank == 1:
            rows["checksum"][rows["kind"] == Kind.PARAM] += np.uint64(99991)

    assert [one.suspected for one in steps.judged(12, 4, flip)][-1] == "hardware"
    assert {one.suspected for one in steps.judged(12, 4, reload)} == {"unknown", "program"}
    assert steps.judged(12, 4, None) == []


@pytest.mark.slow
def test_batch_names_the_samples_of_the_replica_that_moved(tmp_path: Path) -> None:
    steps = Steps(tmp_path, dp=2)

    def spike(rank: int, rows: np.ndarray, end: EndStep) -> EndStep:
        scalars = dict(end.scalars)
        if end.step == 50 and rank == 1:
            scalars["loss"] *= 5.0
        return msgspec.structs.replace(end, scalars=scalars, samples=(end.step * 10 + rank, f"r{rank}"))

    found = [one for one in steps.judged(50, 5, spike) if "LossSpike" in one.detectors][-1]

    assert (found.suspected, found.skip_steps, found.skip_ranks) == ("batch", (50,), (1,))
    assert found.skip_samples == (501, "r1")


@pytest.mark.parametrize(
    ("own", "value", "moved"),
    [
        ({0: 9.0, 1: 9.2, 2: 8.8, 3: 9.1}, 9.0, (0, 1, 2, 3)),
        ({0: 2.0, 1: 30.0, 2: 2.1, 3: 1.9}, 9.0, (1,)),
        ({0: 2.0, 1: 16.0}, 9.0, (1,)),
        ({0: 0.5, 1: 2.0, 2: 2.1, 3: 1.9}, 1.6, (0,)),
        ({0: 9.0, 1: 9.0}, 9.0, ()),  # reduced: equal to the last bit
        ({0: 9.0}, 9.0, ()),
        ({0: float("nan"), 1: 9.0, 2: 9.1}, 9.0, (1, 2)),
        ({rank: 2.0 + 0.2 * (rank % 5) for rank in range(64)} | {7: 30.0}, 2.9, (7,)),
    ],
)
def test_ranks_whose_own_part_moved(own: dict[int, float], value: float, moved: tuple[int, ...]) -> None:
    assert moved_ranks(own, value, 2.0) == moved


@pytest.mark.slow
def test_parts_of_a_norm_are_held_against_their_share(tmp_path: Path) -> None:
    steps = Steps(tmp_path, dp=4)

    def louder(rank: int, rows: np.ndarray, end: EndStep) -> None:
        if rank == 2 and end.step >= 40:
            hit = rows["kind"] == Kind.ACTIVATION
            for name, power in (("mean", 1), ("m2", 2), ("m3", 3), ("m4", 4), ("min", 1), ("max", 1)):
                rows[name][hit] *= 12.0**power

    judge = Judge(load_pack())
    found = [one for step in range(42) for one in judge.judge(None, steps.view(step, louder)).anomalies]
    norms = [one for one in found if one.kind == "activation" and one.statistic == "norm" and one.event == "onset"]

    assert len(norms) > 5
    assert {one.moved_ranks for one in norms} == {(2,)}
    assert {one.dtype for one in norms} == {"float32"}


def one_element(value: float) -> np.void:
    values = np.random.default_rng(3).standard_normal(4096) * 0.05
    values[7] = value
    return of(values)


def test_one_element_that_is_nearly_all_of_a_weight_is_read_where_something_is_amiss(tmp_path: Path) -> None:
    steps, reader = Steps(tmp_path, dp=1), FactReader()

    def change(rank: int, rows: np.ndarray, end: EndStep) -> EndStep | None:
        at = weight_row(steps, rank, rows)
        for name in ("count", "mean", "m2", "m3", "m4", "min", "max"):
            rows[name][at] = one_element(3e36)[name]
        rows["num_nan"][rows["kind"] == Kind.ACTIVATION] = 9
        return None

    (odd,) = reader.read(steps.view(16, change), (), ()).odd_weights
    assert (odd.rank, odd.num_elements, odd.value) == (0, 4096, 3e36)
    assert not reader.read(steps.view(17, change), (), ()).odd_weights, "between the looks nothing is read while all is well"
    assert not reader.read(steps.view(16), (), ()).odd_weights

    found = steps.judged(20, 4, change)
    assert found[-1].suspected == "hardware"
    assert "no update reaches that" in " ".join(found[-1].evidence)


@pytest.mark.slow
def test_an_output_that_strays_is_held_against_the_other_replicas(tmp_path: Path) -> None:
    steps = Steps(tmp_path, dp=3)

    def change(rank: int, rows: np.ndarray, end: EndStep) -> EndStep | None:
        if rank == 1:
            behind = (rows["kind"] == Kind.ACTIVATION) & (rows["site_pos"] >= rows["site_pos"].max() - 4)
            first = np.flatnonzero(behind)[np.argmin(rows["site_pos"][behind])]
            for name in ("count", "mean", "m2", "m3", "m4", "min", "max"):
                rows[name][first] = one_element(1e9)[name]
            return msgspec.structs.replace(end, scalars=end.scalars | {"loss": 40.0})
        return None

    judge = Judge(load_pack())
    for step in range(40):
        judge.judge(None, steps.view(step))
    view = steps.view(40, change)
    facts = FactReader().read(view, judge.judge(None, view).anomalies, ())

    (outlier,) = (one for one in facts.outliers.values() if one.is_alone)
    assert (outlier.lane, outlier.rank, outlier.value, outlier.is_alone, outlier.is_whole) == (1, 1, 1e9, True, False)
    assert 1.0 < outlier.usual < 100.0 and outlier.num_before >= 4 and outlier.upstream.num_measured >= 4
    assert list(facts.apart) == [1]
    assert facts.apart[1].times > 100.0 and not facts.apart[1].is_entry


def first_apart(view: ClosedStep) -> dict[int, tuple[str, float]]:
    """Return, of each replica, its first output that is unlike the others', one row after the other."""
    found: dict[int, tuple[str, float]] = {}
    for tensor in sorted(view.tensors, key=lambda one: (one.depth, int(view.site_pos[one.index]), one.index)):
        if tensor.kind != "activation":
            continue
        own: list[tuple[int, float]] = []
        for at in np.flatnonzero(view.row_logical == tensor.index).tolist():
            row = view.rows[at]
            with np.errstate(all="ignore"):
                rms = math.sqrt(float(row["m2"]) / max(float(row["count"]), 1.0) + float(row["mean"]) ** 2)
            own.append((view.places[int(view.row_rank[at])].coordinate("dp"), rms))
        own.sort(key=lambda one: one[0])
        values = [value for _, value in own]
        for at, (lane, value) in enumerate(own):
            others = values if len(values) > 2 else values[:at] + values[at + 1 :]
            if not others or len(values) < 2 or not math.isfinite(value):
                continue
            usual = float(np.median(others))
            times = value / usual if usual > 0.0 else 1.0
            if lane not in found and not 1.0 / fact_reader.APART <= times <= fact_reader.APART:
                found[lane] = (tensor.name, times)
    return found


@pytest.mark.parametrize("dp", [1, 2, 3, 6])
def test_replicas_are_held_against_each_other_as_one_by_one(tmp_path: Path, dp: int) -> None:
    steps, rng, num_found = Steps(tmp_path, dp=dp), np.random.default_rng(dp), 0
    for step in range(12):

        def strays(rank: int, rows: np.ndarray, end: EndStep) -> EndStep:
            at = np.flatnonzero(rows["kind"] == Kind.ACTIVATION)
            hit = at[rng.random(len(at)) < 0.1]
            rows["mean"][hit] *= rng.choice([1e-3, 0.5, 0.9, 1.2, 40.0, np.nan, np.inf, 0.0], len(hit))
            rows["m2"][hit[::2]] = 0.0
            return msgspec.structs.replace(end, scalars={**end.scalars, "loss": 1e6})

        view = steps.view(step, strays)
        apart = FactReader().read(view, [an_excursion("scalar", "loss", step)], ()).apart
        expected = first_apart(view)
        assert {lane: one.name for lane, one in apart.items()} == {lane: name for lane, (name, _) in expected.items()}
        assert all(apart[lane].times == pytest.approx(times) for lane, (_, times) in expected.items())
        num_found += len(expected)
    assert (num_found > 5) == (dp > 1)
