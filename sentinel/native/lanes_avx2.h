/* AVX2 with FMA and F16C, which every CPU that has AVX2 has. */
#define I16_TURN 0 /* what unsigned bounds of 16 bits are kept with */
#define F32_W 8
typedef __m256 LANES(f32);
typedef __m256i LANES(f32_counts);
typedef __m256 LANES(f32_mask);
#define F64_W 4
typedef __m256d LANES(f64);
typedef __m256i LANES(f64_counts);
typedef __m256d LANES(f64_mask);
typedef __m256i LANES(i16);
typedef struct { __m256d low, high; } LANES(f32_wide);
typedef __m256d LANES(f64_wide);
typedef struct { __m256i sum, high; } LANES(checks);
typedef struct { __m256i top, deep, small; } LANES(i16_bounds);

#define AVX2 static inline TARGET
AVX2 __m256 LANES(f32_set)(float x) { return _mm256_set1_ps(x); }
AVX2 __m256 LANES(f32_add)(__m256 a, __m256 b) { return _mm256_add_ps(a, b); }
AVX2 __m256 LANES(f32_mul)(__m256 a, __m256 b) { return _mm256_mul_ps(a, b); }
AVX2 __m256 LANES(f32_fma)(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
AVX2 __m256 LANES(f32_min)(__m256 a, __m256 b) { return _mm256_min_ps(a, b); }
AVX2 __m256 LANES(f32_max)(__m256 a, __m256 b) { return _mm256_max_ps(a, b); }
AVX2 __m256i LANES(f32_none)(void) { return _mm256_setzero_si256(); }
AVX2 __m256i LANES(f32_count)(__m256i n, __m256 x, __m256 eps)
{
    const __m256 size = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x);
    return _mm256_sub_epi32(n, _mm256_castps_si256(_mm256_cmp_ps(size, eps, _CMP_LE_OQ)));
}
AVX2 __m256 LANES(f32_finite)(__m256 x)
{
    return _mm256_cmp_ps(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), x), _mm256_set1_ps(FLT_MAX), _CMP_LE_OQ);
}
AVX2 __m256 LANES(f32_where)(__m256 m, __m256 x) { return _mm256_and_ps(m, x); }
AVX2 __m256 LANES(f32_min_where)(__m256 a, __m256 m, __m256 x) { return _mm256_min_ps(a, _mm256_blendv_ps(a, x, m)); }
AVX2 __m256 LANES(f32_max_where)(__m256 a, __m256 m, __m256 x) { return _mm256_max_ps(a, _mm256_blendv_ps(a, x, m)); }
AVX2 __m256i LANES(f32_count_where)(__m256i n, __m256 m) { return _mm256_sub_epi32(n, _mm256_castps_si256(m)); }
AVX2 __m256i LANES(f32_count_equal)(__m256i n, __m256 x, __m256 y)
{
    return _mm256_sub_epi32(n, _mm256_castps_si256(_mm256_cmp_ps(x, y, _CMP_EQ_OQ)));
}
AVX2 __m256i LANES(f32_count_nan)(__m256i n, __m256 x)
{
    return _mm256_sub_epi32(n, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}
AVX2 __m256i LANES(f32_count_zero)(__m256i n, __m256 x)
{
    return _mm256_sub_epi32(n, _mm256_castps_si256(_mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_EQ_OQ)));
}
AVX2 __m256d LANES(f64_set)(double x) { return _mm256_set1_pd(x); }
AVX2 __m256d LANES(f64_add)(__m256d a, __m256d b) { return _mm256_add_pd(a, b); }
AVX2 __m256d LANES(f64_mul)(__m256d a, __m256d b) { return _mm256_mul_pd(a, b); }
AVX2 __m256d LANES(f64_fma)(__m256d a, __m256d b, __m256d c) { return _mm256_fmadd_pd(a, b, c); }
AVX2 __m256d LANES(f64_min)(__m256d a, __m256d b) { return _mm256_min_pd(a, b); }
AVX2 __m256d LANES(f64_max)(__m256d a, __m256d b) { return _mm256_max_pd(a, b); }
AVX2 __m256i LANES(f64_none)(void) { return _mm256_setzero_si256(); }
AVX2 __m256i LANES(f64_count)(__m256i n, __m256d x, __m256d eps)
{
    const __m256d size = _mm256_andnot_pd(_mm256_set1_pd(-0.0), x);
    return _mm256_sub_epi64(n, _mm256_castpd_si256(_mm256_cmp_pd(size, eps, _CMP_LE_OQ)));
}
AVX2 __m256d LANES(f64_finite)(__m256d x)
{
    return _mm256_cmp_pd(_mm256_andnot_pd(_mm256_set1_pd(-0.0), x), _mm256_set1_pd(DBL_MAX), _CMP_LE_OQ);
}
AVX2 __m256d LANES(f64_where)(__m256d m, __m256d x) { return _mm256_and_pd(m, x); }
AVX2 __m256d LANES(f64_min_where)(__m256d a, __m256d m, __m256d x) { return _mm256_min_pd(a, _mm256_blendv_pd(a, x, m)); }
AVX2 __m256d LANES(f64_max_where)(__m256d a, __m256d m, __m256d x) { return _mm256_max_pd(a, _mm256_blendv_pd(a, x, m)); }
AVX2 __m256i LANES(f64_count_where)(__m256i n, __m256d m) { return _mm256_sub_epi64(n, _mm256_castpd_si256(m)); }
AVX2 __m256i LANES(f64_count_equal)(__m256i n, __m256d x, __m256d y)
{
    return _mm256_sub_epi64(n, _mm256_castpd_si256(_mm256_cmp_pd(x, y, _CMP_EQ_OQ)));
}
AVX2 __m256i LANES(f64_count_nan)(__m256i n, __m256d x)
{
    return _mm256_sub_epi64(n, _mm256_castpd_si256(_mm256_cmp_pd(x, x, _CMP_UNORD_Q)));
}
AVX2 __m256i LANES(f64_count_zero)(__m256i n, __m256d x)
{
    return _mm256_sub_epi64(n, _mm256_castpd_si256(_mm256_cmp_pd(x, _mm256_setzero_pd(), _CMP_EQ_OQ)));
}
AVX2 __m256d LANES(f64_wide_none)(void) { return _mm256_setzero_pd(); }
AVX2 __m256d LANES(f64_spill)(__m256d w, __m256d x) { return _mm256_add_pd(w, x); }
AVX2 double LANES(f64_wide_sum)(__m256d a)
{
    const __m128d x = _mm_add_pd(_mm256_castpd256_pd128(a), _mm256_extractf128_pd(a, 1));
    return _mm_cvtsd_f64(_mm_add_sd(x, _mm_unpackhi_pd(x, x)));
}
AVX2 LANES(f32_wide) LANES(f32_wide_none)(void)
{
    return (LANES(f32_wide)){_mm256_setzero_pd(), _mm256_setzero_pd()};
}
AVX2 LANES(f32_wide) LANES(f32_spill)(LANES(f32_wide) w, __m256 x)
{
    w.low = _mm256_add_pd(w.low, _mm256_cvtps_pd(_mm256_castps256_ps128(x)));
    w.high = _mm256_add_pd(w.high, _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)));
    return w;
}
AVX2 double LANES(f32_wide_sum)(LANES(f32_wide) w) { return LANES(f64_wide_sum)(_mm256_add_pd(w.low, w.high)); }
AVX2 float LANES(f32_lowest)(__m256 a)
{
    __m128 x = _mm_min_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_min_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_min_ss(x, _mm_movehdup_ps(x)));
}
AVX2 double LANES(f64_lowest)(__m256d a)
{
    const __m128d x = _mm_min_pd(_mm256_castpd256_pd128(a), _mm256_extractf128_pd(a, 1));
    return _mm_cvtsd_f64(_mm_min_sd(x, _mm_unpackhi_pd(x, x)));
}
AVX2 float LANES(f32_highest)(__m256 a)
{
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
AVX2 double LANES(f64_highest)(__m256d a)
{
    const __m128d x = _mm_max_pd(_mm256_castpd256_pd128(a), _mm256_extractf128_pd(a, 1));
    return _mm_cvtsd_f64(_mm_max_sd(x, _mm_unpackhi_pd(x, x)));
}
AVX2 int64_t LANES(f64_total)(__m256i n)
{
    const __m128i x = _mm_add_epi64(_mm256_castsi256_si128(n), _mm256_extracti128_si256(n, 1));
    int64_t halves[2];
    memcpy(halves, &x, sizeof halves);
    return halves[0] + halves[1];
}
AVX2 int64_t LANES(f32_total)(__m256i n)
{
    const __m256i low = _mm256_and_si256(n, _mm256_set1_epi64x(0xffffffff));
    return LANES(f64_total)(_mm256_add_epi64(low, _mm256_srli_epi64(n, 32)));
}
AVX2 __m256i LANES(i16_load)(const uint16_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
AVX2 __m256i LANES(i16_set)(int16_t x) { return _mm256_set1_epi16(x); }
AVX2 LANES(i16_bounds) LANES(i16_bounds_none)(void)
{
    return (LANES(i16_bounds)){_mm256_set1_epi16(INT16_MIN), _mm256_setzero_si256(), _mm256_set1_epi16(-1)};
}
AVX2 LANES(i16_bounds) LANES(i16_bound)(LANES(i16_bounds) bounds, __m256i w)
{
    bounds.top = _mm256_max_epi16(bounds.top, w);
    bounds.deep = _mm256_max_epu16(bounds.deep, w);
    bounds.small = _mm256_min_epu16(bounds.small, w);
    return bounds;
}
AVX2 __m256i LANES(i16_count_zero)(__m256i n, __m256i w)
{
    return _mm256_sub_epi16(n, _mm256_cmpeq_epi16(_mm256_add_epi16(w, w), _mm256_setzero_si256()));
}
AVX2 __m256i LANES(i16_count)(__m256i n, __m256i w, __m256i eps)
{
    const __m256i size = _mm256_and_si256(w, _mm256_set1_epi16(0x7fff));
    return _mm256_add_epi16(_mm256_add_epi16(n, _mm256_set1_epi16(1)), _mm256_cmpgt_epi16(size, eps));
}
AVX2 LANES(checks) LANES(checks_none)(void) { return (LANES(checks)){_mm256_setzero_si256(), _mm256_setzero_si256()}; }
AVX2 LANES(checks) LANES(f32_checks)(LANES(checks) c, __m256 x, __m256 y)
{
    const __m256i a = _mm256_castps_si256(x), b = _mm256_castps_si256(y);
    c.sum = _mm256_add_epi32(c.sum, _mm256_add_epi32(a, b));
    c.high = _mm256_add_epi32(c.high, _mm256_srli_epi32(_mm256_avg_epu16(a, b), 16));
    return c;
}
AVX2 LANES(checks) LANES(f64_checks)(LANES(checks) c, __m256d x, __m256d y)
{
    c.sum = _mm256_add_epi64(c.sum, _mm256_add_epi64(_mm256_castpd_si256(x), _mm256_castpd_si256(y)));
    return c;
}
AVX2 LANES(checks) LANES(checks16)(LANES(checks) c, __m256i w)
{
    c.sum = _mm256_add_epi32(c.sum, w);
    c.high = _mm256_add_epi32(c.high, _mm256_srli_epi32(w, 16));
    return c;
}
#undef AVX2

#define F32_LOAD2_f32(p, a, b) { (a) = _mm256_loadu_ps(p); (b) = _mm256_loadu_ps((p) + 8); }
#define F64_LOAD2_f64(p, a, b) { (a) = _mm256_loadu_pd(p); (b) = _mm256_loadu_pd((p) + 4); }
/* Even elements in one register, odd ones in the other: moments do not mind the order, and no shuffle is needed. */
#define F32_LOAD2_bf16(p, a, b) { \
    const __m256i w = _mm256_loadu_si256((const __m256i *)(p)); \
    (a) = _mm256_castsi256_ps(_mm256_slli_epi32(w, 16)); \
    (b) = _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32((int)0xffff0000u))); }
#define F32_LOAD2_f16(p, a, b) { \
    (a) = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p))); \
    (b) = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)((p) + 8))); }
