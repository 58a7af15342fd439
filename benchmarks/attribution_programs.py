"""The third library of `attribution.py`: wrong programs, effects that outlive their cause, causes that recur, young runs.

Labels were written before a rule of a diagnosis was changed for them. `is_silent` faults are none: healthy training looks
so, and nothing graver than an info may be told of it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from attribution_faults import (
    LAST,
    Plant,
    ReportedStep,
    always,
    has_copies,
    has_replicas,
    is_lane,
    nan,
    replace_element,
    struck_rank,
    with_aftermath,
)  # fmt: skip
from attribution_held_out import probe, router_collapse

from sentinel.record import Kind
from sentinel.testing import BitFlip, Nan, SyntheticRun


def without_probe(said: ReportedStep) -> None:
    """A router collapses and nothing looks at routers: their rows are not there."""
    router_collapse(said)
    said.rows = said.rows[said.kind != Kind.ROUTER]


def unseen_router(said: ReportedStep) -> None:
    """As `without_probe`, and worse at once: a layer's outputs, its gradients and the loss move in the first step."""
    grown = min(said.since + 1, 3) / 3.0
    at = said.at("layers.1.mlp")
    said.scale(at & said.is_forward(), 1.0 + 0.8 * grown)
    said.scale(at & (said.is_backward() | said.is_wgrad()), 1.0 + 1.5 * grown)
    said.log(loss=1.0 + 0.25 * grown, grad_norm=1.0 + 0.8 * grown)


def one_bad_batch(said: ReportedStep) -> None:
    """The loss is a thousand times too high once, and back at the next step; gradients and the optimizer remember it."""
    if said.since == 0:
        said.scale(said.is_forward(), 1.8)
        said.scale(said.is_backward() | said.is_wgrad(), 400.0)
        said.log(loss=1000.0, grad_norm=400.0)
    else:
        left = 0.75**said.since
        said.scale(said.is_backward() | said.is_wgrad(), 1.0 + 5.0 * left)
        said.log(grad_norm=1.0 + 5.0 * left)
    probe(said, Kind.UPDATE_RATIO, "", 1.0 + 20.0 * 0.8**said.since)


def loss_goes_bad_again(said: ReportedStep) -> None:
    """The loss of one replica is no number in one step of ten, born in a module inside; such steps are skipped."""
    if said.since % 10:
        return
    said.skip()
    if is_lane(said):
        at = said.run._model.position("layers.1.mlp")
        hit = said.is_forward() & (said.position >= at)
        said.rows["num_nan"][hit] += 32
        said.rows["count"][hit] -= 32
        said.spoil(said.is_backward())
        if "loss" in said.end.scalars:
            said.log(to_loss=np.nan)
    said.spoil(said.is_wgrad())
    said.log(to_grad_norm=np.nan)


def update_made_nan(said: ReportedStep) -> None:
    """A step's gradients and state are finite, and the update makes a NaN of a whole weight on every replica."""
    if said.since == 0:
        return
    hit = said.at("layers.2.mlp") & (said.kind == Kind.PARAM)
    said.rows["num_nan"][hit] += said.rows["count"][hit]
    said.rows["count"][hit] = 0
    said.rows["checksum"][hit] = 0
    behind = (said.is_forward() & (said.position >= said.run._model.position("layers.2.mlp"))) | said.is_backward()
    said.rows["num_nan"][behind] += said.rows["count"][behind]
    said.rows["count"][behind] = 0
    said.spoil(said.is_wgrad())
    said.log(to_grad_norm=np.nan)
    if "loss" in said.end.scalars:
        said.log(to_loss=np.nan)


def never_alike(said: ReportedStep) -> None:
    """Every replica began with weights of its own: nobody broadcast them."""
    hit = said.kind == Kind.PARAM
    said.rows["checksum"][hit] += np.uint64(1_000_003 * (said.place.dp_rank + 1))


def heavy_tailed(said: ReportedStep) -> None:
    """Ordinary text of a young model: some batches have gradients two to four times as large, and the loss hardly moves."""
    rng = np.random.default_rng((17, said.since))
    whole = float(np.exp(0.25 * abs(rng.standard_t(3))))
    of_layer = np.exp(0.2 * rng.standard_t(3, size=int(said.position.max()) + 64))
    gradients = said.is_backward() | said.is_wgrad()
    for at in np.unique(said.position[gradients]).tolist():
        said.scale(gradients & (said.position == at), min(whole * float(of_layer[at]), 6.0))
    said.log(loss=1.0 + 0.02 * rng.standard_normal(), grad_norm=min(whole, 6.0))


def scale_search(said: ReportedStep) -> None:
    """Half precision: the first steps overflow in the gradients and are skipped, until the loss scale has come down."""
    said.log(to_loss_scale=65536.0 * 0.5 ** min(said.since, 5))
    if said.since < 5:
        said.skip()
        said.spoil(said.is_wgrad(), "num_pos_inf")
        said.spoil(said.is_backward() & (said.position < said.run._model.position("layers.2.mlp")), "num_pos_inf")
        said.log(to_grad_norm=np.inf)
        hit = said.kind == Kind.COMM
        said.rows["num_pos_inf"][hit] += 3
        said.rows["count"][hit] -= 3


def in_turn(steps: tuple[int, ...]) -> Callable[..., list[Nan | BitFlip]]:
    """(steps later) one module, one replica after the other."""

    def plant(run: SyntheticRun, step: int) -> list[Nan | BitFlip]:
        return [Nan(step=step + s, module=LAST, rank=struck_rank(run, LAST, at % run.dp)) for at, s in enumerate(steps)]

    return plant


def lost_element(said: ReportedStep) -> None:
    """One element of one replica's output is huge, as the inverse of a small number is; the weights are as ever."""
    if said.since:
        return
    at = said.run._model.position("layers.2.mlp")
    if is_lane(said):
        for hit in np.flatnonzero(said.is_forward() & (said.position == at)):
            replace_element(said.rows[hit : hit + 1], 0.1, 1e9)
        said.scale(said.is_forward() & (said.position > at), 30.0)
        said.log(loss=2.5)
    said.scale(said.is_wgrad(), 1.0 + 5.0 / said.run.dp)
    said.log(grad_norm=1.0 + 5.0 / said.run.dp)


def quiet_state(said: ReportedStep) -> None:
    """An aftermath in the loss, and a second moment that keeps it far longer."""
    with_aftermath(said)
    probe(said, Kind.UPDATE_RATIO, "", 1.0 + 12.0 * 0.93**said.since)


def all_of_them(steps: tuple[int, ...]) -> Callable[..., list[Nan | BitFlip]]:
    """The same module goes bad on all replicas, these steps later."""

    def plant(run: SyntheticRun, step: int) -> list[Nan | BitFlip]:
        name = "layers.1.attn"
        return [Nan(step=step + s, module=name, rank=struck_rank(run, name, dp)) for s in steps for dp in range(run.dp)]

    return plant


PROGRAMS = [
    Plant("one bad batch, and what the optimizer keeps of it", "batch", always("batch"), one_bad_batch, steps=30),
    Plant("a batch's aftermath in the second moment", "batch", always("batch"), quiet_state, steps=40),
    Plant("NaN of one replica in one step of ten", "program", always("unknown", "program", "model"), loss_goes_bad_again,
          steps=60, needs=has_replicas),
    Plant("NaN of one replica after the other, 8 steps apart", "program", always("model", "program", "unknown"), steps=50,
          faults=in_turn((0, 8, 16, 24)), needs=has_replicas),
    Plant("NaN of one element, one replica, other data", "program", always("unknown", "program"),
          faults=nan("layers.2.attn"), needs=has_replicas),
    Plant("one element 1e9 on one replica, other data", "program", always("unknown", "program"), lost_element,
          needs=has_replicas),
    Plant("the update makes a NaN of finite gradients", "program", always("program", "unknown"), update_made_nan),
    Plant("replicas that never were alike", "program", lambda run: {"program"} if has_copies(run) else {"nothing"},
          never_alike, healthy=0, steps=20, needs=has_copies),
    Plant("router collapse without its probe", "model", always("model", "unknown"), without_probe, steps=24,
          needs=lambda run: run.ep > 1),
    Plant("router collapse without its probe, at once", "model", always("model", "unknown"), unseen_router, steps=24,
          needs=lambda run: run.ep > 1),
    Plant("router collapse after 8 healthy steps", "model", always("model"), router_collapse, steps=24, healthy=8,
          needs=lambda run: run.ep > 1),
    Plant("NaN on all replicas in every fourth step", "model", always("model", "program", "unknown"), steps=30,
          faults=all_of_them((0, 4, 8, 12))),
    Plant("fp16: loss scale is searched at the start", "none", always("nothing"), scale_search, dtype="float16", healthy=0,
          steps=40, is_silent=True, has_comm=True),
    Plant("young model, ordinary text", "none", always("nothing"), heavy_tailed, healthy=0, steps=70, is_silent=True),
]  # fmt: skip
