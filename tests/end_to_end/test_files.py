"""Anomaly files and the journal across real kill -9: every line there once, whole, in order."""

import os
import random
import signal
import subprocess
import sys
import time

from sentinel.report.files import AppendLog, LogPosition
from sentinel.store.journal import Journal

CHILD = """
import sys
from pathlib import Path
from sentinel.report.files import AppendLog, LogPosition, json_line
from sentinel.store.found import FoundAnomaly
from sentinel.store.journal import Commit, Journal

home = Path(sys.argv[1])
journal = Journal(home / "state" / "journal.sqlite")
log = AppendLog(home / "anomalies", file_bytes=20_000)
since = LogPosition.parse(journal.values.get("anomalies"))
log.recover((body for _, body in journal.found.bodies("anomalies", after=since.num_lines)), since)
print("up", flush=True)
seq = journal.judged
while True:
    seq += 1
    lines = [json_line({"seq": seq, "n": n, "pad": "x" * (seq * 37 % 400)}) for n in range(seq % 5)]
    found = [FoundAnomaly(id="a", attempt=0, step=seq, severity="info", body=line) for line in lines]
    journal.commit(Commit(judged=seq, anomalies=[(seq, one) for one in found]))
    for line in lines:
        log.append([line])
    if seq % 7 == 0:
        journal.values.put("anomalies", log.position.text())
"""


def test_kill_9_loses_no_line_and_repeats_none(tmp_path):
    rng = random.Random(7)
    for _ in range(8):
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE)
        assert child.stdout.readline() == b"up\n"
        time.sleep(0.02 + 0.2 * rng.random())
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()

    journal = Journal(tmp_path / "state" / "journal.sqlite")
    log = AppendLog(tmp_path / "anomalies", file_bytes=20_000)
    since = LogPosition.parse(journal.values.get("anomalies"))
    log.recover((body for _, body in journal.found.bodies("anomalies", after=since.num_lines)), since)
    files = sorted((tmp_path / "anomalies").iterdir())
    written = [line for file in files for line in file.read_bytes().splitlines(keepends=True)]

    assert len(written) > 50
    assert written == [body + b"\n" for _, body in journal.found.bodies("anomalies")]
    assert len(files) > 1
    assert log.position.num_lines == len(written)
    journal.close()
