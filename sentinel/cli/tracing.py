"""`sentinel trace`: have a run that trains make small pictures of its tensors, and read them as they come."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import click
import msgspec
import numpy as np

from sentinel.cli.control import commands_of, parse_measured, parse_ranks, parse_step, show, split, warn_if_unresponsive
from sentinel.cli.main import CLEAN, FOUND, to_stderr
from sentinel.cli.places import find_run
from sentinel.cli.progress import progress_of
from sentinel.errors import ConfigError, WireError
from sentinel.monitor_config import MEASURED_LABELS
from sentinel.trace import (
    SIZES,
    Compressor,
    Reduction,
    Trace,
    TracedStep,
    TracedTensor,
    TracePath,
    TraceRings,
    check_compressor,
    read_trace,
    trace_paths,
)

_LOOK_S = 0.2
_HINT = "does the trainer's config name TraceTensors in allow_commands?"


@click.command()
@click.argument("run", required=False)
@click.option("--kinds", default="activation", show_default=True, metavar="KIND,...",
              help=f"Among {', '.join(MEASURED_LABELS)}; attention: what queries attend to.")  # fmt: skip
@click.option("--targets", metavar="GLOB,...", help="Names of modules or parameters, `layers.3.attn`. Default: all.")
@click.option("--compressor", default="tile", show_default=True, metavar="NAME[:SIZE]",
              help=f"How a tensor becomes small: {', '.join(SIZES)}.")  # fmt: skip
@click.option("--reduce", type=click.Choice(get_args(Reduction)), default="mean", show_default=True,
              help="tile: what a tile shows of its elements.")  # fmt: skip
@click.option("--softmax", is_flag=True, help="top_k: probabilities in place of logits.")
@click.option("--vectors", default="", metavar="NAME",
              help="projection: the vectors that the trainer's config has under this name. Default: drawn.")  # fmt: skip
@click.option("--tokens", is_flag=True, help="The whole numbers that the model is given, too.")
@click.option("--every-micro-step", is_flag=True, help="Every micro-batch of a step. Default: the first.")
@click.option("--at-step", default="auto", show_default=True, metavar="N|auto",
              help="First step that is meant; auto: the first that every rank can still obey.")  # fmt: skip
@click.option("--for-steps", type=click.IntRange(1), default=100, show_default=True, metavar="N", help="Steps it stands.")
@click.option("--step-interval", type=click.IntRange(1), default=1, show_default=True, metavar="N",
              help="Trace every so many of them.")  # fmt: skip
@click.option("--ranks", metavar="R,...", help="Ranks that are meant, `0,8-15`. Default: all.")
@click.option("--show", "is_shown", is_flag=True, help="Order nothing: print what lies there, the oldest step first.")
@click.option("--follow", is_flag=True, help="Print each step as it comes, until the order is over or Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object: the command; with --show or --follow one a tensor.")
def trace(
    run: str | None,
    kinds: str,
    targets: str | None,
    compressor: str,
    reduce: Reduction,
    softmax: bool,
    vectors: str,
    tokens: bool,
    every_micro_step: bool,
    at_step: str,
    for_steps: int,
    step_interval: int,
    ranks: str | None,
    is_shown: bool,
    follow: bool,
    as_json: bool,
) -> int:
    """Have each rank of RUN (default: the newest) make small pictures of chosen tensors as they pass, into RUN/trace.

    The pictures are formed on the tensors' own device; no step waits for them, and training stays bit-identical. A rank
    keeps the newest `trace.ring_bytes` of them. Obeyed only where the trainer's own config names TraceTensors in
    `allow_commands`. Exit 1 when nobody listens, or there is nothing to show.
    """
    run_dir, now = find_run(run), time.time()
    if is_shown and not follow:
        return CLEAN if _print_all(trace_paths(run_dir), as_json) else _nothing(run_dir)
    asked = Trace(
        compressor=parse_compressor(compressor, reduce, softmax, vectors), every_micro_step=every_micro_step, tokens=tokens,
    )  # fmt: skip
    there = set(trace_paths(run_dir))
    if is_shown:
        return _follow(run_dir, set(), None, as_json)
    progress = progress_of(run_dir, now)
    command = commands_of(run_dir, progress).trace_tensors(
        at_step=parse_step(run_dir, at_step, progress),
        kinds=parse_measured(kinds),
        targets=split(targets),
        trace=asked,
        for_steps=for_steps,
        step_interval=step_interval,
        ranks=parse_ranks(ranks),
        reason="asked for at the command line",
        now=now,
    )
    if not follow:
        show(run_dir, command, as_json)
        return warn_if_unresponsive(run_dir, progress)
    if warn_if_unresponsive(run_dir, progress) != CLEAN:
        return FOUND
    return _follow(run_dir, there, command.at_step + for_steps, as_json)


def parse_compressor(text: str, reduce: Reduction, softmax: bool, vectors: str = "") -> Compressor:
    """Return the compressor of `NAME` or `NAME:SIZE`; ConfigError for one that nobody can form."""
    name, _, size = text.partition(":")
    if ":" in text and not (size.isascii() and size.isdecimal()):
        raise ConfigError(f'--compressor: expected NAME or NAME:SIZE with a whole number, got "{text[:60]}"')
    asked: Any = {"name": name, "size": int(size[:9]) if size else None, "reduce": reduce, "softmax": softmax,
                  "vectors": vectors}  # fmt: skip
    found = Compressor(**asked)
    check_compressor("--compressor", found)
    return found


def _follow(run_dir: Path, seen: set[TracePath], last_step: int | None, as_json: bool) -> int:
    """Print traces as they come. last_step: the first step that is not waited for; None: until interrupted."""
    has_printed = False
    rings = TraceRings(run_dir)
    while True:
        now = time.time()
        fresh = [one for one in rings.paths() if one not in seen]
        seen.update(fresh)
        has_printed |= _print_all(fresh, as_json)
        progress = progress_of(run_dir, now)
        newest = progress.newest_step
        if not fresh and (
            progress.why_unresponsive or (last_step is not None and newest is not None and newest > last_step)
        ):
            if not has_printed:
                to_stderr(progress.why_unresponsive or f"no rank of {run_dir} has traced anything: {_HINT}")
            return CLEAN if has_printed else FOUND
        time.sleep(_LOOK_S)


def _nothing(run_dir: Path) -> int:
    to_stderr(f"{run_dir}: no traces there; `sentinel trace RUN --targets layers.0` asks a run that trains for some")
    return FOUND


def _print_all(paths: list[TracePath], as_json: bool) -> bool:
    """Print what is still there; return whether anything was."""
    has_printed = False
    for one in paths:
        try:
            step = read_trace(one.path)
        except FileNotFoundError:
            continue  # The ring has let it go meanwhile.
        except WireError as error:
            to_stderr(str(error))
            continue
        for line in _lines(step, as_json):
            click.echo(line)
            has_printed = True
    return has_printed


def _lines(step: TracedStep, as_json: bool) -> Iterator[str]:
    head = step.head
    for key, one in head.tensors.items():
        values = step.tensors[key]
        if as_json:
            parts = {word: step.tensors[f"{key}:{word}"].tolist() for word in one.parts if f"{key}:{word}" in step.tensors}
            plain = {
                "attempt": head.attempt, "step": head.step, "rank": head.rank, "time": head.time, **msgspec.to_builtins(one),
                "values": values.tolist(), **parts,
            }  # fmt: skip
            yield msgspec.json.encode(plain).decode()
        else:
            yield f"step {head.step} rank {head.rank} {_in_words(one, values)}"
    if not as_json:
        for key, why in list(head.left_out.items())[:3]:
            yield f"step {head.step} rank {head.rank} {key}: not traced: {why}"


def _in_words(one: TracedTensor, values: np.ndarray) -> str:
    finite = values[np.isfinite(values)]
    spread = f"{finite.min():.4g} to {finite.max():.4g}, mean {finite.mean():.4g}" if finite.size else "nothing finite"
    bad = values.size - finite.size
    more = f", {bad} not finite" if bad else ""
    shape = "x".join(map(str, one.shape)) or "a number"
    return f"{one.kind} of {one.name or 'the model'} ({shape}): {one.compressor.name} {list(values.shape)}, {spread}{more}"
