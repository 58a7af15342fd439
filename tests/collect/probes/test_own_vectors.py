"""Vectors of the user's own: a file that the config names is read once; what does not fit is said with both sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sentinel.collect.probes.compression import compressed
from sentinel.collect.probes.own_vectors import OwnVectors
from sentinel.errors import ConfigError
from sentinel.trace import Compressor, check_compressor

CPU = torch.device("cpu")
ASKED = Compressor(name="projection", vectors="mine")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_tokens_are_projected_onto_them(tmp_path: Path, dtype: torch.dtype) -> None:
    drawn = torch.Generator().manual_seed(1)
    vectors, x = torch.randn(2, 8, generator=drawn).to(dtype), torch.randn(3, 5, 8, generator=drawn)
    save_file({"directions": vectors}, tmp_path / "own.safetensors")
    own = OwnVectors({"mine": str(tmp_path / "own.safetensors")})
    (tmp_path / "own.safetensors").unlink()

    for _ in range(2):
        picture = compressed(x, ASKED, own.directions)[""]
        assert picture.shape == (15, 2)
        torch.testing.assert_close(picture, x.reshape(15, 8) @ vectors.float().T)
    assert compressed(x, Compressor(name="projection"), own.directions)[""].shape == (15, 3), "drawn ones are still there"


def test_another_hidden_size_is_said_with_both_and_an_unknown_name_with_those_known(tmp_path: Path) -> None:
    save_file({"directions": torch.ones(2, 8)}, tmp_path / "own.safetensors")
    own = OwnVectors({"mine": str(tmp_path / "own.safetensors")})

    with pytest.raises(
        ValueError, match=r"expected vectors of 6 numbers.* got 8 in .*own.safetensors \(trace.vectors.mine\)"
    ):
        compressed(torch.ones(3, 6), ASKED, own.directions)
    with pytest.raises(ValueError, match=r'trace.vectors names \(mine\), got "/etc/passwd"'):
        own.directions("/etc/passwd", 8, CPU)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"a": torch.ones(8)}, r"shape \[1 to 64 vectors, hidden size\], got F32 \[8\]"),
        ({"a": torch.ones(65, 8)}, r"got F32 \[65, 8\]"),
        ({"a": torch.ones(2, 8, dtype=torch.int64)}, r"got I64 \[2, 8\]"),
        ({"a": torch.ones(2, 8), "b": torch.ones(2, 8)}, "expected one tensor, got 2"),
    ],
)
def test_a_file_that_will_not_do_is_said_when_it_is_read_and_when_it_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, tensors: dict[str, torch.Tensor], words: str
) -> None:
    save_file(tensors, tmp_path / "own.safetensors")
    own = OwnVectors({"mine": str(tmp_path / "own.safetensors"), "gone": str(tmp_path / "gone")})

    assert "trace.vectors.mine" in caplog.text and "trace.vectors.gone" in caplog.text
    with pytest.raises(ValueError, match=words):
        own.directions("mine", 8, CPU)
    with pytest.raises(ValueError, match="No such file"):
        own.directions("gone", 8, CPU)


def test_only_projections_have_vectors() -> None:
    check_compressor("here", ASKED)
    with pytest.raises(ConfigError, match=r"here.vectors: expected the compressor projection"):
        check_compressor("here", Compressor(name="pca", vectors="mine"))
