"""The files that a spool has written to the end, below a cap."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sentinel.collect.retention.spool_cap import SpoolCap
from sentinel.messages import EndStep, Health, Vectors
from sentinel.record import ROW_DTYPE
from sentinel.testing import FakeClock
from sentinel.wire.frame import FrameType, decode_message, encode_message
from sentinel.wire.spool import SpoolWriter, write_ack
from sentinel.wire.spool_files import list_files
from sentinel.wire.spool_reader import SpoolReader

from ...wire.test_spool import LIFE, drain, seqs


def capped(folder: Path, *, max_bytes: int, file_bytes: int) -> tuple[SpoolCap, SpoolWriter]:
    cap = SpoolCap(folder, 3, max_bytes=max_bytes)
    return cap, SpoolWriter(folder, LIFE, 3, 42, 0, file_bytes=file_bytes, closed_files=cap, clock=FakeClock())


def test_past_its_cap_the_spool_keeps_less_of_the_oldest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cap, out = capped(tmp_path / "r", max_bytes=40_000, file_bytes=10_000)
    for step in range(60):
        assert out.append_rows(np.zeros(10, ROW_DTYPE), step=step) == 10
        assert out.append(FrameType.VECTOR, encode_message(Vectors(items=())), step=step)
        assert out.append(FrameType.END_STEP, encode_message(EndStep(step=step, num_rows=10, num_calls=10)), step=step)

    size = sum(path.stat().st_size for path in (tmp_path / "r").glob("*.spool"))
    assert size <= 40_000
    reader = SpoolReader(tmp_path / "r")
    frames = drain(reader)
    assert reader.num_missing_files == 0
    assert seqs(frames) == sorted(seqs(frames))
    said = [decode_message(frame) for frame in frames]
    ends = [one for one in said if isinstance(one, EndStep)]
    assert [end.step for end in ends] == list(range(60))
    assert all(end.num_rows + end.num_dropped_rows == 10 for end in ends)
    assert sum(end.num_dropped_rows for end in ends) == cap.cut.num_rows > 0
    reported = [one for one in said if isinstance(one, Health)]
    assert reported
    assert all(one.code == "spool_full" for one in reported)
    [line] = caplog.messages
    assert "finite rows" in line and "sentinel serve" in line


def test_what_is_thinned_to_write_the_news_is_in_the_next(tmp_path: Path) -> None:
    cap, out = capped(tmp_path / "r", max_bytes=4000, file_bytes=1000)
    for _ in range(20):
        out.append(FrameType.VECTOR, b"x" * 100)
    cap.make_room(3000)
    news = cap.news(0)
    cap.make_room(4000)
    now = cap.news(0)
    assert news is not None and now is not None

    cap.mark_reported(news)

    left = cap.news(0)
    assert left is not None and left.count == now.count - news.count > 0
    cap.mark_reported(left)
    assert cap.news(0) is None


def test_what_the_daemon_committed_goes_without_a_word(tmp_path: Path) -> None:
    cap, out = capped(tmp_path / "r", max_bytes=4000, file_bytes=1000)
    for _ in range(60):
        assert out.append(FrameType.VECTOR, b"x" * 100)
        write_ack(tmp_path / "r", *out.position)

    assert not cap.cut and not cap.gone
    assert list_files(tmp_path / "r")[0] > 0
    assert not [f for f in drain(SpoolReader(tmp_path / "r")) if f.header.type == FrameType.HEALTH]
