"""Settings of the end-to-end tests."""

from __future__ import annotations

import pytest

from ..support.warm import interpreter


@pytest.fixture(autouse=True, scope="session")
def _warm() -> None:
    """Start the server of warm interpreters before the first test: its imports take seconds that no test waits for."""
    interpreter()
