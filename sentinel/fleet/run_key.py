"""RunKey: what joins sign their answers with, and nodes their beats: who has it not commands nobody and speaks for no node.

HMAC-SHA256, of the standard library: both ends are one owner's, so that signatures which all may check (Ed25519, of a
package that is no dependency) would prove nothing more. The signature travels in a header, over the subject and all bytes.
"""

from __future__ import annotations

import hashlib
import hmac
import stat
from collections.abc import Mapping
from pathlib import Path

from sentinel.errors import ConfigError

UNSIGNED = "expected a signature by our key, got none or another's; give ship and join the same --key"
HEADER = "Sentinel-Signature"
MIN_BYTES = 32
"""Least bytes of a key: those of the digest."""


class RunKey:
    """One key of one fleet."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    @classmethod
    def read(cls, path: Path) -> RunKey:
        """Return the key in a file that only its owner may read; ConfigError."""
        try:
            mode, key = path.stat().st_mode, path.read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"--key: {path}: expected a file, got: {error.strerror or error}") from error
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(
                f"--key: {path}: expected a file that only its owner may read, got mode {stat.S_IMODE(mode):04o}; chmod 600"
            )
        if len(key) < MIN_BYTES:
            raise ConfigError(
                f"--key: {path}: expected {MIN_BYTES} bytes at least, got {len(key)}; "
                f"openssl rand -hex 32 > {path} makes one"
            )
        return cls(key)

    def headers(self, subject: str, data: bytes) -> dict[str, str]:
        """Return the headers of a message that we send."""
        return {HEADER: self._signature(subject, data)}

    def has_signed(self, subject: str, data: bytes, headers: Mapping[str, str] | None) -> bool:
        """Return whether a message was signed with this key, for this subject."""
        return hmac.compare_digest(self._signature(subject, data).encode(), (headers or {}).get(HEADER, "").encode())

    def _signature(self, subject: str, data: bytes) -> str:
        return hmac.new(self._key, subject.encode() + b"\n" + data, hashlib.sha256).hexdigest()
