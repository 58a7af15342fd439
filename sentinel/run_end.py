"""RunEnd and RankEnd: how a run ended, and how each of its ranks did; on which rank first, and when."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

GOODBYE, EXCEPTION, SIGNAL, OUT_OF_MEMORY, SILENCE = "goodbye", "exception", "signal", "out_of_memory", "silence"
"""How a run ends: every rank left in order; a trainer raised; a rank was killed; for want of memory; ranks fell silent."""

HOWS: tuple[str, ...] = (GOODBYE, EXCEPTION, SIGNAL, OUT_OF_MEMORY, SILENCE)

OWN, UNEXPLAINED, FOLLOWS = 0, 1, 2
"""What an end says of its cause: the rank has one of its own (it raised, it ran out of memory, it crashed); nobody knows
(its process is gone without a word, it fell silent); it looks like the end of another rank (a lost connection, SIGTERM)."""


CRASHES: tuple[str, ...] = ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGSYS", "SIGABRT", "SIGTRAP")
"""Signals that a process causes by its own fault (an invalid address, an abort)."""


MARGIN_S = 2.0
"""Seconds earlier that a rank without an explained end must have gone to be the cause of another's exception. Too small:
without a pulse its last frame may be a heartbeat (1 s) old; too large: the exception is taken for the cause."""
CLEAR_S = 0.05
"""Ranks that went within so short a time of one another cannot be put in order: a pulse is some 20 ms."""


ALL_TOGETHER = "without a word, all together"
"""What an end says where every rank was gone at once."""
TOGETHER_S = 1.0
"""Seconds within which SIGKILL of all ranks came from one sender. Too small: killing many processes takes longer; too large:
one rank's kill, after which a launcher sends the others SIGTERM and then SIGKILL, counts as all."""


EXIT = "exit"
"""What a goodbye says at the end of its process."""
LEFT_EARLY = "left while the others trained on, with an exit code that it told nobody"


class RankEnd(msgspec.Struct, frozen=True, kw_only=True):
    """That one rank is gone, and how."""

    how: str
    """One of HOWS."""
    detail: str = ""
    """In words: type and message of the exception, name of the signal, evidence; empty: nothing beside `how` is known."""
    time: float = 0.0
    """Seconds since the epoch, by the rank's own clock: when it went; of a process that was killed, when it wrote last."""
    step: int = -1
    """The step at which it was; -1: not known."""
    cause: int = UNEXPLAINED
    """OWN, UNEXPLAINED or FOLLOWS; of a goodbye it says nothing."""
    is_asked: bool = False
    """Somebody ended it on purpose: Ctrl-C, or SIGTERM sent to the whole command."""
    has_memory: bool = False
    """The kernel's counters say that it was not killed for want of memory; False: it was, or they do not tell."""
    is_at_prompt: bool = False
    """The process lives on, and may train again: a notebook, whose cell raised."""
    is_between: bool = False
    """`step` was whole, and nothing of another had begun."""
    ignored_sigterm: bool = False
    """It ignored SIGTERM when it was seen last: whoever wants to end it has to send SIGKILL."""


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
    is_restarted: bool = False
    """A newer attempt of the run had begun when it was decided."""
    found_late_s: float = 0.0
    """Seconds between that and the daemon's finding it, by the daemon's clock; 0: the daemon was there."""
    is_asked: bool = False
    """Somebody ended it on purpose: Ctrl-C, or SIGTERM sent to the whole command."""
    has_memory: bool = False
    """The kernel's counters say that it was not killed for want of memory; False: it was, or they do not tell."""
    is_between: bool = False
    """`step` was whole, and nothing of another had begun."""
    ignored_sigterm: bool = False
    """It ignored SIGTERM when it was seen last: whoever wants to end it has to send SIGKILL."""


def was_asked(ends: Iterable[RankEnd]) -> bool:
    """Return whether a rank ended in order by its handler of SIGTERM, and those that did not end so only lost it."""
    ends = list(ends)
    is_reported = any(end.how == GOODBYE and end.detail == "SIGTERM" for end in ends)
    return is_reported and all(end.how == GOODBYE or end.cause == FOLLOWS for end in ends)


def first_to_go(ends: Mapping[int, RankEnd]) -> tuple[int | None, RankEnd | None]:
    """Return the rank whose end the others' follow from, and that end; None: all left in order, or nobody can say.

    By cause before by time: a lost connection and a SIGTERM are how the death of another rank shows, and clocks differ.
    """
    bad = {rank: end for rank, end in ends.items() if end.how != GOODBYE}
    if any(end.is_asked for end in bad.values()) or was_asked(ends.values()):
        return None, None
    own, unexplained, follows = (sorted(r for r, end in bad.items() if end.cause == cause) for cause in range(3))
    first = min(own, key=lambda rank: bad[rank].time, default=None)
    other = min(unexplained, key=lambda rank: bad[rank].time, default=None)
    if first is not None and (other is None or bad[other].time > bad[first].time - MARGIN_S):
        return first, bad[first]
    if other is not None:
        killed = [bad[rank].time for rank in unexplained if bad[rank].detail == "SIGKILL"]
        if len(killed) > 1 and max(killed) - min(killed) < TOGETHER_S:
            return None, None
        near = [rank for rank in unexplained if bad[rank].time - bad[other].time < CLEAR_S]
        return (other, bad[other]) if len(near) == 1 else (None, None)
    lost = min((rank for rank in follows if bad[rank].how != SIGNAL), key=lambda rank: bad[rank].time, default=None)
    if lost is None:
        return next(iter(bad.items())) if len(ends) == 1 and bad else (None, None)
    left = [rank for rank, end in ends.items() if end.detail == EXIT and end.how == GOODBYE and end.time < bad[lost].time]
    if left:
        # Whoever ends with `raise SystemExit(3)` says goodbye too: Python tells nobody the code.
        early = min(left, key=lambda rank: ends[rank].time)
        return early, msgspec.structs.replace(ends[early], how=EXCEPTION, detail=LEFT_EARLY, cause=OWN)
    return lost, bad[lost]


def end_words(end: RunEnd | RankEnd) -> str:
    """Return how a rank or a run ended, in a few words: `raised ValueError: no such token`, `was killed: SIGKILL`."""
    detail = end.detail
    if end.how == GOODBYE:
        return "left in order" + (f" ({detail})" if detail else "")
    if end.how == EXCEPTION:
        if detail == LEFT_EARLY:
            return detail
        return f"ended with {detail}" if detail.startswith("exit code") else f"raised {detail or 'an exception'}"
    if end.how == OUT_OF_MEMORY:
        return "ran out of memory" + (f": {detail}" if detail else "")
    if end.how == SILENCE:
        return "fell silent" + (f": {detail}" if detail else "")
    if detail == "SIGINT":
        return "was interrupted by hand (SIGINT)"
    if end.is_asked or detail == "SIGTERM":
        return f"was ended from outside ({detail})"
    if detail in CRASHES:
        return f"crashed: {detail}"
    return f"was killed: {detail}" if detail.startswith("SIG") else f"is gone {detail or 'without a word'}"
