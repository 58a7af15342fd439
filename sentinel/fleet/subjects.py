"""The names under which messages travel: `sn.<run>.raw.<k>.<node>`, `sn.<run>.beat.<node>`, `sn.<run>.answer.<node>`.

The node is in each, so a broker can grant a node its own subjects and no others'. k is its partition, for who reads a part
of the fleet. What is for workers has names of its own, `frames`, `frames-beat` and `frames-answer` with k in each, and is
not heard by the join. The lease of the join has `sn.lease`, who has which partition `sn.partitions`.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Callable
from typing import NamedTuple

STREAM = "SENTINEL_RAW"
RAW = "sn.*.raw.*.*"
LEASES = "SENTINEL_LEASES"
LEASE = "sn.lease"
BEATS = "sn.*.beat.*"
ANSWERS = "sn.*.answer.*"
FRAMES_STREAM = "SENTINEL_FRAMES"
FRAMES = "sn.*.frames.*.*"
FRAMES_BEATS = "sn.*.frames-beat.*.*"
FRAMES_ANSWERS = "sn.*.frames-answer.*.*"
PARTITIONS_STREAM = "SENTINEL_PARTITIONS"
PARTITIONS = "sn.partitions"
WORKERS = "sn.workers"
"""What workers say of themselves, for people."""
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


def raw(run: str | None, node: str) -> str:
    """Return the subject of a node's chunks of a run; None: of any run."""
    return _with_partition("raw", run, node)


def beat(run: str | None, node: str) -> str:
    """Return the subject of what a node says of a run; None: of any run."""
    return f"sn.{_run_token(run)}.beat.{token(node)}"


def answer(run: str | None, node: str) -> str:
    """Return the subject of what the join answers a node of a run; None: of any run."""
    return f"sn.{_run_token(run)}.answer.{token(node)}"


def frames(run: str | None, node: str) -> str:
    """Return the subject of a node's chunks of a run that are for workers; None: of any run."""
    return _with_partition("frames", run, node)


def frames_beat(run: str | None, node: str) -> str:
    """Return the subject of what a node says to workers of a run; None: of any run."""
    return _with_partition("frames-beat", run, node)


def frames_answer(run: str | None, node: str) -> str:
    """Return the subject of what a worker answers a node of a run; None: of any run."""
    return _with_partition("frames-answer", run, node)


def partition_of(node: str) -> int:
    """Return the partition of a node."""
    return zlib.crc32(node.encode("utf-8", "surrogateescape")) % NUM_PARTITIONS


def in_partition(subjects: str, partition: int) -> str:
    """Return what of subjects that have a partition, of all of them, is of one."""
    head, _, _ = subjects.rpartition(".*.*")
    return f"{head}.{partition}.*"


class Ways(NamedTuple):
    """How a node speaks with whoever takes its spools: who that is, the stream of its chunks, and functions of a run and a
    node."""

    taker: str
    stream: str
    chunk: Callable[[str | None, str], str]
    beat: Callable[[str | None, str], str]
    answer: Callable[[str | None, str], str]


TO_JOIN = Ways("join", STREAM, raw, beat, answer)
TO_WORKERS = Ways("worker", FRAMES_STREAM, frames, frames_beat, frames_answer)


def inbox(user: str) -> str:
    """Return the prefix of the subjects at which a user of the broker gets answers to requests, which no other may hear."""
    return f"_INBOX_{token(user)}" if user else "_INBOX"


def is_of(subject: str, run: str, node: str) -> bool:
    """Return whether a subject is of a run and a node, which a message's body names, but does not prove."""
    tokens = subject.split(".")
    return len(tokens) > 2 and tokens[1] == token(run) and tokens[-1] == token(node)


def _with_partition(kind: str, run: str | None, node: str) -> str:
    return f"sn.{_run_token(run)}.{kind}.{partition_of(node)}.{token(node)}"


def _run_token(run: str | None) -> str:
    return "*" if run is None else token(run)
