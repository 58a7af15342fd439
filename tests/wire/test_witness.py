"""The file of what a rank saw of how others ended."""

from __future__ import annotations

from pathlib import Path

from sentinel.wire.witness import Witnessed, read_witness


def test_torn_and_foreign_lines_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "witness").write_bytes(b'{"pid":1,"start":2,"status":9}\n[[[[\n{"pid":"x"}\n{"pid":3,"sta')

    assert read_witness(tmp_path) == [Witnessed(pid=1, start=2, status=9)]


def test_where_nothing_was_seen_nothing_is_read(tmp_path: Path) -> None:
    assert read_witness(tmp_path) == []
