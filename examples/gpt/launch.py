"""Start N ranks of a training script on this machine: a small stand-in for torchrun that is up in no time.

    python examples/gpt/launch.py -n 4 -- examples/gpt/train.py --steps 100
    python examples/gpt/launch.py -n 2 --nnodes 2 --node-rank 0 --master-port 29500 -- examples/gpt/train.py   # and rank 1

torch is imported once and the ranks are forked off, each a process of its own all the same. When a rank fails the others
are ended; SIGINT and SIGTERM reach all of them. Exits with the first rank's code that is not 0.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import random
import runpy
import signal
import socket
import sys
import time
from pathlib import Path
from types import FrameType

GRACE_S = 5.0
PRELOADED = ("torch", "torch.distributed.pipelining", "torch.distributed.tensor.parallel")


def main() -> int:
    parser = argparse.ArgumentParser(description="Start N ranks of a script on this machine.")
    parser.add_argument("-n", "--num-ranks", type=int, default=4)
    parser.add_argument("--nnodes", type=int, default=1, help="launchers of one training; default 1")
    parser.add_argument("--node-rank", type=int, default=0, help="which of them this is, from 0")
    parser.add_argument("--master-port", type=int, default=0, help="where ranks meet, the same for all; 0: a free port")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- SCRIPT [ARGUMENT ...]")
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("no script given")
    if options.nnodes > 1 and not options.master_port:
        parser.error("--nnodes needs a --master-port, the same for all")
    ranks = start_ranks(
        command, options.num_ranks, num_nodes=options.nnodes, node_rank=options.node_rank, port=options.master_port
    )
    stopping = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    while not stopping and any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
        time.sleep(0.05)
    # Of several that ended within one look those that a signal killed were first: others lose their connection to them.
    first = min((code for code in (rank.poll() for rank in ranks) if code), default=0)
    end_ranks(ranks)
    return 143 if stopping and not first else first if first >= 0 else 128 - first


class Rank:
    """One rank: a fork of this process that runs the script as `__main__`."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self._code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.environ.update(environment)
            sys.argv = command
            sys.path[0] = str(Path(command[0]).resolve().parent)
            runpy.run_path(command[0], run_name="__main__")
            sys.exit()

    def poll(self) -> int | None:
        """Return the exit code, below 0 the signal that ended it; None: it still runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless it is over."""
        if self.poll() is None:
            os.kill(self.pid, number)


def start_ranks(command: list[str], num_ranks: int, *, num_nodes: int = 1, node_rank: int = 0, port: int = 0) -> list[Rank]:
    """Start `command`, a script and its arguments, once a rank of this node, under this interpreter."""
    os.environ.update(
        WORLD_SIZE=str(num_ranks * num_nodes),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port or free_port()),
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",  # Read when torch is imported.
    )
    for name in PRELOADED:
        importlib.import_module(name)
    first = num_ranks * node_rank
    return [Rank(command, {"RANK": str(first + rank), "LOCAL_RANK": str(rank)}) for rank in range(num_ranks)]


def free_port() -> int:
    """Return a free port below those that the kernel gives to outgoing connections: none of them takes it meanwhile."""
    for port in random.SystemRandom().sample(range(10_000, 32_768), 1_000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise SystemExit("launch.py: no port of 127.0.0.1 between 10000 and 32767 is free")


def end_ranks(ranks: list[Rank]) -> None:
    """End what still runs: asked first, after GRACE_S made to."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for rank in ranks:
            rank.send(number)
        deadline = time.monotonic() + GRACE_S
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main())
