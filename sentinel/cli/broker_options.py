"""Where the broker is, as whom it is spoken to, by which key: the options that `ship`, `join` and `fleet status` share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from sentinel.fleet.broker import BrokerConfig
from sentinel.fleet.run_key import RunKey

Command = Callable[..., Any]


def broker_options(command: Command) -> Command:
    """Add the options of `BrokerConfig` to a command, which gets it as `broker`."""
    options = [
        click.option(
            "--server", required=True, metavar="URL", help="nats://HOST:PORT or tls://HOST:PORT; several with commas."
        ),
        click.option("--tls-ca", default="", metavar="FILE", help="Certificates (PEM) by which the server is known."),
        click.option(
            "--client-cert", default="", metavar="FILE", help="Our certificate chain (PEM), where the server asks."
        ),
        click.option("--client-key", default="", metavar="FILE", help="Its private key (PEM)."),
        click.option("--login", default="", metavar="FILE", help="File of two lines, user and password, mode 0600."),
        click.option(
            "--creds", default="", metavar="FILE",
            help="Credentials (JWT and nkey seed) of a server in operator mode, mode 0600; in place of --login.",
        ),
    ]  # fmt: skip

    @functools.wraps(command)
    def call(server: str, tls_ca: str, client_cert: str, client_key: str, login: str, creds: str, **others: Any) -> Any:
        broker = BrokerConfig(
            server=server, ca_file=tls_ca, cert_file=client_cert, key_file=client_key, login_file=login, creds_file=creds
        )
        return command(broker=broker, **others)

    for option in reversed(options):
        call = option(call)
    return call


def key_option(command: Command) -> Command:
    """Add the option of the fleet's key to a command, which gets it as `key`."""
    return click.option(
        "--key", metavar="FILE", help="Key that ship and join share, mode 0600: what is not signed by it is refused.",
        callback=lambda context, option, path: RunKey.read(Path(path)) if path else None,
    )(command)  # fmt: skip
