"""One browser for the tests of a module, and a page of it: of the daemon whose `address` the module says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from ..support.browser import Looked, chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as one:
        yield one


@pytest.fixture
def looked(browser: Browser, address: str) -> Iterator[Looked]:
    """A page of which the browser must have complained of nothing in the end."""
    with Looked(browser, address) as one:
        yield one
        assert one.complaints == []
