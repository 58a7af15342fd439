/* The sums over one span of one dtype in a single pass: powers of (x - center), bounds, zeros, bit patterns.
 *
 * Included once per dtype and instruction set, with ELEMENT (storage type), DTYPE (f32, f64, bf16, f16), REAL and WIDTH
 * (arithmetic type and its lanes), REAL_NAME (f32 or f64), LOAD2, WIDEN, CHECK2 and for elements of 16 bits KEYED defined.
 * Values that are not finite, and sums that overflow, show in d1..d4 of the result: the caller looks.
 */
#define RUN LANES(JOIN(run_, DTYPE))

/* x counts as x * scale + minus, in one rounding; is_centred 0: as it is. is_masked: only what is finite counts, the rest
 * is told apart. The flags are constants where it is inlined. */
static inline __attribute__((always_inline)) TARGET void RUN(const ELEMENT *p, int n, double scale, double minus,
                                                             const int is_centred, const int is_masked,
                                                             const int with_checksum, Sums *out)
{
    typedef LANES(REAL_NAME) V;
    const int vectors = n - n % (2 * WIDTH);
    double d1 = 0.0, d2 = 0.0, d3 = 0.0, d4 = 0.0, low = INFINITY, high = -INFINITY;
    int64_t zeros = 0, num_nan = 0, num_pos = 0, num_neg = 0;
    uint64_t checksum = 0;

    if (vectors) {
        const V infinity = OP(set)(INFINITY), minus_infinity = OP(set)(-INFINITY);
        const V times = OP(set)((REAL)scale), plus = OP(set)((REAL)minus);
        LANES(JOIN(REAL_NAME, _wide)) w1 = OP(wide_none)(), w2 = w1, w3 = w1, w4 = w1;
        LANES(checks) checks = LANES(checks_none)();
        V lo = infinity, hi = minus_infinity;
        LANES(JOIN(REAL_NAME, _counts)) nans = OP(none)(), positive = nans, kept = nans;
#ifdef KEYED
        LANES(i16_bounds) bounds = LANES(i16_bounds_none)();
        LANES(i16) z = LANES(i16_set)(0);
#else
        LANES(JOIN(REAL_NAME, _counts)) z = nans;
#endif
        for (int i = 0; i < vectors;) {
            /* A few dozen elements a lane, then into f64: that is what keeps the sums of many. */
            const int end = vectors - i < SPILL * 2 * WIDTH ? vectors : i + SPILL * 2 * WIDTH;
            V a, b, p1 = OP(set)(0), p2 = p1, p3 = p1, p4 = p1, q3 = p1, q4 = p1;
#ifdef KEYED
            /* In integers, twice as many a vector; on their own, for there are no registers for both. */
            for (int j = i; j < end; j += 2 * WIDTH) {
                const LANES(i16) w = LANES(i16_load)(p + j);
                bounds = LANES(i16_bound)(bounds, w);
                z = LANES(i16_count_zero)(z, w);
                if (with_checksum) checks = LANES(checks16)(checks, w);
            }
#endif
            for (; i < end; i += 2 * WIDTH) {
                LOAD2(p + i, a, b)
#ifndef KEYED
                z = OP(count_zero)(z, a);
                z = OP(count_zero)(z, b);
                if (with_checksum) checks = OP(checks)(checks, a, b);
                if (!is_masked) {
                    lo = OP(min)(lo, OP(min)(a, b));
                    hi = OP(max)(hi, OP(max)(a, b));
                }
#endif
                LANES(JOIN(REAL_NAME, _mask)) keep_a, keep_b;
                if (is_masked) {
                    keep_a = OP(finite)(a);
                    keep_b = OP(finite)(b);
                    lo = OP(min_where)(OP(min_where)(lo, keep_a, a), keep_b, b);
                    hi = OP(max_where)(OP(max_where)(hi, keep_a, a), keep_b, b);
                    nans = OP(count_nan)(OP(count_nan)(nans, a), b);
                    positive = OP(count_equal)(OP(count_equal)(positive, a, infinity), b, infinity);
                    kept = OP(count_where)(OP(count_where)(kept, keep_a), keep_b);
                }
                if (is_centred) {
                    a = OP(fma)(a, times, plus);
                    b = OP(fma)(b, times, plus);
                }
                if (is_masked) {
                    a = OP(where)(keep_a, a);
                    b = OP(where)(keep_b, b);
                }
                const V aa = OP(mul)(a, a), bb = OP(mul)(b, b);
                /* One addition a round waits for the last round's; of the slower fma there are two sums each. */
                p1 = OP(add)(p1, OP(add)(a, b));
                p2 = OP(add)(p2, OP(add)(aa, bb));
                p3 = OP(fma)(aa, a, p3);
                q3 = OP(fma)(bb, b, q3);
                p4 = OP(fma)(aa, aa, p4);
                q4 = OP(fma)(bb, bb, q4);
            }
            w1 = OP(spill)(w1, p1);
            w2 = OP(spill)(w2, p2);
            w3 = OP(spill)(w3, OP(add)(p3, q3));
            w4 = OP(spill)(w4, OP(add)(p4, q4));
        }
        d1 = OP(wide_sum)(w1);
        d2 = OP(wide_sum)(w2);
        d3 = OP(wide_sum)(w3);
        d4 = OP(wide_sum)(w4);
        if (with_checksum) checksum = LANES(JOIN(JOIN(checks_, DTYPE), _total))(&checks, vectors / (2 * WIDTH));
#ifdef KEYED
        int16_t counts[2 * WIDTH];
        memcpy(counts, &z, sizeof counts);
        for (int i = 0; i < 2 * WIDTH; i++) zeros += counts[i];
        if (!is_masked) {
            uint16_t low_bits, high_bits;
            LANES(i16_bounds_end)(&bounds, &low_bits, &high_bits);
            low = WIDEN(low_bits);
            high = WIDEN(high_bits);
        }
#else
        zeros = OP(total)(z);
#endif
        if (low > high) {
            low = OP(lowest)(lo);
            high = OP(highest)(hi);
        }
        if (is_masked) {
            num_nan = OP(total)(nans);
            num_pos = OP(total)(positive);
            num_neg = vectors - OP(total)(kept) - num_nan - num_pos;
        }
    }
    for (int i = vectors; i < n; i++) {
        const double x = WIDEN(p[i]), d = is_centred ? x * scale + minus : x;
        ELEMENT_BITS bits;
        memcpy(&bits, &p[i], sizeof bits);
        if (with_checksum) checksum += bits;
        if (is_masked && !(fabs(x) <= DBL_MAX)) {
            num_nan += x != x;
            num_pos += x == INFINITY;
            num_neg += x == -INFINITY;
            continue;
        }
        d1 += d;
        d2 += d * d;
        d3 += d * d * d;
        d4 += d * d * d * d;
        if (x < low) low = x;
        if (x > high) high = x;
        zeros += x == 0.0;
    }
    *out = (Sums){d1, d2, d3, d4, low, high, zeros, num_nan, num_pos, num_neg, checksum};
}

static TARGET void LANES(JOIN(span_, DTYPE))(const void *memory, int n, double scale, double minus, int is_masked,
                                             int with_checksum, Sums *out)
{
    const ELEMENT *p = memory;
    const int is_centred = scale != 1.0 || minus != 0.0;
    if (is_masked && with_checksum) RUN(p, n, scale, minus, 1, 1, 1, out);
    else if (is_masked) RUN(p, n, scale, minus, 1, 1, 0, out);
    else if (is_centred && with_checksum) RUN(p, n, scale, minus, 1, 0, 1, out);
    else if (is_centred) RUN(p, n, scale, minus, 1, 0, 0, out);
    else if (with_checksum) RUN(p, n, 1.0, 0.0, 0, 0, 1, out);
    else RUN(p, n, 1.0, 0.0, 0, 0, 0, out);
}

/* The elements of |x| <= most, for a bound that is not zero: on its own, since it is seldom asked for. */
static TARGET int64_t LANES(JOIN(zeros_, DTYPE))(const void *memory, int n, double most)
{
    const ELEMENT *p = memory;
    const int vectors = n - n % (2 * WIDTH);
    int64_t zeros = 0;
#ifdef KEYED
    const LANES(i16) eps = LANES(i16_set)((int16_t)JOIN(DTYPE, _at_most)(most));
    LANES(i16) z = LANES(i16_set)(0);
    for (int i = 0; i < vectors; i += 2 * WIDTH) z = LANES(i16_count)(z, LANES(i16_load)(p + i), eps);
    int16_t counts[2 * WIDTH];
    memcpy(counts, &z, sizeof counts);
    for (int i = 0; i < 2 * WIDTH; i++) zeros += counts[i];
#else
    const LANES(REAL_NAME) eps = OP(set)(JOIN(REAL_NAME, _at_most)(most));
    LANES(JOIN(REAL_NAME, _counts)) z = OP(none)();
    for (int i = 0; i < vectors; i += 2 * WIDTH) {
        LANES(REAL_NAME) a, b;
        LOAD2(p + i, a, b)
        z = OP(count)(OP(count)(z, a, eps), b, eps);
    }
    zeros = OP(total)(z);
#endif
    for (int i = vectors; i < n; i++) zeros += fabs(WIDEN(p[i])) <= most;
    return zeros;
}
/* How many |x| lie below each of a few bounds: as patterns, whose order is that of the sizes. */
static TARGET void LANES(JOIN(below_, DTYPE))(const void *memory, int n, const uint64_t *bounds, int num_bounds,
                                              int64_t *out)
{
    const ELEMENT_BITS *p = memory;
    for (int j = 0; j < num_bounds; j++) {
        const ELEMENT_BITS bound = (ELEMENT_BITS)bounds[j];
        ELEMENT_BITS below = 0; /* as narrow as the elements, for the compiler: n fits 16 bits */
        for (int i = 0; i < n; i++) below += (ELEMENT_BITS)(p[i] & (ELEMENT_BITS)~SIGN_BIT) < bound;
        out[j] += (int64_t)below;
    }
}

/* Add the squares of n elements to a sum each; what is not finite, or has no finite square, adds nothing. */
static TARGET void LANES(JOIN(squares_, DTYPE))(const void *memory, int64_t n, double *sums)
{
    const ELEMENT *p = memory;
    for (int64_t i = 0; i < n; i++) {
        const double x = WIDEN_SIZE(p[i]), square = x * x;
        sums[i] += square <= DBL_MAX ? square : 0.0;
    }
}
#undef WIDEN_SIZE
#undef SIGN_BIT
#undef RUN
#undef ELEMENT
#undef ELEMENT_BITS
#undef DTYPE
#undef REAL
#undef REAL_NAME
#undef WIDTH
#undef LOAD2
#undef WIDEN
#undef SPILL
#undef KEYED
