"""Notifications to systemd: ready, alive, reloading, stopping (sd_notify(3)). Silent where there is no systemd."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping
from typing import Self


class Systemd:
    """Talks to the socket that systemd named in NOTIFY_SOCKET.

    address: its path, or a name in the abstract namespace beginning with "@"; empty: nobody listens.
    watchdog_us: WATCHDOG_USEC; 0: no watchdog.
    """

    def __init__(self, address: str = "", watchdog_us: int = 0) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._interval_s = watchdog_us / 2e6
        self._due = 0.0

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Self:
        """Return who listens to this process, by the variables that systemd gave it."""
        watchdog = environ.get("WATCHDOG_USEC", "")
        is_ours = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        return cls(environ.get("NOTIFY_SOCKET", ""), int(watchdog) if is_ours and watchdog.isdecimal() else 0)

    def ready(self) -> None:
        """Say that the daemon serves; ends a reload as well."""
        self._send("READY=1")

    def alive(self) -> None:
        """Feed the watchdog, at half its interval; cheap to call often."""
        now = time.monotonic()
        if self._interval_s and now >= self._due:
            self._due = now + self._interval_s
            self._send("WATCHDOG=1")

    def reloading(self) -> None:
        """Say that rules are being read again; `ready` ends it."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """Say that the daemon ends."""
        self._send("STOPPING=1")

    def _send(self, text: str) -> None:
        if not self._address:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as to:
            to.connect(self._address)
            to.send(text.encode())
