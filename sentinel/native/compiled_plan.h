/* Judging by compiled plans (sentinel/detect/vectorised.py, which says why each number is what it is): all baselines and limits of one
 * step in one pass over the merged statistics. The arithmetic is the numpy's, operation by operation, in double on float
 * state; results do not depend on the instruction set, on the batch, or on the order of entries. */

#define TILE 256
#define CLIP 4.0
#define PEAK_DECAY 0.995
#define COMMON_SAMPLE 128
#define PATIENCE 4
#define MAX_COUNT 32000
#define LEAST_COMMON 4
#define TINY 1e-38
#define HUGE_VALUE 1e38
#define LOG_TINY ((float)-87.49823353377374)

enum { ALGORITHM_LOG, ALGORITHM_LINEAR, ALGORITHM_LIMIT, ALGORITHM_STILL };
enum { SIDES_BOTH, SIDES_UP, SIDES_DOWN };
enum { S_MEAN, S_STD, S_VAR, S_NORM, S_RMS, S_MIN, S_MAX, S_ABSMAX, S_SKEW, S_KURTOSIS, S_NANS, S_INFS, S_ZEROS, NUM_STATISTICS };
enum { HIT_ANOMALOUS = 1, HIT_SETTLED = 2 };

/* One algorithm over the series of one statistic, a row of a compiled plan; native/layout.py has the same as a numpy dtype. */
typedef struct {
    int32_t algorithm, sides, statistic, warmup, settle_after, lasting, after, has_common, num_points, reserved;
    double k, floor, minimum, location_rate, spread_rate, peak_factor, above, below, common;
    int64_t num_entries;
    const int32_t *index; /* of the tensor, rising */
    const int32_t *slots; /* of the series; NULL: entry i is series i */
    float *location, *spread, *peak, *run_location, *run_spread, *size;
    int16_t *count, *run, *inside;
    uint8_t *settled, *zero_is_normal;
    double *last;
    int16_t *streak, *longest, *age;
    int64_t cursor;
} PlanRow;

typedef struct {
    int32_t plan_row, entry, direction, what;
    double value, score, baseline;
} Hit;

typedef char hits_are_40_bytes[sizeof(Hit) == 40 ? 1 : -1];

static inline double larger(double a, double b) { return a > b ? a : b; }

static inline int is_norm_only(const Stats *s) { return s->m3 == INFINITY && s->m4 != s->m4; }

static double rms_of(const Stats *s)
{
    const double n = (double)s->count, deviation = sqrt(s->m2 / n), square = s->mean * s->mean + s->m2 / n;
    /* hypot is for what a square cannot hold. */
    return square > 1e-280 && square < 1e280 ? sqrt(square) : hypot(s->mean, deviation);
}

static double statistic_of(const Stats *s, int statistic)
{
    const double n = s->count > 0 ? (double)s->count : 1.0;
    const int64_t total = s->count + s->num_nan + s->num_pos_inf + s->num_neg_inf;
    double x;
    switch (statistic) {
    case S_MEAN: return s->count > 0 && !is_norm_only(s) ? s->mean : NAN;
    case S_STD: return s->count > 0 && !is_norm_only(s) ? sqrt(s->m2 / n) : NAN;
    case S_VAR: return s->count > 0 && !is_norm_only(s) ? s->m2 / n : NAN;
    case S_NORM: return s->count > 0 ? rms_of(s) * sqrt(n) : total == 0 ? 0.0 : NAN;
    case S_RMS: return s->count > 0 ? rms_of(s) : NAN;
    case S_MIN: return fabs(s->min) < INFINITY ? s->min : NAN;
    case S_MAX: return fabs(s->max) < INFINITY ? s->max : NAN;
    case S_ABSMAX:
        x = fabs(s->min) > fabs(s->max) || s->min != s->min ? fabs(s->min) : fabs(s->max);
        return x < INFINITY ? x : NAN;
    case S_SKEW:
        if (!(s->count > 1 && s->m2 > 0.0) || is_norm_only(s)) return NAN;
        x = sqrt(s->m2 / n);
        return s->m3 / n / x / x / x;
    case S_KURTOSIS:
        if (!(s->count > 1 && s->m2 > 0.0 && s->m4 > 0.0 && s->m4 < INFINITY)) return NAN;
        return s->m4 / s->m2 * (n / s->m2);
    case S_NANS: return (double)s->num_nan;
    case S_INFS: return (double)(s->num_pos_inf + s->num_neg_inf);
    case S_ZEROS: return total > 0 && s->num_zero >= 0 ? (double)s->num_zero / (double)total : NAN;
    default: return NAN;
    }
}

/* log x for a positive, normal x, to an ulp; without branches, so that a loop of it is vectors. Source: FreeBSD e_log.c. */
static inline double log_of(double x)
{
    uint64_t bits, up;
    double m, k;
    memcpy(&bits, &x, 8);
    bits += 0x3ff0000000000000u - 0x3fe6a09e00000000u;
    up = (bits >> 52) | 0x4330000000000000u; /* the exponent as the low bits of 2^52 */
    memcpy(&k, &up, 8);
    k -= 4503599627370496.0 + 1023.0;
    bits = (bits & 0x000fffffffffffffu) + 0x3fe6a09e00000000u;
    memcpy(&m, &bits, 8);
    const double f = m - 1.0, s = f / (2.0 + f), z = s * s, w = z * z, half = 0.5 * f * f;
    const double t1 = w * (3.999999999940941908e-01 + w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01));
    const double t2 = z * (6.666666666666735130e-01 + w * (2.857142874366239149e-01 + w * (1.818357216161805012e-01
                    + w * 1.479819860511658591e-01)));
    return k * 6.93147180369123816490e-01 - ((half - (s * (half + t1 + t2) + k * 1.90821492927058770002e-10)) - f);
}

static inline void add_hit(Hit *hits, int64_t *num_hits, int plan_row, int64_t entry, int what, double value, double score,
                           double baseline, double residual)
{
    Hit *hit = &hits[(*num_hits)++];
    hit->plan_row = plan_row;
    hit->entry = (int32_t)entry;
    hit->direction = residual > 0.0 ? 1 : residual < 0.0 ? -1 : 0;
    hit->what = what;
    hit->value = value;
    hit->score = score;
    hit->baseline = baseline;
}

/* One point of a series, step by step as VectorisedBaseline.score and .learn. x is finite. */
static void judge_point(const PlanRow *f, int plan_row, int64_t entry, int64_t at, double x, double z, int linear, Hit *hits,
                        int64_t *num_hits)
{
    const double location = f->location[at], spread = f->spread[at], whole = z - location, common = f->common;
    const double residual = whole - common, magnitude = fabs(residual);
    const int is_zero = !linear && x == 0.0, is_warm = f->count[at] < f->warmup;
    const int was_running = f->run[at] > 0;
    double floor = linear ? larger(f->floor * f->size[at], TINY) : f->floor;
    double bound = larger(larger(spread * f->k, f->peak[at] * f->peak_factor), floor);
    const double size = f->sides == SIDES_UP ? residual : f->sides == SIDES_DOWN ? -residual : magnitude;
    const int is_anomalous = !is_warm && size >= bound && !(x < f->minimum) && !(is_zero && f->zero_is_normal[at]);
    int what = is_anomalous ? HIT_ANOMALOUS : 0;
    int64_t hit = *num_hits;
    if (is_anomalous) {
        const double baseline = f->count[at] > 0 ? (linear ? location : exp(location)) : NAN;
        add_hit(hits, num_hits, plan_row, entry, what, x, size / bound, baseline, residual);
    }
    f->settled[at] = 0;
    if (linear) {
        if (!is_anomalous) {
            const int count = f->count[at];
            const double rate = count < 10 ? 1.0 / ((count < 9 ? count : 9) + 1.0) : 0.1, old = f->size[at];
            f->size[at] = (float)(old + rate * (fabs(z) - old));
            floor = larger(f->floor * f->size[at], TINY);
        }
    } else if (!is_anomalous) {
        if (is_zero) {
            if (f->count[at] > 0) f->zero_is_normal[at] = 1;
            return;
        }
        if (was_running && f->run_location[at] <= LOG_TINY) f->zero_is_normal[at] = 1;
    }
    if (!is_anomalous) {
        f->run[at] = 0;
        if (is_warm) {
            const double seen = f->count[at];
            if (f->count[at] == 0) {
                f->location[at] = (float)z;
            } else {
                f->location[at] = (float)(location + larger(1.0 / (seen + 1.0), 0.25) * whole);
                f->spread[at] = (float)(spread + larger(1.0 / seen, 0.1) * (fabs(whole) - spread));
            }
            f->count[at]++;
            return;
        }
        const double limit = larger(spread * CLIP, floor * 0.25), learned = magnitude < limit ? magnitude : limit;
        f->peak[at] = (float)larger(f->peak[at] * PEAK_DECAY, magnitude);
        f->location[at] = (float)(location + f->location_rate * (copysign(learned, residual) + common));
        f->spread[at] = (float)(spread + f->spread_rate * (learned - spread));
        return;
    }
    if (!f->settle_after) return;
    const double level = f->run_location[at], wobble = f->run_spread[at], offset = z - level;
    const double near = larger(larger(floor, 6.0 * spread), 0.1 * fabs(level - location));
    const int joins = was_running && fabs(offset) <= near, n = joins ? f->run[at] + 1 : 1;
    const double rate = larger(1.0 / n, 0.1);
    f->run[at] = (int16_t)n;
    f->run_location[at] = (float)(joins ? level + offset * rate : z);
    f->run_spread[at] = (float)(joins ? wobble + (fabs(offset) - wobble) * rate : 0.0);
    if (n >= f->settle_after) {
        f->settled[at] = 1;
        f->run[at] = 0;
        if (!linear && f->run_location[at] <= LOG_TINY) {
            f->zero_is_normal[at] = 1;
        } else {
            f->location[at] = f->run_location[at];
            if (f->run_spread[at] > f->spread[at]) f->spread[at] = f->run_spread[at];
            f->peak[at] = 0.0f;
        }
        hits[hit].what |= HIT_SETTLED;
    }
}

/* Put the n-th smallest (0-based) of `x` at its place, nothing larger before it. */
static double select_nth(double *x, int num, int n)
{
    int low = 0, high = num - 1;
    while (low < high) {
        const double pivot = x[(low + high) / 2];
        int i = low, j = high;
        while (i <= j) {
            while (x[i] < pivot) i++;
            while (x[j] > pivot) j--;
            if (i <= j) {
                const double swap = x[i];
                x[i++] = x[j];
                x[j--] = swap;
            }
        }
        if (n <= j) high = j;
        else if (n >= i) low = i;
        else break;
    }
    return x[n];
}

static double median_of(double *x, int n)
{
    const double upper = select_nth(x, n, n / 2);
    double lower = upper;
    if (n % 2) return upper;
    lower = x[0];
    for (int i = 1; i < n / 2; i++) lower = larger(lower, x[i]);
    return (lower + upper) / 2.0;
}

static void judge_limit(const PlanRow *f, int plan_row, int64_t entry, int64_t at, double x, Hit *hits, int64_t *num_hits)
{
    const int up = x > f->above, down = x < f->below;
    if (up || down) {
        if (f->inside[at] >= f->after) {
            double score = (f->run[at] + 1.0) / f->lasting;
            if (score > 1.0) score = 1.0;
            if (score >= 1.0)
                add_hit(hits, num_hits, plan_row, entry, HIT_ANOMALOUS, x, score, up ? f->above : f->below, up ? 1.0 : -1.0);
        }
        if (f->run[at] < f->lasting) f->run[at]++;
    } else {
        f->run[at] = 0;
        if (f->inside[at] < f->after) f->inside[at]++;
    }
}

/* others_move: some series of the row changed in this step. */
static void judge_still(const PlanRow *f, int plan_row, int64_t entry, int64_t at, double x, int others_move, Hit *hits,
                        int64_t *num_hits)
{
    const double last = f->last[at];
    const int is_zero = x == 0.0, is_still = is_zero || (x == last && others_move);
    if (is_still) {
        if (f->age[at] >= f->after) {
            const int least = is_zero ? f->lasting : f->settle_after, patience = PATIENCE * f->longest[at];
            const double score = (f->streak[at] + 1.0) / (least > patience ? least : patience);
            if (score >= 1.0) add_hit(hits, num_hits, plan_row, entry, HIT_ANOMALOUS, x, score, last, is_zero ? -1.0 : 0.0);
        }
        if (f->streak[at] < MAX_COUNT) f->streak[at]++;
        return;
    }
    if (x == last || !(fabs(x) < INFINITY)) return;
    if (f->streak[at] > 0) {
        if (f->age[at] > 0 && f->streak[at] > f->longest[at]) f->longest[at] = f->streak[at];
        f->streak[at] = 0;
    }
    f->last[at] = x;
    if (last == last && f->age[at] < f->after) f->age[at]++;
}

/* Where a tile's statistics begin: the words that formulas need, side by side. */
typedef struct {
    double n[TILE], total[TILE], mean[TILE], m2[TILE], m3[TILE], m4[TILE];
} Words;

#define ISA portable
#define TARGET
#include "compiled_plan_isa.h"

#if HAS_X86
#define ISA avx2
#define TARGET __attribute__((target("avx2,fma,f16c")))
#include "compiled_plan_isa.h"

#define ISA avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,prefer-vector-width=512")))
#include "compiled_plan_isa.h"
#endif

/* Judge all rows of a compiled plan over its merged statistics, and learn. stats: [num_tensors]; present, bad: [num_tensors]
 * whether the step has the tensor, and whether anything in it is not finite; norm_scale: [num_tensors] factors of the norm,
 * or NULL. hits: room for as many as there are entries. Returns the number of hits. */
EXPORT int64_t sentinel_judge_plan(const Stats *stats, const uint8_t *present, const uint8_t *bad, const double *norm_scale,
                                    int64_t num_tensors, PlanRow *plan, int64_t num_plan_rows, Hit *hits, int32_t isa_index)
{
    for (int64_t w = 0; w < num_plan_rows; w++) {
        plan[w].cursor = 0;
        plan[w].num_points = 0;
    }
#if HAS_X86
    if (isa_index == 2) return judge_plan_avx512(stats, present, bad, norm_scale, num_tensors, plan, (int)num_plan_rows, hits);
    if (isa_index == 1) return judge_plan_avx2(stats, present, bad, norm_scale, num_tensors, plan, (int)num_plan_rows, hits);
#endif
    (void)isa_index;
    return judge_plan_portable(stats, present, bad, norm_scale, num_tensors, plan, (int)num_plan_rows, hits);
}
