"""What is wrong in a pack, in words: FILE:LINE, what was expected, what came, the nearest known word."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sentinel.document import Located, Problem, show
from sentinel.file_keys import RULES, belongs
from sentinel.known_words import nearest
from sentinel.reference import Reference

ReadReference = Callable[[Sequence[Path]], Reference]
"""Reads the logs and runs that `reference:` names. SentinelError where one cannot be read."""


@dataclass(slots=True)
class Draft:
    """A rule as one file gives it: only the fields that are there."""

    name: str
    given: dict[str, Located]
    file: str
    line: int


@dataclass(slots=True)
class PackReading:
    """What one load has found so far."""

    detectors: Mapping[str, type[Any]]
    references: ReadReference | None = None
    problems: list[Problem] = field(default_factory=list)
    complete: list[str] = field(default_factory=list)
    """Names of rules that have a detector."""

    def complain(self, file: str, line: int, message: str) -> None:
        """Note one more problem."""
        self.problems.append(Problem(file, line, message))


def unknown_keys(given: Mapping[str, Located], known: tuple[str, ...], prefix: str, file: str, reading: PackReading) -> None:
    """Complain of each key that is not known."""
    for key, item in given.items():
        if key not in known:
            hint = ("" if prefix else belongs(key, RULES)) or nearest(key, known)
            reading.complain(file, item.where, f"{prefix}unknown key {show(key)}{hint}")
