/* Points of a few series at a time that are well, as nearly all are: each rule below takes all of its points in and returns 1,
 * or, where any would be anomalous, changes nothing and returns 0; the numpy of sentinel/detect then has the word. The
 * arithmetic is the numpy's, operation by operation. All rules on the logged values of a step are one call. */

enum { FAST_DRIFT, FAST_PLATEAU, FAST_HIDDEN, FAST_BASELINE, FAST_FINITE, FAST_ROLLING, FAST_BATCH };

typedef struct {
    const void *parameters;
    void **arrays;                  /* of the state, whole, in the order of sentinel/rules/watches/fast_path.py */
    const int32_t *values, *series; /* [num] which of the step's values each point is, and of which series of the state */
    double *scratch;                /* rolling: as sentinel_rolling_medians asks */
    int64_t num;
    int32_t kind, isa;
} FastRule;

#define FIRST_POINTS 32
#define MEAN_TO_SIGMA 1.2533141373155001

typedef struct {
    double threshold, log_slack, slack_sigmas, slack_wander, slack_walk, share, patience, log_improvement;
    int64_t memory, warmup, is_both;
} LevelParameters;

typedef struct {
    double *unit, *level, *noise, *size;
    int64_t *count;
} Level;

static inline double smaller(double a, double b) { return a < b ? a : b; }

static inline double clipped(double x, double most) { return x < -most ? -most : x > most ? most : x; }

/* detect/drift.py, _Level._follow for a finite point that is not anomalous; returns whether the series is judged from now. */
static int follow_level(const LevelParameters *p, const Level *s, int64_t i, double x)
{
    const int64_t count = s->count[i]++;
    if (count < FIRST_POINTS) {
        s->size[i] = s->size[i] + (smaller(fabs(x), 1e300) - s->size[i]) / ((double)count + 1.0);
        if (count == FIRST_POINTS - 1) {
            s->unit[i] = larger(0.02 * s->size[i], 1e-300);
            s->level[i] = rolling_asinh(x, s->unit[i]);
        }
        return 0;
    }
    const double residual = rolling_asinh(x, s->unit[i]) - s->level[i], noise = s->noise[i], age = (double)(count - FIRST_POINTS);
    const int is_young = count - FIRST_POINTS < p->memory;
    const double least = larger(noise, 1e-12), memory = (double)p->memory;
    const double near = is_young ? residual : clipped(residual, 3.0 * least);
    double far = is_young ? fabs(residual) : smaller(fabs(residual), 4.0 * least);
    far = larger(far, smaller(fabs(residual), 1e-9));
    s->level[i] += 1.0 / smaller(age + 2.0, memory) * near;
    s->noise[i] += 1.0 / smaller(age + 1.0, 4.0 * memory) * (MEAN_TO_SIGMA * far - noise);
    return count + 1 > p->warmup;
}

static inline double drift_sum(const LevelParameters *p, double total, double toward, double slack, double noise)
{
    const double moved = total + clipped((toward - slack) / noise, 2.0), most = 2.0 * p->threshold;
    return moved < 0.0 ? 0.0 : moved > most ? most : moved;
}

typedef struct {
    Level level;
    double *best, *above, *below, *last, *change, *wander, *known, *told, *border, *moved, *rough, *walk;
    int64_t *run, *since;
    uint8_t *settled;
} DriftState;

/* Drift: unit, level, noise, size, count, best, above, below, run, settled, last, change, wander, known, told, border, moved,
 * rough, walk, since. */
static DriftState drift_state(void **a)
{
    return (DriftState){{a[0], a[1], a[2], a[3], a[4]}, a[5], a[6], a[7], a[10], a[11], a[12], a[13], a[14], a[15], a[16], a[17], a[18],
                        a[8], a[19], a[9]};
}

static double drift_noise(const DriftState *s, int64_t i) { return larger(smaller(s->level.noise[i], 3.0 * s->change[i]), 1e-9); }

static double drift_slack(const LevelParameters *p, const DriftState *s, int64_t i)
{
    const double own = larger(p->log_slack, p->slack_sigmas * drift_noise(s, i));
    if (s->run[i] > 0) return larger(own, 0.5 * s->told[i]);
    const double past = larger(p->slack_wander * s->known[i], 3.0 * s->told[i]);
    const int64_t block = 4 * p->memory;
    double walk = p->slack_walk * sqrt(s->walk[i] * larger((double)s->since[i] / (double)block, 1.0));
    if (s->level.count[i] >= 64 * block) walk = smaller(walk, 2.5 * s->known[i]);
    return larger(larger(own, past), walk);
}

static void drift_sums(const LevelParameters *p, const DriftState *s, int64_t i, double x, double *up, double *down)
{
    const int64_t count = s->level.count[i];
    *up = s->above[i];
    *down = s->below[i];
    if (!(fabs(x) < INFINITY) || count < p->warmup) return;
    const double z = count >= FIRST_POINTS ? rolling_asinh(x, s->level.unit[i]) : 0.0, excess = z - s->best[i];
    const double noise = drift_noise(s, i), slack = drift_slack(p, s, i);
    *up = drift_sum(p, s->above[i], excess, slack, noise);
    if (p->is_both) *down = drift_sum(p, s->below[i], -excess, slack, noise);
}

/* Drift._follow_change for a finite point. */
static void follow_change(const LevelParameters *p, const DriftState *s, int64_t i, double x)
{
    const int64_t age = s->level.count[i] - FIRST_POINTS;
    if (age < 0) return;
    const double z = rolling_asinh(x, s->level.unit[i]), most = 4.0 * larger(s->change[i], 1e-9);
    double change = MEAN_TO_SIGMA / 1.4142135623730951 * fabs(z - s->last[i]);
    if (age > p->memory) change = smaller(change, most);
    if (age > 0) s->change[i] += 1.0 / smaller((double)age, 4.0 * (double)p->memory) * (change - s->change[i]);
    s->last[i] = z;
}

/* Drift._follow_wander for a point that is not anomalous. */
static void follow_wander(const LevelParameters *p, const DriftState *s, int64_t i)
{
    const int64_t count = s->level.count[i];
    const double apart = smaller(fabs(s->level.level[i] - s->best[i]), 1.5 * drift_slack(p, s, i));
    s->wander[i] = larger(s->wander[i], apart);
    if (!(count & (count - 1))) s->known[i] = s->wander[i];
}

/* Drift._follow_turns for a point that is not anomalous. */
static void follow_turns(const LevelParameters *p, const DriftState *s, int64_t i)
{
    const int64_t count = s->level.count[i], block = 4 * p->memory;
    if (count % block) return;
    const double moved = s->level.level[i] - s->border[i], turn = smaller(moved - s->moved[i], 0.0);
    s->border[i] = s->level.level[i];
    s->moved[i] = moved;
    if (count <= p->warmup + 2 * block) return;
    int64_t num = count / block, begun = 1;
    while (2 * begun < num) begun *= 2;
    s->rough[i] += (2.0 * (turn * turn) - s->rough[i]) / (double)(num - begun);
    if (num & (num - 1)) return;
    const double noise = 9.0 * (s->level.noise[i] * s->level.noise[i]) / (2.0 * (double)p->memory - 1.0);
    s->walk[i] = 0.5 * larger(s->rough[i] - noise, 0.0);
}

static int fast_drift(const FastRule *r, const double *values)
{
    const LevelParameters *p = r->parameters;
    const DriftState s = drift_state(r->arrays);
    double up, down;
    for (int64_t n = 0; n < r->num; n++) {
        const double x = values[r->values[n]];
        drift_sums(p, &s, r->series[n], x, &up, &down);
        if (fabs(x) < INFINITY && larger(up, down) / p->threshold >= 1.0) return 0;
    }
    for (int64_t n = 0; n < r->num; n++) {
        const int64_t i = r->series[n];
        const double x = values[r->values[n]];
        drift_sums(p, &s, i, x, &up, &down);
        s.settled[i] = 0;
        s.above[i] = up;
        s.below[i] = down;
        if (!(fabs(x) < INFINITY)) continue;
        follow_change(p, &s, i, x);
        if (follow_level(p, &s.level, i, x)) {
            s.run[i] = 0;
            const double level = s.level.level[i];
            s.since[i]++;
            if (p->is_both) {
                s.best[i] += (level - s.best[i]) / (16.0 * (double)p->memory);
                s.since[i] = s.since[i] < 16 * p->memory ? s.since[i] : 16 * p->memory;
            } else {
                s.since[i] = level < s.best[i] ? 0 : s.since[i];
                s.best[i] = smaller(s.best[i], level);
            }
            follow_wander(p, &s, i);
            follow_turns(p, &s, i);
        } else if (s.level.count[i] > FIRST_POINTS) {
            s.best[i] = s.level.level[i];
        }
    }
    return 1;
}

/* Plateau: unit, level, noise, size, count, best, best_at. */
static int fast_plateau(const FastRule *r, const double *values)
{
    const LevelParameters *p = r->parameters;
    void **arrays = r->arrays;
    const Level s = {arrays[0], arrays[1], arrays[2], arrays[3], arrays[4]};
    double *best = arrays[5];
    int64_t *best_at = arrays[6];
    for (int64_t n = 0; n < r->num; n++) {
        const int64_t i = r->series[n];
        const double x = values[r->values[n]];
        if (!(fabs(x) < INFINITY) || s.count[i] < p->warmup) continue;
        const double patient = larger(p->share * ((double)s.count[i] + 1.0), p->patience);
        if ((double)(s.count[i] + 1 - best_at[i]) / patient >= 1.0) return 0;
    }
    for (int64_t n = 0; n < r->num; n++) {
        const int64_t i = r->series[n];
        const double x = values[r->values[n]];
        if (!(fabs(x) < INFINITY)) continue;
        const int is_ready = follow_level(p, &s, i, x);
        if (s.count[i] <= FIRST_POINTS) continue;
        if (!is_ready || s.level[i] < best[i] - p->log_improvement) {
            best[i] = s.level[i];
            best_at[i] = s.count[i];
        }
    }
    return 1;
}

typedef struct {
    int64_t repeats, warmup;
    double converged;
} HiddenParameters;

/* HiddenNan: last, size, change, resolution, recent, changes, repeated. */
static int fast_hidden(const FastRule *r, const double *values)
{
    const HiddenParameters *p = r->parameters;
    void **arrays = r->arrays;
    double *last = arrays[0], *size = arrays[1], *change = arrays[2], *resolution = arrays[3];
    double *recent = arrays[4];
    int64_t *changes = arrays[5];
    int32_t *repeated = arrays[6];
    for (int64_t n = 0; n < r->num; n++) {
        const int64_t i = r->series[n];
        const double x = values[r->values[n]];
        if (!(fabs(x) < INFINITY) || changes[i] < p->warmup) continue;
        const int is_restless = smaller(change[i], recent[i]) >= 10.0 * resolution[i];
        const int is_usual = fabs(x) >= p->converged * size[i] || x == 0.0;
        if (x == last[i] && is_restless && is_usual && (repeated[i] + 1.0) / (double)p->repeats >= 1.0) return 0;
        if (x == 0.0 && size[i] >= 10.0 * change[i] && size[i] > 1e-3) return 0;
    }
    for (int64_t n = 0; n < r->num; n++) {
        const int64_t i = r->series[n];
        const double x = values[r->values[n]];
        const double moved = fabs(x - last[i]);
        if (!(fabs(x) < INFINITY)) continue;
        if (x == last[i]) {
            repeated[i]++;
            continue;
        }
        repeated[i] = 0;
        const double rate = larger(1.0 / (double)(changes[i] > 1 ? changes[i] : 1), 0.05);
        if (changes[i] > 0) {
            change[i] += rate * (moved - change[i]);
            resolution[i] = smaller(resolution[i], moved);
            recent[i] = larger(moved, 0.5 * recent[i]);
        }
        size[i] += (changes[i] == 0 ? 1.0 : rate) * (fabs(x) - size[i]);
        changes[i]++;
        last[i] = x;
    }
    return 1;
}

/* A baseline without a common part, of values that are the statistic themselves. */
static int fast_baseline(const FastRule *r, const double *values)
{
    const PlanRow *f = r->parameters;
    const int linear = f->algorithm == ALGORITHM_LINEAR;
    int64_t num_hits = 0;
    Hit hits[1];
    for (int64_t n = 0; n < r->num; n++) {
        const int64_t i = r->series[n];
        const double x = values[r->values[n]];
        const double size = larger(fabs(x), TINY);
        if (!(fabs(x) < INFINITY) || f->count[i] < f->warmup || x < f->minimum) continue;
        if (!linear && x == 0.0 && f->zero_is_normal[i]) continue;
        const double z = (double)(float)(linear ? clipped(x, HUGE_VALUE) : log_of(size)), residual = z - f->location[i];
        const double floor = linear ? larger(f->floor * f->size[i], TINY) : f->floor;
        const double bound = larger(larger(f->spread[i] * f->k, f->peak[i] * f->peak_factor), floor);
        const double away = f->sides == SIDES_UP ? residual : f->sides == SIDES_DOWN ? -residual : fabs(residual);
        if (away >= bound) return 0;
    }
    for (int64_t n = 0; n < r->num; n++) {
        const int64_t i = r->series[n];
        const double x = values[r->values[n]];
        const double size = larger(fabs(x), TINY);
        f->settled[i] = 0;
        if (!(fabs(x) < INFINITY)) continue;
        judge_point(f, 0, i, i, x, (double)(float)(linear ? clipped(x, HUGE_VALUE) : log_of(size)), linear, hits, &num_hits);
    }
    return 1;
}

typedef struct {
    double log_share;
    int64_t lasting, warmup;
} BatchParameters;

/* SameBatch: last, change, changes, run. */
static int fast_batch(const FastRule *r, const double *values)
{
    const BatchParameters *p = r->parameters;
    double *last = r->arrays[0], *usual = r->arrays[1];
    int64_t *changes = r->arrays[2], *run = r->arrays[3];
    for (int is_judged = 0; is_judged < 2; is_judged++)
        for (int64_t n = 0; n < r->num; n++) {
            const int64_t i = r->series[n];
            const double x = values[r->values[n]];
            if (!(fabs(x) < INFINITY)) continue;
            const double change = clipped(x - last[i], 1e300), size = fabs(change), counted = rolling_log(larger(size, 1e-300));
            const int is_calm = change < 0.0 && counted < p->log_share + usual[i] && changes[i] >= p->warmup;
            if (!is_judged) {
                if (is_calm && ((double)run[i] + 1.0) / (double)p->lasting >= 1.0) return 0;
                continue;
            }
            last[i] = x;
            if (!(size > 0.0)) continue;
            run[i] = is_calm ? run[i] + 1 : 0;
            usual[i] += (is_calm ? 0.01 : larger(1.0 / (1.0 + (double)changes[i]), 0.05)) * (counted - usual[i]);
            changes[i]++;
        }
    return 1;
}

/* What asks for finite values alone. NanStorm: points; AnomalyNan: no arrays. */
static int fast_finite(const FastRule *r, const double *values)
{
    const int64_t num_arrays = *(const int64_t *)r->parameters;
    for (int64_t n = 0; n < r->num; n++)
        if (!(fabs(values[r->values[n]]) < INFINITY)) return 0;
    if (num_arrays > 0)
        for (int64_t n = 0; n < r->num; n++) ((int64_t *)r->arrays[0])[r->series[n]]++;
    return 1;
}

/* LossSpike, GradNormSpike: the arrays of RollingState. */
static int fast_rolling(const FastRule *r, const double *values)
{
    const RollingParameters *p = r->parameters;
    const uint8_t is_anomalous = 0;
    RollingState whole;
    memcpy(&whole, r->arrays, sizeof whole);
    for (int64_t n = 0; n < r->num; n++) {
        const RollingState one = rolling_series_of(p, &whole, r->series[n]);
        double score;
        sentinel_rolling_medians(p, &one, 1, 1, values + r->values[n], &score, NULL, ROLLING_SCORE, r->scratch, r->isa);
        if (score >= 1.0) return 0;
    }
    for (int64_t n = 0; n < r->num; n++) {
        const RollingState one = rolling_series_of(p, &whole, r->series[n]);
        sentinel_rolling_medians(p, &one, 1, 1, values + r->values[n], NULL, &is_anomalous, ROLLING_LEARN, r->scratch, r->isa);
    }
    return 1;
}

/* Take the points of all rules in; is_taken: [num_rules] what each returned. Returns how many returned 1. */
EXPORT int64_t sentinel_fast_step(const FastRule *rules, int64_t num_rules, const double *values, uint8_t *is_taken)
{
    static int (*const kinds[])(const FastRule *, const double *)
        = {fast_drift, fast_plateau, fast_hidden, fast_baseline, fast_finite, fast_rolling, fast_batch};
    int64_t num_taken = 0;
    for (int64_t w = 0; w < num_rules; w++) {
        is_taken[w] = (uint8_t)kinds[rules[w].kind](&rules[w], values);
        num_taken += is_taken[w];
    }
    return num_taken;
}
