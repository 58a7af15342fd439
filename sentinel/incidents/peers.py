"""Peers: the open incidents of one attempt, and which of them explains an anomaly, by series, module, step or carried harm.

Asks `scope` what belongs together; knows the windows of time. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from sentinel.anomaly import Anomaly, Severity
from sentinel.errors import ConfigError
from sentinel.incidents.open_incident import OpenIncident, age, has_bad_episode, is_same_place
from sentinel.incidents.scope import deviating_rank, is_connected, lineage_of, series_of, subject_of
from sentinel.order.origin import Origin


class IncidentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When incidents close, and how far apart two steps may be and still belong together."""

    quiet_steps: int = 20
    """Steps without a new anomaly, and with no episode of one still going on, after which an incident is resolved."""

    near_steps: int = 2
    """Steps back within which growth counts as going on."""

    episode_quiet_steps: int = 20
    """The engine's setting: 0 says that episodes have no end records, so that none are waited for."""

    rules_without_ends: tuple[str, ...] = ()
    """Names of rules whose own setting is 0: no ends are waited for after their onsets."""

    def __post_init__(self) -> None:
        for name, least in (("quiet_steps", 1), ("near_steps", 1), ("episode_quiet_steps", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"incidents.{name} must be at least {least}, got {getattr(self, name)}")


STILL_RAISED = 0.5
"""Share of the learning rate after its jump from which on it still counts as raised. Smaller: what follows a rate that was
put back joins the jump's incident; larger: what a decaying rate brings is an incident of its own."""


class Peers:
    """Those open incidents that an anomaly may belong to."""

    def __init__(
        self,
        open_ones: Iterable[OpenIncident],
        attempt: int,
        config: IncidentConfig,
        stride: int,
        rates: Mapping[str, float],
    ) -> None:
        """stride: steps from one measured step to the next; quiet and nearness are counted in it.

        rates: the newest learning rates by name.
        """
        self._rates = rates
        self._open = [one for one in open_ones if one.incident.attempt == attempt]
        self._quiet = config.quiet_steps * stride
        self._near = config.near_steps * stride

    def of(self, *natures: str) -> list[OpenIncident]:
        """Return those of these natures, in order of opening."""
        return [one for one in self._open if one.nature in natures]

    def owner(self, anomaly: Anomaly) -> OpenIncident | None:
        """Return the incident that had the series of an anomaly, else one that had its module."""
        series, lineage = series_of(anomaly), lineage_of(anomaly)
        peers = self.of("nonfinite", "finite")
        own = [one for one in peers if series in one.series and self._may_explain(one, anomaly, one.series[series])]
        of_module = [
            one
            for one in peers
            if lineage in one.lineages
            and one.incident.severity.level >= anomaly.severity.level
            and self._may_explain(one, anomaly, one.lineages[lineage])
        ]
        return min(own or of_module, key=age, default=None)

    def of_subject(self, anomaly: Anomaly) -> OpenIncident | None:
        """Return the incident about a rank, or about blindness of a rule, that an anomaly of liveness is about too."""
        subject = subject_of(anomaly)
        mine = [
            one
            for one in self.of("liveness")
            if not set(subject).isdisjoint(one.subject) and self._may_explain(one, anomaly, one.incident.last_step)
        ]
        return min(mine, key=age, default=None)

    def explains(self, one: OpenIncident, sources: Sequence[Anomaly], rest: Sequence[Anomaly], step: int) -> bool:
        """Tell whether an incident that has other anomalies of this very step, `sources`, explains the rest of it."""
        # What its own series do in this very step may be graver than anything they did before.
        if max(one.incident.severity.level, _worst(sources)) < _worst(rest) or not _is_of_same_ranks(one, rest):
            return False
        # What a young incident and its step show at once has one cause, measured or not. Of an old one a path must tell.
        is_young = step - one.incident.opened_step <= self._quiet
        return is_young or is_connected(sources, rest)

    def carrying(self, group: Sequence[Anomaly], step: int) -> OpenIncident | None:
        """Return the incident whose harm the weights carried on to this step."""
        least = max(_worst(group), Severity.WARNING.level)
        near = [
            one
            for one in self.of("nonfinite", "finite")
            if one.incident.severity.level >= least
            and _is_of_same_ranks(one, group)
            and self._is_near(one, step, one.carried_step)
        ]
        return min(near or self._under_a_raised_rate(group), key=age, default=None)

    def beside(self, one: OpenIncident) -> OpenIncident | None:
        """Return the incident above `info` that opened when this one, a note until now, did: both are of one cause."""
        peers = [
            other
            for other in self.of("finite")
            if other is not one
            and other.incident.severity.level > Severity.INFO.level
            and 0 <= other.incident.opened_step - one.incident.opened_step <= self._near
            and _is_of_same_ranks(other, one.causes)
        ]
        return min(peers, key=age, default=None)

    def lasting(self, group: Sequence[Anomaly], step: int, ongoing: Collection[str]) -> OpenIncident | None:
        """Return the young finite incident of which a first cause still shows in this step, before all of `group`."""
        peers = [
            one
            for one in self.of("finite")
            if one.incident.severity.level >= _worst(group)
            and step - one.incident.opened_step <= self._quiet
            and _is_of_same_ranks(one, group)
            and one.goes_on_before(group, step, frozenset(ongoing))
        ]
        return min(peers, key=age, default=None)

    def _under_a_raised_rate(self, group: Sequence[Anomaly]) -> list[OpenIncident]:
        """Return the incidents of a learning rate that jumped and is as high still: every step since is of its making."""
        return [
            one
            for one in self.of("nonfinite", "finite")
            if one.is_by_jump
            and one.evidence.jump is not None
            and self._rates.get(one.evidence.jump.name, 0.0) >= STILL_RAISED * one.evidence.jump.after
            and _is_of_same_ranks(one, group)
        ]

    def recurring(self, causes: list[Anomaly], born: Origin) -> list[OpenIncident]:
        """Return the non-finite incidents whose root was born where these are."""
        return [one for one in self.of("nonfinite") if is_same_place(one, causes, born)]

    def spreading(self, step: int) -> list[OpenIncident]:
        """Return the non-finite incidents whose NaN is in the weights, or whose own episode goes on."""
        return [
            one
            for one in self.of("nonfinite")
            if not one.was_skipped and (self._is_near(one, step, one.last_bad_step) or has_bad_episode(one))
        ]

    def going_on(self, causes: list[Anomaly], step: int, ongoing: Collection[str]) -> list[OpenIncident]:
        """Return the non-finite incidents of which an episode without a record in this step comes before these."""
        return [one for one in self.of("nonfinite") if one.goes_on_before(causes, step, frozenset(ongoing))]

    def is_in_the_weights(self, step: int) -> bool:
        """Tell whether non-finite values of a step or two ago reached the weights: what they bring is not born anew."""
        return any(not one.was_skipped and self._is_near(one, step, one.last_bad_step) for one in self.of("nonfinite"))

    def exploding(self, step: int) -> OpenIncident | None:
        """Return the finite incident that was critical a step or two ago: it may go on to overflow."""
        near = [
            one
            for one in self.of("finite")
            if one.incident.severity is Severity.CRITICAL and self._is_near(one, step, one.incident.last_step)
        ]
        return min(near, key=age, default=None)

    def _may_explain(self, one: OpenIncident, anomaly: Anomaly, last_step: int) -> bool:
        """Tell whether something of one subject, last seen in an incident at `last_step`, may belong to it still.

        Within the quiet window what is no graver does; what is graver only while it goes on.
        """
        is_graver = anomaly.severity.level > one.incident.severity.level
        return abs(anomaly.step - last_step) <= (self._near if is_graver else self._quiet)

    def _is_near(self, one: OpenIncident, step: int, last_step: int) -> bool:
        """Tell whether a step lies in the time of an incident, or a little before or behind it."""
        return one.incident.opened_step - self._near <= step <= last_step + self._near


def _worst(group: Iterable[Anomaly]) -> int:
    return max(one.severity.level for one in group)


def _is_of_same_ranks(one: OpenIncident, group: Iterable[Anomaly]) -> bool:
    """Tell whether the ranks that anomalies say deviate from their peers are those of an incident, or either says none."""
    odd = {rank for a in group if (rank := deviating_rank(a)) is not None}
    return not odd or not one.deviating or not odd.isdisjoint(one.deviating)
