"""Communication: what each call of torch.distributed sends and receives, how much, from which line of code.

One row a call and tensor, `op@pkg/file.py:LINE:in` and `:out`, folded over the calls of a step; beside them a vector of all
calls. Results are read when the trainer itself waits for them, never before. No call of our own, no wait.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from sentinel.collect.hooks.chunk import Chunk
from sentinel.collect.parallel.collectives import OBJECT_OPS, Form, argument, calls, tensors_of
from sentinel.collect.parallel.waiting import WORKS
from sentinel.collect.probes.call_sites import CallSites
from sentinel.collect.probes.comm_results import CommResults
from sentinel.collect.probes.comm_rows import CommRows
from sentinel.collect.probes.comm_sites import CommCall, CommSites, ranks_of
from sentinel.collect.probes.context import ProbeContext
from sentinel.record import Kind


class Communication:
    """Watches torch.distributed while `comm` is wanted."""

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        self._recording = context.recording
        self._plan = context.plan
        self.is_due = False
        self._where = CallSites()
        self._sites = CommSites(context)
        self._rows = CommRows(context, self._sites)
        self._results = CommResults(context, self._rows)
        self._num_calls = 0
        self._is_inside = False
        self._is_installed = False
        self._is_ddp_reported = False
        events = context.events
        events.planned.subscribe("comm", self._planned)
        events.begun.subscribe("comm", self._begin)
        events.ending.subscribe("comm", self._end)
        events.rewound.subscribe("comm", self._rewind)
        events.removed.subscribe("comm", self._remove)

    # -- when ----------------------------------------------------------------------------------------------------------

    def _planned(self) -> None:
        is_wanted = self._plan.wants(Kind.COMM) and _is_available()
        if is_wanted and not self._is_installed:
            self._is_installed = True
            calls.join(self)
            WORKS.join(self._results)
        elif not is_wanted:
            self._remove()

    def _remove(self) -> None:
        self.is_due = False
        if self._is_installed:
            self._is_installed = False
            calls.leave(self)
            WORKS.leave(self._results)
            self._results.forget()

    def _look_for_ddp(self) -> None:
        # A step begins inside the forward of the wrapper, if there is one.
        module = sys.modules.get("torch.nn.parallel.distributed")
        if self._is_ddp_reported or module is None:
            return
        if getattr(module.DistributedDataParallel, "_active_ddp_module", None) is not None:
            self._is_ddp_reported = True
            self._recording.report(
                "blind_probe",
                "comm: DistributedDataParallel reduces gradients in C++, where nobody can look; wgrad is what comes of it",
                "comm DistributedDataParallel",
            )

    def _begin(self) -> None:
        self._rows.begin_step()
        self._sites.begin_step()
        self._num_calls = 0
        self.is_due = self._is_installed and bool(self._plan.due(Kind.COMM))
        if self.is_due:
            self._look_for_ddp()

    def _rewind(self, chunk: Chunk) -> None:
        self._rows.rewind()

    def _end(self) -> None:
        """Ship the step's calls."""
        self.is_due = False
        self._rows.end_step()
        self._sites.ship()

    # -- what collectives.py tells ------------------------------------------------------------------------------------

    def began(self, form: Form, group: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CommCall | None:
        """Measure what a call sends, before it is made; None: this call is not measured. As `CallListener`."""
        if self._is_inside or not self.is_due or not self._context.is_measuring():
            return None
        if not self._rows.is_trainers:
            return None
        try:
            return self._begin_call(form, group, args, kwargs)
        except Exception as error:
            self._is_inside = False
            self._context.guard(f"comm {form.op}", error)
            return None

    def _begin_call(self, form: Form, group: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CommCall | None:
        where = self._where.here(OBJECT_OPS)
        if where is None:
            return None
        site = self._sites.site(form.op, where)
        wishes = [wish for wish in site.wishes_of(self._plan) if wish.is_due and wish.measures(site.turn)]
        if not wishes:
            return None
        is_root = not form.root or _is_root(group, args, kwargs)
        sent = list(tensors_of(argument(form, form.sent, args, kwargs)))
        received = list(tensors_of(argument(form, form.received, args, kwargs)))
        if _is_captured(sent) or _is_captured(received):
            self._recording.report("blind_probe", "comm: what a CUDA graph replays is not seen", "comm graph")
            return None
        num_bytes = sum(one.numel() * one.element_size() for one in sent or received)
        fields = [float(self._num_calls), float(num_bytes), 0.0, float(_size_of(group)), 0.0]
        self._num_calls += 1
        site.calls.append(fields)
        if group is not None and site.group is None and not site.is_group_reported:
            site.group = group
        is_measured = any(wish.schedule is None or not wish.schedule.log_only for wish in wishes)
        call = CommCall(site, fields, is_measured, self._micro_step())
        call.group = group
        if call.is_measured:
            if is_root or form.root != "sends":
                self._rows.measure(call, "in", sent)
            if is_root or form.root != "receives":
                call.outputs = [weakref.ref(one) for one in received]
        self._is_inside = True
        call.began = time.perf_counter()
        return call

    def failed(self, call: CommCall) -> None:
        """Drop a call that raised: it has no result."""
        self._is_inside = False

    def ended(self, call: CommCall, result: Any) -> None:
        """Measure the result of a call that returned, or note that it is to be measured when the trainer waits for it."""
        self._is_inside = False
        call.fields[2] += time.perf_counter() - call.began
        try:
            self._results.expect(call, result)
        except Exception as error:
            self._context.guard(f"comm {call.site.op}", error)

    def arrived(self, tensor: Any) -> None:
        """Measure the result of a functional collective that the trainer has waited for."""
        self._results.arrived(tensor)

    def coalescing(self, group: Any, work: Any) -> None:
        """Note that a group coalesces its calls from now on (work: False), or has sent them (their Work, or None)."""
        self._results.coalescing(group, work, is_due=self.is_due)

    def _micro_step(self) -> int:
        chunks = self._context.chunks
        running = next((chunk for chunk in chunks if chunk.in_forward), None)
        if running is not None:
            return running.micro_step
        # Behind the forward and in a backward: the newest micro-step, so that the calls of a step fold.
        return max((chunk.num_forwards for chunk in chunks), default=1) - 1 if chunks else 0


def _is_available() -> bool:
    """Whether this torch can communicate at all; whether a group exists by now does not matter."""
    return sys.modules.get("torch._C._distributed_c10d") is not None


def _is_captured(tensors: list[torch.Tensor]) -> bool:
    """Whether a CUDA graph is being recorded: what is launched now would run again at each replay."""
    return bool(tensors) and tensors[0].device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _is_root(group: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    for one in (*args[1:], *kwargs.values()):
        root = one if type(one) is int else getattr(one, "rootRank", None)
        if root is not None:
            return bool(root == group.rank())
    return True


def _size_of(group: Any) -> int:
    """Return the number of ranks of a group, a mesh, or one dimension of a mesh; 0: not known."""
    if isinstance(group, tuple) and len(group) == 2 and hasattr(group[0], "size"):
        return int(group[0].size(group[1]))
    size = getattr(group, "size", None)
    return int(size()) if callable(size) else len(ranks_of(group))
