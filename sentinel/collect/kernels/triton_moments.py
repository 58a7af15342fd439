"""What runs on the GPU: the moments of tensors, each element read once. Imported only where Triton is.

A tensor is cut into tiles of 16 KiB, tiles are dealt to parts, and a part is one program of 128 threads. A thread keeps
its 32 or 64 elements of a tile in registers, centres them about their own mean and scales them by a power of two, so that
fp32 holds the fourth powers of any of them; it carries its sums on in float64, about the centre of its first tile. No
thread waits for another before its part is done, but for one look per tile whether anything is not finite: counting what
is not, and leaving out what lies beside the tensor, is the branch that this look guards.

The last part of a tensor to be done merges all of them, in the order of parts and not of arrival, and writes the row.
The words are a tree of fixed shape over fixed elements: the same memory gives the same bits.
"""

# Triton's functions are typed by what they are called with: there is nothing here for a checker of Python's types.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

THREADS = 128
NUM_WARPS = 4
STEPS = 8
"""Vectors of 16 bytes that a thread holds of a tile."""
TILE_BYTES = THREADS * STEPS * 16
MOST_PARTS = {"fp32": 512, "bf16": 384, "fp16": 384, "fp64": 384}
"""Parts of a tensor at most, by type: what 128 multiprocessors hold at once, so that none waits for a second round."""
MOST_REGISTERS = {"fp32": 128, "bf16": 168, "fp16": 168, "fp64": 168}
"""Registers of a thread, by type: the fewest that the main loop compiled for Hopper does with, looked up in its code."""

_THREADS = tl.constexpr(THREADS)
_STEPS = tl.constexpr(STEPS)
_AT_ONCE = tl.constexpr(4)
"""Vectors that a thread has on their way at once where it counts what is no whole tile of finite numbers."""
_STAT_WORDS = tl.constexpr(12)
_SEAL = tl.constexpr(0x9E3779B97F4A7C15)
_INF = tl.constexpr(float("inf"))
_ONE_OF_MOST = tl.constexpr(2.0**-64)


@triton.jit
def _least(a, b):
    # NaN stays: no instruction is spent on telling it from a number, and the tile is looked at again anyway.
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _most(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _extremes(words, low, high, least, WIDE: tl.constexpr):
    """Widen the range of values, and the least size of any, to a vector of each thread: [THREADS, words] each."""
    if words.dtype == tl.int32:
        # Two bf16 in a word, each the upper half of a float: one instruction an element.
        a = (words << 16).to(tl.float32, bitcast=True)
        b = (words & -65536).to(tl.float32, bitcast=True)
        low = _least(low, _least(a, b))
        high = _most(high, _most(a, b))
        least = _least(least, _least(tl.abs(a), tl.abs(b)))
    else:
        x = words.to(WIDE)
        low = _least(low, x)
        high = _most(high, x)
        least = _least(least, tl.abs(x))
    return low, high, least


@triton.jit
def _total(words, WIDE: tl.constexpr):
    """Return the sum of a vector of each thread: [THREADS]."""
    if words.dtype == tl.int32:
        x = (words << 16).to(tl.float32, bitcast=True) + (words & -65536).to(tl.float32, bitcast=True)
    else:
        x = words.to(WIDE)
    return tl.sum(x, 1)


@triton.jit
def _add_powers(x, scale, shift, p1, p2, p3, p4):
    d = x * scale[:, None] - shift[:, None]
    dd = d * d
    return p1 + d, p2 + dd, p3 + dd * d, p4 + dd * dd


@triton.jit
def _add_vector(words, scale, shift, p1, p2, p3, p4, WIDE: tl.constexpr):
    """Add the powers of a vector's scaled deviations: [THREADS, words] each."""
    if words.dtype == tl.int32:
        a = (words << 16).to(tl.float32, bitcast=True)
        b = (words & -65536).to(tl.float32, bitcast=True)
        p1, p2, p3, p4 = _add_powers(a, scale, shift, p1, p2, p3, p4)
        p1, p2, p3, p4 = _add_powers(b, scale, shift, p1, p2, p3, p4)
    else:
        p1, p2, p3, p4 = _add_powers(words.to(WIDE), scale, shift, p1, p2, p3, p4)
    return p1, p2, p3, p4


@triton.jit
def _zeros(words, eps, WIDE: tl.constexpr):
    """Return the number of elements of at most eps in a vector of each thread: [THREADS] int32."""
    if words.dtype == tl.int32:
        a = (words << 16).to(tl.float32, bitcast=True)
        b = (words & -65536).to(tl.float32, bitcast=True)
        found = (tl.abs(a) <= eps).to(tl.int32) + (tl.abs(b) <= eps).to(tl.int32)
    else:
        found = (tl.abs(words.to(WIDE)) <= eps).to(tl.int32)
    return tl.sum(found, 1)


@triton.jit
def _bits(x):
    """Return the elements' bit patterns as they add up for one thread without loss: int32 for 16 bits, else int64."""
    if (x.dtype == tl.float16) | (x.dtype == tl.bfloat16):
        bits = x.to(tl.uint16, bitcast=True).to(tl.int32)
    elif x.dtype == tl.float32:
        bits = x.to(tl.uint32, bitcast=True).to(tl.int64)
    else:
        bits = x.to(tl.int64, bitcast=True)
    return bits


@triton.jit
def _bits_of(words):
    """Return the sum of the bit patterns of a vector of each thread: [THREADS], int32 for 16 bits, else int64."""
    if words.dtype == tl.int32:
        bits = (words & 65535) + ((words >> 16) & 65535)
    else:
        bits = _bits(words)
    return tl.sum(bits, 1)


@triton.jit
def _exponent(reach):
    """Return e so that deviations up to `reach` are at most about 1 in units of 2^e: int32."""
    if reach.dtype == tl.float64:
        e = ((reach.to(tl.int64, bitcast=True) >> 52) & 2047).to(tl.int32) - 1023
        e = tl.minimum(tl.maximum(e, -1000), 1000)
    else:
        e = ((reach.to(tl.int32, bitcast=True) >> 23) & 255) - 127
        e = tl.minimum(tl.maximum(e, -126), 126)
    # Nothing deviates: any unit will do that does not overflow the centre.
    return tl.where(reach > 0, e, 0)


@triton.jit
def _power_of_two(e, WIDE: tl.constexpr):
    """Return 2^e in the arithmetic type, exactly."""
    if tl.float64 == WIDE:
        power = ((e.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)
    else:
        power = ((e + 127) << 23).to(tl.float32, bitcast=True)
    return power


@triton.jit
def _own_range(start, begin, end, SIZE: tl.constexpr):
    """Return between which of a tile's elements the tensor's lie, counted from the tile's first one: int32."""
    first = tl.maximum(begin - start, 0).to(tl.int32)
    last = tl.maximum(tl.minimum(end - start, SIZE), 0).to(tl.int32)
    return first, last


@triton.jit
def _loaded(base, start, first, last, step, VECTOR: tl.constexpr):
    """Return one vector of each thread, [THREADS, VECTOR].

    A vector that holds one element of the tensor is read whole: 16 aligned bytes lie in one page.
    """
    vector = step * _THREADS + tl.arange(0, _THREADS)[:, None]
    at = vector * VECTOR + tl.arange(0, VECTOR)[None, :]
    has_own = (vector >= first // VECTOR) & (vector < (last + (VECTOR - 1)) // VECTOR)
    return tl.load(base + start + at, mask=tl.broadcast_to(has_own, (_THREADS, VECTOR)), other=0.0)


@triton.jit
def _is_own(first, last, step, VECTOR: tl.constexpr):
    """Return which elements of that vector of each thread are the tensor's: [THREADS, VECTOR]."""
    vector = step * _THREADS + tl.arange(0, _THREADS)[:, None]
    at = vector * VECTOR + tl.arange(0, VECTOR)[None, :]
    return (at >= first) & (at < last)


@triton.jit
def _count_and_center(base, start, begin, end, eps, checksum, SIZE: tl.constexpr, VECTOR: tl.constexpr, WIDE: tl.constexpr):
    """Return counts, extremes and mean of each thread's finite elements of a tile: [THREADS] each.

    A tile that is not whole is read here first: some vectors at a time, so as not to wait for each.
    """
    n = tl.zeros([_THREADS], tl.int32)
    zero = tl.zeros([_THREADS], tl.int32)
    nan = tl.zeros([_THREADS], tl.int32)
    pos = tl.zeros([_THREADS], tl.int32)
    neg = tl.zeros([_THREADS], tl.int32)
    bit_sum = tl.zeros([_THREADS], tl.int64)
    low = tl.full([_THREADS], _INF, WIDE)
    high = tl.full([_THREADS], -_INF, WIDE)
    total = tl.zeros([_THREADS], WIDE)
    shrunk = tl.zeros([_THREADS], WIDE)
    first, last = _own_range(start, begin, end, SIZE)
    GROUP: tl.constexpr = _AT_ONCE * _THREADS * VECTOR
    for group in range(first // GROUP, (last + (GROUP - 1)) // GROUP):
        vectors = (_loaded(base, start, first, last, group * _AT_ONCE, VECTOR),)
        for k in tl.static_range(1, _AT_ONCE):
            vector = _loaded(base, start, first, last, group * _AT_ONCE + k, VECTOR)
            vectors = vectors + (vector,)  # noqa: RUF005 Triton has no unpacking
        for k in tl.static_range(_AT_ONCE):
            is_own = _is_own(first, last, group * _AT_ONCE + k, VECTOR)
            x = vectors[k].to(WIDE)
            is_finite = (tl.abs(x) < _INF) & is_own
            n += tl.sum(is_finite.to(tl.int32), 1)
            zero += tl.sum(((tl.abs(x) <= eps) & is_own).to(tl.int32), 1)
            nan += tl.sum(((x != x) & is_own).to(tl.int32), 1)
            pos += tl.sum(((x == _INF) & is_own).to(tl.int32), 1)
            neg += tl.sum(((x == -_INF) & is_own).to(tl.int32), 1)
            low = tl.minimum(low, tl.min(tl.where(is_finite, x, _INF), 1))
            high = tl.maximum(high, tl.max(tl.where(is_finite, x, -_INF), 1))
            x = tl.where(is_finite, x, 0.0)
            total += tl.sum(x, 1)
            shrunk += tl.sum(x * (1.0 / 16384), 1)
            if checksum != 0:
                bit_sum += tl.sum(tl.where(is_own, _bits(vectors[k]), 0), 1).to(tl.int64)
    # Largest values overflow their sum, smallest ones are lost in the other.
    many = tl.maximum(n, 1).to(WIDE)
    center = tl.where(tl.abs(total) < _INF, total / many, (shrunk / many) * 16384)
    center = tl.where(n > 0, tl.minimum(tl.maximum(center, low), high), 0.0)
    return n, zero, nan, pos, neg, bit_sum, low, high, center


@triton.jit
def _powers(base, start, begin, end, center, scale, SIZE: tl.constexpr, VECTOR: tl.constexpr, WIDE: tl.constexpr):
    """Return sums of powers of the scaled deviations of each thread's finite elements of a tile: [THREADS] each."""
    d1 = tl.zeros([_THREADS], WIDE)
    d2 = tl.zeros([_THREADS], WIDE)
    d3 = tl.zeros([_THREADS], WIDE)
    d4 = tl.zeros([_THREADS], WIDE)
    first, last = _own_range(start, begin, end, SIZE)
    STEP: tl.constexpr = _THREADS * VECTOR
    for step in range(first // STEP, (last + (STEP - 1)) // STEP):
        x = _loaded(base, start, first, last, step, VECTOR).to(WIDE)
        is_finite = (tl.abs(x) < _INF) & _is_own(first, last, step, VECTOR)
        d = tl.where(is_finite, x * scale[:, None] - (center * scale)[:, None], 0.0)
        dd = d * d
        d1 += tl.sum(d, 1)
        d2 += tl.sum(dd, 1)
        d3 += tl.sum(dd * d, 1)
        d4 += tl.sum(dd * dd, 1)
    return d1, d2, d3, d4


@triton.jit
def _word(x):
    """Return a float64 as the int64 of its bits."""
    return x.to(tl.int64, bitcast=True)


@triton.jit
def _laid_out(lane, count, mean, m2, m3, m4, low, high, nan, pos, neg, zero, checksum):
    """Return [16] int64: the words of STATS_DTYPE, then four zeros."""
    words = tl.where(lane == 0, count.to(tl.int64), 0)
    # What float64 cannot hold is infinite.
    words = tl.where(lane == 1, _word(tl.minimum(tl.maximum(mean, low), high)), words)
    words = tl.where(lane == 2, _word(tl.where(m2 == m2, tl.maximum(m2, 0.0), _INF)), words)
    words = tl.where(lane == 3, _word(tl.where(m3 == m3, m3, _INF)), words)
    words = tl.where(lane == 4, _word(tl.where(m4 == m4, tl.maximum(m4, 0.0), _INF)), words)
    # Rounding in the means of equal elements is no variance; of no elements there is no mean.
    words = tl.where((lane >= 2) & (lane <= 4), tl.where(low < high, words, 0), words)
    words = tl.where(lane == 1, tl.where(count > 0.0, words, 0), words)
    words = tl.where(lane == 5, _word(low), words)
    words = tl.where(lane == 6, _word(high), words)
    words = tl.where(lane == 7, nan, words)
    words = tl.where(lane == 8, pos, words)
    words = tl.where(lane == 9, neg, words)
    words = tl.where(lane == 10, zero, words)
    return tl.where(lane == 11, checksum, words)


@triton.jit
def _both(
    n, near, low, high, nan, pos, neg, zero, bits, n2, near2, low2, high2, nan2, pos2, neg2, zero2, bits2,
):  # fmt: skip
    """Return what the first reduction of _summary makes of two threads."""
    return (
        n + n2, near + near2, tl.minimum(low, low2), tl.maximum(high, high2), nan + nan2, pos + pos2, neg + neg2,
        zero + zero2, bits + bits2,
    )  # fmt: skip


@triton.jit
def _both_powers(s1, s2, s3, s4, r1, r2, r3, r4):
    """Return what the second reduction of _summary makes of two threads."""
    return s1 + r1, s2 + r2, s3 + r3, s4 + r4


@triton.jit
def _summary(lane, n, ref, s1, s2, s3, s4, low, high, nan, pos, neg, zero, bits):
    """Return the words of all threads together, [16] int64, from each one's sums of powers of deviations from its own `ref`.

    Everything is [THREADS]. n, nan, pos, neg and zero may be int32: a part has fewer than 2^31 elements. There are two
    reductions and not one for every statistic, because the waits in them are most of what a small tensor costs. Float64, in
    trees of fixed shape. Source: Pebay, SAND2008-6212, for many at once.
    """
    # Each one's share of 2^64, which is more than all have together: no sum of these overflows.
    share = n.to(tl.float64) * _ONE_OF_MOST * ref
    n_all, near, low, high, nan, pos, neg, zero, bits = tl.reduce((n, share, low, high, nan, pos, neg, zero, bits), 0, _both)
    count = n_all.to(tl.float64)
    inverse = 1.0 / tl.maximum(count, 1.0)
    near = near * inverse * (1.0 / _ONE_OF_MOST)
    d = tl.where(n > 0, ref - near, 0.0)
    nd = n.to(tl.float64) * d
    a4 = s4 + d * (4.0 * s3 + d * (6.0 * s2 + d * (4.0 * s1 + nd)))
    a3 = s3 + d * (3.0 * s2 + d * (3.0 * s1 + nd))
    a2 = s2 + d * (2.0 * s1 + nd)
    s1, s2, s3, s4 = tl.reduce((s1 + nd, a2, a3, a4), 0, _both_powers)
    # From `near`, the weighted mean of all `ref`, to the mean. By Jensen's inequality count * d**k is at most the sum of
    # (x - ref)**k for even k: the subtraction loses no digits that the sums about `ref` had.
    d = s1 * inverse
    m2 = s2 - d * s1
    m3 = s3 - d * (3.0 * s2 - d * (2.0 * s1))
    m4 = s4 - d * (4.0 * s3 - d * (6.0 * s2 - d * (3.0 * s1)))
    return _laid_out(
        lane, count, near + d, m2, m3, m4, low.to(tl.float64), high.to(tl.float64), nan.to(tl.int64), pos.to(tl.int64),
        neg.to(tl.int64), zero.to(tl.int64), bits,
    )  # fmt: skip


@triton.jit
def _column(parts, word, at, num_parts):
    """Return one word of the parts `at`, [THREADS] int64; 0 behind the last."""
    # Other multiprocessors wrote them: read past this one's own cache.
    return tl.load(parts + word * num_parts + at, mask=at < num_parts, other=0, cache_modifier=".cg")


@triton.jit
def _real(word):
    return word.to(tl.float64, bitcast=True)


@triton.jit
def _merged(lane, parts, num_parts):
    """Return the words of all parts together, [16] int64. A thread merges every 128th part, in order of parts."""
    n = tl.zeros([_THREADS], tl.int64)
    nan, pos, neg, zero, bits = n, n, n, n, n
    low = tl.full([_THREADS], _INF, tl.float64)
    high = tl.full([_THREADS], -_INF, tl.float64)
    ref = tl.zeros([_THREADS], tl.float64)
    s1, s2, s3, s4 = ref, ref, ref, ref
    for first in range(0, num_parts.to(tl.int32), _THREADS):
        at = first + tl.arange(0, _THREADS)
        own = _column(parts, 0, at, num_parts)
        mean = _real(_column(parts, 1, at, num_parts))
        m2 = _real(_column(parts, 2, at, num_parts))
        m3 = _real(_column(parts, 3, at, num_parts))
        m4 = _real(_column(parts, 4, at, num_parts))
        own_low = _real(_column(parts, 5, at, num_parts))
        own_high = _real(_column(parts, 6, at, num_parts))
        nan += _column(parts, 7, at, num_parts)
        pos += _column(parts, 8, at, num_parts)
        neg += _column(parts, 9, at, num_parts)
        zero += _column(parts, 10, at, num_parts)
        bits += _column(parts, 11, at, num_parts)
        low = tl.minimum(low, tl.where(own > 0, own_low, _INF))
        high = tl.maximum(high, tl.where(own > 0, own_high, -_INF))
        ref = tl.where(n == 0, mean, ref)
        d = tl.where(own > 0, mean - ref, 0.0)
        nd = own.to(tl.float64) * d
        s4 += m4 + d * (4.0 * m3 + d * (6.0 * m2 + d * nd))
        s3 += m3 + d * (3.0 * m2 + d * nd)
        s2 += m2 + d * nd
        s1 += nd
        n += own
    return _summary(lane, n, ref, s1, s2, s3, s4, low, high, nan, pos, neg, zero, bits)


@triton.jit
def _seal(lane, words):
    """Return a digest of the first thirteen words, int64: a row of which only a part has arrived has another one."""
    mixed = words.to(tl.uint64, bitcast=True) * _SEAL
    mixed = (mixed ^ (mixed >> 32)) * (2 * lane + 1).to(tl.uint64)
    return tl.sum(tl.where(lane <= _STAT_WORDS, mixed.to(tl.int64, bitcast=True), 0), 0)


@triton.jit
def _deliver(lane, found, part, num_parts, parts, counter, row, out, epoch):
    """Leave a part's words, [16] int64, with the others'; the last one merges all and writes the row."""
    is_last = num_parts == 1
    if num_parts > 1:
        column = parts.to(tl.pointer_type(tl.int64))
        tl.store(column + lane * num_parts + part, found, mask=lane < _STAT_WORDS)
        # All threads' words are out before one thread says so, and that is seen before others' words are read.
        tl.debug_barrier()
        arrived = tl.atomic_add(counter.to(tl.pointer_type(tl.int32)), 1, sem="acq_rel")
        is_last = arrived.to(tl.int64) == num_parts - 1
        tl.debug_barrier()
        if is_last:
            found = _merged(lane, column, num_parts)
            tl.store(counter.to(tl.pointer_type(tl.int32)), 0)
    if is_last:
        found = tl.where(lane == _STAT_WORDS, epoch, found)
        found = tl.where(lane == _STAT_WORDS + 1, _seal(lane, found), found)
        tl.store(row.to(tl.pointer_type(tl.int64)) + lane, found)
        tl.store(out.to(tl.pointer_type(tl.int64)) + lane, found)


@triton.jit
def measure_part(
    address, numel, tiles_a_part, own_part, part, num_parts, parts, counter, row, out, epoch, eps, checksum,
    ELEMENT: tl.constexpr, WIDE: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Measure tiles [own_part * tiles_a_part, ...) of the tensor at `address`; the last of num_parts writes the row.

    parts: [12, num_parts] int64 in device memory. counter: int32, 0 before and after. The row is 16 words, sealed, at
    `row` on the device and at `out` in pinned memory.
    """
    SIZE: tl.constexpr = _STEPS * _THREADS * VECTOR
    # A bf16 tile is read as words of two.
    WORD: tl.constexpr = tl.int32 if tl.bfloat16 == ELEMENT else ELEMENT
    WORDS: tl.constexpr = VECTOR // 2 if tl.bfloat16 == ELEMENT else VECTOR
    STEP: tl.constexpr = _THREADS * WORDS
    at = tl.arange(0, _THREADS)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    # Counted from the last multiple of 16 bytes: every tile is then read in whole vectors, of any view.
    base = tl.multiple_of((address & -16).to(tl.pointer_type(ELEMENT)), 16)
    begin = (address & 15) // (16 // VECTOR)
    end = begin + numel
    first = own_part * tiles_a_part
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
    f0 = tl.zeros([_THREADS, WORDS], WORD)
    f1, f2, f3, f4, f5, f6, f7 = f0, f0, f0, f0, f0, f0, f0
    start = first.to(tl.int64) * SIZE
    at_word = first.to(tl.int64) * (_STEPS * STEP)
    is_next_whole = (start >= begin) & (start + SIZE <= end) & (first < stop)
    if is_next_whole:
        p = words + at_word + at
        f0, f1, f2, f3 = tl.load(p), tl.load(p + STEP), tl.load(p + 2 * STEP), tl.load(p + 3 * STEP)
        f4, f5, f6, f7 = tl.load(p + 4 * STEP), tl.load(p + 5 * STEP), tl.load(p + 6 * STEP), tl.load(p + 7 * STEP)
    for tile in range(first, stop):
        w0, w1, w2, w3, w4, w5, w6, w7 = f0, f1, f2, f3, f4, f5, f6, f7
        is_whole = is_next_whole
        is_next_whole = (start + SIZE >= begin) & (start + 2 * SIZE <= end) & (tile + 1 < stop)
        if is_next_whole:
            # On its way while this one is summed.
            p = words + (at_word + _STEPS * STEP) + at
            f0, f1, f2, f3 = tl.load(p), tl.load(p + STEP), tl.load(p + 2 * STEP), tl.load(p + 3 * STEP)
            f4, f5, f6, f7 = tl.load(p + 4 * STEP), tl.load(p + 5 * STEP), tl.load(p + 6 * STEP), tl.load(p + 7 * STEP)
        n = tl.full([_THREADS], _STEPS * VECTOR, tl.int32)
        zeros = tl.zeros([_THREADS], tl.int32)
        low = tl.zeros([_THREADS], WIDE)
        high, center, d1, d2, d3, d4 = low, low, low, low, low, low
        e = zeros
        is_plain = is_whole
        if is_whole:
            if checksum != 0:
                bit_sum += (_bits_of(w0) + _bits_of(w1) + _bits_of(w2) + _bits_of(w3)).to(tl.int64)
                bit_sum += (_bits_of(w4) + _bits_of(w5) + _bits_of(w6) + _bits_of(w7)).to(tl.int64)
            lows = tl.full([_THREADS, WORDS], _INF, WIDE)
            highs = tl.full([_THREADS, WORDS], -_INF, WIDE)
            leasts = tl.full([_THREADS, WORDS], _INF, WIDE)
            lows, highs, leasts = _extremes(w0, lows, highs, leasts, WIDE)
            lows, highs, leasts = _extremes(w1, lows, highs, leasts, WIDE)
            lows, highs, leasts = _extremes(w2, lows, highs, leasts, WIDE)
            lows, highs, leasts = _extremes(w3, lows, highs, leasts, WIDE)
            lows, highs, leasts = _extremes(w4, lows, highs, leasts, WIDE)
            lows, highs, leasts = _extremes(w5, lows, highs, leasts, WIDE)
            lows, highs, leasts = _extremes(w6, lows, highs, leasts, WIDE)
            lows, highs, leasts = _extremes(w7, lows, highs, leasts, WIDE)
            low = tl.min(lows, 1)
            high = tl.max(highs, 1)
            # The mean of a quarter is within 1.8 standard deviations of the mean of all: the sums about it lose no digits.
            center = (_total(w0, WIDE) + _total(w4, WIDE)) * (1.0 / (2 * VECTOR))
            center = tl.minimum(tl.maximum(center, low), high)
            e = _exponent(tl.maximum(high - center, center - low))
            scale = _power_of_two(-e, WIDE)
            shift = center * scale
            z = tl.zeros([_THREADS, WORDS], WIDE)
            p1, p2, p3, p4 = _add_vector(w0, scale, shift, z, z, z, z, WIDE)
            p1, p2, p3, p4 = _add_vector(w1, scale, shift, p1, p2, p3, p4, WIDE)
            p1, p2, p3, p4 = _add_vector(w2, scale, shift, p1, p2, p3, p4, WIDE)
            p1, p2, p3, p4 = _add_vector(w3, scale, shift, p1, p2, p3, p4, WIDE)
            p1, p2, p3, p4 = _add_vector(w4, scale, shift, p1, p2, p3, p4, WIDE)
            p1, p2, p3, p4 = _add_vector(w5, scale, shift, p1, p2, p3, p4, WIDE)
            p1, p2, p3, p4 = _add_vector(w6, scale, shift, p1, p2, p3, p4, WIDE)
            p1, p2, p3, p4 = _add_vector(w7, scale, shift, p1, p2, p3, p4, WIDE)
            d1, d2, d3, d4 = tl.sum(p1, 1), tl.sum(p2, 1), tl.sum(p3, 1), tl.sum(p4, 1)
            # An element that is not finite makes the squares of its thread so; no finite one does, scaled as they are.
            news = tl.max(tl.where(tl.min(leasts, 1) <= eps, 1, 0) + tl.where(d2 < _INF, 0, 2), 0)
            is_plain = news < 2
            if news == 1:
                # Read again, from the nearest cache: few tiles have zeros, and registers to keep them are dear.
                for step in range(_STEPS):
                    p = words + (at_word + step * STEP) + at
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
        # One factor after the other: 0 times what overflowed would be NaN.
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
        start += SIZE
        at_word += _STEPS * STEP

    lane = tl.arange(0, 16)
    found = _summary(lane, count, ref, s1, s2, s3, s4, lowest, highest, nan, pos, neg, zero, bit_sum)
    _deliver(lane, found, part, num_parts, parts, counter, row, out, epoch)
