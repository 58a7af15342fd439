"""Targets: how a person names modules and parameters."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Collection, Iterable, Sequence

import msgspec


class Target(msgspec.Struct, frozen=True):
    """One target: `layers.1`, `layers.*.mlp`, `re:layers\\.[02]\\..*`, each also with `:1` or `:logits` behind it.

    A name means itself and all inside it: `layers.1` is layers.1 and layers.1.mlp, never layers.10.
    """

    text: str
    name: str
    """Name or glob; of a regular expression its pattern."""
    path: str | None
    """Which element of the module's output or input, without the colon; None: every one."""
    pattern: re.Pattern[str] | None = None

    @classmethod
    def parse(cls, text: str) -> Target:
        """Return the target that a text says; ValueError for an empty one and for a broken regular expression."""
        if not text or text == "re:":
            raise ValueError('a target must not be empty; to mean every module: "*"')
        if text.startswith("re:"):
            try:
                return cls(text, text[3:], None, re.compile(text[3:]))
            except re.error as error:
                raise ValueError(f"not a regular expression: {text[3:]!r}: {error}") from error
        name, colon, path = text.partition(":")
        return cls(text, name, path if colon else None)

    def means(self, names: Iterable[str], path: str | None = None) -> bool:
        """Return whether a module or parameter, known by any of `names`, is meant.

        path: the element of its output or input that is asked about, `""` for the only one; None: any.
        """
        names = tuple(names)
        if path is not None and self.path is not None and path != self.path and (path or "0") != self.path:
            return False
        if self.pattern is not None:
            spelled = [*names, *(f"{name}:{path}" for name in names if path)]
            return any(self.pattern.fullmatch(name) for name in spelled)
        return any(
            name == self.name or fnmatch.fnmatchcase(name, self.name) or fnmatch.fnmatchcase(name, self.name + ".*")
            for name in names
        )


def means(targets: Sequence[Target], names: Collection[str], path: str | None = None) -> bool:
    """Return whether one of the targets means it; no target at all means everything."""
    return not targets or any(target.means(names, path) for target in targets)


def nearest(target: Target, names: Collection[str], most: int = 3) -> list[str]:
    """Return the known names that look most like a target that matched nothing."""
    plain = target.name.strip("^$").replace("\\.", ".")
    return difflib.get_close_matches(plain, list(names), most, 0.4)
