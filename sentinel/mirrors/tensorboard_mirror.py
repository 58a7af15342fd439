"""TensorBoard: one event file of a run that grows while it is judged, with what was found as texts."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from sentinel.anomaly import Anomaly
from sentinel.exports import tensorboard
from sentinel.mirrors.lacking_library import lacking_library
from sentinel.mirrors.mirror import MirrorBatch, MirroredIncident, MirrorParts
from sentinel.mirrors.mirror_select import MirrorSelect
from sentinel.printable import printable
from sentinel.private_files import create_file, make_directory

FOLDER = "tensorboard"
ONSETS, ANOMALIES, INCIDENTS = "anomalies/onsets", "anomalies/text", "incidents/text"
"""Tags: how many anomalies began in a step, and what they say; revisions of incidents."""
MOST_SHOWN = 20
"""Anomalies of a step that are told in words; of more the number is."""
_MARKUP = str.maketrans({char: f"\\{char}" for char in "\\`*_[]#|~"} | {"<": "&lt;", ">": "&gt;", "&": "&amp;"})


class TensorBoardConfig(msgspec.Struct, frozen=True, kw_only=True, tag="tensorboard", forbid_unknown_fields=True):
    """Event files for TensorBoard, which reads them while they grow."""

    name: str = "tensorboard"
    """Name in metrics and messages."""

    directory: str = ""
    """Where the runs' folders go, one each, named as the run; empty: `tensorboard` in each run's own directory."""

    select: MirrorSelect = MirrorSelect()
    """What is mirrored."""

    def problem(self, environ: Mapping[str, str]) -> str:
        """Return that tensorboard is not installed, or that nothing can be written there; empty: neither."""
        folder = Path(self.directory).expanduser() if self.directory else None
        while folder is not None and not folder.exists():
            folder = folder.parent if folder != folder.parent else None
        if folder is not None and not (folder.is_dir() and os.access(folder, os.W_OK)):
            return f"directory: {folder}: expected a directory that can be written"
        return lacking_library("tensorboard", "tensorboard")

    def build(self, parts: MirrorParts) -> TensorBoardMirror:
        """Return the mirror of a run."""
        tensorboard.load()
        if self.directory:
            folder = Path(self.directory).expanduser() / parts.run
            folder.mkdir(parents=True, exist_ok=True)
            return TensorBoardMirror(folder, parts.mark, mode=0o666)
        make_directory(parts.run_dir / FOLDER)
        return TensorBoardMirror(parts.run_dir / FOLDER, parts.mark, mode=0o600)


class TensorBoardMirror:
    """Appends to the newest event file of a folder. The mark is its name, its bytes and the attempt; what is behind goes."""

    def __init__(self, folder: Path, mark: str, *, mode: int) -> None:
        """mode: of the files, before the umask. OSError when nothing can be written there."""
        name, num_bytes, self._attempt = _read_mark(mark)
        path = folder / name
        if not name or not path.exists() or path.stat().st_size < num_bytes:
            # Nobody knows what is in a file that is not as it was left: another one goes on behind it.
            number = 1 + max((int(one.name.split(".")[3]) for one in folder.glob(tensorboard.LIVE_FILES)), default=-1)
            name, num_bytes = tensorboard.live_file_name(number), 0
            path = folder / name
        self._name = name
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW
        self._fd = create_file(path, flags) if mode == 0o600 else os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, mode)
        os.ftruncate(self._fd, num_bytes)
        self._num_bytes = num_bytes

    def write(self, batch: MirrorBatch) -> str:
        """Append a batch, and have it on the disk."""
        parts = [] if self._num_bytes else [tensorboard.head()]
        for step in batch.steps:
            if step.attempt != self._attempt:
                if self._attempt is not None:
                    parts.append(tensorboard.session_start(step.step, step.time))
                self._attempt = step.attempt
            parts.append(tensorboard.events(step.step, step.time, step.values))
        parts += _of_anomalies(batch.anomalies)
        parts += [_of_incident(one) for one in batch.incidents]
        data = b"".join(parts)
        try:
            written = 0
            while written < len(data):
                written += os.write(self._fd, memoryview(data)[written:])
            os.fsync(self._fd)
        except OSError:
            os.ftruncate(self._fd, self._num_bytes)
            raise
        self._num_bytes += len(data)
        return f"{self._name} {self._num_bytes} {'' if self._attempt is None else self._attempt}"

    def close(self, *, is_over: bool) -> None:
        """Close the file."""
        os.close(self._fd)


def _read_mark(mark: str) -> tuple[str, int, int | None]:
    name, _, rest = mark.partition(" ")
    num_bytes, _, attempt = rest.partition(" ")
    is_whole = num_bytes.isdigit() and "/" not in name
    return (name, int(num_bytes), int(attempt) if attempt else None) if is_whole else ("", 0, None)


def _of_anomalies(anomalies: Iterable[Anomaly]) -> Iterable[bytes]:
    by_step: dict[tuple[int, int], list[Anomaly]] = {}
    for one in anomalies:
        by_step.setdefault((one.attempt, one.step), []).append(one)
    for (_, step), found in by_step.items():
        time = max(one.time for one in found)
        lines = [f"- **{one.severity.value}** {_shown(one.message or f'{one.rule}: {one.tag_name}')}" for one in found]
        rules = ", ".join(f"{_shown(rule)} {count}" for rule, count in Counter(one.rule for one in found).items())
        rest = [f"- and {len(found) - MOST_SHOWN} more ({rules})"] if len(found) > MOST_SHOWN else []
        yield tensorboard.events(step, time, [(ONSETS, float(len(found)))])
        yield tensorboard.text(step, time, ANOMALIES, "\n".join([*lines[:MOST_SHOWN], *rest]))


def _of_incident(mirrored: MirroredIncident) -> bytes:
    one = mirrored.incident
    lines = [
        f"{one.id} **{mirrored.change}** ({one.severity.value}, {_shown(one.state)}): {_shown(one.title)}",
        f"steps {one.steps}, {one.num_members} anomalies, suspected: {_shown(one.suspected)}",
        *(f"- {_shown(reason)}" for reason in one.reasons),
        *([f"to do: {_shown(one.to_do)}"] if one.to_do else []),
    ]
    return tensorboard.text(max(one.last_step, one.opened_step), one.time, INCIDENTS, "\n\n".join(lines))


def _shown(text: str) -> str:
    """Return text that others made as Markdown shows it: no markup of its own, in one line."""
    return printable(text).translate(_MARKUP)
