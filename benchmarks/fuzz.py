"""Forge what Sentinel reads, checksums right, and count what it brings down: nothing may.

    python benchmarks/fuzz.py [SUBJECT...] [--cases 1000000] [--seed 0] [--write]

Subjects: frames (written into the spool of one of two ranks, followed, assembled, judged), configs, packs, commands,
http (what endpoints take), requests (bytes to a server that listens), acts, tokens (and certificates), directories (that
others made), anomalies, journals. A batch of cases depends on its seed alone: `--seed` of a failed batch makes it again, and
`--seed N` goes on where another run ended. What must hold: no exception but those that say what is wrong; of frames, that
every step of the other rank is judged whole and its NaN is found; no batch over 30 s of processor time or 2 GiB.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import random
import resource
import socket
import sqlite3
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import yaml

from sentinel.control.acts import ActInbox
from sentinel.daemon.config import DaemonConfig, load_config
from sentinel.daemon.config_in_force import ConfigInForce
from sentinel.daemon.http.app import make_app
from sentinel.daemon.http.certificate import expiry
from sentinel.daemon.http.config import HttpConfig
from sentinel.daemon.http.credentials import Credentials
from sentinel.daemon.http.request_gate import RequestGate
from sentinel.daemon.http.server import HttpServer
from sentinel.daemon.http.tokens import Scope, Tokens, read_tokens
from sentinel.daemon.notifying import Notifying
from sentinel.daemon.served_api import ServedApi
from sentinel.daemon.serving import ServedRun
from sentinel.decision import Tick
from sentinel.errors import SentinelError
from sentinel.explain.story import render, story_of
from sentinel.explain.topk import topk
from sentinel.ingest.follow import RunFollower
from sentinel.ingest.liveness import LivenessTracker
from sentinel.ingest.steps import StepAssembler
from sentinel.judge.judge import Judge
from sentinel.judge.packs import RulePacks
from sentinel.messages import Ack, Bye, EndStep, Health, Heartbeat, LayoutChange, Vector, Vectors
from sentinel.monitor_config import MonitorConfig, parse_config
from sentinel.report.silences import Silences
from sentinel.rules.language.loader import PACKS, load_pack
from sentinel.store.foreign_copy import copy_run
from sentinel.store.run_paths import RunPaths
from sentinel.testing import Nan, SyntheticRun
from sentinel.testing.forging import Forger, samples
from sentinel.wire.control_folder import ControlFolder
from sentinel.wire.frame import FRAME_TYPES, Frame, Header, Message, encode_message, run_id_of
from sentinel.wire.spool_reader import SpoolReader

MAX_BATCH_S = 30.0
MAX_BYTES = 2 * 2**30
"""More than it had at its beginning a process may not come to hold."""
STEPS, FORGED_PER_STEP = 8, 125
"""Of a batch of frames."""


def frames(seed: int, home: Path) -> int:
    """Forge frames of rank 1 and judge the run; AssertionError where rank 0 is not judged as it should be."""
    rng, forger = random.Random(seed), Forger(seed)
    run = SyntheticRun(home / "run", dp=2, layers=1, d_model=8, elements=8, micro_steps=1, seed=seed)
    run.plant(Nan(step=STEPS - 1, module="layers.0.mlp", rank=0))
    run.write(1)
    bag = samples([*SpoolReader(run.folder(1)).poll(), *_rare_frames(run)])
    spool = run._ranks[1].spool
    assert spool is not None
    for step in range(STEPS):
        for _ in range(FORGED_PER_STEP):
            frame = rng.choice(bag[rng.choice(list(bag))])
            spool._seq += rng.choice((1, 1, 1, 2, 50))
            header = msgspec.structs.replace(
                frame.header, wall_ns=1_800_000_000 * 10**9, step=step + rng.randrange(3) if frame.header.step >= 0 else -1,
                layout_id=rng.choice((frame.header.layout_id, spool._layouts.id, 7)),
            )  # fmt: skip
            run._append_raw(run._ranks[1], forger.forge(msgspec.structs.replace(frame, header=header), spool._seq))
        run.write(1)
    run.end()
    follower, tracker = RunFollower(run.directory, on_problem=lambda problem: None), LivenessTracker()
    assembler, judge = StepAssembler("run"), Judge(_PACK)
    judged: set[int] = set()
    found = []

    def take(one: Any) -> None:
        if not isinstance(one, Tick):
            found.extend(judge.judge(one.decision, one).anomalies)
            judged.update(one.step for part in one.parts if part.rank == 0 and part.end_step is not None)

    while records := follower.poll():
        assembler.take(records, 0.0)
        tracker.receive(records)
        tracker.look(0.1, follower.behind, is_caught_up=True)
        tracker.facts(assembler.attempts.newest, assembler.attempts.attempt_of)
        for one in assembler.close(0.0, follower.behind):
            take(one)
        assembler.snapshot()
    for one in assembler.finish(0.0):
        take(one)
    missing = set(range(STEPS + 1)) - judged
    assert not missing, f"steps {sorted(missing)} of rank 0 were not judged"
    assert any(one.rule == "non-finite" and one.rank == 0 for one in found), "the NaN of rank 0 was not found"
    return STEPS * FORGED_PER_STEP


def _rare_frames(run: SyntheticRun) -> list[Frame]:
    described = run.descriptor(1)
    messages: list[Message] = [
        Health(code="hook_failed", message="x", site="a", step=3),
        Heartbeat(step=3, call_id=4, activity="train", module="m", phase="forward"),
        Ack(command="c", state="armed", step=3),
        Bye(reason="exit", step=3),
        Vectors(items=(Vector(tensor=1, statistic="load", axis="expert", shape=(4,), values=bytes(16)),)),
        msgspec.structs.replace(described, settings={"a": {"b": [1, 2, {"c": 3}]}}, name_map={"a": "b"}),
        LayoutChange(base=1, base_offset=0, tensors=described.tensors[:3]),
        LayoutChange(base=1, base_offset=0, head=msgspec.structs.replace(described, tensors=())),
        EndStep(step=3, num_rows=5, num_calls=6, scalars={"loss": 1.0}, due={"param": 3}, samples=(1, "a"), step_time_s=0.1),
    ]
    return [
        Frame(
            Header(
                type=FRAME_TYPES[type(one)],
                incarnation=run.incarnation(1),
                run_id=run_id_of("run"),
                rank=1,
                seq=1,
                attempt=0,
                step=3,
                layout_id=7,
                wall_ns=1,
                mono_ns=1,
            ),
            encode_message(one),
            0,
        )
        for one in messages
    ]


def configs(seed: int, home: Path) -> int:
    """Forge the trainer's and the daemon's configuration."""
    forger = Forger(seed)
    whole = msgspec.to_builtins(MonitorConfig(targets=("a",), probes={}, directory="x", run="y"))
    served = msgspec.to_builtins(DaemonConfig())
    for at in range(50):
        text = _text(forger, whole)
        with contextlib.suppress(SentinelError):
            parse_config(text, "config.yaml")
        path = home / f"{at}.yaml"
        path.write_bytes(_text(forger, served))
        with contextlib.suppress(SentinelError):
            load_config(path)
    return 100


def packs(seed: int, home: Path) -> int:
    """Forge rule packs."""
    forger, rng = Forger(seed), random.Random(seed)
    for at in range(20):
        whole = yaml.safe_load((rng.choice(sorted(PACKS.glob("*.yaml")))).read_text())
        rules = rng.sample(whole["rules"], min(3, len(whole["rules"])))
        path = home / f"{at}.yaml"
        path.write_bytes(_text(forger, {**whole, "rules": rules}))
        with contextlib.suppress(SentinelError):
            Judge(load_pack([path]))
    return 20


def commands(seed: int, home: Path) -> int:
    """Forge control files."""
    forger, rng = Forger(seed), random.Random(seed)
    folder = ControlFolder(home, lambda why: None)
    kinds: list[dict[str, Any]] = [
        {
            "type": "EnableMonitoring",
            "id": "c",
            "at_step": 9,
            "kinds": ["wgrad"],
            "targets": ["a*", "re:a+"],
            "for_steps": 3,
        },
        {"type": "DumpTensors", "id": "c", "at_step": 9, "targets": ["a"], "first_n": 3, "step_interval": 2, "ranks": [0]},
        {"type": "ChangeConfig", "id": "c", "at_step": 9, "settings": {"kinds": ["param"]}},
        {"type": "WithdrawCommand", "id": "c", "withdraws": "d"},
    ]
    for at in range(50):
        reported = forger.value({**rng.choice(kinds), "seq": at})
        with contextlib.suppress(UnicodeEncodeError):
            (home / f"{at:06d}.json").write_bytes(
                msgspec.json.encode(reported) if at % 2 else forger.damaged(msgspec.json.encode(reported))
            )
    folder.poll(10**18)
    return 50


PARAMETERS = (
    "run", "name", "kind", "statistic", "limit", "before", "step", "from", "to", "aggregate", "rank", "points"
)  # fmt: skip
ODD_WORDS = ("run", "0", "-1", "9" * 30, "*", "layers.*", "*a" * 500, "[", "{}" * 9, "\x00", "loss")


def http(seed: int, home: Path) -> int:
    """Forge requests to a daemon that serves a run."""
    from starlette.testclient import TestClient

    rng, forger = random.Random(seed), Forger(seed)
    with _served(home) as run:
        config = DaemonConfig()
        notifying = Notifying(config.notify, {}, sys.stderr)
        api = ServedApi(_PACKS, ConfigInForce(config, None, None, 0.0), notifying, Silences(), lambda: None)
        api.publish([run], {}, {}, is_caught_up=True)
        known = Tokens(read="r" * 20, control="c" * 20)
        client = TestClient(make_app(api, RequestGate(HttpConfig(), known)), base_url="http://127.0.0.1")
        headers = {"Authorization": f"Bearer {known.control}"}
        for _ in range(50):
            path = rng.choice(("runs", "anomalies", "incidents", "series", "control"))
            query = {name: rng.choice((*ODD_WORDS, forger.word())) for name in rng.sample(PARAMETERS, 3)}
            if rng.random() < 0.3:
                order = forger.value(
                    {"run": "run", "action": "enable", "kinds": ["wgrad"], "targets": ["a"], "for_steps": 3}
                )
                body = msgspec.json.encode(order) if rng.random() < 0.8 else b"[" * 100_000
                answer = client.post("/api/v1/control", content=body, headers=headers)
            else:
                answer = client.get(f"/api/v1/{path}", params=query, headers=headers)
            assert answer.status_code < 500 or answer.status_code == 503, (path, query, answer.text[:200])
    return 50


WHOLE_REQUESTS = (
    b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAccept: text/plain\r\nAuthorization: Bearer x\r\n\r\n",
    b"GET /api/v1/series?run=a&name=loss HTTP/1.1\r\nHost: 127.0.0.1:9464\r\nOrigin: http://localhost\r\n\r\n",
    b'POST /api/v1/control HTTP/1.1\r\nHost: [::1]\r\nContent-Length: 12\r\n\r\n{"run": "a"}',
    b"POST /-/reload HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nabcd\r\n0\r\n\r\n",
    b"GET / HTTP/1.0\r\n\r\n",
)


def requests(seed: int, home: Path) -> int:
    """Forge the bytes of requests to a server that listens; it must answer or close each, and its health to the end."""
    forger, rng = Forger(seed), random.Random(seed)
    with _listening(home) as port:
        for _ in range(200):
            sent = rng.choice(WHOLE_REQUESTS)
            with contextlib.suppress(ConnectionError):
                _answer_to(port, forger.damaged(sent) if rng.random() < 0.9 else sent * rng.randrange(1, 20))
        assert _answer_to(port, b"GET /healthz HTTP/1.0\r\nHost: localhost\r\n\r\n").startswith(b"HTTP/1.1 200")
    return 200


@contextlib.contextmanager
def _listening(home: Path) -> Iterator[int]:
    config = DaemonConfig()
    notifying = Notifying(config.notify, {}, sys.stderr)
    api = ServedApi(_PACKS, ConfigInForce(config, None, None, 0.0), notifying, Silences(), lambda: None)
    api.publish([], {}, {}, is_caught_up=True)
    api.reload = lambda: {"outcome": "ok"}  # type: ignore[method-assign]
    server = HttpServer(api, HttpConfig(), Credentials(home, HttpConfig()))
    server.start()
    try:
        yield server.port
    finally:
        server.stop()


def _answer_to(port: int, sent: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=MAX_BATCH_S) as one:
        one.sendall(sent)
        one.shutdown(socket.SHUT_WR)
        found = b""
        while more := one.recv(65536):
            found += more
        return found


def acts(seed: int, home: Path) -> int:
    """Forge what people leave about incidents."""
    forger, rng = Forger(seed), random.Random(seed)
    whole = {"incident": "i1", "act": "ack", "who": "ada", "why": "x", "until": 9.0, "id": "a", "time": 1.0}
    (home / "acts").mkdir(mode=0o700)
    for at in range(100):
        body = msgspec.json.encode(forger.value(whole))
        (home / "acts" / f"{at}.json").write_bytes(forger.damaged(body) if rng.random() < 0.5 else body)
    for path, _ in ActInbox(home, lambda why: None).waiting():
        path.unlink()
    return 100


_CERTIFICATE = b"""-----BEGIN CERTIFICATE-----
MIIBfzCCASWgAwIBAgIUeHwyggwQy5dgkKOuVJ7gGphzYQswCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyMzE4MDA0N1oYDzIwNTEwNzE1
MTgwMDQ3WjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAAQeKOuZqVF5ZPJlr7fibzXD6n8U0fm1BGGwjAL5T2geKB77XqIH8lAh
Z9JWKPnrv5d3Cdyb6RPmXVPP1Ksk4XmMo1MwUTAdBgNVHQ4EFgQUCJRSQoIHpPqj
oSm/L6OcxX0y4XcwHwYDVR0jBBgwFoAUCJRSQoIHpPqjoSm/L6OcxX0y4XcwDwYD
VR0TAQH/BAUwAwEB/zAKBggqhkjOPQQDAgNIADBFAiBTbwTGGaVsQW+pqJr7xvh0
wK+uh76W6TgXFr0/EY6LAQIhAMR2VIPv70Xk0YFjsAF1UGdPAvRp1dHad0QeHWvg
VlXz
-----END CERTIFICATE-----
"""


def tokens(seed: int, home: Path) -> int:
    """Forge files of tokens, headers that carry one, and certificates."""
    forger, rng = Forger(seed), random.Random(seed)
    good = Tokens(read="r" * 20, control="c" * 20, silence=("s" * 20, "t" * 20))
    path = home / "tokens.json"
    for _ in range(100):
        body = msgspec.json.encode(forger.value(msgspec.to_builtins(good)))
        path.write_bytes(forger.damaged(body) if rng.random() < 0.5 else body)
        path.chmod(0o600)
        with contextlib.suppress(SentinelError):
            read_tokens(path)
        header = rng.choice(("Bearer ", "Basic ", "", "bearer")) + forger.word()
        assert good.scope(header) is Scope.NOTHING or header.split()[1] in (*good.silence, good.read, good.control)
        with contextlib.suppress(ValueError, IndexError):
            expiry(forger.damaged(_CERTIFICATE).decode("ascii", "replace"))
    return 300


def directories(seed: int, home: Path) -> int:
    """Plant what a run has not into its directory, and copy it as `sentinel open` does."""
    forger, rng = Forger(seed), random.Random(seed)
    (home / "key").write_text("SECRET")
    run = home / "run"
    for name in ("spool/r0", "anomalies", ".daemon", "control"):
        (run / name).mkdir(parents=True)
    folders = [run, *(one for one in run.rglob("*") if one.is_dir())]
    for at in range(50):
        name = forger.word().replace("/", "_").replace("\0", "_")[:50].strip(".") or f"n{at}"
        path = rng.choice(folders) / rng.choice((name, "spool", "journal.sqlite", "incidents.jsonl", f"{at}.jsonl"))
        with contextlib.suppress(OSError, ValueError):
            _plant(rng.randrange(5), path, home / "key")
    copy_run(run, home / "copy")
    for path in (home / "copy").rglob("*"):
        assert path.is_dir() or (path.is_file() and not path.is_symlink() and b"SECRET" not in path.read_bytes()), path
    return 50


def _plant(kind: int, path: Path, key: Path) -> None:
    if os.path.lexists(path):
        return
    if kind == 0:
        path.symlink_to(key)
    elif kind == 1:
        path.hardlink_to(key)
    elif kind == 2:
        os.mkfifo(path)
    elif kind == 3:
        path.mkdir()
    else:
        path.write_bytes(b"{}")


def anomalies(seed: int, home: Path) -> int:
    """Forge the files that `topk` and `explain` read."""
    forger, rng = Forger(seed), random.Random(seed)
    run = home / "run"
    with _served(home):
        pass
    files = [run / "incidents.jsonl", *sorted((run / "anomalies").iterdir())]
    lines = {path: path.read_bytes().splitlines() for path in files}
    for _ in range(20):
        for path, known in lines.items():
            forged = list(known)
            for at in rng.sample(range(len(forged)), min(3, len(forged))):
                if rng.random() < 0.3:
                    forged[at] = forger.damaged(forged[at])
                else:
                    forged[at] = msgspec.json.encode(forger.value(msgspec.json.decode(forged[at])))
            path.write_bytes(b"\n".join(forged) + b"\n")
        with contextlib.suppress(SentinelError):
            topk(run, 8, processes=1)
        with contextlib.suppress(SentinelError):
            render(story_of(run, "latest"))
    return 20


def journals(seed: int, home: Path) -> int:
    """Forge what a daemon finds in its journal when it is started again."""
    forger, rng = Forger(seed), random.Random(seed)
    with _served(home) as run:
        paths = run.paths
    if rng.random() < 0.5:
        data = paths.journal.read_bytes()
        paths.journal.write_bytes(forger.damaged(data))
    else:
        db = sqlite3.connect(paths.journal)
        for table in ("decisions", "snapshots", "incidents"):
            row = db.execute(f"SELECT rowid, body FROM {table} ORDER BY random() LIMIT 1").fetchone()
            if row is not None:
                reported = (
                    msgspec.msgpack.encode(forger.value(msgspec.msgpack.decode(row[1]))) if table == "decisions" else None
                )
                db.execute(f"UPDATE {table} SET body = ? WHERE rowid = ?", (reported or forger.damaged(row[1]), row[0]))
        db.commit()
        db.close()
    with contextlib.suppress(SentinelError):
        again = ServedRun(paths, DaemonConfig(), _PACKS)
        try:
            again.turn(time.time())
            again.finish(time.time(), is_over=True, deadline=time.monotonic() + 5.0)
        finally:
            again.close()
    return 1


@contextlib.contextmanager
def _served(home: Path) -> Any:
    """A small run with a fault in it, judged."""
    source = SyntheticRun(home / "run", dp=2, layers=1, d_model=8, elements=8, micro_steps=1)
    source.plant(Nan(step=3, module="layers.0.mlp", rank=0))
    source.write(6)
    source.end()
    source.directory.chmod(0o700)
    run = ServedRun(RunPaths.of(source.directory), DaemonConfig(), _PACKS)
    try:
        while run.turn(time.time()):
            pass
        run.finish(time.time(), is_over=True, deadline=time.monotonic() + 5.0)
        yield run
    finally:
        run.close()


def _text(forger: Forger, whole: Any) -> bytes:
    reported = forger.value(whole)
    try:
        text = yaml.safe_dump(reported, allow_unicode=True).encode("utf-8", "surrogatepass")
    except RecursionError:
        text = msgspec.json.encode(reported)
    return forger.damaged(text) if len(text) % 3 == 0 else text


SUBJECTS: dict[str, Callable[[int, Path], int]] = {
    one.__name__: one
    for one in (frames, configs, packs, commands, http, requests, acts, tokens, directories, anomalies, journals)
}
_PACKS = RulePacks([])
_PACK = _PACKS.load()


def main() -> int:
    """Return 1 when anything was brought down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subjects", nargs="*", metavar="SUBJECT")
    parser.add_argument("--cases", type=int, default=1_000_000, help="Cases of each subject.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the first batch; each batch takes the next.")
    parser.add_argument("--seconds", type=float, default=1e9, help="Longest time of each subject.")
    parser.add_argument("--write", action="store_true", help="Write the table into benchmarks/results.")
    given = parser.parse_args()
    if unknown := sorted({*given.subjects} - SUBJECTS.keys()):
        parser.error(f"expected subjects of {', '.join(SUBJECTS)}, got {', '.join(unknown)}")
    logging.disable(logging.CRITICAL)
    lines = [f"# {datetime.now(UTC):%Y-%m-%d}: python benchmarks/{' '.join([Path(sys.argv[0]).name, *sys.argv[1:]])}"]
    num_failed = 0
    for name in given.subjects or SUBJECTS:
        begun, num_cases, seed, failed = time.monotonic(), 0, given.seed, 0
        slowest, before = 0.0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        while num_cases < given.cases and time.monotonic() - begun < given.seconds:
            since = time.process_time()
            try:
                with tempfile.TemporaryDirectory() as home:
                    num_cases += SUBJECTS[name](seed, Path(home))
                took = time.process_time() - since
                used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
                assert took < MAX_BATCH_S and used < MAX_BYTES, f"{took:.1f} s, {used / 2**20:.0f} MiB"
                slowest = max(slowest, took)
            except Exception:
                failed += 1
                if failed <= 5:
                    print(f"{name}: batch of seed {seed}:\n{traceback.format_exc(limit=-8)}", file=sys.stderr)
            seed += 1
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before / 2**20
        lines.append(
            f"{name:10} {num_cases:9,} cases  seeds {given.seed} to {seed - 1}  {failed} failed  "
            f"slowest batch {slowest:.2f} s  grown by {grown:.0f} MiB  {time.monotonic() - begun:.0f} s"
        )
        print(lines[-1], flush=True)
        num_failed += failed
    if given.write:
        path = Path(__file__).parent / "results" / f"{datetime.now(UTC):%Y-%m-%d}-fuzz.txt"
        path.write_text("\n".join(lines) + "\n")
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
