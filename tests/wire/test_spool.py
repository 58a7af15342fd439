from __future__ import annotations

import contextlib
import errno
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sentinel.collect.retention.spool_cap import SpoolCap
from sentinel.messages import Health
from sentinel.record import ROW_DTYPE
from sentinel.testing import FakeClock
from sentinel.wire import spool, spool_reader
from sentinel.wire.frame import Frame, FrameType, decode_message
from sentinel.wire.spool import SpoolWriter, read_ack, write_ack
from sentinel.wire.spool_files import list_files
from sentinel.wire.spool_reader import SpoolReader

LIFE = bytes(range(16))


def writer(folder: Path, **more: Any) -> SpoolWriter:
    return SpoolWriter(folder, LIFE, 3, 42, 0, clock=FakeClock(), **more)


def seqs(frames: list[Frame]) -> list[int]:
    return [frame.header.seq for frame in frames]


def drain(reader: SpoolReader, *, final: bool = False) -> list[Frame]:
    frames: list[Frame] = []
    while found := reader.poll(final=final):
        frames += found
    return frames


class Disk:
    """Stands between the writer and the system: full after so many bytes, or dead."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room: int | None = None
        self.error = errno.ENOSPC
        self.can_truncate = True
        self._writev, self._truncate = os.writev, os.ftruncate
        monkeypatch.setattr(spool.os, "writev", self.writev)
        monkeypatch.setattr(spool.os, "write", lambda fd, data: self.writev(fd, [data]))
        monkeypatch.setattr(spool.os, "ftruncate", self.ftruncate)

    def writev(self, fd: int, buffers: list[bytes]) -> int:
        data = b"".join(bytes(one) for one in buffers)
        if self.room is None:
            return self._writev(fd, [data])
        if not self.room:
            raise OSError(self.error, os.strerror(self.error))
        done = self._writev(fd, [data[: self.room]])
        self.room -= done
        return done

    def ftruncate(self, fd: int, size: int) -> None:
        if not self.can_truncate:
            raise OSError(errno.EIO, "no")
        self._truncate(fd, size)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def test_what_is_written_is_read_in_order_with_positions(tmp_path: Path) -> None:
    out = writer(tmp_path / "r")
    for step in range(3):
        assert out.append(FrameType.VECTOR, bytes([step]) * 10, step=step)

    frames = SpoolReader(tmp_path / "r").poll()

    assert seqs(frames) == [1, 2, 3]
    assert [frame.header.step for frame in frames] == [0, 1, 2]
    assert frames[-1].offset_after == (tmp_path / "r" / "000000.spool").stat().st_size
    again = SpoolReader(tmp_path / "r", file_index=0, offset=frames[0].offset_after)
    assert seqs(again.poll()) == [2, 3]


def test_nobody_else_may_read_the_spool(tmp_path: Path) -> None:
    writer(tmp_path / "r").append(FrameType.VECTOR, b"x")

    assert (tmp_path / "r").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "r" / "000000.spool").stat().st_mode & 0o777 == 0o600


def test_rows_are_split_into_frames_of_bounded_size(tmp_path: Path) -> None:
    rows = np.zeros(70_000, ROW_DTYPE)
    rows["tensor"] = np.arange(len(rows))

    assert writer(tmp_path / "r").append_rows(rows, step=1) == 70_000

    frames = drain(SpoolReader(tmp_path / "r"))
    assert len(frames) == 3
    assert all(len(frame.payload) <= spool.ROWS_BYTES for frame in frames)
    assert sum(frame.header.row_count for frame in frames) == 70_000
    joined = np.concatenate([np.frombuffer(frame.payload, ROW_DTYPE) for frame in frames])
    assert np.array_equal(joined, rows)


def test_a_file_begins_with_the_newest_descriptor(tmp_path: Path) -> None:
    out = writer(tmp_path / "r", file_bytes=600)
    out.append(FrameType.DESCRIPTOR, b"first")
    out.append(FrameType.DESCRIPTOR, b"second")
    for _ in range(10):
        out.append(FrameType.VECTOR, b"x" * 100)

    frames = drain(SpoolReader(tmp_path / "r"))

    heads = [next(f for f in frames if f.file_index == index) for index in list_files(tmp_path / "r")]
    assert len(heads) > 2
    assert [head.header.type for head in heads] == [FrameType.DESCRIPTOR] * len(heads)
    assert [bytes(head.payload) for head in heads[1:]] == [b"second"] * (len(heads) - 1)
    assert {frame.header.placement_epoch for frame in frames} == {1, 2}
    assert len({frame.header.layout_id for frame in frames}) == 2
    assert seqs(frames) == list(range(1, len(frames) + 1))


def test_torn_tail_is_cut(tmp_path: Path) -> None:
    out = writer(tmp_path / "r")
    out.append(FrameType.VECTOR, b"whole")
    out.append(FrameType.VECTOR, b"torn" * 50)
    path = tmp_path / "r" / "000000.spool"
    os.truncate(path, path.stat().st_size - 30)

    reader = SpoolReader(tmp_path / "r")

    assert seqs(reader.poll()) == [1]
    assert reader.poll() == []
    assert reader.num_torn == 0, "the writer may live: its tail is waited for"
    assert reader.poll(final=True) == []
    assert (reader.num_torn, reader.num_corrupt) == (1, 0)


def test_a_tail_that_completes_is_read(tmp_path: Path) -> None:
    out = writer(tmp_path / "r")
    out.append(FrameType.VECTOR, b"x" * 100)
    path = tmp_path / "r" / "000000.spool"
    data = path.read_bytes()
    reader = SpoolReader(tmp_path / "r")

    for cut in (0, 3, 50, len(data) - 1):
        path.write_bytes(data[:cut])
        assert reader.poll() == []
    path.write_bytes(data)

    assert seqs(reader.poll()) == [1]
    assert reader.num_torn == reader.num_corrupt == 0


def test_a_newer_file_ends_the_wait_for_a_torn_tail(tmp_path: Path) -> None:
    out = writer(tmp_path / "r", file_bytes=300)
    for _ in range(4):
        out.append(FrameType.VECTOR, b"x" * 150)
    first = tmp_path / "r" / "000000.spool"
    os.truncate(first, first.stat().st_size - 5)

    reader = SpoolReader(tmp_path / "r")

    assert seqs(drain(reader)) == [2, 3, 4]
    assert reader.num_torn == 1


def test_a_flipped_bit_costs_one_frame_and_is_counted(tmp_path: Path) -> None:
    out = writer(tmp_path / "r")
    for _ in range(3):
        out.append(FrameType.VECTOR, b"x" * 100)
    path = tmp_path / "r" / "000000.spool"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(bytes(data))

    reader = SpoolReader(tmp_path / "r")

    assert seqs(reader.poll()) == [1, 3]
    assert (reader.num_corrupt, reader.num_torn) == (1, 0)
    assert reader.num_corrupt_bytes == len(data) // 3


def test_a_window_smaller_than_a_frame_grows(tmp_path: Path) -> None:
    out = writer(tmp_path / "r")
    out.append(FrameType.VECTOR, b"x" * 5000)
    out.append(FrameType.VECTOR, b"y")
    reader = SpoolReader(tmp_path / "r")

    found = [frame for _ in range(2) for frame in reader.poll(max_bytes=64)]

    assert seqs(found) == [1, 2]


def test_frames_of_another_protocol_are_skipped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = writer(tmp_path / "r")
    out.append(FrameType.VECTOR, b"ours")
    with monkeypatch.context() as patch:
        encode = spool.encode_frame
        patch.setattr(spool, "encode_frame", lambda header, payload: encode(header, payload, protocol=3))
        out.append(FrameType.VECTOR, b"theirs")
    out.append(FrameType.VECTOR, b"ours")

    reader = SpoolReader(tmp_path / "r")

    assert seqs(reader.poll()) == [1, 3]
    assert reader.foreign == {3: 1}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_random_damage_never_crashes_the_reader(tmp_path: Path, data: st.DataObject) -> None:
    folder = tmp_path / os.urandom(4).hex()
    out = writer(folder, file_bytes=700)
    sent = [os.urandom(data.draw(st.integers(0, 200))) for _ in range(8)]
    for payload in sent:
        out.append(FrameType.VECTOR, payload)
    for index in list_files(folder):
        path = folder / f"{index:06d}.spool"
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(0, 3))):
            content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(content[: data.draw(st.integers(0, len(content)))])

    frames = drain(SpoolReader(folder), final=True)

    assert seqs(frames) == sorted(set(seqs(frames)))
    assert all(bytes(frame.payload) == sent[frame.header.seq - 1] for frame in frames)


def test_full_disk_is_said(tmp_path: Path, disk: Disk) -> None:
    out = writer(tmp_path / "r")
    rows = np.zeros(10, ROW_DTYPE)
    assert out.append_rows(rows, step=1) == 10
    disk.room = 500

    assert out.append_rows(rows, step=2) == 0
    assert not out.append(FrameType.END_STEP, b"", step=2)
    assert (out.num_failed_frames, out.num_lost_rows) == (2, 10)
    disk.room = None
    assert out.append_rows(rows, step=3) == 10

    reader = SpoolReader(tmp_path / "r")
    frames = reader.poll()
    assert seqs(frames) == [1, 4, 5], "a lost frame leaves a gap in the numbers"
    assert reader.num_corrupt == 0, "what was torn was cut off again"
    health = decode_message(frames[-1])
    assert isinstance(health, Health)
    assert (health.code, health.count, health.step) == ("disk_full", 2, 3)
    assert "No space left" in health.message
    out.append(FrameType.VECTOR, b"")
    assert len(reader.poll()) == 1, "said once"


def test_a_torn_frame_that_cannot_be_cut_begins_a_new_file(tmp_path: Path, disk: Disk) -> None:
    out = writer(tmp_path / "r")
    out.append(FrameType.VECTOR, b"before")
    disk.room, disk.can_truncate = 60, False
    assert not out.append(FrameType.VECTOR, b"torn" * 10)
    disk.room = None
    assert out.append(FrameType.VECTOR, b"after")

    reader = SpoolReader(tmp_path / "r")
    frames = drain(reader)

    assert [bytes(f.payload) for f in frames if f.header.type == FrameType.VECTOR] == [b"before", b"after"]
    assert list_files(tmp_path / "r") == [0, 1]
    assert reader.num_torn == 1


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE, errno.EDQUOT])
def test_a_dead_disk_never_raises_and_leaves_no_litter(tmp_path: Path, disk: Disk, error: int) -> None:
    out = writer(tmp_path / "r")
    out.append(FrameType.VECTOR, b"before")
    disk.room, disk.error = 0, error

    assert not any(out.append(FrameType.VECTOR, b"x") for _ in range(20))
    disk.room = None
    assert out.append(FrameType.VECTOR, b"after")

    assert len(list_files(tmp_path / "r")) <= 2
    assert out.num_failed_frames == 20
    assert [f.header.type for f in drain(SpoolReader(tmp_path / "r"))] == [7, 7, FrameType.HEALTH]


def test_a_folder_that_cannot_be_made_never_raises(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    out = writer(tmp_path / "file" / "r")

    assert not out.append(FrameType.VECTOR, b"x")
    assert out.num_failed_frames == 1


def test_a_full_disk_makes_room_from_what_was_committed(tmp_path: Path, disk: Disk) -> None:
    closed = SpoolCap(tmp_path / "r", 3)
    out = writer(tmp_path / "r", file_bytes=400, closed_files=closed)
    for _ in range(6):
        out.append(FrameType.VECTOR, b"x" * 150)
    write_ack(tmp_path / "r", 2, 0)
    deleted: list[int] = []
    drop = closed.drop_committed

    def drop_and_free() -> bool:
        done = drop()
        deleted.append(done)
        disk.room = None
        return done

    closed.drop_committed = drop_and_free  # type: ignore[method-assign]
    disk.room = 0

    assert out.append(FrameType.VECTOR, b"y")
    assert deleted == [True]
    assert out.num_failed_frames == 0


@pytest.mark.parametrize("text", ["", "3", "three 4\n", "1 2 3\n"])
def test_an_ack_that_makes_no_sense_acknowledges_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "ack").write_text(text)

    assert read_ack(tmp_path) == (0, 0)


def test_a_file_deleted_under_the_writer_is_said(tmp_path: Path) -> None:
    out = writer(tmp_path / "r")
    out.append(FrameType.ROWS, b"x")
    (tmp_path / "r" / "000000.spool").unlink()
    for _ in range(300):
        out.append(FrameType.ROWS, b"x")

    reported = [decode_message(frame) for frame in drain(SpoolReader(tmp_path / "r"))]

    assert "spool_deleted" in [one.code for one in reported if isinstance(one, Health)]


def test_files_that_come_while_the_reader_looks_round_are_read_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = writer(tmp_path, file_bytes=300)
    reader = SpoolReader(tmp_path)
    read = spool_reader.read_window

    def read_late(path: str, offset: int, max_bytes: int) -> tuple[bytes, int] | None:
        found = read(path, offset, max_bytes)
        if found is None and not list_files(tmp_path):  # The reader pauses here, and the writer goes on.
            for _ in range(3):
                out.append(FrameType.HEALTH, b"x" * 200)
            assert len(list_files(tmp_path)) > 1
        return found

    monkeypatch.setattr(spool_reader, "read_window", read_late)

    assert seqs(drain(reader)) == [1, 2, 3]
    assert reader.num_missing_files == 0


@pytest.mark.parametrize("kind", ["fifo", "directory", "link"])
def test_what_is_no_file_in_a_spool_is_neither_waited_for_nor_followed(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "spool"
    spool_writer = writer(folder)
    spool_writer.append(FrameType.HEALTH, b"x")
    spool_writer.close()
    stranger = folder / "000001.spool"
    if kind == "fifo":
        os.mkfifo(stranger)
    elif kind == "directory":
        stranger.mkdir()
    else:
        (tmp_path / "elsewhere").write_bytes((folder / "000000.spool").read_bytes())
        stranger.symlink_to(tmp_path / "elsewhere")

    assert seqs(drain(SpoolReader(folder), final=True)) == [1]


@pytest.mark.parametrize("seed", range(10))
def test_what_is_handed_over_is_read_as_it_is_from_the_disk(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    with contextlib.closing(writer(tmp_path / "whole", file_bytes=4_000)) as written:
        for number in range(60):
            written.append(FrameType.HEALTH, b"x" * rng.randrange(400), step=number)
    expected = drain(SpoolReader(tmp_path / "whole"), final=True)
    reader, found, num_taken, num_polled = SpoolReader(tmp_path / "copy"), list[Frame](), 0, 0
    (tmp_path / "copy").mkdir()
    for path in sorted((tmp_path / "whole").glob("*.spool")):
        data, at = path.read_bytes(), 0
        ends = [one.offset_after for one in expected if one.file_index == int(path.stem)]
        while at < len(data):
            # Cut behind a frame as a rule, and not always handed over.
            end = min(len(data), at + rng.randrange(1, 900))
            if rng.random() < 0.9:
                end = next(one for one in ends if one >= end)
            with (tmp_path / "copy" / path.name).open("ab") as file:
                file.write(data[at:end])
            frames = reader.take(int(path.stem), [(at, data[at:end])], end) if rng.random() < 0.8 else None
            num_taken, num_polled = num_taken + (frames is not None), num_polled + (frames is None)
            found += drain(reader) if frames is None else frames
            at = end
    found += drain(reader, final=True)
    assert [(frame.header, bytes(frame.payload)) for frame in found] == [
        (frame.header, bytes(frame.payload)) for frame in expected
    ]
    assert num_taken and num_polled
