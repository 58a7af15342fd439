"""LivenessDetector: the methods that the engine calls on a detector that judges ranks by the time that passes; StaleRank."""

from __future__ import annotations

import math
from typing import ClassVar, Protocol, runtime_checkable

import msgspec
import numpy as np

from sentinel.detect.declaration import Declaration
from sentinel.detect.detector import Scores, State
from sentinel.errors import ConfigError

Facts = dict[str, np.ndarray]
"""Named columns, one value a rank of the newest attempt:

- heard_at, moved_at: seconds on the clock of `now`, when the newest frame or heartbeat of the rank came, and when its (step,
  call_id) or its activity changed last. is_live: bool, its frames or heartbeats came while it was watched, and not only from
  a recording.
- step, call_id: where it stands. num_calls: calls of its last whole step, 0: not known. has_stepped: bool, it has ended a
  step. activity: `init`, `train`, `eval`, `checkpoint`, `pause`. pp_stage. left: why it said bye, empty while it has not.
- has_died: bool, it is gone otherwise than in order, which another rule reports. May be left out: nobody is.
- is_stopped: bool, its process is there and stopped, as the operating system of its machine says. May be left out: nobody
  is.
- waits_s: how long each has waited for others without pause, 0.0 where it does not or where not every rank of the run was
  read. May be left out: nobody waits.
- is_waiting: int, 1 inside a collective, 2 at the border of its pipeline stage, 0 elsewhere, -1 not known.
"""

RECENT_STEPS = 15
FEW_RANKS = 8
"""Up to so many a loop is quicker than arrays are."""
QUIET_S = 5.0
"""Seconds without a heartbeat after which a rank may be gone: no rank that waits is blamed until that is clear. Five
heartbeats: fewer are lost on a busy machine, more delay the name of the rank that hangs.

Nor is anybody so soon after a rank moved or left: those it held up may go on, and their next heartbeat will tell.
"""
TOGETHER_S = 2.5
"""Ranks whose last heartbeats are within so many seconds fell silent together: heartbeats are a second apart. Smaller: the
heartbeat's own phase parts ranks of one host; larger: those that die later are named as well."""


@runtime_checkable
class LivenessDetector(Protocol):
    """Judges all ranks at one moment, which is handed in: no clock, no I/O. Constant memory a rank.

    It learns from closed steps alone, so that a moment can be judged any number of times, and again on a replay.
    """

    declares: ClassVar[Declaration]
    """What it is asked for and handed, and what its anomalies mean."""

    def state(self, num_ranks: int) -> State:
        """Return the state of ranks that have ended no step."""
        ...

    def score_at(self, facts: Facts, now: float, state: State) -> Scores:
        """Return the score of each rank at `now`, [ranks]; changes nothing. A rank that only waits for another scores 0.

        Baseline: the limit in seconds. Evidence: `reason` (text), `seconds`, and bools: `is_sure`; `is_waiting`; `is_idle`:
        nobody waits inside a step for the rank, so that it may be quiet on purpose.
        """
        ...

    def learn_step(self, step_s: np.ndarray, pause_s: np.ndarray, state: State) -> None:
        """Take in a closed step, in place: [ranks] its duration, and the time since the rank's last one; NaN: not known."""
        ...


class StaleRank(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rank that fell silent, hangs, or left the others waiting. Those that wait for it are not accused."""

    declares: ClassVar[Declaration] = Declaration(
        over="moments",
        summary="a rank that fell silent, that hangs while others wait for it, or that left them waiting",
        statistics=("silent_s", "unheard_s", "stopped_s", "idle_s"),
    )

    stale_after_s: float = 30.0
    """Seconds without any frame, while it trains, after which a rank's process is taken for gone or stopped."""
    quiet_after_s: float = 120.0
    """The same while it starts, evaluates or writes a checkpoint: heartbeats may be held up then."""
    stopped_after_s: float = 2.5
    """The same of a rank whose process is stopped, as the operating system of its machine says: heartbeats are one second
    apart."""
    hang_after_s: float = 30.0
    """Least seconds without progress inside a step, heartbeats coming, that are a hang."""
    hang_factor: float = 10.0
    """Usual step times without progress that are a hang, where they are more than `hang_after_s`."""
    between_after_s: float = 600.0
    """The same between two steps, while nobody waits inside one: loops evaluate and save without saying so."""
    init_after_s: float = 3600.0
    """The same until a rank has ended its first step: it loads, compiles."""
    deadlock_after_s: float = 120.0
    """The same until a rank has ended its first step, while every rank of the run waits for another: nobody loads, nobody
    compiles."""
    eval_after_s: float = 3600.0
    """The same during an evaluation, as the rank says."""
    checkpoint_after_s: float = 3600.0
    """The same during a checkpoint."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")

    def state(self, num_ranks: int) -> State:
        """Return 136 bytes a rank."""
        return {
            "recent_s": np.full((num_ranks, RECENT_STEPS), np.nan),
            "num_steps": np.zeros(num_ranks, dtype=np.int64),
            "longest_pause_s": np.zeros(num_ranks),
        }

    def learn_step(self, step_s: np.ndarray, pause_s: np.ndarray, state: State) -> None:
        """Keep the newest durations, and the longest pause between two steps, which fades."""
        recent, num_steps, longest = state["recent_s"], state["num_steps"], state["longest_pause_s"]
        if len(step_s) <= FEW_RANKS:
            for at, (step, pause) in enumerate(zip(step_s.tolist(), pause_s.tolist(), strict=True)):
                if math.isfinite(step):
                    recent[at, num_steps[at] % RECENT_STEPS] = step
                    num_steps[at] += 1
                if math.isfinite(pause):
                    longest[at] = max(0.999 * float(longest[at]), pause)
            return
        known = np.flatnonzero(np.isfinite(step_s))
        recent[known, num_steps[known] % RECENT_STEPS] = step_s[known]
        num_steps[known] += 1
        pauses = np.isfinite(pause_s)
        longest[pauses] = np.maximum(0.999 * longest[pauses], pause_s[pauses])

    def score_at(self, facts: Facts, now: float, state: State) -> Scores:
        """Score seconds / limit of the ranks to blame, 0.0 of all others."""
        silence, idle = now - facts["received_at"], now - facts["moved_at"]
        has_died = facts.get("has_died", np.zeros(len(idle), dtype=bool))
        has_left = (facts["left"] != "") | has_died
        is_training = facts["activity"] == "train"
        may_be_silent_s = np.where(is_training, self.stale_after_s, self.quiet_after_s)
        is_here = bool((facts["is_live"] & ~has_left).any())
        is_stopped = ~has_left & facts.get("is_stopped", np.zeros(len(idle), dtype=bool)) & is_here
        is_stopped &= silence >= self.stopped_after_s
        is_silent = ~has_left & (silence >= may_be_silent_s) & is_here
        limit, is_inside = self._limits(facts, idle, state)
        is_stuck = ~has_left & ~is_silent & (idle >= limit)
        blamed, reason, seconds = np.zeros(len(idle), dtype=bool), "", idle
        if is_stopped.any() and not (is_silent & ~is_stopped).any():
            # Those that wait for it are not accused, nor is it once more when it has been silent for longer.
            blamed, reason = is_stopped, "stopped"
            seconds, limit = silence, np.full(len(idle), self.stopped_after_s)
        elif is_silent.any():
            slack = np.minimum(TOGETHER_S, 0.25 * may_be_silent_s)
            blamed, reason = ~has_left & (silence >= may_be_silent_s - slack), "silent"
            seconds, limit = silence, may_be_silent_s
        elif has_died.any():
            pass  # Who waits for a rank that is gone hangs, and leaves, because of it.
        elif is_stuck.any() and not _may_go_on(facts["step"], is_stuck, idle, np.where(has_left, 0.0, silence)):
            wait_for_each_other = _wait_for_each_other(facts, ~has_left)
            # A step that a rank left lies at most one behind that in which the others wait.
            first = facts["step"][is_stuck].min()
            left_now = has_left & (facts["step"] >= first - 1)
            elsewhere = ~has_left & ~is_training & ~is_stuck & (facts["step"] <= first + 1)
            if left_now.any():
                if (is_stuck & is_inside).any():
                    blamed, reason = left_now, "left"
                    seconds = np.full(len(idle), idle[is_stuck].max())
                    limit = np.full(len(idle), limit[is_stuck].min())
            elif wait_for_each_other:
                # Who has come least far waits as well: nobody hangs by itself.
                if is_stuck[~has_left].all():
                    blamed, reason = ~has_left, "hung"
            elif not elsewhere.any():
                behind = _behind(facts, ~has_left, is_inside)
                if is_stuck[behind].all():
                    blamed[behind], reason = True, "hung"
        is_inside |= blamed & _wait_for_each_other(facts, ~has_left)
        score = np.where(blamed, np.maximum(seconds / limit, 1.0), 0.0)
        waiting = ~has_left & ~blamed & ~is_silent & (idle >= 0.5 * self.hang_after_s) & blamed.any()
        return Scores.of(
            score, limit, seconds=seconds, reason=np.where(blamed, reason, ""), is_waiting=waiting,
            # Somebody stops a whole run on purpose: Ctrl-Z, a scheduler that suspends it.
            is_idle=blamed & ((reason == "hung") & ~(is_stuck & is_inside).any() | (is_stopped | has_left).all()),
            is_sure=blamed & (reason != "hung" or int(blamed.sum()) == 1),
        )  # fmt: skip

    def _limits(self, facts: Facts, idle: np.ndarray, state: State) -> tuple[np.ndarray, np.ndarray]:
        """Return [ranks] how long each may stand still, and which of them stand inside a step."""
        recent = state["recent_s"]
        known = recent[np.isfinite(recent).any(axis=1)]
        usual_s = float(np.median(_medians(known))) if len(known) else np.nan
        inside_s = max(self.hang_after_s, self.hang_factor * usual_s) if len(known) else self.init_after_s
        pause_s = 2.0 * state["longest_pause_s"]
        calls, usual_calls = facts["call_id"], facts["num_calls"]
        has_stepped, is_training = facts["has_stepped"], facts["activity"] == "train"
        is_inside = is_training & (calls > 0) & ((usual_calls == 0) | (calls < usual_calls))
        is_inside |= is_training & (facts["is_waiting"] == 1)
        is_waited_for = bool((is_inside & has_stepped & (idle >= inside_s) & (facts["left"] == "")).any())
        between_s = np.maximum(inside_s if is_waited_for else max(inside_s, self.between_after_s), pause_s)
        limit = np.where(is_inside, inside_s, between_s)
        limit = np.where(has_stepped, limit, self.init_after_s)
        for activity, after_s in (
            ("init", self.init_after_s), ("eval", self.eval_after_s), ("checkpoint", self.checkpoint_after_s),
            ("pause", np.inf),  # Whoever asked for it said when it is over.
        ):  # fmt: skip
            limit = np.where(facts["activity"] == activity, after_s, limit)
        is_here = facts["left"] == ""
        waits_s = facts.get("waits_s", np.zeros(len(idle)))
        if is_here.any() and (waits_s[is_here] >= self.deadlock_after_s).all():
            limit = np.where(has_stepped, limit, np.minimum(limit, self.deadlock_after_s))
        return limit, is_inside


def _medians(rows: np.ndarray) -> np.ndarray:
    """Return the median of each row beside its NaN; each has a number. `np.nanmedian` takes ten times as long."""
    ordered, count, at = np.sort(rows, axis=1), np.isfinite(rows).sum(axis=1), np.arange(len(rows))
    return np.asarray((ordered[at, (count - 1) // 2] + ordered[at, count // 2]) / 2.0)


def _may_go_on(step: np.ndarray, is_stuck: np.ndarray, idle: np.ndarray, silence: np.ndarray) -> bool:
    """Return whether those who stand still may do so no more, or for a rank that has not shown itself yet.

    A rank that runs two steps ahead waits for nobody: that it moves excuses none.
    """
    has_moved = (idle < QUIET_S) & (step <= step[is_stuck].min() + 1)
    return bool((has_moved | (silence >= QUIET_S)).any())


def _wait_for_each_other(facts: Facts, is_here: np.ndarray) -> bool:
    """Return whether every rank of the run is inside a collective, so that nobody works for whom the others could wait."""
    waits_s = facts.get("waits_s", np.zeros(len(is_here)))
    return bool(is_here.sum() > 1 and (waits_s[is_here] > 0.0).all())


def _behind(facts: Facts, is_here: np.ndarray, is_inside: np.ndarray) -> np.ndarray:
    """Return the positions of the ranks that have come least far: one, or several that came equally far.

    Ranks of one pipeline stage make the same calls, so that the least call_id is behind. Between stages it need not be:
    there a rank in the midst of its work comes before one that waits for its neighbour, then the smaller share of its usual
    calls.
    """
    step, call, stage = facts["step"], facts["call_id"], facts["pp_stage"]
    pool = np.flatnonzero(is_here & (step == step[is_here].min()))
    lagging = []
    for one in np.unique(stage[pool]):
        peers, own = is_here & (stage == one), pool[stage[pool] == one]
        own = own[call[own] == call[own].min()]
        if ((step[peers] > step[own[0]]) | ((step[peers] == step[own[0]]) & (call[peers] > call[own[0]]))).any():
            lagging.append(own)
    if lagging:
        pool = np.concatenate(lagging)
    is_waiting = facts["is_waiting"][pool] > 0
    if is_waiting.any() and not is_waiting.all():
        pool = pool[~is_waiting]
    if len(np.unique(stage[pool])) > 1 and is_inside[pool].any():
        pool = pool[is_inside[pool]]
        share = call[pool] / np.maximum(facts["num_calls"][pool], 1)
        pool = pool[share <= share.min() + 1e-9]
    return pool
