/* From sums to moments, by whichever instruction set: guess a center, sum once, and look whether that was good enough. */

enum { F32, F64, BF16, F16, NUM_STORED };

typedef struct {
    void (*span[NUM_STORED])(const void *, int, double scale, double minus, int with_checksum, Sums *);
    int64_t (*zeros[NUM_STORED])(const void *, int, double most);
} Isa;

/* Elements count as (x - center) / 2^exponent. */
typedef struct {
    double center;
    int exponent;
} Guess;

static const int stored_bytes[NUM_STORED] = {4, 8, 2, 2};

/* Fourth powers of what lies in [2^exponent, 2^(exponent + 1)) at most are far from the ends of the range. */
static int exponent_for(double reach, int dtype)
{
    const int limit = dtype == F64 ? 1000 : 126;
    int exponent = reach > 0.0 ? exponent_of(reach) : 0;
    if (exponent >= -16 && exponent <= 16) return 0; /* ordinary sizes need no scaling */
    if (exponent > limit) exponent = limit;
    if (exponent < -limit) exponent = -limit;
    return exponent;
}

static Guess guess_about(double center, double low, double high, int dtype)
{
    const double above = high - center, below = center - low;
    return (Guess){center, exponent_for(above > below ? above : below, dtype)};
}

/* Zero is the cheapest center, and as good as the mean where that is small beside the deviations. */
static Guess guess_from(double mean, double variance, double low, double high, int dtype)
{
    return guess_about(mean * mean <= 0.0625 * variance ? 0.0 : mean, low, high, dtype);
}

/* A guess from some thirty elements. */
static Guess guess_from_sample(const void *p, int n, int dtype)
{
    const int group = n < 32 ? n : 8, num_groups = n < 32 ? 1 : 4;
    double sum = 0.0, squares = 0.0, low = INFINITY, high = -INFINITY, size = 0.0, x[32];
    int m = 0;
    for (int g = 0; g < num_groups; g++) {
        for (int j = 0; j < group; j++) {
            const int i = g * (n / num_groups) + j;
            double v;
            switch (dtype) {
            case F32: v = ((const float *)p)[i]; break;
            case F64: v = ((const double *)p)[i]; break;
            case BF16: v = widen_bf16(((const uint16_t *)p)[i]); break;
            default: v = widen_f16(((const uint16_t *)p)[i]);
            }
            if (!(fabs(v) <= DBL_MAX)) continue;
            x[m++] = v;
            if (v < low) low = v;
            if (v > high) high = v;
        }
    }
    if (m == 0) return (Guess){0.0, 0};
    size = fabs(low) > fabs(high) ? fabs(low) : fabs(high);
    const int exponent = exponent_for(size, F64);
    const double scale = power_of_two(-exponent);
    for (int i = 0; i < m; i++) {
        sum += x[i] * scale;
        squares += x[i] * scale * (x[i] * scale);
    }
    const double mean = sum / m, unit = power_of_two(exponent);
    if (mean * mean <= 0.0625 * (squares / m - mean * mean)) return guess_about(0.0, low, high, dtype);
    return guess_about(mean * unit, low, high, dtype);
}

/* Measure up to SPAN elements about `guess`, and leave a guess for the next ones. A bad guess costs further passes.
 * Returns 0 where something is not finite: then only num_zero and checksum are right. */
static int measure_span(const Isa *isa, const void *p, int n, int dtype, double zero_eps, int flags, int is_finite,
                        Guess *guess, Stats *out)
{
    const double smallest = dtype == F64 ? 0x1p-900 : 0x1p-100;
    Sums d;
    double center;
    *out = empty;
    for (int tries = 0;; tries++) {
        const double scale = power_of_two(-guess->exponent), unit = power_of_two(guess->exponent);
        const double shift = dtype == F64 ? guess->center * scale : (double)(float)(guess->center * scale);
        center = shift * unit;
        isa->span[dtype](p, n, scale, -shift, tries == 0 && flags & WITH_CHECKSUM, &d);
        if (tries == 0) {
            out->checksum = d.checksum;
            out->num_zero = zero_eps == 0.0 ? d.num_zero : isa->zeros[dtype](p, n, zero_eps);
        }
        double next;
        if (d.d4 <= DBL_MAX) {
            const double e = d.d1 / n, variance = d.d2 / n - e * e;
            /* Within half a deviation of the mean, rounding is magnified by less than ten. */
            if (tries >= 2 || d.low == d.high || (e * e <= 0.25 * variance && d.d4 >= smallest)) break;
            next = center + e * unit;
        } else if (fabs(d.d1) <= DBL_MAX) {
            next = center + d.d1 / n * unit;
        } else if (is_finite) {
            next = 0.5 * d.low + 0.5 * d.high;
        } else {
            return 0;
        }
        if (next < d.low) next = d.low;
        if (next > d.high) next = d.high;
        *guess = guess_about(next, d.low, d.high, dtype);
    }
    out->count = n;
    out->min = d.low;
    out->max = d.high;
    if (d.low == d.high) {
        out->mean = d.low;
    } else {
        recenter(out, n, center, &d, guess->exponent);
        *guess = guess_from(out->mean, out->m2 / n, d.low, d.high, dtype);
    }
    return 1;
}

#define COMPACT(T, SIGN, SPECIAL) { \
    const T *from = p; \
    T *to = buffer; \
    for (int i = 0; i < n; i++) { \
        const T bits = from[i], size = bits & (T)~(T)(SIGN); \
        to[m] = bits; \
        m += size < (T)(SPECIAL); \
        num_nan += size > (T)(SPECIAL); \
        num_pos += bits == (T)(SPECIAL); \
        num_neg += bits == (T)((SIGN) | (SPECIAL)); \
    } }

/* Keep the finite elements of p in `buffer` and count the others; returns how many were kept. */
static int compact(const void *p, int n, int dtype, void *buffer, Stats *out)
{
    int m = 0, num_nan = 0, num_pos = 0, num_neg = 0;
    switch (dtype) {
    case F32: COMPACT(uint32_t, 0x80000000u, 0x7f800000u) break;
    case F64: COMPACT(uint64_t, 0x8000000000000000u, 0x7ff0000000000000u) break;
    case BF16: COMPACT(uint16_t, 0x8000u, 0x7f80u) break;
    default: COMPACT(uint16_t, 0x8000u, 0x7c00u)
    }
    out->num_nan = num_nan;
    out->num_pos_inf = num_pos;
    out->num_neg_inf = num_neg;
    return m;
}

/* Merge the statistics of n elements, whatever they hold, into `sum`. */
static void measure_stretch(const Isa *isa, const char *p, int64_t n, int dtype, double zero_eps, int flags, Guess *guess,
                            Stats *sum)
{
    for (int64_t at = 0; at < n; at += SPAN) {
        const int size = n - at < SPAN ? (int)(n - at) : SPAN;
        const char *here = p + at * stored_bytes[dtype];
        Stats stats;
        if (measure_span(isa, here, size, dtype, zero_eps, flags, 0, guess, &stats)) {
            merge(sum, &stats);
            continue;
        }
        merge(sum, &stats); /* its zeros and checksum: the count is 0 */
        for (int begin = 0; begin < size; begin += BLOCK) {
            uint64_t finite[BLOCK];
            const int num = size - begin < BLOCK ? size - begin : BLOCK;
            Stats bad = empty;
            const int kept = compact(here + begin * stored_bytes[dtype], num, dtype, finite, &bad);
            merge(sum, &bad);
            if (kept == 0) continue;
            measure_span(isa, finite, kept, dtype, 0.0, 0, 1, guess, &stats);
            stats.num_zero = 0;
            merge(sum, &stats);
        }
    }
}
