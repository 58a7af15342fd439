"""Rows as msProbe's CSV files have them: its file names, its columns, all digits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from sentinel.csv_text import guarded
from sentinel.exports.msprobe_format import (
    FEATURE_FILES,
    HEAD,
    MICRO_STEP,
    OPS,
    OTHER_FILE,
    TAIL,
    TENSOR_FILES,
    file_of_kind,
    squashed,
)
from sentinel.messages import TensorInfo
from sentinel.printable import printable

MICRO_FILES = ("actv", "actv_grad")
"""Files whose lines always have a micro_step; rows folded over several have 0."""
GRADIENT_FILE = "grad_unreduced"
"""File that has a column of micro-steps if a step has several."""
FEATURE_KINDS = frozenset(one.kind for one in FEATURE_FILES.values())
"""Kinds that its files have as single numbers, not as statistics."""
_SIDES = {kind: sides for sides in (("activation", "activation_in"), ("dgrad", "dgrad_in")) for kind in sides}
"""Kind -> what the same tensor is as a module's output, and as one's input."""


class Spot(msgspec.Struct, frozen=True):
    """Where a tensor is written: the file, and the name in it."""

    file: str
    name: str
    shift: int = 0
    """The step in the file minus Sentinel's."""
    column: str = ""
    """Column, in a file of features; empty: it has all the statistics."""


def spots_of(infos: Iterable[TensorInfo], squash: bool = False) -> dict[int, tuple[Spot, ...]]:
    """Return id of a tensor -> where msProbe writes it: once for each module that takes or returns it.

    Kinds that msProbe does not measure are left out. The tensors of a module are numbered where it has several, as there.
    squash: names are shortened as `squashed` does.
    """
    infos = list(infos)
    short = squashed(list(dict.fromkeys(_module(info.name) for info in infos))) if squash else {}
    slots: dict[tuple[int, str, str], list[tuple[str, int]]] = {}
    found: dict[int, list[Spot]] = {}
    for info in infos:
        kind = info.kind
        if kind in ("activation", "dgrad", "activation_in", "dgrad_in"):
            module, _, element = info.name.partition(":")
            slots.setdefault((info.chunk, kind, module), []).append((element or "0", info.id))
        elif kind in FEATURE_KINDS:
            spot = _feature_spot(info, short)
            if spot is not None:
                found.setdefault(info.id, []).append(spot)
        elif kind == "grad_momentum_alignment":
            if ":" in info.name:
                continue
            found.setdefault(info.id, []).append(Spot(OTHER_FILE, short.get(info.name, info.name)))
        elif (file := file_of_kind(kind)) is not None:
            found.setdefault(info.id, []).append(Spot(file, short.get(info.name, info.name), -TENSOR_FILES[file][1]))
    for info in infos:
        if info.kind not in _SIDES:
            continue
        output, taken = _SIDES[info.kind]
        others = [(output, *name.partition(":")[::2]) for name in info.also]
        others += [(taken, *name.partition(":")[::2]) for name in info.consumers]
        for kind, module, element in others:
            held = slots.setdefault((info.chunk, kind, module), [])
            if info.id not in [number for _, number in held]:
                held.append((_free(element or "0", [one for one, _ in held]), info.id))
    for (_, kind, module), held in slots.items():
        file = "actv" if kind.startswith("activation") else "actv_grad"
        slot = "input" if kind.endswith("_in") else "output"
        for element, number in held:
            number_text = f"_{element}" if len(held) > 1 or element != "0" else ""
            found.setdefault(number, []).append(Spot(file, f"{short.get(module, module)}.{slot}{number_text}"))
    return {number: tuple(spots) for number, spots in found.items()}


def _feature_spot(info: TensorInfo, short: dict[str, str]) -> Spot | None:
    """Return where a quantity stands; None for one that msProbe does not know."""
    name, _, quantity = info.name.partition(":")
    for file, features in FEATURE_FILES.items():
        for column, feature in features.columns.items():
            if (features.kind, feature.quantity) == (info.kind, quantity) and name.endswith(features.ending):
                module = name.removesuffix(features.ending)
                return Spot(file, short.get(module, module) + features.suffix, 0, column)
    return None


def feature_line(
    file: str, vpp_stage: int, name: str, step: int, micro_step: int, values: Mapping[str, float]
) -> tuple[str, str]:
    """Return (header, line) of a module's features. values: column -> Sentinel's value; the others are written as nan."""
    features = FEATURE_FILES[file]
    own = [values.get(column, math.nan) ** (1 / feature.power) for column, feature in features.columns.items()]
    micro = [str(max(micro_step, 0))] if features.has_micro_steps else []
    lead = [*HEAD, *([MICRO_STEP] if features.has_micro_steps else []), *features.columns]
    return ",".join(lead) + "\n", ",".join([str(vpp_stage), _name(name), str(step), *micro, *map(repr, own)]) + "\n"


def _module(name: str) -> str:
    return name.partition(":")[0]


def _free(element: str, taken: Sequence[str]) -> str:
    """Return an element's number, another one when it is taken."""
    if element not in taken:
        return element
    return str(next(number for number in range(len(taken) + 1) if str(number) not in taken))


def micro_step_of(file: str, micro_step: int, has_several: bool) -> int | None:
    """Return the micro_step that a line of this file has; None: the file has no such column.

    has_several: whether the step has gradients of several micro-batches; of one alone it is that of the step.
    """
    if file in MICRO_FILES or (file == GRADIENT_FILE and has_several):
        return max(micro_step, 0)
    return None


def file_name(file: str, step: int, steps_per_file: int) -> str:
    """Return `actv_0-9.csv` for the file that holds a step."""
    first = step // steps_per_file * steps_per_file
    return f"{file}_{first}-{first + steps_per_file - 1}.csv"


def header(ops: Sequence[str], has_micro_steps: bool) -> str:
    """Return the first line of a file."""
    return ",".join([*HEAD, *([MICRO_STEP] if has_micro_steps else []), *ops, *TAIL]) + "\n"


def line(
    vpp_stage: int, name: str, step: int, micro_step: int | None, values: Sequence[float | int], shape: str, dtype: str
) -> str:
    """Return one line; `shape` as `shape_text` has it."""
    micro = "" if micro_step is None else f"{micro_step},"
    return f"{vpp_stage},{_name(name)},{step},{micro}{','.join(map(repr, values))},{shape},torch.{dtype}\n"


def share_values(ops: Sequence[str], share: float) -> list[float | int]:
    """Return the statistics of a share in the file `other`, where it is a tensor of one element."""
    of_op: dict[str, float | int] = {"nans": int(math.isnan(share)), "zeros": float(abs(share) < 1e-8)}
    return [of_op.get(op, share) for op in ops]


def shape_text(shape: Sequence[int], num_elements: int) -> str:
    """Return a shape as msProbe's CSV has it; of a part of a tensor its number of elements alone."""
    size = 1
    for one in shape:
        size *= one
    return _quoted(str(list(shape) if size == num_elements else [num_elements]))


def _name(name: str) -> str:
    return _quoted(guarded(printable(name)))


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '""') + '"' if any(mark in text for mark in ',"\r\n') else text


def ops_of(statistics: Sequence[str], is_all: bool) -> tuple[str, ...]:
    """Return the statistics asked for that msProbe knows. is_all: all that it knows, in its order."""
    return OPS if is_all else tuple(name for name in statistics if name in OPS)


def value_column(op: str, values: list[float]) -> list[float] | list[int]:
    """Return the column of a statistic: counts are whole numbers."""
    return [int(value) for value in values] if op == "nans" else values


def has_place(kind: str) -> bool:
    """Return whether msProbe has a file for a kind."""
    return kind in FEATURE_KINDS or kind == "grad_momentum_alignment" or file_of_kind(kind) is not None
