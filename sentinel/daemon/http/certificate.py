"""Certificate: the pair that TLS shows, read again when its files change. A broken pair leaves the former one in force."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime
from pathlib import Path

from sentinel.errors import ConfigError

Stamp = tuple[tuple[int, int, int], ...]


class Certificate:
    """A certificate and its key, as files in PEM. Connections that stand keep what they began with."""

    def __init__(self, cert: Path, key: Path) -> None:
        """Read the pair; ConfigError when it cannot be used."""
        self._files = (cert, key)
        self._seen = self._stamp()
        self._newest, self.expires = self._read()
        self.problem = ""
        """Why the files as they are now are not in force; empty: they are."""
        self.context = _context()
        """For the listening socket. Whoever connects is shown the newest pair."""
        self.context.load_cert_chain(cert, key, _no_password)
        self.context.sni_callback = self._choose

    def refresh(self) -> None:
        """Take a new pair in where the files have changed."""
        stamp = self._stamp()
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            self._newest, self.expires = self._read()
        except ConfigError as error:
            until = datetime.fromtimestamp(self.expires, UTC)
            self.problem = f"the former certificate is in use, until {until:%Y-%m-%d %H:%M} UTC: {error}"
        else:
            self.problem = ""

    def _choose(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = self._newest

    def _read(self) -> tuple[ssl.SSLContext, float]:
        cert, key = self._files
        context = _context()
        try:
            context.load_cert_chain(cert, key, _no_password)
            return context, expiry(cert.read_text("ascii"))
        except ssl.SSLError as error:
            reason = error.reason or str(error)
            raise ConfigError(
                f"http.tls_cert {cert}: expected a certificate in PEM whose key, not encrypted, is {key}; got: {reason}"
            ) from error
        except (OSError, ValueError, IndexError) as error:
            raise ConfigError(f"http.tls_cert {cert}, key {key}: {getattr(error, 'strerror', None) or error}") from error

    def _stamp(self) -> Stamp:
        found = []
        for path in self._files:
            try:
                status = path.stat()
                found.append((status.st_mtime_ns, status.st_ino, status.st_size))
            except OSError:
                found.append((0, 0, 0))
        return tuple(found)


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _no_password() -> str:
    """OpenSSL would ask for one at the terminal."""
    return ""


def expiry(pem: str) -> float:
    """Return when the first certificate of a PEM text ends to be valid, in seconds since the epoch; ValueError, IndexError.

    Source: RFC 5280, section 4.1: Certificate, tbsCertificate, and in it, behind an optional version, serial number,
    signature and issuer, the validity.
    """
    end = "-----END CERTIFICATE-----"
    first = pem[pem.index("-----BEGIN CERTIFICATE-----") : pem.index(end) + len(end)]
    [(_, certificate)] = _elements(ssl.PEM_cert_to_DER_cert(first))
    fields = _elements(_elements(certificate)[0][1])
    validity = fields[4 if fields[0][0] == 0xA0 else 3][1]
    tag, not_after = _elements(validity)[1]
    form = "%y%m%d%H%M%SZ" if tag == 0x17 else "%Y%m%d%H%M%SZ"
    return datetime.strptime(not_after.decode("ascii"), form).replace(tzinfo=UTC).timestamp()


def _elements(der: bytes) -> list[tuple[int, bytes]]:
    """Return (tag, content) of the elements that lie one behind the other in DER."""
    found, at = [], 0
    while at < len(der):
        tag, length, at = der[at], der[at + 1], at + 2
        if length & 0x80:
            num_bytes = length & 0x7F
            length, at = int.from_bytes(der[at : at + num_bytes]), at + num_bytes
        found.append((tag, der[at : at + length]))
        at += length
    return found
