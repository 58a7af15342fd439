"""Targets of an export: stdout, a file, a Parquet table, a directory of files."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Protocol

from sentinel.errors import ConfigError
from sentinel.exports.encoders import Encoded
from sentinel.exports.output import WholeDirectory

if TYPE_CHECKING:
    from sentinel.exports.parquet import ParquetTable

HELD_BYTES = 16 * 2**20
"""Bytes of output for stdout held until every glob has matched; a bound on memory: more goes to a temporary file."""


class ExportTarget(Protocol):
    """Takes the encoded steps of an export."""

    @property
    def num_files(self) -> int:
        """Number of files written to; 0: the target is no directory."""
        ...

    def take(self, encoded: Encoded) -> None:
        """Write a step."""
        ...

    def release(self) -> None:
        """Called once all globs have matched: output that was held back may be written."""
        ...


class StreamTarget:
    """Text on stdout, held back until every glob of the request has matched."""

    num_files = 0

    def __init__(self, out: IO[bytes]) -> None:
        self._out = out
        self._held: IO[bytes] | None = tempfile.SpooledTemporaryFile(HELD_BYTES)  # noqa: SIM115 -- closed when released
        self._has_begun = False
        self.has_written = False
        """Whether anything was let out."""

    def take(self, encoded: Encoded) -> None:
        """Write a step."""
        for _, head, data in encoded.chunks:
            self._write((b"" if self._has_begun else head) + data)
            self._has_begun = True

    def release(self) -> None:
        """Write what was held back."""
        if self._held is None:
            return
        held, self._held = self._held, None
        held.seek(0)
        while block := held.read(2**20):
            self._write(block)
        held.close()

    def _write(self, data: bytes) -> None:
        if self._held is not None:
            self._held.write(data)
        else:
            self.has_written = True
            self._out.write(data)


class FileTarget:
    """One file."""

    num_files = 0

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._has_begun = False

    def take(self, encoded: Encoded) -> None:
        """Write a step."""
        for _, head, data in encoded.chunks:
            self._file.write(data if self._has_begun else head + data)
            self._has_begun = True

    def release(self) -> None:
        """Nothing is held back: the file is not there yet."""


class ParquetTarget:
    """One Parquet file."""

    num_files = 0

    def __init__(self, table: ParquetTable) -> None:
        self._table = table

    def take(self, encoded: Encoded) -> None:
        """Write a step."""
        if encoded.num_rows:
            self._table.add(encoded.columns, encoded.num_rows)

    def release(self) -> None:
        """Nothing is held back: the file is not there yet."""


class DirectoryTarget:
    """Files of a directory. place: encoder's name of a file -> its name in the directory."""

    def __init__(self, directory: WholeDirectory, place: Callable[[str], str] = str) -> None:
        self._directory = directory
        self._place = place
        self._heads: dict[str, bytes] = {}

    @property
    def num_files(self) -> int:
        """Files written to."""
        return len(self._heads)

    def take(self, encoded: Encoded) -> None:
        """Write a step. ConfigError where a file would have lines of two kinds."""
        for file, head, data in encoded.chunks:
            name = self._place(file)
            if self._heads.setdefault(name, head) != head:
                raise ConfigError(
                    f"{name}: its columns change from one step to another, for micro-steps came or went; give fewer "
                    "--steps-per-file, or other --steps"
                )
            self._directory.append(name, data, head)

    def release(self) -> None:
        """Nothing is held back: the directory is not there yet."""
