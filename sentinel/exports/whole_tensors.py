"""Dumped shards joined to whole tensors: one file a step, out of the files that each rank wrote. Numpy only.

No value is invented: a tensor with a missing shard is left out and listed, as copies that differ are; what cannot be
joined (each rank's own samples, a summand, a corner of a shard) stands by itself as `kind/name@rank<R>`.
"""

from __future__ import annotations

import dataclasses
import math
import re
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from sentinel.dump import DUMPS, HEAD_KEY, DumpHead, Piece, key_of
from sentinel.errors import WireError
from sentinel.tensor_file import ITEM_BYTES, Stored, TensorFile, header_of, read_tensor_file

_STEP = re.compile(r"attempt(\d+)/step(\d+)/rank(\d+)\.safetensors")
_CHUNK = 2**24
"""Bytes compared at once."""
_HEAD: msgspec.json.Decoder[DumpHead] = msgspec.json.Decoder(DumpHead)

NameOf = Callable[[DumpHead, Piece], str]


@dataclasses.dataclass(frozen=True)
class TensorPiece:
    """One piece of one rank."""

    file: TensorFile
    stored: Stored
    piece: Piece
    rank: int

    def elements(self) -> npt.NDArray[Any]:
        """Return its elements as unsigned integers of their size, read when they are used; at least one dimension."""
        return _mapped(self.file.path, "r", self.stored)


@dataclasses.dataclass
class Joined:
    """The result of joining the dumps of one step."""

    num_tensors: int = 0
    """Number of whole tensors written."""
    num_bytes: int = 0
    apart: dict[str, str] = dataclasses.field(default_factory=dict)
    """Name in the file of a piece that was not joined -> why."""
    problems: list[str] = dataclasses.field(default_factory=list)
    """Shards that are missing, copies that differ, files that cannot be read, each in words."""
    missing_ranks: list[int] = dataclasses.field(default_factory=list)


def find_dumps(run_dir: Path) -> dict[int, dict[int, list[Path]]]:
    """Return step -> attempt -> files of its ranks."""
    found: dict[int, dict[int, list[Path]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted((run_dir / DUMPS).glob("attempt*/step*/rank*.safetensors")):
        match = _STEP.fullmatch(path.relative_to(run_dir / DUMPS).as_posix())
        if match is not None:
            found[int(match[2])][int(match[1])].append(path)
    return {step: dict(attempts) for step, attempts in sorted(found.items())}


def read_heads(paths: Iterable[Path]) -> tuple[list[tuple[TensorFile, DumpHead]], list[str]]:
    """Return (each readable file with its header, what is wrong with each other file, in words)."""
    files: list[tuple[TensorFile, DumpHead]] = []
    problems = []
    for path in paths:
        try:
            file = read_tensor_file(path)
            files.append((file, _HEAD.decode(file.metadata[HEAD_KEY])))
        except (OSError, WireError) as error:
            problems.append(str(error))
        except (KeyError, msgspec.DecodeError) as error:
            problems.append(f"{path}: not a dump of ours: {error}")
    return files, problems


def join(
    files: list[tuple[TensorFile, DumpHead]],
    name_of: NameOf,
    output: Path,
    *,
    takes: Callable[[str, str], bool] = lambda kind, name: True,
) -> Joined:
    """Write the whole tensors of one step into a file that appears when it is complete; return the result.

    name_of: returns a piece's name, the same on every layout. takes: returns whether (kind, name) is to be written.
    """
    result = Joined()
    world = max((head.place.world_size for _, head in files), default=0)
    result.missing_ranks = sorted(set(range(world)) - {head.rank for _, head in files})
    groups: dict[str, list[TensorPiece]] = defaultdict(list)
    for file, head in files:
        for key, piece in head.pieces.items():
            name = name_of(head, piece)
            if key in file.tensors and takes(piece.kind, name):
                again = key.rpartition("#")[2] if "#" in key else ""
                whole = key_of(piece.kind, name, piece.micro_step) + (f"#{again}" if again.isdecimal() else "")
                groups[whole].append(TensorPiece(file, file.tensors[key], piece, head.rank))
        result.problems += [f"rank {head.rank} left out {key}: {why}" for key, why in head.left_out.items()]
    wholes: dict[str, tuple[str, tuple[int, ...], list[TensorPiece]]] = {}
    for key, parts in sorted(groups.items()):
        placed = _settle(key, parts, result)
        if placed:
            wholes[key] = (parts[0].stored.dtype, parts[0].piece.shape, placed)
            result.num_tensors += 1
        if all(part.piece.why_apart for part in parts):
            for part in parts:
                name = f"{key}@rank{part.rank}"
                result.apart[name] = part.piece.why_apart
                wholes[name] = (part.stored.dtype, part.stored.shape, [part])
    if wholes:
        result.num_bytes = _write(output, wholes, files, result)
    return result


def _settle(key: str, parts: list[TensorPiece], result: Joined) -> list[TensorPiece]:
    """Return one part for each place in the whole; none where the whole cannot be formed; the reason is then noted."""
    if all(part.piece.why_apart for part in parts):
        return []
    reported = {(part.stored.dtype, part.piece.shape, part.piece.flat is None, bool(part.piece.why_apart)) for part in parts}
    if len(reported) > 1:
        result.problems.append(
            f"{key}: ranks disagree on its type, its shape, or how it is cut: {sorted(map(str, reported))}"
        )
        return []
    places: dict[tuple[Any, ...], list[TensorPiece]] = defaultdict(list)
    for part in parts:
        if part.stored.num_bytes:
            places[part.piece.start, part.piece.flat, part.stored.shape].append(part)
    for copies in places.values():
        for copy in copies[1:]:
            if not _are_equal(copies[0], copy):
                result.problems.append(f"{key}: the copies of rank {copies[0].rank} and rank {copy.rank} differ")
    chosen = [copies[0] for copies in places.values()]
    why = _why_not_whole(parts[0].piece, chosen)
    if why:
        lacking = f"; missing ranks: {_few(result.missing_ranks)}" if result.missing_ranks else ""
        result.problems.append(f"{key}: {why}{lacking}")
        return []
    # A tensor without elements is whole in any of its parts.
    return chosen or parts[:1]


def _why_not_whole(piece: Piece, parts: list[TensorPiece]) -> str:
    """Return why these parts are not each element of the whole once; empty when they are."""
    wanted = math.prod(piece.shape)
    have = sum(math.prod(part.stored.shape) for part in parts)
    if piece.flat is not None:
        at = 0
        for part in sorted(parts, key=lambda part: part.piece.flat or (0, 0)):
            begin, end = part.piece.flat or (0, 0)
            if begin != at or end - begin != math.prod(part.stored.shape):
                return f"elements {at} to {begin} are missing or held twice"
            at = end
        return "" if at == wanted else f"{at} of {wanted} elements"
    if have != wanted:
        return f"{have} of {wanted} elements"
    starts = np.array([part.piece.start for part in parts], np.int64).reshape(len(parts), -1)
    ends = starts + np.array([part.stored.shape for part in parts], np.int64).reshape(len(parts), -1)
    if (starts < 0).any() or (ends > np.array(piece.shape, np.int64)).any():
        return "a shard lies outside of the whole"
    for at in range(len(parts) - 1):
        if ((starts[at] < ends[at + 1 :]) & (starts[at + 1 :] < ends[at])).all(axis=1).any():
            return "two shards overlap"
    return ""


def _are_equal(one: TensorPiece, other: TensorPiece) -> bool:
    left, right = one.elements().reshape(-1), other.elements().reshape(-1)
    step = max(_CHUNK // left.itemsize, 1)
    return all(np.array_equal(left[at : at + step], right[at : at + step]) for at in range(0, left.size, step))


def _write(
    output: Path,
    wholes: Mapping[str, tuple[str, tuple[int, ...], list[TensorPiece]]],
    files: list[tuple[TensorFile, DumpHead]],
    result: Joined,
) -> int:
    head = files[0][1]
    said = {
        "run": head.run, "attempt": head.attempt, "step": head.step, "ranks": [one.rank for _, one in files],
        "missing_ranks": result.missing_ranks, "apart": result.apart, "problems": result.problems, "first_n": head.first_n,
    }  # fmt: skip
    start, offsets = header_of(
        {key: (dtype, shape) for key, (dtype, shape, _) in wholes.items()},
        {"format": "pt", HEAD_KEY: msgspec.json.encode(said).decode()},
    )
    size = len(start) + sum(ITEM_BYTES[dtype] * math.prod(shape) for dtype, shape, _ in wholes.values())
    output.parent.mkdir(parents=True, exist_ok=True)
    draft = output.with_name(f".{output.name}.{secrets.token_hex(4)}")
    try:
        with draft.open("xb") as file:
            draft.chmod(0o600)
            file.write(start)
            file.truncate(size)
        for key, (dtype, shape, parts) in wholes.items():
            stored = Stored(dtype, shape, offsets[key], ITEM_BYTES[dtype] * math.prod(shape))
            if stored.num_bytes:
                _fill(_mapped(draft, "r+", stored), parts)
        draft.rename(output)
    finally:
        draft.unlink(missing_ok=True)
    return size


def _fill(whole: npt.NDArray[Any], parts: list[TensorPiece]) -> None:
    for part in parts:
        elements = part.elements()
        if part.piece.flat is not None:
            begin, end = part.piece.flat
            whole.reshape(-1)[begin:end] = elements.reshape(-1)
        elif part.piece.start is None:
            whole[...] = elements
        else:
            start = part.piece.start or (0,) * elements.ndim
            whole[tuple(slice(at, at + size) for at, size in zip(start, elements.shape, strict=True))] = elements


def _mapped(path: Path, mode: Any, stored: Stored) -> npt.NDArray[Any]:
    # Bits are moved, not numbers: there is no bfloat16 in numpy, and none is needed.
    dtype = np.dtype(f"<u{ITEM_BYTES[stored.dtype]}")
    return np.memmap(path, dtype, mode, stored.begin, stored.shape or (1,))


def _few(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} others" if len(ranks) > 16 else "")
