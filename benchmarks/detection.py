"""Scalar detectors on labelled training logs: recall, false alarms, frontier, robustness, reference runs, drift, storms,
speed.

usage: detection.py [--logs DIR] [--frontier OUT.csv] [--backtest ALARMS.jsonl] [PART ...]

PART: quality, loro, unseen, frontier, robust, altered, recur, slow, reference runs, speed; none: all. Prints tables.
--backtest scores also what `sentinel rules backtest LOGS/series/*.csv --json` printed: the whole way through the judge. The
logs are data from elsewhere (their README says where from) and no part of this project; without them only speed is measured.

Structure and defaults were chosen with all repositories in view; the half TUNED is the one of 2026-11-21. What constants
find that were chosen without the repository scored: loro.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sentinel.detect import GradNormSpike, HiddenNan, LossSpike, NanStorm, SeriesDetector
from sentinel.detect.drift import Drift, Plateau
from sentinel.detect.windowed import RollingMedian

DEFAULT_LOGS = Path(__file__).parents[2] / "shared" / "trainlogs"
TUNED = ("KellerJordan/modded-nanogpt", "HectorFCardenas/llm.c")
"""Repositories of the tuned half: each half has logs with gradient norms; the other has four kinds of log more."""
DETECTORS: dict[str, RollingMedian] = {"loss": LossSpike(), "grad_norm": GradNormSpike()}
Flags = Callable[[np.ndarray], np.ndarray]
"""A column -> the rows that a detector flags."""

csv.field_size_limit(10**9)


class Logs:
    """The labelled logs: scorer, runs and columns, read once."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.scorer = folder, load_scorer(folder)
        self.runs: list[dict[str, Any]] = self.scorer.load(folder / "manifest.csv")
        self._columns: dict[tuple[str, str], np.ndarray] = {}

    def column(self, file: str, channel: str) -> np.ndarray:
        """Return one column of a series, NaN where a row has no number."""
        if (file, channel) not in self._columns:
            self._columns[file, channel] = read_channel(self.folder, file, channel)
        return self._columns[file, channel]

    def half(self, channel: str, half: str = "all") -> list[dict[str, Any]]:
        """Return the runs that have a channel: `all`, `tuned` or `other`."""
        runs = [run for run in self.runs if channel in run["channels"]]
        return [run for run in runs if half == "all" or (run["repo"] in TUNED) == (half == "tuned")]

    def score(self, channel: str, alarms: Mapping[str, list[int]], half: str = "all") -> dict[str, Any]:
        """Return the scorer's figures."""
        runs = self.half(channel, half)
        found = {(run["file"], channel): alarms.get(run["file"], []) for run in runs}
        result: dict[str, Any] = self.scorer.score(runs, found, channel)
        return result

    def alarms(self, channel: str, flags: Flags) -> dict[str, list[int]]:
        """Return file -> rows flagged or not finite; one configuration for all files."""
        found = {}
        for run in self.half(channel):
            column = self.column(run["file"], channel)
            found[run["file"]] = np.flatnonzero(flags(column) | ~np.isfinite(column)).tolist()
        return found


def load_scorer(logs: Path) -> Any:
    """Return the module `score.py` that lies beside the logs."""
    spec = importlib.util.spec_from_file_location("trainlogs_score", logs / "score.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_channel(logs: Path, file: str, channel: str) -> np.ndarray:
    """Return one column of a series, NaN where a row has no number."""
    with (logs / "series" / file).open() as lines:
        cells = [row.get(channel) or "nan" for row in csv.DictReader(lines)]
    return np.array(cells, dtype=np.float64)


def score_detector(channel: str, detector: RollingMedian, logs: Path = DEFAULT_LOGS, half: str = "all") -> dict[str, Any]:
    """Return the scorer's figures for one channel, every row by itself, no look-ahead."""
    data = Logs(logs)
    return data.score(channel, data.alarms(channel, by_scan(detector)), half)


def by_scan(detector: RollingMedian) -> Flags:
    """Return what a detector flags of a column, in one call."""
    return lambda column: detector.scan(column[:, None], detector.state(1))[:, 0] >= 1.0


def row_by_row(detector: SeriesDetector, columns: np.ndarray) -> np.ndarray:
    """Return which of [points, series] a detector flags, through score and learn."""
    state, flagged = detector.state(columns.shape[1]), np.zeros(columns.shape, dtype=bool)
    for row, point in enumerate(columns):
        flagged[row] = detector.score(point, state).score >= 1.0
        detector.learn(point, state, flagged[row])
    return flagged


# -- others, as people write them ---------------------------------------------------------------------------------------


def mean_plus_sigmas(k: float, window: int = 128) -> Flags:
    """Return the classic: above the mean of the last points by k standard deviations; learns everything."""

    def flags(column: np.ndarray) -> np.ndarray:
        x = np.nan_to_num(column, nan=0.0, posinf=0.0, neginf=0.0)
        ones, squares = np.concatenate([[0.0], np.cumsum(x)]), np.concatenate([[0.0], np.cumsum(x * x)])
        end = np.arange(len(x))
        begin = np.maximum(end - window, 0)
        count = np.maximum(end - begin, 1)
        mean = (ones[end] - ones[begin]) / count
        spread = np.sqrt(np.maximum((squares[end] - squares[begin]) / count - mean * mean, 0.0))
        return (end >= 32) & (x > mean + k * spread + 1e-12)

    return flags


def exponential_z(k: float, rate: float = 0.02) -> Flags:
    """Return an exponential mean's z-score."""

    def flags(column: np.ndarray) -> np.ndarray:
        out, mean, var = np.zeros(len(column), dtype=bool), 0.0, 0.0
        for row, x in enumerate(column.tolist()):
            if not np.isfinite(x):
                continue
            away = x - mean
            out[row] = row >= 32 and away > k * var**0.5
            step = rate if row >= 50 else 1.0 / (row + 1)
            mean += step * away
            var = (1.0 - step) * (var + step * away * away)
        return out

    return flags


def log_median(k: float, floor: float, window: int = 32, memory: int = 256) -> Flags:
    """Return the log-domain rolling median with a MAD of past residuals, written naively; learns nothing it flags."""

    def flags(column: np.ndarray) -> np.ndarray:
        out, points, residuals = np.zeros(len(column), dtype=bool), [], []
        for row, x in enumerate(column.tolist()):
            if not np.isfinite(x) or x <= 0.0:
                continue
            z = float(np.log(x))
            if len(points) >= window:
                away = z - float(np.median(points))
                if len(residuals) >= 32:
                    bound = max(k * 1.4826 * float(np.median(np.abs(residuals))), float(np.log1p(floor)))
                    out[row] = away > bound
                if out[row]:
                    continue
                residuals = [*residuals[-memory + 1 :], away]
            points = [*points[-window + 1 :], z]
        return out

    return flags


# -- tables -------------------------------------------------------------------------------------------------------------


def figures(result: Mapping[str, Any]) -> str:
    """Return recall, lenient and strict, as a table's cells."""
    return f"{result['weighted_recall']:.3f} | {result['per_10k_lenient']:.2f} | {result['per_10k_strict']:.2f}"


def quality(logs: Logs, backtest: Path | None) -> None:
    """Print recall and false alarms of both halves."""
    print("\n## Quality: weighted recall, lenient and strict false alarms per 10k rows, median delay; defaults\n")
    print("| channel | detector | half | events | recall | lenient | strict | delay |\n|---|---|---|---|---|---|---|---|")
    reported: dict[str, dict[tuple[str, str], list[int]]] = {}
    if backtest is not None:
        for line in backtest.read_text().splitlines():
            alarm = json.loads(line)
            reported.setdefault(alarm["channel"], {}).setdefault(alarm["file"].rsplit("/", 1)[-1], []).append(
                int(alarm["i"])
            )
    for channel, detector in DETECTORS.items():
        ways = {type(detector).__name__: logs.alarms(channel, by_scan(detector))}
        if backtest is not None:
            ways["rules backtest"] = reported.get(channel, {})
        others: dict[str, Flags] = {"mean + 6 sigma, 128": mean_plus_sigmas(6.0)}
        others["log median/MAD, k 6"] = log_median(6.0, 0.05 if channel == "loss" else 0.3)
        others["exponential z, 2.5"] = exponential_z(2.5)
        ways |= {name: logs.alarms(channel, flags) for name, flags in others.items()}
        for name, alarms in ways.items():
            for half in ("tuned", "other", "all"):
                r = logs.score(channel, alarms, half)
                print(f"| {channel} | {name} | {half} | {r['events']} | {figures(r)} | {r['median_delay']} |")


def frontier(logs: Logs, out: Path | None) -> None:
    """Print and write recall against false alarms as k varies."""
    rows = []
    for channel, detector in DETECTORS.items():
        for k in (3, 4, 5, 6, 6.5, 7, 7.5, 7.8, 8, 8.2, 8.4, 8.6, 9, 9.5, 10, 11, 12, 14):
            rows.append((channel, type(detector).__name__, k, by_scan(msgspec.structs.replace(detector, k=float(k)))))
        rows += [(channel, "mean + k sigma, 128", k, mean_plus_sigmas(k)) for k in (3, 4, 5, 6, 7, 8, 10)]
        rows += [(channel, "exponential z", k, exponential_z(k)) for k in (2.5, 4, 6, 8, 10)]
        floor = 0.08 if channel == "loss" else 0.5
        rows += [(channel, f"log median/MAD, floor {floor}", k, log_median(k, floor)) for k in (6, 8, 10)]
    print("\n## Frontier: recall | lenient | strict, all logs, as k varies\n")
    print("| channel | detector | k | recall | lenient | strict |\n|---|---|---|---|---|---|")
    lines = ["channel,detector,k,half,weighted_recall,lenient_per_10k,strict_per_10k"]
    for channel, name, k, flags in rows:
        alarms = logs.alarms(channel, flags)
        for half in ("tuned", "other", "all"):
            r = logs.score(channel, alarms, half)
            cells = f"{r['weighted_recall']:.4f},{r['per_10k_lenient']:.3f},{r['per_10k_strict']:.3f}"
            lines.append(f'{channel},"{name}",{k},{half},{cells}')
        print(f"| {channel} | {name} | {k} | {figures(r)} |")
    if out is not None:
        out.write_text("\n".join(lines) + "\n")


def robust(logs: Logs) -> None:
    """Print what every constant does when it is a fifth smaller or larger."""
    print("\n## Robustness: every constant a fifth smaller, larger; recall | lenient | strict, all logs\n")
    print("| channel | constant | -20 % | +20 % |\n|---|---|---|---|")
    for channel, detector in DETECTORS.items():
        spread = []
        for name in ("k", "floor", "window", "memory", "warmup", "settle_after", "near_zero"):
            cells = []
            for factor in (0.8, 1.2):
                value = getattr(detector, name)
                moved = round(value * factor) if isinstance(value, int) else value * factor
                other = msgspec.structs.replace(detector, **{name: moved})
                r = logs.score(channel, logs.alarms(channel, by_scan(other)))
                spread.append((r["weighted_recall"], r["per_10k_lenient"], r["per_10k_strict"]))
                cells.append(figures(r))
            print(f"| {channel} | {name} | {' | '.join(cell.replace(' | ', ' / ') for cell in cells)} |")
        low, high = np.min(spread, axis=0), np.max(spread, axis=0)
        false = f"lenient to {high[1]:.2f}, strict to {high[2]:.2f}"
        print(f"| {channel} | all | recall {low[0]:.3f} to {high[0]:.3f} | {false} |")


def slow(logs: Logs) -> None:
    """Print what the detectors of slow and of non-finite things say of all logs, and of planted slow divergences."""
    print("\n## NaN storms, hidden NaNs, drift, plateau: every alarm on every log (rows at which episodes begin)\n")
    print("| detector | channel | logs judged | accused |\n|---|---|---|---|")
    for detector, channels in (
        (NanStorm(), ("loss", "grad_norm")), (HiddenNan(), ("loss",)), (Drift(), ("loss",)), (Plateau(), ("loss",)),
    ):  # fmt: skip
        for channel in channels:
            runs = logs.half(channel)
            flagged = row_by_row(detector, side_by_side(logs, runs, channel))
            said = []
            for at, run in enumerate(runs):
                begins = logs.scorer.episodes(np.flatnonzero(flagged[: run["n"], at]).tolist())
                if begins:
                    said.append(f"{run['file'][:10]} at {begins[0]}, {run['n'] - begins[0]} rows before its end")
            print(f"| {type(detector).__name__} | {channel} | {len(runs)} | {'; '.join(said) or 'none'} |")
    print("\nplanted: each loss times exp(rate x rows since 900)\n")
    print("| rate a row | logs | called | median of loss/best | p90 | <= 1.15 |")
    print("|---|---|---|---|---|---|")
    runs = [run for run in logs.half("loss") if run["n"] >= 1500 and np.isfinite(logs.column(run["file"], "loss")[0])]
    columns = side_by_side(logs, runs, "loss")[:6000]
    for rate in (1e-4, 3e-4, 1e-3, 3e-3):
        planted = columns * np.exp(rate * np.maximum(np.arange(len(columns)) - 900, 0))[:, None]
        flagged = row_by_row(Drift(), planted)
        ratios = []
        for at in range(len(runs)):
            after = np.flatnonzero(flagged[900:, at])
            if after.size:
                called, level = 900 + int(after[0]), planted[:, at]
                best = min(float(np.median(level[i : i + 48])) for i in range(64, called - 20, 16))
                ratios.append(float(np.median(level[called - 15 : called + 1])) / best)
        share = float(np.mean(np.array(ratios) <= 1.15))
        p50, p90 = np.quantile(ratios, [0.5, 0.9])
        print(f"| {rate:g} | {len(runs)} | {len(ratios)} | {p50:.3f} | {p90:.3f} | {share:.2f} |")


def side_by_side(logs: Logs, runs: list[dict[str, Any]], channel: str) -> np.ndarray:
    """Return [rows, runs], NaN where a run is over."""
    columns = np.full((max(run["n"] for run in runs), len(runs)), np.nan)
    for at, run in enumerate(runs):
        columns[: run["n"], at] = logs.column(run["file"], channel)
    return columns


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--logs", type=Path, default=DEFAULT_LOGS)
    parser.add_argument("--frontier", type=Path)
    parser.add_argument("--backtest", type=Path)
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    import detection_altered
    import detection_loro
    import detection_references
    import detection_speed
    import detection_unseen

    every = ["quality", "loro", "unseen", "frontier", "robust", "altered", "recur", "slow", "sisters", "speed"]
    wanted = args.parts or every
    if not (args.logs / "score.py").is_file():
        print(f"no labelled logs at {args.logs}: nothing but speed is measured", file=sys.stderr)
        wanted = [part for part in wanted if part == "speed"]
    logs = Logs(args.logs) if wanted != ["speed"] and wanted else None
    parts: dict[str, Callable[[Any], None]] = {
        "quality": lambda data: quality(data, args.backtest),
        "loro": lambda data: detection_loro.loro(data, DETECTORS),
        "unseen": lambda data: detection_unseen.unseen(data, DETECTORS, detection_altered.ALTERATIONS),
        "frontier": lambda data: frontier(data, args.frontier),
        "robust": robust,
        "altered": lambda data: detection_altered.altered(data, DETECTORS),
        "recur": detection_references.recur,
        "slow": slow,
        "sisters": detection_references.references,
        "speed": lambda data: detection_speed.speed(),
    }
    for part in wanted:
        parts[part](logs)
    return 0 if args.parts == ["speed"] or logs is not None else 2


if __name__ == "__main__":
    sys.exit(main())
