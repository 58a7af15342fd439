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
    socket: str = ""
    """Path of a unix socket, mode 0600, to listen on instead of an address; empty: host and port."""
    tls_cert: str = ""
    """Certificate chain in PEM; read again when it changes. Empty: no TLS."""
    tls_key: str = ""
    """Private key of it in PEM, not encrypted."""
    has_insecure_tokens: bool = False
    """Listen without TLS where others can see what passes: an address that is not loopback."""
    has_open_reads: bool = False
    """Answer reads without a token on any address, not only on loopback."""
    has_token_reads: bool = False
    """Ask for a token for reads on loopback and on a unix socket too."""
    allowed_hosts: tuple[str, ...] = ()
    """Further names that a Host header may carry: a service's name, a proxy's."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"http.port must be in [0, 65535], got {self.port}")
        if bool(self.tls_cert) != bool(self.tls_key):
            missing = "http.tls_key" if self.tls_cert else "http.tls_cert"
            raise ConfigError(f"{missing} must name a file, got none; a certificate and its key belong together")
        if self.has_open_reads and self.has_token_reads:
            raise ConfigError("http.has_open_reads and http.has_token_reads must not both be set")
        if not (self.is_local or self.has_tls or self.has_insecure_tokens):
            raise ConfigError(
                f"http.listen {self.host}:{self.port}: without TLS whoever sees the traffic learns the tokens; "
                "give --tls-cert and --tls-key, listen on loopback behind a proxy or a tunnel, or allow it by name: "
                "--insecure-tokens"
            )

    @property
    def has_tls(self) -> bool:
        """Whether connections are encrypted."""
        return bool(self.tls_cert)

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        if self.socket or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def are_reads_open(self) -> bool:
        """Whether reads are answered without a token."""
        return self.has_open_reads or (self.is_local and not self.has_token_reads)

    @classmethod
    def parse(cls, listen: str, **others: Any) -> HttpConfig:
        """Return the configuration for `HOST:PORT` (`127.0.0.1:9464`, `[::1]:0`, `:9464` for loopback) or `unix:/PATH`."""
        kind, _, path = listen.partition(":")
        if kind == "unix":
            if not path.startswith("/"):
                raise ConfigError(f'http.listen must be unix:/PATH with a whole path, got "{listen}"')
            return cls(socket=path, **others)
        host, colon, port = listen.rpartition(":")
        if not colon or not (port.isascii() and port.isdigit()):
            raise ConfigError(
                f'http.listen must be HOST:PORT or unix:/PATH, got "{listen}"; for a free port write 127.0.0.1:0'
            )
        return cls(host=host.strip("[]") or "127.0.0.1", port=int(port), **others)
