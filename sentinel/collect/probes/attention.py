"""Attention: the entropy of each query's distribution over keys, and the largest logit, for each attention module."""

from __future__ import annotations

import re
import threading
from types import FrameType
from typing import Any

import torch
from torch import nn

from sentinel.collect.compiled.graphs import is_inside
from sentinel.collect.hooks.backwards import in_backward
from sentinel.collect.hooks.chunk import Chunk
from sentinel.collect.parallel.placements import axes_of, is_dtensor, is_shard, local_of
from sentinel.collect.probes.attention_calls import Attended, calls
from sentinel.collect.probes.attention_scores import AttentionScores, Logits, attention_map, measure
from sentinel.collect.probes.context import ProbeContext
from sentinel.collect.probes.derived import describe_site
from sentinel.collect.probes.prepared_rows import observe_some
from sentinel.collect.rows.tensor_table import TensorEntry
from sentinel.collect.schedule.copy_requests import CopyRequests
from sentinel.place import strip_wrappers
from sentinel.record import Kind
from sentinel.target import Target
from sentinel.trace import Trace

QUANTITIES = ("entropy", "max_logit")
ATTENTIVE = re.compile(r"att(n|en)|mha", re.IGNORECASE)
ROUTING = re.compile(r"rout|moe|expert|gat(e|ing)$", re.IGNORECASE)
HEADS = (
    "num_heads", "n_heads", "n_head", "num_attention_heads", "num_attention_heads_per_partition", "heads", "nhead",
    "num_head", "n_local_heads",
)  # fmt: skip
MOST_FRAMES = 200
"""Most frames searched between a function of torch and the module that calls it; a model's own forward is nearer."""
_HOLDERS = ("self", "module", "mod", "layer", "attn")
"""Names of the argument in which a function gets the module that it computes attention for."""
_ORDINARY = (torch.Tensor, nn.Parameter)


class Attention:
    """Measures each call of attention in a training forward, under the innermost module that runs it.

    Rows `M:entropy` (nats, over samples, heads and queries) and `M:max_logit` (over samples and heads); vectors of the same
    names for each head. A second call of one module in one forward is `M:entropy:1`.
    """

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        self._known: dict[int, tuple[Chunk, str, nn.Module]] = {}
        self._thread = 0
        self._is_due = False
        self._num_seen = 0
        self._num_rows = 0
        self._num_calls: dict[tuple[int, str], tuple[object, int]] = {}
        """(vpp_stage, module) -> the forward that called last, and how often."""
        self._is_written: dict[int, bool] = {}
        """Id of a module -> whether its softmax is that of attention."""
        self._entries: dict[tuple[int, str], TensorEntry] = {}
        self._traces = CopyRequests(context.plan, Trace)
        context.events.planned.subscribe("attention", self._plan)
        context.events.begun.subscribe("attention", self._begin)
        context.events.ending.subscribe("attention", self._end)
        context.events.removed.subscribe("attention", self._leave)

    def _plan(self) -> None:
        self._is_due = self._context.plan.takes(Kind.ATTENTION)
        self._is_written = {}
        if not self._context.plan.wants(Kind.ATTENTION):
            self._leave()
            return
        self._known = {
            id(module): (chunk, strip_wrappers(name) if name else "", module)
            for chunk in self._context.chunks
            for name, module in chunk.root.named_modules()
        }
        calls.join(self)

    def _leave(self) -> None:
        calls.leave(self)
        self._known = {}

    def _begin(self) -> None:
        self._is_due = self._context.plan.takes(Kind.ATTENTION)
        self._thread = threading.get_ident()
        self._num_seen = 0

    def _end(self) -> None:
        if self._is_due and not self._num_seen and any(chunk.num_forwards for chunk in self._context.chunks):
            self._context.recording.report(
                "blind_probe",
                "attention is to be measured, but none was seen: it is compiled, or a kernel of its own, or not there. Seen "
                "are torch's scaled_dot_product_attention, flex_attention, and a softmax in a module called attention",
                "attention",
                self._context.step(),
            )
        elif self._is_due:
            self._report_compiled()
        if self._num_rows:
            self._context.count({"attention": self._num_rows})
        self._num_rows = 0

    def _report_compiled(self) -> None:
        """Report compiled parts that hold attention: a graph calls no function of torch, so none of it is measured."""
        for chunk in self._context.chunks:
            seen = [name for stage, name in self._num_calls if stage == chunk.vpp_stage]
            for part in chunk.compiled.names if chunk.num_forwards else ():
                if any(is_inside(name, part) for name in seen):
                    continue
                inner = [(name, one) for name, one in chunk.structure.modules.items() if is_inside(name, part)]
                if any(ATTENTIVE.search(f"{type(one).__name__} {name.rpartition('.')[2]}") for name, one in inner):
                    reported = f"attention inside {part or 'the model'} is compiled, and not measured"
                    self._context.recording.report("blind_probe", reported, f"{part}:attention", self._context.step())

    # -- what the replaced functions tell --------------------------------------------------------------------------------

    def is_attentive(self) -> bool:
        """Whether a training forward of ours runs on this thread, in a step that measures attention."""
        if not self._is_due or not self._context.is_measuring() or threading.get_ident() != self._thread:
            return False
        return any(chunk.in_forward for chunk in self._context.chunks) and not in_backward()

    def attended(self, call: Attended, frame: FrameType) -> None:
        """Measure one call of an attention function. frame: of its caller."""
        name = "attention"
        try:
            found = self._module_of(frame)
            if found is None:
                return
            chunk, name, module = found
            self._num_seen += 1
            problem = self._problem(call.q, call.k)
            if problem:
                self._context.recording.report("blind_probe", f"attention of {name}: {problem}", name, self._context.step())
                return
            q, k = local_of(call.q), local_of(call.k)
            self._take(chunk, name, module, call.q, lambda: call.scores(q, k), q.dim() == 3)
        except Exception as error:
            self._context.guard(name, error, probe="attention", given=(call.q, call.k))

    def normalized(self, logits: torch.Tensor, dim: int, frame: FrameType) -> None:
        """Measure a softmax over `dim` of logits, where it is that of attention written out. frame: of its caller."""
        name = "attention"
        try:
            if logits.dim() < 3 or dim not in (-1, logits.dim() - 1) or not logits.is_floating_point():
                return
            found = self._module_of(frame)
            if found is None:
                return
            chunk, name, module = found
            if not self._is_attention(chunk, name, module):
                return
            local = local_of(logits)
            if type(local) not in _ORDINARY or local.layout is not torch.strided:
                return
            self._num_seen += 1
            is_flat = local.dim() == 3
            heads = self._heads(chunk, name, module) if is_flat else 0
            if is_flat:
                heads = heads if heads and local.shape[0] % heads == 0 else 1
                local = _with_heads(local, heads)
            self._take(chunk, name, module, logits, lambda: Logits(local), False)
        except Exception as error:
            self._context.guard(name, error, probe="attention", given=logits)

    # -- rows -------------------------------------------------------------------------------------------------------------

    def _take(self, chunk: Chunk, name: str, module: nn.Module, shown: torch.Tensor, scores: Any, is_flat: bool) -> None:
        """Make the rows of one call. shown: a tensor that is placed as its heads are; is_flat: heads lie in the batch."""
        costs = self._context.recording.costs
        former = costs.turn_to_probe("attention")
        try:
            self._make_rows(chunk, name, module, shown, scores, is_flat)
        finally:
            costs.turn_to(former)

    def _make_rows(
        self, chunk: Chunk, name: str, module: nn.Module, shown: torch.Tensor, scores: Any, is_flat: bool
    ) -> None:
        context = self._context
        number = self._number(chunk, name)
        entries = [self._entry(chunk, name + f":{one}" + (f":{number}" if number else "")) for one in QUANTITIES]
        chunk.order.place(entries[0])
        entries[1].site_pos = entries[0].site_pos
        wanted = [context.plan.measures(entry) for entry in entries]
        if not any(wanted):
            return
        asked: AttentionScores | Logits = scores()
        if is_flat and isinstance(asked, AttentionScores):
            heads = self._heads(chunk, name, module)
            if heads and asked.shape[1] != heads and asked.shape[1] % heads == 0:
                asked = _split(asked, heads)
        if self._traces.of(entries[0]):
            # No row is made of it: whoever traces is shown what each query attends to.
            shown_as = self._entry(chunk, name + ":scores" + (f":{number}" if number else ""))
            context.recording.show(shown_as, attention_map(asked), chunk.micro_step)
        measured = measure(asked)
        per_head = measured.of_heads()
        values = ((measured.entropy, measured.counts), (measured.largest, measured.largest != -torch.inf))
        for entry, is_wanted, (one, counts), of_head in zip(entries, wanted, values, per_head, strict=True):
            if not is_wanted:
                continue
            describe_site(context, chunk, entry, shown, module, tuple(one.shape))
            observe_some(context.recording, entry, one, counts, chunk.micro_step)
            context.recording.vector(entry, entry.name.removeprefix(f"{name}:").partition(":")[0], of_head, "head",
                                     chunk.micro_step)  # fmt: skip
            self._num_rows += 1

    def _entry(self, chunk: Chunk, name: str) -> TensorEntry:
        key = (chunk.vpp_stage, name)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = self._context.table.entry(chunk.vpp_stage, name, Kind.ATTENTION)
        return entry

    def _number(self, chunk: Chunk, name: str) -> int:
        """Return how many calls of this module came before in this forward."""
        forward, number = self._num_calls.get((chunk.vpp_stage, name), (None, 0))
        number = number + 1 if forward is chunk.forward else 0
        self._num_calls[chunk.vpp_stage, name] = chunk.forward, number
        return number

    def _problem(self, q: torch.Tensor, k: torch.Tensor) -> str:
        """Return why the scores of a call cannot be formed here; empty: they can."""
        if any(one.is_nested or local_of(one).layout is not torch.strided for one in (q, k)):
            return "nested tensors are not measured"
        if any(type(local_of(one)) not in _ORDINARY for one in (q, k)):
            return f"tensors of type {type(q).__name__} are not measured"
        place = self._context.place()
        if place.cp_size > 1:
            return "each rank holds a part of the keys (context parallelism)"
        if is_dtensor(k) and any(
            is_shard(placement) and placement.dim == k.dim() - 2 for _, _, _, placement in axes_of(k, place)
        ):
            return "each rank holds a part of the keys"
        return ""

    # -- whose call it is -------------------------------------------------------------------------------------------------

    def _module_of(self, frame: FrameType | None) -> tuple[Chunk, str, nn.Module] | None:
        """Return the innermost module of ours on the stack whose chunk's forward runs; None: no module of ours calls."""
        for _ in range(MOST_FRAMES):
            if frame is None:
                return None
            code = frame.f_code
            arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            for holder in _HOLDERS:
                if holder in arguments or holder in code.co_freevars:
                    module = frame.f_locals.get(holder)
                    if not isinstance(module, nn.Module):
                        continue
                    found = self._known.get(id(module))
                    if found is not None and found[2] is module:
                        return found if found[0].in_forward else None
                    if next(module.parameters(), None) is not None:
                        return None  # Another model's: a teacher, a moving average.
            frame = frame.f_back
        return None

    def _lineage(self, chunk: Chunk, name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
        """Return a module and the two that hold it, innermost first."""
        found = [(name, module)]
        for _ in range(2):
            name = name.rpartition(".")[0]
            holder = chunk.structure.modules.get(name)
            if not name or holder is None:
                break
            found.append((name, holder))
        return found

    def _is_attention(self, chunk: Chunk, name: str, module: nn.Module) -> bool:
        """Whether a softmax in this module is one of attention: by its name, its class, or a target that names it."""
        known = self._is_written.get(id(module))
        if known is None:
            words = [(type(one).__name__, own.rpartition(".")[2]) for own, one in self._lineage(chunk, name, module)]
            attentive = [any(ATTENTIVE.search(word) for word in pair) for pair in words]
            known = attentive[0] or (any(attentive) and not any(ROUTING.search(word) for word in words[0]))
            targets = self._context.plan.config.schedule_of(Kind.ATTENTION).targets or ()
            known = known or any(Target.parse(text).name == name for text in targets)
            self._is_written[id(module)] = known
        return known

    def _heads(self, chunk: Chunk, name: str, module: nn.Module) -> int:
        """Return the number of heads, from an attribute of a module, its config, or a module that holds it; 0: not known."""
        for _, one in self._lineage(chunk, name, module):
            for source in (one, getattr(one, "config", None)):
                for word in HEADS:
                    value = getattr(source, word, None)
                    if isinstance(value, int) and value > 0:
                        return value
        return 0


def _split(scores: AttentionScores, heads: int) -> AttentionScores:
    """Return the scores of a call that had [batch * heads, queries, width], with the heads apart."""
    q, k = scores.q[0], scores.k[0]
    if k.shape[0] != q.shape[0]:
        return scores
    mask = None if scores.mask is None else _with_heads(scores.mask[0], heads)
    return AttentionScores(
        _with_heads(q, heads), _with_heads(k, heads), mask, causal=scores.causal, scale=scores.scale,
        score_mod=scores.score_mod, mask_mod=scores.mask_mod,
    )  # fmt: skip


def _with_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.reshape(-1, heads, *x.shape[1:])
