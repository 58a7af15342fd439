/* Looking about a value among `width` floats, a multiple of 16: one version an instruction set, all with the same results. */
#define ROLLING_INLINE static inline __attribute__((always_inline))

/* What lies about v. */
typedef struct {
    int32_t less, most;   /* how many lie below it; how many do not lie above it */
    float below, above;   /* the largest below it, -inf for none; the smallest above it, +inf for none */
} RollingLook;

static inline RollingLook rolling_look_portable(const float *a, int width, float v)
{
    RollingLook at = {0, 0, -INFINITY, INFINITY};
    for (int i = 0; i < width; i++) {
        at.less += a[i] < v;
        at.most += a[i] <= v;
        at.below = a[i] < v && a[i] > at.below ? a[i] : at.below;
        at.above = a[i] > v && a[i] < at.above ? a[i] : at.above;
    }
    return at;
}

#if HAS_X86
static inline __attribute__((target("avx2,popcnt"))) RollingLook rolling_look_avx2(const float *a, int width, float v)
{
    const __m256 t = _mm256_set1_ps(v), low = _mm256_set1_ps(-INFINITY), high = _mm256_set1_ps(INFINITY);
    __m256 below = low, above = high;
    RollingLook at = {0, width, -INFINITY, INFINITY};
    for (int i = 0; i < width; i += 8) {
        const __m256 x = _mm256_loadu_ps(a + i);
        const __m256 is_less = _mm256_cmp_ps(x, t, _CMP_LT_OQ), is_more = _mm256_cmp_ps(x, t, _CMP_GT_OQ);
        at.less += __builtin_popcount((unsigned)_mm256_movemask_ps(is_less));
        at.most -= __builtin_popcount((unsigned)_mm256_movemask_ps(is_more));
        below = _mm256_max_ps(below, _mm256_blendv_ps(low, x, is_less));
        above = _mm256_min_ps(above, _mm256_blendv_ps(high, x, is_more));
    }
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(below), _mm256_extractf128_ps(below, 1));
    __m128 c = _mm_min_ps(_mm256_castps256_ps128(above), _mm256_extractf128_ps(above, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    c = _mm_min_ps(c, _mm_movehl_ps(c, c));
    at.below = _mm_cvtss_f32(_mm_max_ss(b, _mm_shuffle_ps(b, b, 1)));
    at.above = _mm_cvtss_f32(_mm_min_ss(c, _mm_shuffle_ps(c, c, 1)));
    return at;
}

static inline __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,popcnt,prefer-vector-width=512"))) RollingLook
rolling_look_avx512(const float *a, int width, float v)
{
    const __m512 t = _mm512_set1_ps(v);
    __m512 below = _mm512_set1_ps(-INFINITY), above = _mm512_set1_ps(INFINITY);
    RollingLook at = {0, width, -INFINITY, INFINITY};
    for (int i = 0; i < width; i += 16) {
        const __m512 x = _mm512_loadu_ps(a + i);
        const __mmask16 is_less = _mm512_cmp_ps_mask(x, t, _CMP_LT_OQ), is_more = _mm512_cmp_ps_mask(x, t, _CMP_GT_OQ);
        at.less += __builtin_popcount(is_less);
        at.most -= __builtin_popcount(is_more);
        below = _mm512_mask_max_ps(below, is_less, below, x);
        above = _mm512_mask_min_ps(above, is_more, above, x);
    }
    at.below = _mm512_reduce_max_ps(below);
    at.above = _mm512_reduce_min_ps(above);
    return at;
}

#endif

/* `isa` is a constant where this is inlined. */
ROLLING_INLINE RollingLook rolling_look(const float *a, int width, float v, int isa)
{
    (void)isa;
#if HAS_X86
    if (isa == 2) return rolling_look_avx512(a, width, v);
    if (isa == 1) return rolling_look_avx2(a, width, v);
#endif
    return rolling_look_portable(a, width, v);
}
