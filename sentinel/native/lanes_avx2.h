/* AVX2 with FMA and F16C, which every CPU that has AVX2 has. */
#define F32_W 8
typedef __m256 LANES(f32);
typedef __m256i LANES(f32_counts);
#define F64_W 4
typedef __m256d LANES(f64);
typedef __m256i LANES(f64_counts);

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
