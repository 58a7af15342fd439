"""A Slack of our own: chat.postMessage and chat.update with Slack's limits, errors and threads, in memory or over HTTP."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

from sentinel.report.sinks.delivery import Delivery, judge_answer

TOKEN = "xoxb-1"
LIMITS = {"header": 150, "section": 3000, "context": 2000}


class FakeSlack:
    """Keeps messages as a channel shows them: `messages` by ts, each with its thread."""

    def __init__(self) -> None:
        self.messages: dict[str, dict[str, Any]] = {}
        self.replies: list[dict[str, Any]] = []
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.errors: list[str] = []
        """What the next calls answer; empty text: nothing is wrong."""
        self._number = 0

    def answer(self, method: str, token: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return what Slack would."""
        self.calls.append((method, body))
        error = self.errors.pop(0) if self.errors else ""
        error = error or ("" if token == f"Bearer {TOKEN}" else "invalid_auth") or self._problem(method, body)
        if error:
            return {"ok": False, "error": error}
        if method == "chat.update":
            self.messages[body["ts"]].update(body)
            return {"ok": True, "channel": body["channel"], "ts": body["ts"]}
        self._number += 1
        ts = f"17800000{self._number:02d}.000100"
        if "thread_ts" in body:
            self.replies.append(body)
        else:
            self.messages[ts] = dict(body)
        # The channel may be asked for by its name; the answer has its id, which alone chat.update takes.
        return {"ok": True, "channel": "C1", "ts": ts, "message": body}

    def _problem(self, method: str, body: dict[str, Any]) -> str:
        if method == "chat.update" and (body["channel"] != "C1" or body["ts"] not in self.messages):
            return "message_not_found" if body["channel"] == "C1" else "channel_not_found"
        if "thread_ts" in body and body["thread_ts"] not in self.messages:
            return "thread_not_found"
        if not body.get("text"):
            return "no_text"
        return "" if is_within_limits(body) else "invalid_blocks"

    def post(self, url: str, body: bytes, headers: dict[str, str], now: float) -> Delivery:
        """Be a Poster."""
        text = json.dumps(self.answer(url.rpartition("/")[2], headers.get("Authorization", ""), json.loads(body)))
        delivery = judge_answer(200, {}, text[:200], "https://slack.example", now)
        return Delivery(outcome=delivery.outcome, detail=delivery.detail, answer=text)

    @contextlib.contextmanager
    def serving(self) -> Iterator[str]:
        """Yield the address of the API, until the block ends."""
        slack = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = slack.answer(self.path.rpartition("/")[2], self.headers.get("Authorization", ""), body)
                # The message first, as long as it may be: `ok` and `ts` stand behind it.
                text = json.dumps({"message": body, **answer}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *args: Any) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/api"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def is_within_limits(body: dict[str, Any]) -> bool:
    """Return whether Slack takes the blocks of a message."""
    blocks = body.get("blocks", [])
    if len(blocks) > 50 or len(json.dumps(blocks)) > 40_000:
        return False
    for block in blocks:
        texts = [block["text"]] if "text" in block else block["elements"]
        if not 0 < len(texts) <= 10 or any(not 0 < len(text["text"]) <= LIMITS[block["type"]] for text in texts):
            return False
    return True
