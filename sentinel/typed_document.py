"""A document as the struct that it describes: each key and each value is checked where it was written.

The trainer's config and the daemon's are read here, so that both say what is wrong in the same words.
"""

from __future__ import annotations

import datetime
import enum
import functools
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec

from sentinel.document import BrokenDocument, Located, Problem, parse_bytes, read_document, show, type_of
from sentinel.errors import ConfigError
from sentinel.file_keys import belongs
from sentinel.known_words import near, nearest

_StructT = TypeVar("_StructT", bound=msgspec.Struct)
_EXPECTED = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
OutsideBySection: TypeAlias = Mapping[str, Mapping[str, type[msgspec.Struct]]]
NONE_OUTSIDE: OutsideBySection = types.MappingProxyType({})
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


class _Wrong(Exception):
    """A value of which a problem was noted."""


def parse_named(data: bytes, name: str) -> Located | None:
    """Return the document in the bytes of the file `name`, None when it is empty. ConfigError says FILE:LINE and what."""
    try:
        return parse_bytes(data)
    except BrokenDocument as error:
        raise ConfigError(f"{name}:{error.line}: {error}") from error


def named_document(path: Path) -> Located | None:
    """Return the document in a file, None when it is empty. ConfigError says FILE:LINE and what."""
    try:
        return read_document(path)
    except BrokenDocument as error:
        raise ConfigError(f"{path}:{error.line}: {error}") from error


def read_struct(
    document: Located | None,
    struct: type[_StructT],
    *,
    name: str,
    kind: str,
    outside: OutsideBySection = NONE_OUTSIDE,
) -> _StructT:
    """Return the struct that a document describes; its defaults where the document is empty.

    name: of the file, for messages; empty where the values came from code. kind: of the file (`sentinel.file_keys`).
    outside: dotted path of a list whose items choose one of several structs -> those of other packages, by the word that
    names them; it may raise ConfigError for one that cannot be had. ConfigError names everything that is wrong, one
    `FILE:LINE: what` a line.
    """
    if document is None or document.value is None:
        return struct()
    reading = _Reading(document, name, kind, outside)
    try:
        found: _StructT = reading.struct(document, struct, "")
    except _Wrong:
        raise ConfigError("\n".join(map(str, sorted(reading.problems, key=lambda one: one.line)))) from reading.cause
    return found


def locate(document: Located, dotted: str) -> tuple[Located, bool]:
    """Return the deepest value that is written on the way of a dotted path, and whether it is the path's own.

    In a list `[1]` is the second item, and a name the item of that `name`, or else of that `type`.
    """
    at, rest = document, dotted
    while rest:
        found: Located | None = None
        if isinstance(at.value, dict):
            # The names of modules have dots of their own.
            keys = [key for key in at.value if rest == key or rest.startswith((f"{key}.", f"{key}["))]
            if keys:
                key = max(keys, key=len)
                found, rest = at.value[key], rest[len(key) :].removeprefix(".")
        elif isinstance(at.value, list):
            index = re.match(r"\[(\d+)\]\.?", rest)
            if index is not None and int(index[1]) < len(at.value):
                found, rest = at.value[int(index[1])], rest[index.end() :]
            else:
                for item in at.value:
                    named = _name_of(item)
                    if named and (rest == named or rest.startswith(f"{named}.")):
                        found, rest = item, rest[len(named) :].removeprefix(".")
                        break
        if found is None:
            return at, False
        at = found
    return at, True


def _name_of(item: Located) -> str:
    if not isinstance(item.value, dict):
        return ""
    name = item.value.get("name") or item.value.get("type")
    return name.value if name is not None and isinstance(name.value, str) else ""


@functools.cache
def _types(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Return key -> type of a struct's fields."""
    return {field.name: field.type for field in msgspec.structs.fields(struct)}


class _Reading:
    """Reads one document, and goes on after a problem to find the others."""

    def __init__(self, document: Located, name: str, kind: str, outside: OutsideBySection) -> None:
        self.problems: list[Problem] = []
        self.cause: Exception | None = None
        self._document, self._name, self._kind, self._outside = document, name, kind, outside

    def complain(self, item: Located, message: str) -> None:
        self.problems.append(Problem(self._name, item.where or 1, message))

    def struct(self, item: Located, struct: type[msgspec.Struct], path: str, tag: str | None = None) -> Any:
        if isinstance(item.value, struct):
            return item.value
        if not isinstance(item.value, dict):
            return self._refuse(item, path, "a mapping of keys")
        known, before = _types(struct), len(self.problems)
        values: dict[str, Any] = {}
        for key, value in item.value.items():
            if key in known:
                try:
                    values[key] = self.value(value, known[key], f"{path}.{key}" if path else key)
                except _Wrong:
                    continue
            elif key != tag:
                where = f"{path}: " if path else ""
                self.complain(value, f"{where}unknown key {show(key)}{self._meant(key, known, path)}")
        if len(self.problems) > before:
            raise _Wrong
        try:
            return struct(**values)
        except (ConfigError, ValueError, TypeError) as error:
            self.cause = error
            self.complain(self._blamed(str(error), item), str(error))
            raise _Wrong from error

    def _meant(self, key: str, known: dict[str, Any], path: str) -> str:
        """Return in words where a key belongs: under a section of this file, in another file; or the nearest known word."""
        inside = [name for name, of in known.items() if _is_struct(of) and key in _types(of)]
        below = f'; it belongs under "{inside[0]}"' if inside else ""
        other = belongs(key, self._kind) if not path else ""
        return below + other or nearest(key, tuple(known))

    def _blamed(self, message: str, item: Located) -> Located:
        """Return what a message of a struct is about: it begins with the dotted path from the top of the file."""
        dotted = message.split()[0].rstrip(":") if message else ""
        found, is_whole = locate(self._document, dotted)
        if is_whole:
            return found
        own = item.value.get(dotted.rpartition(".")[2])
        return own if own is not None else found if found is not self._document else item

    def value(self, item: Located, kind: Any, path: str) -> Any:
        """Return a value as the type `kind` has it; _Wrong where it is none, and the problem is noted."""
        origin, args = typing.get_origin(kind), typing.get_args(kind)
        if origin in (typing.Union, types.UnionType):
            if item.value is None and type(None) in args:
                return None
            args = tuple(one for one in args if one is not type(None))
            if len(args) > 1:
                is_tagged = all(_is_struct(one) for one in args)
                return self._tagged(item, args, path) if is_tagged else self._other(item, kind, path)
            return self.value(item, args[0], path)
        if _is_struct(kind):
            return self.struct(item, kind, path)
        if origin is tuple:
            return self._tuple(item, args[0], path)
        if origin is dict:
            return self._dict(item, args[1], path)
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            return self._word(item, kind, path)
        return self._scalar(item, kind, path) if kind in _EXPECTED else self._other(item, kind, path)

    def _tuple(self, item: Located, kind: Any, path: str) -> tuple[Any, ...]:
        if not isinstance(item.value, list):
            hint = (
                f"; write [{item.value}]"
                if isinstance(item.value, str) and re.fullmatch(r"[\w.-]{1,60}", item.value)
                else ""
            )
            self._refuse(item, path, "a list", hint)
        found = self._each([(one, f"{path}[{at}]") for at, one in enumerate(item.value)], kind)
        return tuple(found)

    def _dict(self, item: Located, kind: Any, path: str) -> dict[str, Any]:
        if not isinstance(item.value, dict):
            self._refuse(item, path, "a mapping")
        found = self._each([(one, f"{path}.{key}") for key, one in item.value.items()], kind)
        return dict(zip(item.value, found, strict=True))

    def _each(self, items: Sequence[tuple[Located, str]], kind: Any) -> list[Any]:
        found = []
        for item, path in items:
            try:
                found.append(self.value(item, kind, path))
            except _Wrong:
                continue
        if len(found) < len(items):
            raise _Wrong
        return found

    def _tagged(self, item: Located, structs: Sequence[Any], path: str) -> Any:
        """Return the struct, of several, that a key such as `type` names."""
        by_tag = {one.__struct_config__.tag: one for one in structs}
        outside = self._outside.get(re.sub(r"\[\d+\]$", "", path), {})
        field, tags = structs[0].__struct_config__.tag_field, (*by_tag, *outside)
        if isinstance(item.value, tuple(structs)):
            return item.value
        if not isinstance(item.value, dict):
            self._refuse(item, path, f'a mapping with "{field}"')
        named = item.value.get(field)
        if named is None:
            self.complain(item, f'{path}: "{field}" is missing; expected one of {", ".join(tags)}')
            raise _Wrong
        if not isinstance(named.value, str) or named.value not in tags:
            hint = near(named.value, tags) if isinstance(named.value, str) else ""
            self._refuse(named, f"{path}.{field}", f"one of {', '.join(tags)}", hint)
        try:
            return self.struct(item, by_tag.get(named.value) or outside[named.value], path, field)
        except ConfigError as error:
            self.complain(named, f"{path}.{field}: {error}")
            raise _Wrong from error

    def _word(self, item: Located, kind: type[enum.Enum], path: str) -> enum.Enum:
        if isinstance(item.value, kind):
            return item.value
        known = {str(one.value): one for one in kind}
        if not isinstance(item.value, str) or item.value not in known:
            hint = near(item.value, tuple(known)) if isinstance(item.value, str) else ""
            self._refuse(item, path, f"one of {', '.join(known)}", hint)
        return known[item.value]

    def _scalar(self, item: Located, kind: Any, path: str) -> Any:
        value, expected = item.value, _EXPECTED[kind]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if kind is float and is_number:
            try:
                number = float(value)
            except OverflowError:
                number = math.inf
            if math.isfinite(number):
                return number
            expected = "a finite number"
        elif isinstance(value, kind) and isinstance(value, bool) == (kind is bool):
            return value
        hint = ""
        if kind in (int, float, bool) and isinstance(value, str):
            is_quoted = value.lower() in ("true", "false") if kind is bool else bool(_NUMBER.fullmatch(value.strip()))
            hint = "; write it without quotes" if is_quoted else ""
        elif kind is str and isinstance(value, int | float | datetime.date):
            hint = "; write it in quotes"
        return self._refuse(item, path, expected, hint)

    def _other(self, item: Located, kind: Any, path: str) -> Any:
        """Return a value of a type that only structs of other packages have, as msgspec reads it."""
        try:
            return msgspec.convert(item.plain(), kind)
        except msgspec.ValidationError as error:
            self.complain(item, f"{path}: {str(error)[:1].lower()}{str(error)[1:]}")
            raise _Wrong from error

    def _refuse(self, item: Located, path: str, expected: str, hint: str = "") -> Any:
        is_plain = isinstance(item.value, str | int | float)
        got = show(item.value) if is_plain else type_of(item.value)
        where = f"{path}: " if path else ""
        self.complain(item, f"{where}expected {expected}, got {got}{hint}")
        raise _Wrong


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)
