"""The value of each expert, or head, over steps: shares of all ranks' tokens, idle experts, and one rank's heads."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sentinel.daemon.history_api import HAS_NAN, NOTHING, HistoryQueries, HistoryRequest
from sentinel.errors import ConfigError
from sentinel.exports.series import MergedStep
from sentinel.history.vector_rows import MeasuredVector
from sentinel.messages import Vector
from sentinel.step_view import LogicalTensor

from ..support.merged_steps import merged_step
from .test_vector_rows import NamedLayout, histogram
from .test_writer import writing

ROUTER, ATTENTION = "layers.1.mlp.router:load", "layers.0.attn:entropy"


class ExpertLayout(NamedLayout):
    """A router's load and a module's attention, beside a weight."""

    def __init__(self) -> None:
        super().__init__(1)
        self.tensors += [
            LogicalTensor(
                index=at, name=name, kind=kind, key=f"{name}/{kind}", depth=0, site_pos=at, pp_stage=0, vpp_stage=0,
                ranks=(0, 1), num_elements=1, dtype="float32",
            )
            for at, (name, kind) in enumerate([(ROUTER, "router"), (ATTENTION, "attention")], 1)
        ]  # fmt: skip


LAYOUT = ExpertLayout()


def vector(tensor: int, statistic: str, axis: str, values: Sequence[float], micro_step: int = -1) -> Vector:
    packed = np.array(values, "<f4")
    return Vector(
        tensor=tensor, statistic=statistic, axis=axis, micro_step=micro_step, shape=packed.shape, values=packed.tobytes()
    )


def measured(step: MergedStep) -> list[MeasuredVector]:
    """Two ranks route 4 experts, of which the last gets nothing from step 20 on; two heads in two micro-steps each."""
    last = 0 if step.step >= 20 else 10
    entropy = math.nan if step.step == 7 else 1.0
    return [
        MeasuredVector(step, 0, vector(1, "load", "expert", [30, 10, 0, last])),
        MeasuredVector(step, 1, vector(1, "load", "expert", [10, 10, 20, 0])),
        *(
            MeasuredVector(step, rank, vector(2, "entropy", "head", [entropy, 2.0 + micro_step + rank], micro_step))
            for rank in (0, 1)
            for micro_step in (0, 1)
        ),
        MeasuredVector(step, 0, histogram(0, 1, 2)),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("run")
    with writing(made) as one:
        for seq in range(1, 41):
            step = merged_step(LAYOUT, seq)
            one.take(step, measured(step) if step.step % 2 == 0 or step.step == 7 else [])
    return made


def told(run_dir: Path, **parameters: str) -> dict[str, Any]:
    return HistoryQueries().vectors(run_dir, HistoryRequest.parse([("run", "run"), *parameters.items()]))


def matrix(answer: dict[str, Any], what: str = "values") -> np.ndarray:
    dtype = "<f4" if what == "values" else np.uint8
    return np.frombuffer(base64.b64decode(answer[what]), dtype).reshape(answer["num_values"], answer["num_columns"])


def test_the_load_of_experts_is_the_share_of_the_tokens_of_all_ranks(run_dir: Path) -> None:
    found = told(run_dir, kind="router")

    assert [(one["name"], one["statistic"], one["ranks"]) for one in found["choices"]] == [(ROUTER, "load", (0, 1))]
    assert (found["name"], found["axis"], found["rank"], found["num_values"]) == (ROUTER, "expert", None, 4)
    np.testing.assert_allclose(matrix(found)[:, 0], np.array([40, 20, 20, 10]) / 90, rtol=1e-6)
    np.testing.assert_allclose(matrix(found)[:, -1], np.array([40, 20, 20, 0]) / 80, rtol=1e-6)
    shares = np.array([40, 20, 20, 10]) / 90
    assert found["balance"]["entropy"][0] == pytest.approx(-(shares * np.log(shares)).sum() / math.log(4))
    assert found["balance"]["max_over_mean"][0] == pytest.approx(4 * 40 / 90)
    assert [found["balance"]["idle"][at] for at in (0, -1)] == [0, 1]


def test_an_expert_that_gets_no_more_tokens_is_told_with_the_step_of_its_last(run_dir: Path) -> None:
    of_values = told(run_dir, kind="router")["of_values"]

    assert [one["last_step_above_0"] for one in of_values] == [38, 38, 38, 18]
    assert told(run_dir, kind="router", rank="1")["of_values"][3]["last_step_above_0"] == -1
    assert of_values[3]["last"] == 0.0 and of_values[0]["mean"] > 0.4


def test_a_column_is_as_wide_as_what_was_measured_allows_so_that_no_gaps_are_drawn(run_dir: Path) -> None:
    found = told(run_dir, kind="router", columns="1000")
    few = told(run_dir, kind="router", columns="5")

    assert found["width"] == 2 and not (matrix(found, "states") == NOTHING).any()
    assert few["num_columns"] == 5 and few["width"] == 8
    part = told(run_dir, kind="router", **{"from": "10", "to": "19"})
    assert (part["first_step"], part["last_step"]) == (10, 19) and part["balance"]["idle"] == [0] * 5


def test_heads_are_those_of_one_rank_and_what_is_not_finite_is_marked(run_dir: Path) -> None:
    found, other = told(run_dir, kind="attention"), told(run_dir, kind="attention", rank="1")

    assert (found["rank"], found["num_values"], found["balance"]) == (0, 2, None)
    assert matrix(found)[1, 0] == 2.5 and matrix(other)[1, 0] == 3.5, "the mean over micro-steps, of this rank"
    assert (found["of_values"][1]["least"], found["of_values"][1]["greatest"]) == (2.0, 3.0)
    assert (matrix(found, "states")[0] == HAS_NAN).sum() == 1 and found["of_values"][0]["num_bad"] == 2


def test_where_nothing_was_recorded_there_is_no_choice(run_dir: Path, tmp_path: Path) -> None:
    assert told(run_dir, kind="wgrad") == {"run": "run", "kind": "wgrad", "choices": []}
    with writing(tmp_path) as one:
        one.take(merged_step(LAYOUT, 1))
    assert told(tmp_path, kind="router")["choices"] == []


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"kind": "router", "rank": "9"}, "known: 0, 1"),
        ({"kind": "router", "statistic": "lode"}, "expected one of load"),
        ({"kind": "attention", "series": "1"}, "known: "),
        ({"kind": "router", "rank": "-1"}, "whole number"),
    ],
)
def test_a_wrong_request_is_told_what_there_is(run_dir: Path, parameters: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        told(run_dir, **parameters)
