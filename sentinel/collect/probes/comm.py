"""Communication: what each call of torch.distributed sends and receives, how much, from which line of code.

One row a call and tensor, `op@pkg/file.py:LINE:in` and `:out`, folded over the calls of a step; beside them a vector of all
calls. Results are read when the trainer itself waits for them, never before. No call of our own, no wait.
"""

from __future__ import annotations

import fnmatch
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Mapping
from typing import Any

import torch

from sentinel.collect.hooks.chunk import Chunk, in_backward
from sentinel.collect.parallel.placements import arrived, is_async, local_of
from sentinel.collect.parallel.waiting import WORKS
from sentinel.collect.probes.call_sites import CallSite, CallSites
from sentinel.collect.probes.collectives import OBJECT_OPS, Form, argument, calls, tensors_of
from sentinel.collect.probes.context import ProbeContext
from sentinel.collect.rows.tensor_table import TensorEntry
from sentinel.collect.schedule.plan import Wish
from sentinel.place import AXES
from sentinel.record import Flag, Kind
from sentinel.target import Target

MAX_MEMBERS = 16
"""Tensors of one call that have a series each; a longer list (a gather over many ranks) is one series (chosen)."""
MAX_SITES = 4096
"""Call sites told apart; what is more shares one name (chosen)."""
CALL_FIELDS = "call,field"
"""Axis of the vector `calls`: (place among the step's calls, bytes sent or else received, seconds of the host in the call
and in waiting for it, ranks of the group, 1 when its result was waited for)."""


class CommSite:
    """One op at one line of code."""

    def __init__(self, op: str, where: CallSite, name: str) -> None:
        self.op = op
        self.where = where
        self.name = name
        self.generation = -1
        self.wishes: list[Wish] = []
        """The plan's wishes that mean it."""
        self.calls: list[list[float]] = []
        """Of the running step, as CALL_FIELDS."""
        self.group: Any = None
        self.is_group_reported = False
        self.turn = zlib.crc32(name.encode())
        """Where it stands among the turns of a staggered wish: alike on all ranks."""

    def means(self, wish: Wish) -> bool:
        """Whether the code-line filter of a wish lets it through; no filter means every call.

        The targets of a request for other kinds as well name modules: it means every call.
        """
        is_filter = wish.schedule is not None or wish.kinds == {Kind.COMM}
        return not wish.targets or not is_filter or any(self._is_meant(target) for target in wish.targets)

    def _is_meant(self, target: Target) -> bool:
        where = self.where
        file = where.file.rpartition("/")[2]
        function = where.function.rpartition(".")[2]
        names = (self.op, self.name, where.file, file, str(where), f"{file}:{where.line}", where.function, function)
        if target.pattern is not None:
            return any(target.pattern.fullmatch(name) for name in names)
        return any(fnmatch.fnmatchcase(name, target.text) for name in names)


class CommCall:
    """One call under way."""

    def __init__(self, site: CommSite, fields: list[float], is_measured: bool, micro_step: int) -> None:
        self.site = site
        self.fields = fields
        self.is_measured = is_measured
        self.micro_step = micro_step
        self.began = time.perf_counter()
        self.group: Any = None
        self.outputs: list[weakref.ref[torch.Tensor]] = []
        """Weak: nothing lives longer because we look at it."""


class Awaited:
    """Calls that went out as one piece of work, until somebody waits for it, or for a future of it."""

    def __init__(self, calls: list[CommCall]) -> None:
        self.calls = calls
        self.num_holders = 0
        """Objects left by which it can be waited for."""
        self.is_done = False


class Communication:
    """Watches torch.distributed while `comm` is wanted."""

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        self._recording = context.recording
        self._plan = context.plan
        self.is_due = False
        self._where = CallSites()
        self._sites: dict[tuple[str, CallSite], CommSite] = {}
        self._entries: dict[tuple[CommSite, str], TensorEntry] = {}
        self._due: list[Wish] = []
        self._reported: dict[int, Any] = {}
        """id of an entry -> shape and dtype as the table knows them in this step."""
        self._num_calls = 0
        self._num_rows = 0
        self._thread = threading.get_ident()
        self._is_inside = False
        self._works: dict[int, tuple[weakref.ref[Any], list[Awaited]]] = {}
        """id of a Work, or of a future of some, that nobody has waited for yet -> what it stands for."""
        self._results: dict[int, tuple[weakref.ref[torch.Tensor], CommCall]] = {}
        """Address of the memory that a functional collective still writes -> (its tensor, the call)."""
        self._held: dict[int, list[CommCall]] = {}
        """id of a group that is coalescing -> its calls."""
        self._streams: set[Any] = set()
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
            WORKS.join(self)
        elif not is_wanted:
            self._remove()

    def _remove(self) -> None:
        self.is_due = False
        if self._is_installed:
            self._is_installed = False
            calls.leave(self)
            WORKS.leave(self)
            self._works, self._results, self._held = {}, {}, {}

    def _look_for_ddp(self) -> None:
        # A step begins inside the forward of the wrapper, if there is one.
        module = sys.modules.get("torch.nn.parallel.distributed")
        if self._is_ddp_reported or module is None:
            return
        if getattr(module.DistributedDataParallel, "_active_ddp_module", None) is not None:
            self._is_ddp_reported = True
            self._recording.tell(
                "blind_probe",
                "comm: DistributedDataParallel reduces gradients in C++, where nobody can look; wgrad is what comes of it",
                "comm DistributedDataParallel",
            )

    def _begin(self) -> None:
        self._thread = threading.get_ident()
        self._due = self._plan.due(Kind.COMM) if self._is_installed else []
        self._num_calls = self._num_rows = 0
        self._reported.clear()
        self.is_due = bool(self._due)
        if self.is_due:
            self._look_for_ddp()

    def _rewind(self, chunk: Chunk) -> None:
        """A forward raised and its rows are forgotten; its calls were made all the same."""
        rows = self._recording.rows
        self._num_rows = int((rows.array["kind"][: rows.num_rows] == Kind.COMM).sum()) if self._num_rows else 0

    def _end(self) -> None:
        """Ship the step's calls; let what was measured on other streams be done before the rows leave."""
        self.is_due = False
        for stream in self._streams:
            torch.get_device_module(stream.device).current_stream(stream.device).wait_stream(stream)
        self._streams = set()
        if self._num_rows:
            self._context.count({Kind.COMM.label: self._num_rows})
        for site in self._sites.values():
            if site.calls:
                self._ship(site)

    def _ship(self, site: CommSite) -> None:
        entry = self._entry(site, "", None)
        values = torch.tensor(site.calls, dtype=torch.float64)
        site.calls = []
        self._recording.vector(entry, "calls", values, CALL_FIELDS)
        if not site.is_group_reported:
            site.is_group_reported = True
            ranks = _ranks_of(site.group)
            if ranks:
                self._recording.vector(entry, "group", torch.tensor(ranks, dtype=torch.int64), "rank")
        site.group = None

    # -- what collectives.py and waiting.py tell ---------------------------------------------------------------------

    def began(self, form: Form, group: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CommCall | None:
        """A call is about to be made: look at what it sends."""
        if self._is_inside or not self.is_due or not self._context.is_measuring():
            return None
        # Other threads (a checkpoint on its way to the disk) communicate too; a device's backward has a thread of its own.
        if threading.get_ident() != self._thread and not in_backward():
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
        site = self._site(form.op, where)
        wishes = [wish for wish in self._wishes_of(site) if wish.is_due and wish.measures(site.turn)]
        if not wishes:
            return None
        is_root = not form.root or _is_root(group, args, kwargs)
        sent = list(tensors_of(argument(form, form.sent, args, kwargs)))
        received = list(tensors_of(argument(form, form.received, args, kwargs)))
        if _is_captured(sent) or _is_captured(received):
            self._recording.tell("blind_probe", "comm: what a CUDA graph replays is not seen", "comm graph")
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
                self._measure(call, "in", sent)
            if is_root or form.root != "receives":
                call.outputs = [weakref.ref(one) for one in received]
        self._is_inside = True
        call.began = time.perf_counter()
        return call

    def failed(self, call: CommCall) -> None:
        """The call raised: nothing came out."""
        self._is_inside = False

    def ended(self, call: CommCall, result: Any) -> None:
        """The call returned: its result is read now, or when it is waited for."""
        self._is_inside = False
        call.fields[2] += time.perf_counter() - call.began
        try:
            self._expect(call, result)
        except Exception as error:
            self._context.guard(f"comm {call.site.op}", error)

    def _expect(self, call: CommCall, result: Any) -> None:
        held = self._held.get(id(call.group))
        if held is not None:
            held.append(call)
        elif hasattr(result, "wait") and not isinstance(result, torch.Tensor):
            self._hold(result, [Awaited([call])])
        elif isinstance(result, (torch.Tensor, list, tuple)):
            self._expect_tensors(call, list(tensors_of(result)))
        else:
            self._finish(call)

    def _expect_tensors(self, call: CommCall, results: list[torch.Tensor]) -> None:
        """A functional collective gave tensors: those of an async kind are complete when their consumer waits."""
        for one in results:
            inner = local_of(one)
            if call.is_measured and is_async(inner) and not getattr(inner, "completed", False):
                elem = getattr(inner, "elem", inner)
                self._results[elem.untyped_storage().data_ptr()] = (weakref.ref(elem), call)
            elif call.is_measured:
                self._measure(call, "out", [inner])
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
                        self._tell_unread(call)

        before = self._works.pop(key, None)
        held = before[1] if before is not None and before[0]() is work else []
        for one in awaited:
            one.num_holders += 1
        self._works[key] = (weakref.ref(work, gone), [*held, *awaited])

    def _tell_unread(self, call: CommCall) -> None:
        if call.outputs:
            self._recording.tell(
                "comm_unread",
                f"no wait for the work of {call.site.name} was seen (for a communication hook of DDP, C++ waits): what it "
                "received is not measured",
                call.site.name,
            )

    def enter(self) -> None:
        """A wait begins; nothing to do."""

    def add(self, seconds: float) -> None:
        """Time was waited; which work it was for, `done` says."""

    def promised(self, work: Any, future: Any) -> None:
        """A future was taken: who waits for it waits for the Work, which may be gone by then."""
        found = self._works.get(id(work)) if self._works else None
        if found is not None and found[0]() is work:
            self._hold(future, found[1])

    def done(self, work: Any, seconds: float) -> None:
        """The trainer has waited for a Work: what it received is complete, on the stream that is current."""
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
                        self._finish(call)
                except Exception as error:
                    self._context.guard(f"comm {call.site.op}", error)

    def arrived(self, tensor: Any) -> None:
        """The trainer has waited for a functional collective's result."""
        if not self._results:
            return
        try:
            inner = local_of(tensor)
            found = self._results.pop(getattr(inner, "elem", inner).untyped_storage().data_ptr(), None)
            whole = found[0]() if found is not None else None
            if found is not None and whole is not None:
                found[1].fields[4] = 1.0
                self._measure(found[1], "out", [whole])
        except Exception as error:
            self._context.guard("comm wait_tensor", error)

    def coalescing(self, group: Any, work: Any) -> None:
        """Calls of a group are held back from now on, or were sent as one piece of work."""
        if work is False:
            if self.is_due:
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
                self._finish(call)
        except Exception as error:
            self._context.guard("comm coalescing", error)

    # -- measuring ---------------------------------------------------------------------------------------------------

    def _finish(self, call: CommCall) -> None:
        call.fields[4] = 1.0
        if call.is_measured:
            received = [one for one in (ref() for ref in call.outputs) if one is not None]
            self._measure(call, "out", received)

    def _measure(self, call: CommCall, role: str, tensors: list[torch.Tensor]) -> None:
        # A result that comes between two steps belongs to none; threads that are not the trainer's write no rows.
        if not self._context.is_measuring() or (threading.get_ident() != self._thread and not in_backward()):
            return
        with torch.no_grad():
            for at, tensor in enumerate(tensors):
                path = f"{role}.{at}" if 1 < len(tensors) <= MAX_MEMBERS else role
                # What a collective is given is waited for by the collective itself: right behind us.
                local = arrived(tensor) if role == "in" else local_of(tensor)
                entry = self._entry(call.site, path, local)
                self._recording.observe(entry, local, call.micro_step)
                self._num_rows += 1
                if local.device.type != "cpu":
                    self._streams.add(torch.get_device_module(local.device).current_stream(local.device))

    def _entry(self, site: CommSite, path: str, tensor: torch.Tensor | None) -> TensorEntry:
        entry = self._entries.get((site, path))
        if entry is None:
            name = f"{site.name}:{path}" if path else site.name
            vpp_stage = self._context.chunks[0].vpp_stage if self._context.chunks else 0
            entry = self._entries[site, path] = self._context.table.entry(vpp_stage, name, Kind.COMM)
            entry.flags |= int(Flag.PER_RANK)
        reported = None if tensor is None else (tensor.shape, tensor.dtype)
        if self._reported.get(entry.id, ()) != reported:
            self._reported[entry.id] = reported
            place = self._context.place()
            placements = {axis: "unknown" for axis in AXES if place.size(axis) > 1}
            self._context.table.describe(entry, torch.empty(0) if tensor is None else tensor, placements)
        return entry

    def _site(self, op: str, where: CallSite) -> CommSite:
        site = self._sites.get((op, where))
        if site is None:
            if len(self._sites) >= MAX_SITES:
                where = CallSite("elsewhere", 0, "")
                site = self._sites.get((op, where))
                if site is not None:
                    return site
            site = self._sites[op, where] = CommSite(op, where, f"{op}@{where}")
        return site

    def _wishes_of(self, site: CommSite) -> list[Wish]:
        if site.generation != self._plan.generation:
            site.generation = self._plan.generation
            site.wishes = [wish for wish in self._plan.wishes_of(Kind.COMM) if site.means(wish)]
        return site.wishes

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
    return int(size()) if callable(size) else len(_ranks_of(group))


def _ranks_of(group: Any) -> list[int]:
    """Return the global ranks of a group, as far as torch knows them."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    functional = sys.modules.get("torch.distributed._functional_collectives")
    if module is None or group is None:
        return []
    try:
        if isinstance(group, module.ProcessGroup):
            return list(module.get_process_group_ranks(group))
        if isinstance(group, str):
            return list(module.get_process_group_ranks(module._resolve_process_group(group)))
        return list(functional._expand_group(group)[1]) if functional is not None else []
    except Exception:
        return []  # Private names of torch: what we do not know is left out.
