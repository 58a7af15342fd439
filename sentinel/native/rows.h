/* ---- rows ---- */

#define NONE_ID 0xffffffffu
#define FOLDED 4u

static double absmax(const Stats *s)
{
    if (s->count <= 0) return -1.0;
    const double a = fabs(s->min), b = fabs(s->max);
    return a > b ? a : b;
}

static void point_at_own(Row *row)
{
    if (row->num_folded == 0) row->num_folded = 1;
    if (row->bad_call_id == NONE_ID && row->stats.num_nan + row->stats.num_pos_inf + row->stats.num_neg_inf > 0) {
        row->bad_call_id = row->call_id;
        row->bad_micro_step = row->micro_step;
    }
    if (row->max_call_id == NONE_ID && row->stats.count > 0) {
        row->max_call_id = row->call_id;
        row->max_micro_step = row->micro_step;
    }
}

/* Let rows that do not say which observation was non-finite, or largest, point at their own; in place. */
EXPORT void sentinel_point_at_own(Row *rows, int64_t num)
{
    for (int64_t i = 0; i < num; i++) point_at_own(&rows[i]);
}

/* Whether a row holds anything that is not finite. */
EXPORT int sentinel_has_nonfinite(const Row *rows, int64_t num)
{
    int64_t bad = 0;
    for (int64_t i = 0; i < num; i++) bad |= rows[i].stats.num_nan | rows[i].stats.num_pos_inf | rows[i].stats.num_neg_inf;
    return bad != 0;
}

/* Fold rows in place by (tensor, kind), in order of first appearance. Rows that belong to no micro-batch (micro_step -1,
 * not FOLDED) stay as they are. Returns the number of rows left, or -1 where there is no memory. */
EXPORT int64_t sentinel_fold_rows(Row *rows, int64_t num)
{
    uint64_t size = 16;
    while (size < 2 * (uint64_t)num) size *= 2;
    int64_t *table = malloc(size * sizeof *table);
    if (!table) return -1;
    memset(table, 0xff, size * sizeof *table);
    int64_t filled = 0;
    for (int64_t i = 0; i < num; i++) {
        Row row = rows[i];
        point_at_own(&row);
        if (row.micro_step == -1 && !(row.flags & FOLDED)) {
            rows[filled++] = row;
            continue;
        }
        uint64_t at = ((((uint64_t)row.tensor << 8) | row.kind) * 0x9e3779b97f4a7c15u >> 20) & (size - 1);
        while (table[at] >= 0 && (rows[table[at]].tensor != row.tensor || rows[table[at]].kind != row.kind))
            at = (at + 1) & (size - 1);
        if (table[at] < 0) {
            table[at] = filled;
            rows[filled++] = row;
            continue;
        }
        Row *into = &rows[table[at]];
        if (into->bad_call_id == NONE_ID) {
            into->bad_call_id = row.bad_call_id;
            into->bad_micro_step = row.bad_micro_step;
        }
        if (absmax(&row.stats) > absmax(&into->stats)) {
            into->max_call_id = row.max_call_id;
            into->max_micro_step = row.max_micro_step;
        }
        into->flags |= row.flags | FOLDED;
        into->micro_step = -1;
        into->num_folded += row.num_folded;
        merge(&into->stats, &row.stats);
    }
    free(table);
    return filled;
}

/* Merge the Stats words found `stride` bytes apart into `out[group[i]]`, in order; a negative group is left out. */
EXPORT void sentinel_merge_rows(const char *stats, int64_t stride, const int32_t *group, int64_t num, Stats *out,
                                int64_t num_groups)
{
    for (int64_t g = 0; g < num_groups; g++) out[g] = empty;
    for (int64_t i = 0; i < num; i++) {
        if (group[i] < 0 || group[i] >= num_groups) continue;
        Stats one;
        memcpy(&one, stats + i * stride, sizeof one);
        merge(&out[group[i]], &one);
    }
}
