"""`sentinel open DIR VERB`: a reading verb on a run directory that somebody else made."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from sentinel.cli.main import run_cli, to_stderr
from sentinel.errors import ConfigError
from sentinel.known_words import near
from sentinel.printable import printable
from sentinel.run_name import folder_name
from sentinel.store.foreign_copy import copy_run

NAMING: dict[str, tuple[str, ...]] = {
    "status": (), "topk": ("-d",), "explain": ("-d",), "report": (), "export": (), "replay": (), "struct": (),
}  # fmt: skip
"""Verb that only reads -> what stands before the run's directory."""
SHOWN = 10
"""Most entries that are named as left out."""


@click.command(
    "open",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog="Example: sentinel open --untrusted bug-report/run topk -k 5",
)
@click.option("--untrusted", is_flag=True, help="Do not trust whoever made DIR. Always so; said for readers.")
@click.option("--keep", metavar="DIR", help="Leave the copy there. Default: it is removed at the end.")
@click.argument("directory", metavar="DIR")
@click.argument("verb", default="status")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def open_(untrusted: bool, keep: str | None, directory: str, verb: str, arguments: tuple[str, ...]) -> int:
    """Run a reading VERB (status, topk, explain, report, export, replay, struct) on a run directory that others made: an
    unpacked archive, a bug report.

    What can be read without trusting it is copied into a private directory, and the verb reads that: no link is followed,
    no pipe or device is opened, no path in it is believed, and nothing is written into DIR. What is left out is named.
    """
    if verb not in NAMING:
        raise ConfigError(f'"{verb}": expected a verb that only reads, one of {", ".join(NAMING)}{near(verb, NAMING)}')
    source = Path(directory).absolute()
    name = folder_name(source.name) or "run"
    if keep is not None:
        return _read(source, Path(keep).absolute(), verb, arguments)
    with tempfile.TemporaryDirectory(prefix="sentinel-open-") as private:
        return _read(source, Path(private) / name, verb, arguments)


def _read(source: Path, copy: Path, verb: str, arguments: tuple[str, ...]) -> int:
    if copy.exists():
        raise ConfigError(f"--keep {copy}: expected no such directory yet, found one; name another")
    copied = copy_run(source, copy)
    to_stderr(f"{copied.num_files} files, {copied.num_bytes} bytes of {printable(str(source))} are read in a copy, {copy}")
    for line in copied.left_out[:SHOWN]:
        to_stderr(f"left out: {line}")
    if len(copied.left_out) > SHOWN:
        to_stderr(f"left out: {len(copied.left_out) - SHOWN} more")
    return run_cli([verb, *NAMING[verb], str(copy), *arguments])
