"""Scalar detectors on families of made series, labelled: noises, schedules, units and printers of many trainers.

usage: detection_families.py [--seed 0] [--rivals] [--runs 3] [PART ...]        PART: spikes, drift; none: both

The generators know their own noise: a spike of one row, of four, or a jump of the level stands 12, 16 or 30 deviations of
the noise of the last 300 rows above the series (a loss by 15 % at least, a norm by a factor of 2.2), and what the noise
itself throws past 6 of its deviations is neither event nor false. All else that is flagged is false. Labels and generators
were written and committed before anything was measured with them. `--seed`: series that nobody has looked at.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROWS, SPACING, FIRST = 4000, 400, 260
"""Rows of a series; between two events; before the first."""
BURN_IN, EPISODE = 128, 25
SIZES = (12.0, 16.0, 30.0)
"""Heights of events in deviations of the noise."""
UNSURE = 6.0
LEAST = {"loss": float(np.log(1.15)), "grad_norm": float(np.log(2.2))}
SERIES = 8
"""Series a family."""
LONG, WANDERS = 56_000, 3
"""Rows of a healthy run that wanders, and runs a kind."""
MATURE = 10_000
"""Rows before a slow divergence."""
CLIMBS = ((1.3, 2000), (1.3, 500), (2.0, 10_000), (3.0, 20_000))
"""How high a slow divergence climbs, and in how many rows."""


class Made(NamedTuple):
    """A series: level and noise on the scale of the events (logarithms, or as they are), and how large noise is."""

    level: np.ndarray
    noise: np.ndarray
    size: np.ndarray
    is_log: bool = True
    digits: int | None = None
    least: float | None = None
    """Least height of an event where it is not a logarithm."""
    own: tuple[tuple[int, int, int], ...] = ()
    """Events of the family itself, instead of planted ones: onset, end, rows in which it must be told."""


class Labelled(NamedTuple):
    """Values, (onset, end, rows in which it must be told), and rows that are neither."""

    values: np.ndarray
    events: list[tuple[int, int, int]]
    unsure: np.ndarray


Maker = Callable[[Any, int], Made]


def _ar(rng: Any, n: int, phi: float) -> np.ndarray:
    """Return a first-order autoregression of deviation 1."""
    out, last = np.empty(n), float(rng.standard_normal())
    for i, e in enumerate((rng.standard_normal(n) * np.sqrt(1.0 - phi * phi)).tolist()):
        last = phi * last + e
        out[i] = last
    return out


def _falls(n: int, low: float = 2.5, high: float = 8.0, rows: float = 25.0) -> np.ndarray:
    return np.asarray(np.log(low + high * (1.0 + np.arange(n) / rows) ** -0.7))


def _same(n: int, size: float) -> np.ndarray:
    return np.full(n, size)


def _plain(level: Callable[[int], np.ndarray], size: float, draw: Callable[[Any, int], np.ndarray], **more: Any) -> Maker:
    """Return a maker of `size` times a noise whose robust deviation is 1."""

    def make(rng: Any, n: int) -> Made:
        return Made(level(n), size * draw(rng, n), _same(n, size), **more)

    return make


def _bursts(low: float, high: float) -> Maker:
    def make(rng: Any, n: int) -> Made:
        loud = np.repeat(rng.random(n // 120 + 1) < 0.3, 120)[:n]
        size = np.where(loud, high, low)
        return Made(_falls(n), size * rng.standard_normal(n), size)

    return make


def _clusters(rng: Any, n: int) -> Made:
    """Noise that feeds on itself: what was large is followed by what is large."""
    noise, size, var = np.empty(n), np.empty(n), 4e-4
    for i, e in enumerate(rng.standard_normal(n).tolist()):
        size[i] = np.sqrt(var)
        noise[i] = size[i] * e
        var = 2e-5 + 0.1 * float(noise[i]) ** 2 + 0.85 * var
    return Made(_falls(n), noise, size)


def _rate_steps(rng: Any, n: int) -> Made:
    """The rate falls to a tenth thrice: the level falls by 15 % in ten rows, the noise halves."""
    at = np.array([1100, 2100, 3100])[:, None]
    fallen = np.clip((np.arange(n) - at) / 10.0, 0.0, 1.0).sum(axis=0)
    size = 0.03 * 0.5**fallen
    return Made(_falls(n) + np.log(0.85) * fallen, size * rng.standard_normal(n), size)


def _restarts(rng: Any, n: int) -> Made:
    """A cosine schedule with restarts: each time the loss climbs by 12 % in 60 rows and falls again."""
    t = (np.arange(n) - 200) % 800
    wave = 0.12 * np.where(np.arange(n) < 1000, 0.0, np.minimum(t / 60.0, 1.0) * np.exp(-t / 250.0))
    return Made(_falls(n) + wave, 0.02 * rng.standard_normal(n), _same(n, 0.02))


def _curriculum(rng: Any, n: int) -> Made:
    """Harder data from a row on: the loss jumps by 35 % and comes down in some 150 rows. The jump is the event."""
    begins = [900, 1700, 2500, 3300]
    level = _falls(n)
    for begin in begins:
        level[begin:] += 0.3 * np.exp(-np.arange(n - begin) / 150.0)
    return Made(level, 0.02 * rng.standard_normal(n), _same(n, 0.02), own=tuple((b, b + 300, 10) for b in begins))


def _resumed(rng: Any, n: int) -> Made:
    """Resumed thrice from 250 rows before: the level steps back, and up by some percent."""
    t = np.arange(n).astype(np.float64)
    for at in (1000, 2000, 3000):
        t[at:] -= 250.0
    level = np.log(2.0 + 8.0 * (1.0 + t / 150.0) ** -0.7)
    return Made(level, 0.02 * rng.standard_normal(n), _same(n, 0.02))


def _rewards(rng: Any, n: int) -> Made:
    level = -200.0 + 180.0 * (1.0 - np.exp(-np.arange(n) / 900.0))
    return Made(level, 12.0 * rng.standard_normal(n), _same(n, 12.0), is_log=False, least=30.0)


def _policy_loss(rng: Any, n: int) -> Made:
    """About zero, of either sign, heavy-tailed."""
    return Made(np.zeros(n), 0.02 * rng.standard_t(5, n), _same(n, 0.022), is_log=False, least=0.1)


def _gan(rng: Any, n: int) -> Made:
    wave = 0.35 * np.sin(np.arange(n) / 50.0 + _ar(rng, n, 0.99))
    return Made(wave, 0.12 * _ar(rng, n, 0.7) + 0.1 * rng.standard_normal(n), _same(n, 0.3))


def _validation(rng: Any, n: int) -> Made:
    """Every hundredth row is that of the validation set, 7 % above, in the same column."""
    level = _falls(n) + np.where(np.arange(n) % 100 == 99, 0.07, 0.0)
    return Made(level, 0.012 * rng.standard_normal(n), _same(n, 0.012))


def _cliffs(rng: Any, n: int) -> Made:
    """A warm-up with plateaus and cliffs: 11, 7.5, 6, then a decay."""
    t = np.arange(n)
    drop = np.log(11.0 / 7.5) / (1.0 + np.exp(-(t - 60) / 5.0)) + np.log(7.5 / 6.0) / (1.0 + np.exp(-(t - 420) / 8.0))
    level = np.log(11.0) - drop - 0.12 * np.log1p(np.maximum(t - 420, 0) / 60.0)
    return Made(level, 0.01 * rng.standard_normal(n), _same(n, 0.01))


def _full_batch(noise: float) -> Maker:
    """A full batch that falls, waves and climbs by 2.4 in sixty rows, and comes back in as many."""

    def make(rng: Any, n: int) -> Made:
        t, begins = np.arange(n), [700, 1500, 2300, 3100]
        level = -0.9 * np.log1p(t / 40.0) + 0.03 * np.sin(t / 25.0)
        for b in begins:
            level += np.log(2.4) * (np.clip((t - b) / 60.0, 0.0, 1.0) - np.clip((t - b - 200) / 60.0, 0.0, 1.0))
        own = tuple((b, b + 400, 45) for b in begins)
        return Made(level, noise * rng.standard_normal(n), _same(n, max(noise, 1e-3)), own=own)

    return make


def _restless(share: float) -> Maker:
    """Many rows stand up to thirty times as high; the event is 240 times above all of the last 300."""

    def make(rng: Any, n: int) -> Made:
        noise = 0.03 * rng.standard_normal(n)
        high = rng.random(n) < share
        noise[high] += rng.uniform(0.2, 3.4, int(high.sum()))
        rows = list(range(FIRST + 140, n - 200, SPACING))
        for row in rows:
            noise[row] = noise[row - 300 : row].max() + np.log(240.0)
        # Its own noise is what it is: heights of 20 deviations are ordinary here.
        return Made(-2.0 * np.arange(n) / n, noise, _same(n, 1.2), own=tuple((r, r, 2) for r in rows))

    return make


def _normal(rng: Any, n: int) -> np.ndarray:
    return np.asarray(rng.standard_normal(n))


def _t3(rng: Any, n: int) -> np.ndarray:
    return np.asarray(rng.standard_t(3, n)) / 1.134


def _skewed(rng: Any, n: int) -> np.ndarray:
    """The logarithm of a gamma of shape 4, in its own robust deviations."""
    return np.asarray((np.log(rng.gamma(4.0, 0.25, n)) + 0.085) / 0.51)


def _decades(n: int) -> np.ndarray:
    return np.asarray(-np.log(10.0) * 4.0 * np.arange(n) / n)


def _norm_level(n: int) -> np.ndarray:
    return np.asarray(np.log(0.3 + 3.0 * (1.0 + np.arange(n) / 20.0) ** -0.8))


def _wandering_norm(rng: Any, n: int) -> Made:
    return Made(_norm_level(n) + 0.25 * _ar(rng, n, 0.995), 0.15 * rng.standard_normal(n), _same(n, 0.15))


def _resumed_norm(rng: Any, n: int) -> Made:
    """Resumed thrice: for 40 rows the norm is half as high again, as while an optimizer finds its moments."""
    t = np.arange(n) % 1000
    level = _norm_level(n) + np.where(np.arange(n) >= 1000, np.log(1.5) * np.exp(-t / 40.0), 0.0)
    return Made(level, 0.12 * rng.standard_normal(n), _same(n, 0.12))


FAMILIES: dict[str, tuple[str, Maker]] = {
    "autoregression, 0.8": ("loss", _plain(_falls, 0.02, lambda g, n: _ar(g, n, 0.8))),
    "autoregression, 0.97": ("loss", _plain(_falls, 0.03, lambda g, n: _ar(g, n, 0.97))),
    "bursts, 1 % and 4 %": ("loss", _bursts(0.01, 0.04)),
    "bursts, 3 % and 8 %": ("loss", _bursts(0.03, 0.08)),
    "noise that feeds on itself": ("loss", _clusters),
    "Student's t, 3 degrees": ("loss", _plain(_falls, 0.02, _t3)),
    "a small batch, skewed": ("loss", _plain(_falls, 0.3, _skewed)),
    "rate steps": ("loss", _rate_steps),
    "rate restarts": ("loss", _restarts),
    "curriculum": ("loss", _curriculum),
    "resumed": ("loss", _resumed),
    "near zero": ("loss", _plain(_decades, 0.3, _normal)),
    "near zero, 4 decimals": ("loss", _plain(lambda n: np.log(4e-3 + 0 * _falls(n)), 0.15, _normal, digits=4)),
    "bits a byte": ("loss", _plain(lambda n: np.log(0.9) + 0.1 * _falls(n), 0.003, _normal)),
    "rewards below zero": ("loss", _rewards),
    "policy loss about zero": ("loss", _policy_loss),
    "GAN": ("loss", _gan),
    "validation rows between": ("loss", _validation),
    "two decimals": ("loss", _plain(lambda n: _falls(n, 0.35, 3.0), 0.03, _normal, digits=2)),
    "warm-up cliffs": ("loss", _cliffs),
    "full batch, climbs": ("loss", _full_batch(1e-3)),
    "full batch, 2 %, climbs": ("loss", _full_batch(0.02)),
    "240 times above excursions, 20 %": ("loss", _restless(0.2)),
    "240 times above excursions, 40 %": ("loss", _restless(0.4)),
    "norm: 10 %": ("grad_norm", _plain(_norm_level, 0.1, _normal)),
    "norm: autoregression, 0.9": ("grad_norm", _plain(_norm_level, 0.15, lambda g, n: _ar(g, n, 0.9))),
    "norm: wandering": ("grad_norm", _wandering_norm),
    "norm: Student's t, 3 degrees": ("grad_norm", _plain(_norm_level, 0.08, _t3)),
    "norm: two decimals": ("grad_norm", _plain(lambda n: _norm_level(n) - 0.2, 0.06, _normal, digits=2)),
    "norm: one decimal": ("grad_norm", _plain(lambda n: _norm_level(n) + 1.0, 0.06, _normal, digits=1)),
    "norm: four decades down": ("grad_norm", _plain(_decades, 0.12, _normal)),
    "norm: resumed": ("grad_norm", _resumed_norm),
    "norm: above excursions, 20 %": ("grad_norm", _restless(0.2)),
}


def make(name: str, seed: int, number: int) -> Labelled:
    """Return one labelled series of a family."""
    channel, maker = FAMILIES[name]
    rng = np.random.default_rng([seed, number, *name.encode()])
    made = maker(rng, ROWS)
    z, size = made.level + made.noise, made.size
    largest = np.array([size[max(0, row - 300) : row + 1].max() for row in range(ROWS)])
    events = list(made.own)
    if not events:
        for at, row in enumerate(range(FIRST + int(rng.integers(60)), ROWS - 200, SPACING)):
            height = max(SIZES[(at // 3 + number) % 3] * largest[row], LEAST[channel] if made.least is None else made.least)
            rows = (1, 4, 150)[(at + number) % 3]
            z[row : row + rows] += height
            events.append((row, row + rows - 1, 10))
    values = np.exp(z) if made.is_log else z
    if made.digits is not None:
        values = np.round(values, made.digits)
    return Labelled(values, events, np.abs(made.noise) > UNSURE * size)


class Found(NamedTuple):
    """Events, those caught, false alarms, those of them at rows that are unsure, rows outside events."""

    events: int
    caught: int
    false: int
    unsure: int
    rows: int


def judge(flagged: np.ndarray, labelled: Labelled) -> Found:
    """Return what the flags of one series are worth."""
    near = np.zeros(len(flagged), dtype=bool)
    near[:BURN_IN] = True
    caught = 0
    for onset, end, rows in labelled.events:
        near[max(0, onset - 5) : end + 75] = True
        caught += bool(flagged[onset - 2 : onset + rows + 1].any())
    begins: list[int] = []
    for row in np.flatnonzero(flagged).tolist():
        if not begins or row - begins[-1] > EPISODE:
            begins.append(row)
    false = [row for row in begins if not near[row]]
    unsure = sum(bool(labelled.unsure[row]) for row in false)
    return Found(len(labelled.events), caught, len(false) - unsure, unsure, int((~near).sum()))


def spikes(flags: dict[str, dict[str, Callable[[np.ndarray], np.ndarray]]], seed: int) -> None:
    """Print each family: recall, false alarms per 10,000 rows, those at excursions of the noise itself."""
    ways = list(next(iter(flags.values())))
    print("\n## Families: recall | false | at excursions of the noise itself, per 10k rows\n")
    print("| family | events | " + " | ".join(f"{way} | false | noise" for way in ways) + " |")
    print("|---|---|" + "---|---|---|" * len(ways))
    total: dict[tuple[str, str], list[Found]] = {}
    for name, (channel, _) in FAMILIES.items():
        cases = [make(name, seed, number) for number in range(SERIES)]
        cells = []
        for way, flag in flags[channel].items():
            found = _sum([judge(flag(case.values), case) for case in cases])
            total.setdefault((channel, way), []).append(found)
            cells.append(_figures(found))
        print(f"| {name} | {sum(len(case.events) for case in cases)} | {' | '.join(cells)} |", flush=True)
    for channel in flags:
        cells = [_figures(_sum(total[channel, way])) for way in flags[channel]]
        print(f"| all, {channel} | {_sum(total[channel, ways[0]]).events} | {' | '.join(cells)} |")


def _sum(found: list[Found]) -> Found:
    return Found(*(sum(column) for column in zip(*found, strict=True)))


def _figures(found: Found) -> str:
    per = 1e4 / max(found.rows, 1)
    return f"{found.caught / max(found.events, 1):.3f} | {found.false * per:.2f} | {found.unsure * per:.2f}"


# -- drift -----------------------------------------------------------------------------------------------------------------


def _steps(rng: Any, n: int) -> np.ndarray:
    """Levels of some thousand rows each, as data in shards leaves."""
    lengths = rng.integers(800, 4000, n // 800 + 1)
    return np.asarray(np.repeat(0.04 * rng.standard_normal(len(lengths)), lengths)[:n])


HEALTHY: dict[str, Callable[[Any, int], np.ndarray]] = {
    "wander of 3 %, over 1,000 rows": lambda g, n: 0.03 * _ar(g, n, 0.999),
    "wander of 6 %, over 1,000 rows": lambda g, n: 0.06 * _ar(g, n, 0.999),
    "wander of 5 %, over 10,000 rows": lambda g, n: 0.05 * _ar(g, n, 0.9999),
    "two wanders": lambda g, n: 0.02 * _ar(g, n, 0.99) + 0.04 * _ar(g, n, 0.9997),
    "epochs of 3,000 rows, 8 %": lambda g, n: -0.08 * (np.arange(n) % 3000) / 3000,
    "waves of 5,600 rows": lambda g, n: 0.05 * np.sin(np.arange(n) / 900.0 + g.uniform(0.0, 6.0)),
    "waves of 20,000 rows": lambda g, n: 0.06 * np.sin(np.arange(n) / 3200.0 + g.uniform(0.0, 6.0)),
    "shards of data": _steps,
    "restarts of the rate": lambda g, n: 0.1 * np.exp(-((np.arange(n) + 3000) % 7000) / 1500.0),
    "quiet": lambda g, n: np.zeros(n),
}


def wander(seed: int, rows: int, runs: int) -> np.ndarray:
    """Return healthy runs of all kinds, side by side: [rows, kinds * runs]."""
    columns = []
    level = 2.5 * (1.0 + np.arange(rows) / 300.0) ** -0.1
    for name, kind in HEALTHY.items():
        for number in range(runs):
            rng = np.random.default_rng([seed, number, *name.encode()])
            columns.append(level * np.exp(kind(rng, rows) + 0.02 * rng.standard_normal(rows)))
    return np.stack(columns, axis=1)


def drift(detector: Any, row_by_row: Callable[[Any, np.ndarray], np.ndarray], seed: int, runs: int) -> None:
    """Print what healthy runs are told, and how late and how often a slow rise is told on a run of MATURE rows."""
    print(f"\n## Drift: messages of {runs} healthy runs a kind of {LONG} rows (256 quiet rows end one)\n")
    print("| kind | messages, each run |\n|---|---|")
    flagged = row_by_row(detector, wander(seed, LONG, runs))
    reported = np.array([_reported(column) for column in flagged.T]).reshape(len(HEALTHY), runs)
    for name, each in zip(HEALTHY, reported.tolist(), strict=True):
        print(f"| {name} | {each} |")
    print(f"| all | {reported.sum()} in {reported.size} runs, {reported.max()} in one at most |")
    for size, climb in CLIMBS:
        rows = MATURE + climb + 1000
        climbs = wander(seed + 1, rows, runs)
        climbs *= size ** np.clip((np.arange(rows) - MATURE) / climb, 0.0, 1.0)[:, None]
        found = row_by_row(detector, climbs)[MATURE:]
        often = np.array([_reported(column) for column in found.T]).reshape(len(HEALTHY), runs)
        late = np.where(found.any(axis=0), found.argmax(axis=0), -1).reshape(len(HEALTHY), runs)
        print(f"\n### x{size} over {climb} rows, after {MATURE}\n")
        print("| kind | rows until called (-1: not) | messages |\n|---|---|---|")
        for name, first, each in zip(HEALTHY, late.tolist(), often.tolist(), strict=True):
            print(f"| {name} | {first} | {each} |")
        print(f"| all | {(often > 0).sum()} of {often.size} called | {(often > 1).sum()} more than once |", flush=True)


def _reported(flagged: np.ndarray) -> int:
    rows = np.flatnonzero(flagged)
    return len(rows[:1]) + int((np.diff(rows) > 256).sum())


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rivals", action="store_true")
    parser.add_argument("--runs", type=int, default=WANDERS, help="runs a kind for drift")
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    import detection

    flags: dict[str, dict[str, Callable[[np.ndarray], np.ndarray]]] = {}
    for channel, detector in detection.DETECTORS.items():
        flags[channel] = {"ours": detection.by_scan(detector)}
        if args.rivals:
            floor = 0.05 if channel == "loss" else 0.3
            flags[channel]["mean + 6 sigma"] = detection.mean_plus_sigmas(6.0)
            flags[channel]["log median/MAD"] = detection.log_median(6.0, floor)
    if "spikes" in (args.parts or ["spikes"]):
        spikes(flags, args.seed)
    if "drift" in (args.parts or ["drift"]):
        drift(detection.Drift(), detection.row_by_row, args.seed, args.runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
