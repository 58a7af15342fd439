"""A broker for each test of a fleet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..support.nats_broker import NatsBroker


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[NatsBroker]:
    with NatsBroker(tmp_path / "broker") as running:
        yield running
