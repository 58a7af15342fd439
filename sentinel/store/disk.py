"""The kind of file system under a path: SQLite's write-ahead log needs a local one."""

from __future__ import annotations

import os
import re
from pathlib import Path

from sentinel.errors import StoreError

NETWORK_FILE_SYSTEMS = frozenset(
    {
        "nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "9p", "afs", "ocfs2", "gfs2",
        "pvfs2", "orangefs", "panfs", "wekafs", "vboxsf", "coda",
    }
)  # fmt: skip
"""Kernel names of file systems that several machines may write at once: WAL's shared memory does not cross them."""

LOCAL_FUSE = frozenset({"fuseblk", "fuse.fuse-overlayfs"})
"""FUSE file systems that live on this machine's own disk. Any other FUSE is treated as a network file system."""


def file_system(path: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the kernel's name of the file system under `path` (`ext4`, `nfs4`, `fuse.sshfs`), or "": unknown.

    path need not exist: its nearest existing parent counts.
    """
    real = str(nearest(path))
    best, kind = "", ""
    try:
        lines = mountinfo.read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return ""
    for line in lines:
        fields = line.split(" ")
        if "-" not in fields[6:]:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m.group(1), 8)), fields[4])
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        # A later mount on the same point hides the former: >= takes the last one.
        if inside and len(point) >= len(best):
            best, kind = point, fields[fields.index("-", 6) + 1]
    return kind


def refuse_network(path: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> None:
    """Raise StoreError when `path` lies on a file system where SQLite's WAL does not work."""
    kind = file_system(path, mountinfo)
    is_fuse = kind.startswith("fuse") and kind not in LOCAL_FUSE
    if kind in NETWORK_FILE_SYSTEMS or is_fuse:
        raise StoreError(
            f"{path}: the journal needs a local disk, but this is {kind}, a network file system: SQLite's "
            "write-ahead log shares memory between processes, which does not cross machines, so the journal could be "
            "corrupted; give --state-dir DIR on a local disk"
        )


def mount_point(path: Path) -> Path:
    """Return where the file system of a path, or of its nearest parent that exists, is mounted."""
    found = nearest(path)
    while not found.is_mount() and found != found.parent:
        found = found.parent
    return found


def nearest(path: Path) -> Path:
    """Return the real path of the nearest parent of `path` that exists, itself included."""
    real = Path(os.path.realpath(path))
    while not real.exists() and real != real.parent:
        real = real.parent
    return real
