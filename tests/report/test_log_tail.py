"""The tail of a log: each whole line once, in order; what is torn is waited for, and a log that begins anew is told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sentinel.report import log_tail
from sentinel.report.files import AppendLog
from sentinel.report.log_tail import LogTail


class Read:
    """What a tail brought, and how often its log began anew."""

    def __init__(self, path: Path, tail_bytes: int | None = None) -> None:
        self.num_begun = 0
        self._tail = LogTail(path, self._note, tail_bytes=tail_bytes)

    def _note(self) -> None:
        self.num_begun += 1

    def more(self) -> list[bytes]:
        return list(self._tail.lines())


@pytest.mark.parametrize("name", ["log.jsonl", "log"])
def test_each_line_comes_once_over_all_files(tmp_path: Path, name: str) -> None:
    log = AppendLog(tmp_path / name, file_bytes=40)
    read = Read(tmp_path / name)
    assert read.more() == []
    lines = [b"line %d" % number for number in range(30)]

    found = []
    for at in range(0, 30, 3):
        log.append(lines[at : at + 3])
        found += read.more()
    log.close()

    assert found == lines and read.more() == [] and read.num_begun == 0
    assert len(list(tmp_path.rglob("*.jsonl"))) == (1 if name == "log.jsonl" else 6)


def test_a_half_written_line_comes_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"one\ntw")
    read = Read(path)

    assert read.more() == [b"one"]
    path.write_bytes(b"one\ntwo\n")
    assert read.more() == [b"two"]
    assert read.num_begun == 0


def test_a_log_that_became_shorter_was_replaced_or_is_gone_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"one\ntwo\n")
    read = Read(path)
    read.more()
    os.truncate(path, 0)
    path.write_bytes(b"new\n")

    assert (read.more(), read.num_begun) == ([b"new"], 1)
    other = tmp_path / "other"
    other.write_bytes(b"as long as it was, and longer\n")
    other.replace(path)
    assert (read.more(), read.num_begun) == ([b"as long as it was, and longer"], 2)
    path.unlink()
    assert (read.more(), read.num_begun) == ([], 3)
    path.write_bytes(b"again\n")
    assert read.more() == [b"again"]


def test_files_that_retention_removed_are_no_new_beginning(tmp_path: Path) -> None:
    log = AppendLog(tmp_path / "log", file_bytes=20)
    read = Read(tmp_path / "log")
    log.append(b"line %d" % number for number in range(10))
    read.more()
    log.append(b"line %d" % number for number in range(10, 14))
    for path in sorted((tmp_path / "log").glob("*"))[:-1]:
        path.unlink()

    assert (read.more(), read.num_begun) == ([b"line 12", b"line 13"], 0)


def test_of_a_long_log_the_end_alone_is_read_and_no_half_line_of_it(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"".join(b"line %06d\n" % number for number in range(1000)))
    read = Read(path, tail_bytes=100)

    found = read.more()

    assert found == [b"line %06d" % number for number in range(992, 1000)]
    with path.open("ab") as file:
        file.write(b"line 001000\n")
    assert read.more() == [b"line 001000"]


def test_a_line_past_all_bounds_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_tail, "MAX_LINE_BYTES", 1000)
    monkeypatch.setattr(log_tail, "WINDOW_BYTES", 100)
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"one\n" + b"x" * 5000 + b"\ntwo\n")

    assert Read(path).more() == [b"one", b"two"]


def test_links_and_pipes_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "real.jsonl").write_bytes(b"one\n")
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "000001.jsonl").symlink_to(tmp_path / "real.jsonl")
    os.mkfifo(tmp_path / "log" / "000002.jsonl")

    assert Read(tmp_path / "log").more() == []
