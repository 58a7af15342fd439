"""An export format: the numbers of the steps, one a line."""

from __future__ import annotations

from typing import ClassVar

from sentinel.exports.output import text_output
from sentinel.exports.request import ExportRequest, ExportSetting, Option, Written


class Steps:
    """`sentinel export --format steps`."""

    name = "steps"
    goes_to = "text"
    options: ClassVar[frozenset[Option]] = frozenset({"times"})
    takes = "lists steps: --steps, times and --attempt choose them"

    def write(self, request: ExportRequest, setting: ExportSetting) -> Written:
        """Write the steps to stdout, or to the file that was asked for."""
        with setting.open_run(request.paths) as recorded, text_output(request.output, setting) as out:
            steps = [view.step for view, _ in recorded.views() if request.steps[0] <= view.step <= request.steps[1]]
            out.write("".join(f"{step}\n" for step in steps).encode())
        return Written(num_rows=len(steps), num_steps=len(steps))
