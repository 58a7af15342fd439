"""docs/probes.md names every kind that the trainer side measures."""

from __future__ import annotations

from pathlib import Path

import pytest

from sentinel.kinds import MEASURED_KINDS

PAGE = (Path(__file__).parents[2] / "docs" / "probes.md").read_text()


@pytest.mark.parametrize("kind", [kind.label for kind in MEASURED_KINDS])
def test_every_kind_is_documented(kind: str) -> None:
    assert f"`{kind}`" in PAGE
