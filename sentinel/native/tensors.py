"""Functions of the library that take tensors as Python has them, where the build had Python's headers (tensors.h)."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Protocol


class TensorReader(Protocol):
    """Measures plain dense tensors of the host, and leaves all others to who asked. It has read tensors by name only."""

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


def find_reader() -> TensorReader | None:
    """Return the functions; None where the library was built without Python's headers, or not at all."""
    try:
        found: Any = importlib.import_module("sentinel.native._kernels")
    except ImportError:
        return None
    return found if hasattr(found, "measure_tensors") else None
