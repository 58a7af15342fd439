"""BrokerClient: the client of NATS, which a server that lets its user in no more does not end for good."""

from __future__ import annotations

from nats.aio.client import Client
from nats.errors import Error

AUTHORITY_WORDS = ("authorization", "authentication")
"""One of these is in what a server says as it ends a connection whose credentials it takes no more: they expired, or were
revoked, or a configuration that it read again knows them no more. After a refusal of permissions it goes on."""


class BrokerClient(Client):
    """Connects anew, with the credentials of then, where the library's closes: rotated ones were never read."""

    async def _process_err(self, err_msg: str) -> None:
        if any(word in err_msg.lower() for word in AUTHORITY_WORDS):
            error = Error(f"nats: {err_msg.strip(chr(39))}")
            await self._error_cb(error)
            await self._process_op_err(error)
        else:
            await super()._process_err(err_msg)
