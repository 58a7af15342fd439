"""StepFacts: what a diagnosis asks of a closed step beside its anomalies. Of the step alone, so a replay has the same."""

from __future__ import annotations

import msgspec


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """Copies of one tensor that differ in a step."""

    kind: str
    name: str
    accused: tuple[int, ...]
    """Ranks of the copies that fewest hold; all, where nobody can tell."""
    num_copies: int
    is_sure: bool
    """Most copies are equal, so that the accused are the odd ones."""
    change: str = ""
    """`bit`: the sums of bit patterns differ by one power of two. `element`: one absurd value explains the whole difference.
    Empty: neither."""
    change_words: str = ""
    """The figures of that."""
    culprit: int | None = None
    """The rank that holds the absurd value."""


class Upstream(msgspec.Struct, frozen=True, kw_only=True):
    """What one data-parallel replica had measured before the place where its first non-finite value was seen."""

    num_measured: int
    """Tensors of its forward before that place, held against the same ones of the other replicas."""
    num_blocks: int
    """Of those, outputs of whole blocks: the data had passed so many of them well."""
    unlike: str = ""
    """The first of them that is not like the others', in words; empty: all are."""


class TensorReading(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank measured of one tensor of the forward in a step."""

    name: str
    smallest: float
    largest: float
    num_zero: int
    is_bad: bool
    """Some of it is not finite."""


class Maker(msgspec.Struct, frozen=True, kw_only=True):
    """What made a tensor that is not finite; or, where minus infinities went in as a mask may have, what made those."""

    name: str
    """Of the tensor that was made."""
    functions: tuple[str, ...] | None
    """As `TensorInfo.functions`; None: its graph was not read."""
    inputs: tuple[TensorReading, ...] = ()
    """Tensors that it was made of, as far as they are measured."""
    arguments: dict[str, TensorReading] = {}
    """Name -> of the tensors that `functions` names."""
    dtype: str = ""
    is_inf: bool = False
    """Infinities and no NaN."""


class FirstBad(msgspec.Struct, frozen=True, kw_only=True):
    """The first non-finite values of one data-parallel replica's forward in a step, new or not."""

    lane: int
    rank: int
    kind: str
    name: str
    segment: str
    border: str
    depth: int
    dtype: str
    num_bad: int
    is_inf: bool
    upstream: Upstream


class Outlier(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor of the forward that left its range, on the replica where it stands out most: what its numbers look like."""

    lane: int
    rank: int
    value: float
    """The largest of its values, without its sign."""
    usual: float
    """The same of the other replicas, their median; 0: there are none."""
    is_alone: bool
    """One element makes nearly all of the fourth moment: the kurtosis is the number of elements."""
    is_whole: bool
    """Its kurtosis is the other replicas': all elements grew alike."""
    num_before: int
    """Tensors of the forward that its replica had measured before it."""
    upstream: Upstream
    functions: tuple[str, ...] | None = None
    """As `TensorInfo.functions`."""


class ReplicaDeviation(msgspec.Struct, frozen=True, kw_only=True):
    """An output of one data-parallel replica that is not like the others'."""

    name: str
    times: float
    """Its root mean square against the median of theirs."""
    is_entry: bool
    """It is made of the data before the first block."""


class OddWeight(msgspec.Struct, frozen=True, kw_only=True):
    """A weight of which one element is nearly all."""

    step: int
    name: str
    rank: int
    value: float
    """That element."""
    num_elements: int
    gradient: float
    """The largest value of its gradient in that step, without its sign; infinite: not finite, 0: not measured."""
    rate: float
    """The highest learning rate of the step; 1: none is logged."""


class StepFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One closed step."""

    ongoing: frozenset[str] = frozenset()
    """Ids of the onsets whose series are anomalous in this step, those that began in it among them."""
    lanes: dict[int, int] = {}
    """Rank -> its data-parallel coordinate."""
    num_lanes: int = 1
    """Data-parallel replicas."""
    is_whole: bool = True
    """Every rank's frames of the step are complete: what is not anomalous in it is well."""
    missing: tuple[int, ...] = ()
    """Ranks whose frames of the step were incomplete when it was judged: what began there is not seen."""
    num_compared: int = 0
    """Weights of which several copies were compared, bit by bit."""
    num_weights: int = 0
    """Weights in all."""
    num_differing: int = 0
    """Weights whose copies differ; where none do, tensors of all kinds."""
    divergences: tuple[Divergence, ...] = ()
    """The first of them."""
    upstream: dict[str, Upstream] = {}
    """Id of a non-finite anomaly -> what its replica had measured before it."""
    first_bad: tuple[FirstBad, ...] = ()
    """Of each replica whose forward was not finite."""
    makers: dict[str, Maker] = {}
    """`<rank>/<kind>/<name>` of a tensor of the forward -> what made it: of non-finite anomalies and what they name."""
    num_gradients: int = 0
    """Weight gradients that were measured and finite."""
    num_outputs: int = 0
    """Tensors of the forward that were measured."""
    outliers: dict[str, Outlier] = {}
    """Name of a module whose output left its range in this step -> what it looks like; the first few in forward order."""
    odd_weights: tuple[OddWeight, ...] = ()
    """In steps with an onset, and now and then in others: what was so before is no news."""
    apart: dict[int, ReplicaDeviation] = {}
    """Data-parallel replica -> the first output of its forward that is not like the others'; in steps with an onset in a
    loss alone."""
    results: dict[str, float] = {}
    """Finite losses and gradient norms: what a step comes to."""
    odd_lanes: tuple[int, ...] = ()
    """Data-parallel replicas whose own loss stands far above the others'."""
    rates: dict[str, float] = {}
    """Learning rates."""
    loss_scale: float | None = None
    has_narrow: bool = False
    """Some tensor is of a type that overflows in healthy training: float16, or one of eight bits."""
    is_skipped: bool = False
    samples: dict[int, tuple[int | str, ...]] = {}
    """Rank -> ids of the samples that it trained on, where the trainer logs them."""
    num_samples_cut: int = 0
    """Ids that the ranks left out for want of room."""
