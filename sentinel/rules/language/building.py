"""Detectors from the `args` of their rules, checked."""

from __future__ import annotations

import inspect
import re
import weakref
from collections.abc import Mapping
from typing import Any

import msgspec

from sentinel.detect import DETECTORS
from sentinel.errors import RuleError, SentinelError
from sentinel.exception_words import described
from sentinel.rules.guarded_detector import guarded
from sentinel.rules.language.schema import Rule

_KNOWN: weakref.WeakKeyDictionary[type[Any], Mapping[str, Any]] = weakref.WeakKeyDictionary()


def detector_arguments(detector: type[Any]) -> Mapping[str, Any]:
    """Return argument -> default of a detector class; `...` where an argument must be given."""
    found = _KNOWN.get(detector)
    if found is None:
        # Looked up once: it takes a hundred times as long as all else that is read of a rule.
        found = _KNOWN[detector] = _arguments(detector)
    return found


def _arguments(detector: type[Any]) -> Mapping[str, Any]:
    if issubclass(detector, msgspec.Struct):
        return {
            item.name: ... if item.required else item.default if item.default is not msgspec.NODEFAULT else None
            for item in msgspec.structs.fields(detector)
        }
    parameters = inspect.signature(detector).parameters.values()
    named = [item for item in parameters if item.kind in (item.KEYWORD_ONLY, item.POSITIONAL_OR_KEYWORD)]
    return {item.name: ... if item.default is item.empty else item.default for item in named}


def build_detector(rule: Rule, detectors: Mapping[str, type[Any]]) -> Any:
    """Return the detector of `rule`, its arguments checked. RuleError says which argument is wrong and why."""
    cls = detectors[rule.detector]
    try:
        built = msgspec.convert(rule.args, cls) if issubclass(cls, msgspec.Struct) else cls(**rule.args)
    except msgspec.ValidationError as error:
        raise RuleError(_argument_error(str(error))) from error
    except SentinelError as error:
        raise RuleError(f"args: {error}") from error
    except (TypeError, ValueError) as error:
        raise RuleError(f"args of {rule.detector}: {error}") from error
    except Exception as error:
        if cls in DETECTORS.values():
            raise
        raise RuleError(f"{rule.detector} cannot be made: {described(error)}") from error
    return built if cls in DETECTORS.values() else guarded(built, f'detector "{rule.detector}" of rule "{rule.name}"')


def is_series_detector(detector: type[Any]) -> bool:
    """Whether a detector scores single series: those that compare ranks or copies, or watch the clock, do not."""
    return bool(detector.declares.over == "series")


def _argument_error(text: str) -> str:
    """Return msgspec's `Expected ..., got ... - at `$.k`` in this project's words."""
    found = re.match(r"(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", text)
    assert found is not None
    what = found["what"].replace("`", "")
    what = what[:1].lower() + what[1:]
    return f"args.{found['path']}: {what}" if found["path"] else f"args: {what}"
