"""The control folder as a trainer sees it: commands in files, each read once, strangers' files refused."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec

from sentinel.command import Command, bounded
from sentinel.errors import MALFORMED, ConfigError

MAX_COMMAND_BYTES = 2**20
_NAME = re.compile(r"(\d+)\.json")
_RECENT_NS = 100_000_000
"""A folder that changed this recently is listed again: its clock ticks more coarsely than files are made."""
_FORCED_NS = 1_000_000_000
"""A network file system may hide a change of the folder for a while: list it at least this often."""


class ControlFolder:
    """Reads `<run>/control/<seq>.json` in the order of their numbers; each file once, refused ones said once."""

    def __init__(self, directory: Path, on_refused: Callable[[str], None]) -> None:
        self.directory = Path(directory)
        self._on_refused = on_refused
        self._taken: set[int] = set()
        self._refused: dict[str, tuple[int, int]] = {}
        self._decoder: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)
        self._folder_mtime_ns = -1
        self._listed_ns = -_FORCED_NS

    def poll(self, now_ns: int) -> list[Command]:
        """Return commands that are new, ascending by number. `now_ns`: wall clock."""
        try:
            folder = os.lstat(self.directory)
        except OSError:
            return []
        is_quiet = folder.st_mtime_ns == self._folder_mtime_ns and abs(now_ns - folder.st_mtime_ns) > _RECENT_NS
        if is_quiet and 0 <= now_ns - self._listed_ns < _FORCED_NS:
            return []
        self._listed_ns, self._folder_mtime_ns = now_ns, folder.st_mtime_ns
        why = why_foreign(folder, stat.S_ISDIR, "a directory")
        if why:
            self._refuse(str(self.directory), (folder.st_ino, 0), why)
            return []
        found = []
        try:
            names = os.listdir(self.directory)  # noqa: PTH208 -- polled fifty times a second
        except OSError:
            return []
        for name in names:
            match = _NAME.fullmatch(name)
            if match and int(match[1]) not in self._taken:
                found.append((int(match[1]), name))
        commands = []
        for seq, name in sorted(found):
            command = self._read(seq, name)
            if command is not None:
                self._taken.add(seq)
                commands.append(command)
        return commands

    def _read(self, seq: int, name: str) -> Command | None:
        path = self.directory / name
        mark = (0, 0)
        try:
            # Neither follow a link nor wait for the other end of a pipe.
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._refuse(name, self._mark_of(path), f"expected a regular file that we may read, got {error.strerror}")
            return None
        try:
            status = os.fstat(fd)
            mark = (status.st_ino, status.st_mtime_ns)
            why = why_foreign(status, stat.S_ISREG, "a regular file")
            if not why and status.st_size > MAX_COMMAND_BYTES:
                why = f"expected at most {MAX_COMMAND_BYTES} bytes, got {status.st_size}"
            data = b"" if why else os.read(fd, MAX_COMMAND_BYTES)
        except OSError as error:
            why, data = f"cannot be read: {error.strerror}", b""
        finally:
            os.close(fd)
        if not why:
            try:
                command = bounded(self._decoder.decode(data))
                if command.seq == seq:
                    return command
                why = f"expected seq {seq} as its name says, got {command.seq}"
            except MALFORMED as error:
                why = f"expected a command in JSON, got {error}"
            except ConfigError as error:
                why = str(error)
        self._refuse(name, mark, why)
        return None

    def _refuse(self, name: str, mark: tuple[int, int], why: str) -> None:
        if self._refused.get(name) != mark:
            self._refused[name] = mark
            self._on_refused(f"control file {name} refused: {why}")

    @staticmethod
    def _mark_of(path: Path) -> tuple[int, int]:
        try:
            status = os.lstat(path)
        except OSError:
            return 0, 0
        return status.st_ino, status.st_mtime_ns


def why_foreign(status: os.stat_result, is_right: Callable[[int], bool], what: str) -> str:
    """Return why somebody else may have written this; empty when only our user can."""
    if not is_right(status.st_mode):
        return f"expected {what}, got mode {stat.filemode(status.st_mode)}"
    if status.st_uid != os.geteuid():
        return f"expected owner uid {os.geteuid()}, got {status.st_uid}"
    if status.st_mode & 0o022:
        return f"expected it writable by its owner only, got mode {stat.filemode(status.st_mode)}; chmod go-w"
    return ""
