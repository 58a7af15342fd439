"""What a run was judged without: parts of ranks, rows that came too late, and which ranks are not heard while others are.

Not judged. The journal keeps it for `sentinel status`.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Collection, Iterable, Mapping

import msgspec

from sentinel.decision import Decision
from sentinel.ingest.incarnation import Incarnation
from sentinel.rank_identity import RankIdentity
from sentinel.store.journal import Journal

PARTIAL_FACT, MISSING_FACT = "partial", "missing"
"""Names under which the journal keeps `PartialSteps` and `MissingRanks`."""
MAX_RANKS_NAMED = 8
"""Ranks that are named of any number; a bound on the length of a line."""


class AbsentRank(msgspec.Struct, kw_only=True):
    """A rank of which something was not there."""

    rank: int
    host: str = ""
    """The machine that it was last heard from, as `RankIdentity.node` or `host`; empty: not known."""
    why: str = ""
    """As of `Decision.missing`, in the newest step that was judged without its part."""
    num_rows_late: int = 0
    """Rows of it that came behind the judging of their step."""
    heard_at: float = 0.0
    """Seconds since the epoch, by its own clock, of its newest record; 0: it was never heard, or that was not asked for."""


class PartialSteps(msgspec.Struct, kw_only=True):
    """Sums over the judged steps of a run, all attempts."""

    seq: int = 0
    """The newest decision in the sums: after a restart decisions are made again."""
    num_steps: int = 0
    """Steps that were judged without the part of a rank, or with less than the whole of it."""
    first_step: int = -1
    last_step: int = -1
    ranks: list[AbsentRank] = []
    """Whose part that was, the first `MAX_RANKS_NAMED` that were met."""
    has_more_ranks: bool = False
    num_rows_late: int = 0
    """Rows that came behind the judging of their step; no rule saw them."""
    late_ranks: list[AbsentRank] = []
    """Whose rows those are, the most first, at most `MAX_RANKS_NAMED`."""

    @classmethod
    def recalled(cls, journal: Journal) -> PartialSteps:
        """Return the sums as they were written down last."""
        try:
            return msgspec.json.decode(journal.values.get(PARTIAL_FACT) or "{}", type=cls)
        except msgspec.DecodeError:
            return cls()  # Of another version.

    def take(self, decision: Decision) -> None:
        """Take in one judged step, once."""
        if not decision.missing or decision.seq <= self.seq:
            return
        self.seq = decision.seq
        self.num_steps += 1
        self.first_step = decision.step if self.first_step < 0 else min(self.first_step, decision.step)
        self.last_step = max(self.last_step, decision.step)
        known = {one.rank: one for one in self.ranks}
        for rank, why in decision.missing.items():
            if rank in known:
                known[rank].why = why
            elif len(self.ranks) < MAX_RANKS_NAMED:
                self.ranks.append(AbsentRank(rank=rank, why=why))
            else:
                self.has_more_ranks = True

    def take_late(self, num_rows: Mapping[int, int]) -> None:
        """Take in the rows that came too late so far. num_rows: rank -> rows."""
        self.num_rows_late = sum(num_rows.values())
        most = sorted(num_rows.items(), key=lambda one: (-one[1], one[0]))[:MAX_RANKS_NAMED]
        self.late_ranks = [AbsentRank(rank=rank, num_rows_late=count) for rank, count in most]

    def name_hosts(self, known: Iterable[Incarnation]) -> None:
        """Say where its ranks run. known: processes of the run."""
        named = [*self.ranks, *self.late_ranks]
        newest = _newest({one.rank for one in named}, known)
        for one in named:
            one.host = _host(newest.get(one.rank)) or one.host

    @property
    def lines(self) -> list[str]:
        """What was judged without, in words, a line each: none where nothing was."""
        lines = []
        if self.num_steps:
            first, last = self.first_step, self.last_step
            span = f"{first}" if first == last else f"{first} to {last}"
            who = _listed((one.rank, one.host, one.why) for one in self.ranks)
            more = " and others" if self.has_more_ranks else ""
            lines.append(f"judged in part: {_counted(self.num_steps, 'step')} ({span}) without {who}{more}")
        if self.num_rows_late:
            who = _listed((one.rank, one.host, f"{one.num_rows_late:,}") for one in self.late_ranks)
            left = self.num_rows_late - sum(one.num_rows_late for one in self.late_ranks)
            more = f" and others ({left:,})" if left else ""
            lines.append(
                f"left out: {_counted(self.num_rows_late, 'row')} that came after their step was judged: of {who}{more}"
            )
        return lines


class MissingRanks(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks of a run that are not heard while others are."""

    num_missing: int = 0
    num_expected: int = 0
    ranks: list[AbsentRank] = []
    """The lowest `MAX_RANKS_NAMED` of them."""

    @classmethod
    def of(cls, num_expected: int, heard: Collection[int], known: Iterable[Incarnation]) -> MissingRanks:
        """Return who is missing; nobody where none is heard. heard: ranks that write now. known: processes of the run."""
        if not heard or len(heard) >= num_expected:
            return cls()
        # Nobody can know that a world is as large as its ranks say: no more of it is gone through than is named.
        named = list(itertools.islice((rank for rank in range(num_expected) if rank not in heard), MAX_RANKS_NAMED))
        num_missing = num_expected - sum(rank < num_expected for rank in heard) if named else 0
        newest = _newest(named, known)
        ranks = [
            AbsentRank(
                rank=rank, host=_host(newest.get(rank)), heard_at=newest[rank].last_wall_ns / 1e9 if rank in newest else 0.0
            )
            for rank in named
        ]
        return cls(num_missing=num_missing, num_expected=num_expected, ranks=ranks)

    @classmethod
    def recalled(cls, journal: Journal) -> MissingRanks:
        """Return who was missing as it was written down last."""
        try:
            return msgspec.json.decode(journal.values.get(MISSING_FACT) or "{}", type=cls)
        except msgspec.DecodeError:
            return cls()  # Of another version.

    @property
    def words(self) -> str:
        """Who is missing; empty where nobody is: `1 of 4 ranks is not heard: rank 2 (node7, never heard)`."""
        if not self.num_missing:
            return ""
        who = _listed((one.rank, one.host, _since(one.heard_at)) for one in self.ranks)
        left = self.num_missing - len(self.ranks)
        more = f" and {left} more" if left else ""
        verb = "is" if self.num_missing == 1 else "are"
        return f"{self.num_missing} of {_counted(self.num_expected, 'rank')} {verb} not heard: {who}{more}"


def _newest(ranks: Collection[int], known: Iterable[Incarnation]) -> dict[int, Incarnation]:
    """Return, of these ranks, the process of each that wrote last."""
    newest: dict[int, Incarnation] = {}
    for one in known:
        if one.rank in ranks and (one.rank not in newest or one.last_wall_ns >= newest[one.rank].last_wall_ns):
            newest[one.rank] = one
    return newest


def _host(incarnation: Incarnation | None) -> str:
    if incarnation is None or incarnation.descriptor is None:
        return ""
    identity = RankIdentity.reported_by(incarnation.rank, incarnation.descriptor.environment)
    return identity.node or identity.host


def _listed(ranks: Iterable[tuple[int, str, str]]) -> str:
    """ranks: (rank, host, what of it)."""
    words = [f"{rank} ({', '.join(filter(None, (host, what)))})" for rank, host, what in ranks]
    return f"rank{'' if len(words) == 1 else 's'} {', '.join(words)}"


def _since(heard_at: float) -> str:
    if not heard_at:
        return "never heard"
    return f"silent since {datetime.datetime.fromtimestamp(heard_at, datetime.UTC):%Y-%m-%d %H:%M:%S} UTC"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
