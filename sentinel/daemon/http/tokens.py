"""Who may read, act and command over HTTP: bearer tokens in a file that only the owner can read."""

from __future__ import annotations

import base64
import binascii
import enum
import hmac
import os
import secrets
import stat
from pathlib import Path

import msgspec

from sentinel.errors import MALFORMED, ConfigError
from sentinel.private_files import create_file

MAX_TOKENS = 16
"""Most tokens of one scope: the new one, those that leave, and one a reader."""


class Scope(enum.IntEnum):
    """What a request may do; the larger includes the smaller."""

    NOTHING = 0
    READ = 1
    SILENCE = 2
    """Acts on incidents and silences, never on trainers."""
    CONTROL = 3


class Tokens(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`<state-dir>/tokens.json`: made at the first start, 0600, and read again when it changes.

    Each scope has a token or a list of them: to rotate one, add the new one, change the clients, and take the old one out.
    """

    read: str | tuple[str, ...]
    """Opens everything that only reads."""
    control: str | tuple[str, ...]
    """Opens commands to trainers and reloads as well."""
    silence: str | tuple[str, ...] = ()
    """Opens what people do about incidents and messages, beside reads: acknowledge, resolve, silence."""

    def __post_init__(self) -> None:
        scopes: dict[str, Scope] = {}
        for scope in (Scope.READ, Scope.SILENCE, Scope.CONTROL):
            name = scope.name.lower()
            own = self.of(scope)
            if len(own) > MAX_TOKENS:
                raise ConfigError(f"tokens.{name} must have at most {MAX_TOKENS} tokens, got {len(own)}")
            for token in own:
                if len(token) < 16:
                    raise ConfigError(f"tokens.{name} must have at least 16 characters, got {len(token)}")
                if scopes.setdefault(token, scope) is not scope:
                    raise ConfigError(
                        f"tokens.{name} must differ from tokens.{scopes[token].name.lower()}, got the same text"
                    )
        if not self.of(Scope.CONTROL):
            raise ConfigError("tokens.control must have a token, got none")

    def of(self, scope: Scope) -> tuple[str, ...]:
        """Return the tokens of a scope itself."""
        own: str | tuple[str, ...] = getattr(self, scope.name.lower())
        return (own,) if isinstance(own, str) else own

    def scope(self, authorization: str) -> Scope:
        """Return what the value of an Authorization header opens. Takes the same time for every wrong token.

        `Basic` is for browsers, with any name and a token as the password: it opens reads alone, for a browser sends it
        with every request, whoever made it ask.
        """
        kind, _, rest = authorization.partition(" ")
        kind = kind.lower()
        given = rest.strip().encode("utf-8", "surrogateescape")
        if kind == "basic":
            given = _password(given)
        elif kind != "bearer":
            return Scope.NOTHING
        found = Scope.NOTHING
        for scope in (Scope.READ, Scope.SILENCE, Scope.CONTROL):
            for token in self.of(scope):
                if hmac.compare_digest(given, token.encode()):
                    found = scope
        return min(found, Scope.READ) if kind == "basic" else found


def _password(encoded: bytes) -> bytes:
    try:
        return base64.b64decode(encoded, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


def load_tokens(state_dir: Path) -> Tokens:
    """Return the tokens of `<state_dir>/tokens.json`, made when there is none.

    Raises ConfigError for a file that others can read, that is not ours, or that is no such file.
    """
    path = state_dir / "tokens.json"
    try:
        fd = create_file(path, os.O_WRONLY | os.O_EXCL)
    except FileExistsError:
        return read_tokens(path)
    tokens = Tokens(*(secrets.token_urlsafe(24) for _ in Tokens.__struct_fields__))
    with os.fdopen(fd, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(tokens)) + b"\n")
    return tokens


def read_tokens(path: Path) -> Tokens:
    """Return the tokens of a file that only its owner, us, can read; ConfigError for any other."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"{path}: expected a file of tokens, got: {error.strerror}") from error
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path}: expected a file of tokens, got something that is no plain file")
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(
                f"{path}: expected a file that only user {os.geteuid()} can read, got owner {status.st_uid} and mode "
                f"{stat.S_IMODE(status.st_mode):04o}; run: chmod 600 {path} (and change the tokens: others may know them)"
            )
        try:
            return msgspec.json.decode(file.read(65536), type=Tokens)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        except MALFORMED as error:
            raise ConfigError(f"{path}: {error}; remove the file to have new tokens made") from error
