"""Shards of random layouts, and who holds copies of which, against what one finds tensor by tensor."""

from __future__ import annotations

import random

import pytest

from sentinel.ingest.copies import is_empty
from sentinel.ingest.model_layout import ModelLayout
from sentinel.ingest.placing import WEIGHT_KINDS
from sentinel.messages import ChunkInfo, Descriptor, TensorInfo
from sentinel.place import Place
from sentinel.step_view import Holder, Shard

KINDS = ("param", "wgrad", "activation", "dgrad", "exp_avg", "router")
NAMES = ("a", "b.0.fc", "b.1.fc", "", ":logits")
PARTS = ("", "", "", "0:8", "8:16", "dp_shard=1,tp=0", "0:0")


def descriptors_of(rng: random.Random) -> dict[int, Descriptor]:
    """Return those of a run; ranks of one stage have one table, or as good as one."""
    sizes = {"dp": rng.randint(1, 3), "pp": rng.randint(1, 2), "tp": rng.randint(1, 2), "ep": rng.randint(1, 2)}
    world_size = sizes["dp"] * sizes["pp"] * sizes["tp"] * sizes["ep"]
    tables = [[tuple(tensors_of(rng)) for _ in range(2)] for _ in range(sizes["pp"])]
    chunks = [(ChunkInfo(vpp_stage=0, depth=stage, modules=("a", "b"), blocks=("b.0", "b.1")),) for stage in range(2)]
    found = {}
    for rank in range(world_size):
        at, coordinates = rank, {}
        for axis, size in sizes.items():
            at, coordinates[f"{axis}_rank"] = divmod(at, size)
        place = Place(
            rank=rank, world_size=world_size, **coordinates, **{f"{axis}_size": size for axis, size in sizes.items()}
        )
        tensors = tables[place.pp_rank][rng.random() < 0.2]
        found[rank] = Descriptor(
            version="0", place=place, chunks=chunks[place.pp_rank], tensors=tensors, row_fields=(), row_bytes=1
        )
    return found


def tensors_of(rng: random.Random) -> list[TensorInfo]:
    """Return a table of tensors."""
    return [
        TensorInfo(
            id=at, name=f"{rng.choice(NAMES)}.{rng.randrange(6)}", kind=rng.choice(KINDS), shape=(16,),
            dtype=rng.choice(("f32", "bf16")), part=rng.choice(PARTS),
            placements={
                axis: rng.choice(("shard", "replicate", "unknown", "partial"))
                for axis in ("dp", "tp", "ep", "pp") if rng.random() < 0.5
            },
        )
        for at in range(rng.randrange(1, 25))
    ]  # fmt: skip


def shard_of(tensor: TensorInfo, place: Place) -> Shard:
    """Return what tells a rank's shard of a tensor."""
    found: list[tuple[str, int | str]] = []
    for axis in ("dp", "tp", "cp", "ep", "pp"):
        is_cut = tensor.placements.get(axis) == "shard"
        if axis == "dp" and axis not in tensor.placements:
            is_cut = tensor.kind not in WEIGHT_KINDS
        if is_cut and place.size(axis) > 1 and not tensor.part:
            found.append((axis, place.coordinate(axis)))
    return (*found, ("part", tensor.part)) if tensor.part else tuple(found)


@pytest.mark.parametrize("seed", range(20))
def test_shards_and_their_holders_are_those_found_one_by_one(seed: int) -> None:
    descriptors = descriptors_of(random.Random(seed))
    layout = ModelLayout(descriptors)
    numbers: dict[tuple[int, Shard], int] = {}
    holders: dict[tuple[int, str], list[Holder]] = {}
    for rank, descriptor in descriptors.items():
        logical, copies = layout.table_of(rank), layout.copy_table_of(rank)
        for tensor in descriptor.tensors:
            index, shard = int(logical[tensor.id]), shard_of(tensor, descriptor.place)
            assert layout.tensors[index].kind == tensor.kind and rank in layout.tensors[index].ranks
            number = numbers.setdefault((index, shard), len(numbers))
            assert copies[tensor.id] == number, "numbered as they are first named"
            assert (layout.shards.shard(number), layout.shards.tensor_of[number]) == (shard, index)
            if tensor.kind in WEIGHT_KINDS and not is_empty(shard):
                holders.setdefault((number, tensor.dtype), []).append((rank, tensor.id))
    several = {key: tuple(held) for key, held in sorted(holders.items()) if len(held) > 1}
    found = layout.shards.replicas
    assert [(one.number, one.holders) for one in found] == [(number, held) for (number, _), held in several.items()]
    assert {number for number in range(layout.num_copies) if layout.is_replicated[number]} == {one for one, _ in several}
    assert layout.replicated == {one.index for one in found}
    for number in range(layout.num_copies):
        assert layout.shards.replicas_of([number])[number] == [one for one in found if one.number == number]


def test_something_was_held_against() -> None:
    layouts = [ModelLayout(descriptors_of(random.Random(seed))) for seed in range(20)]
    assert sum(len(one.shards.replicas) for one in layouts) > 50
    assert sum(len(one.added_copies) for one in layouts) > 0
