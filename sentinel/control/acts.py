"""What people do about incidents, on its way to the judge: a file each in `<run>/acts/`, so that no daemon need be up."""

from __future__ import annotations

import os
import stat
import uuid
from collections.abc import Callable
from pathlib import Path

import msgspec

from sentinel.errors import ConfigError
from sentinel.incident import IncidentAct
from sentinel.wire.control_folder import why_foreign

ACTS = ("ack", "resolve", "reopen")
"""What a person can do about an incident."""

MAX_TEXT = 500
"""Most characters of a name or a reason, a bound on the length of the messages in which they stand."""

YEAR_S = 366 * 86400.0
_MAX_BYTES = 2**16


class ActRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a person asks for; ConfigError names what is wrong with it."""

    incident: str
    act: str
    """One of ACTS."""
    who: str
    why: str = ""
    until: float = 0.0
    """Of `ack`: seconds since the epoch; 0.0: until the incident ends."""

    def __post_init__(self) -> None:
        if self.act not in ACTS:
            raise ConfigError(f'act: expected {", ".join(ACTS)}, got "{self.act}"')
        if not self.who.strip():
            raise ConfigError("who: expected the name of whoever does this, got none")
        for name, text in (("who", self.who), ("why", self.why)):
            if len(text) > MAX_TEXT:
                raise ConfigError(f"{name}: expected at most {MAX_TEXT} characters, got {len(text)}")
        if self.until and self.act != "ack":
            raise ConfigError(f"until: only an acknowledgement runs out, not {self.act}")

    def begun(self, now: float) -> IncidentAct:
        """Return the act as taken at `now`, seconds since the epoch; ConfigError when `until` is not in the year ahead."""
        if self.until and not now < self.until < now + YEAR_S:
            raise ConfigError(f"until: expected a time in the year ahead, got {self.until - now:.0f} s from now")
        return IncidentAct(
            id=uuid.uuid4().hex, incident=self.incident, act=self.act, who=self.who.strip(), why=self.why.strip(),
            until=self.until, time=now,
        )  # fmt: skip


def leave_act(run_dir: Path, act: IncidentAct) -> Path:
    """Leave an act for whoever judges the run, atomically, and return its file."""
    folder = run_dir / "acts"
    folder.mkdir(mode=0o700, exist_ok=True)
    folder.chmod(0o700)
    path = folder / f"{int(act.time * 1e6):020d}-{act.id}.json"
    scratch = path.with_suffix(".part")
    with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(msgspec.json.encode(act))
    scratch.rename(path)
    return path


class ActInbox:
    """The acts that wait in a run's folder, oldest first. Files that are none, or somebody else's, are said once."""

    def __init__(self, run_dir: Path, on_refused: Callable[[str], None]) -> None:
        self._folder = run_dir / "acts"
        self._on_refused = on_refused
        self._refused: set[str] = set()
        self._decoder = msgspec.json.Decoder(IncidentAct)

    def waiting(self) -> list[tuple[Path, IncidentAct]]:
        """Return what waits; the files stay until they are taken."""
        try:
            why = why_foreign(os.lstat(self._folder), stat.S_ISDIR, "a directory")
            names = sorted(path.name for path in self._folder.iterdir() if path.suffix == ".json")
        except OSError:
            return []
        if why:
            self._refuse("", why)
            return []
        found = []
        for name in names:
            act = self._read(name)
            if act is not None:
                found.append((self._folder / name, act))
        return found

    def take(self, path: Path) -> None:
        """Remove an act that was judged."""
        path.unlink(missing_ok=True)

    def _read(self, name: str) -> IncidentAct | None:
        try:
            fd = os.open(self._folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            self._refuse(name, f"expected a regular file that we may read, got {error.strerror}")
            return None
        with os.fdopen(fd, "rb") as file:
            why = why_foreign(os.fstat(fd), stat.S_ISREG, "a regular file")
            data = b"" if why else file.read(_MAX_BYTES)
        if not why:
            try:
                return self._decoder.decode(data)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                why = f"expected an act in JSON, got {error}"
        self._refuse(name, why)
        return None

    def _refuse(self, name: str, why: str) -> None:
        if name not in self._refused:
            self._refused.add(name)
            self._on_refused(f"{self._folder / name}: refused: {why}")
