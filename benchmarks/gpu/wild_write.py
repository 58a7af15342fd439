"""A kernel that writes where nothing is. Imported only by a child that is to die of it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["address"])
def _store(address: tl.int64):
    tl.store(address.to(tl.pointer_type(tl.int32)), 1)


def write_wild() -> None:
    """Launch a write to the first page, which no allocation has; the device notices when it runs."""
    _store[(1,)](16)
