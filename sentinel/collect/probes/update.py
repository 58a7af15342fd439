"""What the optimizer adds to each parameter in a step, in fp32, and how large that is beside the parameter.

Beside it, of weights in 16 bits: which elements the step left as they were, for what was added is less than half of their
last digit. They are copied before the step for that, and compared with afterwards.

A formula for each known rule (update_rules.py) reads the state behind the step. Of any other optimizer the weights are
copied before it steps and compared with afterwards: a copy of what is measured, and rows flagged DIFFERENCE, for weights in
low precision round most of an update away.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from sentinel.collect.probes.context import ProbeContext
from sentinel.collect.probes.piecewise_rows import ROOM, PiecedRow, side_by_side
from sentinel.collect.probes.single_values import observe_words, value_words
from sentinel.collect.probes.stepped import Stepped, describe_formed, stepped_by
from sentinel.collect.probes.update_rules import Formula, Given, Rule, difference, needs_norm_before, reaches, rule_of
from sentinel.collect.rows.tensor_table import TensorEntry
from sentinel.record import NO_SCALE, Flag, Kind

NORMALISED = ":adam"
"""Suffix of the rows of Adam's step before its rate: the first moment over the root of the second, both corrected."""

LOST = ":lost"
"""Suffix of the rows of what rounding lost: 1 for an element that stayed as it was although something was to be added to it,
else 0. Of weights that the optimizer itself steps in a type of 16 bits."""

SQUARES = ("update_squares", "weight_squares")
"""Suffixes of the summands of a ratio whose parameter lies in shards: this rank's sums of squares."""


@dataclasses.dataclass
class _MeasuredUpdate:
    """One parameter whose update is measured in this step."""

    stepped: Stepped
    update: TensorEntry | None
    ratio: TensorEntry | None
    normalised: TensorEntry | None
    lost: TensorEntry | None
    squares: tuple[TensorEntry, ...] = ()
    """Entries of the summands of the ratio, where ranks hold shards; (): this rank holds all."""

    def __bool__(self) -> bool:
        return bool(self.update or self.ratio or self.normalised or self.lost)


class Update:
    """Rows of `update` (what the step added) and `update_ratio` (its norm over that of the weights before)."""

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        self._pieced = PiecedRow(context.recording)
        self._rules: weakref.WeakKeyDictionary[Any, Rule | None] = weakref.WeakKeyDictionary()
        self._before: dict[int, torch.Tensor] = {}
        """id of a parameter -> its weights before the step, where they must be compared."""
        self._rounded: dict[int, torch.Tensor] = {}
        """id of a parameter of 16 bits -> its weights before the step, to see which of them the step leaves as they are."""
        self._norms: dict[int, torch.Tensor] = {}
        self._unannounced: weakref.WeakSet[Any] = weakref.WeakSet()
        """Optimizers that write their update unannounced: their weights are copied when the step begins."""
        self._announced: set[int] = set()
        self._rows: dict[int, int] = {}
        self._scratch: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}
        context.events.planned.subscribe("update", self._plan)
        context.events.begun.subscribe("update", self._begin)
        context.events.updating.subscribe("update", self._prepare)
        context.events.updated.subscribe("update", self._measure)
        context.events.removed.subscribe("update", self._forget)

    @property
    def _is_due(self) -> bool:
        plan = self._context.plan
        return plan.takes(Kind.UPDATE) or plan.takes(Kind.UPDATE_RATIO)

    def _plan(self) -> None:
        plan = self._context.plan
        if not (plan.wants(Kind.UPDATE) or plan.wants(Kind.UPDATE_RATIO)):
            self._forget()

    def _forget(self) -> None:
        self._before, self._rounded, self._norms, self._scratch = {}, {}, {}, {}

    def _begin(self) -> None:
        self._rows.clear()
        self._before, self._rounded, self._norms = {}, {}, {}
        self._announced.clear()
        if self._unannounced and self._is_due:
            for optimizer in list(self._unannounced):
                self._keep(optimizer)

    def _rule(self, optimizer: Any) -> Rule | None:
        inner = getattr(optimizer, "optim", optimizer)
        if inner not in self._rules:
            self._rules[inner] = rule_of(inner)
        return self._rules[inner]

    # -- before the step -----------------------------------------------------------------------------------------------

    def _prepare(self, optimizer: Any) -> None:
        """Called before the optimizer steps: copy the weights that are needed from before the step."""
        if self._is_due:
            self._announced.add(id(optimizer))
            if optimizer not in self._unannounced:
                self._keep(optimizer)

    @torch.no_grad()
    def _keep(self, optimizer: Any) -> None:
        rule = self._rule(optimizer)
        for wanted in self._wanted(optimizer):
            param, local = wanted.stepped.param, wanted.stepped.held.tensor
            if rule is None or not reaches(rule, param, wanted.stepped.grad):
                self._before[id(param)] = local.clone()
                continue
            if wanted.lost is not None and wanted.stepped.grad is not None:
                self._rounded[id(param)] = local.clone()
            if needs_norm_before(rule):
                self._norms[id(param)] = torch.linalg.vector_norm(local, dtype=_arithmetic(local))

    # -- behind it -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _measure(self, optimizer: Any) -> None:
        """Measure what an optimizer has just added. Does not wait."""
        if not self._is_due:
            return
        if id(optimizer) not in self._announced and optimizer not in self._unannounced:
            self._unannounced.add(optimizer)  # Before its update there was no last moment.
        due: dict[str, int] = {}
        batch = _Batch(self._context, self._rows, self._scratch)
        ratios: list[tuple[_MeasuredUpdate, torch.Tensor, torch.Tensor, int]] = []
        stopped = found_inf_of(optimizer)
        for wanted in self._wanted(optimizer):
            if wanted.stepped.grad is None:
                continue  # The optimizer leaves it alone: what it keeps for it is of an earlier step.
            formula, flag = self._formula(optimizer, wanted.stepped)
            if formula is None:
                continue
            before = self._rounded.pop(id(wanted.stepped.param), None)
            if before is None or before.shape != wanted.stepped.held.tensor.shape:
                wanted.lost = before = None
            self._describe(wanted)
            work = _UpdateWork(wanted, formula, flag, stopped, before)
            if work.num_slots * work.local.numel() <= ROOM:
                norms = batch.take(work)
            else:
                batch.flush()  # Its room is taken.
                norms = self._in_pieces(work)
            if wanted.ratio is not None and norms is not None:
                ratios.append((wanted, *norms, flag))
            for entry in (wanted.update, wanted.ratio, wanted.normalised, wanted.lost):
                if entry is not None and (entry is not wanted.normalised or formula.is_normalised):
                    label = Kind(entry.kind).label
                    due[label] = due.get(label, 0) + 1
        batch.flush()
        self._observe_ratios(ratios)
        self._context.count(due)

    def _formula(self, optimizer: Any, stepped: Stepped) -> tuple[Formula | None, int]:
        """Return the formula of one parameter's update, and its flag; None: the rule is not known."""
        before = self._before.get(id(stepped.param))
        if before is not None and before.shape == stepped.held.tensor.shape:
            return difference(before), int(Flag.DIFFERENCE)
        rule = self._rule(optimizer)
        if rule is not None and stepped.grad is not None and reaches(rule, stepped.param, stepped.grad):
            given = Given(
                getattr(optimizer, "optim", optimizer), stepped.group, stepped.state, stepped.param, stepped.grad,
                self._norms.get(id(stepped.param)),
            )  # fmt: skip
            formula = rule(given)
            if formula is not None:
                return formula, 0
        name = type(optimizer).__name__
        message = f"the update of {stepped.one.entry.name} by {name} is not known: no formula fits, no copy was made in time"
        self._context.recording.report("unsupported", message, f"update {name}")
        return None, 0

    def _wanted(self, optimizer: Any) -> Iterator[_MeasuredUpdate]:
        """Yield the parameters of an optimizer that the running step measures."""
        plan, table = self._context.plan, self._context.table
        has_update, has_ratio = plan.takes(Kind.UPDATE), plan.takes(Kind.UPDATE_RATIO)
        found = stepped_by(optimizer, self._context.parameters)
        if not found and any(group["params"] for group in getattr(optimizer, "param_groups", ())):
            name = type(optimizer).__name__
            message = f"{name} steps tensors that are none of the model's parameters: what becomes of those is not known"
            self._context.recording.report("unsupported", message, f"update of {name}")
        for stepped in found:
            if not stepped.held.tensor.is_floating_point() or stepped.held.tensor.layout is not torch.strided:
                continue
            one = stepped.one.entry

            def entry(is_taken: bool, name: str, kind: Kind, one: TensorEntry = one) -> TensorEntry | None:
                if not is_taken:
                    return None
                found = table.entry(one.chunk, name, kind)
                found.site_pos = one.site_pos
                return found if plan.measures(found) else None

            wanted = _MeasuredUpdate(
                stepped,
                entry(has_update, one.name, Kind.UPDATE),
                entry(has_ratio, one.name, Kind.UPDATE_RATIO),
                entry(has_ratio, one.name + NORMALISED, Kind.UPDATE_RATIO),
                entry(has_update and _is_rounded(stepped), one.name + LOST, Kind.UPDATE),
            )
            if wanted:
                yield wanted

    def _describe(self, wanted: _MeasuredUpdate) -> None:
        held, table = wanted.stepped.held, self._context.table
        shown = torch.empty(0, dtype=_arithmetic(held.tensor))
        shape = held.shape if held.shape is not None else tuple(held.tensor.shape)
        for entry in (wanted.update, wanted.normalised, wanted.lost):
            if entry is not None:
                table.describe(entry, shown, held.placements, held.part, shape)
        if wanted.ratio is not None:
            wanted.squares = describe_formed(table, wanted.ratio, SQUARES, held, shown)

    def _in_pieces(self, work: _UpdateWork) -> tuple[torch.Tensor, torch.Tensor]:
        """Measure an update that is too large to be formed at once; return the norms of it and of the weights before."""
        recording = self._context.recording
        out = _room(self._scratch, work.local)
        squares = torch.zeros(2, dtype=torch.float64, device=work.local.device)
        wanted = work.wanted
        if work.formula.prepare is not None:
            work.formula.prepare((one[:-1] for one in work.pieces()), out.dtype)

        def updates() -> Iterator[torch.Tensor]:
            for *pieces, param in work.pieces():
                view = out[: param.numel()].view(param.shape)
                work.write(view, tuple(pieces), param)
                if wanted.ratio is not None:
                    squares.add_(torch.stack([_square(view), _square(param - view)]))
                if wanted.update is not None:
                    recording.show(wanted.update, view, -1)
                yield view

        def directions() -> Iterator[torch.Tensor]:
            for *pieces, param in work.pieces():
                view = out[: param.numel()].view(param.shape)
                work.formula.direct(view, *pieces, param)
                yield view

        def losses() -> Iterator[torch.Tensor]:
            assert work.before is not None
            for *pieces, param, before in side_by_side([*work.formula.tensors, work.local, work.before]):
                view = out[: param.numel()].view(param.shape)
                work.write(view, tuple(pieces), param)
                yield work.lost(view, view, param, before)

        if wanted.lost is not None:
            self._pieced.fill(self._row(wanted.lost, work.flag), losses())
        if wanted.update is not None:
            self._pieced.fill(self._row(wanted.update, work.flag), updates())
        elif wanted.ratio is not None:
            for _ in updates():
                pass
        if wanted.normalised is not None and work.formula.is_normalised:
            self._pieced.fill(self._row(wanted.normalised, work.flag), directions())
        return squares[0].sqrt(), squares[1].sqrt()

    def _row(self, entry: TensorEntry, flag: int) -> int:
        if entry.id not in self._rows:
            self._rows[entry.id] = self._context.recording.reserve_all([entry], [flag])
        return self._rows[entry.id]

    def _observe_ratios(self, ratios: list[tuple[_MeasuredUpdate, torch.Tensor, torch.Tensor, int]]) -> None:
        for device in {norm.device for _, norm, _, _ in ratios}:
            for flag in {flag for _, _, _, flag in ratios}:
                mine = [one for one in ratios if one[1].device == device and one[3] == flag]
                if mine:
                    added = torch.stack([norm.double() for _, norm, _, _ in mine])
                    before = torch.stack([norm.double() for _, _, norm, _ in mine])
                    # Weights that were all zero have no scale to compare with; that is no infinite step.
                    words = value_words(added / before, ~(before <= NO_SCALE * added))
                    entries = [one.ratio for one, *_ in mine if one.ratio is not None]
                    observe_words(self._context.recording, entries, words, self._rows, flag)
                    self._observe_squares([one.squares for one, *_ in mine], torch.stack([added, before], 1), flag)

    def _observe_squares(self, entries: list[tuple[TensorEntry, ...]], norms: torch.Tensor, flag: int) -> None:
        """Measure the summands of ratios, of which entries[i] has two or none: norms, [n, 2], of update and weights."""
        cut = [at for at, pair in enumerate(entries) if pair]
        if not cut:
            return
        squares = norms.square() if len(cut) == len(entries) else torch.stack([norms[at] for at in cut]).square()
        words = value_words(squares.flatten(), squares.flatten().isfinite())
        observe_words(self._context.recording, [one for at in cut for one in entries[at]], words, self._rows, flag)


class _UpdateWork:
    """One update that is computed from a formula."""

    def __init__(
        self,
        wanted: _MeasuredUpdate,
        formula: Formula,
        flag: int,
        stopped: torch.Tensor | None,
        before: torch.Tensor | None,
    ) -> None:
        """stopped: 0-dim bool, true: the step was skipped; None: it cannot have been.

        before: the weights before the step, where rounding loss is measured; None elsewhere.
        """
        self.wanted = wanted
        self.formula = formula
        self.flag = flag
        self.local = wanted.stepped.held.tensor.detach()
        self.before = before
        self.num_slots = 1 + (wanted.normalised is not None and formula.is_normalised) + (wanted.lost is not None)
        self._stopped = stopped

    def pieces(self) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield (pieces of the formula's tensors..., piece of the weights)."""
        return side_by_side([*self.formula.tensors, self.local])

    def write(
        self, out: torch.Tensor, pieces: tuple[torch.Tensor, ...], param: torch.Tensor, direction: torch.Tensor | None = None
    ) -> None:
        """Write a piece of the update into `out`; zeros where the scaler had the optimizer skip the step."""
        self.formula.write(out, pieces, param, direction)
        if self._stopped is not None:
            out.masked_fill_(self._stopped.to(out.device, non_blocking=True), 0.0)

    @staticmethod
    def lost(out: torch.Tensor, added: torch.Tensor, after: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Write 1 into `out` where `added` is not 0 and the weight did not change, else 0. `out` may be `added` itself."""
        return out.copy_((added != 0) & (after == before))


class _Batch:
    """Small updates, computed one behind the other in one buffer, and measured in one pass when it is full."""

    def __init__(
        self, context: ProbeContext, rows: dict[int, int], scratch: dict[tuple[torch.device, torch.dtype], torch.Tensor]
    ) -> None:
        self._recording = context.recording
        self._rows = rows
        self._scratch = scratch
        self._room: torch.Tensor | None = None
        self._used = 0
        self._entries: list[TensorEntry] = []
        self._views: list[torch.Tensor] = []
        self._flags: list[int] = []

    def take(self, work: _UpdateWork) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Compute an update and keep it until it is measured; return its norm and that of the weights before.

        None: not needed.
        """
        wanted, local = work.wanted, work.local
        room = _room(self._scratch, local)
        if room is not self._room or self._used + work.num_slots * local.numel() > ROOM:
            self.flush()
            self._room = room
        ((*pieces, param),) = work.pieces()
        if work.formula.prepare is not None:
            work.formula.prepare(iter([tuple(pieces)]), room.dtype)
        direction = None
        if wanted.normalised is not None and work.formula.is_normalised:
            direction = self._slot(local)
            work.formula.direct(direction, *pieces, param)
            self._keep(wanted.normalised, direction, work.flag)
        view = self._slot(local)
        work.write(view, tuple(pieces), param, direction)
        if wanted.update is not None:
            self._keep(wanted.update, view, work.flag)
        if wanted.lost is not None and work.before is not None:
            self._keep(wanted.lost, work.lost(self._slot(local), view, local, work.before), work.flag)
        if wanted.ratio is None or local.numel() == 0:
            return None
        return torch.linalg.vector_norm(view), torch.linalg.vector_norm(local - view)

    def _slot(self, local: torch.Tensor) -> torch.Tensor:
        assert self._room is not None
        view = self._room[self._used : self._used + local.numel()].view(local.shape)
        self._used += local.numel()
        return view

    def _keep(self, entry: TensorEntry, view: torch.Tensor, flag: int) -> None:
        if entry.id in self._rows:  # The optimizer steps for the second time in this step.
            self._recording.fill(self._rows[entry.id], view)
            return
        self._entries.append(entry)
        self._views.append(view)
        self._flags.append(flag)

    def flush(self) -> None:
        """Measure all updates in the buffer, and empty it."""
        first = self._recording.observe_all(self._entries, self._views, self._flags)
        self._rows.update({entry.id: first + at for at, entry in enumerate(self._entries)})
        self._entries, self._views, self._flags, self._used = [], [], [], 0


def found_inf_of(optimizer: Any) -> torch.Tensor | None:
    """Return whether a scaler has this optimizer skip its step, as 0-dim bool on its device; None: no scaler does."""
    found = getattr(optimizer, "found_inf", None)
    return found.reshape(()) != 0 if isinstance(found, torch.Tensor) else None


def _is_rounded(stepped: Stepped) -> bool:
    """Whether the optimizer steps the model's own weights, and in a type that most of a small update is lost in."""
    return stepped.param is stepped.one.param and stepped.held.tensor.dtype in (torch.bfloat16, torch.float16)


def _arithmetic(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32


def _room(scratch: dict[tuple[torch.device, torch.dtype], torch.Tensor], local: torch.Tensor) -> torch.Tensor:
    """Return the room for updates on a device: 16 MiB in fp32, kept while updates are wanted."""
    key = local.device, _arithmetic(local)
    if key not in scratch:
        scratch[key] = torch.empty(ROOM, dtype=key[1], device=key[0])
    return scratch[key]


def _square(tensor: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(tensor)
    return norm.double().square()
