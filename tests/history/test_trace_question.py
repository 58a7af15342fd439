"""`OpenedRuns.traces`: the pictures that ranks made come as they wrote them, by name, step and rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import sentinel
from sentinel.errors import ConfigError
from sentinel.history import trace_question
from sentinel.trace import trace_paths

from ..support.traces import TracingRank

LAST = 4


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without a history, two of whose ranks traced five steps."""
    run = tmp_path_factory.mktemp("runs") / "traced"
    ranks = [TracingRank(run, 0), TracingRank(run, 1)]
    for one in ranks:
        for step in range(LAST + 1):
            one.step(step)
    assert all(one.writer.thread.close(10.0) for one in ranks)
    return run


def test_pictures_come_as_they_were_written_by_name_step_and_rank(traced: Path) -> None:
    table = sentinel.open(traced).traces("layers.3", steps=(3, None), rank=1)

    assert [(one["step"], one["rank"], one["kind"], one["name"]) for one in table] == [
        (3, 1, "activation", "layers.3"), (4, 1, "activation", "layers.3"),
    ]  # fmt: skip
    [first, _] = table
    assert (first["run"], first["attempt"], first["tensor_shape"], first["shape"]) == ("traced", 0, [2, 16, 32], [1, 2, 2])
    assert (first["dtype"], first["compressor"], first["part"], first["micro_step"]) == ("float32", "tile", "", -1)
    for step, picture in zip((3, 4), table.arrays(), strict=True):
        expected = torch.full((1, 2, 2), 100.0 + step, dtype=torch.float64).numpy()
        expected[0, 0, 0], expected[0, 1, 1] = np.nan, -np.inf
        np.testing.assert_array_equal(picture, expected)


def test_all_are_there_in_the_order_of_step_and_rank_and_tokens_are_whole(traced: Path) -> None:
    run = sentinel.open(traced)

    assert [(one["step"], one["rank"]) for one in run.traces("layers.3")] == [
        (s, r) for s in range(LAST + 1) for r in (0, 1)
    ]
    assert set(run.traces("layers.*")["name"]) == {"layers.3", "layers.3.mlp.fc1"}
    [tokens] = run.traces(kind="tokens", steps=(2, 2), rank=0).arrays()
    np.testing.assert_array_equal(tokens, np.arange(32).reshape(2, 16))


def test_of_a_step_that_was_repeated_the_later_attempt_counts(tmp_path: Path) -> None:
    for attempt, name in ((0, "old"), (1, "new")):
        one = TracingRank(tmp_path / "run", 0, name, attempt)
        for step in range(attempt, 3 - attempt):
            one.step(step)
        assert one.writer.thread.close(10.0)
    table = sentinel.open(tmp_path / "run").traces(kind="activation")

    assert [(one["attempt"], one["step"], one["name"]) for one in table if "." not in one["name"]] == [
        (0, 0, "old"), (1, 1, "new"), (0, 2, "old"),
    ]  # fmt: skip


def test_what_is_not_there_is_an_error_that_names_what_is(traced: Path, tmp_path: Path) -> None:
    run = sentinel.open(traced)
    (tmp_path / "spool").mkdir()

    with pytest.raises(ConfigError, match=r'none is of a tensor "layers.33x"; nearest: "layers.3"'):
        run.traces("layers.33x")
    with pytest.raises(ConfigError, match=r'none is of kind "activatoin"; did you mean "activation"\?; there are:'):
        run.traces(kind="activatoin")
    with pytest.raises(ConfigError, match=r"5 steps from 0 to 4 of 2 ranks from 0 to 1, got steps \(9, None\) of rank 7"):
        run.traces(steps=(9, None), rank=7)
    with pytest.raises(ConfigError, match="rank must be a whole number or None, got 'x'"):
        run.traces(rank="x")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"no rank has traced anything; sentinel trace RUN .*TraceTensors"):
        sentinel.open(tmp_path).traces()


def test_an_answer_is_bounded_and_a_torn_file_is_told(traced: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = TracingRank(tmp_path / "run", 0)
    for step in range(3):
        one.step(step)
    assert one.writer.thread.close(10.0)
    torn = trace_paths(tmp_path / "run")[1].path
    torn.write_bytes(torn.read_bytes()[:-3])

    table = sentinel.open(tmp_path / "run").traces("layers.3")

    assert (
        table["step"] == [0, 2] and "1 of the files could not be read" in repr(table) and "step1.safetensors" in table.note
    )
    monkeypatch.setattr(trace_question, "MOST_BYTES", 2**20)
    assert len(sentinel.open(traced).traces("layers.3")) == 10
    monkeypatch.setattr(trace_question, "MOST_BYTES", 100)
    with pytest.raises(ConfigError, match="name fewer by name, steps or rank"):
        sentinel.open(traced).traces("layers.3")


def test_the_newest_picture_is_drawn(traced: Path) -> None:
    pytest.importorskip("matplotlib").use("Agg")

    axes = sentinel.open(traced).traces("layers.3").plot()

    [image] = axes.get_images()
    assert image.get_array().shape == (2, 2) and "step 4, rank 1" in axes.get_title()
    axes.figure.canvas.draw()
