"""Rule, Match and Pack: a rule pack as data."""

from __future__ import annotations

import fnmatch
import hashlib
import re
from functools import lru_cache
from typing import Any

import msgspec

from sentinel.aggregate import Aggregate
from sentinel.anomaly import Severity
from sentinel.kinds import WATCHED_KINDS
from sentinel.record import STATISTICS
from sentinel.reference import Reference

ACTIONS: tuple[str, ...] = ("notify", "escalate", "dump", "webhook")
"""What a rule may ask for: tell people; ask the trainer for more monitoring, or for raw tensors; call the rule's own URL."""

VALUE = "value"
"""The statistic of a scalar: the number itself."""

RULE_STATISTICS: tuple[str, ...] = (*STATISTICS, VALUE)
RULE_KINDS: tuple[str, ...] = tuple(kind.label for kind in WATCHED_KINDS)


class Match(msgspec.Struct, frozen=True, kw_only=True):
    """Which series a rule watches."""

    kind: tuple[str, ...]
    """Kinds of record, see `Kind`; `scalar` for logged values. All kinds when a pack names none."""
    name: tuple[str, ...] = ("*",)
    """Globs of canonical names, any of which must match the whole name; `*` crosses dots: `layers.*.mlp.*`."""
    statistic: tuple[str, ...] = ()
    """Statistics; empty: the detector's own choice."""
    rank: tuple[int, ...] = ()
    """Ranks whose own rows are judged, for rules that judge single ranks; empty: all."""
    aggregate: tuple[Aggregate, ...] = ()
    """Groups of tensors, each merged to one series; empty: each tensor is one."""

    def takes_name(self, name: str) -> bool:
        """Whether any glob matches the whole of `name`: `layers.1.*` takes `layers.1.mlp`, never `layers.10.mlp`."""
        return any(_compiled(glob).match(name) is not None for glob in self.name)


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a pack: what is watched, by which detector, how severe it is, and what follows."""

    name: str
    detector: str
    match: Match
    args: dict[str, Any] = {}
    """Arguments of the detector; its fields (`sentinel rules list --json` shows them)."""
    severity: Severity = Severity.WARNING
    actions: tuple[str, ...] = ("notify",)
    webhook: str = ""
    """URL called with the incident when `actions` holds `webhook`."""
    episode_quiet_steps: int = 20
    """Steps without an anomaly that end an episode; 0: every anomalous step is its own."""
    enabled: bool = True
    reference: Reference | None = None
    """Reference runs on the same data, read when the pack was: a scalar is judged beside them too."""
    description: str = ""
    """For people."""
    source: str = ""
    """FILE:LINE it was read from; not part of the hash."""
    match_source: str = ""
    """FILE:LINE its match was read from, which may be another pack's; empty: it has none. Not part of the hash."""

    def unlocated(self) -> dict[str, Any]:
        """Return its fields as plain values, without where they were read from."""
        fields: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(self, source=""))
        del fields["match_source"]
        return fields

    def statistics(self, defaults: tuple[str, ...]) -> tuple[str, ...]:
        """Return the statistics watched: those named, else `value` for scalars, else the detector's `defaults`."""
        if self.match.statistic:
            return self.match.statistic
        return (VALUE,) if self.match.kind == ("scalar",) else defaults


class Pack(msgspec.Struct, frozen=True, kw_only=True):
    """All rules that are on, defaults merged in, in order."""

    rules: tuple[Rule, ...]

    @property
    def pack_hash(self) -> str:
        """16 hex digits: the same rules in the same order have the same hash, wherever they were read from."""
        bare = [rule.unlocated() for rule in self.rules]
        return hashlib.blake2b(msgspec.json.encode(bare, order="sorted"), digest_size=8).hexdigest()

    def rule(self, name: str) -> Rule:
        """Return the rule called `name`; KeyError when there is none."""
        for rule in self.rules:
            if rule.name == name:
                return rule
        raise KeyError(name)


@lru_cache(maxsize=4096)
def _compiled(glob: str) -> re.Pattern[str]:
    return re.compile(fnmatch.translate(glob))
