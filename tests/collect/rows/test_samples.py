"""Sample ids: taken as they come out of data loaders, bounded, counted where they are cut."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

import sentinel
from sentinel.collect.rows.samples import MAX_CHARS, MAX_IDS, Samples
from sentinel.collect.rows.scalars import Scalars
from sentinel.messages import EndStep
from sentinel.wire.frame import encode_message

from ...support.nets import TinyModel, loss_of
from ...support.spools import Said


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        ([3, "a:7"], (3, "a:7")),
        (np.array([[1, 2], [3, 4]]), (1, 2, 3, 4)),
        (torch.tensor([5, 6]), (5, 6)),
        ([torch.tensor(8), np.int64(9)], (8, 9)),
        (7, (7,)),
        ("only", ("only",)),
        ([2**70], (str(2**70),)),
        (["\ud800"], ("\\ud800",)),
        (None, ()),
    ],
)
def test_ids_are_integers_or_strings(given: object, ids: tuple[object, ...]) -> None:
    samples = Samples()
    samples.note(given)

    taken, num_cut = samples.take()

    assert (taken, num_cut) == (ids, 0)
    end = EndStep(step=1, num_rows=0, num_calls=0, samples=taken)
    assert msgspec.msgpack.decode(encode_message(end), type=EndStep).samples == ids


@pytest.mark.parametrize(
    "given", [[1.5], torch.tensor([1.5]), [True], [object()], ["x" * 300], torch.empty(1, device="meta")]
)
def test_what_is_no_id_is_refused(given: object) -> None:
    with pytest.raises(ValueError, match="sample_ids"):
        Samples().note(given)


def test_calls_of_one_step_add_up_and_steps_do_not() -> None:
    scalars = Scalars()
    scalars.note("sample_ids", [1])
    scalars.note("sample_ids", [2])
    scalars.note("loss", 3.0)

    assert scalars.samples.take() == ((1, 2), 0)
    assert set(scalars.take()) == {"loss"}
    assert scalars.samples.take() == ((), 0)


def test_room_is_bounded_and_what_is_cut_is_counted() -> None:
    many, long = Samples(), Samples()
    many.note(torch.arange(MAX_IDS + 5))
    many.note([1, 2])
    long.note(["y" * 200] * (MAX_CHARS // 200 + 3))

    ids, num_cut = many.take()
    assert (len(ids), num_cut) == (MAX_IDS, 7)
    ids, num_cut = long.take()
    assert (sum(map(len, ids)) <= MAX_CHARS, num_cut) == (True, 3)  # type: ignore[arg-type]


def test_a_rank_of_before_has_no_samples() -> None:
    old = msgspec.msgpack.encode({"step": 1, "num_rows": 0, "num_calls": 0})

    assert msgspec.msgpack.decode(old, type=EndStep).samples == ()


def test_ids_travel_with_their_step_and_a_refusal_harms_nothing(run: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = sentinel.attach(model, optimizer, {"kinds": []})
    for step in range(3):
        for micro_batch in range(2):
            loss_of(model, step).backward()
            monitor.log(sample_ids=[10 * step + micro_batch, f"s{step}"] if step != 1 else [1.5], loss=1.0)
        optimizer.step()
        optimizer.zero_grad()
    monitor.detach()

    said = Said(run)

    assert [end.samples for end in said.ends] == [(0, "s0", 1, "s0"), (), (20, "s2", 21, "s2")]
    assert [end.scalars["loss"] for end in said.ends] == [1.0] * 3
    assert {health.code for health in said.health} == {"hook_failed"} and "sample_ids" in said.health[0].message
