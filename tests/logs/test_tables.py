"""Tables that people have: numbers as other countries write them, rows that say whose they are, packed and damaged files."""

from __future__ import annotations

import bz2
import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sentinel.errors import LogError
from sentinel.logs.log_file import read_log
from sentinel.logs.rows import Log

STEPS, LOSS, NORM = [1000, 2000, 3000, 4000], [3.0, 2.75, 2.5, 2.25], [1.5, 1.25, 1.125, 1.0]
HEAD = "step,loss,grad_norm\n"


def rows(form: str) -> str:
    return "".join(form.format(s=s, a=a, b=b) for s, a, b in zip(STEPS, LOSS, NORM, strict=True))


def records(**more: Any) -> list[dict[str, Any]]:
    return [{"step": s, "loss": a, "grad_norm": b, **more} for s, a, b in zip(STEPS, LOSS, NORM, strict=True)]


PLAIN = HEAD + rows("{s},{a},{b}\n")
TABLES: dict[str, str | bytes] = {
    "bzip2": bz2.compress(PLAIN.encode()),
    "xz": lzma.compress(PLAIN.encode()),
    "UTF-16 without its mark": PLAIN.encode("utf-16-le"),
    "UTF-16, the other way round": PLAIN.encode("utf-16-be"),
    "zeros behind a crash": PLAIN.encode() + b"\x00" * 512 + b"\n",
    "thousands": HEAD + rows('"{s:,}",{a},{b}\n'),
    "steps as floats": HEAD + rows("{s:.1e},{a},{b}\n"),
    "quoted decimal commas": HEAD + rows('{s};"{a}";"{b}"\n').replace(".", ",").replace(";", ","),
    "tabs and decimal commas": (HEAD.replace(",", ";") + rows("{s};{a};{b}\n")).replace(".", ",").replace(";", "\t"),
    "Excel's hint": "sep=;\n" + PLAIN.replace(",", ";"),
    "a cell over two lines": "step,loss,grad_norm,note\n" + rows('{s},{a},{b},"one\ntwo"\n'),
    "Markdown": "| step | loss | grad_norm |\n|---|---|---|\n" + rows("| {s} | {a} | {b} |\n"),
    "rich": "\u250f\u2501\u2501\u2501\u2513\n\u2503 step \u2503 loss \u2503 grad_norm \u2503\n"
    + rows("\u2502 {s} \u2502 {a} \u2502 {b} \u2502\n"),
    "a header of two words": rows("{s}\t{a}\t{b}\n").join(["Step\tTraining Loss\tGradient Norm\n", ""]),
    "camel case": "globalStep,trainLoss,gradNorm\n" + rows("{s},{a},{b}\n"),
    "one number a row": "step,tag,value\n" + rows("{s},train/loss,{a}\n{s},train/grad_norm,{b}\n"),
    "one number a row, by its name": "tag,value,step\n" + rows("loss,{a},{s}\n") + rows("grad_norm,{b},{s}\n"),
    "one number a line": rows(
        '{{"step": {s}, "key": "loss", "value": {a}}}\n{{"step": {s}, "key": "grad_norm", "value": {b}}}\n'
    ),
    "what was printed between": "\nWARNING: late\n".join(map(json.dumps, records())) + "\n",
    "killed within a line": "\n".join(map(json.dumps, records())).replace('{"step": 2', '{"step": 2, "lo{"step": 2'),
    "a container's": "".join(json.dumps({"log": f"{json.dumps(r)[1:-1]}\n", "stream": "stdout"}) + "\n" for r in records()),
    "objects over many lines": "\n".join(json.dumps(r, indent=1) for r in records()),
    "by step": json.dumps({str(r.pop("step")): r for r in records()}),
    "beside a configuration": json.dumps({"config": {"lr": 1}, "history": {"step": STEPS, "loss": LOSS, "grad_norm": NORM}}),
}  # fmt: skip


def read(data: str | bytes, tmp_path: Path) -> Log:
    (tmp_path / "a.log").write_bytes(data if isinstance(data, bytes) else data.encode())
    return read_log(tmp_path / "a.log")


def of(log: Log, channel: str) -> list[float]:
    return log.columns[channel][log.present[channel]].tolist()


@pytest.mark.parametrize("form", TABLES)
def test_every_table_gives_the_same_rows(form: str, tmp_path: Path) -> None:
    log = read(TABLES[form], tmp_path)

    assert log.steps.tolist() == STEPS and not log.attempts.any()
    assert (of(log, "loss"), of(log, "grad_norm")) == (LOSS, NORM)


def test_rows_of_an_evaluation_are_no_points(tmp_path: Path) -> None:
    mixed = [one for r in records(split="train") for one in (r, {"step": r["step"], "split": "val", "loss": 9.0})]
    table = "step,phase,loss\n" + "".join(f"{r['step']},{r['split']},{r['loss']}\n" for r in mixed)

    for log in (read("\n".join(map(json.dumps, mixed)), tmp_path), read(table, tmp_path)):
        assert of(log, "loss") == LOSS and of(log, "val/loss") == [9.0] * 4
        assert log.steps.tolist() == [step for step in STEPS for _ in range(2)]


def test_ranks_that_write_into_one_table_are_series_of_their_own(tmp_path: Path) -> None:
    log = read("rank,step,loss\n" + rows("1,{s},{a}\n0,{s},9\n"), tmp_path)

    assert of(log, "loss") == LOSS and of(log, "rank 0/loss") == [9.0] * 4
    assert log.steps.tolist() == [step for step in STEPS for _ in range(2)] and "2 ranks" in log.notes[0]
    # A rank that never changes is a setting.
    assert list(read("rank,step,loss\n" + rows("8,{s},{a}\n"), tmp_path).columns) == ["loss"]


def test_steps_that_several_rows_share_are_steps_and_words_are_said(tmp_path: Path) -> None:
    twice = read("step,loss\n" + rows("{s},{a}\n{s},{a}\n{s},{a}\n"), tmp_path)
    words = read("step,loss\n" + "".join(f"{at}k,2.5\n" for at in range(4)), tmp_path)
    constant = read("step,loss\n" + "7,2.5\n" * 40, tmp_path)

    assert twice.steps.tolist() == [step for step in STEPS for _ in range(3)]
    assert words.steps.tolist() == [0, 1, 2, 3] and 'holds words, such as "0k" in line 2' in words.notes[0]
    assert constant.steps.tolist() == [*range(40)] and "rows are counted" in constant.notes[0]


def test_a_comma_that_may_be_either_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LogError, match=r':2: column "loss": expected a number, .* got "3,125"'):
        read('step,loss\n1,"3,125"\n2,"3,250"\n', tmp_path)
    np.testing.assert_array_equal(of(read('step,loss\n1,"3,125"\n2,"3,2"\n', tmp_path), "loss"), [3.125, 3.2])
    np.testing.assert_array_equal(of(read('step,loss\n1,"3,125.5"\n2,"1,000,000"\n', tmp_path), "loss"), [3125.5, 1e6])


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("a.csv", "step,loss,grad_norm\n1,3.0,1.5\n2,2.5,-5\n", 3),
        ("a.jsonl", '{"step": 1, "loss": 3.0, "grad_norm": 1.5}\n\n{"step": 2, "loss": 2.5, "grad_norm": -5.0}\n', 3),
        ("a.log", "step 1 loss 3.0 grad_norm 1.5\nsaved\nstep 2 loss 2.5 grad_norm -5.0\n", 3),
    ],
)
def test_a_norm_below_zero_is_an_error_with_its_line(name: str, text: str, line: int, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)

    with pytest.raises(LogError, match=rf'{name}:{line}: column "grad_norm": expected a norm, which is 0 or more, got -5'):
        read_log(tmp_path / name)


def test_deepspeeds_word_for_no_norm_is_none_and_said(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("step,loss,grad_norm\n1,3.0,1.5\n2,2.5,-1\n3,2.0,1.0\n")

    log = read_log(tmp_path / "a.csv")

    assert log.present["grad_norm"].tolist() == [True, False, True] and np.isnan(log.columns["grad_norm"][1])
    assert any('"grad_norm" is -1 in 1 rows' in note for note in log.notes)


def test_tags_like_formulas_are_read_as_they_were(tmp_path: Path) -> None:
    given = ("loss", 3.0), ("'-val_loss", 1.0)
    rows = "".join(f"{step},{tag},{value - step}\n" for step in range(4) for tag, value in given)
    (tmp_path / "a.csv").write_text("step,tag,value\n" + rows)

    assert "-val_loss" in read_log(tmp_path / "a.csv").sources.values()
