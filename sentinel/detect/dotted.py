"""Detectors that a rule names by dotted path: code of the user, run only where the user said so (`--allow-code`)."""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any

from sentinel.detect.declaration import CONTRACTS, METHODS, Declaration
from sentinel.detect.detector import SeriesDetector
from sentinel.detect.group import GroupDetector
from sentinel.detect.liveness import LivenessDetector
from sentinel.errors import RuleError
from sentinel.exception_words import described
from sentinel.outside_calls import misfit

ASK = 'give --allow-code, or offer it as an entry point of "sentinel.detectors"'
_PROTOCOLS = {one.__name__: one for one in (SeriesDetector, GroupDetector, LivenessDetector)}
_permission = {"is_given": False}


def allow_code(is_allowed: bool = True) -> None:
    """Let rules of this process name detectors by dotted path, the current directory included; called where the command line
    has `--allow-code`."""
    _permission["is_given"] = is_allowed
    if is_allowed and "" not in sys.path:
        sys.path.insert(0, "")


def is_code_allowed() -> bool:
    """Whether rules of this process may name detectors by dotted path."""
    return _permission["is_given"]


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
        raise RuleError(f"{where} cannot be loaded: {described(error)}{hint}") from error
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
    protocol = _PROTOCOLS[CONTRACTS[declares.over]]
    called = {name: list(inspect.signature(getattr(protocol, name)).parameters)[1:] for name in METHODS[declares.over]}
    if wrong := misfit(found, called):
        return f"{wrong}; see the contract sentinel.detect.{protocol.__name__}"
    try:
        inspect.signature(found)
    except (TypeError, ValueError) as error:
        return f"its arguments cannot be read: {error}"
    return None
