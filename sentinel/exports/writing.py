"""Writes the steps of an export to its target, which appears whole or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sentinel.exports.encoders import Before, Encoder, MergedTable, RankTable
from sentinel.exports.encoding_processes import encoded
from sentinel.exports.output import WholeDirectory, WholeFile
from sentinel.exports.rank_series import RankStepRows
from sentinel.exports.request import ExportSetting, Written
from sentinel.exports.series import MergedStep
from sentinel.exports.step_reading import KEPT, StepReading
from sentinel.exports.targets import DirectoryTarget, ExportTarget, FileTarget, ParquetTarget, StreamTarget


def write_text(output: Path | None, reading: StepReading, encoder: Encoder, jobs: int, setting: ExportSetting) -> Written:
    """Write a table of text: to stdout, or to a file that appears when it is whole."""
    if output is None:
        with setting.stdout() as out:
            target = StreamTarget(out)
            try:
                return write(reading, encoder, target, jobs, setting)
            except BrokenPipeError:
                raise
            except BaseException:
                if target.has_written:
                    setting.to_stderr("what was written to stdout so far is not the whole table")
                raise
    with WholeFile(output) as whole:
        written = write(reading, encoder, FileTarget(whole.file), jobs, setting)
        whole.is_wanted = written.num_rows > 0
    return written


def write_parquet(
    output: Path,
    reading: StepReading,
    encoder: MergedTable | RankTable,
    about: dict[str, str],
    jobs: int,
    setting: ExportSetting,
) -> Written:
    """Write a Parquet file that appears when it is whole."""
    from sentinel.exports.parquet import ParquetTable, load

    load()
    with WholeFile(output) as whole:
        with ParquetTable(whole.file, encoder.columns, about) as table:
            written = write(reading, encoder, ParquetTarget(table), jobs, setting)
        whole.is_wanted = written.num_rows > 0
    return written


def write_directory(
    output: Path,
    reading: StepReading,
    encoder: Encoder,
    jobs: int,
    setting: ExportSetting,
    place: Callable[[str], str] = str,
) -> Written:
    """Write files into a directory that appears when it is whole."""
    with WholeDirectory(output) as whole:
        return write(reading, encoder, DirectoryTarget(whole, place), jobs, setting)


def write(reading: StepReading, encoder: Encoder, target: ExportTarget, jobs: int, setting: ExportSetting) -> Written:
    """Encode the steps with as many processes, in their order, into the target."""
    written = Written()
    num_partial = 0
    series: set[tuple[str, str, str]] = set()
    left_out: dict[str, set[tuple[str, str, str]]] = {}
    steps = encoded(_steps(reading, encoder), encoder, jobs)
    with setting.progress() as progress, contextlib.closing(steps) as results:
        for step in results:
            target.take(step)
            if set(reading.picker.query.globs) <= reading.picker.met:
                target.release()
            written.num_steps += 1
            written.num_rows += step.num_rows
            series.update(step.series)
            num_partial += not step.is_whole
            for why, keys in step.left_out.items():
                left_out.setdefault(why, set()).update(keys)
            progress.show(written.num_steps, lambda: reading.share)
    target.release()
    if num_partial:
        setting.to_stderr(f"{num_partial} steps lack shards of ranks that were not heard; their rows say is_whole false")
    written.num_series = len(series)
    written.left_out = {why: len(keys) for why, keys in left_out.items()} | reading.unmerged(encoder.is_ranked)
    for why, num in written.left_out.items():
        if why != KEPT:  # Which groups those would be in was said already.
            setting.to_stderr(f"{num} series are left out: {why}")
    written.num_files = target.num_files
    return written


def _steps(reading: StepReading, encoder: Encoder) -> Iterator[tuple[Any, Before]]:
    for view, before in reading.views():
        yield RankStepRows.of(view) if encoder.is_ranked else MergedStep.of(view), before
