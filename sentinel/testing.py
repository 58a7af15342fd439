"""For tests of rules, sinks and daemons, here and elsewhere: a clock that stands still, and runs with planted faults.

    run = SyntheticRun(tmp_path / "run", pp=2, dp=2)
    run.plant(Nan(step=5, module="layers.2.mlp", rank=2, micro_step=1))
    run.write(8)
    run.end()

writes the spools of four ranks as a trainer would, byte for byte through the same writer, without torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sentinel.messages import Ack, Bye, ChunkInfo, Descriptor, EndStep, Health, Heartbeat, TensorInfo
from sentinel.native import fold_rows
from sentinel.place import Place, canonical, layer_offsets
from sentinel.record import NONE_ID, ROW_DTYPE, Flag, Kind
from sentinel.version import VERSION
from sentinel.wire.frame import (
    FRAME_TYPES,
    MAGIC,
    NO_ATTEMPT,
    Frame,
    FrameType,
    Header,
    Message,
    encode_frame,
    encode_message,
    row_fields,
    run_id_of,
    scan,
)
from sentinel.wire.spool import FILE_BYTES, SPOOL_BYTES, SpoolWriter, file_name, life_folder

EPOCH_S = 1_800_000_000.0
"""Where a FakeClock's wall clock begins: 2027-01-15, a fixed day."""
_MIX = np.uint64(0x9E3779B97F4A7C15)


class FakeClock:
    """A clock that moves when told. Serves as a `wire.Clock`, and its methods as `time.time` and `time.monotonic`."""

    def __init__(self, time_s: float = EPOCH_S, monotonic_s: float = 1000.0) -> None:
        self._wall_ns = round(time_s * 1e9)
        self._mono_ns = round(monotonic_s * 1e9)

    def advance(self, seconds: float) -> None:
        """Move both clocks forward; ValueError backwards."""
        if seconds < 0:
            raise ValueError(f"a clock goes forward, got {seconds}")
        self._wall_ns += round(seconds * 1e9)
        self._mono_ns += round(seconds * 1e9)

    def sleep(self, seconds: float) -> None:
        """Advance instead of waiting: stands in for `time.sleep`."""
        self.advance(max(0.0, seconds))

    def wall_ns(self) -> int:
        """Return nanoseconds since the epoch."""
        return self._wall_ns

    def mono_ns(self) -> int:
        """Return monotonic nanoseconds."""
        return self._mono_ns

    def time(self) -> float:
        """Return seconds since the epoch."""
        return self._wall_ns / 1e9

    def monotonic(self) -> float:
        """Return monotonic seconds."""
        return self._mono_ns / 1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nan:
    """A non-finite value is born at one module, on one rank, in one micro-step, and goes where the arithmetic carries it.

    Forward: the module's output is bad, and all behind it, on all later stages of that replica, its loss, its gradients,
    and every weight gradient. Backward: the module's output gradient is still clean, what it hands to its input is bad,
    and all before it. Weight gradients are reduced, so they are bad on every replica; then the gradient norm is.
    """

    step: int
    module: str
    """Canonical: `layers.3.attn`, `embed`, `head`."""
    rank: int | None = None
    """Where it is born; None: on the first rank that holds the module."""
    micro_step: int = 0
    phase: str = "forward"
    """`forward`, `backward`, or `wgrad` (the weight gradient alone)."""
    value: str = "nan"
    """`nan`, `inf` or `-inf` where it is born; behind that everything is NaN."""
    is_skipped: bool = True
    """The optimizer skips the step; else every weight is NaN from the next step on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlowUp:
    """The values of one tensor kind at one module, and of the modules behind it, are larger by a factor."""

    step: int
    module: str
    factor: float = 100.0
    for_steps: int = 1
    kind: str = "activation"
    """`activation`, `dgrad` (then what is before the module grows), `wgrad` or `param` (then the module's alone)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossSpike:
    """The loss is larger by a factor, on every rank that reports it, or on one."""

    step: int
    factor: float = 3.0
    for_steps: int = 1
    rank: int | None = None


Fault = Nan | BlowUp | LossSpike


@dataclasses.dataclass(slots=True)
class _Table:
    """What one rank observes in a step, as columns; made once."""

    descriptor: Descriptor
    rows: npt.NDArray[np.void]
    """Template: one row per observation, statistics empty."""
    scale: npt.NDArray[np.float64]
    count: npt.NDArray[np.int64]
    key: npt.NDArray[np.uint64]
    """Seeds the values: equal on ranks that hold the same copy."""
    moves: npt.NDArray[np.bool_]
    """Whether the values are drawn anew each step; weights keep theirs."""
    position: npt.NDArray[np.int64]
    """Place of the site in the forward order of the whole model."""
    module: list[str]
    """Canonical name of the module."""


class _Rank:
    def __init__(self, place: Place, table: _Table) -> None:
        self.place = place
        self.table = table
        self.spool: SpoolWriter | None = None
        self.life = b""
        self.is_dead = False
        self.held: list[tuple[int, bytes, int, int]] | None = None
        self.num_last = 0
        """Frames of the step written last."""


class SyntheticRun:
    """Writes the spools of a run of pp x dp x tp ranks that trains a small transformer, without training anything.

    Ranks are numbered tp fastest, then dp, then pp. Weights are sharded over tp where a transformer's are, copied over
    dp; activations are sharded over dp. The same seed writes the same values.
    """

    def __init__(
        self,
        directory: Path,
        *,
        pp: int = 1,
        dp: int = 1,
        tp: int = 1,
        layers: int = 4,
        d_model: int = 64,
        micro_steps: int = 2,
        kinds: Collection[str] = ("param", "wgrad", "activation", "dgrad"),
        per_micro_step: bool = False,
        black_box: bool = True,
        attempt: int | None = 0,
        first_step: int = 0,
        step_time_s: float = 0.1,
        elements: int = 64,
        seed: int = 0,
        clock: FakeClock | None = None,
        ranks: Iterable[int] | None = None,
        spool_bytes: int = SPOOL_BYTES,
        file_bytes: int = FILE_BYTES,
    ) -> None:
        """directory: `<runs>/<run>`; its last part is the run's name. layers: of the whole model, at least one a stage.

        elements: how many values are drawn for each row (its count is the tensor's). ranks: those that start; None: all.
        black_box: borders are observed whatever `kinds` says.
        """
        if layers < pp:
            raise ValueError(f"expected at least one layer a stage, got {layers} layers for {pp} stages")
        self.directory = Path(directory)
        self.run = self.directory.absolute().name
        self.pp, self.dp, self.tp = pp, dp, tp
        self.micro_steps = micro_steps
        self.attempt = attempt
        self.step = first_step
        """The step that the next `write` writes."""
        self.step_time_s = step_time_s
        self.clock = clock or FakeClock()
        self.faults: list[Fault] = []
        self._layers, self._d_model, self._elements = layers, d_model, elements
        self._kinds = frozenset(kinds)
        self._per_micro_step = per_micro_step
        self._black_box = black_box
        self._seed = seed
        self._first_step = first_step
        self._spool_bytes, self._file_bytes = spool_bytes, file_bytes
        self._num_lives = 0
        self._poisoned_from: int | None = None
        self._offsets = layer_offsets({stage: self._blocks(stage) for stage in range(pp)})
        self._sites = self._make_sites()
        self._ranks = [_Rank(place, self._make_table(place)) for place in self._places()]
        for rank in range(self.num_ranks) if ranks is None else ranks:
            self.start(rank)

    # -- the run ----------------------------------------------------------------------------------------------------

    @property
    def num_ranks(self) -> int:
        """pp x dp x tp."""
        return self.pp * self.dp * self.tp

    @property
    def rows_per_step(self) -> int:
        """Rows that all ranks together write for a step."""
        return sum(self.num_rows(rank) for rank in range(self.num_ranks))

    def num_rows(self, rank: int) -> int:
        """Return the rows that a rank writes for a step."""
        rows = self._ranks[rank].table.rows
        return len(rows) if self._per_micro_step else len(np.unique(rows["tensor"]))

    def modules(self) -> list[str]:
        """Return the canonical names of the modules, in forward order."""
        return [name for names in self._sites for name in names]

    def place(self, rank: int) -> Place:
        """Return where a rank is."""
        return self._ranks[rank].place

    def descriptor(self, rank: int) -> Descriptor:
        """Return what a rank says of itself."""
        return self._ranks[rank].table.descriptor

    def life(self, rank: int) -> bytes:
        """Return the newest life of a rank."""
        return self._ranks[rank].life

    def folder(self, rank: int) -> Path:
        """Return the spool folder of a rank's newest life."""
        return life_folder(self.directory, rank, self._ranks[rank].life)

    def plant(self, *faults: Fault) -> SyntheticRun:
        """Have faults happen at their steps; returns the run."""
        for fault in faults:
            if not isinstance(fault, LossSpike) and fault.module not in self.modules():
                raise ValueError(f"no module {fault.module!r}; there are {', '.join(self.modules())}")
        self.faults.extend(faults)
        return self

    def write(self, num_steps: int = 1, *, ranks: Sequence[int] | None = None, skip: Collection[int] = ()) -> None:
        """Write the next steps. ranks: those that speak, in this order (None: all, rising); skip: ranks that do not.

        The clock advances by step_time_s a step, before its end.
        """
        for _ in range(num_steps):
            self.clock.advance(self.step_time_s)
            for rank in range(self.num_ranks) if ranks is None else ranks:
                if rank not in skip:
                    self.write_rank(rank, self.step)
            self._after(self.step)
            self.step += 1

    def write_rank(self, rank: int, step: int, *, end: bool = True) -> None:
        """Write one step of one rank: its rows, and unless end=False its end_step. Dead and unstarted ranks say nothing."""
        one = self._ranks[rank]
        if one.spool is None or one.is_dead:
            return
        rows, end_step = self.observe(rank, step)
        one.num_last = 0
        self._say(one, FrameType.ROWS, rows.tobytes(), step, len(rows))
        if end:
            self._say(one, FrameType.END_STEP, encode_message(end_step), step, 0)

    def observe(self, rank: int, step: int) -> tuple[npt.NDArray[np.void], EndStep]:
        """Return what a rank would say of a step: [num_rows] ROW_DTYPE and the end_step, planted faults included."""
        one = self._ranks[rank]
        rows = self._values(one, step)
        num_calls = len(rows)
        if not self._per_micro_step:
            rows = rows[: fold_rows(rows, len(rows))]
        is_skipped = any(isinstance(f, Nan) and f.step == step and f.is_skipped for f in self.faults)
        if is_skipped:
            rows["flags"] |= np.uint16(Flag.SKIPPED)
        kinds, counts = np.unique(rows["kind"], return_counts=True)
        end_step = EndStep(
            step=step,
            num_rows=len(rows),
            num_calls=num_calls,
            num_micro_steps=self.micro_steps,
            scalars=self._scalars(one, step),
            is_skipped=is_skipped,
            step_time_s=self.step_time_s,
            due={Kind(int(kind)).label: int(count) for kind, count in zip(kinds, counts, strict=True)},
        )
        return rows, end_step

    def end(self, rank: int | None = None, reason: str = "exit") -> None:
        """Say bye: a rank, or all that live."""
        for one in self._ranks if rank is None else [self._ranks[rank]]:
            if one.spool is not None and not one.is_dead:
                self._say(one, FrameType.BYE, encode_message(Bye(reason=reason, step=self.step - 1)), self.step - 1, 0)
                if one.held is None:
                    one.spool.close()
                    one.is_dead = True

    # -- what may happen to a rank ----------------------------------------------------------------------------------

    def start(self, rank: int) -> bytes:
        """Begin a new life of a rank: at the start, or in place of one that was killed; returns the life."""
        one = self._ranks[rank]
        if one.spool is not None:
            one.spool.close()
        self._num_lives += 1
        self.clock.advance(0.001)
        text = f"{self._seed}/{self.run}/{rank}/{self._num_lives}"
        one.life = hashlib.blake2b(text.encode(), digest_size=16).digest()
        one.spool = SpoolWriter(
            life_folder(self.directory, rank, one.life), one.life, rank, run_id_of(self.run),
            NO_ATTEMPT if self.attempt is None else self.attempt,
            max_bytes=self._spool_bytes, file_bytes=self._file_bytes, clock=self.clock,
        )  # fmt: skip
        one.is_dead, one.held = False, None
        one.spool.append(FrameType.DESCRIPTOR, encode_message(one.table.descriptor))
        return one.life

    def restart(self, step: int, *, attempt: int | None) -> None:
        """Begin new lives of all ranks at a step, as after a crash: what was not said bye to is dead."""
        self.attempt, self.step = attempt, step
        for rank in range(self.num_ranks):
            self.start(rank)

    def kill(self, rank: int, *, in_frame: bool = True) -> None:
        """End a rank's life at once, by default in the middle of a frame of the next step."""
        one = self._ranks[rank]
        if one.spool is not None and in_frame:
            rows, _ = self.observe(rank, self.step)
            header = Header(
                type=FrameType.ROWS, life=one.life, run_id=run_id_of(self.run), rank=rank, seq=2**40, step=self.step,
                row_count=len(rows), wall_ns=self.clock.wall_ns(), mono_ns=self.clock.mono_ns(),
            )  # fmt: skip
            head, body = encode_frame(header, rows.tobytes())
            self._append_raw(one, head + bytes(body)[: len(body) // 2])
        if one.spool is not None:
            one.spool.close()
        one.is_dead = True

    def hold(self, rank: int) -> None:
        """Keep back what a rank says until `release`: it is late."""
        self._ranks[rank].held = []

    def release(self, rank: int) -> None:
        """Let out what was kept back."""
        one = self._ranks[rank]
        held, one.held = one.held or [], None
        for frame in held:
            self._say(one, *frame)

    def repeat_last(self, rank: int) -> None:
        """Write the frames of a rank's last step a second time, under the same numbers."""
        one = self._ranks[rank]
        frames = self._last_frames(one)
        self._append_raw(one, b"".join(frames))

    def reverse_last(self, rank: int) -> None:
        """Turn the frames of a rank's last step round on disk: its end_step comes before its rows."""
        one = self._ranks[rank]
        frames = self._last_frames(one)
        path = self._path(one)
        size = path.stat().st_size
        os.truncate(path, size - sum(map(len, frames)))
        with path.open("ab") as file:
            file.write(b"".join(reversed(frames)))

    def flip_bit(self, rank: int, from_end: int = 200) -> None:
        """Flip one bit in what a rank wrote, `from_end` bytes before the end of its newest file."""
        path = self._path(self._ranks[rank])
        data = bytearray(path.read_bytes())
        data[-from_end] ^= 0x10
        path.write_bytes(data)

    def say(self, rank: int, message: Health | Heartbeat | Ack, step: int | None = None) -> None:
        """Have a rank send a record of health, a heartbeat or an answer."""
        number = FRAME_TYPES[type(message)]
        self._say(self._ranks[rank], number, encode_message(message), self.step if step is None else step, 0)

    # -- bytes ------------------------------------------------------------------------------------------------------

    def _say(self, one: _Rank, frame_type: int, payload: bytes, step: int, row_count: int) -> None:
        if one.spool is None or one.is_dead:
            return
        if one.held is not None:
            one.held.append((frame_type, payload, step, row_count))
            return
        one.spool.append(frame_type, payload, step=step, row_count=row_count)
        one.num_last += 1

    def _path(self, one: _Rank) -> Path:
        assert one.spool is not None
        return one.spool.directory / file_name(one.spool.position[0])

    def _append_raw(self, one: _Rank, data: bytes) -> None:
        with self._path(one).open("ab") as file:
            file.write(data)

    def _last_frames(self, one: _Rank) -> list[bytes]:
        data = self._path(one).read_bytes()
        assert data.startswith(MAGIC)
        ends = [0]
        while ends[-1] < len(data):
            found = scan(data, ends[-1])
            if not isinstance(found, Frame):
                break
            ends.append(found.offset_after)
        frames = [data[a:b] for a, b in itertools.pairwise(ends)]
        return frames[-one.num_last :] if one.num_last else []

    # -- the model --------------------------------------------------------------------------------------------------

    def _places(self) -> list[Place]:
        places = []
        for rank in range(self.num_ranks):
            tp_rank, dp_rank, pp_rank = rank % self.tp, rank // self.tp % self.dp, rank // (self.tp * self.dp)
            places.append(
                Place(
                    rank=rank, world_size=self.num_ranks, dp_rank=dp_rank, dp_size=self.dp, pp_rank=pp_rank,
                    pp_size=self.pp, tp_rank=tp_rank, tp_size=self.tp, schedule="1f1b" if self.pp > 1 else "",
                )
            )  # fmt: skip
        return places

    def _blocks(self, stage: int) -> list[str]:
        """Local names of a stage's layers: each stage counts its own from 0, as Megatron's do."""
        first = stage * self._layers // self.pp
        return [f"layers.{i}" for i in range((stage + 1) * self._layers // self.pp - first)]

    def _local_sites(self, stage: int) -> list[tuple[str, bool]]:
        """(local module, whether it is its input that is observed) in forward order; a module's output otherwise."""
        sites = [("embed", False)] if stage == 0 else [("", True)]
        for block in self._blocks(stage):
            sites += [(f"{block}.norm", False), (f"{block}.attn", False), (f"{block}.mlp", False), (block, False)]
        if stage == self.pp - 1:
            sites += [("norm", False), ("head", False)]
        return sites

    def _make_sites(self) -> list[list[str]]:
        """Canonical names of the modules with an output, by stage."""
        return [
            [self._canonical(name, stage) for name, is_input in self._local_sites(stage) if not is_input]
            for stage in range(self.pp)
        ]

    def _canonical(self, name: str, stage: int) -> str:
        return canonical(name, self._offsets[stage], f"stage{stage}" if self.pp > 1 else "model")

    def _make_table(self, place: Place) -> _Table:
        stage = place.pp_rank
        sites = self._local_sites(stage)
        blocks = self._blocks(stage)
        has_tp = place.tp_size > 1
        data_place = {"dp": "shard", **({"tp": "replicate"} if has_tp else {})}
        tensors: list[TensorInfo] = []
        d = self._d_model
        weights: dict[str, tuple[tuple[int, ...], dict[str, str]]] = {}
        cut = max(1, d // place.tp_size)
        for name, is_input in sites:
            if is_input or name in blocks:
                continue
            leaf = name.rpartition(".")[2]
            shape = {"norm": (d,), "attn": (3 * cut, d), "mlp": (4 * cut, d)}.get(leaf, (16 * cut, d))
            placed = {"dp": "replicate"}
            if has_tp:
                placed["tp"] = "replicate" if leaf == "norm" else "shard"
            weights[name] = (shape, placed)
        order: list[tuple[int, int]] = []
        """(tensor id, micro_step) in the order of observation."""
        local_at: list[int] = []
        params: list[int] = []
        wgrads: list[int] = []
        forwards: list[int] = []
        backwards: list[int] = []

        def add(name: str, kind: str, at: int, **more: Any) -> int:
            tensors.append(TensorInfo(id=len(tensors), name=name, kind=kind, dtype="float32", site_pos=at, **more))
            local_at.append(at)
            return len(tensors) - 1

        for at, (name, _) in enumerate(sites):
            if name in weights:
                shape, placed = weights[name]
                for kind, into in (("param", params), ("wgrad", wgrads)):
                    if kind in self._kinds:
                        into.append(add(f"{name}.weight", kind, at, shape=shape, placements=placed))
        last = len(sites) - 1
        for at, (name, is_input) in enumerate(sites):
            border, index = "", -1
            if at == 0:
                border, index = ("chunk_input", 0) if is_input else ("block_input", 1)
            elif name in blocks:
                border, index = "block_output", 2 + blocks.index(name)
            elif at == last:
                border, index = "chunk_output", len(blocks) + 2
            following = sites[at + 1][0] if at < last else ""
            consumers: tuple[str, ...] = (following,) if following else ()
            if following.endswith(".norm"):
                consumers = (following.rpartition(".")[0], following)
            more: dict[str, Any] = {
                "shape": (2, 16, d), "placements": data_place, "consumers": consumers,
                "also": ("",) if at == last else (), "border": border,
            }  # fmt: skip
            for kind, grad in (("activation_in", "dgrad_in"),) if is_input else (("activation", "dgrad"),):
                if kind in self._kinds or (border and self._black_box):
                    forwards.append(add(name, kind, at, border_index=index, **more))
                if grad in self._kinds or (border and self._black_box):
                    # A tensor that is two borders: its gradient was made behind the later one.
                    if is_input:
                        more["border"], index = "block_input", 1
                    elif at == last:
                        more["border"], index = "chunk_output", len(blocks) + 2
                    backwards.append(add(name, grad, at, border_index=index, **more))
        order += [(tensor, -1) for tensor in params]
        for micro_step in range(self.micro_steps):
            order += [(tensor, micro_step) for tensor in forwards]
            order += [(tensor, micro_step) for tensor in reversed(backwards)]
        order += [(tensor, -1) for tensor in wgrads]
        descriptor = Descriptor(
            version=VERSION,
            place=place,
            chunks=(
                ChunkInfo(
                    vpp_stage=0, depth=stage, segments=("stem", *blocks, "head"), blocks=tuple(blocks),
                    modules=tuple(dict.fromkeys(["", *(name for name, _ in sites if name)])),
                ),
            ),
            tensors=tuple(tensors),
            row_fields=row_fields(ROW_DTYPE),
            row_bytes=ROW_DTYPE.itemsize,
            environment={"host": f"node{place.rank // 8}", "kernel": "synthetic"},
            first_step=self._first_step,
        )  # fmt: skip
        return self._columns(place, descriptor, order, local_at)

    def _columns(self, place: Place, descriptor: Descriptor, order: list[tuple[int, int]], local_at: list[int]) -> _Table:
        stage = place.pp_rank
        before = sum(len(self._local_sites(earlier)) for earlier in range(stage))
        rows = np.zeros(len(order), ROW_DTYPE)
        tensors = [descriptor.tensors[tensor] for tensor, _ in order]
        rows["tensor"] = [tensor.id for tensor in tensors]
        rows["kind"] = [Kind.of(tensor.kind) for tensor in tensors]
        rows["flags"] = [Flag.BORDER if tensor.border else 0 for tensor in tensors]
        rows["micro_step"] = [micro_step for _, micro_step in order]
        rows["call_id"] = np.arange(len(order))
        rows["site_pos"] = [tensor.site_pos for tensor in tensors]
        rows["num_folded"] = 1
        rows["bad_call_id"], rows["bad_micro_step"] = NONE_ID, -1
        rows["max_call_id"], rows["max_micro_step"] = rows["call_id"], rows["micro_step"]
        scales = {"param": 0.05, "wgrad": 1e-3, "activation": 1.0, "activation_in": 1.0}
        keys = []
        modules = []
        for tensor, (_, micro_step) in zip(tensors, order, strict=True):
            module = tensor.name.removesuffix(".weight") if tensor.kind in ("param", "wgrad") else tensor.name
            modules.append(self._canonical(module, stage))
            apart = [f"{axis}{place.coordinate(axis)}" for axis, word in tensor.placements.items() if word == "shard"]
            text = f"{self._seed}/{modules[-1]}/{tensor.kind}/{micro_step}/{'/'.join(apart)}"
            keys.append(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little"))
        return _Table(
            descriptor=descriptor,
            rows=rows,
            scale=np.array([scales.get(tensor.kind, 1e-2) for tensor in tensors]),
            count=np.array([math.prod(tensor.shape) for tensor in tensors], np.int64),
            key=np.array(keys, np.uint64),
            moves=np.array([tensor.kind != "param" for tensor in tensors]),
            position=np.array([before + local_at[tensor] for tensor, _ in order], np.int64),
            module=modules,
        )

    # -- the values -------------------------------------------------------------------------------------------------

    def _values(self, one: _Rank, step: int) -> npt.NDArray[np.void]:
        table = one.table
        rows = table.rows.copy()
        with np.errstate(over="ignore"):
            key = table.key + np.where(table.moves, np.uint64(step + 1), np.uint64(0)) * _MIX
            bits = _mix(key[:, None] + np.arange(self._elements, dtype=np.uint64)[None, :] * _MIX)
        half = self._elements // 2
        uniform = (bits >> np.uint64(11)).astype(np.float64) / 2.0**53 + 2.0**-54
        radius, angle = np.sqrt(-2.0 * np.log(uniform[:, :half])), 2.0 * np.pi * uniform[:, half : 2 * half]
        x = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
        scale = table.scale * np.where(table.moves, 1.0 / math.sqrt(1.0 + 0.01 * step), 1.0 + 1e-4 * step)
        x *= (scale * self._factors(one, step))[:, None]
        mean = x.mean(axis=1)
        centered = x - mean[:, None]
        # A tensor of `count` elements whose distribution is that of the values drawn.
        times = table.count / x.shape[1]
        rows["count"], rows["mean"] = table.count, mean
        rows["m2"] = (centered**2).sum(axis=1) * times
        rows["m3"] = (centered**3).sum(axis=1) * times
        rows["m4"] = (centered**4).sum(axis=1) * times
        rows["min"], rows["max"] = x.min(axis=1), x.max(axis=1)
        is_weight = (rows["kind"] == Kind.PARAM) | (rows["kind"] == Kind.WGRAD)
        rows["checksum"] = np.where(is_weight, _mix(table.key + np.uint64(step + 1)), np.uint64(0))
        for fault in self.faults:
            if isinstance(fault, Nan) and fault.step == step:
                self._poison(one, rows, fault)
        if self._poisoned_from is not None and step >= self._poisoned_from:
            _make_bad(rows, np.ones(len(rows), np.bool_), "nan", everything=True)
        return rows

    def _factors(self, one: _Rank, step: int) -> npt.NDArray[np.float64]:
        factors = np.ones(len(one.table.rows))
        for fault in self.faults:
            if isinstance(fault, BlowUp) and fault.step <= step < fault.step + fault.for_steps:
                at, kinds = self._position(fault.module), one.table.rows["kind"]
                if fault.kind in ("param", "wgrad"):
                    hit = (kinds == Kind.of(fault.kind)) & (one.table.position == at)
                elif fault.kind == "dgrad":
                    hit = np.isin(kinds, (Kind.DGRAD, Kind.DGRAD_IN)) & (one.table.position <= at)
                else:
                    hit = np.isin(kinds, (Kind.ACTIVATION, Kind.ACTIVATION_IN)) & (one.table.position >= at)
                factors[hit] *= fault.factor
        return factors

    def _position(self, module: str) -> int:
        """Place of a module's output in the forward order of all sites."""
        at = 0
        for stage in range(self.pp):
            for name, is_input in self._local_sites(stage):
                if not is_input and self._canonical(name, stage) == module:
                    return at
                at += 1
        raise ValueError(f"no module {module!r}")

    def _birthplace(self, fault: Nan) -> Place:
        holders = [one.place for one in self._ranks if fault.module in one.table.module]
        chosen = [place for place in holders if fault.rank in (None, place.rank)]
        if not chosen:
            ranks = ", ".join(str(place.rank) for place in holders)
            raise ValueError(f"rank {fault.rank} does not hold {fault.module!r}; ranks {ranks} do")
        return chosen[0]

    def _poison(self, one: _Rank, rows: npt.NDArray[np.void], fault: Nan) -> None:
        born = self._birthplace(fault)
        position, kinds = one.table.position, rows["kind"]
        at = self._position(fault.module)
        is_forward = np.isin(kinds, (Kind.ACTIVATION, Kind.ACTIVATION_IN))
        is_backward = np.isin(kinds, (Kind.DGRAD, Kind.DGRAD_IN))
        is_wgrad = kinds == Kind.WGRAD
        of_replica = one.place.dp_rank == born.dp_rank
        is_now = rows["micro_step"] == fault.micro_step
        leaf = fault.module.rpartition(".")[2]
        # attn and mlp end with a sum over the tensor-parallel group: their output is bad on all of it.
        here = (position == at) & (one.place.rank == born.rank or leaf in ("attn", "mlp"))
        if fault.phase == "forward":
            bad = is_now & of_replica & ((is_forward & ((position > at) | here)) | is_backward) | is_wgrad
        elif fault.phase == "backward":
            bad = (is_now & of_replica & is_backward & (position < at)) | (is_wgrad & (position <= at))
        else:
            bad = is_wgrad & (position == at)
        origin = here & {"forward": is_forward & is_now, "backward": is_backward & is_now}.get(fault.phase, is_wgrad)
        _make_bad(rows, bad & ~origin, "nan", everything=True)
        _make_bad(rows, bad & origin, fault.value, everything=False)

    def _scalars(self, one: _Rank, step: int) -> dict[str, float]:
        noise = np.random.default_rng((self._seed, step, one.place.dp_rank))
        scalars = {"lr": 1e-3}
        loss = (2.0 + 4.0 * math.exp(-0.01 * step)) * float(1.0 + 0.01 * noise.standard_normal())
        norm = 1.0 / math.sqrt(1.0 + 0.01 * step)
        norm *= float(1.0 + 0.03 * np.random.default_rng((self._seed, step)).standard_normal())
        for fault in self.faults:
            if isinstance(fault, Nan) and fault.step == step:
                norm = math.nan
                if fault.phase == "forward" and one.place.dp_rank == self._birthplace(fault).dp_rank:
                    loss = math.nan
            elif isinstance(fault, LossSpike) and fault.step <= step < fault.step + fault.for_steps:
                loss *= fault.factor if fault.rank in (None, one.place.rank) else 1.0
        if self._poisoned_from is not None and step >= self._poisoned_from:
            loss = norm = math.nan
        scalars["grad_norm"] = norm
        if one.place.pp_rank == self.pp - 1:
            scalars["loss"] = loss
        return scalars

    def _after(self, step: int) -> None:
        if any(isinstance(f, Nan) and f.step == step and not f.is_skipped for f in self.faults):
            self._poisoned_from = step + 1 if self._poisoned_from is None else self._poisoned_from


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scramble 64-bit words (splitmix64): values that depend on nothing but their key."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def _make_bad(rows: npt.NDArray[np.void], hit: npt.NDArray[np.bool_], value: str, *, everything: bool) -> None:
    """Turn one element of each row that is hit, or all of them, non-finite."""
    field = {"nan": "num_nan", "inf": "num_pos_inf", "-inf": "num_neg_inf"}[value]
    count = rows["count"]
    num_bad = np.where(hit, count if everything else np.minimum(count, 1), 0)
    rows[field] += num_bad
    left = count - num_bad
    for name in ("m2", "m3", "m4"):
        rows[name] = np.where(hit, rows[name] * (left / np.maximum(count, 1)), rows[name])
    is_empty = hit & (left == 0)
    rows["count"] = left
    rows["mean"][is_empty], rows["min"][is_empty], rows["max"][is_empty] = 0.0, np.inf, -np.inf
    rows["bad_call_id"] = np.where(hit, rows["call_id"], rows["bad_call_id"])
    rows["bad_micro_step"] = np.where(hit, rows["micro_step"], rows["bad_micro_step"])


__all__ = [
    "EPOCH_S", "BlowUp", "FakeClock", "Fault", "LossSpike", "Message", "Nan", "SyntheticRun",
]  # fmt: skip
