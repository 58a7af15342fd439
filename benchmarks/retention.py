"""A run of a million steps with a fault that lasts, others that come and go: memory, disk, and the restart behind it.

    python benchmarks/retention.py [--steps 1000000] [--journal-mib 32]

Steps are made in memory (two ranks, four tensors, a loss) and go through the daemon's own judging, journal, files and
retention; nothing of a trainer or its spool takes part. A tensor of rank 1 holds NaN from step 500 on; the loss jumps
every 100 steps and comes back, an incident each time.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np

from sentinel.daemon.commits import STEPS_PER_COMMIT, StepCommits
from sentinel.daemon.config import DaemonConfig
from sentinel.daemon.incident_alerts import IncidentAlerts
from sentinel.daemon.kept_packs import KeptPacks
from sentinel.daemon.run_files import RunFiles
from sentinel.daemon.run_history import RunHistory
from sentinel.daemon.run_retention import RunRetention
from sentinel.daemon.serving import ServedRun
from sentinel.daemon.snapshots import Acknowledgement, Snapshots
from sentinel.daemon.stages import RunStages
from sentinel.decision import Decision, RankPart
from sentinel.ingest.merge import ClosedStep
from sentinel.ingest.synthetic_views import SyntheticSeries, synthetic_views
from sentinel.judge.config import JudgingConfig
from sentinel.judge.packs import RulePacks
from sentinel.step_view import RankStep
from sentinel.store.journal import Journal
from sentinel.store.retention import RetentionConfig
from sentinel.store.run_paths import RunPaths

RULES = """\
builtin: false
rules:
  - {name: non-finite, detector: AnomalyNan, match: {kind: "*"}, severity: critical}
  - {name: loss-spike, detector: LossSpike, match: {kind: scalar}, severity: critical}
"""
PERIOD = 1000
"""Steps after which the same values come again."""
NAN_STEP = 500
JUMP_EVERY = 100


class LongRun:
    """A run whose steps are made in memory, judged and kept as a daemon does it."""

    def __init__(self, run_dir: Path, retention: RetentionConfig, *, snapshot_interval_s: float = 10.0) -> None:
        (run_dir / "spool").mkdir(mode=0o700, parents=True)
        run_dir.chmod(0o700)
        rules = run_dir.parent / "rules.yaml"
        rules.write_text(RULES)
        self.paths = RunPaths.of(run_dir)
        self.config = DaemonConfig(judging=JudgingConfig(snapshot_interval_s=snapshot_interval_s), retention=retention)
        self.packs = RulePacks([rules])
        self.packs.load()
        self.journal = Journal(self.paths.journal)
        kept = KeptPacks(self.journal, self.packs)
        kept.keep()
        self.files = RunFiles(self.paths, self.journal)
        self.files.complete(None)
        self.snapshots = Snapshots(self.paths.name, self.journal, snapshot_interval_s)
        self.commits = StepCommits(
            self.journal, self.files, IncidentAlerts(self.journal, self.config.notify.routes()), self.snapshots,
            Acknowledgement(run_dir / "spool"), lambda _: False,
            RunHistory(run_dir, self.paths.journal, self.config.history),
        )  # fmt: skip
        self.stages = RunStages(self.paths, self.config.judging, kept, lambda _: None, pack_hash=kept.newest_hash)
        self.retention = RunRetention(self.paths.name, self.journal, self.files, kept, retention)
        self._pack_hash = kept.newest_hash
        self._period = list(_period())
        self._step = 0

    def steps(self, num_steps: int, *, steps_per_second: float = 10.0) -> None:
        """Judge so many more steps. steps_per_second: of the run's own clock, by which its files grow old."""
        for step in range(self._step, self._step + num_steps):
            view = self._view(step)
            assert view.decision is not None
            self.commits.begin(view.decision)
            self.commits.add(self.stages.judged(view, view.decision.pack_hash), self.stages)
            if step % STEPS_PER_COMMIT == 0:
                self.commits.flush(self.stages)
                self.retention.turn(
                    self.snapshots.seq, self.stages.judge.open_incidents, time.time() + step / steps_per_second
                )
        self._step += num_steps

    def close(self) -> None:
        """Commit what is left, without a snapshot: what a crash leaves."""
        self.commits.flush(self.stages)
        self.files.close()
        self.stages.watch.close()
        self.journal.close()

    def restarted_s(self) -> float:
        """Return the seconds until a daemon that starts now judges again."""
        begun = time.perf_counter()
        run = ServedRun(self.paths, self.config, self.packs)
        run.turn(time.time())
        took = time.perf_counter() - begun
        run.close()
        return took

    @property
    def disk_bytes(self) -> dict[str, int]:
        """Bytes on disk, of the journal with its log, the anomaly files, and the incidents."""
        return {
            "journal": sum(path.stat().st_size for path in self.paths.state.glob("journal.sqlite*")),
            "anomalies": sum(path.stat().st_size for path in self.paths.anomalies.glob("*")),
            "incidents": self.paths.incidents.stat().st_size if self.paths.incidents.exists() else 0,
        }

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of the state after the newest decision."""
        return len(self.stages.judge.snapshot()) + len(self.stages.assembler.snapshot())

    def _view(self, step: int) -> ClosedStep:
        period = self._period[step % PERIOD]
        parts = [_at(part, step) for part in period.parts]
        ranks = tuple(
            RankPart(
                rank=part.rank, incarnation=bytes([part.rank]) * 16, num_rows=len(part.rows), last_seq=step, layout_id=1
            )
            for part in parts
        )
        decision = Decision(
            seq=self.journal.last_seq + 1, run=self.paths.name, attempt=0, step=step, ranks=ranks, time=parts[0].time,
            pack_hash=self._pack_hash,
        )  # fmt: skip
        # The assembler makes it too, of nothing, so that its state is that after this step.
        self.stages.assembler.replay_decisions([decision])
        for _ in self.stages.assembler.close(0.0):
            pass
        return ClosedStep(run=self.paths.name, attempt=0, step=step, layout=period.layout, parts=parts, decision=decision)


def _period() -> Iterator[ClosedStep]:
    rng = np.random.default_rng(7)
    loss = 2.0 + 0.02 * rng.standard_normal(PERIOD)
    loss[50::JUMP_EVERY] *= 8
    series = [SyntheticSeries(name="loss", kind="scalar", values={"value": loss.tolist()})]
    for number in range(4):
        norms = np.exp(0.05 * rng.standard_normal(PERIOD))
        series.append(SyntheticSeries(name=f"layers.{number}.weight", kind="wgrad", values={"norm": norms.tolist()}))
    yield from synthetic_views("run", series, num_ranks=2)


def _at(part: RankStep, step: int) -> RankStep:
    rows = part.rows
    if step >= NAN_STEP and part.rank == 1:
        rows = rows.copy()
        rows["num_nan"][2], rows["count"][2], rows["bad_call_id"][2], rows["bad_micro_step"][2] = 5, 1019, 2, 0
    assert part.end_step is not None
    end = msgspec.structs.replace(part.end_step, step=step)
    return RankStep(rank=part.rank, descriptor=part.descriptor, rows=rows, end_step=end, time=1.8e9 + step / 10)


def resident_mib() -> float:
    """Return the memory that this process holds, in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def main() -> int:
    """Run it and print a row each twentieth of the way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--journal-mib", type=int, default=32)
    parser.add_argument("--minutes", type=float, default=600.0, help="End sooner, at the next twentieth of the way.")
    arguments = parser.parse_args()
    retention = RetentionConfig(
        journal_bytes=arguments.journal_mib * 2**20, anomalies_bytes=2**27, incidents_bytes=2**23, age_days=0
    )
    where = Path(tempfile.mkdtemp(prefix="retention-"))
    print(f"{datetime.now(UTC):%Y-%m-%d} retention, {arguments.steps} steps, a journal of {arguments.journal_mib} MiB")
    print("   steps   RSS MiB   objects   state KiB   journal MiB   anomalies MiB   incidents MiB   steps/s", flush=True)
    try:
        run = LongRun(where / "run", retention)
        ends = time.monotonic() + 60 * arguments.minutes
        for _ in range(20):
            if time.monotonic() > ends:
                break
            begun = time.perf_counter()
            run.steps(arguments.steps // 20)
            rate = arguments.steps / 20 / (time.perf_counter() - begun)
            disk = {name: size / 2**20 for name, size in run.disk_bytes.items()}
            gc.collect()
            num_objects, state_kib = len(gc.get_objects()), run.snapshot_bytes / 1024
            print(
                f"{run.journal.last_seq:8}  {resident_mib():8.1f}  {num_objects:8}  {state_kib:10.1f}"
                f"  {disk['journal']:12.1f}  {disk['anomalies']:14.1f}  {disk['incidents']:14.2f}  {rate:8.0f}",
                flush=True,
            )
        run_steps = run.journal.last_seq
        kept = run.journal.last_seq - run.journal.cut.seq
        to_judge = run.journal.last_seq - run.snapshots.seq
        lasting = run.stages.judge.open_incidents[0]
        run.close()
        took = [run.restarted_s() for _ in range(5)]
        members = f"{lasting.num_members} members, {lasting.revision} revisions"
        print(f"the lasting incident: {members}, opened at step {lasting.opened_step}")
        print(f"the journal keeps {kept} of {run_steps} decisions, {to_judge} behind the newest snapshot")
        print(f"restart: {took[0]:.2f} s the first time, then {min(took[1:]):.2f} to {max(took[1:]):.2f} s")
    finally:
        shutil.rmtree(where)
    return 0


if __name__ == "__main__":
    sys.exit(main())
