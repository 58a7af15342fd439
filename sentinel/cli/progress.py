"""RunProgress: the newest step and attempt of a run that trains, read from the ends of its spools; no daemon needed."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from sentinel.cli.time_lengths import duration_words
from sentinel.command import ANY_ATTEMPT
from sentinel.ingest.rank_tails import RankTail
from sentinel.wire.frame import NO_ATTEMPT
from sentinel.wire.spool import parse_incarnation_folder
from sentinel.wire.spool_files import file_name, list_files

TAIL_BYTES = 4 * 2**20
"""Bytes read from the end of a spool to learn its rank's step; a bound on time that mostly holds a second's heartbeat."""
MAX_INCARNATIONS = 16
"""Most spools that are read, the newest ones: ranks of one run are a step or two apart."""
SILENT_S = 60.0
"""Seconds without a frame of any rank, heartbeats included, after which a run counts as reading no command. Too small: one
that is stopped for a moment does; too large: a person waits for ranks that are gone."""


class RunProgress(msgspec.Struct, frozen=True, kw_only=True):
    """What the newest frames of the ranks of the newest attempt say; None: they do not say it."""

    newest_step: int | None = None
    """Newest step that any rank is in or has ended."""
    step_time_s: float | None = None
    attempt: int = ANY_ATTEMPT
    why_unresponsive: str = ""
    """Why no rank would read a command, in words; empty: one does, or the run has not begun."""


def progress_of(run_dir: Path, now: float | None = None) -> RunProgress:
    """Return the progress of a run. now: seconds since the epoch; None: the time of the clock."""
    now = time.time() if now is None else now
    files: list[tuple[float, Path]] = []
    for folder in (run_dir / "spool").glob("r*"):
        indices = list_files(folder)
        if indices and parse_incarnation_folder(folder.name) is not None:
            files.append(((folder / file_name(indices[-1])).stat().st_mtime, folder))
    newest = sorted(files, reverse=True)[:MAX_INCARNATIONS]
    tails = [(received, RankTail(folder)) for received, folder in newest]
    if not tails:
        return RunProgress()
    for _, tail in tails:
        tail.look(TAIL_BYTES)
    # The same step of a former attempt is another moment.
    attempt = max((tail.attempt for _, tail in tails if tail.attempt != NO_ATTEMPT), default=NO_ATTEMPT)
    mine = [(received, tail) for received, tail in tails if tail.attempt in (attempt, NO_ATTEMPT)]
    steps = [tail.newest_step for _, tail in mine if tail.newest_step is not None]
    times = [tail.steps[-1].time_s for _, tail in mine if tail.steps and tail.steps[-1].time_s > 0]
    age = now - max(received for received, _ in mine)
    why_unresponsive = ""
    if all(tail.bye is not None for _, tail in mine):
        why_unresponsive = "every rank has ended"
    elif age > SILENT_S:
        why_unresponsive = f"no rank has written anything for {duration_words(age)}: killed, or hanging as a whole"
    return RunProgress(
        newest_step=max(steps, default=None),
        step_time_s=times[-1] if times else None,
        attempt=ANY_ATTEMPT if attempt == NO_ATTEMPT else attempt,
        why_unresponsive=why_unresponsive,
    )
