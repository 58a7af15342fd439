"""RunStages: what stands between the spool of one run and its judged steps, in the state after one of its decisions."""

from __future__ import annotations

from collections.abc import Callable

from sentinel.daemon.command_note import read_note
from sentinel.daemon.kept_packs import KeptPacks
from sentinel.daemon.watching import RunWatch
from sentinel.decision import Tick
from sentinel.ingest.arrivals import Arrivals
from sentinel.ingest.away_rows import RowSource
from sentinel.ingest.follow import RunFollower
from sentinel.ingest.steps import StepAssembler, snapshot_positions
from sentinel.judge.config import JudgingConfig
from sentinel.judge.judge import Judge, Judgement
from sentinel.step_view import StepView
from sentinel.store.run_paths import RunPaths


class RunStages:
    """Follower, assembler, watch and judge: the four whose state a snapshot keeps. Never set back: made anew instead."""

    def __init__(
        self,
        paths: RunPaths,
        config: JudgingConfig,
        packs: KeptPacks,
        on_problem: Callable[[str], None],
        *,
        pack_hash: str,
        arrivals: Callable[[], Arrivals] = Arrivals,
        rows_from: RowSource | None = None,
    ) -> None:
        """on_problem: called with what makes a rank unreadable. pack_hash: of the rules to begin with.

        arrivals: as of `RunFollower`. rows_from: as of `StepMaker`.
        """
        self.pack_hash = pack_hash
        """Of the rules that the judge judges by."""
        self.follower = RunFollower(paths.run_dir, on_problem=on_problem, arrivals=arrivals)
        self.assembler = StepAssembler(
            paths.name, late_after_steps=config.late_after_steps, late_after_s=config.late_after_s, rows_from=rows_from
        )
        self.watch = RunWatch(self.follower, self.assembler, lambda: read_note(paths))
        self.judge = Judge(packs.named(pack_hash), max_anomalies=config.max_anomalies_per_step)
        self._packs = packs

    def use(self, config: JudgingConfig) -> None:
        """Wait and write down as another configuration says, from the next step on."""
        self.assembler.use(config.late_after_steps, config.late_after_s)
        self.judge.max_anomalies = config.max_anomalies_per_step

    def restore(self, judge: bytes, ingest: bytes) -> None:
        """Go on from what the judge's and the assembler's `snapshot` returned."""
        self.judge.restore(judge)
        self.follower.restore(snapshot_positions(ingest))
        self.assembler.restore(ingest, self.follower.incarnations)
        self.watch.tracker.restore(self.follower.incarnations.values())

    def judged(self, decided: StepView | Tick, pack_hash: str) -> Judgement:
        """Return what judging a step or a moment brings. pack_hash: of the rules that its decision names."""
        if pack_hash != self.pack_hash:
            self.judge.reload(self._packs.named(pack_hash))
            self.pack_hash = pack_hash
        if isinstance(decided, Tick):
            return self.judge.judge_tick(decided)
        return self.judge.judge(decided.decision, decided)
