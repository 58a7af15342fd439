"""StepView: one closed step of a run, as rules and exports see it; made by `ingest` of frames, by `logs` of other logs.

A step is two tables beside each other. `rows` are what the ranks measured, one row an observation of one rank. `stats` are
the logical tensors of the model: the rows of a tensor's shards and micro-steps merged, copies taken once. A view is read
only: rules and exports share one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from sentinel.decision import Decision
from sentinel.messages import Descriptor, EndStep, Health
from sentinel.moments import Moments
from sentinel.place import Place

NAN_CHECKSUM = 2**64 - 1
"""Checksum of every copy that holds a NaN: a NaN has many bit patterns, and different ones are no difference."""

Holder: TypeAlias = tuple[int, int]
"""(rank, id of the tensor there)."""
Shard: TypeAlias = tuple[tuple[str, int | str], ...]
"""Coordinates of a piece, or its `TensorInfo.part`; empty: the whole tensor."""


class Scalar(msgspec.Struct, frozen=True):
    """A logged scalar of one step."""

    mean: float
    """Unweighted mean over the ranks that report it; NaN or infinite when one of them is."""
    by_rank: dict[int, float]


class RankStep(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part of a step: its rows, its end_step and its health records."""

    rank: int
    descriptor: Descriptor
    rows: npt.NDArray[np.void]
    """[num_rows] ROW_DTYPE."""
    end_step: EndStep | None
    time: float
    """Seconds since the epoch, by the rank's clock, of its last frame of the step."""
    health: tuple[Health, ...] = ()
    incarnation: bytes = b""
    ended_mono_s: float = 0.0
    """When the rank ended the step, in seconds of its monotonic clock: comparable within its incarnation alone."""

    @property
    def num_rows(self) -> int:
        """Number of `rows`."""
        return len(self.rows)


class LogicalTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor of the model, however many ranks hold it; or one rank's part where parts cannot be merged."""

    index: int
    name: str
    """Canonical name."""
    kind: str
    key: str
    """Names the series: name, kind, and the coordinates over which it is not merged. The same in every layout of a run."""
    depth: int
    site_pos: int
    pp_stage: int
    vpp_stage: int
    ranks: tuple[int, ...]
    place: dict[str, int] = {}
    """Coordinates over which this series is not merged; empty: it is the whole tensor."""
    consumers: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    segment: str = ""
    border: str = ""
    border_index: int = -1
    communicates: bool = False
    is_partial: bool = False
    """Each rank holds a summand, or it is one (`TensorInfo.is_part`): of its values only non-finite ones have a meaning."""
    num_elements: int = 0
    dtype: str = ""
    """Data type on the first of `ranks`."""
    functions: tuple[str, ...] | None = None
    """As `TensorInfo.functions`, with canonical names."""
    is_part: bool = False
    """As `TensorInfo.is_part`: a summand, which reports and exports leave out."""


class Replicas(msgspec.Struct, frozen=True):
    """Copies of one tensor, or of one shard of it, that must be bit-identical."""

    index: int
    """Of the logical tensor."""
    shard: Shard
    holders: tuple[Holder, ...]
    """Ranks rising; at least two."""
    number: int = -1
    """Of the shard in its layout."""


class CopySet(msgspec.Struct, frozen=True):
    """Copies of one tensor that are sharded in different ways: the sums of their pieces' checksums must be equal."""

    index: int
    copies: tuple[tuple[Holder, ...], ...]
    """The pieces of each; at least two copies, and no two pieces of one overlap."""


class Differing(msgspec.Struct, frozen=True):
    """Copies that should be equal and are not all."""

    index: int
    """Of the logical tensor."""
    shard: str
    """Which piece of it, in words; empty: the whole tensor."""
    members: tuple[tuple[int, ...], ...]
    """The ranks of each copy: one, or several that hold it together."""
    checksums: tuple[int, ...]
    """Of each copy; NAN_CHECKSUM where it holds a NaN."""


class OwnRows(Protocol):
    """The index of the ranks' own rows of some tensors of a layout; made once for a layout, used in every step.

    An entry is one rank's part of one quantity: a logical tensor, or all those that are taken as one.
    """

    index: npt.NDArray[np.int64]
    """[entries] the quantity: index of the tensor, or -1 for those that are taken as one; rising."""
    rank: npt.NDArray[np.int64]
    """[entries] ranks of one quantity rise."""

    def values(self, view: Any, statistic: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Return a statistic of what each entry measured in a step, and of how many rows that hold any element: [entries]
        each. NaN: there is no such row, or one holds what is not finite."""


class Layout(Protocol):
    """Which logical tensor each rank's tensor is, for one set of descriptors: the same object as long as none changes."""

    @property
    def descriptors(self) -> Mapping[int, Descriptor]:
        """Rank -> its descriptor; ranks rising."""

    @property
    def places(self) -> dict[int, Place]:
        """Rank -> place."""

    @property
    def tensors(self) -> list[LogicalTensor]:
        """The logical tensors, by their index."""

    @property
    def replicated(self) -> frozenset[int]:
        """Indices of the logical tensors of which several ranks hold copies that must be bit-identical."""

    @property
    def added_copies(self) -> list[CopySet]:
        """Copies that only compare as sums of their pieces."""

    @property
    def num_weights_compared(self) -> tuple[int, int]:
        """(weights of which several copies are held and compared, all weights)."""

    def held_share(self, ranks: frozenset[int]) -> npt.NDArray[np.float64]:
        """Return the share of each logical tensor's distinct shards that one of these ranks holds: [num_tensors]."""

    def logical_of(self, rank: int, tensor_ids: npt.NDArray[np.uint32]) -> npt.NDArray[np.int32]:
        """Return the logical index of each local id; -1 for ids that the descriptor does not know."""

    def own_rows(self, watched: npt.NDArray[np.bool_], is_in_all: npt.NDArray[np.bool_]) -> OwnRows:
        """Return what finds the ranks' own rows of some tensors: [tensors] which, and which of them are taken as one."""


class StepView(Protocol):
    """One closed step of a run: all that rules and exports may read of it."""

    run: str
    attempt: int
    step: int
    decision: Decision | None
    """The decision that closed the step; None: the view was not made of frames (another program's log, synthetic values)."""
    stride: int
    """Steps from one recorded step to the next, 10 in a log of every tenth; durations in steps are counted in it."""
    time: float
    """Seconds since the epoch of the last frame, by its rank's clock."""
    is_skipped: bool
    """Whether any rank's optimizer skipped the step."""
    step_time_s: float
    """The longest of the ranks' steps, in seconds."""
    health: list[tuple[int, Health]]
    """(rank, health record) of all ranks."""
    num_rows: int
    """Rows judged."""

    @property
    def layout(self) -> Layout:
        """Which logical tensor each rank's tensor is."""

    @property
    def parts(self) -> Sequence[RankStep]:
        """The parts of the ranks; ranks rising."""

    @property
    def tensors(self) -> list[LogicalTensor]:
        """Logical tensors of the layout; `stats` and `present` are indexed alike."""

    @property
    def places(self) -> dict[int, Place]:
        """Rank -> place."""

    @property
    def scalars(self) -> dict[str, Scalar]:
        """Name -> what the ranks logged."""

    @property
    def rows(self) -> npt.NDArray[np.void]:
        """[num_rows] ROW_DTYPE, read only: every rank's rows, ranks in rising order."""

    @property
    def row_rank(self) -> npt.NDArray[np.int32]:
        """[num_rows] the rank of each row."""

    @property
    def row_logical(self) -> npt.NDArray[np.int32]:
        """[num_rows] index into `tensors`; -1: the descriptor does not know the row's tensor."""

    @property
    def bad_rows(self) -> npt.NDArray[np.int64]:
        """Indices of rows that hold a non-finite value."""

    @property
    def lone_weights(self) -> npt.NDArray[np.int64]:
        """Indices of the weights of which some row has one element that is nearly all (`moments.LONE_SHARE`), rising."""

    @property
    def stats(self) -> npt.NDArray[np.void]:
        """[num_tensors] STATS_DTYPE: shards and micro-steps merged; of copies, the rows of the lowest rank that is there."""

    @property
    def moments(self) -> Moments:
        """[num_tensors] the derived statistics."""

    @property
    def present(self) -> npt.NDArray[np.bool_]:
        """[num_tensors] whether the step has a row of the tensor with any element: of none there is no statistic."""

    @property
    def is_bad(self) -> npt.NDArray[np.bool_]:
        """[num_tensors] whether any row of the tensor holds a non-finite value."""

    @property
    def is_whole(self) -> npt.NDArray[np.bool_]:
        """[num_tensors] whether each shard of the tensor has a holder whose end_step of this step came."""

    @property
    def site_pos(self) -> npt.NDArray[np.int64]:
        """[num_tensors] place of the site in this step's forward: by its rows, else by the layout."""

    @property
    def ended(self) -> frozenset[int]:
        """Ranks whose end_step came and is of a whole step (not `EndStep.is_partial`)."""

    @property
    def differing(self) -> list[Differing]:
        """Copies of a weight, its state or its reduced gradient that should be bit-identical, and are not."""

    def has_clean_input(self, rank: int, module: str) -> bool:
        """Return whether a rank measured the gradient of a module's input by itself in this step, and it is finite."""

    def carrying(self, kinds: frozenset[str]) -> StepView:
        """Return a step that has at least the rows of these kinds and those that hold a non-finite value, and says the same
        of everything else. Of a large fleet's step the others are on the machines that measured them."""

    def with_rows_of(self, tensors: Collection[int]) -> StepView:
        """Return a step that has at least the rows of these tensors, by their indices, each one's in their order; and says
        the same of everything else. What is away of them is asked for at once."""

    def with_bad_rows(self) -> StepView:
        """Return a step that has at least the rows that hold a non-finite value, and says the same of everything else."""

    def is_per_rank(self, tensor: LogicalTensor) -> bool:
        """Whether the series is one rank's own part."""
