"""`sentinel import msprobe`: what msProbe's CSV files say is a run like any other, and nothing else is in it."""

from __future__ import annotations

import csv
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sentinel.cli.main import run_cli
from sentinel.csv_text import guarded, unguarded
from sentinel.exports.msprobe_reading import Observation, stats_of
from sentinel.moments import Moments

from ..support.exported import exported_rows

HEAD = "vpp_stage,name,step,min,max,mean,norm,nans,zeros,shape,dtype"
MICRO = "vpp_stage,name,step,micro_step,min,max,mean,norm,nans,zeros,shape,dtype"
FOLDER = "Nov21_13-56-02-rank{}-d3a1c196"


def line(name: str, step: int, x: Any, micro: int | None = None, vpp: int = 0, dtype: str = "torch.float32") -> str:
    """One line as msProbe writes it of a tensor, with all digits."""
    x = np.asarray(x, np.float64)
    words: list[Any] = [vpp, name, step, *([] if micro is None else [micro])]
    words += [x.min(), x.max(), x.mean(), np.sqrt((x * x).sum()), int(np.isnan(x).sum()), (np.abs(x) < 1e-8).mean()]
    shape = str(list(x.shape))
    return ",".join([*map(str, words), f'"{shape}"' if "," in shape else shape, dtype])


def write(folder: Path, name: str, *lines: str, header: str = HEAD) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("\n".join([header, *lines]) + "\n")


def test_a_tensor_has_the_statistics_that_its_line_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = np.random.default_rng(0).standard_normal((4, 8)) + 3
    x[0, :2] = 0
    write(tmp_path / "out" / FOLDER.format(0), "grad_reduced_0-0.csv", line("emb.weight", 0, x))

    assert run_cli(["import", "msprobe", str(tmp_path / "out"), "-o", str(tmp_path / "run")]) == 0

    (found,) = exported_rows(capsys, tmp_path / "run")
    assert (found["kind"], found["name"], found["step"], found["num_elements"]) == ("wgrad", "emb.weight", 0, 32)
    expected = Moments.of(x)
    for statistic in ("mean", "std", "var", "norm", "rms", "min", "max", "absmax", "nans", "infs", "zeros"):
        assert found[statistic] == pytest.approx(float(expected.statistic(statistic)[0]), rel=1e-12), statistic
    assert found["skew"] is None and found["kurtosis"] is None, "no CSV says anything of them"


@given(
    st.lists(st.floats(-1e6, 1e6, allow_subnormal=False), min_size=1, max_size=40),
    st.floats(-1e6, 1e6),
    st.sampled_from([1e-20, 1e-7, 1.0, 1e12]),
)
@settings(max_examples=60, deadline=None)
def test_moments_are_those_of_the_elements(values: list[float], mean: float, scale: float) -> None:
    x = (np.array(values) + mean) * scale
    line = Observation(
        "grad_reduced", "wgrad", "w", 0, 0, -1, x.shape, "float64",
        (x.min(), x.max(), x.mean(), np.linalg.norm(x)), ("min", "max", "mean", "norm"), "x:2",
    )  # fmt: skip

    found = Moments(stats_of([line]))

    expected = Moments.of(x)
    assert found.norm()[0] == pytest.approx(expected.norm()[0], rel=1e-9)
    assert found.min()[0] == x.min() and found.max()[0] == x.max()
    assert (found.mean()[0]) == pytest.approx(expected.mean()[0], rel=1e-9, abs=1e-12 * np.abs(x).max())
    # What cancels between norm and mean cannot be had back: an error of the whole's last digits, never more.
    assert found.var()[0] == pytest.approx(expected.var()[0], abs=1e-13 * float((x * x).mean()) + 1e-300)
    assert found.std()[0] >= 0
    if len(x) > 1:
        assert math.isnan(found.kurtosis()[0]) and math.isnan(found.skew()[0])


def observation(ops: str, values: tuple[float, ...], shape: tuple[int, ...] = (64, 64)) -> Observation:
    return Observation("grad_reduced", "wgrad", "w", 0, 0, -1, shape, "float32", values, tuple(ops.split()), "x:2")


def test_equal_elements_have_no_variance_in_spite_of_rounded_digits() -> None:
    """LayerNorm's gains are all one when training begins; six decimals of a norm leave a variance that is not there."""
    ones = Moments(stats_of([observation("min max mean norm", (1.0, 1.0, 1.0, 64.000001))]))
    varied = Moments(stats_of([observation("min max mean norm", (0.5, 1.5, 1.0, 70.0))]))

    assert ones.var()[0] == 0 and ones.norm()[0] == pytest.approx(64, rel=1e-7)
    assert varied.var()[0] == pytest.approx(70.0**2 / 4096 - 1)


@pytest.mark.parametrize(
    ("ops", "values", "known", "unknown"),
    [
        ("norm", (2.0,), {"norm": 2.0, "rms": 2.0 / 64}, ("mean", "std", "var", "min", "max", "zeros", "kurtosis")),
        ("mean", (0.5,), {"mean": 0.5}, ("std", "norm", "min", "max", "zeros")),
        ("min max", (-1.0, 2.0), {"min": -1.0, "max": 2.0, "absmax": 2.0}, ("mean", "std", "norm", "zeros")),
        ("zeros", (0.25,), {"zeros": 0.25}, ("mean", "norm", "min", "max")),
        ("min max mean norm nans", (math.nan,) * 4 + (7.0,), {"nans": 7.0}, ("mean", "norm", "min", "max", "std")),
        ("min max mean norm", (math.nan,) * 4, {"nans": 1.0}, ("mean", "norm", "min", "max", "std")),
        ("min max mean norm", (-math.inf, 0.0, -math.inf, math.inf), {"infs": 1.0, "nans": 0.0, "max": 0.0}, ("mean",)),
        ("norm", (math.inf,), {"infs": 1.0}, ("mean", "norm")),
    ],
)  # fmt: skip
def test_what_a_line_does_not_say_is_not_invented(
    ops: str, values: tuple[float, ...], known: dict[str, float], unknown: tuple[str, ...]
) -> None:
    found = Moments(stats_of([observation(ops, values)]))

    assert {name: float(found.statistic(name)[0]) for name in known} == pytest.approx(known)
    assert [name for name in unknown if not math.isnan(found.statistic(name)[0])] == []


def test_a_norm_alone_merges_over_micro_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """msProbe's own default is the norm alone."""
    lines = [f'0,fc.output,0,{micro},{norm},"[2, 2]",torch.float32' for micro, norm in enumerate((3.0, 4.0))]
    folder = tmp_path / "out" / FOLDER.format(0)
    write(folder, "actv_0-0.csv", *lines, header="vpp_stage,name,step,micro_step,norm,shape,dtype")

    assert run_cli(["import", "msprobe", str(folder), "-o", str(tmp_path / "run")]) == 0

    (found,) = exported_rows(capsys, tmp_path / "run")
    assert found["norm"] == pytest.approx(5.0) and found["mean"] is None and found["std"] is None


def test_names_are_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = np.arange(6.0).reshape(2, 3)
    folder = tmp_path / "out" / FOLDER.format(0)
    names = [".input", "layers.0.attn.input_0", "layers.0.attn.input_1", "layers.0.attn.output_1", "layers.0.output.output"]
    write(folder, "actv_0-0.csv", *(line(name, 0, x, 0) for name in names), header=MICRO)
    write(folder, "actv_grad_0-0.csv", *(line(name, 0, x, 0) for name in ("fc.input", "fc.output")), header=MICRO)
    write(folder, "param_origin_0-0.csv", line("fc.weight", 0, x))

    assert run_cli(["import", "msprobe", str(tmp_path / "out"), "-o", str(tmp_path / "run")]) == 0

    assert {(one["kind"], one["name"]) for one in exported_rows(capsys, tmp_path / "run")} == {
        ("activation_in", "model"), ("activation_in", "layers.0.attn"), ("activation_in", "layers.0.attn:1"),
        ("activation", "layers.0.attn:1"), ("activation", "layers.0.output"),
        ("dgrad_in", "fc"), ("dgrad", "fc"), ("param", "fc.weight"),
    }  # fmt: skip


def test_state_is_of_the_step_that_wrote_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """msProbe reads the optimizer's state before the update and the new weights behind it."""
    folder = tmp_path / "out" / FOLDER.format(0)
    for step in (0, 1):
        write(folder, f"param_origin_{step}-{step}.csv", line("w", step, [float(step)]))
        write(folder, f"param_updated_{step}-{step}.csv", line("w", step, [float(step + 1)]))
        write(folder, f"exp_avg_{step}-{step}.csv", line("w", step, [10.0 * step]))

    assert run_cli(["import", "msprobe", str(tmp_path / "out"), "-o", str(tmp_path / "run")]) == 0

    reported = capsys.readouterr().err
    found = {(one["kind"], one["step"]): one["mean"] for one in exported_rows(capsys, tmp_path / "run")}
    assert found == {("param", 0): 0.0, ("param", 1): 1.0, ("param", 2): 2.0, ("exp_avg", 0): 10.0}
    assert "1 lines are of the optimizer's state before step 0 and are left out" in reported


def test_defect_6_none_is_not_a_nan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "out" / FOLDER.format(0)
    none = "0,attn.output_1,0,0,nan,nan,nan,nan,nan,nan,nan,nan"
    write(folder, "actv_0-0.csv", none, line("attn.output_0", 0, [np.nan, 1.0], 0), header=MICRO)

    assert run_cli(["import", "msprobe", str(tmp_path / "out"), "-o", str(tmp_path / "run")]) == 0

    assert "1 lines are of what is no tensor (None)" in capsys.readouterr().err
    (found,) = exported_rows(capsys, tmp_path / "run")
    assert (found["name"], found["nans"], found["num_elements"]) == ("attn", 1.0, 2), "a real NaN is one"


def test_defect_14_lines_of_collectives_do_not_fit_their_header(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "out" / FOLDER.format(0)
    collective = "all_reduce,0.5,0,1.0,0.7,2.0,0,0.0,0.5,1.0"
    write(folder, "other_0-0.csv", collective, line("fc.weight", 0, [0.5]))

    assert run_cli(["import", "msprobe", str(tmp_path / "out"), "-o", str(tmp_path / "run")]) == 0

    reported = capsys.readouterr().err
    assert "1 lines of collectives do not fit their header" in reported and "other_0-0.csv:2" in reported
    (found,) = exported_rows(capsys, tmp_path / "run")
    assert (found["kind"], found["mean"]) == ("grad_momentum_alignment", 0.5)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (f"{HEAD}\n0,w,0,1,2,1.5", "grad_reduced_0-0.csv:2: expected a whole line"),
        (f"{HEAD}\n0,w,0,1,2,1.5\n", "grad_reduced_0-0.csv:2: expected 11 fields as in the header, got 6; torn?"),
        (f"{HEAD}\n{line('w', 0, [1.0])}\n0,v,0,1,2,x,3,0,0,[3],torch.float32\n", ':3: mean: expected a number, nan or inf'),
        (f"{HEAD}\n0,w,0,1,2,1_0,3,0,0,[3],torch.float32\n", "mean: expected a number"),
        (f"{HEAD}\n-1,w,0,1,2,1,3,0,0,[3],torch.float32\n", 'vpp_stage: expected a number from 0 on, got "-1"'),
        (f"{HEAD}\n0,w,7,1,2,1,3,0,0,[3],torch.float32\n", "expected a step in [0, 0] as the file's name says, got 7"),
        (f"{HEAD}\n0,w,99999999999999999999,1,2,1,3,0,0,[3],torch.float32\n", "step: expected a number"),
        (f"{HEAD}\n0,w,0,1,2,1,3,0,0,[3; 4],torch.float32\n", "shape: expected a list of sizes like [4, 64]"),
        (f"{HEAD}\n0,w,0,1,2,1,3,0,0,nan,torch.float32\n", "expected a shape and a dtype"),
        (f'{HEAD}\n0,w,0,1,2,1,3,0,0,"[99999999999, 99999999999]",torch.float32\n', "at most 2**62 elements"),
        (f"{HEAD}\n0,,0,1,2,1,3,0,0,[3],torch.float32\n", "expected the name of a parameter, got none"),
        (f"{HEAD.replace('mean', 'men')}\n", 'grad_reduced_0-0.csv:1: unknown column "men"; did you mean "mean"?'),
        (f"{HEAD.replace('max', 'min')}\n", "a column is there twice"),
        ("a,b\n", "expected a header that begins vpp_stage,name,step"),
        ("vpp_stage,name,step,min\n", "expected a column shape"),
        ("", "expected a header, got an empty file"),
        (f"{HEAD}\n0,w\0,0,1,2,1,3,0,0,[3],torch.float32\n", "name: expected visible characters"),
        (f"{HEAD}\n{line('w', 0, [1.0])}\n{line('w', 0, [1.0])}\n", ":3: w is there at step 0 already"),
        (f'{HEAD}\n0,"w,0,1,2,1,3,0,0,[3],torch.float32\n', "not CSV"),
    ],
)  # fmt: skip
def test_a_line_that_makes_no_sense_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, what: str
) -> None:
    folder = tmp_path / "out" / FOLDER.format(0)
    folder.mkdir(parents=True)
    (folder / "grad_reduced_0-0.csv").write_text(text)

    assert run_cli(["import", "msprobe", str(tmp_path / "out"), "-o", str(tmp_path / "run")]) == 2

    assert what in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "nothing half done is left"


IMPOSSIBLE = {
    "nans below zero": ("1,2,1.5,2.7,-3,0", "nans: expected 0 or more, got -3"),
    "more NaNs than elements": ("nan,nan,nan,nan,5,0", "nans: expected a whole number of at most 3 elements, got 5"),
    "half a NaN": ("nan,nan,nan,nan,0.5,0", "nans: expected a whole number"),
    "a norm below zero": ("1,2,1.5,-5,0,0", "norm: expected 0 or more, got -5"),
    "a norm of minus infinity": ("1,2,1.5,-inf,0,0", "norm: expected 0 or more, got -inf"),
    "a share above one": ("1,2,1.5,2.7,0,1.5", "zeros: expected a number in [0, 1], got 1.5"),
    "a min above the max": ("3,2,2.5,4.7,0,0", "min: expected at most the max of 2, got 3"),
    "a mean above the max": ("1,2,7,12.7,0,0", "mean: expected one between min and max, 1 and 2, got 7"),
    "a norm below the largest element": ("1,20,7,3,0,0", "norm: expected at least 20, the size of the largest element"),
    "a norm that no elements have": ("1,2,1.5,500,0,0", "norm: expected at most 2 times the root of 3 elements, got 500"),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_what_no_tensor_can_have_is_named(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values, what = IMPOSSIBLE[case]
    write(tmp_path / "out" / FOLDER.format(0), "grad_reduced_0-0.csv", f"0,w,0,{values},[3],torch.float32")

    assert run_cli(["import", "msprobe", str(tmp_path / "out"), "-o", str(tmp_path / "run")]) == 2

    assert f"grad_reduced_0-0.csv:2: {what}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "values",
    ["nan,nan,nan,nan,3,0", "-inf,inf,nan,inf,0,0", "0.1,0.1,0.100001,0.173205,0,0", "0.0,0.0,0.0,0.0,0,1.0",
     "1.0,1.0,1.0039,1.7266,0,0", "0.0,0.000001,0.0,0.0,0,1.0"],
)  # fmt: skip
def test_rounded_and_non_finite_statistics_are_possible(
    values: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "out" / FOLDER.format(0), "grad_reduced_0-0.csv", f"0,w,0,{values},[3],torch.bfloat16")

    assert run_cli(["import", "msprobe", str(tmp_path / "out"), "-o", str(tmp_path / "run")]) == 0


@pytest.mark.parametrize(
    ("time", "arguments", "code"),
    [
        ("Feb31_00-00-00", [], 2), ("Feb29_00-00-00", [], 0), ("Feb29_00-00-00", ["--year", "2025"], 2),
        ("Nov21_25-00-00", [], 2), ("Foo21_13-56-02", [], 2), ("my-run", [], 0), ("Dec31_23-59-59", [], 0),
    ],
)  # fmt: skip
def test_a_folder_of_a_day_that_never_was_is_refused(
    time: str, arguments: list[str], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "out" / f"{time}-rank0-d3a1c196", "grad_reduced_0-0.csv", line("w", 0, [1.0]))

    assert run_cli(["import", "msprobe", str(tmp_path / "out"), "-o", str(tmp_path / "run"), *arguments]) == code
    assert ("there is no such moment" in capsys.readouterr().err) == (code == 2)


def test_names_like_formulas_go_both_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["=SUM(A1)", "+x", "-y", "@z", "'=already"]
    write(tmp_path / "out" / FOLDER.format(0), "grad_reduced_0-0.csv", *(line(guarded(name), 0, [1.0]) for name in names))

    assert run_cli(["import", "msprobe", str(tmp_path / "out"), "-o", str(tmp_path / "run")]) == 0

    assert sorted(one["name"] for one in exported_rows(capsys, tmp_path / "run")) == sorted(names)
    assert run_cli(["export", str(tmp_path / "run")]) == 0
    reported = [one["name"] for one in csv.DictReader(capsys.readouterr().out.splitlines())]
    assert not any(name.startswith(("=", "+", "-", "@")) for name in reported) and sorted(
        map(unguarded, reported)
    ) == sorted(names)
    assert run_cli(["export", str(tmp_path / "run"), "--format", "msprobe-csv", "-o", str(tmp_path / "back")]) == 0
    (back,) = (tmp_path / "back").glob("*/grad_reduced_0-0.csv")
    assert [one["name"] for one in csv.DictReader(back.read_text().splitlines())] == [guarded(name) for name in names]


def test_bytes_that_are_no_text_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "out" / FOLDER.format(0)
    folder.mkdir(parents=True)
    (folder / "actv_0-0.csv").write_bytes(MICRO.encode() + b"\n0,\xff\xfe,0\n")

    assert run_cli(["import", "msprobe", str(tmp_path / "out"), "-o", str(tmp_path / "run")]) == 2
    assert "actv_0-0.csv: expected UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda path: None, "found nothing there"),
        (lambda path: path.write_text("x"), "got a file; give the directory that holds it"),
        (lambda path: (path / "else").mkdir(parents=True), "expected folders like Nov21_13-56-02-rank0-"),
        (lambda path: write(path / FOLDER.format(0), "grad_reducd_0-0.csv"), 'did you mean "grad_reduced"?'),
    ],
)
def test_a_directory_that_is_none_of_msprobes_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Any, what: str
) -> None:
    make(tmp_path / "out")

    assert run_cli(["import", "msprobe", str(tmp_path / "out"), "-o", str(tmp_path / "run")]) == 2
    assert what in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_an_existing_run_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "out" / FOLDER.format(0), "grad_reduced_0-0.csv", line("w", 0, [1.0]))
    (tmp_path / "run").mkdir()

    assert run_cli(["import", "msprobe", str(tmp_path / "out"), "-o", str(tmp_path / "run")]) == 2
    assert "expected no such run yet" in capsys.readouterr().err


@pytest.mark.slow
def test_the_same_input_makes_the_same_bytes(tmp_path: Path) -> None:
    for rank in (0, 1):
        folder = tmp_path / "out" / FOLDER.format(rank)
        for step in range(3):
            write(folder, f"grad_reduced_{step}-{step}.csv", line("w", step, [1.0 + rank, 2.0]))

    for at, jobs in enumerate(("1", "2")):
        run = tmp_path / str(at) / "run"
        assert run_cli(["import", "msprobe", str(tmp_path / "out"), "-o", str(run), "--jobs", jobs]) == 0

    contents = [
        {str(path.relative_to(tmp_path / at)): path.read_bytes() for path in sorted((tmp_path / at).rglob("*.spool"))}
        for at in "01"
    ]
    assert contents[0] == contents[1] and len(contents[0]) == 2


def test_ranks_that_nobody_placed_keep_their_own_series(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(4):
        folder = tmp_path / "out" / FOLDER.format(rank)
        write(folder, "actv_0-0.csv", line("layers.0.fc.output", 0, [float(rank), 1.0], 0), header=MICRO)
        write(folder, "grad_reduced_0-0.csv", line("layers.0.fc.weight", 0, [float(rank // 2)] * 3))

    assert run_cli(["import", "msprobe", str(tmp_path / "out"), "-o", str(tmp_path / "apart")]) == 0
    sizes = ["--pp", "2", "--dp", "2"]
    assert run_cli(["import", "msprobe", str(tmp_path / "out"), "-o", str(tmp_path / "merged"), *sizes]) == 0

    apart = exported_rows(capsys, tmp_path / "apart", "--kind", "wgrad")
    merged = exported_rows(capsys, tmp_path / "merged")
    assert [(one["place"], one["mean"]) for one in apart] == [("dp=0", 0), ("dp=1", 0), ("dp=2", 1), ("dp=3", 1)]
    assert [(one["kind"], one["name"], one["num_elements"], one["mean"]) for one in merged] == [
        ("activation", "layers.0.fc", 4, 0.75), ("wgrad", "layers.0.fc.weight", 3, 0.0),
        ("activation", "layers.1.fc", 4, 1.75), ("wgrad", "layers.1.fc.weight", 3, 1.0),
    ], "a stage numbers its own layers; the model's numbers go on"  # fmt: skip
    assert run_cli(["import", "msprobe", str(tmp_path / "out"), "-o", str(tmp_path / "x"), "--dp", "2"]) == 2
    assert "expected at least 4 ranks" in capsys.readouterr().err


def test_virtual_stages_are_chunks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "out" / FOLDER.format(0)
    write(folder, "grad_reduced_0-0.csv", *(line("layers.0.weight", 0, [float(vpp)], vpp=vpp) for vpp in (0, 1)))

    assert run_cli(["import", "msprobe", str(tmp_path / "out"), "-o", str(tmp_path / "run")]) == 0

    assert [(one["name"], one["mean"]) for one in exported_rows(capsys, tmp_path / "run")] == [
        ("layers.0.weight", 0.0), ("layers.1.weight", 1.0),
    ]  # fmt: skip


def test_a_second_folder_of_a_rank_is_the_next_attempt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for time, steps, value in (("Nov21_13-56-02", range(3), 1.0), ("Nov21_14-56-02", range(2, 4), 2.0)):
        for step in steps:
            write(tmp_path / "out" / f"{time}-rank0-abc", f"grad_reduced_{step}-{step}.csv", line("w", step, [value, 0.0]))

    assert run_cli(["import", "msprobe", str(tmp_path / "out"), "-o", str(tmp_path / "run")]) == 0

    found = exported_rows(capsys, tmp_path / "run")
    assert [(one["attempt"], one["step"], one["max"]) for one in found] == [(0, 0, 1), (0, 1, 1), (1, 2, 2), (1, 3, 2)]


def test_a_run_that_went_on_in_its_folder_is_joined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`append_output` has msProbe write a repeated step behind the former lines of its file."""
    folder = tmp_path / "out" / FOLDER.format(0)
    lines = [line("w", step, [value, 0.0]) for step, value in ((0, 1.0), (1, 1.0), (2, 1.0), (1, 2.0), (2, 2.0), (3, 2.0))]
    write(folder, "grad_reduced_0-9.csv", *lines)

    assert run_cli(["import", "msprobe", str(tmp_path / "out"), "-o", str(tmp_path / "run")]) == 2
    assert "is read with --resumed" in capsys.readouterr().err
    assert run_cli(["import", "msprobe", str(tmp_path / "out"), "-o", str(tmp_path / "run"), "--resumed"]) == 0

    found = sorted((one["step"], one["max"]) for one in exported_rows(capsys, tmp_path / "run"))
    assert found == [(0, 1), (1, 2), (2, 2), (3, 2)]


def test_rules_are_back_tested_on_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(1)
    folder = tmp_path / "out" / FOLDER.format(0)
    for step in range(6):
        lines = []
        for module in ("layers.0.fc1", "layers.0.fc2", "layers.1.fc1"):
            x = rng.standard_normal((4, 4))
            if step == 4 and module != "layers.0.fc1":
                x[0, 0] = np.nan
            lines.append(line(f"{module}.output", step, x, 0))
        write(folder, f"actv_{step}-{step}.csv", *lines, header=MICRO)
    assert run_cli(["import", "msprobe", str(tmp_path / "out"), "-o", str(tmp_path / "run")]) == 0

    code = run_cli(["replay", str(tmp_path / "run"), "--recompute", "--rules", "msprobe", "-o", str(tmp_path / "judged")])

    assert code == 1
    lines = [one for path in (tmp_path / "judged" / "anomalies").glob("*.jsonl") for one in path.read_text().splitlines()]
    found = [json.loads(one) for one in lines]
    first = min((one for one in found if one["severity"] == "critical"), key=lambda one: (one["step"], one["call_id"]))
    assert (first["step"], first["tag_name"], first["kind"]) == (4, "layers.0.fc2", "activation")
    assert {one["tag_name"] for one in found if one["rule"] == "msprobe-nan"} == {"layers.0.fc2", "layers.1.fc1"}


def test_features_go_both_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """msProbe's sr is norm(W) / spectral norm; the stable rank is its square."""
    folder = tmp_path / "out" / FOLDER.format(0)
    tables = {
        "linear_hook_3-3.csv": ("vpp_stage,name,step,sr,kernel_norm", ["0,layers.0.fc.linear,3,3.0,1.5"]),
        "attention_hook_3-3.csv": (
            "vpp_stage,name,step,micro_step,entropy,softmax_max",
            ["0,layers.0.attn.attention,3,0,1.25,0.5", "0,layers.0.attn.attention,3,1,1.5,0.75"],
        ),
        "moe_router_weight_hook_3-3.csv": (
            "vpp_stage,name,step,router_weight_similarity",
            ["0,layers.0.moe.moe_router,3,0.125"],
        ),
    }
    for name, (header, lines) in tables.items():
        write(folder, name, *lines, header=header)

    assert run_cli(["import", "msprobe", str(tmp_path / "out"), "-o", str(tmp_path / "run")]) == 0

    found = {(one["kind"], one["name"]): one["mean"] for one in exported_rows(capsys, tmp_path / "run")}
    assert found == {
        ("weight_spectrum", "layers.0.fc.weight:stable_rank"): 9.0,
        ("weight_spectrum", "layers.0.fc.weight:spectral_norm"): 1.5,
        ("attention", "layers.0.attn:entropy"): 1.375, ("attention", "layers.0.attn:softmax_max"): 0.625,
        ("router", "layers.0.moe:weight_similarity"): 0.125,
    }  # fmt: skip
    assert run_cli(["export", str(tmp_path / "run"), "--format", "msprobe-csv", "-o", str(tmp_path / "back")]) == 0
    back = {path.name: path.read_text().splitlines() for path in (tmp_path / "back").glob("*/*.csv")}
    assert back == {name: [header, *lines] for name, (header, lines) in tables.items()}


@pytest.mark.slow
@given(st.data())
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_csv_comes_back_as_it_was(tmp_path: Path, data: st.DataObject) -> None:
    """Files, names, steps and micro-steps exactly; numbers to the last digits of a sum of squares."""
    case = Path(tempfile.mkdtemp(dir=tmp_path))
    words = st.from_regex(r"[a-z_]{1,6}(\.[0-9]{1,2}){0,2}(\.[a-z]{1,5}){0,2}", fullmatch=True)
    names = data.draw(st.lists(words, min_size=1, max_size=4, unique=True))
    num_steps, num_micro = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    elements = st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=5)
    folder = case / "out" / FOLDER.format(data.draw(st.integers(0, 3)))
    for step in range(num_steps):
        weights = [line(f"{name}.weight", step, data.draw(elements)) for name in names]
        write(folder, f"grad_reduced_{step}-{step}.csv", *weights)
        write(folder, f"param_origin_{step}-{step}.csv", *weights)
        both = [line(f"{name}.output", step, data.draw(elements), micro) for micro in range(num_micro) for name in names]
        write(folder, f"actv_{step}-{step}.csv", *both, header=MICRO)

    assert run_cli(["import", "msprobe", str(case / "out"), "-o", str(case / "run")]) == 0
    assert run_cli(["export", str(case / "run"), "--format", "msprobe-csv", "-o", str(case / "back")]) == 0

    before = {path.name: path for path in folder.iterdir()}
    after = {path.name: path for path in (case / "back").glob("*/*.csv")}
    assert set(after) == set(before) | {f"param_updated_{step}-{step}.csv" for step in range(num_steps - 1)}
    for name, path in before.items():
        with path.open(newline="") as one, after[name].open(newline="") as other:
            pairs = list(zip(csv.DictReader(one), csv.DictReader(other), strict=True))
        for ours, theirs in pairs:
            texts = ("vpp_stage", "name", "step", "micro_step", "shape", "dtype", "nans")
            assert [ours.get(key) for key in texts] == [theirs.get(key) for key in texts]
            assert [float(ours[key]) for key in ("min", "max")] == [float(theirs[key]) for key in ("min", "max")]
            for key in ("mean", "norm", "zeros"):
                assert float(theirs[key]) == pytest.approx(float(ours[key]), rel=1e-7, abs=1e-12), (name, key)


GOLDEN = Path(__file__).parent / "golden" / "msprobe"
"""Real output of msProbe 26.2: two modules of a model in whose linear1.weight a NaN was planted before step 5, the config
that made it, and (step, tag, rule) of the records that msProbe itself wrote of them."""


def test_a_real_recording_raises_the_alarms_that_msprobe_raised(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text((GOLDEN / "config.json").read_text())
    assert run_cli(["import", "msprobe-config", str(tmp_path / "s.json"), "-o", str(tmp_path / "s.yaml")]) == 0
    assert run_cli(["import", "msprobe", str(GOLDEN), "-o", str(tmp_path / "run")]) == 0
    run, pack = str(tmp_path / "run"), str(tmp_path / "s-rules.yaml")
    assert run_cli(["replay", run, "--recompute", "--rules", pack, "-o", run]) == 1
    assert run_cli(["export", run, "--format", "msprobe", "-o", str(tmp_path / "out")]) == 0

    records = json.loads((tmp_path / "out" / "anomaly_detected" / "rank0" / "anomaly.json").read_text())
    ours = {(one["step"], one["tag_name"], one["message"].split()[1]) for one in records.values()}
    theirs = {tuple(one) for one in json.loads((GOLDEN / "alarms.json").read_text())}
    # An output that is None is no NaN; and six decimals have left 0 of means that moved.
    theirs = {one for one in theirs if "self_attn.output_1" not in one[1]}
    assert {one for one in ours if one[2] == "AnomalyNan"} == {one for one in theirs if one[2] == "AnomalyNan"}
    assert ours <= theirs and len(ours) > 0.8 * len(theirs) > 50


def test_the_default_rules_find_the_origin_in_a_real_recording(tmp_path: Path) -> None:
    """msProbe's own list has it at place 436 of 1050."""
    assert run_cli(["import", "msprobe", str(GOLDEN), "-o", str(tmp_path / "run")]) == 0

    assert run_cli(["replay", str(tmp_path / "run"), "--recompute", "-o", str(tmp_path / "judged")]) == 1

    lines = [one for path in (tmp_path / "judged" / "anomalies").glob("*.jsonl") for one in path.read_text().splitlines()]
    found = sorted((json.loads(one) for one in lines), key=lambda one: (one["step"], one["call_id"] or 0))
    assert (found[0]["step"], found[0]["tag_name"], found[0]["kind"]) == (5, "encoder.layers.0.linear1", "activation")
    assert found[0]["severity"] == "critical", "and before it nothing: five healthy steps"
