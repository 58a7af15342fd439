/* Reading tensors that are not simply there: strided ones, and dtypes that are measured as another one. */

/* An element at p + sum of index[i] * stride[i], the last dimension innermost; each seen `times` times. */
typedef struct {
    const char *p;
    int64_t numel, times;
    int num_dims, dtype;
    int64_t size[MAX_DIMS], stride[MAX_DIMS]; /* strides in bytes, falling */
} View;

/* The elements of a tensor in the order in which they lie in memory, broadcasts told apart. Strides in elements. */
static void look_at(View *view, const char *p, int dtype, int num_dims, const int64_t *sizes, const int64_t *strides)
{
    int used = 0;
    view->dtype = dtype;
    view->numel = view->times = 1;
    for (int i = 0; i < num_dims; i++) {
        int64_t size = sizes[i], stride = strides[i] * element_bytes[dtype];
        if (size == 0) {
            view->numel = 0;
            return;
        }
        if (size == 1) continue;
        if (stride == 0) {
            view->times *= size;
            continue;
        }
        if (stride < 0) {
            p += stride * (size - 1);
            stride = -stride;
        }
        view->numel *= size;
        int at = used++;
        for (; at > 0 && view->stride[at - 1] < stride; at--) {
            view->stride[at] = view->stride[at - 1];
            view->size[at] = view->size[at - 1];
        }
        view->stride[at] = stride;
        view->size[at] = size;
    }
    int last = 0; /* dimensions that follow one another without a gap are one */
    for (int i = 1; i < used; i++) {
        if (view->stride[last] == view->stride[i] * view->size[i]) {
            view->size[last] *= view->size[i];
            view->stride[last] = view->stride[i];
        } else {
            last++;
            view->size[last] = view->size[i];
            view->stride[last] = view->stride[i];
        }
    }
    if (used == 0) {
        view->size[0] = 1;
        view->stride[0] = element_bytes[dtype];
    }
    view->num_dims = last + 1;
    view->p = p;
}

typedef void Visitor(void *visit, const void *p, int64_t n);

/* Show `visitor` the n elements from number `first` on, as the type that they are measured as: where they lie, if they lie
 * side by side, else gathered, at most GATHERED of them at once. */
static void visit_elements(const Isa *isa, const View *view, int64_t first, int64_t n, Visitor *visitor, void *visit)
{
    const int dtype = view->dtype, last = view->num_dims - 1;
    const int64_t step = view->stride[last], run = view->size[last];
    const int is_direct = dtype < NUM_STORED && step == element_bytes[dtype];
    if (is_direct && view->num_dims == 1) {
        visitor(visit, view->p + first * step, n);
        return;
    }

    uint64_t buffer[GATHERED];
    uint16_t fp8[256];
    /* Tables and strides: the gathers of wider instruction sets take twice as long (measured). */
    Gather *const gather = dtype >= E4M3FN || step != element_bytes[dtype] ? gather_portable : isa->gather;
    if (dtype >= E4M3FN)
        for (unsigned i = 0; i < 256; i++) {
            const int is_e5 = dtype == E5M2 || dtype == E5M2FNUZ, is_fnuz = dtype >= E4M3FNUZ;
            fp8[i] = bf16_of_fp8(i, is_e5 ? 2 : 3, (is_e5 ? 15 : 7) + is_fnuz, is_fnuz);
        }
    int64_t index[MAX_DIMS], at = first % run, rest = first / run;
    const char *p = view->p;
    for (int i = last - 1; i >= 0; i--) {
        index[i] = rest % view->size[i];
        rest /= view->size[i];
        p += index[i] * view->stride[i];
    }
    int filled = 0;
    for (int64_t left = n; left > 0;) {
        int64_t num = run - at < left ? run - at : left;
        if (is_direct && filled == 0 && num >= GATHERED) {
            visitor(visit, p + at * step, num);
        } else {
            if (num > GATHERED - filled) num = GATHERED - filled;
            gather(buffer, filled, p + at * step, step, (int)num, dtype, fp8);
            filled += (int)num;
            if (filled == GATHERED || num == left) {
                visitor(visit, buffer, filled);
                filled = 0;
            }
        }
        left -= num;
        at += num;
        if (at < run) continue;
        at = 0;
        for (int i = last - 1; i >= 0; i--) {
            p += view->stride[i];
            if (++index[i] < view->size[i]) break;
            p -= view->stride[i] * view->size[i];
            index[i] = 0;
        }
    }
}

typedef struct {
    const Isa *isa;
    int dtype, flags, has_guess;
    double zero_eps;
    Guess guess;
    Stats *sum;
} Measuring;

static void measure_visited(void *visit, const void *p, int64_t n)
{
    Measuring *m = visit;
    if (!m->has_guess) m->guess = guess_from_sample(p, n < SPAN ? (int)n : SPAN, m->dtype);
    m->has_guess = 1;
    measure_stretch(m->isa, p, n, m->dtype, m->zero_eps, m->flags, &m->guess, m->sum);
}

/* The statistics of n elements from number `first` on. */
static void measure_segment(const Isa *isa, const View *view, int64_t first, int64_t n, double zero_eps, int flags,
                            Stats *out)
{
    Measuring measuring = {isa, stored_as[view->dtype], flags, 0, zero_eps, {0.0, 0, 0}, out};
    *out = empty;
    visit_elements(isa, view, first, n, measure_visited, &measuring);
    /* The patterns of the type that they are measured as in torch: fp8 as fp32, whose upper half bf16 is. */
    if (view->dtype >= E4M3FN) out->checksum <<= 16;
}
