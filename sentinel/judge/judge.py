"""Judge: one closed step in, one judgement out. Pure and deterministic: no clock, no I/O, no thread.

The daemon, a restart and `sentinel replay` all judge through this one class, which is why they agree byte for byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from sentinel.anomaly import Anomaly, Severity, anomaly_id
from sentinel.control.proposal import Proposal, propose
from sentinel.incident import Incident, IncidentAct
from sentinel.incidents.diagnosis.fact_reader import FactReader
from sentinel.incidents.peers import IncidentConfig
from sentinel.incidents.tracker import IncidentTracker
from sentinel.order.causal import sort_key
from sentinel.rules.engine import Engine
from sentinel.rules.watches import row_watch

if TYPE_CHECKING:
    from sentinel.decision import Decision, RankFacts, Tick
    from sentinel.rules.language.schema import Pack
    from sentinel.step_view import StepView

MAX_ANOMALIES_PER_STEP = 1000


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """What judging one step brought."""

    anomalies: tuple[Anomaly, ...] = ()
    """In total order, at most the cap, and one `truncated` record behind them where there were more."""
    incidents: tuple[Incident, ...] = ()
    """The revisions that the step made."""
    proposal: Proposal | None = None
    """What the step's alarms may ask of the trainer."""


class _JudgeState(msgspec.Struct):
    engine: bytes
    tracker: bytes


class Judge:
    """Rules, then order, then incidents. Owns their state.

    max_anomalies: most anomalies of one step, applied after ordering; see `truncate`.
    """

    def __init__(self, pack: Pack, *, max_anomalies: int = MAX_ANOMALIES_PER_STEP) -> None:
        self.max_anomalies = max_anomalies
        self._engine = Engine(pack)
        self._tracker = IncidentTracker(_incident_config(pack))
        self._facts = FactReader()
        self._actions = {rule.name: rule.actions for rule in pack.rules}

    @property
    def open_incidents(self) -> list[Incident]:
        """The newest revision of every open incident, in order of opening."""
        return self._tracker.open_incidents

    @property
    def blindness(self) -> list[str]:
        """What the rules cannot judge in the layout of the last step, in words."""
        return self._engine.blind_groups

    @property
    def failures(self) -> list[str]:
        """Which rules are off because the code of others failed, and why."""
        return self._engine.failures

    @property
    def num_steps_judged(self) -> int:
        """Steps judged, all attempts."""
        return self._engine.num_steps

    @property
    def num_rows_judged(self) -> int:
        """Rows judged, all steps: must equal the rows that ranks sent."""
        return self._engine.num_rows_judged

    @property
    def num_points_judged(self) -> dict[str, int]:
        """Rule -> points it scored so far: rows, tensors x statistics, or scalars."""
        return self._engine.num_points_judged

    def reload(self, pack: Pack) -> None:
        """Judge by other rules from the next step on; rules that did not change keep their state."""
        self._engine.reload(pack)
        self._tracker.config = _incident_config(pack)
        self._actions = {rule.name: rule.actions for rule in pack.rules}

    def judge(self, decision: Decision | None, view: StepView) -> Judgement:
        """Return the judgement on one closed step. Anomaly.time is the record's."""
        found = sorted(self._engine.judge(view), key=sort_key)
        kept = truncate(found, self.max_anomalies, self._engine.num_left_out)
        # An end that is not written still ends its episode: its incident would stay open for ever.
        written = {one.id for one in kept}
        unwritten_ends = [one for one in found if one.event == "end" and one.id not in written]
        incidents = self._tracker.update(
            view.step,
            [*kept, *unwritten_ends],
            attempt=view.attempt,
            time=view.time,
            is_skipped=view.is_skipped,
            settled=self._engine.settled,
            facts=self._facts.read(view, kept, self._engine.ongoing(view.step)),
            stride=view.stride,
        )
        causes = {cause for incident in incidents for cause in incident.first_causes}
        return Judgement(
            anomalies=tuple(kept),
            incidents=tuple(incidents),
            proposal=propose(kept, self._actions, view.places, causes),
        )

    def reconcile(self, written: Mapping[str, Incident], roots: Mapping[str, Anomaly], step: int) -> list[Incident]:
        """Go on from incidents as they were written before a repair, and return the revisions that this makes.

        written: id -> newest revision. roots: first causes of the open ones, by id. step: from which on this judge judged.
        """
        return self._tracker.reconcile(written, roots, step)

    def has_news(self, ranks: Sequence[RankFacts], now: float) -> bool:
        """Return whether a tick of these facts would bring anything; changes nothing."""
        return self._engine.has_news(ranks, now)

    @property
    def stale_ranks(self) -> frozenset[int]:
        """Ranks that are silent, hung or gone, by the rules."""
        return self._engine.stale_ranks

    def judge_tick(self, tick: Tick) -> Judgement:
        """Return the judgement on one moment: who is stale or gone, that the run is over, what people did."""
        found = sorted(self._engine.judge_tick(tick), key=sort_key)
        incidents = self._tracker.update(max(tick.step, 0), found, attempt=tick.attempt, time=tick.time, ended=tick.ended)
        for act in tick.acts:
            incidents += self._tracker.act(act)
        return Judgement(anomalies=tuple(found), incidents=tuple(incidents))

    def why_not(self, act: IncidentAct) -> str:
        """Return why what a person did cannot be taken now; empty: it can."""
        return self._tracker.why_not(act)

    def snapshot(self) -> bytes:
        """Return the whole state; `restore` takes it back exactly."""
        return msgspec.msgpack.encode(_JudgeState(self._engine.snapshot(), self._tracker.snapshot()))

    def restore(self, snapshot: bytes) -> None:
        """Go on where `snapshot` was taken."""
        state = msgspec.msgpack.decode(snapshot, type=_JudgeState)
        self._engine.restore(state.engine)
        self._tracker.restore(state.tracker)


def truncate(anomalies: Sequence[Anomaly], most: int, num_unmade: int = 0) -> list[Anomaly]:
    """Return at most `most` of a step's anomalies, and one `truncated` record that counts the others.

    anomalies: in total order. num_unmade: others of the step of which there is no record; they count as left out. What is
    worse stays before what is milder, what came first before what came later; the order of those that stay is kept. So a
    flood of excursions hides neither a NaN nor the loss.
    """
    if len(anomalies) <= most and not num_unmade:
        return list(anomalies)
    ranked = sorted(range(len(anomalies)), key=lambda at: (-anomalies[at].severity.level, at))
    kept = [anomalies[at] for at in sorted(ranked[:most])]
    first = anomalies[0]
    left_out = [anomalies[at] for at in ranked[most:]]
    # What was not made is of a tensor of which others were.
    alike = [one for one in anomalies if one.event == "onset"] if num_unmade else []
    worst = max((one.severity for one in (*left_out, *alike)), key=lambda severity: severity.level, default=Severity.INFO)
    note = Anomaly(
        id=anomaly_id(first.run, first.attempt, first.step, None, None, "", "truncated", "truncated"),
        run=first.run,
        attempt=first.attempt,
        rank=None,
        ranks=tuple(sorted({one.rank for one in left_out if one.rank is not None})[:64]),
        step=first.step,
        micro_step=None,
        pp_stage=0,
        vpp_stage=0,
        call_id=None,
        tag_name="",
        kind="health",
        statistic="",
        rule="truncated",
        detector="",
        severity=worst,
        value=None,
        message=f"{len(left_out) + num_unmade} more anomalies of step {first.step} were not written: at most {most} are"
        + (f", and of one tensor the first ranks and micro-steps, at most {row_watch.MAX_PLACES}" if num_unmade else ""),
        time=max(one.time for one in anomalies),
        event="truncated",
        count=len(left_out) + num_unmade,
    )
    return [*kept, note]


def _incident_config(pack: Pack) -> IncidentConfig:
    # A rule whose episodes have no end records must not keep its incidents open for ever.
    return IncidentConfig(rules_without_ends=tuple(rule.name for rule in pack.rules if rule.episode_quiet_steps == 0))
