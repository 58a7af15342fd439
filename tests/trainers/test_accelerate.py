"""Real loops through an Accelerator: steps, micro-steps, skipped ones, its trackers and its checkpoints."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import GeneralTracker

import sentinel
from sentinel.record import Flag

from ..support.nets import TinyModel
from ..support.spools import ALL_KINDS, Said, norm
from .hf_training import incarnations, same, scalar, steps

pytestmark = pytest.mark.trainer

EVERYTHING = {"kinds": ALL_KINDS}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


class Notebook(GeneralTracker):
    """A tracker that keeps what it is given: what a user reads beside the step."""

    name = "notebook"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int | None, dict[str, Any]]] = []

    @property
    def tracker(self) -> None:
        return None

    def store_init_configuration(self, values: dict[str, Any]) -> None: ...

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.lines.append((step, values))


class Loop:
    """The usual loop of Accelerate's own examples, over a tiny model."""

    def __init__(
        self,
        *,
        accumulation: int = 1,
        config: Any = None,
        is_watched: bool = True,
        examples: int = 40,
        first: int = 0,
        max_norm: float | None = 0.5,
        lr: float = 0.05,
        make: Callable[[Any], torch.optim.Optimizer] | None = None,
        first_step: int | None = None,
        scaler: Any = None,
        **arguments: Any,
    ) -> None:
        torch.manual_seed(0)
        self.notebook = Notebook()
        self.accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=accumulation, log_with=self.notebook, **arguments
        )
        self.accelerator.init_trackers("test")
        if scaler is not None:  # Accelerate refuses fp16 on a CPU; the scaler itself does not.
            self.accelerator.scaler = scaler
        data = list(torch.randint(0, 11, (examples, 5), generator=torch.Generator().manual_seed(1)))
        model = TinyModel()
        optimizer = (make or (lambda params: torch.optim.SGD(params, lr=lr)))(model.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        self.model, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(
            model, optimizer, DataLoader(data, batch_size=2), schedule
        )
        if scaler is not None:
            self.accelerator.state._mixed_precision, self.accelerator.native_amp = "fp16", True
        self.step, self.max_norm = first, max_norm
        self.losses: dict[int, float] = {}
        self.norms: dict[int, dict[str, float]] = {}
        self.monitor: Any = None
        if is_watched:
            self.monitor = sentinel.attach_accelerate(
                self.accelerator, self.model, self.optimizer, config, first if first_step is None else first_step
            )

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.model(tokens).flatten(0, 1), tokens.flatten())

    def train(self, num_steps: int, log: Callable[[int, torch.Tensor], None] | None = None) -> None:
        end, total = self.step + num_steps, 0.0
        while self.step < end:
            for tokens in self.loader:
                with self.accelerator.accumulate(self.model):
                    loss = self.loss(tokens)
                    self.accelerator.backward(loss)
                    total += float(loss.detach()) / self.accelerator.gradient_accumulation_steps
                    if self.accelerator.sync_gradients:
                        self.norms[self.step] = {
                            name: float(p.grad.norm()) for name, p in self.model.named_parameters() if p.grad is not None
                        }
                        if self.max_norm is not None:
                            self.accelerator.clip_grad_norm_(self.model.parameters(), self.max_norm)
                    self.optimizer.step()
                    self.schedule.step()
                    self.optimizer.zero_grad()
                if self.accelerator.sync_gradients:
                    self.losses[self.step], total = total, 0.0
                    (log or self.log)(self.step, loss)
                    self.step += 1
                    if self.step == end:
                        return

    def log(self, step: int, loss: torch.Tensor) -> None:
        values = {"loss": self.losses[step], "lr": self.optimizer.param_groups[0]["lr"]}
        self.accelerator.log(values, step=step)

    def logged(self, name: str = "loss") -> dict[int | None, float]:
        return {step: float(values[name]) for step, values in self.notebook.lines if name in values}

    def end(self) -> dict[str, torch.Tensor]:
        if self.monitor is not None:
            self.monitor.detach()
        return {name: value.clone() for name, value in self.accelerator.unwrap_model(self.model).state_dict().items()}


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("first", [0, 1, 200])
def test_step_number_is_the_one_the_loop_logs_beside_the_loss(run: Path, accumulation: int, first: int) -> None:
    loop = Loop(accumulation=accumulation, first=first)

    loop.train(5)
    loop.end()

    said = Said(run)
    assert list(loop.logged()) == list(range(first, first + 5))
    assert scalar(said, "loss") == pytest.approx(loop.logged()) and scalar(said, "lr") == loop.logged("lr")
    assert [end.num_micro_steps for end in said.ends] == [accumulation] * 5 and not said.health
    assert all(said.of(step, "param") and said.of(step, "wgrad") for step in loop.logged())


def test_uneven_last_accumulation_of_a_loader_has_fewer_micro_steps(run: Path) -> None:
    loop = Loop(accumulation=3, examples=10)  # 5 batches a round

    loop.train(4)
    loop.end()

    said = Said(run)
    assert [end.num_micro_steps for end in said.ends] == [3, 2, 3, 2]
    assert scalar(said, "loss") == pytest.approx(loop.logged())


def test_loss_needs_no_tracker_and_no_synchronisation(run: Path) -> None:
    loop = Loop(accumulation=2)

    loop.train(4, log=lambda step, loss: None)
    loop.end()

    said = Said(run)
    assert scalar(said, "loss") == pytest.approx(loop.losses) and not loop.notebook.lines
    assert scalar(said, "lr") == pytest.approx({step: 0.05 * 0.9**step for step in range(4)})
    assert scalar(said, "grad_norm") == pytest.approx(
        {step: math.sqrt(sum(value**2 for value in norms.values())) for step, norms in loop.norms.items()}
    )


@pytest.mark.parametrize("where", ["after", "before"])
def test_number_that_the_loop_logs_is_taken_over_by_a_single_process(run: Path, where: str) -> None:
    loop = Loop(accumulation=2, config={**EVERYTHING, "per_micro_step": True})
    number = {"after": lambda: loop.step + 1, "before": lambda: loop.step + 1}[where]
    if where == "before":
        backward = loop.accelerator.backward

        def log_first(loss: torch.Tensor) -> None:
            loop.accelerator.log({"train/loss": float(loss)}, step=number())
            backward(loss)

        loop.accelerator.backward = log_first

    loop.train(3, log=(lambda step, loss: loop.accelerator.log({"train_loss": 7.0 + step}, step=number()))
               if where == "after" else lambda step, loss: None)  # fmt: skip
    loop.end()

    said = Said(run)
    assert [end.step for end in said.ends] == [1, 2, 3]
    assert [len(said.of(step, "dgrad", "head")) for step in (1, 2, 3)] == [2, 2, 2]
    if where == "after":
        assert scalar(said, "loss") == {1: 7.0, 2: 8.0, 3: 9.0}


def test_of_several_processes_none_takes_a_number_over_and_one_says_so(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop()
    monkeypatch.setattr(Accelerator, "num_processes", 2)

    with caplog.at_level("WARNING", logger="sentinel"):
        loop.train(3, log=lambda step, loss: loop.accelerator.log({"loss": float(loss)}, step=step + 1))
    monkeypatch.undo()
    loop.end()

    assert [end.step for end in Said(run).ends] == [0, 1, 2]
    assert len([record for record in caplog.records if "first_step=1" in record.getMessage()]) == 1


def test_epoch_numbers_and_averages_do_not_pass_for_steps_and_losses(run: Path) -> None:
    loop = Loop()

    def log(step: int, loss: torch.Tensor) -> None:
        if step % 3 == 2:
            loop.accelerator.log({"train_loss": 99.0, "epoch": step // 3}, step=step // 3)
        loop.accelerator.log({"eval_loss": 1.0}, step=1000)

    loop.train(6, log)
    loop.end()

    said = Said(run)
    assert [end.step for end in said.ends] == list(range(6))
    assert {step: value for step, value in scalar(said, "loss").items() if step != 2} == pytest.approx(
        {step: value for step, value in loop.losses.items() if step != 2}
    )
    assert scalar(said, "logged_loss") == {5: 99.0}
    assert not scalar(said, "eval_loss")


def test_other_models_that_go_through_the_accelerator_are_not_ours(run: Path) -> None:
    loop = Loop()
    other = nn.Linear(2, 1)

    for tokens in list(loop.loader)[:3]:
        loss = loop.loss(tokens)
        loop.accelerator.backward(loss)
        loop.accelerator.backward(other(torch.ones(3, 2)).sum() * 1e6)
        loop.losses[len(loop.losses)] = float(loss)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    loop.end()

    assert scalar(Said(run), "loss") == pytest.approx(loop.losses)


# -- nothing changes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [{}, {"mixed_precision": "bf16"}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_losses_and_weights_are_bit_identical(run: Path, arguments: dict[str, Any], optimizer: str) -> None:
    make = {"sgd": None, "adamw": lambda params: torch.optim.AdamW(params, lr=0.01)}[optimizer]
    plain = Loop(accumulation=2, is_watched=False, make=make, **arguments)
    plain.train(4)
    weights = plain.end()
    AcceleratorState._reset_state(reset_partial_state=True)
    watched = Loop(accumulation=2, config=EVERYTHING, make=make, **arguments)

    watched.train(4)

    assert watched.losses == plain.losses and same(watched.end(), weights)
    said = Said(run)
    assert {tensor.kind for tensor, _ in said.rows[3]} >= set(ALL_KINDS) and not said.health


def test_disabled_is_a_no_op(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SENTINEL_DISABLE", "1")
    loop = Loop(config={"no_such_key": 1})

    loop.train(2)
    loop.accelerator.save_state(str(tmp_path / "state"))
    loop.accelerator.load_state(str(tmp_path / "state"))
    loop.accelerator.end_training()

    assert not loop.monitor.is_alive and not run.exists()
    assert not {"backward", "log", "end_training"} & set(loop.accelerator.__dict__)
    assert not (tmp_path / "state" / "sentinel_state.json").exists()


def test_end_of_training_detaches_and_leaves_everything_as_it_was(run: Path) -> None:
    loop = Loop()
    loop.train(2)
    assert {"backward", "log", "end_training"} <= set(loop.accelerator.__dict__)

    loop.accelerator.end_training()

    assert not {"backward", "log", "end_training"} & set(loop.accelerator.__dict__)
    assert not loop.accelerator._save_model_state_pre_hook and not loop.accelerator._load_model_state_pre_hook
    assert not loop.model._forward_hooks and not loop.monitor.is_alive
    assert Said(run).byes[0].reason == "detached"


def test_attached_twice_is_followed_once(run: Path) -> None:
    loop = Loop()
    former, loop.monitor = loop.monitor, sentinel.attach_accelerate(loop.accelerator, loop.model, loop.optimizer)

    loop.train(3)
    loop.end()

    assert not former.is_alive, "the second takes the place of the first"
    assert scalar(Said(run), "loss") == pytest.approx(loop.losses)


# -- gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [None, 1e-3])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_wgrad_is_accumulated_and_before_clipping(run: Path, max_norm: float | None, accumulation: int) -> None:
    loop = Loop(accumulation=accumulation, max_norm=max_norm)

    loop.train(3)
    loop.end()

    said = Said(run)
    for step, expected in loop.norms.items():
        found = {tensor.name: norm(row) for tensor, row in said.rows[step] if tensor.kind == "wgrad"}
        assert found == pytest.approx(expected, rel=1e-5)
        assert not any(int(row["flags"]) & Flag.POST_CLIP for row in said.of(step, "wgrad"))


def test_gradients_clipped_by_value_are_read_before(run: Path) -> None:
    loop = Loop(max_norm=None)
    loop.accelerator.clip_grad_norm_ = lambda parameters, limit: loop.accelerator.clip_grad_value_(parameters, 1e-4)
    loop.max_norm = 1.0

    loop.train(2)
    loop.end()

    said = Said(run)
    for step, expected in loop.norms.items():
        found = {tensor.name: norm(row) for tensor, row in said.rows[step] if tensor.kind == "wgrad"}
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("max_norm", [None, 1e-3])
@pytest.mark.parametrize("optimizer", ["sgd", "fused"])
def test_step_that_the_scaler_skips_is_a_step(run: Path, max_norm: float | None, optimizer: str) -> None:
    # A fused optimizer is called on an overflow too, with scaled gradients, and leaves the weights alone by itself.
    make = {"sgd": None, "fused": lambda params: torch.optim.AdamW(params, fused=True)}[optimizer]
    reference = Loop(is_watched=False, max_norm=None)
    reference.train(1)
    AcceleratorState._reset_state(reset_partial_state=True)
    loop = Loop(scaler=torch.amp.GradScaler("cpu", init_scale=1024.0), max_norm=max_norm, make=make)
    seen: dict[int, bool] = {}
    ours = loop.loss
    loop.loss = lambda tokens: ours(tokens) * (float("inf") if loop.step == 1 else 1.0)

    def log(step: int, loss: torch.Tensor) -> None:
        seen[step] = loop.accelerator.optimizer_step_was_skipped

    loop.train(4, log)
    loop.end()

    said = Said(run)
    assert seen == {0: False, 1: optimizer == "sgd", 2: False, 3: False}
    assert [end.is_skipped for end in said.ends] == [False, True, False, False]
    found = {tensor.name: norm(row) for tensor, row in said.rows[0] if tensor.kind == "wgrad"}
    assert found == pytest.approx(reference.norms[0], rel=1e-5)  # unscaled
    bad = [row for tensor, row in said.rows[1] if tensor.kind == "wgrad"]
    assert bad and sum(int(row["num_nan"]) + int(row["num_pos_inf"]) + int(row["num_neg_inf"]) for row in bad) > 0
    assert scalar(said, "loss_scale") == {0: 1024.0, 1: 1024.0, 2: 512.0, 3: 512.0}


# -- evaluation and checkpoints ----------------------------------------------------------------------------------------


def test_evaluation_inside_the_loop_is_not_measured(run: Path) -> None:
    loop = Loop(config=EVERYTHING)
    evaluated = []

    def log(step: int, loss: torch.Tensor) -> None:
        loop.model.eval()
        with torch.no_grad():
            for tokens in list(loop.loader)[:2]:
                gathered = loop.accelerator.gather_for_metrics(loop.loss(tokens).reshape(1))
                evaluated.append(float(gathered.mean()))
        loop.model.train()

    loop.train(3, log)
    loop.end()

    said = Said(run)
    assert len(evaluated) == 6
    assert [end.num_micro_steps for end in said.ends] == [1, 1, 1]
    assert len({len(said.rows[step]) for step in range(3)}) == 1
    assert scalar(said, "loss") == pytest.approx(loop.losses)


def test_saved_state_is_loaded_with_its_numbers(run: Path, tmp_path: Path) -> None:
    whole = Loop(is_watched=False)
    whole.train(6)
    AcceleratorState._reset_state(reset_partial_state=True)
    first = Loop()
    activities = []
    first.train(4)
    first.accelerator.register_save_state_pre_hook(lambda *a: activities.append(first.monitor.runner.position().activity))
    first.accelerator.save_state(str(tmp_path / "state"))
    first.end()
    AcceleratorState._reset_state(reset_partial_state=True)
    again = Loop()

    again.accelerator.load_state(str(tmp_path / "state"))
    again.step = again.monitor.state_dict()["step"]
    again.loader = again.accelerator.skip_first_batches(again.loader, 4)
    again.train(2)
    again.end()

    assert activities == ["checkpoint"]
    assert steps(run) == [[0, 1, 2, 3], [4, 5]]
    assert scalar(incarnations(run)[1], "loss") == pytest.approx({step: whole.losses[step] for step in (4, 5)})
    assert incarnations(run)[1].descriptor.first_step == 4


def test_checkpoint_from_before_sentinel_and_one_with_it_load_either_way(run: Path, tmp_path: Path) -> None:
    class Counter:
        value = 3

        def state_dict(self) -> dict[str, Any]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.value = state["value"]

    loops = []
    for is_watched in (False, True):
        AcceleratorState._reset_state(reset_partial_state=True)
        loop = Loop(is_watched=is_watched)
        loops.append(loop)
        counter = Counter()
        loop.accelerator.register_for_checkpointing(counter)
        loop.train(2)
        counter.value = 8
        loop.accelerator.save_state(str(tmp_path / str(is_watched)))
        for saved in (False, True):
            if (tmp_path / str(saved)).exists():
                counter.value = 0
                loop.accelerator.load_state(str(tmp_path / str(saved)))
                assert counter.value == 8
    loops[0].accelerator.load_state(str(tmp_path / "True"))
    loops[1].end()


def test_going_back_to_an_earlier_state_repeats_its_steps(run: Path, tmp_path: Path) -> None:
    loop = Loop()
    loop.train(2)
    loop.accelerator.save_state(str(tmp_path / "state"))
    loop.train(2)
    loop.accelerator.load_state(str(tmp_path / "state"))
    loop.step = 2

    loop.train(1)
    loop.end()

    assert [end.step for end in Said(run).ends] == [0, 1, 2, 3, 2]


def test_failing_hook_of_ours_does_not_reach_the_loop(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop()
    monkeypatch.setattr(loop.monitor, "noticed", lambda **values: 1 / 0)
    monkeypatch.setattr(loop.monitor, "state_dict", lambda: 1 / 0)

    loop.train(2)
    loop.accelerator.save_state(str(tmp_path / "state"))
    loop.train(1)
    loop.end()

    sites = {health.site for health in Said(run).health}
    assert len(loop.losses) == 3 and {"accelerator.backward", "accelerator.save_state"} <= sites


RAISES = """
import torch
from tests.trainers.test_accelerate import Loop
loop = Loop(accumulation=2)
ours = loop.loss
def loss(tokens):
    value = ours(tokens)
    if loop.step == 2 and loop.accelerator.sync_gradients:
        raise RuntimeError("boom")
    return value
loop.loss = loss
loop.train(5)
"""


def test_step_in_which_the_loop_raises_is_on_disk_as_partial(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    environment = {"SENTINEL_DIR": str(tmp_path), "SENTINEL_RUN": "run", "PYTHONPATH": str(root), "PATH": "/usr/bin:/bin"}

    ended = subprocess.run([sys.executable, "-c", RAISES], capture_output=True, text=True, timeout=120, env=environment)

    assert ended.returncode == 1 and "boom" in ended.stderr
    said = Said(tmp_path / "run")
    assert [(end.step, end.is_partial) for end in said.ends] == [(0, False), (1, False), (2, True)]
    assert said.of(2, "param") and said.byes[-1].reason == "exception"


def test_example_runs_under_sentinel_run(tmp_path: Path) -> None:
    root, environment = Path(__file__).parents[2], {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "sentinel.cli", "run", "--dir", str(tmp_path), "--name", "example", "--"]
    example = str(root / "examples" / "accelerate_loop.py")
    command += [sys.executable, example, "--steps", "6", "--state", str(tmp_path / "s")]

    for _ in range(2):
        ended = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=tmp_path, env=environment)
        assert ended.returncode == 0, ended.stderr[-3000:]

    assert steps(tmp_path / "example") == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
