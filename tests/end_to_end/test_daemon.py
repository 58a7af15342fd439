"""`sentinel serve` and `sentinel run` as processes: signals, HTTP, reloads, new runs, exit codes, clean stdout."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from recording import Recording, record

from sentinel.daemon.daemon import Daemon, ServeOptions
from sentinel.daemon.loop_requests import LoopRequests
from sentinel.store.lock import holder

from ..support.servers import Receiver
from ..support.waiting import wait_for
from ..support.warm import cli, interpreter


class Served:
    """A daemon in a process of its own, and what it answers."""

    def __init__(self, directory: Path, *options: str, state: Path | None = None) -> None:
        self.state = state or directory / ".daemon"
        self.process = subprocess.Popen(
            [*cli(), "serve", str(directory), "--listen", "127.0.0.1:0", "--open-reads", *options],
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def url(self) -> str:
        def read() -> str | None:
            assert self.process.poll() is None, self.process.communicate()[1].decode()
            path = self.state / "http.json"
            return json.loads(path.read_text())["url"] if path.exists() else None

        return str(wait_for(read, "the address"))

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url() + path, timeout=240) as answer:
            body = answer.read().decode()
        return json.loads(body) if answer.headers["content-type"] == "application/json" else body

    def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        token = json.loads((self.state / "tokens.json").read_text())["control"]
        request = urllib.request.Request(
            self.url() + path, json.dumps(body).encode(), {"Authorization": f"Bearer {token}"}, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=240) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def judged(self, run: str) -> int:
        return next((one["judged_step"] or -1 for one in self.get("/api/v1/runs")["runs"] if one["run"] == run), -1)

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        self.process.send_signal(number)
        _, talk = self.process.communicate(timeout=240)
        return self.process.returncode, talk.decode()


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    started: list[Served] = []

    def start(*arguments: Any, **options: Any) -> Served:
        started.append(Served(*arguments, **options))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.process.communicate()


def home(tmp_path: Path) -> Path:
    directory = tmp_path / "runs"
    directory.mkdir(mode=0o700)
    return directory


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_order(tmp_path: Path, serve: Callable[..., Served], number: int) -> None:
    record(tmp_path / "run", 50, nan_steps=(20,))
    daemon = serve(tmp_path / "run")
    wait_for(lambda: daemon.judged("run") == 49, "the last step")

    code, talk = daemon.stop(number)

    assert code == 0, talk
    assert not (daemon.state / "http.json").exists()
    assert (tmp_path / "run" / "incidents.jsonl").read_text().count("\n") >= 1


def test_a_signal_at_any_moment_of_a_pause_ends_it(tmp_path: Path) -> None:
    record(tmp_path / "run", 5)
    daemon = Daemon(ServeOptions(directory=tmp_path / "run", http=None), {}, io.StringIO())
    struck: list[int] = []

    def strike(frame: FrameType) -> None:
        """Have a signal arrive here."""
        struck.append(frame.f_lineno)
        if len(struck) <= 40:
            signal.raise_signal(signal.SIGHUP)
        else:
            daemon.stop()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        """Have one arrive at each line of a pause, those of the library by which it waits among them."""
        within: FrameType | None = frame
        while within is not None and within.f_code is not LoopRequests.pause.__code__:
            within = within.f_back
        if within is not None:
            strike(frame)
        return trace if within is not None else None

    sys.settrace(trace)
    try:
        assert daemon.run() == 0
    finally:
        sys.settrace(None)
    assert len(struck) > 40


def test_http_answers_what_was_found(tmp_path: Path, serve: Callable[..., Served]) -> None:
    record(tmp_path / "run", 50, nan_steps=(45,))
    daemon = serve(tmp_path / "run")
    wait_for(lambda: daemon.judged("run") == 49, "the last step")

    assert daemon.get("/api/v1/anomalies?run=run&limit=5")["anomalies"][0]["step"] == 45
    assert daemon.get("/api/v1/incidents?state=open")["incidents"][0]["opened_step"] == 45
    [loss] = daemon.get("/api/v1/series?run=run&name=loss&limit=3")["series"]
    assert [point[:2] for point in loss["points"]] == [[0, 47], [0, 48], [0, 49]]
    assert wait_for(lambda: daemon.get("/readyz")["ready"], "readiness")
    assert daemon.get("/healthz")["status"] == "ok"
    assert "NaN born in" in daemon.get("/")
    metrics = daemon.get("/metrics")
    assert 'sentinel_steps_judged_total{run="run"} 50.0' in metrics
    assert 'sentinel_records_total{run="run"} 3200.0' in metrics


def test_new_runs_appear_while_serving(tmp_path: Path, serve: Callable[..., Served]) -> None:
    directory = home(tmp_path)
    record(directory / "first", 10)
    daemon = serve(directory)
    wait_for(lambda: daemon.judged("first") == 9, "the first run")

    live = Recording(directory / "second", is_live=True)
    for step in range(20):
        live.step(step)

    wait_for(lambda: daemon.judged("second") == 19, "the second run")
    code, body = daemon.post("/api/v1/control", {"run": "second", "action": "enable", "for_steps": 5, "kinds": ["dgrad"]})
    assert (code, body["command"]["kinds"]) == (200, ["dgrad"])
    assert body["command"]["at_step"] >= 20
    assert (directory / "second" / "control" / "000001.json").exists()
    assert any(one["action"] == "command.issued" for one in daemon.get("/api/v1/control?run=second")["audit"])
    assert daemon.stop()[0] == 0


RULES = 'rules:\n  - name: mine\n    detector: AnomalyNan\n    match: {{kind: "*"}}\n    severity: {severity}\n'


def test_rules_are_read_again_and_broken_ones_are_not_used(tmp_path: Path, serve: Callable[..., Served]) -> None:
    record(tmp_path / "run", 10)
    rules = tmp_path / "rules.yaml"
    rules.write_text(RULES.format(severity="warning"))
    daemon = serve(tmp_path / "run", "--rules", str(rules))
    before = wait_for(lambda: daemon.get("/healthz"), "health")["pack_hash"]

    rules.write_text("rules: [")
    code, body = daemon.post("/-/reload")
    assert code == 422
    assert "rules.yaml" in body["problem"]
    health = daemon.get("/healthz")
    assert (health["status"], health["pack_hash"]) == ("degraded", before)
    assert 'sentinel_last_reload_successful{what="rules"} 0.0' in daemon.get("/metrics")

    rules.write_text(RULES.format(severity="critical"))
    wait_for(lambda: daemon.get("/healthz")["pack_hash"] != before, "the change to be seen")
    assert daemon.get("/healthz")["status"] == "ok"
    newest = daemon.get("/healthz")["pack_hash"]
    rules.write_text(RULES.format(severity="info"))
    daemon.process.send_signal(signal.SIGHUP)
    wait_for(lambda: daemon.get("/healthz")["pack_hash"] != newest, "the hang-up to be heard")
    code, talk = daemon.stop()
    assert code == 0
    assert "the former ones stay in use" in talk


def test_the_configuration_is_read_again_when_asked_and_a_broken_one_changes_nothing(
    tmp_path: Path, serve: Callable[..., Served]
) -> None:
    record(tmp_path / "run", 5)
    config = tmp_path / "daemon.yaml"
    config.write_text("judging: {late_after_s: 9.0}\n")
    daemon = serve(tmp_path / "run", "--config", str(config))
    before = wait_for(lambda: daemon.get("/healthz"), "health")["config_hash"]

    config.write_text("judging: {late_after_s: -1.0}\n")
    code, body = daemon.post("/-/reload")
    assert code == 422
    assert "daemon.yaml:1: judging.late_after_s must be at least 0" in body["problem"]
    health = daemon.get("/healthz")
    assert (health["status"], health["config_hash"]) == ("degraded", before)
    assert 'sentinel_last_reload_successful{what="config"} 0.0' in daemon.get("/metrics")

    config.write_text("judging: {late_after_s: 7.0}\n")
    daemon.process.send_signal(signal.SIGHUP)
    wait_for(lambda: daemon.get("/healthz")["config_hash"] != before, "the hang-up to be heard")
    assert daemon.get("/healthz")["status"] == "ok"
    assert 'sentinel_last_reload_successful{what="config"} 1.0' in daemon.get("/metrics")
    code, _ = daemon.stop()
    assert code == 0


def test_a_run_of_ours_that_others_may_write_is_taken_from_them_and_judged(
    tmp_path: Path, serve: Callable[..., Served]
) -> None:
    directory = home(tmp_path)
    record(directory / "open", 5)
    (directory / "open").chmod(0o777)

    daemon = serve(directory)
    wait_for(lambda: daemon.judged("open") == 4, "the run")

    assert (directory / "open").stat().st_mode & 0o022 == 0
    assert daemon.get("/healthz")["status"] == "ok"


def test_a_second_daemon_of_a_run_stands_by_and_one_that_is_owned_is_refused(
    tmp_path: Path, serve: Callable[..., Served]
) -> None:
    record(tmp_path / "run", 5)
    daemon = serve(tmp_path / "run")
    wait_for(lambda: daemon.judged("run") == 4, "the run")

    process = f"process {str(holder(daemon.state)).split()[0]} on"
    owned = subprocess.run([*cli(), "serve", str(tmp_path / "run"), "--owned", "--no-http"], capture_output=True, text=True)
    standby = serve(tmp_path / "run", "--no-http")
    talk = iter(standby.process.stderr or ())
    stands_by = next(line.decode() for line in talk if b"standby" in line)
    assert daemon.stop()[0] == 0
    takes_over = next(line.decode() for line in talk if b"taken over from" in line)

    assert owned.returncode == 1 and process in owned.stderr
    assert process in stands_by and process in takes_over
    assert standby.stop()[0] == 0


def test_people_are_told_once_across_restarts(tmp_path: Path, serve: Callable[..., Served]) -> None:
    live = Recording(tmp_path / "run", nan_steps=(15,), is_live=True)
    for step in range(20):
        live.step(step)
    with Receiver().running() as receiver:
        config = tmp_path / "daemon.yaml"
        config.write_text(f"notify: {{sinks: [{{type: webhook, name: hook, url: '{receiver.url}/'}}]}}\n")
        for _ in range(3):
            daemon = serve(tmp_path / "run", "--config", str(config))
            wait_for(lambda daemon=daemon: daemon.judged("run") == 19, "the run")
            wait_for(lambda: receiver.received, "the message")
            assert daemon.stop()[0] == 0

    assert len(receiver.received) == 1


TRAINER = """
import os, sys, time
sys.path.insert(0, {benchmarks!r})
from pathlib import Path
from recording import Recording
run = Path(os.environ["SENTINEL_DIR"]) / os.environ["SENTINEL_RUN"]
live = Recording(run, nan_steps=({nan},), is_live=True)
for step in range(30):
    live.step(step)
    time.sleep(0.005)
{end}
print("the result")
print("the talk", file=sys.stderr)
sys.exit({code})
"""


def trainer(tmp_path: Path, *, nan: int = -1, code: int = 0, end: str = "live.bye(29)") -> list[str]:
    script = tmp_path / "train.py"
    benchmarks = str(Path(__file__).parents[2] / "benchmarks")
    script.write_text(TRAINER.format(benchmarks=benchmarks, nan=nan, code=code, end=end))
    return [interpreter(), str(script)]


def run_it(tmp_path: Path, *options: str, command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*cli(), "run", "--dir", str(tmp_path / "runs"), "--name", "r", *options, "--", *command],
        env={**os.environ, "PYTHON_EXEC": interpreter()},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_run_keeps_stdout_clean_and_reports(tmp_path: Path) -> None:
    report = tmp_path / "report.json"

    result = run_it(tmp_path, "--report", str(report), command=trainer(tmp_path, nan=12))

    assert (result.returncode, result.stdout) == (0, "the result\n"), result.stderr
    assert "the talk" in result.stderr
    assert "CRITICAL" in result.stderr
    written = json.loads(report.read_text())
    assert (written["exit_code"], written["is_complete"], written["run"]) == (0, True, "r")
    assert written["incidents"][0]["opened_step"] == 12
    assert (
        "step 29 judged"
        in subprocess.run([*cli(), "status", str(tmp_path / "runs" / "r")], capture_output=True, text=True).stdout
    )


def test_run_judges_a_command_that_dies_in_mid_step(tmp_path: Path) -> None:
    result = run_it(tmp_path, command=trainer(tmp_path, nan=29, end="os.kill(os.getpid(), 9)"))

    assert result.returncode == 137
    assert "2 incidents" in result.stderr, result.stderr
    assert "CRITICAL NaN born in" in result.stderr
    assert "ended: " in result.stderr


@pytest.mark.parametrize(
    ("options", "nan", "code", "expected"),
    [
        ((), 12, 0, 0),
        (("--fail-on", "critical"), 12, 0, 1),
        (("--fail-on", "critical"), -1, 0, 0),
        (("--fail-on", "critical"), 12, 7, 7),
    ],
    ids=["found", "fail on", "clean", "own code"],
)
def test_runs_exit_code(tmp_path: Path, options: tuple[str, ...], nan: int, code: int, expected: int) -> None:
    assert run_it(tmp_path, *options, command=trainer(tmp_path, nan=nan, code=code)).returncode == expected


def test_a_daemon_that_is_killed_is_started_again(tmp_path: Path) -> None:
    lock = tmp_path / "runs" / "r" / ".daemon" / "lock"
    script = (
        "import os, sys, time, signal, pathlib\n"
        f"lock = pathlib.Path({str(lock)!r})\n"
        "seen = []\n"
        "for _ in range(600):\n"
        "    text = lock.read_text() if lock.exists() else ''\n"
        "    pid = int(text.split()[0]) if text.split() else 0\n"
        "    if pid and pid not in seen:\n"
        "        seen.append(pid)\n"
        "        if len(seen) == 3: break\n"
        "        os.kill(pid, signal.SIGKILL)\n"
        "    time.sleep(0.02)\n"
        "print(len(seen))\n"
    )

    result = run_it(tmp_path, command=[interpreter(), "-c", script])

    assert (result.returncode, result.stdout) == (0, "3\n"), result.stderr
    assert "0 anomalies" in result.stderr


def test_signals_pass_through_to_the_command(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    script = f"trap 'exit 9' USR1; touch {ready}; while :; do sleep 0.05; done"
    process = subprocess.Popen([*cli(), "run", "--dir", str(tmp_path / "runs"), "--", "sh", "-c", script])
    wait_for(ready.exists, "the command")

    process.send_signal(signal.SIGUSR1)

    assert process.wait(240) == 9
