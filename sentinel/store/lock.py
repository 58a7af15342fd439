"""A run is judged by one daemon at a time."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from sentinel.errors import StoreError
from sentinel.private_files import create_file, make_directory
from sentinel.store.trouble import disk_trouble


class LockHeld(StoreError):
    """Another process has the lock."""

    def __init__(self, message: str, holder: str) -> None:
        """holder: that process, in the words that it wrote into the lock: `4711 on node7`."""
        super().__init__(message)
        self.holder = holder


def holder(directory: Path) -> str | None:
    """Return the process that holds `<directory>/lock`, in the words that it wrote there; None: it is not held."""
    try:
        fd = os.open(directory / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return os.pread(fd, 256, 0).decode("ascii", "replace").strip() or "unknown"
    finally:
        os.close(fd)
    return None


class RunLock:
    """Holds `<directory>/lock` until closed; the kernel releases it when the process ends, however it ends."""

    def __init__(self, directory: Path, what: str) -> None:
        """Take the lock, or raise LockHeld naming the process that has it, or StoreError saying what the disk did.

        what: the thing that is locked, for the message: `run /data/run1`.
        """
        self._path = directory / "lock"
        try:
            make_directory(directory)
            self._fd = create_file(self._path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError as error:
            raise disk_trouble(self._path, error) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._fd, 256, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._fd)
            raise LockHeld(
                f"{what}: another daemon judges it (process {holder}, lock {self._path}); "
                "stop that one first, or leave it to it",
                holder,
            ) from error
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()} on {os.uname().nodename}\n".encode(), 0)

    def close(self) -> None:
        """Release the lock. The file stays: removing it would let two daemons lock two different files of one name."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
