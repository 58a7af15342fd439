"""Other kernels than Sentinel's for GPUs, to be timed beside it: its tile as a parameter, and two passes. See variants.py.

Each takes the place of a function of the product's own entries: what launches, merges and reads rows is the product's.

    measure_tiles    for `measure_part`: the product's arithmetic for tiles of any form. With the parameters that stand here
                     it compiles to the product's instructions (a test compares), so what one gains here it gains there
    measure_twice    for `measure_part`: mean and extremes first; in a second launch the powers about that mean
    many_in_turn     for `_many`: a fixed number of programs, each of which takes parts in turn

Hopper loads 16 bytes at most: loads of 32 begin with compute capability 10. What can be measured of 32 bytes are two vectors
of 16 beside each other, BESIDE.
"""

# Triton's functions are typed by what they are called with: there is nothing here for a checker of Python's types.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from sentinel.collect.kernels.triton_moments import (
    _INF,
    _STAT_WORDS,
    _THREADS,
    _add_vector,
    _bits_of,
    _column,
    _count_and_center,
    _deliver,
    _exponent,
    _extremes,
    _laid_out,
    _merged,
    _power_of_two,
    _powers,
    _real,
    _seal,
    _summary,
    _total,
    _zeros,
    measure_part,
)

_STEPS = tl.constexpr(8)
"""Vectors that a thread holds of a tile: at least 4."""
_VECTOR_BYTES = tl.constexpr(16)
"""Bytes of a vector: what one load reads."""
_BESIDE = tl.constexpr(1)
"""Vectors of a thread that lie beside each other; the threads' groups of them follow each other."""
_IS_AHEAD = tl.constexpr(True)
"""Load a tile while the one before is summed; false: fewer registers, and so more programs on a multiprocessor."""
_IS_INTERLEAVED = tl.constexpr(False)
"""Parts take tiles in turn; false: each takes tiles that follow each other."""
_EVICT = tl.constexpr("")
"""What the caches are told: "evict_first" for what is not read again."""
_MOST_PARTS = tl.constexpr(512)
"""Parts of a tensor that the second of two passes adds up, at most: a power of two."""


@triton.jit
def _tile(p, WORDS: tl.constexpr):
    """Return the vectors of each thread of a tile, _STEPS times [THREADS, words]. p: where the first one lies."""
    found = (tl.load(p, eviction_policy=_EVICT),)
    for k in tl.static_range(1, _STEPS):
        # All groups of the other threads lie between two of a thread's own.
        offset = (k // _BESIDE * _BESIDE * (_THREADS - 1) + k) * WORDS
        found = found + (tl.load(p + offset, eviction_policy=_EVICT),)  # noqa: RUF005 Triton has no unpacking
    return found


@triton.jit
def measure_tiles(
    address, numel, tiles_a_part, own_part, part, num_parts, parts, counter, row, out, epoch, eps, checksum,
    ELEMENT: tl.constexpr, WIDE: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """As measure_part, with tiles of _STEPS vectors of _VECTOR_BYTES a thread. VECTOR counts for nothing."""
    WIDTH: tl.constexpr = ELEMENT.primitive_bitwidth // 8
    OWN: tl.constexpr = _VECTOR_BYTES // WIDTH
    SIZE: tl.constexpr = _STEPS * _THREADS * OWN
    WORD: tl.constexpr = tl.int32 if tl.bfloat16 == ELEMENT else ELEMENT
    WORDS: tl.constexpr = OWN // 2 if tl.bfloat16 == ELEMENT else OWN
    STEP: tl.constexpr = _THREADS * WORDS
    at = tl.arange(0, _THREADS)[:, None] * (WORDS * _BESIDE) + tl.arange(0, WORDS)[None, :]
    base = tl.multiple_of((address & -16).to(tl.pointer_type(ELEMENT)), 16)
    begin = (address & 15) // WIDTH
    end = begin + numel
    if _IS_INTERLEAVED:
        own_parts = (numel + (16 // WIDTH - 1) + (SIZE - 1)) // SIZE
        own_parts = (tl.maximum(own_parts, 1) + tiles_a_part - 1) // tiles_a_part
        first = own_part
        hop = own_parts * SIZE
        word_hop = own_parts * (_STEPS * STEP)
        stop = first + ((end + SIZE - 1) // SIZE - own_part + own_parts - 1) // own_parts
    else:
        first = own_part * tiles_a_part
        hop: tl.constexpr = SIZE
        word_hop: tl.constexpr = _STEPS * STEP
        stop = tl.minimum(first + tiles_a_part, (end + SIZE - 1) // SIZE)
    first = first.to(tl.int32)
    stop = stop.to(tl.int32)

    count = tl.zeros([_THREADS], tl.int32)
    zero = tl.zeros([_THREADS], tl.int32)
    nan = tl.zeros([_THREADS], tl.int32)
    pos = tl.zeros([_THREADS], tl.int32)
    neg = tl.zeros([_THREADS], tl.int32)
    bit_sum = tl.zeros([_THREADS], tl.int64)
    lowest = tl.full([_THREADS], _INF, WIDE)
    highest = tl.full([_THREADS], -_INF, WIDE)
    ref = tl.zeros([_THREADS], tl.float64)
    s1 = tl.zeros([_THREADS], tl.float64)
    s2 = tl.zeros([_THREADS], tl.float64)
    s3 = tl.zeros([_THREADS], tl.float64)
    s4 = tl.zeros([_THREADS], tl.float64)

    words = tl.multiple_of((address & -16).to(tl.pointer_type(WORD)), 16)
    nothing = tl.zeros([_THREADS, WORDS], WORD)
    f = (nothing,)
    for _ in tl.static_range(1, _STEPS):
        f = f + (nothing,)  # noqa: RUF005 Triton has no unpacking
    start = first.to(tl.int64) * SIZE
    at_word = first.to(tl.int64) * (_STEPS * STEP)
    is_next_whole = (start >= begin) & (start + SIZE <= end) & (first < stop)
    if _IS_AHEAD:  # noqa: SIM102 known when compiled; the other one is not
        if is_next_whole:
            f = _tile(words + at_word + at, WORDS)
    for tile in range(first, stop):
        w = f
        is_whole = is_next_whole
        is_next_whole = (start + hop >= begin) & (start + hop + SIZE <= end) & (tile + 1 < stop)
        if _IS_AHEAD:
            if is_next_whole:
                f = _tile(words + (at_word + word_hop) + at, WORDS)
        elif is_whole:
            w = _tile(words + at_word + at, WORDS)
        n = tl.full([_THREADS], _STEPS * OWN, tl.int32)
        zeros = tl.zeros([_THREADS], tl.int32)
        low = tl.zeros([_THREADS], WIDE)
        high, center, d1, d2, d3, d4 = low, low, low, low, low, low
        e = zeros
        is_plain = is_whole
        if is_whole:
            if checksum != 0:
                for k in tl.static_range(0, _STEPS, 4):
                    bits = _bits_of(w[k]) + _bits_of(w[k + 1]) + _bits_of(w[k + 2]) + _bits_of(w[k + 3])
                    bit_sum += bits.to(tl.int64)
            lows = tl.full([_THREADS, WORDS], _INF, WIDE)
            highs = tl.full([_THREADS, WORDS], -_INF, WIDE)
            leasts = tl.full([_THREADS, WORDS], _INF, WIDE)
            for k in tl.static_range(_STEPS):
                lows, highs, leasts = _extremes(w[k], lows, highs, leasts, WIDE)
            low = tl.min(lows, 1)
            high = tl.max(highs, 1)
            # A quarter of the vectors.
            total = _total(w[0], WIDE)
            for k in tl.static_range(4, _STEPS, 4):
                total = total + _total(w[k], WIDE)
            center = total * (1.0 / (_STEPS // 4 * OWN))
            center = tl.minimum(tl.maximum(center, low), high)
            e = _exponent(tl.maximum(high - center, center - low))
            scale = _power_of_two(-e, WIDE)
            shift = center * scale
            z = tl.zeros([_THREADS, WORDS], WIDE)
            p1, p2, p3, p4 = _add_vector(w[0], scale, shift, z, z, z, z, WIDE)
            for k in tl.static_range(1, _STEPS):
                p1, p2, p3, p4 = _add_vector(w[k], scale, shift, p1, p2, p3, p4, WIDE)
            d1, d2, d3, d4 = tl.sum(p1, 1), tl.sum(p2, 1), tl.sum(p3, 1), tl.sum(p4, 1)
            news = tl.max(tl.where(tl.min(leasts, 1) <= eps, 1, 0) + tl.where(d2 < _INF, 0, 2), 0)
            is_plain = news < 2
            if news == 1:
                # In any order: all of the tile's words, a vector of all threads beside another.
                for step in range(_STEPS):
                    p = (
                        words
                        + (at_word + step * STEP)
                        + (tl.arange(0, _THREADS)[:, None] * WORDS + tl.arange(0, WORDS)[None, :])
                    )
                    zeros += _zeros(tl.load(p), eps, WIDE)
        if is_plain == 0:
            n, zeros, nans, poss, negs, bits, low, high, center = _count_and_center(
                base, start, begin, end, eps, checksum, SIZE, WORDS, WIDE
            )
            nan += nans
            pos += poss
            neg += negs
            if is_whole == 0:
                bit_sum += bits
            e = _exponent(tl.where(n > 0, tl.maximum(high - center, center - low), 0.0))
            scale = _power_of_two(-e, WIDE)
            d1, d2, d3, d4 = _powers(base, start, begin, end, center, scale, SIZE, WORDS, WIDE)
        zero += zeros
        lowest = tl.minimum(lowest, low)
        highest = tl.maximum(highest, high)
        wide_center = center.to(tl.float64)
        ref = tl.where(count == 0, wide_center, ref)
        unit = _power_of_two(e, tl.float64)
        a1 = d1.to(tl.float64) * unit
        a2 = d2.to(tl.float64) * unit * unit
        a3 = d3.to(tl.float64) * unit * unit * unit
        a4 = d4.to(tl.float64) * unit * unit * unit * unit
        off = wide_center - ref
        nd = n.to(tl.float64) * off
        s4 += a4 + off * (4.0 * a3 + off * (6.0 * a2 + off * (4.0 * a1 + nd)))
        s3 += a3 + off * (3.0 * a2 + off * (3.0 * a1 + nd))
        s2 += a2 + off * (2.0 * a1 + nd)
        s1 += a1 + nd
        count += n
        start += hop
        at_word += word_hop

    lane = tl.arange(0, 16)
    found = _summary(lane, count, ref, s1, s2, s3, s4, lowest, highest, nan, pos, neg, zero, bit_sum)
    _deliver(lane, found, part, num_parts, parts, counter, row, out, epoch)


FIRST_PASS, SECOND_PASS = 2, 4
"""Bits of `checksum`: which pass of measure_twice a launch makes."""
_FIRST_PASS = tl.constexpr(FIRST_PASS)


@triton.jit
def measure_twice(
    address, numel, tiles_a_part, own_part, part, num_parts, parts, counter, row, out, epoch, eps, checksum,
    ELEMENT: tl.constexpr, WIDE: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """As measure_part, in two launches: the first leaves all but the powers at `row`, the second reads it and adds them.

    For tensors that one launch reads: the parts of a row that is measured in chunks do not know each other's mean.
    """
    WIDTH: tl.constexpr = ELEMENT.primitive_bitwidth // 8
    SIZE: tl.constexpr = _STEPS * _THREADS * (16 // WIDTH)
    base = tl.multiple_of((address & -16).to(tl.pointer_type(ELEMENT)), 16)
    begin = (address & 15) // WIDTH
    end = begin + numel
    first = own_part * tiles_a_part
    stop = tl.minimum(first + tiles_a_part, (end + SIZE - 1) // SIZE).to(tl.int32)
    first = first.to(tl.int32)
    lane = tl.arange(0, 16)
    if checksum & _FIRST_PASS != 0:
        found = _means(lane, address, base, begin, end, first, stop, eps, checksum & 1, ELEMENT, WIDE)
    else:
        found = _sums(lane, address, base, begin, end, first, stop, row, ELEMENT, WIDE)
    is_last = num_parts == 1
    if num_parts > 1:
        column = parts.to(tl.pointer_type(tl.int64))
        tl.store(column + lane * num_parts + part, found, mask=lane < _STAT_WORDS)
        tl.debug_barrier()
        arrived = tl.atomic_add(counter.to(tl.pointer_type(tl.int32)), 1, sem="acq_rel")
        is_last = arrived.to(tl.int64) == num_parts - 1
        tl.debug_barrier()
        if is_last:
            if checksum & _FIRST_PASS != 0:
                found = _merged(lane, column, num_parts)
            else:
                found = _added(lane, column, num_parts)
            tl.store(counter.to(tl.pointer_type(tl.int32)), 0)
    if is_last:
        here = row.to(tl.pointer_type(tl.int64))
        if checksum & _FIRST_PASS == 0:
            found = _about(lane, here, found, WIDE)
            found = tl.where(lane == _STAT_WORDS, epoch, found)
            found = tl.where(lane == _STAT_WORDS + 1, _seal(lane, found), found)
            tl.store(out.to(tl.pointer_type(tl.int64)) + lane, found)
            # No thread may still be reading there what this overwrites.
            tl.debug_barrier()
        tl.store(here + lane, found)


@triton.jit
def _means(
    lane, address, base, begin, end, first, stop, eps, checksum, ELEMENT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Return [16] int64, as _laid_out: all statistics of a part but its powers, which are zero."""
    WORD: tl.constexpr = tl.int32 if tl.bfloat16 == ELEMENT else ELEMENT
    WORDS: tl.constexpr = 16 // (WORD.primitive_bitwidth // 8)
    OWN: tl.constexpr = 16 // (ELEMENT.primitive_bitwidth // 8)
    SIZE: tl.constexpr = _STEPS * _THREADS * OWN
    at = tl.arange(0, _THREADS)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    words = tl.multiple_of((address & -16).to(tl.pointer_type(WORD)), 16)
    count = tl.zeros([_THREADS], tl.int32)
    zero = tl.zeros([_THREADS], tl.int32)
    nan = tl.zeros([_THREADS], tl.int32)
    pos = tl.zeros([_THREADS], tl.int32)
    neg = tl.zeros([_THREADS], tl.int32)
    bit_sum = tl.zeros([_THREADS], tl.int64)
    lowest = tl.full([_THREADS], _INF, WIDE)
    highest = tl.full([_THREADS], -_INF, WIDE)
    total = tl.zeros([_THREADS], tl.float64)
    start = first.to(tl.int64) * SIZE
    at_word = first.to(tl.int64) * (_STEPS * _THREADS * WORDS)
    for _ in range(first, stop):
        is_whole = (start >= begin) & (start + SIZE <= end)
        is_plain = is_whole
        n = tl.full([_THREADS], _STEPS * OWN, tl.int32)
        zeros = tl.zeros([_THREADS], tl.int32)
        low = tl.zeros([_THREADS], WIDE)
        high = low
        own = tl.zeros([_THREADS], tl.float64)
        if is_whole:
            w = _tile(words + at_word + at, WORDS)
            if checksum != 0:
                for k in tl.static_range(0, _STEPS, 4):
                    bits = _bits_of(w[k]) + _bits_of(w[k + 1]) + _bits_of(w[k + 2]) + _bits_of(w[k + 3])
                    bit_sum += bits.to(tl.int64)
            lows = tl.full([_THREADS, WORDS], _INF, WIDE)
            highs = tl.full([_THREADS, WORDS], -_INF, WIDE)
            leasts = tl.full([_THREADS, WORDS], _INF, WIDE)
            some = _total(w[0], WIDE)
            lows, highs, leasts = _extremes(w[0], lows, highs, leasts, WIDE)
            for k in tl.static_range(1, _STEPS):
                some = some + _total(w[k], WIDE)
                lows, highs, leasts = _extremes(w[k], lows, highs, leasts, WIDE)
            low = tl.min(lows, 1)
            high = tl.max(highs, 1)
            own = some.to(tl.float64)
            news = tl.max(tl.where(tl.min(leasts, 1) <= eps, 1, 0) + tl.where(tl.abs(some) < _INF, 0, 2), 0)
            is_plain = news < 2
            if news == 1:
                for k in tl.static_range(_STEPS):
                    zeros += _zeros(w[k], eps, WIDE)
        if is_plain == 0:
            n, zeros, nans, poss, negs, bits, low, high, center = _count_and_center(
                base, start, begin, end, eps, checksum, SIZE, WORDS, WIDE
            )
            nan += nans
            pos += poss
            neg += negs
            if is_whole == 0:
                bit_sum += bits
            own = n.to(tl.float64) * center.to(tl.float64)
        count += n
        zero += zeros
        lowest = tl.minimum(lowest, low)
        highest = tl.maximum(highest, high)
        total += own
        start += SIZE
        at_word += _STEPS * _THREADS * WORDS
    counted = tl.sum(count.to(tl.float64), 0)
    mean = tl.sum(total, 0) / tl.maximum(counted, 1.0)
    nothing = mean * 0.0
    return _laid_out(
        lane, counted, mean, nothing, nothing, nothing, tl.min(lowest, 0).to(tl.float64), tl.max(highest, 0).to(tl.float64),
        tl.sum(nan.to(tl.int64), 0), tl.sum(pos.to(tl.int64), 0), tl.sum(neg.to(tl.int64), 0),
        tl.sum(zero.to(tl.int64), 0), tl.sum(bit_sum, 0),
    )  # fmt: skip


@triton.jit
def _centre(row, WIDE: tl.constexpr):
    """Return the mean in the arithmetic type, and e so that deviations from it are at most about 1 in units of 2^e.

    row: what the first launch left there, as a pointer to int64.
    """
    low = _real(tl.load(row + 5))
    high = _real(tl.load(row + 6))
    center = tl.minimum(tl.maximum(_real(tl.load(row + 1)), low), high)
    is_some = tl.load(row) > 0
    center = tl.where(is_some, center, 0.0).to(WIDE)
    reach = tl.maximum(high.to(WIDE) - center, center - low.to(WIDE))
    return center, _exponent(tl.where(is_some, reach, 0.0))


@triton.jit
def _sums(lane, address, base, begin, end, first, stop, row, ELEMENT: tl.constexpr, WIDE: tl.constexpr):
    """Return [16] int64: sums of the first four powers of the scaled deviations from the mean, float64, in words 1 to 4."""
    WORD: tl.constexpr = tl.int32 if tl.bfloat16 == ELEMENT else ELEMENT
    WORDS: tl.constexpr = 16 // (WORD.primitive_bitwidth // 8)
    SIZE: tl.constexpr = _STEPS * _THREADS * (16 // (ELEMENT.primitive_bitwidth // 8))
    at = tl.arange(0, _THREADS)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    words = tl.multiple_of((address & -16).to(tl.pointer_type(WORD)), 16)
    same, e = _centre(row.to(tl.pointer_type(tl.int64)), WIDE)
    center = tl.zeros([_THREADS], WIDE) + same
    scale = tl.zeros([_THREADS], WIDE) + _power_of_two(-e, WIDE)
    shift = center * scale
    s1 = tl.zeros([_THREADS], tl.float64)
    s2 = tl.zeros([_THREADS], tl.float64)
    s3 = tl.zeros([_THREADS], tl.float64)
    s4 = tl.zeros([_THREADS], tl.float64)
    start = first.to(tl.int64) * SIZE
    at_word = first.to(tl.int64) * (_STEPS * _THREADS * WORDS)
    for _ in range(first, stop):
        d1 = tl.zeros([_THREADS], WIDE)
        d2, d3, d4 = d1, d1, d1
        is_plain = (start >= begin) & (start + SIZE <= end)
        if is_plain:
            w = _tile(words + at_word + at, WORDS)
            z = tl.zeros([_THREADS, WORDS], WIDE)
            p1, p2, p3, p4 = _add_vector(w[0], scale, shift, z, z, z, z, WIDE)
            for k in tl.static_range(1, _STEPS):
                p1, p2, p3, p4 = _add_vector(w[k], scale, shift, p1, p2, p3, p4, WIDE)
            d1, d2, d3, d4 = tl.sum(p1, 1), tl.sum(p2, 1), tl.sum(p3, 1), tl.sum(p4, 1)
            is_plain = tl.max(tl.where(d2 < _INF, 0, 1), 0) == 0
        if is_plain == 0:
            d1, d2, d3, d4 = _powers(base, start, begin, end, center, scale, SIZE, WORDS, WIDE)
        s1 += d1.to(tl.float64)
        s2 += d2.to(tl.float64)
        s3 += d3.to(tl.float64)
        s4 += d4.to(tl.float64)
        start += SIZE
        at_word += _STEPS * _THREADS * WORDS
    return _in_words(lane, tl.sum(s1, 0), tl.sum(s2, 0), tl.sum(s3, 0), tl.sum(s4, 0))


@triton.jit
def _in_words(lane, s1, s2, s3, s4):
    words = tl.where(lane == 1, s1.to(tl.int64, bitcast=True), 0)
    words = tl.where(lane == 2, s2.to(tl.int64, bitcast=True), words)
    words = tl.where(lane == 3, s3.to(tl.int64, bitcast=True), words)
    return tl.where(lane == 4, s4.to(tl.int64, bitcast=True), words)


@triton.jit
def _added(lane, parts, num_parts):
    """Return the sums of all parts, laid out as one part's."""
    at = tl.arange(0, _MOST_PARTS)
    s1 = tl.sum(_real(_column(parts, 1, at, num_parts)), 0)
    s2 = tl.sum(_real(_column(parts, 2, at, num_parts)), 0)
    s3 = tl.sum(_real(_column(parts, 3, at, num_parts)), 0)
    s4 = tl.sum(_real(_column(parts, 4, at, num_parts)), 0)
    return _in_words(lane, s1, s2, s3, s4)


@triton.jit
def _about(lane, row, sums, WIDE: tl.constexpr):
    """Return [16] int64: the words at `row`, and the powers about the mean there made of the sums."""
    center, e = _centre(row, WIDE)
    unit = _power_of_two(e, tl.float64)
    s1 = _real(tl.sum(tl.where(lane == 1, sums, 0), 0)) * unit
    s2 = _real(tl.sum(tl.where(lane == 2, sums, 0), 0)) * unit * unit
    s3 = _real(tl.sum(tl.where(lane == 3, sums, 0), 0)) * unit * unit * unit
    s4 = _real(tl.sum(tl.where(lane == 4, sums, 0), 0)) * unit * unit * unit * unit
    n = tl.load(row).to(tl.float64)
    mean = _real(tl.load(row + 1))
    # The mean as the arithmetic type holds it is not quite the mean. Source: Pebay, as in _summary.
    d = tl.where(n > 0.0, center.to(tl.float64) - mean, 0.0)
    nd = n * d
    m2 = s2 + d * (2.0 * s1 + nd)
    m3 = s3 + d * (3.0 * s2 + d * (3.0 * s1 + nd))
    m4 = s4 + d * (4.0 * s3 + d * (6.0 * s2 + d * (4.0 * s1 + nd)))
    return _laid_out(
        lane, n, mean, m2, m3, m4, _real(tl.load(row + 5)), _real(tl.load(row + 6)), tl.load(row + 7), tl.load(row + 8),
        tl.load(row + 9), tl.load(row + 10), tl.load(row + 11),
    )  # fmt: skip


PARTS_SHIFT = 8
"""Bits of `checksum` below the number of parts of all tensors."""
_PARTS_SHIFT = tl.constexpr(PARTS_SHIFT)


@triton.jit
def many_in_turn(
    addresses, shapes, work, parts, counters, rows, out, epoch, eps, checksum,
    ELEMENT: tl.constexpr, WIDE: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """As _many, for fewer programs than there are parts: each takes every so many-th part."""
    epoch, eps = epoch.to(tl.int64), eps.to(tl.int64)
    num_all = (checksum >> _PARTS_SHIFT).to(tl.int32)
    for program in range(tl.program_id(0), num_all, tl.num_programs(0)):
        tensor = tl.load(work.to(tl.pointer_type(tl.int32)) + program).to(tl.int64)
        shape = shapes.to(tl.pointer_type(tl.int64)) + tensor * 8
        address = tl.load(addresses.to(tl.pointer_type(tl.int64)) + tensor)
        numel = tl.load(shape)
        tiles_a_part = tl.load(shape + 1)
        first_program = tl.load(shape + 2)
        num_parts = tl.load(shape + 3)
        place = tl.load(shape + 4)
        part = program - first_program
        measure_part(
            address, numel, tiles_a_part, part, part, num_parts, parts + first_program * 96, counters + place * 4,
            rows + place * 128, out + place * 128, epoch, eps.to(tl.float64, bitcast=True).to(WIDE), checksum & 1,
            ELEMENT, WIDE, VECTOR,
        )  # fmt: skip
