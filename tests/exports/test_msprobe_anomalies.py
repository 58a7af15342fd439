"""Anomalies in msProbe's words: tags, keys and messages."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sentinel.anomaly import Anomaly
from sentinel.exports.msprobe_anomalies import MsprobeAnomalies

from ..support.anomalies import an_excursion


def of_stage_2(**given: Any) -> Anomaly:
    place = {"rank": 3, "micro_step": 1, "pp_stage": 2, "vpp_stage": 1, "call_id": 9}
    values = {"value": 1.5, "baseline": 0.5, "score": None}
    name, kind = given.pop("tag_name", "layers.0.fc"), given.pop("kind", "activation")
    return an_excursion(kind, name, 7, **(place | values | given))


def entries(tmp_path: Path, *anomalies: Anomaly, **options: Any) -> dict[str, dict[str, Any]]:
    files = MsprobeAnomalies(tmp_path, **options)
    for one in anomalies:
        files.add(one)
    files.close()
    return {key: one for path in sorted(tmp_path.rglob("*.json")) for key, one in json.loads(path.read_text()).items()}


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({}, "1:layers.0.fc.output:1/rank3/actv_step_7_call_9"),
        ({"kind": "activation_in", "tag_name": "layers.0.fc:2"}, "1:layers.0.fc.input_2:1/rank3/actv_step_7_call_9"),
        ({"kind": "dgrad", "micro_step": None}, "1:layers.0.fc.output:0/rank3/actv_grad_step_7_call_9"),
        ({"tag_name": "model"}, "1:.output:1/rank3/actv_step_7_call_9"),
        ({"tag_name": "stage2:1"}, "1:.output_1:1/rank3/actv_step_7_call_9"),
        ({"tag_name": "vision.model"}, "1:vision.model.output:1/rank3/actv_step_7_call_9"),
        ({"kind": "wgrad", "tag_name": "w"}, "1:w/rank3/post_grad_step_7_call_9"),
        ({"kind": "wgrad_unreduced", "tag_name": "w", "call_id": None}, "1:w/rank3/acc_grad_step_7_call_-1"),
        ({"kind": "exp_avg_sq", "tag_name": "w"}, "1:w/rank3/exp_avg_sq_step_8_call_9"),
        ({"rank": None, "ranks": (4, 2)}, "1:layers.0.fc.output:1/rank2/actv_step_7_call_9"),
    ],
)
def test_keys(tmp_path: Path, given: dict[str, Any], key: str) -> None:
    assert list(entries(tmp_path, of_stage_2(**given))) == [key]


def test_names_are_those_of_the_ranks_csv_files(tmp_path: Path) -> None:
    names = {(3, "activation", "layers.4.fc"): "layers.0.fc.output_0", (3, "param", "w"): "w"}

    found = entries(tmp_path, of_stage_2(tag_name="layers.4.fc"), of_stage_2(tag_name="w", kind="param"), names=names)

    assert list(found) == [
        "1:layers.0.fc.output_0:1/rank3/actv_step_7_call_9", "1:w/rank3/param_origin_step_7_call_9",
    ]  # fmt: skip


@pytest.mark.parametrize("names", [None, {(3, "activation", "layers.0.fc"): "layers.0.fc.output"}])
@pytest.mark.parametrize(("kind", "name"), [("health", "rank 3"), ("scalar", "loss"), ("update", "w"), ("comm", "a@b")])
def test_what_msprobe_has_no_tensor_for_is_not_written(
    kind: str, name: str, names: dict[tuple[int, str, str], str] | None, tmp_path: Path
) -> None:
    assert not MsprobeAnomalies(tmp_path, names).add(of_stage_2(kind=kind, tag_name=name))
    assert not list(tmp_path.rglob("*.json"))


def test_defect_1_three_alarms_on_one_tensor_are_three_records(tmp_path: Path) -> None:
    found = entries(tmp_path, *(of_stage_2(statistic=statistic) for statistic in ("min", "max", "norm")))

    assert [key.rpartition("call_")[2] for key in found] == ["9", "9_2", "9_3"]
    assert [re.findall(r"'(\w+)'\)", one["message"]) for one in found.values()] == [["min"], ["max"], ["norm"]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "('{tag}', 'norm') at step 7, current value 1.5, history mean 0.5."),
        ({"value": None, "value_text": "-inf"}, "('{tag}', 'norm') at step 7, current value -inf, history mean 0.5."),
        (
            {"statistic": "nans", "value": 3.0, "baseline": None},
            "('{tag}', 'norm') at step 7, current value nan, history mean nan.",
        ),
    ],
)
def test_messages_are_in_its_words(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    (found,) = entries(tmp_path, of_stage_2(**given)).values()

    expected = "Rule AnomalyTurbulence reports anomaly signal in " + message.format(tag=found["tag_name"])
    assert found["message"] == expected
