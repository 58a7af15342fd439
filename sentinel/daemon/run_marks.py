"""RunMarks: what happened to a run beside its values: restarts, checkpoints, other rules, commands; each at its step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from sentinel.command import (
    ChangeConfig,
    DescribeStructure,
    DisableMonitoring,
    DumpTensors,
    EnableMonitoring,
    RequestAction,
    WithdrawCommand,
)
from sentinel.control.command_status import CommandStatus
from sentinel.messages import Heartbeat
from sentinel.step_view import StepView
from sentinel.store.journal import Journal

MARKS_FACT = "marks"
"""Name under which the journal keeps them."""
MOST_KEPT = 500
"""Most that are kept; the oldest go first."""
MOST_TOLD = 1000


class RunMark(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened."""

    kind: str
    """`restart`, `checkpoint`, `rules` or `command`."""
    attempt: int
    step: int
    label: str
    """In words."""
    time: float = 0.0
    """Seconds since the epoch; 0: not known."""


class _Kept(msgspec.Struct, kw_only=True):
    seq: int = 0
    """The last decision that was looked at when this was written."""
    attempt: int | None = None
    pack_hash: str = ""
    marks: list[RunMark] = []


class RunMarks:
    """Written by the loop; what it hands out is new each time. What was known is known again after a restart."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        text = journal.values.get(MARKS_FACT)
        self._kept = msgspec.json.decode(text, type=_Kept) if text else _Kept()
        self._is_written = True
        self._marks: tuple[RunMark, ...] = tuple(self._kept.marks)

    def take_step(self, view: StepView) -> None:
        """Take in that a step was judged: of a new attempt, or by other rules than the one before it."""
        decision, kept = view.decision, self._kept
        if decision is None or decision.seq <= kept.seq:
            return
        if kept.attempt is None:
            self._is_written = False
        elif view.attempt > kept.attempt:
            resumed = [part.descriptor.resumed_step for part in view.parts if part.descriptor.resumed_step >= 0]
            words = f", with the state of a checkpoint behind step {max(resumed) - 1}" if resumed else ""
            self._add(_restart(view.attempt, view.step, view.time, words))
        if kept.pack_hash and decision.pack_hash != kept.pack_hash:
            label = f"judged by other rules from here on: pack {decision.pack_hash}"
            self._add(RunMark(kind="rules", attempt=view.attempt, step=view.step, time=view.time, label=label))
        kept.seq, kept.attempt, kept.pack_hash = decision.seq, view.attempt, decision.pack_hash

    def take_heartbeat(self, beat: Heartbeat, attempt: int, time: float) -> None:
        """Take in that a rank writes a checkpoint. time: by its own clock, seconds since the epoch."""
        if beat.activity != "checkpoint":
            return
        if any(one.kind == "checkpoint" and (one.attempt, one.step) == (attempt, beat.step) for one in self._marks):
            return
        label = f"a checkpoint is written at step {beat.step}"
        self._add(RunMark(kind="checkpoint", attempt=attempt, step=beat.step, time=time, label=label))

    def _add(self, mark: RunMark) -> None:
        self._marks = (*self._marks[-MOST_KEPT + 1 :], mark)
        self._is_written = False

    def keep(self) -> None:
        """Write down what is new, once a batch of steps."""
        if not self._is_written:
            self._kept.marks = list(self._marks)
            self._journal.values.put(MARKS_FACT, msgspec.json.encode(self._kept).decode())
            self._is_written = True

    def told(self, statuses: Iterable[CommandStatus], attempts: Iterable[tuple[int, int]]) -> list[RunMark]:
        """Return all that is known in the order of attempts and steps, at most `MOST_TOLD`, the newest. For any thread.

        statuses: of the run's commands. attempts: (attempt, first step) as a history has them, rising: it may know of more
        than a journal that is younger.
        """
        kept = self._marks
        known = {one.attempt for one in kept if one.kind == "restart"}
        found = [*kept, *_of_commands(statuses)]
        found += [_restart(attempt, step) for attempt, step in list(attempts)[1:] if attempt not in known]
        return sorted(found, key=lambda one: (one.step, one.attempt))[-MOST_TOLD:]


def _restart(attempt: int, step: int, time: float = 0.0, words: str = "") -> RunMark:
    return RunMark(kind="restart", attempt=attempt, step=step, time=time, label=f"attempt {attempt} begins{words}")


def _of_commands(statuses: Iterable[CommandStatus]) -> list[RunMark]:
    """Return a mark for each command that names a step, with what became of it."""
    found = []
    for one in statuses:
        command = one.command
        if isinstance(command, WithdrawCommand):
            continue
        why = f" ({one.reason})" if one.reason else ""
        label = f"{_ordered(command)}: {one.state}{why}"
        found.append(RunMark(kind="command", attempt=command.attempt, step=command.at_step, label=label, time=one.issued))
    return found


def _ordered(command: Any) -> str:
    match command:
        case EnableMonitoring(kinds=kinds):
            return f"measure {', '.join(kinds)}"
        case DisableMonitoring(kinds=kinds):
            return f"stop measuring {', '.join(kinds) or 'what was asked for'}"
        case ChangeConfig(changed=changed):
            return f"the config changes {', '.join(changed) or 'in its text alone'}"
        case DumpTensors(kinds=kinds):
            return f"dump {', '.join(kinds)}"
        case DescribeStructure():
            return "write down the structure"
        case RequestAction(action=action):
            return {"checkpoint": "a checkpoint is asked for", "skip_batches": "batches are to be skipped"}.get(
                action, "a pause is asked for"
            )
    return type(command).__name__
