"""Several models in one `attach`: the chunks of one pipeline, or models with names and an order of their own."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from sentinel.collect.hooks.structure import unwrap
from sentinel.errors import ConfigError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


def listed(model: Any) -> tuple[list[nn.Module], tuple[str, ...]]:
    """Return (modules that `attach` was given, name of the model of each); the names are () where none were given.

    ConfigError for what is neither a module, nor a list of modules, nor a mapping of names to them.
    """
    if isinstance(model, nn.Module) and not isinstance(model, nn.ModuleDict):
        return [model], ()
    if isinstance(model, (Mapping, nn.ModuleDict)):
        models, names = [], []
        for name, value in model.items():
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise ConfigError(
                    f"attach: the name of a model must be letters, digits, _ and -, beginning with a letter; got {name!r}"
                )
            chunks = [value] if isinstance(value, nn.Module) else list(value) if isinstance(value, Sequence) else []
            models += _checked(chunks, f"model {name!r}", value)
            names += [name] * len(chunks)
        if models:
            return _checked(models, "model", model), tuple(names)
    return _checked(list(model) if isinstance(model, Sequence) else [], "model", model), ()


def _checked(modules: list[Any], what: str, given: Any) -> list[nn.Module]:
    if not modules or not all(isinstance(one, nn.Module) for one in modules):
        raise ConfigError(
            f"attach: {what} must be a torch.nn.Module, a list of them, or a mapping of names to them, "
            f"got {type(given).__name__}"
        )
    if len({id(unwrap(one)) for one in modules}) < len(modules):
        raise ConfigError(f"attach: {what} holds the same module twice")
    return modules


def names_by_class(models: Sequence[nn.Module]) -> tuple[str, ...]:
    """Return a name for each of several models that were given none: its class, numbered where several have one."""
    classes = [type(unwrap(one)).__name__ for one in models]
    number: Counter[str] = Counter()
    names = []
    for name in classes:
        names.append(f"{name}_{number[name]}" if classes.count(name) > 1 else name)
        number[name] += 1
    return tuple(names)
