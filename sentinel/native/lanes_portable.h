/* Vectors of sixteen bytes in the compiler's own notation: SSE2, NEON, or scalars where there is nothing. */
#define F32_W 4
typedef float LANES(f32) __attribute__((vector_size(16)));
typedef int32_t LANES(f32_counts) __attribute__((vector_size(16)));
#define F64_W 2
typedef double LANES(f64) __attribute__((vector_size(16)));
typedef int64_t LANES(f64_counts) __attribute__((vector_size(16)));

/* A comparison is a vector of 0 and -1: it selects, and it counts. */
#define PORTABLE_OPS(T, V, I) \
    static inline V LANES(T##_set)(T##_t x) { V r; for (unsigned i = 0; i < sizeof r / sizeof x; i++) r[i] = x; return r; } \
    static inline V LANES(T##_add)(V a, V b) { return a + b; } \
    static inline V LANES(T##_mul)(V a, V b) { return a * b; } \
    static inline V LANES(T##_fma)(V a, V b, V c) { return a * b + c; } \
    static inline V LANES(T##_min)(V a, V b) { const I m = a < b; return (V)(((I)a & m) | ((I)b & ~m)); } \
    static inline V LANES(T##_max)(V a, V b) { const I m = a > b; return (V)(((I)a & m) | ((I)b & ~m)); } \
    static inline I LANES(T##_count)(I n, V x, V eps) { return n - ((I)(x <= eps) & (I)(-x <= eps)); } \
    static inline I LANES(T##_none)(void) { I r; memset(&r, 0, sizeof r); return r; } \
    static inline T##_t LANES(T##_sum)(V a) \
    { T##_t r = a[0]; for (unsigned i = 1; i < sizeof a / sizeof r; i++) r += a[i]; return r; } \
    static inline T##_t LANES(T##_lowest)(V a) \
    { T##_t r = a[0]; for (unsigned i = 1; i < sizeof a / sizeof r; i++) if (a[i] < r) r = a[i]; return r; } \
    static inline T##_t LANES(T##_highest)(V a) \
    { T##_t r = a[0]; for (unsigned i = 1; i < sizeof a / sizeof r; i++) if (a[i] > r) r = a[i]; return r; } \
    static inline int64_t LANES(T##_total)(I n) \
    { int64_t r = 0; for (unsigned i = 0; i < sizeof n / sizeof n[0]; i++) r += n[i]; return r; }

PORTABLE_OPS(f32, LANES(f32), LANES(f32_counts))
PORTABLE_OPS(f64, LANES(f64), LANES(f64_counts))
#undef PORTABLE_OPS

typedef int16_t LANES(i16) __attribute__((vector_size(16)));
static inline LANES(i16) LANES(i16_load)(const uint16_t *p) { LANES(i16) r; memcpy(&r, p, sizeof r); return r; }
static inline LANES(i16) LANES(i16_set)(int16_t x) { return (LANES(i16)){x, x, x, x, x, x, x, x}; }
static inline LANES(i16) LANES(i16_min)(LANES(i16) a, LANES(i16) b) { const LANES(i16) m = a < b; return (a & m) | (b & ~m); }
static inline LANES(i16) LANES(i16_max)(LANES(i16) a, LANES(i16) b) { const LANES(i16) m = a > b; return (a & m) | (b & ~m); }
static inline LANES(i16) LANES(i16_key)(LANES(i16) w) { return w ^ ((w >> 15) & 0x7fff); }
static inline LANES(i16) LANES(i16_count)(LANES(i16) n, LANES(i16) w, LANES(i16) eps) { return n - ((w & 0x7fff) <= eps); }

#define F32_LOAD2_f32(p, a, b) { memcpy(&(a), (p), 16); memcpy(&(b), (p) + 4, 16); }
#define F64_LOAD2_f64(p, a, b) { memcpy(&(a), (p), 16); memcpy(&(b), (p) + 2, 16); }
/* Even elements in one vector, odd ones in the other (or the reverse): moments do not mind the order. */
#define F32_LOAD2_bf16(p, a, b) { \
    LANES(f32_counts) w; \
    memcpy(&w, (p), 16); \
    (a) = (LANES(f32))(w << 16); \
    (b) = (LANES(f32))(w & (int32_t)0xffff0000u); }
#define F32_LOAD2_f16(p, a, b) { \
    float wide[8]; \
    for (int q = 0; q < 8; q++) wide[q] = widen_f16((p)[q]); \
    memcpy(&(a), wide, 16); \
    memcpy(&(b), wide + 4, 16); }
