"""The record: one fixed row per observation, and the names that its small integers stand for."""

from __future__ import annotations

import enum

import numpy as np


class Kind(enum.IntEnum):
    """What was observed. The number travels in the row; the lower-case name is public."""

    PARAM = 0
    WGRAD_UNREDUCED = 1
    WGRAD = 2
    ACTIVATION_IN = 3
    ACTIVATION = 4
    DGRAD = 5
    DGRAD_IN = 6
    RESIDUAL = 7
    EXP_AVG = 8
    EXP_AVG_SQ = 9
    UPDATE = 10
    UPDATE_RATIO = 11
    GRAD_MOMENTUM_ALIGNMENT = 12
    ATTENTION = 13
    WEIGHT_SPECTRUM = 14
    ROUTER = 15
    COMM = 16
    SCALAR = 17
    HEALTH = 18
    PRECISION = 19
    SATURATION = 20
    CHANNEL = 21

    @property
    def label(self) -> str:
        """The name used in rules, JSON and metrics: `wgrad`, `activation_in`."""
        return self.name.lower()

    @classmethod
    def of(cls, label: str) -> Kind:
        """Return the kind called `label`; KeyError when there is none."""
        return cls[label.upper()]


KIND_LABELS: tuple[str, ...] = tuple(kind.label for kind in Kind)


class Flag(enum.IntFlag):
    """What is to be known of a row beside its numbers."""

    SKIPPED = 1
    """The optimizer skipped this step."""
    POST_CLIP = 2
    """Something changed this gradient after the backward and before it was read."""
    FOLDED = 4
    """More than one observation was merged into this row."""
    LATE = 8
    """The row came after its step was closed."""
    DEGRADED = 16
    """A hook failed on this site; the row may be incomplete."""
    BORDER = 32
    """The site is a border of the black box."""
    PER_RANK = 64
    """The placement is unknown: this row is never merged with another rank's."""
    DIFFERENCE = 128
    """An update that no formula is known for: what the weights show of it, rounded as they are."""


NO_SCALE = 1e-4
"""Weights of at most this share of their update are no scale for it. Too small: ratios of weights that were zero but for
rounding; too large: real growth (more than 10,000-fold here) has no ratio."""
NO_ANGLE = 1e-30
"""Product of two norms below which their cosine is rounding alone: eight decades above fp32's least normal, 1.2e-38."""

NONE_ID = 0xFFFFFFFF
"""A call_id that stands for none."""

STATS_DTYPE = np.dtype(
    [
        ("count", "<i8"),
        ("mean", "<f8"),
        ("m2", "<f8"),
        ("m3", "<f8"),
        ("m4", "<f8"),
        ("min", "<f8"),
        ("max", "<f8"),
        ("num_nan", "<i8"),
        ("num_pos_inf", "<i8"),
        ("num_neg_inf", "<i8"),
        ("num_zero", "<i8"),
        ("checksum", "<u8"),
    ]
)
"""What a kernel measures: twelve 8-byte words, 96 bytes.

`count` counts finite elements; mean, m2..m4, min and max are over those alone (min=+inf, max=-inf when there is none).
The number of elements is count + num_nan + num_pos_inf + num_neg_inf. `num_zero` counts |x| <= zero_eps.
`checksum` is the sum modulo 2**64 of the elements' bit patterns, zero-extended to 64 bits (0 where it was not asked for).
"""

ROW_DTYPE = np.dtype(
    [
        ("tensor", "<u4"),
        ("kind", "u1"),
        ("reserved", "u1"),
        ("flags", "<u2"),
        ("micro_step", "<i4"),
        ("call_id", "<u4"),
        ("site_pos", "<u4"),
        ("num_folded", "<u4"),
        ("bad_call_id", "<u4"),
        ("max_call_id", "<u4"),
        ("bad_micro_step", "<i4"),
        ("max_micro_step", "<i4"),
        *((name, STATS_DTYPE[name].str) for name in STATS_DTYPE.names or ()),
    ]
)
"""One observation, 136 bytes, little-endian, no padding.

`tensor` indexes the descriptor's table. `micro_step` is -1 for what belongs to no micro-batch (params, reduced wgrads)
and for a row folded over several; `num_folded` says how many observations it holds. `bad_*` point at the first
non-finite observation (NONE_ID / -1: none), `max_*` at the one with the largest absolute value.
"""

BAD_ROW_DTYPE = np.dtype(
    [
        (name, ROW_DTYPE[name].str)
        for name in (
            "tensor", "kind", "reserved", "flags", "micro_step", "call_id", "bad_call_id", "bad_micro_step", "count",
            "num_nan", "num_pos_inf", "num_neg_inf",
        )
    ]
)  # fmt: skip
"""What is looked at of a row that holds a non-finite value, 56 bytes: which it is, when, where, and how many elements are
not finite. Once a weight is not finite all rows of a job are such."""

STATS_OFFSET: int = 40
"""Byte offset of the twelve STATS words inside a row."""

STATISTICS: tuple[str, ...] = (
    "mean", "std", "var", "norm", "rms", "min", "max", "absmax", "skew", "kurtosis", "nans", "infs", "zeros",
)  # fmt: skip
"""Derived statistics, by public name. `nans` and `infs` are numbers of elements, `zeros` a share in [0, 1]."""

assert ROW_DTYPE.itemsize == STATS_OFFSET + STATS_DTYPE.itemsize == 136
