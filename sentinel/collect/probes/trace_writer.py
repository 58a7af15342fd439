"""Traces on their way to the disk: a ring of each rank's newest steps, whose oldest go when its bytes are used up."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import shutil
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from sentinel.collect.probes.copy_thread import CopyThread, bytes_of
from sentinel.collect.probes.dump_writer import DTYPES
from sentinel.dump import HEAD_KEY
from sentinel.tensor_file import write_tensors
from sentinel.trace import TRACES, TraceHead, ring_dir, step_path

_ATTEMPT = re.compile(r"attempt(\d{1,9})")
_STEP = re.compile(r"step(\d{1,18})\.safetensors")


@dataclasses.dataclass
class StepTrace:
    """The pictures that one rank makes of one step."""

    head: TraceHead
    tensors: dict[str, torch.Tensor]
    """Name in the file -> on the host, complete once `events` have happened."""
    events: list[Any]
    num_bytes: int


class TraceWriter:
    """Writes what `thread` is handed, and keeps the newest `ring_bytes` of it."""

    def __init__(self, run_dir: Path, ring_bytes: int, report: Callable[[str, str, str], None]) -> None:
        """report: called with (code, message, site) of what was not written, in the writing thread."""
        self._run_dir = run_dir
        self._ring_bytes = ring_bytes
        self._report = report
        self._ring: deque[tuple[Path, int]] | None = None
        """(file, its bytes), the oldest first; None: not looked for yet."""
        self._num_bytes = 0
        self.thread: CopyThread[StepTrace] = CopyThread("sentinel-trace", self._write, self._failed)

    def _failed(self, trace: StepTrace, error: Exception) -> None:
        self._report("trace_failed", f"step {trace.head.step}: {type(error).__name__}: {error}", "")

    def _write(self, trace: StepTrace) -> None:
        head = trace.head
        folder = ring_dir(self._run_dir, head.attempt, head.rank)
        stored = {name: (DTYPES[one.dtype], tuple(one.shape), bytes_of(one)) for name, one in trace.tensors.items()}
        metadata = {"format": "pt", HEAD_KEY: msgspec.json.encode(head).decode()}
        if self._ring is None:
            self._ring = _found(folder)
            _forget_older(self._run_dir, head)
            self._num_bytes = sum(size for _, size in self._ring)
        path = step_path(folder, head.step)
        try:
            size = write_tensors(path, stored, metadata)
        except FileExistsError:
            self._report("trace_failed", f"step {head.step}: {path} is there already and stays as it is", "")
        except OSError as error:
            code = "disk_full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "trace_failed"
            self._report(code, f"step {head.step} is not traced: {path}: {error.strerror or error}", "trace")
        else:
            self._ring.append((path, size))
            self._num_bytes += size
            self._let_go(self._ring)

    def _let_go(self, ring: deque[tuple[Path, int]]) -> None:
        """Delete the oldest steps past the bound; the newest stays, however large it is."""
        while len(ring) > 1 and self._num_bytes > self._ring_bytes:
            path, size = ring.popleft()
            self._num_bytes -= size
            path.unlink(missing_ok=True)


def _forget_older(run_dir: Path, head: TraceHead) -> None:
    """Delete what this rank traced in attempts before the last one."""
    own = {int(match[1]): one for one in (run_dir / TRACES).glob("attempt*") if (match := _ATTEMPT.fullmatch(one.name))}
    for attempt in sorted(one for one in own if one < head.attempt)[:-1]:
        shutil.rmtree(ring_dir(run_dir, attempt, head.rank), ignore_errors=True)


def _found(folder: Path) -> deque[tuple[Path, int]]:
    """Return what a former process of this rank left in its ring."""
    try:
        there = [(int(match[1]), one) for one in os.scandir(folder) if (match := _STEP.fullmatch(one.name))]
    except FileNotFoundError:
        return deque()
    return deque((Path(one.path), one.stat().st_size) for _, one in sorted(there, key=lambda pair: pair[0]))
