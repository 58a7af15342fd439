"""Detectors that a rule names by dotted path: code of the user, run only where the user said so (`--allow-code`)."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping
from typing import Any

from sentinel.detect.declaration import CONTRACTS, Declaration
from sentinel.errors import RuleError

ASK = 'give --allow-code, or offer it as an entry point of "sentinel.detectors"'
_permission = {"is_given": False}


def allow_code(is_allowed: bool = True) -> None:
    """Let rules of this process name detectors by dotted path, the current directory included; called where the command line
    has `--allow-code`."""
    _permission["is_given"] = is_allowed
    if is_allowed and "" not in sys.path:
        sys.path.insert(0, "")


def is_dotted(name: str) -> bool:
    """Whether `name` is a path to a class, `package.module:Class` or `package.module.Class`, and no detector's name."""
    return "." in name or ":" in name


def dotted_detector(name: str) -> type[Any]:
    """Return the class at a dotted path. RuleError says why there is none: not allowed, not found, or no detector."""
    where = f'detector "{name}"'
    if not _permission["is_given"]:
        raise RuleError(f"{where} is a path to code, which is not run unasked; {ASK}")
    module, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:  # a user's module may fail in any way
        hint = "; looked for in the current directory and on PYTHONPATH" if isinstance(error, ModuleNotFoundError) else ""
        raise RuleError(f"{where} cannot be loaded: {type(error).__name__}: {error}{hint}") from error
    if (problem := shortcoming(found)) is not None:
        raise RuleError(f"{where} is no detector: {problem}")
    return found  # type: ignore[no-any-return]


def shortcoming(found: object) -> str | None:
    """Return in words what a class lacks to be a detector; None when it keeps the contract that it declares."""
    if not isinstance(found, type):
        return f"expected a class, got {type(found).__name__}"
    declares = getattr(found, "declares", None)
    if not isinstance(declares, Declaration):
        got = "none" if declares is None else type(declares).__name__
        what = 'a class attribute declares = Declaration(summary="...", statistics=("norm",)) of sentinel.detect'
        return f"expected {what}, got {got}"
    if declares.over not in CONTRACTS:
        return f'it declares over="{declares.over}", which only detectors of Sentinel do; known: {", ".join(CONTRACTS)}'
    lacking = [name for name in declares.methods if not callable(getattr(found, name, None))]
    if lacking:
        return f"it has no {' and no '.join(lacking)}; see the contract sentinel.detect.{CONTRACTS[declares.over]}"
    try:
        inspect.signature(found)
    except (TypeError, ValueError) as error:
        return f"its arguments cannot be read: {error}"
    return None


def why_not(name: str, detectors: Mapping[str, type[Any]]) -> str:
    """Return in words why an entry point or a dotted path is no detector; empty where it is one, or `name` is neither."""
    if isinstance(detectors, Detectors) and name in detectors.broken:
        return detectors.broken[name]
    try:
        if is_dotted(name) and name not in detectors:
            dotted_detector(name)
    except RuleError as error:
        return str(error)
    return ""


class Detectors(dict[str, type[Any]]):
    """Name -> class: what is known by name, and where code is allowed whatever a dotted path leads to."""

    def __init__(self, known: Mapping[str, type[Any]]) -> None:
        super().__init__(known)
        self.broken: dict[str, str] = {}
        """Name that an entry point offers -> why there is no detector behind it."""

    def __contains__(self, name: object) -> bool:
        if super().__contains__(name):
            return True
        if not (isinstance(name, str) and is_dotted(name)):
            return False
        try:
            self[name] = dotted_detector(name)
        except RuleError:
            return False
        return True

    def __missing__(self, name: str) -> type[Any]:
        if not is_dotted(name):
            raise KeyError(name)
        self[name] = dotted_detector(name)
        return self[name]
