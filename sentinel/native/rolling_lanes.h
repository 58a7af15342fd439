/* Looking about a value among `width` floats, a multiple of 16: one version an instruction set, all with the same results. */
#define ROLLING_INLINE static inline __attribute__((always_inline))

/* Four at a time on any machine: SSE2, NEON, or what the compiler makes of it. */
typedef float Floats __attribute__((vector_size(16)));
typedef float FloatsThere __attribute__((vector_size(16), aligned(4)));
typedef int32_t Choice __attribute__((vector_size(16)));
#if defined(__clang__)
#define ROLLING_PICK(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define ROLLING_PICK(a, b, i, j, k, l) __builtin_shuffle(a, b, (Choice){i, j, k, l})
#endif

static inline Floats rolling_choose(Choice is_first, Floats a, Floats b)
{
    return (Floats)(((Choice)a & is_first) | ((Choice)b & ~is_first));
}

/* What lies about v. */
typedef struct {
    int32_t less, most;   /* how many lie below it; how many do not lie above it */
    float below, above;   /* the largest below it, -inf for none; the smallest above it, +inf for none */
} RollingLook;

static inline RollingLook rolling_look_portable(const float *a, int width, float v)
{
    const Floats t = {v, v, v, v}, top = {INFINITY, INFINITY, INFINITY, INFINITY};
    Floats below = -top, above = top;
    Choice less = {0, 0, 0, 0}, more = less;
    for (int i = 0; i < width; i += 4) {
        const Floats x = *(const FloatsThere *)(a + i);
        const Choice is_less = x < t, is_more = x > t;
        const Floats low = rolling_choose(is_less, x, -top), high = rolling_choose(is_more, x, top);
        less -= is_less;
        more -= is_more;
        below = rolling_choose(low > below, low, below);
        above = rolling_choose(high < above, high, above);
    }
    RollingLook at = {0, width, -INFINITY, INFINITY};
    for (int i = 0; i < 4; i++) {
        at.less += less[i];
        at.most -= more[i];
        at.below = below[i] > at.below ? below[i] : at.below;
        at.above = above[i] < at.above ? above[i] : at.above;
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

/* Replacing one of the numbers that ascend in `a`, what is not there +inf. Leaving out: from `old` on each place takes its
 * next. Putting in: a place keeps what is no more than `new`, and else takes the larger of `new` and what was below it. No
 * search, and no branch that nobody could foresee. */
static inline void rolling_replace_portable(float *a, int width, float old, float new)
{
    const Floats o = {old, old, old, old}, n = {new, new, new, new}, top = {INFINITY, INFINITY, INFINITY, INFINITY};
    Floats here = *(const FloatsThere *)a, under = -top;
    for (int i = 0; i < width; i += 4) {
        const Floats next = i + 4 < width ? *(const FloatsThere *)(a + i + 4) : top;
        const Floats rest = rolling_choose(here < o, here, ROLLING_PICK(here, next, 1, 2, 3, 4));
        const Floats below = ROLLING_PICK(under, rest, 3, 4, 5, 6), least = rolling_choose(below > n, below, n);
        *(FloatsThere *)(a + i) = rolling_choose(rest < least, rest, least);
        under = rest;
        here = next;
    }
}

#if HAS_X86
static inline __attribute__((target("avx2,popcnt"))) void rolling_replace_avx2(__m256_u *a, int num, float old, float new)
{
    const __m256 o = _mm256_set1_ps(old), n = _mm256_set1_ps(new), top = _mm256_set1_ps(INFINITY);
    const __m256i down = _mm256_setr_epi32(1, 2, 3, 4, 5, 6, 7, 0), up = _mm256_setr_epi32(7, 0, 1, 2, 3, 4, 5, 6);
    __m256 here = a[0], turned = _mm256_permutevar8x32_ps(here, down), under = _mm256_set1_ps(-INFINITY);
    for (int i = 0; i < num; i++) {
        const __m256 next = i + 1 < num ? a[i + 1] : top, next_turned = _mm256_permutevar8x32_ps(next, down);
        const __m256 shifted = _mm256_blend_ps(turned, next_turned, 0x80);
        const __m256 rest = _mm256_blendv_ps(shifted, here, _mm256_cmp_ps(here, o, _CMP_LT_OQ));
        const __m256 rest_turned = _mm256_permutevar8x32_ps(rest, up), below = _mm256_blend_ps(rest_turned, under, 0x01);
        a[i] = _mm256_min_ps(rest, _mm256_max_ps(below, n));
        under = rest_turned;
        here = next;
        turned = next_turned;
    }
}

static inline __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,popcnt,prefer-vector-width=512"))) void
rolling_replace_avx512(__m512_u *a, int num, float old, float new)
{
    const __m512 o = _mm512_set1_ps(old), n = _mm512_set1_ps(new), top = _mm512_set1_ps(INFINITY);
    __m512 here = a[0];
    __m512i under = _mm512_castps_si512(_mm512_set1_ps(-INFINITY));
    for (int i = 0; i < num; i++) {
        const __m512 next = i + 1 < num ? a[i + 1] : top;
        const __m512i shifted = _mm512_alignr_epi32(_mm512_castps_si512(next), _mm512_castps_si512(here), 1);
        const __mmask16 is_kept = _mm512_cmp_ps_mask(here, o, _CMP_LT_OQ);
        const __m512i rest = _mm512_mask_blend_epi32(is_kept, shifted, _mm512_castps_si512(here));
        const __m512 below = _mm512_castsi512_ps(_mm512_alignr_epi32(rest, under, 15));
        a[i] = _mm512_min_ps(_mm512_castsi512_ps(rest), _mm512_max_ps(below, n));
        under = rest;
        here = next;
    }
}

/* Many replacements in a row; middle: what stands at `low` and `high` after each, both in 16 to 23. All 48 numbers stay in
 * registers. */
static inline __attribute__((target("avx2,popcnt"))) void rolling_slide_avx2(float *a, const float *old, const float *new,
                                                                             int64_t num, int low, int high,
                                                                             float (*middle)[2])
{
    const __m256i at = _mm256_castsi128_si256(_mm_setr_epi32(low - 16, high - 16, 0, 0));
    __m256_u *const from = (__m256_u *)a, held[6] = {from[0], from[1], from[2], from[3], from[4], from[5]};
    for (int64_t i = 0; i < num; i++) {
        rolling_replace_avx2(held, 6, old[i], new[i]);
        _mm_storel_pi((__m64 *)middle[i], _mm256_castps256_ps128(_mm256_permutevar8x32_ps(held[2], at)));
    }
    for (int i = 0; i < 6; i++) from[i] = held[i];
}

static inline __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,popcnt,prefer-vector-width=512"))) void
rolling_slide_avx512(float *a, const float *old, const float *new, int64_t num, int low, int high, float (*middle)[2])
{
    const __m512i at = _mm512_castsi128_si512(_mm_setr_epi32(low - 16, high - 16, 0, 0));
    __m512_u *const from = (__m512_u *)a, held[3] = {from[0], from[1], from[2]};
    for (int64_t i = 0; i < num; i++) {
        rolling_replace_avx512(held, 3, old[i], new[i]);
        _mm_storel_pi((__m64 *)middle[i], _mm512_castps512_ps128(_mm512_permutexvar_ps(at, held[1])));
    }
    for (int i = 0; i < 3; i++) from[i] = held[i];
}
#endif

ROLLING_INLINE void rolling_replace(float *a, int width, float old, float new, int isa)
{
    (void)isa;
#if HAS_X86
    if (isa == 2)
        rolling_replace_avx512((__m512_u *)a, width / 16, old, new);
    else if (isa == 1)
        rolling_replace_avx2((__m256_u *)a, width / 8, old, new);
    else
#endif
        rolling_replace_portable(a, width, old, new);
}

ROLLING_INLINE void rolling_slide(float *a, int width, const float *old, const float *new, int64_t num, int low, int high,
                                  float (*middle)[2], int isa)
{
#if HAS_X86
    if (isa && width == 48 && low >= 16 && high < 24) {
        if (isa == 2)
            rolling_slide_avx512(a, old, new, num, low, high, middle);
        else
            rolling_slide_avx2(a, old, new, num, low, high, middle);
        return;
    }
#endif
    for (int64_t i = 0; i < num; i++) {
        rolling_replace(a, width, old[i], new[i], isa);
        middle[i][0] = a[low];
        middle[i][1] = a[high];
    }
}

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

/* What lies in [low, high], at most ROLLING_NEAR of it, and how many lie below; returns how many lie in it. */
#define ROLLING_NEAR 32

static inline int rolling_near_portable(const float *a, int width, float low, float high, float *near, int *less)
{
    int num = 0, below = 0;
    for (int i = 0; i < width; i++) {
        near[num < ROLLING_NEAR ? num : ROLLING_NEAR] = a[i];
        below += a[i] < low;
        num += a[i] >= low && a[i] <= high;
    }
    *less = below;
    return num;
}

#if HAS_X86
static inline __attribute__((target("avx2,popcnt"))) int rolling_near_avx2(const float *a, int width, float low, float high,
                                                                            float *near, int *less)
{
    const __m256 l = _mm256_set1_ps(low), h = _mm256_set1_ps(high);
    int num = 0, below = 0;
    for (int i = 0; i < width; i += 8) {
        const __m256 x = _mm256_loadu_ps(a + i);
        const unsigned under = (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(x, l, _CMP_LT_OQ));
        unsigned in = (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(x, h, _CMP_LE_OQ)) & ~under;
        below += __builtin_popcount(under);
        for (; in; in &= in - 1, num++) near[num < ROLLING_NEAR ? num : ROLLING_NEAR] = a[i + __builtin_ctz(in)];
    }
    *less = below;
    return num;
}

static inline __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,popcnt,prefer-vector-width=512"))) int
rolling_near_avx512(const float *a, int width, float low, float high, float *near, int *less)
{
    const __m512 l = _mm512_set1_ps(low), h = _mm512_set1_ps(high);
    int num = 0, below = 0;
    for (int i = 0; i < width; i += 16) {
        const __m512 x = _mm512_loadu_ps(a + i);
        const __mmask16 under = _mm512_cmp_ps_mask(x, l, _CMP_LT_OQ);
        const __mmask16 in = _mm512_mask_cmp_ps_mask((__mmask16)~under, x, h, _CMP_LE_OQ);
        _mm512_storeu_ps(near + (num < ROLLING_NEAR ? num : ROLLING_NEAR), _mm512_maskz_compress_ps(in, x));
        below += __builtin_popcount(under);
        num += __builtin_popcount(in);
    }
    *less = below;
    return num;
}

/* Number k of `num` by size, from 0. */
static inline __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,popcnt,prefer-vector-width=512"))) float
rolling_nth_avx512(const float *a, int num, int k)
{
    const __m512 x = _mm512_loadu_ps(a), y = _mm512_loadu_ps(a + 16);
    const __m512i one = _mm512_set1_epi32(1), most = _mm512_set1_epi32(k);
    __m512i p = _mm512_setzero_si512(), q = p;
    for (int i = 0; i < num; i++) {
        const __m512 v = _mm512_set1_ps(a[i]);
        p = _mm512_mask_add_epi32(p, _mm512_cmp_ps_mask(v, x, _CMP_LT_OQ), p, one);
        q = _mm512_mask_add_epi32(q, _mm512_cmp_ps_mask(v, y, _CMP_LT_OQ), q, one);
    }
    const unsigned there = num == 32 ? 0xffffffffu : (1u << num) - 1;
    const __mmask16 low = (__mmask16)(_mm512_cmple_epi32_mask(p, most) & there);
    const __mmask16 high = (__mmask16)(_mm512_cmple_epi32_mask(q, most) & there >> 16);
    const __m512 none = _mm512_set1_ps(-INFINITY);
    return _mm512_reduce_max_ps(_mm512_max_ps(_mm512_mask_blend_ps(low, none, x), _mm512_mask_blend_ps(high, none, y)));
}
#endif

static inline float rolling_nth_portable(const float *a, int num, int k)
{
    int32_t less[ROLLING_NEAR] = {0};
    float found = -INFINITY;
    for (int i = 0; i < num; i++)
        for (int j = 0; j < ROLLING_NEAR; j++) less[j] += a[i] < a[j];
    for (int j = 0; j < num; j++) found = less[j] <= k && a[j] > found ? a[j] : found;
    return found;
}

ROLLING_INLINE int rolling_near(const float *a, int width, float low, float high, float *near, int *less, int isa)
{
    (void)isa;
#if HAS_X86
    if (isa == 2) return rolling_near_avx512(a, width, low, high, near, less);
    if (isa == 1) return rolling_near_avx2(a, width, low, high, near, less);
#endif
    return rolling_near_portable(a, width, low, high, near, less);
}
ROLLING_INLINE float rolling_nth(const float *a, int num, int k, int isa)
{
    (void)isa;
#if HAS_X86
    if (isa == 2) return rolling_nth_avx512(a, num, k);
#endif
    return rolling_nth_portable(a, num, k);
}
