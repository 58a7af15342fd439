"""Takes the port that the page is served on, before anything that takes long."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from sentinel.daemon.http.config import HttpConfig
from sentinel.daemon.http.credentials import Credentials
from sentinel.daemon.http.daemon_api import DaemonApi
from sentinel.daemon.http.server import HttpServer
from sentinel.errors import ConfigError

log = logging.getLogger("sentinel.daemon")


def bound_server(api: DaemonApi, asked: HttpConfig | None, state: Path, *, is_owned: bool) -> HttpServer | None:
    """Return a server that has its port and does not answer yet; None: nothing is to be served, or nothing can be.

    state: directory of tokens. is_owned: it is beside a command, for which another port, or none, is taken where the wanted
    one is taken: judging is worth more than the page. ConfigError for any other daemon whose port is taken.
    """
    if asked is None:
        return None
    credentials = Credentials(state, asked)
    try:
        return HttpServer(api, asked, credentials)
    except ConfigError as error:
        if not is_owned:
            raise
        log.error("%s; a free port is tried instead", error)
    try:
        return HttpServer(api, msgspec.structs.replace(asked, port=0, socket=""), credentials)
    except ConfigError as error:
        log.error("%s; the page is not served, judging goes on", error)
        return None
