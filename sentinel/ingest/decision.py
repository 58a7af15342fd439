"""That a step is closed, and with what: what the journal keeps, and a replay makes the same step from."""

from __future__ import annotations

import msgspec


class RankPart(msgspec.Struct, frozen=True, kw_only=True):
    """What of one rank is in a closed step: the frames of one life up to a number."""

    rank: int
    life: bytes
    num_rows: int
    last_seq: int
    """Frames of the step with a number above it came too late."""
    layout_id: int
    """The descriptor that its rows are read with."""
    generation: int = 0
    """+1 each time the life went back to a step that it had ended."""
    is_ended: bool = True
    """Its end_step came; else the rows are what came before the step was late."""


class Described(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that is not in the step, but whose tensors are known: the names of the others depend on it."""

    rank: int
    life: bytes
    layout_id: int


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """That a step is closed, and with what. Journalled before the step is judged; replayed, it makes the same StepView."""

    seq: int
    """From 1, +1 a decision of the run."""
    run: str
    attempt: int
    step: int
    ranks: tuple[RankPart, ...]
    """In rising order of rank."""
    missing: dict[int, str] = {}
    """Rank -> why it is not whole: `never started`, `ended`, `late`, `unfinished` (rows, but not its end of the step)."""
    why: str = "complete"
    """`complete`, `late_steps`, `late_time`, `finished` (the run is over), `superseded` (a newer attempt), `crowded`."""
    time: float = 0.0
    """Seconds since the epoch by the newest record included."""
    pack_hash: str = ""
    described: tuple[Described, ...] = ()
    """Changes since the last decision of the attempt, of ranks that are not in this step."""
    blindness: dict[str, int] = {}
    """What was lost or came too late since the last decision: `late_rows`, `late_frames`, `unplaced_rows`, `lost_health`."""
