"""Which run and which attempt this process belongs to: agreed once at attach, without a collective."""

from __future__ import annotations

import datetime
import itertools
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch.distributed as dist

from sentinel.collect.environment import Environment
from sentinel.errors import StoreError
from sentinel.monitor_config import MonitorConfig
from sentinel.private_files import create_file, make_directory, refuse_foreign, tighten
from sentinel.run_name import folder_name, given_name, numbered

log = logging.getLogger("sentinel")

NO_ATTEMPT = 0xFFFFFFFF
AGREE_TIMEOUT_S = 5.0

_attaches = itertools.count()


class RankAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """The run and the attempt to which this incarnation belongs."""

    run: str
    attempt: int
    """0-based; NO_ATTEMPT when rank 0 did not say in time: the daemon then opens a new one."""
    directory: Path
    """`<runs>/<run>`, made, private."""
    is_alone: bool = False
    """This rank had nothing, such as a store or a launcher's id, by which to agree with others on a run."""
    start: str = ""
    """The incarnation of the rank 0 that decided, in hexadecimal digits; empty: there was no store to agree through."""


def agree(
    config: MonitorConfig, environment: Environment, incarnation: bytes, is_taken: Callable[[Path, str], bool]
) -> RankAttempt:
    """Return run and attempt, the same on every rank.

    With torch.distributed rank 0 decides and tells through the default store: one bounded read (5 s). Without it the
    launcher's id and restart count decide, else this process is an attempt of its own.

    A training is a run of its own: without a name that the user gave, each attach of this process is; of a name that was
    given, one that is attached while another of this process is alive under it. Another one after that is an attempt.

    is_taken: tells whether a monitor of this process is alive in a run. Raises StoreError when the run directory is not
    private to this user; OSError when it cannot be made.
    """
    base = Path(config.directory) if config.directory else environment.directory
    given = config.run or environment.run
    number = next(_attaches)

    def choose(launch: str | None) -> tuple[str, int, Path]:
        run = folder_name(given or environment.job or _fresh_name())
        if not given:
            run = f"{run}-{number + 1}" if number else run
        elif is_taken(base, run):
            run = next(one for n in itertools.count(2) if not is_taken(base, one := numbered(run, n)))
        directory = private_directory(base, run)
        key = f"{launch}#{number}" if launch and number else launch or incarnation.hex()
        return run, _claim(directory, key, given or given_name(run)), directory

    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        run, attempt, directory = choose(environment.launch)
        return RankAttempt(run=run, attempt=attempt, directory=directory, is_alone=not (given or environment.job))
    key = f"sentinel/attach/{number}"
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        try:
            run, attempt, directory = choose(None)
        except (OSError, StoreError) as error:
            store.set(key, msgspec.json.encode(["", str(error)]).decode())
            raise
        store.set(key, msgspec.json.encode([run, attempt, incarnation.hex()]).decode())
        return RankAttempt(run=run, attempt=attempt, directory=directory, start=incarnation.hex())
    try:
        store.wait([key], datetime.timedelta(seconds=AGREE_TIMEOUT_S))
        run, attempt, *start = msgspec.json.decode(store.get(key))
    except (RuntimeError, dist.DistError):
        run, attempt, start = folder_name(given or environment.job or "unplaced"), NO_ATTEMPT, []
    if not run:
        raise StoreError(f"rank 0 could not make the run directory: {attempt}")
    return RankAttempt(run=run, attempt=attempt, directory=private_directory(base, run), start="".join(start))


def private_directory(base: Path, run: str) -> Path:
    """Make `<base>/<run>`, and what is missing above it, with mode 0700, and return it; StoreError when others own it.

    One of ours that others may write is taken from them, and that is said.
    """
    directory = base / run
    for one in (directory, *(directory / part for part in ("attempts", "spool", "control"))):
        make_directory(one)
        if said := tighten(one):
            log.warning("sentinel: %s", said)
        refuse_foreign(one)
    return directory


def _fresh_name() -> str:
    return time.strftime("%Y%m%d-%H%M%S") + f"-{os.getpid()}"


def _claim(directory: Path, key: str, name: str) -> int:
    """Find the attempt made for `key`, or make the next: O_EXCL decides between processes."""
    folder = directory / "attempts"
    taken = {}
    for path in folder.glob("*.json"):
        if path.stem.isdigit():
            taken[int(path.stem)] = path
    for number, path in taken.items():
        try:
            if msgspec.json.decode(path.read_bytes()).get("key") == key:
                return number
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, AttributeError):
            continue
    number = max(taken, default=-1) + 1
    while True:
        path = folder / f"{number}.json"
        draft = folder / f".{number}-{os.getpid()}"
        with os.fdopen(create_file(draft, os.O_WRONLY | os.O_TRUNC), "wb") as file:
            file.write(msgspec.json.encode({"attempt": number, "key": key, "time": time.time(), "name": name}))
        try:
            os.link(draft, path)
            return number
        except FileExistsError:
            if msgspec.json.decode(path.read_bytes()).get("key") == key:
                return number
            number += 1
        finally:
            draft.unlink()
