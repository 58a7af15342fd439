"""Pieces of tensors are all of them, and rows of pieces are the row of the whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sentinel.collect.kernels import choose_kernel
from sentinel.collect.probes.piecewise_rows import PiecedRow, merge_words, piece_words, side_by_side
from sentinel.collect.rows.buffer import StepRows
from sentinel.collect.rows.recording import Recording
from sentinel.collect.rows.tensor_table import TensorTable
from sentinel.record import STATS_DTYPE, Kind


def row_of(tensor: torch.Tensor) -> np.ndarray:
    rows = StepRows(1)
    rows.add(0, 0, 0, -1, 0, 0)
    choose_kernel("cpu").measure((tensor,), rows, 0)
    return rows.array[0]


def assert_alike(one: Any, other: Any, rel: float = 1e-5) -> None:
    for name in STATS_DTYPE.names or ():
        if name == "checksum":
            continue
        scale = {"mean": 1.0, "m3": float(other["m2"]) ** 1.5}.get(name, 0.0)
        assert float(one[name]) == pytest.approx(float(other[name]), rel=rel, abs=1e-6 * scale), name


TENSORS = {
    "normal": lambda g: torch.randn(1000, generator=g) + 3,
    "far": lambda g: torch.randn(1000, generator=g) + 1e3,
    "tiny": lambda g: torch.randn(1000, generator=g).abs() * 1e-20,
    "huge": lambda g: torch.randn(1000, generator=g) * 1e15,
    "holes": lambda g: torch.randn(1000, generator=g).masked_fill(torch.arange(1000) % 7 == 0, torch.nan),
    "infinite": lambda g: torch.randn(1000, generator=g).masked_fill(torch.arange(1000) == 3, -torch.inf),
    "zeros": lambda g: torch.zeros(1000),
    "nothing finite": lambda g: torch.full((1000,), torch.inf),
}


@pytest.mark.parametrize("name", TENSORS)
def test_words_made_by_torch_are_those_of_the_kernel(name: str) -> None:
    tensor = TENSORS[name](torch.Generator().manual_seed(0))

    words = piece_words(tensor, 0.0)

    assert_alike(words.numpy().view(STATS_DTYPE)[0], row_of(tensor), rel=1e-3)


@pytest.mark.parametrize("name", TENSORS)
def test_merged_pieces_are_the_whole(name: str) -> None:
    tensor = TENSORS[name](torch.Generator().manual_seed(0))
    words = torch.stack([piece_words(tensor[at : at + 300], 0.0) for at in range(0, 1000, 300)])

    merged = merge_words(words)

    assert_alike(merged.numpy().view(STATS_DTYPE)[0], row_of(tensor), rel=1e-3)


def test_a_row_is_filled_piece_by_piece() -> None:
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(1)) * torch.linspace(0, 5, 1000)
    recording = Recording(choose_kernel("cpu"), TensorTable(), max_rows=1024, zero_eps=0.0, checksum=True)
    pieced = PiecedRow(recording)
    room = torch.empty(10)
    for _ in range(2):
        row = recording.reserve(recording.table.entry(0, "a", Kind.UPDATE), -1)
        pieced.fill(row, (room.copy_(piece) for piece in tensor.split(10)))

        assert_alike(recording.rows.array[row], row_of(tensor), rel=1e-6)


@pytest.mark.parametrize("most", [1, 5, 24, 10**6])
def test_pieces_side_by_side_are_all_of_each_tensor(most: int) -> None:
    a = torch.arange(120.0).view(4, 5, 6)
    others = [a.clone(), a.transpose(0, 2).contiguous().transpose(0, 2), a[:, :1].expand(4, 5, 6)]

    for tensors in ([a, others[0]], [a, others[1]], [others[1], others[2], a]):
        seen = list(side_by_side(tensors, most))

        assert all(one.numel() <= most for pieces in seen for one in pieces)
        for at, tensor in enumerate(tensors):
            together = torch.cat([pieces[at].flatten() for pieces in seen])
            assert torch.equal(together.sort()[0], tensor.flatten().sort()[0])
        pairs = {pair for pieces in seen for pair in zip(*(one.flatten().tolist() for one in pieces[:2]), strict=True)}
        assert pairs == set(zip(*(one.flatten().tolist() for one in tensors[:2]), strict=True))
