"""What probes compute on a device never asks it for a value: on the meta device there is none, and asking raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sentinel.collect.probes import histogram, weight_spectrum
from sentinel.collect.probes.alignment import agreement
from sentinel.collect.probes.piecewise_rows import merge_words, piece_words
from sentinel.collect.probes.prepared_rows import device_shares, moments_words
from sentinel.collect.probes.single_values import value_words
from sentinel.collect.probes.update import found_inf_of
from sentinel.collect.probes.update_rules import Given, adafactor, adam, lion, muon, sgd

META = torch.device("meta")


def on_meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


RULES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "adam": (
        adam,
        {"betas": (0.9, 0.99), "lr": on_meta(), "eps": 1e-8, "weight_decay": 0.1, "decoupled_weight_decay": True},
        {"exp_avg": on_meta(6, 5), "exp_avg_sq": on_meta(6, 5), "step": on_meta()},
    ),
    "sgd": (
        sgd,
        {"lr": on_meta(), "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum_buffer": on_meta(6, 5)},
    ),
    "lion": (lion, {"betas": (0.9, 0.99), "lr": on_meta(), "weight_decay": 0.1}, {"exp_avg": on_meta(6, 5)}),
    "adafactor": (
        adafactor,
        {"lr": on_meta(), "eps": (None, 1e-3), "d": 1.0, "weight_decay": 0.1},
        {"row_var": on_meta(6, 1), "col_var": on_meta(1, 5), "step": on_meta()},
    ),
    "muon": (
        muon,
        {
            "lr": on_meta(), "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "eps": 1e-7, "ns_steps": 5,
            "ns_coefficients": (3.4, -4.7, 2.0), "adjust_lr_fn": None,
        },
        {"momentum_buffer": on_meta(6, 5)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_formulas_with_numbers_on_the_device(name: str) -> None:
    rule, group, state = RULES[name]
    param = nn.Parameter(on_meta(6, 5))

    formula = rule(Given(None, group, state, param, on_meta(6, 5), on_meta()))

    out = on_meta(6, 5)
    if formula.prepare is not None:
        formula.prepare(iter([formula.tensors]), torch.float32)
    formula.write(out, formula.tensors, param.detach())
    assert isinstance(formula.scale, torch.Tensor)


class Stopped:
    found_inf = on_meta(1)


COMPUTED: dict[str, Callable[[], torch.Tensor | None]] = {
    "agreement": lambda: agreement(on_meta(6, 5), on_meta(6, 5), on_meta()),
    "value_words": lambda: value_words(on_meta(4), on_meta(4, dtype=torch.bool)),
    "moments_words": lambda: moments_words(on_meta(4)),
    "device_shares": lambda: device_shares(on_meta(4, dtype=torch.int64), on_meta(4, dtype=torch.int64)),
    "piece_words": lambda: piece_words(on_meta(4), 0.0),
    "merge_words": lambda: merge_words(on_meta(3, 12, dtype=torch.int64)),
    "bin_of": lambda: histogram.bin_of(on_meta(4), on_meta()),
    "tallied_in_order": lambda: histogram.tallied_in_order(on_meta(4, dtype=torch.int32)),
    "applied": lambda: weight_spectrum.applied(on_meta(2, 6, 5, dtype=torch.bfloat16), on_meta(2, 5, 4)),
    "applied_transposed": lambda: weight_spectrum.applied_transposed(on_meta(2, 6, 5).half(), on_meta(2, 6, 4)),
    "orthonormal": lambda: weight_spectrum.orthonormal(on_meta(2, 5, 4)),
    "largest_eigenvalue": lambda: weight_spectrum.largest_eigenvalue(on_meta(2, 4, 4, dtype=torch.float64)),
    "frobenius_norms": lambda: weight_spectrum.frobenius_norms(on_meta(2, 6, 5)),
    "found_inf_of": lambda: found_inf_of(Stopped),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_computations_stay_on_the_device(name: str) -> None:
    found = COMPUTED[name]()

    assert found is not None
    assert found.device == META


def test_asking_raises_there() -> None:
    """The positive control."""
    with pytest.raises((RuntimeError, NotImplementedError)):
        float(on_meta())
    with pytest.raises((RuntimeError, NotImplementedError)):
        bool(on_meta() > 0)
