"""Finds impossible content in whole frames: in their place, in their times, and against the frames around them."""

from __future__ import annotations

import math
from typing import Any

from sentinel.bounds import MAX_ATTEMPT, MAX_ELEMENTS, MAX_MONO_NS, MAX_SETTINGS_DEPTH, MAX_STEP, MAX_WALL_NS
from sentinel.errors import WireError
from sentinel.messages import Descriptor, EndStep
from sentinel.wire.frame import NO_ATTEMPT, NO_STEP, Frame, FrameType, Header, Message, row_dtype

MAX_GAPS = 1024
"""Missing numbers of an incarnation that are remembered, so that a late frame is distinguished from a repeated one. A number
further ahead
is believed when the next frame has a higher one."""
MAX_STEP_LEAP = 64
"""A step so far ahead of the last that its rank ended is believed when the next frame is of that step, or of a later one
of that rank. Too small: ordinary leaps wait for a second frame; too large: one false step makes every other rank late."""

_OF_STEPS = frozenset({int(FrameType.ROWS), int(FrameType.END_STEP), int(FrameType.VECTOR)})


def why_header(header: Header, rank: int) -> str:
    """Return what of a header is impossible in the spool of this rank, in words; empty: nothing."""
    if header.rank != rank:
        return f"expected rank {rank}, got {header.rank}"
    if header.attempt != NO_ATTEMPT and header.attempt > MAX_ATTEMPT:
        return f"expected an attempt of at most {MAX_ATTEMPT}, got {header.attempt}"
    least = 0 if header.type in _OF_STEPS else NO_STEP
    if not least <= header.step <= MAX_STEP:
        return f"expected a step in [{least}, {MAX_STEP}], got {header.step}"
    if not 0 <= header.wall_ns <= MAX_WALL_NS or not 0 <= header.mono_ns <= MAX_MONO_NS:
        return f"expected clocks between 1970 and 2100, got {header.wall_ns} and {header.mono_ns} ns"
    if not 1 <= header.seq < 2**63:
        return f"expected a frame number in [1, 2**63), got {header.seq}"
    return ""


def leaps(header: Header, max_seq: int, last_step: int) -> str:
    """Return in words how a frame is far ahead of those before it; empty: it is not."""
    if header.seq > max_seq + MAX_GAPS:
        return f"frame {header.seq} stands between frame {max_seq} and those that follow it"
    if header.type in _OF_STEPS and last_step >= 0 and header.step > last_step + MAX_STEP_LEAP:
        return f"step {header.step} stands between step {last_step} and those that follow it"
    return ""


def bears_out(leap: Header, header: Header) -> bool | None:
    """Return whether the next frame continues from one that leapt; None: it neither does nor contradicts it."""
    if header.seq <= leap.seq:
        return False
    if header.type == FrameType.BYE:
        return True
    return header.step >= leap.step if header.type in _OF_STEPS else None


def why_descriptor(descriptor: Descriptor, rank: int) -> str:
    """Return what of a descriptor is impossible for this rank, in words; empty: nothing."""
    if descriptor.place.rank != rank:
        return f"expected the place of rank {rank}, got that of rank {descriptor.place.rank}"
    ids = {tensor.id for tensor in descriptor.tensors}
    if len(ids) != len(descriptor.tensors):
        return "expected each tensor to have an id of its own, got one twice"
    most = 2 * len(ids) + 1024
    if ids and max(ids) >= most:
        return f"expected ids below {most} of {len(ids)} tensors, got {max(ids)}"
    if len({chunk.vpp_stage for chunk in descriptor.chunks}) != len(descriptor.chunks):
        return "expected each model chunk once, got one twice"
    large = next((tensor for tensor in descriptor.tensors if math.prod(tensor.shape) > MAX_ELEMENTS), None)
    if large is not None:
        return f"{large.name[:80]}: expected at most {MAX_ELEMENTS} elements, got {large.shape}"
    if not _is_shallow(descriptor.settings):
        return f"settings: expected at most {MAX_SETTINGS_DEPTH} containers in one another, got more"
    try:
        row_dtype(descriptor)
    except WireError as error:
        return str(error)
    return ""


def _is_shallow(settings: dict[str, Any]) -> bool:
    level: list[Any] = [settings]
    for _ in range(MAX_SETTINGS_DEPTH):
        level = [one for held in level for one in (held.values() if isinstance(held, dict) else held)]
        level = [one for one in level if isinstance(one, (dict, list))]
        if not level:
            return True
    return False


def why_contradicted(frame: Frame, message: Message | None, descriptor: Descriptor | None) -> str:
    """Return how a frame contradicts itself, or the descriptor that its rows point into; empty where it does not."""
    header = frame.header
    if isinstance(message, EndStep) and message.step != header.step:
        return f"expected the end of step {header.step}, got that of step {message.step}"
    if header.type == FrameType.ROWS and descriptor is not None:
        expected, got = header.row_count * descriptor.row_bytes, memoryview(frame.payload).nbytes + frame.num_bytes_away
        if got != expected:
            return f"expected {header.row_count} rows of {descriptor.row_bytes} bytes, got {got} bytes"
    return ""
