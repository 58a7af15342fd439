"""What a test of rules begins with."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sentinel.rules.engine import Engine
from sentinel.rules.language.loader import load_pack

from ..support.paper_run import PaperRun, plant_nan


@pytest.fixture
def paper_run() -> type[PaperRun]:
    return PaperRun


@pytest.fixture
def with_nan() -> Callable[..., None]:
    return plant_nan


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.fixture
def engine() -> Engine:
    """The rules that come with Sentinel, before their first step."""
    return Engine(load_pack())
