"""Offline runs of Weights & Biases, as its own client wrote them, and what became of some of them."""

from __future__ import annotations

import math
import struct
import zlib
from pathlib import Path

import pytest

from sentinel.errors import LogError
from sentinel.logs.log_file import find_logs, read_log

from ..support.wandb_run import write_wandb_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 30 rows: one NaN, a text longer than a block, names with an escape."""
    rows = [
        {"train/loss": "nan" if at == 12 else 3.0 / (at + 1), "lr": 1e-3, "long": 40_000 if at == 5 else 1, "\x1b[31m": at}
        for at in range(30)
    ]
    return write_wandb_run(tmp_path_factory.mktemp("wandb"), rows)


def file_of(run: Path) -> Path:
    (path,) = run.glob("run-*.wandb")
    return path


def damaged(run: Path, tmp_path: Path, body: bytes) -> Path:
    path = tmp_path / file_of(run).name
    path.write_bytes(body)
    return path


def a_file(*records: bytes) -> bytes:
    """Return what wandb would write of records that fit a block."""
    made = b":W&B" + struct.pack("<HB", 0xBEE1, 0)
    for one in records:
        made += struct.pack("<IHB", zlib.crc32(one, zlib.crc32(b"\x01")), len(one), 1) + one
    return made


def test_the_history_is_read_from_the_file_and_from_its_directory(run: Path) -> None:
    for path in (file_of(run), run):
        log = read_log(path)

        assert (log.form, log.num_rows, log.step_source) == ("wandb", 30, "_step")
        assert log.steps.tolist() == list(range(30)) and not log.attempts.any() and log.notes == ()
        assert log.sources["loss"] == "train/loss" and set(log.columns) == {"loss", "lr", "\x1b[31m"}
        loss = log.columns["loss"]
        assert math.isnan(loss[12]) and log.present["loss"].all()
        assert loss[[0, 5, 29]] == pytest.approx([3.0, 0.5, 0.1])


def test_the_directory_of_runs_is_each_run_once_without_the_clients_own_logs(run: Path) -> None:
    assert (run.parent / "latest-run").is_symlink() and (run.parent / "debug.log").exists()
    assert find_logs(run.parent) == [run]


def test_a_file_that_ends_anywhere_is_read_as_far_as_it_goes(run: Path, tmp_path: Path) -> None:
    body = file_of(run).read_bytes()
    seen = set()
    for size in range(len(body) - 1, 32, -997):
        try:
            log = read_log(damaged(run, tmp_path, body[:size]))
        except LogError as error:
            assert "found none" in str(error)
            continue
        assert log.steps.tolist() == list(range(log.num_rows))
        assert not log.notes or log.notes[0].endswith("is half written and was left out")
        seen.add((log.num_rows, bool(log.notes)))

    assert len({num for num, _ in seen}) > 5 and {is_noted for _, is_noted in seen} >= {True}


def test_zeros_that_a_power_cut_left_end_it(run: Path, tmp_path: Path) -> None:
    body = file_of(run).read_bytes()

    assert read_log(damaged(run, tmp_path, body + bytes(500))).num_rows == 30


@pytest.mark.parametrize("at", [40, 20_000, -40])
def test_a_bit_that_flipped_is_said_with_its_place(run: Path, tmp_path: Path, at: int) -> None:
    body = bytearray(file_of(run).read_bytes())
    body[at] ^= 4

    with pytest.raises(LogError, match=r"byte \d+: record \d+ has a wrong checksum; the file is damaged"):
        read_log(damaged(run, tmp_path, bytes(body)))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b":W&B", "expected the head of wandb's file"),
        (b":W&B\xe1\xbe\x07", "expected version 0 of wandb's file, got 7"),
        (a_file(), "expected the history of a run in wandb's file, found none"),
        (a_file(b"\x08\x01"), "found none"),
        (a_file(b"\x12\x7f"), "record 0: expected a record of wandb, got 2 other bytes"),
        (a_file(b"\x12\x09\x0a\x07\x0a\x01a\x82\x01\x01-"), "record 0: expected a record of wandb"),
        (a_file(b"\x08\x01") + bytes(50) + b"x", "got zeros; the file is damaged"),
    ],
)
def test_what_is_no_run_is_said(body: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "run-x.wandb"
    path.write_bytes(body)

    with pytest.raises(LogError) as error:
        read_log(path)

    assert str(error.value).startswith(str(path)) and says in str(error.value)
