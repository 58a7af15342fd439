"""Routers: logits, decisions and loads of mixtures of experts, for each router of the model."""

from __future__ import annotations

import fnmatch
import sys
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from sentinel.collect.hooks.chunk import Chunk
from sentinel.collect.parallel.placements import local_of
from sentinel.collect.probes.context import ProbeContext
from sentinel.collect.probes.derived import describe_site
from sentinel.collect.probes.prepared_rows import observe_some, share_words, write_rows
from sentinel.collect.probes.router_finding import Router, find_routers
from sentinel.collect.probes.routing import (
    balance_of,
    coupling_of,
    decide,
    returned_load,
    returned_logits,
    returned_losses,
    similarity,
)
from sentinel.collect.probes.step_sums import StepSums
from sentinel.collect.rows.tensor_table import TensorEntry
from sentinel.record import Kind
from sentinel.target import Target

AT_ONCE = ("logits", "entropy", "margin", "relative_margin", "aux_loss", "weight_similarity", "bias")
AT_END = ("load", "max_over_mean", "inactive", "balance", "coupling", "alignment")
"""Quantities over the tokens of a whole step, written when it ends."""


class WatchedRouter:
    """One router whose forwards are measured."""

    def __init__(self, chunk: Chunk, router: Router) -> None:
        self.chunk = chunk
        self.router = router
        self.logits: torch.Tensor | None = None
        """What its gate gave out last, on its way to the router's own end."""
        self.entries: dict[str, TensorEntry] = {}
        self.step = -1
        """The step in which its weight was measured last."""
        self.was_called = False
        """A forward of it was seen: it is not compiled."""


class RouterProbe:
    """Rows of each router M, of this rank's tokens.

    Per micro-step `M:logits`, `M:entropy` (nats a token), `M:margin`, `M:relative_margin`, `M:aux_loss`; once a step
    `M:weight_similarity` (cosines of the experts' weights), `M:bias`, and of all the tokens of the step `M:load` (a row over
    experts: the share of the tokens that each gets), `M:max_over_mean`, `M:inactive`, `M:balance`, `M:coupling`,
    `M:alignment`; the vector `load` has each expert's number of tokens, which add up over ranks.
    """

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        self._watched: list[WatchedRouter] = []
        self._handles: list[RemovableHandle] = []
        self._plan_seen = -1
        self._sums = StepSums(context, "router")
        self._of_load: dict[int, WatchedRouter] = {}
        """Id of a load's entry -> whose it is."""
        self._num_rows = 0
        context.events.planned.subscribe("router", self._plan)
        self._is_tracker_read = False
        """In this step: an optimizer for experts beside the one for all else steps in it too."""
        context.events.begun.subscribe("router", self._begin)
        context.events.updating.subscribe("router", self._read_tracker)
        context.events.ending.subscribe("router", self._end)
        context.events.removed.subscribe("router", self._leave)

    # -- which routers ------------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        plan = self._context.plan
        if not plan.wants(Kind.ROUTER):
            self._leave()
            return
        if self._watched and self._plan_seen == plan.generation:
            return
        self._leave()
        self._plan_seen = plan.generation
        targets = [Target.parse(text) for text in plan.config.schedule_of(Kind.ROUTER).targets or ()]

        def is_named(name: str) -> bool:
            return any(
                name == one.name or ("*" not in one.name.rpartition(".")[2] and fnmatch.fnmatchcase(name, one.name))
                for one in targets
            )

        for chunk in self._context.chunks:
            routers = find_routers(chunk.structure.modules, is_named)
            for router in routers:
                if plan.wants_at(Kind.ROUTER, router.name, chunk.vpp_stage):
                    self._watch(WatchedRouter(chunk, router))
            if routers:
                self._handles.append(self._context.watch("router", chunk, "", chunk.root, _Root(self, chunk).ended))

    def _watch(self, one: WatchedRouter) -> None:
        watch = self._context.watch
        self._watched.append(one)
        router = one.router
        if router.gate is not None and router.gate is not router.module:
            self._handles.append(watch("router", one.chunk, router.name, router.gate, _InnerGateHook(self, one).ended))
        self._handles.append(watch("router", one.chunk, router.name, router.module, _RouterHook(self, one).ended))

    def _leave(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._watched = [], []
        self._of_load = {}

    # -- rows -----------------------------------------------------------------------------------------------------------

    def keep_logits(self, one: WatchedRouter, output: Any) -> None:
        """Called when the gate inside a router has returned: keep its logits until the router returns."""
        if self._context.plan.takes(Kind.ROUTER) and isinstance(output, torch.Tensor):
            one.logits = local_of(output.detach())

    def routed(
        self, one: WatchedRouter, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, micro_step: int
    ) -> None:
        """Called when a router has returned: measure its logits, scores and decisions."""
        logits, one.logits, one.was_called = one.logits, None, True
        plan = self._context.plan
        if not plan.takes(Kind.ROUTER):
            return
        router = one.router
        if router.gate is router.module and isinstance(output, torch.Tensor):
            logits = returned_logits(output, router.num_experts)
        elif logits is None:
            logits = self._computed(router, args, kwargs)
        if logits is None:
            logits = returned_logits(output, router.num_experts)
        if logits is None or logits.shape[-1] != router.num_experts or not logits.numel():
            self._context.recording.report(
                "blind_probe", f"router {router.name} shows no logits of {router.num_experts} experts", router.name,
                self._context.step(),
            )  # fmt: skip
            return
        logits = logits.reshape(-1, router.num_experts)
        shown = _shown(output, logits)
        entries = {name: self._entry(one, name) for name in (*AT_ONCE, *AT_END)}
        one.chunk.order.place(entries["logits"])
        wanted = set()
        for name, entry in entries.items():
            entry.site_pos = entries["logits"].site_pos
            if plan.measures(entry):
                wanted.add(name)
        if not wanted:
            return
        num_tokens = len(logits)
        load = returned_load(output, router.num_experts, router.top_k, num_tokens)
        decisions = decide(logits, router.top_k, router.scoring)
        if load is None and not router.has_choice_bias():
            load = decisions.preferred
        values: dict[str, torch.Tensor | None] = {
            "logits": logits, "entropy": decisions.entropy, "margin": decisions.margin,
            "relative_margin": decisions.relative_margin,
        }  # fmt: skip
        losses = returned_losses(output)
        values["aux_loss"] = losses[0] if losses else None
        is_first = one.step != self._context.step()
        one.step = self._context.step()
        if is_first:
            values["bias"] = router.bias()
        for name, value in values.items():
            if value is not None and name in wanted:
                self._observe(one, name, value, shown, micro_step if name != "bias" else -1)
        if is_first and "weight_similarity" in wanted:
            weight = router.weight()
            if weight is not None:
                cosine, counts = similarity(weight)
                self._describe(one, "weight_similarity", shown, tuple(cosine.shape))
                observe_some(self._context.recording, entries["weight_similarity"], cosine, counts, -1)
                self._num_rows += 1
        if load is not None and wanted.intersection(AT_END):
            preferred = decisions.preferred if decisions.preferred is not None else load
            load = load.to(preferred.device)
            entry = entries["load"]
            self._of_load[entry.id] = one
            for name in wanted.intersection(AT_END):
                self._describe(one, name, shown, (router.num_experts,) if name in ("load", "inactive") else ())
            self._sums.add(entry, micro_step, (load, preferred, decisions.scores), num_tokens)

    def _computed(self, router: Router, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """Return the logits that a router with a weight of its own must have formed of its input."""
        weight = router.weight()
        given = next((one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)), None)
        if weight is None or given is None:
            return None
        given = local_of(given.detach())
        if given.shape[-1] != weight.shape[1] or not given.is_floating_point():
            return None
        bias = getattr(router.gate or router.module, "bias", None)
        with torch.autocast(given.device.type, enabled=False):
            logits = given.reshape(-1, weight.shape[1]).float() @ weight.float().T
            if isinstance(bias, torch.Tensor) and bias.shape == (router.num_experts,):
                logits = logits + bias.float()
        return logits

    def _end(self) -> None:
        for entry, (((load, preferred, scores), num_tokens),) in self._sums.take():
            one = self._of_load.get(entry.id)
            if one is None:
                continue
            coupling, alignment = coupling_of(preferred, scores)
            share = load.double()
            made = {
                "load": share / num_tokens,
                "max_over_mean": share.amax() / share.mean().clamp(min=torch.finfo(torch.float64).tiny),
                "balance": balance_of(load),
                "coupling": coupling,
                "alignment": alignment,
            }
            for name in AT_END:
                mine = self._entry(one, name)
                if not self._context.plan.measures(mine):
                    continue
                if name == "inactive":
                    words = share_words((load == 0).sum().view(1), load.numel())
                    write_rows(self._context.recording, [mine], words, -1)
                else:
                    self._context.recording.observe(mine, made[name], -1)
                self._sums.place_last_row(entry)
                if name == "load":
                    self._context.recording.vector(mine, "load", load, "expert")
                self._num_rows += 1
        if self._num_rows:
            self._context.count({"router": self._num_rows})
        self._num_rows = 0
        if self._context.plan.takes(Kind.ROUTER):
            self._report_blind()

    def _report_blind(self) -> None:
        report, step = self._context.recording.report, self._context.step()
        for one in self._watched:
            if not one.was_called and one.chunk.num_forwards:
                reported = f"router {one.router.name} was not seen at work: it is compiled, or not used"
                report("blind_probe", reported, one.router.name, step)
        if not self._watched and self._context.place().pp_size == 1:
            reported = "routers are to be measured, but no module looks like one; name them as targets of router"
            report("blind_probe", reported, "router", step)

    def _entry(self, one: WatchedRouter, quantity: str) -> TensorEntry:
        entry = one.entries.get(quantity)
        if entry is None:
            name = f"{one.router.name}:{quantity}"
            entry = one.entries[quantity] = self._context.table.entry(one.chunk.vpp_stage, name, Kind.ROUTER)
        return entry

    def _describe(self, one: WatchedRouter, quantity: str, shown: torch.Tensor, shape: tuple[int, ...]) -> None:
        describe_site(self._context, one.chunk, self._entry(one, quantity), shown, one.router.module, shape)

    def _observe(self, one: WatchedRouter, quantity: str, value: torch.Tensor, shown: torch.Tensor, micro_step: int) -> None:
        self._describe(one, quantity, shown, tuple(value.shape))
        self._context.recording.observe(self._entry(one, quantity), value, micro_step)
        self._num_rows += 1

    # -- auxiliary losses that are no router's output ---------------------------------------------------------------------

    def whole_ended(self, chunk: Chunk, output: Any, micro_step: int) -> None:
        """Called when a chunk's forward has returned: measure the auxiliary loss that Hugging Face models return."""
        loss = getattr(output, "aux_loss", None)
        if isinstance(loss, torch.Tensor) and loss.dim() == 0:
            loss = loss.detach().view(1)
            self._lone(chunk, "aux_loss", loss, torch.ones_like(loss, dtype=torch.bool), micro_step)

    def _begin(self) -> None:
        self._is_tracker_read = False

    def _read_tracker(self, optimizer: Any) -> None:
        """Read Megatron's tracker before its trainer reduces and clears it: this rank's layers, the mean of micro-steps."""
        if self._is_tracker_read or not self._context.plan.takes(Kind.ROUTER) or not self._context.chunks:
            return
        self._is_tracker_read = True
        module = sys.modules.get("megatron.core.transformer.moe.moe_utils")
        kept: dict[str, Any] = getattr(module, "get_moe_layer_wise_logging_tracker", dict)()
        if not kept:
            module = sys.modules.get("megatron.core.transformer.moe.moe_logging")
            tracker = getattr(module, "get_moe_metrics_tracker", lambda: None)()
            kept = {name: {"values": one.values} for name, one in getattr(tracker, "metrics", {}).items()}
        chunk = self._context.chunks[0]
        for name, one in kept.items():
            values = one["values"].detach() / max(1, chunk.num_forwards)
            self._lone(chunk, str(name), values, values != 0, -1, "layer")

    def _lone(
        self, chunk: Chunk, quantity: str, values: torch.Tensor, counts: torch.Tensor, micro_step: int, axis: str = ""
    ) -> None:
        context = self._context
        entry = context.table.entry(chunk.vpp_stage, f":{quantity}", Kind.ROUTER)
        if not context.plan.measures(entry):
            return
        # Each stage has the values of its own layers.
        known = {"pp": "shard"} if axis == "layer" and context.place().pp_size > 1 else {}
        describe_site(context, chunk, entry, values, chunk.root, tuple(values.shape), known)
        observe_some(context.recording, entry, values, counts, micro_step)
        if axis:
            context.recording.vector(entry, quantity, values, axis)
        self._num_rows += 1


class _InnerGateHook:
    """Forward hook of the gate inside a router."""

    def __init__(self, probe: RouterProbe, one: WatchedRouter) -> None:
        self.probe, self.one = probe, one

    def ended(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, micro_step: int) -> None:
        self.probe.keep_logits(self.one, output)


class _RouterHook(_InnerGateHook):
    """Forward hook of a router."""

    def ended(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, micro_step: int) -> None:
        self.probe.routed(self.one, args, kwargs, output, micro_step)


class _Root:
    """Forward hook of a chunk's root."""

    def __init__(self, probe: RouterProbe, chunk: Chunk) -> None:
        self.probe, self.chunk = probe, chunk

    def ended(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, micro_step: int) -> None:
        if self.probe._context.plan.takes(Kind.ROUTER):
            self.probe.whole_ended(self.chunk, output, micro_step)


def _shown(output: Any, logits: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a router's output that is placed as its tokens, with the autograd graph that shows how."""
    values = output if isinstance(output, (list, tuple)) else [output]
    for one in values:
        if isinstance(one, torch.Tensor) and one.requires_grad and one.dim():
            return one
    return logits
