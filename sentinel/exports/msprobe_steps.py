"""The steps of one rank that msProbe recorded, in order: lines of all its files put together."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import msgspec

from sentinel.errors import ConfigError
from sentinel.exports.msprobe_format import FEATURE_FILES
from sentinel.exports.msprobe_reading import Observation, Unread, csv_files, read_file

_PHASES = {"param": 0, "activation_in": 1, "activation": 1, "dgrad": 1, "dgrad_in": 1, "wgrad_unreduced": 2, "wgrad": 3}
_LAST = 4
_FORWARD, _BACKWARD, _GRADIENT = 0, 1, 2


class Step(msgspec.Struct, frozen=True):
    """All observations of one rank at one step."""

    step: int
    lines: list[Observation]
    """In the order in which they were observed, as far as the files show: by micro-step, forward before backward."""
    repeat: int = 0
    """How often the rank had written this step before, having resumed from an older checkpoint; 0: this is the first
    time."""


class RepeatedLine(ConfigError):
    """A tensor has two lines at one step."""


class RankSteps:
    """Reads the folder of one rank, a few files at a time."""

    def __init__(self, folder: Path, *, is_resumed: bool = False) -> None:
        """is_resumed: a second line of a tensor at a step was written by a resumed run; else it is a RepeatedLine."""
        self.folder = Path(folder)
        self.is_resumed = is_resumed
        self.unread = Unread()
        self.num_changed_weights = 0
        """Weights of step N that are not those that step N - 1 left behind."""
        self.has_running_sums = False
        """Gradients by micro-step: msProbe's are sums up to that micro-step."""

    def __iter__(self) -> Iterator[Step]:
        """Yield the steps, rising; of a repeated one each time. ConfigError as of `read_file`."""
        open_steps: dict[int, list[Observation]] = {}
        files = csv_files(self.folder)
        groups = [(span, list(group)) for span, group in groupby(files, key=lambda one: (one[0], one[1]))]
        for at, ((first, last), group) in enumerate(groups):
            for _, _, file, path in group:
                for line in read_file(path, file, (first, last), self.unread):
                    open_steps.setdefault(line.step, []).append(line)
            # A later file may still tell of its first step less one: the optimizer's state.
            border = groups[at + 1][0][0] - 1 if at + 1 < len(groups) else 2**62
            for step in sorted(one for one in open_steps if one < border):
                yield from self._closed(step, open_steps.pop(step))

    def _closed(self, step: int, lines: list[Observation]) -> Iterator[Step]:
        rounds: list[dict[tuple[object, ...], Observation]] = [{}]
        # Weights before the step say what it began with; those that the last one left come behind.
        for line in sorted(lines, key=lambda one: one.file == "param_updated"):
            key = (line.kind, line.vpp_stage, line.name, line.micro_step)
            if line.kind == "wgrad_unreduced" and line.micro_step >= 0:
                self.has_running_sums = True
            at = 0
            while at < len(rounds) and key in rounds[at] and rounds[at][key].file == line.file:
                at += 1
            if at and not self.is_resumed:
                other = rounds[0][key]
                raise RepeatedLine(
                    f"{line.where}: {line.name} is there at step {line.step} already, in {other.where}; a run that went on "
                    "from a checkpoint into the same folder is read with --resumed"
                )
            if at == len(rounds):
                rounds.append({})
            other_file = rounds[at].setdefault(key, line)
            if other_file is not line:
                self.num_changed_weights += other_file.values != line.values
        for at, found in enumerate(rounds):
            yield Step(step, sorted(found.values(), key=_order), at)


def _order(line: Observation) -> tuple[int, int, int]:
    """Sorting is stable: within one of these the lines stay as they lie in their file."""
    if line.micro_step < 0 or line.file in FEATURE_FILES:
        return _PHASES.get(line.kind, _LAST), 0, 0
    within = _BACKWARD if line.kind in ("dgrad", "dgrad_in") else _GRADIENT if line.kind == "wgrad_unreduced" else _FORWARD
    return _PHASES["activation"], line.micro_step, within
