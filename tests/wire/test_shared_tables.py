"""Descriptors of replicas share their tables, and are otherwise what the plain decoder makes of them."""

from __future__ import annotations

import gc
from pathlib import Path
from weakref import WeakValueDictionary

import msgspec
import pytest

from sentinel.messages import Descriptor
from sentinel.testing import SyntheticRun
from sentinel.wire import shared_tables
from sentinel.wire.shared_tables import decode_descriptor

PLAIN = msgspec.msgpack.Decoder(Descriptor)


def descriptors(run: SyntheticRun) -> list[bytes]:
    return [msgspec.msgpack.encode(run.descriptor(rank)) for rank in range(run.num_ranks)]


@pytest.fixture
def payloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    monkeypatch.setattr(shared_tables, "_KNOWN", WeakValueDictionary())
    return descriptors(SyntheticRun(tmp_path / "run", pp=2, dp=3, layers=4))


def test_replicas_share_what_they_describe_alike(payloads: list[bytes]) -> None:
    found = [decode_descriptor(one) for one in payloads]

    assert found == [PLAIN.decode(one) for one in payloads]
    assert len({id(one.tensors) for one in found}) == len({id(one.chunks) for one in found}) == 2, "one for each stage"
    assert len({one.place for one in found}) == 6


def test_a_table_is_forgotten_with_the_last_that_has_it(payloads: list[bytes]) -> None:
    found = [decode_descriptor(one) for one in payloads]
    assert len(shared_tables._KNOWN) == 4
    del found[:-1]
    gc.collect()
    assert len(shared_tables._KNOWN) == 2
    assert decode_descriptor(payloads[-1]).tensors is found[0].tensors
    found.clear()
    gc.collect()
    assert len(shared_tables._KNOWN) == 0


def test_names_of_a_shared_table_are_shown_as_any_other() -> None:
    hostile = {"version": "1", "place": {}, "row_fields": [["tensor", "<u4", 0]], "row_bytes": 4}
    tensor = {"id": 0, "name": "layer\x1b[31m", "kind": "param"}
    chunk = {"vpp_stage": 0, "depth": 0, "modules": ["a\nb"]}
    payload = msgspec.msgpack.encode({**hostile, "tensors": [tensor], "chunks": [chunk]})

    for _ in range(2):
        found = decode_descriptor(payload)
        assert found.tensors[0].name == "layer\\u001b[31m" and found.chunks[0].modules == ("a\\nb",)


@pytest.mark.parametrize(("field", "value", "words"), [
    ("tensors", [{"id": 0, "name": "a", "kind": "param"}, {"id": "x"}], r"\$\.tensors\[1\]\.id"),
    ("chunks", [{"vpp_stage": 0, "depth": -1}], r"\$\.chunks\[0\]\.depth"),
    ("row_bytes", 0, r"\$\.row_bytes"),
    ("tensors", 3, r"\$\.tensors"),
])  # fmt: skip
def test_what_is_wrong_is_said_with_its_place(payloads: list[bytes], field: str, value: object, words: str) -> None:
    wrong = msgspec.msgpack.encode({**msgspec.msgpack.decode(payloads[0]), field: value})

    with pytest.raises(msgspec.ValidationError, match=words):
        decode_descriptor(wrong)
    with pytest.raises(msgspec.ValidationError, match=words):
        PLAIN.decode(wrong)
