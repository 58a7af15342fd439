from __future__ import annotations

import zlib
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sentinel.errors import WireError
from sentinel.messages import Ack, Bye, EndStep, Health, Heartbeat
from sentinel.record import ROW_DTYPE
from sentinel.testing import SyntheticRun
from sentinel.wire.frame import (
    FRAME_TYPES,
    HEADER_BYTES,
    MAGIC,
    Corrupt,
    Foreign,
    Frame,
    FrameType,
    Header,
    Incomplete,
    decode_message,
    encode_frame,
    encode_message,
    row_dtype,
    row_fields,
    run_id_of,
    scan,
)

LIFE = bytes(range(16))
RUN_ID = 10773672743070944251
headers = st.builds(
    Header,
    type=st.integers(0, 255),
    incarnation=st.binary(min_size=16, max_size=16),
    run_id=st.integers(0, 2**64 - 1),
    attempt=st.integers(0, 2**32 - 1),
    rank=st.integers(0, 2**32 - 1),
    step=st.integers(-1, 2**63 - 1),
    seq=st.integers(0, 2**64 - 1),
    placement_epoch=st.integers(0, 2**32 - 1),
    layout_id=st.integers(0, 2**32 - 1),
    wall_ns=st.integers(-(2**63), 2**63 - 1),
    mono_ns=st.integers(-(2**63), 2**63 - 1),
    row_count=st.integers(0, 2**32 - 1),
)


def frame_bytes(header: Header, payload: bytes, **more: int) -> bytes:
    return b"".join(encode_frame(header, payload, **more))


def frames_of(data: bytes) -> list[Frame]:
    """All frames that a reader would find, resyncing where it must."""
    found, at = [], 0
    while at < len(data):
        one = scan(data, at)
        if isinstance(one, Frame):
            found.append(one)
            at = one.offset_after
        elif isinstance(one, Corrupt | Foreign):
            assert one.next_offset > at
            at = one.next_offset
        else:
            break
    return found


@given(headers, st.binary(max_size=300))
def test_a_frame_comes_back_as_it_was(header: Header, payload: bytes) -> None:
    data = frame_bytes(header, payload)

    found = scan(data, 0)

    assert isinstance(found, Frame)
    assert found.header == header
    assert bytes(found.payload) == payload
    assert found.offset_after == len(data) == HEADER_BYTES + len(payload)


@given(headers, st.binary(max_size=60), st.data())
def test_every_beginning_of_a_frame_is_incomplete(header: Header, payload: bytes, data: st.DataObject) -> None:
    whole = frame_bytes(header, payload)
    cut = data.draw(st.integers(0, len(whole) - 1))

    assert isinstance(scan(whole[:cut], 0), Incomplete)


@pytest.mark.slow
@settings(max_examples=300)
@given(st.lists(st.tuples(headers, st.binary(max_size=120)), min_size=1, max_size=5), st.data())
def test_corruption_never_yields_a_wrong_frame(sent: list[tuple[Header, bytes]], data: st.DataObject) -> None:
    whole = bytearray(b"".join(frame_bytes(header, payload) for header, payload in sent))
    for _ in range(data.draw(st.integers(1, 4))):
        action = data.draw(st.sampled_from(["flip", "cut", "insert", "swap"]))
        at = data.draw(st.integers(0, max(0, len(whole) - 1)))
        if action == "flip" and whole:
            whole[at] ^= 1 << data.draw(st.integers(0, 7))
        elif action == "cut":
            del whole[at : at + data.draw(st.integers(1, 200))]
        elif action == "insert":
            whole[at:at] = data.draw(st.binary(max_size=50) | st.just(MAGIC))
        else:
            other = data.draw(st.integers(0, max(0, len(whole) - 1)))
            whole[at : at + 8], whole[other : other + 8] = whole[other : other + 8], whole[at : at + 8]
    known = {(header.incarnation, header.seq, header.step, payload) for header, payload in sent}

    for frame in frames_of(bytes(whole)):
        assert (frame.header.incarnation, frame.header.seq, frame.header.step, bytes(frame.payload)) in known


@given(st.binary(max_size=400))
def test_noise_never_crashes_the_scan(noise: bytes) -> None:
    assert frames_of(noise) == []


@pytest.mark.parametrize("position", range(0, HEADER_BYTES + 40, 7))
def test_after_a_flipped_bit_the_next_frame_is_found(position: int) -> None:
    first = bytearray(frame_bytes(Header(type=2, incarnation=LIFE, run_id=1, rank=0, seq=1), b"x" * 40))
    second = frame_bytes(Header(type=2, incarnation=LIFE, run_id=1, rank=0, seq=2), b"y" * 40)
    first[position] ^= 0x20

    assert [frame.header.seq for frame in frames_of(bytes(first) + second)] == [2]


def test_a_flipped_length_is_not_waited_for() -> None:
    data = bytearray(frame_bytes(Header(type=2, incarnation=LIFE, run_id=1, rank=0, seq=1), b"x" * 40))
    data[10] ^= 0x01

    assert isinstance(scan(bytes(data), 0), Corrupt)


def test_a_magic_inside_a_payload_is_no_frame() -> None:
    first = bytearray(frame_bytes(Header(type=2, incarnation=LIFE, run_id=1, rank=0, seq=1), MAGIC * 30))
    second = frame_bytes(Header(type=2, incarnation=LIFE, run_id=1, rank=0, seq=2), MAGIC)
    first[50] ^= 1

    assert [frame.header.seq for frame in frames_of(bytes(first) + second)] == [2]


def test_a_view_into_a_larger_buffer_is_scanned_like_bytes() -> None:
    data = bytearray(frame_bytes(Header(type=2, incarnation=LIFE, run_id=1, rank=0, seq=1), b"x" * 40))
    data[50] ^= 1
    second = frame_bytes(Header(type=2, incarnation=LIFE, run_id=1, rank=0, seq=2), b"")
    view = memoryview(b"junk" + bytes(data) + second)[4:]

    found = scan(view, 0)

    assert isinstance(found, Corrupt)
    assert isinstance(scan(view, found.next_offset), Frame)


def test_a_newer_protocol_is_named_and_skipped_whole() -> None:
    data = frame_bytes(Header(type=2, incarnation=LIFE, run_id=1, rank=17, seq=1), b"x" * 40, protocol=3)

    assert scan(data, 0) == Foreign(3, len(data))


def test_the_checksum_is_plain_crc32_over_the_frame_with_its_field_zero() -> None:
    data = bytearray(frame_bytes(Header(type=2, incarnation=LIFE, run_id=1, rank=0, seq=1), b"payload"))
    crc = int.from_bytes(data[16:20], "little")
    data[16:20] = bytes(4)

    assert crc == zlib.crc32(bytes(data))


@pytest.mark.parametrize(
    "message",
    [
        EndStep(step=3, num_rows=7, num_calls=9, scalars={"loss": float("inf")}, due={"param": 4}),
        Health(code="disk_full", message="no space"),
        Ack(command="c1", state="armed", step=4),
        Heartbeat(step=3, call_id=1, activity="train"),
        Bye(reason="exit", step=9),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_come_back_as_they_were(message: EndStep | Health | Ack | Heartbeat | Bye) -> None:
    header = Header(type=FRAME_TYPES[type(message)], incarnation=LIFE, run_id=1, rank=0, seq=1)
    frame = scan(frame_bytes(header, encode_message(message)), 0)

    assert isinstance(frame, Frame)
    assert decode_message(frame) == message


def test_a_descriptor_comes_back_and_lays_out_the_row(tmp_path) -> None:
    descriptor = SyntheticRun(tmp_path / "run", pp=2, ranks=[]).descriptor(1)
    header = Header(type=FrameType.DESCRIPTOR, incarnation=LIFE, run_id=1, rank=1, seq=1)
    frame = scan(frame_bytes(header, encode_message(descriptor)), 0)

    assert isinstance(frame, Frame)
    assert decode_message(frame) == descriptor
    assert row_dtype(descriptor) == ROW_DTYPE


@pytest.mark.parametrize("form", ["|O", "<u4,<u4", "zzz", "|V8", "|S4"])
def test_a_row_of_anything_but_numbers_is_refused(tmp_path: Path, form: str) -> None:
    descriptor = SyntheticRun(tmp_path / "run", ranks=[]).descriptor(0)
    strange = msgspec.structs.replace(descriptor, row_fields=(("tensor", form, 0),), row_bytes=8)

    with pytest.raises(WireError, match="descriptor of rank 0: row layout"):
        row_dtype(strange)


@pytest.mark.parametrize("number", [-1, 2**40])
def test_tensor_ids_that_no_table_can_have_are_refused(tmp_path: Path, number: int) -> None:
    descriptor = SyntheticRun(tmp_path / "run", ranks=[]).descriptor(0)
    reported = msgspec.to_builtins(descriptor)
    reported["tensors"][0]["id"] = number
    frame = scan(
        frame_bytes(
            Header(type=FrameType.DESCRIPTOR, incarnation=LIFE, run_id=1, rank=0, seq=1), msgspec.msgpack.encode(reported)
        )
    )

    assert isinstance(frame, Frame)
    with pytest.raises(WireError, match="Expected `int`"):
        decode_message(frame)


def test_a_newer_row_is_read_by_the_fields_that_are_known() -> None:
    wider = np.dtype([*ROW_DTYPE.descr, ("entropy", "<f8")])

    assert row_fields(wider)[-1] == ("entropy", "<f8", 136)
    assert [name for name, _, _ in row_fields(wider)][:-1] == list(ROW_DTYPE.names or ())


def test_a_payload_that_is_not_its_type_is_said_with_its_number() -> None:
    frame = scan(frame_bytes(Header(type=FrameType.BYE, incarnation=LIFE, run_id=1, rank=17, seq=5), b"\xc1"), 0)

    assert isinstance(frame, Frame)
    with pytest.raises(WireError, match="bye frame 5"):
        decode_message(frame)


def test_the_run_id_is_stable() -> None:
    assert run_id_of("run") == RUN_ID
    assert run_id_of("a") != run_id_of("b")
