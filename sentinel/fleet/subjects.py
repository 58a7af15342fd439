"""The names under which messages travel: `sn.<run>.raw.<k>`, `sn.<run>.beat.<node>`, `sn.<run>.answer.<node>`.

The lease of the join has `sn.lease`.
"""

from __future__ import annotations

import hashlib
import re
import zlib

STREAM = "SENTINEL_RAW"
RAW = "sn.*.raw.*"
LEASES = "SENTINEL_LEASES"
LEASE = "sn.lease"
BEATS = "sn.*.beat.*"
ANSWERS = "sn.*.answer.*"
NUM_PARTITIONS = 64
MAX_TOKEN_BYTES = 120
_PLAIN = re.compile(rb"[^A-Za-z0-9_-]")


def token(name: str) -> str:
    """Return a name as one token of a subject, whatever is in it; two names never have the same one."""
    plain = _PLAIN.sub(lambda found: b"%%%02X" % found[0][0], name.encode("utf-8", "surrogateescape")).decode()
    if len(plain) <= MAX_TOKEN_BYTES:
        return plain or "%"
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
    return f"{plain[: MAX_TOKEN_BYTES - 17]}%{digest}"


def raw(run: str, node: str) -> str:
    """Return the subject of a node's chunks of a run."""
    return f"sn.{token(run)}.raw.{zlib.crc32(node.encode('utf-8', 'surrogateescape')) % NUM_PARTITIONS}"


def beat(run: str, node: str) -> str:
    """Return the subject of what a node says of a run."""
    return f"sn.{token(run)}.beat.{token(node)}"


def answer(run: str, node: str) -> str:
    """Return the subject of what the join answers a node of a run; `*` for any run."""
    return f"sn.{run if run == '*' else token(run)}.answer.{token(node)}"
