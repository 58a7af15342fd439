"""The numbers of a rule: which of them its language has, what each is for, and a pack that changes some of them.

Which values a number may have only its detector knows: a change is a pack, and whoever reads packs says what is wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import msgspec
import yaml
from msgspec import inspect

from sentinel.detect import known_detectors
from sentinel.errors import RuleError
from sentinel.known_words import nearest
from sentinel.rules.language.building import detector_arguments
from sentinel.rules.language.listing import argument_docs
from sentinel.rules.language.schema import Rule

QUIET_STEPS = "episode_quiet_steps"
"""The one number that every rule has, whatever its detector."""
_QUIET_MEANING = "Steps without an anomaly that end an episode; 0: every anomalous step is its own."


class RuleNumber(msgspec.Struct, frozen=True, kw_only=True):
    """One number of a rule."""

    name: str
    """The argument of its detector, or `episode_quiet_steps`."""
    value: float | int | None
    """As it is in force; None: there is no limit."""
    default: float | int | None
    """What it is where a pack says nothing."""
    is_whole: bool
    """Whole numbers alone are taken."""
    meaning: str
    """In a sentence or two; empty: its detector does not say."""


def numbers_of(rule: Rule) -> list[RuleNumber]:
    """Return the numbers of a rule that is in force, in the order in which its detector has them."""
    cls: Any = known_detectors()[rule.detector]
    found = []
    for name, is_whole, default, meaning in _of_detector(cls):
        value = rule.args.get(name, default)
        if value is None or _is_number(value):
            found.append(RuleNumber(name=name, value=value, default=default, is_whole=is_whole, meaning=meaning))
    quiet = RuleNumber(name=QUIET_STEPS, value=rule.episode_quiet_steps, default=20, is_whole=True, meaning=_QUIET_MEANING)
    return [*found, quiet]


def written_change(rule: Rule, numbers: Mapping[str, float | int]) -> str:
    """Return a pack, as YAML, that gives some numbers of a rule other values and leaves all else of it as it is.

    RuleError where a number is none that the rule has, or none is given. Whether the values will do, the reader of packs
    says.
    """
    known = [one.name for one in numbers_of(rule)]
    for name in numbers:
        if name not in known:
            raise RuleError(f'rule "{rule.name}": has no number "{name[:80]}"{nearest(name[:80], known)}')
    if not numbers:
        raise RuleError(f'rule "{rule.name}": expected a number to change ({", ".join(known)}), got none')
    change: dict[str, Any] = {"name": rule.name}
    args = {name: value for name, value in numbers.items() if name != QUIET_STEPS}
    if args:
        change["args"] = args
    if QUIET_STEPS in numbers:
        change[QUIET_STEPS] = numbers[QUIET_STEPS]
    return yaml.safe_dump({"rules": [change]}, sort_keys=False, allow_unicode=True, width=1000)


@functools.lru_cache(maxsize=256)
def _of_detector(cls: Any) -> tuple[tuple[str, bool, float | int | None, str], ...]:
    """Return (argument, whether it is whole, default, meaning) of each number; reading its source takes milliseconds."""
    documented, types = argument_docs(cls), _types_of(cls)
    found = []
    for name, given in detector_arguments(cls).items():
        default = None if given is ... else given
        kinds = types.get(name, {type(default)})
        if kinds & {int, float} and (default is None or _is_number(default)):
            found.append((name, float not in kinds, default, documented.get(name, "")))
    return tuple(found)


def _types_of(cls: type[Any]) -> Mapping[str, set[type]]:
    """Return argument -> what it may be, as far as that are numbers; nothing of a class that declares no types."""
    if not issubclass(cls, msgspec.Struct):
        return {}
    named: dict[type, type] = {inspect.IntType: int, inspect.FloatType: float}
    told = inspect.type_info(cls)
    assert isinstance(told, inspect.StructType)
    return {
        field.name: {
            named.get(type(one), object)
            for one in (field.type.types if isinstance(field.type, inspect.UnionType) else (field.type,))
        }
        for field in told.fields
    }


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
