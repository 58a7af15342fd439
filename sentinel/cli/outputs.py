"""What -o takes: `-` is stdout where one text is written, and no name of a directory."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import click

STDOUT = "-"
Name = TypeVar("Name", str, Path)


def no_stdout(ctx: click.Context, param: click.Parameter, value: Name | None) -> Name | None:
    """Return a directory's name as it was given; BadParameter for stdout. A click callback."""
    if value is not None and str(value) == STDOUT:
        raise click.BadParameter(
            f"expected a directory, got {STDOUT}, which is stdout; a directory of this name is ./-", ctx, param
        )
    return value
