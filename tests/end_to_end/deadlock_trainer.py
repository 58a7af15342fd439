"""The example's GPT, whose ranks come to wait for one another: KIND STEP, then arguments of the example; run by a launcher.

Kinds that never end, from the first micro-batch of STEP on:
- `order`: the ranks of each stage all-reduce over two groups, the odd ones in the opposite order.
- `message`: each rank of the first stage waits for a message that the next rank never sends.
- `alone`: rank 0 alone calls an all-reduce of all ranks, as code behind `if rank == 0` does.
Kinds that only take WAITING_S seconds there:
- `load`: rank 1 loads its data, and the others wait for it.
- `compile`: every rank works before its first forward.
- `broadcast`: rank 0 reads pieces and hands each to all ranks, who wait most of the time, by turns.
- `save`: rank 0 writes a checkpoint, and the others wait at a barrier; both say so.
What began is noted in $TMPDIR/struck: seconds since the epoch, process id.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "gpt"))

import torch
import torch.distributed as dist
import train
from faults import Faults
from model import MLP

import sentinel

KIND, AT = sys.argv[1], int(sys.argv[2])
WAITING_S = float(os.environ.get("WAITING_S", "20"))
STRUCK = Path(tempfile.gettempdir()) / "struck"
PIECE_S = 0.4


class Plan:
    """What this rank does once, in the forward of its first feed-forward module or before the step."""

    def __init__(self, stages: int) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        size = world // stages
        self.groups = [
            [dist.new_group(list(range(first, first + size))) for first in range(0, world, size)] for _ in range(2)
        ]  # fmt: skip
        self.everybody = dist.new_group(list(range(world)))
        self.rank, self.world, self.stage = rank, world, rank // size
        self.is_due = False
        self.num_passed = 0
        self.monitors: list[Any] = []

    def before_step(self) -> None:
        """Do what comes before the first forward."""
        if (KIND == "load" and self.rank == 1) or KIND == "compile":
            time.sleep(WAITING_S)
        elif KIND == "broadcast":
            piece = torch.zeros(4)
            for _ in range(int(WAITING_S / PIECE_S)):
                for source in range(self.world):
                    # Whoever reads works; all others wait for it.
                    if self.rank == source:
                        time.sleep(PIECE_S / self.world)
                    dist.broadcast(piece, source, group=self.everybody)
        elif KIND == "save":
            self.monitors[0].activity("checkpoint")
            if self.rank == 0:
                time.sleep(WAITING_S)
            dist.barrier(group=self.everybody)
            self.monitors[0].activity("train")

    def in_forward(self) -> None:
        """Do what comes in the midst of a forward."""
        one = torch.ones(1)
        if KIND == "order":
            pair = [groups[self.stage] for groups in self.groups]
            for group in pair if self.rank % 2 == 0 else reversed(pair):
                dist.all_reduce(one, group=group)
        elif KIND == "message" and self.stage == 0:
            dist.recv(one, (self.rank + 1) % self.world)
        elif KIND == "alone" and self.rank == 0:
            dist.all_reduce(one, group=self.everybody)


def main() -> None:
    """Plant it, and train."""
    plans: list[Plan] = []
    blocks: list[Any] = []
    begin_step, forward, plant, attach = Faults.begin_step, MLP.forward, Faults.plant, sentinel.attach
    stages = int(sys.argv[sys.argv.index("--pp") + 1])

    def planted(faults: Faults, chunks: Any) -> None:
        plans.append(Plan(stages))
        blocks.extend(block for chunk in chunks for block in chunk.blocks.values())
        plant(faults, chunks)

    def attached(*args: Any) -> Any:
        plans[0].monitors.append(attach(*args))
        return plans[0].monitors[0]

    def begun(faults: Faults, step: int) -> None:
        begin_step(faults, step)
        plans[0].is_due = step == AT
        if step == AT:
            draft = STRUCK.with_suffix(f".{os.getpid()}")
            draft.write_text(f"{time.time()} {os.getpid()}")
            draft.rename(STRUCK)
            plans[0].before_step()

    def forwarded(module: MLP, hidden: torch.Tensor) -> torch.Tensor:
        if plans[0].is_due and module is blocks[0].mlp:
            plans[0].num_passed += 1
            # A pipeline's first forward of all is one for the shapes alone.
            if plans[0].num_passed == (2 if AT == 0 else 1):
                plans[0].in_forward()
        return forward(module, hidden)

    Faults.plant, Faults.begin_step, MLP.forward = planted, begun, forwarded  # type: ignore[method-assign]
    sentinel.attach = attached  # type: ignore[assignment]
    sys.argv[1:3] = []
    train.main()


if __name__ == "__main__":
    main()
