"""Outputs that are there whole or not at all: a file, or a directory of files, under its name only when it is done."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO

from sentinel.errors import ConfigError
from sentinel.exports.request import ExportSetting


@contextlib.contextmanager
def text_output(output: Path | None, setting: ExportSetting) -> Iterator[IO[bytes]]:
    """Yield where a format of one text writes: stdout, or a file that is there once the block ends without an exception."""
    if output is None:
        with setting.stdout() as out:
            yield out
    else:
        with WholeFile(output) as whole:
            yield whole.file


class WholeFile:
    """A file that takes its name when it is closed in good order; what had that name before is replaced then."""

    def __init__(self, path: Path) -> None:
        """ConfigError for a directory, or a name in no directory."""
        if path.is_dir():
            raise ConfigError(f"{path}: expected the name of a file, got a directory")
        if not path.parent.is_dir():
            what = "a file" if path.parent.exists() else "nothing"
            raise ConfigError(f"{path}: expected a directory {path.parent} to write into, found {what} there")
        self.path = path
        self.is_wanted = True
        """False: there turned out to be nothing to write."""
        self.scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        fd = os.open(self.scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self.file: IO[bytes] = os.fdopen(fd, "wb")

    def __enter__(self) -> WholeFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None:
                # What does not fit on the disk says so here, before the file has its name.
                self.file.close()
                if self.is_wanted:
                    self.scratch.replace(self.path)
        finally:
            with contextlib.suppress(OSError):
                self.file.close()
            self.scratch.unlink(missing_ok=True)


class WholeDirectory:
    """A directory that takes its name when it is closed in good order. Nothing may be there before."""

    def __init__(self, path: Path) -> None:
        """ConfigError where there is a file, or a directory that holds something."""
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{path}: expected a directory, got a file; give another name with -o DIR")
        if path.is_dir() and any(path.iterdir()):
            raise ConfigError(f"{path}: expected an empty directory or none, got one with files; give another with -o DIR")
        self.path = path
        # Nothing is made on the way there before there is something to put there.
        home = next(parent for parent in path.absolute().parents if parent.exists())
        if not home.is_dir():
            raise ConfigError(f"{path}: expected a directory to write into, got a file {home}")
        self.scratch = home / f".{path.name}.{secrets.token_hex(4)}"
        self.scratch.mkdir(mode=0o700)
        self.files: set[str] = set()
        """Names, relative, of the files written so far."""

    def append(self, name: str, data: bytes, head: bytes = b"") -> None:
        """Append data to a file of the directory. head: bytes that a new file begins with."""
        is_new = name not in self.files
        path = self.scratch / name
        if is_new:
            self.files.add(name)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(head + data if is_new else data)

    def __enter__(self) -> WholeDirectory:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None and self.files:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.scratch.replace(self.path)
        finally:
            shutil.rmtree(self.scratch, ignore_errors=True)
