"""BrokerClient: the client of NATS, for which credentials and certificates may be changed while it goes on."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import Any

from nats.aio.client import Client
from nats.errors import Error

from sentinel.fleet.broker_credentials import AUTHORITY_WORDS


class BrokerClient(Client):
    """Connects anew, with the credentials of then, where the library's closes: rotated ones were never read."""

    def __init__(self, tls: Callable[[], ssl.SSLContext | None] = lambda: None) -> None:
        """tls: asked before each try how the server is known; None: as before. What it raises is said, and ends that try."""
        super().__init__()
        self._tls = tls

    async def _connect_to_server(self, s: Any) -> None:
        if (context := self._tls()) is not None:
            self.options["tls"] = context
        await super()._connect_to_server(s)

    async def _process_err(self, err_msg: str) -> None:
        if any(word in err_msg.lower() for word in AUTHORITY_WORDS):
            error = Error(f"nats: {err_msg.strip(chr(39))}")
            await self._error_cb(error)
            await self._process_op_err(error)
        else:
            await super()._process_err(err_msg)
