"""A night on call: three runs, two daemons, a Prometheus, an Alertmanager and four receivers. Each is told what it has to
know, once, and nothing else."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sentinel.messages import Heartbeat
from sentinel.testing import LossJump, Nan, SyntheticRun

from ..support.results import incidents
from ..support.servers import Receiver, alertmanager, get_json, need, prometheus
from ..support.waiting import wait_for
from ..support.warm import cli
from .test_failover import Candidate

pytestmark = [pytest.mark.server, pytest.mark.long]

RULES = """\
rules:
  - {name: stale-rank, detector: StaleRank, severity: critical, args: {hang_after_s: 3, stale_after_s: 600}}
"""
SENT = re.compile(r'sentinel_notifications_total\{[^}]*outcome="sent"[^}]*\} (\S+)')
DEPLOY = Path(__file__).parents[2] / "deploy"


class LiveRun:
    """Ranks that write as they train: ten steps and some heartbeats a second, until they hang, fail or end."""

    def __init__(self, directory: Path, num_ranks: int, seed: int) -> None:
        self.source = SyntheticRun(directory, dp=num_ranks, layers=2, d_model=8, elements=8, seed=seed, step_time_s=0.1)
        directory.chmod(0o700)
        self.name = directory.name
        self._mutex = threading.Lock()
        self._hung: int | None = None
        self._is_over = self._is_quiet = False
        self._thread = threading.Thread(target=self._train)

    def start(self) -> None:
        self._thread.start()

    def at(self, step: int) -> None:
        wait_for(lambda: self.source.step >= step, timeout_s=240.0)

    def plant(self, make: Callable[[int], Any]) -> int:
        """Have a fault happen two steps from now; returns its step."""
        with self._mutex:
            step = self.source.step + 2
            self.source.plant(make(step))
        return step

    def hang(self, rank: int) -> int:
        """Have a rank stop in mid-step, while the others wait for it."""
        with self._mutex:
            self._hung = rank
            for other in range(self.source.num_ranks):
                self.source.write_rank(other, self.source.step, end=False)
            return self.source.step

    def fail(self, rank: int, error: str, message: str) -> None:
        """Have a rank raise; the launcher ends the others."""
        with self._mutex:
            self._is_quiet = True
            self.source.end(rank, "exception", error=error, message=message)
            for other in range(self.source.num_ranks):
                if other != rank:
                    self.source.kill(other)

    def relaunch(self) -> None:
        """Go on from the newest checkpoint, as a launcher has it."""
        with self._mutex:
            self.source.restart(self.source.step, attempt=(self.source.attempt or 0) + 1)
            self._hung, self._is_quiet = None, False

    def end(self) -> None:
        """End in order."""
        with self._mutex:
            self._is_over = True
            self.source.end()

    def close(self) -> None:
        self._is_over = True
        if self._thread.ident is not None:
            self._thread.join()

    def _train(self) -> None:
        while not self._is_over:
            with self._mutex:
                if not self._is_over and not self._is_quiet:
                    self._turn()
            time.sleep(0.1)

    def _turn(self) -> None:
        step = self.source.step
        if self._hung is None:
            self.source.write()
        for rank in range(self.source.num_ranks):
            is_hung = rank == self._hung
            self.source.report(
                rank, Heartbeat(step=step, call_id=3 if is_hung else 9 if self._hung is not None else 0, activity="train")
            )


class Told:
    """What a receiver was told, as (run, what changed, text)."""

    def __init__(self, receiver: Receiver, read: Callable[[Any], list[tuple[str, str, str]]]) -> None:
        self.receiver, self._read = receiver, read

    def all(self) -> list[tuple[str, str, str]]:
        return [one for body in self.receiver.bodies() for one in self._read(body)]

    def of(self, run: str) -> list[str]:
        return [change for name, change, _ in self.all() if name == run]


def from_webhook(body: Any) -> list[tuple[str, str, str]]:
    return [(one["incident"]["run"], one["change"], one["text"]) for one in body["alerts"]]


def from_slack(body: Any) -> list[tuple[str, str, str]]:
    text = body["text"]
    found = re.match(r"([^:]+): run (\w+)", text)
    assert found, text
    return [(found[2], found[1], text)]


def from_pagerduty(body: Any) -> list[tuple[str, str, str]]:
    run = body["dedup_key"].partition(":")[0]
    return [(run, body["event_action"], body.get("payload", {}).get("summary", ""))]


def from_alertmanager(body: Any) -> list[tuple[str, str, str]]:
    return [
        (one["labels"].get("run", one["labels"]["alertname"]), one["status"], one["annotations"].get("summary", ""))
        for one in body["alerts"]
    ]


@contextlib.contextmanager
def night(tmp_path: Path) -> Iterator[dict[str, Any]]:
    runs = tmp_path / "runs"
    runs.mkdir(mode=0o700)
    with contextlib.ExitStack() as stack:
        heard = {name: stack.enter_context(Receiver().running()) for name in ("slack", "pager", "hook", "am")}
        am = stack.enter_context(alertmanager(tmp_path, heard["am"].url))
        for name, secret in (("slack", heard["slack"].url), ("key", "0123456789abcdef0123456789abcdef")):
            (tmp_path / name).write_text(secret + "\n")
            (tmp_path / name).chmod(0o600)
        config = tmp_path / "daemon.yaml"
        # These ranks answer no command.
        config.write_text(f"""
control: {{escalate: false}}
notify:
  external_url: http://sentinel.example.org
  sinks:
    - {{type: slack, url_file: {tmp_path / "slack"}, route: {{min_severity: critical}}, digest_after: 50}}
    - type: pagerduty
      routing_key_file: {tmp_path / "key"}
      url: {heard["pager"].url}
      route: {{min_severity: critical}}
    - {{type: webhook, url: "{heard["hook"].url}"}}
    - {{type: alertmanager, urls: ["{am}"], resend_interval_s: 1}}
""")
        (tmp_path / "rules.yaml").write_text(RULES)
        live = [LiveRun(runs / name, 2, seed) for seed, name in enumerate(("alpha", "beta", "gamma"))]
        for one in live:
            stack.callback(one.close)
            one.start()
        daemons: list[Candidate] = []
        stack.callback(lambda: [one.end(signal.SIGKILL) for one in daemons if one.process.poll() is None])

        def daemon() -> Candidate:
            daemons.append(
                Candidate(runs, config, tmp_path / f"daemon{len(daemons)}.log", "--rules", str(tmp_path / "rules.yaml"))
            )
            return daemons[-1]

        told = {
            "slack": Told(heard["slack"], from_slack), "pager": Told(heard["pager"], from_pagerduty),
            "hook": Told(heard["hook"], from_webhook), "am": Told(heard["am"], from_alertmanager),
        }  # fmt: skip
        yield {"runs": runs, "live": live, "daemon": daemon, "told": told, "am": am}


def command(runs: Path, run: str, *arguments: str) -> None:
    done = subprocess.run([*cli(), *arguments, "-d", str(runs / run)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(900)
def test_each_receiver_is_told_what_it_has_to_know_once_and_nothing_else(tmp_path: Path) -> None:
    need("prometheus-alertmanager", "prometheus")
    with contextlib.ExitStack() as stack:
        shift = stack.enter_context(night(tmp_path))
        runs, told = shift["runs"], shift["told"]
        alpha, beta, gamma = shift["live"]

        def all_heard(run: str, change: str = "", most_s: float = 200.0) -> None:
            """Wait until every receiver was told of a run; change: as the webhook calls it, and until it was."""
            wait_for(lambda: all(one.of(run) for one in told.values()), timeout_s=most_s)
            wait_for(lambda: not change or change in told["hook"].of(run), timeout_s=most_s)

        active = shift["daemon"]()
        active.wait_until_ready()
        standby = shift["daemon"]()
        own = [one.url.removeprefix("http://") for one in (active, standby)]
        rules = DEPLOY / "prometheus" / "sentinel.rules.yml"
        watcher = stack.enter_context(
            prometheus(tmp_path, own[0], rules, also=own[1:], alertmanager=shift["am"].removeprefix("http://"))
        )
        for one in (alpha, beta, gamma):
            one.at(60)

        # 01:10: a NaN gets into the weights of alpha.
        step = alpha.plant(lambda step: Nan(step=step, module="layers.1", is_skipped=False))
        all_heard("alpha", "opened")
        wait_for(lambda: sum(map(float, SENT.findall(active.get("/metrics")[1]))) >= len(told), "outcomes on disk")

        # 01:20: the daemon dies, and the other takes over.
        active.end(signal.SIGKILL)
        standby.wait_until_ready()

        # 02:00: the loss of gamma jumps for two seconds. Who is behind would see it come and go at once, and say so.
        judged = re.compile(r'sentinel_judged_step\{[^}]*run="gamma"[^}]*\} (\S+)')
        wait_for(lambda: float(judged.findall(standby.get("/metrics")[1])[0]) >= gamma.source.step - 5, "one that keeps up")
        jump = gamma.plant(lambda step: LossJump(step=step, factor=6.0, for_steps=18))
        all_heard("gamma", "opened")

        # 02:15: the loss of beta jumps too, as its people knew it would.
        silence = ["silence", "add", "run=beta", "detector=LossSpike", "--for", "2h", "--why", "new data", "--who", "eve"]
        command(runs, "", *silence)
        wait_for(lambda: "new data" in standby.get("/api/v1/silences")[1])
        beta.plant(lambda step: LossJump(step=step, factor=6.0, for_steps=10))

        # 02:30: somebody takes the NaN of alpha.
        command(runs, "alpha", "ack", "worst", "--who", "ana", "--why", "looking")
        all_heard("alpha", "acknowledged")
        all_heard("gamma", "resolved")

        wait_for(lambda: [one for one in incidents(runs / "beta") if one.state == "resolved"], "the silenced one")

        # 03:00: a rank of beta hangs; then it raises.
        hung = beta.hang(1)
        all_heard("beta", "opened")
        beta.fail(1, "RuntimeError", "NCCL communicator was aborted on rank 1")
        wait_for(lambda: told["hook"].of("beta").count("opened") == 2)

        # 03:20: its launcher begins anew, and it trains on.
        beta.relaunch()
        wait_for(lambda: told["hook"].of("beta").count("ended") == 2, timeout_s=240.0)
        beta.at(beta.source.step + 30)

        # 05:00: alpha is done.
        alpha.end()
        all_heard("alpha", "ended")
        wait_for(lambda: told["am"].of("Watchdog"))
        scraped = f"{watcher}/api/v1/query?query=sum(sentinel_open_incidents)"
        wait_for(lambda: get_json(scraped)["data"]["result"], "what Prometheus scraped", timeout_s=240.0)
        time.sleep(5)  # Nothing more is said.

    nan = f"NaN born in layers.1 (forward) on rank 0, micro_step 0, step {step}"
    spike = re.compile(rf"loss-spike: loss \S+ against \S+ at step {jump}")
    hang = re.compile(rf"rank 1 hangs: no progress for \S+ s \(limit 3 s\); last seen in step {hung}, call 3; rank 0 waits")
    error = (
        f"rank 1, in step {hung - 1}, raised RuntimeError: NCCL communicator was aborted on rank 1; it was the first to go"
    )
    for name, one in told.items():
        for run, change, text in one.all():
            assert (
                not text
                or (nan in text) + bool(spike.search(text)) + bool(hang.search(text)) + (error in text) == 1
                or run == "Watchdog"
                # The one that was killed, which Prometheus waits for as long as its rule says.
                or (run == "SentinelDown" and own[0] in text)
            ), (name, run, change, text)
            assert "(repeated)" not in text
    assert told["hook"].of("alpha") == ["opened", "acknowledged", "ended"]
    assert [change for change in told["hook"].of("gamma") if change != "refined"] == ["opened", "resolved"]
    assert sorted(told["hook"].of("beta")) == ["ended", "ended", "opened", "opened"]
    assert told["slack"].of("alpha") == ["CRITICAL", "CRITICAL, acknowledged", "CRITICAL ended"]
    assert [change for change in told["slack"].of("gamma") if "more" not in change] == ["CRITICAL", "CRITICAL resolved"]
    assert sorted(told["slack"].of("beta")) == ["CRITICAL", "CRITICAL", "CRITICAL ended", "CRITICAL ended"]
    assert told["pager"].of("alpha") == ["trigger", "acknowledge", "resolve"]
    assert told["pager"].of("gamma")[0] == "trigger" and told["pager"].of("gamma").count("resolve") == 1
    assert told["pager"].of("beta").count("resolve") == 1, "that a run failed is for a person to close"
    assert told["am"].of("alpha") == ["firing", "resolved"]
    assert told["am"].of("gamma") == ["firing", "resolved"]
    assert sorted(told["am"].of("beta")) == ["firing", "firing", "resolved"]
    assert told["am"].of("Watchdog") == ["firing"]
    assert {run for run, _, _ in told["am"].all()} == {"alpha", "beta", "gamma", "Watchdog"}, "no other shipped alert"
