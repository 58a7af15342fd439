"""Names in a message as they may be shown: whatever a trainer called its modules and values, each is one visible line.

Done where messages are read, so that judging, files, metrics, messages and exports all have the same name.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from sentinel.messages import Descriptor, EndStep, LayoutChange, TensorInfo, Vectors
from sentinel.printable import printable

_Message = TypeVar("_Message", bound=msgspec.Struct)


def shown(message: _Message) -> _Message:
    """Return a message whose every text is printable: itself where it is so already, as good as always."""
    if isinstance(message, Vectors) or _is_printable(message):
        return message
    if isinstance(message, EndStep):
        scalars = {printable(name): value for name, value in message.scalars.items()}
        message = msgspec.structs.replace(message, scalars=scalars)
    return msgspec.convert(_printed(msgspec.to_builtins(message)), type(message))


def shown_table(tensors: tuple[TensorInfo, ...]) -> tuple[TensorInfo, ...]:
    """Return a table whose every text is printable, as `shown` does."""
    if all(map(_has_printable_names, tensors)):
        return tensors
    return msgspec.convert(_printed(msgspec.to_builtins(tensors)), tuple[TensorInfo, ...])


def _is_printable(message: msgspec.Struct) -> bool:
    if isinstance(message, EndStep):
        return all(map(str.isprintable, message.scalars)) and all(
            one.isprintable() for one in message.samples if isinstance(one, str)
        )
    if isinstance(message, (Descriptor, LayoutChange)):
        # A model has a hundred thousand tensors, and each rank describes its own.
        if not all(map(_has_printable_names, message.tensors)):
            return False
        message = msgspec.structs.replace(message, tensors=())
    # As JSON it is printable where its texts are; what it escapes is looked at one by one.
    text = msgspec.json.encode(message).decode()
    return ("\\" not in text and text.isprintable()) or _is_all_printable(msgspec.to_builtins(message))


def _has_printable_names(tensor: TensorInfo) -> bool:
    texts = (tensor.name, tensor.part, *tensor.consumers, *tensor.also, *(tensor.functions or ()))
    return all(map(str.isprintable, texts))


def _is_all_printable(value: Any) -> bool:
    if isinstance(value, str):
        return value.isprintable()
    if isinstance(value, dict):
        return all(_is_all_printable(key) and _is_all_printable(one) for key, one in value.items())
    return not isinstance(value, list | tuple) or all(map(_is_all_printable, value))


def _printed(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {_printed(key): _printed(one) for key, one in value.items()}
    return [_printed(one) for one in value] if isinstance(value, list | tuple) else value
