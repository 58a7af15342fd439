"""Traces: small pictures of chosen tensors, step by step, while a run trains; what asks for them, and where they lie.

`<run>/trace/attempt<A>/rank<R>/step<S>.safetensors`, tensors named as in a dump (`dump.key_of`), and a TraceHead as JSON in
the metadata under `dump.HEAD_KEY`. Each rank keeps its newest steps only: its folder is a ring of bounded bytes.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np

from sentinel.dump import HEAD_KEY
from sentinel.errors import ConfigError, WireError
from sentinel.known_words import nearest
from sentinel.tensor_file import read_tensor_file

TRACES = "trace"
CompressorName: TypeAlias = Literal["tile", "projection", "pca", "top_k", "histogram", "none"]
Reduction: TypeAlias = Literal["mean", "max", "min", "absmax"]
SIZES: dict[str, int] = {"tile": 96, "projection": 3, "pca": 3, "top_k": 16, "histogram": 64, "none": 1}
"""Compressor -> its size where none is given."""
MOST_SIZES: dict[str, int] = {"tile": 512, "projection": 64, "pca": 8, "top_k": 1024, "histogram": 4096, "none": 1}
REDUCTIONS: tuple[str, ...] = ("mean", "max", "min", "absmax")
_NUMPY: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "I32": np.dtype("<i4"), "I64": np.dtype("<i8")}
_ATTEMPT = re.compile(r"attempt(0|[1-9]\d{0,8})")
_RANK = re.compile(r"rank(0|[1-9]\d{0,8})")
_STEP = re.compile(r"step(0|[1-9]\d{0,17})\.safetensors")
SETTLED_NS = 2_000_000_000
"""Age of a folder's last change from which its list is kept: clocks of file systems are as coarse as that, and what happens
twice in one of their ticks shows once."""


class Compressor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a tensor becomes small, on its own device."""

    name: CompressorName = "tile"
    """`tile`: each of the last two dimensions cut into `size` stretches, one number a tile; `projection`: of each token onto
    `size` unit vectors drawn from `seed`; `pca`: of each token, onto the `size` directions in which tokens differ most;
    `top_k`: the `size` largest of the last dimension, and which they are; `histogram`: counts in `size` bins between the
    least and the greatest number; `none`: the whole tensor."""
    size: int | None = None
    """None: as SIZES says."""
    reduce: Reduction = "mean"
    """Of `tile`: what a tile shows of its elements."""
    softmax: bool = False
    """Of `top_k`: probabilities over the last dimension in place of logits."""
    seed: int = 0
    """Of `projection`."""
    vectors: str = ""
    """Of `projection`: onto the vectors that the trainer's config has under this name in `trace.vectors`, in place of drawn
    ones; `size` and `seed` say nothing then."""

    @property
    def effective_size(self) -> int:
        """The size in force."""
        return SIZES[self.name] if self.size is None else self.size


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """How the tensors that a request measures are traced besides."""

    compressor: Compressor = Compressor()
    every_micro_step: bool = False
    """False: only what a step's first micro-batch shows."""
    tokens: bool = False
    """The whole numbers that the model is given, too."""


AS_TILES = Trace()


class TracedTensor(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of a trace, before it was made small."""

    kind: str
    """`tokens` for what the model is given."""
    name: str
    """Local name, as in `messages.TensorInfo`; `M:scores` is what attention M gives each key, [heads, queries, keys]."""
    chunk: int = 0
    """vpp_stage."""
    micro_step: int = -1
    shape: tuple[int, ...] = ()
    """Of what this rank holds."""
    dtype: str = ""
    compressor: Compressor = Compressor()
    parts: tuple[str, ...] = ()
    """Further tensors of the file that belong to it: `indices` of `top_k`; `range` and `nonfinite` of `histogram`. Each is
    named as it, with `:` and its word behind."""


class TraceHead(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank says of its trace of one step."""

    run: str
    attempt: int
    rank: int
    step: int
    time: float
    """Seconds since the epoch at the step's end."""
    tensors: dict[str, TracedTensor] = {}
    """Name in the file -> what it was made of."""
    left_out: dict[str, str] = {}
    """Name -> why a tensor that was asked for is not here."""
    num_dropped: int = 0
    """Steps that this rank could not hand over since it traces, because earlier ones were on their way."""
    commands: tuple[str, ...] = ()
    """Ids of the commands that asked."""


class TracePath(NamedTuple):
    """The trace of one step of one rank."""

    attempt: int
    rank: int
    step: int
    path: Path


class TracedStep(NamedTuple):
    """What one file holds."""

    head: TraceHead
    tensors: dict[str, np.ndarray]
    """Name -> fp32, int32 or int64."""


def check_compressor(where: str, asked: Compressor) -> None:
    """Raise ConfigError, which names the field, for a compressor that nobody can form."""
    if asked.name not in SIZES:
        raise ConfigError(f"{where}: unknown compressor {asked.name!r}{nearest(asked.name, tuple(SIZES))}")
    if asked.reduce not in REDUCTIONS:
        raise ConfigError(f"{where}.reduce: expected one of {', '.join(REDUCTIONS)}, got {asked.reduce!r}")
    most = MOST_SIZES[asked.name]
    if not 1 <= asked.effective_size <= most:
        raise ConfigError(f"{where}.size of {asked.name}: expected 1 to {most}, got {asked.effective_size}")
    if asked.vectors and asked.name != "projection":
        raise ConfigError(
            f"{where}.vectors: expected the compressor projection, which alone has vectors, got {asked.name!r}"
        )
    if not 0 <= asked.seed < 2**32:
        raise ConfigError(f"{where}.seed: expected 0 to {2**32 - 1}, got {asked.seed}")


def ring_dir(run_dir: Path, attempt: int, rank: int) -> Path:
    """Return where a rank's traces of an attempt lie."""
    return run_dir / TRACES / f"attempt{attempt}" / f"rank{rank}"


def step_path(folder: Path, step: int) -> Path:
    """Return where the trace of a step lies in a rank's folder."""
    return folder / f"step{step}.safetensors"


def trace_paths(run_dir: Path) -> list[TracePath]:
    """Return the traces that are there now, in the order of attempt, step, rank."""
    return TraceRings(run_dir).paths()


class TraceRings:
    """The traces of a run, rank by rank, for whoever looks again and again: a folder is listed once for each change of it.

    Not for several threads at once.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._listed: dict[str, tuple[int, tuple[int, ...]]] = {}
        """Folder -> (when it had changed last, the numbers in it), of those that may not have changed since."""

    def attempts(self) -> tuple[int, ...]:
        """Return the attempts in which any rank traced, rising; what is left of them may be nothing."""
        return self._numbers(f"{self._run_dir}/{TRACES}", _ATTEMPT)

    def ranks(self, attempt: int) -> tuple[int, ...]:
        """Return the ranks that traced in an attempt, rising."""
        return self._numbers(f"{self._run_dir}/{TRACES}/attempt{attempt}", _RANK)

    def steps(self, attempt: int, rank: int) -> tuple[int, ...]:
        """Return the steps of a rank's ring, rising; empty where it has none."""
        return self._numbers(f"{self._run_dir}/{TRACES}/attempt{attempt}/rank{rank}", _STEP)

    def newest_attempt(self) -> int | None:
        """Return the newest attempt of which any trace is there; None: nothing is."""
        found = reversed(self.attempts())
        return next((one for one in found if any(self.steps(one, rank) for rank in self.ranks(one))), None)

    def path(self, attempt: int, rank: int, step: int) -> TracePath:
        """Return where a trace lies."""
        return TracePath(attempt, rank, step, step_path(ring_dir(self._run_dir, attempt, rank), step))

    def paths(self, rank: int | None = None) -> list[TracePath]:
        """Return the traces that are there now, in the order of attempt, step, rank. rank: of this one; None: of all."""
        found = [
            self.path(attempt, one, step)
            for attempt in self.attempts()
            for one in (self.ranks(attempt) if rank is None else (rank,))
            for step in self.steps(attempt, one)
        ]
        return sorted(found, key=lambda one: (one.attempt, one.step, one.rank))

    def _numbers(self, folder: str, form: re.Pattern[str]) -> tuple[int, ...]:
        """Return the numbers of what a folder holds that is called so."""
        now_ns = time.time_ns()
        try:
            changed_ns = os.stat(folder).st_mtime_ns  # noqa: PTH116 -- Path objects cost more than the call
            known_ns, numbers = self._listed.get(folder, (-1, ()))
            if known_ns == changed_ns:
                return numbers
            names = os.listdir(folder)  # noqa: PTH208
        except OSError:
            self._listed.pop(folder, None)
            return ()
        numbers = tuple(sorted(int(match[1]) for name in names if (match := form.fullmatch(name))))
        if now_ns - changed_ns > SETTLED_NS:
            self._listed[folder] = (changed_ns, numbers)
        return numbers


def read_trace(path: Path) -> TracedStep:
    """Return the trace of one step. WireError for a file that is none, or torn; FileNotFoundError: the ring let it go."""
    file = read_tensor_file(path)
    try:
        head = msgspec.json.decode(file.metadata.get(HEAD_KEY, ""), type=TraceHead)
    except (msgspec.DecodeError, ValueError) as error:
        raise WireError(f"{path}: expected a trace, got a head that is none: {error}") from error
    tensors: dict[str, np.ndarray] = {}
    with path.open("rb") as stream:
        for name, stored in file.tensors.items():
            dtype = _NUMPY.get(stored.dtype)
            if dtype is None:
                raise WireError(f"{path}: {name!r}: expected one of {', '.join(_NUMPY)}, got {stored.dtype}")
            stream.seek(stored.begin)
            data = stream.read(stored.num_bytes)
            if len(data) != stored.num_bytes:
                raise WireError(f"{path}: torn: {name!r} has {len(data)} of {stored.num_bytes} bytes")
            tensors[name] = np.frombuffer(data, dtype).reshape(stored.shape)
    missing = [name for name in head.tensors if name not in tensors]
    if missing:
        raise WireError(f"{path}: its head names {missing[0]!r}, which it does not hold")
    return TracedStep(head, tensors)


def read_traces(paths: Iterable[TracePath], problems: list[str]) -> Iterator[TracedStep]:
    """Yield the traces of steps, one at a time; what a ring let go meanwhile is left out. problems: gets what is none."""
    for one in paths:
        try:
            yield read_trace(one.path)
        except FileNotFoundError:
            continue
        except (WireError, OSError) as error:
            problems.append(str(error))
