"""Start N ranks of a training script on this machine: a small stand-in for torchrun that is up in no time.

    python examples/gpt/launch.py -n 4 -- examples/gpt/train.py --steps 100

When a rank fails the others are ended; SIGINT and SIGTERM reach all of them. Exits with the first rank's code that is
not 0.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from types import FrameType

GRACE_S = 5.0


def main() -> int:
    parser = argparse.ArgumentParser(description="Start N ranks of a script on this machine.")
    parser.add_argument("-n", "--num-ranks", type=int, default=4)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- SCRIPT [ARGUMENT ...]")
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("no script given")
    ranks = start_ranks(command, options.num_ranks)
    stopping = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    while not stopping and any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
        time.sleep(0.05)
    first = next((code for code in (rank.poll() for rank in ranks) if code), 0)
    end_ranks(ranks)
    return 143 if stopping and not first else first if first >= 0 else 128 - first


def start_ranks(command: list[str], num_ranks: int) -> list[subprocess.Popen[bytes]]:
    """Start `command`, a script and its arguments, once a rank, under this interpreter."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        **os.environ,
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    return [
        subprocess.Popen([sys.executable, *command], env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(num_ranks)
    ]


def end_ranks(ranks: list[subprocess.Popen[bytes]]) -> None:
    """End what still runs: asked first, after GRACE_S made to."""
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
    deadline = time.monotonic() + GRACE_S
    for rank in ranks:
        try:
            rank.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


if __name__ == "__main__":
    sys.exit(main())
