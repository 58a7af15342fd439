/* The loops of compiled_plan.h for one instruction set: ISA names it, TARGET compiles for it. */
#define LANES(name) JOIN(JOIN(name, _), ISA)

/* What a row of the plan compares: float32 logarithms, or float32 values. */
static TARGET void LANES(map_log)(const double *restrict x, double *restrict z, int n)
{
    for (int i = 0; i < n; i++) {
        const double size = fabs(x[i]);
        z[i] = (double)(float)log_of(size > TINY ? size : TINY);
    }
}

static TARGET void LANES(map_linear)(const double *restrict x, double *restrict z, int n)
{
    for (int i = 0; i < n; i++) {
        const double low = x[i] < HUGE_VALUE ? x[i] : HUGE_VALUE;
        z[i] = (double)(float)(low > -HUGE_VALUE ? low : -HUGE_VALUE);
    }
}

/* The words of `n` tensors, side by side. */
static TARGET void LANES(spread_words)(Words *restrict words, const Stats *restrict stats, int n)
{
    for (int i = 0; i < n; i++) {
        const Stats *s = &stats[i];
        words->n[i] = (double)s->count;
        words->total[i] = (double)(s->count + s->num_nan + s->num_pos_inf + s->num_neg_inf);
        words->mean[i] = s->mean;
        words->m2[i] = s->m2;
        words->m3[i] = s->m3;
        words->m4[i] = s->m4;
    }
}

/* statistic_of for `n` tensors, bit by bit the same. */
static TARGET void LANES(statistic_column)(const Words *restrict w, const Stats *stats, int statistic, double *restrict out,
                                           int n)
{
    int32_t is_far = 0;
    switch (statistic) {
    case S_NORM:
    case S_RMS:
        for (int i = 0; i < n; i++) {
            const double square = w->mean[i] * w->mean[i] + w->m2[i] / w->n[i];
            const double root = sqrt(square), whole = statistic == S_NORM ? root * sqrt(w->n[i]) : root;
            const double none = statistic == S_NORM && w->total[i] == 0.0 ? 0.0 : NAN;
            is_far |= !(square > 1e-280) | !(square < 1e280);
            out[i] = w->n[i] > 0.0 ? whole : none;
        }
        if (!is_far) return;
        break;
    case S_KURTOSIS:
        for (int i = 0; i < n; i++) {
            const double m2 = w->m2[i], m4 = w->m4[i], value = m4 / m2 * (w->n[i] / m2);
            out[i] = (w->n[i] > 1.0) & (m2 > 0.0) & (m4 > 0.0) & (m4 < INFINITY) ? value : NAN;
        }
        return;
    default: break;
    }
    for (int i = 0; i < n; i++) out[i] = statistic_of(&stats[i], statistic);
}

/* Judge `n` series that lie side by side as if each were warm and well, as nearly all of them are; leave alone, and mark in
 * `slow`, those that are not. */
static inline __attribute__((always_inline)) TARGET int LANES(judge_healthy)(
    const PlanRow *f, const double *restrict x, const double *restrict z, int n, float *restrict location,
    float *restrict spread, float *restrict peak, float *restrict usual, const int16_t *restrict count,
    const int16_t *restrict run, int32_t *restrict slow, const int linear, const int sides)
{
    const double k = f->k, least = f->floor, minimum = f->minimum, rate = f->location_rate, spread_rate = f->spread_rate;
    const double peak_factor = f->peak_factor, common = f->common;
    const int32_t warmup = f->warmup;
    const double size_rate = warmup < 10 ? 1.0 / (warmup < 9 ? warmup + 1.0 : 10.0) : 0.1;
    int32_t busy[TILE], num_slow = 0;
    for (int i = 0; i < n; i++) busy[i] = (count[i] < warmup) | (run[i] > 0);
    for (int i = 0; i < n; i++) {
        const double at = location[i], width = spread[i], was = peak[i], old = linear ? usual[i] : 0.0;
        const double residual = z[i] - at - common, magnitude = fabs(residual);
        const double floor = linear ? larger(least * old, TINY) : least;
        const double bound = larger(larger(width * k, was * peak_factor), floor);
        const double size = sides == SIDES_UP ? residual : sides == SIDES_DOWN ? -residual : magnitude;
        const int odd = (!(fabs(x[i]) < INFINITY)) | (!linear & (x[i] == 0.0)) | ((size >= bound) & !(x[i] < minimum));
        const float size_now = linear ? (float)(old + size_rate * (fabs(z[i]) - old)) : 0.0f;
        const double floor_now = linear ? larger(least * size_now, TINY) : least;
        const double limit = larger(width * CLIP, floor_now * 0.25), learned = magnitude < limit ? magnitude : limit;
        const float new_peak = (float)larger(was * PEAK_DECAY, magnitude);
        const float new_location = (float)(at + rate * (copysign(learned, residual) + common));
        const float new_spread = (float)(width + spread_rate * (learned - width));
        const int is_slow = odd | busy[i];
        slow[i] = is_slow;
        num_slow += is_slow;
        location[i] = is_slow ? location[i] : new_location;
        spread[i] = is_slow ? spread[i] : new_spread;
        peak[i] = is_slow ? peak[i] : new_peak;
        if (linear) usual[i] = is_slow ? usual[i] : size_now;
    }
    return num_slow;
}

#define HEALTHY(linear, sides) \
    LANES(judge_healthy)(f, x, z, n, location, spread, peak, usual, count, run, slow, linear, sides)

static TARGET int LANES(judge_side_by_side)(const PlanRow *f, const double *x, const double *z, int n, float *location,
                                            float *spread, float *peak, float *usual, const int16_t *count,
                                            const int16_t *run, int32_t *slow)
{
    if (f->algorithm == ALGORITHM_LOG) {
        if (f->sides == SIDES_UP) return HEALTHY(0, SIDES_UP);
        return f->sides == SIDES_DOWN ? HEALTHY(0, SIDES_DOWN) : HEALTHY(0, SIDES_BOTH);
    }
    if (f->sides == SIDES_UP) return HEALTHY(1, SIDES_UP);
    return f->sides == SIDES_DOWN ? HEALTHY(1, SIDES_DOWN) : HEALTHY(1, SIDES_BOTH);
}

static TARGET void LANES(judge_tile)(PlanRow *f, int number, const double *column, const double *mapped, int64_t first,
                                     int64_t end, const uint8_t *present, int all_present, Hit *hits, int64_t *num_hits)
{
    double x[TILE], z[TILE];
    int32_t entry[TILE], at[TILE], slow[TILE];
    int n = 0, is_one_piece = 1;
    const int64_t left = f->num_entries - f->cursor;
    const int32_t *index = f->index + f->cursor, begin = (int32_t)f->cursor;
    int num = 0, most = left < TILE ? (int)left : TILE;
    while (num < most && index[num] < end) num++;
    f->cursor += num;
    if (all_present && !f->slots) { /* the usual step: nothing to decide */
        for (n = 0; n < num; n++) {
            x[n] = column[index[n] - first];
            z[n] = mapped[index[n] - first];
        }
        for (int i = 0; i < num; i++) entry[i] = at[i] = begin + i;
    } else {
        for (int i = 0; i < num; i++) {
            const int64_t tensor = index[i];
            if (!present[tensor]) continue;
            x[n] = column[tensor - first];
            z[n] = mapped[tensor - first];
            entry[n] = begin + i;
            at[n] = f->slots ? f->slots[begin + i] : begin + i;
            is_one_piece &= n == 0 || at[n] == at[n - 1] + 1;
            n++;
        }
    }
    f->num_points += n;
    if (n <= 0) return;
    if (f->algorithm == ALGORITHM_LIMIT) {
        for (int i = 0; i < n; i++)
            if (fabs(x[i]) < INFINITY) judge_limit(f, number, entry[i], at[i], x[i], hits, num_hits);
        return;
    }
    if (f->algorithm == ALGORITHM_STILL) {
        for (int i = 0; i < n; i++) judge_still(f, number, entry[i], at[i], x[i], f->common != 0.0, hits, num_hits);
        return;
    }
    const int linear = f->algorithm == ALGORITHM_LINEAR;
    if (is_one_piece) {
        const int64_t a = at[0];
        const int num_slow = LANES(judge_side_by_side)(f, x, z, n, f->location + a, f->spread + a, f->peak + a,
                                                       linear ? f->size + a : NULL, f->count + a, f->run + a, slow);
        memset(f->settled + a, 0, (size_t)n);
        if (num_slow == 0) return;
    } else {
        for (int i = 0; i < n; i++) slow[i] = 1;
    }
    for (int i = 0; i < n; i++) {
        if (!slow[i]) continue;
        if (fabs(x[i]) < INFINITY) judge_point(f, number, entry[i], at[i], x[i], z[i], linear, hits, num_hits);
        else f->settled[at[i]] = 0;
    }
}

/* The median residual of the series of a row, of each n-th where they are many: VectorisedBaseline._common. */
static TARGET double LANES(common_of)(const PlanRow *f, const Stats *stats, const uint8_t *present, const uint8_t *bad,
                                      const double *norm_scale)
{
    double x[2 * COMMON_SAMPLE], z[2 * COMMON_SAMPLE], residuals[2 * COMMON_SAMPLE];
    int64_t at[2 * COMMON_SAMPLE], num_here = 0, left = 0;
    int n = 0, num_known = 0;
    for (int64_t e = 0; e < f->num_entries; e++) num_here += present[f->index[e]];
    const int64_t every = num_here / COMMON_SAMPLE > 1 ? num_here / COMMON_SAMPLE : 1;
    for (int64_t e = 0; e < f->num_entries; e++) {
        const int64_t tensor = f->index[e];
        if (!present[tensor]) continue;
        if (left > 0) {
            left--;
            continue;
        }
        left = every - 1;
        at[n] = f->slots ? f->slots[e] : e;
        if (f->count[at[n]] < f->warmup || bad[tensor]) continue;
        x[n] = statistic_of(&stats[tensor], f->statistic);
        if (f->statistic == S_NORM && norm_scale) x[n] *= norm_scale[tensor];
        if (fabs(x[n]) < INFINITY && (f->algorithm == ALGORITHM_LINEAR || x[n] != 0.0)) n++;
    }
    if (f->algorithm == ALGORITHM_LINEAR) LANES(map_linear)(x, z, n);
    else LANES(map_log)(x, z, n);
    for (int i = 0; i < n; i++) residuals[num_known++] = z[i] - f->location[at[i]];
    return num_known >= LEAST_COMMON ? median_of(residuals, num_known) : 0.0;
}

/* Whether any series of a VectorisedStillness changes in this step. Nearly always the first one does. */
static TARGET int LANES(any_moves)(const PlanRow *f, const Stats *stats, const uint8_t *present, const uint8_t *bad,
                                   const double *norm_scale)
{
    for (int64_t e = 0; e < f->num_entries; e++) {
        const int64_t tensor = f->index[e];
        const double last = f->last[f->slots ? f->slots[e] : e];
        if (!present[tensor] || bad[tensor] || last != last) continue;
        double x = statistic_of(&stats[tensor], f->statistic);
        if (f->statistic == S_NORM && norm_scale) x *= norm_scale[tensor];
        if (fabs(x) < INFINITY && x != 0.0 && x != last) return 1;
    }
    return 0;
}

static TARGET int64_t LANES(judge_plan)(const Stats *stats, const uint8_t *present, const uint8_t *bad,
                                         const double *norm_scale, int64_t num_tensors, PlanRow *plan, int num_plan_rows,
                                         Hit *hits)
{
    Words words;
    double columns[NUM_STATISTICS][TILE], logs[NUM_STATISTICS][TILE], linears[NUM_STATISTICS][TILE];
    int64_t num_hits = 0;
    for (int w = 0; w < num_plan_rows; w++) {
        PlanRow *f = &plan[w];
        if (f->algorithm == ALGORITHM_STILL) f->common = LANES(any_moves)(f, stats, present, bad, norm_scale);
        else f->common = f->has_common ? LANES(common_of)(f, stats, present, bad, norm_scale) : 0.0;
    }
    for (int64_t first = 0; first < num_tensors; first += TILE) {
        const int64_t end = first + TILE < num_tensors ? first + TILE : num_tensors;
        const int n = (int)(end - first);
        const int all_present = !memchr(present + first, 0, (size_t)n);
        uint32_t wanted = 0, as_log = 0, as_linear = 0;
        for (int w = 0; w < num_plan_rows; w++) {
            const PlanRow *f = &plan[w];
            if (f->cursor >= f->num_entries || f->index[f->cursor] >= end) continue;
            const uint32_t bit = 1u << f->statistic;
            wanted |= bit;
            if (f->algorithm == ALGORITHM_LOG) as_log |= bit;
            if (f->algorithm == ALGORITHM_LINEAR) as_linear |= bit;
        }
        if (wanted & (1u << S_NORM | 1u << S_RMS | 1u << S_KURTOSIS)) LANES(spread_words)(&words, stats + first, n);
        for (int s = 0; s < NUM_STATISTICS; s++) {
            if (!(wanted >> s & 1)) continue;
            double *column = columns[s];
            LANES(statistic_column)(&words, stats + first, s, column, n);
            for (int i = 0; i < n; i++) column[i] = bad[first + i] ? NAN : column[i];
            if (s == S_NORM && norm_scale)
                for (int i = 0; i < n; i++) column[i] *= norm_scale[first + i];
            if (as_log >> s & 1) LANES(map_log)(column, logs[s], n);
            if (as_linear >> s & 1) LANES(map_linear)(column, linears[s], n);
        }
        for (int w = 0; w < num_plan_rows; w++) {
            PlanRow *f = &plan[w];
            if (f->cursor >= f->num_entries || f->index[f->cursor] >= end) continue;
            const double *mapped = f->algorithm == ALGORITHM_LINEAR ? linears[f->statistic] : logs[f->statistic];
            LANES(judge_tile)(f, w, columns[f->statistic], mapped, first, end, present, all_present, hits, &num_hits);
        }
    }
    return num_hits;
}

#undef HEALTHY
#undef LANES
#undef ISA
#undef TARGET
