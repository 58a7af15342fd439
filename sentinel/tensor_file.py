"""Files of raw tensors: the safetensors format, read and written without the tensors' library.

Eight bytes with the length of a JSON header (little-endian), the header, then the elements of all tensors without a gap.
The library wants every tensor of a file in memory at once, and on the numpy side it has no bf16. Here shards are copied from
file to file, each to its place, on a machine without torch. The tests read what is written with the library.
Source: huggingface/safetensors, README, "Format".
"""

from __future__ import annotations

import errno
import math
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from sentinel.errors import WireError
from sentinel.private_files import create_file, make_directory

ITEM_BYTES: dict[str, int] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "C64": 8,
}  # fmt: skip
"""Dtype as the format calls it -> bytes of one element."""
MAX_HEADER_BYTES = 100_000_000
"""As the format's own library allows."""


class Stored(NamedTuple):
    """One tensor of a file."""

    dtype: str
    """A key of ITEM_BYTES."""
    shape: tuple[int, ...]
    begin: int
    """First byte in the file."""
    num_bytes: int


class TensorFile(NamedTuple):
    """What a file says of itself."""

    path: Path
    metadata: dict[str, str]
    tensors: dict[str, Stored]


def size_of(dtype: str, shape: Sequence[int]) -> int:
    """Return the bytes of a tensor."""
    return ITEM_BYTES[dtype] * math.prod(shape)


def header_of(tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """Return the head of a file and, for each tensor, the byte of the file at which it begins.

    tensors: name -> (dtype, shape), in the order in which they lie.
    """
    plain: dict[str, Any] = {"__metadata__": dict(metadata)}
    offsets: dict[str, int] = {}
    at = 0
    for name, (dtype, shape) in tensors.items():
        end = at + size_of(dtype, shape)
        plain[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        offsets[name], at = at, end
    text = msgspec.json.encode(plain)
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: start + offset for name, offset in offsets.items()}


def write_tensors(path: Path, tensors: Mapping[str, tuple[str, Sequence[int], Any]], metadata: Mapping[str, str]) -> int:
    """Write a file that appears when it is whole, readable by its owner only; return its bytes.

    tensors: name -> (dtype, shape, its elements as a buffer). FileExistsError where there is one; OSError as it comes, and
    then nothing is left behind.
    """
    head, _ = header_of({name: (dtype, shape) for name, (dtype, shape, _) in tensors.items()}, metadata)
    make_directory(path.parent)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(create_file(draft, os.O_WRONLY | os.O_EXCL), "wb") as file:
            file.write(head)
            for _, _, buffer in tensors.values():
                file.write(buffer)
            num_bytes = file.tell()
        _claim(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    return num_bytes


def _claim(draft: Path, path: Path) -> None:
    """Give a finished file its name; FileExistsError where there is one."""
    try:
        os.link(draft, path)  # A link, unlike a rename, fails where there is a file already.
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK):
            raise
        if path.exists():  # A file system without links: only this rank writes this name.
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        draft.rename(path)


def read_tensor_file(path: Path) -> TensorFile:
    """Return what a file holds, without its elements. WireError for what is no such file, or a torn one."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
            raise WireError(f"{path}: expected a safetensors file, got {size} bytes with a head of {length}")
        text = file.read(length)
    try:
        plain = msgspec.json.decode(text, type=dict[str, dict[str, Any]])
        metadata = {str(key): str(value) for key, value in plain.pop("__metadata__", {}).items()}
        tensors = {name: _stored(name, one, 8 + length) for name, one in plain.items()}
    except (msgspec.DecodeError, KeyError, TypeError, ValueError, UnicodeDecodeError) as error:
        raise WireError(f"{path}: not a safetensors file: {error}") from error
    end = max((one.begin + one.num_bytes for one in tensors.values()), default=0)
    if end > size:
        raise WireError(f"{path}: torn: expected {end} bytes, got {size}")
    return TensorFile(path, metadata, tensors)


def _stored(name: str, one: Mapping[str, Any], start: int) -> Stored:
    dtype, shape = str(one["dtype"]), tuple(int(size) for size in one["shape"])
    begin, end = (int(offset) for offset in one["data_offsets"])
    if dtype not in ITEM_BYTES or min(shape, default=0) < 0 or begin < 0 or end - begin != size_of(dtype, shape):
        raise ValueError(f"tensor {name!r}: dtype {dtype}, shape {shape}, offsets {begin} to {end} do not fit")
    return Stored(dtype, shape, start + begin, end - begin)


def total_bytes(paths: Iterable[Path]) -> int:
    """Return the bytes of those files that are there."""
    found = 0
    for path in paths:
        try:
            found += path.stat().st_size
        except OSError:
            continue
    return found
