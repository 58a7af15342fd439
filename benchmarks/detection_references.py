"""Reference runs of the labelled logs: what recurs at the same step, and a step off by 2 % beside what the reference runs
forecast.

Called by detection.py. Reference runs are found in the data: runs whose loss, less its moving mean, moves together.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np

from sentinel.detect import LossSpike
from sentinel.detect.residual import Beside
from sentinel.reference import combine
from sentinel.rules.watches.reference_runs import Lookup

PROJECT = "KellerJordan/modded-nanogpt"
"""36 runs, which share their data order."""
TOGETHER = 0.5
"""Correlation of two runs' movements from which on they are reference runs; between strangers it is near 0."""
BURN_IN = 128
PLANTS = 60
"""Corrupted steps planted in each run, each in a run of its own."""
PLANTED = (1.02, 0.98)


def groups_of(logs: Any) -> list[list[str]]:
    """Return files in groups that saw the same batches at the same steps."""
    groups: list[list[str]] = []
    for run in logs.half("loss"):
        if run["repo"] != PROJECT:
            continue
        file = run["file"]
        group = next((group for group in groups if _together(logs, file, group[0]) > TOGETHER), None)
        if group is None:
            groups.append([file])
        else:
            group.append(file)
    return groups


def _together(logs: Any, one: str, other: str) -> float:
    moves = []
    for file in (one, other):
        steps, z = logs.column(file, "step").astype(int), np.log(logs.column(file, "loss"))
        moves.append(dict(zip(steps.tolist(), (z - np.convolve(z, np.ones(9) / 9.0, "same")).tolist(), strict=True)))
    both = [step for step in moves[0] if step in moves[1] and 200 <= step < 1500]
    return float(np.corrcoef([moves[0][s] for s in both], [moves[1][s] for s in both])[0, 1]) if len(both) > 50 else 0.0


def recur(logs: Any) -> None:
    """Print the share of alarms that recur in a reference run at the same step: no label needed, the batch did it."""
    detector = LossSpike()
    alarms = logs.alarms("loss", lambda column: detector.scan(column[:, None], detector.state(1))[:, 0] >= 1.0)
    print("\n## Alarms that recur within 2 steps in at least one sister run; in at least half of those that got there\n")
    print("| sisters a group | runs | alarms | in one | in half |\n|---|---|---|---|---|")
    for group in groups_of(logs):
        total = once = often = 0
        begins = {}
        for file in group:
            steps = logs.column(file, "step")
            begins[file] = [float(steps[row]) for row in logs.scorer.episodes(alarms[file]) if row >= BURN_IN]
        for file in group:
            for step in begins[file]:
                there = [other for other in group if other != file and logs.column(other, "step")[-1] >= step + 2]
                if not there:
                    continue
                hits = sum(any(abs(step - found) <= 2 for found in begins[other]) for other in there)
                total, once, often = total + 1, once + (hits > 0), often + (2 * hits >= len(there))
        share = (f"{once / total:.2f}", f"{often / total:.2f}") if total else ("no sister", "no sister")
        print(f"| {len(group) - 1} | {len(group)} | {total} | {share[0]} | {share[1]} |")


@dataclass
class Beheld:
    """One run beside the others of its group, row by row."""

    file: str
    num_references: int
    half: str
    """`tuned` or `other`: runs of a group in turn."""
    residual: np.ndarray
    """What it is away from the forecast, in logarithms; NaN where there is none. Rows from BURN_IN on, as all below."""
    score: np.ndarray
    """Signed: below 0.0 where the run is under the forecast."""
    caught: dict[float, list[bool]]
    """Factor planted -> whether each plant was called, on its own side."""
    alone: list[bool]
    """Whether the run's past alone calls the plants of PLANTED[0]."""

    def episodes(self, rows: np.ndarray, logs: Any) -> int:
        """Return the number of episodes of the rows flagged."""
        return len(logs.scorer.episodes(np.flatnonzero(rows).tolist()))


def references(logs: Any) -> None:
    """Print how many planted steps are caught beside the reference runs, the false alarms, and what any threshold could
    reach."""
    runs = [_beside(logs, group, at) for group in groups_of(logs) if len(group) > 1 for at in range(len(group))]
    print(
        "\n## Beside sisters: one step of the loss x1.02, x0.98; each run left out of its group in turn; rows from 128 on\n"
    )
    print("""Nearly all constants were set on a grid over all runs, the last two (how k depends on the number of reference
    runs) on
every second run of each group (tuned): the other half is not unseen. False alarms count both sides; beside one reference
run a
fall is never called, by design.
""")
    print("| sisters | half | runs | planted | +2 % caught | -2 % caught | rows | false | per 100k | +2 % without sisters |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    counts = sorted({run.num_references for run in runs})
    for num in (*counts, None):
        for half in ("tuned", "other", "all"):
            taken = [run for run in runs if num in (None, run.num_references) and half in ("all", run.half)]
            rows = sum(len(run.score) for run in taken)
            false = sum(run.episodes(sign * run.score >= 1.0, logs) for run in taken for sign in (1.0, -1.0))
            caught = {factor: np.concatenate([run.caught[factor] for run in taken]) for factor in PLANTED}
            planted = len(caught[PLANTED[0]])
            shares = " | ".join(f"{caught[factor].mean():.3f}" for factor in PLANTED)
            alone = np.concatenate([run.alone for run in taken]).mean()
            called = f"{rows} | {false} | {false * 1e5 / rows:.1f}"
            print(f"| {num or 'all'} | {half} | {len(taken)} | {planted} | {shares} | {called} | {alone:.3f} |")
    _bound(logs, runs, counts)


def _bound(logs: Any, runs: list[Beheld], counts: list[int]) -> None:
    """Print what the best threshold reaches that allows so many false alarms, chosen with hindsight."""
    print("""
+2 % caught by the best threshold of all on the same residuals, chosen for each group to give at most so many false alarms
per 100k rows, upward only: of the residual itself, of the residual by a deviation that knows the future (robust, 48 rows to
each side), and of the residual by what the detector allows at that row. What no oracle catches, noise hides.
""")
    print(
        "| sisters | false per 100k | residual | by the deviation in hindsight | by what is allowed |\n|---|---|---|---|---|"
    )
    for num in counts:
        taken = [run for run in runs if run.num_references == num]
        rows = sum(len(run.score) for run in taken)
        for per_100k in (5, 20, 50, 100):
            cells = []
            for scale_of in (lambda run: np.ones(len(run.residual)), lambda run: _hindsight(run.residual), _allowed):
                if scale_of is _allowed and num < 3:
                    cells.append("-")  # beside one reference run nothing is allowed or not below the forecast
                    continue
                scales = [scale_of(run) for run in taken]
                heights = [np.nan_to_num(run.residual, nan=-1.0) / scale for run, scale in zip(taken, scales, strict=True)]
                allowed, low, high = per_100k * rows / 1e5, 0.0, 1000.0
                for _ in range(40):
                    middle = 0.5 * (low + high)
                    false = sum(run.episodes(height >= middle, logs) for run, height in zip(taken, heights, strict=True))
                    low, high = (low, middle) if false <= allowed else (middle, high)
                over = [h + np.log(1.02) / s >= high for h, s in zip(heights, scales, strict=True)]
                cells.append(f"{np.mean([one.mean() for one in over]):.3f}")
            print(f"| {num} | {per_100k} | {' | '.join(cells)} |")


def _hindsight(residual: np.ndarray, reach: int = 48) -> np.ndarray:
    """Return the robust deviation of the residuals around each row."""
    padded = np.pad(np.nan_to_num(residual), reach, mode="reflect")
    low, high = np.quantile(np.lib.stride_tricks.sliding_window_view(padded, 2 * reach + 1), [0.25, 0.75], axis=1)
    return np.maximum((high - low) / 1.349, 1e-5)


def _allowed(run: Beheld) -> np.ndarray:
    """Return how far up the detector lets the residual go at each row; much where it says nothing."""
    with np.errstate(divide="ignore", invalid="ignore"):
        bound = np.abs(run.residual / run.score)
    return np.where(np.isfinite(bound), bound, 1e3)


def _beside(logs: Any, group: list[str], at: int) -> Beheld:
    file = group[at]
    others = [{"loss": (logs.column(one, "step"), logs.column(one, "loss"))} for one in group if one != file]
    steps, loss, detector = logs.column(file, "step").astype(int), logs.column(file, "loss"), LossSpike()
    lookup = Lookup(combine(others).series["loss"])
    beside, state = Beside(detector, lookup.num_kept), detector.state(1)
    there = [row for row in range(BURN_IN, len(loss)) if np.isfinite(lookup.around(steps[row])[0]).any()]
    plants = set(np.random.default_rng(0).choice(there, min(PLANTS, len(there)), replace=False).tolist())
    residual, score = np.full(len(loss), np.nan), np.zeros(len(loss))
    caught: dict[float, list[bool]] = {factor: [] for factor in PLANTED}
    alone = []
    for row, value in enumerate(loss.tolist()):
        found, point = lookup.around(steps[row]), np.array([value])
        if row in plants:
            for factor in PLANTED:
                height, side, *_ = deepcopy(beside).judge(factor * value, *found)
                caught[factor].append(height >= 1.0 and (side > 0) == (factor > 1.0))
            alone.append(bool(detector.score(PLANTED[0] * point, state).score[0] >= 1.0))
        height, side, forecast, _ = beside.judge(value, *found)
        score[row] = height * side
        if np.isfinite(forecast):
            residual[row] = np.log(value / forecast)
        detector.learn(point, state, detector.score(point, state).score >= 1.0)
    # A reference run that is over forecasts nothing any more: rows past the last are not judged.
    judged = np.array(there)
    half = "tuned" if at % 2 == 0 else "other"
    return Beheld(file, len(group) - 1, half, residual[judged], score[judged], caught, alone)
