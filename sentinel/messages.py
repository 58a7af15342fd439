"""Payloads of the frames that hold no rows: descriptor, change, end_step, vector, health, ack, heartbeat and bye.

Fields are only ever added, last, with a default, so that an older reader can read the frames of a newer rank. The range of
each field is checked when a frame is read (`bounds`).
"""

from __future__ import annotations

import fnmatch
import math
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from sentinel.bounds import (
    MAX_SCALARS,
    MAX_STEP,
    Chunk,
    Count,
    Depth,
    Dtype,
    LayoutId,
    Name,
    Offset,
    Seconds,
    Shape,
    Shift,
    Small,
    Step,
    TensorId,
    Text,
    Word,
)
from sentinel.place import Place


class TensorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the table that rows point into."""

    id: TensorId
    name: Name
    """Name on this rank, wrapper prefixes stripped: `blocks.0.mlp.fc1.weight` for a parameter, the module's name for an
    activation, with `:1` or `:logits` behind it for another element of its output or input than the only one.
    The chunk itself is `""`; the daemon gives it its canonical name."""
    kind: Word
    shape: Shape = ()
    dtype: Word = ""
    chunk: Chunk = 0
    """vpp_stage of the model chunk that holds it, 0-based."""
    site_pos: Small = 0
    """Order of first appearance of the site in forward, 0-based in each chunk; params and wgrads: that of their module."""
    consumers: tuple[Name, ...] = ()
    """Modules that read this same tensor (activation, dgrad): it is their activation_in / dgrad_in under another name."""
    also: tuple[Name, ...] = ()
    """Outer modules that handed the same tensor on as their own output."""
    placements: dict[Word, Word] = {}
    """Mesh axis (`dp`, `tp`, ...) to `replicate`, `shard` (merged by moments), `partial`, `owned` or `unknown`."""
    border: Word = ""
    """Black box: `chunk_input`, `block_input`, `block_output`, `chunk_output`, or empty."""
    border_index: Small = -1
    """Position of the border in its chunk's list of borders, forward order, 0-based; -1: no border."""
    part: Name = ""
    """Which part of the tensor this rank holds, where coordinates do not determine it: `dp_shard=1,tp=0`, or `0:4096` of
    the flattened tensor. Equal parts are replicas, unequal ones are disjoint. Empty: `placements` determines it."""
    functions: tuple[Name, ...] | None = None
    """Activations: functions not defined everywhere that made it from what was measured before, by its autograd graph,
    nearest first: `log`, `div`, `log:blocks.1.up` (of that very tensor), `sqrt'` (its derivative alone). None: not known."""
    parts: tuple[TensorId, ...] = ()
    """Of a value that is formed of sums over all shards (`ingest/whole_tensor_values.py`): this rank's tensors that hold its
    summands."""
    is_part: bool = False
    """It is such a summand, whose own value has no meaning."""


class ChunkInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One model chunk of a rank, and how the black box cut it."""

    vpp_stage: Chunk
    depth: Depth
    """Place in the forward order of all chunks of all stages, 0-based (`place.depth`)."""
    segments: tuple[Name, ...] = ()
    """Names of the segments in forward order; segment i lies between border i and border i + 1."""
    blocks: tuple[Name, ...] = ()
    """Local names of the repeated layers, in forward order; those of one container share its name as prefix."""
    modules: tuple[Name, ...] = ()
    """Local names of all modules, in order of registration."""
    offsets: dict[Name, Shift] = {}
    """Local name of a container of numbered children -> number to add to make theirs global, from the trainer itself
    (Megatron's layer_number, the experts of an expert-parallel rank). Takes precedence over what the daemon works out."""
    model: Name = ""
    """Which of several models of the trainer it belongs to (`G`, `D`): stands before its names. Empty: there is one."""
    flows: tuple[str, ...] | None = None
    """Local names of the modules outside the blocks that hold no parameters, and whose outputs a gradient goes through, as
    far as is known: what another stage has under such a name is another tensor. Tables of positions are not among them:
    those are the same on every stage. None: an older version wrote it without this field, so every module may be one."""


START = "start"
"""Entry of a descriptor's `environment`: the incarnation of the rank 0 with which a rank agreed on its attempt through the
store of the process group. It is the same on all ranks of one start, and on no others; missing where there was no store."""


class Descriptor(msgspec.Struct, frozen=True, kw_only=True, weakref=True):
    """The first frame of an incarnation and of each of its files; when tensors, placements or chunks change, a
    `LayoutChange`."""

    version: Word
    place: Place
    chunks: tuple[ChunkInfo, ...]
    tensors: tuple[TensorInfo, ...]
    row_fields: Annotated[tuple[tuple[Word, Dtype, Annotated[int, Meta(ge=0, lt=2**16)]], ...], Meta(max_length=1024)]
    """(name, numpy dtype string, byte offset) of each field of a row."""
    row_bytes: Annotated[int, Meta(ge=1, le=2**16)]
    environment: dict[Word, Name] = {}
    """host, torch, kernel, boundary, device: for people, never judged. pid, pid_start, pid_space, boot: by these a daemon on
    the same host finds the process again, and no other that got its number. start: see `START`. job, pod, node, gpu,
    gpu_uuid, label.NAME: see `rank_identity.RankIdentity`. command: how the process was started, see `command_line`. seed:
    torch's, as it was set last."""
    first_step: Step = 0
    layer_offset: Shift | None = None
    name_map: dict[Name, Name] = {}
    config_path: Name = ""
    """Absolute path of the config file on this rank's host; empty: the config came from code."""
    config_hash: Word = ""
    """Hash of the text in force (`monitor_config.hash_of`); it follows edits while training."""
    settings: dict[str, Any] = {}
    """The config in force, plain values of `monitor_config.MonitorConfig`."""
    resumed_step: int = -1
    """The next step by the last state that `Monitor.load_state_dict` was given; -1: none was loaded."""


class LayoutChange(msgspec.Struct, frozen=True, kw_only=True):
    """The difference of a descriptor from an earlier one of the incarnation; or that an earlier one is in force again.

    An id stands for one tensor as long as the incarnation lasts, and none is taken out of the table: a tensor that a step
    does not measure has no row in it, and needs no layout of its own.
    """

    base: LayoutId
    """Layout id of the descriptor that this changes; the frame's own layout id: that descriptor is in force again."""
    base_offset: Offset
    """Byte offset in the same file at which the frame begins that describes `base`."""
    tensors: tuple[TensorInfo, ...] = ()
    """Entries that are new, and those that changed, each with all its fields."""
    head: Descriptor | None = None
    """The descriptor without its table, where a field beside the table changed; its own table is empty."""

    def applied_to(self, base: Descriptor) -> Descriptor:
        """Return the descriptor that this makes of its base."""
        tensors = {tensor.id: tensor for tensor in base.tensors}
        tensors.update((tensor.id, tensor) for tensor in self.tensors)
        return msgspec.structs.replace(self.head or base, tensors=tuple(tensors.values()))


class EndStep(msgspec.Struct, frozen=True, kw_only=True):
    """The last frame of a rank's step: counts of what it measured, scalars, and times."""

    step: Annotated[int, Meta(ge=0, le=MAX_STEP)]
    num_rows: Count
    """Rows this rank sent for the step, all rows frames together."""
    num_calls: Count
    """call_ids given out in the step."""
    num_micro_steps: Count = 0
    scalars: Annotated[dict[Name, float], Meta(max_length=MAX_SCALARS)] = {}
    """Logged values by name, NaN and infinities included."""
    is_skipped: bool = False
    is_partial: bool = False
    """The trainer ended in mid-step: the rows are those measured until then."""
    num_dropped_rows: Count = 0
    """Rows of this step that were measured and not written (an older writer: of this or of earlier steps)."""
    num_folded_rows: Count = 0
    """Rows that were folded into others, since the step had more than `max_rows`."""
    step_time_s: Seconds = 0.0
    """From the step's first forward to its end: of the host; of an accelerator's stream where `wait_s` is known there."""
    due: dict[Word, Count] = {}
    """Kind to the number of tensors that this step was due to measure, with which its rows are compared."""
    wait_s: Seconds = -1.0
    """Seconds of step_time_s in which the host, or the accelerator's stream that trains, waited for other ranks in
    collectives; below 0: not known."""
    activities: Annotated[tuple[Word, ...], Meta(max_length=1024)] = ()
    """Activities other than train that the trainer set since the last end_step: step_time_s includes their time."""
    samples: Annotated[tuple[Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | Name, ...], Meta(max_length=2**20)] = ()
    """Ids of the samples that this rank trained on in the step, where the trainer logs them."""
    num_samples_cut: Count = 0
    """Ids that were left out for want of room."""
    num_finite_dropped: Count = 0
    """Of `num_dropped_rows`, those that held no NaN and no infinity."""
    lost_to: Word = ""
    """Why rows were dropped, joined by commas: `writer` (it was late and the hand-over full), `cap` (spool.max_bytes),
    `disk` (writing failed), `error` (the rows could not be read)."""
    left_out: Annotated[tuple[Word, ...], Meta(max_length=256)] = ()
    """Kinds that were scheduled for this step and not measured, since their cost exceeds `max_overhead` of a step."""


LOSS_NAMES = (
    "loss", "Loss", "LOSS", "loss/*", "*[/. _-]loss", "*[/. _-]Loss", "*_loss_step", "*_loss_epoch", "*_loss/*", "train_nll",
    "*/nll", "*cross_entropy*",
)  # fmt: skip
"""Names of scalars in which the default rules look for a loss (rules/default.yaml, loss-spike)."""


def is_loss(name: str) -> bool:
    """Return whether the default rules take a scalar of this name for a loss."""
    return any(fnmatch.fnmatchcase(name, glob) for glob in LOSS_NAMES)


class Vector(msgspec.Struct, frozen=True, kw_only=True):
    """A statistic of one tensor that has several values: one for each head, expert, channel or bin."""

    tensor: TensorId
    """Index of the descriptor's table, as in a row."""
    statistic: Word
    """What the values are: `histogram`, `entropy`, `max_logit`, `load`, ..."""
    axis: Word
    """What each dimension of `shape` runs over: `bin`, `head`, `expert`, `channel`; several joined by `,`."""
    micro_step: Small = -1
    call_id: Count = 0
    dtype: Dtype = "<f4"
    """numpy's name of a little-endian dtype."""
    shape: Shape = ()
    values: bytes = b""
    """The values of an array of `shape`, in C order."""
    edges: tuple[float, ...] = ()
    """Edges of a histogram's bins, one more than there are bins; empty where there are none."""

    def __post_init__(self) -> None:
        """Raise ValueError where the values are not of the shape."""
        expected = math.prod(self.shape) * int(self.dtype[-1])
        if len(self.values) != expected:
            raise ValueError(f"{self.statistic}: expected {expected} bytes of values, got {len(self.values)}")


class Vectors(msgspec.Struct, frozen=True, kw_only=True):
    """The vectors of one rank and step; the frame precedes the step's end_step."""

    items: tuple[Vector, ...]


IMPOSSIBLE = "impossible_frame"
"""Code of the health record by which a reader replaces a frame that it refused."""


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """A failure of the measurement itself on a rank, such as rows that were dropped; rules can judge it like a value."""

    code: Word
    """`hook_failed`, `unsupported_placement`, `rows_dropped`, `steps_dropped`, `spool_full`, `disk_full`, ..."""
    message: Text
    site: Name = ""
    count: Count = 1
    step: Step = -1
    first_step: Step = -1
    """Of `steps_dropped`: the first of the steps up to `step` of which nothing is left, not even their end."""
    num_rows: Count = 0
    """Of `steps_dropped`: the rows of these steps."""
    lost_to: Name = ""
    """Of `steps_dropped`: why, as in `EndStep.lost_to`."""
    runs: tuple[tuple[Step, Step, Count, Count], ...] = ()
    """Of `steps_dropped`: (first step, last step, steps, rows) of stretches of steps that each had as many rows: a reader
    that read some of them before they were dropped leaves these out."""


class Ack(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's answer to a command."""

    command: Word
    """The command's id."""
    state: Word
    """`armed` (takes effect at at_step), `missed` (at_step had begun), `refused`, `applied`, `ended`, `withdrawn`."""
    step: Step
    """The rank's current step when it answered."""
    reason: Text = ""


class Bye(msgspec.Struct, frozen=True, kw_only=True):
    """The last frame of an incarnation that ended in order."""

    reason: Text
    """`detached`, `exit`, `exception`, `interrupted` (Ctrl-C)."""
    step: Step
    error: Name = ""
    """Type of the exception, with its module where it is no built-in: `torch.OutOfMemoryError`; empty: none is known."""
    message: Text = ""
    """The exception's message, cut to the bound of a text."""
    code: Annotated[int, Meta(ge=-(2**31), le=2**32)] = 0
    """Exit code that the trainer gave to `sys.exit` or `os._exit`; 0: it gave 0, or none."""
    is_memory: bool = False
    """The exception says that memory ran out."""
    is_lost_peer: bool = False
    """The exception says that the connection to another rank was lost, or that others did not answer."""
    is_between: bool = False
    """`step` had ended and the next one had not begun."""
    signal: Word = ""
    """Name of the signal whose handler, the trainer's own, ended the process: `SIGTERM`, `SIGINT`; empty: none is known."""


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """Written once a second while the rank's process runs: the step, call and activity it is in."""

    step: Step
    call_id: Count
    activity: Word
    """init, train, eval, checkpoint."""
    module: Name = ""
    phase: Word = ""
    """forward, backward, optimizer, or empty."""
    micro_step: Small = -1
    """Micro-step of the last observation; -1: none, or not known."""
    is_waiting: Annotated[int, Meta(ge=-1, le=1)] = -1
    """1: the training thread is inside a collective, 0: it is not, -1: not known."""
    raised: Bye | None = None
    """What a notebook's cell raised while it trained, which does not end the process; None: nothing, or it trained since."""
    site: Name = ""
    """The line of the user's code at which the training thread makes no progress, `file:line (function)`; empty: it does."""
    num_waits: Count = 0
    """Number of waits for other ranks that ended since this incarnation began; 0: none, or not known."""
