"""The files of one incarnation's spool folder: whole ones, and what is kept of several once the cap was reached.

<index:06d>.spool                           whole, as it was written
<last:06d>.<first:06d>-<generation>.spool   what is kept of the files first to last; the newest generation counts
"""

from __future__ import annotations

import functools
import os
import re
import stat
from pathlib import Path

import msgspec

_INDEX = r"(\d{6}|[1-9]\d{6,8})"
"""As `file_name` writes it, and no number else: of two names one file would not be found."""
_WHOLE = re.compile(rf"{_INDEX}\.spool", re.ASCII)
_KEPT = re.compile(rf"{_INDEX}\.{_INDEX}-(0|[1-9]\d{{0,8}})\.spool", re.ASCII)


class KeptFile(msgspec.Struct, frozen=True, order=True):
    """What is kept of the files `first` to `last`."""

    first: int
    last: int
    generation: int

    @property
    def name(self) -> str:
        """Its file's name."""
        return f"{self.last:06d}.{self.first:06d}-{self.generation}.spool"


def file_name(index: int) -> str:
    """Return the name of the whole spool file with this index, 0-based."""
    return f"{index:06d}.spool"


@functools.lru_cache(maxsize=65536)
def read_name(name: str) -> int | KeptFile | None:
    """Return the index of the whole file of this name, or what a thinned one covers; None: it is no spool file's name."""
    if match := _WHOLE.fullmatch(name):
        return int(match[1])
    match = _KEPT.fullmatch(name)
    return KeptFile(int(match[2]), int(match[1]), int(match[3])) if match else None


def read_window(path: str | Path, offset: int, max_bytes: int) -> tuple[bytes, int] | None:
    """Return (bytes behind an offset, size of the file), nothing and 0 where its disk fails; None: there is no such file.

    Opened each time: that is what makes a network file system look again. A pipe or a link has no business in a spool: its
    other end is not waited for, nor followed.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return None
        wanted = min(max_bytes, max(0, status.st_size - offset))
        return os.pread(fd, wanted, offset) if wanted else b"", status.st_size
    except OSError:
        return b"", 0
    finally:
        os.close(fd)


def list_files(folder: Path) -> list[int]:
    """Return the indices of the whole spool files in a folder, ascending; empty when there is no folder."""
    return sorted(int(match[1]) for match in map(_WHOLE.fullmatch, _names(folder)) if match)


def list_kept(folder: Path) -> list[KeptFile]:
    """Return the files of which only a part is kept, by what they cover, the newest generation of each last."""
    found = [match for match in map(_KEPT.fullmatch, _names(folder)) if match]
    return sorted(KeptFile(int(match[2]), int(match[1]), int(match[3])) for match in found)


def list_stored(folder: Path) -> dict[int, str]:
    """Return index -> file name of what a folder holds, ascending; of several files of which a part is kept the last index.

    A whole file counts before what is kept of it, and of what is kept the newest generation.
    """
    names = _names(folder)
    kept = sorted((-int(match[3]), int(match[1]), name) for name in names if (match := _KEPT.fullmatch(name)))
    found = {int(match[1]): name for name in names if (match := _WHOLE.fullmatch(name))}
    for _, last, name in kept:
        found.setdefault(last, name)
    return dict(sorted(found.items()))


def covering(folder: Path, index: int) -> KeptFile | None:
    """Return the newest file that holds what is kept of the file of this index; None: there is none."""
    found = [one for one in list_kept(folder) if one.first <= index <= one.last]
    return max(found, key=lambda one: one.generation, default=None)


def next_place(folder: Path, after: int) -> int | None:
    """Return the lowest index above `after` of which anything is there; None: nothing is."""
    kept = [max(one.first, after + 1) for one in list_kept(folder) if one.last > after]
    return min([*kept, *(index for index in list_files(folder) if index > after)], default=None)


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 -- names alone; Path objects cost ten times as much per poll
    except OSError:
        return []
