"""Skimming a spool: wanted frames come once and in order, whatever lies between them or happened to the file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sentinel.messages import EndStep
from sentinel.testing import SyntheticRun
from sentinel.wire import spool_skim
from sentinel.wire.frame import HEADER_BYTES, Frame, FrameType, decode_message, encode_frame, peek
from sentinel.wire.spool_files import list_files
from sentinel.wire.spool_skim import SpoolSkim

ENDS = (FrameType.END_STEP,)
PLENTY = 2**30


def a_run(run_dir: Path, **options: object) -> SyntheticRun:
    return SyntheticRun(run_dir, **{"layers": 2, "d_model": 8, "elements": 8, **options})  # type: ignore[arg-type]


def steps_of(frames: list[Frame]) -> list[int]:
    messages = [decode_message(frame) for frame in frames]
    return [one.step for one in messages if isinstance(one, EndStep)]


def test_only_what_is_new_comes_and_rows_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lengths_read: list[int]
) -> None:
    # Each window is shorter than a step's rows, as it is of a model of a usual size.
    monkeypatch.setattr(spool_skim, "WINDOW_BYTES", 512)
    run = a_run(tmp_path / "run", layers=16)
    skim = SpoolSkim(run.folder(0), ENDS)
    run.write(20)

    assert steps_of(skim.read(PLENTY)) == list(range(20))
    assert sum(lengths_read) < sum(file.stat().st_size for file in run.folder(0).glob("*.spool")) / 3
    lengths_read.clear()
    assert skim.read(PLENTY) == [] and sum(lengths_read) == 0
    run.write(2)
    assert steps_of(skim.read(PLENTY)) == [20, 21]


def test_it_goes_on_over_files_and_begins_at_the_last_two(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", file_bytes=16 * 2**10)
    run.write(30)
    assert len(list_files(run.folder(0))) > 3
    skim = SpoolSkim(run.folder(0), ENDS)

    first = steps_of(skim.read(PLENTY))
    run.write(30)
    second = steps_of(skim.read(PLENTY))

    assert first == list(range(first[0], 30)) and 0 < first[0] < 29
    assert second == list(range(30, 60))


def test_where_too_much_waits_it_leaps_to_the_newest(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    run.write(300)
    skim = SpoolSkim(run.folder(0), ENDS)

    found = steps_of(skim.read(200_000))

    assert found[-1] == 299 and found[0] == 0
    assert len(found) < 300 and found == sorted(set(found))


def test_a_torn_tail_is_waited_for_and_rubbish_is_passed_over(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    run.write(2)
    (path,) = run.folder(0).glob("*.spool")
    whole = path.read_bytes()
    skim = SpoolSkim(run.folder(0), ENDS)
    path.write_bytes(whole[:-10])

    assert steps_of(skim.read(PLENTY)) == [0]
    path.write_bytes(whole)
    assert steps_of(skim.read(PLENTY)) == [1]
    path.write_bytes(whole + b"SNTL rubbish" * 30)
    assert skim.read(PLENTY) == []
    path.write_bytes(whole + b"SNTL rubbish" * 30 + whole)
    assert steps_of(skim.read(PLENTY)) == [0, 1]


def test_rows_that_are_being_written_are_waited_for(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    run.write(1)
    (path,) = run.folder(0).glob("*.spool")
    whole = path.read_bytes()
    run.write(1)
    both = path.read_bytes()
    skim = SpoolSkim(run.folder(0), ENDS)
    path.write_bytes(both[: len(whole) + HEADER_BYTES + 5])

    assert steps_of(skim.read(PLENTY)) == [0]
    path.write_bytes(both)
    assert steps_of(skim.read(PLENTY)) == [1]


def test_a_file_that_became_shorter_is_read_from_its_beginning_and_one_that_is_gone_is_left_out(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", file_bytes=64 * 2**10)
    run.write(3)
    path = run.folder(0) / "000000.spool"
    skim = SpoolSkim(run.folder(0), ENDS)
    assert steps_of(skim.read(PLENTY)) == [0, 1, 2]
    os.truncate(path, path.stat().st_size - 10)

    assert steps_of(skim.read(PLENTY)) == [0, 1]
    run.write(60)
    path.unlink()
    found = steps_of(skim.read(PLENTY))
    assert found == list(range(found[0], 63)) and 3 < found[0] < 40


def test_links_and_pipes_are_not_opened(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    run.write(2)
    planted = tmp_path / "planted"
    planted.mkdir()
    (planted / "000000.spool").symlink_to(run.folder(0) / "000000.spool")
    os.mkfifo(planted / "000001.spool")

    assert SpoolSkim(planted, ENDS).read(PLENTY) == []
    assert SpoolSkim(tmp_path / "nowhere", ENDS).read(PLENTY) == []


def test_a_prefix_tells_type_and_length_and_a_flipped_bit_in_it_is_seen(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    run.write(1)
    frames = SpoolSkim(run.folder(0), ENDS).read(PLENTY)
    head, payload = encode_frame(frames[0].header, frames[0].payload)
    data = head + bytes(payload)

    assert peek(data) == (FrameType.END_STEP, len(data))
    assert peek(data[:23]) is None
    for at in range(12):
        assert peek(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]) is None
