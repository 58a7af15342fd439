"""The kernel for GPUs: Triton's, one launch for a tensor of a hook, one a type of elements for all tensors of a step."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sentinel.collect.kernels import triton_entries
from sentinel.collect.kernels import triton_moments as device_code
from sentinel.collect.kernels.native import NativeKernel
from sentinel.collect.kernels.tensor_memory import CONVERTED, is_dense, pieces, plain
from sentinel.collect.kernels.torch_ops import TorchKernel
from sentinel.collect.rows.buffer import SLOT_BYTES, DeviceStats, StepRows
from sentinel.errors import SentinelError

log = logging.getLogger("sentinel")

CODES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
"""Types of elements that are read as they are."""
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
CHUNK_BYTES = 16 << 20
"""Bytes converted or copied at a time, where a tensor cannot be read as it lies."""
TILES_A_PART = 8
"""Tiles that a part should have where there are parts enough: to end one costs about as much as a tile."""
ENOUGH_PARTS = 1536
MOST_PLANS = 4096
"""Kinds of tensors whose launch is remembered: sequences of every length come by."""
MOST_TABLES = 32
"""Lists of tensors whose tables are kept on the device."""

_LARGEST = {"fp32": torch.finfo(torch.float32).max, "fp64": torch.finfo(torch.float64).max}
_ORDINARY = (torch.Tensor, torch.nn.Parameter)


class Launcher:
    """Launches one of the kernels: through Triton the first time, which compiles it, and from then on without.

    Triton's own launch binds and looks up for some 20 us; what it launches in the end takes integers alone.
    """

    def __init__(self, name: str) -> None:
        self._function: Any = getattr(triton_entries, name)
        self._registers = device_code.MOST_REGISTERS[name.split("_")[1]]
        self._compiled: Any = None
        self._runners: dict[int, Callable[..., Any]] = {}

    @property
    def is_compiled(self) -> bool:
        """Whether it was launched before."""
        return self._compiled is not None

    def __call__(self, num_programs: int, stream: int, *args: int) -> None:
        """Launch that many programs on `stream`, which is the current one."""
        runner = self._runners.get(num_programs)
        if runner is not None:
            runner(*args, stream=stream)
            return
        if self._compiled is None:
            # Fused multiply-adds are half of the instructions saved; later versions of Triton want them asked for.
            self._compiled = self._function[(num_programs,)](
                *args, num_warps=device_code.NUM_WARPS, maxnreg=self._registers, enable_fp_fusion=True
            )
            return
        runner = self._compiled[(num_programs, 1, 1)]
        runner(*args, stream=stream)
        self._runners[num_programs] = runner


class Tables:
    """What a launch for many tensors reads on the device: their shapes and parts, and where they lie now."""

    def __init__(self, numels: Sequence[int], places: Sequence[int], code: str, device: torch.device) -> None:
        tiles = [tiles_of(numel, code) for numel in numels]
        # Short parts where there is little to do, so that every multiprocessor has some.
        least = max(1, min(TILES_A_PART, sum(tiles) // ENOUGH_PARTS))
        shapes: list[int] = []
        work: list[torch.Tensor] = []
        self.num_programs = 0
        for at, (numel, place) in enumerate(zip(numels, places, strict=True)):
            tiles_a_part = max(least, -(-tiles[at] // device_code.MOST_PARTS[code]))
            num_parts = -(-tiles[at] // tiles_a_part)
            shapes += [numel, tiles_a_part, self.num_programs, num_parts, place, 0, 0, 0]
            work.append(torch.full((num_parts,), at, dtype=torch.int32, device="cpu"))
            self.num_programs += num_parts
        self.shapes = _sent(torch.tensor(shapes, dtype=torch.int64, device="cpu"), device)
        self.work = _sent(torch.cat(work), device)
        self.parts = torch.empty(self.num_programs * 12, dtype=torch.int64, device=device)
        self._device = device
        self._pointers: tuple[int, ...] = ()
        self._addresses = self.shapes

    def addresses(self, pointers: tuple[int, ...]) -> int:
        """Return where the tensors' addresses lie on the device; sends them where they are not those of last time."""
        if pointers != self._pointers:
            self._addresses = _sent(torch.tensor(pointers, dtype=torch.int64, device="cpu"), self._device)
            self._pointers = pointers
        return self._addresses.data_ptr()


class CaptureSwitch:
    """A switch on the device for launches that a CUDA graph has captured: whether they measure, and into which rows.

    Change it on the stream that replays the graph: a launch must not see it change.
    """

    def __init__(self, device: torch.device) -> None:
        self._cell = torch.zeros(4, dtype=torch.int64, device=device)
        self.address = self._cell.data_ptr()

    def open(self, stats: DeviceStats, rows: Sequence[int]) -> None:
        """Let the captured launches fill `rows`, begun in the buffer that `stats` belongs to. Does not wait."""
        for row in rows:
            stats.slot(row)
        words = [1, stats.epoch, stats.stage, stats.address]
        self._cell.copy_(_sent(torch.tensor(words, dtype=torch.int64, device="cpu"), self._cell.device))

    def close(self) -> None:
        """Let the captured launches do nothing. Does not wait."""
        self._cell.zero_()


class TritonKernel:
    """Measures tensors on a GPU; those on the CPU by `on_cpu`. Torch operations measure where Triton cannot compile."""

    def __init__(self, on_cpu: NativeKernel | TorchKernel | None = None) -> None:
        """on_cpu: measures tensors on the CPU; None: Triton does, which only its interpreter can."""
        self.name = "triton"
        self.is_capturing: Callable[[], bool] = bool
        """Whether the current stream records a CUDA graph."""
        if torch.cuda.is_available():
            self.is_capturing = torch.cuda.is_current_stream_capturing
        self._on_cpu = on_cpu
        self._instead: TorchKernel | None = None
        self._launchers: dict[tuple[int, str], Launcher] = {}
        self._scratch: dict[tuple[int, int], tuple[torch.Tensor, int]] = {}
        self._plans: dict[tuple[torch.dtype, int, int, float], tuple[Launcher, torch.device, int, int, int]] = {}
        self._limits: dict[tuple[float, bool], int] = {}
        self._tables: dict[Any, Tables] = {}
        self._captured: list[Any] = []

    def measure(
        self,
        tensors: Sequence[torch.Tensor],
        rows: StepRows,
        first_row: int,
        *,
        zero_eps: float = 0.0,
        checksum: bool = False,
    ) -> None:
        """As Kernel.measure, on GPUs."""
        if len(tensors) == 1 and self._measured_fast(tensors[0], rows, first_row, zero_eps, checksum):
            return
        if self._instead is not None:
            self._instead.measure(tensors, rows, first_row, zero_eps=zero_eps, checksum=checksum)
            return
        if self.is_capturing():
            # Every replay would fill this step's rows again, and whatever waits here would break the capture.
            raise SentinelError("a CUDA graph is being captured, and nothing in it is measured: capture first, then attach")
        try:
            if len(tensors) == 1:
                self._measure_slowly(tensors[0], rows, first_row, zero_eps, checksum)
            else:
                self._measure_many(tensors, rows, first_row, zero_eps, checksum)
        except SentinelError:
            raise
        except Exception as error:
            if any(launcher.is_compiled for launcher in self._launchers.values()):
                raise
            # Nothing was ever launched: this Triton, driver or device cannot compile it.
            self._instead = TorchKernel("cuda", on_cpu=self._on_cpu if isinstance(self._on_cpu, NativeKernel) else None)
            self._plans.clear()
            self.name = f"{self._instead.name}, triton failed"
            log.warning("sentinel: triton cannot compile its kernel, torch operations measure instead: %s", error)
            self._instead.measure(tensors, rows, first_row, zero_eps=zero_eps, checksum=checksum)

    # -- one tensor ------------------------------------------------------------------------------------------------

    def _measured_fast(self, tensor: torch.Tensor, rows: StepRows, row: int, zero_eps: float, checksum: bool) -> bool:
        """Launch for a tensor whose like was launched before, where nothing stands in the way; false: the long way round.

        All that is known of such tensors is kept in a plan: this is the path of every hook, a microsecond of which counts.
        """
        index = tensor.get_device()
        plan = self._plans.get((tensor.dtype, tensor.numel(), index, zero_eps))
        if plan is None:
            return False
        launcher, device, num_parts, tiles_a_part, limit = plan
        address = tensor.data_ptr()
        if (
            not _lies_open(tensor, address) or self.is_capturing()
            or (index >= 0 and torch._C._cuda_getDevice() != index)
        ):  # fmt: skip
            return False
        stats = rows.on(device)
        slot = stats.slot(row)
        stream = stats.stream
        parts = 0
        if num_parts > 1:
            scratch = self._scratch.get((index, stream))
            if scratch is None:
                return False
            parts = scratch[1]
        launcher(
            num_parts, stream, address, tensor.numel(), tiles_a_part, 0, num_parts, parts, stats.counters + 4 * row,
            stats.stage + SLOT_BYTES * row, slot, stats.epoch, limit, int(checksum), 0,
        )  # fmt: skip
        return True

    def _plan(self, local: torch.Tensor, code: str, zero_eps: float) -> None:
        """Remember how tensors like this one are launched."""
        if len(self._plans) >= MOST_PLANS:
            self._plans.clear()
        numel, index = local.numel(), local.get_device()
        tiles_a_part, num_parts = cut(numel, code)
        self._plans[local.dtype, numel, index, zero_eps] = (
            self._launcher(local.device, "one", code), local.device, num_parts, tiles_a_part, self._limit(zero_eps, code)
        )  # fmt: skip

    def _is_here(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda or (self._on_cpu is None and tensor.is_cpu)

    def _launch_one(
        self, address: int, numel: int, code: str, stats: DeviceStats, row: int, zero_eps: float, checksum: bool
    ) -> None:
        tiles_a_part, num_parts = cut(numel, code)
        self._launch(
            stats, code, num_parts, address, numel, tiles_a_part, 0, num_parts, row,
            self._limit(zero_eps, code), checksum,
        )  # fmt: skip

    def _launch(
        self, stats: DeviceStats, code: str, num_programs: int, address: int, numel: int, tiles_a_part: int,
        first_part: int, num_parts: int, row: int, limit: int, checksum: bool, *, parts: int = 0,
    ) -> None:  # fmt: skip
        device = stats.device
        if device.type == "cuda" and device.index is not None and device.index != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                self._launch(
                    stats, code, num_programs, address, numel, tiles_a_part, first_part, num_parts, row, limit,
                    checksum, parts=parts,
                )  # fmt: skip
            return
        slot = stats.slot(row)
        stream = stats.stream
        if num_parts > 1 and not parts:
            parts = self._parts(device, stream)
        self._launcher(device, "one", code)(
            num_programs, stream, address, numel, tiles_a_part, first_part, num_parts, parts, stats.counters + 4 * row,
            stats.stage + SLOT_BYTES * row, slot, stats.epoch, limit, int(checksum), 0,
        )  # fmt: skip

    def capture(
        self, tensor: torch.Tensor, gate: CaptureSwitch, row: int, *, zero_eps: float = 0.0, checksum: bool = False
    ) -> None:
        """Launch what fills row `row` of the buffer that `gate` is open for: for a CUDA graph that is being captured.

        The tensor is dense and of a type that is read as it is; SentinelError otherwise.
        """
        code = CODES.get(tensor.dtype)
        if code is None or not is_dense(tensor) or tensor.is_neg():
            raise SentinelError(f"cannot capture the reading of a tensor of dtype {tensor.dtype}, strides {tensor.stride()}")
        tiles_a_part, num_parts = cut(tensor.numel(), code)
        # Of its own: a replay may run beside other launches.
        room = torch.zeros(12 * num_parts + 1, dtype=torch.int64, device=tensor.device)
        self._captured.append(room)
        stream = torch._C._cuda_getCurrentRawStream(tensor.device.index) if tensor.is_cuda else 0
        self._launcher(tensor.device, "one", code)(
            num_parts, stream, tensor.data_ptr(), tensor.numel(), tiles_a_part, 0, num_parts, room.data_ptr() + 8,
            room.data_ptr(), SLOT_BYTES * row, SLOT_BYTES * row, 0, self._limit(zero_eps, code), int(checksum), gate.address,
        )  # fmt: skip

    def _launcher(self, device: torch.device, kind: str, code: str) -> Launcher:
        key = (device.index or 0, kind + code)
        launcher = self._launchers.get(key)
        if launcher is None:
            launcher = self._launchers[key] = Launcher(f"{kind}_{code}")
        return launcher

    def _parts(self, device: torch.device, stream: int) -> int:
        """Return where launches on a stream keep their parts: one after the other, they can share."""
        key = (-1 if device.index is None else device.index, stream)
        scratch = self._scratch.get(key)
        if scratch is None:
            most = 12 * max(device_code.MOST_PARTS.values())
            room = torch.empty(most, dtype=torch.int64, device=device)
            scratch = self._scratch[key] = (room, room.data_ptr())
        return scratch[1]

    def _limit(self, zero_eps: float, code: str) -> int:
        """Return the bits of the largest number of the arithmetic type that is not above zero_eps, finite: as float64."""
        key = (zero_eps, code == "fp64")
        limit = self._limits.get(key)
        if limit is None:
            value = min(zero_eps, _LARGEST["fp64" if code == "fp64" else "fp32"])
            if code != "fp64":
                rounded = torch.tensor(value, dtype=torch.float32, device="cpu")
                if rounded.item() > value:
                    rounded = torch.nextafter(rounded, torch.tensor(-torch.inf, device="cpu"))
                value = rounded.item()
            limit = self._limits[key] = struct.unpack("<q", struct.pack("<d", value))[0]
        return limit

    def _measure_slowly(self, tensor: torch.Tensor, rows: StepRows, row: int, zero_eps: float, checksum: bool) -> None:
        """Measure what is no plain tensor, or is converted or copied chunk by chunk; each chunk is some parts of the row."""
        if tensor.is_cpu and self._on_cpu is not None:
            self._on_cpu.measure((tensor,), rows, row, zero_eps=zero_eps, checksum=checksum)
            return
        local = plain(tensor)
        if not self._is_here(local):
            raise SentinelError(f"the triton kernel reads GPU memory, got a tensor of dtype {local.dtype} on {local.device}")
        dtype = CONVERTED.get(local.dtype, local.dtype)
        code = CODES[dtype]
        stats = rows.on(local.device)
        if local.dtype is dtype and is_dense(local) and not local.is_neg():
            self._plan(local, code, zero_eps)
            self._launch_one(local.data_ptr(), local.numel(), code, stats, row, zero_eps, checksum)
            return
        with torch.no_grad():
            self._measure_in_chunks(local, code, dtype, stats, row, zero_eps, checksum)

    def _measure_in_chunks(
        self, local: torch.Tensor, code: str, dtype: torch.dtype, stats: DeviceStats, row: int, zero_eps: float,
        checksum: bool,
    ) -> None:  # fmt: skip
        most_parts = device_code.MOST_PARTS[code]
        size = min(max(CHUNK_BYTES // BYTES[code], local.numel() // (most_parts // 4)), max(local.numel(), 1))
        chunks = list(_packed(pieces(local, size), size))
        numels = [sum(piece.numel() for piece in chunk) for chunk in chunks] or [0]
        most_of_one = max(1, most_parts // len(numels))
        cuts = []
        for numel in numels:
            tiles_a_part = -(-tiles_of(numel, code) // most_of_one)
            cuts.append((tiles_a_part, -(-tiles_of(numel, code) // tiles_a_part)))
        num_parts = sum(parts for _, parts in cuts)
        # The chunks of a row follow each other on one stream: no other launch comes between them.
        room = torch.empty(size, dtype=dtype, device=local.device)
        parts = torch.empty(12 * num_parts, dtype=torch.int64, device=local.device)
        first_part = 0
        for chunk, numel, (tiles_a_part, own_parts) in zip(chunks or [[]], numels, cuts, strict=True):
            at = 0
            for piece in chunk:
                room[at : at + piece.numel()].view(piece.shape).copy_(piece)
                at += piece.numel()
            self._launch(
                stats, code, own_parts, room.data_ptr(), numel, tiles_a_part, first_part, num_parts, row,
                self._limit(zero_eps, code), checksum, parts=parts.data_ptr(),
            )  # fmt: skip
            first_part += own_parts

    # -- many tensors ----------------------------------------------------------------------------------------------

    def _measure_many(
        self, tensors: Sequence[torch.Tensor], rows: StepRows, first_row: int, zero_eps: float, checksum: bool
    ) -> None:
        groups: dict[tuple[torch.device, str], list[int]] = {}
        slow: list[int] = []
        for at, tensor in enumerate(tensors):
            code = CODES.get(tensor.dtype)
            if code is None or not self._is_here(tensor) or not _lies_open(tensor, tensor.data_ptr()):
                slow.append(at)
            else:
                groups.setdefault((tensor.device, code), []).append(at)
        for (device, code), places in groups.items():
            self._launch_group(tensors, places, rows.on(device), code, first_row, zero_eps, checksum)
        failed: SentinelError | None = None
        for at in slow:
            try:
                self._measure_slowly(tensors[at], rows, first_row + at, zero_eps, checksum)
            except SentinelError as error:
                failed = failed or error
        if failed:
            raise failed

    def _launch_group(
        self, tensors: Sequence[torch.Tensor], places: list[int], stats: DeviceStats, code: str, first_row: int,
        zero_eps: float, checksum: bool,
    ) -> None:  # fmt: skip
        device = stats.device
        if device.type == "cuda" and device.index is not None and device.index != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                self._launch_group(tensors, places, stats, code, first_row, zero_eps, checksum)
            return
        address = 0 if len(places) == 1 else stats.slots(first_row + places[0], 1)
        if not address:
            # One tensor needs no table; and rows on both sides of a buffer's growth do not lie in one stretch.
            for at in places:
                tensor = tensors[at]
                self._launch_one(tensor.data_ptr(), tensor.numel(), code, stats, first_row + at, zero_eps, checksum)
            return
        for at in places[1:]:
            stats.is_row[first_row + at] = True
        stream = stats.stream
        numels = tuple(tensors[at].numel() for at in places)
        first = first_row + places[0]
        key = (device, stream, code, numels, tuple(at - places[0] for at in places))
        tables = self._tables.pop(key, None)
        if tables is None:
            tables = Tables(numels, key[-1], code, device)
        self._tables[key] = tables
        while len(self._tables) > MOST_TABLES:
            del self._tables[next(iter(self._tables))]
        self._launcher(device, "many", code)(
            tables.num_programs, stream, tables.addresses(tuple(tensors[at].data_ptr() for at in places)),
            tables.shapes.data_ptr(), tables.work.data_ptr(), tables.parts.data_ptr(), stats.counters + 4 * first,
            stats.stage + SLOT_BYTES * first, address, stats.epoch, self._limit(zero_eps, code), int(checksum),
        )  # fmt: skip


def _lies_open(tensor: torch.Tensor, address: int) -> bool:
    """Return whether memory holds the tensor as it is: nothing to copy or unwrap. address: its data_ptr."""
    return (
        type(tensor) in _ORDINARY
        and tensor.is_contiguous()
        and not tensor.is_neg()
        # FSDP frees storages under tensors that are in use: then only the offset is left of the address.
        and address != tensor.storage_offset() * tensor.itemsize
    )


def cut(numel: int, code: str) -> tuple[int, int]:
    """Return the tiles of a part and the parts of a tensor that is launched alone."""
    tiles = tiles_of(numel, code)
    tiles_a_part = -(-tiles // device_code.MOST_PARTS[code])
    return tiles_a_part, -(-tiles // tiles_a_part)


def tiles_of(numel: int, code: str) -> int:
    """Return the tiles that a tensor may touch, wherever it begins: at least one, which writes the row of an empty one."""
    width = BYTES[code]
    tile = device_code.TILE_BYTES // width
    return max(1, -(-(numel + 16 // width - 1) // tile))


def _packed(parts: Any, most: int) -> Any:
    """Yield lists of pieces that have at most `most` elements together."""
    chunk: list[torch.Tensor] = []
    room = most
    for piece in parts:
        if piece.numel() == 0:
            continue
        if piece.numel() > room and chunk:
            yield chunk
            chunk, room = [], most
        chunk.append(piece)
        room -= piece.numel()
    if chunk:
        yield chunk


def _sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of a tensor of the host on `device`, without waiting."""
    if device.type != "cuda":
        return tensor.clone()
    # The allocator of pinned memory keeps the source until the copy is done.
    return tensor.pin_memory().to(device, non_blocking=True)
