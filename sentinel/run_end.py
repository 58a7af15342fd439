"""RunEnd: how a run ended, on which rank first, and when."""

from __future__ import annotations

import msgspec

GOODBYE, EXCEPTION, SIGNAL, OUT_OF_MEMORY, SILENCE = "goodbye", "exception", "signal", "out_of_memory", "silence"
"""How a run ends: every rank left in order; a trainer raised; a rank was killed; for want of memory; nobody was heard."""

HOWS: tuple[str, ...] = (GOODBYE, EXCEPTION, SIGNAL, OUT_OF_MEMORY, SILENCE)


class RunEnd(msgspec.Struct, frozen=True, kw_only=True):
    """That an attempt of a run is over, and how. A decision: it is journalled before it is judged."""

    how: str
    """One of HOWS."""
    rank: int | None = None
    """The first rank to go; None: all left in order, or nobody knows."""
    step: int = -1
    """The step at which that rank was; -1: not known."""
    detail: str = ""
    """In words: type and message of the exception, or name of the signal; empty: nothing is known beside `how`."""
    time: float = 0.0
    """Seconds since the epoch when that rank went, by its own clock."""
