"""Where DeepSpeed keeps reduced gradients and partitioned parameters, by its optimizer: nothing here is gathered or copied.

ZeRO-1 and 2 cut a flat buffer of each parameter group into one partition a rank, and leave this rank's reduced gradients
in `averaged_gradients`: tensors that tile the partition, or, offloaded, the gradient of the fp32 partition. ZeRO-3 cuts
every parameter by itself. The BF16 optimizer (ZeRO-1, bf16 summed in fp32) keeps whole reduced gradients in fp32 on every
rank; without ZeRO they are in `.grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from sentinel.collect.parallel.parameter_storage import HeldPiece, Master, TorchStorage
from sentinel.collect.parallel.placements import placements_of
from sentinel.place import Place
from sentinel.record import Kind

CUT_AXES = ("dp", "cp")
"""ZeRO cuts over the data-parallel and the sequence-parallel ranks together."""


class Stretch(NamedTuple):
    """What a rank owns of a parameter: elements [start, end) of it flattened, which lie at `at` in the rank's partition."""

    start: int
    end: int
    at: int = 0
    group: int = 0

    @property
    def part(self) -> str:
        """As it travels; all that hold nothing say the same."""
        return f"{self.start}:{self.end}" if self.end > self.start else "0:0"

    @property
    def numel(self) -> int:
        """Elements in it."""
        return self.end - self.start


class DeepSpeedStorage(TorchStorage):
    """Reduced gradients between `open` and `close`, at other times none: there is one moment at which they are whole."""

    def __init__(self, optimizer: Any, place: Place, report: Callable[[str, str], None]) -> None:
        """tell: (code, message) of what cannot be measured."""
        super().__init__(place)
        self._optimizer = optimizer
        self._report = report
        self._stretches: dict[int, Stretch] = {}
        self._reduced: dict[int, torch.Tensor] = {}
        self._is_open = False

    @property
    def is_partitioned(self) -> bool:
        """Whether a rank holds a stretch of each reduced gradient, and not all of it."""
        return isinstance(self._optimizer, (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3))

    def look(self, params: Iterable[torch.Tensor]) -> None:
        """Find out which stretch of each parameter is this rank's; that never changes."""
        params = list(params)
        super().look(params)
        for param in params:
            if id(param) not in self._stretches and hasattr(param, "ds_tensor"):
                self._stretches[id(param)] = _zero3_stretch(param)
        if isinstance(self._optimizer, DeepSpeedZeroOptimizer) and not self._stretches:
            self._stretches = {id(param): stretch for param, stretch in _zero12_stretches(self._optimizer)}

    def param(self, param: torch.Tensor) -> HeldPiece | None:
        """Return the whole parameter, or ZeRO-3's partition of it without its padding."""
        if not hasattr(param, "ds_tensor"):
            return super().param(param)
        cut: Any = param.ds_tensor
        stretch = self._stretches.get(id(param))
        if stretch is None or not cut.is_floating_point() or getattr(cut.status, "name", "AVAILABLE") != "AVAILABLE":
            self._report("unmeasured_partition", "parameters that are quantised or lie on NVMe are not measured")
            return None
        return self._cut(param, cut.view(-1).narrow(0, 0, stretch.numel), stretch, Kind.PARAM)

    def wgrad(self, param: torch.Tensor) -> HeldPiece | None:
        """Return what is this rank's of the reduced gradient, while `open`."""
        if not self._is_open:
            return None
        grad = self._reduced.get(id(param))
        if self.is_partitioned:
            return None if grad is None else self._cut(param, grad, self._stretches[id(param)], Kind.WGRAD)
        if grad is not None:
            return HeldPiece(grad, placements_of(grad, Kind.WGRAD, self.place), "", tuple(param.shape))
        return super().wgrad(param)

    def state(self, param: torch.Tensor, tensor: torch.Tensor) -> HeldPiece:
        """Return how a piece of the optimizer's state lies: as this rank's stretch of the parameter, if as long."""
        stretch = self._stretches.get(id(param))
        if self.is_partitioned and stretch is not None and tensor.numel() == stretch.numel:
            return self._cut(param, tensor, stretch, Kind.EXP_AVG)
        return super().state(param, tensor)

    def master(self, param: torch.Tensor) -> Master | None:
        """Return this rank's stretch of the fp32 partition that the optimizer steps."""
        optimizer, stretch = self._optimizer, self._stretches.get(id(param))
        if stretch is None:
            return None
        if isinstance(optimizer, DeepSpeedZeroOptimizer):
            return Master(optimizer.single_partition_of_fp32_groups[stretch.group], stretch.at, stretch.numel)
        if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
            number, begin, _ = optimizer.grad_position[optimizer.get_param_id(param)]
            return Master(optimizer.fp32_partitioned_groups_flat[number], int(begin), stretch.numel)
        return None

    def _cut(self, param: Any, piece: torch.Tensor, stretch: Stretch, kind: Kind) -> HeldPiece:
        placements = placements_of(piece, kind, self.place)
        placements.update((axis, "shard") for axis in CUT_AXES if axis in placements)
        return HeldPiece(piece, placements, stretch.part, tuple(getattr(param, "ds_shape", param.shape)))

    def open(self) -> None:
        """Find the reduced gradients: the step's last backward is over, DeepSpeed's optimizer comes next."""
        self._is_open = True
        optimizer = self._optimizer
        if _is_muon(optimizer):
            self._report(
                "unmeasured_gradients", "Muon under DeepSpeed replaces gradients by its update before they are whole"
            )
            return
        if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
            found = self._zero3_gradients(optimizer)
        elif isinstance(optimizer, DeepSpeedZeroOptimizer):
            found = self._zero12_gradients(optimizer)
        elif isinstance(optimizer, BF16_Optimizer):
            found = _bf16_gradients(optimizer)
        else:
            return
        self._reduced = {id(param): grad for param, grad in found}

    def close(self) -> None:
        """Forget them: DeepSpeed frees and clips them now."""
        self._is_open = False
        self._reduced = {}

    def _zero12_gradients(self, optimizer: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        if optimizer.cpu_offload:
            # The optimizer waits for the same copies in its next lines: they are read on the host, so they must be there.
            wait = getattr(optimizer, "_wait_for_offload_copies", None)
            if wait is not None:
                wait()
        for number, params in enumerate(optimizer.bit16_groups):
            if optimizer.cpu_offload:
                flat = optimizer.single_partition_of_fp32_groups[number].grad
                tiles: dict[int, torch.Tensor] = {}
            else:
                tensors = optimizer.averaged_gradients.get(number)
                if tensors is None:
                    continue
                flat = getattr(tensors, "flat_partition", None)
                tiles = {} if flat is not None else _tiles(tensors)
            for param in params:
                stretch = self._stretches[id(param)]
                if stretch.numel == 0:
                    yield param, param.new_empty(0)
                elif flat is not None:
                    yield param, flat.view(-1).narrow(0, stretch.at, stretch.numel)
                elif stretch.at in tiles and tiles[stretch.at].numel() == stretch.numel:
                    yield param, tiles[stretch.at]
                else:
                    self._report("unknown_deepspeed", "averaged_gradients do not lie as this version of Sentinel expects")

    def _zero3_gradients(self, optimizer: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for number, params in enumerate(optimizer.fp16_groups):
            if optimizer.offload_optimizer and optimizer._swappable_optimizer_subgroup(number):
                self._report("unmeasured_gradients", "gradients that lie on NVMe are not measured")
                continue
            tensors = None if optimizer.offload_optimizer else optimizer.averaged_gradients.get(number)
            flat = optimizer.fp32_partitioned_groups_flat[number].grad if optimizer.offload_optimizer else None
            for at, param in enumerate(params):
                if not param.requires_grad or (tensors is None and flat is None):
                    continue
                stretch = self._stretches[id(param)]
                if tensors is not None:
                    yield param, tensors[at].view(-1).narrow(0, 0, stretch.numel)
                elif flat is not None:
                    _, begin, _ = optimizer.grad_position[optimizer.get_param_id(param)]
                    yield param, flat.view(-1).narrow(0, begin, stretch.numel)


def _bf16_gradients(optimizer: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for params, grads in zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients, strict=True):
        yield from zip(params, grads, strict=True)


def _is_muon(optimizer: Any) -> bool:
    return "muon" in type(getattr(optimizer, "optimizer", optimizer)).__name__.lower()


def _tiles(tensors: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return where in the partition each tensor begins -> tensor; they lie one behind the other, padding included."""
    found, at = {}, 0
    for tensor in tensors:
        if tensor.numel():
            found[at] = tensor
        at += tensor.numel()
    return found


def _zero12_stretches(optimizer: Any) -> Iterator[tuple[torch.Tensor, Stretch]]:
    """Yield each trained parameter and its stretch. Parameters are views of the flat buffer: the view says where it lies,
    whichever order (round robin) and padding DeepSpeed chose."""
    for number, (flat, params) in enumerate(zip(optimizer.bit16_groups_flat, optimizer.bit16_groups, strict=True)):
        size = int(optimizer.partition_size[number])
        first = dist.get_rank(group=optimizer.real_dp_process_group[number]) * size
        for param in params:
            begin = (param.data_ptr() - flat.data_ptr()) // flat.element_size() if param.numel() else 0
            start = min(max(first - begin, 0), param.numel())
            end = min(max(first + size - begin, 0), param.numel())
            yield param, Stretch(start, end, begin + start - first, number)


def _zero3_stretch(param: Any) -> Stretch:
    """Return a rank's partition of a parameter, without the padding of the last ones."""
    size, numel = int(param.ds_tensor.ds_numel), int(param.ds_numel)
    first = dist.get_rank(group=getattr(param, "ds_process_group", None)) * size
    return Stretch(min(first, numel), min(first + size, numel))
