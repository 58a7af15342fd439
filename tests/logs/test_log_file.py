"""Plain logs: every kind that people have gives the same rows, and what cannot be read says where and what to do."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sentinel.errors import LogError
from sentinel.logs.columns import channels
from sentinel.logs.log_file import find_logs, read_log

LOSS = [3.25, 3.0, float("nan"), 2.75, 2.5]
NORM = [1.5, float("inf"), 1.25, None, 1.0]
STEPS = [10, 20, 30, 40, 50]


def cell(value: float | None) -> str:
    return "" if value is None else repr(value)


def table(delimiter: str = ",", header: str = "step{d}loss{d}grad_norm") -> str:
    lines = [delimiter.join((str(s), cell(a), cell(b))) for s, a, b in zip(STEPS, LOSS, NORM, strict=True)]
    return "\n".join([header.replace("{d}", delimiter), *lines]) + "\n"


def records() -> list[dict[str, Any]]:
    return [{"step": s, "loss": a, "grad_norm": b} for s, a, b in zip(STEPS, LOSS, NORM, strict=True)]


def trainer_state() -> str:
    return json.dumps({"best_metric": None, "global_step": 50, "log_history": records()}, indent=2)


def printed(form: str) -> str:
    lines = []
    for s, a, b in zip(STEPS, LOSS, NORM, strict=True):
        norm = form.split("||")[1].format(b) if b is not None else ""
        lines.append(form.split("||")[0].format(s, a) + norm)
    return "starting up, 8 workers\n" + "\n".join(lines) + "\nsaving checkpoint to out/ckpt.pt\n"


FORMS = {
    "csv": table(),
    "tsv": table("\t"),
    "semicolons, decimal commas": table(";").replace(".", ","),
    "bars": table("|"),
    "spaces": table(" ").replace("40 2.75 ", "40 2.75 None"),
    "byte order mark": "\ufeff" + table(),
    "windows line ends": table().replace("\n", "\r\n"),
    "comments": "# run 7\n" + table().replace("\n30", "\n# resumed\n\n30"),
    "quoted": table().replace("step,loss,grad_norm", '"step","loss","grad_norm"').replace("10,3.25", '"10","3.25"'),
    "header as comment": table().replace("step,", "# step,"),
    "other order": "\n".join(",".join(line.split(",")[::-1]) for line in table().splitlines()),
    "spellings": table(header="trainer/global_step{d}Loss/train{d}gradient-norm"),
    "capitals": table().replace("nan", "NaN").replace("inf", "Infinity"),
    "a text column": "\n".join(f"{line},{'note' if not at else 'ok'}" for at, line in enumerate(table().splitlines())),
    "trailing delimiter": "\n".join(f"{line}," for line in table().splitlines()),
    "header twice": table().replace("\n30", "\nstep,loss,grad_norm\n30"),
    "wandb": table(header='"Step"{d}"run 7 - train/loss"{d}"run 7 - train/grad_norm"'),
    "jsonl": "\n".join(map(json.dumps, records())) + "\n",
    "jsonl, strict": "\n".join(map(json.dumps, records())).replace("NaN", '"nan"').replace("Infinity", '"inf"') + "\n\n",
    "jsonl, steps of all": "\n".join(
        json.dumps({"global_step/max_steps": f"{r.pop('step')}/100", **r, "elapsed_time": "3s"}) for r in records()
    ),
    "jsonl, nested": "\n".join(json.dumps({"step": r.pop("step"), "train": r}) for r in records()),
    "json array": json.dumps(records()),
    "json columns": json.dumps({name: [r[name] for r in records()] for name in records()[0]}),
    "trainer_state": trainer_state(),
    "trainer_state, one line": json.dumps(json.loads(trainer_state())),
    "llm.c": printed("step   {:4d}/100 | loss {:.6f} (+nanz)|| | norm {:.4f} (+nanz)| lr 6.00e-04 | 2063.46 ms"),
    "words and numbers in turn": printed("step {} | loss {}|| | norm {} |"),
    "nanogpt": printed("iter {}: loss {:.4f}, time 23.11ms, mfu 12.0%|| grad_norm {}"),
    "megatron": printed(
        " [2026-11-21 10:00:00] iteration {:8d}/     100 | consumed samples: 640 | elapsed time per iteration (ms): 91.2 | "
        "global batch size: 64 | lm loss: {:.6E} | loss scale: 1.0 | number of skipped iterations: 0 || "
        "| grad norm: {:.3f} | number of nan iterations: 1 |"
    ),
    "modded-nanogpt": printed("step:{}/9536 train_loss:{:.4f}|| norm:{} train_time:12ms step_avg:9.9ms"),
    "torchtitan": printed("\x1b[34m[titan] 2026-11-21 - INFO - step: {:2}  \x1b[32mloss: {:7.4f}|| grad_norm: {}\x1b[0m"),
    "llm.c main.log": printed("s:{} trl:{:.4f} lr:0.000600|| norm:{}"),
    "logfmt": printed("ts=2026-11-21T10:00:00Z level=info step={} loss={}|| grad_norm={}"),
    "fairseq": printed('| inner | {{"epoch": 1, "num_updates": "{}", "loss": "{}"||, "gnorm": "{}"}}').replace("}}", "}"),
    "tutorial": printed("Epoch [1/5], Step [{}/600], Loss: {}||, grad norm: {}"),
    "olmo-core": printed("2026-11-21 root INFO [step={}/100,epoch=1]\n    train/CE loss={}||\n    optim/total grad norm={}"),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_kind_gives_the_same_rows(form: str, tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text(FORMS[form], encoding="utf-8", newline="")

    log = read_log(path)

    assert log.steps.tolist() == STEPS
    assert not log.attempts.any()
    np.testing.assert_allclose(log.columns["loss"], LOSS, rtol=1e-3)
    assert log.present["loss"].all()
    np.testing.assert_allclose(log.columns["grad_norm"], [np.nan if one is None else one for one in NORM], rtol=1e-3)
    assert log.present["grad_norm"].tolist() == [one is not None for one in NORM]


@pytest.mark.parametrize("form", ["csv", "jsonl", "trainer_state", "nanogpt"])
def test_gzip_is_the_same(form: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_text(FORMS[form])
    (tmp_path / "a.gz").write_bytes(gzip.compress(FORMS[form].encode()))

    assert read_log(tmp_path / "a.gz").columns["loss"].tolist()[3:] == read_log(tmp_path / "a").columns["loss"].tolist()[3:]


def test_utf16_as_powershell_writes_it(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(table(), encoding="utf-16")

    assert read_log(tmp_path / "a.csv").steps.tolist() == STEPS


def test_missing_and_nan_are_told_apart(tmp_path: Path) -> None:
    rows = "1,,1\n2,None,1\n3,null,\n4,NaN,1\n5,-nan,1\n6,1e999,1\n7,-nan(ind),1\n8,2,1\n"
    (tmp_path / "a.csv").write_text("step,loss,lr\n" + rows)

    log = read_log(tmp_path / "a.csv")

    assert log.present["loss"].tolist() == [False] * 3 + [True] * 5
    assert np.isnan(log.columns["loss"][3:5]).all() and log.columns["loss"][5] == np.inf
    assert log.present["lr"].tolist() == [True, True, False, True, True, True, True, True]


def test_trainer_state_keeps_evaluations_apart_and_its_summary_out(tmp_path: Path) -> None:
    history = records()
    history.insert(3, {"step": 30, "epoch": 0.3, "eval_loss": 9.0, "eval_runtime": 3.2})
    history.append({"step": 50, "train_loss": 2.9, "train_runtime": 100.0, "epoch": 1.0})
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": history}))

    log = read_log(tmp_path)

    assert log.form == "trainer_state" and log.num_rows == 7 and not log.attempts.any()
    assert log.steps.tolist() == [10, 20, 30, 30, 40, 50, 50]
    assert log.present["loss"].tolist() == [True, True, True, False, True, True, False]
    assert log.columns["eval_loss"][3] == 9.0 and log.present["eval_loss"].sum() == 1
    assert "train_loss" not in log.columns


def test_a_step_that_goes_back_begins_an_attempt(tmp_path: Path) -> None:
    steps = [*range(10), *range(6, 12)]
    (tmp_path / "a.csv").write_text("step,loss\n" + "".join(f"{step},{1.5}\n" for step in steps))

    log = read_log(tmp_path / "a.csv")

    assert log.steps.tolist() == steps
    assert log.attempts.tolist() == [0] * 10 + [1] * 6


def test_steps_counted_within_epochs_go_on(tmp_path: Path) -> None:
    lines = [f"{epoch},{batch},{1.5}" for epoch in range(3) for batch in range(4)]
    (tmp_path / "a.csv").write_text("epoch,batch,loss\n" + "\n".join(lines))

    log = read_log(tmp_path / "a.csv")

    assert log.steps.tolist() == list(range(12)) and not log.attempts.any()
    assert "counted on" in log.notes[0]


@pytest.mark.parametrize("text", ["loss\n1.5\n1.25\n1.0\n", "1.5\n1.25\n1.0\n", "epoch,loss\n0.1,1.5\n0.1,1.25\n0.2,1.0\n"])
def test_without_a_step_rows_are_steps(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(text)

    log = read_log(tmp_path / "a.csv")

    assert log.steps.tolist() == [0, 1, 2] and log.step_source == ""
    assert log.columns["loss"].tolist() == [1.5, 1.25, 1.0]


def test_lightning_rows_of_validation_are_no_missing_points(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("epoch,step,train_loss,val_loss\n0,49,1.5,\n0,49,,1.25\n1,99,1.0,\n1,99,,0.5\n")

    log = read_log(tmp_path)

    assert log.steps.tolist() == [49, 49, 99, 99] and not log.attempts.any()
    assert log.present["loss"].tolist() == [True, False, True, False]
    assert log.columns["val_loss"][[1, 3]].tolist() == [1.25, 0.5]


def test_evaluations_between_printed_lines_are_no_points_of_the_loss(tmp_path: Path) -> None:
    text = "step 0: train loss 4.1, val loss 4.2\niter 0: loss 4.0, time 1ms\niter 1: loss 3.0, time 1ms\nval loss 2.5\n"
    (tmp_path / "a.log").write_text(text)

    log = read_log(tmp_path / "a.log")

    assert log.steps.tolist() == [0, 1] and log.columns["loss"].tolist() == [4.0, 3.0]
    assert log.columns["val_loss"].tolist() == [4.2, 2.5]


PRINTED: dict[str, tuple[str, list[int], dict[str, list[float]]]] = {
    "Hugging Face's console": (
        "{'loss': 2.5, 'grad_norm': 1.5, 'epoch': 0.1}\n  1%| | 10/1000 [00:10<, 1s/it]{'loss': 2.25, 'grad_norm': 1.25}\n"
        "{'eval_loss': 1.0, 'eval_runtime': 3.0}\n{'train_runtime': 3, 'train_loss': 2.2, 'epoch': 0.3}\n",
        [0, 1], {"loss": [2.5, 2.25], "grad_norm": [1.5, 1.25]},
    ),
    "Keras": (
        "Epoch 1/3\n9/9 - 3s - loss: 0.5 - val_loss: 0.75\nEpoch 2/3\n9/9 - 3s - loss: 0.25 - val_loss: 0.5\n",
        [0, 1], {"loss": [0.5, 0.25], "val_loss": [0.75, 0.5]},
    ),
    "a line an epoch": (
        "Epoch 1: train_loss=0.5 val_loss=0.75\nEpoch 2: train_loss=0.25 val_loss=0.5\n"
        "Epoch 3: train_loss=0.125 val_loss=0.5\n",
        [1, 2, 3], {"loss": [0.5, 0.25, 0.125], "val_loss": [0.75, 0.5, 0.5]},
    ),
    "thousands": (
        "step 00010/21400 (0.05%) | loss: 9.5 | grad norm: 2.5 | dt: 300.00ms | tok/sec: 1,747,626 | mfu: 47.0\n"
        "step 00011/21400 (0.05%) | loss: 9.25 | grad norm: 2.25 | dt: 300.00ms | tok/sec: 1,747,626 | mfu: 47.0\n",
        [10, 11], {"loss": [9.5, 9.25], "grad_norm": [2.5, 2.25]},
    ),
    "DeepSpeed": (
        "[2026] [INFO] [Rank 0] step=10, skipped=0, lr=[0.5], mom=[[0.9, 0.95]]\nsteps: 10 loss: 2.5 iter time (s): 1.2\n"
        "[2026] [INFO] [Rank 0] step=20, skipped=0, lr=[0.25], mom=[[0.9, 0.95]]\nsteps: 20 loss: 2.25 iter time (s): 1.2\n",
        [10, 20], {"loss": [2.5, 2.25], "lr": [0.5, 0.25]},
    ),
    "Composer": (
        "[epoch=1][batch=10/100]:\n\t Train trainer/global_step: 9\n\t Train loss/train/total: 10.5\n"
        "[epoch=1][batch=20/100]:\n\t Train trainer/global_step: 19\n\t Train loss/train/total: 10.25\n",
        [9, 19], {"loss": [10.5, 10.25]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("trainer", PRINTED)
def test_what_trainers_print_is_read(trainer: str, tmp_path: Path) -> None:
    text, steps, columns = PRINTED[trainer]
    (tmp_path / "a.log").write_text(text)

    log = read_log(tmp_path / "a.log")

    assert log.form == "text" and log.steps.tolist() == steps
    assert {channel: log.columns[channel].tolist() for channel in columns} == columns


def test_runs_of_one_export_are_judged_apart() -> None:
    names = ["Step", "a - _step", "a - train/loss", "a - train/loss__MIN", "b - train/loss", "b - train/grad_norm"]

    assert channels(names) == {"a - train/loss": "a/loss", "b - train/loss": "b/loss", "b - train/grad_norm": "b/grad_norm"}


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["lm loss", "lm loss validation", "loss-scale"], {"lm loss": "loss"}),
        (["train_loss_epoch", "train_loss_step", "lr-AdamW"], {"train_loss_step": "loss", "lr-AdamW": "lr"}),
        (["loss_metrics/global_avg_loss", "loss_metrics/global_max_loss", "grad_norm"],
         {"loss_metrics/global_avg_loss": "loss", "grad_norm": "grad_norm"}),
        (["rollout/reward", "algo/ppo_loss"], {"algo/ppo_loss": "loss"}),
        (["grad_norm/layer.0", "grad_2.0_norm_total"], {"grad_2.0_norm_total": "grad_norm"}),
        (["loss", "train_loss"], {"loss": "loss", "train_loss": "train_loss"}),
        (["optim/total grad norm", "optim/LR (group 0)", "train/CE loss"],
         {"optim/total grad norm": "grad_norm", "optim/LR (group 0)": "lr", "train/CE loss": "loss"}),
    ],
)  # fmt: skip
def test_spellings_of_the_field(names: list[str], wanted: dict[str, str]) -> None:
    found = channels(names)

    assert {name: found[name] for name in wanted} == wanted
    assert sorted(found.values()) == sorted(set(found.values()))


# -- TensorBoard -------------------------------------------------------------------------------------------------------


def write_events(folder: Path, values: list[tuple[str, int, float]], *, first: int = 0) -> Path:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder), filename_suffix=f".{first}")
    for tag, step, value in values:
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
        writer.add_event(Event(step=step, wall_time=1e9 + step, summary=summary))
    writer.close()
    return next(folder.glob(f"*tfevents*.{first}"))


def test_event_files_need_no_tensorboard_to_be_read(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    values = [("train/loss", s, v) for s, v in zip(STEPS, LOSS, strict=True)]
    values += [("train/grad_norm", s, v) for s, v in zip(STEPS, NORM, strict=True) if v is not None]
    values += [("eval/loss", 30, 9.0), ("epoch/accuracy", 1, 0.5)]
    values.sort(key=lambda one: one[1])
    path = write_events(tmp_path, values)

    for log in (read_log(path), read_log(tmp_path)):
        assert log.form == "tensorboard" and log.steps.tolist() == STEPS and not log.attempts.any()
        np.testing.assert_allclose(log.columns["loss"], LOSS)
        assert log.present["grad_norm"].tolist() == [True, True, True, False, True]
        assert log.columns["eval/loss"][2] == 9.0 and log.present["eval/loss"].sum() == 1
        assert "1 values are of steps at which" in log.notes[0]


def test_event_files_of_a_resumed_run_are_two_attempts(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    write_events(tmp_path, [("loss", step, 1.0) for step in range(10)], first=1)
    write_events(tmp_path, [("loss", step, 2.0) for step in range(5, 12)], first=2)

    log = read_log(tmp_path)

    assert log.steps.tolist() == [*range(10), *range(5, 12)]
    assert log.attempts.tolist() == [0] * 10 + [1] * 7


def test_scalars_as_tensors_are_read_too(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    tensors = [
        TensorProto(dtype=1, float_val=[1.5]), TensorProto(dtype=1, tensor_content=np.float32(1.25).tobytes()),
        TensorProto(dtype=2, double_val=[1.0]), TensorProto(dtype=3, int_val=[3]), TensorProto(dtype=7, string_val=[b"no"]),
    ]  # fmt: skip
    writer = EventFileWriter(str(tmp_path))
    for step, tensor in enumerate(tensors):
        writer.add_event(Event(step=step, summary=Summary(value=[Summary.Value(tag="Loss", tensor=tensor)])))
    writer.close()

    assert read_log(tmp_path).columns["loss"].tolist() == [1.5, 1.25, 1.0, 3.0]


def test_a_torn_event_file_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    path = write_events(tmp_path, [("loss", step, 1.0) for step in range(10)])
    path.write_bytes(path.read_bytes()[:-7])

    log = read_log(path)

    assert log.num_rows == 9 and "half written" in log.notes[0]


@pytest.mark.parametrize("at", [30, 200, -20])
def test_a_bit_that_flipped_in_an_event_file_is_said_with_its_record(tmp_path: Path, at: int) -> None:
    path = write_events(tmp_path, [("loss", step, 1.0) for step in range(10)])
    body = bytearray(path.read_bytes())
    body[at] ^= 4
    path.write_bytes(bytes(body))

    with pytest.raises(LogError, match=r"record \d+: .*checksum; the file is damaged"):
        read_log(path)


def test_values_that_are_there_twice_are_counted(tmp_path: Path) -> None:
    values = [("loss", 0, 1.0), ("loss", 1, 2.0), ("loss", 1, 2.0), ("loss", 2, float("nan")), ("loss", 2, float("nan"))]
    write_events(tmp_path, [*values, ("loss", 3, 1.0), ("loss", 3, 7.0)])

    log = read_log(tmp_path)

    assert log.steps.tolist() == [0, 1, 2, 3, 3] and log.columns["loss"][[1, 3, 4]].tolist() == [2.0, 1.0, 7.0]
    assert log.notes == (
        "2 values are there twice, step and number: one of each counts",
        "1 values are of a step that their series has already: each is a row of its own",
    )


# -- what cannot be read -----------------------------------------------------------------------------------------------

BROKEN = {
    "empty": (b"", "expected a log, got an empty file"),
    "blank": (b"\n \n", "expected a log, got an empty file"),
    "words in the loss": (b"step,loss\n1,2.5\n2,2.4\n3,oops\n4,2\n", ':4: column "loss": expected a number, nan, inf'),
    "too many cells": (b"step,loss\n1,2.5\n2,2.4,7\n3,2.4\n", ":3: expected 2 cells (step, loss), got 3"),
    "a name twice": (b"step,loss,loss\n1,2.5,1\n2,2.4,1\n", ':1: expected columns of different names, got "loss" twice'),
    "no header": (b"1,2.5,9\n2,2.4,8\n3,2.3,7\n", ":1: expected a header that names its 3 columns"),
    "header only": (b"step,loss\n", "expected a log"),
    "no measure": (b"step,time\n1,2.5\n2,2.4\n", "expected a column such as loss"),
    "prose": (b"it was a dark and stormy night\n", "expected a log (CSV, JSON lines"),
    "broken json": (b'{"log_history": [\n{"step": 1, "loss": 2.0},\n{"step": 2, "lo', ":3: expected JSON"),
    "broken jsonl": (b'{"step": 1, "loss": 2.0}\n{"step": 2, "loss: 2.0}\n{"step": 3}\n', ":2: expected a JSON object"),
    "json of numbers": (b'[{"step": 1, "loss": 2.0}, 7]', "record 1: expected an object, got 7"),
    "no records": (b'{"log_history": []}', "expected records, got an empty list"),
    "deep json": (b'{"log_history": ' + b"[" * 100_000, "expected"),
    "parquet": (b"PAR1\x15\x04\x00\x00", "expected Parquet, got damaged data"),
    "binary": (bytes(range(256)), "got binary data"),
    "torn gzip": (gzip.compress(b"step,loss\n" + b"1,2.5\n" * 20_000)[:-20], "expected gzip, got damaged data"),
    "gzip of nothing": (b"\x1f\x8bnonsense", "expected gzip, got damaged data"),
}  # fmt: skip


@pytest.mark.filterwarnings("error")
def test_damage_is_an_error_that_names_the_file_and_nothing_else(tmp_path: Path) -> None:
    """Valid logs with bytes changed, cut, doubled and strewn in: they are read, or refused with their name."""
    rng = random.Random(0)
    junk = [b'"', b"\x00", b"\n", b",", b"nan", b"1e999", b"{", b"}", b"[", b"\xff\xfe", b"9" * 400, b"\t", b"step", b"\r"]
    counts = {"read": 0, "refused": 0}
    for text in FORMS.values():
        for _ in range(6):
            data = bytearray(text.encode())
            for _ in range(rng.randint(1, 4)):
                at = rng.randrange(len(data) + 1)
                cut = at + rng.randint(0, 20)
                data[at:cut] = rng.choice([b"", data[at:cut] * 2, rng.choice(junk)])
            path = tmp_path / "a.log"
            path.write_bytes(bytes(data))
            try:
                log = read_log(path)
            except LogError as error:
                assert str(error).startswith(str(path))
                counts["refused"] += 1
            else:
                assert all(len(values) == log.num_rows == len(log.steps) for values in log.columns.values())
                counts["read"] += 1
    assert min(counts.values()) > 30


@pytest.mark.parametrize("case", BROKEN)
def test_what_cannot_be_read_says_where_and_what(case: str, tmp_path: Path) -> None:
    data, words = BROKEN[case]
    path = tmp_path / "bad.csv"
    path.write_bytes(data)

    with pytest.raises(LogError) as error:
        read_log(path)

    assert words in str(error.value) and str(error.value).startswith(str(path))


def test_damaged_events_are_refused_and_not_guessed(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    path = write_events(tmp_path, [("loss", step, 1.0) for step in range(10)])
    data = bytearray(path.read_bytes())
    data[-40] ^= 0xFF
    data[60] ^= 0xFF
    path.write_bytes(bytes(data))

    with pytest.raises(LogError, match="record"):
        read_log(path)


@pytest.mark.parametrize(
    ("text", "rows"), [("step,loss\n1,2.5\n2,2.25\n3", 2), ('{"step": 1, "loss": 1}\n{"step": 2, "lo', 1)]
)
def test_a_half_written_last_line_is_left_out(text: str, rows: int, tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(text)

    log = read_log(tmp_path / "a.log")

    assert log.num_rows == rows and "half written" in log.notes[0]


def test_columns_and_headers_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("step,objective,loss\n1,2.5,7\n2,2.25,7\n")
    (tmp_path / "b.csv").write_text("1,2.5,9\n2,2.25,8\n")

    log = read_log(tmp_path / "a.csv", columns={"loss": "objective"})
    bare = read_log(tmp_path / "b.csv", header=["step", "loss", "grad_norm"])

    assert log.columns["loss"].tolist() == [2.5, 2.25] and log.columns["loss (own)"].tolist() == [7.0, 7.0]
    assert bare.columns["grad_norm"].tolist() == [9.0, 8.0]
    with pytest.raises(LogError, match=r'expected a column "nope".*known: loss, objective, step'):
        read_log(tmp_path / "a.csv", columns={"loss": "nope"})


def test_directories_mean_their_logs(tmp_path: Path) -> None:
    for name in ("a.csv", "b.jsonl", "c.log.xz", "notes.md", ".hidden.csv"):
        (tmp_path / name).write_text(table())
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "trainer_state.json").write_text(trainer_state())

    for step in (90, 100):
        (tmp_path / "out" / f"checkpoint-{step}").mkdir(parents=True)
        (tmp_path / "out" / f"checkpoint-{step}" / "trainer_state.json").write_text(trainer_state())

    assert [path.name for path in find_logs(tmp_path)] == ["a.csv", "b.jsonl", "c.log.xz", "run"]
    assert [path.name for path in find_logs(tmp_path / "out")] == ["checkpoint-100"]
    assert read_log(tmp_path / "out").steps.tolist() == STEPS
    assert find_logs(tmp_path / "run") == [tmp_path / "run"]
