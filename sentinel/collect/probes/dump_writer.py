"""Dumps on their way to the disk: bytes are counted against the quota, and no partial file is left behind."""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from sentinel.collect.probes.copy_thread import CopyThread, bytes_of
from sentinel.dump import DUMPS, HEAD_KEY, DumpHead, dump_path
from sentinel.tensor_file import header_of, total_bytes, write_tensors

DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.uint16: "U16", torch.uint32: "U32",
    torch.uint64: "U64", torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}  # fmt: skip
"""Dtype -> its name in the safetensors format."""


@dataclasses.dataclass
class StepDump:
    """The tensors that one rank dumps of one step."""

    head: DumpHead
    tensors: dict[str, torch.Tensor]
    """Name in the file -> a copy on the host, complete once `events` have happened."""
    events: list[Any]
    """One behind the copies of each accelerator's stream."""
    num_bytes: int


class DumpWriter:
    """Writes what `submit` hands over, in order, on a thread of its own."""

    def __init__(self, run_dir: Path, quota_bytes: int, report: Callable[[str, str, str], None]) -> None:
        """run_dir: dumps lie below it. quota_bytes: most bytes of dumps that this rank writes, over all attempts.

        report: called with (code, message, site) of what was not written, in the writing thread.
        """
        self.is_full = False
        """The quota is used up: nothing more need be copied."""
        self._run_dir = run_dir
        self._quota_bytes = quota_bytes
        self._report = report
        self._used: int | None = None
        self.thread: CopyThread[StepDump] = CopyThread("sentinel-dump", self._write, self._failed)

    def _failed(self, dump: StepDump, error: Exception) -> None:
        self._report("dump_failed", f"step {dump.head.step}: {type(error).__name__}: {error}", "")

    def _write(self, dump: StepDump) -> None:
        head = dump.head
        stored = {
            name: (DTYPES[tensor.dtype], tuple(tensor.shape), bytes_of(tensor)) for name, tensor in dump.tensors.items()
        }
        metadata = {"format": "pt", HEAD_KEY: msgspec.json.encode(head).decode()}
        start, _ = header_of({name: one[:2] for name, one in stored.items()}, metadata)
        num_bytes = len(start) + dump.num_bytes
        if self._used is None:
            # Of all attempts: a run that restarts has the disk that it had.
            self._used = total_bytes((self._run_dir / DUMPS).glob(f"attempt*/step*/rank{head.rank}.safetensors"))
        if self._used + num_bytes > self._quota_bytes:
            self.is_full = True
            self._report(
                "dump_quota",
                f"step {head.step} is not dumped: {num_bytes} bytes more than the {self._used} there would pass "
                f"dump.quota_bytes ({self._quota_bytes})",
                "",
            )
            return
        path = dump_path(self._run_dir, head.attempt, head.step, head.rank)
        try:
            self._used += write_tensors(path, stored, metadata)
        except FileExistsError:
            self._report("dump_failed", f"step {head.step}: {path} is there already and stays as it is", "")
        except OSError as error:
            code = "disk_full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "dump_failed"
            self._report(code, f"step {head.step} is not dumped: {path}: {error.strerror or error}", "dump")
