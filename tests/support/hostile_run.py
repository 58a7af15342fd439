"""A run that was written to harm whoever reads it: names that move a cursor, end a line or are run; values that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sentinel.testing import Nan, SyntheticRun
from sentinel.testing.model import SyntheticModel, Table
from sentinel.testing.values import SyntheticValues

EVIL = (
    "=cmd|'/C calc'!A0 \x1b[31m\x1b]0;owned\x07\r\nERROR forged line\x00\x9b2J\u202e<script>alert(1)</script> <!channel> `*_"
)


def renamed(name: str) -> str:
    """Return a name with EVIL in it, of what is in layer 1."""
    return name.replace("layers.1", f"{EVIL}layers.1")


def write_hostile_run(run_dir: Path, num_steps: int = 12, *, is_skipped: bool = True, **scalars: float) -> None:
    """Write a run whose module, parameter and value names are all hostile, and in which one of them goes bad at step 8.

    is_skipped: its optimizer skips that step; else all that follows is NaN. scalars: logged in each step beside the others.
    """
    table, values = SyntheticModel.table, SyntheticValues.scalars

    def renamed_table(self: SyntheticModel, place: Any) -> Table:
        made = table(self, place)
        body = msgspec.json.encode(made.descriptor).decode().replace("layers.1", json.dumps(renamed("layers.1"))[1:-1])
        made.descriptor = msgspec.json.decode(body.encode(), type=type(made.descriptor))
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SyntheticModel, "table", renamed_table)
        patch.setattr(SyntheticValues, "scalars", lambda self, place, step: {
            **values(self, place, step), f"{EVIL}loss": float("nan") if step > 8 else 1.0, **scalars,
        })  # fmt: skip
        run = SyntheticRun(run_dir, layers=2, d_model=8, elements=8)
        run.plant(Nan(step=8, module="layers.1", is_skipped=is_skipped)).write(num_steps)
