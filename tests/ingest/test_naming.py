from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import pytest

from sentinel.ingest.model_layout import ModelLayout
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
    return [tensor.name for tensor in ModelLayout(descriptors).tensors]


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


def sited(number: int, tensors: Sequence[tuple[str, str]], flows: tuple[str, ...] | None = ()) -> tuple[int, Descriptor]:
    """A pipeline rank of which every stage has `norm` with a weight, `drop` and `rotary` without, and these tensors."""
    _, descriptor = rank(number, [f"layers.{number}"], ["norm.weight"])
    more = [TensorInfo(id=10 + at, name=name, kind=kind) for at, (name, kind) in enumerate(tensors)]
    (chunk,) = descriptor.chunks
    modules = (*chunk.modules, "norm", "drop", "rotary")
    chunk = msgspec.structs.replace(chunk, modules=modules, flows=flows)
    return number, msgspec.structs.replace(descriptor, chunks=(chunk,), tensors=(*descriptor.tensors, *more))


def test_a_table_that_every_stage_has_is_one_and_what_gradients_pass_is_told_apart() -> None:
    seen = [("rotary", "activation"), ("rotary:zero", "saturation"), ("drop", "activation"), ("drop:zero", "saturation")]

    found = set(names(dict([sited(0, seen, ("drop",)), sited(1, seen, ("drop",))])))

    assert {"rotary", "rotary:zero", "stage0.drop", "stage1.drop", "stage0.drop:zero", "stage1.drop:zero"} <= found
    assert "drop" not in found and "stage1.rotary" not in found


def test_probe_rows_of_modules_that_share_a_name_are_told_apart_as_the_modules_are() -> None:
    seen = [("norm", "activation"), ("norm:channel_rms", "channel"), ("norm.weight:spectral_norm", "weight_spectrum")]

    found = names(dict([sited(0, seen), sited(1, seen)]))

    for stage in range(2):
        ours = {"norm", "norm:channel_rms", "norm.weight:spectral_norm"}
        assert {f"stage{stage}.{one}" for one in ours} <= {*found} and not ours & {*found}


def test_a_version_that_does_not_tell_what_gradients_pass_is_read_as_before() -> None:
    seen = [("rotary", "activation")]

    found = names(dict([sited(0, seen, None), sited(1, seen, None)]))

    assert {"stage0.rotary", "stage1.rotary"} <= {*found}


def test_probe_rows_of_the_whole_models_input_and_output_carry_no_stage() -> None:
    output = [(":zero", "saturation"), (":channel_rms", "channel"), (":activation.fp16_overflow", "precision")]
    data = [(":dgrad_in.dynamic_range", "precision"), ("", "activation_in")]

    found = names(dict([sited(0, [*data, *output]), sited(1, [*data, *output])]))

    assert {"model:zero", "model:channel_rms", "model:activation.fp16_overflow", "model:dgrad_in.dynamic_range"} <= {*found}
    assert {"stage0:zero", "stage1:dgrad_in.dynamic_range", "stage1", "stage0:activation.fp16_overflow"} <= {*found}


def test_a_loss_over_all_layers_of_which_each_stage_has_some_is_one_series() -> None:
    def with_loss(number: int) -> tuple[int, Descriptor]:
        _, descriptor = sited(number, [])
        loss = TensorInfo(id=9, name=":load_balancing_loss", kind="router", placements={"pp": "shard"})
        return number, msgspec.structs.replace(descriptor, tensors=(*descriptor.tensors, loss))

    layout = ModelLayout(dict([with_loss(0), with_loss(1)]))

    (loss,) = [tensor for tensor in layout.tensors if tensor.kind == "router"]
    assert (loss.key, loss.ranks) == ("model:load_balancing_loss/router", (0, 1))
    assert len({int(layout.copies_of(rank, np.array([9], np.uint32))[0]) for rank in range(2)}) == 2
