"""Reference runs for rules: plain logs and recorded runs, read into a Reference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from sentinel.detect import known_detectors
from sentinel.detect.windowed import RollingMedian
from sentinel.errors import LogError
from sentinel.ingest.follow import RunFollower
from sentinel.logs.log_file import find_logs, read_log
from sentinel.messages import EndStep
from sentinel.reference import Reference, combine
from sentinel.rules.language.schema import Pack, Rule
from sentinel.store.run_paths import runs_in

Scalars = dict[str, tuple[np.ndarray, np.ndarray]]
"""Scalar -> (steps, values)."""


def read_references(paths: Sequence[str | Path]) -> Reference:
    """Return what the plain logs and recorded runs at `paths` (a directory: all that lie in it) make together.

    LogError where one cannot be read, or none has a number.
    """
    found = combine(references_at(paths), [str(path) for path in paths])
    if not found.series:
        raise LogError(f"{', '.join(map(str, paths))}: expected logs with numbers of reference runs, found none")
    return found


def with_reference(pack: Pack, reference: Reference) -> Pack:
    """Return the pack with `reference` in every rule that can use it and has none of its own."""
    detectors = known_detectors()

    def takes(name: str) -> bool:
        cls = detectors.get(name)
        return isinstance(cls, type) and issubclass(cls, RollingMedian)

    def beside(rule: Rule) -> Rule:
        return replace(rule, reference=reference) if rule.reference is None and takes(rule.detector) else rule

    return Pack(rules=tuple(map(beside, pack.rules)))


def references_at(paths: Iterable[str | Path]) -> Iterator[Scalars]:
    """Return what each log and recorded run at `paths` logged, by itself."""
    for path in map(Path, paths):
        if path.is_dir() and (runs := runs_in(path)):
            yield from map(_run_scalars, runs)
            continue
        for one in find_logs(path):
            log = read_log(one)
            yield {name: (log.steps, values) for name, values in log.columns.items()}


def _run_scalars(run_dir: Path) -> Scalars:
    """Return what a recorded run logged: of each step the mean over the ranks; a later attempt at it counts alone."""
    sums: dict[str, dict[int, list[float]]] = {}
    newest: dict[int, int] = {}
    follower = RunFollower(run_dir)
    while records := follower.poll(final=True):
        for record in records:
            if not isinstance(record.message, EndStep):
                continue
            step, attempt = record.message.step, record.incarnation.attempt or 0
            if attempt > newest.setdefault(step, attempt):
                newest[step] = attempt
                for values in sums.values():
                    values.pop(step, None)
            if attempt == newest[step]:
                for name, value in record.message.scalars.items():
                    sums.setdefault(name, {}).setdefault(step, []).append(value)
    return {
        name: (np.array(list(values), np.int64), np.array([np.mean(one) for one in values.values()], np.float64))
        for name, values in sums.items()
    }
