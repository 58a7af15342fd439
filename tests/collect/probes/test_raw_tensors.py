"""Raw tensors on their way to the disk: what is dumped, when, how much, and that training does not notice."""

from __future__ import annotations

import errno
import os
import stat
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

import sentinel
from sentinel.cli.main import run_cli
from sentinel.collect.probes import copy_thread, dump_writer
from sentinel.control.commands import RunCommands
from sentinel.dump import HEAD_KEY, DumpHead, dump_path
from sentinel.errors import ConfigError, WireError
from sentinel.monitor_config import load_config
from sentinel.tensor_file import read_tensor_file

from ...layouts.builds import fsdp1, fsdp2, one, pipeline, tp
from ...layouts.layout import Trainer, train_ranks
from ...support.nets import TinyModel, loss_of
from ...support.spools import Said


class Training:
    """A tiny run of its own, step by step; what each step really held is kept."""

    def __init__(self, config: dict[str, Any] | None, num_micro_steps: int = 1, extra: int = 0) -> None:
        torch.manual_seed(0)
        self.model = TinyModel()
        if extra:
            self.model.extra = torch.nn.Linear(extra, extra)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.1)
        self.monitor = None if config is None else sentinel.attach(self.model, self.optimizer, config)
        self.num_micro_steps = num_micro_steps
        self.params: list[dict[str, torch.Tensor]] = []
        self.grads: list[dict[str, torch.Tensor]] = []
        self.losses: list[float] = []
        self.heads: list[list[torch.Tensor]] = []

    def steps(self, number: int) -> Training:
        for _ in range(number):
            step = len(self.losses)
            self.optimizer.zero_grad()
            self.params.append({name: p.detach().clone() for name, p in self.model.named_parameters()})
            seen: list[torch.Tensor] = []
            handle = self.model.head.register_forward_hook(lambda m, a, out, seen=seen: seen.append(out.detach().clone()))
            for micro in range(self.num_micro_steps):
                loss = loss_of(self.model, 10 * step + micro)
                loss.backward()
            handle.remove()
            self.heads.append(seen)
            self.grads.append({name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None})
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)
            self.optimizer.step()
            self.losses.append(float(loss))
        return self

    def end(self) -> None:
        assert self.monitor is not None
        self.monitor.detach()


def head_of(path: Path) -> DumpHead:
    return msgspec.json.decode(read_tensor_file(path).metadata[HEAD_KEY], type=DumpHead)


def dumped(run: Path) -> list[int]:
    return sorted(int(path.parent.name[4:]) for path in run.glob("dumps/attempt0/step*/rank0.safetensors"))


def test_what_is_written_is_what_the_step_held(run: Path) -> None:
    kinds = ["param", "wgrad", "activation", "exp_avg"]
    training = Training({"kinds": [], "dump": {"kinds": kinds, "start_step": 1, "end_step": 2}}, 2).steps(4)
    training.end()

    assert dumped(run) == [1, 2]
    for step in (1, 2):
        path = dump_path(run, 0, step, 0)
        tensors = load_file(path)
        for name, param in training.params[step].items():
            assert torch.equal(tensors[f"param/{name}"], param)
            assert torch.equal(tensors[f"wgrad/{name}"], training.grads[step][name])  # Before clipping.
            assert f"exp_avg/{name}" in tensors
        for micro, output in enumerate(training.heads[step]):
            assert torch.equal(tensors[f"activation/head/{micro}"], output)
        head = head_of(path)
        assert (head.step, head.rank, head.attempt, head.first_n, head.left_out) == (step, 0, 0, None, {})
        assert head.pieces["wgrad/head.weight"].shape == (11, 8)
        assert head.pieces["wgrad/head.weight"].start == (0, 0)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert all(stat.S_IMODE(folder.stat().st_mode) == 0o700 for folder in list(path.parents)[:3])
    said = Said(run)
    assert not said.health
    # A dumped tensor is a measured one: the row beside it agrees.
    row = said.of(1, "wgrad", "head.weight")[0]
    assert float(row["max"]) == pytest.approx(float(training.grads[1]["head.weight"].max()))
    assert not said.of(3, "wgrad") and not said.of(0, "wgrad")


def test_training_does_not_notice(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = Training(None, 2).steps(4)
    kinds = ["param", "wgrad", "activation", "dgrad", "exp_avg"]

    watched = Training({"dump": {"kinds": kinds}}, 2).steps(4)
    watched.end()

    assert len(dumped(run)) == 4
    assert watched.losses == bare.losses
    assert all(torch.equal(a, b) for a, b in zip(watched.model.parameters(), bare.model.parameters(), strict=True))


def test_schedule_targets_and_corners(run: Path) -> None:
    dump = {"kinds": "wgrad", "targets": "blocks.1", "start_step": 1, "step_interval": 2, "end_step": 4, "first_n": 3}
    training = Training({"kinds": [], "dump": dump}).steps(6)
    training.end()

    assert dumped(run) == [1, 3]
    tensors = load_file(dump_path(run, 0, 3, 0))
    assert set(tensors) == {f"wgrad/{name}" for name in training.grads[3] if name.startswith("blocks.1.")}
    assert torch.equal(tensors["wgrad/blocks.1.fc1.weight"], training.grads[3]["blocks.1.fc1.weight"][:3, :3])
    piece = head_of(dump_path(run, 0, 3, 0)).pieces["wgrad/blocks.1.fc1.weight"]
    assert (piece.shape, piece.start) == ((3, 3), (0, 0))


@pytest.mark.parametrize(
    ("dump", "says"),
    [
        ({"kinds": ["wgrads"]}, "dump.kinds[0]"),
        ({"start_step": -1}, "dump.start_step must be at least 0, got -1"),
        ({"start_step": 5, "end_step": 4}, "dump.end_step must be at least dump.start_step (5), got 4"),
        ({"step_interval": 0}, "dump.step_interval must be at least 1, got 0"),
        ({"first_n": 0}, "dump.first_n must be at least 1, got 0"),
        ({"quota_bytes": -1}, "dump.quota_bytes must be at least 0, got -1"),
        ({"targets": ["re:("]}, "dump.targets[0]"),
        ({"quota": 1}, "dump"),
    ],
)
def test_nonsensical_settings_are_refused(dump: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config({"dump": dump})

    assert says in str(refused.value)


def test_past_the_quota_a_step_is_not_dumped_at_all(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training({"dump": {"kinds": ["param"]}}).steps(2)
    training.end()
    used = sum(path.stat().st_size for path in run.rglob("*.safetensors"))
    files = set(run.rglob("dumps/**/*"))

    # Another attempt of the same run: what lies there counts.
    again = Training({"dump": {"kinds": ["param"], "quota_bytes": used + 100}}).steps(3)
    again.end()

    assert set(run.rglob("dumps/**/*")) == files  # Nothing half-written either.
    assert dumped(run) == [0, 1]
    assert "dump_quota" in [one.code for one in Said(run).health]


def test_a_full_disk_is_said(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(dump_writer, "write_tensors", full)
    training = Training({"dump": {"kinds": ["param"]}}).steps(3)
    training.end()

    assert "disk_full" in [one.code for one in Said(run).health]
    assert len(training.losses) == 3


def test_a_slow_disk_holds_up_nobody(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect 28 in its kind: training never waits for whoever takes its tensors."""
    write, gate = dump_writer.write_tensors, []

    def slow(*args: Any) -> int:
        while not gate:
            time.sleep(0.005)
        return write(*args)

    monkeypatch.setattr(dump_writer, "write_tensors", slow)
    close = copy_thread.CopyThread.close
    monkeypatch.setattr(copy_thread.CopyThread, "close", lambda self, timeout_s: gate.append(1) or close(self, timeout_s))
    training = Training({"dump": {"kinds": ["param"], "in_flight_bytes": 2**20}}, extra=400).steps(4)

    assert len(training.losses) == 4  # The disk has taken nothing yet.
    assert not list(run.rglob("*.safetensors"))
    training.end()

    whole, *_, last = (head_of(path) for path in sorted(run.glob("dumps/attempt0/*/rank0.safetensors")))
    assert not whole.left_out
    assert "in_flight_bytes" in last.left_out["param/extra.weight"]
    assert "dump_incomplete" in [one.code for one in Said(run).health]


def order(run: Path, **changes: Any) -> str:
    asked = {"at_step": 2, "kinds": ("wgrad",), "for_steps": 3, "step_interval": 2, "first_n": 2, "now": 1.0, **changes}
    return RunCommands(run).dump_tensors(**asked).id


def answers(run: Path) -> list[tuple[str, str]]:
    return [(ack.state, ack.reason) for ack in Said(run).acks]


@pytest.mark.parametrize("is_allowed", [False, True])
def test_a_command_dumps_only_where_the_trainer_allows_it(run: Path, is_allowed: bool) -> None:
    allowed = {"allow_commands": ["DumpTensors"]} if is_allowed else {}
    training = Training({"kinds": [], **allowed}).steps(1)
    command = order(run)
    time.sleep(0.3)  # The writer looks for commands by itself.
    training.steps(7)
    training.end()

    assert dumped(run) == ([2, 4] if is_allowed else [])
    states = [state for state, _ in answers(run)]
    assert states == (["armed", "applied", "ended"] if is_allowed else ["refused"])
    if is_allowed:
        assert head_of(dump_path(run, 0, 2, 0)).commands == (command,)
        assert load_file(dump_path(run, 0, 2, 0))["wgrad/head.weight"].shape == (2, 2)
        assert not training.monitor.recorder.recording.observers  # type: ignore[union-attr]
    else:
        assert "allow_commands" in answers(run)[0][1]


def test_what_nobody_shows_is_said(run: Path) -> None:
    training = Training({"kinds": [], "dump": {"kinds": ["exp_avg", "router", "param"]}}).steps(2)
    training.end()

    assert {one.site for one in Said(run).health if one.code == "dump_empty"} == {"router"}
    assert "exp_avg/head.weight" in load_file(dump_path(run, 0, 0, 0))


def test_off_costs_nothing(run: Path) -> None:
    training = Training({"kinds": ["wgrad"]}).steps(1)

    assert not training.monitor.recorder.recording.observers  # type: ignore[union-attr]
    training.end()
    assert not (run / "dumps").exists()


def test_before_and_after_its_steps_nobody_looks(run: Path) -> None:
    training = Training({"kinds": ["wgrad"], "dump": {"kinds": ["param"], "start_step": 2, "end_step": 2}})
    looking = []
    for _ in range(4):
        training.steps(1)
        looking.append(len(training.monitor.recorder.recording.observers))  # type: ignore[union-attr]
    training.end()

    assert looking == [0, 0, 1, 0]
    assert dumped(run) == [2]


def test_torn_and_foreign_files_are_told(tmp_path: Path) -> None:
    for name, data in (("short", b"abc"), ("long", b"\xff" * 64), ("text", (5).to_bytes(8, "little") + b"hello")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(WireError, match=name):
            read_tensor_file(tmp_path / name)


# -- several ranks, joined -----------------------------------------------------------------------------------------------

DUMP = {"kinds": [], "dump": {"kinds": ["param", "wgrad", "exp_avg"], "start_step": 1, "end_step": 1}}


def keeping(build: Any) -> Trainer:
    """The same training, which also keeps the whole tensors as torch itself gathers them."""
    trainer: Trainer = build()
    inner = trainer.train_step

    def train_step(step: int) -> Any:
        if step == 1:
            whole = {}
            for at, model in enumerate(trainer.models):
                for name, param in model.named_parameters():
                    full = param.full_tensor() if hasattr(param, "full_tensor") else param
                    whole[f"{at}/{name}"] = full.detach().clone()
            rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
            torch.save(whole, Path(os.environ["SENTINEL_DIR"]) / f"whole-{rank}.pt")
        return inner(step)

    trainer.train_step = train_step
    return trainer


def exported(folder: Path, *more: str) -> tuple[int, dict[str, torch.Tensor]]:
    code = run_cli(["export", str(folder / "run"), "--format", "tensors", "-o", str(folder / "whole"), *more])
    path = folder / "whole" / "step1.safetensors"
    return code, load_file(path) if path.exists() else {}


@pytest.mark.parametrize(
    ("build", "world"),
    [(fsdp2, 3), pytest.param(tp, 2, marks=pytest.mark.long), pytest.param(partial(tp, 2, True), 4, marks=pytest.mark.long)],
    ids=["fsdp2", "tp", "tp_fsdp2"],
)
def test_shards_join_to_the_whole(build: Any, world: int, tmp_path: Path) -> None:
    """Defect 12 in its kind: what every rank wrote is there. Three ranks cut unevenly, some get nothing."""
    train_ranks(tmp_path, partial(keeping, build), world, config=DUMP, num_steps=3)

    code, whole = exported(tmp_path)

    assert code == 0
    truth = {name[2:]: tensor for name, tensor in torch.load(tmp_path / "whole-0.pt").items()}
    assert {name for name in whole if name.startswith("param/")} == {f"param/{name}" for name in truth}
    for name, tensor in truth.items():
        assert torch.equal(whole[f"param/{name}"], tensor), name
        assert whole[f"wgrad/{name}"].shape == tensor.shape
        assert whole[f"exp_avg/{name}"].shape == tensor.shape


@pytest.mark.parametrize("build", [fsdp1, partial(pipeline, "Schedule1F1B")], ids=["fsdp1", "pipeline"])
def test_other_layouts_join_to_what_one_process_has(build: Any, tmp_path: Path) -> None:
    train_ranks(tmp_path / "many", build, 2, config=DUMP, num_steps=2)
    train_ranks(tmp_path / "single", one, 1, config=DUMP, num_steps=2)

    code, whole = exported(tmp_path / "many")
    alone, truth = exported(tmp_path / "single")

    assert (code, alone) == (0, 0)
    assert set(whole) == set(truth)
    for name, tensor in truth.items():
        torch.testing.assert_close(whole[name], tensor, rtol=2e-3, atol=2e-5)


def test_a_missing_rank_is_told_and_nothing_is_invented(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_ranks(tmp_path, fsdp2, 2, config=DUMP, num_steps=2)
    dump_path(tmp_path / "run", 0, 1, 1).unlink()

    code, whole = exported(tmp_path)

    assert code == 1
    said = capsys.readouterr().err
    assert "nothing of ranks 1" in said and "missing ranks: 1" in said
    assert not any("weight" in name and tensor.dim() == 2 for name, tensor in whole.items())


def test_copies_that_differ_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_ranks(tmp_path, ddp_like, 2, config=DUMP, num_steps=2)
    assert exported(tmp_path)[0] == 0
    path = dump_path(tmp_path / "run", 0, 1, 1)
    stored = read_tensor_file(path).tensors["param/head.weight"]
    data = bytearray(path.read_bytes())
    data[stored.begin] ^= 1
    path.write_bytes(data)
    (tmp_path / "whole" / "step1.safetensors").unlink()

    code, whole = exported(tmp_path)

    assert code == 1
    assert "param/head.weight: the copies of rank 0 and rank 1 differ" in capsys.readouterr().err
    assert "param/head.weight" in whole


def ddp_like() -> Trainer:
    from ...layouts.builds import ddp

    return ddp()


def test_what_is_each_ranks_own_stands_by_itself(tmp_path: Path) -> None:
    config = {"kinds": [], "dump": {"kinds": ["activation"], "start_step": 1, "end_step": 1, "targets": ["head"]}}
    train_ranks(tmp_path, ddp_like, 2, config=config, num_steps=2)

    code, whole = exported(tmp_path)

    assert code == 0
    assert set(whole) == {"activation/head/0@rank0", "activation/head/0@rank1"}
