"""The anomalies of a run as msProbe's analyser reads them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np

from sentinel.aggregate import matches, nearest_names
from sentinel.anomaly import Anomaly
from sentinel.errors import MALFORMED, ConfigError
from sentinel.explain.anomaly_files import anomaly_files
from sentinel.exports.msprobe_anomalies import MsprobeAnomalies
from sentinel.exports.msprobe_csv import spots_of
from sentinel.exports.output import WholeDirectory
from sentinel.exports.request import ExportRequest, ExportSetting, Written
from sentinel.exports.series import newest_attempts
from sentinel.step_view import Layout
from sentinel.store.run_paths import RunPaths

_DECODER = msgspec.json.Decoder(Anomaly)


def export_anomalies(request: ExportRequest, output: Path, setting: ExportSetting) -> Written:
    """Write `anomaly_detected/rank<R>/anomaly.json` below `output`, and return how many records there are."""
    paths, steps, times, attempt = request.paths, request.steps, request.times, request.attempt
    names, to_stderr = request.names or ("*",), setting.to_stderr
    found = list(anomaly_files(paths.run_dir))
    if not found:
        to_stderr(
            f"{paths.run_dir}: no anomalies there; was the run judged? `sentinel replay RUN --recompute -o DIR` judges it"
        )
        return Written()
    own_names, attempts = _read_run(paths, setting)
    newest = attempts if attempt is None and len({one.attempt for one in _anomalies(found, to_stderr)}) > 1 else None
    written = Written()
    met: set[str] = set()
    seen_names: set[str] = set()
    seen_steps: set[int] = set()
    num_others = num_unknown = 0
    with WholeDirectory(output) as whole, contextlib.closing(MsprobeAnomalies(whole.scratch, own_names)) as records:
        for one in _anomalies(found, to_stderr):
            if not steps[0] <= one.step <= steps[1] or (times is not None and not times[0] <= one.time <= times[1]):
                continue
            if (attempt is not None and one.attempt != attempt) or (newest and newest.get(one.step, -1) > one.attempt):
                continue
            if one.event != "onset":
                num_others += 1
                continue
            seen_names.add(one.tag_name)
            globs = [glob for glob in names if any(matches(glob, name) for name in (one.tag_name, *one.also))]
            if not globs:
                continue
            met.update(globs)
            if records.add(one):
                seen_steps.add(one.step)
            else:
                num_unknown += 1
        for glob in names:
            if glob != "*" and glob not in met:
                near = nearest_names([glob], seen_names)
                raise ConfigError(f'"{glob}" matches no anomaly\'s name' + (f"; nearest: {', '.join(near)}" if near else ""))
        records.close()
        whole.files |= records.files
    why = ("of an episode's end, or of what was not written", "of what its files have no tensor for: health, logged values")
    written.left_out = {what: num for what, num in zip(why, (num_others, num_unknown), strict=True) if num}
    for what, num in written.left_out.items():
        to_stderr(f"{num} records are left out: {what}")
    written.num_rows, written.num_series = records.num_records, records.num_tags
    written.num_steps, written.num_files = len(seen_steps), len(records.files)
    return written


def _read_run(paths: RunPaths, setting: ExportSetting) -> tuple[dict[tuple[int, str, str], str] | None, dict[int, int]]:
    """Return (rank, kind, canonical name) -> name in msProbe's CSV files, and step -> the newest attempt that measured it.

    No names where no step is in the spool any more.
    """
    names: dict[tuple[int, str, str], str] = {}
    met: list[tuple[int, int]] = []
    layout = None
    with setting.open_run(paths) as recorded:
        for view, _ in recorded.views():
            met.append((view.attempt, view.step))
            if view.layout is not layout:
                layout = view.layout
                names.update(_names_in(layout))
    return names or None, newest_attempts(met)


def _names_in(layout: Layout) -> Iterator[tuple[tuple[int, str, str], str]]:
    for rank, descriptor in layout.descriptors.items():
        spots = spots_of(descriptor.tensors)
        logical = layout.logical_of(rank, np.array([info.id for info in descriptor.tensors], np.uint32))
        for info, at in zip(descriptor.tensors, logical.tolist(), strict=True):
            if at >= 0 and info.id in spots:
                yield (rank, info.kind, layout.tensors[at].name), spots[info.id][0].name


def _anomalies(files: list[Path], to_stderr: Callable[[str], None]) -> Iterator[Anomaly]:
    for path in files:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    yield _DECODER.decode(line)
                except MALFORMED as error:
                    if not line.endswith(b"\n"):
                        to_stderr(f"{path}:{number}: the last line is torn and is left out")
                        continue
                    raise ConfigError(f"{path}:{number}: expected an anomaly: {error}") from error
