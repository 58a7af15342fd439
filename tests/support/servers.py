"""Real servers for tests: Alertmanager, Prometheus, and a webhook receiver, all on free loopback ports."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from .ports import free_port
from .waiting import wait_for


def need(*names: str) -> None:
    """Skip a test where a program is missing; under CI a missing program is a failure."""
    missing = [name for name in names if shutil.which(name) is None]
    if missing and os.environ.get("CI"):
        pytest.fail(f"CI installs {', '.join(missing)} by apt, and it is not there")
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


def run_tool(*arguments: str, stdin: bytes = b"", cwd: Path | None = None) -> tuple[int, str]:
    """Return the exit code of a program, and what it wrote."""
    done = subprocess.run(arguments, input=stdin, capture_output=True, timeout=240, check=False, cwd=cwd)
    return done.returncode, (done.stdout + done.stderr).decode()


def get(url: str, data: bytes | None = None) -> bytes:
    """Return what a server answers, past any proxy. data: of a POST."""
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=30) as answer:
        return bytes(answer.read())


def get_json(url: str) -> Any:
    return json.loads(get(url))


def is_up(url: str) -> bool:
    try:
        get(url)
    except (OSError, urllib.error.URLError):
        return False
    return True


@contextlib.contextmanager
def program(arguments: Sequence[str], ready_url: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server until the block ends; fails with its log when it does not come up."""
    with log.open("wb") as output:
        process = subprocess.Popen(arguments, stdout=output, stderr=subprocess.STDOUT)
        try:
            wait_for(lambda: is_up(ready_url) or process.poll() is not None)
            assert process.poll() is None, log.read_text()
            yield process
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def alertmanager(directory: Path, receiver_url: str, *, group_interval: str = "1s") -> Iterator[str]:
    """Yield the address of an Alertmanager that tells `receiver_url`, one group an incident."""
    config = directory / "alertmanager.yml"
    config.write_text(f"""
route:
  receiver: hook
  group_by: [run, incident]
  group_wait: 0s
  group_interval: {group_interval}
  repeat_interval: 1h
receivers:
  - name: hook
    webhook_configs: [{{url: "{receiver_url}", send_resolved: true}}]
""")
    url = f"http://127.0.0.1:{free_port()}"
    binary = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")
    arguments = [
        binary, f"--config.file={config}", f"--storage.path={directory / 'am'}", "--cluster.listen-address=",
        f"--web.listen-address={url.removeprefix('http://')}",
    ]  # fmt: skip
    with program(arguments, f"{url}/-/ready", directory / "alertmanager.log"):
        yield url


@contextlib.contextmanager
def prometheus(
    directory: Path, target: str, rules: str | Path, *, also: Sequence[str] = (), alertmanager: str = ""
) -> Iterator[str]:
    """Yield the address of a Prometheus that scrapes `target` every 200 ms and evaluates the file `rules`.

    also: further targets. alertmanager: HOST:PORT of the one that it tells; empty: none.
    """
    alerting = f"alerting: {{alertmanagers: [static_configs: [{{targets: ['{alertmanager}']}}]]}}" if alertmanager else ""
    config = directory / "prometheus.yml"
    config.write_text(f"""
global: {{scrape_interval: 200ms, evaluation_interval: 200ms, scrape_timeout: 200ms}}
rule_files: ["{rules}"]
{alerting}
scrape_configs:
  - job_name: sentinel
    static_configs: [{{targets: {json.dumps([target, *also])}}}]
""")
    url = f"http://127.0.0.1:{free_port()}"
    arguments = [
        # Alertmanagers are found after some seconds; what fired before that is lost, and sent again only so often.
        shutil.which("prometheus"), "--rules.alert.resend-delay=1s", f"--config.file={config}",
        f"--storage.tsdb.path={directory / 'tsdb'}",
        f"--web.listen-address={url.removeprefix('http://')}",
    ]  # fmt: skip
    with program(arguments, f"{url}/-/ready", directory / "prometheus.log"):
        yield url


class Receiver(http.server.ThreadingHTTPServer):
    """Answers POSTs from a script, (status, headers) each, then 200; keeps what it heard. GETs answer with `page()`."""

    daemon_threads = True

    def __init__(
        self, answers: Sequence[tuple[int, dict[str, str]] | str] = (),
        page: Callable[[], tuple[bytes, str]] = lambda: (b"", "text/plain"),
    ) -> None:  # fmt: skip
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers = list(answers)
        self.page = page
        self.received: list[tuple[dict[str, str], Any]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"

    @contextlib.contextmanager
    def running(self) -> Iterator[Receiver]:
        """Serve until the block ends."""
        thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.shutdown()
            self.server_close()
            thread.join()

    def bodies(self) -> list[Any]:
        """Return what came, without the headers."""
        return [body for _, body in self.received]


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Receiver
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        body, content_type = self.server.page()
        self.answer(200, {"Content-Type": content_type}, body)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"null")
        self.server.received.append((dict(self.headers), body))
        answer = self.server.answers.pop(0) if self.server.answers else (200, {})
        if answer == "hang up":
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
        elif answer == "hang":
            time.sleep(3)
        else:
            self.answer(answer[0], answer[1], b"answer")

    def answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
