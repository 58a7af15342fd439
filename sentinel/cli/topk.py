"""`sentinel topk`: the anomalies that came first, as a table and as `anomaly_analyse.json`."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

import click
import msgspec

from sentinel.anomaly import Anomaly, Severity
from sentinel.cli.main import BAD_USAGE, CLEAN, FOUND, to_stderr
from sentinel.cli.outputs import no_stdout
from sentinel.cli.places import find_run, runs_directory
from sentinel.cli.text_table import show_table
from sentinel.explain.selection import ORDERS
from sentinel.explain.topk import RESULT_NAME, TopEntry, TopK
from sentinel.explain.topk import topk as find_topk
from sentinel.incidents.titles import origin_words
from sentinel.order.causes import leading_causes
from sentinel.order.origin import origin
from sentinel.run_name import FOLDER

MAX_STEPS = 1_000_000
"""Most steps that may be named; a bound on memory: each is held as an integer."""


def steps_of(ctx: click.Context, param: click.Parameter, value: str | None) -> frozenset[int] | None:
    """Return the steps that `1,2,40-45` names."""
    if value is None:
        return None
    steps: set[int] = set()
    num_steps = 0
    for word in value.split(","):
        first, dash, last = word.strip().partition("-")
        is_sound = len(word) < 40 and first.isdecimal() and (not dash or last.isdecimal())
        if not is_sound or (dash and int(last) < int(first)):
            raise click.BadParameter(f'expected steps like 1,2 or 40-45, got "{word[:40]}"', ctx, param)
        begin, end = int(first), int(last if dash else first) + 1
        num_steps += end - begin
        if num_steps > MAX_STEPS:
            raise click.BadParameter(f'expected at most {MAX_STEPS:,} steps, got more with "{word}"', ctx, param)
        steps.update(range(begin, end))
    return frozenset(steps)


@click.command()
@click.option(
    "-d", "--dir", "directory",
    help="A run or its name, a directory of *.jsonl or *.jsonl.gz, or msProbe's output. Default: the run written to last.",
)  # fmt: skip
@click.option("-o", "--out", callback=no_stdout, help=f"Directory for {RESULT_NAME}; made if need be. Default: DIR.")
@click.option("-k", "--top", "k", type=click.IntRange(min=1), default=8, show_default=True, help="How many to name.")
@click.option("-s", "--steps", callback=steps_of, help="Only these steps: 1,2 or 40-45. Default: all.")
@click.option("--incident", help="Only the members of this incident: its id, a prefix of it, or `latest`.")
@click.option(
    "--min-severity",
    type=click.Choice([severity.value for severity in Severity]),
    default="info",
    show_default=True,
    help="Leave out what is milder.",
)
@click.option(
    "--order", type=click.Choice(list(ORDERS)), default="causal", show_default=True, help="msprobe: its own sort key."
)
@click.option("--all", "all_alike", is_flag=True, help="Every record in its place: repeats, mere notes and ill timing too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
def topk(
    directory: str | None,
    out: str | None,
    k: int,
    steps: frozenset[int] | None,
    incident: str | None,
    min_severity: str,
    order: str,
    all_alike: bool,
    as_json: bool,
) -> int:
    """Name the anomalies that came first, whatever the order of files.

    Of one tensor or logged value, at one step on one rank, the first record stands for what further rules say of it, which
    comes behind. Members of incidents that stayed notes (`info`), or are about slow and silent ranks, come behind all
    others. --all leaves both in their place.

    Writes them to anomaly_analyse.json, under msProbe's keys. Exit 1 when there are any, 0 when there are none, 2 when none
    are found and some could not be read.
    """
    directory = place_of(directory, incident)
    found = find_topk(directory, k, steps, incident, order=order, min_severity=Severity(min_severity), all_alike=all_alike)
    for path in found.torn:
        to_stderr(f"{path}: the last record is half written; it was left out")
    if found.num_malformed:
        to_stderr(f"{found.num_malformed} lines could not be read, the first at {found.malformed[0]}")
    if not found.num_files:
        to_stderr(f"{directory}: no anomaly files there")
    home = Path(directory)
    target = Path(out) if out else home if home.is_dir() else home.parent
    try:
        write_analysis(target / RESULT_NAME, found)
    except OSError as error:
        to_stderr(f"{target}: cannot write {RESULT_NAME}: {error.strerror}; give a directory with -o OUT")
        return BAD_USAGE
    if as_json:
        click.echo(json.dumps(as_object(found), allow_nan=False))
    else:
        show(found)
    # Nothing found where something could not be read is no good news.
    return FOUND if found.entries else BAD_USAGE if found.num_malformed else CLEAN


def place_of(directory: str | None, incident: str | None) -> str:
    """Return the path of the run: by its name, the newest one, or the one in `directory` that has the incident."""
    if incident is not None:
        # It brings all that stories need, which the plain case should not wait for.
        from sentinel.cli.explain import run_with_incident
    if directory is None:
        return str(find_run(None) if incident is None else run_with_incident(incident, None))
    path = Path(directory)
    if not path.exists() and FOLDER.fullmatch(directory) and (runs_directory() / directory).is_dir():
        return str(runs_directory() / directory)
    is_of_runs = path.is_dir() and incident is not None and not _is_one_run(path)
    return str(run_with_incident(incident, directory)) if is_of_runs and incident is not None else directory


def _is_one_run(path: Path) -> bool:
    """Return whether a directory is one run's, or holds anomalies itself."""
    if (path / "anomalies").is_dir() or (path / "incidents.jsonl").is_file():
        return True
    return not any((one / "incidents.jsonl").is_file() for one in path.iterdir() if one.is_dir())


def write_analysis(path: Path, found: TopK) -> None:
    """Write the result to a file, whole or not at all. OSError where the disk refuses."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        scratch.write_text(json.dumps(found.analysis(), indent=1, allow_nan=False) + "\n")
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def as_object(found: TopK) -> dict[str, Any]:
    """Return the result for `--json`."""
    worst = found.worst
    return {
        "anomalies": [entry.record for entry in found.entries],
        "worst": None if worst is None else worst.record,
        "worst_in_words": None if worst is None else origin_words(worst.anomaly),
        "origins": [_origin_of(entry, found) for entry in found.entries],
        "num_anomalies": found.num_anomalies,
        "num_unwritten": found.num_unwritten,
        "num_files": found.num_files,
        "torn": list(found.torn),
        "num_malformed": found.num_malformed,
    }


def _origin_of(entry: TopEntry, found: TopK) -> dict[str, Any]:
    """Return the origin of an anomaly, as far as the anomalies of its step that are shown determine it."""
    of_step = [one.anomaly for one in found.entries if one.anomaly.step == entry.anomaly.step]
    reported: dict[str, Any] = msgspec.to_builtins(origin(entry.anomaly, of_step))
    return reported


COLUMNS = ("#", "step", "micro", "rank", "stage", "kind", "name", "statistic", "value", "rule", "severity")


def row_of(number: int, anomaly: Anomaly) -> tuple[str, ...]:
    """Return the cells of an anomaly's row. number: 1 for the first."""
    value = anomaly.value_text or ("" if anomaly.value is None else f"{anomaly.value:.5g}")
    stage = f"{anomaly.pp_stage}" if anomaly.vpp_stage == 0 else f"{anomaly.pp_stage}.{anomaly.vpp_stage}"
    micro = "" if anomaly.micro_step is None else str(anomaly.micro_step)
    rank = "all" if anomaly.rank is None else str(anomaly.rank)
    where = (str(anomaly.step), micro, rank, stage, anomaly.kind, anomaly.tag_name)
    return (str(number), *where, anomaly.statistic, value, anomaly.rule, anomaly.severity.value)


def show(found: TopK) -> None:
    """Print the table: aligned text into a pipe, with colours on a terminal; what it means goes to stderr."""
    rows = [row_of(number, entry.anomaly) for number, entry in enumerate(found.entries, 1)]
    if rows:
        show_table(COLUMNS, rows)
    files = f"{found.num_files} file" + ("" if found.num_files == 1 else "s")
    cut = f", {found.num_unwritten} of them not written" if found.num_unwritten else ""
    shown = f"{found.num_anomalies} anomalies in {files}{cut}; the {len(rows)} earliest are shown"
    to_stderr(shown if rows else f"no anomalies in {files}")
    if found.worst is not None:
        to_stderr(f"first critical: {origin_words(found.worst.anomaly)}")
    elif found.entries:
        shown_ones = [entry.anomaly for entry in found.entries]
        first = shown_ones[leading_causes(shown_ones)[0]]
        to_stderr(f"first of the gravest shown: {origin_words(first)}")
