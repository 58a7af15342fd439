"""JudgedByRule: what each rule of a run has looked at so far, for whoever asks from another thread."""

from __future__ import annotations

import re

import msgspec

from sentinel.judge.judge import Judge

_OF_RULE = re.compile(r'rule "(.*?)"(?::| is off)', re.DOTALL)
"""Which rule a text about blindness is about, where it is about one alone."""


class JudgedByRule(msgspec.Struct, frozen=True, kw_only=True):
    """What each rule of a run has looked at so far."""

    num_steps: int = 0
    """Steps judged."""
    points: dict[str, int] = {}
    """Rule -> points it scored: rows, tensors x statistics, or scalars."""
    blind: dict[str, list[str]] = {}
    """Rule -> what it says itself that it is blind to."""

    @classmethod
    def of(cls, judge: Judge) -> JudgedByRule:
        """Return it as a judge has it now."""
        blind: dict[str, list[str]] = {}
        for text in judge.blindness:
            if named := _OF_RULE.search(text):
                blind.setdefault(named[1], []).append(text)
        return cls(num_steps=judge.num_steps_judged, points=judge.num_points_judged, blind=blind)
