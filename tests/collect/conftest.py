"""Real training steps on tiny models, and what reached the spool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sentinel.messages import Bye, Descriptor, EndStep, Health, LayoutChange, TensorInfo
from sentinel.record import ROW_DTYPE
from sentinel.wire.frame import Frame, FrameType, decode_message, scan


class Said:
    """Everything one rank said, in order."""

    def __init__(self, run: Path, rank: int = 0) -> None:
        self.descriptor: Descriptor | None = None
        self.ends: list[EndStep] = []
        self.health: list[Health] = []
        self.acks: list[Any] = []
        self.byes: list[Bye] = []
        self.rows: dict[int, list[tuple[TensorInfo, Any]]] = {}
        for folder in sorted(run.glob(f"spool/r{rank:05d}-*")):
            for path in sorted(folder.glob("*.spool")):
                self._read(path.read_bytes())

    def _read(self, data: bytes) -> None:
        offset, table = 0, {}
        layouts: dict[int, Descriptor] = {}
        while offset < len(data):
            frame = scan(data, offset)
            assert isinstance(frame, Frame), frame
            offset = frame.offset_after
            if frame.header.type == FrameType.ROWS:
                for row in np.frombuffer(frame.payload, ROW_DTYPE):
                    self.rows.setdefault(frame.header.step, []).append((table[int(row["tensor"])], row))
                continue
            message = decode_message(frame)
            if isinstance(message, LayoutChange):
                message = message.applied_to(layouts[message.base])
            if isinstance(message, Descriptor):
                self.descriptor = layouts[frame.header.layout_id] = message
                table = {tensor.id: tensor for tensor in message.tensors}
            elif isinstance(message, EndStep):
                self.ends.append(message)
            elif isinstance(message, Health):
                self.health.append(message)
            elif isinstance(message, Bye):
                self.byes.append(message)

    def of(self, step: int, kind: str, name: str | None = None) -> list[Any]:
        """Rows of one step and kind, in order of their call_ids."""
        found = [r for t, r in self.rows.get(step, []) if t.kind == kind and name in (None, t.name)]
        return sorted(found, key=lambda row: int(row["call_id"]))

    def names(self, step: int, kind: str) -> list[str]:
        return [t.name for t, _ in self.rows.get(step, []) if t.kind == kind]

    def tensor(self, kind: str, name: str) -> TensorInfo:
        assert self.descriptor is not None
        return next(t for t in self.descriptor.tensors if t.kind == kind and t.name == name)


def norm(row: Any) -> float:
    """The l2 norm that a row implies."""
    return float(np.sqrt(row["m2"] + row["count"] * row["mean"] ** 2))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(torch.relu(self.fc1(self.ln(x))))


class TinyModel(nn.Module):
    """Embedding, blocks, norm, head."""

    def __init__(self, num_blocks: int = 2, width: int = 8) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(num_blocks)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def tokens(seed: int) -> torch.Tensor:
    return torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    batch = tokens(seed)
    return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


ALL_KINDS = ["param", "wgrad", "activation", "activation_in", "dgrad", "dgrad_in"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the run that attach makes in this test."""
    monkeypatch.setenv("SENTINEL_DIR", str(tmp_path))
    monkeypatch.setenv("SENTINEL_RUN", "run")
    for name in ("SENTINEL_DISABLE", "RANK", "WORLD_SIZE", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    torch.manual_seed(0)
    return tmp_path / "run"
