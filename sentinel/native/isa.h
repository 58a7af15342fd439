/* All span functions of one instruction set: ISA names it, TARGET compiles for it, LANES_FILE has its operations. */
#define LANES(name) JOIN(JOIN(name, _), ISA)
#define OP(name) LANES(JOIN(JOIN(REAL_NAME, _), name))
#include LANES_FILE

/* A pair of words' upper halves, averaged (rounding up): their sum says which multiple of 2^32 the sum of all words,
 * known modulo 2^32, lies on. Exact while a lane sees fewer than 21,000 pairs. */
static TARGET uint64_t LANES(checks_f32_total)(const LANES(checks) *checks, int num_pairs)
{
    uint32_t sums[sizeof checks->sum / 4], highs[sizeof checks->sum / 4];
    uint64_t total = 0;
    memcpy(sums, &checks->sum, sizeof sums);
    memcpy(highs, &checks->high, sizeof highs);
    for (unsigned i = 0; i < sizeof sums / 4; i++) {
        const uint64_t at_least = (2 * (uint64_t)highs[i] - (uint64_t)num_pairs) << 16;
        total += at_least + (uint32_t)(sums[i] - (uint32_t)at_least);
    }
    return total;
}

/* Two elements a word: the sum of the upper ones, and of all words modulo 2^32. */
static TARGET uint64_t LANES(checks_bf16_total)(const LANES(checks) *checks, int num_pairs)
{
    uint32_t sums[sizeof checks->sum / 4], highs[sizeof checks->sum / 4];
    uint64_t total = 0;
    (void)num_pairs;
    memcpy(sums, &checks->sum, sizeof sums);
    memcpy(highs, &checks->high, sizeof highs);
    for (unsigned i = 0; i < sizeof sums / 4; i++) total += (uint64_t)highs[i] + (uint32_t)(sums[i] - (highs[i] << 16));
    return total;
}

static TARGET uint64_t LANES(checks_f16_total)(const LANES(checks) *checks, int num_pairs)
{
    return LANES(checks_bf16_total)(checks, num_pairs);
}

static TARGET uint64_t LANES(checks_f64_total)(const LANES(checks) *checks, int num_pairs)
{
    uint64_t sums[sizeof checks->sum / 8], total = 0;
    (void)num_pairs;
    memcpy(sums, &checks->sum, sizeof sums);
    for (unsigned i = 0; i < sizeof sums / 8; i++) total += sums[i];
    return total;
}

/* Elements of 16 bits, as integers: the bound of each sign, read from the bits of the three bounds that are kept. */
static TARGET void LANES(i16_bounds_end)(const LANES(i16_bounds) *bounds, uint16_t *low, uint16_t *high)
{
    int16_t tops[sizeof bounds->top / 2];
    uint16_t deeps[sizeof bounds->top / 2], smalls[sizeof bounds->top / 2], deep = 0, small = 0xffffu;
    int16_t top = INT16_MIN;
    memcpy(tops, &bounds->top, sizeof tops);
    memcpy(deeps, &bounds->deep, sizeof deeps);
    memcpy(smalls, &bounds->small, sizeof smalls);
    for (unsigned i = 0; i < sizeof tops / 2; i++) {
        if (tops[i] > top) top = tops[i];
        const uint16_t d = deeps[i] ^ I16_TURN, s = smalls[i] ^ I16_TURN;
        if (d > deep) deep = d;
        if (s < small) small = s;
    }
    *high = top >= 0 ? (uint16_t)top : small;      /* none is positive: the largest is the smallest size */
    *low = deep & 0x8000u ? deep : small;          /* none is negative */
}

#define ELEMENT float
#define ELEMENT_BITS uint32_t
#define DTYPE f32
#define REAL float
#define REAL_NAME f32
#define WIDTH F32_W
#define LOAD2 F32_LOAD2_f32
#define WIDEN(x) ((double)(x))
#define WIDEN_SIZE(x) ((double)(x))
#define SIGN_BIT 0x80000000u
#define SPILL 64
#include "span.h"

#define ELEMENT double
#define ELEMENT_BITS uint64_t
#define DTYPE f64
#define REAL double
#define REAL_NAME f64
#define WIDTH F64_W
#define LOAD2 F64_LOAD2_f64
#define WIDEN(x) (x)
#define WIDEN_SIZE(x) (x)
#define SIGN_BIT 0x8000000000000000u
#define SPILL 1024
#include "span.h"

#define ELEMENT uint16_t
#define ELEMENT_BITS uint16_t
#define DTYPE bf16
#define REAL float
#define REAL_NAME f32
#define WIDTH F32_W
#define LOAD2 F32_LOAD2_bf16
#define WIDEN(x) ((double)widen_bf16(x))
#define WIDEN_SIZE(x) ((double)widen_bf16(x))
#define SIGN_BIT 0x8000u
#define KEYED
#define SPILL 64
#include "span.h"

#define ELEMENT uint16_t
#define ELEMENT_BITS uint16_t
#define DTYPE f16
#define REAL float
#define REAL_NAME f32
#define WIDTH F32_W
#define LOAD2 F32_LOAD2_f16
#define WIDEN(x) ((double)widen_f16(x))
#define WIDEN_SIZE(x) ((double)size_of_f16(x))
#define SIGN_BIT 0x8000u
#define KEYED
#define SPILL 64
#include "span.h"

#include "gather.h"

#undef LANES
#undef I16_TURN
#undef OP
#undef F32_W
#undef F64_W
#undef F32_LOAD2_f32
#undef F64_LOAD2_f64
#undef F32_LOAD2_bf16
#undef F32_LOAD2_f16
#undef ISA
#undef TARGET
#undef LANES_FILE
