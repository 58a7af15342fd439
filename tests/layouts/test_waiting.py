"""Who arrives last at the collectives: every step is equally long, and only the slow rank does not wait."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from sentinel.collect import assembly
from sentinel.collect.parallel.stream_waiting import StreamWaits
from sentinel.rules.engine import Engine
from sentinel.rules.language.loader import load_pack

from ..collect.accelerator import Event, Runtime, Stream
from ..support.closed_steps import closed_steps
from .builds import ddp, fsdp2, pipeline, tp
from .layout import Trainer, train_ranks

SLOW, SLEEP_S = 1, 0.25


def with_straggler(build: Any, sleep_s: float = SLEEP_S) -> Trainer:
    trainer: Trainer = build()
    if dist.get_rank() == SLOW:
        inner = trainer.train_step

        def train_step(step: int) -> Any:
            hooks = [
                next(iter(model.modules())).register_forward_pre_hook(lambda module, args: time.sleep(sleep_s))
                for model in trainer.models
            ]
            result = inner(step)
            for hook in hooks:
                hook.remove()
            return result

        trainer.train_step = train_step
    return trainer


class PromptEvent(Event):
    """Of a stream that does everything at once, and whose clock is the host's."""

    def record(self, stream: Stream) -> None:
        self.reached_s = time.perf_counter()


class PromptRuntime(Runtime):
    def timed_event(self) -> Event:
        return PromptEvent(self, enable_timing=True)


def on_a_stream(build: Any) -> Trainer:
    """What the build gives, whose waits are timed as those of an accelerator are."""
    assembly.wait_clock = lambda device, guard: StreamWaits(PromptRuntime(), guard)  # type: ignore[arg-type]
    trainer: Trainer = build()
    return trainer


GPIPE = partial(pipeline, "ScheduleGPipe", micro=2)


LAYOUTS = [(ddp, 3), (GPIPE, 2), (fsdp2, 3), (tp, 2)]
ON_A_STREAM = [(partial(on_a_stream, build), world) for build, world in LAYOUTS]


@pytest.mark.parametrize(
    ("build", "world"),
    # Short: a collective, a message, and one of them on a stream of its own.
    [
        *LAYOUTS[:2],
        ON_A_STREAM[0],
        *(pytest.param(*one, marks=pytest.mark.long) for one in (*LAYOUTS[2:], *ON_A_STREAM[1:])),
    ],
)
def test_only_the_slow_rank_does_not_wait(build: Any, world: int, tmp_path: Path) -> None:
    train_ranks(tmp_path, partial(with_straggler, build), world, config={"kinds": ["param"]}, num_steps=9)

    views = closed_steps(tmp_path / "run")

    assert len(views) == 9
    # DDP orders its buckets anew, and waits, between the first two; the last step has no next one.
    steps = [{part.rank: part.end_step for part in view.parts} for view in views[2:8]]
    # A busy machine holds up any rank in some step, and the others wait for it then; only the slow one is slow in each.
    least_busy = {rank: min(ends[rank].step_time_s - ends[rank].wait_s for ends in steps) for rank in range(world)}
    assert max(least_busy, key=lambda rank: least_busy[rank]) == SLOW
    assert least_busy[SLOW] > 0.9 * SLEEP_S
    for rank in range(world):
        if rank != SLOW:
            assert max(ends[rank].wait_s for ends in steps) > 0.5 * SLEEP_S, (rank, steps)


def test_the_default_rules_name_the_rank_for_which_streams_wait(tmp_path: Path) -> None:
    # On a busy machine any rank is held up, for about as long, and is rightly named: one must be slower than that.
    for sleep_s in (SLEEP_S, 4 * SLEEP_S, 16 * SLEEP_S):
        runs = tmp_path / str(sleep_s)
        build = partial(with_straggler, partial(on_a_stream, ddp), sleep_s)
        train_ranks(runs, build, 3, config={"kinds": ["param"]}, num_steps=10)
        engine = Engine(load_pack())
        found = [one for view in closed_steps(runs / "run") for one in engine.judge(view) if one.rule == "slow-rank"]
        if [(one.rank, one.event) for one in found] == [(SLOW, "onset")]:
            break

    assert [(one.rank, one.event) for one in found] == [(SLOW, "onset")]
    assert found[0].value > 0.9 * sleep_s
