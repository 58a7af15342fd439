"""OwnBroker: a nats-server of this machine for a fleet: its program, its configuration, and the credentials of its users."""

from __future__ import annotations

import datetime
import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

import msgspec

from sentinel.errors import ConfigError
from sentinel.fleet.broker import BrokerConfig
from sentinel.fleet.broker_certificates import BrokerCertificates
from sentinel.fleet.broker_users import STATUS, write_users
from sentinel.private_files import create_file, make_directory

PROGRAM = "nats-server"
MIN_VERSION = (2, 9)
"""Oldest server that a fleet is tested with; before it consumers cannot be kept in memory."""

ANSWERS_S = 1.0
"""A server of this machine that has not answered for so long is not up yet."""
MAX_GREETING_BYTES = 4096


class OwnBroker:
    """Listens at 127.0.0.1, with TLS, and lets in only users of its own, each with no more rights than it needs."""

    def __init__(self, directory: Path, nodes: list[str], port: int) -> None:
        """directory: for `broker/`, the server's files, and `credentials/`, what its users are to have."""
        self._folder, self.credentials = directory / "broker", directory / "credentials"
        self._nodes, self._port = nodes, port

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"tls://127.0.0.1:{self._port}"

    @property
    def command(self) -> list[str]:
        """How it is started."""
        return [_program(), "-c", str(self._folder / "nats.conf")]

    @property
    def is_up(self) -> bool:
        """Whether it answers where it listens. The whole handshake is done: of one that is broken off it logs an error."""
        host, _, port = self.url.removeprefix("tls://").rpartition(":")
        tls = self.access(STATUS).tls()
        assert tls is not None
        try:
            with socket.create_connection((host, int(port)), ANSWERS_S) as connection:
                # Its greeting comes in the clear.
                connection.recv(MAX_GREETING_BYTES)
                with tls.wrap_socket(connection, server_hostname=host):
                    return True
        except OSError:
            return False

    def access(self, user: str) -> BrokerConfig:
        """Return how it is reached by one of its users."""
        return BrokerConfig(
            server=self.url, ca_file=str(self.credentials / "ca.pem"), login_file=str(self.credentials / user)
        )

    def prepare(self) -> None:
        """Write certificates, logins and configuration, as far as they are not there; ConfigError, OSError."""
        _refuse_old(_program())
        make_directory(self._folder)
        accounts = write_users(self.credentials, self._nodes)
        certificates = BrokerCertificates(self._folder)
        certificates.renew(datetime.datetime.now(datetime.UTC))
        _write(self.credentials / "ca.pem", certificates.authority.read_text())
        quoted = {
            name: msgspec.json.encode(str(path)).decode()
            for name, path in (
                ("store", self._folder / "store"),
                ("certificate", certificates.certificate),
                ("key", certificates.key),
            )
        }
        _write(
            self._folder / "nats.conf",
            f'listen: "127.0.0.1:{self._port}"\n'
            f"jetstream {{ store_dir: {quoted['store']} }}\n"
            f"tls {{ cert_file: {quoted['certificate']}, key_file: {quoted['key']} }}\n" + accounts,
        )


def _program() -> str:
    found = shutil.which(PROGRAM)
    if found is None:
        raise ConfigError(
            f"{PROGRAM} is not installed (looked in PATH), and a fleet's spools travel through it: apt install nats-server, "
            "brew install nats-server, or https://github.com/nats-io/nats-server/releases"
        )
    return found


def _refuse_old(program: str) -> None:
    try:
        said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{program} --version: {error}") from error
    wanted = ".".join(map(str, MIN_VERSION))
    found = re.search(r"v(\d+)\.(\d+)", said)
    if found is None or (int(found[1]), int(found[2])) < MIN_VERSION:
        raise ConfigError(
            f'{program}: expected version {wanted} or newer, got "{said.strip()[:80]}"; '
            "https://github.com/nats-io/nats-server/releases has newer ones"
        )


def _write(path: Path, text: str) -> None:
    with os.fdopen(create_file(path, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW), "w") as file:
        file.write(text)
