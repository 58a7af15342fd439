/* What single probes want beside the moments: how many elements are how small, and the squares of each channel. */

typedef struct {
    const Isa *isa;
    int dtype, num_bounds;
    const uint64_t *bounds;
    int64_t *out;
} Counting;

static void count_visited(void *visit, const void *p, int64_t n)
{
    const Counting *c = visit;
    for (int64_t at = 0; at < n; at += GATHERED)
        c->isa->below[c->dtype]((const char *)p + at * stored_bytes[c->dtype], n - at < GATHERED ? (int)(n - at) : GATHERED,
                                c->bounds, c->num_bounds, c->out);
}

/* The pattern that the patterns of all |x| < bound lie below. */
static uint64_t pattern_of_bound(double bound, int dtype)
{
    if (!(bound > 0.0)) return 0;
    uint32_t half;
    uint64_t bits = 0;
    float f;
    double largest;
    switch (dtype) {
    case F32:
        f = f32_at_most(bound);
        memcpy(&half, &f, 4);
        bits = half;
        largest = f;
        break;
    case F64:
        memcpy(&bits, &bound, 8);
        largest = bound;
        break;
    case BF16:
        bits = bf16_at_most(bound);
        largest = widen_bf16((uint16_t)bits);
        break;
    default:
        bits = bound == INFINITY ? 0x7c00u : f16_at_most(bound);
        largest = widen_f16((uint16_t)bits);
    }
    return largest == bound ? bits : bits + 1;
}

/* Write how many |x| lie below each of `num_bounds` bounds (at most 64) into out; nan lies below none. shape as in
 * sentinel_measure_one. Returns 0, or 1 where the dtype code or a number is beyond what is known. */
EXPORT int64_t sentinel_count_below(uint64_t pointer, int64_t numel, int32_t dtype, int32_t num_dims, const int64_t *shape,
                                    const double *bounds, int32_t num_bounds, int64_t *out, int32_t isa_index)
{
    const char *p = (const char *)(uintptr_t)pointer;
    const int64_t one = 1;
    uint64_t patterns[64];
    View view;
    if (dtype < 0 || dtype >= NUM_DTYPES || num_dims < 0 || num_dims > MAX_DIMS) return 1;
    if (num_bounds < 0 || num_bounds > 64) return 1;
    look_at(&view, p, dtype, shape ? num_dims : 1, shape ? shape : &numel, shape ? shape + num_dims : &one);
    for (int j = 0; j < num_bounds; j++) {
        patterns[j] = pattern_of_bound(bounds[j], stored_as[dtype]);
        out[j] = 0;
    }
    if (view.numel == 0) return 0;
    Counting counting = {&isas[isa_index], stored_as[dtype], num_bounds, patterns, out};
    visit_elements(&isas[isa_index], &view, 0, view.numel, count_visited, &counting);
    for (int j = 0; j < num_bounds; j++) out[j] *= view.times;
    return 0;
}

/* Add the squares of [num_rows, num_channels], channels side by side and rows `row_stride` elements apart, to `sums`, one
 * for each channel. Returns 0, or 1 where the dtype is none of the four floats. */
EXPORT int64_t sentinel_add_channel_squares(uint64_t pointer, int64_t num_rows, int64_t num_channels, int64_t row_stride,
                                            int32_t dtype, double *sums, int32_t isa_index)
{
    const char *p = (const char *)(uintptr_t)pointer;
    if (dtype < 0 || dtype >= NUM_STORED) return 1;
    /* A strip of sums stays in the first-level cache while all rows pass. */
    for (int64_t from = 0; from < num_channels; from += STRIP) {
        const int64_t n = num_channels - from < STRIP ? num_channels - from : STRIP;
        for (int64_t row = 0; row < num_rows; row++)
            isas[isa_index].squares[dtype](p + (row * row_stride + from) * stored_bytes[dtype], n, sums + from);
    }
    return 0;
}
