"""Inside compiled models: the same rows as uncompiled, in one graph, whatever the order of micro-batches."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import sentinel
from sentinel.collect.compiled import ops as compiled_ops
from sentinel.collect.compiled.ops import Ticket
from sentinel.collect.hooks.graph_tap import GraphTap

from ...support.nets import Block, TinyModel, tokens
from ...support.spools import Said
from ..compiled_runs import (
    BLACK_BOX,
    EACH_AFTER_EACH,
    FULL,
    STYLES,
    Compile,
    Order,
    Run,
    assert_same_rows,
    cross_entropy,
    each_block,
    function,
    train_compiled,
    whole,
)

pytestmark = pytest.mark.skipif(bool(compiled_ops.unavailable), reason=compiled_ops.unavailable or "-")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")


@pytest.fixture(scope="session")
def inductor_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inductor")


@pytest.fixture(autouse=True)
def _own_caches(inductor_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(inductor_cache))
    for name in ("SENTINEL_DISABLE", "SENTINEL_RUN", "SENTINEL_DIR", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def unwatched() -> Callable[[str], Run]:
    """Return what the model trains to, compiled in a style, when nothing is attached."""

    @functools.cache
    def trained(style: str) -> Run:
        return train_compiled(None, STYLES[style]("aot_eager"), orders=EACH_AFTER_EACH, steps=4)

    return trained


class Shaped(nn.Module):
    """Blocks called in the ways that models have."""

    def __init__(self, kind: str, num_blocks: int = 1) -> None:
        super().__init__()
        self.kind = kind
        self.emb = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([Block(8) for _ in range(num_blocks)])
        self.mix = nn.Linear(8, 8)
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(8, 11)

    def forward(self, batch: torch.Tensor) -> Any:
        x = self.emb(batch)
        for block in self.blocks:
            if self.kind in ("checkpointed", "checkpointed reentrant"):
                x = checkpoint(block, x, use_reentrant=self.kind == "checkpointed reentrant")
            elif self.kind == "tied":
                x = self.mix(self.mix(block(x)))
            elif self.kind == "in place":
                x = self.mix(block(x))
                x.add_(1)
                x = self.act(self.mix(x))
            elif self.kind == "broken":
                x = block(x)
                torch._dynamo.graph_break()
            else:
                x = block(x)
        if self.kind == "nested":
            return {"logits": self.head(x), "hidden": (x, [x * 2])}
        return self.head(x)


ONE_BLOCK = functools.partial(TinyModel, num_blocks=1)
"""For tests that ask nothing of a second block: half of the time is spent on tracing it."""
# -- rows --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("style", "config"),
    [
        *(pytest.param(style, FULL, marks=() if style == "blocks" else pytest.mark.long) for style in STYLES),
        ("whole", BLACK_BOX),
        pytest.param("function", BLACK_BOX, marks=pytest.mark.long),
    ],
    ids=lambda value: value if isinstance(value, str) else "every site" if value is FULL else "black box",
)
def test_rows_are_those_of_the_uncompiled_model(
    tmp_path: Path, unwatched: Callable[[str], Run], style: str, config: dict[str, Any]
) -> None:
    compile_it = STYLES[style]("aot_eager")

    plain = train_compiled(tmp_path / "plain", config=config, orders=EACH_AFTER_EACH, steps=4)
    bare = unwatched(style)
    watched = train_compiled(tmp_path / "watched", compile_it, config, orders=EACH_AFTER_EACH, steps=4)

    assert_same_rows(plain.said, watched.said)
    assert watched.said is not None
    num_sites = 11 if config is FULL else 3
    found = [len(watched.said.of(step, kind)) for step in range(4) for kind in ("activation", "dgrad")]
    assert found == [3 * num_sites] * 8
    assert watched.is_same(bare)
    assert watched.graphs == bare.graphs == [1] * 4


@pytest.mark.parametrize(
    "style", ["whole", *(pytest.param(style, marks=pytest.mark.long) for style in ("blocks", "function"))]
)
def test_attached_after_compiling_but_before_the_first_call_is_the_same(tmp_path: Path, style: str) -> None:
    compile_it = STYLES[style]("aot_eager")

    plain = train_compiled(tmp_path / "plain", make=ONE_BLOCK)
    watched = train_compiled(tmp_path / "watched", compile_it, make=ONE_BLOCK, attach_last=True)

    assert_same_rows(plain.said, watched.said)


@pytest.mark.parametrize(
    ("kind", "compile_it"),
    [
        ("checkpointed", whole("aot_eager")),
        pytest.param("checkpointed", each_block("aot_eager"), marks=pytest.mark.long),
        pytest.param("checkpointed reentrant", each_block("aot_eager"), marks=pytest.mark.long),
        pytest.param("tied", whole("aot_eager"), marks=pytest.mark.long),
        pytest.param("in place", whole("aot_eager"), marks=pytest.mark.long),
        pytest.param("nested", whole("aot_eager"), marks=pytest.mark.long),
        ("broken", whole("aot_eager", fullgraph=False)),
        pytest.param("tied", whole("eager"), marks=pytest.mark.long),
    ],
    ids=["inside a checkpoint", "around", "around reentrant", "tied", "in place", "nested", "broken", "no autograd"],
)
def test_rows_are_the_same_however_modules_are_called(tmp_path: Path, kind: str, compile_it: Compile) -> None:
    # One block suffices where nothing is repeated: what is compiled grows with it, and that is what takes the time.
    def make() -> nn.Module:
        return Shaped(kind, 2 if kind == "checkpointed" else 1)

    plain = train_compiled(tmp_path / "plain", make=make, orders=EACH_AFTER_EACH, steps=4)
    bare = train_compiled(None, compile_it, make=make, orders=EACH_AFTER_EACH, steps=4)
    watched = train_compiled(tmp_path / "watched", compile_it, make=make, orders=EACH_AFTER_EACH, steps=4)

    assert_same_rows(plain.said, watched.said)
    assert watched.is_same(bare)
    assert watched.graphs == bare.graphs


def test_a_chunk_that_is_a_layer_of_torch_is_measured_inside(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.GELU())

    def square(call: Any, seed: int) -> torch.Tensor:
        return call(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))).square().mean()

    plain = train_compiled(tmp_path / "plain", make=make, loss=square)
    watched = train_compiled(tmp_path / "watched", whole("aot_eager"), make=make, loss=square)

    assert_same_rows(plain.said, watched.said)


@pytest.mark.long
def test_shapes_may_change(tmp_path: Path) -> None:
    def ragged(call: Any, seed: int) -> torch.Tensor:
        batch = torch.randint(0, 11, (3 + seed % 4, 4 + seed % 3), generator=torch.Generator().manual_seed(seed))
        return nn.functional.cross_entropy(call(batch).flatten(0, 1), batch.flatten())

    plain = train_compiled(tmp_path / "plain", make=ONE_BLOCK, loss=ragged)
    watched = train_compiled(tmp_path / "watched", whole("aot_eager", dynamic=True), make=ONE_BLOCK, loss=ragged)

    assert_same_rows(plain.said, watched.said)
    assert watched.graphs == [1, 1]


def test_a_retained_graph_counts_once(tmp_path: Path) -> None:
    class Twice:
        def __init__(self, loss: torch.Tensor) -> None:
            self.loss = loss

        def backward(self) -> None:
            self.loss.backward(retain_graph=True)
            self.loss.backward()

        def detach(self) -> torch.Tensor:
            return self.loss.detach()

    def twice(call: Any, seed: int) -> Any:
        return Twice(cross_entropy(call, seed))

    plain = train_compiled(tmp_path / "plain", make=ONE_BLOCK, loss=twice)
    watched = train_compiled(tmp_path / "watched", whole("aot_eager"), make=ONE_BLOCK, loss=twice)

    assert_same_rows(plain.said, watched.said)
    assert watched.said is not None and len(watched.said.of(1, "dgrad", "blocks.0")) == 3


def list_compiled_files(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which the file of each function is added that the compiler compiles from now on."""
    files: list[str] = []
    convert = torch._dynamo.convert_frame._compile

    def noted(code: Any, *args: Any, **kwargs: Any) -> Any:
        files.append(code.co_filename)
        return convert(code, *args, **kwargs)

    monkeypatch.setattr("torch._dynamo.convert_frame._compile", noted)
    return files


def test_a_whole_training_step_may_be_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(folder: Path, is_compiled: bool) -> tuple[list[float], Said]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = TinyModel(num_blocks=1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        monitor = sentinel.attach(model, optimizer, config={"directory": str(folder), "run": "run", **FULL})

        def step(seed: int) -> torch.Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(model, seed)
            loss.backward()
            optimizer.step()
            return loss.detach()

        call = torch.compile(step, backend="aot_eager") if is_compiled else step
        losses = [float(call(seed)) for seed in range(3)]
        monitor.detach()
        return losses, Said(folder / "run")

    losses, said = steps(tmp_path / "plain", False)
    compiled = list_compiled_files(monkeypatch)
    compiled_losses, compiled_said = steps(tmp_path / "compiled", True)

    assert_same_rows(said, compiled_said)
    assert compiled_losses == losses
    assert any(file.endswith("test_graphs.py") for file in compiled)
    assert not [file for file in compiled if file.startswith(sentinel.__path__[0])], "something of ours was compiled"


@pytest.mark.long
def test_evaluation_in_between_leaves_no_rows(tmp_path: Path) -> None:
    def evaluate(monitor: Any, step: int, model: nn.Module) -> None:
        model.eval()
        with torch.no_grad():
            model(tokens(7))
        model.train()

    def compile_it(model: nn.Module) -> nn.Module:
        model.compile(backend="aot_eager", fullgraph=True)
        return model

    plain = train_compiled(tmp_path / "plain", make=ONE_BLOCK, before_step=evaluate)
    watched = train_compiled(tmp_path / "watched", compile_it, make=ONE_BLOCK, before_step=evaluate)

    assert_same_rows(plain.said, watched.said)


def test_gradients_belong_to_the_micro_step_of_their_own_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def micro_steps(run: Run) -> list[int]:
        assert run.said is not None
        return [int(row["micro_step"]) for row in run.said.of(1, "dgrad", "blocks.0")]

    right = train_compiled(tmp_path / "right", whole("aot_eager"), make=ONE_BLOCK, orders=(Order.FORWARDS_FIRST,))
    answer = GraphTap.gradient_passes

    def of_the_last_forward(tap: GraphTap, gradient: torch.Tensor, ticket: Ticket) -> None:
        answer(tap, gradient, ticket._replace(micro_step=tap._tap.chunk.micro_step))

    monkeypatch.setattr(GraphTap, "gradient_passes", of_the_last_forward)
    wrong = train_compiled(tmp_path / "wrong", whole("aot_eager"), make=ONE_BLOCK, orders=(Order.FORWARDS_FIRST,))

    assert micro_steps(right) == [0, 1, 2]
    assert micro_steps(wrong) == [2, 2, 2]


# -- graphs ------------------------------------------------------------------------------------------------------------


def switch(monitor: Any, step: int, model: nn.Module) -> None:
    """Everything that can be switched while training."""
    if monitor is None:
        return
    if step == 1:
        monitor.enable(["activation", "dgrad"], for_steps=2)
    elif step == 5:
        monitor.enable(["activation"], targets="blocks.1")
    elif step in (6, 8):
        monitor.disable()
    elif step == 7:
        monitor.enable(["dgrad_in"])


@pytest.mark.parametrize(
    "style", ["whole", *(pytest.param(style, marks=pytest.mark.long) for style in ("blocks", "function"))]
)
def test_full_monitoring_is_one_second_graph_and_nothing_else_is_compiled(tmp_path: Path, style: str) -> None:
    compile_it = STYLES[style]("aot_eager")

    plain = train_compiled(tmp_path / "plain", config=BLACK_BOX, steps=10, before_step=switch)
    watched = train_compiled(tmp_path / "watched", compile_it, BLACK_BOX, steps=10, before_step=switch)

    assert_same_rows(plain.said, watched.said)
    assert watched.graphs == [1] + [2] * 9


@pytest.mark.long
@pytest.mark.parametrize(
    "schedule",
    [
        {"step_interval": 3},
        pytest.param({"stagger": 3}, marks=pytest.mark.long),
        pytest.param({"start_step": 2}, marks=pytest.mark.long),
        pytest.param({"collect_times": 2}, marks=pytest.mark.long),
    ],
)
def test_no_cadence_compiles_anything(tmp_path: Path, schedule: dict[str, int]) -> None:
    config = {**FULL, **schedule}

    plain = train_compiled(tmp_path / "plain", config=config, make=ONE_BLOCK, steps=6)
    watched = train_compiled(tmp_path / "watched", whole("aot_eager"), config, make=ONE_BLOCK, steps=6)

    assert_same_rows(plain.said, watched.said)
    assert watched.graphs[-1] <= 2 and watched.graphs[3:] == [watched.graphs[3]] * 3


def test_once_both_graphs_are_there_a_recompile_would_be_an_error(tmp_path: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    settings = {"directory": str(tmp_path), "run": "run", **BLACK_BOX}
    monitor = sentinel.attach(model, optimizer, config=settings)
    call = torch.compile(model, backend="eager", fullgraph=True)  # Dynamo alone decides what is compiled again.

    def step(seed: int) -> None:
        cross_entropy(call, seed).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    monitor.enable(["activation"])
    step(1)
    monitor.disable()
    with torch.compiler.set_stance("fail_on_recompile"):
        step(2)
        monitor.enable(["dgrad"], targets="blocks.1.fc1")
        step(3)
        monitor.disable()
        step(4)
        with pytest.raises(RuntimeError, match="recompil"):  # What was just done is watched indeed.
            call(tokens(0).to(torch.int32))
    monitor.detach()

    said = Said(tmp_path / "run")
    assert [len(said.of(step, "activation")) for step in range(5)] == [3, 10, 3, 3, 3]  # The first input goes on.
    assert [len(said.of(step, "dgrad", "blocks.1.fc1")) for step in range(5)] == [0, 0, 0, 1, 0]


def ops_in_graph(compile_with: Any, config: dict[str, Any], folder: Path) -> list[str]:
    found: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        found.extend(str(node.target) for node in graph.graph.nodes if str(node.target).startswith("sentinel"))
        return graph.forward

    train_compiled(folder, compile_with(backend), config, make=ONE_BLOCK, steps=1)
    return found


def test_what_is_off_leaves_nothing_in_the_graph(tmp_path: Path) -> None:
    off = {"black_box": False, "kinds": ["wgrad"]}

    assert ops_in_graph(whole, off, tmp_path / "off") == []
    assert ops_in_graph(whole, BLACK_BOX, tmp_path / "on") == ["sentinel.observe.default"] * 2
    # Where the whole chunk is inside, its forward must show all the same: two ops.
    inside = ops_in_graph(function, off, tmp_path / "inside")
    assert inside == ["sentinel.begin_forward.default", "sentinel.end_forward.default"]


def test_blocks_that_are_compiled_one_by_one_share_their_graph(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return TinyModel(num_blocks=10)  # More than torch compiles of one function before it gives up.

    plain = train_compiled(tmp_path / "plain", make=make, steps=1)
    watched = train_compiled(tmp_path / "watched", each_block("aot_eager"), make=make, steps=1)

    assert_same_rows(plain.said, watched.said)
    assert watched.graphs == [1]


# -- inductor ----------------------------------------------------------------------------------------------------------


@pytest.mark.long
@needs_compiler
def test_fp32_is_bit_identical_in_inductor_with_every_site_in_one_graph(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return Shaped("checkpointed")

    bare = train_compiled(None, whole("inductor"), make=make, orders=(Order.FORWARDS_FIRST,))
    watched = train_compiled(tmp_path / "watched", whole("inductor"), make=make, orders=(Order.FORWARDS_FIRST,))
    plain = train_compiled(tmp_path / "plain", make=make, orders=(Order.FORWARDS_FIRST,))

    assert watched.is_same(bare)
    assert watched.graphs == bare.graphs == [1, 1]
    assert_same_rows(plain.said, watched.said)


# The short form is what inductor makes of a graph before it makes kernels of it, which take it 20 s.
@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager_decomp_partition", pytest.param("inductor", marks=pytest.mark.long)])
def test_blocks_in_inductor_are_bit_identical_through_both_graphs(tmp_path: Path, backend: str) -> None:
    compile_it = each_block(backend)

    bare = train_compiled(None, compile_it, BLACK_BOX, steps=4)
    watched = train_compiled(
        tmp_path / "watched", compile_it, BLACK_BOX, steps=4,
        before_step=lambda monitor, step, model: monitor.enable(["activation"], for_steps=1) if step == 1 else None,
    )  # fmt: skip

    assert watched.is_same(bare)
    assert watched.graphs == [1, 2, 2, 2]
    # Inside the blocks too, while that was on.
    assert watched.said is not None and len(watched.said.of(1, "activation", "blocks.1.fc1")) == 3


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize("config", [BLACK_BOX, FULL], ids=["black box", "every site"])
def test_bf16_stays_within_the_rounding_of_its_losses(tmp_path: Path, config: dict[str, Any]) -> None:
    """A graph with ops fuses differently: where inductor kept fp32 between two operations, bf16 is stored."""

    def make() -> nn.Module:
        return TinyModel(num_blocks=1).to(torch.bfloat16)

    bare = train_compiled(None, whole("inductor"), make=make, steps=6)
    watched = train_compiled(tmp_path / "watched", whole("inductor"), config, make=make, steps=6)

    # One rounding of bf16 is 2**-8 of the value; losses here are below 4. Chosen: two of them after 18 micro-batches.
    assert max(abs(one - two) for one, two in zip(bare.losses, watched.losses, strict=True)) <= 2 * 4 * 2**-8
    furthest = max(float((a.float() - b.float()).abs().max()) for a, b in zip(bare.weights, watched.weights, strict=True))
    # Adam moves a weight by 0.01 a step, whatever the size of its gradient: a sign that flips is two such moves.
    assert furthest <= 2 * 0.01 * 6
