"""The residual stream: what passes the borders of blocks, known under a kind of its own without being measured twice."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import sentinel
from sentinel.exports.megatron_stats import places_of
from sentinel.exports.series import MergedStep, Picker, SeriesQuery
from sentinel.kinds import Phase, is_of_kind
from sentinel.order.phase import phase_of

from ...support.closed_steps import FollowedRun
from ...support.nets import TinyModel, loss_of, outputs
from ...support.truth import assert_row_of


def measured(run: Path, kinds: list[str]) -> tuple[TinyModel, list[torch.Tensor], FollowedRun]:
    model = TinyModel()
    monitor = sentinel.attach(model, config={"kinds": kinds, "black_box": False})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train() -> None:
        loss_of(model, 0).backward()
        optimizer.step()

    seen = outputs(model, ["emb", "blocks.0", "blocks.1"], train)
    monitor.detach()
    followed = FollowedRun(run)
    followed.finish()
    return model, [seen[name][0] for name in ("emb", "blocks.0", "blocks.1")], followed


def test_wanting_the_residual_stream_measures_the_borders_of_blocks(run: Path) -> None:
    _, stream, followed = measured(run, ["residual"])
    (view,) = followed.views
    picker = Picker(SeriesQuery(kinds=("residual",)))
    picker.meet(view.layout)

    points = picker.points(MergedStep.of(view))

    found = {(one.name, one.kind): points.moments[at].stats[0] for at, one in enumerate(points.series)}
    assert set(found) == {
        ("blocks.0", "activation"), ("blocks.1", "activation"), ("blocks.0", "dgrad"), ("blocks.1", "dgrad"),
        ("blocks.0", "activation_in"), ("blocks.0", "dgrad_in"),
    }  # fmt: skip
    assert_row_of(found["blocks.0", "activation_in"], stream[0])
    assert_row_of(found["blocks.0", "activation"], stream[1])
    assert_row_of(found["blocks.1", "activation"], stream[2])


def test_groups_and_megatrons_files_know_it_too(run: Path) -> None:
    from sentinel.aggregate import Aggregate

    _, _, followed = measured(run, ["residual", "activation", "dgrad"])
    (view,) = followed.views
    picker = Picker(SeriesQuery(kinds=("residual",), aggregates=(Aggregate.parse("stream=*"),)))
    picker.meet(view.layout)

    points = picker.points(MergedStep.of(view))

    assert {(one.name, one.kind): int(num) for one, num in zip(points.series, points.num_tensors, strict=True)} == {
        # The first block's input is the embedding's output, measured once.
        ("stream", "activation"): 3, ("stream", "dgrad"): 3,
    }  # fmt: skip
    assert ("residual_dgrad_raw_moments_by_layer", "blocks.1/output0") in places_of("blocks.1", "dgrad", "block_output")


def test_a_rule_on_the_residual_stream_judges_nothing_else(run: Path) -> None:
    from sentinel.rules.language.loader import load_pack
    from sentinel.rules.watches.series_index import SeriesIndex, SeriesSelection

    _, _, followed = measured(run, ["residual", "activation", "dgrad", "param"])
    path = run / "pack.yaml"
    path.write_text(
        "rules:\n- {name: stream, detector: AnomalyTurbulence, match: {kind: residual, statistic: norm}}\n", "utf-8"
    )
    pack = load_pack([path])
    rule = next(one for one in pack.rules if one.name == "stream")
    layout = followed.views[0].layout

    takes = SeriesSelection(layout, SeriesIndex()).takes(rule.match, frozenset(rule.match.kind))
    taken = [one for one in layout.tensors if takes[one.index]]

    assert {(one.name, one.kind) for one in taken} == {
        ("emb", "activation"), ("blocks.0", "activation"), ("blocks.1", "activation"),
        ("emb", "dgrad"), ("blocks.0", "dgrad"), ("blocks.1", "dgrad"),
    }  # fmt: skip
    assert len(layout.tensors) > 20


def test_which_tensors_are_of_a_kind() -> None:
    assert is_of_kind("activation", "block_output", {"residual"}) and is_of_kind("dgrad_in", "block_input", {"residual"})
    assert not is_of_kind("activation", "chunk_output", {"residual"}) and not is_of_kind("activation", "", {"residual"})
    assert not is_of_kind("param", "block_output", {"residual"}) and is_of_kind("param", "", {"param"})


def test_low_precision_is_said_where_its_tensor_was_made() -> None:
    assert phase_of("precision", "layers.0.fc1:dgrad.fp16_overflow") is Phase.BACKWARD
    assert phase_of("precision", "layers.0.fc1.weight:wgrad.fp16_overflow") is Phase.WGRAD
    assert phase_of("precision", "odd") is Phase.FREE


def test_a_border_in_a_parallel_block_is_the_blocks_output(run: Path) -> None:
    """GPT-J's blocks add attention and MLP to their input at once: the stream is what the block gives out."""

    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ln, self.attn, self.mlp = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.ln(x)
            return x + self.attn(h) + self.mlp(h)

    model = nn.Sequential()
    model.stem, model.blocks = nn.Linear(4, 8), nn.ModuleList([Parallel(), Parallel()])

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.blocks = model.stem, model.blocks

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = block(x)
            return x

    net = Net()
    monitor = sentinel.attach(net, config={"kinds": ["residual"], "black_box": False})
    net(torch.randn(3, 4)).sum().backward()
    monitor.detach()
    followed = FollowedRun(run)
    (view,) = followed.finish()

    borders = {one.name: one.border for one in view.tensors if one.kind == "activation"}
    assert borders == {"blocks.0": "block_output", "blocks.1": "block_output"}
