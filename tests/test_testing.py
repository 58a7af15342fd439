from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sentinel.ingest.follow import RunFollower
from sentinel.ingest.merge import ClosedStep
from sentinel.ingest.steps import StepAssembler
from sentinel.place import depth
from sentinel.testing import EPOCH_S, BlowUp, FakeClock, LossJump, Nan, SyntheticRun
from sentinel.testing.schedules import program_order


def views(run: SyntheticRun) -> list[ClosedStep]:
    follower = RunFollower(run.directory)
    assembler = StepAssembler(run.run)
    found: list[ClosedStep] = []
    while records := follower.poll(final=True):
        assembler.take(records, 0.0)
        found += assembler.close(0.0, follower.behind)
    return found + list(assembler.finish(0.0))


def bad(view: ClosedStep) -> set[str]:
    """`key of the tensor r<rank>` of every row with a non-finite value."""
    return {f"{view.tensors[view.row_logical[at]].key} r{view.row_rank[at]}" for at in view.bad_rows}


def keys(view: ClosedStep, kind: str, ranks: range, *, at_least: str = "", below: str = "") -> set[str]:
    order = [tensor for tensor in view.tensors if tensor.kind == kind]
    order.sort(key=lambda tensor: (tensor.depth, tensor.site_pos))
    found = [tensor.name for tensor in order]
    first = found.index(at_least) if at_least else 0
    last = found.index(below) if below else len(found)
    return {f"{order[at].key} r{rank}" for at in range(first, last) for rank in ranks if rank in order[at].ranks}


def test_a_fake_clock_moves_when_told() -> None:
    clock = FakeClock()
    assert (clock.time(), clock.wall_ns()) == (EPOCH_S, round(EPOCH_S * 1e9))

    clock.advance(1.5)
    clock.sleep(0.5)

    assert (clock.time(), clock.monotonic()) == (EPOCH_S + 2.0, 1002.0)
    with pytest.raises(ValueError, match="forward"):
        clock.advance(-1.0)


def test_the_same_seed_writes_the_same_bytes(tmp_path: Path) -> None:
    written = []
    for name in ("a", "b"):
        run = SyntheticRun(tmp_path / name / "run", pp=2, dp=2, tp=2)
        run.write(3)
        run.end()
        written.append({p.name + str(p.stat().st_size): p.read_bytes() for p in sorted((tmp_path / name).rglob("*.spool"))})

    assert written[0] == written[1]


def test_values_are_plausible(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path / "run", pp=2, dp=2)
    run.write(30)
    seen = views(run)

    losses = [view.scalars["loss"].mean for view in seen]
    assert len(seen) == 30
    assert losses[0] > losses[-1] > 2.0
    norms = np.array([view.moments.statistic("norm") for view in seen])
    assert np.isfinite(norms).all()
    steps = np.abs(np.diff(np.log(norms), axis=0))
    assert steps.max() < 0.7, "no tensor jumps"
    assert 2.0 < np.median([view.moments.statistic("kurtosis") for view in seen]) < 4.0


@pytest.mark.parametrize("pp", [1, 2])
def test_names_do_not_depend_on_the_layout(tmp_path: Path, pp: int) -> None:
    run = SyntheticRun(tmp_path / "run", pp=pp, dp=2, kinds=("param", "wgrad"), black_box=False)
    run.write(1)

    assert sorted({t.name for t in views(run)[0].tensors}) == sorted(
        ["embed.weight", "norm.weight", "head.weight"]
        + [f"layers.{i}.{leaf}.weight" for i in range(4) for leaf in ("norm", "attn", "mlp")]
    )


def test_a_forward_nan_goes_where_the_arithmetic_carries_it(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path / "run", pp=2, dp=2).plant(Nan(step=1, module="layers.1.mlp", rank=1))
    run.write(3)
    before, at, after = views(run)

    replica = range(1, 4, 2)
    expected = keys(at, "activation", replica, at_least="layers.1.mlp") | keys(at, "activation_in", replica)
    expected |= keys(at, "dgrad", replica) | keys(at, "dgrad_in", replica) | keys(at, "wgrad", range(4))
    assert bad(at) == expected
    assert bad(before) == bad(after) == set()
    assert np.isnan(at.scalars["loss"].by_rank[3])
    assert np.isfinite(at.scalars["loss"].by_rank[2])
    assert at.is_skipped


def test_a_backward_nan_leaves_the_output_gradient_of_its_module_clean(tmp_path: Path) -> None:
    fault = Nan(step=0, module="layers.2.attn", rank=2, phase="backward")
    run = SyntheticRun(tmp_path / "run", pp=2, dp=2).plant(fault)
    run.write(1)
    (view,) = views(run)

    first_stage, second_stage = range(1), range(2, 3)
    assert bad(view) == (
        keys(view, "dgrad", first_stage)
        | keys(view, "dgrad_in", second_stage)
        | {"layers.2.norm/dgrad r2"}
        | {key for key in keys(view, "wgrad", range(4)) if key[:8] in ("embed.we", "layers.0", "layers.1")}
        | {f"layers.2.{leaf}.weight/wgrad r{rank}" for leaf in ("norm", "attn") for rank in (2, 3)}
    )
    assert np.isfinite(view.scalars["loss"].mean)
    assert np.isnan(view.scalars["grad_norm"].mean)


def test_a_nan_inside_a_tensor_group_comes_out_on_all_of_it(tmp_path: Path) -> None:
    for module, ranks in (("layers.0.mlp", {0, 1}), ("layers.0.norm", {1})):
        fault = Nan(step=0, module=module, rank=1, value="inf")
        run = SyntheticRun(tmp_path / module / "run", tp=2, layers=1).plant(fault)
        run.write(1)
        (view,) = views(run)

        here = [at for at in view.bad_rows if view.tensors[view.row_logical[at]].key == f"{module}/activation"]
        assert {int(view.row_rank[at]) for at in here} == ranks
        assert view.rows["num_pos_inf"][here].tolist() == [1] * len(here)


def test_a_nan_that_is_not_skipped_poisons_every_weight(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path / "run").plant(Nan(step=0, module="head", phase="wgrad", is_skipped=False))
    run.write(2)
    first, second = views(run)

    assert bad(first) == {"head.weight/wgrad r0"}
    assert len(second.bad_rows) == second.num_rows


def test_clipping_by_a_bad_norm_spoils_all_that_the_optimizer_writes(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path / "run", dp=2, kinds=("wgrad", "update"), layers=1)
    run.plant(Nan(step=0, module="head", phase="wgrad", value="inf", is_skipped=False))
    run.write(1)
    (view,) = views(run)

    updates = keys(view, "update", range(2))
    assert len(updates) == 12
    assert bad(view) == {"head.weight/wgrad r0", "head.weight/wgrad r1"} | updates


def test_other_faults_move_what_they_say(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path / "run", layers=2)
    run.plant(BlowUp(step=2, module="layers.1", factor=50.0), LossJump(step=3, factor=4.0))
    run.write(5)
    seen = views(run)

    norms = np.array([view.moments.statistic("norm") for view in seen])
    grown = {seen[0].tensors[at].key for at in np.flatnonzero(norms[2] > 10 * norms[1])}
    assert grown == {"layers.1/activation", "norm/activation", "head/activation"}
    losses = [view.scalars["loss"].mean for view in seen]
    assert losses[3] > 3 * losses[2] > 2 * losses[4]


def test_a_blow_up_leaves_behind_it_what_is_told(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path / "run", dp=2, layers=2)
    fault = BlowUp(step=2, module="layers.0", factor=1e4, rank=1, spread=0.5, in_gradients=0.25, in_loss=0.1)
    run.plant(fault)
    run.write(4)
    seen = views(run)

    norms = np.array([view.moments.statistic("norm") for view in seen])
    growth = {tensor.key: norms[2, at] / norms[1, at] for at, tensor in enumerate(seen[0].tensors)}
    # Half of the batch is one replica's: norms of the whole grow by 1 / sqrt(2) of the factor.
    assert growth["layers.0/activation"] == pytest.approx(1e4 / 2**0.5, rel=0.3)
    assert growth["layers.1/activation"] == pytest.approx(1e2 / 2**0.5, rel=0.3)
    assert growth["layers.0.mlp/activation"] == pytest.approx(1.0, rel=0.3)
    assert growth["layers.1.attn.weight/wgrad"] == pytest.approx(10.0, rel=0.3)
    losses = seen[2].scalars["loss"].by_rank
    assert losses[1] > 2 * losses[0]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "loopedbfs", "interleaved1f1b", "zbv", "dualpipev"])
def test_schedules_are_feasible(schedule: str) -> None:
    """Each rank can do its work in its order, without waiting for ever; forward precedes backward."""
    vpp = 1 if schedule in ("gpipe", "1f1b") else 2
    order = program_order(schedule, 3, vpp, 5)
    depths = {(stage, chunk): depth(schedule, stage, chunk, 3) for stage in range(3) for chunk in range(vpp)}
    done: set[tuple[bool, int, int]] = set()
    at = [0, 0, 0]
    assert all(len(work) == 2 * vpp * 5 for work in order)
    while sum(at) < sum(map(len, order)):
        before = sum(at)
        for stage, work in enumerate(order):
            if at[stage] == len(work):
                continue
            is_forward, chunk, micro = work[at[stage]]
            here, last = depths[stage, chunk], 3 * vpp - 1
            waits = {(True, here - 1, micro)} if is_forward and here else set()
            if not is_forward:
                waits = {(True, last, micro)} | ({(False, here + 1, micro)} if here < last else set())
            if waits <= done:
                done.add((is_forward, here, micro))
                at[stage] += 1
        assert sum(at) > before, "no rank can go on"


def test_a_folded_schedule_puts_first_and_last_chunk_on_one_rank(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path / "run", pp=2, vpp=2, schedule="zbv", shuffle=True)
    run.plant(Nan(step=0, module="layers.2.mlp", rank=1))
    run.write(1)
    (view,) = views(run)

    by_rank = {rank: {t.name for t in view.tensors if rank in t.ranks and t.kind == "activation"} for rank in (0, 1)}
    assert {"embed", "layers.0", "layers.3", "head"} <= by_rank[0]
    assert {"layers.1", "layers.2"} <= by_rank[1]
    assert bad(view) >= {"layers.2.mlp/activation r1", "layers.3.norm/activation r0", "head/activation r0"}
    assert not {"layers.2.attn/activation r1", "layers.1/activation r1", "layers.0/activation r0"} & bad(view)


def test_shuffled_tables_mean_the_same(tmp_path: Path) -> None:
    seen = []
    for shuffle in (False, True):
        run = SyntheticRun(tmp_path / str(shuffle) / "run", pp=2, dp=2, shuffle=shuffle)
        run.write(1)
        seen.append(views(run)[0])

    plain, shuffled = (dict(zip((t.key for t in view.tensors), view.stats.tolist(), strict=True)) for view in seen)
    assert plain == shuffled
    assert [t.key for t in seen[0].tensors] != [t.key for t in seen[1].tensors]


def test_a_fault_at_no_module_is_refused(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path / "run", pp=2)

    with pytest.raises(ValueError, match=r"no module 'layers\.9'; there are embed"):
        run.plant(Nan(step=0, module="layers.9"))
    with pytest.raises(ValueError, match="rank 1 does not hold 'embed'"):
        run.plant(Nan(step=0, module="embed", rank=1)).write(1)
