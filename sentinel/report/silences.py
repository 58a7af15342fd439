"""Silences: what people do not want to hear of for a while, in one file of the daemon's state directory."""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import msgspec

from sentinel.errors import ConfigError, StoreError
from sentinel.private_files import create_file, make_directory
from sentinel.report.alert import Alert
from sentinel.report.matchers import Matchers

FILE = "silences.json"
"""Name of the file in the state directory."""
MAX_SILENCES = 500
"""Most silences that have not run out; a bound on the time that each message takes."""
MAX_WORDS = 500
"""Most characters of a name or a reason, a bound on the file."""
MAX_BYTES = 2**22
"""Largest file that is read; above what MAX_SILENCES of the largest take."""
KEEP_S = 7 * 86400.0
"""Seconds for which a silence that ran out is still listed."""
MAX_S = 366 * 86400.0
"""Longest silence."""


class Silence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is not told, until when, who wants it so, and why."""

    id: str
    matchers: tuple[str, ...]
    who: str
    why: str
    begun: float
    """Seconds since the epoch."""
    until: float
    """Seconds since the epoch; when it was ended before its time: then."""
    ended_by: str = ""
    """Who ended it before its time; empty: nobody did."""

    def __post_init__(self) -> None:
        if not self.matchers:
            raise ConfigError("matchers: expected at least one, such as run=NAME; got none, which would silence everything")
        Matchers(self.matchers, "matchers")
        for name, text in (("who", self.who), ("why", self.why)):
            if not text.strip():
                raise ConfigError(f"{name}: expected {'a name' if name == 'who' else 'a reason'}, got none")
            if len(text) > MAX_WORDS:
                raise ConfigError(f"{name}: expected at most {MAX_WORDS} characters, got {len(text)}")


class SilenceRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a person asks for; ConfigError names what is wrong with it."""

    matchers: tuple[str, ...]
    why: str
    until: float = 0.0
    """Seconds since the epoch."""
    for_s: float = 0.0
    """Seconds from now, in place of `until`."""
    who: str = ""
    """Empty: the user that the process runs as."""

    def begun(self, now: float) -> Silence:
        """Return the silence that begins now."""
        until = self.until or now + self.for_s
        if (self.until > 0) is (self.for_s > 0) or not 0 < until - now <= MAX_S:
            raise ConfigError("until or for_s: expected one of them, a time in the year ahead, in seconds")
        who = self.who or getpass.getuser()
        return Silence(id=f"s{secrets.token_hex(4)}", matchers=self.matchers, who=who, why=self.why, begun=now, until=until)


class SilenceBook:
    """The silences of one state directory, which commands and the daemon share; any of them may write."""

    def __init__(self, state: Path) -> None:
        self.path = state / FILE
        self.problem = ""
        """Why the file cannot be read; empty: it can. Nobody is silenced by a file that cannot."""
        self._stamp: tuple[int, int, int] | None = None
        self._known: list[tuple[Silence, Matchers]] = []

    def all(self) -> list[Silence]:
        """Return every silence that is kept, the newest last; StoreError where the file is broken: nothing is lost then."""
        try:
            with self.path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreError(f"{self.path}: {error.strerror}") from error
        try:
            if len(data) > MAX_BYTES:
                raise ValueError(f"expected at most {MAX_BYTES} bytes, got more")
            return _DECODER.decode(data)
        except (msgspec.MsgspecError, ConfigError, ValueError, RecursionError) as error:
            what = f"expected silences, got something else: {error}"
            raise StoreError(f"{self.path}: {what}; nobody is silenced; mend the file, or move it away") from error

    def add(self, silence: Silence, now: float) -> None:
        """Write one down, durably; ConfigError where there are too many, StoreError where the file is broken."""
        with self._locked():
            kept = [one for one in self.all() if one.until > now - KEEP_S]
            if sum(one.until > now for one in kept) >= MAX_SILENCES:
                raise ConfigError(f"expected at most {MAX_SILENCES} silences at a time; end one with `sentinel silence end`")
            self._write([*kept, silence])

    def end(self, wanted: str, who: str, now: float) -> Silence:
        """End a silence before its time and return it. wanted: its id, or the beginning of one that is active."""
        with self._locked():
            everything = self.all()
            found = [one for one in everything if one.id.startswith(wanted) and one.until > now] if wanted else []
            if len(found) != 1:
                known = ", ".join(one.id for one in everything if one.until > now) or "none"
                raise ConfigError(f'"{wanted[:80]}": expected the id of one active silence; active: {known}')
            ended = msgspec.structs.replace(found[0], until=now, ended_by=who)
            self._write([ended if one.id == ended.id else one for one in everything if one.until > now - KEEP_S])
        return ended

    def until(self, alert: Alert, now: float) -> float | None:
        """Return until when an alert is silenced, seconds since the epoch; None: it is not."""
        self.refreshed()
        ends = [one.until for one, matchers in self._known if one.begun <= now < one.until and matchers.match(alert)]
        return max(ends, default=None)

    def active(self, now: float) -> list[Silence]:
        """Return the silences that hold now."""
        self.refreshed()
        return [one for one, _ in self._known if now < one.until]

    def refreshed(self) -> object:
        """Read the file again where it has changed; return what is another then."""
        try:
            status = self.path.stat()
            stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
        except OSError:
            stamp = (0, 0, 0)
        if stamp == self._stamp:
            return stamp
        try:
            known, self.problem = [(one, Matchers(one.matchers, "matchers")) for one in self.all()], ""
        except StoreError as error:
            known, self.problem = [], str(error)
        self._stamp, self._known = stamp, known
        return stamp

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        make_directory(self.path.parent)
        fd = create_file(self.path.with_name(f".{FILE}.lock"), os.O_RDWR)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _write(self, silences: list[Silence]) -> None:
        part = self.path.with_name(f".{FILE}.{os.getpid()}")
        with os.fdopen(create_file(part, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW), "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(silences)) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(self.path)


_DECODER = msgspec.json.Decoder(list[Silence])


class Silences:
    """The books of the daemon and of its runs, as one."""

    def __init__(self, *books: SilenceBook) -> None:
        self.books = books
        """Replaced when runs join or leave; never changed."""
        self._stamps: list[object] = []

    def until(self, alert: Alert, now: float) -> float | None:
        """Return until when an alert is silenced; None: it is not."""
        return max((until for book in self.books if (until := book.until(alert, now)) is not None), default=None)

    def active(self, now: float) -> list[Silence]:
        """Return the silences that hold now, the oldest first."""
        return sorted((one for book in self.books for one in book.active(now)), key=lambda one: one.begun)

    def have_changed(self) -> bool:
        """Return whether a book is another than when this was asked last."""
        stamps = [book.refreshed() for book in self.books]
        has_changed, self._stamps = stamps != self._stamps, stamps
        return has_changed

    def problems(self) -> list[str]:
        """Return why books cannot be read."""
        return [book.problem for book in self.books if book.problem]
