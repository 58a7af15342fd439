"""Real ranks under torchrun that end in every way: who is told, how, how soon, how often, and whether any of it is false.

    python benchmarks/ends.py [--cases kill,stop] [--ranks 2,4] [--modes run,serve,later] [--times 10] [--keep DIR] [--write]

A small data-parallel model (gloo, CPU, steps of some 0.1 s); at step 12 rank 1 ends as the case says. Modes: `run`: with
`sentinel run -- torchrun`; `serve`: with a `sentinel serve` beside that was there before; `later`: a daemon looks when it is
all over. Delay: from the fault to the anomaly on disk; `later`: from the start of the daemon. Messages: what a sink of
default settings is told when an incident opens or gets worse; that a told incident is over is no message of its own.

The cases `deadlock` train the example's GPT (tests/end_to_end/deadlock_trainer.py): from step 12 on, or 0, all ranks wait
for one another; told with limits of 10 s where the default has 30 and 120. Then the command is sent SIGTERM.

The case `oom` needs ENDING_GROUP: the folder of a memory group (cgroup) with a limit, which rank 1 joins and fills.

CASES are the labels. They were written before the code was changed that this measures.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from sentinel.anomaly import Anomaly, Severity
from sentinel.cli.status import run_status
from sentinel.incident import Incident
from sentinel.report.alert import RouteConfig, change_of

ROOT = Path(__file__).parents[1]
TRAINER = ROOT / "tests" / "end_to_end" / "ending_trainer.py"
CLI = [sys.executable, "-m", "sentinel.cli"]
CLEAN = {key: value for key, value in os.environ.items() if not key.startswith("SENTINEL_")}
DEADLOCKS = TRAINER.with_name("deadlock_trainer.py")
AT = 12
LIMITS = "rules: [{name: stale-rank, args: {deadlock_after_s: 10, hang_after_s: 10}}]"
MESSAGES = ("opened", "raised", "worse", "refined", "reopened")


class Case(NamedTuple):
    """What is done, and what is to be told of it."""

    mode: str
    """What the trainer does; see its own words."""
    notified: str
    """A regular expression that the first message has to fit; empty: nobody is to be told anything."""
    later: str = ""
    """The same where a daemon finds it when all is over; empty: as `told`; `-`: not taken."""
    how: str = "exception"
    """How the run ended, in `sentinel status`."""
    within_s: float = 5.0
    most: Severity = Severity.CRITICAL
    launcher: str = "torchrun"
    act: str = ""
    """What is done to it from outside, by `acts`."""
    num_messages: int = 1
    restarts: int = 0
    rank: int | None = 1
    """Who is to be named first; None: nobody."""
    pp: int = 0
    """Pipeline stages of the example that comes to a deadlock; 0: it is not that which trains."""
    at: int = AT
    """The step at which it does."""
    beside: str = ""
    """As `told`, with `serve` beside, which does not see what is sent to the command; empty: the same."""

    def label(self, mode: str) -> tuple[str, tuple[int | None, ...], Severity]:
        """Return what is to be told, of which rank (one of these), and how grave it is at most."""
        if mode == "serve" and self.beside:
            # torchrun kills its ranks one after the other, the first one first; the others may break before they are killed.
            return self.beside, (0, None), Severity.CRITICAL
        return self.later if mode == "later" and self.later else self.notified, (self.rank,), self.most


KILLED, GONE = r"rank 1.* was killed: SIGKILL", r"rank 1.* (was killed: SIGKILL|is gone without a word)"
EACH_OTHER = r"ranks 0, 1.* wait for each other: .*, at end_to_end/deadlock_trainer.py:\d+ \(Plan.in_forward\)"
VALUE = r"rank 1.* raised ValueError: no such token: 50257"
CASES = {
    "kill": Case("kill", KILLED, GONE, how="signal"),
    "stop": Case("stop", r"rank 1 is stopped", "-", how="goodbye", act="continue"),
    "stop_kill": Case("stop", r"rank 1 is stopped", GONE, how="signal", act="kill"),
    "raise": Case("raise", VALUE),
    "memory": Case("memory", r"rank 1.* ran out of memory: MemoryError: cannot hold 3 GiB", how="out_of_memory"),
    "alloc": Case("alloc", r"rank 1.* ran out of memory: RuntimeError: .*\d{9,} bytes", how="out_of_memory"),
    "limit": Case("limit", r"rank 1.* ran out of memory: RuntimeError: .*\d{9,} bytes", how="out_of_memory"),
    "oom": Case("oom", r"rank 1.* ran out of memory: .*(MiB|GiB)", GONE, how="out_of_memory"),
    "thread": Case("thread", VALUE),
    "exit": Case("exit", r"rank 1.* ended with exit code 3"),
    "system_exit": Case("system_exit", r"rank 1.* ended with exit code 3", r"rank 1.* left while the others trained on"),
    "hard_exit": Case("hard_exit", r"rank 1.* ended with exit code 7"),
    "crash": Case("crash", r"rank 1.* SIGSEGV", r"rank 1.* (SIGSEGV|is gone without a word)", how="signal"),
    "restart": Case("raise", VALUE, how="goodbye", restarts=1),
    "spawn": Case("raise", VALUE, launcher="spawn"),
    "spawn_kill": Case("kill", KILLED, GONE, how="signal", launcher="spawn"),
    "process": Case("raise", VALUE, launcher="process"),
    "sigterm": Case(
        "none", r"ended from outside \(SIGTERM\)", r"ranks 0, 1.* gone without a word, all together.*SIGTERM or SIGKILL",
        how="signal", act="terminate", rank=None, most=Severity.WARNING,
    ),
    "handled": Case(
        "handled", r"ended from outside \(SIGTERM\)", how="signal", act="terminate", rank=None, most=Severity.WARNING,
    ),
    "saves": Case("saves", "", how="goodbye", act="terminate", rank=None, num_messages=0),
    "deaf": Case(
        "deaf", r"ended from outside \(SIGTERM", "-", how="signal", act="terminate", rank=None, most=Severity.WARNING,
        within_s=45.0,
        beside=r"(rank 0,.* was killed: SIGKILL; it was the first to go|ranks 0, .* were killed: SIGKILL; nothing tells)"
        r".*not for want of memory.*SIGTERM was ignored",
    ),
    "deadlock": Case("order", EACH_OTHER, "-", how="signal", act="end", rank=None, pp=1, within_s=20.0),
    "deadlock_alone": Case("alone", EACH_OTHER, "-", how="signal", act="end", rank=None, pp=1, within_s=20.0),
    "deadlock_pp": Case("message", EACH_OTHER, "-", how="signal", act="end", rank=None, pp=2, within_s=20.0),
    "deadlock_first": Case("message", EACH_OTHER, "-", how="signal", act="end", rank=None, pp=2, at=0, within_s=20.0),
    "usr1": Case("usr1", "", how="goodbye", num_messages=0, rank=None),
    "none": Case("none", "", how="goodbye", num_messages=0, rank=None),
}  # fmt: skip


class Taken(NamedTuple):
    """What one run brought."""

    is_named: bool
    """The first to be told is who went first, and in the words of the label."""
    delay_s: float | None
    num_messages: int
    false: list[str]
    """What was told that is not so, or not needed."""
    text: str


def command(case: Case, num_ranks: int) -> list[str]:
    """Return the command that trains."""
    trainer = [str(TRAINER), case.mode, str(AT), "1"]
    if case.pp:
        trainer = [
            str(DEADLOCKS), case.mode, str(case.at), "--pp", str(case.pp), "--steps", "100000", "--step-time", "0.1",
            "--layers", "2", "--width", "32", "--sequence", "16", "--micro-batch", "2", "--micro-batches", "2",
        ]  # fmt: skip
    if case.launcher != "torchrun":
        return [sys.executable, *trainer]
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks),
        "--max-restarts", str(case.restarts), *trainer,
    ]  # fmt: skip


def environment(folder: Path, case: Case, num_ranks: int) -> dict[str, str]:
    """Return the environment of ranks and daemon."""
    more = {"PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT))}
    if case.launcher != "torchrun":
        more[f"ENDING_{case.launcher.upper()}"] = str(num_ranks)
    if case.act == "terminate":
        more["ENDING_STEPS"] = "600"
    if case.mode == "oom":
        more["ENDING_GROUP"] = os.environ["ENDING_GROUP"]
    return {
        **CLEAN, **more, "SENTINEL_DIR": str(folder), "SENTINEL_RUN": "run", "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(folder),
    }  # fmt: skip


def onsets(run_dir: Path) -> list[Anomaly]:
    """Return the onsets of a run, in the order written."""
    decode = msgspec.json.Decoder(Anomaly).decode
    lines = [line for file in sorted((run_dir / "anomalies").glob("*.jsonl")) for line in file.read_bytes().splitlines()]
    found = []
    for line in lines:
        try:
            found.append(decode(line))
        except msgspec.DecodeError:
            break  # a line that is being written
    return [one for one in found if one.event == "onset"]


def messages(run_dir: Path) -> list[str]:
    """Return what a sink of default settings was told, without the ends of what it knew."""
    path, known, notified = run_dir / "incidents.jsonl", {}, []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        one = msgspec.json.decode(line, type=Incident)
        change = change_of(known.get(one.id), one, RouteConfig())
        if change in MESSAGES:
            notified.append(f"{change} {one.severity.value}: {one.title}")
        known[one.id] = one
    left = [one.title for one in known.values() if one.state == "open"]
    return notified + [f"STILL OPEN: {title}" for title in left]


def wait(is_so: Any, timeout_s: float) -> Any:
    """Wait until a claim holds; return it, false after the time."""
    until = time.monotonic() + timeout_s
    while not (found := is_so()) and time.monotonic() < until:
        time.sleep(0.02)
    return found


def struck(folder: Path) -> tuple[float, int] | None:
    """Return when the rank did it, and its process; None: not yet."""
    try:
        at, pid = (folder / "struck").read_text().split()
        return float(at), int(pid)
    except (OSError, ValueError):
        return None


def acts(case: Case, folder: Path, process: subprocess.Popen[bytes]) -> float | None:
    """Do to the run what the case wants; return when, seconds since the epoch."""
    run_dir = folder / "run"
    if case.act == "terminate":
        wait(lambda: num_steps(run_dir) >= AT, 90)
        process.send_signal(signal.SIGTERM)
        return time.time()
    if not case.act:
        return None
    found = wait(lambda: struck(folder), 90)
    if found is None:
        return None
    if case.act == "end":
        wait(lambda: any(one.rule == "stale-rank" for one in onsets(run_dir)), 60)
        time.sleep(5.0)
        process.send_signal(signal.SIGTERM)
        return None
    wait(lambda: any(one.rule in ("stale-rank", "run-ended") for one in onsets(run_dir)), 40 if case.notified else 3)
    os.kill(found[1], signal.SIGCONT if case.act == "continue" else signal.SIGKILL)
    return None


def num_steps(run_dir: Path) -> int:
    """Return the steps judged so far."""
    try:
        return int(run_status(run_dir)["num_steps"])
    except Exception:  # a journal that is being made
        return 0


def take(name: str, num_ranks: int, mode: str, folder: Path) -> Taken:
    """Run one case once."""
    case = CASES[name]
    folder.chmod(0o700)
    env, run_dir = environment(folder, case, num_ranks), folder / "run"
    run_dir.mkdir(mode=0o700)
    trains = command(case, num_ranks)
    (folder / "pack.yaml").write_text(LIMITS)
    rules = ["--rules", str(folder / "pack.yaml")] if case.pp else []
    serve = [*CLI, "serve", str(run_dir), "--no-http", *rules]
    quiet = (folder / "log").open("wb")
    daemon, begun, seen = None, None, None
    if mode == "run":
        trains = [*CLI, "run", "--dir", str(folder), "--name", "run", *rules, "--", *trains]
    elif mode == "serve":
        daemon = subprocess.Popen(serve, env=env, stdout=quiet, stderr=quiet)
    process = subprocess.Popen(trains, env=env, stdout=quiet, stderr=quiet)
    try:
        if mode == "later":
            if case.act == "kill" and (hit := wait(lambda: struck(folder), 90)):
                time.sleep(3.0)
                os.kill(hit[1], signal.SIGKILL)
            if case.act == "terminate":
                wait(lambda: len(list(run_dir.glob("spool/*/pulse"))) == num_ranks, 90)
                time.sleep(4.0)
                process.send_signal(signal.SIGTERM)
        else:
            seen = watch(run_dir)
            begun = acts(case, folder, process)
        process.wait(150)
        if mode == "later":
            begun = time.time()
            seen = watch(run_dir)
            daemon = subprocess.Popen(serve, env=env, stdout=quiet, stderr=quiet)
        wait(lambda: is_over(run_dir), 50)
        time.sleep(1.0)
    finally:
        for one in (process, daemon):
            if one is not None and one.poll() is None:
                one.send_signal(signal.SIGTERM)
                one.wait(60)
        quiet.close()
        if seen is not None:
            seen.kill()
            seen.wait()
    if begun is None and (hit := struck(folder)) is not None:
        begun = hit[0]
    first = float((folder / "seen").read_text() or 0) if (folder / "seen").exists() else 0.0
    delay = first - begun if first and begun is not None else None
    return judged(case, mode, run_dir, delay)


def watch(run_dir: Path) -> subprocess.Popen[bytes]:
    """Note from a process of its own when the first anomaly about an end, or a rank's silence, is on disk."""
    text = (
        "import sys, time, pathlib\nrun = pathlib.Path(sys.argv[1])\n"
        "texts = lambda: (file.read_bytes() for file in run.glob('anomalies/*'))\n"
        "while not any(b'run-ended' in text or b'stale-rank' in text for text in texts()):\n"
        "    time.sleep(0.02)\n(run.parent / 'seen').write_text(str(time.time()))\n"
    )
    return subprocess.Popen([sys.executable, "-S", "-c", text, str(run_dir)])


def is_over(run_dir: Path) -> bool:
    """Return whether a daemon has decided that the run is over."""
    try:
        return run_status(run_dir)["ended"] is not None
    except Exception:  # a journal that is being made
        return False


def judged(case: Case, mode: str, run_dir: Path, delay: float | None) -> Taken:
    """Hold what was told against the label."""
    wanted, accused, most = case.label(mode)
    found = [one for one in onsets(run_dir) if one.rule in ("run-ended", "stale-rank")]
    first = found[0] if found else None
    is_named = first is None if not wanted else (
        first is not None and first.rank in accused and re.search(wanted, first.message) is not None
    )  # fmt: skip
    notified = messages(run_dir)
    false = [f"{one.severity.value} {one.rule}: {one.message}" for one in found[1:]]
    false += [
        f"{one.severity.value} {one.rule}: {one.message}"
        for one in onsets(run_dir) if one not in found and one.severity is not Severity.INFO
    ]  # fmt: skip
    false += [text for text in notified if text.startswith("STILL OPEN")]
    # Nobody was there to see that it was sent: it may be for want of memory.
    is_known = mode != "later" or not case.later
    if first is not None and is_known and first.severity.level > most.level:
        false.append(f"severity {first.severity.value}")
    ended = run_status(run_dir)["ended"]
    how = "nothing" if ended is None else ended["how"]
    if how != case.how and not (mode == "later" and case.how == "out_of_memory"):
        false.append(f"status says {how}")
    text = first.message if first is not None else ""
    return Taken(is_named, delay, len([one for one in notified if not one.startswith("STILL")]), false, text)


def main() -> None:
    """Take the cases, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(one for one in CASES if one != "oom"))
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--modes", default="run,serve,later")
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--write", action="store_true", help="add the table to benchmarks/results")
    options = parser.parse_args()
    head = "| case | ranks | mode | named right | delay s: median, most | messages | false |\n|---|---|---|---|---|---|---|"
    print(head, flush=True)
    lines = []
    for name in options.cases.split(","):
        for num_ranks in map(int, options.ranks.split(",")):
            for mode in options.modes.split(","):
                if mode == "later" and CASES[name].later == "-":
                    continue
                lines.append(row(name, num_ranks, mode, options.times, options.keep))
                print(lines[-1], flush=True)
    if options.write:
        path = ROOT / "benchmarks" / "results" / f"{datetime.date.today()}-ends.md"
        path.write_text("\n".join([f"# How runs end\n\n`{' '.join(['python', *sys.argv])}`\n\n{head}", *lines]) + "\n")


def row(name: str, num_ranks: int, mode: str, times: int, keep: Path | None) -> str:
    """Take one case so often and return its line of the table; what was not right goes to stderr."""
    taken = []
    for number in range(times):
        with tempfile.TemporaryDirectory(prefix="ends-") as scratch:
            folder = Path(scratch)
            if keep is not None:
                folder = keep / f"{name}-{num_ranks}-{mode}-{number}"
                folder.mkdir(parents=True, mode=0o700)
            one = take(name, num_ranks, mode, folder)
        taken.append(one)
        wrong = one.false + ([] if one.is_named else [f"NOT AS LABELLED: {one.text}"])
        if one.num_messages != CASES[name].num_messages:
            wrong.append(f"{one.num_messages} messages")
        for text in wrong:
            print(f"  {name} {num_ranks} {mode} #{number}: {text}", file=sys.stderr, flush=True)
    delays = [one.delay_s for one in taken if one.delay_s is not None]
    times_s = f"{statistics.median(delays):.1f}, {max(delays):.1f}" if delays else "-"
    num_messages = sorted({one.num_messages for one in taken})
    return (
        f"| {name} | {num_ranks} | {mode} | {sum(one.is_named for one in taken)}/{times} | {times_s} | "
        f"{', '.join(map(str, num_messages))} | {sum(bool(one.false) for one in taken)}/{times} |"
    )


if __name__ == "__main__":
    main()
