"""More faults for `attribution.py`, written with what each layout can show before a rule of a judgement was changed for
them.

They have rows of probes: update ratios of all weights, attention logits and entropies, loads of a router.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
from attribution_faults import (
    Plant,
    ReportedStep,
    always,
    batch_of,
    has_copies,
    has_odd_one,
    has_replicas,
    is_lane,
    replace_element,
    rising,
    where_compared,
)  # fmt: skip

from sentinel.record import Kind
from sentinel.testing import SyntheticRun


def compared(*otherwise: str, majority: bool = False) -> Callable[[SyntheticRun], set[str]]:
    """`hardware` alone where copies tell, what else is right otherwise."""
    return lambda run: {"hardware"} if (has_odd_one if majority else has_copies)(run) else {"hardware", *otherwise}


def layer(said: ReportedStep, name: str) -> np.ndarray:
    """Rows of all modules of a layer."""
    return said.at(f"{name}.norm") | said.at(f"{name}.attn") | said.at(f"{name}.mlp")


def called(said: ReportedStep, field: str) -> np.ndarray:
    """Rows of tensors of probes whose name ends so."""
    return np.array([said.names.get(tensor, "").endswith(field) for tensor in said.rows["tensor"].tolist()])


def probe(said: ReportedStep, kind: Kind, field: str, factor: float, at: np.ndarray | None = None) -> None:
    """Multiply what a probe says. field: of the tensor's name behind the colon; empty: all."""
    hit = (said.kind == kind) & (True if at is None else at)
    if field:
        hit &= called(said, field)
    for name in ("mean", "min", "max"):
        said.rows[name][hit] *= factor


def state_lost(said: ReportedStep) -> None:
    """exp_avg_sq is zeroed: a step of some thirty times the usual size, smaller ones after it, and what they bring."""
    probe(said, Kind.UPDATE_RATIO, "", 1.0 + 30.0 / (1.0 + said.since) ** 1.5)
    if said.since:
        left = 1.0 / said.since**0.5
        said.scale(said.is_forward(), 1.0 + 0.5 * left)
        said.scale(said.is_backward() | said.is_wgrad(), 1.0 + 3.0 * left)
        said.log(loss=1.0 + 0.6 * left, grad_norm=1.0 + 3.0 * left)


def router_collapse(said: ReportedStep) -> None:
    """The tokens go to few experts, more from step to step, and the loss pays a little."""
    grown = min(said.since + 1, 6) / 6.0
    at = said.at("layers.1.mlp")
    probe(said, Kind.ROUTER, ":balance", 1.0 + 60.0 * grown, at)
    hit = (said.kind == Kind.ROUTER) & at
    idle = hit & called(said, ":inactive")
    for name in ("mean", "min", "max"):
        said.rows[name][idle] = 0.6 * grown
    said.scale(at & said.is_forward(), 1.0 + 0.5 * grown)
    said.log(loss=1.0 + 0.05 * grown)


def logits(said: ReportedStep) -> None:
    """Query weights x30 where attention is measured: logits, entropy; the loss pays a tenth."""
    at = said.at("layers.2.attn")
    probe(said, Kind.ATTENTION, ":max_logit", 30.0, at)
    probe(said, Kind.ATTENTION, ":entropy", 0.05, at)
    said.scale(at & (said.kind == Kind.PARAM), 17.0)
    said.scale(at & (said.is_backward() | said.is_wgrad()), 2.5)
    said.log(loss=1.1)


def rate(times: float, steps: int) -> Callable[[ReportedStep], None]:
    """A logged learning rate that is too high for some steps; what it brings comes a step later and decays slowly."""

    def change(said: ReportedStep) -> None:
        if said.since < steps:
            said.log(to_lr=1e-3 * times)
            probe(said, Kind.UPDATE_RATIO, "", times)
        if said.since:
            height = (1.0 + 0.8 * min(said.since, steps)) / (1.0 + 0.1 * max(0, said.since - steps))
            said.scale(said.is_forward(), 1.0 + 0.2 * height)
            said.scale(said.is_backward() | said.is_wgrad(), 1.0 + height)
            said.log(loss=1.0 + 0.3 * height, grad_norm=1.0 + height)

    return change


def scale_falls(said: ReportedStep) -> None:
    """Half precision: infinities in the weight gradients, step after step, and a loss scale that is halved each time."""
    said.log(to_loss_scale=65536.0 * 0.5 ** min(said.since, 8))
    if said.since < 8:
        said.skip()
        said.spoil(said.is_wgrad() & layer(said, "layers.3"), "num_pos_inf")
        said.log(to_grad_norm=np.inf)


def gradients_underflow(said: ReportedStep) -> None:
    """Half precision, a loss scale lost: all gradients of the lower layers are exactly zero."""
    said.log(to_loss_scale=1.0)
    below = (said.position <= said.run._model.position("layers.2.mlp")) & (said.is_backward() | said.is_wgrad())
    said.scale(below, 0.0)
    said.rows["checksum"][below] = 0
    said.log(grad_norm=0.2)


def input_nan(said: ReportedStep) -> None:
    """NaN in the samples of one replica: the first thing computed of them is NaN in whole rows, and all behind it."""
    if said.since:
        return
    said.skip()
    if is_lane(said):
        first = said.is_forward() & (said.position == 0)
        said.rows["num_nan"][first] += 96
        said.rows["count"][first] -= 96
        for hit in (said.is_forward() & (said.position > 0), said.is_backward()):
            said.rows["num_nan"][hit] += 96
            said.rows["count"][hit] -= 96
        if "loss" in said.end.scalars:
            said.log(to_loss=np.nan)
    said.spoil(said.is_wgrad())
    said.log(to_grad_norm=np.nan)


def labels(times: float, steps: int, *, one: bool) -> Callable[[ReportedStep], None]:
    """Labels are noise: the forward is as ever, the loss and the gradients are not."""

    def change(said: ReportedStep) -> None:
        if said.since >= steps:
            return
        if not one or is_lane(said):
            said.scale(said.is_backward(), times)
            said.log(loss=times)
        whole = times if not one else 1.0 + (times - 1.0) / said.run.dp
        said.scale(said.is_wgrad(), whole)
        said.log(grad_norm=whole)

    return change


def bad_bucket(said: ReportedStep) -> None:
    """A bucket of reduced gradients arrives wrong on one rank, once: its weights are others from then on."""
    if not is_lane(said) or said.place.tp_rank:
        return
    at = layer(said, "layers.1")
    if said.since == 0:
        said.rows["checksum"][at & said.is_wgrad()] += np.uint64(77_777_777)
    said.rows["checksum"][at & (said.kind == Kind.PARAM)] += np.uint64(13_131_313)


def bad_sum(said: ReportedStep) -> None:
    """One sum over the replicas is wrong, and all of them take it: weight gradients that nothing before them explains."""
    if said.since == 0:
        said.scale(layer(said, "layers.1") & said.is_wgrad(), 1e4)
        said.log(grad_norm=4e3)


def top_bit(said: ReportedStep) -> None:
    """The top exponent bit of one weight of one rank, for good: all that it makes overflows, every step is skipped."""
    said.skip()
    at = said.run._model.position("layers.1.mlp")
    if is_lane(said):
        if not said.place.tp_rank:
            hit = np.flatnonzero((said.position == at) & (said.kind == Kind.PARAM))
            if len(hit):
                row = said.rows[hit[0] : hit[0] + 1]
                row["checksum"] += np.uint64(2**30)
                with np.errstate(all="ignore"):
                    replace_element(row, 0.01, 3.4e36)
        here = said.is_forward() & (said.position == at)
        said.rows["num_nan"][here] += 40
        said.rows["num_pos_inf"][here] += 40
        behind = (said.is_forward() & (said.position > at)) | said.is_backward()
        said.rows["num_nan"][behind] += said.rows["count"][behind]
        said.rows["count"][behind] = 0
        if "loss" in said.end.scalars:
            said.log(to_loss=np.nan)
    bad = said.is_wgrad()
    said.rows["num_nan"][bad] += said.rows["count"][bad]
    said.rows["count"][bad] = 0
    said.log(to_grad_norm=np.nan)


def small_flip(said: ReportedStep) -> None:
    """One weight of one rank x16: nothing but the copy shows it."""
    if is_lane(said) and not said.place.tp_rank:
        hit = np.flatnonzero(said.at("layers.2.attn") & (said.kind == Kind.PARAM))
        if len(hit):
            row = said.rows[hit[0] : hit[0] + 1]
            row["checksum"] += np.uint64(2**25)
            replace_element(row, 0.01, 0.16)


def one_element(said: ReportedStep) -> None:
    """One element of an activation of one rank is 1e8, once; what is behind it is thrown out, and stays finite."""
    if said.since:
        return
    at = said.run._model.position("layers.2.mlp")
    if is_lane(said):
        for hit in np.flatnonzero(said.is_forward() & (said.position == at)):
            replace_element(said.rows[hit : hit + 1], 0.1, 1e8)
        said.scale(said.is_forward() & (said.position > at), 50.0)
        said.scale(said.is_backward(), 8.0)
        said.log(loss=3.0)
    said.scale(said.is_wgrad(), 1.0 + 7.0 / said.run.dp)
    said.log(grad_norm=1.0 + 7.0 / said.run.dp)


def wrong_products(said: ReportedStep) -> None:
    """From one step on a rank's products come out three times too large, from one layer on; all before it is as ever."""
    at = said.run._model.position("layers.2.mlp")
    if is_lane(said):
        said.scale(said.is_forward() & (said.position >= at), 3.0)
        said.scale(said.is_backward(), 1.5)
        said.log(loss=1.4)
    said.scale(said.is_wgrad(), 1.0 + 0.5 / said.run.dp)
    said.log(grad_norm=1.0 + 0.5 / said.run.dp)


def zeroed_weights(said: ReportedStep) -> None:
    """A layer's weights are zero, for good, on all replicas."""
    at = said.at("layers.2.mlp")
    hit = at & (said.kind == Kind.PARAM)
    for name in ("mean", "m2", "m3", "m4", "min", "max"):
        said.rows[name][hit] = 0.0
    said.rows["checksum"][hit] = 0
    said.scale(at & said.is_forward(), 0.0)
    said.log(loss=1.15, grad_norm=1.3)


def frozen_layer(said: ReportedStep) -> None:
    """A layer's weights stand still while its gradients flow."""
    probe(said, Kind.UPDATE_RATIO, "", 0.0, said.at("layers.2.mlp"))


def slow(said: ReportedStep) -> None:
    """One rank is three times as slow, and the others wait for it in the collectives."""
    late = said.place.rank == said.run.num_ranks - 1
    said.end = msgspec.structs.replace(said.end, step_time_s=0.3, wait_s=0.0 if late else 0.2)


HELD_OUT = [
    Plant("optimizer: exp_avg_sq lost", "model", always("model"), state_lost),
    Plant("router collapse", "model", always("model"), router_collapse, needs=lambda run: run.ep > 1),
    Plant("attention logits x30", "model", always("model"), logits),
    Plant("lr x100, 3 steps", "model", always("model"), rate(100.0, 3)),
    Plant("lr x10, one step", "model", always("model"), rate(10.0, 1)),
    Plant("loss grows, gradients not measured", "model", always("model"), rising(1.0, logged=False, steps=20, first=1.08),
          steps=24),
    Plant("a layer's weights zeroed", "model", always("model"), zeroed_weights),
    Plant("a layer frozen", "model", always("model"), frozen_layer, steps=24),
    Plant("fp16: loss scale falls", "precision", always("precision"), scale_falls, dtype="float16"),
    Plant("fp16: gradients underflow", "precision", always("precision"), gradients_underflow, dtype="float16"),
    Plant("data: NaN in the samples of one replica", "batch", always("batch"), input_nan, needs=has_replicas),
    Plant("data: NaN in the samples, one replica in all", "batch", always("batch"), input_nan,
          needs=lambda run: run.dp == 1),
    Plant("label noise, one step", "batch", always("batch"), labels(1.5, 1, one=False)),
    Plant("label noise of one replica, 4 steps", "batch", where_compared("unknown", "batch", cause="batch"),
          labels(1.6, 4, one=True), needs=has_replicas),
    Plant("other data on one replica, one step", "batch", always("batch"), batch_of(1.6, 1.3, 1.8, one=True),
          needs=has_replicas),
    Plant("all-reduce: a bucket wrong on one rank", "hardware", compared("unknown", majority=True), bad_bucket,
          needs=has_copies),
    Plant("all-reduce: a sum wrong on all ranks", "hardware", always("unknown", "program"), bad_sum),
    Plant("flip: top exponent bit of a weight", "hardware", always("hardware"), top_bit),
    Plant("flip: weight x16", "hardware", compared("unknown", "nothing"), small_flip),
    Plant("one activation element 1e8", "hardware", always("unknown"), one_element),
    Plant("products x3 on one rank from now on", "hardware", always("unknown"), wrong_products,
          needs=has_replicas),
    Plant("straggler, three times as slow", "hardware", always("unknown"), slow, needs=has_replicas, steps=40),
    Plant("frozen rank", "hardware", always("unknown"), steps=0, needs=has_replicas, is_frozen=True),
]  # fmt: skip
