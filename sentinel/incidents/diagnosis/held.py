"""HeldDiagnosis: the diagnosis that an incident's messages carry, which changes only for one that has held."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from sentinel.incident import SUSPECTED, Incident
from sentinel.incidents.diagnosis.claim import UNKNOWN, Diagnosis

HELD_STEPS = 3
"""Closed steps for which a diagnosis must hold before it is sent. Fewer: one that the next step's facts turn around is sent;
more: people wait for it."""
MAX_DOUBLINGS = 6
"""Most doublings of the steps that a diagnosis must hold: each change that was sent doubles them once, up to 192 steps.
Fewer: one that swings sends more messages; more: a late change waits for longer."""
_NOT_NOTIFIED = "not settled yet: "
_FIGURES = re.compile(r"\d+")


class HeldDiagnosis(msgspec.Struct, kw_only=True):
    """The diagnosis in force, and for how many closed steps another has held instead. Kept in the tracker's snapshot.

    Each change that was sent doubles the steps for which the next must hold, so that evidence which comes and goes does not
    make messages that come and go. The incident's last message has the diagnosis of its end, however long that has held.
    """

    notified: Diagnosis = UNKNOWN
    to_do: str = ""
    """What to do about it, in a sentence."""
    other: Diagnosis | None = None
    """The diagnosis that would replace it, and has not held for long enough yet."""
    since: int = 0
    """Number of the closed step from which on it has been suspected."""
    changes: tuple[str, ...] = ()
    """Sentences that say what took the place of a diagnosis that had been sent, and why; oldest first."""
    num_notified: int = 0
    """Number of diagnoses other than `unknown` that were sent, and of those that took their place."""

    @classmethod
    def of(cls, incident: Incident) -> HeldDiagnosis:
        """Return the held diagnosis of an incident whose snapshot, of an older version, has nothing but its revisions."""
        notified = Diagnosis(suspected=incident.suspected, skip_steps=incident.skip_steps)
        return cls(notified=notified, num_notified=1)

    def see(self, found: Diagnosis, to_do: str, *, index: int, step: int, is_over: bool = False) -> None:
        """Take what is suspected after a closed step. index: counts closed steps; step: the step's own number.

        is_over: the incident ends with it.
        """
        if _claim(found) == _claim(self.notified):
            self.other = None
            if found.skip_steps != self.notified.skip_steps or _words(found.reasons) != _words(self.notified.reasons):
                self.notified, self.to_do = found, to_do  # The same claim, said better; figures that grow are no news.
            return
        if self.other is None or _claim(found) != _claim(self.other):
            self.since = index
        self.other = found
        needed = HELD_STEPS << min(max(self.num_notified - 1, 0), MAX_DOUBLINGS)
        if is_over or index - self.since + 1 >= needed:
            self._notify(found, to_do, step)

    def _notify(self, found: Diagnosis, to_do: str, step: int) -> None:
        if self.num_notified:
            why = found.reasons[0] if found.reasons else "what spoke for it no longer does"
            self.changes = (*self.changes, f"{self.notified.suspected} -> {found.suspected} at step {step}, because {why}")
        self.notified, self.to_do, self.other, self.num_notified = found, to_do, None, self.num_notified + 1

    @property
    def lines(self) -> tuple[str, ...]:
        """What people read: what changed last, the reasons, what to do, and what is suspected instead and not settled."""
        reasons = [*self.notified.reasons, *([self.to_do] if self.to_do else ())]
        notified = [f"{SUSPECTED}{self.notified.suspected}: {line}" for line in reasons]
        other = []
        if self.other is not None and self.other.suspected != "unknown":
            other = [f"{_NOT_NOTIFIED}{self.other.suspected}: {reason}" for reason in self.other.reasons[:1]]
        return (*self.changes[-1:], *notified, *other, *self.changes[:-1])


def _claim(one: Diagnosis) -> tuple[object, ...]:
    """What a person does about it follows from this: its figures and its wording may change meanwhile."""
    return one.suspected, one.ranks, one.skip_lanes if one.skip_steps else ()


def _words(lines: Iterable[str]) -> list[str]:
    return [_FIGURES.sub("", line) for line in lines]
