"""`compat: msprobe` against msProbe's own code on random streams: every verdict, every history mean to the last bit.

    python benchmarks/msprobe_formula.py
    python benchmarks/msprobe_formula.py --golden tests/detect/golden/msprobe_rules.json

The streams hold NaN, infinities, zeros of both signs, negatives, denormals and values near the largest double. Needs msProbe
(`pip install mindstudio-probe`) and torch beside Sentinel; says so and exits where it is absent.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results"
CASES: tuple[tuple[str, float | None], ...] = (
    ("AnomalyTurbulence", 0.5), ("AnomalyTurbulence", 0.0), ("AnomalyTurbulence", 3.0), ("AnomalyNan", None),
    ("AnomalyNan", 1e10), ("AnomalyNan", 0.0),
)  # fmt: skip
GOLDEN: tuple[tuple[str, float | None], ...] = (
    ("AnomalyTurbulence", 0.5), ("AnomalyTurbulence", 2.0), ("AnomalyNan", None), ("AnomalyNan", 1.0),
)  # fmt: skip
HEAD = ("rule", "threshold", "points", "alarms", "verdicts that differ", "histories that differ in any bit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=400_000, help="points of all cases together")
    parser.add_argument("--golden", type=Path, help="write msProbe's verdicts on small streams for the test suite, and exit")
    parser.add_argument("--write", action="store_true", help="write the table into benchmarks/results")
    options = parser.parse_args()
    if importlib.util.find_spec("msprobe") is None:
        print("msProbe is not installed; pip install mindstudio-probe", file=sys.stderr)
    elif options.golden:
        write_golden(options.golden)
    else:
        lines = [
            f"{datetime.date.today()}  msProbe {version('mindstudio-probe')}, numpy {np.__version__}",
            f"python benchmarks/msprobe_formula.py --points {options.points}",
            "",
            f"| {' | '.join(HEAD)} |",
            "|" + "---|" * len(HEAD),
        ]
        for number, (rule, threshold) in enumerate(CASES):
            values = streams(np.random.default_rng(number), max(options.points // len(CASES) // 300, 2), 300)
            lines.append(f"| {' | '.join(map(str, compared(values, rule, threshold)))} |")
        print("\n".join(lines))
        if options.write:
            (RESULTS / f"{datetime.date.today()}-msprobe_formula.md").write_text("\n".join(lines) + "\n")


def streams(rng: np.random.Generator, points: int, series: int) -> np.ndarray:
    """Return [points, series] of everything a statistic can be."""
    values = rng.standard_normal((points, series)) * np.exp(rng.standard_normal((points, series)))
    values *= np.logspace(-40, 40, series)
    # A NaN blinds a history for good: in a third of the series there are none, in a third few.
    share = np.array([0.0, 0.002, 0.02])[np.arange(series) % 3]
    for bad in (0.0, -0.0, -1.0, np.nan, np.inf, -np.inf, 1e308, 5e-324, -1e-310):
        values[rng.random(values.shape) < share] = bad
    is_finite = np.arange(series) % 3 == 0
    for odd in (0.0, -1.0, 1e308, 5e-324):
        values[(rng.random(values.shape) < 0.01) & is_finite] = odd
    return values


def msprobe_verdicts(values: np.ndarray, rule: str, threshold: float | None) -> tuple[np.ndarray, np.ndarray]:
    """Return what msProbe's own writer and rule say: found [points, series], and the history before each point."""
    from msprobe.core.monitor.anomaly_processor import AnomalyScanner
    from msprobe.pytorch.monitor.data_writers import BaseWriterWithAD, WriterInput

    spec: dict[str, Any] = {"rule_name": rule}
    if threshold is not None:
        spec["args"] = {"threshold": threshold}
    writer = BaseWriterWithAD(WriterInput("", AnomalyScanner.load_rules([spec]), ""))
    found, history = np.zeros(values.shape, bool), np.zeros(values.shape)
    for i, point in enumerate(values.tolist()):
        for j, value in enumerate(point):
            average = writer._update_tag2scalars((f"series{j}", "norm"), value)
            found[i, j], history[i, j] = writer._ad(value, history=average)[0], average
    return found, history


def our_verdicts(values: np.ndarray, rule: str, threshold: float | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the same of `compat: msprobe`."""
    from sentinel.detect import DETECTORS

    arguments = {} if threshold is None else {"threshold": threshold}
    detector = DETECTORS[rule](compat="msprobe", **arguments)
    state = detector.state(values.shape[1])
    found, history = np.zeros(values.shape, bool), np.zeros(values.shape)
    with np.errstate(all="ignore"):
        for i, point in enumerate(values):
            scores = detector.score(point, state)
            found[i], history[i] = scores.score >= 1.0, scores.baseline
            detector.learn(point, state, found[i])
    return found, history


def compared(values: np.ndarray, rule: str, threshold: float | None) -> tuple[object, ...]:
    """Return one row of the table."""
    theirs, their_history = msprobe_verdicts(values, rule, threshold)
    ours, our_history = our_verdicts(values, rule, threshold)
    same = (their_history == our_history) | (np.isnan(their_history) & np.isnan(our_history))
    histories: object = int((~same).sum()) if rule == "AnomalyTurbulence" else "it has none"
    return rule, threshold, values.size, int(theirs.sum()), int((theirs != ours).sum()), histories


def write_golden(path: Path) -> None:
    """Write msProbe's own verdicts: streams, alarms, and history means to the last bit."""
    values = streams(np.random.default_rng(2026), 40, 12)
    cases = []
    for rule, threshold in GOLDEN:
        found, history = msprobe_verdicts(values, rule, threshold)
        case: dict[str, Any] = {"rule": rule, "threshold": threshold}
        case["alarms"] = ["".join("01"[bool(one)] for one in series) for series in found.T]
        if rule == "AnomalyTurbulence" and threshold == 0.5:
            case["history"] = [[float(one).hex() for one in series] for series in history.T]
        cases.append(case)
    series = [[float(one).hex() for one in column] for column in values.T]
    made_by = f"msProbe {version('mindstudio-probe')}, benchmarks/msprobe_formula.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"made_by": made_by, "series": series, "cases": cases}, indent=0) + "\n")
    print(f"written: {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
