/* AVX-512 F and BW. */
#define I16_TURN 0 /* what unsigned bounds of 16 bits are kept with */
#define F32_W 16
typedef __m512 LANES(f32);
typedef __m512i LANES(f32_counts);
typedef __mmask16 LANES(f32_mask);
#define F64_W 8
typedef __m512d LANES(f64);
typedef __m512i LANES(f64_counts);
typedef __mmask8 LANES(f64_mask);
typedef __m512i LANES(i16);
typedef struct { __m512d low, high; } LANES(f32_wide);
typedef __m512d LANES(f64_wide);
typedef struct { __m512i sum, high; } LANES(checks);
typedef struct { __m512i top, deep, small; } LANES(i16_bounds);

#define AVX512 static inline TARGET
AVX512 __m512 LANES(f32_set)(float x) { return _mm512_set1_ps(x); }
AVX512 __m512 LANES(f32_add)(__m512 a, __m512 b) { return _mm512_add_ps(a, b); }
AVX512 __m512 LANES(f32_mul)(__m512 a, __m512 b) { return _mm512_mul_ps(a, b); }
AVX512 __m512 LANES(f32_fma)(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
AVX512 __m512 LANES(f32_min)(__m512 a, __m512 b) { return _mm512_min_ps(a, b); }
AVX512 __m512 LANES(f32_max)(__m512 a, __m512 b) { return _mm512_max_ps(a, b); }
AVX512 __m512i LANES(f32_none)(void) { return _mm512_setzero_si512(); }
AVX512 __m512i LANES(f32_count)(__m512i n, __m512 x, __m512 eps)
{
    const __mmask16 is_zero = _mm512_cmp_ps_mask(_mm512_abs_ps(x), eps, _CMP_LE_OQ);
    return _mm512_mask_add_epi32(n, is_zero, n, _mm512_set1_epi32(1));
}
AVX512 __mmask16 LANES(f32_finite)(__m512 x) { return (__mmask16)~_mm512_fpclass_ps_mask(x, 0x99); } /* nans, infinities */
AVX512 __m512 LANES(f32_where)(__mmask16 m, __m512 x) { return _mm512_maskz_mov_ps(m, x); }
AVX512 __m512 LANES(f32_min_where)(__m512 a, __mmask16 m, __m512 x) { return _mm512_mask_min_ps(a, m, a, x); }
AVX512 __m512 LANES(f32_max_where)(__m512 a, __mmask16 m, __m512 x) { return _mm512_mask_max_ps(a, m, a, x); }
AVX512 __m512i LANES(f32_count_where)(__m512i n, __mmask16 m)
{
    return _mm512_mask_sub_epi32(n, m, n, _mm512_set1_epi32(-1));
}
AVX512 __m512i LANES(f32_count_equal)(__m512i n, __m512 x, __m512 y)
{
    return _mm512_mask_sub_epi32(n, _mm512_cmp_ps_mask(x, y, _CMP_EQ_OQ), n, _mm512_set1_epi32(-1));
}
AVX512 __m512i LANES(f32_count_nan)(__m512i n, __m512 x)
{
    return _mm512_mask_sub_epi32(n, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), n, _mm512_set1_epi32(-1));
}
AVX512 __m512i LANES(f32_count_zero)(__m512i n, __m512 x)
{
    const __mmask16 is_zero = _mm512_testn_epi32_mask(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff));
    return _mm512_mask_sub_epi32(n, is_zero, n, _mm512_set1_epi32(-1));
}
AVX512 LANES(f32_wide) LANES(f32_wide_none)(void)
{
    return (LANES(f32_wide)){_mm512_setzero_pd(), _mm512_setzero_pd()};
}
AVX512 LANES(f32_wide) LANES(f32_spill)(LANES(f32_wide) w, __m512 x)
{
    w.low = _mm512_add_pd(w.low, _mm512_cvtps_pd(_mm512_castps512_ps256(x)));
    w.high = _mm512_add_pd(w.high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)));
    return w;
}
AVX512 double LANES(f32_wide_sum)(LANES(f32_wide) w) { return _mm512_reduce_add_pd(_mm512_add_pd(w.low, w.high)); }
AVX512 __m512d LANES(f64_set)(double x) { return _mm512_set1_pd(x); }
AVX512 __m512d LANES(f64_add)(__m512d a, __m512d b) { return _mm512_add_pd(a, b); }
AVX512 __m512d LANES(f64_mul)(__m512d a, __m512d b) { return _mm512_mul_pd(a, b); }
AVX512 __m512d LANES(f64_fma)(__m512d a, __m512d b, __m512d c) { return _mm512_fmadd_pd(a, b, c); }
AVX512 __m512d LANES(f64_min)(__m512d a, __m512d b) { return _mm512_min_pd(a, b); }
AVX512 __m512d LANES(f64_max)(__m512d a, __m512d b) { return _mm512_max_pd(a, b); }
AVX512 __m512i LANES(f64_none)(void) { return _mm512_setzero_si512(); }
AVX512 __m512i LANES(f64_count)(__m512i n, __m512d x, __m512d eps)
{
    const __mmask8 is_zero = _mm512_cmp_pd_mask(_mm512_abs_pd(x), eps, _CMP_LE_OQ);
    return _mm512_mask_add_epi64(n, is_zero, n, _mm512_set1_epi64(1));
}
AVX512 __mmask8 LANES(f64_finite)(__m512d x) { return (__mmask8)~_mm512_fpclass_pd_mask(x, 0x99); } /* nans, infinities */
AVX512 __m512d LANES(f64_where)(__mmask8 m, __m512d x) { return _mm512_maskz_mov_pd(m, x); }
AVX512 __m512d LANES(f64_min_where)(__m512d a, __mmask8 m, __m512d x) { return _mm512_mask_min_pd(a, m, a, x); }
AVX512 __m512d LANES(f64_max_where)(__m512d a, __mmask8 m, __m512d x) { return _mm512_mask_max_pd(a, m, a, x); }
AVX512 __m512i LANES(f64_count_where)(__m512i n, __mmask8 m)
{
    return _mm512_mask_sub_epi64(n, m, n, _mm512_set1_epi64(-1));
}
AVX512 __m512i LANES(f64_count_equal)(__m512i n, __m512d x, __m512d y)
{
    return _mm512_mask_sub_epi64(n, _mm512_cmp_pd_mask(x, y, _CMP_EQ_OQ), n, _mm512_set1_epi64(-1));
}
AVX512 __m512i LANES(f64_count_nan)(__m512i n, __m512d x)
{
    return _mm512_mask_sub_epi64(n, _mm512_cmp_pd_mask(x, x, _CMP_UNORD_Q), n, _mm512_set1_epi64(-1));
}
AVX512 __m512i LANES(f64_count_zero)(__m512i n, __m512d x)
{
    const __mmask8 is_zero = _mm512_testn_epi64_mask(_mm512_castpd_si512(x), _mm512_set1_epi64(INT64_MAX));
    return _mm512_mask_sub_epi64(n, is_zero, n, _mm512_set1_epi64(-1));
}
AVX512 __m512d LANES(f64_wide_none)(void) { return _mm512_setzero_pd(); }
AVX512 __m512d LANES(f64_spill)(__m512d w, __m512d x) { return _mm512_add_pd(w, x); }
AVX512 double LANES(f64_wide_sum)(__m512d w) { return _mm512_reduce_add_pd(w); }
AVX512 float LANES(f32_lowest)(__m512 a) { return _mm512_reduce_min_ps(a); }
AVX512 float LANES(f32_highest)(__m512 a) { return _mm512_reduce_max_ps(a); }
AVX512 int64_t LANES(f32_total)(__m512i n) { return _mm512_reduce_add_epi32(n); }
AVX512 double LANES(f64_lowest)(__m512d a) { return _mm512_reduce_min_pd(a); }
AVX512 double LANES(f64_highest)(__m512d a) { return _mm512_reduce_max_pd(a); }
AVX512 int64_t LANES(f64_total)(__m512i n) { return _mm512_reduce_add_epi64(n); }
AVX512 __m512i LANES(i16_load)(const uint16_t *p) { return _mm512_loadu_si512((const void *)p); }
AVX512 __m512i LANES(i16_set)(int16_t x) { return _mm512_set1_epi16(x); }
AVX512 LANES(i16_bounds) LANES(i16_bounds_none)(void)
{
    return (LANES(i16_bounds)){_mm512_set1_epi16(INT16_MIN), _mm512_setzero_si512(), _mm512_set1_epi16(-1)};
}
AVX512 LANES(i16_bounds) LANES(i16_bound)(LANES(i16_bounds) bounds, __m512i w)
{
    bounds.top = _mm512_max_epi16(bounds.top, w);
    bounds.deep = _mm512_max_epu16(bounds.deep, w);
    bounds.small = _mm512_min_epu16(bounds.small, w);
    return bounds;
}
AVX512 __m512i LANES(i16_count_zero)(__m512i n, __m512i w)
{
    const __mmask32 is_zero = _mm512_testn_epi16_mask(w, _mm512_set1_epi16(0x7fff));
    return _mm512_mask_sub_epi16(n, is_zero, n, _mm512_set1_epi16(-1));
}
AVX512 __m512i LANES(i16_count)(__m512i n, __m512i w, __m512i eps)
{
    const __mmask32 is_zero = _mm512_cmple_epi16_mask(_mm512_and_si512(w, _mm512_set1_epi16(0x7fff)), eps);
    return _mm512_mask_add_epi16(n, is_zero, n, _mm512_set1_epi16(1));
}
AVX512 LANES(checks) LANES(checks_none)(void) { return (LANES(checks)){_mm512_setzero_si512(), _mm512_setzero_si512()}; }
AVX512 LANES(checks) LANES(f32_checks)(LANES(checks) c, __m512 x, __m512 y)
{
    const __m512i a = _mm512_castps_si512(x), b = _mm512_castps_si512(y);
    c.sum = _mm512_add_epi32(c.sum, _mm512_add_epi32(a, b));
    c.high = _mm512_add_epi32(c.high, _mm512_srli_epi32(_mm512_avg_epu16(a, b), 16));
    return c;
}
AVX512 LANES(checks) LANES(f64_checks)(LANES(checks) c, __m512d x, __m512d y)
{
    c.sum = _mm512_add_epi64(c.sum, _mm512_add_epi64(_mm512_castpd_si512(x), _mm512_castpd_si512(y)));
    return c;
}
AVX512 LANES(checks) LANES(checks16)(LANES(checks) c, __m512i w)
{
    c.sum = _mm512_add_epi32(c.sum, w);
    c.high = _mm512_add_epi32(c.high, _mm512_srli_epi32(w, 16));
    return c;
}
#undef AVX512

#define F32_LOAD2_f32(p, a, b) { (a) = _mm512_loadu_ps(p); (b) = _mm512_loadu_ps((p) + 16); }
#define F64_LOAD2_f64(p, a, b) { (a) = _mm512_loadu_pd(p); (b) = _mm512_loadu_pd((p) + 8); }
/* Even elements in one register, odd ones in the other: moments do not mind the order, and no shuffle is needed. */
#define F32_LOAD2_bf16(p, a, b) { \
    const __m512i w = _mm512_loadu_si512((const void *)(p)); \
    (a) = _mm512_castsi512_ps(_mm512_slli_epi32(w, 16)); \
    (b) = _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32((int)0xffff0000u))); }
#define F32_LOAD2_f16(p, a, b) { \
    (a) = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p))); \
    (b) = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)((p) + 16))); }
