"""Where a daemon listens and whom it answers: the options that `serve` takes and `run` hands on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from sentinel.cli.main import to_stderr
from sentinel.daemon.http.config import HttpConfig
from sentinel.daemon.http.local_users import other_people

Command = Callable[..., Any]


class Listening(msgspec.Struct, frozen=True, kw_only=True):
    """The values of `listening_options`, by their names."""

    listen: str
    """Empty: nowhere, where that is the default."""
    tls_cert: str | None = None
    tls_key: str | None = None
    insecure_tokens: bool = False
    token_reads: bool | None = None
    """None: decided by whether other people use this machine."""
    hosts: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        """The same as arguments of `sentinel serve`."""
        found = ["--listen", self.listen]
        for option, path in (("--tls-cert", self.tls_cert), ("--tls-key", self.tls_key)):
            if path is not None:
                found += [option, str(Path(path).absolute())]
        if self.insecure_tokens:
            found.append("--insecure-tokens")
        if self.token_reads is not None:
            found.append("--token-reads" if self.token_reads else "--open-reads")
        return [*found, *(word for host in self.hosts for word in ("--allow-host", host))]

    def config(self, people: Callable[[], Sequence[str]] = other_people) -> HttpConfig:
        """Return what the daemon takes; ConfigError. people: who else uses this machine, asked only where it matters."""
        config = HttpConfig.parse(
            self.listen,
            tls_cert=self.tls_cert or "",
            tls_key=self.tls_key or "",
            has_insecure_tokens=self.insecure_tokens,
            has_open_reads=self.token_reads is False,
            has_token_reads=self.token_reads is True,
            allowed_hosts=self.hosts,
        )
        if self.token_reads is not None or not config.is_local or config.socket:
            return config
        others = people()
        if not others:
            return config
        named = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
        to_stderr(f"reads need a token, for others use this machine too ({named}); --open-reads answers them")
        return msgspec.structs.replace(config, has_token_reads=True)


def listening_options(default: str, what: str = "the page is") -> Callable[[Command], Command]:
    """Return a decorator that adds the options of `Listening` to a command, which gets them as `listening`.

    default: of --listen; empty: nowhere. what: what is served.
    """
    otherwise = "" if default else " Default: nowhere."
    options = [
        click.option(
            "--listen",
            default=default,
            show_default=bool(default),
            metavar="HOST:PORT",
            help=f"Where {what} served; port 0: a free one. unix:/PATH: a socket that only you may open.{otherwise}",
        ),
        click.option("--tls-cert", metavar="FILE", help="Certificate chain (PEM) to serve HTTPS with, reread on change."),
        click.option("--tls-key", metavar="FILE", help="Its private key (PEM, not encrypted)."),
        click.option("--insecure-tokens", is_flag=True, help="Listen beyond loopback without TLS: tokens can be overheard."),
        click.option(
            "--token-reads/--open-reads",
            "token_reads",
            default=None,
            help="Whether reads need a token. Default: yes, except on loopback of a machine that no other people use.",
        ),
        click.option(
            "--allow-host", "hosts", multiple=True, metavar="NAME", help="Further name that a Host header may carry."
        ),
    ]

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def call(**others: Any) -> Any:
            listening = Listening(**{name: others.pop(name) for name in Listening.__struct_fields__})
            return command(listening=listening, **others)

        for option in reversed(options):
            call = option(call)
        return call

    return decorate
