"""Descriptors of ranks that are copies of each other share their tables: tensors and chunks are read once, and held once.

A rank of a large run describes a thousand tensors, a megabyte of objects of Python, and its replicas describe the same ones.
"""

from __future__ import annotations

import typing
import zlib
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from sentinel.messages import ChunkInfo, Descriptor, TensorInfo
from sentinel.wire.shown_names import shown, shown_table

_SHARED: dict[str, msgspec.msgpack.Decoder[Any]] = {
    "tensors": msgspec.msgpack.Decoder(tuple[TensorInfo, ...]),
    "chunks": msgspec.msgpack.Decoder(tuple[ChunkInfo, ...]),
}
_HINTS = typing.get_type_hints(Descriptor, include_extras=True) | dict.fromkeys(_SHARED, msgspec.Raw)
_WITHOUT_TABLES = msgspec.defstruct(
    "DescriptorWithoutTables",
    [
        (one.name, _HINTS[one.name])
        if one.required
        else (
            one.name,
            _HINTS[one.name],
            one.default if one.default_factory is msgspec.NODEFAULT else msgspec.field(default_factory=one.default_factory),
        )
        for one in msgspec.structs.fields(Descriptor)
    ],
    kw_only=True,
)
_WITHOUT_TABLES_DECODER = msgspec.msgpack.Decoder(_WITHOUT_TABLES)
_KNOWN: WeakValueDictionary[tuple[str, int, int, int], Descriptor] = WeakValueDictionary()
"""(field, number, hash and check of its bytes) -> the newest descriptor that has it. Together 96 bits, 64 of them others in
each process: a cryptographic hash of what 16,384 ranks say takes ten seconds."""


def decode_descriptor(payload: bytes | bytearray | memoryview) -> Descriptor:
    """Return a descriptor, all of its texts printable. msgspec.DecodeError and others as of its decoder."""
    read = _WITHOUT_TABLES_DECODER.decode(payload)
    fields = {name: getattr(read, name) for name in read.__struct_fields__}
    data = {name: bytes(fields[name]) for name in _SHARED}
    keys = {name: (name, len(one), hash(one), zlib.crc32(one)) for name, one in data.items()}
    for name in _SHARED:
        known = _KNOWN.get(keys[name])
        fields[name] = _decoded(name, data[name]) if known is None else getattr(known, name)
    tensors = fields.pop("tensors")
    found = msgspec.structs.replace(shown(Descriptor(tensors=(), **fields)), tensors=tensors)
    _KNOWN.update(dict.fromkeys(keys.values(), found))
    return found


def _decoded(name: str, data: bytes) -> Any:
    try:
        found = _SHARED[name].decode(data)
    except msgspec.DecodeError as error:
        words = str(error)
        words = words.replace("`$", f"`$.{name}", 1) if "`$" in words else f"{words} - at `$.{name}`"
        raise type(error)(words) from None
    return shown_table(found) if name == "tensors" else found
