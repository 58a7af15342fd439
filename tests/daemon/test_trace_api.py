"""Traces over HTTP: what ranks wrote comes back with every bit, bounded, and only to who has a token."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from sentinel import trace
from sentinel.collect.probes.trace_writer import StepTrace, TraceWriter
from sentinel.daemon import trace_api
from sentinel.daemon.http.tokens import load_tokens
from sentinel.daemon.trace_api import TraceQueries, TraceRequest
from sentinel.errors import ConfigError
from sentinel.trace import Compressor, TracedStep, TracedTensor, TraceHead, trace_paths

from ..support.serving import small_run
from .test_daemon import daemon, url

EVIL = "<img src=x>\x1b[2J"


def write(run_dir: Path, *, ranks: int = 2, steps: int = 5, attempt: int = 0, name: str = "layers.0") -> None:
    """Have ranks trace one tensor whose first number is NaN, and whose others are 1000 * rank + step."""
    for rank in range(ranks):
        writer = TraceWriter(run_dir, 2**20, lambda *said: pytest.fail(str(said)))
        for step in range(steps):
            picture = torch.full((2, 3), 1000.0 * rank + step)
            picture[0, 0] = torch.nan
            about = TracedTensor(
                kind="activation",
                name=name,
                shape=(4, 96),
                dtype="bfloat16",
                compressor=Compressor(name="top_k"),
                parts=("indices",),
            )
            head = TraceHead(
                run="r", attempt=attempt, rank=rank, step=step, time=5.0, tensors={"key": about}, left_out={EVIL: EVIL}
            )
            tensors = {"key": picture, "key:indices": torch.arange(6, dtype=torch.int32).reshape(2, 3)}
            writer.thread.submit(StepTrace(head, tensors, [], 48))
        assert writer.thread.close(10.0)


def numbers(picture: dict[str, Any]) -> np.ndarray:
    dtype = {"F32": "<f4", "I32": "<i4", "I64": "<i8"}[picture["dtype"]]
    return np.frombuffer(base64.b64decode(picture["data"]), dtype).reshape(picture["shape"])


def traced(run_dir: Path, request: TraceRequest) -> dict[str, Any]:
    return TraceQueries().traced(run_dir, request)


def asked(**query: str) -> TraceRequest:
    return TraceRequest.parse([("run", "r"), *query.items()])


def test_every_bit_comes_back(tmp_path: Path) -> None:
    write(tmp_path)

    answer = traced(tmp_path, asked())

    assert [(one["rank"], one["step"]) for one in answer["steps"]] == [(0, 4), (1, 4)]
    assert answer["ranks"] == [0, 1] and answer["attempt"] == 0 and not answer["has_more"]
    tensor = answer["steps"][1]["tensors"][0]
    assert (tensor["kind"], tensor["name"], tensor["shape"], tensor["dtype"]) == (
        "activation",
        "layers.0",
        (4, 96),
        "bfloat16",
    )
    expected = np.full((2, 3), 1004.0, "f4")
    expected[0, 0] = np.nan
    assert np.array_equal(numbers(tensor["pictures"][""]), expected, equal_nan=True)
    assert np.array_equal(numbers(tensor["pictures"]["indices"]).ravel(), np.arange(6))


def test_steps_behind_one_of_a_rank_and_of_the_newest_attempt(tmp_path: Path) -> None:
    write(tmp_path)
    write(tmp_path, attempt=1, steps=3, name="other")

    assert [one["step"] for one in traced(tmp_path, asked(attempt="0", rank="1", after="2"))["steps"]] == [3, 4]
    newest = traced(tmp_path, asked(after="-1"))
    assert newest["attempt"] == 1
    assert [(one["step"], one["rank"]) for one in newest["steps"]] == [(s, r) for s in range(3) for r in range(2)]
    assert all(not one["tensors"] for one in traced(tmp_path, asked(name="dgrad"))["steps"])


def test_an_answer_is_bounded_and_says_that_there_is_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    monkeypatch.setattr(trace_api, "MAX_STEPS", 3)
    answer = traced(tmp_path, asked(after="-1"))
    assert len(answer["steps"]) == 3 and answer["has_more"]
    monkeypatch.setattr(trace_api, "MAX_BYTES", 1)
    answer = traced(tmp_path, asked(after="-1"))
    assert len(answer["steps"]) == 1 and answer["has_more"]


def test_one_rank_is_read_alone_and_the_others_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, ranks=3)
    read: list[str] = []
    read_trace = trace.read_trace

    def counted(path: Path) -> TracedStep:
        read.append(path.parent.name)
        return read_trace(path)

    monkeypatch.setattr(trace, "read_trace", counted)

    answer = traced(tmp_path, asked(rank="1", after="2"))

    assert answer["ranks"] == [0, 1, 2] and [one["step"] for one in answer["steps"]] == [3, 4]
    assert set(read) == {"rank1"}
    assert traced(tmp_path, asked(rank="9"))["steps"] == []


def test_some_ranks_are_chosen_and_how_many_are_not_shown_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, ranks=5, steps=1)
    monkeypatch.setattr(trace_api, "MOST_SHOWN", 3)

    def told(**query: str) -> tuple[list[int], int]:
        answer = traced(tmp_path, asked(**query))
        assert answer["ranks"] == [0, 1, 2, 3, 4]
        return [one["rank"] for one in answer["steps"]], answer["num_ranks_not_shown"]

    assert told() == ([0, 1, 2], 2)
    assert told(rank="3-4,1") == ([1, 3, 4], 2)
    assert told(rank="4") == ([4], 4)
    with pytest.raises(ConfigError, match='rank: expected at most 3 ranks, got more with "1-4"'):
        asked(rank="1-4")


def test_what_each_rank_was_seen_of_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, ranks=3)
    request = msgspec.structs.replace(asked(after="1"), shown={0: 4, 2: 3})

    assert [(one["step"], one["rank"]) for one in traced(tmp_path, request)["steps"]] == [(2, 1), (3, 1), (4, 1), (4, 2)]


def test_a_torn_file_is_told_and_the_others_are_shown(tmp_path: Path) -> None:
    write(tmp_path, ranks=1)
    path = trace_paths(tmp_path)[1].path
    path.write_bytes(path.read_bytes()[:-3])

    answer = traced(tmp_path, asked(after="-1"))

    assert [one["step"] for one in answer["steps"]] == [0, 2, 3, 4]
    assert len(answer["problems"]) == 1 and "step1.safetensors: torn" in answer["problems"][0]


@pytest.mark.parametrize("query", [[("run", "r"), ("run", "s")], [("rank", "0")], [("run", "r"), ("after", "x")],
                                   [("run", "r"), ("rank", "-1")], [("run", "r"), ("what", "1")]])  # fmt: skip
def test_nonsense_is_refused(query: list[tuple[str, str]]) -> None:
    with pytest.raises((ValueError, ConfigError), match=r"."):
        TraceRequest.parse(query)


def test_nothing_traced_says_what_to_do(tmp_path: Path) -> None:
    answer = traced(tmp_path, asked())

    assert answer["steps"] == [] and answer["attempt"] is None and "allow_commands" in answer["hint"]


@pytest.mark.server
@pytest.mark.slow
def test_a_token_is_needed_even_where_reads_are_open(tmp_path: Path) -> None:
    run = small_run(tmp_path / "r")
    run.write(3)
    write(tmp_path / "r", ranks=1)
    with daemon(tmp_path):
        path = f"{url(tmp_path)}/api/v1/traces?run=r"
        tokens = load_tokens(tmp_path / ".daemon")
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(path, timeout=60)
        assert refused.value.code == 401
        request = urllib.request.Request(path, headers={"Authorization": f"Bearer {tokens.read}"})
        answer = json.load(urllib.request.urlopen(request, timeout=60))
        assert answer["steps"][0]["left_out"] == {EVIL: EVIL}
