"""Dumps of raw tensors: what lies beside each rank's shards, so that they can be joined.

`<run>/dumps/attempt<A>/step<S>/rank<R>.safetensors`, tensors named `kind/name` (`kind/name/micro_step` for what belongs to
a micro-batch), and a DumpHead as JSON in the metadata under HEAD_KEY.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from sentinel.messages import ChunkInfo
from sentinel.place import Place

HEAD_KEY = "sentinel"
DUMPS = "dumps"


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of a dump: which part of which whole."""

    kind: str
    name: str
    """Local name, as in `messages.TensorInfo`."""
    chunk: int = 0
    """vpp_stage."""
    micro_step: int = -1
    shape: tuple[int, ...] = ()
    """Of the whole tensor."""
    start: tuple[int, ...] | None = None
    """Where in the whole this box begins, for each dimension; None: it is no box."""
    flat: tuple[int, int] | None = None
    """Elements [begin, end) of the flattened whole; None: it is no such stretch."""
    why_apart: str = ""
    """Why it cannot be joined with those of other ranks; empty: it can."""
    placements: dict[str, str] = {}
    """As in `messages.TensorInfo`."""
    part: str = ""


class DumpHead(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank says of its dump of one step."""

    run: str
    attempt: int
    rank: int
    step: int
    place: Place
    chunks: tuple[ChunkInfo, ...] = ()
    pieces: dict[str, Piece] = {}
    """Name in the file -> what it is."""
    first_n: int | None = None
    """Only the first so many elements of each dimension of what the rank holds; None: all."""
    left_out: dict[str, str] = {}
    """Name -> why a tensor that was asked for is not here."""
    layer_offset: int | None = None
    name_map: dict[str, str] = {}
    commands: tuple[str, ...] = ()
    """Ids of the commands that asked; empty: the config."""


def dump_path(run_dir: Path, attempt: int, step: int, rank: int) -> Path:
    """Return where a rank's dump of a step lies."""
    return run_dir / DUMPS / f"attempt{attempt}" / f"step{step}" / f"rank{rank}.safetensors"


def key_of(kind: str, name: str, micro_step: int) -> str:
    """Return the name of a tensor in a dump."""
    return f"{kind}/{name}" if micro_step < 0 else f"{kind}/{name}/{micro_step}"
