"""The default pack on altered versions of the labelled logs: what other trainers, printers and schedules do to a log.

Called by detection.py. Labels move with the rows. A labelled event stays one only if the altered rows still meet the rule
the labels were made by (the median of 75 rows before, 10 of their robust deviations, 10 % of a loss or
twice a norm), else its rows are ambiguous, as are all past 5 deviations. Nothing was tuned on these tables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Column = np.ndarray
Altered = tuple[np.ndarray, np.ndarray]
"""Values, and of each row the row of the original log that it comes from."""
BEFORE = 75
EVENT = {"loss": (10.0, 0.10), "grad_norm": (10.0, 1.0)}
"""Deviations, and relative rise, past which a row is an event; AMBIGUOUS likewise."""
AMBIGUOUS = {"loss": (5.0, 0.03), "grad_norm": (5.0, 0.35)}
SOME = 200
"""Rows between two that are infinite, and rows that a resumed run repeats."""

_courses: dict[int, np.ndarray] = {}


def _rows(x: Column) -> np.ndarray:
    return np.arange(len(x))


def every(n: int, first: int = 0) -> Callable[[Column, Any], Altered]:
    """Return a log that was written every n-th row."""
    return lambda x, rng: (x[first::n], _rows(x)[first::n])


def rounded(decimals: int) -> Callable[[Column, Any], Altered]:
    """Return a log printed with so many decimals."""
    return lambda x, rng: (np.round(x, decimals), _rows(x))


def digits(n: int) -> Callable[[Column, Any], Altered]:
    """Return a log printed with so many significant digits."""

    def alter(x: Column, rng: Any) -> Altered:
        unit = 10.0 ** (np.floor(np.log10(np.maximum(np.abs(x), 1e-300))) - n + 1)
        return np.round(x / unit) * unit, _rows(x)

    return alter


def repeated(times: int, share: float) -> Callable[[Column, Any], Altered]:
    """Return a log in which some rows stand several times."""

    def alter(x: Column, rng: Any) -> Altered:
        count = np.where(rng.random(len(x)) < share, times, 1)
        rows = np.repeat(_rows(x), count)
        return x[rows], rows

    return alter


def resumed(x: Column, rng: Any) -> Altered:
    """Return a log of a run that was resumed thrice from SOME rows before: the rows stand there twice, nearly the same."""
    rows, values = [], []
    begin = 0
    for share in (0.3, 0.5, 0.8):
        end = int(share * len(x))
        rows.append(np.arange(begin, end))
        begin = max(0, end - SOME)
    rows.append(np.arange(begin, len(x)))
    values = [x[at] * np.exp(1e-3 * rng.standard_normal(len(at))) for at in rows]
    return np.concatenate(values), np.concatenate(rows)


def smoothed(keep: float) -> Callable[[Column, Any], Altered]:
    """Return a log of exponential means, as some trainers print."""

    def alter(x: Column, rng: Any) -> Altered:
        out, mean = np.empty(len(x)), np.nan
        for row, value in enumerate(x.tolist()):
            mean = value if not np.isfinite(mean) else keep * mean + (1.0 - keep) * value
            out[row] = mean
        return out, _rows(x)

    return alter


def meant(n: int) -> Callable[[Column, Any], Altered]:
    """Return a log of means over n steps, written every n-th."""

    def alter(x: Column, rng: Any) -> Altered:
        whole = len(x) // n * n
        return x[:whole].reshape(-1, n).mean(axis=1), _rows(x)[:whole:n]

    return alter


def quieter(x: Column, rng: Any) -> Altered:
    """Return a log whose batch is four times larger from the middle on: half the noise, spikes included."""
    level = _course(x)
    return np.where(_rows(x) >= len(x) // 2, level * np.sqrt(np.maximum(x / level, 1e-12)), x), _rows(x)


def louder(x: Column, rng: Any) -> Altered:
    """Return a log whose batch is a fourth from the middle on: twice the noise."""
    level = _course(x)
    return np.where(_rows(x) >= len(x) // 2, level * (x / level) ** 2, x), _rows(x)


def breathing(x: Column, rng: Any) -> Altered:
    """Return a log with as much noise again, which comes and goes every 500 rows."""
    sigma = _sigma(np.log(np.maximum(x / _course(x), 1e-12)))
    wave = 0.5 + 0.5 * np.sin(2.0 * np.pi * _rows(x) / 500.0)
    return x * np.exp(sigma * wave * rng.standard_normal(len(x))), _rows(x)


def one_rank(x: Column, rng: Any) -> Altered:
    """Return what one of eight ranks logs for itself: its noise is root 8 of that of the mean."""
    sigma = _sigma(np.log(np.maximum(x / _course(x), 1e-12)))
    return x * np.exp(np.sqrt(7.0) * sigma * rng.standard_normal(len(x))), _rows(x)


def overflowed(x: Column, rng: Any) -> Altered:
    """Return a log with an infinity every SOME rows: what a loss scaler that tries more leaves."""
    return np.where(_rows(x) % SOME == SOME - 1, np.inf, x), _rows(x)


def clipped(x: Column, rng: Any) -> Altered:
    """Return norms logged after clipping, at one and a half medians: most rows are below."""
    return np.minimum(x, 1.5 * np.nanmedian(x)), _rows(x)


def pinned(x: Column, rng: Any) -> Altered:
    """Return norms logged after clipping, at the median: every second row is the limit itself."""
    return np.minimum(x, np.nanmedian(x)), _rows(x)


def shuffled(x: Column, rng: Any) -> Altered:
    """Return another log of the same kind: the excursions of each 50 rows about the course, drawn anew."""
    level = _course(x)
    rows = _rows(x)
    blocks = rng.integers(0, max(1, len(x) // 50), len(x) // 50 + 1) * 50
    source = np.concatenate([np.arange(b, min(b + 50, len(x))) for b in blocks])
    source = np.concatenate([rows[:128], source])[: len(x)]
    source = np.concatenate([source, rows[len(source) :]])
    return level * (x[source] / level[source]), source


def scaled(factor: float, shift: float = 0.0) -> Callable[[Column, Any], Altered]:
    """Return a log in another unit."""
    return lambda x, rng: (factor * x + shift, _rows(x))


ALTERATIONS: dict[str, Callable[[Column, Any], Altered]] = {
    "as it is": lambda x, rng: (x, _rows(x)),
    "every 2nd row": every(2),
    "every 2nd row, the others": every(2, 1),
    "every 5th row": every(5),
    "means of 5 rows": meant(5),
    "4 decimals": rounded(4),
    "3 decimals": rounded(3),
    "2 decimals": rounded(2),
    "3 significant digits": digits(3),
    "each row twice": repeated(2, 1.0),
    "one row in ten twice": repeated(2, 0.1),
    "resumed thrice": resumed,
    "smoothed, 0.9": smoothed(0.9),
    "smoothed, 0.99": smoothed(0.99),
    "batch x4 from the middle": quieter,
    "batch / 4 from the middle": louder,
    "noise that comes and goes": breathing,
    "one rank of eight": one_rank,
    "inf every 200 rows": overflowed,
    "clipped at 1.5 medians": clipped,
    "clipped at the median": pinned,
    "excursions drawn anew": shuffled,
    "x 1000": scaled(1000.0),
    "less 1": scaled(1.0, -1.0),
}


def altered(logs: Any, detectors: Any) -> None:
    """Print what the fixed pack does on each altered version of all logs, and on each repository by itself."""
    print("\n## Altered logs: the same pack; events that remain, weighted recall | lenient | strict per 10k, all logs\n")
    print("| alteration | loss events | recall | lenient | strict | grad_norm events | recall | lenient | strict |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, alter in ALTERATIONS.items():
        cells = []
        for channel, detector in detectors.items():
            found = outcome(logs, channel, detector, alter)
            cells.append(f"{found['events']} | {figures(found)}")
        print(f"| {name} | {' | '.join(cells)} |")
    print("\nBy repository, as they are (no constant was chosen per repository):\n")
    print("| repository | channel | logs | rows | events | recall | lenient | strict |\n|---|---|---|---|---|---|---|---|")
    for channel, detector in detectors.items():
        for repo in sorted({run["repo"] for run in logs.half(channel)}):
            found = outcome(logs, channel, detector, ALTERATIONS["as it is"], repo)
            runs = [run for run in logs.half(channel) if run["repo"] == repo]
            share = figures(found) if found["events"] else f"- | {figures(found).split(' | ', 1)[1]}"
            print(f"| {repo} | {channel} | {len(runs)} | {sum(r['n'] for r in runs)} | {found['events']} | {share} |")


def figures(result: Any) -> str:
    """Return recall, lenient and strict, as a table's cells."""
    recall = f"{result['weighted_recall']:.3f}" if result["events"] else "-"
    return f"{recall} | {result['per_10k_lenient']:.2f} | {result['per_10k_strict']:.2f}"


def outcome(logs: Any, channel: str, detector: Any, alter: Any, repo: str | None = None) -> Any:
    """Return the scorer's figures of one alteration of all logs, or of those of one repository."""
    runs, alarms = [], {}
    for run in logs.half(channel):
        original = logs.column(run["file"], channel)
        if repo not in (None, run["repo"]) or not np.isfinite(original).any():
            continue
        values, source = alter(original, np.random.default_rng(0))
        flagged = detector.scan(values[:, None], detector.state(1))[:, 0] >= 1.0
        moved = run
        if alter is not ALTERATIONS["as it is"]:
            moved = moved_labels(run, channel, original, values, source, np.flatnonzero(flagged))
        runs.append(moved)
        alarms[run["file"], channel] = np.flatnonzero(flagged & np.isfinite(values)).tolist()
    return logs.scorer.score(runs, alarms, channel)


def moved_labels(run: Any, channel: str, original: Column, values: Column, source: np.ndarray, flagged: np.ndarray) -> Any:
    """Return the run with its labels at the altered rows; what is past 5 deviations is looked at among `flagged` alone."""
    events, ambiguous = [], []
    for event in run["events"]:
        # A row that stands several times has the event several times.
        inside = np.flatnonzero((source >= event["onset"]) & (source <= max(event["end"], event["onset"])))
        for first, last in _stretches(inside):
            rows = np.arange(first, min(last, first + run["window"]) + 1)
            if event["channel"] != channel or event["kind"] not in ("spike", "jump"):
                events.append({**event, "onset": first, "end": last})
            elif (tall := _still_tall(channel, original, values, source, rows)).any():
                events.append({**event, "onset": int(rows[np.argmax(tall)]), "end": last})
            else:
                ambiguous.append((first, last + 1))
    for first, last in run["ambiguous"][channel]:
        inside = np.flatnonzero((source >= first) & (source < max(last, first + 1)))
        ambiguous += [(begin, end + 1) for begin, end in _stretches(inside)]
    height, deviations = heights(values, flagged)
    limit, rise = AMBIGUOUS[channel]
    unsure = flagged[(deviations >= limit) & (height >= np.log1p(rise))]
    ambiguous += [(row, row + 1) for row in unsure.tolist()]
    return {**run, "n": len(values), "events": events, "ambiguous": {**run["ambiguous"], channel: ambiguous}}


def _still_tall(channel: str, original: Column, values: Column, source: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return which rows of an event meet the labels' rule, or stand as high as they did, within a tenth."""
    height, deviations = heights(values, rows)
    was_high, was_far = heights(original, source[rows])
    limit, rise = EVENT[channel]
    meets = (deviations >= limit) & (height >= np.log1p(rise))
    return np.asarray(meets | ((height >= 0.9 * was_high) & (deviations >= 0.9 * was_far) & (height > np.log1p(0.5 * rise))))


def heights(values: Column, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return how far rows are above the median of the BEFORE rows before them, in logarithms and robust deviations."""
    height, deviations = np.zeros(len(rows)), np.zeros(len(rows))
    z = np.log(np.where(np.isfinite(values) & (values > 0.0), values, np.nan))
    for at, row in enumerate(rows.tolist()):
        before = z[max(0, row - BEFORE) : row]
        before = before[np.isfinite(before)]
        if before.size and np.isfinite(z[row]):
            middle = np.median(before)
            height[at] = z[row] - middle
            deviations[at] = height[at] / max(1.4826 * float(np.median(np.abs(before - middle))), 1e-9)
    return height, deviations


def _stretches(rows: np.ndarray) -> list[tuple[int, int]]:
    if not rows.size:
        return []
    cuts = np.flatnonzero(np.diff(rows) > 1)
    return list(zip(rows[np.r_[0, cuts + 1]].tolist(), rows[np.r_[cuts, len(rows) - 1]].tolist(), strict=True))


def _course(x: np.ndarray, reach: int = 25, every_rows: int = 5) -> np.ndarray:
    """Return the median of the rows around each, formed every few rows."""
    if id(x) not in _courses:
        padded = np.pad(np.where(np.isfinite(x), x, np.nanmedian(x)), reach, mode="edge")
        windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach + 1)[::every_rows]
        _courses[id(x)] = np.repeat(np.maximum(np.median(windows, axis=1), 1e-12), every_rows)[: len(x)]
    return _courses[id(x)]


def _sigma(z: np.ndarray) -> float:
    low, high = np.nanquantile(z, [0.25, 0.75])
    return float(high - low) / 1.349
