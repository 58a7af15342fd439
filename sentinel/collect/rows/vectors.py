"""Vectors of the running step: small tensors, a value for each head, expert, channel or bin, on their way to the host."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from sentinel.collect.rows.pinned import PINNED
from sentinel.messages import Vector, Vectors

MOST_BYTES = 8 * 2**20
"""Most bytes of vectors that a rank writes a step; a bound on memory and the spool: further ones are dropped and counted."""

_DTYPES = {
    torch.float32: "<f4", torch.float64: "<f8", torch.int64: "<i8", torch.int32: "<i4", torch.uint8: "|u1",
}  # fmt: skip


class StepVectors:
    """Filled by the training thread, finished by the writer's. Nothing here waits for a device but `finish`."""

    def __init__(self) -> None:
        self.num_dropped = 0
        """Vectors that found no room."""
        self._kept: list[tuple[Vector, torch.Tensor]] = []
        self._num_bytes = 0
        self._arrived: list[Any] = []

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        """Bytes of the vectors that are kept."""
        return self._num_bytes

    def add(self, head: Vector, values: torch.Tensor) -> None:
        """Take `values`, of any shape and device; nobody may write into them afterwards.

        head: all but dtype, shape and values. Half types travel as float32.
        """
        values = values.detach()
        if values.dtype not in _DTYPES:
            values = values.to(torch.float32 if values.is_floating_point() else torch.int64)
        num_bytes = values.numel() * values.element_size()
        if self._num_bytes + num_bytes > MOST_BYTES:
            self.num_dropped += 1
            return
        self._num_bytes += num_bytes
        self._kept.append((head, values))

    def truncate(self, call_id: int) -> None:
        """Forget the vectors of observations from `call_id` on."""
        kept = [pair for pair in self._kept if pair[0].call_id < call_id]
        if len(kept) != len(self._kept):
            self._kept = kept
            self._num_bytes = sum(values.numel() * values.element_size() for _, values in kept)

    def add_up(self, statistic: str, *, keeps_micro_steps: bool) -> None:
        """Make one of the vectors of each tensor that count alike, those of its micro-steps unless they stay apart.

        On the device they lie on; does not wait. Of one vector nothing changes but its micro_step.
        """
        alike: dict[tuple[int, int], list[tuple[Vector, torch.Tensor]]] = {}
        others = []
        for head, values in self._kept:
            if head.statistic == statistic:
                alike.setdefault((head.tensor, head.micro_step if keeps_micro_steps else -1), []).append((head, values))
            else:
                others.append((head, values))
        for (_, micro_step), pairs in alike.items():
            head = msgspec.structs.replace(pairs[0][0], micro_step=micro_step)
            values = pairs[0][1] if len(pairs) == 1 else torch.stack([one for _, one in pairs]).sum(dim=0)
            others.append((head, values))
        others.sort(key=lambda pair: pair[0].call_id)
        self._kept = others
        self._num_bytes = sum(values.numel() * values.element_size() for _, values in others)

    def begin_copy(self) -> None:
        """Send what lies on accelerators towards the host, behind the work that fills it. Does not wait.

        After a device assert what lies there is out of reach, and left out.
        """
        devices = {values.device for _, values in self._kept if values.device.type != "cpu"}
        if not devices:
            return
        on_host = [(head, values) for head, values in self._kept if values.device.type == "cpu"]
        try:
            self._kept = [(head, _on_its_way(values)) for head, values in self._kept]
            for device in devices:
                module = torch.get_device_module(device)
                event = module.Event()
                event.record(module.current_stream(device))
                self._arrived.append(event)
        except RuntimeError:
            self._kept, self._arrived = on_host, []

    def finish(self) -> Vectors | None:
        """Return the vectors as they travel; None where there are none. Waits for the copies: not in the training thread."""
        for event in self._arrived:
            event.synchronize()
        if not self._kept:
            return None
        return Vectors(items=tuple(_packed(head, values) for head, values in self._kept))


def _on_its_way(values: torch.Tensor) -> torch.Tensor:
    if values.device.type == "cpu":
        return values
    pinned = PINNED.empty(tuple(values.shape), values.dtype)
    return pinned.copy_(values, non_blocking=True)


def _packed(head: Vector, values: torch.Tensor) -> Vector:
    array = values.contiguous().numpy()
    return Vector(
        tensor=head.tensor, statistic=head.statistic, axis=head.axis, micro_step=head.micro_step, call_id=head.call_id,
        edges=head.edges, dtype=_DTYPES[values.dtype], shape=tuple(array.shape), values=array.tobytes(),
    )  # fmt: skip
