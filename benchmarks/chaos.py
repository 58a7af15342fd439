"""Whatever goes wrong around a daemon, at random, over and over, compared with a daemon that nobody disturbed.

    python benchmarks/chaos.py [--faults 1000] [--seed 0]

While a writer writes a run at the pace of a training, its daemon is killed, stopped, and denied its disk (full, read-only,
locked by another process), its journal is damaged and repaired, and the receiver of its messages hangs, answers 429 or
500, or takes a message and hangs up. What must hold in the end: the same anomalies and incidents byte for byte; every
critical incident told with its last word, and of any other that was told, its end; nothing told that did not happen; a
message that came twice says so and has the same key.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from kill9 import different_lines, different_replay, finish, progress, reported, serve, write_slowly
from recording import lines_of, record

from sentinel.store.journal import Journal
from sentinel.store.run_paths import RunPaths

CONFIG = """\
judging: {{snapshot_interval_s: 0.2}}
notify:
  hold_s: {{critical: 0, warning: 0, info: 0}}
  retry_s: 0.1
  max_retry_s: 0.5
  sinks:
    - type: webhook
      name: hook
      url: "{url}"
      rate_per_s: 1000
      digest_after: 0
      timeout_s: 1
      route: {{min_severity: info}}
"""
TOPIC = "alert:hook"
DISK_BYTES = 48 * 2**20
"""Size of the file system under the journal, where one can be made."""
CLOSED = frozenset({"resolved", "settled", "ended", "closed", "merged"})


class Heard(NamedTuple):
    """One message in a request."""

    key: str
    is_repeated: bool
    request: str
    """The idempotency key of the request."""
    num_together: int
    is_answered: bool
    """Answered with 200; else it was read, and the connection closed."""
    incident: str
    state: str
    revision: int


class Receiver:
    """Takes messages, or does what receivers do that are not well."""

    MODES = ("hang", "429", "500", "close")

    def __init__(self) -> None:
        self.mode = "ok"
        self.heard: list[Heard] = []
        self.num_requests: Counter[str] = Counter()
        """Requests by the mode in which they came."""
        mutex, receiver = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                mode = receiver.mode
                receiver.num_requests[mode] += 1
                if mode in ("ok", "close"):
                    with mutex:
                        receiver.heard += _heard(body, self.headers["webhook-id"], is_answered=mode == "ok")
                if mode == "hang":
                    time.sleep(1.5)
                if mode in ("hang", "close"):
                    self.close_connection = True
                    return
                self.send_response({"429": 429, "500": 500}.get(mode, 200))
                if mode == "429":
                    self.send_header("Retry-After", "1")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                pass  # whoever is killed amid a request leaves it

        self._server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._server.server_port}/"

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()


def _heard(body: bytes, request: str, *, is_answered: bool) -> Iterator[Heard]:
    alerts = json.loads(body)["alerts"]
    for one in alerts:
        incident = one["incident"]
        yield Heard(
            one["key"], one["repeated"], request, len(alerts), is_answered, incident["id"], incident["state"],
            incident["revision"],
        )  # fmt: skip


@dataclass
class Chaos:
    """A daemon, the run that it serves, its receiver, and what was done to it."""

    run_dir: Path
    config: Path
    receiver: Receiver
    rng: random.Random
    state_dir: Path | None = None
    """On a small file system of its own; None: none could be made."""
    done: Counter[str] = field(default_factory=Counter)
    may_be_lost: set[str] = field(default_factory=set)
    """Keys of messages that waited when the journal was damaged."""
    process: subprocess.Popen[bytes] | None = None

    @property
    def options(self) -> tuple[str, ...]:
        """Of the daemon."""
        return ("--state-dir", str(self.state_dir)) if self.state_dir is not None else ()

    @property
    def journal(self) -> Path:
        """The journal's file."""
        return RunPaths.of(self.run_dir, self.state_dir).journal

    def start(self) -> None:
        """Have a daemon, if there is none."""
        if self.process is None or self.process.poll() is not None:
            self.process = serve(self.run_dir, self.config, *self.options)

    def kill(self) -> None:
        """End the daemon at once, wherever it is."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None

    def fault(self, name: str) -> None:
        """Have something go wrong, and be well again."""
        self.start()
        FAULTS[name](self)
        self.done[name] += 1

    @property
    def faults(self) -> list[str]:
        """What can go wrong here."""
        return [name for name in FAULTS if self.state_dir is not None or name not in NEED_A_DISK]

    def pause(self, most_s: float) -> None:
        """Wait for a random time."""
        time.sleep(self.rng.uniform(0.0, most_s))


def _kill(chaos: Chaos) -> None:
    chaos.pause(1.2)
    chaos.kill()


def _stop(chaos: Chaos) -> None:
    assert chaos.process is not None
    chaos.process.send_signal(signal.SIGSTOP)
    chaos.pause(1.0)
    chaos.process.send_signal(signal.SIGCONT)


def _busy(chaos: Chaos) -> None:
    """Have another process hold the journal: a backup, or somebody who looks into it."""
    if not chaos.journal.exists():
        return
    connection = sqlite3.connect(chaos.journal, isolation_level=None, timeout=5.0)
    with closing(connection) as db, contextlib.suppress(sqlite3.Error):
        db.execute("BEGIN IMMEDIATE")
        chaos.pause(1.5)
        db.execute("ROLLBACK")


def _full(chaos: Chaos) -> None:
    assert chaos.state_dir is not None
    filler = chaos.state_dir / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(65536))
    chaos.pause(1.0)
    filler.unlink()


def _read_only(chaos: Chaos) -> None:
    # A file that is open for writing keeps its file system writable: the daemon meets it as it starts.
    chaos.kill()
    subprocess.run(["mount", "-o", "remount,ro", str(chaos.state_dir)], check=True, capture_output=True)
    chaos.start()
    chaos.pause(1.0)
    subprocess.run(["mount", "-o", "remount,rw", str(chaos.state_dir)], check=True, capture_output=True)


def _corrupted(chaos: Chaos, offset: int) -> None:
    chaos.kill()
    if not chaos.journal.exists():
        return
    chaos.may_be_lost |= set(_waiting(chaos.journal))
    with chaos.journal.open("r+b") as file:
        file.seek(offset)
        some = file.read(64)
        file.seek(offset)
        file.write(bytes(byte ^ 0xFF for byte in some))
    state = ("--state-dir", str(chaos.state_dir)) if chaos.state_dir is not None else ()
    command = [sys.executable, "-m", "sentinel.cli", "repair", str(chaos.run_dir), "--config", str(chaos.config), *state]
    repaired = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if repaired.returncode:
        raise RuntimeError(f"the repair failed: {repaired.stderr[-2000:]}")


def _header(chaos: Chaos) -> None:
    _corrupted(chaos, 0)


def _page(chaos: Chaos) -> None:
    num_pages = max(chaos.journal.stat().st_size // 4096, 2) if chaos.journal.exists() else 2
    _corrupted(chaos, 4096 * chaos.rng.randrange(1, num_pages))


def _receiver(mode: str) -> Callable[[Chaos], None]:
    def strike(chaos: Chaos) -> None:
        before = chaos.receiver.num_requests[mode]
        chaos.receiver.mode = mode
        # Until one was hit, and a little longer.
        deadline = time.monotonic() + 4.0
        while chaos.receiver.num_requests[mode] == before and time.monotonic() < deadline:
            time.sleep(0.01)
        chaos.pause(0.5)
        chaos.receiver.mode = "ok"

    return strike


FAULTS: dict[str, Callable[[Chaos], None]] = {
    "kill": _kill, "stop": _stop, "busy": _busy, "full": _full, "read-only": _read_only, "header": _header, "page": _page,
    **{mode: _receiver(mode) for mode in Receiver.MODES},
}  # fmt: skip
NEED_A_DISK = frozenset({"full", "read-only"})


def _waiting(journal: Path) -> list[str]:
    try:
        with closing(Journal(journal, read_only=True)) as found:
            return [row.key for row in found.outbox.waiting(TOPIC, 1e12, 10_000)]
    except Exception:
        return []


@contextlib.contextmanager
def small_disk(where: Path) -> Iterator[Path | None]:
    """Yield a directory on a file system of its own; None: this user may make none."""
    where.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=700", "none", str(where)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        yield None
        return
    try:
        yield where
    finally:
        subprocess.run(["umount", str(where)], check=True)


class Outcome(NamedTuple):
    """What a campaign did and found."""

    done: Counter[str]
    num_lines: int
    num_heard: int
    num_repeated: int
    differences: list[str]


def planted(num_steps: int) -> dict[str, tuple[int, ...]]:
    """Return the steps at which the run itself has faults: often, so that there is always something to tell."""
    return {"nan_steps": (37, 38, num_steps - 20), "spike_steps": tuple(range(60, num_steps - 30, 30))}


def campaign(where: Path, names: Sequence[str], num_steps: int, rng: random.Random) -> Outcome:
    """Judge one run undisturbed and one amid faults, and return what differs. names: of the faults, in order."""
    where.mkdir(parents=True, exist_ok=True)
    receiver, quiet = Receiver(), Receiver()
    golden, disturbed = where / "golden" / "run", where / "disturbed" / "run"
    for name, one in (("golden", quiet), ("disturbed", receiver)):
        (where / f"{name}.yaml").write_text(CONFIG.format(url=one.url))
    record(golden, num_steps, **planted(num_steps))
    finish(golden, where / "golden.yaml", num_steps)
    disturbed.mkdir(mode=0o700, parents=True)
    (disturbed / "spool").mkdir(mode=0o700)
    with small_disk(where / "state") as state_dir:
        chaos = Chaos(disturbed, where / "disturbed.yaml", receiver, rng, state_dir)
        names = [one for one in names if one in chaos.faults]
        pause_s = len(names) * 1.2 / num_steps
        writer = multiprocessing.get_context("spawn").Process(
            target=write_slowly, args=(disturbed, num_steps, pause_s, planted(num_steps))
        )
        writer.start()
        try:
            for name in names:
                chaos.fault(name)
                chaos.pause(0.6)
            writer.join(600)
            chaos.kill()
            _told_to_the_end(chaos, num_steps)
        finally:
            chaos.kill()
            if writer.is_alive():
                writer.kill()
        differences = different_lines(golden, disturbed) + wrongly_told(golden, chaos)
        differences += different_replay(disturbed, where)
    receiver.close()
    quiet.close()
    num_repeated = sum(one.is_repeated for one in receiver.heard)
    return Outcome(chaos.done, sum(1 for _ in lines_of(golden)), len(receiver.heard), num_repeated, differences)


def _told_to_the_end(chaos: Chaos, num_steps: int) -> None:
    """Serve until all is judged and nothing waits to be sent."""
    for _ in range(5):
        finish(chaos.run_dir, chaos.config, min(num_steps, progress(chaos.run_dir)[0] or num_steps), options=chaos.options)
        if not _waiting(chaos.journal):
            return


def wrongly_told(golden: Path, chaos: Chaos) -> list[str]:
    """Return in words what the receiver was told otherwise than it should."""
    found = []
    keys = [key for key in reported(golden) if key.startswith("hook:")]
    told = chaos.receiver.heard
    revision_of = {}
    for key in keys:
        _, _, incident, revision = key.rsplit(":", 3)
        revision_of[incident] = int(revision)
    lines = [json.loads(line) for line in (golden / "incidents.jsonl").read_text().splitlines()]
    severity_of = {one["id"]: one["severity"] for one in lines}
    for incident, revision in revision_of.items():
        newest = max((one.revision for one in told if one.incident == incident and one.is_answered), default=0)
        # What is milder, and over before anybody was told, is told to nobody.
        is_due = newest > 0 or severity_of[incident] == "critical"
        if is_due and newest < revision and f"hook:run:{incident}:{revision}" not in chaos.may_be_lost:
            found.append(f"of {incident} revision {revision} was never told, the last was {newest}")
    states = {(one["id"], one["state"]) for one in lines}
    seen: dict[str, Heard] = {}
    for one in told:
        if one.key not in keys:
            found.append(f"{one.key} was told, and the undisturbed daemon never told it")
        if one.state in CLOSED and (one.incident, one.state) not in states:
            found.append(f"{one.incident} was told {one.state}, and it never was")
        former = seen.setdefault(one.key, one)
        if former is not one and not one.is_repeated:
            found.append(f"{one.key} came twice, and did not say so")
        if former is not one and {former.num_together, one.num_together} == {1} and former.request != one.request:
            found.append(f"{one.key} came twice, with two idempotency keys")
    return found


def main() -> int:
    """Run the campaigns and print one line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=600.0, help="End sooner, behind a campaign.")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    left, is_bad, begun = arguments.faults, False, time.monotonic()
    total: Counter[str] = Counter()
    heard = repeated = 0
    print(f"{datetime.now(UTC):%Y-%m-%d} chaos, {arguments.faults} faults, seed {arguments.seed}")
    print("campaign  faults  lines compared  messages  repeated  differences", flush=True)
    number = 0
    while left > 0 and time.monotonic() < begun + 60 * arguments.minutes:
        num_faults = min(left, rng.randint(10, 30))
        with tempfile.TemporaryDirectory(prefix="chaos-") as where:
            outcome = campaign(Path(where), rng.choices(list(FAULTS), k=num_faults), 300, rng)
        print(
            f"{number:8}  {num_faults:6}  {outcome.num_lines:14}  {outcome.num_heard:8}  {outcome.num_repeated:8}"
            f"  {len(outcome.differences)}",
            flush=True,
        )
        for difference in outcome.differences:
            print("   ", difference, flush=True)
        is_bad = is_bad or bool(outcome.differences)
        total += outcome.done
        heard, repeated = heard + outcome.num_heard, repeated + outcome.num_repeated
        left -= num_faults
        number += 1
    counts = ", ".join(f"{count} {name}" for name, count in sorted(total.items()))
    result = "DIFFERENCES" if is_bad else "no difference"
    print(
        f"{total.total()} faults ({counts}); {heard} messages, {repeated} repeated and marked; {result}, "
        f"{time.monotonic() - begun:.0f} s"
    )
    return 1 if is_bad else 0


if __name__ == "__main__":
    sys.exit(main())
