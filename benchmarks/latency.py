"""From the last row in the spool to the request that tells people: the daemon, a webhook, an Alertmanager and a Slack.

    python benchmarks/latency.py [--alerts 100] [--ranks 8] [--tensors 200]

A writer in this process writes steps at the pace of a training; now and then a step holds a NaN, or the loss jumps after
a quiet stretch in which the former incident was resolved. Each time, the clock runs from the moment the last frame of
that step was in the spool (the write call returned) until a local HTTP server has the request. All on one machine.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from recording import Recording

# Each alarm by itself: a hundred of them in a minute would be held, and told as a digest.
CONFIG = """\
notify:
  hold_s: {{critical: 0}}
  digest: {{window_s: 0.001}}
  sinks:
    - {{type: webhook, name: webhook, url: "{url}/webhook", rate_per_s: 1000}}
    - {{type: alertmanager, name: alertmanager, urls: ["{url}/am"]}}
    - {{type: slack, name: slack, url_file: "{slack}", rate_per_s: 1000}}
"""
RULES = """\
builtin: false
rules:
  - {name: non-finite, detector: AnomalyNan, match: {kind: "*"}, severity: critical, episode_quiet_steps: 1}
"""


class Receiver:
    """Notes when a request about a step came, by path."""

    def __init__(self) -> None:
        self.arrived: dict[str, list[tuple[float, str]]] = {}
        mutex = Lock()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
                now = time.perf_counter()
                with mutex:
                    receiver.arrived.setdefault(self.path.split("/")[1], []).append((now, body))
                self.send_response(200)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"ok")

            def log_message(self, *arguments: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        Thread(target=self.server.serve_forever, daemon=True).start()

    def first(self, path: str, text: str, since: float) -> float | None:
        """Return when the first request to `path` that holds `text` came after `since`."""
        return next((at for at, body in list(self.arrived.get(path, ())) if at >= since and text in body), None)


def measure(where: Path, *, num_alerts: int, num_ranks: int, num_tensors: int, pause_s: float) -> dict[str, list[float]]:
    """Return sink -> seconds from spool to request, one for each alert."""
    receiver = Receiver()
    secret = where / "slack.url"
    secret.write_text(f"{receiver.url}/slack\n")
    secret.chmod(0o600)
    (where / "daemon.yaml").write_text(CONFIG.format(url=receiver.url, slack=secret))
    (where / "rules.yaml").write_text(RULES)
    run = where / "run"
    gap = 25
    bad = tuple(range(gap, gap * (num_alerts + 1), gap))
    live = Recording(run, num_ranks=num_ranks, num_tensors=num_tensors, nan_steps=bad, is_live=True)
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "sentinel.cli", "serve", str(run), "--listen", "127.0.0.1:0"),
            *("--config", str(where / "daemon.yaml"), "--rules", str(where / "rules.yaml")),
        ],
        stdout=subprocess.DEVNULL,
    )
    address = run / ".daemon" / "http.json"
    while not address.exists():
        if process.poll() is not None:
            raise RuntimeError(f"the daemon ended with {process.returncode}")
        time.sleep(0.05)
    time.sleep(1.0)
    took: dict[str, list[float]] = {"webhook": [], "am": [], "slack": []}
    for step in range(bad[-1] + 1):
        live.step(step)
        written = time.perf_counter()
        if step in bad:
            deadline = written + 5.0
            waiting = set(took)
            while waiting and time.perf_counter() < deadline:
                for path in list(waiting):
                    at = receiver.first(path, f"step {step}", written)
                    if at is not None:
                        took[path].append(at - written)
                        waiting.discard(path)
                time.sleep(0.001)
            for path in waiting:
                took[path].append(float("inf"))
        time.sleep(pause_s)
    process.send_signal(signal.SIGTERM)
    process.wait(30)
    receiver.server.shutdown()
    return took


def main() -> int:
    """Print a table; 1 when a p99 is above the budget of 250 ms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--alerts", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tensors", type=int, default=200)
    parser.add_argument("--pause-ms", type=float, default=20.0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="latency-") as where:
        took = measure(
            Path(where),
            num_alerts=arguments.alerts,
            num_ranks=arguments.ranks,
            num_tensors=arguments.tensors,
            pause_s=arguments.pause_ms / 1e3,
        )
    rows = {}
    for name, values in took.items():
        ordered = sorted(values)
        rows[name] = {
            "alerts": len(ordered),
            "p50_ms": 1e3 * ordered[len(ordered) // 2],
            "p99_ms": 1e3 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
            "max_ms": 1e3 * ordered[-1],
        }
    if arguments.json:
        print(json.dumps(rows))
    else:
        print(
            f"{datetime.now(UTC):%Y-%m-%d} last row in the spool -> request, {arguments.ranks} ranks x "
            f"{arguments.tensors} rows a step, a step every {arguments.pause_ms:g} ms and its writing; budget p99 < 250 ms"
        )
        print("sink            alerts    p50 ms    p99 ms    max ms")
        for name, row in rows.items():
            print(f"{name:14}{row['alerts']:8}{row['p50_ms']:10.1f}{row['p99_ms']:10.1f}{row['max_ms']:10.1f}")
    return 1 if any(row["p99_ms"] >= 250 for row in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
