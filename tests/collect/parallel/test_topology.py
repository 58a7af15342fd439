"""Where ranks stand: found in the objects that trainers make, before or after attach."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sentinel.collect.environment import Environment
from sentinel.collect.parallel.topology import Topology
from sentinel.place import Place

from ...support import forked
from ...support.nets import TinyModel
from ...support.ports import free_port


def ddp_after() -> tuple[Any, nn.Module]:
    model = TinyModel()
    return nn.parallel.DistributedDataParallel(model), model


def ddp_in_subgroups() -> tuple[Any, nn.Module]:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = nn.parallel.DistributedDataParallel(TinyModel(), process_group=groups[dist.get_rank() // 2])
    return None, model


def nothing() -> tuple[Any, nn.Module]:
    return None, TinyModel()


def mesh_of_three() -> tuple[Any, nn.Module]:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp_replicate", "tp")), TinyModel()


def mesh_hsdp() -> tuple[Any, nn.Module]:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")), TinyModel()


CASES: list[tuple[Callable[[], tuple[Any, nn.Module]], list[dict[str, int]]]] = [
    (ddp_after, [{"dp": rank} for rank in range(4)]),
    (ddp_in_subgroups, [{"dp": rank % 2} for rank in range(4)]),
    (nothing, [{"dp": rank} for rank in range(4)]),
    (mesh_of_three, [{"pp": rank // 2, "tp": rank % 2} for rank in range(4)]),
    (mesh_hsdp, [{"dp": rank} for rank in range(4)]),
]


def find(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=4)
    places = []
    for make, _ in CASES:
        keep, model = make()
        topology = Topology(Environment(), None)
        topology.scan()
        places.append(topology.place([model]))
        del keep, model, topology
        gc.collect()
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(places))
    dist.barrier()
    dist.destroy_process_group()


def test_place_is_found(tmp_path: Path) -> None:
    port = free_port()
    forked.start_ranks(find, (port, str(tmp_path)), 4)  # One launch for all: it is what takes the time.

    said: list[list[Place]] = [pickle.loads((tmp_path / str(rank)).read_bytes()) for rank in range(4)]

    for at, (make, expected) in enumerate(CASES):
        assert [places[at].coordinates() for places in said] == expected, make.__name__
        assert [places[at].rank for places in said] == [0, 1, 2, 3]


def test_place_from_the_launcher_and_as_given() -> None:
    model = TinyModel()

    assert Topology(Environment(rank=3, world_size=8), None).place([model]) == Place(rank=3, world_size=8)
    assert Topology(Environment(rank=3, world_size=8), Place(rank=1, world_size=2)).place([model]).rank == 1
