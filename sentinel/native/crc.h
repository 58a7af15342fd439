/* crc32 as zlib's, of the polynomial that Ethernet has; by carry-less products where the CPU has them.
 * Source: Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ" (Intel, 2009), constants there. */

static uint32_t crc_tables[8][256];

static void make_crc_tables(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (0xedb88320u & (0u - (crc & 1u)));
        crc_tables[0][byte] = crc;
    }
    for (uint32_t byte = 0; byte < 256; byte++)
        for (int t = 1; t < 8; t++)
            crc_tables[t][byte] = crc_tables[t - 1][byte] >> 8 ^ crc_tables[0][crc_tables[t - 1][byte] & 0xff];
}

static uint32_t crc_by_table(const uint8_t *data, int64_t num, uint32_t crc)
{
    for (; num >= 8; num -= 8, data += 8) {
        uint32_t low, high;
        memcpy(&low, data, 4);
        memcpy(&high, data + 4, 4);
        low ^= crc;
        crc = crc_tables[7][low & 0xff] ^ crc_tables[6][low >> 8 & 0xff] ^ crc_tables[5][low >> 16 & 0xff]
            ^ crc_tables[4][low >> 24] ^ crc_tables[3][high & 0xff] ^ crc_tables[2][high >> 8 & 0xff]
            ^ crc_tables[1][high >> 16 & 0xff] ^ crc_tables[0][high >> 24];
    }
    for (; num > 0; num--) crc = crc >> 8 ^ crc_tables[0][(crc ^ *data++) & 0xff];
    return crc;
}

#if HAS_X86
#define FOLD(x, k) _mm_xor_si128(_mm_clmulepi64_si128(x, k, 0x00), _mm_clmulepi64_si128(x, k, 0x11))
#define AT(offset) _mm_loadu_si128((const __m128i *)(data + (offset)))

#define WIDE_BYTES 1024
#define WIDE __attribute__((target("avx512f,vpclmulqdq,pclmul,sse4.1")))
#define FOLD4(x, k, y) \
    _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(x, k, 0x00), _mm512_clmulepi64_epi128(x, k, 0x11), y, 0x96)
#define AT4(offset) _mm512_loadu_si512((const void *)(data + (offset)))

/* Fold the first `num` bytes, a multiple of 256, into the four words that the rest is folded with. crc_by_products with
 * four products an instruction. */
static WIDE void fold_wide(const uint8_t *data, int64_t num, uint32_t crc, __m128i words[4])
{
    const __m512i farthest = _mm512_broadcast_i32x4(_mm_set_epi64x(0x01322d1430, 0x011542778a));
    const __m512i far = _mm512_broadcast_i32x4(_mm_set_epi64x(0x01c6e41596, 0x0154442bd4));
    __m512i a = _mm512_xor_si512(AT4(0), _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)crc)));
    __m512i b = AT4(64), c = AT4(128), d = AT4(192);
    for (data += 256, num -= 256; num >= 256; data += 256, num -= 256) {
        a = FOLD4(a, farthest, AT4(0));
        b = FOLD4(b, farthest, AT4(64));
        c = FOLD4(c, farthest, AT4(128));
        d = FOLD4(d, farthest, AT4(192));
    }
    b = FOLD4(a, far, b);
    c = FOLD4(b, far, c);
    _mm512_storeu_si512(words, FOLD4(c, far, d));
}
#undef FOLD4
#undef AT4

/* num: at least 64, a multiple of 16. is_wide: the CPU has products of four words. */
static __attribute__((target("pclmul,sse4.1"))) uint32_t crc_by_products(const uint8_t *data, int64_t num, uint32_t crc,
                                                                         int is_wide)
{
    const __m128i far = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4), near = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
    const __m128i last = _mm_set_epi64x(0, 0x0163cd6124), poly = _mm_set_epi64x(0x01f7011641, 0x01db710641);
    const __m128i low = _mm_setr_epi32(-1, 0, -1, 0);
    __m128i a = _mm_xor_si128(AT(0), _mm_cvtsi32_si128((int)crc)), b = AT(16), c = AT(32), d = AT(48), x;
    int64_t begun = 64;
    if (is_wide && num >= WIDE_BYTES) {
        __m128i words[4];
        begun = num & ~(int64_t)255;
        fold_wide(data, begun, crc, words);
        a = words[0];
        b = words[1];
        c = words[2];
        d = words[3];
    }
    for (data += begun, num -= begun; num >= 64; data += 64, num -= 64) {
        a = _mm_xor_si128(FOLD(a, far), AT(0));
        b = _mm_xor_si128(FOLD(b, far), AT(16));
        c = _mm_xor_si128(FOLD(c, far), AT(32));
        d = _mm_xor_si128(FOLD(d, far), AT(48));
    }
    a = _mm_xor_si128(FOLD(a, near), b);
    a = _mm_xor_si128(FOLD(a, near), c);
    a = _mm_xor_si128(FOLD(a, near), d);
    for (; num >= 16; data += 16, num -= 16) a = _mm_xor_si128(FOLD(a, near), AT(0));
    a = _mm_xor_si128(_mm_srli_si128(a, 8), _mm_clmulepi64_si128(a, near, 0x10));
    x = _mm_srli_si128(a, 4);
    a = _mm_xor_si128(_mm_clmulepi64_si128(_mm_and_si128(a, low), last, 0x00), x);
    x = _mm_and_si128(_mm_clmulepi64_si128(_mm_and_si128(a, low), poly, 0x10), low);
    a = _mm_xor_si128(a, _mm_clmulepi64_si128(x, poly, 0x00));
    return (uint32_t)_mm_extract_epi32(a, 1);
}
#undef FOLD
#undef AT
#endif

/* Call once before sentinel_crc32; from one thread. */
EXPORT void sentinel_prepare_crc32(void) { make_crc_tables(); }

/* crc of `num` bytes from data[offset] on, going on from `crc` as zlib's crc32 does. has_products: use them if there are. */
EXPORT uint32_t sentinel_crc32(const uint8_t *data, int64_t offset, int64_t num, uint32_t crc, int32_t has_products)
{
    data += offset;
    crc = ~crc;
#if HAS_X86
    if (has_products && num >= 64 && __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1")) {
        const int64_t whole = num & ~(int64_t)15;
        const int is_wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq");
        crc = crc_by_products(data, whole, crc, is_wide);
        data += whole;
        num -= whole;
    }
#endif
    (void)has_products;
    return ~crc_by_table(data, num, crc);
}
