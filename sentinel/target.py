"""Targets: how a person names modules and parameters."""

from __future__ import annotations

import difflib
import fnmatch
import time
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache

import msgspec

from sentinel.errors import ConfigError
from sentinel.regular_expression import RegularExpression

MAX_TARGET = 1000
"""Characters of a target; a bound on the time to look one up, beyond the name of any module."""
RESOLVE_S = 1.0
"""Seconds that looking up what targets mean may take; a bound on time: with 10,000 names a target takes about 0.05 s."""


class Target(msgspec.Struct, frozen=True):
    """One target: `layers.1`, `layers.*.mlp`, `re:layers\\.[02]\\..*`, each also with `:1` or `:logits` behind it.

    A name means itself and all inside it: `layers.1` is layers.1 and layers.1.mlp, never layers.10.
    """

    text: str
    name: str
    """Name or glob; of a regular expression its pattern."""
    path: str | None
    """Which element of the module's output or input, without the colon; None: every one."""
    pattern: RegularExpression | None = None

    @classmethod
    def parse(cls, text: str) -> Target:
        """Return the target that a text says; ValueError for an empty one and for a regular expression that is none, or
        cannot be matched in bounded time.
        """
        return _parsed(text)

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


@lru_cache(maxsize=1024)
def _parsed(text: str) -> Target:
    """One target object a text: what it was found to mean on one thread is known on the others."""
    if not text or text == "re:":
        raise ValueError('a target must not be empty; to mean every module: "*"')
    if len(text) > MAX_TARGET:
        raise ValueError(f"expected at most {MAX_TARGET} characters, got {len(text)}")
    if text.startswith("re:"):
        return Target(text, text[3:], None, RegularExpression(text[3:]))
    name, colon, path = text.partition(":")
    return Target(text, name, path if colon else None)


def resolve(targets: Iterable[str], names: Collection[str], limit_s: float = RESOLVE_S) -> None:
    """Look up what targets mean among names, so that who asks later need not; ConfigError when that takes too long.

    names: of modules and parameters, with `:1` or `:logits` behind them where there are several elements.
    """
    deadline = time.monotonic() + limit_s
    for text in targets:
        target = Target.parse(text)
        for name in names:
            target.means((name,))
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"target {text[:80]!r}: what it means among {len(names)} names was not found within {limit_s:g} s; "
                    "name fewer targets, or simpler ones"
                )


def means(targets: Sequence[Target], names: Collection[str], path: str | None = None) -> bool:
    """Return whether one of the targets means it; no target at all means everything."""
    return not targets or any(target.means(names, path) for target in targets)


def nearest(target: Target, names: Collection[str], most: int = 3) -> list[str]:
    """Return the known names that look most like a target that matched nothing."""
    plain = target.name.strip("^$").replace("\\.", ".")
    return difflib.get_close_matches(plain, list(names), most, 0.4)
