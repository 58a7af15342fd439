"""How often the host asks a device for a value: on a GPU each is a wait, and on a CPU it can be counted."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

READ = "aten._local_scalar_dense"
SYNCHRONISING = (READ, "aten.nonzero", "aten.equal", "aten.is_nonzero")


class HostWaits(TorchDispatchMode):
    """Counts, in this thread and inside the block, the operations that wait for a device; `(READ,)`: values read alone."""

    def __init__(self, operations: tuple[str, ...] = SYNCHRONISING) -> None:
        super().__init__()
        self.operations = operations
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += str(func).startswith(self.operations)
        return func(*args, **(kwargs or {}))
