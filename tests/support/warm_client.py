"""The stand-in of `warm.py`: hands itself over to the server at ADDRESS, and ends as the program there does."""

import contextlib
import json
import os
import signal
import socket
import sys

FORWARDED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}


def main(address: str) -> None:
    """Run the program to its end."""
    # Until the program's number is known a signal waits.
    blocked = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)]
    mask = os.umask(0)
    os.umask(mask)
    ignored = [int(number) for number in FORWARDED if signal.getsignal(number) is signal.SIG_IGN]
    folder = os.getcwd()  # noqa: PTH109  (pathlib takes longer to import than all of this)
    reported = json.dumps([sys.argv[1:], dict(os.environ), folder, mask, ignored, blocked]).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**20)
        server.connect(address)
        socket.send_fds(server, [reported], [0, 1, 2])
        pid = int(server.recv(64))
        for number in FORWARDED:
            signal.signal(number, lambda number, _: forward(pid, number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        code = int(server.recv(64) or b"-9")
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def forward(pid: int, number: int) -> None:
    """Send a signal to the program and its children."""
    with contextlib.suppress(ProcessLookupError):
        try:
            os.killpg(pid, number)
        except ProcessLookupError:  # It has no session of its own yet.
            os.kill(pid, number)


main(ADDRESS)  # noqa: F821  (set in the line before this text)
