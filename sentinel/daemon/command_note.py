"""CommandNote: what `sentinel run` knows of its command and the daemon beside it does not."""

from __future__ import annotations

from pathlib import Path

import msgspec

from sentinel.private_files import make_directory
from sentinel.store.run_paths import RunPaths, write_whole

_NAME = "command.json"


class CommandNote(msgspec.Struct, frozen=True, kw_only=True):
    """One command: which process it is, what it was asked from outside, and what became of it."""

    pid: int = 0
    began: float = 0.0
    """Seconds since the epoch when it was started; 0: this is no note of any command."""
    ended: float = 0.0
    """The same when it was over; 0: it runs."""
    signals: tuple[tuple[str, float], ...] = ()
    """(name, seconds since the epoch) of the signals that were sent to it through us, oldest first."""
    code: int | None = None
    """Its exit code, 128 + n for a signal; None: it runs."""
    command: str = ""
    """What was typed, as a shell takes it, what looks like a secret left out; empty: an older note."""
    folder: str = ""
    """Where it was started."""

    def asked_by(self, time: float) -> str:
        """Return the signal that had asked the whole command to end by this time, seconds since the epoch; or nothing."""
        if not self.covers(time):
            return ""
        names = [name for name, sent in self.signals if name in _ENDING and sent - SLACK_S <= time]
        return names[-1] if names else ""

    def covers(self, time: float) -> bool:
        """Return whether the command ran at this time: a run's directory may have seen several."""
        return 0.0 < self.began <= time + SLACK_S and (not self.ended or time <= self.ended + SLACK_S)


_ENDING = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
SLACK_S = 1.0
"""A rank's last word may be so much older than what ended it: heartbeats are a second apart."""


def write_note(run_dir: Path, note: CommandNote) -> None:
    """Leave a note for the daemon of a run. OSError when it cannot be written."""
    folder = RunPaths.of(run_dir).lock_directory
    make_directory(folder)
    write_whole(folder / _NAME, msgspec.json.encode(note).decode() + "\n")


def read_note(paths: RunPaths) -> CommandNote:
    """Return the note of a run; an empty one where there is none, or it cannot be read."""
    try:
        return msgspec.json.decode((paths.lock_directory / _NAME).read_bytes(), type=CommandNote)
    except (OSError, msgspec.DecodeError):
        return CommandNote()
