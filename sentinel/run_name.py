"""The folder that a run's name stands for: injective, so that two names are never one run."""

from __future__ import annotations

import hashlib
import re
import urllib.parse

MAX_BYTES = 128
"""Most bytes of a folder's name: file systems allow 255, and files beside it add to it."""

FOLDER = re.compile(r"[A-Za-z0-9_%-][A-Za-z0-9._%+-]{0,127}")
"""What a folder of ours is called."""

PARTS_OF_A_RUN = frozenset({"spool", "attempts"})
"""A directory of runs in which anything is called so would itself be taken for a run (`store.run_paths.is_run`)."""
_PLAIN = re.compile(r"[^A-Za-z0-9._-]")


def folder_name(name: str) -> str:
    """Return the folder of a run of this name: what cannot be in a path is percent-encoded (UTF-8), a dot in front too, and
    the first letter of `PARTS_OF_A_RUN`.

    One that would be longer than `MAX_BYTES` ends with a hash of the whole name. `given_name` undoes the others.
    """
    plain = _PLAIN.sub(lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode("utf-8", "surrogateescape")), name)
    if plain.startswith(".") or plain in PARTS_OF_A_RUN:
        plain = f"%{ord(plain[0]):02X}{plain[1:]}"
    if len(plain) <= MAX_BYTES:
        return plain or "%"
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
    return f"{plain[: MAX_BYTES - 17]}%{digest}"


def numbered(folder: str, number: int) -> str:
    """Return the folder of the number-th training that goes by one name in one process; the first has the name itself.

    No name that a user gives has a folder with a plus sign in it.
    """
    return folder if number <= 1 else f"{folder}+{number}"


def given_name(folder: str) -> str:
    """Return the name that a folder stands for, for people."""
    return urllib.parse.unquote(folder, errors="replace")
