"""A local HTTP server for the demo that receives what Slack, an Alertmanager or a webhook would be sent."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

OWNER_OF: dict[str, str] = {
    "/slack": "Slack",
    "/alertmanager/api/v2/alerts": "Alertmanager",
    "/webhook": "webhook",
}


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One request that was received."""

    to: str
    """The service whose path the request was for: Slack, Alertmanager, webhook."""
    body: Any

    @property
    def text(self) -> str:
        """The message as a person would read it, in one line."""
        if self.to == "Slack":
            return " ".join(str(self.body.get("text", "")).split())
        if self.to == "Alertmanager":
            notified = [
                f"{one['labels'].get('alertname')} severity={one['labels'].get('severity')} "
                f"page={one['labels'].get('page')} ({one.get('annotations', {}).get('change', '')})"
                for one in self.body
            ]
            return "; ".join(notified)
        return json.dumps(self.body)


class Receiver:
    """An HTTP server on a free loopback port. received: called with each message, from the server's thread."""

    def __init__(self, received: Callable[[Message], None]) -> None:
        self.messages: list[Message] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                owner = OWNER_OF.get(self.path)
                try:
                    body = json.loads(raw)
                except ValueError:
                    owner = None
                if owner:
                    message = Message(to=owner, body=body)
                    receiver.messages.append(message)
                    received(message)
                self.send_response(200 if owner else 400)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"ok")

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.1,), name="receiver", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
