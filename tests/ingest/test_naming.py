from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from sentinel.ingest.merge import Layout
from sentinel.ingest.naming import make_names, segment_of
from sentinel.messages import ChunkInfo, Descriptor, TensorInfo
from sentinel.place import Place


def rank(
    number: int, blocks: Sequence[str], names: Sequence[str] = (), *, pp: int = 2, **more: object
) -> tuple[int, Descriptor]:
    """One pipeline rank that holds these blocks, and parameters of these names besides theirs."""
    params = [*names, *(f"{block}.weight" for block in blocks)]
    descriptor = Descriptor(
        version="0",
        place=Place(rank=number, world_size=pp, pp_rank=number, pp_size=pp),
        chunks=(
            ChunkInfo(
                vpp_stage=0, depth=number, segments=("stem", *blocks, "head"), blocks=tuple(blocks),
                modules=("", *blocks),
            ),
        ),
        tensors=tuple(TensorInfo(id=at, name=name, kind="param") for at, name in enumerate(params)),
        row_fields=(),
        row_bytes=136,
        **more,  # type: ignore[arg-type]
    )  # fmt: skip
    return number, descriptor


def names(descriptors: Mapping[int, Descriptor]) -> list[str]:
    return [tensor.name for tensor in Layout(descriptors).tensors]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (["layers.0", "layers.1"], ["layers.0", "layers.1"]),
        (["layers.0", "layers.1"], ["layers.2", "layers.3"]),
        (["layers.0", "layers.1", "layers.2"], ["layers.0"]),
    ],
    ids=["local numbers", "global numbers", "uneven stages"],
)
def test_layers_have_the_number_they_have_in_the_whole_model(first: list[str], second: list[str]) -> None:
    found = names(dict([rank(0, first), rank(1, second)]))

    assert found == [f"layers.{i}.weight" for i in range(4)]


def test_the_config_may_say_the_offset() -> None:
    found = names(dict([rank(0, ["layers.0"]), rank(1, ["layers.0"], layer_offset=10)]))

    assert found == ["layers.0.weight", "layers.10.weight"]


def test_the_config_may_say_other_names() -> None:
    found = names(dict([rank(0, [], ["wte.weight"], pp=1, name_map={"wte": "embed"})]))

    assert found == ["embed.weight"]


def test_two_tensors_never_share_a_name() -> None:
    found = names(dict([rank(0, [], ["norm.weight"]), rank(1, [], ["norm.weight"])]))

    assert found == ["stage0.norm.weight", "stage1.norm.weight"]


def test_the_chunk_itself_is_the_model_or_its_stage() -> None:
    whole = make_names(dict([rank(0, ["layers.0"], pp=1)]))
    cut = make_names(dict([rank(0, ["layers.0"]), rank(1, ["layers.0"])]))

    assert whole.of("", 0) == "model"
    assert [cut.of("", depth) for depth in (0, 1)] == ["stage0", "stage1"]
    assert cut.of(":1", 1) == "stage1:1"


@pytest.mark.parametrize(
    ("name", "segment"),
    [
        ("layers.1.mlp", "layers.1"),
        ("layers.1", "layers.1"),
        ("layers.1:2", "layers.1"),
        ("layers.10.mlp", "head"),
        ("embed", "stem"),
        ("head", "head"),
    ],
)
def test_a_module_belongs_to_its_block_or_to_stem_or_head(name: str, segment: str) -> None:
    chunk = ChunkInfo(
        vpp_stage=0, depth=0, segments=("stem", "layers.0", "layers.1", "head"), blocks=("layers.0", "layers.1"),
        modules=("", "embed", "layers", "layers.0", "layers.1", "layers.10", "head"),
    )  # fmt: skip

    assert segment_of(TensorInfo(id=0, name=name, kind="activation"), chunk) == segment
