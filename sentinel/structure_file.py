"""The structure of a model as one rank wrote it down: modules, what they take and give, who calls them.

`<run>/structure/rank<R>.json`; the newest answer replaces the one before.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import msgspec

from sentinel.place import Place
from sentinel.private_files import create_file, make_directory

STRUCTURE = "structure"


class Shown(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known of a value that passed: a tensor's shape, a list's elements, a number."""

    kind: str
    """Name of its type: `Tensor`, `tuple`, `NoneType`."""
    shape: tuple[int, ...] | None = None
    """Of a tensor; None: it is none."""
    dtype: str = ""
    device: str = ""
    requires_grad: bool = False
    local_shape: tuple[int, ...] | None = None
    """What this rank holds of a DTensor."""
    placements: tuple[str, ...] = ()
    """Of a DTensor, for each dimension of its mesh."""
    num_items: int | None = None
    """Elements of a list or mapping; `items` may hold fewer."""
    items: dict[str, Shown] = {}
    value: str = ""
    """Of a number, a truth value or None."""


class ModuleShown(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One module."""

    name: str
    """Local name, wrapper prefixes stripped; `""`: the chunk itself."""
    kind: str
    """Module and name of its class."""
    num_calls: int = 0
    """Training forwards in the step, recomputes not counted; 0: it was not seen (another branch, a compiled graph)."""
    place_in_forward: int = -1
    """In which order modules returned, 0-based; -1: not seen."""
    inputs: tuple[Shown, ...] = ()
    """Of the first call."""
    keywords: dict[str, Shown] = {}
    output: Shown | None = None
    parameters: dict[str, Shown] = {}
    """Its own parameters and buffers."""
    called_from: tuple[str, ...] = ()
    """`pkg/file.py:LINE function` of the frames that led to the first call, innermost first; torch's own left out."""


class ChunkShown(msgspec.Struct, frozen=True, kw_only=True):
    """One model chunk, modules in order of registration."""

    vpp_stage: int
    depth: int
    modules: tuple[ModuleShown, ...]


class StructureFile(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank wrote down."""

    run: str
    attempt: int
    rank: int
    step: int
    place: Place
    chunks: tuple[ChunkShown, ...]
    version: int = 1


def structure_path(run_dir: Path, rank: int) -> Path:
    """Return where a rank's structure lies."""
    return run_dir / STRUCTURE / f"rank{rank}.json"


def write_structure(path: Path, file: StructureFile) -> None:
    """Write a rank's structure, whole or not at all, for its owner only. OSError as it comes."""
    make_directory(path.parent)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(create_file(draft, os.O_WRONLY | os.O_EXCL), "wb") as stream:
            stream.write(msgspec.json.encode(file))
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def read_structure(path: Path) -> StructureFile:
    """Return what a rank wrote down; OSError, or msgspec.DecodeError for what is no structure."""
    return msgspec.json.decode(path.read_bytes(), type=StructureFile)
