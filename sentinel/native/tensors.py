"""Functions of the library that take tensors as Python has them, where the build had Python's headers (tensors.h)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol


class TensorReader(Protocol):
    """Takes plain tensors as torch has them, and leaves all others to who asked. It reads everything by name only."""

    def know_tensors(self, types: tuple[type, ...], dtypes: dict[Any, int], strided: Any, isa: int, /) -> None:
        """Take in which classes of tensors are what they seem, the code of each dtype (layout.py), and `torch.strided`.

        To be called once, before anything else. isa: the instruction set, by its number in library.ISAS.
        """

    def measure_tensor(self, tensor: Any, address: int, zero_eps: float, checksum: bool, /) -> bool:
        """Write the statistics of one tensor to the twelve words at `address`; False: it is left, nothing was written.

        Besides what is not plain, large tensors are left, that are worth several threads. Small ones keep the GIL.
        """

    def measure_tensors(
        self, tensors: list[Any], address: int, stride: int, zero_eps: float, checksum: bool, num_threads: int, /
    ) -> Sequence[int]:
        """Write the statistics of tensor i to address + i * stride; return the numbers of those that are left."""

    def know_passing(
        self,
        tensor: type,
        kernel: type,
        sighting: type,
        gradient_tap: type,
        hooks: type,
        keys: Iterator[int],
        is_grad_enabled: Callable[[], bool],
        graph_task: Callable[[], int],
        guard: Any,
        border: int,
        /,
    ) -> None:
        """Take in what the hooks of `sentinel.collect` are made of; until then the functions below do nothing.

        tensor: the class of plain tensors. kernel: the class of the kernel that only asks this library. sighting,
        gradient_tap: classes to make. hooks: the class of a tensor's hooks; keys: theirs. is_grad_enabled, graph_task: as
        torch's. guard: whose `depth` is above 0 inside a stage's shape inference. border: the flag of a border's row.
        """

    def take_again(self, tap: Any, tensor: Any, is_input: bool, module: Any, /) -> bool:
        """Take a lone tensor where one was taken since the taps were changed, as `ModuleTap._take` does.

        False: nothing was done, for it is not such a tensor, or this forward has seen it before. module: whose hook this is;
        None: the caller has asked whether the tap is to look at all.
        """

    def take_gradient(self, tap: Any, gradient: Any, /) -> bool:
        """Measure the gradient that a `GradientTap` waits for; False: nothing was done, something is to be asked first."""


def find_reader() -> TensorReader | None:
    """Return the functions; None where the library was built without Python's headers, or not at all."""
    try:
        found: Any = importlib.import_module("sentinel.native._kernels")
    except ImportError:
        return None
    return found if hasattr(found, "measure_tensors") else None


def never(*_: Any) -> bool:
    """Stand for a short way that is not there."""
    return False
