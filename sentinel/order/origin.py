"""Where a first cause was born: the module, segment, parameter or scalar, as closely as what was measured can tell."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec

from sentinel.anomaly import Anomaly
from sentinel.kinds import MODULE_KINDS, Phase, labels, measured_kind
from sentinel.order.phase import phase_of, tensor_name


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Where a fault was born, as closely as what was measured can tell."""

    name: str
    """Module, segment, parameter or scalar."""
    kind: str
    phase: str
    """`forward`, `backward` or `optimizer`."""
    rank: int | None
    """None where the ranks were already merged or reduced."""
    micro_step: int | None
    segment: str = ""
    module: str = ""
    """The module itself; empty where only the segment, or no module at all, is known."""
    candidates: tuple[str, ...] = ()
    """Modules that cannot be distinguished: they all read the tensor whose gradient went bad."""
    ranks: tuple[int, ...] = ()
    """Ranks of one tensor- or context-parallel group that show the same at the same place: one of them, `rank` being the
    lowest; an exchange between them lies between the fault and what was measured. Empty: `rank` alone."""


_PHASE_WORDS = {
    Phase.PARAM: "optimizer",
    Phase.FORWARD: "forward",
    Phase.LOSS: "forward",
    Phase.METRIC: "forward",
    Phase.BACKWARD: "backward",
    Phase.WGRAD_UNREDUCED: "backward",
    Phase.WGRAD: "backward",
    Phase.SCHEDULE: "optimizer",
    Phase.NORM: "backward",
    Phase.OPTIMIZER: "optimizer",
    Phase.COMM: "communication",
    Phase.FREE: "",
}


def origin(anomaly: Anomaly, anomalies: Iterable[Anomaly] = ()) -> Origin:
    """Return where a first cause was born.

    Forward: the module whose output is first bad while its inputs are clean. Backward: the module whose `dgrad` was
    clean and whose `dgrad_in` is bad, so a consumer of the tensor, the innermost. Of a border alone: its segment.

    A border's block is named as the module when other modules of its rank were seen: then those inside it were clean.

    anomalies: those of the same step; a consumer whose own gradient was bad already did not make this one.
    """
    anomalies = list(anomalies)
    phase = phase_of(anomaly.kind, anomaly.tag_name)
    kind, tensor = measured_kind(anomaly.kind, anomaly.tag_name), tensor_name(anomaly.tag_name)
    module, candidates = "", ()  # type: tuple[str, tuple[str, ...]]
    name = anomaly.tag_name
    rank = anomaly.rank
    if anomaly.num_members:
        pass  # a group of tensors is no module
    elif phase is Phase.FORWARD:
        maker = maker_of(anomaly.tag_name, anomaly.border, anomaly.also) if _sees_modules(anomaly, anomalies) else ""
        if maker:
            name = module = maker
        elif kind == "activation_in" and anomaly.border:
            name = anomaly.segment or f"input of {anomaly.tag_name}"
        elif kind == "activation_in":
            # No module put this out: it was made between modules, by the code of the one around them.
            module = tensor.rpartition(".")[0]
            name = module or anomaly.segment or f"input of {anomaly.tag_name}"
        elif (
            not anomaly.border
            or _is_inside(tensor, anomaly.segment)
            or (tensor == anomaly.segment and _sees_modules(anomaly, anomalies))
        ):
            module = tensor
        else:
            name = anomaly.segment or anomaly.tag_name
    elif phase is Phase.BACKWARD:
        candidates = _suspects(anomaly, anomalies)
        if anomaly.border and not any(_is_inside(c, anomaly.segment) for c in candidates):
            if anomaly.segment in candidates and _sees_modules(anomaly, anomalies):
                module = anomaly.segment
            name, candidates = anomaly.segment or name, ()
        elif len(candidates) == 1:
            module, candidates = candidates[0], ()
            name = module
        elif candidates:
            name = " or ".join(candidates)
        elif kind == "dgrad_in":
            module = tensor
        else:
            name = anomaly.segment or f"gradient of the output of {anomaly.tag_name}"
    elif phase in (Phase.WGRAD, Phase.WGRAD_UNREDUCED, Phase.PARAM, Phase.OPTIMIZER):
        module = tensor.rpartition(".")[0]
        if phase is not Phase.WGRAD_UNREDUCED and anomaly.dp_size > 1:
            rank = None
    return Origin(
        name=name,
        kind=anomaly.kind,
        phase=_PHASE_WORDS[phase],
        rank=rank,
        micro_step=anomaly.micro_step,
        segment=anomaly.segment,
        module=module,
        candidates=candidates,
        ranks=_group_alike(anomaly, anomalies) if rank is not None else (),
    )


def _group_alike(anomaly: Anomaly, anomalies: Iterable[Anomaly]) -> tuple[int, ...]:
    if anomaly.tp_size <= 1 and "cp" not in anomaly.place:
        return ()

    def identity(a: Anomaly) -> tuple[object, ...]:
        place = {axis: at for axis, at in a.place.items() if axis not in ("tp", "cp")}
        return a.step, a.kind, a.tag_name, a.micro_step, a.depth, a.statistic, place

    mine = identity(anomaly)
    ranks = {a.rank for a in anomalies if a.rank is not None and identity(a) == mine}
    return tuple(sorted(ranks)) if len(ranks) > 1 else ()


_OF_MODULE = labels(MODULE_KINDS)
_CHUNK = re.compile(r"model|stage\d+")


def _is_inside(module: str, segment: str) -> bool:
    """Tell whether naming a module says more than naming its segment: only module monitoring sees such modules.

    A block's segment bears the block's name; stem and head hold modules of any name, but not the whole chunk.
    """
    if segment.rpartition(".")[2] in ("stem", "head"):
        return _CHUNK.fullmatch(module) is None
    return bool(segment) and module.startswith(segment + ".")


def maker_of(name: str, border: str, also: Sequence[str]) -> str:
    """Return the innermost module that put a border's tensor out, where modules were ever measured; empty: none is known.

    also: the names of outputs that the tensor has beside that of its border.
    """
    for one in also:
        module = tensor_name(one)
        if not module or _CHUNK.fullmatch(module) or name.startswith(f"{module}."):
            continue  # The whole model, or a module around it: its row has the name of the innermost already.
        is_inside = module.startswith(f"{name}.")
        if border == "chunk_output" or (border == "block_output" and is_inside):
            return module
        if border == "block_input" and not is_inside and module != name:
            return module
    return ""


def _sees_modules(anomaly: Anomaly, anomalies: Iterable[Anomaly]) -> bool:
    """Tell whether the rank of a border had module monitoring on, as far as its anomalies of the step show it."""
    return any(not a.border and a.rank == anomaly.rank and a.kind in _OF_MODULE for a in anomalies)


def _suspects(anomaly: Anomaly, anomalies: Iterable[Anomaly]) -> tuple[str, ...]:
    consumers = anomaly.consumers
    if not consumers and measured_kind(anomaly.kind, anomaly.tag_name) == "dgrad_in":
        consumers = (tensor_name(anomaly.tag_name),)
    innermost = [c for c in consumers if not any(other.startswith(c + ".") for other in consumers)]
    if len(innermost) > 1:
        dirty = {
            name
            for a in anomalies
            if a.kind == "dgrad" and a.rank == anomaly.rank and _meets_micro(a, anomaly) and a.id != anomaly.id
            for name in (a.tag_name, *a.also)
        }
        innermost = [c for c in innermost if c not in dirty] or innermost
    return tuple(sorted(innermost))


def _meets_micro(a: Anomaly, b: Anomaly) -> bool:
    return a.micro_step is None or b.micro_step is None or a.micro_step == b.micro_step
