"""Records a second on one core from frames in memory to anomalies out, with the default pack; and what state costs.

usage: rules.py [--small] [--steps 400] [--long 100000] [--series 1000000]

Every step of a made-up run is encoded as the frames that its ranks would write; timed is what the daemon does with them:
check and decode (crc32, headers, messages), assemble (who has spoken, decisions, encoded as the journal would), merge
(shards, copies, non-finite values, checksums), judge (all rules, order, incidents). Processor time; the median step and the
fastest of twenty, for other work shares the machine. Anomalies are planted and must be found, and as many rows be judged as
were sent: else the benchmark fails.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import msgspec
import numpy as np

from sentinel import native
from sentinel.anomaly import Anomaly
from sentinel.ingest.follow import RunFollower
from sentinel.ingest.merge import ClosedStep
from sentinel.ingest.model_layout import ModelLayout
from sentinel.ingest.steps import StepAssembler
from sentinel.judge.judge import Judge
from sentinel.messages import ChunkInfo, Descriptor, EndStep, TensorInfo
from sentinel.place import Place
from sentinel.record import NONE_ID, ROW_DTYPE, Kind
from sentinel.rules.engine import Engine
from sentinel.rules.language.loader import load_pack
from sentinel.rules.watches.scalar_step import ScalarStep
from sentinel.step_view import RankStep
from sentinel.version import VERSION
from sentinel.wire.frame import FRAME_TYPES, FrameType, Header, encode_frame, encode_message, row_fields, run_id_of
from sentinel.wire.spool import incarnation_folder
from sentinel.wire.spool_reader import SpoolReader

KINDS = ("param", "wgrad", "activation", "dgrad")
WARMUP_STEPS = 60
PLANT_EVERY = 97
"""Steps between plants: a norm x1000 on three tensors, and a NaN on one."""
PARTS = ("decode", "assemble", "merge", "judge", "of which scalars")


JUDGE_SCALARS = ScalarStep.judge


class MemoryReader(SpoolReader):
    """The reader of a spool whose file is in memory: frames are handed out as if read."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.data = b""
        self._base = 0

    def put(self, data: bytes) -> None:
        """Have these frames lie where the last ones ended."""
        self._base, self.data = self.offset, data

    def _has_newer(self, final: bool) -> bool:
        return False

    def _read(self, max_bytes: int) -> tuple[bytes, int] | None:
        begin = self.offset - self._base
        return self.data[begin:] if begin else self.data, 0


class MemoryFollower(RunFollower):
    """A follower of ranks whose spools are in memory."""

    def __init__(self, ranks: list[MadeRank]) -> None:
        super().__init__(Path("/nowhere"))
        for rank in ranks:
            name = incarnation_folder(self.run_dir, rank.rank, rank.incarnation).name
            rank.reader = MemoryReader(self.spool_dir / name)
            self._add(name, rank.reader)

    def _discover(self) -> None:
        pass


class MadeRank:
    """One rank of the run: encodes what it says."""

    reader: MemoryReader

    def __init__(self, rank: int, num_ranks: int, num_tensors: int) -> None:
        self.rank, self.incarnation, self._seq = rank, rank.to_bytes(16, "little"), 0
        self.descriptor = make_descriptor(rank, num_ranks, num_tensors)
        self.num_tensors = num_tensors

    def frame(self, frame_type: int, payload: bytes | memoryview, step: int, row_count: int = 0) -> bytes:
        """Return the next frame."""
        self._seq += 1
        header = Header(
            type=frame_type,
            incarnation=self.incarnation,
            run_id=run_id_of("benchmark"),
            rank=self.rank,
            seq=self._seq,
            attempt=0,
            step=step,
            wall_ns=(step + 1) * 10**9,
            mono_ns=(step + 1) * 10**9,
            row_count=row_count,
        )
        return b"".join(map(bytes, encode_frame(header, payload)))

    def introduce(self) -> bytes:
        """Return the descriptor's frame."""
        return self.frame(FRAME_TYPES[Descriptor], encode_message(self.descriptor), -1)

    def step(self, step: int, rows: np.ndarray, scalars: dict[str, float]) -> bytes:
        """Return the frames of one step."""
        end = EndStep(step=step, num_rows=len(rows), num_calls=len(rows), scalars=scalars, step_time_s=1.0)
        rows_frame = self.frame(FrameType.ROWS, memoryview(rows).cast("B"), step, len(rows))
        return rows_frame + self.frame(FRAME_TYPES[EndStep], encode_message(end), step)


def make_descriptor(rank: int, num_ranks: int, num_tensors: int) -> Descriptor:
    """Return what a data-parallel rank says of itself: a quarter of its tensors is of each kind."""
    tensors = tuple(
        TensorInfo(id=at, name=f"layers.{at // 4}.mlp", kind=KINDS[at % 4], shape=(1000,), site_pos=at // 4)
        for at in range(num_tensors)
    )
    return Descriptor(
        version=VERSION,
        place=Place(rank=rank, world_size=num_ranks, dp_rank=rank, dp_size=num_ranks),
        chunks=(ChunkInfo(vpp_stage=0, depth=0),),
        tensors=tensors,
        row_fields=row_fields(ROW_DTYPE),
        row_bytes=ROW_DTYPE.itemsize,
    )


class Healthy:
    """Rows of healthy steps; weights move little, gradients and activations by tens of percents."""

    def __init__(self, num_tensors: int, seed: int = 3) -> None:
        self._rng = rng = np.random.default_rng(seed)
        kind = np.arange(num_tensors) % 4
        self._noise = np.where(kind == 0, 0.001, np.where(kind == 2, 0.05, 0.2))
        self._level = np.exp(rng.standard_normal(num_tensors))
        self._rows = rows = np.zeros(num_tensors, ROW_DTYPE)
        rows["tensor"] = rows["call_id"] = np.arange(num_tensors)
        rows["kind"] = np.array([int(Kind.of(name)) for name in KINDS])[kind]
        rows["bad_call_id"], rows["bad_micro_step"], rows["count"] = NONE_ID, -1, 1000
        self._is_param, self._is_own = kind == 0, kind >= 2

    def rows(self, step: int) -> Iterator[np.ndarray]:
        """Yield each rank's rows, in one array: of the same weights and reduced gradients, of data of its own."""
        rows, rng = self._rows, self._rng
        n, is_own = len(rows), self._is_own
        common = rng.standard_normal(n)
        while True:
            noise = np.where(is_own, rng.standard_normal(n), common)
            norm = self._level * np.exp(self._noise * noise)
            rows["m2"], rows["m4"] = norm**2, (3.0 + 0.1 * np.abs(noise)) * norm**4 / 1000
            rows["min"], rows["max"] = -norm, norm
            rows["checksum"] = np.where(self._is_param, 12345 + step, 0)
            yield rows

    def scalars(self) -> dict[str, float]:
        """Return what the trainer logs."""
        rng = self._rng
        return {
            "loss": 3.0 + 0.05 * float(rng.standard_normal()), "grad_norm": 1.0 + 0.1 * float(rng.random()), "lr": 1e-3,
        }  # fmt: skip


def plant(rows: np.ndarray) -> np.ndarray:
    """Return the rows with a norm x1000 on three gradients and a NaN in one activation."""
    rows = rows.copy()
    for at in (1, 5, 9):
        rows["m2"][at] *= 1e6
    rows["num_nan"][2], rows["count"][2] = 3, 997
    return rows


class Timed:
    """One run through the whole pipeline, step by step."""

    def __init__(self, num_tensors: int, num_ranks: int, *, times_scalars: bool = False) -> None:
        self.ranks = [MadeRank(rank, num_ranks, num_tensors) for rank in range(num_ranks)]
        self.follower = MemoryFollower(self.ranks)
        self.assembler = StepAssembler("benchmark")
        self.judge = Judge(load_pack())
        self._scalars_s = 0.0
        ScalarStep.judge = JUDGE_SCALARS  # type: ignore[method-assign]
        if times_scalars:  # The clock is a system call, some 20 us a step.
            ScalarStep.judge = lambda step, view: self._judge_scalars(step, view)  # type: ignore[method-assign, assignment]
        self.healthy = Healthy(num_tensors)
        self.records_a_step = num_tensors * num_ranks
        self.num_judged, self.num_planted, self.num_found, self.num_false = 0, 0, 0, 0
        for rank in self.ranks:
            rank.reader.put(rank.introduce())
        self.assembler.take(self.follower.poll(), 0.0)

    def _judge_scalars(self, step: ScalarStep, view: ClosedStep) -> list[Anomaly]:
        begun = time.thread_time()
        found = JUDGE_SCALARS(step, view)
        self._scalars_s += time.thread_time() - begun
        return found

    def step(self, step: int) -> list[float]:
        """Run one step; return the seconds of PARTS."""
        is_planted = step >= WARMUP_STEPS and step % PLANT_EVERY == 0
        for rank, rows in zip(self.ranks, self.healthy.rows(step), strict=False):
            rank.reader.put(rank.step(step, plant(rows) if is_planted else rows, self.healthy.scalars()))
        clock = time.thread_time
        t0 = clock()
        records = self.follower.poll()
        t1 = clock()
        self.assembler.take(records, float(step))
        views = list(self.assembler.close(float(step), self.follower.behind))
        msgspec.msgpack.encode([one.decision for one in views if isinstance(one, ClosedStep)])
        t2 = clock()
        (view,) = views
        assert isinstance(view, ClosedStep)
        _ = view.stats, view.present, view.is_bad
        t3 = clock()
        self._scalars_s = 0.0
        judgement = self.judge.judge(None, view)
        t4 = clock()
        self.num_judged += view.num_rows
        onsets = [one for one in judgement.anomalies if one.event == "onset"]
        self.num_planted += is_planted
        if is_planted:
            said = {(one.rule, one.tag_name) for one in onsets}
            self.num_found += {("non-finite", "layers.0.mlp"), ("turbulent-norm", "layers.1.mlp")} <= said
        else:
            self.num_false += len(onsets)
        return [t1 - t0, t2 - t1, t3 - t2, t4 - t3, self._scalars_s]

    def check(self, num_steps: int) -> None:
        """Fail where not all rows were judged, or a plant was not found."""
        assert self.num_judged == num_steps * self.records_a_step, (self.num_judged, num_steps * self.records_a_step)
        assert self.num_planted and self.num_found == self.num_planted, (self.num_found, self.num_planted)


def throughput(num_tensors: int, num_ranks: int, num_steps: int) -> str:
    """Return a line of the table of speeds."""
    run = Timed(num_tensors, num_ranks)
    gc.disable()
    times = np.array([run.step(step) for step in range(WARMUP_STEPS + num_steps)])
    run.check(len(times))
    again = Timed(num_tensors, num_ranks, times_scalars=True)
    middle = np.median(times[WARMUP_STEPS:], axis=0)
    middle[-1] = np.median([again.step(step)[-1] for step in range(WARMUP_STEPS + PLANT_EVERY)][WARMUP_STEPS:])
    gc.enable()
    sums = times[WARMUP_STEPS:, :4].sum(axis=1)
    whole, best = float(np.median(sums)), float(np.percentile(sums, 5))
    total = run.records_a_step
    shares = " | ".join(f"{1e6 * one:.0f}" for one in middle)
    speeds = f"{total / whole / 1e6:.1f} | {total / best / 1e6:.1f}"
    return f"| {num_tensors} | {num_ranks} | {total} | {speeds} | {1e6 * whole:.0f} | {shares} | {run.num_false} |"


def flatness(num_tensors: int, num_steps: int) -> Iterator[str]:
    """Yield the median us of a step around step 100, 1,000, 10,000, ... of one run."""
    run = Timed(num_tensors, 1)
    marks = [at for at in (100, 1000, 10_000, 100_000, 1_000_000) if at <= num_steps]
    window: list[float] = []
    for step in range(num_steps + 1):
        window.append(sum(run.step(step)[:4]))
        if step in marks:
            yield f"| {step} | {1e6 * float(np.median(window[-50:])):.0f} |"
        del window[:-50]
    run.check(num_steps + 1)


def rss_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory(num_series: int) -> str:
    """Return what an engine of so many logical tensors holds, and what snapshots of it cost."""
    layout = ModelLayout({0: make_descriptor(0, 1, num_series)})
    healthy, views = Healthy(num_series), []
    for step in range(3):
        rows = next(healthy.rows(step)).copy()
        end = EndStep(step=step, num_rows=num_series, num_calls=num_series)
        part = RankStep(rank=0, descriptor=layout.descriptors[0], rows=rows, end_step=end, time=float(step))
        views.append(ClosedStep(run="benchmark", attempt=0, step=step, layout=layout, parts=[part]))
        _ = views[-1].stats, views[-1].present, views[-1].is_bad
    gc.collect()
    before = rss_bytes()
    ScalarStep.judge = JUDGE_SCALARS  # type: ignore[method-assign]
    engine = Engine(load_pack())
    for view in views[:2]:
        engine.judge(view)
    gc.collect()
    held = rss_bytes() - before
    begun = time.perf_counter()
    snapshot = engine.snapshot()
    saved = time.perf_counter()
    other = Engine(load_pack())
    other.restore(snapshot)
    restored = time.perf_counter()
    assert engine.judge(views[2]) == other.judge(views[2]) and engine.snapshot() == other.snapshot()
    return (
        f"| {num_series} | {held / 1e6:.0f} | {held / num_series:.0f} | {engine.state_bytes_per_tensor:.0f} | "
        f"{len(snapshot) / 1e6:.0f} | {saved - begun:.2f} | {restored - saved:.2f} |"
    )


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a few seconds, for a look")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--long", type=int, default=100_000)
    parser.add_argument("--series", type=int, default=1_000_000)
    options = parser.parse_args()
    if options.small:
        options.steps, options.long, options.series = 60, 200, 20_000
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    print(f"{platform.machine()}, one core, C library: {native.implementation}\n")
    columns = ("tensors", "ranks", "records a step", "M records/s", "best 5 %", "us a step", *PARTS, "false onsets")
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for num_tensors, num_ranks, factor in ((2000, 1, 1), (2000, 8, 2), (20_000, 1, 2), (16_000, 4, 4), (64_000, 1, 4)):
        print(throughput(num_tensors, num_ranks, max(options.steps // factor, PLANT_EVERY)), flush=True)
    print("\nRules in numpy (no compiled plan), the rest as above:\n")
    with patch.object(native, "judge_plan", None):
        print(throughput(2000, 1, max(options.steps // 2, PLANT_EVERY)))
        print(throughput(20_000, 1, max(options.steps // 4, PLANT_EVERY)))
    print("\n| after step | us a step of 2000 records |\n|---|---|")
    for line in flatness(2000, options.long):
        print(line, flush=True)
    print("\n| tensors | RSS of the engine, MB | bytes a tensor | of them state | snapshot, MB | save, s | restore, s |")
    print("|---|---|---|---|---|---|---|")
    print(memory(options.series))
    return 0


if __name__ == "__main__":
    sys.exit(main())
