/* All block functions of one instruction set: ISA names it, TARGET compiles for it, LANES_FILE has its operations. */
#define LANES(name) JOIN(JOIN(name, _), ISA)
#define OP(name) LANES(JOIN(JOIN(REAL_NAME, _), name))
#include LANES_FILE

#define ELEMENT float
#define DTYPE f32
#define REAL float
#define REAL_NAME f32
#define WIDTH F32_W
#define LOAD2 F32_LOAD2_f32
#define WIDEN(x) ((double)(x))
#define EXPONENT_LIMIT 126
#include "block.h"

#define ELEMENT double
#define DTYPE f64
#define REAL double
#define REAL_NAME f64
#define WIDTH F64_W
#define LOAD2 F64_LOAD2_f64
#define WIDEN(x) (x)
#define EXPONENT_LIMIT 1000
#include "block.h"

#define ELEMENT uint16_t
#define DTYPE bf16
#define REAL float
#define REAL_NAME f32
#define WIDTH F32_W
#define LOAD2 F32_LOAD2_bf16
#define WIDEN(x) ((double)widen_bf16(x))
#define KEYED
#define EXPONENT_LIMIT 126
#include "block.h"

#define ELEMENT uint16_t
#define DTYPE f16
#define REAL float
#define REAL_NAME f32
#define WIDTH F32_W
#define LOAD2 F32_LOAD2_f16
#define WIDEN(x) ((double)widen_f16(x))
#define KEYED
#define EXPONENT_LIMIT 126
#include "block.h"

/* Sums of bit patterns: halves of 16 bits fit 32-bit sums over a block, which is what vectorises. */
static TARGET uint64_t LANES(checksum16)(const uint16_t *p, int n)
{
    uint32_t sum = 0;
    for (int i = 0; i < n; i++) sum += p[i];
    return sum;
}

static TARGET uint64_t LANES(checksum32)(const uint32_t *p, int n)
{
    uint32_t low = 0, high = 0;
    for (int i = 0; i < n; i++) {
        low += p[i] & 0xffffu;
        high += p[i] >> 16;
    }
    return (uint64_t)low + ((uint64_t)high << 16);
}

static TARGET uint64_t LANES(checksum64)(const uint64_t *p, int n)
{
    uint64_t sum = 0;
    for (int i = 0; i < n; i++) sum += p[i];
    return sum;
}

#undef LANES
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
