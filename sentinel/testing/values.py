"""The values that a synthetic run observes: drawn from a seed, and bad where planted faults carry it."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from sentinel.place import Place
from sentinel.record import Kind
from sentinel.testing.faults import BitFlip, BlowUp, Fault, LossJump, Nan
from sentinel.testing.model import RankTables, SyntheticModel, Table

_MIX = np.uint64(0x9E3779B97F4A7C15)


class SyntheticValues:
    """What a step's tensors hold; the same seed, step and faults make the same."""

    def __init__(self, model: SyntheticModel, tables: RankTables, *, elements: int, seed: int) -> None:
        """tables: of all ranks. elements: how many values are drawn for each row."""
        self.faults: list[Fault] = []
        self._model = model
        self._tables = tables
        self._elements = elements
        self._seed = seed
        self._poisoned_from: int | None = None
        self._birthplaces: dict[Nan, Place] = {}

    def rows(self, table: Table, step: int) -> npt.NDArray[np.void]:
        """Return the rows of one rank's step, one an observation: [observations] ROW_DTYPE."""
        rows = table.rows.copy()
        with np.errstate(over="ignore"):
            key = table.key + np.where(table.moves, np.uint64(step + 1), np.uint64(0)) * _MIX
            bits = _mix(key[:, None] + np.arange(self._elements, dtype=np.uint64)[None, :] * _MIX)
        half = self._elements // 2
        uniform = (bits >> np.uint64(11)).astype(np.float64) / 2.0**53 + 2.0**-54
        radius, angle = np.sqrt(-2.0 * np.log(uniform[:, :half])), 2.0 * np.pi * uniform[:, half : 2 * half]
        x = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
        scale = table.scale * np.where(table.moves, 1.0 / math.sqrt(1.0 + 0.01 * step), 1.0 + 1e-4 * step)
        x *= (scale * self._factors(table, step))[:, None]
        mean = x.mean(axis=1)
        centered = x - mean[:, None]
        # A tensor of `count` elements whose distribution is that of the values drawn.
        times = table.count / x.shape[1]
        rows["count"], rows["mean"] = table.count, mean
        rows["m2"] = (centered**2).sum(axis=1) * times
        rows["m3"] = (centered**3).sum(axis=1) * times
        rows["m4"] = (centered**4).sum(axis=1) * times
        rows["min"], rows["max"] = x.min(axis=1), x.max(axis=1)
        is_weight = (rows["kind"] == Kind.PARAM) | (rows["kind"] == Kind.WGRAD)
        rows["checksum"] = np.where(is_weight, _mix(table.key + np.uint64(step + 1)), np.uint64(0))
        for fault in self.faults:
            if isinstance(fault, BitFlip) and fault.step <= step < fault.step + fault.for_steps:
                is_hit = (rows["kind"] == Kind.PARAM) & (table.position == self._model.position(fault.module))
                if table.descriptor.place.rank == fault.rank and is_hit.any():
                    rows["checksum"][np.flatnonzero(is_hit)[0]] += np.uint64(2**52)
            if isinstance(fault, Nan) and fault.step == step:
                self._poison(table, rows, fault)
                if not fault.is_skipped:
                    # Clipped by a norm that is NaN: whatever the optimizer writes is.
                    _make_bad(rows, np.isin(rows["kind"], (Kind.EXP_AVG, Kind.UPDATE)), "nan", everything=True)
        if self._poisoned_from is not None and step >= self._poisoned_from:
            _make_bad(rows, np.ones(len(rows), np.bool_), "nan", everything=True)
        return rows

    def _factors(self, table: Table, step: int) -> npt.NDArray[np.float64]:
        factors = np.ones(len(table.rows))
        for fault in self.faults:
            if isinstance(fault, BlowUp) and fault.is_on(step):
                factors *= fault.factor ** self._share(table, fault)
        return factors

    def _share(self, table: Table, fault: BlowUp) -> npt.NDArray[np.float64]:
        """Return how much of a fault each row shows: the exponent of its factor."""
        at, kinds, position = self._model.position(fault.module), table.rows["kind"], table.position
        is_forward = np.isin(kinds, (Kind.ACTIVATION, Kind.ACTIVATION_IN))
        is_backward, is_wgrad = np.isin(kinds, (Kind.DGRAD, Kind.DGRAD_IN)), kinds == Kind.WGRAD
        share = np.zeros(len(kinds))
        if fault.kind in ("param", "wgrad"):
            share[(kinds == Kind.of(fault.kind)) & (position == at)] = 1.0
        elif fault.kind in ("dgrad", "dgrad_in"):
            first = at if fault.kind == "dgrad" else at - 1
            share[is_backward & (position <= first)] = fault.spread
            share[is_backward & (position == first)] = 1.0
            share[is_wgrad & (position <= at)] = fault.in_gradients
        else:
            share[is_forward & (position > at)] = fault.spread
            share[is_forward & (position == at)] = 1.0
            share[is_backward | is_wgrad] = fault.in_gradients
        if fault.micro_step is not None:
            share[(table.rows["micro_step"] >= 0) & (table.rows["micro_step"] != fault.micro_step)] = 0.0
        if fault.rank is not None and table.descriptor.place.dp_rank != self._place(fault.rank).dp_rank:
            share[~is_wgrad] = 0.0
        return share

    def _place(self, rank: int) -> Place:
        return self._tables[rank].descriptor.place

    def _birthplace(self, fault: Nan) -> Place:
        found = self._birthplaces.get(fault)
        if found is None:
            found = self._birthplaces[fault] = self._found_birthplace(fault)
        return found

    def _found_birthplace(self, fault: Nan) -> Place:
        holders = [table.descriptor.place for table in self._tables if fault.module in table.module]
        chosen = [place for place in holders if fault.rank in (None, place.rank)]
        if not chosen:
            ranks = ", ".join(str(place.rank) for place in holders)
            raise ValueError(f"rank {fault.rank} does not hold {fault.module!r}; ranks {ranks} do")
        return chosen[0]

    def _poison(self, table: Table, rows: npt.NDArray[np.void], fault: Nan) -> None:
        place, born = table.descriptor.place, self._birthplace(fault)
        position, kinds = table.position, rows["kind"]
        at = self._model.position(fault.module)
        is_forward = np.isin(kinds, (Kind.ACTIVATION, Kind.ACTIVATION_IN))
        is_backward = np.isin(kinds, (Kind.DGRAD, Kind.DGRAD_IN))
        is_wgrad = kinds == Kind.WGRAD
        of_replica = place.dp_rank == born.dp_rank
        is_now = rows["micro_step"] == fault.micro_step
        is_own = place.tp_rank == born.tp_rank
        sums = self._model.exchanges(backward=fault.phase != "forward")
        # The other ranks of the tensor-parallel group catch it at the first sum over the group.
        first = at if is_own else min((one for one in sums if one >= at), default=1 << 30)
        here = (position == at) & (first == at)
        if fault.phase == "forward":
            bad = is_now & of_replica & ((is_forward & (position >= first)) | is_backward) | is_wgrad
        elif fault.phase == "backward":
            last = at if is_own else max((one for one in sums if one <= at), default=-1)
            spoilt = position < last
            bad = (is_now & of_replica & is_backward & spoilt) | (is_wgrad & (spoilt | (is_own & (position == at))))
        else:
            bad = is_wgrad & (position == at) & is_own
        origin = here & {"forward": is_forward & is_now, "backward": is_backward & is_now}.get(fault.phase, is_wgrad)
        _make_bad(rows, bad & ~origin, "nan", everything=True)
        _make_bad(rows, bad & origin, fault.value, everything=False)

    def scalars(self, place: Place, step: int) -> dict[str, float]:
        """Return what the rank at a place logs of a step."""
        noise = np.random.default_rng((self._seed, step, place.dp_rank))
        scalars = {"lr": 1e-3}
        loss = (2.0 + 4.0 * math.exp(-0.01 * step)) * float(1.0 + 0.01 * noise.standard_normal())
        norm = 1.0 / math.sqrt(1.0 + 0.01 * step)
        norm *= float(1.0 + 0.03 * np.random.default_rng((self._seed, step)).standard_normal())
        for fault in self.faults:
            if isinstance(fault, Nan) and fault.step == step:
                norm = math.nan
                if fault.phase == "forward" and place.dp_rank == self._birthplace(fault).dp_rank:
                    loss = math.nan
            elif isinstance(fault, BlowUp) and fault.is_on(step):
                norm *= fault.factor**fault.in_loss
                if fault.rank is None or place.dp_rank == self._place(fault.rank).dp_rank:
                    loss *= fault.factor**fault.in_loss
            elif isinstance(fault, LossJump) and fault.step <= step < fault.step + fault.for_steps:
                loss *= fault.factor if fault.rank in (None, place.rank) else 1.0
        if self._poisoned_from is not None and step >= self._poisoned_from:
            loss = norm = math.nan
        scalars["grad_norm"] = norm
        if self._model.has_loss(place):
            scalars["loss"] = loss
        return scalars

    def is_skipped(self, step: int) -> bool:
        """Whether the optimizer skips a step."""
        return any(isinstance(f, Nan) and f.step == step and f.is_skipped for f in self.faults)

    def settle(self, step: int) -> None:
        """Have the optimizer take a step: a bad one that was not skipped leaves bad weights behind."""
        if any(isinstance(f, Nan) and f.step == step and not f.is_skipped for f in self.faults):
            self._poisoned_from = step + 1 if self._poisoned_from is None else self._poisoned_from


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scramble 64-bit words (splitmix64): values that depend on nothing but their key."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def _make_bad(rows: npt.NDArray[np.void], hit: npt.NDArray[np.bool_], value: str, *, everything: bool) -> None:
    """Turn one element of each row that is hit, or all of them, non-finite."""
    field = {"nan": "num_nan", "inf": "num_pos_inf", "-inf": "num_neg_inf"}[value]
    count = rows["count"]
    num_bad = np.where(hit, count if everything else np.minimum(count, 1), 0)
    rows[field] += num_bad
    left = count - num_bad
    for name in ("m2", "m3", "m4"):
        rows[name] = np.where(hit, rows[name] * (left / np.maximum(count, 1)), rows[name])
    is_empty = hit & (left == 0)
    rows["count"] = left
    rows["mean"][is_empty], rows["min"][is_empty], rows["max"][is_empty] = 0.0, np.inf, -np.inf
    rows["bad_call_id"] = np.where(hit, rows["call_id"], rows["bad_call_id"])
    rows["bad_micro_step"] = np.where(hit, rows["micro_step"], rows["bad_micro_step"])
