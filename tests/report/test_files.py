import errno
import json
import math
import os

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sentinel.anomaly import Anomaly
from sentinel.errors import StoreError
from sentinel.report.files import AppendLog, LogPosition, anomaly_line, json_line

from ..support.anomalies import a_nan


def lines_on_disk(path):
    files = [path] if path.is_file() else sorted(path.glob("*.jsonl"))
    return [line for file in files for line in file.read_bytes().splitlines(keepends=True)]


def numbered(num_lines):
    return [json_line({"n": number, "pad": "x" * (number % 7)}) for number in range(num_lines)]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float64("nan"), 1e308, np.float32(0.1), -0.0])
def test_strict_json_always(value):
    line = anomaly_line(a_nan(value=value, baseline=math.nan, score=math.inf, place={"dp": np.int64(3)}))

    def refuse(word):
        raise AssertionError(f"not strict: {word}")

    read = json.loads(line, parse_constant=refuse)
    assert b"\n" not in line
    assert read["baseline"] is None
    assert read["score"] is None
    if math.isfinite(value):
        assert read["value"] == pytest.approx(float(value))
    else:
        assert read["value"] is None
        assert float(read["value_text"]) == value or math.isnan(value)
    assert msgspec.json.decode(line, type=Anomaly).tag_name == "blocks.0"


def test_lines_are_appended_and_files_cut_at_a_size_between_lines(tmp_path):
    log = AppendLog(tmp_path / "anomalies", file_bytes=100)
    lines = numbered(50)

    for line in lines:
        log.append([line])

    assert lines_on_disk(tmp_path / "anomalies") == [line + b"\n" for line in lines]
    sizes = [file.stat().st_size for file in (tmp_path / "anomalies").iterdir()]
    assert len(sizes) > 5
    assert max(sizes) <= 100
    assert log.position.num_lines == 50


def test_what_is_on_disk_is_never_written_again(tmp_path):
    """Defect 31: a mark made in the file from outside is still there; who rewrites the file wipes it out."""
    log = AppendLog(tmp_path / "anomalies", file_bytes=10_000)
    lines = numbered(50)
    log.append(lines[:25])
    (file,) = (tmp_path / "anomalies").iterdir()
    with file.open("r+b") as stream:
        stream.write(b"#")
    inode = file.stat().st_ino

    for line in lines[25:]:
        log.append([line])

    assert file.stat().st_ino == inode
    assert file.read_bytes() == b"#" + b"".join(line + b"\n" for line in lines)[1:]


def test_a_line_longer_than_a_file_gets_a_file_of_its_own(tmp_path):
    log = AppendLog(tmp_path / "anomalies", file_bytes=10)

    log.append([b'"a"', b'"' + b"b" * 50 + b'"', b'"c"'])

    assert [len(file.read_bytes()) for file in sorted((tmp_path / "anomalies").iterdir())] == [4, 53, 4]


def test_files_are_for_the_owner_only(tmp_path):
    AppendLog(tmp_path / "anomalies").append([b"1"])

    assert (tmp_path / "anomalies").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "anomalies" / "000001.jsonl").stat().st_mode & 0o777 == 0o600


@settings(max_examples=60, deadline=None)
@given(
    num_lines=st.integers(0, 40), num_committed=st.integers(0, 40), num_written=st.integers(0, 40),
    torn=st.integers(0, 60), file_bytes=st.integers(1, 200), other_file_bytes=st.integers(1, 200),
)  # fmt: skip
def test_kill_9_loses_nothing_and_writes_nothing_twice(
    tmp_path_factory, num_lines, num_committed, num_written, torn, file_bytes, other_file_bytes
):
    path = tmp_path_factory.mktemp("log") / "anomalies"
    lines = numbered(num_lines)
    num_written = min(num_written, num_lines)
    num_committed = min(num_committed, num_written)
    log = AppendLog(path, file_bytes=file_bytes)
    committed = log.append(lines[:num_committed])
    log.append(lines[num_committed:num_written])
    if num_written < num_lines:
        half = AppendLog(path, file_bytes=file_bytes)
        half.recover([], log.position)
        whole = lines[num_written]
        at = half._cut(half.position, len(whole) + 1)
        path.mkdir(exist_ok=True)
        with half.file(at.index).open("ab") as file:
            file.write(whole[: min(torn, len(whole))])

    after = AppendLog(path, file_bytes=other_file_bytes)
    recovery = after.recover(lines[committed.num_lines :], LogPosition.parse(committed.text()))
    after.append([b'"next"'])

    assert lines_on_disk(path) == [line + b"\n" for line in lines] + [b'"next"\n']
    assert recovery.num_found == num_written - num_committed
    assert recovery.num_written == num_lines - num_written
    assert recovery.set_aside is None
    assert after.position.num_lines == num_lines + 1


def test_a_torn_line_is_completed_not_repeated(tmp_path):
    path = tmp_path / "incidents.jsonl"
    path.write_bytes(b'{"n":1}\n{"n":')

    recovery = AppendLog(path).recover([b'{"n":1}', b'{"n":2}', b'{"n":3}'])

    assert path.read_bytes() == b'{"n":1}\n{"n":2}\n{"n":3}\n'
    assert recovery.is_torn
    assert (recovery.num_found, recovery.num_written) == (1, 2)


def test_a_line_that_lacks_only_its_line_feed_is_completed(tmp_path):
    path = tmp_path / "incidents.jsonl"
    path.write_bytes(b'{"n":1}')

    AppendLog(path).recover([b'{"n":1}'])

    assert path.read_bytes() == b'{"n":1}\n'


@pytest.mark.parametrize("foreign", [b"\0\0\0\0", b'{"somebody":"else"}\n'])
def test_foreign_bytes_are_set_aside_and_kept(tmp_path, foreign):
    path = tmp_path / "anomalies"
    path.mkdir()
    (path / "000001.jsonl").write_bytes(b"1\n" + foreign)

    recovery = AppendLog(path).recover([b"1", b"2"])

    assert lines_on_disk(path) == [b"1\n", b"2\n"]
    assert recovery.set_aside.read_bytes() == foreign


def test_a_file_cut_by_somebody_is_said_and_can_be_written_anew(tmp_path):
    path = tmp_path / "incidents.jsonl"
    log = AppendLog(path)
    position = log.append([b"1", b"2"])
    os.truncate(path, 1)

    with pytest.raises(StoreError, match="expected at least 4 bytes, got 1"):
        AppendLog(path).recover([], position)
    AppendLog(path).recover([b"1", b"2"])

    assert path.read_bytes() == b"1\n2\n"


class FullDisk:
    """Takes `room` bytes, then no more."""

    def __init__(self, room):
        self.room = room
        self.pwritev = os.pwritev

    def __call__(self, fd, buffers, offset):
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        data = b"".join(buffers)[: self.room]
        self.room -= len(data)
        return self.pwritev(fd, [data], offset)


@pytest.mark.parametrize("room", range(0, 40, 3))
def test_full_disk_is_said_and_nothing_lost(tmp_path, monkeypatch, room):
    disk = FullDisk(room)
    monkeypatch.setattr(os, "pwritev", disk)
    lines = numbered(6)
    log = AppendLog(tmp_path / "anomalies", file_bytes=60)

    log.append(lines[:3])
    log.append(lines[3:])

    assert "No space left" in log.problem
    assert log.num_failures >= 1
    disk.room = 10_000
    assert log.retry()
    assert log.problem == ""
    assert lines_on_disk(tmp_path / "anomalies") == [line + b"\n" for line in lines]


def test_memory_is_bounded_while_the_disk_is_full(tmp_path, monkeypatch):
    disk = FullDisk(7)
    monkeypatch.setattr(os, "pwritev", disk)
    lines = numbered(100)
    log = AppendLog(tmp_path / "anomalies", max_pending_bytes=200)

    for line in lines:
        log.append([line])

    assert log.needs_recovery
    assert log.num_pending == 0
    disk.room = 10**6
    log.recover(lines[log.position.num_lines :], log.position)
    assert not log.needs_recovery
    assert lines_on_disk(tmp_path / "anomalies") == [line + b"\n" for line in lines]
