/* Many tensors, in one thread or several: segments are measured in any order, and merged in one. */

/* Elements that make one more thread worth its start. */
#define WORTH_A_THREAD 400000

typedef struct {
    const uint64_t *pointers;
    const int64_t *numels;
    const uint8_t *dtypes;
    const int64_t *layouts;
    char *out;
    int64_t out_stride;
    double zero_eps;
    int flags;
    const Isa *isa;
} Tensors;

static void view_tensor(const Tensors *tensors, int64_t t, View *view)
{
    const char *p = (const char *)(uintptr_t)tensors->pointers[t];
    const int64_t at = tensors->layouts ? tensors->layouts[t] : 0;
    if (at) {
        const int num_dims = (int)tensors->layouts[at];
        look_at(view, p, tensors->dtypes[t], num_dims, tensors->layouts + at + 1, tensors->layouts + at + 1 + num_dims);
        return;
    }
    view->p = p;
    view->dtype = tensors->dtypes[t];
    view->numel = view->size[0] = tensors->numels[t];
    view->stride[0] = element_bytes[view->dtype];
    view->times = view->num_dims = 1;
}

/* Put what was measured where it belongs. */
static void deliver(const Tensors *tensors, int64_t t, Stats *stats, int64_t times)
{
    char *place = tensors->out + t * tensors->out_stride;
    if (times != 1) repeat(stats, times);
    if (tensors->flags & ACCUMULATE) {
        Stats sum;
        memcpy(&sum, place, sizeof sum);
        merge(&sum, stats);
        *stats = sum;
    }
    memcpy(place, stats, sizeof *stats);
}

static void measure_here(const Tensors *tensors, int64_t t)
{
    View view;
    Stats sum = empty, part;
    view_tensor(tensors, t, &view);
    for (int64_t at = 0; at < view.numel; at += SEGMENT) {
        const int64_t n = view.numel - at < SEGMENT ? view.numel - at : SEGMENT;
        measure_segment(tensors->isa, &view, at, n, tensors->zero_eps, tensors->flags, &part);
        merge(&sum, &part);
    }
    deliver(tensors, t, &sum, view.times);
}

#if HAS_THREADS
typedef struct {
    int64_t tensor, first, n;
    Stats stats;
} Segment;

typedef struct {
    const Tensors *tensors;
    const View *views;
    Segment *segments;
    int64_t num_segments, next;
} Work;

static void *work_on_segments(void *argument)
{
    Work *work = argument;
    for (;;) {
        const int64_t i = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED);
        if (i >= work->num_segments) return NULL;
        Segment *s = &work->segments[i];
        measure_segment(work->tensors->isa, &work->views[s->tensor], s->first, s->n, work->tensors->zero_eps,
                        work->tensors->flags, &s->stats);
    }
}

/* Threads live as long as the call: nothing to fork around, nothing to tear down. Returns -1 where there is no memory. */
static int64_t measure_in_threads(const Tensors *tensors, int64_t num, int num_threads)
{
    View *views = malloc((size_t)num * sizeof *views);
    int64_t num_segments = 0, filled = 0;
    if (!views) return -1;
    for (int64_t t = 0; t < num; t++) {
        view_tensor(tensors, t, &views[t]);
        num_segments += (views[t].numel + SEGMENT - 1) / SEGMENT;
    }
    Segment *segments = malloc((size_t)(num_segments + 1) * sizeof *segments);
    if (!segments) {
        free(views);
        return -1;
    }
    for (int64_t t = 0; t < num; t++)
        for (int64_t at = 0; at < views[t].numel; at += SEGMENT) {
            const int64_t n = views[t].numel - at < SEGMENT ? views[t].numel - at : SEGMENT;
            segments[filled++] = (Segment){t, at, n, empty};
        }
    Work work = {tensors, views, segments, num_segments, 0};
    pthread_t threads[MAX_THREADS];
    int started = 0;
    while (started < num_threads - 1 && pthread_create(&threads[started], NULL, work_on_segments, &work) == 0) started++;
    work_on_segments(&work);
    for (int i = 0; i < started; i++) pthread_join(threads[i], NULL);
    filled = 0;
    for (int64_t t = 0; t < num; t++) {
        Stats sum = empty;
        for (; filled < num_segments && segments[filled].tensor == t; filled++) merge(&sum, &segments[filled].stats);
        deliver(tensors, t, &sum, views[t].times);
    }
    free(segments);
    free(views);
    return 0;
}
#endif
