"""Proposal: what the alarms of one step ask for, and where they point. Made while judging, and nowhere else."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

import msgspec

from sentinel.anomaly import Anomaly, Severity
from sentinel.monitor_config import MEASURED_LABELS
from sentinel.place import Place, depth

MAX_NEIGHBOURS = 64
"""Most targets that neighbours come to; past it all modules are meant. Too small: a wide fault is looked for everywhere; too
large: each rank looks up many globs."""
_NUMBERED = re.compile(r"(?P<container>.*?)(?P<number>\d+)")
"""A block by its number: `blocks.3`, `layers.12`; what stands behind it lies inside."""


class RuleAlarm(msgspec.Struct, frozen=True, kw_only=True):
    """A rule that fired, as policies see it."""

    rule: str
    detector: str
    severity: Severity
    actions: tuple[str, ...] = ()
    """What the rule itself asks for."""
    what: str = ""
    """In words: `loss-spike: loss value at step 40`."""


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """What the alarms of one step ask for. From the judgement alone, so that a replay proposes the same."""

    key: str
    """Names it for ever: the same proposal becomes the same commands, however often a crash repeats it."""
    run: str
    attempt: int
    step: int
    """Step of the alarms."""
    alarms: tuple[RuleAlarm, ...] = ()
    """One of each rule, in the total order."""
    ranks: tuple[int, ...] = ()
    """Ranks of the blast radius; empty: all."""
    neighbours: tuple[str, ...] = ()
    """Globs of the blocks of the first causes and of those beside them; empty: not known."""
    suspected: str = "somewhere"
    """Where it is suspected, in words."""

    @property
    def topic(self) -> str:
        """The queue of the outbox that it waits in."""
        return "escalation"

    @property
    def body(self) -> bytes:
        """JSON for the outbox; `Proposal.read` takes it back."""
        return msgspec.json.encode(self)

    @staticmethod
    def read(body: bytes) -> Proposal:
        """Return the proposal that `body` says."""
        return msgspec.json.decode(body, type=Proposal)

    def reason(self, alarm: RuleAlarm) -> str:
        """Return why a command follows from an alarm, in words."""
        return f"{alarm.what}, suspected in {self.suspected}"


def propose(
    anomalies: Sequence[Anomaly],
    actions: Mapping[str, Collection[str]],
    places: Mapping[int, Place],
    first_causes: Collection[str] = (),
) -> Proposal | None:
    """Return what the anomalies of one step may ask for, or None. Pure.

    anomalies: of one step, in the total order. actions: rule's name -> its actions. places: rank -> where it lives.
    first_causes: ids of those that nothing explains; empty: the order alone says who is suspected.
    """
    onsets = [one for one in anomalies if one.event == "onset"]
    # A lone finite excursion (`info`) is common on healthy runs: it is written down, not looked into.
    alarming = [one for one in onsets if one.severity is not Severity.INFO]
    if not alarming:
        return None
    by_rule: dict[str, Anomaly] = {}
    for one in alarming:
        known = by_rule.get(one.rule)
        if known is None or known.severity.level < one.severity.level:
            by_rule[one.rule] = one
    # A rule may ask because of the loss, while another saw where it began: suspect what was seen first.
    suspects = [one for one in onsets if one.id in first_causes] or onsets
    # A logged value says nothing about where: a bad loss may come from anywhere. A group of tensors may span all stages: its
    # members say where, if anybody does.
    located = [one for one in suspects if one.kind in MEASURED_LABELS and not one.num_members]
    first = alarming[0]
    return Proposal(
        key=f"{first.run}:{first.attempt}:{first.step}:{first.id}",
        run=first.run,
        attempt=first.attempt,
        step=first.step,
        alarms=tuple(
            RuleAlarm(
                rule=one.rule, detector=one.detector, severity=one.severity, actions=tuple(actions.get(one.rule, ())),
                what=f"{one.rule}: {one.tag_name} {one.statistic} at step {one.step}",
            )
            for one in by_rule.values()
        ),
        ranks=blast_radius(located, places),
        neighbours=neighbours(located),
        suspected=(located[0].segment or located[0].tag_name) if located else "somewhere",
    )  # fmt: skip


def blast_radius(suspects: Sequence[Anomaly], places: Mapping[int, Place]) -> tuple[int, ...]:
    """Return the ranks to look at: all that hold a suspected pipeline stage; empty for all ranks, or for no suspect.

    Every data- and tensor-parallel rank of the stage is in it: a fault that comes back need not choose the same
    replica. Where no segment is known the neighbours in depth are suspected too: a tensor on a border belongs to two.
    """
    if not suspects or not places:
        return ()
    depths: set[int] = set()
    for one in suspects:
        schedule = next((place.schedule for place in places.values() if place.schedule), "")
        at = depth(schedule, one.pp_stage, one.vpp_stage, one.pp_size)
        depths.update((at,) if one.segment else (at - 1, at, at + 1))
    ranks = [
        rank
        for rank, place in sorted(places.items())
        if any(depth(place.schedule, place.pp_rank, chunk, place.pp_size) in depths for chunk in range(place.vpp_size))
    ]
    return () if len(ranks) == len(places) else tuple(ranks)


def neighbours(suspects: Sequence[Anomaly]) -> tuple[str, ...]:
    """Return globs of the numbered blocks that suspects lie in, and of those before and behind them; empty where one lies in
    none, or they are very many."""
    found: dict[str, None] = {}
    for one in suspects:
        match = _NUMBERED.match(one.segment or one.tag_name)
        if match is None:
            return ()
        number = int(match["number"])
        for beside in range(max(number - 1, 0), number + 2):
            found[f"{match['container']}{beside}"] = None
    return tuple(found) if len(found) <= MAX_NEIGHBOURS else ()
