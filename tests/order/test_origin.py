"""Where a fault was born, in forward and backward, with and without module monitoring."""

from __future__ import annotations

import pytest

from sentinel.order.origin import maker_of, origin

from ..support.anomalies import a_nan


def test_a_border_names_its_block_when_modules_were_seen():
    """Everything inside was measured and clean: the block's own code did it."""
    border = a_nan(name="blocks.1", border="block_output", segment="blocks.1")
    elsewhere = a_nan("dgrad", "blocks.0.ln2", segment="blocks.0")
    on_another_rank = a_nan("dgrad", "blocks.2.ln2", segment="blocks.2", rank=1)

    assert origin(border, [border, elsewhere]).module == "blocks.1"
    assert origin(border, [border, on_another_rank]).module == ""


def test_ranks_of_a_tensor_parallel_group_that_look_alike_are_all_named():
    group = {"border": "block_output", "segment": "blocks.1", "name": "blocks.1", "tp_size": 2, "dp_size": 2}
    mates = [a_nan(rank=r, place={"tp": r, "dp": 0}, **group) for r in range(2)]
    other_replica = a_nan(rank=2, place={"tp": 0, "dp": 1}, **group)

    assert origin(mates[0], [*mates, other_replica]).ranks == (0, 1)
    assert origin(mates[0], [mates[0], other_replica]).ranks == ()


def test_an_input_that_no_module_put_out_names_the_module_around():
    assert origin(a_nan("activation_in", "blocks.0.ln2", segment="blocks.0")).module == "blocks.0"
    assert origin(a_nan("activation_in", "blocks.0", border="block_input", segment="stem")).name == "stem"


def test_forward_names_the_module_whose_output_is_first_bad():
    found = origin(a_nan(name="blocks.2.mlp.fc1", rank=3, micro_step=1, segment="blocks.2"))

    assert (found.name, found.module, found.phase) == ("blocks.2.mlp.fc1", "blocks.2.mlp.fc1", "forward")
    assert (found.rank, found.micro_step, found.segment) == (3, 1, "blocks.2")


def test_of_a_border_alone_names_the_segment():
    found = origin(a_nan(name="blocks.2", border="block_output", segment="blocks.2"))

    assert (found.name, found.module, found.segment) == ("blocks.2", "", "blocks.2")


def test_of_the_head_names_what_is_less_than_the_chunk():
    fields = {"border": "chunk_output", "segment": "stage1.head"}

    assert origin(a_nan(name="stage1", **fields)).module == ""
    assert origin(a_nan(name="lm_head", also=("stage1",), **fields)).module == "lm_head"


def test_a_block_that_ends_its_chunk_is_still_a_segment():
    last = a_nan(name="blocks.1", also=("stage0",), border="chunk_output", segment="blocks.1")

    assert (origin(last).name, origin(last).module) == ("blocks.1", "")


def test_a_border_named_after_an_inner_module_names_the_module():
    also = ("blocks.2.mlp", "blocks.2")
    border = a_nan(name="blocks.2.mlp.fc2", also=also, border="block_output", segment="blocks.2")

    assert origin(border).module == "blocks.2.mlp.fc2"


def test_backward_names_the_innermost_consumer():
    consumers = ("blocks.2", "blocks.2.attn", "blocks.2.attn.qkv")
    found = origin(a_nan("dgrad", "blocks.1.mlp.fc2", consumers=consumers))

    assert (found.name, found.module, found.phase) == ("blocks.2.attn.qkv", "blocks.2.attn.qkv", "backward")


def test_backward_of_a_residual_branch_spares_the_consumer_that_was_bad_already():
    bad = a_nan("dgrad", "ln1", consumers=("attn.q", "attn.k"), site_pos=1)
    victim_of_another = a_nan("dgrad", "attn.k", site_pos=3)

    assert origin(bad, [bad]).candidates == ("attn.k", "attn.q")
    assert origin(bad, [bad]).module == ""
    assert origin(bad, [bad, victim_of_another]).module == "attn.q"


def test_backward_at_a_border_alone_names_the_segment_that_made_it():
    found = origin(a_nan("dgrad", "blocks.1", consumers=("blocks.2",), border="block_output", segment="blocks.2"))

    assert (found.name, found.module) == ("blocks.2", "")


def test_input_gradient_names_its_own_module():
    assert origin(a_nan("dgrad_in", "embed.proj")).module == "embed.proj"


def test_a_reduced_gradient_names_the_parameter_without_rank():
    found = origin(a_nan("wgrad", "fc.weight", dp_size=4, rank=2, micro_step=None))

    assert (found.name, found.module, found.rank) == ("fc.weight", "fc", None)


def test_what_a_probe_formed_names_the_module_that_it_looked_at():
    named = {
        ("attention", "blocks.1.attn:max_logit"): "blocks.1.attn",
        ("router", "blocks.1.moe:load"): "blocks.1.moe",
        ("saturation", "blocks.1.act:dead"): "blocks.1.act",
        ("channel", "blocks.1.mlp:channel_rms"): "blocks.1.mlp",
        ("precision", "blocks.1.fc1:activation.fp16_overflow"): "blocks.1.fc1",
        ("precision", "blocks.1.fc1:dgrad_in.fp16_overflow"): "blocks.1.fc1",
        ("precision", "blocks.1.fc1.weight:wgrad.fp16_underflow"): "blocks.1.fc1",
        ("weight_spectrum", "blocks.1.fc1.weight:spectral_norm"): "blocks.1.fc1",
        ("activation", "blocks.1.attn:1"): "blocks.1.attn",
    }

    assert {key: origin(a_nan(*key, statistic="norm", value_text="")).module for key in named} == named


@pytest.mark.parametrize(
    ("name", "border", "also", "maker"),
    [
        ("model", "chunk_output", ("head",), "head"),
        ("stage3", "chunk_output", ("head",), "head"),
        ("head", "chunk_output", ("model",), ""),
        ("head", "chunk_output", ("",), ""),
        ("G.head", "chunk_output", ("G",), ""),
        ("blocks.1", "block_output", ("blocks.1.mlp",), "blocks.1.mlp"),
        ("blocks.1", "block_output", ("stage1",), ""),
        ("blocks.0", "block_input", ("emb",), "emb"),
        ("blocks.0", "block_input", ("model", "emb"), "emb"),
    ],
)
def test_a_border_was_made_by_the_innermost_module_that_put_its_tensor_out(
    name: str, border: str, also: tuple[str, ...], maker: str
) -> None:
    assert maker_of(name, border, also) == maker
