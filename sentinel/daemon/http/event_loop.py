"""What the thread of the HTTP server runs: uvicorn with our connections, and none of what we do not use."""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl

import uvicorn
from starlette.types import ASGIApp

from sentinel.daemon.http.connections import IDLE_S, MAX_CONNECTIONS, Connection, Door
from sentinel.daemon.http.trace_socket import MAX_MESSAGE_BYTES

HANDSHAKE_S = 5.0
"""Longest time for a TLS handshake."""
MAX_HEADER_BYTES = 32 * 1024
"""Most bytes of a request line and its headers; more is answered with 400."""


class EventLoop(uvicorn.Server):
    """Serves an application on sockets that listen already, until `should_exit`."""

    def __init__(self, app: ASGIApp, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                log_level="warning",
                access_log=False,
                lifespan="off",
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=int(IDLE_S),
                timeout_graceful_shutdown=1,
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
                ws="websockets-sansio",
                ws_max_size=MAX_MESSAGE_BYTES,
                ws_max_queue=4,
                ws_per_message_deflate=False,
                log_config=None,
            )
        )
        self._tls = tls
        self._door = Door()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept. uvicorn's own gives a handshake a minute."""
        await self.lifespan.startup()
        connection = functools.partial(
            Connection,
            self._door,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        loop = asyncio.get_running_loop()
        timeout_s = None if self._tls is None else HANDSHAKE_S
        self.servers = [
            await loop.create_server(
                connection, sock=one, ssl=self._tls, backlog=MAX_CONNECTIONS, ssl_handshake_timeout=timeout_s
            )
            for one in sockets or []
        ]
        self.started = True
