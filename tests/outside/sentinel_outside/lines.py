"""A mirror: a file with a line for each step and each revision of an incident."""

from __future__ import annotations

from pathlib import Path

import msgspec

from sentinel.mirrors.mirror_select import MirrorSelect


class LinesConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The fields are the keys under `mirrors`; `name`, `select`, `problem` and `build` are what every mirror has."""

    path: str
    name: str = "lines"
    select: MirrorSelect = MirrorSelect()

    def problem(self, environ):
        return "" if Path(self.path).parent.is_dir() else f"path: {self.path}: its directory is not there"

    def build(self, parts):
        return LinesMirror(Path(self.path), parts)


class LinesMirror:
    def __init__(self, path, parts):
        self._path, self._run = path, parts.run

    def write(self, batch):
        with self._path.open("a") as file:
            for step in batch.steps:
                file.write(f"{self._run} {step.step} {dict(step.values)}\n")
            for told in batch.incidents:
                file.write(f"{self._run} {told.change}: {told.incident.title}\n")
        return ""  # the mark: kept on disk, and given as parts.mark to whoever is built behind a restart

    def close(self, *, is_over):
        pass
