"""Who may read and who may command over HTTP: two bearer tokens in a file that only the owner can read."""

from __future__ import annotations

import enum
import hmac
import os
import secrets
import stat
from pathlib import Path

import msgspec

from sentinel.errors import MALFORMED, ConfigError
from sentinel.private_files import create_file


class Scope(enum.IntEnum):
    """What a request may do; the larger includes the smaller."""

    NOTHING = 0
    READ = 1
    CONTROL = 2


class Tokens(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`<state-dir>/tokens.json`: made at the first start, 0600; edit it and restart to change a token."""

    read: str
    """Opens everything that only reads."""
    control: str
    """Opens commands and reloads as well."""

    def __post_init__(self) -> None:
        for name, token in (("read", self.read), ("control", self.control)):
            if len(token) < 16:
                raise ConfigError(f"tokens.{name} must have at least 16 characters, got {len(token)}")
        if self.read == self.control:
            raise ConfigError("tokens.read and tokens.control must differ, got the same text twice")

    def scope(self, authorization: str) -> Scope:
        """Return what the value of an Authorization header opens. Takes the same time for every wrong token."""
        kind, _, token = authorization.partition(" ")
        if kind.lower() != "bearer":
            return Scope.NOTHING
        given = token.strip().encode("utf-8", "surrogateescape")
        may_control = hmac.compare_digest(given, self.control.encode())
        may_read = hmac.compare_digest(given, self.read.encode())
        return Scope.CONTROL if may_control else Scope.READ if may_read else Scope.NOTHING


def load_tokens(state_dir: Path) -> Tokens:
    """Return the tokens of `<state_dir>/tokens.json`, made when there is none.

    Raises ConfigError for a file that others can read, that is not ours, or that is no such file.
    """
    path = state_dir / "tokens.json"
    try:
        fd = create_file(path, os.O_WRONLY | os.O_EXCL)
    except FileExistsError:
        return read_tokens(path)
    tokens = Tokens(read=secrets.token_urlsafe(24), control=secrets.token_urlsafe(24))
    with os.fdopen(fd, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(tokens)) + b"\n")
    return tokens


def read_tokens(path: Path) -> Tokens:
    """Return the tokens of a file that only its owner, us, can read; ConfigError for any other."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"{path}: expected a file of tokens, got: {error.strerror}") from error
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(
                f"{path}: expected a file that only user {os.geteuid()} can read, got owner {status.st_uid} and mode "
                f"{stat.S_IMODE(status.st_mode):04o}; run: chmod 600 {path} (and change the tokens: others may know them)"
            )
        try:
            return msgspec.json.decode(file.read(65536), type=Tokens)
        except MALFORMED as error:
            raise ConfigError(f"{path}: {error}; remove the file to have new tokens made") from error
