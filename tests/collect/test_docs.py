"""docs/probes.md names every key of the trainer side's configuration and every kind that it measures."""

from __future__ import annotations

from pathlib import Path

import pytest

from sentinel.monitor_config import MEASURED, MonitorConfig, SpoolConfig

PAGE = (Path(__file__).parents[2] / "docs" / "probes.md").read_text()


@pytest.mark.parametrize("key", MonitorConfig.__struct_fields__)
def test_every_key_is_documented(key: str) -> None:
    fields = [f"spool.{name}" for name in SpoolConfig.__struct_fields__] if key == "spool" else [key]

    assert all(f"`{field}`" in PAGE for field in fields)


@pytest.mark.parametrize("kind", [kind.label for kind in MEASURED])
def test_every_kind_is_documented(kind: str) -> None:
    assert f"`{kind}`" in PAGE
