"""Traces: pictures of the tensors that a command chooses, in a ring of files, without any trace in the training."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import sentinel
from sentinel.collect.probes import compression, tensor_trace, trace_writer
from sentinel.control.commands import RunCommands
from sentinel.errors import ConfigError, WireError
from sentinel.trace import AS_TILES, SIZES, Compressor, Trace, TracedStep, check_compressor, read_trace, trace_paths

from ...support.spools import Said
from ...support.waiting import wait_for

ALLOWED = {"kinds": [], "allow_commands": ["TraceTensors", "DisableMonitoring"]}


class Attentive(torch.nn.Module):
    """Tokens, one block of attention, logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 32)
        self.attn = torch.nn.MultiheadAttention(32, 4, batch_first=True)
        self.mlp = torch.nn.Linear(32, 64)
        self.head = torch.nn.Linear(64, 50)
        self.drop = torch.nn.Dropout(0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        x = x + self.attn(x, x, x, attn_mask=mask, need_weights=False)[0]
        return self.head(self.drop(torch.relu(self.mlp(x))))


class Training:
    """A tiny run on tokens; `watched` modules' outputs are kept as they were."""

    def __init__(self, config: dict[str, Any] | None, extra: int = 0) -> None:
        """extra: so many linear modules besides, of 640 KB each, which nobody calls."""
        torch.manual_seed(0)
        self.model = Attentive()
        self.model.extra = torch.nn.ModuleList(torch.nn.Linear(400, 400) for _ in range(extra))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.01)
        self.monitor = None if config is None else sentinel.attach(self.model, self.optimizer, config)
        self.losses: list[float] = []
        self.shown: dict[str, list[torch.Tensor]] = {"mlp": [], "head": [], "tokens": []}
        for name in ("mlp", "head"):
            module = self.model.get_submodule(name)
            module.register_forward_hook(lambda m, a, out, name=name: self.shown[name].append(out.detach().clone()))

    def steps(self, number: int) -> Training:
        for _ in range(number):
            tokens = torch.randint(50, (3, 24), generator=torch.Generator().manual_seed(len(self.losses)))
            self.shown["tokens"].append(tokens)
            logits = self.model(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.losses.append(float(loss.detach()))
        return self

    def end(self) -> None:
        assert self.monitor is not None
        self.monitor.detach()


def order(run: Path, trace: Trace = AS_TILES, **changes: Any) -> str:
    return RunCommands(run).trace_tensors(**{"at_step": 2, "for_steps": 3, "trace": trace, "now": 1.0, **changes}).id


def answered(run: Path) -> None:
    """Wait until the rank has said what becomes of the order; its writer looks for commands by itself."""
    wait_for(lambda: run.exists() and Said(run).acks, "an answer")


def traced(run: Path, trace: Trace = AS_TILES, config: dict[str, Any] | None = None, **changes: Any) -> list[TracedStep]:
    """Train 7 steps with an order for three of them."""
    training = Training(ALLOWED | (config or {})).steps(1)
    order(run, trace, **changes)
    answered(run)
    training.steps(6)
    training.end()
    traced.training = training  # type: ignore[attr-defined]
    return [read_trace(one.path) for one in trace_paths(run)]


def test_what_is_shown_is_what_the_step_held(run: Path) -> None:
    found = traced(run, Trace(compressor=Compressor(name="none"), tokens=True), targets=("mlp", "head"), step_interval=2)

    shown = traced.training.shown  # type: ignore[attr-defined]
    assert [(one.head.step, one.head.rank) for one in found] == [(2, 0), (4, 0)]
    for step in found:
        assert set(step.tensors) == {"activation/mlp/0", "activation/head/0", "tokens//0"}
        for name in ("mlp", "head"):
            assert np.array_equal(step.tensors[f"activation/{name}/0"], shown[name][step.head.step].numpy())
        assert np.array_equal(step.tensors["tokens//0"], shown["tokens"][step.head.step][:, :-1].numpy())
        assert step.head.tensors["activation/mlp/0"].shape == (3, 23, 64)
        assert not step.head.left_out and step.head.num_dropped == 0
    assert not traced.training.monitor.recorder.recording.observers  # type: ignore[attr-defined]


def test_tokens_are_projected_onto_vectors_that_the_config_names(run: Path, tmp_path: Path) -> None:
    vectors = torch.eye(64)[:2].contiguous()
    save_file({"mine": vectors}, tmp_path / "own.safetensors")
    asked = Compressor(name="projection", vectors="mine")
    config = {"trace": {"vectors": {"mine": str(tmp_path / "own.safetensors")}}}

    found = traced(run, Trace(compressor=asked), config, targets=("mlp", "head"))

    shown = traced.training.shown  # type: ignore[attr-defined]
    assert [one.head.step for one in found] == [2, 3, 4]
    for step in found:
        plain = shown["mlp"][step.head.step].reshape(-1, 64)[:, :2].numpy()
        np.testing.assert_allclose(step.tensors["activation/mlp/0"], plain, rtol=1e-6)
        # The head has 50 numbers a token.
        [why] = step.head.left_out.values()
        assert set(step.head.tensors) == {"activation/mlp/0"} and "expected vectors of 50 numbers" in why and "got 64" in why


def test_training_does_not_notice(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit-identical, every compressor on, and the generators stand where they stood."""
    bare = Training(None).steps(7)
    bare_state = torch.get_rng_state()
    for name in SIZES:
        monkeypatch.setenv("SENTINEL_RUN", f"run-{name}")
        where = run.parent / f"run-{name}"
        found = traced(
            where, Trace(compressor=Compressor(name=name), tokens=True), kinds=("activation", "dgrad", "wgrad", "attention")
        )
        training = traced.training  # type: ignore[attr-defined]
        assert len(found) == 3
        assert training.losses == bare.losses
        assert torch.equal(torch.get_rng_state(), bare_state)
        for one, other in zip(training.model.parameters(), bare.model.parameters(), strict=True):
            assert torch.equal(one, other)


def test_what_attention_attends_to(run: Path) -> None:
    found = traced(run, Trace(compressor=Compressor(name="none")), kinds=("attention",), targets=("attn",))

    scores = found[0].tensors["attention/attn:scores/0"]
    assert scores.shape == (4, 23, 23)
    assert np.allclose(scores.sum(-1), 1.0, atol=1e-5)
    assert np.all(np.triu(scores, 1) == 0.0), "a query attends to what comes after it"
    assert np.all(scores[:, 0, 0] == 1.0)


def test_only_where_the_trainer_allows_it(run: Path) -> None:
    assert traced(run, config={"allow_commands": ["EnableMonitoring"]}) == []
    assert [(ack.state, "allow_commands" in ack.reason) for ack in Said(run).acks] == [("refused", True)]


@pytest.mark.parametrize(("asked", "says"), [
    ({"name": "tiles"}, "tile"), ({"size": 0}, "1 to 512"), ({"name": "pca", "size": 9}, "1 to 8"),
    ({"reduce": "median"}, "absmax"), ({"seed": -1}, "seed"),
])  # fmt: skip
def test_a_compressor_that_nobody_can_form_is_refused(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_compressor("compressor", Compressor(**asked))


def test_the_oldest_go_and_a_restart_goes_on_with_the_ring(run: Path, tmp_path: Path) -> None:
    writer = trace_writer.TraceWriter(tmp_path, 5000, lambda *said: pytest.fail(str(said)))
    for step in range(10):
        writer.thread.submit(step_trace(step))
        if step == 4:
            assert writer.thread.close(5.0)
            writer = trace_writer.TraceWriter(tmp_path, 5000, lambda *said: pytest.fail(str(said)))
    assert writer.thread.close(5.0)

    left = trace_paths(tmp_path)
    assert [one.step for one in left] == list(range(10 - len(left), 10)) and 2 <= len(left) <= 5
    assert sum(one.path.stat().st_size for one in left) <= 5000


def test_of_older_attempts_one_is_kept(tmp_path: Path) -> None:
    for attempt in range(4):
        writer = trace_writer.TraceWriter(tmp_path, 2**20, lambda *said: pytest.fail(str(said)))
        writer.thread.submit(step_trace(3, attempt))
        assert writer.thread.close(5.0)

    assert [one.attempt for one in trace_paths(tmp_path)] == [2, 3]


def step_trace(step: int, attempt: int = 0) -> trace_writer.StepTrace:
    head = trace_writer.TraceHead(run="r", attempt=attempt, rank=0, step=step, time=0.0)
    return trace_writer.StepTrace(head, {"x": torch.full((200,), float(step))}, [], 800)


def test_a_disk_that_hangs_drops_steps_and_counts_them(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, gate = trace_writer.write_tensors, []

    def slow(*args: Any) -> int:
        while not gate:
            time.sleep(0.005)
        return write(*args)

    monkeypatch.setattr(trace_writer, "write_tensors", slow)
    training = Training(ALLOWED | {"trace": {"in_flight_bytes": 2**20}}).steps(1)
    order(run, Trace(compressor=Compressor(name="none")), for_steps=10_000)
    answered(run)
    training.steps(59)
    assert not list(run.rglob("*.safetensors"))  # Training went on; the disk has taken nothing yet.
    gate.append(1)

    def is_through() -> bool:
        """Whether the step before the last gets to the disk: the last ends when the next one begins."""
        training.steps(1)
        time.sleep(0.05)
        return len(training.losses) - 2 in [one.step for one in trace_paths(run)]

    wait_for(is_through)
    training.end()

    last = read_trace(trace_paths(run)[-1].path).head
    assert 0 < last.num_dropped < 60
    assert len(trace_paths(run)) + last.num_dropped == last.step - 1


def test_a_step_that_is_larger_than_memory_allows_shows_what_fits_and_names_the_rest(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_trace, "MOST_NAMED", 3)
    training = Training(ALLOWED | {"trace": {"in_flight_bytes": 2**20}}, extra=4).steps(1)
    order(run, Trace(compressor=Compressor(name="none")), kinds=("param",), for_steps=1)
    answered(run)
    training.steps(3).end()

    [step] = [read_trace(one.path) for one in trace_paths(run)]
    num_bytes = sum(one.nbytes for one in step.tensors.values())
    assert 0 < num_bytes <= 2**20 and step.head.num_dropped == 0 and step.tensors
    *named, (others, rest) = step.head.left_out.items()
    assert len(named) == 3 and all("in_flight_bytes" in why for _, why in named)
    num_params = len(list(training.model.parameters()))
    assert (others, rest) == ("others", f"{num_params - len(step.tensors) - 3} more tensors are not shown")


def test_torn_and_foreign_files_are_told(run: Path) -> None:
    traced(run)
    path = trace_paths(run)[0].path
    whole = path.read_bytes()
    for cut in (0, 7, 60, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(WireError, match=path.name):
            read_trace(path)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        read_trace(path)


# -- compressors, each against a slow reading ---------------------------------------------------------------------------


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("reduce", ["mean", "max", "min", "absmax"])
@pytest.mark.parametrize("shape", [(7, 10), (2, 5, 9), (2, 3, 100, 97), (11,), (), (40, 3, 3)])
def test_tiles(reduce: str, shape: tuple[int, ...]) -> None:
    x = drawn(*shape)
    x.view(-1)[:1] = torch.nan

    found = compression.compressed(x, Compressor(name="tile", size=4, reduce=reduce))[""].numpy()

    plain = x.numpy().reshape((-1, *x.shape[-2:]) if x.dim() > 2 else (1, *(1,) * (2 - x.dim()), *x.shape))[:16]
    how = {"mean": np.mean, "max": np.max, "min": np.min, "absmax": lambda part: np.max(np.abs(part))}[reduce]
    rows, columns = (-(-size // min(4, size)) for size in plain.shape[1:])
    expected = [
        [
            [how(one[r : r + rows, c : c + columns]) for c in range(0, one.shape[1], columns)]
            for r in range(0, one.shape[0], rows)
        ]
        for one in plain
    ]
    assert np.allclose(found, expected, atol=1e-6, equal_nan=True)
    assert np.isnan(found).sum() == 1, "one NaN is one tile"


def test_projections_are_the_same_everywhere() -> None:
    x = drawn(2, 6, 32).bfloat16()
    one, other = (compression.compressed(x, Compressor(name="projection", size=5, seed=seed))[""] for seed in (3, 4))

    directions = compression._directions(32, 5, 3, torch.device("cpu"))
    assert torch.allclose(directions.norm(dim=0), torch.ones(5))
    assert torch.allclose(one, x.float().reshape(12, 32) @ directions)
    assert not torch.allclose(one, other)


def test_principal_components() -> None:
    x = drawn(200, 16) * torch.linspace(4, 0.1, 16)
    found = compression.compressed(x, Compressor(name="pca", size=2))[""].double()

    away = (x - x.mean(0)).double()
    _, _, axes = torch.linalg.svd(away, full_matrices=False)
    expected = away @ axes[:2].T
    assert found.shape == (200, 2)
    for at in range(2):
        cosine = (found[:, at] @ expected[:, at]) / found[:, at].norm() / expected[:, at].norm()
        assert abs(cosine) > 0.95
    assert (found.square().sum(0) > 0.95 * expected.square().sum(0)).all()


def test_the_largest_and_their_probabilities() -> None:
    x = drawn(2, 5, 30)
    parts = compression.compressed(x, Compressor(name="top_k", size=3, softmax=True))

    probabilities = x.reshape(10, 30).softmax(-1)
    assert torch.allclose(parts[""], probabilities.gather(1, parts["indices"].long()))
    assert torch.equal(parts["indices"].long(), probabilities.topk(3).indices)


def test_a_histogram_counts_what_is_not_finite_apart() -> None:
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, *drawn(1000).tolist()])
    parts = compression.compressed(x, Compressor(name="histogram", size=10))

    expected, _ = np.histogram(x[3:].numpy(), 10)
    assert np.abs(parts[""].numpy() - expected).sum() <= 2  # An edge in fp32.
    assert parts[""].sum() == 1000 and parts["nonfinite"].tolist() == [1, 1, 1]
    assert parts["range"].tolist() == [x[3:].min(), x[3:].max()]
    same = compression.compressed(torch.full((8,), 2.0), Compressor(name="histogram"))
    assert same[""].sum() == 8 and same["range"].tolist() == [2.0, 2.0]
    none = compression.compressed(torch.full((8,), torch.nan), Compressor(name="histogram"))
    assert none[""].sum() == 0 and none["nonfinite"].tolist() == [8, 0, 0]


def test_what_has_no_picture_says_why() -> None:
    for x, name, says in (
        (torch.empty(0), "tile", "no elements"), (torch.tensor(1.0), "pca", "tokens by channels"),
        (torch.tensor(1.0), "top_k", "last dimension"), (torch.zeros(2**21), "none", "more than"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=says):
            compression.compressed(x, Compressor(name=name))
