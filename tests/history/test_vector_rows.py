"""Vectors in a history: with the names of their tensors, once each, and of old steps some."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sentinel.history.config import HistoryConfig
from sentinel.history.vector_rows import MOST_BYTES, MeasuredVector, UnjudgedVectors
from sentinel.messages import Vector, Vectors

from ..support.merged_steps import FlatLayout, merged_step
from ..support.waiting import wait_for
from .test_writer import answer, writing


class NamedLayout(FlatLayout):
    """Whose ranks know its tensors by their index."""

    def logical_of(self, rank: int, tensor_ids: np.ndarray) -> np.ndarray:
        return np.where(tensor_ids < len(self.tensors), tensor_ids, -1).astype(np.int32)


LAYOUT = NamedLayout(3)


def histogram(tensor: int, *counts: int) -> Vector:
    return Vector(
        tensor=tensor, statistic="histogram", axis="bin", dtype="<i8", shape=(len(counts),),
        values=np.array(counts, "<i8").tobytes(), edges=tuple(float(one) for one in range(len(counts) + 1)),
    )  # fmt: skip


def test_of_a_rank_that_trained_a_step_twice_the_newer_process_counts() -> None:
    waiting = UnjudgedVectors()
    old, new = histogram(0, 1), histogram(0, 2)
    waiting.receive(5, 0, b"old", Vectors(items=(old, old)))
    waiting.receive(5, 0, b"new", Vectors(items=(new,)))
    waiting.receive(5, 1, b"other", Vectors(items=(old,)))
    step = merged_step(LAYOUT, 6, step=5)

    assert waiting.take(step) == [MeasuredVector(step, 0, new), MeasuredVector(step, 1, old)]
    assert waiting.take(step) == []


def test_what_waits_for_a_judgement_is_bounded_and_the_oldest_goes() -> None:
    waiting = UnjudgedVectors()
    large = histogram(0, *range(2**20))
    for step in range(20):
        waiting.receive(step, 0, b"one", Vectors(items=(large,)))

    there = [at for at in range(20) if waiting.take(merged_step(LAYOUT, at + 1, step=at))]
    assert there == list(range(20 - MOST_BYTES // (2**23 + 200), 20))


def test_what_is_no_vector_of_a_known_tensor_is_left_out(tmp_path: Path) -> None:
    step = merged_step(LAYOUT, 1)
    with writing(tmp_path) as one:
        one.take(step, [MeasuredVector(step, 0, histogram(9, 1)), MeasuredVector(step, 1, histogram(2, 3, 4))])

    assert answer(tmp_path, "SELECT name, rank, values FROM vectors") == [("layers.2.weight", 1, [3.0, 4.0])]


@pytest.mark.slow
def test_of_old_steps_one_in_256_keeps_its_vectors(tmp_path: Path) -> None:
    with writing(tmp_path, HistoryConfig(enabled=True, flush_s=0.05, full_steps=300)) as one:
        for seq in range(1, 1001):
            step = merged_step(LAYOUT, seq)
            one.take(step, [MeasuredVector(step, 0, histogram(0, seq))] if seq % 3 == 0 else [])
            if seq % 20 == 0:
                one.flush()
                wait_for(lambda seq=seq: one.decision >= seq, interval_s=0.001)

    steps = [step for (step,) in answer(tmp_path, "SELECT step FROM vectors ORDER BY step")]
    old = [step for step in steps if step < 480]
    assert len(old) <= 4 and old[0] == 2 and len({one // 256 for one in old}) == 2
    assert [one for one in steps if one >= 700] == [one for one in range(700, 1000) if one % 3 == 2]
