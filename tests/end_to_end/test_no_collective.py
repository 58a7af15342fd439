"""Sentinel adds no collective and no synchronisation to a data-parallel run: counted with and without."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ..support import forked
from ..support.host_waits import HostWaits
from ..support.ports import free_port

NUM_STEPS = 6


def rank_main(rank: int, port: int, watched: bool, folder: str) -> None:
    os.environ.update(SENTINEL_DIR=folder, SENTINEL_RUN="run", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    )
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    monitor = None
    if watched:
        import sentinel

        monitor = sentinel.attach(
            model, optimizer, {"kinds": ["param", "wgrad", "activation", "activation_in", "dgrad", "dgrad_in"]}
        )
    counter = HostWaits()
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        for micro_step in range(2):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + 10 * micro_step + rank))
            with counter:
                loss = model(x).square().mean()
                loss.backward()
        with counter:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
        if monitor is not None:
            monitor.log(lr=0.01)
    if monitor is not None:
        assert monitor.is_alive
        monitor.detach()
    collectives = dist.group.WORLD._get_sequence_number_for_group()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.save((collectives, counter.count, weights), Path(folder) / f"{watched}-{rank}.pt")
    dist.destroy_process_group()
    # Not by the interpreter's end: the group joins its threads with the GIL, and one that lets go of the collectives of
    # `counter`'s block needs the GIL for that, so that torch could wait for ever.
    os._exit(0)


def test_no_sync_no_collective(tmp_path: Path) -> None:
    for watched in (False, True):
        port = free_port()
        forked.start_ranks(rank_main, (port, watched, str(tmp_path)), 2)

    for rank in range(2):
        bare = torch.load(tmp_path / f"False-{rank}.pt")
        seen = torch.load(tmp_path / f"True-{rank}.pt")
        assert seen[0] == bare[0] > NUM_STEPS  # The positive control: collectives are counted at all.
        assert seen[1] == bare[1]
        assert torch.equal(seen[2], bare[2])
    assert list(tmp_path.glob("run/spool/r00001-*/*.spool"))
