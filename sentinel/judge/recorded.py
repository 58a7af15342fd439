"""A recorded run step by step: spool and journal read through the daemon's own code; no lock, nothing is written."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from sentinel.decision import Decision, Tick, decode_decision
from sentinel.ingest.follow import RunFollower
from sentinel.ingest.steps import StepAssembler, snapshot_positions
from sentinel.judge.snapshot import snapshot_at_cut
from sentinel.step_view import StepView
from sentinel.store.journal import Journal
from sentinel.store.lock import holder
from sentinel.store.run_paths import RunPaths
from sentinel.wire.spool import parse_incarnation_folder

STEP = "step"
"""The kind of the journal's decisions that close a step."""


class RecordedRun:
    """What a run has on disk, as of now. Steps that a daemon decided are made as it made them, the others as they lie there.

    Where a daemon is at work only its decided steps are here: of later ones, frames of some ranks may not have come yet.
    """

    def __init__(self, paths: RunPaths) -> None:
        """Open the journal, if there is one. StoreError when it cannot be read."""
        self.paths = paths
        self.journal = Journal(paths.journal, read_only=True) if paths.journal.exists() else None
        self._is_served = self.journal is not None and holder(paths.lock_directory) is not None
        self._follower: RunFollower | None = None

    def __enter__(self) -> RecordedRun:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the journal."""
        if self.journal is not None:
            self.journal.close()

    def views(self) -> Iterator[tuple[StepView, Decision]]:
        """Yield the steps in order, each with the decision that made it; statistics are formed when they are asked for."""
        self._follower = RunFollower(self.paths.run_dir)
        for view, decision in recorded_views(self.paths, self.journal, follower=self._follower):
            if self._is_served and self.journal is not None and decision.seq > self.journal.last_seq:
                return
            yield view, decision

    @property
    def has_resumed(self) -> bool:
        """Whether a rank lived more than once: then a step may be there twice."""
        ranks = [parsed[0] for folder in self._folders() if (parsed := parse_incarnation_folder(folder.name)) is not None]
        return len(set(ranks)) < len(ranks)

    @property
    def num_bytes(self) -> int:
        """Bytes of spool on disk, as of now."""
        return sum(path.stat().st_size for folder in self._folders() for path in folder.glob("*.spool"))

    @property
    def num_bytes_read(self) -> int:
        """Bytes of spool that the newest `views` has read."""
        return 0 if self._follower is None else self._follower.num_bytes

    @property
    def damage(self) -> str:
        """Words for what the newest `views` found broken in the spool; empty: nothing."""
        follower = self._follower
        if follower is None:
            return ""
        counts = (
            (follower.num_corrupt, "regions that are no frames"), (follower.num_torn, "torn tails"),
            (follower.num_missing_files, "files gone before they were read"), (follower.num_lost, "frames lost"),
            (follower.num_undecodable, "frames of nonsense"), (follower.num_foreign, "frames of another version"),
        )  # fmt: skip
        return ", ".join(f"{count} {what}" for count, what in counts if count)

    def _folders(self) -> list[Path]:
        return [path for path in (self.paths.run_dir / "spool").glob("r*") if path.is_dir()]


def recorded_views(
    paths: RunPaths,
    journal: Journal | None,
    *,
    recompute: bool = False,
    pause_s: float = 0.0,
    follower: RunFollower | None = None,
) -> Iterator[tuple[StepView, Decision]]:
    """Yield the steps of a run: those that the journal decided as it says, then those that nobody has decided.

    recompute, pause_s, follower: as of `recorded`.
    """
    for one in recorded(paths, journal, recompute=recompute, pause_s=pause_s, follower=follower):
        if not isinstance(one, Tick):
            assert one.decision is not None
            yield one, one.decision


def recorded(
    paths: RunPaths,
    journal: Journal | None,
    *,
    recompute: bool = False,
    pause_s: float = 0.0,
    follower: RunFollower | None = None,
) -> Iterator[StepView | Tick]:
    """Yield the steps of a run, and between them the moments at which ranks were found stale, in the order of decision.

    Where the journal was cut, they begin behind the cut. StoreError: the state there cannot be read.

    recompute: decide all anew; nobody is late or stale then. pause_s: sleeps so long after each look at the spool, so that
    a daemon's own thread comes first. follower: a fresh one, for those who ask it later what it found. A run without a
    journal is decided anew too.
    """
    follower = follower or RunFollower(paths.run_dir)
    # Nobody is late in a recording that is read as fast as the disk allows: only what never came is missing.
    assembler = StepAssembler(paths.name, late_after_steps=0, late_after_s=0.0)
    if journal is not None and not recompute:
        begin = snapshot_at_cut(journal)
        if begin is not None:
            follower.restore(snapshot_positions(begin.ingest))
            assembler.restore(begin.ingest, follower.incarnations)
        assembler.replay_decisions(decode_decision(kind, body) for _, kind, body in journal.decisions(journal.cut.seq))
    elif journal is not None:
        for _, kind, body in journal.decisions(after=journal.last_seq - 1):
            assembler.pack_hash = decode_decision(kind, body).pack_hash
    while True:
        records = follower.poll(final=True)
        assembler.take(records, time.monotonic())
        yield from assembler.close(time.monotonic(), follower.behind) if records else assembler.finish(time.monotonic())
        if not records:
            return
        if pause_s:
            time.sleep(pause_s)
