"""Compiled models from attach to detach: what is said when it is too late, and that nobody is hurt."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sentinel
from sentinel.collect.compiled import capability as capability
from sentinel.collect.compiled import graphs as compiled
from sentinel.collect.compiled import ops as compiled_ops
from sentinel.record import Flag

from ..support.nets import TinyModel, tokens
from ..support.spools import Said
from .compiled_runs import BLACK_BOX, FULL, STYLES, assert_same_rows, cross_entropy, lines, train_compiled, whole

pytestmark = pytest.mark.skipif(bool(compiled_ops.unavailable), reason=compiled_ops.unavailable or "-")


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("SENTINEL_DISABLE", "SENTINEL_RUN", "SENTINEL_DIR", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    torch._dynamo.reset()


class Training:
    """A model, its optimizer, and how it is called: as it was traced, what follows that is not asked here."""

    def __init__(self, folder: Path, style: str = "whole", backend: str = "eager") -> None:
        self.folder = folder
        self.model = TinyModel()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.call = STYLES[style](backend)(self.model)

    def attach(self, config: dict[str, Any] = FULL, run: str = "run") -> Any:
        target = self.call if isinstance(self.call, nn.Module) else self.model
        return sentinel.attach(target, self.optimizer, config={"directory": str(self.folder), "run": run, **config})

    def step(self, num_steps: int = 1) -> None:
        for step in range(num_steps):
            self.optimizer.zero_grad()
            cross_entropy(self.call, step).backward()
            self.optimizer.step()

    def said(self, run: str = "run") -> Said:
        return Said(self.folder / run)


def num_activations(said: Said) -> list[int]:
    return [len(said.of(end.step, "activation")) for end in said.ends]


# -- too late ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("style", "named", "outside"),
    [("whole", "the model", 1), ("in place", "the model", 1), ("blocks", "blocks.0, blocks.1", 5)],
    ids=["whole", "in place", "blocks"],
)
def test_a_model_called_before_attach_is_said_to_be_blind_inside_once(
    tmp_path: Path, style: str, named: str, outside: int
) -> None:
    training = Training(tmp_path, style)
    training.step()
    monitor = training.attach()
    training.step(2)
    torch._dynamo.reset()  # What the warning asks for.
    training.step()
    monitor.detach()

    said = training.said()
    (health,) = [one for one in said.health if one.code == "compiled_before_attach"]
    assert health.message.startswith(f"{named}: compiled and called before attach")
    assert "attach before the first call" in health.message and health.count == 1
    assert num_activations(said) == [outside, outside, 11]


def test_a_model_attached_in_time_is_not_said_to_be_blind(tmp_path: Path) -> None:
    training = Training(tmp_path)
    monitor = training.attach(BLACK_BOX)
    training.step()
    monitor.enable(["activation"])
    training.step()
    monitor.detach()

    assert training.said().health == []
    assert num_activations(training.said()) == [3, 10]  # The first block's input is not the embedding's output too.


@pytest.mark.long
def test_a_graph_for_cuda_graphs_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def codes(folder: Path) -> set[str]:
        torch._dynamo.reset()
        training = Training(folder, backend="aot_eager")
        monitor = training.attach(BLACK_BOX)
        training.step()
        monitor.detach()
        return {one.code for one in training.said().health}

    import torch._inductor.config as inductor

    with inductor.patch({"triton.cudagraphs": True}):
        assert codes(tmp_path / "cpu") == set()

        monkeypatch.setattr(compiled_ops, "GRAPHED_DEVICES", ("cpu",))
        assert codes(tmp_path / "as if on a gpu") == {"cuda_graphs"}


def test_another_torch_is_tried_out_before_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_on(folder: Path, torch_works: bool) -> tuple[list[int], set[str]]:
        torch._dynamo.reset()
        capability.why_unusable.cache_clear()
        monkeypatch.setattr(compiled.gate, "is_usable", False)
        training = Training(folder)
        with monkeypatch.context() as patch:
            if not torch_works:
                patch.setattr(capability, "observe", lambda *args: None)
            monitor = training.attach()
            training.step()
        monitor.detach()
        return num_activations(training.said()), {one.code for one in training.said().health}

    monkeypatch.setattr(capability, "TESTED", ())

    assert run_on(tmp_path / "works", True) == ([11], set())
    assert run_on(tmp_path / "loses ops", False) == ([1], {"compiled"})
    capability.why_unusable.cache_clear()


# -- nobody is hurt ----------------------------------------------------------------------------------------------------


def test_what_fails_in_an_op_is_told_and_training_goes_on(tmp_path: Path) -> None:
    bare = train_compiled(None, whole("aot_eager"))

    def break_it(monitor: Any, step: int, model: nn.Module) -> None:
        observe = monitor.recorder.sites.observe

        def planned(entry: Any, tensor: torch.Tensor, micro_step: int) -> None:
            if entry.name == "blocks.0.fc1":
                raise ValueError("planned")
            observe(entry, tensor, micro_step)

        if step == 0:
            monitor.recorder.sites.observe = planned

    watched = train_compiled(tmp_path, whole("aot_eager"), before_step=break_it)

    assert watched.is_same(bare)
    assert watched.said is not None
    ((code, site, message),) = {(one.code, one.site, one.message) for one in watched.said.health}
    assert (code, site) == ("hook_failed", "blocks.0.fc1")
    assert message.startswith(f"blocks.0.fc1: ValueError: planned ({__file__}:") and "; rows of its outputs" in message
    assert len(watched.said.of(1, "activation")) == 3 * 10
    assert any(row["flags"] & Flag.DEGRADED for _, row in watched.said.rows[1])


def test_detach_leaves_the_model_as_it_was_and_a_graph_without_ops(tmp_path: Path) -> None:
    training = Training(tmp_path)
    before = {name: set(module.__dict__) for name, module in training.model.named_modules()}
    monitor = training.attach()
    training.step()
    graphs: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if str(node.target).startswith("sentinel")])
        return graph.forward

    seen = torch.compile(training.model, backend=backend, fullgraph=True)
    cross_entropy(seen, 0)
    monitor.detach()
    cross_entropy(seen, 0)
    training.step()

    assert [bool(ops) for ops in graphs] == [True, False]
    for name, module in training.model.named_modules():
        assert not module._forward_hooks and not module._forward_pre_hooks, name
        assert set(module.__dict__) - before[name] <= {"_is_torch_compile"}, name  # Torch's own.
    assert not compiled_ops.on_root_traced and not compiled_ops.on_cuda_graph


@pytest.mark.long
def test_copies_are_nobodys_and_compile_without_ops(tmp_path: Path) -> None:
    training = Training(tmp_path)
    monitor = training.attach()
    training.step()
    copied = copy.deepcopy(training.model)
    for other in (copied, pickle.loads(pickle.dumps(training.model))):
        cross_entropy(torch.compile(other, backend="aot_eager", fullgraph=True), 3).backward()
    torch.save(training.model, io.BytesIO())
    training.step()
    monitor.detach()

    said = training.said()
    assert said.health == [] and [end.num_micro_steps for end in said.ends] == [1, 1]
    assert num_activations(said) == [11, 11]


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.long)])
def test_an_exported_program_holds_no_ops(tmp_path: Path, strict: bool) -> None:
    training = Training(tmp_path)
    monitor = training.attach()
    training.step()

    exported = torch.export.export(training.model, (tokens(1),), strict=strict)
    monitor.detach()

    assert not [node for node in exported.graph.nodes if "sentinel" in str(node.target)]
    assert num_activations(training.said()) == [11]


def test_a_forward_that_fails_in_a_graph_is_forgotten(tmp_path: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer, config={"directory": str(tmp_path), "run": "run", **FULL})
    call = torch.compile(lambda batch: model(batch), backend="aot_eager", fullgraph=True)
    failing = [True]

    def planned(gate: torch.Tensor) -> None:
        if failing[0]:
            raise ValueError("planned")

    library: Any = torch.library.Library("planned_failure", "DEF")
    library.define("fail(Tensor gate) -> Tensor")
    library.impl("fail", lambda gate: (planned(gate), gate.clone())[1], "CompositeExplicitAutograd")
    torch.library.register_fake("planned_failure::fail", torch.empty_like, lib=library)
    handle = model.head.register_forward_pre_hook(
        lambda module, args: torch.ops.planned_failure.fail(args[0].detach()) * 0 + args[0]
    )
    with pytest.raises(ValueError, match="planned"):
        cross_entropy(call, 0)
    failing[0] = False
    cross_entropy(call, 0).backward()
    optimizer.step()
    monitor.detach()
    handle.remove()
    library._destroy()

    said = Said(tmp_path / "run")
    assert [end.num_micro_steps for end in said.ends] == [1]
    assert len(said.of(0, "activation", "blocks.0.fc1")) == 1
    assert len(said.of(0, "dgrad", "blocks.0.fc1")) == 1


# -- wrappers ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def one_process(tmp_path: Path) -> Any:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("order", [pytest.param("compiled inside", marks=pytest.mark.long), "compiled outside"])
def test_data_parallel_around_or_inside_a_compiled_model(one_process: None, tmp_path: Path, order: str) -> None:
    def make() -> nn.Module:
        if order == "compiled inside":
            return DistributedDataParallel(torch.compile(TinyModel(), backend="aot_eager"))
        return torch.compile(DistributedDataParallel(TinyModel()), backend="aot_eager")

    plain = train_compiled(tmp_path / "plain", make=lambda: DistributedDataParallel(TinyModel()))
    watched = train_compiled(tmp_path / "watched", make=make)

    assert_same_rows(plain.said, watched.said)
    assert plain.said is not None and len(lines(plain.said)[1]) > 100


def test_sharded_blocks_that_are_compiled_one_by_one(one_process: None, tmp_path: Path) -> None:
    """As torchtitan does. What FSDP2 makes of a block's input lies in the same memory, and is a tensor of its own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",))

    def make(is_compiled: bool) -> nn.Module:
        model = TinyModel()
        for block in model.blocks:
            if is_compiled:
                block.compile(backend="aot_eager", fullgraph=True)
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    plain = train_compiled(tmp_path / "plain", make=lambda: make(False))
    watched = train_compiled(tmp_path / "watched", make=lambda: make(True))

    assert_same_rows(plain.said, watched.said)
    assert watched.losses == plain.losses and watched.graphs == [1, 1]
