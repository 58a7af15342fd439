/* What is measured, how two measurements merge, and the number formats. */

typedef struct {
    int64_t count;
    double mean, m2, m3, m4, min, max;
    int64_t num_nan, num_pos_inf, num_neg_inf, num_zero;
    uint64_t checksum;
} Stats;

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

/* Sums of powers of (x - center) over n elements, in units of 2^exponent; what the loops over memory give. */
typedef struct {
    double d1, d2, d3, d4, low, high;
    int64_t num_zero, num_nan, num_pos_inf, num_neg_inf;
    uint64_t checksum;
} Sums;

/* What is measured as it is, and what is measured as another type. */
enum { F32, F64, BF16, F16, NUM_STORED };
enum { U8 = NUM_STORED, I8, I16, U16, I32, U32, I64, U64, E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ, NUM_DTYPES };

static const int element_bytes[NUM_DTYPES] = {4, 8, 2, 2, 1, 1, 2, 2, 4, 4, 8, 8, 1, 1, 1, 1};
/* The smallest type that holds every value; 64-bit integers to 53 bits. */
static const uint8_t stored_as[NUM_DTYPES] = {F32, F64, BF16, F16, F32, F32, F32, F32,
                                              F64, F64, F64, F64, BF16, BF16, BF16, BF16};

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

/* |x|, without branches: the exponent's bias by a product, exact for denormals too; from 2^16 on it is infinity or nan. */
static inline float size_of_f16(uint16_t x)
{
    uint32_t bits = (uint32_t)(x & 0x7fffu) << 13;
    float f;
    memcpy(&f, &bits, 4);
    f *= 0x1p112f;
    return f < 65536.0f ? f : INFINITY;
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

/* An fp8 number as bf16, which holds each of them exactly. bias: of its exponent; is_fnuz: one nan where minus zero would
 * be, and no infinity. */
static uint16_t bf16_of_fp8(unsigned byte, int mantissa_bits, int bias, int is_fnuz)
{
    const unsigned sign = byte >> 7, rest = byte & 0x7fu, mantissa = rest & ((1u << mantissa_bits) - 1);
    const int exponent = (int)(rest >> mantissa_bits), top = (1 << (7 - mantissa_bits)) - 1;
    float f;
    uint32_t bits;
    if (is_fnuz) {
        if (byte == 0x80u) return 0x7fc0u;
    } else if (mantissa_bits == 3) {
        if (rest == 0x7fu) return (uint16_t)(sign << 15 | 0x7ff0u);
    } else if (exponent == top) { /* infinity; nans as they are widened by way of fp16 */
        return (uint16_t)(sign << 15 | (mantissa ? 0x7fc0u | mantissa << 5 : 0x7f80u));
    }
    const double unit = power_of_two((exponent ? exponent : 1) - bias - mantissa_bits);
    f = (float)((double)(mantissa + (exponent ? 1u << mantissa_bits : 0)) * unit);
    if (sign) f = -f;
    memcpy(&bits, &f, 4);
    return (uint16_t)(bits >> 16);
}

/* Moments about the true mean from sums of powers about `center`, in units of 2^exponent. */
static void recenter(Stats *out, int n, double center, const Sums *d, int exponent)
{
    const double e = d->d1 / n, unit = power_of_two(exponent);
    double m2 = d->d2 - e * d->d1, m4 = d->d4 - 4.0 * e * d->d3 + 6.0 * e * e * d->d2 - 3.0 * e * e * e * d->d1;
    const double m3 = d->d3 - 3.0 * e * d->d2 + 2.0 * e * e * d->d1;
    if (m2 < 0.0) m2 = 0.0;
    if (m4 < 0.0) m4 = 0.0;
    out->mean = center + e * unit;
    if (out->mean < out->min) out->mean = out->min;
    if (out->mean > out->max) out->mean = out->max;
    /* One factor after the other: zero times a power that overflows would be nan. */
    out->m2 = m2 * unit * unit;
    out->m3 = m3 * unit * unit * unit;
    out->m4 = m4 * unit * unit * unit * unit;
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

/* The same elements `times` over, as a broadcast shows them. */
static void repeat(Stats *a, int64_t times)
{
    const double k = (double)times;
    a->count *= times;
    a->m2 *= k;
    a->m3 *= k;
    a->m4 *= k;
    a->num_nan *= times;
    a->num_pos_inf *= times;
    a->num_neg_inf *= times;
    a->num_zero *= times;
    a->checksum *= (uint64_t)times;
}
