"""The table of kinds: each has a row, and what stages ask of a kind is what its row says."""

from __future__ import annotations

import enum
import subprocess
import sys
from typing import cast

import pytest

from sentinel import kinds
from sentinel.kinds import KINDS, ROW_OF, Ordering, Phase, Subject, measured_kind, table_of
from sentinel.order.phase import phase_of
from sentinel.record import Kind


def test_a_kind_without_a_row_is_named() -> None:
    more = cast(type[Kind], enum.IntEnum("more", {**{kind.name: kind.value for kind in Kind}, "NOVELTY": 99}))
    more.label = property(lambda self: self.name.lower())  # type: ignore[assignment, attr-defined]

    with pytest.raises(RuntimeError, match=r"expected a row for each kind, got none for novelty$"):
        table_of(more, KINDS)


@pytest.mark.slow
def test_sentinel_does_not_import_with_a_kind_that_has_no_row() -> None:
    script = (
        "import enum, sys, types\n"
        "import sentinel.record as record\n"
        "members = {kind.name: kind.value for kind in record.Kind} | {'NOVELTY': 99}\n"
        "kind = enum.IntEnum('Kind', members)\n"
        "kind.label = property(lambda self: self.name.lower())\n"
        "record.Kind = kind\n"
        "import sentinel.order.causal\n"
    )

    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)

    assert result.returncode != 0 and "expected a row for each kind, got none for novelty" in result.stderr


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.label)
def test_the_causal_order_places_a_kind_as_its_row_says(kind: Kind) -> None:
    row = KINDS[kind]
    expected = {
        Ordering.PHASE: {"fc1": row.phase, "fc1:dgrad.fp16_overflow": row.phase},
        Ordering.PROGRAM: {"train.py:12": Phase.COMM},
        Ordering.NAME: {"loss": Phase.LOSS, "lr": Phase.SCHEDULE, "grad_norm": Phase.NORM},
        Ordering.CARRIER: {"fc1:dgrad.fp16_overflow": Phase.BACKWARD, "fc1:activation.dynamic_range": Phase.FORWARD},
        Ordering.NONE: {"rank 3": Phase.FREE},
    }[row.ordering]

    assert {name: phase_of(kind.label, name) for name in expected} == expected


def test_only_what_is_no_tensor_is_free_of_the_order_or_told_by_its_name() -> None:
    by_phase = [kind for kind in Kind if KINDS[kind].subject in (Subject.MODULE, Subject.PARAMETER, Subject.BLOCK)]

    assert by_phase and all(KINDS[kind].ordering is Ordering.PHASE for kind in by_phase)
    assert [kind for kind in Kind if KINDS[kind].ordering is Ordering.NONE] == [Kind.HEALTH]
    assert [kind for kind in Kind if KINDS[kind].phase is None] == [Kind.SCALAR, Kind.PRECISION]


def test_a_probe_looks_at_tensors_that_are_measured_themselves() -> None:
    for kind, carriers in kinds.CARRIERS.items():
        assert carriers and all(KINDS[one].has_elements for one in carriers), kind


def test_what_a_newer_version_wrote_is_related_to_nothing() -> None:
    assert "novelty" not in ROW_OF
    assert phase_of("novelty", "fc1") is Phase.FREE
    assert measured_kind("novelty", "fc1:dgrad.x") == "novelty"
