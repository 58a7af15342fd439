"""Ports for servers of the tests that no outgoing connection of a busy machine takes meanwhile."""

from __future__ import annotations

import random
import socket
from pathlib import Path

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST = 10_000


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free and outside the range from which the kernel gives ports by itself.

    A port asked for as 0, given back and used a second later may by then be the near end of another test's connection.
    """
    highest = int(RANGE.read_text().split()[0]) - 1 if RANGE.exists() else 32_767
    if highest <= LOWEST:
        highest = 32_767
    for _ in range(1_000):
        port = random.SystemRandom().randint(LOWEST, highest)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no port of 127.0.0.1 is free between {LOWEST} and {highest}")
