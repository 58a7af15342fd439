"""Decisions that depended on the time at which frames came: a step is closed (`Decision`), ranks are judged (`Tick`).

The journal keeps each before it is judged, and a replay reads them instead of a clock.
"""

from __future__ import annotations

import msgspec

from sentinel.incident import IncidentAct
from sentinel.run_end import RankEnd, RunEnd


class RankPart(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part of a closed step: the frames of one incarnation up to a sequence number."""

    rank: int
    incarnation: bytes = msgspec.field(name="life")
    num_rows: int
    last_seq: int
    """Sequence number of the last frame included; frames of the step with a higher one came too late."""
    layout_id: int
    """Layout id of the descriptor by which its rows are read."""
    generation: int = 0
    """+1 each time the incarnation went back to a step that it had ended."""
    is_ended: bool = True
    """The rank's end_step came; False: the rows are those that came before the step was closed without it."""
    num_lost: int = 0
    """Rows of the step that it measured and that never came."""
    num_finite_lost: int = 0
    """Of `num_lost`, the rows that are known to have held no NaN and no infinity."""
    lost_to: str = ""
    """Why rows were lost: `EndStep.lost_to`, or `frames` where frames were damaged or missing."""


class DescribedRank(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that is not in the step, but whose tensors are known: the names of the others depend on it."""

    rank: int
    incarnation: bytes = msgspec.field(name="life")
    layout_id: int


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """That a step is closed, and which frames it includes. From it and the spools a replay makes the same StepView."""

    seq: int
    """Number of the decision in its run, from 1 without gaps."""
    run: str
    attempt: int
    step: int
    ranks: tuple[RankPart, ...]
    """In rising order of rank."""
    missing: dict[int, str] = {}
    """Rank -> why its part is missing or incomplete: `never started`, `ended`, `late`, `unfinished` (rows, no end_step)."""
    why: str = "complete"
    """`complete`, `late_steps`, `late_time`, `finished` (the run is over), `superseded` (a newer attempt), `crowded`."""
    time: float = 0.0
    """Time of the newest record included, by its rank's clock, in seconds since the epoch."""
    pack_hash: str = ""
    described: tuple[DescribedRank, ...] = ()
    """Ranks that are not in this step and whose descriptor changed since the attempt's last decision."""
    blindness: dict[str, int] = {}
    """Counts of what was lost or came too late since the last decision: `late_rows`, `late_frames`, `unplaced_rows`,
    `lost_health`."""
    is_catching_up: bool = False
    """Of a step that lost rows: frames of the next step had come before it was closed, or rows were cut at a spool's cap, as
    they are while nobody reads it."""
    is_by_machine: bool | msgspec.UnsetType = msgspec.UNSET
    """The rows of each machine were merged first, and then those sums (`ingest.node_merge`); not there: all were merged rank
    by rank, as those of one machine, or of an older version, are."""


class RankFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one rank at a tick, from which liveness and ends are judged."""

    rank: int
    incarnation: bytes = msgspec.field(name="life")
    pp_stage: int = 0
    received_at: float = msgspec.field(name="heard_at")
    """When its last frame came, in seconds on the clock of `Tick.now`."""
    moved_at: float
    """When its step, call or activity changed last, in seconds on the clock of `Tick.now`."""
    time: float = 0.0
    """Seconds since the epoch, by its own clock, of its newest record."""
    is_live: bool = True
    """A frame of it came while the daemon watched; False: all its frames were in the spool when the daemon started."""
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
    """Reason of its bye frame; empty: there is none."""
    is_stopped: bool = False
    """Its process exists and is stopped, by SIGSTOP, Ctrl-Z or a debugger, as the table of processes shows."""
    end: RankEnd | None = None
    """How its process ended; None: it has not, or that is not known."""
    ended_at: float = 0.0
    """When `end` became known, in seconds on the clock of `Tick.now`."""
    process_state: str = ""
    """The kernel's letter of its process while it is there: R, S, D, T (stopped), t (stopped by who traces it); empty: the
    process is not in our table."""
    pid: int = 0
    host: str = ""
    """Which process that is; 0 and empty: not known."""
    waiting_at: float | None = None
    """Since when it has waited for other ranks without pause, in seconds on the clock of `Tick.now`; None: it does not, or
    that is not known."""
    world_size: int = 0
    """Ranks of its run; 0: not known."""
    site: str = ""
    """`Heartbeat.site`: the line of the user's code at which it makes no progress; empty: it does, or that is not known."""
    unheard_node: str = ""
    """The node that ships its records, where nothing is heard of that either; empty: it is heard, or there is none."""


class Tick(msgspec.Struct, frozen=True, kw_only=True):
    """A moment at which a rank became stale or was gone, or no longer is, a run ended, or a person acted."""

    seq: int
    run: str
    attempt: int
    step: int
    """The newest step of the attempt that is closed; -1: none."""
    now: float
    """The daemon's clock: seconds that it has watched since it started, without those in which it was stopped."""
    ranks: tuple[RankFacts, ...]
    """The ranks of the attempt, in rising order of rank."""
    time: float = 0.0
    """Time of the newest record read, by its rank's clock, in seconds since the epoch."""
    pack_hash: str = ""
    acts: tuple[IncidentAct, ...] = ()
    """Acts of people (ack, resolve, reopen) that are applied to incidents with this tick."""
    ended: RunEnd | None = None
    """The attempt is over with this tick; None: it is not."""


STEP, TICK = "step", "tick"
"""Kinds of decision in the journal."""

_STEP_DECODER = msgspec.msgpack.Decoder(Decision)
_TICK_DECODER = msgspec.msgpack.Decoder(Tick)


class _Judged(msgspec.Struct):
    pack_hash: str = ""


_JUDGED_DECODER = msgspec.msgpack.Decoder(_Judged)


def decode_decision(kind: str, body: bytes) -> Decision | Tick:
    """Return a decision as the journal has it."""
    return _TICK_DECODER.decode(body) if kind == TICK else _STEP_DECODER.decode(body)


def decode_pack_hash(body: bytes) -> str:
    """Return the hash of the rules by which a decision in the journal is judged, of either kind."""
    return _JUDGED_DECODER.decode(body).pack_hash


def encode_decision(decision: Decision | Tick) -> tuple[int, str, bytes]:
    """Return (seq, kind, body) for the journal."""
    return decision.seq, TICK if isinstance(decision, Tick) else STEP, msgspec.msgpack.encode(decision)
