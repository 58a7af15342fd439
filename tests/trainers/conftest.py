"""Settings of the tests on real trainers."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from ..collect.conftest import one_thread, run
from .megatron_launch import Launcher, launched

__all__ = ["one_thread", "run"]


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """Train with one thread: a trainer sets no number of its own."""


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """Starts Megatron's ranks, for one file of tests."""
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    yield from launched(tmp_path_factory.mktemp("once"))
