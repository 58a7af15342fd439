"""`sentinel export`: tables of series and of groups from a run's spool and journal, exact and strict."""

from __future__ import annotations

import csv
import functools
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import sentinel
from sentinel.cli.main import run_cli
from sentinel.exports.text_tables import TableText
from sentinel.messages import TensorInfo
from sentinel.moments import Moments
from sentinel.record import STATISTICS
from sentinel.store.journal import Journal
from sentinel.store.run_paths import RunPaths
from sentinel.testing import Nan

from ..support.closed_steps import closed_steps
from ..support.exported import exported_rows, strict_json
from ..support.serving import catch_up, judge_run, served, small_run

deep_run = functools.partial(small_run, tp=2, layers=12)


def test_a_group_is_the_root_of_the_sum_of_squares_of_its_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deep_run(tmp_path / "run").write(3)
    views = closed_steps(tmp_path / "run")
    assert len(views) == 3

    found = exported_rows(
        capsys, tmp_path / "run", "--kind", "wgrad", "--statistic", "norm", "--aggregate", "global_grad_norm=*",
        "--aggregate", "layers.1.*", "--aggregate", "layer{}=layers.{}.*",
    )  # fmt: skip

    for view in views:
        of_step = {one["name"]: one for one in found if one["step"] == view.step}
        norms = {tensor.name: view.moments.norm()[tensor.index] for tensor in view.tensors if tensor.kind == "wgrad"}
        for name, prefix in {"global_grad_norm": "", "layers.1.*": "layers.1.", "layer10": "layers.10."}.items():
            members = [norm for tensor, norm in norms.items() if tensor.startswith(prefix)]
            assert of_step[name]["num_tensors"] == len(members) > 1
            assert of_step[name]["norm"] == pytest.approx(math.sqrt(sum(norm**2 for norm in members)), rel=1e-12)
        assert sum(name.startswith("layer") for name in of_step) == 1 + 12
        assert all(one["is_whole"] and one["num_excluded"] == 0 for one in of_step.values())


def test_without_a_group_each_tensor_is_a_series(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deep_run(tmp_path / "run").write(2)
    (_, view) = closed_steps(tmp_path / "run")

    found = exported_rows(capsys, tmp_path / "run", "--name", "layers.1.*", "--steps", "1", "--kind", "wgrad,param")

    wanted = [one for one in view.tensors if one.kind in ("wgrad", "param") and one.name.startswith("layers.1.")]
    assert [(one["name"], one["kind"]) for one in found] == [(one.name, one.kind) for one in wanted]
    for one, tensor in zip(found, wanted, strict=True):
        for statistic in STATISTICS:
            expected = float(view.moments.statistic(statistic)[tensor.index])
            assert one[statistic] == (None if math.isnan(expected) else expected)


def test_csv_and_json_lines_say_the_same_with_all_digits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deep_run(tmp_path / "run").write(2)
    as_json = exported_rows(capsys, tmp_path / "run", "--aggregate", "layers.{}.*")

    assert run_cli(["export", str(tmp_path / "run"), "--aggregate", "layers.{}.*"]) == 0
    table = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))

    assert len(table) == len(as_json) > 24
    for line, one in zip(table, as_json, strict=True):
        assert list(line) == list(one)
        for statistic in STATISTICS:
            assert one[statistic] == (None if line[statistic] == "" else float(line[statistic]))
        assert line["is_whole"] == json.dumps(one["is_whole"])


@pytest.mark.parametrize("value", [1e-7, -1e-7, 5e-324, 1.7976931348623157e308, 0.1 + 0.2, 1e22, 0.0])
@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_no_digit_is_lost(form: str, value: float) -> None:
    line = TableText(form, ("a", "b")).row((value, "x"))

    found = float(line.partition(",")[0]) if form == "csv" else json.loads(line)["a"]
    assert found == value


def test_what_is_undefined_is_null_and_strict() -> None:
    values = (math.nan, math.inf, -math.inf, True, 'a "quoted", name')

    assert TableText("csv", "abcde").row(values) == ',inf,-inf,true,"a ""quoted"", name"\n'
    line = TableText("jsonl", "abcde").row(values)
    assert strict_json(line) == {"a": None, "b": None, "c": None, "d": True, "e": values[-1]}


def test_a_nan_is_counted_and_poisons_no_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = deep_run(tmp_path / "run", kinds=("param", "wgrad", "activation", "dgrad"))
    run.plant(Nan(step=1, module="layers.2")).write(3)

    found = exported_rows(capsys, tmp_path / "run", "--aggregate", "*", "--kind", "activation", "--statistic", "nans,norm")

    assert [one["nans"] > 0 for one in found] == [False, True, False]
    assert all(one["norm"] is not None and one["norm"] > 0 for one in found)


def test_a_glob_that_matches_nothing_names_what_is_near(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deep_run(tmp_path / "run").write(1)

    for option in ("--aggregate", "--name"):
        assert run_cli(["export", str(tmp_path / "run"), option, "*", option, "layer.*.mlp"][: 4 + 2]) == 2
        out, err = capsys.readouterr()
        assert out == "", "nothing is written when a glob is wrong"
        assert '"layer.*.mlp" matches no name; nearest: layers.0.mlp' in err
    assert run_cli(["export", str(tmp_path / "run"), "--name", "layers.0.mlp", "--kind", "wgrad"]) == 2
    assert "matches no name of kind wgrad; nearest: layers.0.mlp.weight" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--aggregate", "layers.{}*"], "has no bounds"),
        (["--aggregate", "x=a.*", "--aggregate", "x=b.*"], "is there twice"),
        (["--aggregate", "*", "--name", "*"], "give one of them"),
        (["--aggregate", "layer{}=layers.{}.*", "--aggregate", "layer1=*"], 'both make a group "layer1"'),
        (["--json", "--format", "csv"], "give one of them"),
        (["--aggregate", "*", "--kind", "scalar"], "logged values are not merged"),
        (["--kind", "wgrat"], 'did you mean "wgrad"?'),
        (["--statistic", "nrm"], 'did you mean "norm"?'),
        (["--statistic", ","], "expected at least one statistic"),
        (["--attempt", "7"], "expected one of 0, got 7"),
        (["--steps", "5:2"], "expected the first step before the last"),
        (["--steps", "a:"], "expected steps like 100:200"),
        (["--format", "xml"], "Invalid value"),
    ],
)
def test_a_wrong_word_is_said_and_exits_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], what: str
) -> None:
    deep_run(tmp_path / "run", layers=2).write(1)

    assert run_cli(["export", str(tmp_path / "run"), *arguments]) == 2
    out, err = capsys.readouterr()
    assert what in err and out == ""


def test_the_newest_attempt_of_a_step_wins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = deep_run(tmp_path / "run", layers=2, pp=1, tp=1)
    run.write(6)
    run.restart(3, attempt=1)
    run.write(5)

    newest = exported_rows(capsys, tmp_path / "run", "--aggregate", "*", "--kind", "wgrad")
    first = exported_rows(capsys, tmp_path / "run", "--aggregate", "*", "--kind", "wgrad", "--attempt", "0")

    assert [(one["attempt"], one["step"]) for one in newest] == [*((0, s) for s in range(3)), *((1, s) for s in range(3, 8))]
    assert [(one["attempt"], one["step"]) for one in first] == [(0, step) for step in range(6)]


def test_steps_are_included_at_both_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deep_run(tmp_path / "run", layers=2).write(6)

    for text, expected in {"2:4": [2, 3, 4], "4:": [4, 5], ":1": [0, 1], "3": [3]}.items():
        found = exported_rows(capsys, tmp_path / "run", "--aggregate", "*", "--kind", "wgrad", "--steps", text)
        assert [one["step"] for one in found] == expected
    assert exported_rows(capsys, tmp_path / "run", "--steps", "9:", code=1) == []


def test_scalars_are_series_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deep_run(tmp_path / "run", layers=2).write(2)
    views = closed_steps(tmp_path / "run")

    found = exported_rows(capsys, tmp_path / "run", "--kind", "scalar", "--name", "lo*")

    assert [(one["step"], one["name"], one["value"]) for one in found] == [
        (view.step, "loss", view.scalars["loss"].mean) for view in views
    ]


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deep_run(tmp_path / "run", layers=2).write(2)
    target = tmp_path / "out.jsonl"

    assert run_cli(["export", str(tmp_path / "run"), "--name", "nothing", "-o", str(target)]) == 2
    assert not target.exists()
    assert run_cli(["export", str(tmp_path / "run"), "-o", str(target), "--json", "--aggregate", "*"]) == 0
    reported = json.loads(capsys.readouterr().out)
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    assert reported == {
        "file": str(target), "num_rows": len(lines), "num_series": len(lines) // 2, "num_steps": 2, "num_left_out": 0,
        "left_out": {},
    }  # fmt: skip
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".out")] == []


def test_beside_a_daemon_the_steps_are_the_daemons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rank that was late is left out of its steps as the daemon left it out, also when its rows came in the end."""
    run = deep_run(tmp_path / "run", layers=2, pp=1, tp=1)
    run.write(2)
    run.hold(1)
    run.write(4)
    daemon = served(tmp_path / "run")
    catch_up(daemon)
    run.release(1)
    run.write(1)
    journal = Journal(RunPaths.of(tmp_path / "run").journal, read_only=True)
    decided = journal.last_seq
    journal.close()
    assert decided == 4, "two steps behind the newest is late"

    beside = exported_rows(capsys, tmp_path / "run", "--aggregate", "*", "--kind", "activation")
    err = run_cli(["export", str(tmp_path / "run"), "--aggregate", "*"])
    said = capsys.readouterr().err
    catch_up(daemon)
    daemon.close()
    after = exported_rows(capsys, tmp_path / "run", "--aggregate", "*", "--kind", "activation")
    leisure = {"late_after_steps": 0, "late_after_s": 0.0}
    afresh = {view.step: view for view in closed_steps(tmp_path / "run", **leisure)}

    assert err == 0
    assert [(one["step"], one["is_whole"]) for one in beside] == [(0, True), (1, True), (2, False), (3, False)]
    assert "2 steps lack shards of ranks that were not heard" in said
    assert [(one["step"], one["is_whole"]) for one in after] == [
        (0, True), (1, True), (2, False), (3, False), (4, True), (5, True), (6, True),
    ]  # fmt: skip
    assert after[:4] == beside
    whole = afresh[2].is_whole
    assert whole.all(), "a reading at leisure has the rank: the daemon's decisions made the difference"


def test_weights_are_whole_where_a_replica_speaks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = deep_run(tmp_path / "run", layers=2, pp=1, tp=1)
    run.write(3, skip=[1])

    found = exported_rows(capsys, tmp_path / "run", "--aggregate", "*", "--kind", "param,activation")

    assert {(one["kind"], one["is_whole"]) for one in found} == {("param", True), ("activation", False)}


def test_a_run_that_nobody_judged_is_read_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deep_run(tmp_path / "run").write(4)
    before = exported_rows(capsys, tmp_path / "run", "--aggregate", "layers.{}.*")

    judge_run(tmp_path / "run")

    assert exported_rows(capsys, tmp_path / "run", "--aggregate", "layers.{}.*") == before
    assert not (tmp_path / "run" / "anomaly_analyse.json").exists()


def test_statistics_are_those_of_the_merged_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deep_run(tmp_path / "run", per_micro_step=True).write(1)
    (view,) = closed_steps(tmp_path / "run")
    members = [one.index for one in view.tensors if one.kind == "activation" and one.name.startswith("layers.7.")]
    merged = Moments.empty(1)
    for at in members:
        merged = merged.merge(Moments(view.stats[at : at + 1]))

    (found,) = exported_rows(capsys, tmp_path / "run", "--aggregate", "layers.7.*", "--kind", "activation")

    assert found["num_elements"] == merged.num_elements()[0]
    for statistic in STATISTICS:
        assert found[statistic] == pytest.approx(float(merged.statistic(statistic)[0]), rel=1e-9), statistic
    assert np.isfinite(found["kurtosis"])


# -- megatron-stats ---------------------------------------------------------------------------------------------------


def stats_lines(directory: Path) -> dict[str, list[dict[str, Any]]]:
    """Stat -> the lines of all its rank files."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted((directory / "training_stats").glob("*/rank*.jsonl")):
        for line in path.read_text().splitlines():
            one = strict_json(line)
            assert list(one) == ["iter", "consumed_train_samples", "stat", "values"] and one["stat"] == path.parent.name
            found.setdefault(path.parent.name, []).append(one)
    return found


def test_megatron_stats_hold_each_tensor_once_with_its_raw_sums(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deep_run(tmp_path / "run").write(2)
    views = closed_steps(tmp_path / "run")

    arguments = ["--format", "megatron-stats", "-o", str(tmp_path / "out"), "--json"]
    assert run_cli(["export", str(tmp_path / "run"), *arguments]) == 0

    reported = json.loads(capsys.readouterr().out)
    found = stats_lines(tmp_path / "out")
    assert set(found) == {
        "param_raw_moments_by_param", "grad_raw_moments_by_param", "activation_raw_moments_by_layer",
        "dgrad_raw_moments_by_layer", "residual_raw_moments_by_layer", "residual_dgrad_raw_moments_by_layer",
    }  # fmt: skip
    assert reported["num_rows"] == sum(len(line["values"]) for lines in found.values() for line in lines)
    # Weights are written after the update: those that step 1 begins with are of iteration 0.
    for kind, stat, shift in (("wgrad", "grad_raw_moments_by_param", 0), ("param", "param_raw_moments_by_param", 1)):
        assert min(line["iter"] for line in found[stat]) == 0
        for view in views[shift:]:
            lines = [line for line in found[stat] if line["iter"] == view.step - shift]
            values = {name: one for line in lines for name, one in line["values"].items()}
            tensors = [tensor for tensor in view.tensors if tensor.kind == kind]
            assert len(values) == sum(len(line["values"]) for line in lines) == len(tensors)
            sums = view.moments.raw_moments()
            for tensor in tensors:
                one = values[tensor.name]
                assert one["count"] == view.stats["count"][tensor.index]
                assert [one[f"sum_{n}"] for n in range(1, 5)] == [float(sums[f"s{n}"][tensor.index]) for n in range(1, 5)]
                assert (one["nan"], one["inf"], one["min"]) == (0, 0, float(view.stats["min"][tensor.index]))
    squares = sum(one["sum_2"] for line in found["grad_raw_moments_by_param"][:1] for one in line["values"].values())
    assert squares > 0


@pytest.mark.slow
def test_megatron_stats_name_what_modules_take_and_give(tmp_path: Path) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.relu(self.up(self.norm(x))))

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    torch.manual_seed(0)
    model = nn.Sequential()
    for name, module in (("embedding", nn.Linear(3, 4)), ("decoder", Decoder()), ("output_layer", nn.Linear(4, 2))):
        model.add_module(name, module)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen: dict[str, float] = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            seen[f"{name}/input0"], seen[f"{name}/output0"] = float(args[0].sum()), float(output.sum())

        return hook

    for name, module in model.named_modules():
        if name:
            module.register_forward_hook(note(name))
    kinds = ["param", "activation", "activation_in", "dgrad", "dgrad_in"]
    monitor = sentinel.attach(model, optimizer, {"kinds": kinds, "directory": str(tmp_path), "run": "run"})
    weights = []
    for step in range(3):
        model(torch.randn(5, 3)).square().mean().backward()
        if step == 2:
            expected = dict(seen)
        monitor.log(consumed_samples=5.0 * (step + 1))
        optimizer.step()
        optimizer.zero_grad()
        weights.append(float(model.output_layer.weight.sum()))
    monitor.detach()

    assert run_cli(["export", str(tmp_path / "run"), "--format", "megatron-stats", "-o", str(tmp_path / "out")]) == 0

    found = stats_lines(tmp_path / "out")
    params = found["param_raw_moments_by_param"]
    assert [(line["iter"], line["consumed_train_samples"]) for line in params] == [(0, 5.0), (1, 10.0)]
    sums = [line["values"]["output_layer.weight"]["sum_1"] for line in params]
    assert sums == pytest.approx(weights[:2], rel=1e-5)
    layers = found["activation_raw_moments_by_layer"][-1]["values"]
    assert {name: one["sum_1"] for name, one in layers.items() if name in expected} == pytest.approx(expected, rel=1e-4)
    gradients = found["dgrad_raw_moments_by_layer"][-1]["values"]
    assert {"decoder.layers.0.up/input0", "decoder.layers.0.up/output0", "output_layer/input0"} <= set(gradients)
    stream = ["decoder/input0", "decoder.layers.0/output0", "decoder.layers.1/output0"]
    for stat in ("residual_raw_moments_by_layer", "residual_dgrad_raw_moments_by_layer"):
        assert [list(line["values"]) for line in found[stat]] == [stream] * 3


@pytest.mark.slow
@pytest.mark.parametrize("jobs", ["1", "3"])
@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet", "tensorboard", "msprobe-csv", "megatron-stats"])
def test_steps_without_any_tensor_row_are_exported_as_such(form: str, jobs: str, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    config = {"kinds": ["param"], "black_box": False, "step_interval": 3, "directory": str(tmp_path), "run": "run"}
    monitor = sentinel.attach(model, optimizer, config)
    for _ in range(8):
        model(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    monitor.detach()
    arguments = ["export", str(tmp_path / "run"), "--format", form, "-o", str(tmp_path / "out"), "--jobs", jobs]

    assert run_cli(arguments) == 0
    if form == "jsonl":
        steps = [json.loads(line)["step"] for line in (tmp_path / "out").read_text().splitlines()]
        assert steps == [0, 0, 3, 3, 6, 6]
    if form in ("csv", "jsonl"):
        assert run_cli([*arguments[:4], "--aggregate", "all=*", "--kind", "param"]) == 0
        assert run_cli([*arguments[:4], "--kind", "wgrad"]) == 1, "nothing of that kind"


@pytest.mark.parametrize("arguments", [(), ("--aggregate", "all=*"), ("--format", "megatron-stats")])
def test_what_cannot_be_merged_is_counted_always(
    arguments: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def summands(**given: Any) -> TensorInfo:
        if given["kind"] == "activation":
            given["placements"] = {**given["placements"], "tp": "partial"}
        return TensorInfo(**given)

    monkeypatch.setattr("sentinel.testing.model.TensorInfo", summands)
    deep_run(tmp_path / "run", layers=2, pp=1).write(2)
    (view, _) = closed_steps(tmp_path / "run")
    num = sum(one.kind == "activation" for one in view.tensors)
    wanted = ["--kind", "activation,wgrad", "-o", str(tmp_path / "out"), "--json", *arguments]

    assert run_cli(["export", str(tmp_path / "run"), *wanted]) == 0

    said = capsys.readouterr()
    reported = json.loads(said.out)
    assert reported["num_left_out"] == sum(reported["left_out"].values()) == num > 0
    assert f"{num} series " in said.err
    if not arguments:
        assert run_cli(["export", str(tmp_path / "run"), "--kind", "activation,wgrad", "--per-rank"]) == 0
        assert "left out" not in capsys.readouterr().err


def test_megatron_stats_of_groups_count_what_is_no_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = deep_run(tmp_path / "run", layers=2, pp=1)
    run.plant(Nan(step=1, module="layers.1")).write(2)
    arguments = ["--format", "megatron-stats", "-o", str(tmp_path / "out"), "--kind", "activation"]
    arguments += ["--aggregate", "layers.{}*"]
    assert run_cli(["export", str(tmp_path / "run"), *arguments]) == 2
    assert not (tmp_path / "out").exists()

    arguments[-1] = "layer{}=layers.{},layers.{}.*"
    assert run_cli(["export", str(tmp_path / "run"), *arguments]) == 0

    lines = stats_lines(tmp_path / "out")["activation_raw_moments_by_layer"]
    assert [list(line["values"]) for line in lines] == [["layer0", "layer1"]] * 2
    assert [line["values"]["layer1"]["nan"] > 0 for line in lines] == [False, True]
    assert lines[1]["values"]["layer1"]["sum_2"] > 0
    assert run_cli(["export", str(tmp_path / "run"), *arguments]) == 2
    assert "expected no training_stats there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ([], "give -o DIR"),
        (["-o", "x", "--statistic", "norm"], "no --statistic"),
        (["-o", "x", "--kind", "exp_avg"], "has no place for other kinds"),
    ],
)
def test_megatron_stats_say_what_they_need(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], what: str
) -> None:
    deep_run(tmp_path / "run", layers=2).write(1)

    assert run_cli(["export", str(tmp_path / "run"), "--format", "megatron-stats", *arguments]) == 2
    assert what in capsys.readouterr().err
