"""What people should know of a run beside its anomalies: what its ranks said of themselves, and whether a loss is logged.

Not judged and not journalled with the steps: a run that is judged again has the same notes in the end.
"""

from __future__ import annotations

import msgspec

from sentinel.messages import is_loss
from sentinel.step_view import StepView
from sentinel.store.journal import Journal

MAX_NOTES = 64
"""Notes kept of a run; a bound on memory and on the length of the page."""
MAX_RANKS = 16
NO_LOSS = "no_loss"


class RunNote(msgspec.Struct, kw_only=True):
    """One thing that ranks of a run said."""

    code: str
    """As `messages.Health.code`."""
    message: str
    site: str = ""
    ranks: list[int] = []
    """Those that said it, the first 16."""
    num_times: int = 0
    """As counted by the rank that met it most often."""
    first_step: int = -1
    last_step: int = -1


class Notes(msgspec.Struct, kw_only=True):
    """The notes of the newest attempt of a run."""

    attempt: int = -1
    has_loss: bool = False
    found: dict[str, RunNote] = {}
    """Code and site -> note, in the order in which they came."""

    @classmethod
    def recalled(cls, journal: Journal) -> Notes:
        """Return the notes as they were written down last."""
        body = journal.values.get("notes")
        try:
            return msgspec.json.decode(body or "{}", type=cls)
        except msgspec.DecodeError:
            return cls()  # Of another version: the ranks say it again.

    def take(self, view: StepView) -> None:
        """Take in what was said in one step."""
        if view.attempt > self.attempt:
            self.attempt, self.has_loss, self.found = view.attempt, False, {}
        for rank, health in view.health:
            self._add(rank, RunNote(code=health.code, message=health.message, site=health.site), health.count, view.step)
        self._see_loss(view)

    def _see_loss(self, view: StepView) -> None:
        if self.has_loss:
            return
        if any(is_loss(name) for name in view.scalars):
            self.has_loss = True
            self.found.pop(NO_LOSS, None)
        elif view.scalars or any(part.end_step is not None and not part.end_step.is_partial for part in view.parts):
            message = (
                "no loss was logged so far: rules about the loss are blind. Behind each step, or every few: "
                "monitor.log(loss=loss), on any one rank"
            )
            self._add(-1, RunNote(code=NO_LOSS, message=message), 1, view.step)

    def _add(self, rank: int, note: RunNote, count: int, step: int) -> None:
        known = self.found.get(key := f"{note.code}/{note.site}" if note.site else note.code)
        if known is None:
            if len(self.found) >= MAX_NOTES:
                return
            known = self.found[key] = note
            note.first_step = step
        known.last_step, known.message = step, note.message
        known.num_times = max(known.num_times, count)
        if rank >= 0 and rank not in known.ranks and len(known.ranks) < MAX_RANKS:
            known.ranks.append(rank)

    def write(self, journal: Journal) -> None:
        """Write down what changed since: `sentinel status` says it. A note that only goes on is no change."""
        kept = {
            key: msgspec.structs.replace(one, last_step=one.last_step if one.num_times > 1 else one.first_step)
            for key, one in self.found.items()
        }
        body = msgspec.json.encode(msgspec.structs.replace(self, found=kept)).decode()
        if body != (journal.values.get("notes") or ""):
            journal.values.put("notes", body)


def note_lines(notes: Notes, most: int = 8) -> list[str]:
    """Return the notes in words, a line each, first those that came first."""
    lines = []
    for one in list(notes.found.values())[:most]:
        times = f", {one.num_times} times" if one.num_times > 1 else ""
        where = f" (rank {', '.join(map(str, one.ranks))}, from step {one.first_step} on{times})" if one.ranks else ""
        lines.append(f"{one.code}: {one.message}{where}")
    if len(notes.found) > most:
        lines.append(f"and {len(notes.found) - most} more")
    return lines
