"""`sentinel export --format skip-list`: the batches that verdicts suspect, for trainers in any language."""

from __future__ import annotations

from pathlib import Path

import click

from sentinel.cli.exporting import Written
from sentinel.explain.skip_list import skip_list
from sentinel.exports.output import WholeFile
from sentinel.report.files import json_line


def export_skip_list(run: Path, output: str | None, steps: tuple[int, int], attempt: int | None) -> Written:
    """Write JSON lines, one a suspected step, rising; to stdout without `output`."""
    found = [one for one in skip_list(run, attempt=attempt) if steps[0] <= one.step <= steps[1]]
    body = b"".join(json_line(one) + b"\n" for one in found)
    if output is None:
        click.echo(body.decode(), nl=False)
    else:
        with WholeFile(Path(output)) as file:
            file.file.write(body)
    incidents, told = {one.incident for one in found}, {one.step for one in found}
    return Written(num_rows=len(found), num_series=len(incidents), num_steps=len(told))
