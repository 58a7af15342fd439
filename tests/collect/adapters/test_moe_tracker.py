"""The methods of Megatron's MoE tracker, with its results, and nobody waits for another rank."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import sentinel
from sentinel.collect.adapters.moe_tracker import MoETracker, num_moe_layers
from sentinel.place import Place

from ...support.nets import TinyModel, loss_of
from ...support.spools import Said


class Writer:
    """What TensorBoard's writer and wandb's run are asked to keep."""

    def __init__(self) -> None:
        self.kept: dict[str, tuple[float, int]] = {}

    def add_scalar(self, name: str, value: Any, iteration: int) -> None:
        self.kept[name] = float(value), iteration

    def log(self, values: dict[str, Any], iteration: int) -> None:
        for name, value in values.items():
            self.add_scalar(name, value, iteration)


class Group:
    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


def recorded(tracker: MoETracker) -> MoETracker:
    """Two micro-batches of three MoE layers among four."""
    for micro in range(2):
        for layer, value in ((1, 1.0), (2, 2.0), (4, 6.0)):
            tracker.record("load_balancing_loss", torch.tensor(value + micro, requires_grad=True), layer, 4)
            tracker.record("load_imbalance", value, layer, 4, needs_dp_avg=False)
    return tracker


def test_the_mean_over_moe_layers_and_the_line_for_people() -> None:
    writer, wandb = Writer(), Writer()

    line = recorded(MoETracker()).report(0.5, 7, writer, wandb, num_layers=4, moe_layer_freq=[1, 1, 0, 1])

    assert line == " load_balancing_loss: 3.50 | load_imbalance: 3.00 |"
    assert writer.kept == wandb.kept == {"load_balancing_loss": (3.5, 7), "load_imbalance": (3.0, 7)}


@pytest.mark.parametrize(
    ("num_layers", "freq", "mtp", "expected"),
    [(4, None, None, 4), (6, 2, None, 3), (7, 3, None, 3), (4, [1, 0, 1, 0], None, 2), (4, 1, 2, 6)],
)
def test_which_layers_are_moe_layers(num_layers: int, freq: Any, mtp: Any, expected: int) -> None:
    assert num_moe_layers(num_layers, freq, mtp) == expected


def test_percentiles_are_of_layers_that_have_a_value() -> None:
    writer = Writer()

    line = recorded(MoETracker()).report(
        0.5, 1, writer, None, True, num_layers=4, moe_layer_freq=[1, 1, 0, 1], percentiles={"load_imbalance": [0.5, 0.95]}
    )

    assert line.startswith(" load_balancing_loss: 3.50 | load_imbalance_p50: 2.00 | load_imbalance_p95: 5.60 |")
    assert {name: value for name, (value, _) in writer.kept.items() if name.startswith("moe/")} == {
        "moe/load_balancing_loss_layer_0": 1.5, "moe/load_balancing_loss_layer_1": 2.5,
        "moe/load_balancing_loss_layer_2": 0.0, "moe/load_balancing_loss_layer_3": 6.5,
        "moe/load_imbalance_layer_0": 1.0, "moe/load_imbalance_layer_1": 2.0, "moe/load_imbalance_layer_3": 6.0,
    }  # fmt: skip


def test_losses_go_where_the_trainer_adds_them_up() -> None:
    totals: dict[str, Any] = {"load_balancing_loss": torch.tensor(1.0)}

    line = recorded(MoETracker()).report(0.5, 1, num_layers=4, moe_layer_freq=[1, 1, 0, 1], total_loss_dict=totals)

    assert line == " load_imbalance: 3.00 |"
    assert float(totals["load_balancing_loss"]) == 4.5


def test_a_report_begins_anew_and_names_can_be_chosen() -> None:
    tracker = recorded(MoETracker())

    assert tracker.report(1.0, 1, track_names="load_imbalance", num_layers=4) == " load_imbalance: 4.50 |"
    assert tracker.metrics["load_balancing_loss"].values.tolist() == [0.0] * 4  # Megatron clears all of them too.
    assert tracker.report(1.0, 2, num_layers=4) == " load_balancing_loss: 0.00 | load_imbalance: 0.00 |"
    recorded(tracker).clear()
    assert tracker.metrics["load_imbalance"].values.tolist() == [0.0] * 4


def test_a_stage_without_moe_layers_reports_zeros() -> None:
    tracker = MoETracker()

    with pytest.raises(ValueError, match="num_layers"):
        tracker.report(1.0, 1, force_initialize=True, track_names=["z_loss"])
    assert tracker.report(1.0, 1, track_names=["z_loss"], num_layers=2) == ""
    line = tracker.report(1.0, 1, force_initialize=True, track_names=["z_loss"], num_layers=2, mtp_num_layers=1)

    assert line == " z_loss: 0.00 |"
    assert len(tracker.metrics["z_loss"].values) == 3


def test_layers_that_are_not_there_are_refused_and_no_layer_is_left_out() -> None:
    tracker = MoETracker()
    tracker.record("z_loss", torch.tensor(1.0), None, 4)
    assert not tracker.metrics
    for layer in (0, 5):
        with pytest.raises(ValueError, match="out of range"):
            tracker.record("z_loss", torch.tensor(1.0), layer, 4)


def test_arguments_are_megatrons() -> None:
    def names(method: Any) -> list[str]:
        return list(inspect.signature(method).parameters)

    tracker = sentinel.MoETracker()

    assert names(tracker.record) == [
        "name", "value", "layer_number", "num_layers", "reduce_group", "avg_group", "needs_dp_avg",
    ]  # fmt: skip
    assert names(tracker.report)[:12] == [
        "loss_scale", "iteration", "writer", "wandb_writer", "per_layer_logging", "force_initialize", "track_names",
        "num_layers", "moe_layer_freq", "mtp_num_layers", "total_loss_dict", "percentiles",
    ]  # fmt: skip
    assert names(tracker.ensure_initialized)[:2] == ["name", "num_layers"]


def test_what_is_reported_belongs_to_the_step_and_nobody_waits_for_another_rank(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mean over ranks of what each ships is what Megatron's collectives make of it."""
    for name in ("all_reduce", "all_gather", "reduce", "broadcast", "barrier"):
        monkeypatch.setattr(torch.distributed, name, lambda *a, **k: pytest.fail("a collective"))
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer)
    tracker = monitor.moe_tracker()
    for step in range(2):
        loss_of(model, step).backward()
        optimizer.step()
        tracker.record("z_loss", torch.tensor(1.0 + step), 2, 2, reduce_group=Group(4))
        tracker.report(1.0, step, num_layers=2, per_layer_logging=True)
    monitor.detach()

    ends = Said(run).ends

    # Summands of four ranks: this one's fourth, were all alike, is the whole.
    assert [end.scalars["z_loss"] for end in ends] == [2.0, 4.0]
    assert [end.scalars["moe/z_loss_layer_1"] for end in ends] == [4.0, 8.0]
    assert "moe/z_loss_layer_0" not in ends[0].scalars


def test_the_mean_of_the_ranks_of_a_pipeline_is_the_mean_over_all_layers() -> None:
    class Stage:
        def __init__(self, rank: int) -> None:
            self.place = Place(rank=rank, world_size=2, pp_rank=rank, pp_size=2)
            self.logged: dict[str, Any] = {}

        def log(self, **scalars: Any) -> None:
            self.logged.update(scalars)

    stages = [Stage(0), Stage(1)]
    for stage, layers in zip(stages, ({1: 3.0}, {3: 5.0, 4: 1.0}), strict=True):
        tracker = MoETracker(stage)  # type: ignore[arg-type]
        for layer, value in layers.items():
            tracker.record("load_balancing_loss", value, layer, 4)
        tracker.report(1.0, 1, num_layers=4, moe_layer_freq=[1, 0, 1, 1], percentiles={"load_balancing_loss": [0.5]})

    shipped = [float(stage.logged["load_balancing_loss"]) for stage in stages]

    assert sum(shipped) / 2 == pytest.approx(9.0 / 3)
    assert "load_balancing_loss_p50" not in stages[0].logged
