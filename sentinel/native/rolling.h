/* Scalars against the rolling median of their last points: the same arithmetic as detect/windowed.py, bit for bit.
 *
 * Nothing is sorted: an order statistic has moved little since it was last asked for, so it is found from there by counting
 * what lies below and stepping to a neighbour. Points and residuals are on the asinh scale, in f32.
 */
#include "rolling_lanes.h"

typedef struct {
    double k, floor, near_zero;
    int32_t window, memory, warmup, settle_after;
} RollingParameters;

/* First axis the series; words a series: points window; recent and residuals `window` and `memory` rounded up to 16, what
 * is not there +inf; marks 6; held max(settle_after, 1); the others 1. Every array is contiguous. */
typedef struct {
    double *points;
    float *recent, *residuals, *marks;
    double *held, *unit, *center;
    int64_t *seen, *kept, *run;
    int32_t *filled, *at;
    uint8_t *settled;
} RollingState;

enum { ROLLING_SCORE = 1, ROLLING_LEARN = 2 };
#define ROLLING_MAX 4096

/* One series, seen from its first words. */
typedef RollingState Rolling;

/* marks: order statistics of the residuals, and the lower middle of the window: where the next search begins. */
enum { MARK_LOW, MARK_QUARTER, MARK_HALF, MARK_THREE, MARK_HIGH, MARK_MIDDLE, NUM_MARKS };
#define ROLLING_AHEAD 32
#define ROLLING_WIDTH(size) (((size) + 15) & ~15)

/* log(x), x >= 1: plain arithmetic in a fixed order, as `_log` of detect/windowed.py (fdlibm's polynomial). */
static inline double rolling_log(double x)
{
    uint64_t bits, biased;
    memcpy(&bits, &x, 8);
    /* An integer below 2^52 in the last bits of 2^52: as a float without a conversion, which few machines have in lanes. */
    biased = bits >> 52 | 0x4330000000000000u;
    double exponent;
    memcpy(&exponent, &biased, 8);
    exponent -= 4503599627370496.0 + 1022.0;
    bits = (bits & 0x000fffffffffffffu) | 0x3fe0000000000000u;
    double m;
    memcpy(&m, &bits, 8);
    const int is_low = m < 0.70710678118654752440;
    m = is_low ? m + m : m;
    exponent = is_low ? exponent - 1.0 : exponent;
    const double f = m - 1.0, s = f / (2.0 + f), z = s * s;
    const double series = z * (6.666666666666735130e-01 + z * (3.999999999940941908e-01 + z * (2.857142874366239149e-01
        + z * (2.222219843214978396e-01 + z * (1.818357216161805012e-01 + z * (1.531383769920937332e-01
        + z * 1.479819860511658591e-01))))));
    return exponent * 0.69314718055994530942 + (s + s + s * series);
}

static inline double rolling_asinh(double x, double unit)
{
    double y = x / unit;
    y = y > 1e300 ? 1e300 : y < -1e300 ? -1e300 : y;
    const double size = fabs(y);
    const double z = rolling_log(size < 1e8 ? size + sqrt(size * size + 1.0) : size + size);
    return y < 0.0 ? -z : z;
}

/* A float's bits, so ordered that integers compare as the floats do. */
static inline int32_t rolling_key(float x)
{
    int32_t bits;
    memcpy(&bits, &x, 4);
    return bits < 0 ? (int32_t)0x80000000 - bits : bits;
}

static inline float rolling_unkey(int32_t key)
{
    const int32_t bits = key < 0 ? (int32_t)0x80000000 - key : key;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* Number k of `width` numbers by size, from 0: it has moved little since it was `from`, so step there; else halve. What
 * lies about it is left in `at`. */
ROLLING_INLINE float rolling_select(const float *a, int width, int k, float from, RollingLook *at, int isa)
{
    float v = from;
    /* One number was replaced, as a rule: one step at most, taken without a branch that nobody could foresee. */
    *at = rolling_look(a, width, v, isa);
    v = k < at->less ? at->below : k >= at->most ? at->above : v;
    for (int step = 0; step < 16; step++) {
        *at = rolling_look(a, width, v, isa);
        if (k >= at->less && k < at->most) return v;
        v = k < at->less ? at->below : at->above;
    }
    int64_t low = rolling_key(-INFINITY), high = rolling_key(INFINITY);
    while (low < high) {
        const int64_t middle = low + ((high - low) >> 1);
        if (k < rolling_look(a, width, rolling_unkey((int32_t)middle), isa).most)
            high = middle;
        else
            low = middle + 1;
    }
    v = rolling_unkey((int32_t)low);
    *at = rolling_look(a, width, v, isa);
    return v;
}

/* The median of what is in the window. was_full: one point was replaced since the last time, so that of an odd number the
 * middle moved by one step at most. */
ROLLING_INLINE double rolling_center(const RollingParameters *p, Rolling *s, int was_full, int isa)
{
    const int num = *s->filled;
    RollingLook at;
    if (was_full && num % 2) {
        const float v = s->marks[MARK_MIDDLE];
        at = rolling_look(s->recent, ROLLING_WIDTH(p->window), v, isa);
        const float middle = num / 2 < at.less ? at.below : num / 2 >= at.most ? at.above : v;
        s->marks[MARK_MIDDLE] = middle;
        return (double)middle;
    }
    const float low = rolling_select(s->recent, ROLLING_WIDTH(p->window), (num - 1) / 2, s->marks[MARK_MIDDLE], &at, isa);
    s->marks[MARK_MIDDLE] = low;
    return 0.5 * ((double)low + (double)(num / 2 < at.most ? low : at.above));
}

/* The order statistics of the residuals, formed anew every 32nd point (the outer ones every 64th): of many, a few new ones
 * move them little. */
ROLLING_INLINE void rolling_mark(const RollingParameters *p, Rolling *s, int isa)
{
    const int64_t kept = *s->kept;
    if (kept >= 64 && kept % 32 != 0) return;
    const int num = kept < p->memory ? (int)kept : p->memory, width = ROLLING_WIDTH(p->memory);
    float *m = s->marks;
    RollingLook at;
    m[MARK_QUARTER] = rolling_select(s->residuals, width, num / 4, m[MARK_QUARTER], &at, isa);
    m[MARK_HALF] = rolling_select(s->residuals, width, num / 2, m[MARK_HALF], &at, isa);
    m[MARK_THREE] = rolling_select(s->residuals, width, (3 * num) / 4, m[MARK_THREE], &at, isa);
    if (kept >= 64 && kept % 64 != 0) return;
    m[MARK_LOW] = rolling_select(s->residuals, width, num / 10, m[MARK_LOW], &at, isa);
    m[MARK_HIGH] = rolling_select(s->residuals, width, (9 * num) / 10, m[MARK_HIGH], &at, isa);
}

static int rolling_order_f64(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Median of `num` numbers, which are put in order. */
static double rolling_median(double *numbers, int num)
{
    qsort(numbers, (size_t)num, sizeof *numbers, rolling_order_f64);
    return 0.5 * (numbers[(num - 1) / 2] + numbers[num / 2]);
}

/* The normal rise: k spreads, at least `floor`. Where the middle half says nothing (few digits) four fifths do. */
static inline double rolling_bound(const RollingParameters *p, const float *marks)
{
    const double half = ((double)marks[MARK_THREE] - (double)marks[MARK_QUARTER]) * 0.7413011092528009;
    const double most = ((double)marks[MARK_HIGH] - (double)marks[MARK_LOW]) * 0.19507602886806754;
    const double bound = p->k * (half > most ? half : most);
    return bound > p->floor ? bound : p->floor;
}

static inline double rolling_score(const RollingParameters *p, const Rolling *s, double z)
{
    if (*s->seen < 2 * (int64_t)p->warmup || *s->kept == 0) return 0.0;
    const double rise = (double)(float)z - *s->center - (double)s->marks[MARK_HALF];
    const double score = rise / rolling_bound(p, s->marks);
    return score > 0.0 ? score : 0.0;
}

/* Everything in the window on the scale of another unit. */
ROLLING_INLINE void rolling_rescale(const RollingParameters *p, Rolling *s, int isa)
{
    for (int i = 0; i < *s->filled; i++) s->recent[i] = (float)rolling_asinh(s->points[i], *s->unit);
    *s->center = rolling_center(p, s, 0, isa);
}

/* Decide below what the scale is linear: see `RollingMedian._choose_unit`. */
ROLLING_INLINE void rolling_choose_unit(const RollingParameters *p, Rolling *s, double *scratch, int isa)
{
    const int num = *s->filled;
    int num_low = 0;
    if (num < 2) return;
    /* A point at or below zero is needed for any other choice. */
    if (*s->seen != p->warmup) {
        int is_above = 1;
        for (int i = 0; i < num; i++) is_above &= s->recent[i] > 0.0f;
        if (is_above) return;
    }
    for (int i = 0; i + 1 < num; i++) scratch[i] = fabs(s->points[i + 1] - s->points[i]);
    const double noise = 1.0483565417151464 * rolling_median(scratch, num - 1);
    for (int i = 0; i < num; i++) {
        scratch[i] = fabs(s->points[i]);
        num_low += s->points[i] <= 0.0;
    }
    const double size = rolling_median(scratch, num);
    const int is_close = num_low > 0 && size < 3.0 * noise;
    if (!is_close && *s->seen != p->warmup) return;
    double unit = is_close ? 4.0 * noise : p->near_zero * size;
    if (!(unit > *s->unit)) return;
    *s->unit = unit < 1e300 ? unit : 1e300;
    rolling_rescale(p, s, isa);
}

ROLLING_INLINE void rolling_take(const RollingParameters *p, Rolling *s, double x, double z, double *scratch, int isa)
{
    const float point = (float)z;
    if (*s->seen >= p->warmup) {
        s->residuals[(uint32_t)*s->kept % (uint32_t)p->memory] = (float)((double)point - *s->center);
        *s->kept += 1;
        rolling_mark(p, s, isa);
    }
    const int was_full = *s->filled == p->window;
    s->recent[*s->at] = point;
    s->points[*s->at] = x;
    *s->at = *s->at + 1 == p->window ? 0 : *s->at + 1;
    *s->filled += *s->filled < p->window;
    *s->center = rolling_center(p, s, was_full, isa);
    *s->seen += 1;
    *s->run = 0;
    if (*s->seen == p->warmup || (*s->seen % 16 == 0 && *s->seen > p->warmup)) rolling_choose_unit(p, s, scratch, isa);
}

static double rolling_noise(double *numbers, int num)
{
    const double middle = rolling_median(numbers, num);
    for (int i = 0; i < num; i++) numbers[i] = fabs(numbers[i] - middle);
    return 1.4826 * rolling_median(numbers, num);
}

/* Keep flagged points apart until they are a level of their own: see `RollingMedian._hold`. */
ROLLING_INLINE void rolling_hold(const RollingParameters *p, Rolling *s, double x, double *scratch, int isa)
{
    const int size = p->settle_after;
    if (!size) return;
    s->held[*s->run % size] = x;
    *s->run += 1;
    if (*s->run < size) return;
    const int first = (int)(*s->run % size), half = size / 2;
    double *z = scratch + size;
    for (int i = 0; i < size; i++) z[i] = rolling_asinh(s->held[(first + i) % size], *s->unit);
    if (half) {
        memcpy(scratch, z, (size_t)half * sizeof *z);
        const double early = rolling_median(scratch, half), early_noise = rolling_noise(scratch, half);
        memcpy(scratch, z + half, (size_t)(size - half) * sizeof *z);
        const double late = rolling_median(scratch, size - half), late_noise = rolling_noise(scratch, size - half);
        const double noise = early_noise > late_noise ? early_noise : late_noise;
        const double allowed = 2.0 * noise > p->floor ? 2.0 * noise : p->floor;
        if (fabs(late - early) > allowed) return;
    }
    const int num = size < p->window ? size : p->window;
    for (int i = 0; i < num; i++) s->points[i] = s->held[(first + size - num + i) % size];
    *s->filled = num;
    *s->at = num == p->window ? 0 : num;
    for (int i = num; i < p->window; i++) s->recent[i] = INFINITY;
    rolling_rescale(p, s, isa);
    *s->run = 0;
    *s->settled = 1;
}

ROLLING_INLINE void rolling_run(const RollingParameters *p, const RollingState *state, int64_t num_points,
                                int64_t num_series, const double *values, double *scores, const uint8_t *flags,
                                int32_t steps, double *scratch, int isa)
{
    const int64_t held = p->settle_after ? p->settle_after : 1;
    const int64_t recent = ROLLING_WIDTH(p->window), residuals = ROLLING_WIDTH(p->memory);
    for (int64_t j = 0; j < num_series; j++) {
        Rolling s = {
            state->points + j * p->window, state->recent + j * recent, state->residuals + j * residuals,
            state->marks + j * NUM_MARKS, state->held + j * held, state->unit + j, state->center + j, state->seen + j,
            state->kept + j, state->run + j, state->filled + j, state->at + j, state->settled + j,
        };
        double z[ROLLING_AHEAD], unit = 0.0;
        for (int64_t i = 0; i < num_points; i++) {
            const double x = values[i * num_series + j];
            const int64_t ahead = i % ROLLING_AHEAD;
            if (ahead == 0 || *s.unit != unit) {
                /* Many at once, in lanes; again should one of them change the unit. */
                const int64_t num = num_points - i < ROLLING_AHEAD - ahead ? num_points - i : ROLLING_AHEAD - ahead;
                unit = *s.unit;
                for (int64_t n = 0; n < num; n++) z[ahead + n] = rolling_asinh(values[(i + n) * num_series + j], unit);
            }
            if (steps & ROLLING_LEARN) *s.settled = 0;
            if (!isfinite(x)) {
                if (steps & ROLLING_SCORE) scores[i * num_series + j] = 0.0;
                continue;
            }
            double score = 0.0;
            if (steps & ROLLING_SCORE) scores[i * num_series + j] = score = rolling_score(p, &s, z[ahead]);
            if (!(steps & ROLLING_LEARN)) continue;
            if (flags ? flags[i * num_series + j] != 0 : score >= 1.0)
                rolling_hold(p, &s, x, scratch, isa);
            else
                rolling_take(p, &s, x, z[ahead], scratch, isa);
        }
    }
}

#define ROLLING_ARGUMENTS \
    const RollingParameters *p, const RollingState *state, int64_t num_points, int64_t num_series, const double *values, \
        double *scores, const uint8_t *flags, int32_t steps, double *scratch

/* The same loops for each instruction set: comparing and counting give the same results in any. */
static void rolling_portable(ROLLING_ARGUMENTS)
{
    rolling_run(p, state, num_points, num_series, values, scores, flags, steps, scratch, 0);
}
#if HAS_X86
static __attribute__((target("avx2,popcnt"))) void rolling_avx2(ROLLING_ARGUMENTS)
{
    rolling_run(p, state, num_points, num_series, values, scores, flags, steps, scratch, 1);
}
static __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,popcnt,prefer-vector-width=512"))) void rolling_avx512(ROLLING_ARGUMENTS)
{
    rolling_run(p, state, num_points, num_series, values, scores, flags, steps, scratch, 2);
}
#endif

/* Score and take in `num_points` points of `num_series` series. values, scores, flags: point i of series j lies at
 * i * num_series + j. steps: ROLLING_SCORE writes scores; ROLLING_LEARN takes the points in, as anomalous where `flags`
 * says so, or where there are none, where the score reaches 1. scratch: 2 * max(window, settle_after) + 2 words.
 * `isa` as sentinel_best_isa says, or less. */
EXPORT void sentinel_rolling(ROLLING_ARGUMENTS, int32_t isa)
{
#if HAS_X86
    if (isa == 2)
        rolling_avx512(p, state, num_points, num_series, values, scores, flags, steps, scratch);
    else if (isa == 1)
        rolling_avx2(p, state, num_points, num_series, values, scores, flags, steps, scratch);
    else
#endif
        rolling_portable(p, state, num_points, num_series, values, scores, flags, steps, scratch);
    (void)isa;
}

/* The yardstick of benchmarks/detection_speed.py: an exponential mean and variance on the same scale, in the same style. */
EXPORT void sentinel_exponential(int64_t num_points, int64_t num_series, const double *values, double *scores, double k,
                                 double rate, double *mean, double *variance)
{
    for (int64_t j = 0; j < num_series; j++)
        for (int64_t i = 0; i < num_points; i++) {
            const double x = values[i * num_series + j];
            scores[i * num_series + j] = 0.0;
            if (!isfinite(x)) continue;
            const double away = rolling_asinh(x, 0.02) - mean[j];
            const double score = away / (k * sqrt(variance[j]) + 1e-9);
            scores[i * num_series + j] = score > 0.0 ? score : 0.0;
            if (score >= 1.0) continue;
            mean[j] += rate * away;
            variance[j] += rate * (away * away - variance[j]);
        }
}
