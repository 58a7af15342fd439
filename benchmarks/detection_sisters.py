"""Sister runs of the labelled logs: what recurs at the same step, and a +2 % step beside the sisters' median.

Called by detection.py. Sisters are found in the data: runs whose loss, less its moving mean, moves together.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sentinel.detect import LossSpike
from sentinel.detect.reference import Beside
from sentinel.detect.rolling import spread
from sentinel.reference import ReferenceSeries, combine

PROJECT = "KellerJordan/modded-nanogpt"
"""36 runs; trainlogs/README.md says that they share their data order."""
TOGETHER = 0.5
"""Correlation of two runs' movements from which on they are sisters; between strangers it is near 0."""
BURN_IN = 128
PLANTS = 60
"""Corrupted steps planted in each run, each in a run of its own."""


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
    """Print the share of alarms that recur in a sister at the same step: no label needed, the batch did it."""
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


def sisters(logs: Any) -> None:
    """Print how many planted +2 % steps are caught beside the sisters, and the false alarms; each run left out in turn."""
    print("\n## Beside sisters: one step of the loss x1.02, each run left out of its group in turn; rows from 128 on\n")
    print("| sisters | runs | planted | caught | rows judged | false alarms | per 100k rows | caught without sisters |")
    print("|---|---|---|---|---|---|---|---|")
    whole = np.zeros(4)
    several = np.zeros(4)
    for group in groups_of(logs):
        if len(group) < 2:
            continue
        sums, alone = np.zeros(4), 0
        for file in group:
            others = [{"loss": (logs.column(one, "step"), logs.column(one, "loss"))} for one in group if one != file]
            found, without = _left_out(logs, file, combine(others).series["loss"])
            sums, alone = sums + found, alone + without
        planted, caught, rows, false = sums
        cells = f"{planted:.0f} | {caught / planted:.3f} | {rows:.0f} | {false:.0f} | {false * 1e5 / rows:.1f}"
        print(f"| {len(group) - 1} | {len(group)} | {cells} | {alone / planted:.3f} |")
        whole += sums
        several += sums * (len(group) > 3)
    for name, (planted, caught, rows, false) in (("3 and more", several), ("all", whole)):
        cells = f"{planted:.0f} | {caught / planted:.3f} | {rows:.0f} | {false:.0f} | {false * 1e5 / rows:.1f}"
        print(f"| {name} | | {cells} | |")


def _left_out(logs: Any, file: str, series: ReferenceSeries) -> tuple[np.ndarray, int]:
    """Return (planted, caught, rows judged, false alarms) of one run, and what is caught of the plants without sisters."""
    steps, medians, unrest = series.arrays()
    at = {int(step): (float(m), float(u)) for step, m, u in zip(steps, medians, unrest, strict=True)}
    own_steps, loss = logs.column(file, "step"), logs.column(file, "loss")
    there = [row for row in range(BURN_IN, len(loss)) if int(own_steps[row]) in at]
    plants = set(np.random.default_rng(0).choice(there, min(PLANTS, len(there)), replace=False).tolist())
    detector = LossSpike()
    state, beside = detector.state(1), Beside(detector)
    beside.grow(1)
    caught = alone = 0
    flagged = []
    for row, value in enumerate(loss.tolist()):
        step, point = int(own_steps[row]), np.array([value])
        if step in at:
            median, restless = at[step]
            own = float(spread(state)[0])
            if row in plants:
                kept = _copied(beside, detector)
                caught += kept.judge(0, 1.02 * value, own, median, restless, series.num_runs)[0] >= 1.0
                alone += detector.score(1.02 * point, state).score[0] >= 1.0
            if beside.judge(0, value, own, median, restless, series.num_runs)[0] >= 1.0 and row >= BURN_IN:
                flagged.append(row)
        detector.learn(point, state, detector.score(point, state).score >= 1.0)
    return np.array([len(plants), caught, len(there), len(logs.scorer.episodes(flagged))], dtype=float), alone


def _copied(beside: Beside, detector: LossSpike) -> Beside:
    """Return a copy that may take in what did not happen."""
    copy = Beside(detector)
    copy.grow(1)
    copy.take_dict(beside.to_dict())
    return copy
