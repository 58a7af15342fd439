/* From sums to moments, by whichever instruction set: guess a center, sum once, and look whether that was good enough. */

typedef void Gather(void *, int filled, const char *, int64_t stride, int, int dtype, const uint16_t *fp8);

typedef struct {
    void (*span[NUM_STORED])(const void *, int, double scale, double minus, int is_masked, int with_checksum, Sums *);
    int64_t (*zeros[NUM_STORED])(const void *, int, double most);
    void (*below[NUM_STORED])(const void *, int, const uint64_t *bounds, int num_bounds, int64_t *out);
    Gather *gather;
    void (*squares[NUM_STORED])(const void *, int64_t, double *sums);
} Isa;

/* Elements count as (x - center) / 2^exponent; is_masked: some may not be finite. */
typedef struct {
    double center;
    int exponent, is_masked;
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
    return (Guess){center, exponent_for(above > below ? above : below, dtype), 0};
}

/* Zero is the cheapest center, and as good as the mean where that is small beside the deviations. */
static Guess guess_from(double mean, double variance, double low, double high, int dtype)
{
    return guess_about(mean * mean <= 0.5 * variance ? 0.0 : mean, low, high, dtype);
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
    if (m == 0) return (Guess){0.0, 0, 0};
    size = fabs(low) > fabs(high) ? fabs(low) : fabs(high);
    const int exponent = exponent_for(size, F64);
    const double scale = power_of_two(-exponent);
    for (int i = 0; i < m; i++) {
        sum += x[i] * scale;
        squares += x[i] * scale * (x[i] * scale);
    }
    const double mean = sum / m, unit = power_of_two(exponent);
    if (mean * mean <= 0.5 * (squares / m - mean * mean)) return guess_about(0.0, low, high, dtype);
    return guess_about(mean * unit, low, high, dtype);
}

/* Measure up to SPAN elements about `guess`, and leave a guess for the next ones. A bad guess costs further passes, and
 * so does the first element that is not finite. */
static void measure_span(const Isa *isa, const void *p, int n, int dtype, double zero_eps, int flags, Guess *guess,
                         Stats *out)
{
    const double smallest = dtype == F64 ? 0x1p-900 : 0x1p-100;
    int is_masked = guess->is_masked, count = n;
    Sums d;
    double center;
    *out = empty;
    for (int tries = 0;; tries++) {
        const double scale = power_of_two(-guess->exponent), unit = power_of_two(guess->exponent);
        const double shift = dtype == F64 ? guess->center * scale : (double)(float)(guess->center * scale);
        center = shift * unit;
        isa->span[dtype](p, n, scale, -shift, is_masked, tries == 0 && flags & WITH_CHECKSUM, &d);
        if (tries == 0) {
            out->checksum = d.checksum;
            out->num_zero = zero_eps == 0.0 ? d.num_zero : isa->zeros[dtype](p, n, zero_eps);
        }
        if (is_masked) count = n - (int)(d.num_nan + d.num_pos_inf + d.num_neg_inf);
        if (count == 0) break;
        if (d.d4 <= DBL_MAX) {
            const double e = d.d1 / count, variance = d.d2 / count - e * e;
            /* Within a deviation of the mean, rounding is magnified by less than twenty. */
            if (tries >= 3 || d.low == d.high || (e * e <= variance && d.d4 >= smallest)) break;
            center += e * unit;
        } else if (fabs(d.d1) <= DBL_MAX) {
            center += d.d1 / count * unit;
        } else if (is_masked) {
            center = 0.5 * d.low + 0.5 * d.high;
        } else { /* something is not finite, or the sum overflows */
            is_masked = 1;
            continue;
        }
        if (center < d.low) center = d.low;
        if (center > d.high) center = d.high;
        *guess = guess_about(center, d.low, d.high, dtype);
    }
    if (is_masked) {
        out->num_nan = d.num_nan;
        out->num_pos_inf = d.num_pos_inf;
        out->num_neg_inf = d.num_neg_inf;
    }
    if (count) {
        out->count = count;
        out->min = d.low;
        out->max = d.high;
        if (d.low == d.high) {
            out->mean = d.low;
        } else {
            recenter(out, count, center, &d, guess->exponent);
            *guess = guess_from(out->mean, out->m2 / count, d.low, d.high, dtype);
        }
    }
    guess->is_masked = is_masked && count < n;
}

/* Merge the statistics of n elements, whatever they hold, into `sum`. */
static void measure_stretch(const Isa *isa, const char *p, int64_t n, int dtype, double zero_eps, int flags, Guess *guess,
                            Stats *sum)
{
    for (int64_t at = 0; at < n; at += SPAN) {
        Stats stats;
        measure_span(isa, p + at * stored_bytes[dtype], n - at < SPAN ? (int)(n - at) : SPAN, dtype, zero_eps, flags, guess,
                     &stats);
        merge(sum, &stats);
    }
}
