"""RunMirrors: the mirrors of a served run. What is wrong with one is said; the run is judged, and the others are written."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from sentinel.decision import Tick
from sentinel.exports.series import MergedStep
from sentinel.mirrors.mirror import MirrorParts, MirrorSettings
from sentinel.mirrors.mirror_position import FOLDER
from sentinel.mirrors.mirror_worker import MirrorWorker
from sentinel.report.metrics import MirrorCounts
from sentinel.store.journal import Journal
from sentinel.store.run_paths import RunPaths

log = logging.getLogger("sentinel.serving")

OVER_S = 1.0
"""It is looked so often whether all ranks have left."""


class RunMirrors:
    """Of one run. Called by the loop; a mirror works in a thread of its own, and nothing here waits for it but the end."""

    def __init__(
        self,
        paths: RunPaths,
        journal: Journal,
        configs: Sequence[MirrorSettings],
        labels: Mapping[str, str],
        environ: Mapping[str, str],
    ) -> None:
        self._paths, self._journal, self._configs = paths, journal, tuple(configs)
        self._parts = MirrorParts(run=paths.name, key="", run_dir=paths.run_dir, mark="", environ=environ, labels=labels)
        self._workers: list[MirrorWorker] = []
        self._over_due = 0.0

    def begin(self, after: int) -> None:
        """Mirror from now on. after: the last decision that is not judged again."""
        folder = self._paths.state / FOLDER
        self._workers = [
            MirrorWorker(one, self._parts, self._journal, folder / f"{one.name}.json", after=after) for one in self._configs
        ]

    def use(self, configs: Sequence[MirrorSettings]) -> None:
        """Say where another configuration asks for something else: mirrors are what they were when the run was opened."""
        if tuple(configs) != self._configs:
            words = "run %s: the section mirrors has changed; in force when the daemon is started anew"
            log.warning(words, self._paths.name)

    def take(self, step: MergedStep, step_time_s: float) -> None:
        """Take in a judged step; what a mirror has already it leaves. step_time_s: 0: not known."""
        for one in self._workers:
            one.take(step, step_time_s)

    def pass_by(self, tick: Tick) -> None:
        """Take note of a decision that closed no step."""
        for one in self._workers:
            one.pass_by(tick.seq)

    def look(self, have_left: Callable[[], Iterable[bool]]) -> None:
        """Have the mirrors sum the run up where all its ranks have left. have_left: says of each whether it has."""
        if self._workers and (now := time.monotonic()) >= self._over_due:
            self._over_due = now + OVER_S
            left = list(have_left())
            if left and all(left):
                self.end()

    def end(self) -> None:
        """Have the mirrors sum the run up: it is over."""
        for one in self._workers:
            one.end()

    def hurry(self) -> None:
        """Begin to end, so that the mirrors of several runs do so at once."""
        for one in self._workers:
            one.hurry()

    def close(self) -> None:
        """Write what waits, and end."""
        self.hurry()
        for one in self._workers:
            one.close()

    @property
    def problems(self) -> list[str]:
        """Why the newest steps are not mirrored, in words."""
        return [one.problem for one in self._workers if one.problem]

    @property
    def counts(self) -> dict[str, MirrorCounts]:
        """Name of a mirror -> what became of what it was given."""
        return {one.name: one.counts for one in self._workers}
