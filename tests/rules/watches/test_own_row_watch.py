"""msProbe's mode keys its series as msProbe does: a rank's own tensor, each micro-step for itself."""

import numpy as np
import pytest

from sentinel.ingest.merge import ClosedStep
from sentinel.messages import EndStep
from sentinel.rules.engine import Engine
from sentinel.rules.language.loader import load_pack
from sentinel.step_view import RankStep

TENSORS = [("layers.0.mlp", "activation"), ("layers.1.mlp", "activation"), ("layers.0.mlp.weight", "wgrad")]
TURBULENCE, NAN = "msprobe-turbulence", "msprobe-nan"


def step_of(run, step, norms):
    """norms: (tensor, rank, micro_step) -> norm; micro_step -1: the one row of the step."""
    parts = []
    for rank, descriptor in run.descriptors.items():
        mine = [(tensor, micro, norm) for (tensor, of, micro), norm in norms.items() if of == rank]
        rows = run.rows(np.ones(len(run.tensors)))[[tensor for tensor, _, _ in mine]]
        rows["micro_step"] = [micro for _, micro, _ in mine]
        bad = np.array([not np.isfinite(norm) for _, _, norm in mine], dtype=bool)
        values = np.array([norm if np.isfinite(norm) else 1.0 for _, _, norm in mine])
        rows["m2"], rows["max"], rows["min"] = values**2, values, -values
        rows["num_nan"][bad] = 1
        rows["call_id"] = np.arange(len(rows))
        end = EndStep(step=step, num_rows=len(rows), num_calls=len(rows))
        parts.append(RankStep(rank=rank, descriptor=descriptor, rows=rows, end_step=end, time=float(step)))
    return ClosedStep(run="paper", attempt=0, step=step, layout=run.layout, parts=parts)


def reference(steps, threshold=0.5):
    """msProbe's formula, a dict and floats: {(step, series)} that exceed (1 + threshold) times their own history."""
    history, found = {}, set()
    for step, norms in enumerate(steps):
        for series, norm in norms.items():
            mean = history.setdefault(series, abs(norm))
            if abs(norm) > mean * (1 + threshold):
                found.add((step, *series))
            history[series] = 0.99 * mean + (1 - 0.99) * abs(norm)
    return found


@pytest.fixture
def steps(rng):
    """40 steps of 2 ranks and 2 micro-batches that live at levels of their own; the gradient has one row a step."""
    keys = [(tensor, rank, micro) for tensor in (0, 1) for rank in (0, 1) for micro in (0, 1)]
    keys += [(2, 0, -1), (2, 1, -1)]
    level = {key: 10.0**at for at, key in enumerate(keys)}
    return [{key: level[key] * float(np.exp(0.4 * rng.standard_normal())) for key in keys} for _ in range(40)]


def reported(engine, run, steps, rule=TURBULENCE, statistic="norm"):
    names = [name for name, _ in run.tensors]
    found = set()
    for step, norms in enumerate(steps):
        for one in engine.judge(step_of(run, step, norms)):
            if (one.rule, one.statistic) == (rule, statistic):
                micro = -1 if one.micro_step is None else one.micro_step
                found.add((one.step, names.index(one.tag_name), one.rank, micro))
    assert engine.num_rows_judged == sum(map(len, steps))
    return found


def test_each_rank_and_micro_step_is_a_series_of_its_own(paper_run, steps):
    run = paper_run(TENSORS, num_ranks=2)
    expected = reference(steps)
    assert len(expected) > 20

    assert reported(Engine(load_pack(["msprobe"])), run, steps) == expected


def test_a_nan_is_told_of_its_own_row_and_blinds_that_series_alone(paper_run, steps):
    run = paper_run(TENSORS, num_ranks=2)
    steps[5][0, 1, 0] = np.nan
    for step in (10, 20):
        for micro in (0, 1):
            steps[step][0, 1, micro] *= 1e3
    expected = reference(steps)

    nans = reported(Engine(load_pack(["msprobe"])), run, steps, NAN, "nans")
    found = reported(Engine(load_pack(["msprobe"])), run, steps)

    assert nans == {(5, 0, 1, 0)}
    assert found == expected
    assert (10, 0, 1, 1) in found and (10, 0, 1, 0) not in found


def test_a_restored_engine_goes_on_identically(paper_run, steps):
    run = paper_run(TENSORS, num_ranks=2)
    pack = load_pack(["msprobe"])
    whole, first = Engine(pack), Engine(pack)
    views = [step_of(run, step, norms) for step, norms in enumerate(steps)]
    expected = [whole.judge(view) for view in views]
    early = [first.judge(view) for view in views[:20]]

    second = Engine(pack)
    second.restore(first.snapshot())
    late = [second.judge(view) for view in views[20:]]

    assert early + late == expected
    assert sum(map(len, late)) > 0


def test_a_rank_and_a_micro_step_that_join_late_begin_with_their_own_history(paper_run, steps):
    run = paper_run(TENSORS, num_ranks=2)
    for norms in steps[:15]:
        for key in [key for key in norms if key[1] == 1 or key[2] == 1]:
            del norms[key]

    assert reported(Engine(load_pack(["msprobe"])), run, steps) == reference(steps)
