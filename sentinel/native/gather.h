/* Elements that do not lie side by side, or are measured as another type, into a buffer of what is measured. */

/* Written twice, for the compiler to see the common stride. */
#define GATHER_AS(FROM, TO, VALUE) { \
    TO *restrict to = (TO *)buffer + filled; \
    if (stride == (int64_t)sizeof(FROM)) { \
        for (int i = 0; i < n; i++) { FROM x; memcpy(&x, p + i * (int64_t)sizeof x, sizeof x); to[i] = VALUE; } \
    } else { \
        for (int i = 0; i < n; i++, p += stride) { FROM x; memcpy(&x, p, sizeof x); to[i] = VALUE; } \
    } }

/* Put n elements, `stride` bytes apart, behind the `filled` ones of the buffer, as the type that they are measured as. */
static TARGET void LANES(gather)(void *restrict buffer, int filled, const char *restrict p, int64_t stride, int n, int dtype,
                                 const uint16_t *restrict fp8)
{
    switch (dtype) {
    case F32: GATHER_AS(uint32_t, uint32_t, x) break;
    case F64: GATHER_AS(uint64_t, uint64_t, x) break;
    case BF16: case F16: GATHER_AS(uint16_t, uint16_t, x) break;
    case U8: GATHER_AS(uint8_t, float, (float)x) break;
    case I8: GATHER_AS(int8_t, float, (float)x) break;
    case I16: GATHER_AS(int16_t, float, (float)x) break;
    case U16: GATHER_AS(uint16_t, float, (float)x) break;
    case I32: GATHER_AS(int32_t, double, (double)x) break;
    case U32: GATHER_AS(uint32_t, double, (double)x) break;
    case I64: GATHER_AS(int64_t, double, (double)x) break;
    case U64: GATHER_AS(uint64_t, double, (double)x) break;
    default: GATHER_AS(uint8_t, uint16_t, fp8[x])
    }
}
#undef GATHER_AS
