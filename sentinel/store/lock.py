"""A run is judged by one daemon at a time."""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path

from sentinel.errors import StoreError
from sentinel.private_files import create_file, make_directory
from sentinel.store.trouble import disk_trouble

_EPOCH = re.compile(r", epoch (\d{1,18})$")


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
    """Holds `<directory>/lock` until closed; the kernel releases it when the process ends, however it ends.

    A process that was stopped still holds it. Who has a lease of a higher epoch than that one wrote into the lock puts a
    lock of its own in the place of it: what the former does when it goes on, the journal's fence keeps off.
    """

    def __init__(self, directory: Path, what: str, *, epoch: int = 0) -> None:
        """Take the lock, or raise LockHeld naming the process that has it, or StoreError saying what the disk did.

        what: the thing that is locked, for the message: `run /data/run1`. epoch: of the lease under which this process
        works; 0: under none, and the lock is taken from nobody.
        """
        self.former = ""
        """The process from which it was taken while that held it, in its own words; empty: from none."""
        self._path, self._what, self._epoch = directory / "lock", what, epoch
        try:
            make_directory(directory)
            self._fd = self._free()
            if self._fd < 0:
                self._fd = self._taken_over()
        except LockHeld:
            raise
        except OSError as error:
            raise disk_trouble(self._path, error) from error
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, self._words(), 0)

    def close(self) -> None:
        """Release the lock. The file stays: removing it would let two daemons lock two different files of one name."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _words(self) -> bytes:
        """Return what the lock says of us."""
        epoch = f", epoch {self._epoch}" if self._epoch else ""
        return f"{os.getpid()} on {os.uname().nodename}{epoch}\n".encode()

    def _free(self) -> int:
        """Return the descriptor of the lock, which is ours; -1: another process holds it."""
        while True:
            fd = create_file(self._path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                return -1
            except BaseException:
                os.close(fd)
                raise
            if _is_file(fd, self._path):
                return fd
            os.close(fd)  # another one took its place between the two

    def _taken_over(self) -> int:
        """Return the descriptor of a new lock in the place of one whose holder had a lease before us; LockHeld."""
        turn = create_file(self._path.with_name("lock.turn"), os.O_RDWR | os.O_NOFOLLOW)
        try:
            try:
                fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise self._held(holder(self._path.parent) or "unknown") from error
            found = holder(self._path.parent)
            if found is None and (fd := self._free()) >= 0:
                return fd
            if found is None or not 0 < _epoch_of(found) < self._epoch:
                raise self._held(found or "unknown")
            self.former = found
            draft = self._path.with_name("lock.new")
            draft.unlink(missing_ok=True)
            fd = create_file(draft, os.O_RDWR | os.O_EXCL | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.pwrite(fd, self._words(), 0)
                draft.replace(self._path)
            except BaseException:
                os.close(fd)
                raise
            return fd
        finally:
            os.close(turn)

    def _held(self, by: str) -> LockHeld:
        return LockHeld(
            f"{self._what}: another daemon judges it (process {by}, lock {self._path}); "
            "stop that one first, or leave it to it",
            by,
        )


def _is_file(fd: int, path: Path) -> bool:
    """Return whether a path still leads to the file of a descriptor."""
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False


def _epoch_of(holder: str) -> int:
    """Return the epoch of the lease under which a holder works, as its lock says; 0: under none."""
    found = _EPOCH.search(holder)
    return int(found[1]) if found else 0
