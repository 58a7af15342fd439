"""As whom the broker is spoken to, by a file that only its owner may read: a login, or the credentials of operator mode."""

from __future__ import annotations

import base64
import re
import stat
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from sentinel.errors import ConfigError
from sentinel.printable import printable

LOGIN_LINES = "two lines, user and password"
CREDS_PARTS = "a user's JWT and the seed of its nkey, as `nsc generate creds` writes them"
_JWT = re.compile(r"-{3,}BEGIN NATS USER JWT-{3,}\s+([A-Za-z0-9_.-]+)\s+-{3,}END")
_SEED = re.compile(r"-{3,}BEGIN USER NKEY SEED-{3,}\s+(SU[A-Z2-7]+)\s+-{3,}END")

AUTHORITY_WORDS = ("authorization", "authentication")
"""One of these is in what a server says as it ends a connection whose credentials it takes no more: they expired, or were
revoked, or a configuration that it read again knows them no more. After a refusal of permissions it goes on."""


class Login(NamedTuple):
    """A user of the server's own configuration."""

    user: str
    password: str


class _Claims(msgspec.Struct, frozen=True):
    """What of the claims of a JWT is looked at here; whether they hold the server decides."""

    sub: str
    """Public key of whom they are about."""
    name: str = ""


class NkeyCredentials(NamedTuple):
    """A user of a server in operator mode."""

    user: str
    """The name in the claims."""
    jwt: str
    seed: str

    def sign(self, nonce: str) -> bytes:
        """Return the signature by which the server knows that we have the seed, in base64."""
        signed: bytes = _key_pair(self.seed).sign(nonce.encode())
        return base64.b64encode(signed)


def read_login(path: Path) -> Login:
    """Return the login in a file; ConfigError."""
    lines = _private_text(path, LOGIN_LINES).splitlines()
    if len(lines) < 2 or not lines[0]:
        raise ConfigError(f"{path}: expected {LOGIN_LINES}, got {len(lines)}")
    return Login(lines[0], lines[1])


def read_credentials(path: Path) -> NkeyCredentials:
    """Return the credentials in a file; ConfigError, also where the package `nkeys` is not installed."""
    text = _private_text(path, CREDS_PARTS)
    jwt, seed = _JWT.search(text), _SEED.search(text)
    if jwt is None or seed is None:
        raise _not_credentials(path, "no seed" if jwt else "no JWT")
    nkeys, claims = _nkeys(), _claims_of(path, jwt[1])
    try:
        key: str = _key_pair(seed[1]).public_key.decode()
    except (nkeys.NkeysError, ValueError) as error:
        raise _not_credentials(path, f"a seed that is none ({error})") from error
    if key != claims.sub:
        raise _not_credentials(path, f"a JWT of {printable(claims.sub)} and the seed of {key}")
    return NkeyCredentials(claims.name, jwt[1], seed[1])


def _claims_of(path: Path, jwt: str) -> _Claims:
    body = jwt.split(".")[1] if jwt.count(".") == 2 else ""
    try:
        claims = msgspec.json.decode(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)), type=_Claims)
    except (ValueError, msgspec.DecodeError) as error:
        raise _not_credentials(path, f"a JWT that cannot be read ({error})") from error
    if not claims.name:
        # The user's inbox is by its name.
        raise _not_credentials(path, "a JWT that does not name its user")
    return claims


def _not_credentials(path: Path, what: str) -> ConfigError:
    return ConfigError(f"{path}: expected {CREDS_PARTS}, got {what}; have it written anew")


def _private_text(path: Path, expected: str) -> str:
    try:
        mode, text = path.stat().st_mode, path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: expected {expected}, got: {error}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            f"{path}: expected a file that only its owner may read, got mode {stat.S_IMODE(mode):04o}; chmod 600"
        )
    return text


def _key_pair(seed: str) -> Any:
    return _nkeys().from_seed(bytearray(seed.encode()))


def _nkeys() -> Any:
    try:
        import nkeys
    except ImportError as error:
        raise ConfigError('--creds needs the signatures of NATS: pip install "sentinel[fleet]" (nkeys)') from error
    return nkeys
