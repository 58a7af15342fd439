"""What is known of each kind of row: one line a kind, which every stage reads."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from sentinel.record import Kind


class Phase(enum.IntEnum):
    """When in a step something is made; the number is its place in the total order."""

    PARAM = 0
    """Weights as the step reads them."""
    FORWARD = 1
    LOSS = 2
    METRIC = 3
    """A scalar of unknown making: after the forward, before nothing."""
    BACKWARD = 4
    WGRAD_UNREDUCED = 5
    WGRAD = 6
    SCHEDULE = 7
    """Learning rate and its like: only the optimizer reads them."""
    NORM = 8
    """Gradient norm, found_inf: after every rank's weight gradients."""
    OPTIMIZER = 9
    COMM = 10
    """A collective: program order on its own rank only."""
    FREE = 11
    """Health and wall-clock figures: related to nothing inside the step."""


class Ordering(enum.Enum):
    """How the causal order tells when in its step a row of a kind was made."""

    PHASE = "phase"
    """By the phase of the kind; inside the phase by depth, site and slot, or by the parameter's name."""
    PROGRAM = "program"
    """By the program of its own rank, and nothing else."""
    NAME = "name"
    """By the name of the logged value."""
    CARRIER = "carrier"
    """As the kind of the tensor that the row tells of, which stands in its name: `fc1:dgrad.fp16_overflow`."""
    NONE = "none"
    """Related to nothing inside the step."""


class Subject(enum.Enum):
    """What a row of a kind tells of: where it is measured, and what its targets name."""

    MODULE = "module"
    """A tensor that passes a module: it needs the module's hooks."""
    BLOCK = "block"
    """What the borders of blocks pass on; it has no rows of its own (`is_of_kind`)."""
    PARAMETER = "parameter"
    """There is one for each parameter."""
    PROBE = "probe"
    """A quantity that a probe forms inside a module, or of another kind's tensor."""
    CALL = "call"
    """A call of torch.distributed, at a line of code."""
    LOGGED = "logged"
    """A number that the trainer logs."""
    PROCESS = "process"
    """The run's processes and files, and no tensor."""


class Placement(enum.Enum):
    """What data-parallel ranks hold of a plain tensor of a kind, and so how their rows are merged."""

    COPIES = "copies"
    """The same bits on each rank: one of them stands for all, and their checksums are compared."""
    ALIKE = "alike"
    """Formed of copies, each rank of what it holds: merged, and no two tell of different data."""
    PARTS = "parts"
    """Each rank has its own samples or tokens: the rows of all are merged."""
    OWN = "own"
    """Each rank has a value of its own; whether these are merged, the placements of the single tensor say."""
    NOWHERE = "nowhere"
    """It is no tensor that lies on ranks."""


class Side(enum.Enum):
    """Whether a tensor goes into a module or comes out of it; a gradient is on its tensor's side."""

    INPUT = "input"
    OUTPUT = "output"
    NONE = "none"


class KindRow(NamedTuple):
    """What is known of one kind."""

    subject: Subject
    phase: Phase | None
    """None: it depends on the name, see `ordering`."""
    slot: int
    """Place among the kinds of one phase at one site, or of one parameter. In forward the input is there before the output,
    in backward the other way; what a probe says of an output stands where the output does. Of one parameter: the optimizer's
    state, then what it adds."""
    ordering: Ordering
    placement: Placement
    side: Side = Side.NONE
    has_elements: bool = False
    """The row's numbers are the elements of a tensor, and no quantity that was formed of it."""
    carriers: frozenset[Kind] = frozenset()
    """Kinds whose tensors it looks at: those must pass by, whether or not they are measured themselves."""


def table_of(kinds: Iterable[Kind], rows: Mapping[Kind, KindRow]) -> Mapping[Kind, KindRow]:
    """Return the rows, once each kind is known to have one; RuntimeError names those that have none."""
    missing = [kind.label for kind in kinds if kind not in rows]
    if missing:
        raise RuntimeError(f"sentinel/kinds.py: expected a row for each kind, got none for {', '.join(missing)}")
    return rows


_OF = frozenset
_M, _P, _Q = Subject.MODULE, Subject.PARAMETER, Subject.PROBE
_BY = Ordering

KINDS = table_of(Kind, {
    Kind.PARAM:           KindRow(_P, Phase.PARAM, 0, _BY.PHASE, Placement.COPIES, has_elements=True),
    Kind.WGRAD_UNREDUCED: KindRow(_P, Phase.WGRAD_UNREDUCED, 0, _BY.PHASE, Placement.OWN, has_elements=True),
    Kind.WGRAD:           KindRow(_P, Phase.WGRAD, 0, _BY.PHASE, Placement.COPIES, has_elements=True),
    Kind.ACTIVATION_IN:   KindRow(_M, Phase.FORWARD, 0, _BY.PHASE, Placement.PARTS, Side.INPUT, True),
    Kind.ACTIVATION:      KindRow(_M, Phase.FORWARD, 2, _BY.PHASE, Placement.PARTS, Side.OUTPUT, True),
    Kind.DGRAD:           KindRow(_M, Phase.BACKWARD, 0, _BY.PHASE, Placement.PARTS, Side.OUTPUT, True),
    Kind.DGRAD_IN:        KindRow(_M, Phase.BACKWARD, 2, _BY.PHASE, Placement.PARTS, Side.INPUT, True),
    Kind.RESIDUAL:        KindRow(Subject.BLOCK, Phase.FORWARD, 2, _BY.PHASE, Placement.PARTS, has_elements=True),
    Kind.EXP_AVG:         KindRow(_P, Phase.OPTIMIZER, 0, _BY.PHASE, Placement.COPIES, has_elements=True),
    Kind.EXP_AVG_SQ:      KindRow(_P, Phase.OPTIMIZER, 0, _BY.PHASE, Placement.COPIES, has_elements=True),
    Kind.UPDATE:          KindRow(_P, Phase.OPTIMIZER, 1, _BY.PHASE, Placement.ALIKE, has_elements=True),
    Kind.UPDATE_RATIO:    KindRow(_P, Phase.OPTIMIZER, 2, _BY.PHASE, Placement.ALIKE),
    Kind.GRAD_MOMENTUM_ALIGNMENT: KindRow(_P, Phase.OPTIMIZER, 2, _BY.PHASE, Placement.OWN),
    Kind.ATTENTION:       KindRow(_Q, Phase.FORWARD, 1, _BY.PHASE, Placement.PARTS),
    Kind.WEIGHT_SPECTRUM: KindRow(_P, Phase.PARAM, 0, _BY.PHASE, Placement.OWN),
    Kind.ROUTER:          KindRow(_Q, Phase.FORWARD, 1, _BY.PHASE, Placement.PARTS),
    Kind.COMM:            KindRow(Subject.CALL, Phase.COMM, 0, _BY.PROGRAM, Placement.OWN),
    Kind.SCALAR:          KindRow(Subject.LOGGED, None, 0, _BY.NAME, Placement.NOWHERE),
    Kind.HEALTH:          KindRow(Subject.PROCESS, Phase.FREE, 0, _BY.NONE, Placement.NOWHERE),
    Kind.PRECISION:       KindRow(_Q, None, 0, _BY.CARRIER, Placement.OWN, carriers=_OF({Kind.ACTIVATION, Kind.DGRAD})),
    Kind.SATURATION:      KindRow(_Q, Phase.FORWARD, 2, _BY.PHASE, Placement.PARTS, Side.OUTPUT,
                                  carriers=_OF({Kind.ACTIVATION})),
    Kind.CHANNEL:         KindRow(_Q, Phase.FORWARD, 2, _BY.PHASE, Placement.PARTS, Side.OUTPUT,
                                  carriers=_OF({Kind.ACTIVATION})),
})  # fmt: skip
"""Kind to what is known of it. A kind without a row is an error of this module's import."""

ROW_OF: Mapping[str, KindRow] = {kind.label: row for kind, row in KINDS.items()}
"""The same by public name. What a newer version of Sentinel wrote may be of a kind that is not here."""


def _where(holds: Callable[[KindRow], bool]) -> tuple[Kind, ...]:
    return tuple(kind for kind, row in KINDS.items() if holds(row))


def labels(kinds: Iterable[Kind]) -> frozenset[str]:
    """Return the public names of some kinds."""
    return frozenset(kind.label for kind in kinds)


MEASURED_KINDS = _where(lambda row: row.subject not in (Subject.LOGGED, Subject.PROCESS))
"""Kinds that the monitor can measure: their rows lie somewhere in the model or its program."""
WATCHED_KINDS = _where(lambda row: row.subject is not Subject.PROCESS)
"""Kinds of which there are series: rules name them, exports write them."""
MODULE_KINDS = _where(lambda row: row.subject is Subject.MODULE)
"""Kinds that are tensors passing a module: they need its hooks."""
PARAMETER_KINDS = _where(lambda row: row.subject is Subject.PARAMETER)
"""Kinds of which there is one for each parameter: their targets name parameters, or modules that hold some."""
ACTIVATION_KINDS = _where(lambda row: row.subject is Subject.MODULE and row.phase is Phase.FORWARD)
"""Tensors of the forward that pass a module."""
FORWARD_KINDS = _where(lambda row: row.phase is Phase.FORWARD)
BACKWARD_KINDS = _where(lambda row: row.phase is Phase.BACKWARD)
GRADIENT_KINDS = _where(lambda row: row.phase in (Phase.BACKWARD, Phase.WGRAD_UNREDUCED, Phase.WGRAD))
"""Gradients: of data, and of weights before and after their reduction."""
COPIED_KINDS = _where(lambda row: row.placement is Placement.COPIES)
"""Kinds of which data-parallel ranks hold the same bits."""
SHARED_KINDS = _where(lambda row: row.placement in (Placement.COPIES, Placement.ALIKE))
"""Kinds of which no rank has numbers of its own data."""
STATE_KINDS = _where(lambda row: row.phase is Phase.OPTIMIZER and row.placement is Placement.COPIES)
"""What the optimizer keeps of each parameter: running means."""
ELEMENT_KINDS = _where(lambda row: row.has_elements)
"""Kinds whose rows are a tensor's elements; those of the others are derived quantities."""
CARRIERS: Mapping[Kind, frozenset[Kind]] = {kind: row.carriers for kind, row in KINDS.items() if row.carriers}
"""Kinds that look at the tensors of others, and the kinds of these tensors."""

_STREAM = labels(MODULE_KINDS)
_STREAM_BORDERS = frozenset({"block_input", "block_output"})


def is_of_kind(kind: str, border: str, kinds: Collection[str]) -> bool:
    """Return whether a tensor is of one of these kinds. border: that of the black box which it is, or empty.

    `residual` means the residual stream and its gradient: whatever passes the borders of the blocks. It has no rows of its
    own: a tensor is measured once.
    """
    return kind in kinds or ("residual" in kinds and kind in _STREAM and border in _STREAM_BORDERS)


def measured_kind(kind: str, name: str) -> str:
    """Return the kind of the tensor that a row is about: `dgrad` for the precision row `fc1:dgrad.fp16_overflow`."""
    row = ROW_OF.get(kind)
    is_in_name = row is not None and row.ordering is Ordering.CARRIER
    return name.rpartition(":")[2].partition(".")[0] if is_in_name else kind
