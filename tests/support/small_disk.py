"""A disk that a test may fill: a file system of a few megabytes in memory, which nobody else sees."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest


class SmallDisk:
    """Of some bytes; skips the test where this process may mount none."""

    def __init__(self, directory: Path, num_bytes: int) -> None:
        """directory: an empty one, which is used for a moment."""
        if os.geteuid() != 0 or shutil.which("mount") is None:
            pytest.skip("a disk of its own: it needs root, to mount it")
        command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "none", str(directory)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"a disk of its own: {done.stderr.strip()}")
        try:
            self._fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        finally:
            # It stays for as long as somebody has anything on it open, and no longer.
            subprocess.run(["umount", "--lazy", str(directory)], check=True)
        self.path = Path(f"/proc/{os.getpid()}/fd/{self._fd}")
        """Where it is, for other processes too, until it is closed."""

    def __enter__(self) -> SmallDisk:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def fill(self) -> None:
        """Leave no room on it; called again, none of what others have deleted since."""
        with (self.path / "filler").open("ab", buffering=0) as file:
            for size in (2**16, 2**12):
                try:
                    while file.write(bytes(size)):
                        pass
                except OSError:
                    continue

    def free(self) -> None:
        """Have as much room on it as before."""
        (self.path / "filler").unlink()
