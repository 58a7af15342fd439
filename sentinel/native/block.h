/* One block of one dtype, all of it finite: two passes while it lies in the first-level cache.
 *
 * Included once per dtype and instruction set, with ELEMENT (storage type), DTYPE (f32, f64, bf16, f16), REAL and WIDTH
 * (arithmetic type and its lanes), REAL_NAME (f32 or f64), LOAD2, WIDEN and EXPONENT_LIMIT defined.
 * Returns 0, and leaves the block to the careful path, where the sum shows a value that is not finite (or where finite
 * values overflow the sum, which costs speed alone).
 */
static TARGET int LANES(JOIN(block_, DTYPE))(const ELEMENT *p, int n, double zero_eps, Block *out)
{
    typedef LANES(REAL_NAME) V;
    const int vectors = n - n % (2 * WIDTH);
    double sum = 0.0, lowest = INFINITY, highest = -INFINITY;
    int64_t zeros = 0;

#ifdef KEYED
    /* Elements of 16 bits: read as integers whose order is that of the floats, twice as many fit a vector. */
    if (vectors) {
        typedef LANES(i16) W;
        const W eps = LANES(i16_set)((int16_t)JOIN(DTYPE, _at_most)(zero_eps));
        V a, b, s0 = OP(set)(0), s1 = s0;
        W lo = LANES(i16_set)(INT16_MAX), hi = LANES(i16_set)(INT16_MIN), z = LANES(i16_set)(0);
        for (int i = 0; i < vectors; i += 2 * WIDTH) {
            LOAD2(p + i, a, b)
            const W w = LANES(i16_load)(p + i), key = LANES(i16_key)(w);
            s0 = OP(add)(s0, a);
            s1 = OP(add)(s1, b);
            lo = LANES(i16_min)(lo, key);
            hi = LANES(i16_max)(hi, key);
            z = LANES(i16_count)(z, w, eps);
        }
        int16_t lows[2 * WIDTH], highs[2 * WIDTH], counts[2 * WIDTH], low = INT16_MAX, high = INT16_MIN;
        memcpy(lows, &lo, sizeof lows);
        memcpy(highs, &hi, sizeof highs);
        memcpy(counts, &z, sizeof counts);
        int num_zeros = 0;
        for (int i = 0; i < 2 * WIDTH; i++) {
            low = lows[i] < low ? lows[i] : low;
            high = highs[i] > high ? highs[i] : high;
            num_zeros += counts[i];
        }
        sum = OP(sum)(OP(add)(s0, s1));
        lowest = WIDEN((uint16_t)(low < 0 ? low ^ 0x7fff : low));
        highest = WIDEN((uint16_t)(high < 0 ? high ^ 0x7fff : high));
        zeros = num_zeros;
    }
#else
    if (vectors) {
        const V eps = OP(set)(JOIN(REAL_NAME, _at_most)(zero_eps));
        V a, b, s0 = OP(set)(0), s1 = s0, lo0 = OP(set)(INFINITY), lo1 = lo0, hi0 = OP(set)(-INFINITY), hi1 = hi0;
        LANES(JOIN(REAL_NAME, _counts)) z0 = OP(none)(), z1 = z0;
        for (int i = 0; i < vectors; i += 2 * WIDTH) {
            LOAD2(p + i, a, b)
            s0 = OP(add)(s0, a);
            s1 = OP(add)(s1, b);
            lo0 = OP(min)(lo0, a);
            lo1 = OP(min)(lo1, b);
            hi0 = OP(max)(hi0, a);
            hi1 = OP(max)(hi1, b);
            z0 = OP(count)(z0, a, eps);
            z1 = OP(count)(z1, b, eps);
        }
        sum = OP(sum)(OP(add)(s0, s1));
        lowest = OP(lowest)(OP(min)(lo0, lo1));
        highest = OP(highest)(OP(max)(hi0, hi1));
        zeros = OP(total)(z0) + OP(total)(z1);
    }
#endif
    for (int i = vectors; i < n; i++) {
        const double x = WIDEN(p[i]);
        sum += x;
        if (x < lowest) lowest = x;
        if (x > highest) highest = x;
        zeros += fabs(x) <= zero_eps;
    }
    if (!(fabs(sum) <= DBL_MAX)) return 0;

    out->count = n;
    out->min = lowest;
    out->max = highest;
    out->num_zero = zeros;
    double guess = sum / n;
    if (guess < lowest) guess = lowest;
    if (guess > highest) guess = highest;
    const REAL center = (REAL)guess;
    const double above = highest - (double)center, below = (double)center - lowest;
    const double reach = above > below ? above : below;
    if (!(reach > 0.0)) {
        out->mean = lowest;
        out->m2 = out->m3 = out->m4 = 0.0;
        return 1;
    }
    int exponent = exponent_of(reach);
    if (exponent > EXPONENT_LIMIT) exponent = EXPONENT_LIMIT;
    if (exponent < -EXPONENT_LIMIT) exponent = -EXPONENT_LIMIT;
    /* Ordinary sizes need no scaling: their fourth powers are far from the ends of the range. */
    if (exponent >= -16 && exponent <= 16) exponent = 0;
    const double scale = power_of_two(-exponent);
    double d1 = 0.0, d2 = 0.0, d3 = 0.0, d4 = 0.0;

    if (vectors) {
        const V times = OP(set)((REAL)scale), minus = OP(set)(-(REAL)(center * scale));
        V a, b, p1 = OP(set)(0), p2 = p1, p3 = p1, p4 = p1, q1 = p1, q2 = p1, q3 = p1, q4 = p1;
#define POWERS(x, p1, p2, p3, p4) { \
            const V xx = OP(mul)(x, x); \
            p1 = OP(add)(p1, x); \
            p2 = OP(add)(p2, xx); \
            p3 = OP(fma)(xx, x, p3); \
            p4 = OP(fma)(xx, xx, p4); }
        /* No prefetch of the next block here: tried, 20 % slower from memory. */
        if (exponent == 0) {
            for (int i = 0; i < vectors; i += 2 * WIDTH) {
                LOAD2(p + i, a, b)
                a = OP(add)(a, minus);
                b = OP(add)(b, minus);
                POWERS(a, p1, p2, p3, p4)
                POWERS(b, q1, q2, q3, q4)
            }
        } else {
            for (int i = 0; i < vectors; i += 2 * WIDTH) {
                LOAD2(p + i, a, b)
                a = OP(fma)(a, times, minus);
                b = OP(fma)(b, times, minus);
                POWERS(a, p1, p2, p3, p4)
                POWERS(b, q1, q2, q3, q4)
            }
        }
#undef POWERS
        d1 = OP(sum)(OP(add)(p1, q1));
        d2 = OP(sum)(OP(add)(p2, q2));
        d3 = OP(sum)(OP(add)(p3, q3));
        d4 = OP(sum)(OP(add)(p4, q4));
    }
    for (int i = vectors; i < n; i++) {
        const double x = WIDEN(p[i]) * scale - (double)center * scale;
        d1 += x;
        d2 += x * x;
        d3 += x * x * x;
        d4 += x * x * x * x;
    }
    recenter(out, n, (double)center, d1, d2, d3, d4, exponent);
    return 1;
}
#undef ELEMENT
#undef DTYPE
#undef REAL
#undef REAL_NAME
#undef WIDTH
#undef LOAD2
#undef WIDEN
#undef EXPONENT_LIMIT
#undef KEYED
