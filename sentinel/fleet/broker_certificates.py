"""Certificates of a broker of one machine: an authority of its own and what it vouches for, made anew before they expire."""

from __future__ import annotations

import datetime
import ipaddress
import os
from pathlib import Path

from sentinel.errors import ConfigError
from sentinel.private_files import create_file

AUTHORITY = "Sentinel fleet of one machine"
VALID_DAYS = 365
RENEWED_DAYS = 90
"""Certificates that are valid for less are made anew when the broker starts."""


class BrokerCertificates:
    """`ca.pem`, by which clients know the server, `cert.pem` and `key.pem` in a folder.

    The authority's own key is kept nowhere: nobody can have it vouch for anything else.
    """

    def __init__(self, folder: Path) -> None:
        self.authority, self.certificate, self.key = folder / "ca.pem", folder / "cert.pem", folder / "key.pem"

    def renew(self, now: datetime.datetime) -> bool:
        """Make them where there are none, or where they expire soon; return whether they are new. ConfigError, OSError.

        now: in UTC.
        """
        try:
            from cryptography import x509
        except ImportError as error:
            raise ConfigError(
                'certificates are made with the package cryptography, and it is not here: pip install "sentinel[fleet]"'
            ) from error
        try:
            until = min(
                x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
                for path in (self.authority, self.certificate)
            )
            if self.key.exists() and until - now > datetime.timedelta(days=RENEWED_DAYS):
                return False
        except (OSError, ValueError):
            pass
        self._make(now)
        return True

    def _make(self, now: datetime.datetime) -> None:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID

        def named(words: str) -> x509.Name:
            return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, words)])

        def begun(words: str, key: ec.EllipticCurvePrivateKey, *, is_authority: bool) -> x509.CertificateBuilder:
            usage = x509.KeyUsage(
                digital_signature=not is_authority, key_cert_sign=is_authority, crl_sign=False, content_commitment=False,
                key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False,
                decipher_only=False,
            )  # fmt: skip
            constraints = x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None)
            return (
                x509.CertificateBuilder()
                .subject_name(named(words))
                .issuer_name(named(AUTHORITY))
                .public_key(key.public_key())
                .serial_number(x509.random_serial_number())
                .not_valid_before(now - datetime.timedelta(hours=1))
                .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
                .add_extension(constraints, critical=True)
                .add_extension(usage, critical=True)
            )

        authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        vouched = x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key())
        of_authority = (
            begun(AUTHORITY, authority_key, is_authority=True)
            .add_extension(vouched, critical=False)
            .sign(authority_key, hashes.SHA256())
        )
        of_server = (
            begun("localhost", key, is_authority=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(vouched), critical=False)
            .sign(authority_key, hashes.SHA256())
        )
        _write(self.authority, of_authority.public_bytes(serialization.Encoding.PEM))
        _write(self.certificate, of_server.public_bytes(serialization.Encoding.PEM))
        plain = serialization.NoEncryption()
        _write(self.key, key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))


def _write(path: Path, data: bytes) -> None:
    with os.fdopen(create_file(path, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW), "wb") as file:
        file.write(data)
