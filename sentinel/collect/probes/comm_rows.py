"""Rows of what calls of torch.distributed send and receive."""

from __future__ import annotations

import threading
from typing import Any

import torch

from sentinel.collect.hooks.backwards import in_backward
from sentinel.collect.parallel.placements import arrived, local_of
from sentinel.collect.probes.comm_sites import CommCall, CommSites
from sentinel.collect.probes.context import ProbeContext
from sentinel.record import Kind

MAX_MEMBERS = 16
"""Tensors of one call that have a series each; a bound on series: a longer list (a gather over many ranks) is one series."""


class CommRows:
    """Decides which tensors of a call are measured: those of the trainer's own thread, while a step runs."""

    def __init__(self, context: ProbeContext, sites: CommSites) -> None:
        self._context = context
        self._recording = context.recording
        self._sites = sites
        self._thread = threading.get_ident()
        self._num_rows = 0
        self._streams: set[Any] = set()
        """Of an accelerator, on which rows of this step were measured."""

    @property
    def is_trainers(self) -> bool:
        """Whether this thread is the trainer's: others (a checkpoint on its way to the disk) communicate too.

        A device's backward has a thread of its own.
        """
        return threading.get_ident() == self._thread or in_backward()

    def begin_step(self) -> None:
        """Begin a step; the calling thread is the trainer's."""
        self._thread = threading.get_ident()
        self._num_rows = 0

    def rewind(self) -> None:
        """Count the rows anew after a forward raised and its rows were dropped."""
        rows = self._recording.rows
        self._num_rows = int((rows.array["kind"][: rows.num_rows] == Kind.COMM).sum()) if self._num_rows else 0

    def end_step(self) -> None:
        """Have the current stream wait for those that rows of this step were measured on, and count the rows."""
        for stream in self._streams:
            torch.get_device_module(stream.device).current_stream(stream.device).wait_stream(stream)
        self._streams = set()
        if self._num_rows:
            self._context.count({Kind.COMM.label: self._num_rows})

    def finish(self, call: CommCall) -> None:
        """Measure what a call received; it is complete and was waited for."""
        call.fields[4] = 1.0
        if call.is_measured:
            received = [one for one in (ref() for ref in call.outputs) if one is not None]
            self.measure(call, "out", received)

    def measure(self, call: CommCall, role: str, tensors: list[torch.Tensor]) -> None:
        """Measure tensors of a call. role: `in`, what it sends, or `out`, what it received. Does not wait."""
        # A result that comes between two steps belongs to none; threads that are not the trainer's write no rows.
        if not self._context.is_measuring() or not self.is_trainers:
            return
        with torch.no_grad():
            for at, tensor in enumerate(tensors):
                path = f"{role}.{at}" if 1 < len(tensors) <= MAX_MEMBERS else role
                # What a collective is given is waited for by the collective itself: right behind us.
                local = arrived(tensor) if role == "in" else local_of(tensor)
                entry = self._sites.entry(call.site, path, local)
                self._recording.observe(entry, local, call.micro_step)
                self._num_rows += 1
                if local.device.type != "cpu":
                    self._streams.add(torch.get_device_module(local.device).current_stream(local.device))
