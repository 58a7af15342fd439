"""What a rank holds of a parameter, and how it is placed: asked for each parameter at each step."""

from __future__ import annotations

import torch
from torch import nn

from sentinel.collect.hooks.sites import BORDER
from sentinel.collect.parallel.parameter_storage import TorchStorage
from sentinel.collect.rows.tensor_table import TensorTable
from sentinel.place import Place
from sentinel.record import Flag, Kind


def test_plain_parameters_follow_the_rank_to_another_place() -> None:
    param = nn.Parameter(torch.ones(3, 2))
    param.grad = torch.ones(3, 2)
    storage = TorchStorage(Place())

    alone = storage.param(param), storage.wgrad(param)
    storage.place = Place(world_size=2, dp_size=2)
    copied = storage.param(param), storage.wgrad(param)
    storage.place = Place(world_size=2, tp_size=2)
    split = storage.param(param), storage.wgrad(param)

    assert [held.placements for held in (*alone, *copied, *split) if held is not None] == [
        {}, {}, {"dp": "replicate"}, {"dp": "replicate"}, {"tp": "unknown"}, {"tp": "unknown"},
    ]  # fmt: skip


def test_plain_parameters_beside_dtensors_are_copies_from_the_next_look_on() -> None:
    class Placed(torch.Tensor):
        """What says itself how it is placed, as a DTensor does."""

        @property
        def device_mesh(self) -> object:
            return type("Mesh", (), {"mesh_dim_names": ("tp",), "get_coordinate": lambda self: (0,)})()

        @property
        def placements(self) -> tuple[object, ...]:
            shard = type("Shard", (), {"is_partial": lambda self: False, "is_shard": lambda self: True})
            return (shard(),)

    plain, placed = nn.Parameter(torch.ones(3)), torch.ones(3).as_subclass(Placed)
    storage = TorchStorage(Place(world_size=2, tp_size=2))

    before = storage.param(plain)
    storage.look([plain, placed])
    after = storage.param(plain)

    assert before is not None
    assert after is not None
    assert (before.placements, after.placements) == ({"tp": "unknown"}, {"tp": "replicate"})


def test_shape_and_type_of_a_weight_are_described_again_when_they_change() -> None:
    table = TensorTable()
    entry = table.entry(0, "head.weight", Kind.PARAM)
    storage = TorchStorage(Place())
    reported = []
    for tensor in (torch.ones(3, 2), torch.ones(3, 2, dtype=torch.bfloat16), torch.ones(4, 2)):
        held = storage.param(nn.Parameter(tensor))
        assert held is not None
        table.describe(entry, held.tensor, held.placements, held.part, held.shape)
        reported.append((entry.shape, entry.dtype))

    assert reported == [((3, 2), "float32"), ((3, 2), "bfloat16"), ((4, 2), "float32")]


def test_flags_of_a_tensor_are_plain_ints() -> None:
    table = TensorTable()
    entry = table.entry(0, "head", Kind.ACTIVATION)
    table.describe(entry, torch.ones(2), {"tp": "unknown"})
    entry.flags |= BORDER

    assert type(entry.flags) is int
    assert entry.flags == Flag.BORDER | Flag.PER_RANK
