"""Where runs lie: the directory of runs and the run that a command means."""

from __future__ import annotations

import os
import secrets
from datetime import UTC, datetime
from pathlib import Path

from sentinel.errors import ConfigError
from sentinel.run_name import FOLDER, folder_name


def runs_directory(given: str | None = None) -> Path:
    """Return the directory of runs: what was given, else $SENTINEL_DIR, else ./sentinel_runs."""
    return Path(given or os.environ.get("SENTINEL_DIR") or "sentinel_runs").absolute()


def run_name(given: str | None = None) -> str:
    """Return the run's name: what was given, else $SENTINEL_RUN, else the time and four random digits."""
    return given or os.environ.get("SENTINEL_RUN") or f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def find_run(given: str | None) -> Path:
    """Return the run directory that `given` means: a path, or a run's name in the directory of runs.

    None: the run that was written to last. ConfigError when there is none.
    """
    home = runs_directory()
    if given is None:
        # Whoever stands in a run, or in a directory of runs, means what is there; a variable that is set means what it says.
        homes = [home] if "SENTINEL_DIR" in os.environ else [home, Path.cwd()]
        found = next((run for run in map(newest_run, homes) if run is not None), None)
        if found is None:
            raise ConfigError(f"{' and '.join(map(str, homes))}: expected runs, found none; name a run's directory")
        return found
    path = Path(given)
    if path.is_dir():
        return path.absolute()
    for folder in (given, folder_name(given)):
        if FOLDER.fullmatch(folder) and (home / folder).is_dir():
            return home / folder
    known = ", ".join(sorted(one.name for one in _directories(home))[:8]) or "none"
    raise ConfigError(f'"{given}": expected a run, found none there nor in {home}; known: {known}')


def newest_run(home: Path) -> Path | None:
    """Return the run that a directory is, or of those directly in it the one that was written to last; None: it has none."""
    if (home / "spool").is_dir():
        return home
    runs = [path for path in _directories(home) if (path / "spool").is_dir()]
    return max(runs, key=lambda path: (path / "spool").stat().st_mtime, default=None)


def _directories(home: Path) -> list[Path]:
    try:
        return [path for path in home.iterdir() if path.is_dir() and not path.name.startswith(".")]
    except OSError:
        return []
