"""`sentinel export` to other tools' formats: what stands there is what was recorded, and what those tools read."""

from __future__ import annotations

import csv
import errno
import json
import math
import multiprocessing
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import sentinel.cli.export as cli_export
from sentinel.cli.main import run_cli
from sentinel.exports import targets, tensorboard
from sentinel.exports.msprobe_csv import spots_of
from sentinel.exports.msprobe_format import squashed, tag_of
from sentinel.handled_signals import handled
from sentinel.messages import TensorInfo
from sentinel.moments import Moments
from sentinel.record import STATISTICS
from sentinel.testing import Nan

from ..support.closed_steps import closed_steps
from ..support.serving import small_run

pytestmark = pytest.mark.slow


def export(run: Path, form: str, output: Path, *arguments: str, code: int = 0) -> Path:
    assert run_cli(["export", str(run), "--format", form, "-o", str(output), *arguments]) == code
    return output


def lines_of(directory: Path) -> dict[str, list[dict[str, str]]]:
    """File name -> the lines of it in all ranks' folders, each with its rank."""
    found: dict[str, list[dict[str, str]]] = {}
    for path in sorted(directory.glob("*/*.csv")):
        rank = path.parent.name.split("-rank")[1].split("-")[0]
        with path.open(newline="") as file:
            reader = csv.reader(file)
            header = next(reader)
            for fields in reader:
                assert len(fields) == len(header), "defect 14: as many columns as headers"
                found.setdefault(path.name, []).append({"rank": rank, **dict(zip(header, fields, strict=True))})
    return found


# -- msProbe's CSV ----------------------------------------------------------------------------------------------------


def test_msprobe_csv_has_its_files_and_columns(tmp_path: Path) -> None:
    small_run(tmp_path / "run", per_micro_step=True).write(3)

    out = export(tmp_path / "run", "msprobe-csv", tmp_path / "out")

    folders = sorted(path.name for path in out.iterdir())
    assert len(folders) == 4 and all(f"-rank{rank}-" in name for rank, name in enumerate(folders))
    found = lines_of(out)
    steps = [f"{step}-{step}.csv" for step in range(3)]
    assert sorted(found) == sorted(
        [f"{file}_{step}" for file in ("actv", "actv_grad", "grad_reduced", "param_origin") for step in steps]
        + [f"param_updated_{step}" for step in steps[:2]]
    ), "the last step's new weights are of a step that was not recorded"
    assert list(found["grad_reduced_0-0.csv"][0]) == [
        "rank", "vpp_stage", "name", "step", "min", "max", "mean", "norm", "nans", "zeros", "shape", "dtype",
    ]  # fmt: skip
    assert list(found["actv_0-0.csv"][0])[:5] == ["rank", "vpp_stage", "name", "step", "micro_step"]
    assert {line["micro_step"] for line in found["actv_0-0.csv"]} == {"0", "1"}
    for step in (0, 1):
        after = {(one["rank"], one["name"]): one for one in found[f"param_origin_{step + 1}-{step + 1}.csv"]}
        for one in found[f"param_updated_{step}-{step}.csv"]:
            assert one["step"] == str(step)
            assert {**one, "step": str(step + 1)} == after[one["rank"], one["name"]], "the next step's weights"


def test_msprobe_csv_has_each_ranks_own_numbers_with_all_digits(tmp_path: Path) -> None:
    small_run(tmp_path / "run", dp=1).write(1)
    (view,) = closed_steps(tmp_path / "run")

    found = lines_of(export(tmp_path / "run", "msprobe-csv", tmp_path / "out"))

    num_lines = 0
    for part in view.parts:
        infos = {info.id: info for info in part.descriptor.tensors}
        own = [(file, one) for file in found for one in found[file] if one["rank"] == str(part.rank)]
        lines = {(one["name"], file.split("_0")[0]): one for file, one in own}
        for at, row in enumerate(part.rows):
            moments = Moments.from_rows(part.rows[at : at + 1])
            info = infos[int(row["tensor"])]
            slot = ".input" if info.kind.endswith("_in") else "" if info.kind in ("param", "wgrad") else ".output"
            kind = info.kind.removesuffix("_in")
            file = {"param": "param_origin", "wgrad": "grad_reduced", "activation": "actv", "dgrad": "actv_grad"}[kind]
            name = info.name + slot
            one = lines[name, file]
            num_lines += 1
            assert [float(one[op]) for op in ("min", "max", "mean", "norm", "nans")] == [
                float(moments.statistic(op)[0]) for op in ("min", "max", "mean", "norm", "nans")
            ]
            assert math.prod(json.loads(one["shape"])) == int(moments.num_elements()[0])
    assert num_lines > 20


def test_defect_20_a_small_mean_is_not_written_as_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "csv" / "Nov21_13-56-02-rank0-a"
    folder.mkdir(parents=True)
    head = "vpp_stage,name,step,min,max,mean,norm,shape,dtype\n"
    values = {"a": "1e-07", "b": "-3.98e-13", "c": "4.9e-310", "d": "0.0"}
    lines = [f"0,{name},0,-1.0,1.0,{mean},2.0,[64],torch.float32\n" for name, mean in values.items()]
    (folder / "grad_reduced_0-0.csv").write_text(head + "".join(lines))
    assert run_cli(["import", "msprobe", str(tmp_path / "csv"), "-o", str(tmp_path / "run")]) == 0

    found = lines_of(export(tmp_path / "run", "msprobe-csv", tmp_path / "out"))

    assert {one["name"]: float(one["mean"]) for one in found["grad_reduced_0-0.csv"]} == {
        name: float(mean) for name, mean in values.items()
    }


def test_steps_of_a_file_are_as_many_as_asked(tmp_path: Path) -> None:
    small_run(tmp_path / "run", pp=1, dp=1).write(5)

    arguments = ["--steps-per-file", "3", "--kind", "wgrad,param"]
    found = lines_of(export(tmp_path / "run", "msprobe-csv", tmp_path / "out", *arguments))

    files = ("grad_reduced", "param_origin", "param_updated")
    assert sorted(found) == [f"{file}_{steps}.csv" for file in files for steps in ("0-2", "3-5")]
    assert {one["step"] for one in found["grad_reduced_0-2.csv"]} == {"0", "1", "2"}
    assert {one["step"] for one in found["param_updated_3-5.csv"]} == {"3"}


def test_a_nan_is_written_as_msprobe_does(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", pp=1, dp=1)
    run.plant(Nan(step=1, module="layers.1")).write(2)

    found = lines_of(export(tmp_path / "run", "msprobe-csv", tmp_path / "out", "--kind", "activation"))

    sick = {one["name"]: one for one in found["actv_1-1.csv"] if int(one["nans"])}
    assert "layers.1.output" in sick and {sick["layers.1.output"][op] for op in ("min", "max", "mean", "norm")} == {"nan"}
    assert not any(int(one["nans"]) for one in found["actv_0-0.csv"])


def test_our_own_run_comes_back_from_msprobe_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_run(tmp_path / "run", per_micro_step=True, pp=2, dp=2).write(3)
    kinds = ["--kind", "param,wgrad,activation,dgrad", "--json"]
    export(tmp_path / "run", "msprobe-csv", tmp_path / "csv")

    assert run_cli(["import", "msprobe", str(tmp_path / "csv"), "-o", str(tmp_path / "back"), "--pp", "2", "--dp", "2"]) == 0

    capsys.readouterr()
    tables = []
    for name in ("run", "back"):
        assert run_cli(["export", str(tmp_path / name), *kinds]) == 0
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        tables.append({(one["step"], one["kind"], one["name"]): one for one in rows})
    # Tensors that a module reads have its input's name besides.
    assert set(tables[0]) <= set(tables[1]) and len(tables[0]) > 100
    for key, one in tables[0].items():
        for statistic in ("mean", "norm", "min", "max", "std", "zeros", "nans"):
            assert tables[1][key][statistic] == pytest.approx(one[statistic], rel=1e-9, abs=1e-15), (key, statistic)
        assert tables[1][key]["num_elements"] == one["num_elements"]


def test_a_tensor_stands_under_each_module_that_has_it() -> None:
    infos = [
        TensorInfo(id=0, name="emb", kind="activation", consumers=("layers.0.attn",)),
        TensorInfo(id=1, name="layers.0.attn", kind="activation_in"),
        TensorInfo(id=2, name="layers.0.attn", kind="activation", also=("layers.0",)),
        TensorInfo(id=3, name="layers.0.attn:weights", kind="activation"),
        TensorInfo(id=4, name="", kind="dgrad"),
        TensorInfo(id=5, name="layers.0.attn.weight", kind="exp_avg"),
        TensorInfo(id=6, name="layers.0.attn.weight", kind="update"),
        TensorInfo(id=7, name="layers.0.drop", kind="activation_in", consumers=("layers.0.fc",)),
        TensorInfo(id=8, name="layers.0.attn.weight", kind="grad_momentum_alignment"),
        TensorInfo(id=9, name="layers.0.attn.weight:cosine", kind="grad_momentum_alignment"),
    ]

    found = {number: [(spot.file, spot.name, spot.shift) for spot in spots] for number, spots in spots_of(infos).items()}

    assert found == {
        0: [("actv", "emb.output", 0), ("actv", "layers.0.attn.input_1", 0)],
        1: [("actv", "layers.0.attn.input_0", 0)],
        2: [("actv", "layers.0.attn.output_0", 0), ("actv", "layers.0.output", 0)],
        3: [("actv", "layers.0.attn.output_weights", 0)],
        4: [("actv_grad", ".output", 0)],
        5: [("exp_avg", "layers.0.attn.weight", 1)],
        7: [("actv", "layers.0.drop.input", 0), ("actv", "layers.0.fc.input", 0)],
        8: [("other", "layers.0.attn.weight", 0)],
    }


# -- TensorBoard ------------------------------------------------------------------------------------------------------


def scalars_of(directory: Path) -> dict[tuple[str, str, int], float]:
    """(run, tag, step) -> value, as TensorBoard itself reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for path in sorted(directory.rglob("*tfevents*")):
        events = EventAccumulator(str(path.parent), size_guidance={"scalars": 0})
        events.Reload()
        for tag in events.Tags()["scalars"]:
            for event in events.Scalars(tag):
                found[str(path.parent.relative_to(directory)), tag, event.step] = event.value
    return found


def test_tensorboard_reads_msprobes_tags(tmp_path: Path) -> None:
    small_run(tmp_path / "run", per_micro_step=True).write(2)
    table = lines_of(export(tmp_path / "run", "msprobe-csv", tmp_path / "csv"))

    found = scalars_of(export(tmp_path / "run", "tensorboard", tmp_path / "tb"))

    num_values = 0
    for file, lines in table.items():
        for one in lines:
            micro = f":micro{one['micro_step']}" if "micro_step" in one else ""
            where = f"rank{one['rank']}/{file.rpartition('_')[0]}"
            for op in ("min", "max", "mean", "norm", "nans", "zeros"):
                value = found[where, f"vp{one['vpp_stage']}:{one['name']}{micro}/{op}", int(one["step"])]
                assert value == pytest.approx(float(one[op]), rel=1e-6)
                num_values += 1
    assert num_values > 1000
    assert any(tag.endswith("/kurtosis") for _, tag, _ in found), "and what msProbe does not know"


def test_tensorboard_of_groups_and_of_logged_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_run(tmp_path / "run", layers=2).write(3)
    (first, *_) = closed_steps(tmp_path / "run")

    layers = ["--aggregate", "layer{}=layers.{}.*", "--kind", "wgrad"]
    groups = export(tmp_path / "run", "tensorboard", tmp_path / "groups", *layers)
    whole = ["--merged", "--kind", "scalar,param", "--statistic", "norm,value"]
    merged = export(tmp_path / "run", "tensorboard", tmp_path / "merged", *whole)
    own = export(tmp_path / "run", "tensorboard", tmp_path / "own", "--kind", "scalar", "--name", "loss")

    assert {(run, tag) for run, tag, _ in scalars_of(groups)} == {
        ("merged/wgrad", f"layer{layer}/{statistic}") for layer in range(2) for statistic in STATISTICS
    }
    found = scalars_of(merged)
    assert found["merged/scalar", "loss", 0] == pytest.approx(first.scalars["loss"].mean, rel=1e-6)
    assert {run for run, _, _ in found} == {"merged/scalar", "merged/param"}
    assert set(scalars_of(own)) == {("scalars", "loss", step) for step in range(3)}


def test_what_is_undefined_is_no_point_and_a_nan_is_one(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", pp=1, dp=1)
    run.plant(Nan(step=1, module="layers.1")).write(2)

    found = scalars_of(export(tmp_path / "run", "tensorboard", tmp_path / "tb", "--kind", "activation"))

    assert math.isnan(found["rank0/actv", "vp0:layers.1.output:micro0/norm", 1])
    assert math.isfinite(found["rank0/actv", "vp0:layers.1.output:micro0/norm", 0])


def test_without_tensorboard_the_error_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small_run(tmp_path / "run", layers=2).write(1)
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)

    export(tmp_path / "run", "tensorboard", tmp_path / "tb", code=2)

    assert "pip install 'sentinel[tensorboard]'" in capsys.readouterr().err and not (tmp_path / "tb").exists()


def test_events_of_many_values_are_cut(tmp_path: Path) -> None:
    values = {f"tag{at}": float(at) for at in range(1300)}
    path = tmp_path / "run" / tensorboard.FILE_NAME
    path.parent.mkdir()
    path.write_bytes(tensorboard.head() + tensorboard.events(7, 12.0, values.items()))

    assert scalars_of(tmp_path) == {("run", tag, 7): value for tag, value in values.items()}


# -- Parquet ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranked", [[], ["--per-rank"]])
def test_parquet_says_what_json_lines_say(tmp_path: Path, capsys: pytest.CaptureFixture[str], ranked: list[str]) -> None:
    run = small_run(tmp_path / "run", per_micro_step=bool(ranked))
    run.plant(Nan(step=1, module="layers.1")).write(3)
    assert run_cli(["export", str(tmp_path / "run"), "--json", *ranked]) == 0
    expected = [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    path = export(tmp_path / "run", "parquet", tmp_path / "run.parquet", *ranked)

    rows = pq.read_table(path).to_pylist()
    assert len(rows) == len(expected) > 100
    for row, one in zip(rows, expected, strict=True):
        assert row.pop("time").timestamp() == pytest.approx(one.pop("time"), abs=1e-6)
        assert row == one
    assert ("rank" in expected[0]) == bool(ranked)


def test_parquet_columns_are_typed_and_row_groups_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sentinel.exports.parquet as parquet

    monkeypatch.setattr(parquet.ParquetTable.__init__, "__defaults__", (100,))
    small_run(tmp_path / "run").write(4)

    file = pq.ParquetFile(export(tmp_path / "run", "parquet", tmp_path / "run.parquet"))

    types = {field.name: str(field.type) for field in file.schema_arrow}
    assert types["time"] == "timestamp[us, tz=UTC]" and types["step"] == "int64" and types["norm"] == "double"
    assert types["name"].startswith("dictionary<values=string")
    meta = file.metadata
    assert meta.num_row_groups > 2 and all(meta.row_group(at).num_rows <= 200 for at in range(meta.num_row_groups))
    columns = {meta.row_group(0).column(at).path_in_schema: meta.row_group(0).column(at) for at in range(meta.num_columns)}
    assert columns["norm"].compression == "ZSTD" and "BYTE_STREAM_SPLIT" in columns["norm"].encodings
    assert "RLE_DICTIONARY" in columns["name"].encodings
    assert json.loads(file.schema_arrow.metadata[b"sentinel"]) == {"schema": "1", "run": "run", "table": "series"}


# -- all formats ------------------------------------------------------------------------------------------------------

ALL = ["csv", "jsonl", "parquet", "tensorboard", "msprobe-csv", "megatron-stats"]


def contents(path: Path) -> dict[str, bytes]:
    if path.is_file():
        return {"": path.read_bytes()}
    return {str(one.relative_to(path)): one.read_bytes() for one in sorted(path.rglob("*")) if one.is_file()}


@pytest.mark.parametrize("form", ALL)
def test_several_processes_write_the_same_bytes(tmp_path: Path, form: str) -> None:
    small_run(tmp_path / "run", per_micro_step=True).write(7)

    alone = contents(export(tmp_path / "run", form, tmp_path / "alone"))
    together = contents(export(tmp_path / "run", form, tmp_path / "together", "--jobs", "3"))

    if form == "parquet":
        assert pq.read_table(tmp_path / "alone") == pq.read_table(tmp_path / "together")
    else:
        assert alone == together and alone


@pytest.mark.parametrize("form", ALL)
def test_a_resumed_run_is_joined(tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = small_run(tmp_path / "run", layers=2, pp=1, dp=1)
    run.write(4)
    run.restart(2, attempt=1)
    run.write(4)

    path = export(tmp_path / "run", form, tmp_path / "out", "--json")

    assert json.loads(capsys.readouterr().out)["num_steps"] == 6
    if form == "msprobe-csv":
        assert len(list(path.iterdir())) == 1, "a rank has one folder however often it began"
        found = {file: lines for file, lines in lines_of(path).items() if file.startswith("grad_reduced")}
        assert sorted(found) == [f"grad_reduced_{step}-{step}.csv" for step in range(6)]
        assert {len(lines) for lines in found.values()} == {len(found["grad_reduced_0-0.csv"])}


@pytest.mark.parametrize("form", ALL)
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_full_disk_is_said_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, form: str, jobs: str
) -> None:
    small_run(tmp_path / "run", layers=2, pp=1, dp=1).write(3)
    num_taken = 0
    for sink in (targets.FileTarget, targets.ParquetTarget, targets.DirectoryTarget):
        true = sink.take

        def take(self: Any, encoded: Any, true: Any = true) -> None:
            nonlocal num_taken
            num_taken += 1
            if num_taken == 3:
                raise OSError(errno.ENOSPC, "No space left on device")
            true(self, encoded)

        monkeypatch.setattr(sink, "take", take)

    export(tmp_path / "run", form, tmp_path / "out", "--jobs", jobs, code=1)

    assert num_taken == 3 and "No space left on device" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("form", ["csv", "parquet", "tensorboard"])
def test_an_interrupted_export_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    small_run(tmp_path / "run", layers=2, pp=1, dp=1).write(3)

    def interrupted(self: Any, num_steps: int, share: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_export.ExportBar, "show", interrupted)

    assert run_cli(["export", str(tmp_path / "run"), "--format", form, "-o", str(tmp_path / "out")]) == 130
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--format", "parquet"], "give -o FILE"),
        (["--format", "tensorboard"], "give -o DIR"),
        (["--format", "csv", "-o", "{dir}"], "expected the name of a file, got a directory"),
        (["--format", "tensorboard", "-o", "{file}"], "expected a directory, got a file"),
        (["--format", "msprobe-csv", "-o", "{dir}"], "expected an empty directory or none"),
        (["--format", "csv", "-o", "{file}/x.csv"], "found a file there"),
        (["--format", "csv", "-o", "{dir}/none/x.csv"], "found nothing there"),
        (["--format", "tensorboard", "-o", "{file}/deep/x"], "expected a directory to write into, got a file"),
        (["--format", "msprobe-csv", "-o", "{new}", "--aggregate", "*"], "does not go with"),
        (["--format", "msprobe-csv", "-o", "{new}", "--merged"], "does not go with --merged"),
        (["--format", "msprobe-csv", "-o", "{new}", "--kind", "update"], "has no place for other kinds"),
        (["--format", "msprobe-csv", "-o", "{new}", "--statistic", "std"], "has min, max, mean, norm, nans and zeros"),
        (["--format", "megatron-stats", "-o", "{new}", "--per-rank"], "does not go with --per-rank"),
        (["--per-rank", "--kind", "scalar"], "logged values are no rows of a rank"),
        (["--squash-names", "--aggregate", "*"], "does not go with --squash-names"),
        (["--format", "msprobe", "-o", "{new}", "--kind", "wgrad"], "writes anomalies"),
        (["--start-time", "yesterday"], "expected a time like 2026-11-21T14:00:00+08:00"),
        (["--start-time", "20", "--end-time", "10"], "expected a time before --end-time"),
        (["--format", "tensorboard", "-o", "{new}", "--name", "layer.*"], "matches no name; nearest: "),
        (["--format", "parquet", "-o", "{new}", "--name", "layer.*", "--jobs", "2"], "matches no name; nearest: "),
        (["--jobs", "0"], "Invalid value"),
    ],
)
def test_what_cannot_be_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], what: str) -> None:
    small_run(tmp_path / "run", layers=2, pp=1, dp=1).write(1)
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "held").write_text("x")
    (tmp_path / "file").write_text("x")
    places = {name: str(tmp_path / name) for name in ("dir", "file", "new")}

    assert run_cli(["export", str(tmp_path / "run"), *(word.format(**places) for word in arguments)]) == 2

    out, err = capsys.readouterr()
    assert what in " ".join(err.split()) and out == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dir", "file", "run"]
    assert (tmp_path / "file").read_text() == "x" and [path.name for path in (tmp_path / "dir").iterdir()] == ["held"]


def test_time_ranges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_run(tmp_path / "run", layers=2, pp=1, dp=1, step_time_s=10.0).write(6)
    times = {view.step: view.time for view in closed_steps(tmp_path / "run")}

    def steps(*arguments: str) -> set[int]:
        capsys.readouterr()
        run_cli(["export", str(tmp_path / "run"), "--json", "--kind", "wgrad", *arguments])
        return {json.loads(line)["step"] for line in capsys.readouterr().out.splitlines()}

    from datetime import UTC, datetime, timedelta, timezone

    middle = times[2] + 5
    at = datetime.fromtimestamp(middle, UTC)
    for text in (str(middle), at.strftime("%Y-%m-%dT%H:%M:%S"), at.astimezone(timezone(timedelta(hours=8))).isoformat()):
        assert steps("--start-time", text) == {3, 4, 5}
        assert steps("--end-time", text) == {0, 1, 2}
    assert steps("--start-time", str(times[2] - 1), "--end-time", str(times[3] + 1)) == {2, 3}
    assert steps("--start-time", str(times[5] + 100)) == set()


def test_a_run_that_was_not_resumed_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sentinel.judge.recorded import RecordedRun

    passes = []
    true = RecordedRun.views

    def views(self: RecordedRun) -> Any:
        passes.append(1)
        return true(self)

    monkeypatch.setattr(RecordedRun, "views", views)
    run = small_run(tmp_path / "run", layers=2, pp=1, dp=1)
    run.write(3)
    export(tmp_path / "run", "csv", tmp_path / "a.csv")
    assert len(passes) == 1
    run.restart(2, attempt=1)
    run.write(1)
    export(tmp_path / "run", "csv", tmp_path / "b.csv")
    assert len(passes) == 3


def test_a_torn_spool_is_said_and_what_is_whole_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = small_run(tmp_path / "run", layers=2, pp=1, dp=1)
    run.write(3)
    run.kill(0)

    export(tmp_path / "run", "csv", tmp_path / "out.csv")

    assert "the spool is damaged: 1 torn tails" in capsys.readouterr().err
    with (tmp_path / "out.csv").open() as file:
        assert {row["step"] for row in csv.DictReader(file)} == {"0", "1", "2"}


def test_per_rank_rows_are_those_that_were_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_run(tmp_path / "run", per_micro_step=True).write(1)
    (view,) = closed_steps(tmp_path / "run")

    assert run_cli(["export", str(tmp_path / "run"), "--per-rank", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    assert len(found) == view.num_rows
    norms = Moments.from_rows(view.rows).norm()
    for at, one in enumerate(found):
        row = view.rows[at]
        assert one["name"] == view.tensors[view.row_logical[at]].name and one["rank"] == view.row_rank[at]
        assert (one["micro_step"], one["call_id"]) == (row["micro_step"], row["call_id"])
        assert one["norm"] == norms[at]


def test_names_are_squashed_where_they_stay_different(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert squashed(["model.decoder.layers.0.mlp", "model.decoder.layers.1.mlp", "model.final_norm", "head.weight"]) == {
        "model.decoder.layers.0.mlp": "layers.0.mlp", "model.decoder.layers.1.mlp": "layers.1.mlp",
        "model.final_norm": "final_norm", "head.weight": "head.weight",
    }  # fmt: skip
    both = ["encoder.layers.0.mlp", "decoder.layers.0.mlp"]
    assert squashed(both) == dict(zip(both, both, strict=True)), "a short name that two would share is given to neither"
    assert squashed(["layers.0.norm.weight"]) == {"layers.0.norm.weight": "layers.0.norm.weight"}


def test_the_bar_is_on_a_terminal_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small_run(tmp_path / "run", layers=2, pp=1, dp=1).write(40)
    export(tmp_path / "run", "csv", tmp_path / "a.csv")
    assert "%" not in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    export(tmp_path / "run", "csv", tmp_path / "b.csv", "--quiet")
    assert "%" not in capsys.readouterr().err
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    export(tmp_path / "run", "csv", tmp_path / "c.csv")
    assert "steps" in capsys.readouterr().err


# -- msProbe's anomalies ----------------------------------------------------------------------------------------------


def judged(tmp_path: Path, **options: Any) -> Path:
    run = small_run(tmp_path / "run", per_micro_step=True, **options)
    run.plant(Nan(step=4, module="layers.1")).write(8)
    run_cli(["replay", str(tmp_path / "run"), "--recompute", "--rules", "msprobe", "-o", str(tmp_path / "run")])
    return tmp_path / "run"


def test_anomalies_have_msprobes_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = judged(tmp_path, pp=2, dp=1)
    ours = [json.loads(line) for path in (run / "anomalies").glob("*.jsonl") for line in path.read_text().splitlines()]
    ours = [one for one in ours if one["event"] == "onset"]

    out = export(run, "msprobe", tmp_path / "out")

    files = sorted((out / "anomaly_detected").glob("rank*/anomaly.json"))
    records = {key: one for path in files for key, one in json.loads(path.read_text()).items()}
    assert [path.parent.name for path in files] == ["rank0", "rank1"]
    assert sum(len(json.loads(path.read_text())) for path in files) == len(ours) > 20, "defect 1: each alarm is a record"
    for key, one in records.items():
        assert list(one) == [
            "rank", "step", "micro_step", "pp_stage", "vpp_stage", "call_id", "tag_name", "message", "group_mates",
        ]  # fmt: skip
        assert key.startswith(f"{one['tag_name']}_step_{one['step']}_call_{one['call_id']}")
        assert f"/rank{one['rank']}/" in one["tag_name"]
    first = next(one for one in ours if one["kind"] == "activation" and one["severity"] == "critical")
    tag = tag_of(0, first["tag_name"], "activation", first["rank"], first["micro_step"])
    assert first["rank"] == 0 and f"{tag}_step_4_call_{first['call_id']}" in records


def test_anomalies_are_named_as_in_the_csv_files_and_of_tensors_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = judged(tmp_path, pp=2, dp=1)
    lines = [line for path in sorted((run / "anomalies").glob("*.jsonl")) for line in path.read_text().splitlines()]
    onset = next(json.loads(line) for line in lines if json.loads(line)["kind"] == "wgrad")
    strangers = [{**onset, "id": str(at), "kind": kind, "tag_name": "x"} for at, kind in enumerate(("health", "scalar"))]
    with next((run / "anomalies").glob("*.jsonl")).open("a") as file:
        file.writelines(json.dumps(one) + "\n" for one in strangers)

    out = export(run, "msprobe", tmp_path / "out", "--json")
    reported = json.loads(capsys.readouterr().out.splitlines()[-1])
    names = {
        (folder.rpartition("rank")[2].partition("-")[0], file.rsplit("_", 1)[0], row["vpp_stage"], row["name"])
        for (folder, file), rows in csv_rows(export(run, "msprobe-csv", tmp_path / "csv")).items()
        for row in rows
    }

    files_of = {"actv": "actv", "actv_grad": "actv_grad", "post_grad": "grad_reduced", "acc_grad": "grad_unreduced"}
    records = [one for path in out.rglob("anomaly.json") for one in json.loads(path.read_text()).values()]
    for one in records:
        tag, rank, word = one["tag_name"].split("/")
        vpp_stage, name = tag.split(":")[:2]
        assert (rank.removeprefix("rank"), files_of.get(word, word), vpp_stage, name) in names, one["tag_name"]
    assert len(records) > 20 and reported["left_out"][
        "of what its files have no tensor for: health, logged values"] == len(strangers)  # fmt: skip


def csv_rows(directory: Path) -> dict[tuple[str, str], list[dict[str, str]]]:
    return {
        (path.parent.name, path.stem): list(csv.DictReader(path.read_text().splitlines()))
        for path in directory.glob("*/*.csv")
    }


def test_topk_reads_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = export(judged(tmp_path, pp=1, dp=1), "msprobe", tmp_path / "out", "--steps", "4")
    capsys.readouterr()

    assert run_cli(["topk", "-d", str(out), "-o", str(tmp_path / "top"), "--json", "-k", "999"]) == 1

    found = json.loads(capsys.readouterr().out)
    records = {one["tag_name"]: one for one in found["anomalies"] if one["rule"] == "AnomalyNan"}
    planted = records["0:layers.1.output:0/rank0/actv"]
    assert (planted["step"], planted["statistic"], planted["value_text"]) == (4, "norm", "nan")


def test_an_unjudged_run_has_no_anomalies_to_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_run(tmp_path / "run", layers=2).write(1)

    export(tmp_path / "run", "msprobe", tmp_path / "out", code=1)

    assert "was the run judged?" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_glob_that_no_anomaly_has_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = judged(tmp_path, pp=1, dp=1)

    export(run, "msprobe", tmp_path / "out", "--name", "layer.1", code=2)

    assert "matches no anomaly's name; nearest:" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_defect_21_json_is_strict(tmp_path: Path) -> None:
    def refused(word: str) -> float:
        raise AssertionError(word)

    run = judged(tmp_path, pp=1, dp=1)
    export(run, "jsonl", tmp_path / "a.jsonl")
    export(run, "jsonl", tmp_path / "b.jsonl", "--per-rank")
    export(run, "megatron-stats", tmp_path / "mega")
    export(run, "msprobe", tmp_path / "out")

    num_nulls = 0
    for path in [tmp_path / "a.jsonl", tmp_path / "b.jsonl", *(tmp_path / "mega").rglob("*.jsonl")]:
        for line in path.read_text().splitlines():
            json.loads(line, parse_constant=refused)
            num_nulls += "null" in line
    assert num_nulls, "there was something that strict JSON cannot say"
    for path in (tmp_path / "out").rglob("anomaly.json"):
        assert json.loads(path.read_text(), parse_constant=refused)


def test_exports_load_neither_torch_nor_what_they_do_not_need() -> None:
    script = (
        "import sys\nfrom sentinel.cli.main import run_cli\nimport sentinel.cli.export\n"
        "print([name for name in ('torch', 'pyarrow', 'tensorboard', 'duckdb', 'rich') if name in sys.modules])"
    )

    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)

    assert result.stdout.strip() == "[]", result.stderr


def test_processes_end_whatever_this_one_does_about_sigterm(tmp_path: Path) -> None:
    small_run(tmp_path / "run").write(4)

    with handled([signal.SIGTERM], lambda number, frame: None):
        export(tmp_path / "run", "jsonl", tmp_path / "out", "--jobs", "2")

    assert not multiprocessing.active_children()
