"""A model that is saved while it is watched loads where Sentinel is not installed, and trains there as ever."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sentinel
from sentinel.collect.hooks.pickle_stub import stub_hook, stub_methods

KINDS = [
    ["activation", "activation_in", "dgrad", "dgrad_in", "param", "wgrad"],
    ["wgrad_unreduced", "residual", "update", "update_ratio", "exp_avg", "exp_avg_sq"],
    ["attention", "channel", "saturation", "precision", "weight_spectrum", "grad_momentum_alignment"],
]
LOADS = """
import pickle, sys
sys.modules["sentinel"] = None
import torch
for path in sys.argv[1:]:
    with open(path, "rb") as file:
        loaded = torch.load(file, weights_only=False) if path.endswith(".pt") else pickle.load(file)
    if isinstance(loaded, torch.optim.Optimizer):
        loaded.step()
    else:
        loaded(torch.ones(3, 5, 4)).sum().backward()
        print(float(sum(one.grad.abs().sum() for one in loaded.parameters())))
    loaded.zero_grad()
"""


def built() -> nn.Sequential:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(nn.Linear(4, 8), body, nn.LayerNorm(8), nn.Linear(8, 2))


def saved_while_watched(kinds: list[str], folder: Path) -> tuple[list[Path], float]:
    """Return files of a watched model, of a copy of it and of its optimizer, and the sum of its gradients' magnitudes."""
    model = built()
    optimizer = torch.optim.AdamW(model.parameters(), 0.0)
    monitor = sentinel.attach(model, optimizer, {"kinds": kinds})
    model(torch.ones(3, 5, 4)).sum().backward()
    optimizer.step()
    expected = float(sum(one.grad.abs().sum() for one in model.parameters() if one.grad is not None))
    optimizer.zero_grad()
    model(torch.ones(3, 5, 4)).sum().backward()
    saved = io.BytesIO()
    torch.save(model, saved)
    files = {"a.pt": saved.getvalue(), "b.pkl": pickle.dumps(copy.deepcopy(model)), "c.pkl": pickle.dumps(optimizer)}
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
        assert b"sentinel" not in data, (kinds, name)
    monitor.detach()
    return [folder / name for name in files], expected


def test_watched_models_load_without_sentinel(run: Path, tmp_path: Path) -> None:
    saved = [saved_while_watched(kinds, tmp_path / kinds[0]) for kinds in KINDS]

    done = subprocess.run(
        [sys.executable, "-c", LOADS, *(str(path) for paths, _ in saved for path in paths)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    expected = [gradients for _, gradients in saved for _ in ("the model", "its copy")]
    assert [float(line) for line in done.stdout.split()] == pytest.approx(expected, rel=1e-5)


class Hooks:
    """Hooks as methods."""

    def _before(self, module: Any, args: Any) -> str:
        return "never seen"

    def __reduce__(self) -> Any:
        return stub_methods(type(self))


class Hook:
    """A hook that is called itself."""

    def __call__(self, *args: Any) -> str:
        return "never seen"

    def __reduce__(self) -> Any:
        return stub_hook()


def test_what_stands_for_hooks_takes_anything_and_does_nothing() -> None:
    for hook in (Hooks()._before, Hook()):
        loaded = pickle.loads(pickle.dumps(hook))

        assert loaded(1, (2,), {"three": 4}) is None
        assert pickle.loads(pickle.dumps(loaded))() is None, "saved again by whoever loaded it"
