"""Kill the daemon with SIGKILL at random moments, over and over, and compare with a run that nobody disturbed.

    python benchmarks/kill9.py [--rounds 500] [--seed 0]

Half of the campaigns judge recorded frames, half judge while a writer process writes. What must hold: the same anomaly
and incident files byte for byte, the same alerts in the outbox, each once, and a replay that is identical.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

sys.path.insert(0, str(Path(__file__).parent))

from recording import Recording, lines_of, record

from sentinel.store.journal import Journal
from sentinel.store.run_paths import RunPaths

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event

AHEAD = 20
"""Steps that a writer is at most before the daemon, which is so always amid the run, however slow the machine is."""
NUM_STEPS = {True: 300, False: 1500}
"""Of a campaign, by whether frames are written meanwhile."""
"""Steps of a campaign, live or recorded: a daemon that catches up judges some hundred steps between two commits."""
CONFIG = """\
judging: {snapshot_interval_s: 0.05}
notify:
  sinks:
    - {type: webhook, name: hook, url: "http://127.0.0.1:9/", route: {min_severity: info}}
"""


class Outcome(NamedTuple):
    """What a campaign did and found."""

    num_kills: int
    num_hit: int
    """Kills that found the daemon judging: decisions had been made and not all were made."""
    num_anomalies: int
    differences: list[str]


def faults(num_steps: int) -> dict[str, tuple[int, ...]]:
    """Return the steps at which faults strike: the same few in every 300."""
    rounds = range(0, num_steps, 300)
    nan_steps = tuple(base + step for base in rounds for step in (37, 38, 120, 250, 251, 252))
    return {"nan_steps": nan_steps, "spike_steps": tuple(base + step for base in rounds for step in (80, 200))}


def serve(run_dir: Path, config: Path, *options: str) -> subprocess.Popen[bytes]:
    """Start the daemon of a run, which closes open steps when it is ended in order. options: further ones of `serve`."""
    command = [
        sys.executable,
        "-m",
        "sentinel.cli",
        "serve",
        str(run_dir),
        "--owned",
        "--no-http",
        "--config",
        str(config),
        *options,
    ]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def progress(run_dir: Path) -> tuple[int, int]:
    """Return (decisions made, decisions judged) of a run."""
    path = RunPaths.of(run_dir).journal
    if not path.exists():
        return 0, 0
    try:
        journal = Journal(path, read_only=True)
    except Exception:
        return 0, 0
    try:
        return journal.last_seq, journal.judged
    finally:
        journal.close()


def finish(run_dir: Path, config: Path, num_steps: int, timeout_s: float = 60.0, options: tuple[str, ...] = ()) -> None:
    """Serve until every step is judged, then end in order."""
    process = serve(run_dir, config, *options)
    deadline = time.monotonic() + timeout_s
    lock = RunPaths.of(run_dir).lock_directory / "lock"
    # Its own name in the lock says that it has begun, and so has handlers for the signal that ends it in order.
    while time.monotonic() < deadline and process.poll() is None:
        has_begun = lock.exists() and lock.read_text().startswith(f"{process.pid} ")
        if has_begun and progress(run_dir)[1] >= num_steps:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, talk = process.communicate(timeout=30)
    if process.returncode != 0:
        raise RuntimeError(f"the daemon ended with {process.returncode}: {talk.decode()[-2000:]}")


def reported(run_dir: Path) -> list[str]:
    """Return the keys of all alerts that were ever put into the outbox, in order."""
    journal = Journal(RunPaths.of(run_dir).journal, read_only=True)
    try:
        return [row[0] for row in journal._file.db.execute("SELECT key FROM outbox ORDER BY position")]
    finally:
        journal.close()


def write_slowly(run_dir: Path, num_steps: int, pause_s: float, planted: dict[str, tuple[int, ...]]) -> None:
    """Write a run at the pace of a training; the body of a writer process."""
    recording = Recording(run_dir, **planted)
    for step in range(num_steps):
        recording.step(step)
        time.sleep(pause_s)
    recording.bye(num_steps - 1)


def write_beside(run_dir: Path, num_steps: int, is_left_alone: Event) -> None:
    """Write a run little before its daemon has judged it, the last steps once nobody ends the daemon any more."""
    recording = Recording(run_dir, **faults(num_steps))
    for step in range(num_steps):
        while not is_left_alone.is_set() and step > min(progress(run_dir)[0] + AHEAD, num_steps - AHEAD):
            time.sleep(0.01)
        recording.step(step)
    recording.bye(num_steps - 1)


def wait_for_moment(run_dir: Path, num_steps: int, kills_left: int, rng: random.Random) -> None:
    """Return at a random moment: while it starts, one time in four; else after a random share of the steps that are left.

    num_steps: as many as it can judge meanwhile.
    """
    if rng.random() < 0.25:
        time.sleep(rng.uniform(0.0, 0.8))
        return
    made = progress(run_dir)[0]
    target = made + rng.randint(1, max(1, 2 * (num_steps - made) // kills_left))
    deadline = time.monotonic() + 120.0
    while progress(run_dir)[0] < min(target, num_steps) and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(rng.uniform(0.0, 0.01))


def campaign(where: Path, num_kills: int, rng: random.Random, *, is_live: bool, num_steps: int) -> Outcome:
    """Judge one run undisturbed and one under SIGKILL, and return what differs."""
    where.mkdir(parents=True, exist_ok=True)
    config = where / "daemon.yaml"
    config.write_text(CONFIG)
    golden = record(where / "golden" / "run", num_steps, **faults(num_steps))
    finish(golden, config, num_steps)
    disturbed = where / "disturbed" / "run"
    context = multiprocessing.get_context("spawn")
    is_left_alone = context.Event()
    writer = context.Process(target=write_beside, args=(disturbed, num_steps, is_left_alone))
    num_there = num_steps
    if is_live:
        disturbed.mkdir(mode=0o700, parents=True)
        (disturbed / "spool").mkdir(mode=0o700)
        writer.start()
        num_there = num_steps - 2 * AHEAD
    else:
        record(disturbed, num_steps, **faults(num_steps))
    num_hit = 0
    for number in range(num_kills):
        process = serve(disturbed, config)
        wait_for_moment(disturbed, num_there, num_kills - number, rng)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        made, judged = progress(disturbed)
        num_hit += 0 < made < num_steps or judged < made
    is_left_alone.set()
    if is_live:
        writer.join(120)
    finish(disturbed, config, num_steps)
    differences = compare(golden, disturbed, where)
    return Outcome(num_kills, num_hit, sum(1 for _ in lines_of(golden)), differences)


def compare(golden: Path, disturbed: Path, where: Path) -> list[str]:
    """Return in words what is not the same in two runs."""
    found = different_lines(golden, disturbed)
    if reported(golden) != reported(disturbed):
        found.append(f"expected the alerts {reported(golden)}, got {reported(disturbed)}")
    return found + different_replay(disturbed, where)


def different_lines(golden: Path, disturbed: Path) -> list[str]:
    """Return in words where the anomalies or incidents of two runs are not the same, byte for byte."""
    found = []
    expected, got = list(lines_of(golden)), list(lines_of(disturbed))
    if not expected:
        found.append("the undisturbed run has no anomalies: nothing was compared")
    for number, (one, other) in enumerate(zip(expected, got, strict=False)):
        if one != other:
            found.append(f"line {number}: {_fields_that_differ(one, other)}")
            break
    if len(expected) != len(got):
        found.append(f"expected {len(expected)} lines, got {len(got)}")
    ids = [msgspec.json.decode(line).get("id", "") + str(msgspec.json.decode(line).get("revision", "")) for line in got]
    if len(ids) != len(set(ids)):
        found.append("an anomaly or a revision is there twice")
    return found


def _fields_that_differ(one: bytes, other: bytes) -> str:
    expected, got = msgspec.json.decode(one), msgspec.json.decode(other)
    names = [name for name in {**expected, **got} if expected.get(name) != got.get(name)]
    return ", ".join(f"{name} of {got.get('id')}: expected {expected.get(name)!r}, got {got.get(name)!r}" for name in names)


def different_replay(disturbed: Path, where: Path) -> list[str]:
    """Return in words where a replay of a run differs from what its daemon wrote."""
    command = [sys.executable, "-m", "sentinel.cli", "replay", str(disturbed), "-o", str(where / "replayed")]
    replayed = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return [f"the replay differs: {replayed.stderr[-1000:]}"] if replayed.returncode else []


def main() -> int:
    """Run the campaigns and print one line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    left, is_bad, begun, num_hit = arguments.rounds, False, time.monotonic(), 0
    number = 0
    print(f"{datetime.now(UTC):%Y-%m-%d} kill -9, {arguments.rounds} rounds, seed {arguments.seed}")
    print("campaign  frames    kills  amid judging  lines compared  differences")
    while left > 0:
        kills = min(left, rng.randint(5, 25))
        is_live = number % 2 == 1
        with tempfile.TemporaryDirectory(prefix="kill9-") as where:
            outcome = campaign(Path(where), kills, rng, is_live=is_live, num_steps=NUM_STEPS[is_live])
        kind = "live" if is_live else "recorded"
        print(
            f"{number:8}  {kind:8}  {kills:5}  {outcome.num_hit:12}  {outcome.num_anomalies:14}  {len(outcome.differences)}",
            flush=True,
        )
        for difference in outcome.differences:
            print("   ", difference)
        is_bad = is_bad or bool(outcome.differences)
        num_hit += outcome.num_hit
        left -= kills
        number += 1
    print(
        f"{arguments.rounds} kills, {num_hit} amid judging, "
        f"{'DIFFERENCES' if is_bad else 'no difference'}, {time.monotonic() - begun:.0f} s"
    )
    return 1 if is_bad else 0


if __name__ == "__main__":
    sys.exit(main())
