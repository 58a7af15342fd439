"""Background: the usual losses, learning rates and odd weights of an attempt, for incidents that are yet to open."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from sentinel.anomaly import Anomaly, Severity
from sentinel.incidents.diagnosis.claim import CALM_STEPS, rose
from sentinel.incidents.diagnosis.evidence import LearningRateJump
from sentinel.incidents.diagnosis.step_facts import StepFacts
from sentinel.kinds import Phase
from sentinel.order.phase import scalar_phase

RECENT_LOSSES, MIN_LOSSES = 16, 8
"""Newest values of a loss whose median and spread are its usual ones when an incident opens, and the fewest that these are
taken from. Fewer: they are chance; more: a loss in fall is held against values long past."""

MAX_ODD = 256
"""Most weights that are remembered to be of one large element, a bound on memory: few weights are."""


class Background(msgspec.Struct, kw_only=True):
    """The usual losses, the learning rates and the odd weights of the attempt so far, updated at each closed step."""

    num_steps: int = 0
    """Steps closed."""
    num_alike: int = 0
    """Of those, steps in which copies of weights were compared and all the same."""
    last_alike: int = -1
    trouble_step: int = -1
    """Newest step with an anomaly graver than info; -1: none."""
    rates: dict[str, float] = {}
    """Learning rates of the step before."""
    highest: dict[str, float] = {}
    """The highest of each so far."""
    jump: LearningRateJump | None = None
    """The newest rise of a learning rate that no schedule explains."""
    loss_scale: float | None = None
    """Of the step before."""
    odd_weights: tuple[str, ...] = ()
    """Weights of which one element is nearly all, at most `MAX_ODD`."""
    finite_gradients: dict[int, int] = {}
    """The newest step -> weight gradients in it that were measured and finite."""
    losses: dict[str, list[float]] = {}
    """The newest values of each loss, of steps without an anomaly in it."""

    def see(self, step: int, anomalies: Iterable[Anomaly], facts: StepFacts) -> None:
        """Take a closed step."""
        self.num_steps += 1
        if facts.num_compared and not facts.num_differing:
            self.num_alike, self.last_alike = self.num_alike + 1, step
        if any(a.event == "onset" and a.severity is not Severity.INFO for a in anomalies):
            self.trouble_step = step
        if facts.odd_weights:
            self.odd_weights = tuple(sorted({*self.odd_weights, *(one.name for one in facts.odd_weights)}))[:MAX_ODD]
        self.loss_scale = facts.loss_scale
        self.finite_gradients = {step: facts.num_gradients}
        moved = {a.tag_name for a in anomalies if a.kind == "scalar"}
        for name, value in facts.results.items():
            if name not in moved and scalar_phase(name) is Phase.LOSS:
                self.losses[name] = [*self.losses.get(name, [])[-RECENT_LOSSES + 1 :], value]

    def see_rates(self, step: int, facts: StepFacts) -> None:
        """Take the learning rates of a closed step."""
        for name, rate in sorted(facts.rates.items()):
            before, highest = self.rates.get(name), self.highest.get(name, 0.0)
            if before is not None and self.num_steps >= CALM_STEPS and rose(before, rate, highest):
                self.jump = LearningRateJump(step=step, index=self.num_steps, name=name, before=before, after=rate)
            self.rates[name], self.highest[name] = rate, max(highest, rate)
