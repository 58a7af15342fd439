"""The fixed pack on logs of other kinds than the labelled ones: alterations, planted spikes and jumps, other processes.

Called by detection.py. All labels are made here by the rule of the labelled logs, from the whole series and without any
detector: a row is an event where it exceeds the median of the 75 rows before by max(10 robust deviations, 10 % of a loss or
a factor 2 of a norm) and what follows too (spike), or where the level itself moves (jump); past max(5 deviations, 3 % / a
factor 1.35) it is ambiguous. The deviation is the MAD about the course of the 301 rows around (chosen;
so taken, the labels of the manifest come out again, as the first table shows). What was planted is an event where the rule
says so. The labels were written before any rule was changed; the tables were looked at while rules were.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

BEFORE, COURSE, AROUND, AFTER = 75, 31, 301, 10
"""Rows of the median before; of the course; around, that the deviation is taken over; and after, that a spike exceeds."""
EVENT = {"loss": (10.0, 0.10), "grad_norm": (10.0, 1.0)}
"""Deviations, and relative rise, past which a row is an event; AMBIGUOUS likewise."""
AMBIGUOUS = {"loss": (5.0, 0.03), "grad_norm": (5.0, 0.35)}
BURN_IN, SPACING = 128, 400
"""Rows that count for nothing, and rows between two plants in one log."""
MOST_PLANTS = 40
"""Plants a repository, so that one with many runs is not the whole exam."""
Label = dict[str, Any]


def label(x: np.ndarray, channel: str, quantum: float = 0.0) -> Label:
    """Return events and ambiguous stretches of a series, as score.py reads them.

    quantum: the last digit it is printed with.
    """
    z, low_rise, high_rise = _scale(x, channel)
    before = _before(z, BEFORE)
    noise = np.abs(z - _around(z, COURSE))
    sigma = np.maximum(1.4826 * _around(noise, AROUND), 1e-6)
    if quantum:
        sigma = np.maximum(sigma, 0.5 * quantum / np.maximum(np.abs(x), quantum) if z is not x else 0.5 * quantum)
    height = z - before
    seen = np.arange(len(x)) >= 32
    is_far = seen & (height >= np.maximum(EVENT[channel][0] * sigma, high_rise))
    unsure = seen & (height >= np.maximum(AMBIGUOUS[channel][0] * sigma, low_rise))
    events, ambiguous = [], []
    for first, last in _stretches(np.flatnonzero(is_far), 5):
        need = max(EVENT[channel][0] * sigma[first], float(np.atleast_1d(high_rise)[first % np.size(high_rise)]))
        top = float(z[first : last + 1].max())
        spike = last - first < 25 and top - _median(z[last + 1 : last + 1 + AFTER]) >= 0.5 * need
        jump = _median(z[first : first + BEFORE]) - before[first] >= 0.5 * need and len(x) - first >= 25
        if spike or jump:
            events.append({"channel": channel, "kind": "spike" if spike else "jump", "onset": first, "end": last})
        else:
            ambiguous.append((first, last + 1))
    for first, last in _stretches(np.flatnonzero(unsure & ~is_far), 1):
        ambiguous.append((first, last + 1))
    return {"events": events, "ambiguous": {channel: ambiguous}}


def _scale(x: np.ndarray, channel: str) -> tuple[np.ndarray, Any, Any]:
    """Return the values on the labels' scale and the two rises there: logarithms, or shares of the size near zero."""
    low, high = AMBIGUOUS[channel][1], EVENT[channel][1]
    if (x > 0.0).all():
        return np.log(x), np.log1p(low), np.log1p(high)
    size = np.abs(_before(x, BEFORE))
    return x, low * size, high * size


def _before(z: np.ndarray, rows: int) -> np.ndarray:
    """Return the median of so many rows before each, of fewer at the start."""
    out = np.full(len(z), z[0])
    for row in range(1, min(rows, len(z))):
        out[row] = np.median(z[:row])
    if len(z) > rows:
        out[rows:] = np.median(sliding_window_view(z, rows), axis=1)[:-1]
    return out


def _around(z: np.ndarray, rows: int) -> np.ndarray:
    half = rows // 2
    padded = np.pad(z, half, mode="reflect" if len(z) > half else "edge")
    return np.asarray(np.median(sliding_window_view(padded, rows), axis=1))


def _median(z: np.ndarray) -> float:
    return float(np.median(z)) if len(z) else -np.inf


def _stretches(rows: np.ndarray, gap: int) -> list[tuple[int, int]]:
    if not rows.size:
        return []
    cuts = np.flatnonzero(np.diff(rows) > gap)
    return list(zip(rows[np.r_[0, cuts + 1]].tolist(), rows[np.r_[cuts, len(rows) - 1]].tolist(), strict=True))


def agreement(logs: Any) -> None:
    """Print how far these labels are those of the manifest."""
    print("\n## Labels of the exam beside the manifest's, logs as they are\n")
    print("| channel | manifest's events | of those ours, ambiguous at least | ours | of those the manifest's |")
    print("|---|---|---|---|---|")
    for channel in ("loss", "grad_norm"):
        theirs = ours = both = unsure = back = 0
        for run in logs.half(channel):
            x = logs.column(run["file"], channel)
            if not np.isfinite(x).all():
                continue
            found = label(x, channel)
            scored = [e for e in run["events"] if e["channel"] == channel and e["kind"] in ("spike", "jump")]
            want = [e for e in scored if e["onset"] >= BURN_IN]
            have = [e for e in found["events"] if e["onset"] >= BURN_IN]
            theirs, ours = theirs + len(want), ours + len(have)
            near = [any(e["onset"] - 5 <= h["onset"] <= e["end"] + 5 for h in have) for e in want]
            both += sum(near)
            unsure += sum(
                any(first - 5 <= e["onset"] <= last + 5 for first, last in found["ambiguous"][channel])
                for e, hit in zip(want, near, strict=True) if not hit
            )  # fmt: skip
            back += sum(any(e["onset"] - 5 <= h["onset"] <= e["end"] + 75 for e in want) for h in have)
        print(f"| {channel} | {theirs} | {both}, {both + unsure} | {ours} | {back} |")


# -- planted into the labelled logs -----------------------------------------------------------------------------------------


Plant = Callable[[np.ndarray, int, float, float, Any], None]
"""Changes z from a row on. Arguments: z, row, the height that is an event there, by how much to pass it, random numbers."""


def spike(rows: int) -> Plant:
    """Return a plant: so many rows stand above the median before."""

    def plant(z: np.ndarray, row: int, height: float, factor: float, rng: Any) -> None:
        z[row : row + rows] = np.median(z[row - BEFORE : row]) + factor * height

    return plant


def jump(z: np.ndarray, row: int, height: float, factor: float, rng: Any) -> None:
    """The level moves for 150 rows."""
    z[row : row + 150] += factor * height


def again(rows: int) -> Plant:
    """Return a plant: a spike so many rows after one of three rows and twice its size."""

    def plant(z: np.ndarray, row: int, height: float, factor: float, rng: Any) -> None:
        z[row - rows : row - rows + 3] += 2.0 * factor * height
        z[row] = np.median(z[row - BEFORE : row]) + factor * height

    return plant


def restless(share: float, low: float, high: float) -> Plant:
    """Return a plant: a spike after 200 rows of which a share stand high by [low, high] of what is an event."""

    def plant(z: np.ndarray, row: int, height: float, factor: float, rng: Any) -> None:
        at = row - 200 + np.flatnonzero(rng.random(195) < share)
        z[at] += height * rng.uniform(low, high, len(at))
        z[row] = np.median(z[row - BEFORE : row]) + factor * height

    return plant


def above_all(z: np.ndarray, row: int, height: float, factor: float, rng: Any) -> None:
    """Among rows that stand up to thirty times as high a spike that is far above them all."""
    at = row - 200 + np.flatnonzero(rng.random(195) < 0.15)
    z[at] += rng.uniform(0.5, 3.4, len(at))
    z[row] = z[row - 200 : row].max() + 1.0 + factor * height


def climb(rows: int, share: float) -> Plant:
    """Return a plant: the level climbs over so many rows, by that share of an event's height more than is one."""

    def plant(z: np.ndarray, row: int, height: float, factor: float, rng: Any) -> None:
        rise = np.minimum(np.arange(150) / rows, 1.0) * share * factor * height
        z[row : row + 150] += rise[: len(z) - row]

    return plant


PLANTS: dict[str, Plant] = {
    "a spike of one row": spike(1),
    "a spike of four rows": spike(4),
    "a jump of the level": jump,
    "8 rows after another": again(8),
    "15 rows after another": again(15),
    "40 rows after another": again(40),
    "after 200 rows with 5 % ambiguous": restless(0.05, 0.5, 0.75),
    "after 200 rows with 12 % ambiguous": restless(0.12, 0.5, 0.75),
    "after 200 rows with 10 % events": restless(0.10, 1.1, 2.5),
    "above all, among 15 % at up to x30": above_all,
    "a climb over 20 rows": climb(20, 1.5),
}
FACTORS = (1.1, 1.5, 3.0)


def planted(logs: Any, channel: str, plant: Plant, factor: float) -> list[tuple[dict[str, Any], np.ndarray]]:
    """Return runs with plants at clean rows of the manifest, and their values."""
    found = []
    for run, x, rows in _clean_rows(logs, channel):
        rng = np.random.default_rng([len(x), rows[0]])
        z = np.log(x)
        limit, rise = EVENT[channel]
        sigma = 1.4826 * _around(np.abs(z - _around(z, COURSE)), AROUND)
        for row in rows:
            plant(z, row, max(limit * float(sigma[row]), float(np.log1p(rise))), factor, rng)
        found.append((_only_near(_run(run, np.exp(z), channel), rows), np.exp(z)))
    return found


def _clean_rows(logs: Any, channel: str) -> list[tuple[dict[str, Any], np.ndarray, list[int]]]:
    """Return runs, values and rows to plant at: nothing labelled from 210 rows before to 160 after."""
    found, by_repo = [], defaultdict(list)
    for run in logs.half(channel):
        x = logs.column(run["file"], channel)
        if not (np.isfinite(x).all() and (x > 0.0).all()):
            continue
        busy = [e["onset"] for e in run["events"] if e["channel"] == channel] + [a for a, _ in run["ambiguous"][channel]]
        at = np.arange(BURN_IN + 210, len(x) - 160, SPACING)
        rows = [int(row) for row in at if not any(row - 210 <= b <= row + 160 for b in busy)]
        by_repo[run["repo"]] += [(run, x, row) for row in rows]
    for places in by_repo.values():
        chosen = [places[i] for i in np.linspace(0, len(places) - 1, min(len(places), MOST_PLANTS)).astype(int)]
        for file in dict.fromkeys(run["file"] for run, _, _ in chosen):
            mine = [(run, x, row) for run, x, row in chosen if run["file"] == file]
            found.append((mine[0][0], mine[0][1], [row for _, _, row in mine]))
    return found


def _run(run: dict[str, Any], x: np.ndarray, channel: str, quantum: float = 0.0) -> dict[str, Any]:
    """Return a run whose labels are of these values."""
    return {**run, "n": len(x), "repo": run["file"], "channels": [channel], **label(x, channel, quantum)}


def _only_near(run: dict[str, Any], rows: list[int]) -> dict[str, Any]:
    """Return the run with no events to catch but those that begin where one was planted."""
    events = [e if any(-2 <= e["onset"] - r <= 25 for r in rows) else {**e, "kind": "other"} for e in run["events"]]
    return {**run, "events": events}


# -- processes of other kinds ----------------------------------------------------------------------------------------------


ROWS = 4000


def _ar(rng: Any, n: int, phi: float) -> np.ndarray:
    """Return a first-order autoregression of deviation 1."""
    noise = rng.standard_normal(n) * np.sqrt(1.0 - phi * phi)
    out = np.empty(n)
    last = rng.standard_normal()
    for i, e in enumerate(noise.tolist()):
        last = phi * last + e
        out[i] = last
    return out


def _falls(n: int, low: float = 2.0, high: float = 8.0, rows: float = 20.0) -> np.ndarray:
    return np.asarray(low + high * (1.0 + np.arange(n) / rows) ** -0.7)


def _power(rng: Any, n: int) -> np.ndarray:
    """A full batch: no noise but that of the arithmetic."""
    return np.asarray((1.0 + np.arange(n) / 30.0) ** -1.2 * np.exp(1e-4 * rng.standard_normal(n)))


def _wobble(rng: Any, n: int) -> np.ndarray:
    """A full batch under Adam: slow waves about a decay, nearly no noise."""
    t = np.arange(n)
    wave = 0.05 * np.sin(t / 17.0) * np.sin(t / 90.0)
    return np.asarray((1.0 + t / 30.0) ** -1.0 * np.exp(wave + 1e-3 * rng.standard_normal(n)))


def _bursts(rng: Any, n: int) -> np.ndarray:
    """Noise of 1 %, and of 4 % in stretches of 100 rows that come and go."""
    loud = np.repeat(rng.random(n // 100 + 1) < 0.3, 100)[:n]
    return np.asarray(_falls(n) * np.exp(np.where(loud, 0.04, 0.01) * rng.standard_normal(n)))


PROCESSES: dict[str, tuple[str, Callable[[Any, int], np.ndarray]]] = {
    "noise of 2 %": ("loss", lambda g, n: _falls(n) * np.exp(0.02 * g.standard_normal(n))),
    "noise of 0.2 %": ("loss", lambda g, n: _falls(n) * np.exp(0.002 * g.standard_normal(n))),
    "a small batch: noise of 30 %": ("loss", lambda g, n: _falls(n) * g.gamma(11.0, 1.0 / 11.0, n)),
    "Student's t, 4 degrees": ("loss", lambda g, n: _falls(n) * np.exp(0.015 * g.standard_t(4, n))),
    "Laplace": ("loss", lambda g, n: _falls(n) * np.exp(g.laplace(0.0, 0.02, n))),
    "AR(1), 0.9": ("loss", lambda g, n: _falls(n) * np.exp(0.02 * _ar(g, n, 0.9) + 0.005 * g.standard_normal(n))),
    "noise whose size wanders": (
        "loss",
        lambda g, n: _falls(n) * np.exp(0.02 * np.exp(0.5 * _ar(g, n, 0.995)) * g.standard_normal(n)),
    ),
    "noise in bursts": ("loss", _bursts),
    "epochs: steps down": (
        "loss",
        lambda g, n: _falls(n) * 0.93 ** (np.arange(n) // 300) * np.exp(0.015 * g.standard_normal(n)),
    ),
    "epochs: saw teeth of 6 %": (
        "loss",
        lambda g, n: 2.0 * np.exp(-0.06 * (np.arange(n) % 250) / 250 + 0.01 * g.standard_normal(n)),
    ),
    "full batch, no noise": ("loss", _power),
    "full batch, waves": ("loss", _wobble),
    "reinforcement: noise of 25 %": ("loss", lambda g, n: 0.4 * np.exp(0.25 * g.standard_normal(n) + 0.3 * _ar(g, n, 0.99))),
    "ELBO: from 50 to -80": (
        "loss",
        lambda g, n: -80.0 + 130.0 * np.exp(-np.arange(n) / 500.0) + 1.5 * g.standard_normal(n),
    ),
    "ELBO: through zero": ("loss", lambda g, n: 5.0 * np.exp(-np.arange(n) / 400.0) - 2.0 + 0.02 * g.standard_normal(n)),
    "likelihood about -3": ("loss", lambda g, n: -3.0 + 4.0 * np.exp(-np.arange(n) / 150.0) + 0.05 * g.standard_normal(n)),
    "six decades down": ("loss", lambda g, n: 10.0 ** (-6.0 * np.arange(n) / n) * np.exp(0.15 * g.standard_normal(n))),
    "six decades at once, then still": (
        "loss",
        lambda g, n: (np.exp(-np.arange(n) / 30.0) + 1e-6) * np.exp(0.1 * g.standard_normal(n)),
    ),
    "a long steep descent": (
        "loss",
        lambda g, n: 10.0 * np.exp(-2.5 * np.arange(n) / 600.0).clip(0.1) * np.exp(0.02 * g.standard_normal(n)),
    ),
    "two decimals": ("loss", lambda g, n: np.round(0.3 + _falls(n, 0.5, 3.0) * np.exp(0.02 * g.standard_normal(n)), 2)),
    "norm: noise of 8 %": ("grad_norm", lambda g, n: 0.4 * np.exp(0.08 * g.standard_normal(n))),
    "norm: noise of 30 %": ("grad_norm", lambda g, n: _falls(n, 0.5, 4.0) * np.exp(0.3 * g.standard_normal(n))),
    "norm: skewed": ("grad_norm", lambda g, n: 0.3 + g.gamma(3.0, 0.1, n)),
    "norm: wandering": ("grad_norm", lambda g, n: np.exp(0.12 * g.standard_normal(n) + 0.4 * _ar(g, n, 0.998))),
    "norm: falls by decades": (
        "grad_norm",
        lambda g, n: 10.0 ** (-3.0 * np.arange(n) / n) * np.exp(0.12 * g.standard_normal(n)),
    ),
    "norm: grows x20": ("grad_norm", lambda g, n: 20.0 ** (np.arange(n) / n) * np.exp(0.12 * g.standard_normal(n))),
    "norm: two decimals": ("grad_norm", lambda g, n: np.round(0.25 * np.exp(0.08 * g.standard_normal(n)), 2)),
}


def process(name: str, seed: int) -> tuple[dict[str, Any], np.ndarray]:
    """Return a series of a process with a spike or a jump every SPACING rows, and its labels."""
    channel, make = PROCESSES[name]
    rng = np.random.default_rng([seed, len(name)])
    x = np.asarray(make(rng, ROWS), dtype=np.float64)
    quantum = 0.01 if "decimals" in name else 0.0
    z, _, rise = _scale(x, channel)
    sigma = 1.4826 * _around(np.abs(z - _around(z, COURSE)), AROUND)
    rows = list(range(BURN_IN + 30 + 37 * seed % 200, ROWS - 200, SPACING))
    for at, row in enumerate(rows):
        height = max(EVENT[channel][0] * float(sigma[row]), float(np.broadcast_to(rise, len(x))[row]))
        (spike(1), spike(3), jump)[at % 3](z, row, height, FACTORS[(at + seed) % 3], rng)
    values = z if (x <= 0.0).any() else np.exp(z)
    values = np.round(values, 2) if quantum else values
    run = _run({"file": f"{name} {seed}", "window": 10}, values, channel, quantum)
    return _only_near(run, rows), values


# -- tables ----------------------------------------------------------------------------------------------------------------


def outcome(logs: Any, detector: Any, channel: str, cases: list[tuple[dict[str, Any], np.ndarray]]) -> dict[str, Any]:
    """Return the scorer's figures of runs and their values."""
    alarms = {}
    for run, x in cases:
        flagged = detector.scan(x[:, None], detector.state(1))[:, 0] >= 1.0
        alarms[run["file"], channel] = np.flatnonzero(flagged).tolist()
    result: dict[str, Any] = logs.scorer.score([run for run, _ in cases], alarms, channel)
    return result


def relabelled(logs: Any, channel: str, alter: Any) -> list[tuple[dict[str, Any], np.ndarray]]:
    """Return altered logs, labelled anew; those with a value that is no positive number left out."""
    found = []
    for run in logs.half(channel):
        original = logs.column(run["file"], channel)
        if np.isfinite(original).all():
            values, _ = alter(original, np.random.default_rng(0))
            if len(values) > 2 * BURN_IN and np.isfinite(values).all():
                # The last digit printed hides noise below it: no row is an event by that alone.
                steps = np.abs(np.diff(values))
                quantum = float(steps[steps > 1e-9].min()) if (steps > 1e-9).any() else 0.0
                found.append(({**_run(run, values, channel, quantum), "repo": run["repo"]}, values))
    return found


def unseen(logs: Any, detectors: Any, alterations: Any) -> None:
    """Print the whole exam, and its sums."""
    agreement(logs)
    total: dict[str, list[dict[str, Any]]] = defaultdict(list)
    print("\n## Unseen: altered logs, labelled anew; weighted recall | lenient | strict per 10k\n")
    print("| alteration | channel | events | recall | lenient | strict |\n|---|---|---|---|---|---|")
    for name, alter in alterations.items():
        if name.startswith("inf"):
            continue
        for channel, detector in detectors.items():
            cases = relabelled(logs, channel, alter)
            _row(name, channel, outcome(logs, detector, channel, cases), total["altered " + channel])
    print(
        "\n## Unseen: planted at clean rows, 1.1, 1.5 and 3 times what the labels ask; recall | lenient | strict per 10k\n"
    )
    print("| plant | channel | events | recall | lenient | strict |\n|---|---|---|---|---|---|")
    for name, plant in PLANTS.items():
        for channel, detector in detectors.items():
            parts = [outcome(logs, detector, channel, planted(logs, channel, plant, factor)) for factor in FACTORS]
            _row(name, channel, _sum(parts), total["planted " + channel])
    print("\n## Unseen: other processes; recall | lenient | strict per 10k\n")
    print("| process | channel | events | recall | lenient | strict |\n|---|---|---|---|---|---|")
    for name, (channel, _) in PROCESSES.items():
        cases = [process(name, seed) for seed in range(8)]
        _row(name, channel, outcome(logs, detectors[channel], channel, cases), total["processes " + channel])
    print("\n## Unseen: sums; every line above counts alike\n")
    print("| part | lines | recall | worst | lenient | strict |\n|---|---|---|---|---|---|")
    for name, parts in total.items():
        recalls = [part["weighted_recall"] for part in parts if part["events"]]
        false = [np.mean([part[key] for part in parts]) for key in ("per_10k_lenient", "per_10k_strict")]
        print(f"| {name} | {len(parts)} | {np.mean(recalls):.3f} | {min(recalls):.3f} | {false[0]:.2f} | {false[1]:.2f} |")


def _row(name: str, channel: str, found: dict[str, Any], total: list[dict[str, Any]]) -> None:
    total.append(found)
    recall = f"{found['weighted_recall']:.3f}" if found["events"] else "-"
    false = f"{found['per_10k_lenient']:.2f} | {found['per_10k_strict']:.2f}"
    print(f"| {name} | {channel} | {found['events']} | {recall} | {false} |")


def _sum(parts: list[dict[str, Any]]) -> dict[str, Any]:
    events = sum(part["events"] for part in parts)
    clean = sum(part["clean_rows"] for part in parts)
    return {
        "events": events,
        "weighted_recall": sum(part["events"] * part["recall"] for part in parts) / max(events, 1),
        **{
            key: sum(part["clean_rows"] * part[key] for part in parts) / max(clean, 1)
            for key in ("per_10k_lenient", "per_10k_strict")
        },
    }
