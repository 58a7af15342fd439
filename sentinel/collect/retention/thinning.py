"""Which closed spool files lose what, when an incarnation's spool has reached its cap, and how that is done in one step.

A thinned file is written beside those that it is made of and takes its name by a rename; only then are they deleted. So
whoever is killed in between, writer or reader, loses nothing: what is whole is read where it is there, and what is kept of
the others behind it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from sentinel.collect.retention.distil import MAX_LEVEL, distil
from sentinel.collect.retention.losses import Losses
from sentinel.wire.spool_files import KeptFile, file_name

SMALL_BYTES = 2**20
"""Bytes below which a thinned file takes in what is kept of the next. Too small: files that are mostly the whole descriptor
each begins with; too large: more is written anew at each joining."""
LEFT_OUT = {
    1: "finite rows that are no border of the black box",
    2: "finite borders of the black box",
    3: "whole steps in which nothing is non-finite",
    4: "all rows but those of the first NaN",
}
"""Level -> what goes at it, in words."""


class SpoolFile(msgspec.Struct, frozen=True, kw_only=True):
    """A closed file: whole, or what is kept of several."""

    first: int
    last: int
    num_bytes: int
    level: int = 0
    """0: whole; else as in `distil`."""
    generation: int = 0
    has_nonfinite: bool = False
    """Of a thinned file: it holds a non-finite row or scalar."""

    @property
    def name(self) -> str:
        """Its name in the incarnation's folder."""
        return file_name(self.last) if not self.level else KeptFile(self.first, self.last, self.generation).name


@dataclasses.dataclass(frozen=True, slots=True)
class Thinned:
    """What came of thinning."""

    file: SpoolFile
    cut: Losses
    """Steps that lost rows just now."""
    gone: Losses
    """Steps that were lost whole just now."""


def next_to_thin(files: Sequence[SpoolFile], file_bytes: int) -> tuple[int, int] | None:
    """Return (position, number of files) of those to thin next: of which most is kept, the oldest of these; None: no more.

    The file with the first NaN of the incarnation is never thinned past it. file_bytes: the size at which whole files are
    cut.
    """
    kept = next((one for one in files if one.level == MAX_LEVEL - 1 and one.has_nonfinite), None)
    able = [at for at, one in enumerate(files) if one.level < MAX_LEVEL and one is not kept]
    if not able:
        return None
    at = min(able, key=lambda one: (files[one].level, one))
    before = files[at - 1] if at else None
    small = SMALL_BYTES if before is not kept else min(SMALL_BYTES, file_bytes * 3 // 4)
    if before is not None and before.level == files[at].level + 1 and before.num_bytes < small:
        return at - 1, 2
    return at, 1


def thin(directory: Path, files: Sequence[SpoolFile]) -> Thinned:
    """Write what the next level keeps of neighbouring files and put it in place; they are still there. OSError.

    files: one, or one behind another that is of the next level already.
    """
    level = files[-1].level + 1
    found = KeptFile(files[0].first, files[-1].last, max(one.generation for one in files) + 1)
    path = directory / found.name
    fresh = path.with_suffix(".new")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        done = distil([directory / one.name for one in files], fd, level)
        fresh.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise
    finally:
        os.close(fd)
    kept = SpoolFile(
        first=found.first, last=found.last, num_bytes=done.num_bytes, level=level, generation=found.generation,
        has_nonfinite=done.has_nonfinite,
    )  # fmt: skip
    return Thinned(file=kept, cut=done.cut, gone=done.gone)
