"""The skip list: what trainers read of `batch` verdicts, without torch and without a daemon."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import sentinel
from sentinel.anomaly import Severity
from sentinel.errors import ConfigError
from sentinel.incident import Incident

from ..support.anomalies import an_incident

pytestmark = pytest.mark.slow


def revised(number: int, revision: int, **fields: object) -> Incident:
    usual = {"severity": Severity.CRITICAL, "opened_step": 3, "last_step": 3, "title": ""}
    return an_incident(number, revision=revision, **(usual | fields))


def write(folder: Path, *revisions: Incident, tail: bytes = b"") -> Path:
    (folder / "incidents.jsonl").write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in revisions) + tail)
    return folder


BATCH = {
    "suspected": "batch", "skip_steps": (41, 42), "skip_ranks": (3,), "skip_samples": (7, "shard-2:19"),
    "evidence": ("suspected batch: loss 9 against 1", "first bad: loss"),
}  # fmt: skip


def test_newest_revision_of_each_incident_counts(tmp_path: Path) -> None:
    run = write(
        tmp_path,
        revised(1, 1), revised(1, 2, **BATCH), revised(2, 1, suspected="batch", skip_steps=(50,)),
        revised(2, 2, suspected="model"), revised(3, 1, **(BATCH | {"skip_steps": (60,), "state": "merged"})),
        revised(4, 1, suspected="hardware"), tail=b'{"id": "torn',
    )  # fmt: skip

    skips = sentinel.skip_list(run)

    assert (sorted(skips.steps), skips.samples) == ([41, 42], {7, "shard-2:19"})
    assert 41 in skips and 50 not in skips and 60 not in skips
    (first, _) = skips
    assert (first.ranks, first.incident, first.reason) == ((3,), "i1", "loss 9 against 1")
    assert sentinel.skip_list(run / "incidents.jsonl").steps == skips.steps
    assert not sentinel.skip_list(run, attempt=1)


def test_run_in_which_nothing_happened_has_an_empty_list(tmp_path: Path) -> None:
    assert len(sentinel.skip_list(tmp_path)) == 0
    with pytest.raises(ConfigError, match="expected a run's directory"):
        sentinel.skip_list(tmp_path / "nowhere")


def test_stretches_and_the_ranks_that_had_a_part(tmp_path: Path) -> None:
    part = {"suspected": "batch", "skip_steps": (50, 52), "skip_ranks": (1, 3)}
    whole = revised(1, 1, suspected="batch", skip_steps=(42, 41, 43))
    skips = sentinel.skip_list(write(tmp_path, whole, revised(2, 1, **part)))

    assert skips.ranges == ((41, 43), (50, 50), (52, 52))
    assert sorted(skips.of(3).steps) == [41, 42, 43, 50, 52]
    assert sorted(skips.of(0).steps) == [41, 42, 43], "a batch of all ranks is everybody's, a part is its own rank's"
    assert (50 in skips.of(1), 50 in skips.of(2)) == (True, False)


def test_an_exported_list_is_read_again(tmp_path: Path) -> None:
    run = write(tmp_path, revised(1, 1, **BATCH), revised(2, 1, **(BATCH | {"attempt": 1, "skip_steps": (90,)})))
    first = sentinel.skip_list(run)
    exported = tmp_path / "skips.jsonl"
    exported.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in first))

    again = sentinel.skip_list(exported)

    assert again.skips == first.skips and len(again) == 3
    assert sentinel.skip_list(exported, attempt=1).steps == {90}


def test_what_is_no_skip_list_is_said(tmp_path: Path) -> None:
    run = write(tmp_path, revised(1, 1, **BATCH))
    good = (run / "incidents.jsonl").read_bytes()
    (run / "incidents.jsonl").write_bytes(b"{broken}\n" + good + b'{"id": "torn')
    reported = sentinel.skip_list(run)
    assert (sorted(reported.steps), len(reported.problems)) == ([41, 42], 1), "the torn tail is no problem"
    assert reported.problems[0].startswith(f"{run / 'incidents.jsonl'}:1: ")
    (run / "steps.csv").write_text("step,loss\n1,2\n")
    with pytest.raises(ConfigError, match=r"steps.csv:1: .*no line of it is understood"):
        sentinel.skip_list(run / "steps.csv")
    (tmp_path / "runs" / "one").mkdir(parents=True)
    write(tmp_path / "runs" / "one", revised(1, 1, **BATCH))
    with pytest.raises(ConfigError, match=r"holds runs: name one of 1, .*one"):
        sentinel.skip_list(tmp_path / "runs")


def test_reading_it_needs_no_torch(tmp_path: Path) -> None:
    run = write(tmp_path, revised(1, 1, **BATCH))
    code = f"import sentinel, sys; print(sorted(sentinel.skip_list({str(run)!r}).steps), 'torch' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.split("\n")[0] == "[41, 42] False"


def test_export_writes_it_for_others(tmp_path: Path) -> None:
    run = write(tmp_path, revised(1, 1, **BATCH))
    (run / "spool").mkdir()

    command = [sys.executable, "-m", "sentinel.cli", "export", str(run), "--format", "skip-list", "--steps", "42:"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    (line,) = done.stdout.splitlines()
    assert msgspec.json.decode(line) == {
        "attempt": 0, "step": 42, "ranks": [3], "samples": [7, "shard-2:19"], "incident": "i1", "reason": "loss 9 against 1",
    }  # fmt: skip
