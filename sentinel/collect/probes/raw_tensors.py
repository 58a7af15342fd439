"""Raw tensors: each rank writes its part of the measured tensors that the config or a command selects."""

from __future__ import annotations

import functools
from typing import Any

import torch

from sentinel.collect.hooks.chunk import Chunk
from sentinel.collect.kernels.tensor_memory import plain
from sentinel.collect.probes.context import ProbeContext
from sentinel.collect.probes.copy_thread import events_behind
from sentinel.collect.probes.dump_pieces import piece_of
from sentinel.collect.probes.dump_writer import DTYPES, DumpWriter, StepDump
from sentinel.collect.rows.recording import Observer
from sentinel.collect.rows.tensor_table import TensorEntry
from sentinel.collect.schedule.copy_requests import CopyRequests
from sentinel.collect.schedule.wishes import Dump, Request
from sentinel.dump import DumpHead, Piece, key_of
from sentinel.kinds import BACKWARD_KINDS, FORWARD_KINDS
from sentinel.record import Kind

CLOSE_S = 5.0
"""Most seconds that a trainer waits, when it ends, for dumps on their way to the disk."""


class TensorDump:
    """Copies the tensors that requests select as they pass, and hands them to the writer when the step ends. Never waits."""

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        self._requests = CopyRequests(context.plan, Dump)
        self._recording = context.recording
        config = context.config.dump
        self._in_flight_bytes = config.in_flight_bytes
        report = functools.partial(_report, context)
        self._writer = DumpWriter(context.attempt.directory, config.quota_bytes, report)
        self._num_taken = 0
        """Bytes ever copied; those that wait are the ones the writer has not counted."""
        self._pieces: dict[str, Piece] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._left_out: dict[str, str] = {}
        self._asked: dict[str, None] = {}
        self._first_n: int | None = 0
        self._num_bytes = 0
        self._params: dict[tuple[int, str], Any] | None = None
        self._is_installed = False
        if config.kinds:
            last = config.end_step
            context.plan.requests.enable(
                config.kinds, config.targets, per_micro_step=False, first_step=config.start_step,
                for_steps=None if last is None else last - config.start_step + 1, step_interval=config.step_interval,
                copy=Dump(first_n=config.first_n),
            )  # fmt: skip
        self._observer = Observer("dump", self._look)
        events = context.events
        events.planned.subscribe("dump", self._planned)
        events.ending.subscribe("dump", self._end)
        events.rewound.subscribe("dump", self._rewind)
        events.removed.subscribe("dump", self._remove)

    def _planned(self) -> None:
        observers = self._recording.observers
        may_come = bool(self._requests.standing)
        if may_come and not self._is_installed:
            self._is_installed = True
            observers.append(self._observer)
        elif not may_come and self._is_installed:
            self._is_installed = False
            observers.remove(self._observer)

    def _remove(self) -> None:
        if self._is_installed:
            self._is_installed = False
            self._recording.observers.remove(self._observer)
        if not self._writer.thread.close(CLOSE_S):
            _report(self._context, "dump_failed", f"dumps were still on their way to the disk after {CLOSE_S:g} s", "close")

    def _look(self, entry: TensorEntry, tensor: torch.Tensor, micro_step: int) -> None:
        """Take a tensor that a request of this step means."""
        requests = self._requests.of(entry)
        if not requests or not self._context.is_measuring():
            return
        kind = Kind(entry.kind)
        key = base = key_of(kind.label, entry.name, micro_step)
        again = 2
        while key in self._pieces or key in self._left_out:
            key, again = f"{base}#{again}", again + 1
        try:
            self._take(key, entry, tensor, micro_step, requests)
        except Exception as error:
            # What cannot be copied must neither end the step's dump nor stay unsaid.
            self._left_out[key] = f"{type(error).__name__}: {error}"[:300]

    def _take(
        self, key: str, entry: TensorEntry, tensor: torch.Tensor, micro_step: int, requests: list[tuple[Request, Dump]]
    ) -> None:
        limits = [dump.first_n for _, dump in requests]
        first_n = None if None in limits else max(one for one in limits if one is not None)
        local = plain(tensor)
        if local.dtype not in DTYPES:
            raise TypeError(f"the file format has no {local.dtype}")
        part = local[tuple(slice(0, first_n) for _ in local.shape)] if first_n is not None else local
        num_bytes = part.numel() * part.element_size()
        if self._writer.is_full:
            self._left_out[key] = "dump.quota_bytes is used up"
            return
        if self._num_taken - self._writer.thread.num_written + num_bytes > self._in_flight_bytes:
            self._left_out[key] = f"more than dump.in_flight_bytes ({self._in_flight_bytes}) were on their way to the disk"
            return
        whole = self._param(entry)
        piece = piece_of(entry, local, micro_step, self._context.place(), whole, first_n)
        with torch.no_grad():
            self._tensors[key] = _copied(part)
        self._pieces[key] = piece
        self._num_taken += num_bytes
        self._num_bytes += num_bytes
        self._first_n = None if first_n is None or self._first_n is None else max(self._first_n, first_n)
        self._asked.update(dict.fromkeys(one.command for one, _ in requests if one.command))

    def _param(self, entry: TensorEntry) -> Any:
        """Return the parameter that an entry belongs to, for its placements; None: it belongs to none."""
        if Kind(entry.kind) in FORWARD_KINDS or Kind(entry.kind) in BACKWARD_KINDS:
            return None
        if self._params is None:
            self._params = {(one.entry.chunk, one.entry.name): one.param for one in self._context.parameters.all}
        return self._params.get((entry.chunk, entry.name.partition(":")[0]))

    def _rewind(self, chunk: Chunk) -> None:
        """A forward raised: what it showed is forgotten."""
        for key, piece in list(self._pieces.items()):
            is_its = piece.chunk == chunk.vpp_stage and piece.micro_step == chunk.micro_step
            if is_its and Kind.of(piece.kind) in FORWARD_KINDS:
                del self._pieces[key]
                tensor = self._tensors.pop(key)
                num_bytes = tensor.numel() * tensor.element_size()
                self._num_bytes -= num_bytes
                self._num_taken -= num_bytes

    def _end(self) -> None:
        """Hand the step over."""
        self._params = None
        if self._is_installed and self._requests.due:
            self._report_unseen()
        if not self._pieces and not self._left_out:
            return
        if self._left_out:
            key, why = next(iter(self._left_out.items()))
            message = f"{len(self._left_out)} tensors of a step are not dumped, the first {key}: {why}"
            _report(self._context, "dump_incomplete", message, why[:60])
        if self._pieces:
            events = events_behind(self._tensors.values())
            self._writer.thread.submit(StepDump(self._head(), self._tensors, events, self._num_bytes))
        self._pieces, self._tensors, self._left_out, self._asked = {}, {}, {}, {}
        self._first_n, self._num_bytes = 0, 0

    def _report_unseen(self) -> None:
        """Report kinds that were requested of all modules and passed nowhere: those inside a compiled graph, for example."""
        seen = {piece.kind for piece in self._pieces.values()} | {key.partition("/")[0] for key in self._left_out}
        wanted = {kind.label for one in self._requests.due if not one.targets for kind in one.kinds}
        for label in sorted(wanted - seen):
            message = f"a dump of {label} was asked for, and this step showed no such tensor in eager code"
            _report(self._context, "dump_empty", message, label)

    def _head(self) -> DumpHead:
        descriptor = self._context.descriptor()
        attempt = self._context.attempt
        return DumpHead(
            run=attempt.run, attempt=attempt.attempt, rank=descriptor.place.rank, step=self._context.step(),
            place=descriptor.place, chunks=descriptor.chunks, pieces=self._pieces, first_n=self._first_n,
            left_out=self._left_out, layer_offset=descriptor.layer_offset, name_map=descriptor.name_map,
            commands=tuple(self._asked),
        )  # fmt: skip


def _report(context: ProbeContext, code: str, message: str, site: str) -> None:
    context.recording.report(code, message, site, context.step())


def _copied(part: torch.Tensor) -> torch.Tensor:
    """Return a copy on the host, or a pinned one on its way there: the trainer writes into its own tensor soon."""
    if part.device.type == "cpu":
        return part.clone(memory_format=torch.contiguous_format)
    pinned = torch.empty(part.shape, dtype=part.dtype, device="cpu", pin_memory=True)
    return pinned.copy_(part, non_blocking=True)
