"""The `aggregate` of a rule's match, as YAML gives it: a glob, a list of globs, or names of groups with their globs."""

from __future__ import annotations

from collections.abc import Callable

from sentinel.aggregate import Aggregate
from sentinel.document import Located
from sentinel.errors import ConfigError

FORMS = "a glob, a list of globs, or NAME: GLOB"


def read_aggregates(match: Located, complain: Callable[[int, str], None]) -> tuple[Aggregate, ...]:
    """Return the groups of a match, none where it has no `aggregate`; what is wrong is complained of with its line.

    A text is read as `sentinel export --aggregate` reads it; in a list each text is a group of its own.
    """
    item = match.value.get("aggregate")
    if item is None:
        return ()
    if isinstance(item.value, dict):
        named = list(item.value.items())
    else:
        named = [("", entry) for entry in (item.value if isinstance(item.value, list) else [item])]
    if not named:
        complain(item.where, f"match.aggregate: expected {FORMS}, got none")
    found: dict[str, Aggregate] = {}
    for name, entry in named:
        one = _aggregate(name, entry, complain)
        if one is not None and one.name in found:
            complain(entry.where, f'match.aggregate: "{one.name}" is there twice')
        elif one is not None:
            found[one.name] = one
    rank, kind = match.value.get("rank"), match.value.get("kind")
    if rank is not None:
        complain(rank.where, "match.rank: says nothing about groups, which are merged over ranks; leave it out")
    if kind is not None and "scalar" in (kind.plain() if isinstance(kind.value, list) else [kind.value]):
        complain(kind.where, "match.aggregate: logged values are not merged; leave scalar out of kind")
    return tuple(found.values())


def _aggregate(name: str, entry: Located, complain: Callable[[int, str], None]) -> Aggregate | None:
    globs = entry.plain() if name and isinstance(entry.value, list) else [entry.value]
    if not globs or not all(isinstance(glob, str) for glob in globs):
        expected = "a glob or a list of globs" if name else FORMS
        got = next((_shown(glob) for glob in globs if not isinstance(glob, str)), "none")
        complain(entry.where, f"match.aggregate: expected {expected}, got {got}")
        return None
    try:
        return Aggregate(name=name, globs=tuple(globs)) if name else Aggregate.parse(globs[0])
    except ConfigError as error:
        complain(entry.where, f"match.aggregate: {error}")
        return None


def _shown(value: object) -> str:
    return {dict: "a mapping", list: "a list", type(None): "nothing"}.get(type(value), str(value))
