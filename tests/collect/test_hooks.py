"""What hooks see, and that nobody notices them."""

from __future__ import annotations

import copy
import functools
import io
import os
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import sentinel
from sentinel import native
from sentinel.collect.hooks import gradient_taps, module_hooks, root_hooks
from sentinel.collect.hooks.gradient_taps import hang
from sentinel.errors import ConfigError

from ..support.nets import Block, Recomputing, TinyModel, loss_of, tokens
from ..support.spools import ALL_KINDS, Said, norm
from ..support.training import train_steps


class Tangled(nn.Module):
    """A module that is called twice, one that writes in place, one that hands its input on, and one that gives a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))
        self.relu = nn.ReLU(inplace=True)
        self.same = nn.Identity()
        self.twice = nn.Linear(8, 8)
        self.rnn = nn.GRU(8, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.same(block(x))
        x = self.relu(self.twice(self.twice(x)))
        return self.rnn(x)[0]


@pytest.mark.parametrize("config", [{}, {"kinds": ALL_KINDS, "per_micro_step": True}], ids=["default", "all"])
def test_a_site_that_is_taken_again_makes_the_rows_of_the_first_time(
    run: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]
) -> None:
    rows, names = [], []
    taken: dict[str, list[bool]] = {"take_again": [], "take_gradient": []}

    def counted(way: str, *args: Any) -> bool:
        taken[way].append(getattr(native, way)(*args))
        return taken[way][-1]

    for name in ("short", "long"):
        for module, way in ((module_hooks, "take_again"), (root_hooks, "take_again"), (gradient_taps, "take_gradient")):
            monkeypatch.setattr(module, way, functools.partial(counted, way) if name == "short" else native.tensors.never)
        torch.manual_seed(0)
        model = Tangled()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        monitor = sentinel.attach(model, optimizer, {"run": name, "max_overhead": None, **config})
        for step in range(5):
            for micro_step in range(2):
                seen = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(2 * step + micro_step))
                seen[0, 0, 0] = torch.nan if step == 3 else 1.0
                model(seen.requires_grad_(micro_step == 1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        monitor.detach()
        said = Said(run.parent / name)
        rows.append({step: [row.tobytes() for _, row in found] for step, found in said.rows.items()})
        names.append([(t.kind, t.name, t.site_pos, t.border, t.consumers, t.also) for t in said.descriptor.tensors])

    assert native.tensor_reader is None or all(sum(found) >= 20 for found in taken.values())
    assert names[0] == names[1]
    assert rows[0] == rows[1]


def test_hooks_of_users_live_beside_ours() -> None:
    leaf, reported = torch.ones(3, requires_grad=True), []
    middle = leaf * 2
    first = middle.register_hook(lambda gradient: reported.append("first"))
    hang(middle, lambda gradient: reported.append("ours"))
    last = middle.register_hook(lambda gradient: reported.append("last"))
    first.remove()
    hang(middle, lambda gradient: reported.append("ours too"))
    scaled = middle.register_hook(lambda gradient: gradient * 10)

    middle.sum().backward()

    assert reported == ["ours", "last", "ours too"]
    assert leaf.grad is not None and leaf.grad.tolist() == [20.0] * 3
    last.remove()
    scaled.remove()


def test_wgrad_is_before_clipping(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer)
    truth, totals = [], []
    for step, clip in enumerate(
        [
            lambda ps: nn.utils.clip_grad_norm_(ps, 1e-3),
            lambda ps: nn.utils.clip_grads_with_norm_(ps, 1e-3, nn.utils.get_total_norm([p.grad for p in ps])),
            lambda ps: nn.utils.clip_grad_value_(ps, 1e-4),
            lambda ps: None,
        ]
    ):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        truth.append({n: float(p.grad.norm()) for n, p in model.named_parameters()})
        totals.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters()])))
        clip(list(model.parameters()))
        optimizer.step()
    monitor.detach()

    said = Said(run)

    for step in range(4):
        for name, expected in truth[step].items():
            (row,) = said.of(step, "wgrad", name)
            assert norm(row) == pytest.approx(expected, rel=1e-5), (step, name)
            assert not row["flags"] & 2
    assert said.ends[0].scalars["grad_norm"] == pytest.approx(totals[0], rel=1e-6)
    assert said.ends[1].scalars["grad_norm"] == pytest.approx(totals[1], rel=1e-6)


def test_gradient_that_something_else_touched_is_flagged(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if step == 1:
            model.head.weight.grad.mul_(0.5)
        optimizer.step()
    monitor.detach()

    said = Said(run)

    assert not any(row["flags"] & 2 for row in said.of(0, "wgrad"))
    touched = [t.name for t, row in said.rows[1] if t.kind == "wgrad" and row["flags"] & 2]
    assert touched == ["head.weight"]


def test_training_is_bit_identical(run: Path) -> None:
    torch.manual_seed(1)
    bare = TinyModel()
    watched = copy.deepcopy(bare)
    expected = train_steps(bare)

    monitor = sentinel.attach(watched, config={"kinds": ALL_KINDS})
    losses = train_steps(watched)
    monitor.detach()

    assert losses == expected
    for one, other in zip(bare.parameters(), watched.parameters(), strict=True):
        assert torch.equal(one, other)
    assert not Said(run).health


def test_the_default_device_is_the_trainers_own_affair(run: Path) -> None:
    """`torch.set_default_device("cuda")` is common; what Sentinel makes for the host must be made there. Here it is meta."""
    model, batch = TinyModel(), tokens(1)
    kinds = [*ALL_KINDS, "grad_momentum_alignment", "update", "saturation", "channel", "weight_spectrum"]
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    torch.set_default_device("meta")
    try:
        with sentinel.attach(model, optimizer, {"kinds": kinds}) as monitor:
            for _ in range(4):
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
                monitor.log(loss=loss)
                optimizer.zero_grad()
    finally:
        torch.set_default_device(None)
    said = Said(run)

    assert not said.health
    assert {t.kind for t, _ in said.rows[3]} >= {"param", "wgrad", "activation", "dgrad", "grad_momentum_alignment"}


def test_detach_restores_everything(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = [dict(vars(m)) for m in model.modules()]
    scaled = torch.nn.utils.clip_grad._clip_grads_with_norm_
    public = torch.nn.utils.clip_grads_with_norm_
    monitor = sentinel.attach(model, optimizer, {"kinds": ALL_KINDS})
    loss_of(model, 0).backward()
    optimizer.step()
    monitor.detach()

    assert all(not m._forward_hooks and not m._forward_pre_hooks and not m._backward_hooks for m in model.modules())
    assert [set(vars(m)) for m in model.modules()] == [set(names) for names in before]
    assert "zero_grad" not in vars(optimizer)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert torch.nn.utils.clip_grad._clip_grads_with_norm_ is scaled
    assert torch.nn.utils.clip_grads_with_norm_ is public
    monitor.detach()
    monitor.log(loss=1.0)


def test_eager_monitoring_that_is_off_has_no_hooks(run: Path) -> None:
    model = TinyModel()
    monitor = sentinel.attach(model, config={"black_box": False})

    hooked = {n for n, m in model.named_modules() if m._forward_hooks or m._forward_pre_hooks}

    assert hooked == {""}
    monitor.detach()


def test_hooks_never_raise_into_autograd(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = TinyModel()
    model = copy.deepcopy(bare)
    expected = train_steps(bare)
    monitor = sentinel.attach(model, config={"kinds": ALL_KINDS})
    measure = monitor.recorder.recording.kernel.measure

    def broken(tensors: Any, rows: Any, *args: Any, **kwargs: Any) -> None:
        if len(tensors) == 1 and tensors[0].shape[-1] == 16:
            raise RuntimeError("kernel on fire")
        measure(tensors, rows, *args, **kwargs)

    monkeypatch.setattr(type(monitor.recorder.recording.kernel), "measure", lambda self, *a, **k: broken(*a, **k))
    losses = train_steps(model)
    monitor.detach()

    said = Said(run)

    assert losses == expected
    assert [end.step for end in said.ends] == [0, 1, 2]
    assert {"blocks.0.fc1", "blocks.1.fc1"} <= {h.site for h in said.health if h.code == "hook_failed"}
    assert "kernel on fire" in said.health[0].message


def test_micro_step_survives_reverse_backward(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer, {"per_micro_step": True, "kinds": ALL_KINDS})
    truth = {}
    losses = [loss_of(model, seed) for seed in range(3)]
    for micro_step in (2, 0, 1):
        grads: list[torch.Tensor] = []
        handle = None
        (losses[micro_step] * (micro_step + 1.0)).backward()
        truth[micro_step] = grads
        del handle
    optimizer.step()
    monitor.detach()

    said = Said(run)
    dgrads = said.of(0, "dgrad", "blocks.0")
    outputs = said.of(0, "activation", "blocks.0")

    assert [int(row["micro_step"]) for row in dgrads] == [2, 0, 1]
    assert [int(row["micro_step"]) for row in outputs] == [0, 1, 2]


def test_micro_steps_fold_into_one_row(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen: list[torch.Tensor] = []
    model.blocks[0].register_forward_hook(lambda m, i, o: seen.append(o.detach().clone()))
    monitor = sentinel.attach(model, optimizer)
    for seed in range(3):
        loss_of(model, seed).backward()
    optimizer.step()
    monitor.detach()

    (row,) = Said(run).of(0, "activation", "blocks.0")
    whole = torch.stack(seen).double()

    assert row["num_folded"] == 3
    assert row["micro_step"] == -1
    assert row["count"] == whole.numel()
    assert row["mean"] == pytest.approx(float(whole.mean()), abs=1e-7)
    assert row["m2"] == pytest.approx(float(((whole - whole.mean()) ** 2).sum()), rel=1e-6)


def test_folded_row_names_the_first_bad_micro_step(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer)
    calls = [0]

    def plant(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        calls[0] += 1
        return output * float("nan") if calls[0] in (2, 3) else None

    model.blocks[1].fc1.register_forward_hook(plant)
    for seed in range(4):
        loss_of(model, seed).backward()
    optimizer.step()
    monitor.detach()

    said = Said(run)

    assert said.of(0, "activation", "blocks.0")[0]["bad_micro_step"] == -1
    assert said.of(0, "activation", "blocks.1")[0]["bad_micro_step"] == 1


@pytest.mark.parametrize("reentrant", [True, False])
def test_recompute_counted_once(run: Path, reentrant: bool) -> None:
    torch.manual_seed(3)
    plain = TinyModel(3)
    model = Recomputing(reentrant, 3)
    model.load_state_dict(plain.state_dict())
    config = {"kinds": ALL_KINDS, "per_micro_step": True}
    for one, name in ((plain, "plain"), (model, "recomputing")):
        monitor = sentinel.attach(one, config={**config, "run": name})
        train_steps(one)
        monitor.detach()

    expected, said = Said(run.parent / "plain"), Said(run.parent / "recomputing")

    assert [end.num_micro_steps for end in said.ends] == [2, 2, 2]
    for step in range(3):
        for kind in ("activation", "dgrad"):
            assert sorted(said.names(step, kind)) == sorted(expected.names(step, kind)), (step, kind)
            for name in ("blocks.1", "blocks.1.fc1", "blocks.2.ln"):
                mine, theirs = said.of(step, kind, name), expected.of(step, kind, name)
                assert [int(r["micro_step"]) for r in mine] == [int(r["micro_step"]) for r in theirs] == [0, 1]
                assert [norm(r) for r in mine] == pytest.approx([norm(r) for r in theirs], rel=1e-6)


def test_leaf_hooks_do_not_pile_up(run: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    received = torch.randn(3, 4, requires_grad=True)
    monitor = sentinel.attach(model, optimizer, {"per_micro_step": True})
    for step in range(10):
        optimizer.zero_grad()
        out = model(received)
        if step != 4:  # A forward whose backward never comes leaves nothing behind either.
            out.sum().backward()
        optimizer.step()
    monitor.detach()

    said = Said(run)

    assert not received._backward_hooks
    assert [len(said.of(step, "dgrad_in", "")) for step in (3, 5, 9)] == [1, 1, 1]


def test_tied_tensors_counted_once(run: Path) -> None:
    model = TinyModel()
    model.head.weight = model.emb.weight
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer)
    loss_of(model, 0).backward()
    optimizer.step()
    monitor.detach()

    said = Said(run)

    assert said.names(0, "param").count("emb.weight") == 1
    assert "head.weight" not in said.names(0, "param")


def test_parameter_that_stopped_receiving_gradients_is_not_written_again(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer)
    for step in range(3):
        for name, p in model.named_parameters():
            if name != "emb.weight":
                p.grad = None  # The user clears all but one by hand.
        if step == 1:
            model.emb.weight.requires_grad_(False)
        loss_of(model, step).backward()
        optimizer.step()
    monitor.detach()

    said = Said(run)

    assert [said.names(step, "wgrad").count("emb.weight") for step in range(3)] == [1, 0, 0]
    assert [said.names(step, "wgrad").count("head.weight") for step in range(3)] == [1, 1, 1]


class Pair(NamedTuple):
    hidden: torch.Tensor
    extra: torch.Tensor | None


class Nested(nn.Module):
    """Returns what real models return."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> dict[str, Any]:
        return {"pair": Pair(self.a(x), None), "logits": [self.b(x), (x * 2, None)], "nothing": None}


def test_nested_outputs_and_none(run: Path) -> None:
    model = Nested()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer, {"kinds": ALL_KINDS})
    mask = torch.full((3, 4), float("-inf"))
    out = model(torch.randn(3, 4), mask=mask)
    (out["pair"].hidden.sum() + out["logits"][0].sum() + out["logits"][1][0].sum()).backward()
    optimizer.step()
    monitor.detach()

    said = Said(run)

    assert not any(row["num_nan"] or row["num_neg_inf"] for _, row in said.rows[0])
    assert set(said.names(0, "activation")) == {"a", "b", ":logits.1.0"}
    assert said.tensor("activation", "b").also == (":logits.0",)
    assert not said.health


def test_inplace_operation_after_a_module_is_fine(run: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    bare = copy.deepcopy(model)
    x = torch.randn(5, 4)
    bare(x).sum().backward()
    monitor = sentinel.attach(model, config={"kinds": ALL_KINDS})
    model(x).sum().backward()
    monitor.detach()

    said = Said(run)

    assert torch.equal(model[0].weight.grad, bare[0].weight.grad)
    assert said.of(0, "activation", "1")[0]["min"] >= 0
    assert said.of(0, "activation", "0")[0]["min"] < 0


def test_hooks_of_the_user_that_come_later_are_seen(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer, {"kinds": ALL_KINDS})
    model.blocks[0].fc1.register_forward_hook(lambda m, i, o: o + float("inf"))
    loss_of(model, 0)
    monitor.detach()

    said = Said(run)

    assert said.of(0, "activation", "blocks.0.ln")[0]["num_pos_inf"] == 0
    assert said.of(0, "activation", "blocks.0.fc1")[0]["num_pos_inf"] > 0


def test_shared_tensor_is_measured_once_and_named_twice(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer, {"kinds": ALL_KINDS})
    loss_of(model, 0).backward()
    optimizer.step()
    monitor.detach()

    said = Said(run)

    assert said.tensor("dgrad", "blocks.0").consumers == ("blocks.1", "blocks.1.ln")
    assert said.names(0, "activation_in") == ["blocks.0.fc2", "blocks.1.fc2"]  # relu is no module
    assert said.tensor("activation", "head").also == ("",)


def test_borders_and_segments(run: Path) -> None:
    model = TinyModel(3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer)
    loss_of(model, 0).backward()
    optimizer.step()
    monitor.detach()

    said = Said(run)
    assert said.descriptor is not None
    (chunk,) = said.descriptor.chunks
    borders = {(t.kind, t.border_index): t.border for t in said.descriptor.tensors if t.border}

    assert chunk.segments == ("stem", "blocks.0", "blocks.1", "blocks.2", "head")
    assert [borders["activation", at] for at in (2, 3, 4, 5)] == ["block_output"] * 3 + ["chunk_output"]
    assert borders["activation_in", 1] == borders["dgrad_in", 1] == "block_input"
    assert [borders["dgrad", at] for at in (2, 3, 4, 5)] == ["block_output"] * 3 + ["chunk_output"]


@pytest.mark.parametrize("how", ["modulelist", "sequential", "attributes", "moduledict", "namespace"])
def test_blocks_are_found_by_structure(how: str) -> None:
    from sentinel.collect.hooks.structure import find_blocks

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tok, self.pos = nn.Embedding(1000, 8), nn.Embedding(1000, 8)
            if how == "modulelist":
                self.h = nn.ModuleList([Block(8), Block(8)])
            elif how == "sequential":
                self.h = nn.Sequential(Block(8), Block(8))
            elif how == "moduledict":
                self.h = nn.ModuleDict({"0": Block(8), "1": Block(8)})
            elif how == "namespace":
                self.h = nn.ModuleDict({"wte": nn.Embedding(9, 8), "h": nn.ModuleList([Block(8), Block(8)])})
            else:
                self.h0, self.h1 = Block(8), Block(8)

    expected = {"attributes": ["h0", "h1"], "namespace": ["h.h.0", "h.h.1"]}.get(how, ["h.0", "h.1"])

    assert find_blocks(Model()) == [expected]


def test_targets_do_not_match_by_prefix(run: Path) -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4) for _ in range(12)])})

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model["layers"]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    chain = Chain()
    optimizer = torch.optim.SGD(chain.parameters(), 0.1)
    monitor = sentinel.attach(chain, optimizer, {"black_box": False})
    monitor.enable(["activation"], targets=["layers.1"])
    chain(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    monitor.detach()

    assert Said(run).names(0, "activation") == ["layers.1"]


def test_enable_for_steps_ends_by_itself(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer)
    for step in range(5):
        if step == 2:
            monitor.enable(["activation", "dgrad"], for_steps=2)
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    monitor.detach()

    said = Said(run)

    assert [bool(said.of(step, "activation", "blocks.0.fc1")) for step in range(5)] == [False, False, True, True, False]
    assert [bool(said.of(step, "dgrad", "blocks.0.fc1")) for step in range(5)] == [False, False, True, True, False]


def test_copies_and_pickles_of_a_watched_model_are_free(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer, {"kinds": ALL_KINDS, "per_micro_step": True})
    loss_of(model, 0).backward()
    average = copy.deepcopy(model)
    loss_of(average, 1).backward()
    average.zero_grad()
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    loaded = torch.load(stored, weights_only=False)
    loss_of(loaded, 1).backward()
    pickle.loads(pickle.dumps(model)).zero_grad()
    optimizer.step()
    monitor.detach()

    said = Said(run)

    assert all(p.grad is None for p in average.parameters())
    assert model.head.weight.grad is not None
    assert said.ends[0].num_micro_steps == 1
    assert not said.health


def test_attach_twice_counts_once(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer)
    again = sentinel.attach(model, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    again.detach()

    assert again is not monitor and not monitor.is_alive, "the second takes the place of the first"
    assert [end.step for end in Said(run).ends] == [0, 1, 2]


def test_model_without_parameters(run: Path) -> None:
    model = nn.Identity()
    monitor = sentinel.attach(model)
    for _ in range(3):
        model(torch.randn(2, 2))
        monitor.log(loss=1.0)
        monitor.step()
    monitor.detach()

    assert [end.scalars["loss"] for end in Said(run).ends] == [1.0] * 3


def test_disabled_attach_does_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SENTINEL_DISABLE", "1")
    model = TinyModel()
    monitor = sentinel.attach(model)
    train_steps(model)
    monitor.log(loss=1.0)
    monitor.enable(["activation"])
    monitor.detach()

    assert not run.exists()
    assert not any(m._forward_hooks for m in model.modules())


def test_directory_that_others_may_write_is_taken_from_them(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    run.mkdir()
    run.chmod(0o777)
    model = TinyModel()
    monitor = sentinel.attach(model)
    losses = train_steps(model)
    monitor.detach()

    assert len(losses) == 6
    assert "others could write it" in caplog.text
    assert run.stat().st_mode & 0o777 == 0o755
    assert [end.step for end in Said(run).ends] == [0, 1, 2]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"kindz": ["param"]}, 'unknown key "kindz"; did you mean "kinds"?'),
        ({"kinds": ["activations"]}, "unknown kind 'activations'; did you mean \"activation\"?"),
        ({"step_interval": 0}, "step_interval must be at least 1, got 0"),
        ({"black_box": "yes"}, "black_box"),
        ({"spool": {"max_bytes": 3}}, "spool"),
        (42, "config must be a mapping"),
    ],
)
def test_config_errors_say_where_and_what(run: Path, config: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        sentinel.attach(TinyModel(), config=config)

    assert message in str(error.value)


def test_attach_to_nonsense(run: Path) -> None:
    with pytest.raises(ConfigError, match="model must be"):
        sentinel.attach("model")
    with pytest.raises(ConfigError, match="optimizer must have a step method"):
        sentinel.attach(TinyModel(), "adam")


def test_forked_child_is_disarmed(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer)
    loss_of(model, 0).backward()
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # As a data-loader worker does: OpenMP's threads did not survive the fork.
        loss_of(model, 1)
        monitor.log(loss=2.0)
        monitor.detach()
        os._exit(int(monitor.is_alive))
    _, status = os.waitpid(child, 0)
    optimizer.step()
    monitor.detach()

    said = Said(run)

    assert os.waitstatus_to_exitcode(status) == 0
    assert [(end.step, end.num_micro_steps) for end in said.ends] == [(0, 1)]
    assert len(said.byes) == 1


def test_site_seen_late_has_its_place_between_the_others(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer, {"kinds": ALL_KINDS})
    strikes = [False]
    # Usually the block hands its input's sum on; once its output is changed behind the head's back.
    model.head.register_forward_hook(lambda m, i, o: o * float("nan") if strikes[0] else None)
    model.norm.register_forward_pre_hook(lambda m, i: (i[0] * 1.0,) if strikes[0] else None)
    for step in range(3):
        strikes[0] = step == 2
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    monitor.detach()

    said = Said(run)
    places = [
        {(t.kind, t.name): int(row["site_pos"]) for t, row in said.rows[step] if "activation" in t.kind} for step in (1, 2)
    ]
    new = set(places[1]) - set(places[0])

    assert new == {("activation_in", "norm")}
    assert all(places[1][site] == at for site, at in places[0].items() if site in places[1])
    late = places[1]["activation_in", "norm"]
    assert places[1]["activation", "blocks.1"] < late < places[1]["activation", "norm"] < places[1]["activation", "head"]


def test_attach_that_fails_leaves_the_model_as_it_was(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def explode(self: Any) -> None:
        raise TypeError("no such thing")

    monkeypatch.setattr("sentinel.collect.hooks.clipping.ClipWatch.install", explode)
    monitor = sentinel.attach(model, optimizer)
    losses = train_steps(model)

    assert len(losses) == 6
    assert not monitor.is_alive
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert "zero_grad" not in vars(optimizer)
