"""What trainers print, by a table of samples: printed_lines.txt has a few lines of each, and what is to be read in them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from sentinel.logs.log_file import read_log

SAMPLES = Path(__file__).with_name("printed_lines.txt")
ESCAPES = {r"\r": "\r", r"\t": "\t", r"\x1b": "\x1b", r"\x08": "\b"}


def samples() -> dict[str, tuple[dict[str, list[float]], str]]:
    found = {}
    for sample in SAMPLES.read_text(encoding="utf-8").split("### ")[1:]:
        head, _, text = sample.partition("\n")
        name, *columns = head.split(" | ")
        given = {column.split(" = ")[0]: [float(one) for one in column.split(" = ")[1].split()] for column in columns}
        found[name] = given, re.sub(r"\\(r|t|x1b|x08)", lambda match: ESCAPES[match[0]], text)
    return found


SAMPLE = samples()


@pytest.mark.parametrize("trainer", SAMPLE)
def test_points_are_read_as_the_trainer_printed_them(trainer: str, tmp_path: Path) -> None:
    columns, text = SAMPLE[trainer]
    (tmp_path / "a.log").write_bytes(text.encode())

    log = read_log(tmp_path / "a.log")

    assert log.form == "text"
    if "step" in columns:
        assert log.steps.tolist() == columns["step"]
    for channel, values in columns.items():
        if channel != "step":
            np.testing.assert_allclose(log.columns[channel][log.present[channel]], values, rtol=1e-6)


def read(text: str, tmp_path: Path) -> dict[str, list[float]]:
    (tmp_path / "a.log").write_text(text)
    log = read_log(tmp_path / "a.log")
    return {channel: values[log.present[channel]].tolist() for channel, values in log.columns.items()}


def test_what_an_evaluation_prints_under_its_heading_is_no_point(tmp_path: Path) -> None:
    training = "".join(f"Train: [{at}/9]  Loss: {2.5 - at / 4}  LR: 0.5\n" for at in range(3))

    given = read(training + "Test: [0/5]  Loss: 9.5\nvalid on 'valid' subset | loss 8.5 | lr 0.25\n" + training, tmp_path)

    assert given["loss"] == [2.5, 2.25, 2.0] * 2 and given["lr"] == [0.5] * 6
    assert (given["test/loss"], given["val/loss"]) == ([9.5], [8.5])


def test_a_heading_that_every_line_has_says_nothing(tmp_path: Path) -> None:
    given = read("".join(f"INFO - test - step {at} loss {2.5 - at / 4}\n" for at in range(3)), tmp_path)

    assert given == {"loss": [2.5, 2.25, 2.0]}


def test_a_rate_among_the_settings_is_no_point(tmp_path: Path) -> None:
    given = read("learning_rate = 0.5\nbatch_size = 8\n" + "step 1 loss 2.5 lr 0.25\nstep 2 loss 2.5 lr 0.25\n", tmp_path)

    assert given == {"loss": [2.5, 2.5], "lr": [0.25, 0.25]}


def test_a_step_told_again_by_a_line_of_another_form_is_left_out(tmp_path: Path) -> None:
    line = "| train_inner | num_updates {0} loss {0}\n"
    (tmp_path / "a.log").write_text(line.format(1) + line.format(2) + "| train | num_updates 2 loss 9\n" + line.format(3))

    log = read_log(tmp_path / "a.log")

    assert log.columns["loss"].tolist() == [1, 2, 3] and "1 lines of another form" in log.notes[0]
    # Ranks that print the same line are points.
    assert read("".join(f"rank{at % 2}: step {at // 2} loss {at}\n" for at in range(6)), tmp_path)["loss"] == [*range(6)]
