"""Faults planted into synthetic steps, and the verdicts that each layout can show at best."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import msgspec
import numpy as np

from sentinel.messages import EndStep
from sentinel.place import Place
from sentinel.record import Kind
from sentinel.testing import BitFlip, Nan, SyntheticRun

FORWARD = (int(Kind.ACTIVATION), int(Kind.ACTIVATION_IN))
BACKWARD = (int(Kind.DGRAD), int(Kind.DGRAD_IN))


@dataclasses.dataclass
class ReportedStep:
    """What one rank says of one step, to be changed in place."""

    run: SyntheticRun
    place: Place
    since: int
    """Steps since the fault's first."""
    rows: np.ndarray
    end: EndStep
    position: np.ndarray
    """Of each row, in the forward order of the whole model."""
    names: dict[int, str] = dataclasses.field(default_factory=dict)
    """Id of a tensor -> its name on this rank, for those of probes."""

    @property
    def kind(self) -> np.ndarray:
        """Of each row."""
        return np.asarray(self.rows["kind"])

    def is_forward(self) -> np.ndarray:
        """Rows of the forward."""
        return np.isin(self.kind, FORWARD)

    def is_backward(self) -> np.ndarray:
        """Rows of the backward."""
        return np.isin(self.kind, BACKWARD)

    def is_wgrad(self) -> np.ndarray:
        """Rows of weight gradients."""
        return np.asarray(self.kind == Kind.WGRAD)

    def at(self, module: str) -> np.ndarray:
        """Rows of one module."""
        return np.asarray(self.position == self.run._model.position(module))

    def scale(self, hit: np.ndarray, factor: float) -> None:
        """Multiply all elements of some rows."""
        for name, power in (("mean", 1), ("m2", 2), ("m3", 3), ("m4", 4), ("min", 1), ("max", 1)):
            self.rows[name][hit] *= float(factor) ** power
        shared = hit & np.isin(self.kind, (Kind.WGRAD, Kind.PARAM))
        # Alike on all replicas: reduced, or updated by what was reduced.
        self.rows["checksum"][shared] += np.uint64(int(abs(factor) * 1e6) + 1)

    def spoil(self, hit: np.ndarray, field: str = "num_nan") -> None:
        """Make one element of each row non-finite."""
        self.rows[field][hit] += 1
        self.rows["count"][hit] -= 1
        self.rows["bad_call_id"][hit] = self.rows["call_id"][hit]
        self.rows["bad_micro_step"][hit] = 0

    def log(self, **scalars: float | None) -> None:
        """Multiply logged scalars by factors (`loss`), or give them values (`to_lr`); None takes one away."""
        now = dict(self.end.scalars)
        for name, value in scalars.items():
            if name.startswith("to_"):
                now[name[3:]] = float(value if value is not None else np.nan)
            elif value is None:
                now.pop(name, None)
            elif name in now:
                now[name] *= value
        self.end = msgspec.structs.replace(self.end, scalars=now)

    def skip(self) -> None:
        """The optimizer skips the step."""
        self.end = msgspec.structs.replace(self.end, is_skipped=True)


@dataclasses.dataclass(frozen=True)
class Plant:
    """One fault."""

    name: str
    cause: str
    """`batch`, `model`, `precision`, `hardware`, or `program` (code that is wrong on some ranks)."""
    right: Callable[[SyntheticRun], set[str]]
    """The verdicts that the layout can show at best; `hardware` is wrong wherever it is not among them."""
    change: Callable[[ReportedStep], None] | None = None
    faults: Callable[[SyntheticRun, int], list[Nan | BitFlip]] | None = None
    """Of the synthetic run itself, from its step on."""
    steps: int = 16
    needs: Callable[[SyntheticRun], bool] = lambda run: True
    dtype: str = "float32"
    is_frozen: bool = False
    """A rank falls silent in mid-step; the others wait for it."""
    healthy: int = 60
    """Healthy steps before it."""
    is_silent: bool = False
    """It is no fault: nothing graver than an info may be told."""
    has_comm: bool = False
    """Its collectives are measured."""


def is_lane(said: ReportedStep, dp_rank: int = 1) -> bool:
    """Whether this rank belongs to the struck replica: the last where there are fewer."""
    return said.place.dp_rank == min(dp_rank, said.run.dp - 1)


def struck_rank(run: SyntheticRun, module: str, dp_rank: int = 1) -> int:
    """Return the rank of the struck replica that holds a module."""
    for rank in range(run.num_ranks):
        place, table = run.place(rank), run._ranks[rank].table
        if place.dp_rank == min(dp_rank, run.dp - 1) and module in table.module:
            return rank
    raise ValueError(module)


def always(*suspects: str) -> Callable[[SyntheticRun], set[str]]:
    """The same on every layout."""
    return lambda run: set(suspects)


def where_compared(*otherwise: str, cause: str = "hardware") -> Callable[[SyntheticRun], set[str]]:
    """The cause alone where there is a second copy of the weights."""
    return lambda run: {cause} if has_copies(run) else set(otherwise)


def on_all(cause: str, *alone: str) -> Callable[[SyntheticRun], set[str]]:
    """The cause where replicas tell: they exchange no tokens. alone: what else is right where there is one."""

    def right(run: SyntheticRun) -> set[str]:
        if run.dp == 1:
            return {"unknown", *alone}
        return {cause} if getattr(run, "ep", 1) == 1 else {cause, "unknown"}

    return right


def has_replicas(run: SyntheticRun) -> bool:
    """More than one data-parallel replica."""
    return run.dp > 1


def has_copies(run: SyntheticRun) -> bool:
    """Some weight is held twice."""
    return run.dp > 1 and not getattr(run, "is_sharded", False)


def has_odd_one(run: SyntheticRun) -> bool:
    """Copies among which most are equal."""
    return run.dp // getattr(run, "ep", 1) > 2 and has_copies(run)


def batch_of(
    loss: float, activations: float, gradients: float, *, steps: int = 1, one: bool = False
) -> Callable[[ReportedStep], None]:
    """A batch that moves the loss, the activations and the gradients by factors; of one replica or of all."""

    def change(said: ReportedStep) -> None:
        if said.since >= steps:
            return
        if not one or is_lane(said):
            said.scale(said.is_forward(), activations)
            said.scale(said.is_backward(), gradients)
            said.log(loss=loss)
        whole = gradients if not one else 1.0 + (gradients - 1.0) / said.run.dp
        said.scale(said.is_wgrad(), whole)
        said.log(grad_norm=whole)

    return change


def with_aftermath(said: ReportedStep) -> None:
    """A batch that moved the weights: what comes after it is worse than before, and heals."""
    left = (1.0, 0.35, 0.2, 0.1, 0.05)
    if said.since < len(left):
        share = left[said.since]
        said.scale(said.is_forward(), 1.0 + 0.6 * share)
        said.scale(said.is_backward() | said.is_wgrad(), 1.0 + 4.0 * share)
        said.log(loss=1.0 + 1.5 * share, grad_norm=1.0 + 4.0 * share)


def bad_labels(one: bool) -> Callable[[ReportedStep], None]:
    """No label counts in a micro-batch: the loss is 0/0, the forward is finite."""

    def change(said: ReportedStep) -> None:
        if said.since:
            return
        said.skip()
        if not one or is_lane(said):
            said.spoil(said.is_backward())
            said.log(to_loss=np.nan) if "loss" in said.end.scalars else None
        said.spoil(said.is_wgrad())
        said.log(to_grad_norm=np.nan)

    return change


def rising(rate: float, *, logged: bool, steps: int = 8, first: float = 1.25) -> Callable[[ReportedStep], None]:
    """A learning rate that is too high from the first step on: the next steps get worse and worse, then stay."""

    def change(said: ReportedStep) -> None:
        if logged and said.since < steps:
            said.log(to_lr=1e-3 * rate)
        if not logged:
            said.log(lr=None)
        if said.since:
            factor = first ** min(said.since, steps)
            said.scale(said.is_forward(), factor**0.7)
            said.scale(said.is_backward() | said.is_wgrad(), factor**1.5)
            said.log(loss=factor, grad_norm=factor**1.5)

    return change


def then_nan(said: ReportedStep) -> None:
    """It grows for five steps, then it is NaN everywhere."""
    if said.since < 5:
        factor = 2.0 ** (said.since + 1)
        said.scale(said.is_forward() | said.is_backward() | said.is_wgrad(), factor)
        said.log(loss=factor**0.5, grad_norm=factor)
    else:
        said.spoil(np.ones(len(said.rows), np.bool_))
        said.log(to_grad_norm=np.nan)
        if "loss" in said.end.scalars:
            said.log(to_loss=np.nan)


def attention(said: ReportedStep) -> None:
    """Query weights x30, for good: the weight, and the attention behind it."""
    at = said.at("layers.1.attn")
    said.scale(at & (said.kind == Kind.PARAM), 17.0)
    said.scale(at & said.is_forward(), 4.0)
    said.scale(at & (said.is_wgrad() | said.is_backward()), 6.0)


def zeroed(said: ReportedStep) -> None:
    """A layer's weight gradient is zero, for good."""
    hit = said.at("layers.2.mlp") & said.is_wgrad()
    said.scale(hit, 0.0)
    said.rows["checksum"][hit] = 0


def overflow(forward: bool) -> Callable[[ReportedStep], None]:
    """Half precision: an infinity, in the gradients under a loss scale or in the forward of one replica; it is skipped."""

    def change(said: ReportedStep) -> None:
        said.log(to_loss_scale=65536.0 if said.since == 0 else 32768.0)
        if said.since:
            return
        said.skip()
        if forward:
            if is_lane(said):
                said.spoil(said.at("layers.2.mlp") & said.is_forward(), "num_pos_inf")
                said.spoil((said.position > said.run._model.position("layers.2.mlp")) & said.is_forward())
                said.spoil(said.is_backward())
        else:
            at = said.run._model.position("layers.2.mlp")
            said.spoil(said.is_backward() & (said.position == at - 1), "num_pos_inf")
            said.spoil(said.is_backward() & (said.position < at - 1))
        said.spoil(said.is_wgrad())
        said.log(to_grad_norm=np.inf)

    return change


def flip(kind: str) -> Callable[[ReportedStep], None]:
    """A bit of one element of one weight on one replica, from the first step on."""

    def change(said: ReportedStep) -> None:
        if not is_lane(said) or (said.place.tp_rank != 0):
            if kind == "absurd":
                said.scale(said.is_wgrad(), 30.0) if said.since < 3 else None
                said.log(grad_norm=30.0 if said.since < 3 else 1.0)
            return
        hit = np.flatnonzero(said.at("layers.1.mlp") & (said.kind == Kind.PARAM))
        if not len(hit):
            if kind == "absurd" and said.since < 3:
                said.scale(said.is_wgrad(), 30.0)
            return
        row = said.rows[hit[0] : hit[0] + 1]
        old = 0.01
        new = {"low": old, "quarter": old * 4, "absurd": 3e4}[kind]
        if kind == "low":
            row["checksum"] += np.uint64(2**5)
        else:
            row["checksum"] += np.uint64(2**24 + 12345 if kind == "quarter" else 2**29)
            replace_element(row, old, new)
        if kind == "absurd":
            behind = said.is_forward() & (said.position >= said.run._model.position("layers.1.mlp"))
            said.scale(behind, 500.0)
            said.log(loss=3.0)
            if said.since < 3:
                said.scale(said.is_wgrad(), 30.0)
                said.log(grad_norm=30.0)

    return change


def replace_element(row: np.ndarray, old: float, new: float) -> None:
    """Put `new` in the place of an element `old`: the moments of what is there then, exactly."""
    n, mean = row["count"].astype(np.float64), row["mean"].copy()
    m2, m3, m4 = row["m2"].copy(), row["m3"].copy(), row["m4"].copy()
    s = [n * mean, m2 + n * mean**2, m3 + 3 * mean * m2 + n * mean**3,
         m4 + 4 * mean * m3 + 6 * mean**2 * m2 + n * mean**4]  # fmt: skip
    s = [one + new**k - old**k for k, one in enumerate(s, 1)]
    mu = s[0] / n
    row["mean"] = mu
    row["m2"] = s[1] - n * mu**2
    row["m3"] = s[2] - 3 * mu * s[1] + 2 * n * mu**3
    row["m4"] = s[3] - 4 * mu * s[2] + 6 * mu**2 * s[1] - 3 * n * mu**4
    row["max"], row["min"] = np.maximum(row["max"], new), np.minimum(row["min"], new)


def reloaded(said: ReportedStep) -> None:
    """One rank's program loads other weights: all of them differ from then on."""
    if is_lane(said):
        said.rows["checksum"][said.kind == Kind.PARAM] += np.uint64(987654321)


def unreduced(said: ReportedStep) -> None:
    """A gradient is left out of the reduction: every replica has its own from then on, and its own weight."""
    hit = said.at("layers.2.attn") & np.isin(said.kind, (Kind.WGRAD, Kind.PARAM))
    said.rows["checksum"][hit] += np.uint64(1_000_003 * (said.place.dp_rank + 1) * (said.since + 1))


def poor_shard(said: ReportedStep) -> None:
    """One replica reads bad data for ten steps."""
    if said.since < 10:
        batch_of(1.8, 1.5, 2.0, steps=10, one=True)(said)


def lost_product(said: ReportedStep) -> None:
    """One product on one replica comes out 1e6 times too large, once, and stays finite."""
    if said.since == 0:
        if is_lane(said):
            said.scale(said.is_forward() & (said.position >= said.run._model.position("layers.2.mlp")), 1e6)
            said.log(loss=5.0)
        said.scale(said.is_wgrad(), 1e3)
        said.log(grad_norm=1e3)


def a_row(said: ReportedStep) -> None:
    """Where a value was born non-finite, a whole token of it was: so do modules fail on data."""
    hit = (said.rows["num_nan"] == 1) & said.is_forward()
    said.rows["num_nan"][hit] = 32


def straggler(said: ReportedStep) -> None:
    """One rank takes half as long again, and all others wait for it."""
    slow = said.place.rank == said.run.num_ranks - 1
    said.end = msgspec.structs.replace(said.end, step_time_s=0.15, wait_s=0.0 if slow else 0.05)


def nan(
    module: str, phase: str = "forward", value: str = "nan", *, skipped: bool = True
) -> Callable[..., list[Nan | BitFlip]]:
    """A non-finite value on one rank of one replica, once."""
    return lambda run, step: [
        Nan(step=step, module=module, rank=struck_rank(run, module), phase=phase, value=value, is_skipped=skipped)
    ]


def everywhere(module: str, steps: int) -> Callable[..., list[Nan | BitFlip]]:
    """The same module goes bad on all replicas in the same steps."""
    return lambda run, step: [
        Nan(step=step + s, module=module, rank=struck_rank(run, module, dp)) for s in range(steps) for dp in range(run.dp)
    ]


def again(places: list[tuple[int, str, int]]) -> Callable[..., list[Nan | BitFlip]]:
    """(steps later, module, data-parallel rank)"""
    return lambda run, step: [Nan(step=step + s, module=m, rank=struck_rank(run, m, dp)) for s, m, dp in places]


def on_one_rank(steps: list[int]) -> Callable[..., list[Nan | BitFlip]]:
    """In several modules of one rank of the last replica's last stage, and of no other."""

    def plant(run: SyntheticRun, step: int) -> list[Nan | BitFlip]:
        rank = struck_rank(run, LAST)
        inside = [name for name in run.modules() if name in run.modules_of(rank) and name.endswith((".mlp", ".attn"))]
        names = [inside[-1 - at % len(inside)] for at in range(len(steps))]
        return [Nan(step=step + s, module=name, rank=rank) for s, name in zip(steps, names, strict=True)]

    return plant


LAST = "layers.3.mlp"
PLANTS = [
    Plant("batch, all replicas", "batch", always("batch"), batch_of(2.2, 1.6, 3.0)),
    Plant("batch, all replicas, mild", "batch", always("batch"), batch_of(1.3, 1.0, 2.2)),
    Plant("batch, gradients alone", "batch", always("batch"), batch_of(1.0, 1.0, 4.0)),
    Plant("batch, two in a row", "batch", always("batch"), batch_of(2.0, 1.5, 2.5, steps=2)),
    Plant("batch, and its aftermath", "batch", always("batch"), with_aftermath),
    Plant("batch of one replica", "batch", always("batch"), batch_of(3.0, 1.8, 6.0, one=True), needs=has_replicas),
    Plant("labels, all replicas: loss 0/0", "batch", always("batch"), bad_labels(one=False)),
    Plant("labels of one replica: loss 0/0", "batch", always("batch"), bad_labels(one=True), needs=has_replicas),
    Plant("data: NaN in the first block of one replica", "batch", always("batch"), a_row,
          faults=nan("layers.0.attn"), needs=has_replicas),
    Plant("data: a token NaN in a late block of one replica", "batch", always("batch"), a_row,
          faults=nan("layers.2.attn"), needs=has_replicas),
    Plant("data: NaN on all replicas, once", "batch", on_all("batch"),
          faults=everywhere("layers.1.attn", 1)),
    Plant("bad data of one replica, ten steps", "batch", where_compared("unknown", "batch", cause="batch"), poor_shard,
          steps=24, needs=has_replicas),
    Plant("lr x100, logged", "model", always("model"), rising(100.0, logged=True)),
    Plant("lr x100, not logged", "model", always("model"), rising(100.0, logged=False)),
    Plant("slow divergence", "model", always("model"), rising(1.0, logged=True, steps=40, first=1.05), steps=40),
    Plant("explodes, then NaN", "model", always("model"), then_nan),
    Plant("attention x30", "model", always("model"), attention),
    Plant("zeroed gradient of a layer", "model", always("model"), zeroed),
    Plant("NaN on all replicas, every step", "model", on_all("model", "model"),
          faults=everywhere("layers.1.attn", 6)),
    Plant("fragile module, 3 steps apart", "model", always("model", "unknown"), a_row, needs=has_replicas, steps=30,
          faults=again([(0, LAST, 0), (3, LAST, 1), (6, LAST, 0), (9, LAST, 1)])),
    Plant("fragile module, 15 steps apart", "model", always("model", "unknown"), a_row, needs=has_replicas, steps=60,
          faults=again([(0, LAST, 0), (15, LAST, 1), (30, LAST, 0), (45, LAST, 1)])),
    Plant("fp16: gradients overflow under a scale", "precision", always("precision"), overflow(False), dtype="float16"),
    Plant("fp16: forward overflows on one replica", "precision", always("precision"), overflow(True), dtype="float16"),
    Plant("flip: low bit of a weight", "hardware", where_compared("unknown"), flip("low"), needs=has_copies),
    Plant("flip: weight x4", "hardware", where_compared("unknown"), flip("quarter"), needs=has_copies),
    Plant("flip: absurd weight", "hardware", where_compared("unknown"), flip("absurd")),
    Plant("NaN on one rank, inside", "hardware", always("unknown"), faults=nan("layers.2.mlp")),
    Plant("NaN on one rank, inside, not skipped", "hardware", always("unknown", "model"),
          faults=nan("layers.2.mlp", skipped=False)),
    Plant("inf on one rank, inside", "hardware", always("unknown"), faults=nan("layers.2.attn", value="inf")),
    Plant("NaN on one rank, backward", "hardware", always("unknown"),
          faults=nan("layers.2.mlp", "backward")),
    Plant("NaN in a weight gradient", "hardware", always("unknown"), faults=nan("layers.2.mlp", "wgrad")),
    Plant("NaN on one rank, again and again", "hardware",
          always("unknown"), needs=has_replicas, steps=60, faults=on_one_rank([0, 9, 17, 30, 41])),
    Plant("one product lost, finite", "hardware", always("unknown"), lost_product, needs=has_replicas),
    Plant("straggler", "hardware", always("unknown"), straggler, needs=has_replicas, steps=40),
    Plant("weights of one rank reloaded", "program", always("program"), reloaded, needs=has_copies),
    Plant("gradient left out of the reduction", "program", always("program"), unreduced, needs=has_copies),
]  # fmt: skip
