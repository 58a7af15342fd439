"""Traces: small pictures of the tensors that a command chooses, taken as they pass and kept in a ring of files."""

from __future__ import annotations

import functools
import time
from typing import Any

import torch

from sentinel.collect.hooks.chunk import Chunk
from sentinel.collect.kernels.tensor_memory import plain
from sentinel.collect.probes.compression import compressed
from sentinel.collect.probes.context import ProbeContext
from sentinel.collect.probes.copy_thread import events_behind
from sentinel.collect.probes.own_vectors import OwnVectors
from sentinel.collect.probes.trace_writer import StepTrace, TraceWriter
from sentinel.collect.rows.pinned import PINNED
from sentinel.collect.rows.tensor_table import TensorEntry
from sentinel.collect.schedule.copy_requests import CopyRequests
from sentinel.dump import key_of
from sentinel.kinds import FORWARD_KINDS
from sentinel.record import Kind
from sentinel.trace import Compressor, Trace, TracedTensor, TraceHead

CLOSE_S = 5.0
"""Most seconds that a trainer waits, when it ends, for traces on their way to the disk."""
MOST_TENSORS = 1024
"""Pictures of one step; a bound on launches, past which tensors are left out and named."""
MOST_NAMED = 100
"""Tensors left out of one step that are named; further ones are counted."""
TOKENS = Compressor(name="none")


class TensorTrace:
    """Has the tensors that requests select compressed on their device, and hands them to the writer when the step ends."""

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        self._requests = CopyRequests(context.plan, Trace)
        config = context.config.trace
        self._in_flight_bytes = config.in_flight_bytes
        self._vectors = OwnVectors(config.vectors)
        self._writer = TraceWriter(context.attempt.directory, config.ring_bytes, functools.partial(_report, context))
        self._num_taken = 0
        """Bytes ever handed over; those that wait are the ones that the thread has not counted."""
        self._num_bytes = 0
        """Of the running step's pictures."""
        self._is_full = False
        """The running step has a picture for which memory has no room; it takes no further one."""
        self._num_dropped = 0
        self._tensors: dict[str, torch.Tensor] = {}
        self._traced: dict[str, TracedTensor] = {}
        self._left_out: dict[str, str] = {}
        self._num_unnamed = 0
        """Tensors left out of the running step beyond those."""
        self._asked: dict[str, None] = {}
        self._handles: list[Any] = []
        context.look_while("trace", lambda: bool(self._requests.standing), self._look)
        context.events.planned.subscribe("trace", self._planned)
        context.events.ending.subscribe("trace", self._end)
        context.events.rewound.subscribe("trace", self._rewind)
        context.events.removed.subscribe("trace", self._remove)

    def _planned(self) -> None:
        """Look at what the model is given, where a request wants tokens."""
        wants_tokens = any(trace.tokens for trace in self._requests.standing)
        if wants_tokens == bool(self._handles):
            return
        self._leave_inputs()
        if wants_tokens:
            context = self._context
            for chunk in context.chunks:
                look = functools.partial(self._look_at_inputs, chunk)
                self._handles.append(context.watch("trace", chunk, "", chunk.root, look))

    def _leave_inputs(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _remove(self) -> None:
        self._leave_inputs()
        if not self._writer.thread.close(CLOSE_S):
            _report(
                self._context, "trace_failed", f"traces were still on their way to the disk after {CLOSE_S:g} s", "close"
            )

    # -- what passes -------------------------------------------------------------------------------------------------------

    def _look(self, entry: TensorEntry, tensor: torch.Tensor, micro_step: int) -> None:
        """Take a tensor that a request of this step means."""
        asked = [
            (request, trace) for request, trace in self._requests.of(entry) if micro_step <= 0 or trace.every_micro_step
        ]
        if not asked or not self._context.is_measuring():
            return
        self._asked.update(dict.fromkeys(request.command for request, _ in asked if request.command))
        for compressor in dict.fromkeys(trace.compressor for _, trace in asked):
            self._take(Kind(entry.kind).label, entry.name, entry.chunk, tensor, micro_step, compressor)

    def _look_at_inputs(
        self, chunk: Chunk, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, micro_step: int
    ) -> None:
        """Take the first tensor of whole numbers that the model is given: its tokens."""
        due = [(one, one.copy) for one in self._requests.due if isinstance(one.copy, Trace) and one.copy.tokens]
        asked = [request for request, trace in due if micro_step <= 0 or trace.every_micro_step]
        if not asked:
            return
        given = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
        tokens = next((one for one in given if one.dtype in (torch.int64, torch.int32) and one.dim() >= 1), None)
        if tokens is None:
            self._leave_out("tokens", "the model is given no tensor of whole numbers")
            return
        self._asked.update(dict.fromkeys(request.command for request in asked if request.command))
        self._take("tokens", "", chunk.vpp_stage, tokens, micro_step, TOKENS)

    def _take(self, kind: str, name: str, chunk: int, tensor: torch.Tensor, micro_step: int, compressor: Compressor) -> None:
        key = base = key_of(kind, name, micro_step)
        again = 2
        while key in self._traced or key in self._left_out:
            key, again = f"{base}#{again}", again + 1
        if len(self._traced) >= MOST_TENSORS:
            self._leave_out(key, f"more than {MOST_TENSORS} tensors of one step are asked for")
            return
        if self._is_full:
            self._leave_out(key, self._no_room)
            return
        try:
            local = plain(tensor)
            parts = compressed(local, compressor, self._vectors.directions)
        except Exception as error:
            self._leave_out(key, f"{type(error).__name__}: {error}"[:300])
            return
        num_bytes = sum(part.numel() * part.element_size() for part in parts.values())
        if self._num_waiting + self._num_bytes + num_bytes > self._in_flight_bytes:
            self._is_full = True
            self._leave_out(key, self._no_room)
            return
        self._num_bytes += num_bytes
        for word, part in parts.items():
            self._tensors[f"{key}:{word}" if word else key] = _to_host(part)
        self._traced[key] = TracedTensor(
            kind=kind, name=name, chunk=chunk, micro_step=micro_step, shape=tuple(local.shape),
            dtype=str(local.dtype).removeprefix("torch."), compressor=compressor, parts=tuple(filter(None, parts)),
        )  # fmt: skip

    @property
    def _num_waiting(self) -> int:
        """Bytes of earlier steps on their way to the disk."""
        return self._num_taken - self._writer.thread.num_written

    @property
    def _no_room(self) -> str:
        return f"pictures of more than trace.in_flight_bytes ({self._in_flight_bytes}) are asked for; name fewer modules"

    def _leave_out(self, key: str, why: str) -> None:
        if len(self._left_out) < MOST_NAMED:
            self._left_out[key] = why
        else:
            self._num_unnamed += 1

    def _rewind(self, chunk: Chunk) -> None:
        """A forward raised: what it showed is forgotten."""
        for key, one in list(self._traced.items()):
            is_its = one.chunk == chunk.vpp_stage and one.micro_step == chunk.micro_step
            if is_its and (one.kind == "tokens" or Kind.of(one.kind) in FORWARD_KINDS):
                del self._traced[key]
                for word in ("", *one.parts):
                    gone = self._tensors.pop(f"{key}:{word}" if word else key)
                    self._num_bytes -= gone.numel() * gone.element_size()

    # -- the step's end ----------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """Hand the step over, or drop it where earlier ones are still on their way."""
        if not self._traced and not self._left_out:
            return
        if self._is_full and self._num_waiting:
            self._num_dropped += 1
        else:
            if self._num_unnamed:
                self._left_out["others"] = f"{self._num_unnamed} more tensors are not shown"
            self._num_taken += self._num_bytes
            events = events_behind(self._tensors.values())
            self._writer.thread.submit(StepTrace(self._head(), self._tensors, events, self._num_bytes))
        self._tensors, self._traced, self._left_out, self._asked = {}, {}, {}, {}
        self._num_bytes, self._num_unnamed, self._is_full = 0, 0, False

    def _head(self) -> TraceHead:
        attempt = self._context.attempt
        return TraceHead(
            run=attempt.run, attempt=attempt.attempt, rank=self._context.place().rank, step=self._context.step(),
            time=time.time(), tensors=self._traced, left_out=self._left_out, num_dropped=self._num_dropped,
            commands=tuple(self._asked),
        )  # fmt: skip


def _report(context: ProbeContext, code: str, message: str, site: str) -> None:
    context.recording.report(code, message, site, context.step())


def _to_host(part: torch.Tensor) -> torch.Tensor:
    """Return a picture on the host, or pinned and on its way there. Nobody else holds its memory."""
    if part.device.type == "cpu":
        return part.clone(memory_format=torch.contiguous_format)
    return PINNED.empty(tuple(part.shape), part.dtype).copy_(part, non_blocking=True)
