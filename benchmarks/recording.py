"""Recordings for the daemon's benchmarks and tests: spools of several ranks with planted faults, always the same bytes."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from sentinel.messages import Bye, ChunkInfo, Descriptor, EndStep, Heartbeat, TensorInfo
from sentinel.place import Place
from sentinel.record import NONE_ID, ROW_DTYPE, Kind
from sentinel.wire.frame import FrameType, encode_message, row_fields, run_id_of
from sentinel.wire.spool import SpoolWriter, incarnation_folder

EPOCH_NS = 1_700_000_000 * 10**9
STEP_NS = 100_000_000


class FixedClock:
    """A clock that is set by hand, so that every recording has the same times in it."""

    def __init__(self) -> None:
        self.now_ns = EPOCH_NS

    def wall_ns(self) -> int:
        """Return the time it was set to."""
        return self.now_ns

    def mono_ns(self) -> int:
        """Return the time it was set to."""
        return self.now_ns


class Recording:
    """Writes a run step by step: data-parallel ranks with the same layers. The same arguments write the same bytes.

    nan_steps: steps in which rank 1's gradient of layer 2 and the loss are NaN. spike_steps: the loss jumps.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        num_ranks: int = 4,
        num_tensors: int = 16,
        attempt: int = 0,
        nan_steps: tuple[int, ...] = (),
        spike_steps: tuple[int, ...] = (),
        is_live: bool = False,
        file_bytes: int = 64 * 2**20,
    ) -> None:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.num_ranks = num_ranks
        self.num_tensors = num_tensors
        self.nan_steps = nan_steps
        self.spike_steps = spike_steps
        self.clock = FixedClock()
        self._is_live = is_live
        self.writers: list[SpoolWriter] = []
        for rank in range(num_ranks):
            incarnation = hashlib.blake2b(f"{attempt}/{rank}".encode(), digest_size=16).digest()
            writer = SpoolWriter(
                incarnation_folder(run_dir, rank, incarnation),
                incarnation,
                rank,
                run_id_of(run_dir.name),
                attempt,
                clock=self.clock,
                file_bytes=file_bytes,
            )
            writer.append(FrameType.DESCRIPTOR, encode_message(self._descriptor(rank)))
            self.writers.append(writer)

    def _descriptor(self, rank: int) -> Descriptor:
        tensors = tuple(
            TensorInfo(
                id=at,
                name=f"layers.{at}.weight",
                kind="wgrad",
                shape=(100,),
                dtype="float32",
                site_pos=at,
                placements={"dp": "replicate"},
            )
            for at in range(self.num_tensors)
        )
        return Descriptor(
            version="0",
            place=Place(rank=rank, world_size=self.num_ranks, dp_rank=rank, dp_size=self.num_ranks),
            chunks=(ChunkInfo(vpp_stage=0, depth=0, blocks=tuple(f"layers.{at}" for at in range(self.num_tensors))),),
            tensors=tensors,
            row_fields=row_fields(ROW_DTYPE),
            row_bytes=ROW_DTYPE.itemsize,
        )

    def step(self, step: int) -> None:
        """Write one step of every rank, rank after rank."""
        for rank in range(self.num_ranks):
            self.rank_step(rank, step)

    def rank_step(self, rank: int, step: int, *, loss: float | None = None) -> None:
        """Write one step of one rank."""
        if not self._is_live:
            self.clock.now_ns = EPOCH_NS + step * STEP_NS + rank
        else:
            self.clock.now_ns = time.time_ns()
        noise = np.random.default_rng([step, 1])
        rows = np.zeros(self.num_tensors, ROW_DTYPE)
        rows["tensor"], rows["call_id"] = np.arange(self.num_tensors), np.arange(self.num_tensors)
        rows["kind"], rows["micro_step"], rows["site_pos"] = Kind.WGRAD, -1, np.arange(self.num_tensors)
        rows["num_folded"], rows["bad_call_id"], rows["bad_micro_step"], rows["max_micro_step"] = 1, NONE_ID, -1, -1
        scale = np.exp(0.05 * noise.standard_normal(self.num_tensors))
        rows["count"], rows["m2"], rows["m4"] = 100, 100 * scale, 300 * scale**2
        rows["min"], rows["max"] = -3 * scale, 3 * scale
        value = 2.0 + 1.0 / (1 + step) + 0.01 * float(noise.standard_normal()) if loss is None else loss
        if step in self.spike_steps:
            value *= 8
        if step in self.nan_steps:
            value = float("nan")
            if rank == 1 % self.num_ranks:
                rows["num_nan"][2], rows["count"][2], rows["bad_call_id"][2] = 5, 95, 2
        writer = self.writers[rank]
        writer.append(FrameType.HEARTBEAT, encode_message(Heartbeat(step=step, call_id=0, activity="train")))
        writer.append_rows(rows, step=step)
        end = EndStep(
            step=step, num_rows=len(rows), num_calls=len(rows), scalars={"loss": value, "lr": 1e-3}, step_time_s=0.1
        )
        writer.append(FrameType.END_STEP, encode_message(end), step=step)

    def bye(self, step: int) -> None:
        """End every rank in order."""
        for rank, writer in enumerate(self.writers):
            self.clock.now_ns = EPOCH_NS + (step + 1) * STEP_NS + rank if not self._is_live else time.time_ns()
            writer.append(FrameType.BYE, encode_message(Bye(reason="exit", step=step)))
            writer.close()


def record(run_dir: Path, num_steps: int, **options: object) -> Path:
    """Write a whole run and return its directory, replacing what was there."""
    shutil.rmtree(run_dir, ignore_errors=True)
    recording = Recording(run_dir, **options)  # type: ignore[arg-type]
    for step in range(num_steps):
        recording.step(step)
    recording.bye(num_steps - 1)
    return run_dir


def lines_of(run_dir: Path) -> Iterator[bytes]:
    """Yield every line of the anomaly files, then of the incidents."""
    for file in [*sorted((run_dir / "anomalies").glob("*.jsonl")), run_dir / "incidents.jsonl"]:
        if file.exists():
            yield from file.read_bytes().splitlines()
