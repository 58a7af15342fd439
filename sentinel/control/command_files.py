"""CommandFiles: the numbered files of a run's commands: each made whole before it has its name, each read once.

A command is one file `<run>/control/<seq>.json`. Numbers go on from what lies there: a daemon that restarts and a person at
a shell share one row of numbers.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from sentinel.command import (
    ChangeConfig,
    Command,
    DescribeStructure,
    DisableMonitoring,
    DumpTensors,
    EnableMonitoring,
    RequestAction,
    TraceTensors,
    WithdrawCommand,
    bounded,
)
from sentinel.errors import ConfigError, StoreError
from sentinel.private_files import create_file, make_directory

CommandT = TypeVar(
    "CommandT", EnableMonitoring, DisableMonitoring, ChangeConfig, DumpTensors, TraceTensors, DescribeStructure,
    RequestAction, WithdrawCommand,
)  # fmt: skip
COMMAND_FILE = re.compile(r"(\d{6,})\.json")
"""What the file of a command is called."""
_DECODER: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)


def place_command(directory: Path, name: str, data: bytes) -> None:
    """Have a command that was written elsewhere lie here under its number, whole or not at all; again: nothing.

    StoreError where the disk takes it not, or another command has that number.
    """
    path = directory / name
    draft = directory / f".{name}.{secrets.token_hex(4)}.tmp"
    try:
        make_directory(directory)
        with os.fdopen(create_file(draft, os.O_WRONLY | os.O_EXCL | os.O_NOFOLLOW), "wb") as stream:
            stream.write(data)
        _link(draft, path)
    except FileExistsError:
        if path.is_symlink() or path.read_bytes() != data:
            raise StoreError(f"{path}: another command has this number; who else commands this run?") from None
    except OSError as error:
        raise StoreError(f"{path}: cannot write a command: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def _link(draft: Path, path: Path) -> None:
    """Give a draft its name, or raise FileExistsError; OSError."""
    try:
        # A link, unlike a rename, fails where somebody took the number meanwhile.
        os.link(draft, path)
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK):
            raise
        # A file system without links: two writers at one instant could collide, one alone cannot.
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
        draft.rename(path)


class CommandFiles:
    """The directory of a run's commands."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._seen: set[int] = set()
        self._next_seq = 1

    def note(self, seq: int) -> None:
        """This number is taken, and its command known."""
        self._seen.add(seq)
        self._next_seq = max(self._next_seq, seq + 1)

    def fresh(self) -> Iterator[tuple[str, Command | None]]:
        """Yield (name of a file, its command) of those that nobody has read yet; None: it is no command of its number."""
        try:
            names = sorted(path.name for path in self.directory.iterdir())
        except OSError:
            return
        for name in names:
            match = COMMAND_FILE.fullmatch(name)
            if match is None or int(match[1]) in self._seen:
                continue
            seq = int(match[1])
            self.note(seq)
            command = self._read(self.directory / name)
            yield name, command if command is not None and command.seq == seq else None

    def write(self, make: Callable[[int], CommandT]) -> CommandT:
        """Write what `make` returns for the next number. StoreError where the disk takes it not."""
        try:
            make_directory(self.directory)
            return self._claim(make)
        except OSError as error:
            raise StoreError(f"{self.directory}: cannot write a command: {error.strerror or error}") from error

    def _claim(self, make: Callable[[int], CommandT]) -> CommandT:
        while True:
            seq = self._next_seq
            command = make(seq)
            path = self.directory / f"{seq:06d}.json"
            draft = self.directory / f".{seq:06d}.{secrets.token_hex(4)}.tmp"
            file = create_file(draft, os.O_WRONLY | os.O_EXCL | os.O_NOFOLLOW)
            try:
                with os.fdopen(file, "wb") as stream:
                    stream.write(msgspec.json.encode(command))
                _link(draft, path)
            except FileExistsError:
                self._next_seq = seq + 1
                continue
            finally:
                with contextlib.suppress(OSError):
                    draft.unlink(missing_ok=True)
            self.note(seq)
            return command

    def _read(self, path: Path) -> Command | None:
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            with os.fdopen(file, "rb") as stream:
                if os.fstat(file).st_uid != os.geteuid():
                    return None
                return bounded(_DECODER.decode(stream.read(2**20)))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OSError, ConfigError):
            return None
