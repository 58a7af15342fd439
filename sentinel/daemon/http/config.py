"""HttpConfig: where the daemon listens and what it answers without a token."""

from __future__ import annotations

import ipaddress
from typing import Any

import msgspec

from sentinel.errors import ConfigError


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the daemon listens and what it answers without a token."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 0
    """TCP port; 0: a free one, written to `<state-dir>/http.json`."""
    has_open_reads: bool = False
    """Answer reads without a token on any address, not only on loopback."""
    allowed_hosts: tuple[str, ...] = ()
    """Further names that a Host header may carry: a service's name, a proxy's."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"http.port must be in [0, 65535], got {self.port}")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @classmethod
    def parse(cls, listen: str, **others: Any) -> HttpConfig:
        """Return the configuration for `HOST:PORT` (`127.0.0.1:9464`, `[::1]:0`, `:9464` for loopback)."""
        host, colon, port = listen.rpartition(":")
        if not colon or not (port.isascii() and port.isdigit()):
            raise ConfigError(f'http.listen must be HOST:PORT, got "{listen}"; for a free port write 127.0.0.1:0')
        return cls(host=host.strip("[]") or "127.0.0.1", port=int(port), **others)
