"""The batches that diagnoses suspect, as JSON lines for trainers in any language."""

from __future__ import annotations

from sentinel.explain.skip_list import skip_list
from sentinel.exports.output import text_output
from sentinel.exports.request import ExportRequest, ExportSetting, Written
from sentinel.report.files import json_line


def export_skip_list(request: ExportRequest, setting: ExportSetting) -> Written:
    """Write JSON lines, one a suspected step, rising; to stdout without an output."""
    first, last = request.steps
    found = [one for one in skip_list(request.paths.run_dir, attempt=request.attempt) if first <= one.step <= last]
    body = b"".join(json_line(one) + b"\n" for one in found)
    with text_output(request.output, setting) as out:
        out.write(body)
    incidents, reported = {one.incident for one in found}, {one.step for one in found}
    return Written(num_rows=len(found), num_series=len(incidents), num_steps=len(reported))
