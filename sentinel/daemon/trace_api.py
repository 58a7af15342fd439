"""Answers questions for traces over HTTP: what the ranks of a run have traced, bounded in steps and bytes."""

from __future__ import annotations

import base64
import heapq
import itertools
import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sentinel.rank_list import ranks_in
from sentinel.trace import TracedStep, TracePath, TraceRings, read_traces

MAX_STEPS = 200
"""Most files in one answer."""
MOST_SHOWN = 200
"""Most ranks whose traces are shown at a time: one answer has a step of each."""
MOST_RUNS = 8
"""Runs whose lists of traces are remembered; of 2,048 ranks with 100 steps each one takes some 10 MB."""
MAX_BYTES = 8 << 20
"""Bytes of pictures past which an answer has no further step."""
NOTHING_TRACED = (
    "nothing is traced: order it by POST /api/v1/control with the action trace, or by `sentinel trace`; the trainer's "
    "config has to name TraceTensors in allow_commands"
)
_DTYPES = {"f4": "F32", "i4": "I32", "i8": "I64"}


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is asked for. Built from query parameters."""

    run: str
    attempt: int | None = None
    """None: the newest that traced anything."""
    ranks: tuple[int, ...] | None = None
    """Rising; None: the first `MOST_SHOWN` that trace."""
    after: int | None = None
    """Steps behind this one, the oldest first; None: the newest step of each rank."""
    shown: dict[int, int] = {}
    """Rank -> its newest step that is known already, where that is not `after`."""
    name: str = ""
    """Only tensors whose `kind/name` begins so."""

    @classmethod
    def parse(cls, query: Sequence[tuple[str, str]]) -> TraceRequest:
        """Return the request of a query; ValueError for what it does not know, or gives twice.

        `rank` is one or several, `0,8-15`: ConfigError where these are none, or too many.
        """
        given = dict(query)
        if len(given) != len(query):
            raise ValueError("each parameter may be given once")
        plain: dict[str, Any] = dict(given)
        if "ranks" in plain:
            raise ValueError('unknown parameter "ranks"; did you mean "rank"?')
        if "rank" in plain:
            plain["ranks"] = ranks_in(plain.pop("rank"), "rank", MOST_SHOWN)
        for name in ("attempt", "after"):
            if name in plain:
                text = plain[name]
                digits = text.removeprefix("-") if name == "after" else text
                if not (digits.isascii() and digits.isdigit()) or len(digits) > 18:
                    raise ValueError(f'{name} must be a whole number, got "{text[:40]}"')
                plain[name] = int(text)
        return msgspec.convert(plain, cls)


class TraceQueries:
    """Answers requests, from any thread. The folders of the runs that were asked for last are listed when they change."""

    def __init__(self) -> None:
        self._rings: dict[Path, TraceRings] = {}
        self._listing = threading.Lock()

    def traced(self, run_dir: Path, request: TraceRequest) -> dict[str, Any]:
        """Return {"attempt", "ranks", "num_ranks_not_shown", "steps": [...], "problems": [...], "has_more", "hint"}.

        ranks: all that trace; of `num_ranks_not_shown` of them nothing is in the answer, whatever they traced. A step is
        {"step", "rank", "time", "num_dropped", "left_out", "tensors": [...]}; a tensor has the fields of
        `trace.TracedTensor`, its `key`, and `pictures`: word -> {"shape", "dtype": F32, I32 or I64, "data": base64 of
        little-endian numbers}. The word of the picture itself is empty. hint: what to do where a run has traced nothing; it
        has no attempt then.
        """
        attempt, ranks, num_shown, chosen = self._chosen(run_dir, request)
        if attempt is None:
            return {
                "attempt": None, "ranks": [], "num_ranks_not_shown": 0, "steps": [], "problems": [], "has_more": False,
                "hint": NOTHING_TRACED,
            }  # fmt: skip
        problems: list[str] = []
        steps: list[dict[str, Any]] = []
        num_bytes = 0
        has_more = False
        for step in read_traces(chosen, problems):
            if len(steps) >= MAX_STEPS or num_bytes >= MAX_BYTES:
                has_more = True
                break
            shown = _shown(step, request.name)
            num_bytes += sum(len(picture["data"]) for one in shown["tensors"] for picture in one["pictures"].values())
            steps.append(shown)
        return {
            "attempt": attempt, "ranks": ranks, "num_ranks_not_shown": len(ranks) - num_shown, "steps": steps,
            "problems": problems[:20], "has_more": has_more, "hint": "",
        }  # fmt: skip

    def _chosen(self, run_dir: Path, request: TraceRequest) -> tuple[int | None, list[int], int, Iterator[TracePath]]:
        """Return (attempt, the ranks that traced in it, how many of them are shown, and what is asked for of these in the
        order of step and rank)."""
        with self._listing:
            rings = self._rings.pop(run_dir, None) or TraceRings(run_dir)
            self._rings[run_dir] = rings
            while len(self._rings) > MOST_RUNS:
                del self._rings[next(iter(self._rings))]
            newest = rings.newest_attempt()
            attempt = newest if newest is None or request.attempt is None else request.attempt
            if attempt is None:
                return None, [], 0, iter(())
            ranks = rings.ranks(attempt)
            asked = None if request.ranks is None else frozenset(request.ranks)
            wanted = [rank for rank in ranks if asked is None or rank in asked][:MOST_SHOWN]
            steps = {rank: found for rank in wanted if (found := rings.steps(attempt, rank))}
        if request.after is None:
            return attempt, list(ranks), len(wanted), (rings.path(attempt, rank, found[-1]) for rank, found in steps.items())
        behind = {rank: bisect_right(found, request.shown.get(rank, request.after)) for rank, found in steps.items()}
        # Few of them are shown: the others are not put in order.
        merged = heapq.merge(*(zip(found[behind[rank] :], itertools.repeat(rank)) for rank, found in steps.items()))
        return attempt, list(ranks), len(wanted), (rings.path(attempt, rank, step) for step, rank in merged)


def numbers_of(picture: Mapping[str, Any]) -> np.ndarray:
    """Return the numbers of a picture of an answer."""
    dtype = np.dtype({name: word for word, name in _DTYPES.items()}[picture["dtype"]]).newbyteorder("<")
    return np.frombuffer(base64.b64decode(picture["data"]), dtype).reshape(picture["shape"])


def _shown(step: TracedStep, begins: str) -> dict[str, Any]:
    head = step.head
    tensors = [
        {
            "key": key,
            **msgspec.to_builtins(one),
            "pictures": {
                word: _picture(step.tensors[name])
                for word in ("", *one.parts)
                if (name := f"{key}:{word}" if word else key) in step.tensors
            },
        }
        for key, one in head.tensors.items()
        if f"{one.kind}/{one.name}".startswith(begins)
    ]
    return {
        "step": head.step, "rank": head.rank, "time": head.time, "num_dropped": head.num_dropped,
        "left_out": dict(list(head.left_out.items())[:20]), "tensors": tensors,
    }  # fmt: skip


def _picture(values: np.ndarray) -> dict[str, Any]:
    """Return numbers as JSON can carry them: NaN and infinities too."""
    dtype = _DTYPES[values.dtype.str.lstrip("<=|")]
    return {"shape": list(values.shape), "dtype": dtype, "data": base64.b64encode(values.tobytes()).decode()}
