"""Leave one repository out: constants chosen on the logs of all other repositories, scored on those of the one left out.

Called by detection.py. Of each grid the setting is chosen whose cost is least on average with its neighbours in k, so that
one on the edge of a cliff is not: a point of weighted recall costs as much as one strict false alarm in 10,000 rows, and a
lenient one ten times that. What the left-out repositories find is summed: no constant of the grid has seen the log that it
is scored on. The structure and where the grid lies were chosen with all logs in view, so the figure is still a kind one.
Beside it stand the setting chosen on all logs, and the defaults.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import msgspec
import numpy as np

GRID: dict[str, dict[str, Sequence[float]]] = {
    "loss": {
        "k": (7.4, 7.6, 7.8, 8.0, 8.2, 8.4, 8.6, 8.8, 9.0),
        "window": (39, 47, 55),
        "memory": (128, 160, 192),
        "floor": (0.07, 0.09, 0.1),
    },
    "grad_norm": {
        "k": (5.0, 6.0, 7.0, 7.5, 8.0, 8.5, 9.0, 10.0),
        "window": (39, 47, 55, 61, 69, 75),
        "memory": (128, 160, 192),
        "floor": (0.85, 0.95),
    },
}
Setting = tuple[float, ...]
Part = dict[str, float]
"""What one repository adds to a score: weight, caught, rows, lenient, strict."""


def loro(logs: Any, detectors: Any) -> None:
    """Print both channels: chosen and scored by repository, and pooled."""
    print("\n## Leave one repository out: weighted recall | lenient | strict per 10k\n")
    print("| channel | left out | chosen on the others | events | recall | lenient | strict |")
    print("|---|---|---|---|---|---|---|")
    pooled = []
    for channel, default in detectors.items():
        names = list(GRID[channel])
        repos = sorted({run["repo"] for run in logs.half(channel)})
        settings: list[Setting] = list(product(*GRID[channel].values()))
        parts = {
            setting: {repo: _part(logs, channel, _at(default, names, setting), repo) for repo in repos}
            for setting in settings
        }
        unseen = []
        for repo in repos:
            chosen = _choose(parts, [other for other in repos if other != repo], names.index("k"))
            unseen.append(parts[chosen][repo])
            print(f"| {channel} | {repo} | {_shown(names, chosen)} | {_figures(unseen[-1:])} |")
        tuned = _choose(parts, repos, names.index("k"))
        now = [_part(logs, channel, default, repo) for repo in repos]
        pooled += [
            f"| {channel} | left out, pooled | by repository | {_figures(unseen)} |",
            f"| {channel} | none: tuned on all | {_shown(names, tuned)} | {_figures(list(parts[tuned].values()))} |",
            f"| {channel} | none: the defaults | {_shown(names, [getattr(default, n) for n in names])} | {_figures(now)} |",
        ]
    print("\n".join(pooled))


def _at(detector: Any, names: list[str], setting: Setting) -> Any:
    return msgspec.structs.replace(detector, **dict(zip(names, setting, strict=True)))


def _part(logs: Any, channel: str, detector: Any, repo: str) -> Part:
    runs, alarms = [run for run in logs.half(channel) if run["repo"] == repo], {}
    for run in runs:
        x = logs.column(run["file"], channel)
        flagged = detector.scan(x[:, None], detector.state(1))[:, 0] >= 1.0
        alarms[run["file"], channel] = np.flatnonzero(flagged | ~np.isfinite(x)).tolist()
    found = logs.scorer.score(runs, alarms, channel)
    rows = found["clean_rows"]
    weight = _weight(runs, channel)
    return {
        "events": found["events"], "weight": weight, "caught": weight * found["weighted_recall"], "rows": rows,
        "lenient": found["per_10k_lenient"] * rows / 1e4, "strict": found["per_10k_strict"] * rows / 1e4,
    }  # fmt: skip


def _weight(runs: list[dict[str, Any]], channel: str) -> float:
    """Return the weights of the events scored: one for each place where events recur, less what the burn-in takes."""
    places = [
        (event["onset"] // 4, event["onset"])
        for run in runs for event in run["events"] if event["channel"] == channel and event["kind"] in ("spike", "jump")
    ]  # fmt: skip
    every = [place for place, _ in places]
    return sum(1.0 / every.count(place) for place, onset in places if onset >= 128)


def _sums(parts: Sequence[Part]) -> tuple[float, float, float]:
    total = {key: sum(part[key] for part in parts) for key in parts[0]}
    rows = max(total["rows"], 1.0)
    recall = total["caught"] / total["weight"] if total["weight"] else 1.0
    return recall, 1e4 * total["lenient"] / rows, 1e4 * total["strict"] / rows


def _choose(parts: dict[Setting, dict[str, Part]], repos: list[str], k: int) -> Setting:
    cost = {}
    for setting, by_repo in parts.items():
        recall, lenient, strict = _sums([by_repo[repo] for repo in repos])
        cost[setting] = 100.0 * (1.0 - recall) + 10.0 * lenient + strict
    ks = sorted({setting[k] for setting in parts})

    def around(setting: Setting) -> float:
        at = ks.index(setting[k])
        near = ks[max(0, at - 1) : at + 2]
        if len(near) < 3:
            return np.inf
        return sum(cost[(*setting[:k], other, *setting[k + 1 :])] for other in near) / 3.0

    return min(parts, key=around)


def _shown(names: list[str], setting: Sequence[float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in zip(names, setting, strict=True))


def _figures(parts: Sequence[Part]) -> str:
    events = int(sum(part["events"] for part in parts))
    recall, lenient, strict = _sums(parts)
    return f"{events} | {f'{recall:.3f}' if events else '-'} | {lenient:.2f} | {strict:.2f}"
