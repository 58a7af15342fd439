"""`sentinel demo`: a small GPT on 2 pipeline stages x 2 replicas, faults planted, and whether Sentinel found them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

import sentinel
from sentinel.anomaly import Anomaly
from sentinel.cli.demo_machines import DemoMachines, OneMachine, TwoNodes
from sentinel.cli.demo_plan import FLEET_PLAN, DemoOutcome, DemoPlan, judge
from sentinel.cli.demo_progress import DemoBar, Lines, progress
from sentinel.cli.demo_receiver import Message, Receiver
from sentinel.cli.demo_story import Scene, story
from sentinel.cli.main import CLEAN, FOUND
from sentinel.cli.places import run_name, runs_directory
from sentinel.decision import Decision, decode_decision
from sentinel.errors import ConfigError
from sentinel.handled_signals import handled
from sentinel.incident import Incident
from sentinel.store.journal import Journal
from sentinel.store.run_paths import RunPaths

TRAINING_LIMIT_S = 600.0
"""The trainer is ended after this; on 2 cores it needs about 30 s."""
DRAIN_LIMIT_S = 20.0
BEGIN_LIMIT_S = 120.0
SHOWN_GAUGES = (
    "sentinel_judged_step", "sentinel_records_total", "sentinel_loss", "sentinel_grad_norm", "sentinel_rows_dropped_total",
    "sentinel_open_incidents", "sentinel_anomalies_total", "sentinel_nonfinite_elements_total", "sentinel_commands_total",
    "sentinel_notifications_total",
)  # fmt: skip


@click.command()
@click.option(
    "--dir", "directory", metavar="DIR",
    help="Directory of runs; the demo makes a run of its own in it. Default: $SENTINEL_DIR, else ./sentinel_runs.",
)  # fmt: skip
@click.option(
    "--fleet", "is_fleet", is_flag=True,
    help="Train on two nodes without a shared disk, with a broker (nats-server), a shipper each and a join, and kill some.",
)  # fmt: skip
@click.option("--keep", is_flag=True, help="Keep the daemon and its page up afterwards, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the story.")
def demo(directory: str | None, is_fleet: bool, keep: bool, as_json: bool) -> int:
    """Train a small GPT on the text of Python's standard library, plant two faults, and find them.

    The trainer, the daemon and the receiver of alerts are processes of their own; all that passes between trainer and
    daemon is the run's directory. Exit 0 only when everything planted was found, by module, rank and micro-batch, and
    nobody was notified of anything that is not true.
    """
    began = time.monotonic()
    where = runs_directory(directory) / run_name(
        f"demo-{'fleet-' if is_fleet else ''}{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    )
    plan = FLEET_PLAN if is_fleet else DemoPlan()
    show = progress(plan.num_steps)
    # SIGTERM as Ctrl-C: what was started is ended with it.
    with (
        handled([signal.SIGTERM], _interrupt),
        contextlib.closing(Stage(TwoNodes(where, plan, show.line) if is_fleet else OneMachine(where), plan, show)) as stage,
    ):
        stage.perform()
        scene = stage.scene(time.monotonic() - began)
        if as_json:
            click.echo(json.dumps(scene.report(), indent=2))
        else:
            for line in story(scene):
                click.echo(line)
        if keep:
            stage.print(f"the page stays at {stage.machines.url} until Ctrl-C")
            while stage.machines.pid is not None:
                time.sleep(0.5)
    return CLEAN if scene.outcome.holds else FOUND


def _interrupt(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise KeyboardInterrupt


class Stage:
    """Receiver, what watches, and trainer of one demo. Progress goes to stderr."""

    def __init__(self, machines: DemoMachines, plan: DemoPlan, show: DemoBar | Lines) -> None:
        self.machines, self.plan = machines, plan
        self.run_dir = machines.run_dir
        self._show = show
        self._step = -1
        """Newest that the trainer said."""
        self._trainers: list[subprocess.Popen[str]] = []
        self._example = _find_example()
        private = machines.private
        private.mkdir(mode=0o700, parents=True)
        private.parent.chmod(0o700)
        self.receiver = Receiver(lambda message: self._received(message))
        slack_file, config = private / "slack-url", private / "daemon.yaml"
        slack_file.write_text(f"{self.receiver.url}/slack")
        config.write_text(
            # Two faults in a few seconds: the second must not wait until the first escalation has cooled down.
            "control: {cooldown_s: 1.0}\n"
            "notify:\n  sinks:\n"
            f"    - {{type: slack, url_file: '{slack_file}'}}\n"
            f"    - {{type: alertmanager, urls: ['{self.receiver.url}/alertmanager']}}\n"
            f"    - {{type: webhook, url: '{self.receiver.url}/webhook'}}\n"
        )
        self._faults = private / "faults.json"
        self._faults.write_text(json.dumps(plan.faults()))
        self._monitor = private / "monitor.yaml"
        # What the demo checks does not depend on how fast this machine is.
        self._monitor.write_text("max_overhead: null\n")
        machines.start(config)

    def print(self, text: str) -> None:
        """Write one line to stderr."""
        self._show.line(text)

    def perform(self) -> None:
        """Train to the end and wait until every step was judged."""
        self.print(f"run {self.run_dir.name} in {self.run_dir}")
        self._await_page()
        self.print(self.machines.words)
        self.print("trainer: 2 pipeline stages x 2 replicas, 4 micro-batches, every module's activations off")
        deadline = time.monotonic() + TRAINING_LIMIT_S
        log = self.machines.private / "trainer.log"
        readers = self._start_trainers(log)
        news = self._news()
        while any(one.poll() is None for one in self._trainers) and not any(one.poll() for one in self._trainers):
            if time.monotonic() > deadline:
                raise ConfigError(f"the trainer took more than {TRAINING_LIMIT_S:g} s; see {log}")
            self._print_all(next(news))
            self._watch()
            time.sleep(0.05)
        failed = next((one.returncode for one in self._trainers if one.poll()), 0)
        if failed:
            raise ConfigError(f"the trainer ended with exit code {failed}; see {log}")
        for reader in readers:
            reader.join(2)
        self._await_diagnoses()
        self._print_all(next(news))
        self._show.close()

    def _start_trainers(self, log: Path) -> list[threading.Thread]:
        """Start the ranks; returns the threads that read what they print."""
        environment = dict(os.environ)
        for variable in ("SENTINEL_DISABLE", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
            environment.pop(variable, None)
        root = str(Path(sentinel.__file__).parents[1])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        readers = []
        with log.open("w") as errors:
            for one in self.machines.launches():
                command = [
                    sys.executable, str(self._example / "launch.py"), *one.options, "--",
                    str(self._example / "train.py"), "--steps", str(self.plan.num_steps), "--faults", str(self._faults),
                    "--sentinel-config", str(self._monitor), "--step-time", str(self.plan.step_time_s),
                ]  # fmt: skip
                trainer = subprocess.Popen(
                    command, env={**environment, "SENTINEL_DIR": str(one.runs), "SENTINEL_RUN": one.run},
                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True,
                )  # fmt: skip
                self._trainers.append(trainer)
                readers.append(
                    threading.Thread(target=self._read_trainer, args=(trainer,), name="trainer-output", daemon=True)
                )
                readers[-1].start()
        return readers

    def scene(self, seconds: float) -> Scene:
        """Return what files, receiver and /metrics hold at the end. seconds: that the demo took."""
        notified = [
            msgspec.convert(alert["incident"], Incident)
            for message in self.receiver.messages
            if message.to == "webhook"
            for alert in message.body["alerts"]
        ]
        outcome = judge(
            self.plan, read_anomalies(self.run_dir), read_incidents(self.run_dir), notified,
            num_judged=num_judged(self.run_dir), num_dropped=int(sum(self._gauge("sentinel_rows_dropped_total"))),
            texts=[message.text for message in self.receiver.messages if message.to == "Slack"],
        )  # fmt: skip
        outcome = msgspec.structs.replace(
            outcome, claims=outcome.claims + self.machines.claims(self.plan, self.receiver.messages)
        )
        steps = [step for step in (outcome.black_box_step, outcome.escalated_step) if step is not None]
        return Scene(
            plan=self.plan, outcome=outcome, topk={step: self._topk(outcome, step) for step in steps},
            messages=list(self.receiver.messages), gauges=self._gauges(), run_dir=self.run_dir, url=self.machines.url,
            seconds=seconds, postmortem=self._postmortem(),
        )  # fmt: skip

    def _gauges(self) -> list[str]:
        """Return the lines of /metrics that are shown, zero counters left out."""
        shown = []
        for line in self._scrape().splitlines():
            name = re.split(r"[{ ]", line, maxsplit=1)[0]
            is_zero = line.endswith((" 0", " 0.0"))
            if name in SHOWN_GAUGES and not (is_zero and name not in ("sentinel_rows_dropped_total",)):
                shown.append(line.replace(f'run="{self.run_dir.name}",', "").replace(f'{{run="{self.run_dir.name}"}}', ""))
        return shown

    def _topk(self, outcome: DemoOutcome, step: int) -> list[dict[str, Any]]:
        """Return what `sentinel topk` says of one step of the incident."""
        out = self.machines.private / f"topk-{step}"
        command = [
            sys.executable, "-m", "sentinel.cli", "topk", "-d", str(self.run_dir), "-k", "5", "-s", str(step), "--json",
            "-o", str(out),
        ]  # fmt: skip
        if outcome.incident is not None:
            command += ["--incident", outcome.incident.id]
        answer = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        try:
            return list(json.loads(answer.stdout)["anomalies"])
        except ValueError as error:
            raise ConfigError(f"sentinel topk gave no JSON: {answer.stderr.strip()[-500:]}") from error

    def _postmortem(self) -> str:
        """Write the run's post-mortem, and return its file; empty where that cannot be done."""
        path = self.machines.private / "postmortem.html"
        command = [sys.executable, "-m", "sentinel.cli", "report", str(self.run_dir), "-o", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if done.returncode:
            self.print(f"no post-mortem: {done.stderr.strip()[-500:]}")
        return "" if done.returncode else str(path)

    def close(self) -> None:
        """End the processes that were started."""
        self._show.close()
        for trainer in self._trainers:
            if trainer.poll() is None:
                trainer.terminate()
        for trainer in self._trainers:
            try:
                trainer.wait(10)
            except subprocess.TimeoutExpired:
                trainer.kill()
                trainer.wait()
        self.machines.finish(DRAIN_LIMIT_S)
        self.receiver.close()

    def _await_page(self) -> None:
        deadline = time.monotonic() + BEGIN_LIMIT_S
        while not self.machines.is_ready:
            if time.monotonic() > deadline:
                raise ConfigError(f"what judges did not come up within {BEGIN_LIMIT_S:g} s; see {self.machines.state_log}")
            self._watch()
            time.sleep(0.05)

    def _watch(self) -> None:
        self.machines.watch(
            self._step, self.receiver.messages, lambda: int(sum(self._gauge("sentinel_notifications_pending")))
        )
        if self.machines.problem:
            raise ConfigError(self.machines.problem)

    def _await_diagnoses(self) -> None:
        wanted = self.plan.num_steps - 1
        deadline = time.monotonic() + DRAIN_LIMIT_S
        while time.monotonic() < deadline:
            self._watch()
            judged = self._gauge("sentinel_judged_step")
            if judged and judged[0] >= wanted and not any(self._gauge("sentinel_notifications_pending")):
                return
            time.sleep(0.2)
        self.print(f"not every step was judged within {DRAIN_LIMIT_S:g} s of the trainer's end")

    def _gauge(self, name: str) -> list[float]:
        return [float(value) for value in re.findall(rf"^{name}\{{[^}}]*\}} (\S+)", self._scrape(), re.MULTILINE)]

    def _scrape(self) -> str:
        try:
            with urllib.request.urlopen(f"{self.machines.url}/metrics", timeout=5) as answer:
                return str(answer.read(), "utf-8")
        except OSError:
            return ""

    def _read_trainer(self, trainer: subprocess.Popen[str]) -> None:
        assert trainer.stdout is not None
        for line in trainer.stdout:
            step = re.match(r"step\s+(\d+)", line)
            if step:
                self._step = int(step[1])
                self._show.step(self._step, line.rstrip())

    def _received(self, message: Message) -> None:
        if message.to != "webhook":
            self.print(f"  -> {message.to} hears: {message.text}")

    def _news(self) -> Iterator[list[str]]:
        """Yield what came since the last look: incidents and commands, in words."""
        seen_commands: set[str] = set()
        offset, known = 0, {}  # type: int, dict[str, Incident]
        path = self.run_dir / "incidents.jsonl"
        while True:
            lines = []
            if path.exists():
                with path.open("rb") as stream:
                    stream.seek(offset)
                    new = stream.read()
                whole = new[: new.rfind(b"\n") + 1]
                offset += len(whole)
                for raw in whole.splitlines():
                    now = msgspec.json.decode(raw, type=Incident)
                    before = known.get(now.id)
                    known[now.id] = now
                    if before is None or (before.state, before.module, before.severity) != (
                        now.state, now.module, now.severity,
                    ):  # fmt: skip
                        lines.append(
                            f"  incident {now.id} {now.state}, {now.severity.value}, step {now.opened_step}: {now.title}"
                            + (f"; first cause: {now.root_name}" if now.root_name else "")
                        )
            for file in sorted((self.run_dir / "control").glob("*.json")):
                if file.name not in seen_commands:
                    seen_commands.add(file.name)
                    command = json.loads(file.read_bytes())
                    at = f" at step {command['at_step']}" if "at_step" in command else ""
                    kinds = f" of {', '.join(command['kinds'])}" if command.get("kinds") else ""
                    lines.append(f"  command {command.get('type')}{kinds}{at}: {command.get('reason', '')}")
            yield lines

    def _print_all(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.print(line)


def _find_example() -> Path:
    folder = Path(sentinel.__file__).parents[1] / "examples" / "gpt"
    if not (folder / "train.py").is_file():
        raise ConfigError(f"{folder}: expected the example trainer, found none; run the demo from a checkout")
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise ConfigError("the demo trains a model and needs torch: pip install sentinel[train]") from error
    return folder


def num_judged(run_dir: Path) -> int:
    """Return how many steps of a run were judged, by its journal: a daemon's own counts begin anew with its process."""
    journal = Journal(RunPaths.of(run_dir).journal, read_only=True)
    try:
        return sum(isinstance(decode_decision(kind, body), Decision) for _, kind, body in journal.decisions())
    finally:
        journal.close()


def read_anomalies(run_dir: Path) -> list[Anomaly]:
    """Return every anomaly of a run, in the order of its files."""
    decode = msgspec.json.Decoder(Anomaly).decode
    files = sorted((run_dir / "anomalies").glob("*.jsonl"))
    return [decode(line) for file in files for line in file.read_bytes().splitlines()]


def read_incidents(run_dir: Path) -> list[Incident]:
    """Return every revision of every incident of a run, in the order written."""
    path = run_dir / "incidents.jsonl"
    decode = msgspec.json.Decoder(Incident).decode
    return [decode(line) for line in path.read_bytes().splitlines()] if path.exists() else []
