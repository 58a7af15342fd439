"""DeepSpeed with the two lines in place: a tiny GPT, ZeRO stage 2, on a CPU.

    sentinel run -- python examples/deepspeed_train.py            one process
    sentinel run -- torchrun --nproc-per-node 2 examples/deepspeed_train.py --stage 3

Prints one JSON line a step: DeepSpeed's own number, loss, gradient norm.
"""

from __future__ import annotations

import argparse
import json
import os

import deepspeed
import torch
from torch import nn

import sentinel

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
"""What a launcher would set."""
VOCAB, WIDTH, HEADS, LENGTH, BATCH = 64, 32, 4, 16, 4


class Block(nn.Module):
    """Attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, WIDTH] in and out."""
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        h = self.ln1(x)
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.ln2(x))


class TinyGPT(nn.Module):
    """Embedding, two blocks, head."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of predicting each token from those before it; tokens: [batch, LENGTH + 1]."""
        x = self.emb(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), tokens[:, 1:].flatten())


def main() -> None:
    """Train for a few steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="Optimizer steps. Default: 20.")
    parser.add_argument("--stage", type=int, default=2, help="ZeRO stage, 0 to 3. Default: 2.")
    parser.add_argument("--local_rank", type=int, default=0, help="Set by the deepspeed launcher.")
    options = parser.parse_args()
    for name, value in ALONE.items():
        os.environ.setdefault(name, value)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    # On a CPU DeepSpeed compiles this on first use, which takes a minute; gloo serves a tiny model as well.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(verbose=False, auto_mpi_discovery=False)
    model = TinyGPT()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), 1e-3),
        config={
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 1.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": options.stage},
        },
    )
    monitor = sentinel.attach_deepspeed(engine)
    draw = torch.Generator().manual_seed(engine.global_rank)
    while engine.global_steps < options.steps:
        losses = []
        for _ in range(2):
            start = torch.randint(0, VOCAB, (BATCH, 1), generator=draw)
            loss = engine(((start + torch.arange(LENGTH + 1)) % VOCAB).to(engine.device))
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        if engine.global_rank == 0:
            norm = engine.get_global_grad_norm()
            said = {"step": engine.global_steps, "loss": sum(losses) / 2, "grad_norm": None if norm is None else float(norm)}
            print(json.dumps(said), flush=True)
    monitor.detach()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
