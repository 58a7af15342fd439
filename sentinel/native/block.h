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
        s0 = OP(add)(s0, s1);
        lo0 = OP(min)(lo0, lo1);
        hi0 = OP(max)(hi0, hi1);
        REAL lanes_s[WIDTH], lanes_lo[WIDTH], lanes_hi[WIDTH];
        JOIN(REAL_NAME, _count_t) lanes_z0[WIDTH], lanes_z1[WIDTH];
        memcpy(lanes_s, &s0, sizeof lanes_s);
        memcpy(lanes_lo, &lo0, sizeof lanes_lo);
        memcpy(lanes_hi, &hi0, sizeof lanes_hi);
        memcpy(lanes_z0, &z0, sizeof lanes_z0);
        memcpy(lanes_z1, &z1, sizeof lanes_z1);
        for (int i = 0; i < WIDTH; i++) {
            sum += lanes_s[i];
            if (lanes_lo[i] < lowest) lowest = lanes_lo[i];
            if (lanes_hi[i] > highest) highest = lanes_hi[i];
            zeros += lanes_z0[i] + lanes_z1[i];
        }
    }
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
    const double scale = power_of_two(-exponent);
    double d1 = 0.0, d2 = 0.0, d3 = 0.0, d4 = 0.0;

    if (vectors) {
        const V times = OP(set)((REAL)scale), minus = OP(set)(-(REAL)(center * scale));
        V a, b, p1 = OP(set)(0), p2 = p1, p3 = p1, p4 = p1, q1 = p1, q2 = p1, q3 = p1, q4 = p1;
        for (int i = 0; i < vectors; i += 2 * WIDTH) {
            LOAD2(p + i, a, b)
            const V x = OP(fma)(a, times, minus), y = OP(fma)(b, times, minus);
            const V xx = OP(mul)(x, x), yy = OP(mul)(y, y);
            p1 = OP(add)(p1, x);
            q1 = OP(add)(q1, y);
            p2 = OP(add)(p2, xx);
            q2 = OP(add)(q2, yy);
            p3 = OP(fma)(xx, x, p3);
            q3 = OP(fma)(yy, y, q3);
            p4 = OP(fma)(xx, xx, p4);
            q4 = OP(fma)(yy, yy, q4);
        }
        REAL lanes[8][WIDTH];
        memcpy(lanes[0], &p1, sizeof lanes[0]);
        memcpy(lanes[1], &p2, sizeof lanes[0]);
        memcpy(lanes[2], &p3, sizeof lanes[0]);
        memcpy(lanes[3], &p4, sizeof lanes[0]);
        memcpy(lanes[4], &q1, sizeof lanes[0]);
        memcpy(lanes[5], &q2, sizeof lanes[0]);
        memcpy(lanes[6], &q3, sizeof lanes[0]);
        memcpy(lanes[7], &q4, sizeof lanes[0]);
        for (int i = 0; i < WIDTH; i++) {
            d1 += (double)lanes[0][i] + (double)lanes[4][i];
            d2 += (double)lanes[1][i] + (double)lanes[5][i];
            d3 += (double)lanes[2][i] + (double)lanes[6][i];
            d4 += (double)lanes[3][i] + (double)lanes[7][i];
        }
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
