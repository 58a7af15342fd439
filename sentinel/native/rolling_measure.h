/* What a point is measured from, and by: the arithmetic of `_base` and `_bound` of detect/rolling.py, bit for bit. */

/* The normal rise: k spreads, at least `floor`. Where the middle half says nothing (few digits) four fifths do. No more than
 * is far above the largest residual (detect/rolling.py: APART, APART_RISE), and no less than TWICE the second. */
static inline double rolling_bound(const RollingParameters *p, const Rolling *s)
{
    const float *marks = s->marks;
    const int64_t kept = *s->kept, num = kept < ROLLING_MANY ? kept : kept - kept % ROLLING_EVERY;
    const double half = ((double)marks[MARK_THREE] - (double)marks[MARK_QUARTER]) * 0.7413011092528009;
    const double most = ((double)marks[MARK_HIGH] - (double)marks[MARK_LOW]) * 0.19507602886806754;
    double spread = p->k * (half > most ? half : most);
    if (num < ROLLING_YOUNG) spread *= 1.0 + (16.0 / (double)num - 0.125);
    const double top = marks[MARK_TOP] > 0.0f ? (double)marks[MARK_TOP] : 0.0, more = 0.5 * top;
    const double twice = 1.2 * (double)*s->second;
    spread = spread > twice ? spread : twice;
    const double apart = top + (more > 1.3862943611198906 ? more : 1.3862943611198906);
    const double bound = spread < apart ? spread : apart;
    return bound > p->floor ? bound : p->floor;
}

static inline int rolling_is_judged(const RollingParameters *p, const Rolling *s)
{
    return *s->seen >= 2 * (int64_t)p->warmup && *s->kept > 0;
}

/* What points are measured from: the median, or the nearest of the latest points where all of them lie below it; above it too
 * while a series is young. */
static inline double rolling_base(const RollingParameters *p, const Rolling *s)
{
    if (*s->filled < ROLLING_LATEST || p->window < ROLLING_LATEST) return *s->center;
    float largest = -INFINITY, least = INFINITY;
    for (int i = 1; i <= ROLLING_LATEST; i++) {
        const float x = s->recent[*s->at - i + (*s->at < i ? p->window : 0)];
        largest = x > largest ? x : largest;
        least = x < least ? x : least;
    }
    if ((double)largest < *s->center) return (double)largest;
    return *s->kept < ROLLING_YOUNG && (double)least > *s->center ? (double)least : *s->center;
}

/* Below zero where a point lies below the base; the caller writes 0.0 then. */
static inline double rolling_score(double z, double base, double bound) { return ((double)(float)z - base) / bound; }

/* What each of `num` points is measured from, as rolling_base says; the window is full. latest: room for the LATEST points
 * before them, then the points. */
static inline void rolling_bases(const Rolling *s, int window, float *latest, const double *center, int64_t num, double *base)
{
    float two[ROLLING_LATEST + ROLLING_AHEAD], four[ROLLING_LATEST + ROLLING_AHEAD];
    if (window < ROLLING_LATEST) {
        for (int64_t i = 0; i < num; i++) base[i] = center[i];
        return;
    }
    for (int i = 0; i < ROLLING_LATEST; i++) {
        const int at = *s->at - ROLLING_LATEST + i;
        latest[i] = s->recent[at < 0 ? at + window : at];
    }
    for (int64_t i = 0; i < num + 6; i++) two[i] = latest[i] > latest[i + 1] ? latest[i] : latest[i + 1];
    for (int64_t i = 0; i < num + 4; i++) four[i] = two[i] > two[i + 2] ? two[i] : two[i + 2];
    for (int64_t i = 0; i < num; i++) {
        const double largest = (double)(four[i] > four[i + 4] ? four[i] : four[i + 4]);
        base[i] = largest < center[i] ? largest : center[i];
    }
    if (*s->kept >= ROLLING_YOUNG) return;
    for (int64_t i = 0; i < num; i++) {
        float least = INFINITY;
        for (int64_t j = i; j < i + ROLLING_LATEST; j++) least = latest[j] < least ? latest[j] : least;
        base[i] = (double)least > center[i] ? (double)least : base[i];
    }
}

/* The point whose residual is kept after each of `num` points, which are not in the window yet (detect/rolling.py: PLACE). */
static inline void rolling_middles(const Rolling *s, int window, const float *point, int64_t num, float *half)
{
    if (*s->filled < window) {
        const int at = 5 * (*s->filled + 1) / 8;
        half[0] = at < *s->filled ? s->recent[at] : point[0];
        return;
    }
    for (int64_t i = 0; i < num; i++) {
        const int64_t after = i + 1 + 5 * window / 8, at = *s->at + after;
        half[i] = after < window ? s->recent[at < window ? at : at - window] : point[after - window];
    }
}
