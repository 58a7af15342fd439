"""The paths of a run: spool, files, lock and journal, which may lie on another disk."""

from __future__ import annotations

import glob
import json
import os
from dataclasses import dataclass
from pathlib import Path

from sentinel.errors import StoreError
from sentinel.printable import printable
from sentinel.private_files import create_file, make_directory

OWNER = "run.json"
"""File of a state directory that names the run whose journal it is."""


def is_run(directory: Path) -> bool:
    """Return whether a directory is one run, rather than a directory of runs."""
    return (directory / "spool").is_dir() or (directory / "attempts").is_dir()


def refuse_planted(run_dir: Path) -> None:
    """Raise StoreError where a run has a link, a pipe or a device: its author would have us write elsewhere, or wait.

    Looks at what lies in the run, in its state and beside its anomalies, and at the folders of its spool.
    """
    for folder in (run_dir, *(run_dir / name for name in (".daemon", "anomalies", "acts", "control", "history", "spool"))):
        try:
            entries = list(os.scandir(folder))
        except (FileNotFoundError, NotADirectoryError):
            continue
        for one in entries:
            if not one.is_dir(follow_symlinks=False) and not one.is_file(follow_symlinks=False):
                what = "a link" if one.is_symlink() else "a pipe, a socket or a device"
                raise StoreError(
                    f"{printable(one.path)}: expected a plain file or a directory, got {what}; read a run that others made "
                    "with sentinel open --untrusted"
                )


def runs_in(directory: Path) -> list[Path]:
    """Return the run that a directory is, or the runs directly in it, sorted by name."""
    if is_run(directory):
        return [directory]
    try:
        entries = sorted(directory.iterdir())
    except OSError:
        return []
    return [one for one in entries if not one.name.startswith(".") and not one.is_symlink() and is_run(one)]


def further_runs(run_dir: Path) -> list[Path]:
    """Return the runs of further models that the same process trained beside this one."""
    return [one for one in sorted(run_dir.parent.glob(f"{glob.escape(run_dir.name)}+*")) if is_run(one)]


def refuse_unprintable(run_dir: Path) -> None:
    """Raise StoreError when a run's name cannot stand in a log line, a label or JSON."""
    name = run_dir.absolute().name
    if not name.isprintable():
        raise StoreError(
            f'run name: expected visible characters in UTF-8, got "{printable(name)}"; rename the directory in '
            f"{printable(str(run_dir.absolute().parent))}"
        )


@dataclass(frozen=True)
class RunPaths:
    """The paths of one run. state: the directory of its journal."""

    run_dir: Path
    state: Path

    @classmethod
    def of(cls, run_dir: Path, state_dir: Path | None = None) -> RunPaths:
        """Return the paths of a run.

        state_dir: the argument of --state-dir; None: where the journal was kept before, by default `<run>/.daemon`.
        StoreError when the run has a journal somewhere else: judging it twice would write every anomaly twice.
        """
        run_dir = run_dir.absolute()
        own = run_dir / ".daemon"
        asked = None if state_dir is None else state_dir.absolute() / "runs" / run_dir.name
        former = _former(own)
        if asked is None:
            paths = cls(run_dir, former or own)
            if paths.state.exists():
                paths.refuse_unproven()
            return paths
        if former is not None and former != asked and former.exists():
            raise StoreError(
                f"{run_dir}: was judged with its journal in {former}, got --state-dir {state_dir}; give the former one, or "
                f"move the journal there and remove {own / 'state.json'}"
            )
        if former is None and (own / "journal.sqlite").exists():
            raise StoreError(
                f"{run_dir}: was judged with its journal in {own}, got --state-dir {state_dir}; leave --state-dir out, or "
                "move the journal there"
            )
        return cls(run_dir, asked)

    def refuse_unproven(self) -> None:
        """Raise StoreError where only a file of the run says that its journal lies elsewhere: whoever made it wrote that."""
        if self.state != self.lock_directory and not _names_back(self.state, self.run_dir):
            raise StoreError(
                f"{self.lock_directory / 'state.json'}: names {printable(str(self.state))}, where nothing says that it "
                "belongs to this run; give --state-dir if you know it, or remove that file"
            )

    @property
    def name(self) -> str:
        """The run's name: that of its directory."""
        return self.run_dir.name

    @property
    def journal(self) -> Path:
        """The journal's file."""
        return self.state / "journal.sqlite"

    @property
    def lock_directory(self) -> Path:
        """Where the lock lies: in the run itself, so that daemons with different state directories meet."""
        return self.run_dir / ".daemon"

    @property
    def anomalies(self) -> Path:
        """The directory of anomaly files."""
        return self.run_dir / "anomalies"

    @property
    def incidents(self) -> Path:
        """The file of incident revisions."""
        return self.run_dir / "incidents.jsonl"

    def remember(self) -> None:
        """Write a file into the run that names the directory of its journal, if that is not the default, and one back."""
        own = self.lock_directory
        if self.state == own:
            return
        make_directory(own)
        make_directory(self.state)
        write_whole(self.state / OWNER, json.dumps({"run": str(self.run_dir)}) + "\n")
        write_whole(own / "state.json", json.dumps({"state": str(self.state)}) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a small file, 0600, so that readers see the former one or the new one and nothing between."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    fd = create_file(part, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(text)
    part.replace(path)


def _names_back(state: Path, run_dir: Path) -> bool:
    try:
        return bool(json.loads((state / OWNER).read_text("utf-8"))["run"] == str(run_dir))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _former(own: Path) -> Path | None:
    try:
        return Path(json.loads((own / "state.json").read_text("utf-8"))["state"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{own / 'state.json'}: expected a note of where the journal is, got: {error}") from error
