"""What a mirror is: it writes batches of one run to one place; and what it may be built of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from sentinel.anomaly import Anomaly
from sentinel.errors import SentinelError
from sentinel.incident import Incident
from sentinel.mirrors.mirror_select import MirrorSelect


class MirrorError(SentinelError):
    """A mirror could not take a batch; it is tried again, later and later."""


class MirroredStep(msgspec.Struct, frozen=True, kw_only=True):
    """The chosen values of one judged step."""

    attempt: int
    step: int
    time: float
    """Seconds since the epoch, by the clock of its last rank."""
    values: tuple[tuple[str, float], ...]
    """(name in visible characters, value); NaN and infinite ones are what was logged."""


class MirroredIncident(msgspec.Struct, frozen=True, kw_only=True):
    """A revision of an incident, and what is new in it to who was told of the ones before."""

    change: str
    """`opened`: the first of it that is mirrored; `changed`; `closed`: the first in which it is over."""
    incident: Incident


@dataclass(frozen=True, kw_only=True)
class MirrorBatch:
    """What a mirror is to write at once; behind it all that was written before."""

    steps: Sequence[MirroredStep] = ()
    """In the order in which they were judged; where `attempt` rises the run went back to an earlier step."""
    anomalies: Sequence[Anomaly] = ()
    """Onsets, in the order in which they were found."""
    incidents: Sequence[MirroredIncident] = ()
    """Revisions, in the order in which they were made."""

    def __bool__(self) -> bool:
        return bool(self.steps or self.anomalies or self.incidents)


class Mirror(Protocol):
    """Writes one run to one place. Called by one thread, which may block; whatever it raises has the batch tried again."""

    def write(self, batch: MirrorBatch) -> str:
        """Write a batch, whole or not at all where the place allows that; return the mark of what is behind it.

        The mark is kept on disk, and is `MirrorParts.mark` of the mirror that a restart builds.
        """
        ...

    def close(self, *, is_over: bool) -> None:
        """Let go of the place. is_over: the run has ended, so that what sums it up is written too."""
        ...


@dataclass(frozen=True, kw_only=True)
class MirrorParts:
    """What a mirror may be built of."""

    run: str
    """Name of the run."""
    key: str
    """Hexadecimal digits that no other run has, one of the same name neither."""
    run_dir: Path
    mark: str
    """What `Mirror.write` returned last, in this process or in one before; empty: nothing was written yet."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """The environment as the command line hands it down, for secrets."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """`labels` of the daemon's configuration."""

    @property
    def found_files(self) -> list[Path]:
        """The files of anomalies and incidents that the run has, for mirrors that keep files."""
        incidents = self.run_dir / "incidents.jsonl"
        return [*sorted((self.run_dir / "anomalies").glob("*.jsonl")), *([incidents] if incidents.exists() else [])]


class MirrorSettings(Protocol):
    """The configuration of one mirror: a frozen struct, each field documented. Other packages offer theirs too."""

    @property
    def name(self) -> str:
        """Name in metrics and of the file that remembers how far it is; unique."""
        ...

    @property
    def select(self) -> MirrorSelect:
        """What is mirrored."""
        ...

    def problem(self, environ: Mapping[str, str]) -> str:
        """Return in words why nothing could be mirrored here and now, such as a library that is lacking; empty: it could.

        Opens no connection, and does not import the library.
        """
        ...

    def build(self, parts: MirrorParts) -> Mirror:
        """Return the mirror of a run; imports its library, and may connect. Whatever it raises has it tried again."""
        ...
