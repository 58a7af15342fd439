"""Hopping over a spool file: its whole frames are found by their headers, whatever lies between them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sentinel.testing import SyntheticRun
from sentinel.wire import frame_hops
from sentinel.wire.frame import Frame, FrameType
from sentinel.wire.frame_hops import FrameHops
from sentinel.wire.spool_files import KeptFile, file_name, list_stored
from sentinel.wire.spool_reader import SpoolReader

from ..support.serving import small_run


def hopped(path: Path) -> list[Frame]:
    with FrameHops(path) as file:
        return [frame for found in file.heads() if (frame := file.frame(found)) is not None]


def read_whole(folder: Path) -> list[Frame]:
    """Return every frame of a folder, by the reader that takes all of it."""
    return SpoolReader(folder).poll(final=True)


def same(found: list[Frame], expected: list[Frame]) -> bool:
    return [(one.header, bytes(one.payload), one.offset_after) for one in found] == [
        (one.header, bytes(one.payload), one.offset_after) for one in expected
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SyntheticRun:
    run = small_run(tmp_path_factory.mktemp("spools") / "run", pp=1, dp=1)
    run.write(12)
    return run


@pytest.mark.parametrize("window", [128, 1000, 16 * 2**10])
def test_the_frames_are_those_that_the_reader_of_all_finds(
    run: SyntheticRun, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    monkeypatch.setattr(frame_hops, "WINDOW_BYTES", window)

    found = hopped(run.folder(0) / file_name(0))

    assert len(found) > 24 and same(found, read_whole(run.folder(0)))


@pytest.mark.parametrize("window", [128, 16 * 2**10])
@pytest.mark.parametrize("damage", ["torn", "flipped payload", "flipped length", "rubbish", "false magic"])
def test_damage_costs_the_frames_that_it_hits(
    run: SyntheticRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str, window: int
) -> None:
    monkeypatch.setattr(frame_hops, "WINDOW_BYTES", window)
    whole = (run.folder(0) / file_name(0)).read_bytes()
    ends = [one.offset_after for one in read_whole(run.folder(0))]
    middle, behind = ends[7], ends[8]
    data = {
        "torn": whole[:-5],
        "flipped payload": whole[: behind - 3] + bytes([whole[behind - 3] ^ 1]) + whole[behind - 2 :],
        "flipped length": whole[: middle + 8] + bytes([whole[middle + 8] ^ 1]) + whole[middle + 9 :],
        "rubbish": whole[:middle] + b"rubbish" * 40 + whole[middle:],
        "false magic": whole[:middle] + b"SNTL" * 100 + whole[middle:],
    }[damage]
    (tmp_path / file_name(0)).write_bytes(data)

    found = hopped(tmp_path / file_name(0))

    assert same(found, read_whole(tmp_path))
    assert len(ends) - len(found) == (0 if damage in ("rubbish", "false magic") else 1)


def test_rows_that_nobody_asks_for_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lengths_read: list[int]
) -> None:
    run = small_run(tmp_path / "run", pp=1, dp=1, layers=40)
    run.write(20)
    path = run.folder(0) / file_name(0)
    monkeypatch.setattr(frame_hops, "WINDOW_BYTES", 512)
    with FrameHops(path) as file:
        ends = [one.head.step for one in file.heads() if one.head.type == FrameType.END_STEP]

    assert ends == list(range(20)) and sum(lengths_read) < path.stat().st_size / 4


def test_a_file_that_only_looks_like_frames_is_given_up(
    run: SyntheticRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame_hops, "MOST_DAMAGED", 10)
    whole = (run.folder(0) / file_name(0)).read_bytes()
    path = tmp_path / "forged"
    path.write_bytes(b"SNTL" * 9 + whole)
    assert len(hopped(path)) == len(read_whole(run.folder(0)))
    path.write_bytes(b"SNTL" * 11 + whole)

    assert hopped(path) == []


def test_links_pipes_and_what_is_gone_hold_nothing(run: SyntheticRun, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(run.folder(0) / file_name(0))
    os.mkfifo(tmp_path / "pipe")

    assert [hopped(tmp_path / name) for name in ("link", "pipe", "gone")] == [[], [], []]


def test_of_several_files_a_whole_one_counts_first_and_of_kept_ones_the_newest(tmp_path: Path) -> None:
    for name in (file_name(4), file_name(3), KeptFile(0, 2, 1).name, KeptFile(0, 2, 2).name, KeptFile(2, 3, 3).name, "ack"):
        (tmp_path / name).touch()

    assert list_stored(tmp_path) == {2: KeptFile(0, 2, 2).name, 3: file_name(3), 4: file_name(4)}
    assert list_stored(tmp_path / "nowhere") == {}
