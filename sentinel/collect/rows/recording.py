"""Rows of the current step: every observation of this rank goes through here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from sentinel.collect.hooks.failures import describe_failure
from sentinel.collect.hooks.parameters import Parameter, WatchedParameters
from sentinel.collect.kernels import Kernel
from sentinel.collect.rows.buffer import StepRows
from sentinel.collect.rows.tensor_table import TensorEntry, TensorTable
from sentinel.collect.rows.vectors import StepVectors
from sentinel.collect.schedule.costs import OWN, Costs
from sentinel.messages import Health, Vector
from sentinel.native import fold_rows, has_nonfinite
from sentinel.record import Flag, Kind

log = logging.getLogger("sentinel")

Look = Callable[[TensorEntry, torch.Tensor, int], None]
"""(tensor's entry, the local tensor, micro_step): may neither change the tensor nor wait for it; asks the plan itself."""


class Observer(NamedTuple):
    """A probe that looks at the tensors of others."""

    probe: str
    """Its name, for people."""
    look: Look


POOL = 6
"""Row buffers in all: one being filled, the others on their way to the spool. Where the writer is late, and none is free,
the oldest step's rows are copied out of its buffer."""
MOST_BUFFERS = 48
"""The same while rows of an accelerator have not arrived and cannot be copied yet; a bound on memory, past which a step's
rows are dropped."""


class Recording:
    """Fills row buffers; the call_id of an observation is its order in this rank's step."""

    def __init__(self, kernel: Kernel, table: TensorTable, *, max_rows: int, zero_eps: float, checksum: bool) -> None:
        self.kernel = kernel
        self.table = table
        self.max_rows = max_rows
        self.zero_eps = zero_eps
        self.checksum = checksum
        self.call_id = 0
        self.num_folded = 0
        self.rows = self._new_rows()
        self.vectors = StepVectors()
        """Beside the rows of this step."""
        self.costs = Costs()
        self.observers: list[Observer] = []
        """Shown every tensor that is measured, and those that pass a site in a step that measures modules."""
        self._is_showing = False
        self._free: list[StepRows] = []
        self._made = 1
        self.health: list[Health] = []
        self._reported: dict[tuple[str, str], int] = {}
        self.at: TensorEntry | None = None
        """The site that was observed last: where a hang stands."""

    def _new_rows(self, capacity: int = 4096) -> StepRows:
        return StepRows(min(self.max_rows, capacity))

    def observe(self, entry: TensorEntry, tensor: torch.Tensor, micro_step: int) -> int:
        """Measure one tensor into one row, and return that. Launches one kernel; does not synchronize."""
        rows = self.rows
        if rows.num_rows >= rows.capacity:
            self._make_room(1)
        self.at = entry
        row = rows.add(entry.id, entry.kind, entry.flags, micro_step, self.call_id, entry.site_pos)
        self.call_id += 1
        self.kernel.measure((tensor,), rows, row, zero_eps=self.zero_eps)
        if self.observers:
            self.show(entry, tensor, micro_step)
        return row

    def rename(self, row: int, former: TensorEntry, entry: TensorEntry, micro_step: int) -> bool:
        """Make a row of the running micro-step that of another entry; False where it was folded into others since."""
        rows = self.rows
        if not 0 <= row < rows.num_rows:
            return False
        one = rows.array[row]
        if (int(one["tensor"]), int(one["micro_step"]), int(one["num_folded"])) != (former.id, micro_step, 1):
            return False
        one["tensor"], one["kind"], one["flags"] = entry.id, entry.kind, (int(one["flags"]) & ~former.flags) | entry.flags
        one["site_pos"] = entry.site_pos
        return True

    def show(self, entry: TensorEntry, tensor: torch.Tensor, micro_step: int) -> None:
        """Let everybody look at a tensor; not at what observers measure themselves."""
        if self._is_showing:
            return
        self._is_showing = True
        former = self.costs.turn_to(OWN)
        try:
            for one in self.observers:
                self.costs.turn_to_probe(one.probe)
                try:
                    one.look(entry, tensor, micro_step)
                except Exception as error:
                    site = f"{Kind(entry.kind).label} of {entry.name or 'the model itself'}"
                    message = describe_failure(site, error, probe=one.probe, given=tensor)
                    self.report("hook_failed", message, f"{entry.name}:{one.probe}")
        finally:
            self._is_showing = False
            self.costs.turn_to(former)

    def reserve(self, entry: TensorEntry, micro_step: int) -> int:
        """Begin a row, in the order of calls, whose tensor may be complete only later."""
        rows = self.rows
        if rows.num_rows >= rows.capacity:
            self._make_room(1)
        self.at = entry
        at = rows.add(entry.id, entry.kind, entry.flags, micro_step, self.call_id, entry.site_pos)
        self.call_id += 1
        return at

    def fill(self, row: int, tensor: torch.Tensor, *, checksum: bool = False) -> None:
        """Measure one tensor into a row begun before."""
        self.kernel.measure((tensor,), self.rows, row, zero_eps=self.zero_eps, checksum=checksum and self.checksum)

    def reserve_all(self, entries: Sequence[TensorEntry], flags: Sequence[int], micro_step: int = -1) -> int:
        """Begin a row for each entry, -1: of no micro-step; returns the first, the others follow."""
        rows = self.rows
        if not entries:
            return rows.num_rows
        if rows.num_rows + len(entries) > rows.capacity:
            self._make_room(len(entries))
        first = rows.num_rows
        for entry, flag in zip(entries, flags, strict=True):
            rows.add(entry.id, entry.kind, entry.flags | flag, micro_step, self.call_id, entry.site_pos)
            self.call_id += 1
        self.at = entries[-1]
        return first

    def observe_all(self, entries: Sequence[TensorEntry], tensors: Sequence[torch.Tensor], flags: Sequence[int]) -> int:
        """Measure many tensors in one pass; returns the row of the first, the others follow."""
        first = self.reserve_all(entries, flags)
        if not entries:
            return first
        self.kernel.measure(tensors, self.rows, first, zero_eps=self.zero_eps, checksum=self.checksum)
        if self.observers:
            for entry, tensor in zip(entries, tensors, strict=True):
                self.show(entry, tensor, -1)
        return first

    def vector(
        self,
        entry: TensorEntry,
        statistic: str,
        values: torch.Tensor,
        axis: str,
        micro_step: int = -1,
        edges: tuple[float, ...] = (),
    ) -> None:
        """Ship a small tensor of any shape beside the rows: what there is for each head, expert, channel or bin.

        axis: what its dimensions count, as `messages.Vector`. Nobody may write into `values` afterwards. Does not wait.
        """
        # Its values, and their shape, come when the step has ended.
        head = Vector(
            tensor=entry.id, statistic=statistic, axis=axis, micro_step=micro_step, call_id=self.call_id, edges=edges,
            shape=(0,),
        )  # fmt: skip
        self.vectors.add(head, values)

    def read_gradients(self, parameters: WatchedParameters, which: list[Parameter], *, is_before_zeroing: bool) -> None:
        """Measure the gradients that were not read in this step yet."""
        fresh = parameters.fresh_grads(which, is_before_zeroing)
        again = [item for item in fresh if item[3] is not None]
        for one, local, touched, row in again:
            assert row is not None
            self.rows.array["flags"][row] = one.wgrad.flags | (int(Flag.POST_CLIP) if touched else 0)
            self.kernel.measure((local,), self.rows, row, zero_eps=self.zero_eps, checksum=self.checksum)
        new = [item for item in fresh if item[3] is None]
        flags = [int(Flag.POST_CLIP) if touched else 0 for _, _, touched, _ in new]
        first = self.observe_all([one.wgrad for one, *_ in new], [local for _, local, *_ in new], flags)
        for at, (one, *_) in enumerate(new):
            parameters.read[id(one.param)] = first + at

    @property
    def has_nonfinite(self) -> bool:
        """Whether a row of the running step that the host has already holds a NaN or an infinity. Does not wait."""
        return has_nonfinite(self.rows.array, self.rows.num_rows)

    def rewind(self, num_rows: int, call_id: int) -> None:
        """Forget what was observed since: a forward that failed and may be tried again."""
        self.rows.truncate(num_rows)
        self.vectors.truncate(call_id)
        self.call_id = call_id

    def _make_room(self, needed: int) -> None:
        """Grow up to the cap; past it fold the micro-steps of this step, so that nothing non-finite is lost."""
        rows = self.rows
        if rows.capacity < self.max_rows:
            rows.grow(min(self.max_rows, max(rows.capacity * 2, rows.num_rows + needed)))
        if rows.num_rows + needed > rows.capacity and rows.is_on_host:
            before = rows.num_rows
            rows.truncate(fold_rows(rows.array, before))
            self.num_folded += before - rows.num_rows
        if rows.num_rows + needed > rows.capacity:
            # More distinct tensors than the cap: the cap is for micro-steps, not for tensors.
            rows.grow(rows.num_rows + needed + 1024)

    def take_vectors(self) -> StepVectors:
        """Hand out the vectors of the step that ends, on their way to the host, and begin with none."""
        full, self.vectors = self.vectors, StepVectors()
        if full.num_dropped:
            self.report("vectors_dropped", f"{full.num_dropped} vectors of a step found no room")
        full.begin_copy()
        return full

    def swap(self, free_buffer: Callable[[], bool]) -> StepRows | None:
        """Hand out the filled buffer and begin an empty one; None when every buffer is still on its way.

        Then the rows of the step are dropped, and the caller says so: the trainer never waits for the writer.
        free_buffer: has `give_back` called for a buffer that waits for the writer; false: there is none.
        """
        full = self.rows
        self.call_id, self.num_folded = 0, 0
        if not self._free and self._made >= POOL:
            free_buffer()
        if self._free:
            self.rows = self._free.pop()
        elif self._made < MOST_BUFFERS:
            self._made += 1
            self.rows = self._new_rows(max(256, full.num_rows + full.num_rows // 8))
        else:
            full.reset()
            return None
        return full

    def give_back(self, rows: StepRows) -> None:
        """Take a buffer back, on the writer's thread or the trainer's own."""
        rows.reset()
        self._free.append(rows)

    def report(self, code: str, message: str, site: str = "", step: int = -1) -> None:
        """Note something that blinds Sentinel: logged once per site, shipped, counted."""
        count = self._reported.get((code, site), 0) + 1
        self._reported[code, site] = count
        if count == 1:
            log.warning("sentinel: %s: %s", code, message)
        if count & (count - 1) == 0:  # 1, 2, 4, 8, ...: a site that fails at every call says so without a flood.
            self.health.append(Health(code=code, message=message, site=site, count=count, step=step))

    def refused(self, reason: str) -> None:
        """Note a command that is not obeyed."""
        self.report("command_refused", reason, reason[:60])

    def take_health(self) -> list[Health]:
        """Hand out what was noted since the last time."""
        reported, self.health = self.health, []
        return reported
