/* Scalars against the rolling median of their last points: the same arithmetic as detect/rolling.py, bit for bit.
 *
 * The window is also kept in order: each point replaces the oldest there in a pass without a branch (rolling_lanes.h), so
 * its median is a look at the middle. Points are taken in a stretch at a time, and those that turn out anomalous are taken
 * back: replacing is its own inverse. The residuals' order statistics, asked for now and then, have moved little since, and
 * are found from there. Points and residuals are on the asinh scale, in f32; what is put in order has no -0.0, so that any
 * way of ordering gives the same bits.
 */
#include "rolling_lanes.h"

typedef struct {
    double k, floor, near_zero;
    int32_t window, memory, warmup, settle_after;
} RollingParameters;

/* First axis the series; words a series: points window; recent, ordered and residuals `window` and `memory` rounded up to
 * 16, what is not there +inf; marks 5; held max(settle_after, 1); the others 1. Every array is contiguous. */
typedef struct {
    double *points;
    float *recent, *ordered, *residuals, *marks;
    double *held, *unit, *center;
    int64_t *seen, *kept, *run;
    int32_t *filled, *at;
    uint8_t *settled;
    float *second;
} RollingState;

enum { ROLLING_SCORE = 1, ROLLING_LEARN = 2 };

/* One series, seen from its first words. */
typedef RollingState Rolling;

/* marks: order statistics of the residuals. */
enum { MARK_LOW, MARK_QUARTER, MARK_THREE, MARK_HIGH, MARK_TOP, NUM_MARKS };
/* detect/rolling.py: MANY, EVERY, OUTER_EVERY, UNIT_EVERY, LATEST, YOUNG; FEW is 16. */
enum { ROLLING_MANY = 64, ROLLING_EVERY = 32, ROLLING_OUTER_EVERY = 64, ROLLING_UNIT_EVERY = 16, ROLLING_LATEST = 8, ROLLING_YOUNG = 128 };
#define ROLLING_AHEAD 32
#define ROLLING_WIDTH(size) (((size) + 15) & ~15)

static inline Rolling rolling_series_of(const RollingParameters *p, const RollingState *state, int64_t j)
{
    const int64_t width = ROLLING_WIDTH(p->window), memory = ROLLING_WIDTH(p->memory);
    const int64_t held = p->settle_after ? p->settle_after : 1;
    return (Rolling){
        state->points + j * p->window, state->recent + j * width, state->ordered + j * width, state->residuals + j * memory,
        state->marks + j * NUM_MARKS, state->held + j * held, state->unit + j, state->center + j, state->seen + j,
        state->kept + j, state->run + j, state->filled + j, state->at + j, state->settled + j,
        state->second + j,
    };
}

/* log(x), x positive and normal: plain arithmetic in a fixed order, as `log` of detect/rolling.py (fdlibm's polynomial). */
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

/* The same; what lies within `reach` of `from` is looked through first, but for AVX2, where stepping is faster. */
ROLLING_INLINE float rolling_select_near(const float *a, int width, int k, float from, float reach, int isa)
{
    float near[ROLLING_NEAR + 16];
    int less;
    RollingLook at;
    if (isa == 1) return rolling_select(a, width, k, from, &at, isa);
    const int num = rolling_near(a, width, from - reach, from + reach, near, &less, isa);
    if (less <= k && k < less + num && num <= ROLLING_NEAR) return rolling_nth(near, num, k - less, isa);
    return rolling_select(a, width, k, from, &at, isa);
}

/* The median of what is in the window. */
static inline double rolling_center(const float *ordered, int filled)
{
    return 0.5 * ((double)ordered[(filled - 1) / 2] + (double)ordered[filled / 2]);
}

/* The first residuals in order, for as long as marks are formed at every point: they are the one thing that is kept for a
 * call and no longer. */
typedef struct {
    float ordered[ROLLING_MANY];
    int64_t num;
} RollingYoung;

/* The order statistics of the residuals, of many formed anew every 32nd point (the outer ones every 64th): a few new ones
 * among them move them little. */
ROLLING_INLINE void rolling_mark(const RollingParameters *p, Rolling *s, RollingYoung *young, int isa)
{
    const int64_t kept = *s->kept;
    if (kept >= ROLLING_MANY && kept % ROLLING_EVERY != 0) return;
    const int num = kept < p->memory ? (int)kept : p->memory, width = ROLLING_WIDTH(p->memory);
    float *m = s->marks;
    if (kept <= ROLLING_MANY && kept <= p->memory) {
        if (!young->num)
            for (int i = 0; i < ROLLING_MANY; i++) young->ordered[i] = INFINITY;
        for (; young->num < kept; young->num++)
            rolling_replace(young->ordered, ROLLING_MANY, INFINITY, s->residuals[young->num], isa);
        m[MARK_LOW] = young->ordered[num / 10];
        m[MARK_QUARTER] = young->ordered[num / 4];
        m[MARK_THREE] = young->ordered[(3 * num) / 4];
        m[MARK_HIGH] = young->ordered[(9 * num) / 10];
        m[MARK_TOP] = young->ordered[num - 1];
        *s->second = young->ordered[num > 1 ? num - 2 : 0];
        return;
    }
    /* Some 16 residuals lie within that of each; as many came and went since. Only speed depends on it. */
    const float *a = s->residuals, reach = 20.0f / (float)num * (m[MARK_THREE] - m[MARK_QUARTER]);
    m[MARK_QUARTER] = rolling_select_near(a, width, num / 4, m[MARK_QUARTER], reach, isa);
    m[MARK_THREE] = rolling_select_near(a, width, (3 * num) / 4, m[MARK_THREE], reach, isa);
    m[MARK_TOP] = rolling_look(a, width, INFINITY, isa).below;
    RollingLook at;
    *s->second = rolling_select(a, width, num > 1 ? num - 2 : 0, *s->second, &at, isa);
    if (kept >= ROLLING_MANY && kept % ROLLING_OUTER_EVERY != 0) return;
    m[MARK_LOW] = rolling_select_near(a, width, num / 10, m[MARK_LOW], 1.5f * reach, isa);
    m[MARK_HIGH] = rolling_select_near(a, width, (9 * num) / 10, m[MARK_HIGH], 1.5f * reach, isa);
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

#include "rolling_measure.h"

/* A number as windows hold it: zero without a sign, so that what is equal is the same bits, in whatever order. */
static inline float rolling_held(double x) { return (float)x + 0.0f; }

/* Everything in the window on the scale of another unit. */
ROLLING_INLINE void rolling_rescale(const RollingParameters *p, Rolling *s, int isa)
{
    const int width = ROLLING_WIDTH(p->window);
    for (int i = 0; i < width; i++) s->ordered[i] = INFINITY;
    for (int i = 0; i < *s->filled; i++) {
        s->recent[i] = rolling_held(rolling_asinh(s->points[i], *s->unit));
        rolling_replace(s->ordered, width, INFINITY, s->recent[i], isa);
    }
    *s->center = rolling_center(s->ordered, *s->filled);
}

/* Decide below what the scale is linear: see `_choose_unit` of detect/rolling.py. */
ROLLING_INLINE void rolling_choose_unit(const RollingParameters *p, Rolling *s, double *scratch, int isa)
{
    const int num = *s->filled;
    int num_low = 0;
    if (num < 2) return;
    /* A point at or below zero is needed for any other choice. */
    if (*s->seen != p->warmup && s->ordered[0] > 0.0f) return;
    double unit, least = INFINITY;
    for (int i = 0; i < num; i++) {
        scratch[i] = fabs(s->points[i]);
        num_low += s->points[i] <= 0.0;
    }
    if (!num_low && *s->seen != p->warmup) return;
    unit = p->near_zero * rolling_median(scratch, num);
    if (num_low) {
        for (int i = 0; i + 1 < num; i++) {
            const double step = fabs(s->points[i + 1] - s->points[i]);
            least = step > 0.0 && step < least ? step : least;
            scratch[i] = step;
        }
        const double noise = 4.0 * (1.0483565417151464 * rolling_median(scratch, num - 1));
        const double digits = least < INFINITY ? 50.0 * least : 0.0;
        unit = noise > digits ? noise : digits;
    }
    if (!(unit > *s->unit)) return;
    *s->unit = unit < 1e300 ? unit : 1e300;
    rolling_rescale(p, s, isa);
}

static double rolling_noise(double *numbers, int num)
{
    const double middle = rolling_median(numbers, num);
    for (int i = 0; i < num; i++) numbers[i] = fabs(numbers[i] - middle);
    return 1.4826 * rolling_median(numbers, num);
}

/* Keep flagged points apart until they are a level of their own: see `_hold` of detect/rolling.py. */
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

/* z of the next points of a series, or of one point of the next series (unit_stride 1), in lanes; NaN for what is not
 * finite. */
ROLLING_INLINE void rolling_ahead(const double *values, int64_t stride, const double *unit, int64_t unit_stride, int64_t num,
                                  double *z)
{
    double x[ROLLING_AHEAD], u[ROLLING_AHEAD];
    for (int64_t n = 0; n < num; n++) {
        x[n] = values[n * stride];
        u[n] = unit[n * unit_stride];
    }
    for (int64_t n = 0; n < num; n++) {
        const double y = rolling_asinh(x[n], u[n]);
        z[n] = fabs(x[n]) < INFINITY ? y : NAN;
    }
}

static inline int64_t rolling_least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Points until there is more to do than to take them in, the one included after which there is. */
static inline int64_t rolling_due(const RollingParameters *p, const Rolling *s)
{
    const int64_t seen = *s->seen, kept = *s->kept;
    if (*s->filled < p->window || kept < ROLLING_MANY || seen < 2 * (int64_t)p->warmup) return 1;
    /* Windows that wrap, and marks; the unit, which stays where all of a window lies above zero. */
    const int64_t wrap = rolling_least(p->window - *s->at, p->memory - kept % p->memory);
    const int64_t due = rolling_least(wrap, ROLLING_EVERY - kept % ROLLING_EVERY);
    return s->ordered[0] > 0.0f ? due : rolling_least(due, ROLLING_UNIT_EVERY - seen % ROLLING_UNIT_EVERY);
}

/* Take in up to `due` points, as rolling_due says, or fewer where one that is not above zero makes the unit due; return how
 * many were: up to the first that is not finite or anomalous.
 * The window slides over all of them before any is judged, and back over those that it should not have: few are. */
ROLLING_INLINE int64_t rolling_stretch(const RollingParameters *p, Rolling *s, int64_t *due, int64_t stride,
                                       const double *values, const double *z, double *scores, const uint8_t *flags, int width,
                                       int isa)
{
    const int is_judged = scores && rolling_is_judged(p, s), is_kept = *s->seen >= p->warmup;
    const int filled = *s->filled + (*s->filled < p->window), low = (filled - 1) / 2, high = filled / 2;
    float *const recent = s->recent + *s->at, *const residuals = s->residuals + *s->kept % p->memory;
    double *const points = s->points + *s->at;
    float latest[ROLLING_LATEST + ROLLING_AHEAD], middle[ROLLING_AHEAD][2], half[ROLLING_AHEAD];
    float *const point = latest + ROLLING_LATEST;
    double center[ROLLING_AHEAD + 1], rise[ROLLING_AHEAD];
    int64_t num = *due;
    int is_well = 1;
    for (int64_t i = 0; i < num; i++) {
        point[i] = rolling_held(z[i]);
        is_well &= point[i] > 0.0f;
    }
    for (int64_t i = 0; i < num && !(is_well && !flags); i++) {
        if (z[i] != z[i] || (flags && flags[i * stride]))
            num = i;
        else if (point[i] <= 0.0f)
            *due = num = rolling_least(num, i + ROLLING_UNIT_EVERY - (*s->seen + i) % ROLLING_UNIT_EVERY);
    }
    center[0] = *s->center;
    rolling_slide(s->ordered, width, recent, point, num, low, high, middle, isa);
    for (int64_t i = 0; i < num; i++) center[i + 1] = 0.5 * ((double)middle[i][0] + (double)middle[i][1]);
    if (is_judged) {
        /* A quotient below 1 is not rounded to 1: score >= 1 and rise >= bound are the same. */
        const double bound = rolling_bound(p, s);
        double base[ROLLING_AHEAD];
        if (num > 1)
            rolling_bases(s, p->window, latest, center, num, base);
        else
            base[0] = rolling_base(p, s);
        is_well = 1;
        for (int64_t i = 0; i < num; i++) {
            rise[i] = (double)(float)z[i] - base[i];
            is_well &= rise[i] < bound;
        }
        if (!is_well && !flags) {
            int64_t first = 0;
            while (rise[first] < bound) first++;
            while (num > first) {
                num--;
                rolling_replace(s->ordered, width, point[num], recent[num], isa);
            }
        }
        for (int64_t i = 0; i < num; i++) {
            const double score = rise[i] / bound;
            scores[i * stride] = score > 0.0 ? score : 0.0;
        }
    } else if (scores) {
        for (int64_t i = 0; i < num; i++) scores[i * stride] = 0.0;
    }
    if (!num) return 0;
    if (is_kept) rolling_middles(s, p->window, point, num, half);
    for (int64_t i = 0; i < num; i++) {
        recent[i] = point[i];
        points[i] = values[i * stride];
    }
    if (is_kept)
        for (int64_t i = 0; i < num; i++) residuals[i] = rolling_held((double)half[i] - center[i + 1]);
    *s->center = center[num];
    *s->at = *s->at + (int32_t)num == p->window ? 0 : *s->at + (int32_t)num;
    *s->filled = filled;
    *s->seen += num;
    *s->kept += is_kept ? num : 0;
    *s->run = 0;
    return num;
}

/* All points of one series. ahead: z of the first, where it is known. */
ROLLING_INLINE void rolling_series(const RollingParameters *p, Rolling *s, int64_t num_points, int64_t stride,
                                   const double *values, double *scores, const uint8_t *flags, const double *ahead,
                                   double *scratch, int width, int isa)
{
    RollingYoung young;
    double z[ROLLING_AHEAD], unit = *s->unit;
    int64_t first = 0, end = ahead != NULL;
    if (ahead) z[0] = *ahead;
    young.num = 0;
    for (int64_t i = 0; i < num_points;) {
        if (i == end || *s->unit != unit) {
            unit = *s->unit;
            first = i;
            end = num_points - i < ROLLING_AHEAD ? num_points : i + ROLLING_AHEAD;
            rolling_ahead(values + i * stride, stride, &unit, 0, end - i, z);
        }
        int64_t due = rolling_least(rolling_due(p, s), end - i);
        const uint8_t *flagged = flags ? flags + i * stride : NULL;
        double *scored = scores ? scores + i * stride : NULL;
        const int64_t taken
            = rolling_stretch(p, s, &due, stride, values + i * stride, z + (i - first), scored, flagged, width, isa);
        *s->settled = 0;
        if (taken) {
            if (*s->kept) rolling_mark(p, s, &young, isa);
            if (*s->seen == p->warmup || (*s->seen > p->warmup && *s->seen % ROLLING_UNIT_EVERY == 0))
                rolling_choose_unit(p, s, scratch, isa);
            i += taken;
        }
        if (taken < due) {
            const double x = values[i * stride];
            double score = 0.0;
            if (fabs(x) < INFINITY) {
                if (rolling_is_judged(p, s))
                    score = rolling_score(z[i - first], rolling_base(p, s), rolling_bound(p, s));
                rolling_hold(p, s, x, scratch, isa);
            }
            if (scores) scores[i * stride] = score > 0.0 ? score : 0.0;
            i++;
        }
    }
}

ROLLING_INLINE void rolling_run(const RollingParameters *p, const RollingState *state, int64_t num_points,
                                int64_t num_series, const double *values, double *scores, const uint8_t *flags,
                                int32_t steps, double *scratch, int width, int isa)
{
    double z[ROLLING_AHEAD];
    for (int64_t j = 0; j < num_series; j++) {
        const int64_t at = j % ROLLING_AHEAD;
        if (num_points == 1 && at == 0)
            rolling_ahead(values + j, 1, state->unit + j, 1, num_series - j < ROLLING_AHEAD ? num_series - j : ROLLING_AHEAD, z);
        Rolling s = rolling_series_of(p, state, j);
        if (steps & ROLLING_LEARN) {
            rolling_series(p, &s, num_points, num_series, values + j, steps & ROLLING_SCORE ? scores + j : NULL,
                           flags ? flags + j : NULL, num_points == 1 ? z + at : NULL, scratch, width, isa);
            continue;
        }
        const double base = rolling_base(p, &s), bound = rolling_bound(p, &s);
        const int is_judged = rolling_is_judged(p, &s);
        for (int64_t i = 0; i < num_points; i++) {
            const double x = values[i * num_series + j];
            const double y = num_points == 1 ? z[at] : rolling_asinh(x, *s.unit);
            const double score = is_judged && isfinite(x) ? rolling_score(y, base, bound) : 0.0;
            scores[i * num_series + j] = score > 0.0 ? score : 0.0;
        }
    }
}

#define ROLLING_ARGUMENTS \
    const RollingParameters *p, const RollingState *state, int64_t num_points, int64_t num_series, const double *values, \
        double *scores, const uint8_t *flags, int32_t steps, double *scratch

/* Windows of up to 48 points, as by default, have loops of their own: a width that is known is no loop. */
#define ROLLING_SIZED(isa) \
    const int width = ROLLING_WIDTH(p->window); \
    if (width == 48) \
        rolling_run(p, state, num_points, num_series, values, scores, flags, steps, scratch, 48, isa); \
    else \
        rolling_run(p, state, num_points, num_series, values, scores, flags, steps, scratch, width, isa)

/* The same loops for each instruction set: comparing and counting give the same results in any. */
static void rolling_portable(ROLLING_ARGUMENTS)
{
    ROLLING_SIZED(0);
}
#if HAS_X86
static __attribute__((target("avx2,popcnt"))) void rolling_avx2(ROLLING_ARGUMENTS)
{
    ROLLING_SIZED(1);
}
static __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,popcnt,prefer-vector-width=512"))) void rolling_avx512(ROLLING_ARGUMENTS)
{
    ROLLING_SIZED(2);
}
#endif

/* Score and take in `num_points` points of `num_series` series. values, scores, flags: point i of series j lies at
 * i * num_series + j. steps: ROLLING_SCORE writes scores; ROLLING_LEARN takes the points in, as anomalous where `flags`
 * says so, or where there are none, where the score reaches 1. scratch: 2 * max(window, settle_after) + 2 words.
 * `isa` as sentinel_best_isa says, or less. */
EXPORT void sentinel_rolling_medians(ROLLING_ARGUMENTS, int32_t isa)
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
