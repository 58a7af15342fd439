"""Recall and false alarms of LossSpike and GradNormSpike on labelled training logs (default settings, one for all files).

usage: detection.py [--logs ../shared/trainlogs]

Prints a table by split. The logs are data from elsewhere (their README says where from) and are no part of this project.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from sentinel.detect import GradNormSpike, LossSpike, SeriesDetector

DEFAULT_LOGS = Path(__file__).parents[2] / "shared" / "trainlogs"


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


def alarms_of(detector: SeriesDetector, series: dict[str, np.ndarray]) -> dict[str, list[int]]:
    """Return file -> rows that the detector flags or that are not finite; all files side by side, row by row."""
    files = sorted(series, key=lambda file: -len(series[file]))
    lengths = np.array([len(series[file]) for file in files])
    values = np.full((lengths[0], len(files)), np.nan)
    for at, file in enumerate(files):
        values[: len(series[file]), at] = series[file]
    state = detector.state(len(files))
    alarms: dict[str, list[int]] = {file: [] for file in files}
    for row in range(len(values)):
        here = int(np.searchsorted(-lengths, -row))
        part = {name: array[:here] for name, array in state.items()}
        point = values[row, :here]
        flagged = detector.score(point, part).score >= 1.0
        detector.learn(point, part, flagged)
        for column in np.flatnonzero(flagged | ~np.isfinite(point)).tolist():
            alarms[files[column]].append(row)
    return alarms


csv.field_size_limit(10**9)


def score_detector(channel: str, detector: SeriesDetector, logs: Path = DEFAULT_LOGS, split: str = "") -> dict[str, Any]:
    """Return the scorer's figures for one channel; `split` as in manifest.csv, empty for all."""
    scorer = load_scorer(logs)
    runs = [run for run in scorer.load(logs / "manifest.csv") if channel in run["channels"]]
    if split:
        with (logs / "manifest.csv").open() as lines:
            members = {row["file"] for row in csv.DictReader(lines) if row["split"] == split}
        runs = [run for run in runs if run["file"] in members]
    found = alarms_of(detector, {run["file"]: read_channel(logs, run["file"], channel) for run in runs})
    result: dict[str, Any] = scorer.score(runs, {(file, channel): rows for file, rows in found.items()}, channel)
    return result


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logs", type=Path, default=DEFAULT_LOGS)
    logs = parser.parse_args().logs
    if not (logs / "score.py").is_file():
        print(f"no labelled logs at {logs}", file=sys.stderr)
        return 2
    with (logs / "manifest.csv").open() as lines:
        splits = sorted({row["split"] for row in csv.DictReader(lines)})
    print("| split | channel | detector | events | weighted recall | lenient /10k | strict /10k | median delay | s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for split in splits:
        for channel, detector in (("loss", LossSpike()), ("grad_norm", GradNormSpike())):
            began = time.perf_counter()
            r = score_detector(channel, detector, logs, split)
            took = time.perf_counter() - began
            print(
                f"| {split} | {channel} | {type(detector).__name__} | {r['events']} | {r['weighted_recall']:.3f}"
                f" | {r['per_10k_lenient']:.2f} | {r['per_10k_strict']:.2f} | {r['median_delay']} | {took:.1f} |"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
