"""Tensors inside what modules take and return: tuples, dicts, dataclasses, nested."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from sentinel.collect.parallel.placements import is_async

MAX_NESTING = 4


def tensors_in(value: Any, path: str = "", nesting: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (path, tensor) for every floating tensor of a module's inputs or outputs; None is nothing, not a NaN.

    The first element of a tuple has the path of a lone tensor: "". Others are `:1`, `:logits`, `:1.0`.
    """
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() or is_async(value):
            yield "" if path.strip("0.") == "" else f":{path}", value
    elif nesting < MAX_NESTING and value is not None:
        if isinstance(value, Mapping):
            items: Any = value.items()
        elif isinstance(value, (list, tuple)):
            fields = getattr(value, "_fields", None)
            items = zip(fields, value, strict=True) if fields else enumerate(value)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            items = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        else:
            return
        for key, item in items:
            yield from tensors_in(item, f"{path}.{key}" if path else str(key), nesting + 1)
