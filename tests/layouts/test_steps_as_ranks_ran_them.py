"""A step of real ranks: the passes that its schedule ran are read out of their rows, and who waited for whom."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sentinel.explain.call_waits import call_waits
from sentinel.explain.pass_order import RankOrders, places_of, words_of

from ..support.recorded_step import read_step
from .builds import ddp, pipeline
from .layout import Trainer, train_ranks

SLOW, SLEEP_S = 1, 0.25
KINDS = ["wgrad", "wgrad_unreduced", "activation", "activation_in", "dgrad", "dgrad_in"]


def with_a_late_rank() -> Trainer:
    """Ranks that add a number up behind each step, one of which comes late."""
    trainer: Trainer = ddp()
    inner = trainer.train_step

    def train_step(step: int) -> Any:
        result = inner(step)
        if dist.get_rank() == SLOW:
            time.sleep(SLEEP_S)
        dist.all_reduce(torch.ones(4))
        return result

    trainer.train_step = train_step
    return trainer


@pytest.mark.parametrize(
    ("build", "kinds"),
    [
        (partial(pipeline, "Schedule1F1B"), []),
        pytest.param(partial(pipeline, "Schedule1F1B"), KINDS, marks=pytest.mark.long),
    ],
    ids=["black box", "modules"],
)
def test_a_real_pipeline_is_drawn_as_it_ran(tmp_path: Path, build: partial[object], kinds: list[str]) -> None:
    train_ranks(tmp_path, build, 2, config={"per_micro_step": True, "kinds": kinds}, num_steps=2)

    orders = [RankOrders().of(part) for part in read_step(tmp_path / "run", 1).parts]
    words = [words_of(one.passes) for one in orders]
    num = sum(one.way == "F" for one in orders[0].passes)

    assert num >= 2 and words[1] == " ".join(f"F{at} B{at}" for at in range(num)), "the last stage goes back at once"
    assert words[0].startswith("F0 F1 ") and words[0].endswith(f" B{num - 1}") and len(words[0].split()) == 2 * num
    places = places_of(orders)
    assert places[0][:2] == (0, 1) and places[1][:2] == (1, 2), "the second stage begins behind the first"


def test_the_rank_that_came_last_at_real_collectives_is_the_one_that_the_others_waited_for(tmp_path: Path) -> None:
    config = {"kinds": [], "probes": {"comm": {"log_only": True}}}
    train_ranks(tmp_path, with_a_late_rank, 2, config=config, num_steps=3)

    step = read_step(tmp_path / "run", 2)
    waits = call_waits(step.vectors, {part.rank: part.descriptor for part in step.parts})

    assert waits and (waits[0].rank, waits[0].behind) == (1 - SLOW, SLOW) and waits[0].seconds > 0.5 * SLEEP_S
