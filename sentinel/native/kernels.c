/* Moments of CPU tensors, and folding of rows: a plain C ABI for ctypes. No Python, no torch, no state.
 *
 * Numerics (FIELD_NOTES 2): blocks of 2048 elements, centred on their own mean and scaled by a power of two, in the
 * tensor's own arithmetic type (fp32 for the half types), summed in lanes; blocks merge in f64 by Pebay's formulas
 * (SAND2008-6212, eq. 3.1) into segments, segments into the tensor, always in the same order: the number of threads
 * does not change a bit of the result.
 */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if (defined(__GNUC__) || defined(__clang__)) && (defined(__x86_64__) || defined(__i386__))
#include <immintrin.h>
#define HAS_X86 1
#else
#define HAS_X86 0
#endif

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#define HAS_THREADS 1
#else
#define HAS_THREADS 0
#endif

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

#define BLOCK 2048
#define SEGMENT ((int64_t)BLOCK * 128)
#define MAX_THREADS 16

enum { F32 = 0, F64 = 1, BF16 = 2, F16 = 3, NUM_DTYPES = 4 };
enum { WITH_CHECKSUM = 1, ACCUMULATE = 2 };
static const int element_bytes[NUM_DTYPES] = {4, 8, 2, 2};

typedef float f32_t;
typedef double f64_t;

typedef struct {
    int64_t count;
    double mean, m2, m3, m4, min, max;
    int64_t num_nan, num_pos_inf, num_neg_inf, num_zero;
    uint64_t checksum;
} Stats;
typedef Stats Block;

typedef struct {
    uint32_t tensor;
    uint8_t kind, reserved;
    uint16_t flags;
    int32_t micro_step;
    uint32_t call_id, site_pos, num_folded, bad_call_id, max_call_id;
    int32_t bad_micro_step, max_micro_step;
    Stats stats;
} Row;

typedef char stats_are_96_bytes[sizeof(Stats) == 96 ? 1 : -1];
typedef char rows_are_136_bytes[sizeof(Row) == 136 ? 1 : -1];

static const Stats empty = {.min = INFINITY, .max = -INFINITY};

static inline double power_of_two(int exponent) /* -1022 <= exponent <= 1023 */
{
    const uint64_t bits = (uint64_t)(exponent + 1023) << 52;
    double x;
    memcpy(&x, &bits, 8);
    return x;
}

static inline int exponent_of(double x) /* x > 0; floor(log2(x)), -1023 for the smallest, 1024 for infinity */
{
    uint64_t bits;
    memcpy(&bits, &x, 8);
    return (int)(bits >> 52 & 0x7ff) - 1023;
}

static inline float widen_bf16(uint16_t x)
{
    const uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static inline float widen_f16(uint16_t x)
{
    const uint32_t sign = (uint32_t)(x & 0x8000u) << 16, rest = x & 0x7fffu;
    uint32_t bits;
    float f;
    if (rest >= 0x7c00u) { /* infinity, nan */
        bits = sign | 0x7f800000u | (rest & 0x3ffu) << 13;
    } else if (rest >= 0x400u) {
        bits = sign | ((rest << 13) + 0x38000000u);
    } else { /* zero, denormal: rest * 2^-24 */
        f = (float)rest * 0x1p-24f;
        return sign ? -f : f;
    }
    memcpy(&f, &bits, 4);
    return f;
}

/* The largest number of the type that is not above x >= 0 (the half types: its bits), so that |v| <= x stays exact. */
static inline float f32_at_most(double x)
{
    float f = (float)x;
    if ((double)f > x) f = nextafterf(f, -INFINITY);
    return f;
}

static inline double f64_at_most(double x) { return x; }

static inline uint16_t bf16_at_most(double x)
{
    const float f = f32_at_most(x);
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return (uint16_t)(bits >> 16);
}

static inline uint16_t f16_at_most(double x)
{
    uint16_t bits = 0;
    for (int bit = 1 << 14; bit && x > 0.0; bit >>= 1)
        if ((bits | bit) <= 0x7c00 && (double)widen_f16((uint16_t)(bits | bit)) <= x) bits |= (uint16_t)bit;
    return bits;
}

/* Moments about the true mean from sums of powers about `center`, in units of 2^exponent. */
static void recenter(Stats *out, int n, double center, double d1, double d2, double d3, double d4, int exponent)
{
    const double e = d1 / n, unit = power_of_two(exponent), square = unit * unit;
    double m2 = d2 - e * d1, m4 = d4 - 4.0 * e * d3 + 6.0 * e * e * d2 - 3.0 * e * e * e * d1;
    const double m3 = d3 - 3.0 * e * d2 + 2.0 * e * e * d1;
    if (m2 < 0.0) m2 = 0.0;
    if (m4 < 0.0) m4 = 0.0;
    out->mean = center + e * unit;
    if (out->mean < out->min) out->mean = out->min;
    if (out->mean > out->max) out->mean = out->max;
    out->m2 = m2 * square;
    out->m3 = m3 * unit * square;
    out->m4 = m4 * unit * unit * square;
}

static void merge(Stats *a, const Stats *b)
{
    if (b->count > 0) {
        if (a->count == 0) {
            a->count = b->count;
            a->mean = b->mean;
            a->m2 = b->m2;
            a->m3 = b->m3;
            a->m4 = b->m4;
            a->min = b->min;
            a->max = b->max;
        } else {
            const double na = (double)a->count, nb = (double)b->count, n = na + nb;
            const double share = 1.0 / n, fa = na * share, fb = nb * share, d = b->mean - a->mean, dd = d * d, nn = na * fb;
            a->m4 += b->m4 + dd * dd * nn * (fa * fa - fa * fb + fb * fb)
                   + 6.0 * dd * (fa * fa * b->m2 + fb * fb * a->m2) + 4.0 * d * (fa * b->m3 - fb * a->m3);
            a->m3 += b->m3 + dd * d * nn * (fa - fb) + 3.0 * d * (fa * b->m2 - fb * a->m2);
            a->m2 += b->m2 + dd * nn;
            a->mean += d * fb;
            a->count += b->count;
            if (b->min < a->min) a->min = b->min;
            if (b->max > a->max) a->max = b->max;
        }
    }
    a->num_nan += b->num_nan;
    a->num_pos_inf += b->num_pos_inf;
    a->num_neg_inf += b->num_neg_inf;
    a->num_zero += b->num_zero;
    a->checksum += b->checksum;
}

/* ---- one instruction set after the other ---- */

#define ISA portable
#define TARGET
#define LANES_FILE "lanes_portable.h"
#include "isa.h"

#if HAS_X86
#define ISA avx2
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define LANES_FILE "lanes_avx2.h"
#include "isa.h"

#define ISA avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,prefer-vector-width=512")))
#define LANES_FILE "lanes_avx512.h"
#include "isa.h"
#endif

typedef struct {
    int (*f32)(const float *, int, double, Block *);
    int (*f64)(const double *, int, double, Block *);
    int (*bf16)(const uint16_t *, int, double, Block *);
    int (*f16)(const uint16_t *, int, double, Block *);
    uint64_t (*checksum16)(const uint16_t *, int);
    uint64_t (*checksum32)(const uint32_t *, int);
    uint64_t (*checksum64)(const uint64_t *, int);
} Isa;

#define ISA_TABLE(isa) \
    {block_f32_##isa, block_f64_##isa, block_bf16_##isa, block_f16_##isa, checksum16_##isa, checksum32_##isa, checksum64_##isa}
static const Isa isas[] = {
    ISA_TABLE(portable),
#if HAS_X86
    ISA_TABLE(avx2),
    ISA_TABLE(avx512),
#endif
};

/* The best instruction set this CPU has: 0 portable, 1 AVX2, 2 AVX-512. */
EXPORT int sentinel_best_isa(void)
{
#if HAS_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")
        && __builtin_cpu_supports("avx512dq"))
        return 2;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
    return 0;
}

/* ---- the careful path: a block that holds something not finite, or whose sum overflows ---- */

static double widened(const void *p, int i, int dtype)
{
    switch (dtype) {
    case F32: return ((const float *)p)[i];
    case F64: return ((const double *)p)[i];
    case BF16: return widen_bf16(((const uint16_t *)p)[i]);
    default: return widen_f16(((const uint16_t *)p)[i]);
    }
}

static void careful_block(const void *p, int n, int dtype, double zero_eps, Block *out)
{
    double x[BLOCK], largest = 0.0;
    int m = 0;
    *out = empty;
    for (int i = 0; i < n; i++) {
        const double v = widened(p, i, dtype), size = fabs(v);
        if (size <= DBL_MAX) {
            x[m++] = v;
            if (size > largest) largest = size;
            if (v < out->min) out->min = v;
            if (v > out->max) out->max = v;
            out->num_zero += size <= zero_eps;
        } else if (v != v) {
            out->num_nan++;
        } else if (v > 0.0) {
            out->num_pos_inf++;
        } else {
            out->num_neg_inf++;
        }
    }
    out->count = m;
    if (m == 0 || largest == 0.0) return;
    int exponent = exponent_of(largest) + 1;
    if (exponent < -1000) exponent = -1000;
    if (exponent > 1000) exponent = 1000; /* then |x| < 2^24 in these units: no sum overflows */
    const double scale = power_of_two(-exponent);
    double mean = 0.0, d1 = 0.0, d2 = 0.0, d3 = 0.0, d4 = 0.0;
    for (int i = 0; i < m; i++) mean += x[i] * scale;
    mean /= m;
    /* Deviations are scaled again by their own reach, so that their fourth powers neither over- nor underflow. */
    double reach = 0.0;
    for (int i = 0; i < m; i++) {
        x[i] = x[i] * scale - mean;
        if (fabs(x[i]) > reach) reach = fabs(x[i]);
    }
    if (out->min == out->max || reach == 0.0) {
        out->mean = out->min == out->max ? out->min : mean * power_of_two(exponent);
        return;
    }
    int inner = exponent_of(reach) + 1;
    if (inner < -1000) inner = -1000;
    const double again = power_of_two(-inner);
    for (int i = 0; i < m; i++) {
        const double d = x[i] * again;
        d1 += d;
        d2 += d * d;
        d3 += d * d * d;
        d4 += d * d * d * d;
    }
    int total = exponent + inner;
    if (total < -1022) total = -1022;
    if (total > 1023) total = 1023;
    recenter(out, m, mean * power_of_two(exponent), d1, d2, d3, d4, total);
}

/* ---- tensors ---- */

static void measure_segment(const Isa *isa, const char *p, int64_t n, int dtype, double zero_eps, int flags, Stats *out)
{
    *out = empty;
    for (int64_t at = 0; at < n; at += BLOCK) {
        const int size = n - at < BLOCK ? (int)(n - at) : BLOCK;
        const void *here = p + at * element_bytes[dtype];
        Block block = empty;
        int is_done = 0;
        switch (dtype) {
        case F32: is_done = isa->f32(here, size, zero_eps, &block); break;
        case F64: is_done = isa->f64(here, size, zero_eps, &block); break;
        case BF16: is_done = isa->bf16(here, size, zero_eps, &block); break;
        case F16: is_done = isa->f16(here, size, zero_eps, &block); break;
        }
        if (!is_done) careful_block(here, size, dtype, zero_eps, &block);
        if (flags & WITH_CHECKSUM) {
            switch (element_bytes[dtype]) {
            case 2: block.checksum = isa->checksum16(here, size); break;
            case 4: block.checksum = isa->checksum32(here, size); break;
            default: block.checksum = isa->checksum64(here, size); break;
            }
        }
        merge(out, &block);
    }
}

typedef struct {
    const char *p;
    int64_t n;
    int32_t dtype, tensor;
    Stats stats;
} Segment;

typedef struct {
    const Isa *isa;
    Segment *segments;
    int64_t num_segments;
    int64_t next;
    double zero_eps;
    int flags;
} Work;

#if HAS_THREADS
static void *work_on_segments(void *argument)
{
    Work *work = argument;
    for (;;) {
        const int64_t i = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED);
        if (i >= work->num_segments) return NULL;
        Segment *s = &work->segments[i];
        measure_segment(work->isa, s->p, s->n, s->dtype, work->zero_eps, work->flags, &s->stats);
    }
}

/* Threads live as long as the call: nothing to fork around, nothing to tear down. Returns 0 where there is no memory. */
static int measure_in_threads(const Isa *isa, int64_t num, const uint64_t *pointers, const int64_t *numels,
                              const uint8_t *dtypes, char *out, int64_t out_stride, double zero_eps, int flags,
                              int num_threads, int64_t num_segments)
{
    Segment *segments = malloc((size_t)num_segments * sizeof *segments);
    if (!segments) return 0;
    int64_t filled = 0;
    for (int64_t t = 0; t < num; t++) {
        for (int64_t at = 0; at < numels[t]; at += SEGMENT) {
            Segment *s = &segments[filled++];
            s->p = (const char *)(uintptr_t)pointers[t] + at * element_bytes[dtypes[t]];
            s->n = numels[t] - at < SEGMENT ? numels[t] - at : SEGMENT;
            s->dtype = dtypes[t];
            s->tensor = (int32_t)t;
        }
    }
    Work work = {isa, segments, filled, 0, zero_eps, flags};
    pthread_t threads[MAX_THREADS];
    int started = 0;
    while (started < num_threads - 1 && pthread_create(&threads[started], NULL, work_on_segments, &work) == 0) started++;
    work_on_segments(&work);
    for (int i = 0; i < started; i++) pthread_join(threads[i], NULL);
    for (int64_t i = 0; i < filled; i++) {
        Stats sum;
        char *place = out + segments[i].tensor * out_stride;
        memcpy(&sum, place, sizeof sum);
        merge(&sum, &segments[i].stats);
        memcpy(place, &sum, sizeof sum);
    }
    free(segments);
    return 1;
}
#endif

/* Measure `num` tensors, contiguous in memory, into Stats words `out_stride` bytes apart. With ACCUMULATE the numbers
 * are merged into what stands there. `isa` as sentinel_best_isa says, or less. Returns 0, or 1 + the index of a tensor
 * whose dtype code is unknown (then nothing was written). */
EXPORT int64_t sentinel_measure(int64_t num, const uint64_t *pointers, const int64_t *numels, const uint8_t *dtypes,
                                char *out, int64_t out_stride, double zero_eps, int32_t flags, int32_t num_threads,
                                int32_t isa_index)
{
    const Isa *isa = &isas[isa_index];
    int64_t total = 0, num_segments = 0;
    for (int64_t t = 0; t < num; t++) {
        if (dtypes[t] >= NUM_DTYPES) return 1 + t;
        total += numels[t];
        num_segments += (numels[t] + SEGMENT - 1) / SEGMENT;
    }
    if (!(flags & ACCUMULATE))
        for (int64_t t = 0; t < num; t++) memcpy(out + t * out_stride, &empty, sizeof empty);
#if HAS_THREADS
    /* A thread costs some 20 us; it pays from about half a million elements on. */
    int64_t useful = total / (2 * SEGMENT);
    if (useful > MAX_THREADS) useful = MAX_THREADS;
    if (num_threads > useful) num_threads = (int32_t)useful;
    if (num_threads > 1
        && measure_in_threads(isa, num, pointers, numels, dtypes, out, out_stride, zero_eps, flags, num_threads, num_segments))
        return 0;
#endif
    for (int64_t t = 0; t < num; t++) {
        Stats sum;
        memcpy(&sum, out + t * out_stride, sizeof sum);
        const char *p = (const char *)(uintptr_t)pointers[t];
        for (int64_t at = 0; at < numels[t]; at += SEGMENT) {
            Stats part;
            const int64_t n = numels[t] - at < SEGMENT ? numels[t] - at : SEGMENT;
            measure_segment(isa, p + at * element_bytes[dtypes[t]], n, dtypes[t], zero_eps, flags, &part);
            merge(&sum, &part);
        }
        memcpy(out + t * out_stride, &sum, sizeof sum);
    }
    return 0;
}

/* The same for one tensor, for hooks: fewer arguments to convert. */
EXPORT int64_t sentinel_measure_one(uint64_t pointer, int64_t numel, int32_t dtype, char *out, double zero_eps,
                                    int32_t flags, int32_t num_threads, int32_t isa_index)
{
    const uint8_t code = (uint8_t)dtype;
    return sentinel_measure(1, &pointer, &numel, &code, out, 96, zero_eps, flags, num_threads, isa_index);
}

/* ---- rows ---- */

#define NONE_ID 0xffffffffu
#define FOLDED 4u

static double absmax(const Stats *s)
{
    if (s->count <= 0) return -1.0;
    const double a = fabs(s->min), b = fabs(s->max);
    return a > b ? a : b;
}

static void point_at_own(Row *row)
{
    if (row->num_folded == 0) row->num_folded = 1;
    if (row->bad_call_id == NONE_ID && row->stats.num_nan + row->stats.num_pos_inf + row->stats.num_neg_inf > 0) {
        row->bad_call_id = row->call_id;
        row->bad_micro_step = row->micro_step;
    }
    if (row->max_call_id == NONE_ID && row->stats.count > 0) {
        row->max_call_id = row->call_id;
        row->max_micro_step = row->micro_step;
    }
}

/* Fold rows in place by (tensor, kind), in order of first appearance. Rows that belong to no micro-batch (micro_step -1,
 * not FOLDED) stay as they are. Returns the number of rows left, or -1 where there is no memory. */
EXPORT int64_t sentinel_fold_rows(Row *rows, int64_t num)
{
    uint64_t size = 16;
    while (size < 2 * (uint64_t)num) size *= 2;
    int64_t *table = malloc(size * sizeof *table);
    if (!table) return -1;
    memset(table, 0xff, size * sizeof *table);
    int64_t filled = 0;
    for (int64_t i = 0; i < num; i++) {
        Row row = rows[i];
        point_at_own(&row);
        if (row.micro_step == -1 && !(row.flags & FOLDED)) {
            rows[filled++] = row;
            continue;
        }
        uint64_t at = ((((uint64_t)row.tensor << 8) | row.kind) * 0x9e3779b97f4a7c15u >> 20) & (size - 1);
        while (table[at] >= 0 && (rows[table[at]].tensor != row.tensor || rows[table[at]].kind != row.kind))
            at = (at + 1) & (size - 1);
        if (table[at] < 0) {
            table[at] = filled;
            rows[filled++] = row;
            continue;
        }
        Row *into = &rows[table[at]];
        if (into->bad_call_id == NONE_ID) {
            into->bad_call_id = row.bad_call_id;
            into->bad_micro_step = row.bad_micro_step;
        }
        if (absmax(&row.stats) > absmax(&into->stats)) {
            into->max_call_id = row.max_call_id;
            into->max_micro_step = row.max_micro_step;
        }
        into->flags |= row.flags | FOLDED;
        into->micro_step = -1;
        into->num_folded += row.num_folded;
        merge(&into->stats, &row.stats);
    }
    free(table);
    return filled;
}

/* Merge the Stats words found `stride` bytes apart into `out[group[i]]`, in order; a negative group is left out. */
EXPORT void sentinel_merge_rows(const char *stats, int64_t stride, const int32_t *group, int64_t num, Stats *out,
                                int64_t num_groups)
{
    for (int64_t g = 0; g < num_groups; g++) out[g] = empty;
    for (int64_t i = 0; i < num; i++) {
        if (group[i] < 0 || group[i] >= num_groups) continue;
        Stats one;
        memcpy(&one, stats + i * stride, sizeof one);
        merge(&out[group[i]], &one);
    }
}
