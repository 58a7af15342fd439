"""The messages about lost rows: how many, of which steps and ranks, why, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sentinel.rules.watches.lost_rows_watch import Lost

_WHYS = {
    "cap": "the spool reached spool.max_bytes{max_bytes} before a daemon had judged it",
    "writer": "the trainer's writer thread fell behind by more than spool.queue_bytes{queue_bytes}",
    "disk": "the disk took no more",
    "error": "they could not be read from the device",
    "frames": "frames of the spool are damaged or gone",
    "": "nobody knows why",
}
_REMEDIES = {
    "cap": "keep `sentinel serve` running beside the trainer, or raise spool.max_bytes",
    "writer": "give the rank a free core and its spool a faster disk, or raise spool.queue_bytes",
    "disk": "make room on the disk of the run",
    "error": "see the trainer's log of that step",
    "frames": "check the disk of the run, and who deletes from its spool",
    "": "see the trainer's log of those steps",
}


def lost(known: Lost, how: str) -> str:
    """Return the sentence that reports a loss; how: of `how_lost`."""
    return f"{_counts(known)} were lost and never judged: {how}"


def over(known: Lost) -> str:
    """Return the sentence that reports the end of a loss."""
    return f"no more rows are lost: it was {_counts(known)}"


def how_lost(known: Lost, settings: Mapping[str, Any]) -> str:
    """Return why rows were lost, what was kept, and what to do. settings: the config in force of one of the ranks."""
    spool = settings.get("spool")
    given = {key: spool.get(key) if isinstance(spool, Mapping) else None for key in ("max_bytes", "queue_bytes")}
    sizes = {key: f" ({_size(value)})" if isinstance(value, int) else "" for key, value in given.items()}
    whys = known.lost_to or ([""] if not known.num_steps_gone else ["cap"])
    why = " and ".join(_WHYS.get(one, one).format_map(sizes) for one in whys)
    if known.num_steps_gone:
        kept = "a NaN may be among them"
    elif known.num_finite == known.num_rows:
        kept = "all of them were finite; NaNs, scalars and the end of each step were kept"
    else:
        kept = f"a NaN may be among {known.num_rows - known.num_finite} of them"
    return f"{why}; {kept}. To do: {'; '.join(_REMEDIES.get(one, _REMEDIES['']) for one in whys)}"


def _counts(known: Lost) -> str:
    """`rank 0: 40 of 1,000 rows of steps 3 to 9`"""
    who = f"rank {known.ranks[0]}" if len(known.ranks) == 1 else f"ranks {', '.join(map(str, known.ranks[:8]))}"
    who += f" and {len(known.ranks) - 8} more" if len(known.ranks) > 8 else ""
    first, last = known.first_step, known.last_step
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    of = f" of {known.num_sent:,}" if known.num_sent and not known.num_steps_gone else ""
    gone = f", {known.num_steps_gone:,} steps whole" if known.num_steps_gone else ""
    return f"{who}: {known.num_rows:,}{of} rows of {steps}{gone}"


def _size(num_bytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.4g} {unit}"
    return f"{num_bytes} bytes"
