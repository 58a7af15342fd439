"""Communication of real ranks: what went in and came out of each call, from which line, without changing anything."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn

from sentinel.collect.parallel.collectives import METHODS, calls
from sentinel.messages import Descriptor, Health, TensorInfo, Vectors
from sentinel.record import NONE_ID

from ...layouts.builds import ddp, fsdp2, pipeline, tp
from ...layouts.layout import Trainer, train_ranks
from ...support.closed_steps import closed_steps
from ...support.nets import TinyModel, loss_of
from ...support.spools import decoded, frames_so_far, norm, spool_folders, values_of

COMM = {"kinds": ["wgrad", "comm"]}


class Received:
    """Rows, vectors and health of one rank."""

    def __init__(self, run: Path, rank: int) -> None:
        self.tensors: dict[int, TensorInfo] = {}
        self.rows: dict[int, dict[str, Any]] = defaultdict(dict)
        self.vectors: dict[tuple[str, str], list[np.ndarray]] = defaultdict(list)
        self.health: list[Health] = []
        frames = [frame for folder in spool_folders(run, rank) for frame in decoded(frames_so_far(folder))]
        for _, message in frames:
            if isinstance(message, Descriptor):
                self.tensors.update({tensor.id: tensor for tensor in message.tensors})
            elif isinstance(message, Health):
                self.health.append(message)
        for header, message in frames:
            if isinstance(message, np.ndarray):
                for row in message:
                    tensor = self.tensors[int(row["tensor"])]
                    if tensor.kind == "comm":
                        assert tensor.name not in self.rows[header.step]
                        self.rows[header.step][tensor.name] = row
            elif isinstance(message, Vectors):
                for item in message.items:
                    self.vectors[self.tensors[item.tensor].name, item.statistic].append(values_of(item))

    def row(self, step: int, op: str, role: str) -> Any:
        """The row of an op that only one line calls."""
        found = [row for name, row in self.rows[step].items() if name.startswith(f"{op}@") and name.endswith(f":{role}")]
        assert len(found) == 1, (op, role, sorted(self.rows[step]))
        return found[0]


def expected(rank: int) -> dict[str, list[float]]:
    path = Path(os.environ["SENTINEL_DIR"]) / f"expected-{rank}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def note(**tensors: Any) -> None:
    """Leave [norm, count] of what a call was given and gave, in float64, for the test to compare."""
    rank = dist.get_rank()
    said = expected(rank)
    for name, tensor in tensors.items():
        many = tensor if isinstance(tensor, list) else [tensor]
        flat = torch.cat([one.detach().clone().double().flatten() for one in many])
        said[name] = [float(flat.norm()), flat.numel()]
    (Path(os.environ["SENTINEL_DIR"]) / f"expected-{rank}.json").write_text(json.dumps(said))


def by_hand() -> Trainer:
    """A loop that uses every kind of call itself."""
    torch.manual_seed(0)
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rank, world = dist.get_rank(), dist.get_world_size()

    def train_step(step: int) -> tuple[torch.Tensor, Any]:
        optimizer.zero_grad()
        loss = loss_of(model, 10 * step + rank)
        loss.backward()
        grad = model.head.weight.grad
        note(sum_in=grad)
        work = dist.all_reduce(grad, async_op=True)
        generator = torch.Generator().manual_seed(100 * step + rank)
        mine = torch.randn(3, 4, generator=generator)
        parts = [torch.empty(3, 4) for _ in range(world)]
        dist.all_gather(parts, mine)
        note(gather_in=mine, gather_out=parts[1])
        work.wait()
        note(sum_out=grad)
        out = torch.empty(2, 4)
        dist.all_to_all_single(out, torch.randn(2, 4, generator=generator))
        note(a2a_out=out)
        root = torch.randn(5, generator=generator)
        if rank == 0:
            note(cast_in=root)
        dist.broadcast(root, 0)
        note(cast_out=root)
        total = torch.randn(6, generator=generator)
        note(reduce_in=total)
        dist.reduce(total, 1)
        if rank == 1:
            note(reduce_out=total)
        if rank == 0:
            sent = torch.randn(7, generator=generator)
            note(sent=sent)
            dist.send(sent, 1)
        else:
            got = torch.empty(7)
            request = dist.irecv(got, 0)
            request.wait()
            note(got=got)
        summed = funcol.all_reduce(mine, "sum", dist.group.WORLD)
        summed = summed + 0.0
        note(functional_out=summed)
        dist.barrier()
        said: list[Any] = [None] * world
        dist.all_gather_object(said, {"rank": rank})
        model.head.weight.grad /= world
        with torch.no_grad():
            for name, param in model.named_parameters():
                if name != "head.weight":
                    param.grad /= 1.0
        total_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss.detach(), total_norm

    return Trainer([model], optimizer, train_step)


def test_every_call_is_a_row_that_matches_the_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SENTINEL_DIR", str(tmp_path))
    plain = train_ranks(tmp_path / "bare", by_hand, 2, num_steps=3)

    watched = train_ranks(tmp_path / "watched", by_hand, 2, config=COMM, num_steps=3)

    # Bit-identical, and not one call more.
    assert [(one.losses, one.weights, one.num_collectives) for one in watched] == [
        (one.losses, one.weights, one.num_collectives) for one in plain
    ]
    roles = {
        "sum_in": ("all_reduce", "in"), "sum_out": ("all_reduce", "out"), "gather_in": ("all_gather", "in"),
        "gather_out": ("all_gather", "out.1"), "a2a_out": ("all_to_all_single", "out"), "cast_in": ("broadcast", "in"),
        "cast_out": ("broadcast", "out"), "reduce_in": ("reduce", "in"), "reduce_out": ("reduce", "out"),
        "sent": ("send", "in"), "got": ("recv", "out"),
    }  # fmt: skip
    names = []
    for rank in range(2):
        said = json.loads((tmp_path / "watched" / f"expected-{rank}.json").read_text())
        ears = Received(tmp_path / "watched" / "run", rank)
        functional = {name: row for name, row in ears.rows[2].items() if name.startswith("all_reduce@")}
        by_line = sorted({name.rpartition(":")[0] for name in functional}, key=lambda line: int(line.rpartition(":")[2]))
        assert len(by_line) == 2  # The gradient's, and the functional one.
        for name, (length, count) in said.items():
            op, role = roles.get(name, ("all_reduce", "out"))
            if op == "all_reduce":
                line = by_line[1 if name == "functional_out" else 0]
                row = functional[f"{line}:{role}"]
            else:
                row = ears.row(2, op, role)
            assert int(row["count"]) == count, name
            assert norm(row) == pytest.approx(length, rel=1e-6), name
        # What is not the root's says nothing; objects are no tensors.
        assert ("broadcast", "in") not in {(n.partition("@")[0], n.rpartition(":")[2]) for n in ears.rows[2]} or rank == 0
        assert not any("uint8" in tensor.dtype for tensor in ears.tensors.values() if tensor.kind == "comm")
        assert all("test_comm.py:" in name for name in ears.rows[2])
        assert not [one for one in ears.health if one.code == "hook_failed"]
        names.append({name for name in ears.rows[2] if not name.startswith(("send", "recv", "broadcast", "reduce@"))})
        calls_of = {name: vectors for (name, statistic), vectors in ears.vectors.items() if statistic == "calls"}
        assert any(name.startswith("barrier@") for name in calls_of)
        for vectors in calls_of.values():
            for values in vectors:
                assert (values[:, 3] == 2).all() and (values[:, 4] == 1).all() and (values[:, 2] >= 0).all()
        groups = [v for (_, statistic), v in ears.vectors.items() if statistic == "group"]
        assert groups and all(one.tolist() == [0, 1] for vectors in groups for one in vectors)
    assert names[0] == names[1]
    assert closed_steps(tmp_path / "watched" / "run")[-1].tensors  # The daemon reads it: nothing is merged or clashes.


def test_fully_sharded_training_is_seen_and_unchanged(tmp_path: Path) -> None:
    plain = train_ranks(tmp_path / "bare", fsdp2, 2, num_steps=3)

    watched = train_ranks(tmp_path / "watched", fsdp2, 2, config=COMM, num_steps=3)

    assert [(o.losses, o.weights, o.num_collectives) for o in watched] == [
        (o.losses, o.weights, o.num_collectives) for o in plain
    ]
    ears = Received(tmp_path / "watched" / "run", 1)
    ops = {name.partition("@")[0] for name in ears.rows[1]}
    assert {"all_gather_into_tensor", "reduce_scatter_tensor"} <= ops
    folded = [row for name, row in ears.rows[1].items() if name.startswith("reduce_scatter_tensor@")]
    assert sum(int(row["num_folded"]) for row in folded) > len(folded)  # Several layers, one line of code.
    assert all(int(row["call_id"]) != NONE_ID for row in folded)
    assert not ears.health
    view = closed_steps(tmp_path / "watched" / "run")[1]
    comm = [tensor for tensor in view.tensors if tensor.kind == "comm" and tensor.name.endswith(":in")]
    assert comm and {len(tensor.ranks) for tensor in comm} == {1}  # Never merged: each rank sends its own.


@pytest.mark.parametrize(("build", "op"), [(tp, "all_reduce"), (partial(pipeline, "Schedule1F1B"), "send")])
def test_tensor_and_pipeline_parallel_are_seen(build: Any, op: str, tmp_path: Path) -> None:
    train_ranks(tmp_path, build, 2, config=COMM, num_steps=2)

    both = [Received(tmp_path / "run", rank) for rank in range(2)]
    assert any(name.startswith(f"{op}@") for ears in both for name in ears.rows[1])
    for view in closed_steps(tmp_path / "run"):
        assert all(len(tensor.ranks) == 1 for tensor in view.tensors if tensor.kind == "comm")
    assert not [one for ears in both for one in ears.health]


def test_ddp_says_what_cannot_be_seen(tmp_path: Path) -> None:
    train_ranks(tmp_path, ddp, 2, config=COMM, num_steps=2)

    ears = Received(tmp_path / "run", 0)
    assert [one.code for one in ears.health] == ["blind_probe"]


def unread() -> Trainer:
    """One call is never waited for; another is in the next step; a filter lets one line through."""
    trainer = by_hand()
    inner, late = trainer.train_step, []

    def train_step(step: int) -> Any:
        for work in late:
            work.wait()
        late.clear()
        return inner(step)

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        forgotten = torch.ones(3)
        unread_works.append(dist.all_reduce(forgotten, async_op=True))
        kept_tensors.append(forgotten)
        del unread_works[:-1]

    trainer.optimizer.register_step_pre_hook(after)
    trainer.train_step = train_step
    return trainer


unread_works: list[Any] = []
kept_tensors: list[Any] = []


def test_a_work_that_nobody_waits_for_is_said(tmp_path: Path) -> None:
    config = {"probes": {"comm": {"targets": ["after", "barrier"]}}}
    train_ranks(tmp_path, unread, 2, config=config, num_steps=3)

    ears = Received(tmp_path / "run", 0)

    assert "comm_unread" in [one.code for one in ears.health]
    assert {name.rpartition(":")[2] for name in ears.rows[1]} == {"in"}
    assert {name.partition("@")[0] for name, _ in ears.vectors} == {"all_reduce", "barrier"}


@pytest.mark.parametrize("target", ["all_gather", "test_comm.py", "probes/test_comm.py", "re:.*train_step", "all_gather@*"])
def test_code_lines_are_filtered(target: str, tmp_path: Path) -> None:
    config = {"probes": {"comm": {"targets": [target, "nothing.py:3"]}}}
    train_ranks(tmp_path, by_hand, 2, config=config, num_steps=1)

    names = set(Received(tmp_path / "run", 0).rows[0])

    assert any(name.startswith("all_gather@") for name in names)
    assert (len({name.partition("@")[0] for name in names}) == 1) is target.startswith("all_gather")


def test_targets_of_modules_are_no_filter_of_lines(run: Path, tmp_path: Path) -> None:
    import sentinel

    single(tmp_path)
    try:
        model = TinyModel()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        monitor = sentinel.attach(model, optimizer, {"kinds": ["activation", "comm"], "targets": ["blocks.1"]})
        for step in range(3):
            loss_of(model, step).backward()
            dist.all_reduce(torch.ones(2))
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                monitor.disable("comm")
                monitor.enable(["comm", "dgrad"], ["blocks.0"])
            if step == 1:
                monitor.disable("comm")
                monitor.enable(["comm"], ["nowhere.py:1"])
        monitor.detach()
    finally:
        dist.destroy_process_group()

    rows = Received(run, 0).rows
    assert [len(rows[step]) for step in range(3)] == [2, 2, 0]


def test_log_only_counts_and_measures_nothing(tmp_path: Path) -> None:
    config = {"probes": {"comm": {"log_only": True, "step_interval": 2}}}
    train_ranks(tmp_path, by_hand, 2, config=config, num_steps=4)

    ears = Received(tmp_path / "run", 1)

    assert not any(ears.rows.values())
    gathered = next(v for (name, what), v in ears.vectors.items() if name.startswith("all_gather@") and what == "calls")
    assert len(gathered) == 2  # Steps 0 and 2.
    assert gathered[0][0, 1] == 3 * 4 * 4  # bytes


def test_without_torch_distributed_nothing_happens(run: Path) -> None:
    import sentinel

    kind = torch._C._distributed_c10d.ProcessGroup
    before = {name: getattr(kind, name) for name in METHODS if hasattr(kind, name)}
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer, {"kinds": ["comm"]})
    assert kind.allreduce is not before["allreduce"]  # It is on: the control.

    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    monitor.disable("comm")
    loss_of(model, 5).backward()
    optimizer.step()
    assert kind.allreduce is before["allreduce"]
    monitor.detach()

    assert {name: getattr(kind, name) for name in before} == before
    assert not calls.users and not calls.names


def test_off_means_not_installed(run: Path) -> None:
    import sentinel

    model = nn.Linear(2, 2)
    monitor = sentinel.attach(model, torch.optim.SGD(model.parameters(), 0.1), {"kinds": ["wgrad"]})

    assert not calls.names

    monitor.detach()


def single(tmp_path: Path) -> None:
    """A group of one, in this process."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)


def test_threads_compiled_graphs_and_failed_forwards(run: Path, tmp_path: Path) -> None:
    """Only the trainer's own calls count; a forward that is tried again leaves no rows of the first try."""
    import threading

    import sentinel

    single(tmp_path)
    try:
        model = TinyModel()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        fails = [True]

        def exchange(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(output.detach().clone())
            if fails and fails.pop():
                raise RuntimeError("try again")
            return output

        model.blocks[0].register_forward_hook(exchange)
        monitor = sentinel.attach(model, optimizer, {"kinds": ["comm"], "black_box": False})
        dist.all_reduce(torch.ones(2))  # Before the step.
        with pytest.raises(RuntimeError, match="try again"):
            loss_of(model, 0)
        loss_of(model, 0).backward()
        other = threading.Thread(target=lambda: dist.broadcast(torch.ones(3), 0))
        other.start()
        other.join()

        @torch.compile(backend="eager", fullgraph=True)
        def compiled(x: torch.Tensor) -> torch.Tensor:
            return funcol.all_reduce(x * 2, "sum", dist.group.WORLD) + 1

        assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 3.0))
        optimizer.step()
        dist.all_reduce(torch.ones(2))  # Still of the step: the next one has not begun.
        optimizer.zero_grad()
        loss_of(model, 1).backward()
        optimizer.step()
        monitor.detach()
    finally:
        dist.destroy_process_group()

    ears = Received(run, 0)
    first = {name: int(row["num_folded"]) for name, row in ears.rows[0].items()}
    assert sorted(name.rpartition(":")[2] for name in first) == ["in", "in", "out", "out"]
    assert all(name.startswith("all_reduce@") for name in first)
    assert not ears.health


def test_calls_held_back_are_seen_when_they_are_sent(run: Path, tmp_path: Path) -> None:
    import sentinel

    single(tmp_path)
    try:
        model = TinyModel()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        monitor = sentinel.attach(model, optimizer, {"kinds": ["comm"], "black_box": False})
        optimizer.zero_grad()
        loss_of(model, 0).backward()
        with dist.distributed_c10d._coalescing_manager(async_ops=True) as held:
            dist.all_reduce(torch.full((2,), 3.0))
            dist.all_reduce(torch.full((5,), 4.0))
        held.wait()
        optimizer.step()
        monitor.detach()
    finally:
        dist.destroy_process_group()

    rows = {name.rpartition(":")[2]: row for name, row in Received(run, 0).rows[0].items()}
    assert {role: (int(row["count"]), float(row["mean"])) for role, row in rows.items()} == {
        "in.0": (2, 3.0), "in.1": (5, 4.0), "out.0": (2, 3.0), "out.1": (5, 4.0),
    }  # fmt: skip
