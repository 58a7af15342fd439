"""Steps of a run that exists on paper alone: statistics as they are written down, made into rows that have them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from sentinel.errors import ConfigError
from sentinel.ingest.merge import ClosedStep
from sentinel.ingest.model_layout import ModelLayout
from sentinel.ingest.placing import WEIGHT_KINDS
from sentinel.kinds import ELEMENT_KINDS, SHARED_KINDS, labels
from sentinel.messages import ChunkInfo, Descriptor, EndStep, TensorInfo
from sentinel.moments import EMPTY
from sentinel.place import Place
from sentinel.record import NONE_ID, ROW_DTYPE, STATS_DTYPE, Flag, Kind
from sentinel.step_view import RankStep
from sentinel.version import VERSION

NUM_ELEMENTS = 1024
"""Number of elements that every synthetic tensor is declared to have; no values are made for them."""
EPOCH_S = 1_767_225_600.0
"""Seconds since the epoch at which step 0 ended, any fixed date (2026-01-01 here); steps are a second apart."""


class SyntheticSeries(msgspec.Struct, frozen=True, kw_only=True):
    """What one scalar or tensor was, step by step, on some ranks or (none named) on all."""

    name: str
    kind: str
    values: Mapping[str, Sequence[float | None]]
    """Statistic -> value at each step; None: the step has none."""
    ranks: tuple[int, ...] = ()
    noise: float = 0.0
    """Relative standard deviation of the lognormal factor on each value, drawn from the name: the same in each run. What
    comes of a rank's batch (activations and their gradients) is drawn for each rank; copies are alike."""


OF_A_BATCH = labels(ELEMENT_KINDS) - labels(SHARED_KINDS)
"""Kinds of which no two ranks have the same numbers: each has a batch of its own."""


def synthetic_views(
    run: str, series: Sequence[SyntheticSeries], *, num_ranks: int = 1, first_step: int = 0, skipped: Sequence[int] = ()
) -> Iterator[ClosedStep]:
    """Yield the steps until the last value of any series; ranks are data-parallel replicas, a tensor's order is that given.

    ConfigError for statistics that no tensor has together.
    """
    tensors = list(dict.fromkeys((one.name, one.kind) for one in series if one.kind != "scalar"))
    ids = {tensor: at for at, tensor in enumerate(tensors)}
    infos = tuple(
        TensorInfo(
            id=at, name=name, kind=kind, shape=(NUM_ELEMENTS,), site_pos=at,
            placements={"dp": "replicate" if kind in WEIGHT_KINDS else "shard"},
        )
        for (name, kind), at in ids.items()
    )  # fmt: skip
    descriptors = {
        rank: Descriptor(
            version=VERSION, place=Place(rank=rank, world_size=num_ranks, dp_rank=rank, dp_size=num_ranks),
            chunks=(ChunkInfo(vpp_stage=0, depth=0),), tensors=infos, row_fields=(), row_bytes=ROW_DTYPE.itemsize,
        )
        for rank in range(num_ranks)
    }  # fmt: skip
    layout = ModelLayout(descriptors)
    # What is said of single ranks goes before what is said of all.
    ordered = sorted(series, key=lambda one: bool(one.ranks))
    copies = [(one, _with_noise(one)) for one in ordered]
    every = {
        rank: [(one, _with_noise(one, rank) if rank and one.kind in OF_A_BATCH else values) for one, values in copies]
        for rank in descriptors
    }
    num_steps = max((len(values) for _, several in copies for values in several.values()), default=0)
    for at in range(num_steps):
        step = first_step + at
        parts = []
        for rank, descriptor in descriptors.items():
            reported = [(one, values) for one, values in every[rank] if not one.ranks or rank in one.ranks]
            rows = _rows(reported, at, ids, step in skipped)
            scalars = {
                one.name: value
                for one, values in reported
                if one.kind == "scalar" and (value := _at(values["value"], at)) is not None
            }
            end = EndStep(step=step, num_rows=len(rows), num_calls=len(rows), scalars=scalars, is_skipped=step in skipped)
            parts.append(RankStep(rank=rank, descriptor=descriptor, rows=rows, end_step=end, time=EPOCH_S + step))
        yield ClosedStep(run=run, attempt=0, step=step, layout=layout, parts=parts)


def _with_noise(one: SyntheticSeries, rank: int = 0) -> dict[str, list[float | None]]:
    found: dict[str, list[float | None]] = {}
    for statistic, values in one.values.items():
        factor = np.ones(len(values))
        if one.noise:
            # Copies of a weight have the same noise: their seed knows no rank.
            text = f"{one.kind}/{one.name}/{statistic}" + (f"/{rank}" if rank else "")
            seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
            factor = np.exp(np.random.default_rng(seed).normal(0.0, one.noise, len(values)))
        found[statistic] = [None if value is None else value * by for value, by in zip(values, factor.tolist(), strict=True)]
    return found


def _at(values: Sequence[float | None], at: int) -> float | None:
    return values[at] if at < len(values) else None


def _rows(
    reported: Sequence[tuple[SyntheticSeries, Mapping[str, Sequence[float | None]]]],
    at: int,
    ids: Mapping[tuple[str, str], int],
    is_skipped: bool,
) -> npt.NDArray[np.void]:
    of_tensor: dict[int, tuple[SyntheticSeries, dict[str, float]]] = {}
    for one, values in reported:
        if one.kind != "scalar":
            here = {name: value for name, own in values.items() if (value := _at(own, at)) is not None}
            if here:
                of_tensor.setdefault(ids[one.name, one.kind], (one, {}))[1].update(here)
    rows = np.zeros(len(of_tensor), ROW_DTYPE)
    for call, (tensor, (one, statistics)) in enumerate(sorted(of_tensor.items())):
        row = rows[call : call + 1]
        stats = stats_of(statistics, f'"{one.name}" ({one.kind})')
        for name in STATS_DTYPE.names or ():
            row[name] = stats[name]
        row["tensor"], row["kind"], row["call_id"], row["num_folded"] = tensor, int(Kind.of(one.kind)), call, 1
        row["site_pos"], row["max_call_id"], row["max_micro_step"] = tensor, call, 0
        is_bad = bool(stats["num_nan"] or stats["num_pos_inf"] or stats["num_neg_inf"])
        row["bad_call_id"], row["bad_micro_step"] = (call, 0) if is_bad else (NONE_ID, -1)
        row["flags"] = Flag.SKIPPED if is_skipped else 0
        if one.kind in WEIGHT_KINDS:
            text = repr(sorted(statistics.items()))
            row["checksum"] = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") | 1
    return rows


def stats_of(statistics: Mapping[str, float], of: str) -> npt.NDArray[np.void]:
    """Return a row's STATS_DTYPE with these statistics; what is not given is as of a Gaussian of mean 0 and rms 1.

    A value that is no number makes one element of the tensor so. ConfigError for what contradicts itself. of: for errors.
    """
    given = {name: value for name, value in statistics.items() if math.isfinite(value)}
    bad = [value for value in statistics.values() if not math.isfinite(value)]
    found = np.zeros((), STATS_DTYPE)
    for name in STATS_DTYPE.names or ():
        found[name] = EMPTY[name]
    num_nan = int(given.get("nans", 0)) + sum(math.isnan(value) for value in bad)
    num_inf = int(given.get("infs", 0)) + sum(value == math.inf for value in bad)
    found["num_nan"], found["num_pos_inf"] = num_nan, num_inf
    found["num_neg_inf"] = sum(value == -math.inf for value in bad)
    n = NUM_ELEMENTS - int(found["num_nan"] + found["num_pos_inf"] + found["num_neg_inf"])
    if n <= 0:
        return found
    mean = given.get("mean", 0.0)
    spreads = [name for name in ("norm", "rms", "std", "var") if name in given]
    if len(spreads) > 1:
        raise ConfigError(f"{of}: expected one of norm, rms, std and var, got {' and '.join(spreads)}")
    of_norm = {"norm": given.get("norm", 0.0) ** 2, "rms": n * given.get("rms", 0.0) ** 2}
    size = spreads[0] if spreads else ""
    if size in of_norm:
        m2 = of_norm[size] - n * mean * mean
    else:
        m2 = n * (given["var"] if size == "var" else given.get("std", 1.0) ** 2)
    if m2 < -1e-9 * max(1.0, n * mean * mean):
        raise ConfigError(f"{of}: expected a {size} of at least that of its mean {mean:g}, got {given[size]:g}")
    m2 = max(m2, 0.0)
    std = math.sqrt(m2 / n)
    found["count"], found["mean"], found["m2"] = n, mean, m2
    found["m3"], found["m4"] = given.get("skew", 0.0) * n * std**3, given.get("kurtosis", 3.0) * n * std**4
    largest = given.get("absmax", abs(mean) + 3.0 * std)
    found["min"], found["max"] = given.get("min", -largest), given.get("max", largest)
    found["num_zero"] = round(n * given.get("zeros", 1.0 if m2 == 0.0 and mean == 0.0 else 0.0))
    return found
