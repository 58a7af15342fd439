/* Vectors of sixteen bytes in the compiler's own notation: SSE2, NEON, or scalars where there is nothing. */
#define I16_TURN 0x8000u /* what unsigned bounds of 16 bits are kept with */
#define F32_W 4
typedef float LANES(f32) __attribute__((vector_size(16)));
typedef int32_t LANES(f32_counts) __attribute__((vector_size(16)));
typedef LANES(f32_counts) LANES(f32_mask);
#define F64_W 2
typedef double LANES(f64) __attribute__((vector_size(16)));
typedef int64_t LANES(f64_counts) __attribute__((vector_size(16)));
typedef LANES(f64_counts) LANES(f64_mask);

/* A comparison is a vector of 0 and -1: it selects, and it counts. */
#define PORTABLE_OPS(T, V, I) \
    static inline V LANES(T##_set)(T##_t x) { V r; for (unsigned i = 0; i < sizeof r / sizeof x; i++) r[i] = x; return r; } \
    static inline V LANES(T##_add)(V a, V b) { return a + b; } \
    static inline V LANES(T##_mul)(V a, V b) { return a * b; } \
    static inline V LANES(T##_fma)(V a, V b, V c) { return a * b + c; } \
    static inline I LANES(T##_count)(I n, V x, V eps) { return n - ((I)(x <= eps) & (I)(-x <= eps)); } \
    static inline I LANES(T##_none)(void) { I r; memset(&r, 0, sizeof r); return r; } \
    static inline I LANES(T##_finite)(V x) { return x - x == 0; } /* elsewhere it is nan */ \
    static inline V LANES(T##_where)(I m, V x) { return (V)(m & (I)x); } \
    static inline V LANES(T##_min_where)(V a, I m, V x) { return LANES(T##_min)(a, (V)((m & (I)x) | (~m & (I)a))); } \
    static inline V LANES(T##_max_where)(V a, I m, V x) { return LANES(T##_max)(a, (V)((m & (I)x) | (~m & (I)a))); } \
    static inline I LANES(T##_count_where)(I n, I m) { return n - m; } \
    static inline I LANES(T##_count_equal)(I n, V x, V y) { return n - (I)(x == y); } \
    static inline I LANES(T##_count_nan)(I n, V x) { return n - (I)(x != x); } \
    static inline I LANES(T##_count_zero)(I n, V x) { return n - (I)(x == 0); } \
    static inline T##_t LANES(T##_lowest)(V a) \
    { T##_t r = a[0]; for (unsigned i = 1; i < sizeof a / sizeof r; i++) if (a[i] < r) r = a[i]; return r; } \
    static inline T##_t LANES(T##_highest)(V a) \
    { T##_t r = a[0]; for (unsigned i = 1; i < sizeof a / sizeof r; i++) if (a[i] > r) r = a[i]; return r; } \
    static inline int64_t LANES(T##_total)(I n) \
    { int64_t r = 0; for (unsigned i = 0; i < sizeof n / sizeof n[0]; i++) r += n[i]; return r; }

#if defined(__SSE2__)
static inline LANES(f32) LANES(f32_min)(LANES(f32) a, LANES(f32) b) { return _mm_min_ps(a, b); }
static inline LANES(f32) LANES(f32_max)(LANES(f32) a, LANES(f32) b) { return _mm_max_ps(a, b); }
static inline LANES(f64) LANES(f64_min)(LANES(f64) a, LANES(f64) b) { return _mm_min_pd(a, b); }
static inline LANES(f64) LANES(f64_max)(LANES(f64) a, LANES(f64) b) { return _mm_max_pd(a, b); }
#else /* GCC does not see what this is */
#define PORTABLE_BOUNDS(T, V, I) \
    static inline V LANES(T##_min)(V a, V b) { const I m = a < b; return (V)(((I)a & m) | ((I)b & ~m)); } \
    static inline V LANES(T##_max)(V a, V b) { const I m = a > b; return (V)(((I)a & m) | ((I)b & ~m)); }
PORTABLE_BOUNDS(f32, LANES(f32), LANES(f32_counts))
PORTABLE_BOUNDS(f64, LANES(f64), LANES(f64_counts))
#undef PORTABLE_BOUNDS
#endif
PORTABLE_OPS(f32, LANES(f32), LANES(f32_counts))
PORTABLE_OPS(f64, LANES(f64), LANES(f64_counts))
#undef PORTABLE_OPS

typedef struct { LANES(f64) low, high; } LANES(f32_wide);
typedef LANES(f64) LANES(f64_wide);
static inline LANES(f64) LANES(f64_wide_none)(void) { return LANES(f64_set)(0.0); }
static inline LANES(f64) LANES(f64_spill)(LANES(f64) w, LANES(f64) x) { return w + x; }
static inline double LANES(f64_wide_sum)(LANES(f64) w) { return w[0] + w[1]; }
static inline LANES(f32_wide) LANES(f32_wide_none)(void)
{
    return (LANES(f32_wide)){LANES(f64_set)(0.0), LANES(f64_set)(0.0)};
}
static inline LANES(f32_wide) LANES(f32_spill)(LANES(f32_wide) w, LANES(f32) x)
{
    w.low += (LANES(f64)){x[0], x[1]};
    w.high += (LANES(f64)){x[2], x[3]};
    return w;
}
static inline double LANES(f32_wide_sum)(LANES(f32_wide) w) { return LANES(f64_wide_sum)(w.low + w.high); }

typedef int16_t LANES(i16) __attribute__((vector_size(16)));
typedef struct { LANES(i16) top, deep, small; } LANES(i16_bounds);
typedef uint32_t LANES(u32) __attribute__((vector_size(16)));
typedef uint64_t LANES(u64) __attribute__((vector_size(16)));
typedef struct { LANES(u32) sum, high; } LANES(checks);
static inline LANES(checks) LANES(checks_none)(void) { LANES(checks) c; memset(&c, 0, sizeof c); return c; }
static inline LANES(checks) LANES(f32_checks)(LANES(checks) c, LANES(f32) x, LANES(f32) y)
{
    const LANES(u32) a = (LANES(u32))x, b = (LANES(u32))y;
    c.sum += a + b;
    c.high += ((a >> 16) + (b >> 16) + 1) >> 1;
    return c;
}
static inline LANES(checks) LANES(f64_checks)(LANES(checks) c, LANES(f64) x, LANES(f64) y)
{
    c.sum = (LANES(u32))((LANES(u64))c.sum + ((LANES(u64))x + (LANES(u64))y));
    return c;
}
static inline LANES(checks) LANES(checks16)(LANES(checks) c, LANES(i16) w)
{
    c.sum += (LANES(u32))w;
    c.high += (LANES(u32))w >> 16;
    return c;
}
static inline LANES(i16) LANES(i16_load)(const uint16_t *p) { LANES(i16) r; memcpy(&r, p, sizeof r); return r; }
static inline LANES(i16) LANES(i16_set)(int16_t x) { return (LANES(i16)){x, x, x, x, x, x, x, x}; }
static inline LANES(i16_bounds) LANES(i16_bounds_none)(void)
{
    return (LANES(i16_bounds)){LANES(i16_set)(INT16_MIN), LANES(i16_set)(INT16_MIN), LANES(i16_set)(INT16_MAX)};
}
/* Unsigned order is signed order of words with the sign bit turned over: SSE2 compares signed ones only. */
static inline LANES(i16_bounds) LANES(i16_bound)(LANES(i16_bounds) b, LANES(i16) w)
{
    const LANES(i16) turned = w ^ INT16_MIN, t = b.top > w, d = b.deep > turned, s = b.small < turned;
    b.top = (b.top & t) | (w & ~t);
    b.deep = (b.deep & d) | (turned & ~d);
    b.small = (b.small & s) | (turned & ~s);
    return b;
}
static inline LANES(i16) LANES(i16_count_zero)(LANES(i16) n, LANES(i16) w) { return n - ((w & 0x7fff) == 0); }
static inline LANES(i16) LANES(i16_count)(LANES(i16) n, LANES(i16) w, LANES(i16) eps) { return n - ((w & 0x7fff) <= eps); }

#define F32_LOAD2_f32(p, a, b) { memcpy(&(a), (p), 16); memcpy(&(b), (p) + 4, 16); }
#define F64_LOAD2_f64(p, a, b) { memcpy(&(a), (p), 16); memcpy(&(b), (p) + 2, 16); }
/* Even elements in one vector, odd ones in the other (or the reverse): moments do not mind the order. */
#define F32_LOAD2_bf16(p, a, b) { \
    LANES(f32_counts) w; \
    memcpy(&w, (p), 16); \
    (a) = (LANES(f32))(w << 16); \
    (b) = (LANES(f32))(w & (int32_t)0xffff0000u); }
/* The exponent's bias by a product, which is exact for denormals too; what then reaches 2^16 is infinity or nan. */
static inline LANES(f32) LANES(f32_of_f16)(LANES(f32_counts) w)
{
    const LANES(f32) size = (LANES(f32))((w & 0x7fff) << 13) * 0x1p112f;
    return (LANES(f32))((LANES(f32_counts))size | ((size >= 65536.0f) & 0x7f800000) | ((w & 0x8000) << 16));
}
#define F32_LOAD2_f16(p, a, b) { \
    LANES(f32_counts) w; \
    memcpy(&w, (p), 16); \
    (a) = LANES(f32_of_f16)(w); \
    (b) = LANES(f32_of_f16)(w >> 16); }
