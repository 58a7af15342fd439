"""`sentinel export --vectors`: what is no row comes out with its name, its axis and every value."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from sentinel.cli.main import run_cli
from sentinel.messages import Vector, Vectors
from sentinel.testing import SyntheticRun
from sentinel.wire.frame import FrameType, encode_message

from ..support.exported import exported_rows
from ..support.serving import small_run

staged_run = functools.partial(small_run, dp=1)


def write(run: SyntheticRun, num_steps: int, scale: float = 1.0) -> None:
    """Write steps whose activations have a value a head and whose weight gradients have a histogram."""
    for _ in range(num_steps):
        for rank in range(run.num_ranks):
            tensors = {(one.kind, one.name): one.id for one in run.descriptor(rank).tensors}
            heads = np.array([[0.5, 1.5], [2.5, run.step]], "<f4") * np.float32(scale)
            items = (
                Vector(
                    tensor=tensors["activation", "layers.0"], statistic="entropy", axis="micro_batch,head", micro_step=1,
                    call_id=4, dtype="<f4", shape=(2, 2), values=heads.tobytes(),
                ),
                Vector(
                    tensor=tensors["wgrad", "layers.0.mlp.weight"], statistic="histogram", axis="bin", dtype="<i8",
                    shape=(3,), values=np.array([1, 2**53, 0], "<i8").tobytes(), edges=(-1.0, 0.0, 1e-7, 1.0),
                ),
            )  # fmt: skip
            run._write_message(run._ranks[rank], FrameType.VECTOR, encode_message(Vectors(items=items)), run.step, 0)
        run.write(1)


def test_a_vector_has_its_canonical_name_and_all_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(staged_run(tmp_path / "run"), 2)

    found = exported_rows(capsys, tmp_path / "run", "--vectors")

    assert [(one["step"], one["rank"], one["kind"], one["name"]) for one in found[:4]] == [
        (0, 0, "activation", "layers.0"), (0, 0, "wgrad", "layers.0.mlp.weight"),
        (0, 1, "activation", "layers.2"), (0, 1, "wgrad", "layers.2.mlp.weight"),
    ], "the second stage's layers go on counting"  # fmt: skip
    heads, histogram = found[4], found[5]
    assert (heads["statistic"], heads["axis"], heads["shape"]) == ("entropy", "micro_batch,head", [2, 2])
    assert (heads["values"], heads["micro_step"], heads["call_id"]) == ([0.5, 1.5, 2.5, 1.0], 1, 4)
    assert histogram["values"] == [1, 2**53, 0] and histogram["edges"] == [-1.0, 0.0, 1e-7, 1.0]


@pytest.mark.slow
def test_parquet_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(staged_run(tmp_path / "run"), 300)
    expected = exported_rows(capsys, tmp_path / "run", "--vectors")

    assert run_cli(["export", str(tmp_path / "run"), "--vectors", "-o", str(tmp_path / "v.parquet")]) == 0

    table = pq.read_table(tmp_path / "v.parquet").to_pylist()
    assert len(table) == len(expected) == 1200
    for row, one in zip(table, expected, strict=True):
        assert row.pop("time").timestamp() == pytest.approx(one.pop("time"), abs=1e-6)
        assert row == one


def test_they_are_chosen_and_resumed_runs_joined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = staged_run(tmp_path / "run", pp=1)
    write(run, 4)
    run.restart(2, attempt=1)
    write(run, 3, scale=2.0)

    found = exported_rows(capsys, tmp_path / "run", "--vectors", "--kind", "activation", "--name", "layers.*")

    assert [(one["step"], one["attempt"], one["values"][0]) for one in found] == [
        (0, 0, 0.5), (1, 0, 0.5), (2, 1, 1.0), (3, 1, 1.0), (4, 1, 1.0),
    ]  # fmt: skip
    assert {one["step"] for one in exported_rows(capsys, tmp_path / "run", "--vectors", "--steps", "1:2")} == {1, 2}
    assert {one["step"] for one in exported_rows(capsys, tmp_path / "run", "--vectors", "--attempt", "0")} == {0, 1, 2, 3}
    assert exported_rows(capsys, tmp_path / "run", "--vectors", "--kind", "param", code=1) == []


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--name", "layer.0*"], '"layer.0*" matches no name of a vector; nearest: layers.0'),
        (["--format", "csv"], "as jsonl, parquet or tensorboard"),
        (["--statistic", "norm"], "as jsonl, parquet or tensorboard"),
        (["--format", "parquet"], "give -o FILE"),
    ],
)
def test_what_cannot_be_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], what: str) -> None:
    write(staged_run(tmp_path / "run"), 1)

    assert exported_rows(capsys, tmp_path / "run", "--vectors", *arguments, code=2) == []
    run_cli(["export", str(tmp_path / "run"), "--vectors", *arguments])
    assert what in capsys.readouterr().err


def test_a_vector_that_lies_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = staged_run(tmp_path / "run", pp=1)
    write(run, 1)
    lie = Vector(tensor=10**6, statistic="x", axis="head", shape=(1,), values=b"\0" * 4)
    run._write_message(run._ranks[0], FrameType.VECTOR, encode_message(Vectors(items=(lie,))), 1, 0)
    run.write(1)

    assert run_cli(["export", str(tmp_path / "run"), "--vectors"]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 2 and "1 vectors do not hold what they say" in err


def test_tensorboard_has_histograms_and_a_value_a_head(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(staged_run(tmp_path / "run", pp=1), 2)

    arguments = ["--vectors", "--format", "tensorboard", "-o", str(tmp_path / "tb")]
    assert run_cli(["export", str(tmp_path / "run"), *arguments]) == 0

    def read(kind: str) -> EventAccumulator:
        events = EventAccumulator(str(tmp_path / "tb" / "rank0" / kind), size_guidance={"scalars": 0, "histograms": 0})
        events.Reload()
        return events

    histogram, second = read("wgrad").Histograms("vp0:layers.0.mlp.weight/histogram")
    value = histogram.histogram_value
    assert (list(value.bucket_limit), list(value.bucket)) == ([0.0, 1e-7], [1, 2**53]) and second.step == 1
    assert (value.min, value.max, value.num) == (-1.0, 1e-7, 2.0**53)
    heads = read("activation")
    assert sorted(heads.Tags()["scalars"]) == [
        f"vp0:layers.0:micro1/entropy/micro_batch,head {place}" for place in ("0,0", "0,1", "1,0", "1,1")
    ]
    assert [one.value for one in heads.Scalars("vp0:layers.0:micro1/entropy/micro_batch,head 1,1")] == [0.0, 1.0]
