"""Imported before ranks are forked off: a step of two layouts, of one rank that communicates with nobody.

What torch finds out about the shapes of each operation on DTensors takes longer than the rest of a short training: the ranks
that are forked off have it. What it found out about their shardings is forgotten: that knows this rank's mesh.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_fast_path_sharding_prop_cache, _clear_python_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from .builds import LAYOUTS

for name in ("tp", "fsdp2"):
    build, num_ranks = LAYOUTS[name]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    build().train_step(0)
    dist.destroy_process_group()
_clear_python_sharding_prop_cache()
_clear_fast_path_sharding_prop_cache()
