"""What depended on time, as the journal keeps it and a replay repeats it: that a step is closed, that a rank is stale."""

from __future__ import annotations

import msgspec

from sentinel.incident import IncidentAct
from sentinel.run_end import RankEnd, RunEnd


class RankPart(msgspec.Struct, frozen=True, kw_only=True):
    """What of one rank is in a closed step: the frames of one incarnation up to a number."""

    rank: int
    incarnation: bytes = msgspec.field(name="life")
    num_rows: int
    last_seq: int
    """Frames of the step with a number above it came too late."""
    layout_id: int
    """The descriptor that its rows are read with."""
    generation: int = 0
    """+1 each time the incarnation went back to a step that it had ended."""
    is_ended: bool = True
    """Its end_step came; else the rows are what came before the step was late."""
    num_lost: int = 0
    """Rows of the step that it measured and that never came."""
    num_finite_lost: int = 0
    """Of them, those that are known to have held no NaN and no infinity."""
    lost_to: str = ""
    """Why: `EndStep.lost_to`, or `frames` where frames were damaged or missing."""


class DescribedRank(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that is not in the step, but whose tensors are known: the names of the others depend on it."""

    rank: int
    incarnation: bytes = msgspec.field(name="life")
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
    described: tuple[DescribedRank, ...] = ()
    """Changes since the last decision of the attempt, of ranks that are not in this step."""
    blindness: dict[str, int] = {}
    """What was lost or came too late since the last decision: `late_rows`, `late_frames`, `unplaced_rows`, `lost_health`."""
    is_catching_up: bool = False
    """Of a step that lost rows: the next one had been heard already."""


class RankFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Where one rank stands: all that a judge of liveness may know of it."""

    rank: int
    incarnation: bytes = msgspec.field(name="life")
    pp_stage: int = 0
    received_at: float = msgspec.field(name="heard_at")
    """Seconds on the clock of `Tick.now`: when anything of it was heard last."""
    moved_at: float
    """The same: when its step, call or activity changed last."""
    time: float = 0.0
    """Seconds since the epoch, by its own clock, of its newest record."""
    is_live: bool = True
    """It was heard while it was watched, not only from what lay there when the daemon came."""
    step: int = 0
    call_id: int = 0
    num_calls: int = 0
    """Calls of its last whole step; 0: not known."""
    micro_step: int = -1
    activity: str = "train"
    module: str = ""
    phase: str = ""
    is_waiting: int = -1
    """1: inside a collective, 2: at the border of its pipeline stage; 0: elsewhere; -1: not known."""
    has_stepped: bool = True
    left: str = ""
    """Why it said bye; empty: it has not."""
    is_stopped: bool = False
    """The table of processes says that it lives, and is stopped: by SIGSTOP, Ctrl-Z, or a debugger."""
    end: RankEnd | None = None
    """That it is gone, and how; None: it is not, or nobody knows."""
    ended_at: float = 0.0
    """Seconds on the clock of `Tick.now`: when that became known."""
    process_state: str = ""
    """The kernel's letter of its process while it is there: R, S, D, T (stopped), t (stopped by who traces it); empty: the
    process is not in our table."""
    pid: int = 0
    host: str = ""
    """Which process that is; 0 and empty: not known."""
    waiting_at: float | None = None
    """Seconds on the clock of `Tick.now`: since when it waits for others without pause; None: not known, or it does not."""
    world_size: int = 0
    """Ranks of its run; 0: not known."""
    site: str = ""
    """The line of the user's code at which it stands, as it says itself; empty: it moves, or did not say."""


class Tick(msgspec.Struct, frozen=True, kw_only=True):
    """A moment at which a rank became stale or was gone, or no longer is, a run ended, or a person acted."""

    seq: int
    run: str
    attempt: int
    step: int
    """The newest step of the attempt that is closed; -1: none."""
    now: float
    """Seconds that the daemon has watched since it began."""
    ranks: tuple[RankFacts, ...]
    """Of the attempt, in rising order of rank."""
    time: float = 0.0
    """Seconds since the epoch by the newest record heard."""
    pack_hash: str = ""
    acts: tuple[IncidentAct, ...] = ()
    """What people did about incidents."""
    ended: RunEnd | None = None
    """The attempt is over with this tick; None: it is not."""


STEP, TICK = "step", "tick"
"""Kinds of decision in the journal."""

_STEP_DECODER = msgspec.msgpack.Decoder(Decision)
_TICK_DECODER = msgspec.msgpack.Decoder(Tick)


def decode_decision(kind: str, body: bytes) -> Decision | Tick:
    """Return a decision as the journal has it."""
    return _TICK_DECODER.decode(body) if kind == TICK else _STEP_DECODER.decode(body)


def encode_decision(decision: Decision | Tick) -> tuple[int, str, bytes]:
    """Return (seq, kind, body) for the journal."""
    return decision.seq, TICK if isinstance(decision, Tick) else STEP, msgspec.msgpack.encode(decision)
