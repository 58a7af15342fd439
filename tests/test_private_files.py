from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from sentinel.errors import StoreError
from sentinel.private_files import create_file, make_directory, refuse_foreign, tighten

UMASKS = [0o000, 0o002, 0o022, 0o027, 0o077, 0o277, 0o777]


@pytest.fixture
def umask() -> Iterator[None]:
    former = os.umask(0o022)
    yield
    os.umask(former)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("mask", UMASKS)
def test_every_level_is_private_whatever_the_umask(mask: int, tmp_path: Path, umask: None) -> None:
    os.umask(mask)

    make_directory(tmp_path / "a" / "b" / "c")
    make_directory(tmp_path / "a" / "b" / "c")

    assert [mode_of(tmp_path / name) for name in ("a", "a/b", "a/b/c")] == [0o700] * 3
    refuse_foreign(tmp_path / "a" / "b" / "c")


def test_what_was_there_before_is_left_as_it_is(tmp_path: Path) -> None:
    shared = tmp_path / "team"
    shared.mkdir()
    shared.chmod(0o2775)

    make_directory(shared / "run")

    assert mode_of(shared) == 0o2775
    refuse_foreign(shared, is_shared=True)


@pytest.mark.parametrize("mask", UMASKS)
def test_files_can_be_read_by_their_owner_alone(mask: int, tmp_path: Path, umask: None) -> None:
    os.umask(mask)

    os.close(create_file(tmp_path / "file", os.O_WRONLY | os.O_EXCL))

    assert mode_of(tmp_path / "file") & 0o477 == 0o400


@pytest.mark.parametrize(("mode", "expected"), [(0o770, 0o750), (0o777, 0o755), (0o2775, 0o2755), (0o000, 0o700)])
def test_a_looser_directory_of_ours_is_taken_from_others_and_that_is_said(mode: int, expected: int, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(mode)

    said = tighten(tmp_path / "run")

    assert mode_of(tmp_path / "run") == expected
    assert f"{mode:04o}" in said
    assert f"{expected:04o}" in said


def test_a_private_directory_and_one_of_another_user_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    assert tighten(tmp_path / "run") == ""
    (tmp_path / "run").chmod(0o770)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)

    assert tighten(tmp_path / "run") == ""
    with pytest.raises(StoreError, match="owned by user 12345"):
        refuse_foreign(tmp_path / "run")


def test_a_file_in_the_way_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")

    with pytest.raises(OSError, match="a"):
        make_directory(tmp_path / "a" / "b")
