"""Results of calls of torch.distributed: read when the trainer itself has waited for them, never before."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from sentinel.collect.parallel.collectives import tensors_of
from sentinel.collect.parallel.placements import is_async, local_of
from sentinel.collect.probes.comm_rows import CommRows
from sentinel.collect.probes.comm_sites import CommCall
from sentinel.collect.probes.context import ProbeContext


class Awaited:
    """Calls that one Work stands for, until the trainer waits for it or for a future of it."""

    def __init__(self, calls: list[CommCall]) -> None:
        self.calls = calls
        self.num_holders = 0
        """Objects left by which it can be waited for."""
        self.is_done = False


class CommResults:
    """Decides when the result of a call is complete. `waiting.WaitWatcher` calls it at every wait."""

    def __init__(self, context: ProbeContext, rows: CommRows) -> None:
        self._context = context
        self._rows = rows
        self._works: dict[int, tuple[weakref.ref[Any], list[Awaited]]] = {}
        """id of a Work, or of a future of some, that was not waited for yet -> the calls it stands for."""
        self._results: dict[int, tuple[weakref.ref[torch.Tensor], CommCall]] = {}
        """Address of the memory that a functional collective still writes -> (its tensor, the call)."""
        self._held: dict[int, list[CommCall]] = {}
        """id of a group that is coalescing -> its calls."""

    def forget(self) -> None:
        """Drop all results that are not complete."""
        self._works, self._results, self._held = {}, {}, {}

    def expect(self, call: CommCall, result: Any) -> None:
        """Measure the result of a call now if it is complete, else when the trainer waits for it.

        result: Work or tensors.
        """
        held = self._held.get(id(call.group))
        if held is not None:
            held.append(call)
        elif hasattr(result, "wait") and not isinstance(result, torch.Tensor):
            self._hold(result, [Awaited([call])])
        elif isinstance(result, (torch.Tensor, list, tuple)):
            self._expect_tensors(call, list(tensors_of(result)))
        else:
            self._rows.finish(call)

    def _expect_tensors(self, call: CommCall, results: list[torch.Tensor]) -> None:
        """A functional collective gave tensors: those of an async kind are complete when their consumer waits."""
        for one in results:
            inner = local_of(one)
            if call.is_measured and is_async(inner) and not getattr(inner, "completed", False):
                elem = getattr(inner, "elem", inner)
                self._results[elem.untyped_storage().data_ptr()] = (weakref.ref(elem), call)
            elif call.is_measured:
                self._rows.measure(call, "out", [inner])
                call.fields[4] = 1.0

    def _hold(self, work: Any, awaited: list[Awaited]) -> None:
        """Take note that who waits for this object waits for those calls."""
        key = id(work)
        probe = weakref.ref(self)

        def gone(_: Any) -> None:
            self = probe()
            found = self._works.pop(key, None) if self is not None else None
            if self is None or found is None:
                return
            for lost in found[1]:
                lost.num_holders -= 1
                if not lost.num_holders and not lost.is_done:
                    for call in lost.calls:
                        self._report_unread(call)

        before = self._works.pop(key, None)
        held = before[1] if before is not None and before[0]() is work else []
        for one in awaited:
            one.num_holders += 1
        self._works[key] = (weakref.ref(work, gone), [*held, *awaited])

    def _report_unread(self, call: CommCall) -> None:
        if call.outputs:
            self._context.recording.report(
                "comm_unread",
                f"no wait for the work of {call.site.name} was seen (for a communication hook of DDP, C++ waits): what it "
                "received is not measured",
                call.site.name,
            )

    def enter(self) -> None:
        """Do nothing when a wait begins."""

    def add(self, seconds: float) -> None:
        """Do nothing: `done` says for which Work the seconds were waited."""

    def promised(self, work: Any, future: Any) -> None:
        """Let a wait for this future count as one for the Work, which may be freed by then."""
        found = self._works.get(id(work)) if self._works else None
        if found is not None and found[0]() is work:
            self._hold(future, found[1])

    def done(self, work: Any, seconds: float) -> None:
        """Measure what a Work received, on the current stream: the trainer has waited for it.

        seconds: host time of the wait.
        """
        found = self._works.pop(id(work), None) if self._works else None
        if found is None or found[0]() is not work:
            return
        for awaited in found[1]:
            awaited.num_holders -= 1
            is_done, awaited.is_done = awaited.is_done, True
            for call in awaited.calls:
                call.fields[2] += seconds
                try:
                    if not is_done:
                        self._rows.finish(call)
                except Exception as error:
                    self._context.guard(f"comm {call.site.op}", error)

    def arrived(self, tensor: Any) -> None:
        """Measure the result of a functional collective that the trainer has waited for."""
        if not self._results:
            return
        try:
            inner = local_of(tensor)
            found = self._results.pop(getattr(inner, "elem", inner).untyped_storage().data_ptr(), None)
            whole = found[0]() if found is not None else None
            if found is not None and whole is not None:
                found[1].fields[4] = 1.0
                self._rows.measure(found[1], "out", [whole])
        except Exception as error:
            self._context.guard("comm wait_tensor", error)

    def coalescing(self, group: Any, work: Any, *, is_due: bool) -> None:
        """Note that a group coalesces its calls from now on (work: False), or has sent them (their Work, or None).

        is_due: calls are measured in this step.
        """
        if work is False:
            if is_due:
                self._held[id(group)] = []
            return
        held = self._held.pop(id(group), None)
        if not held:
            return
        try:
            if work is not None:
                self._hold(work, [Awaited(held)])
                return
            for call in held:
                self._rows.finish(call)
        except Exception as error:
            self._context.guard("comm coalescing", error)
