/* Eight lanes in plain C: what any compiler vectorises for whatever machine it targets. */
#define F32_W 8
typedef struct { float v[8]; } LANES(f32);
typedef struct { int32_t v[8]; } LANES(f32_counts);
#define F64_W 8
typedef struct { double v[8]; } LANES(f64);
typedef struct { int64_t v[8]; } LANES(f64_counts);

#define PORTABLE_OPS(T, V, I) \
    static inline V LANES(T##_set)(T##_t x) { V r; for (int i = 0; i < 8; i++) r.v[i] = x; return r; } \
    static inline V LANES(T##_add)(V a, V b) { for (int i = 0; i < 8; i++) a.v[i] += b.v[i]; return a; } \
    static inline V LANES(T##_mul)(V a, V b) { for (int i = 0; i < 8; i++) a.v[i] *= b.v[i]; return a; } \
    static inline V LANES(T##_fma)(V a, V b, V c) { for (int i = 0; i < 8; i++) a.v[i] = a.v[i] * b.v[i] + c.v[i]; return a; } \
    static inline V LANES(T##_min)(V a, V b) { for (int i = 0; i < 8; i++) a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return a; } \
    static inline V LANES(T##_max)(V a, V b) { for (int i = 0; i < 8; i++) a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; } \
    static inline I LANES(T##_count)(I n, V x, V eps) \
    { for (int i = 0; i < 8; i++) n.v[i] += (x.v[i] <= eps.v[i]) & (-x.v[i] <= eps.v[i]); return n; } \
    static inline I LANES(T##_none)(void) { I r; memset(&r, 0, sizeof r); return r; }

PORTABLE_OPS(f32, LANES(f32), LANES(f32_counts))
PORTABLE_OPS(f64, LANES(f64), LANES(f64_counts))
#undef PORTABLE_OPS

#define F32_LOAD2_f32(p, a, b) { memcpy(&(a), (p), 32); memcpy(&(b), (p) + 8, 32); }
#define F64_LOAD2_f64(p, a, b) { memcpy(&(a), (p), 64); memcpy(&(b), (p) + 8, 64); }
#define F32_LOAD2_bf16(p, a, b) for (int q = 0; q < 8; q++) { (a).v[q] = widen_bf16((p)[q]); (b).v[q] = widen_bf16((p)[q + 8]); }
#define F32_LOAD2_f16(p, a, b) for (int q = 0; q < 8; q++) { (a).v[q] = widen_f16((p)[q]); (b).v[q] = widen_f16((p)[q + 8]); }
