/* Small groups of numbers: what group detectors ask of the ranks of a step. */

/* For each of n members the median of its group, NaN left out and 0.5 * (low + high) of an even number, NaN where none is
 * known; and how many are known. group: [n] in [0, num_groups). begins: [num_groups + 1], middles: [num_groups], sorted: [n]
 * scratch. Sorted by insertion: fit for groups of up to some thousand members. */
EXPORT void sentinel_group_medians(const double *values, const int64_t *group, int64_t n, int64_t num_groups, double *median,
                                   int64_t *known, int64_t *begins, double *middles, double *sorted)
{
    for (int64_t g = 0; g <= num_groups; g++) begins[g] = 0;
    for (int64_t i = 0; i < n; i++) begins[group[i] + 1]++;
    for (int64_t g = 0; g < num_groups; g++) {
        begins[g + 1] += begins[g];
        middles[g] = 0.0;
    }
    /* middles counts how many of a group stand in `sorted` so far. */
    for (int64_t i = 0; i < n; i++) {
        const int64_t g = group[i];
        const double x = values[i];
        if (x != x) continue;
        double *first = sorted + begins[g], *at = first + (int64_t)middles[g];
        for (; at > first && at[-1] > x; at--) *at = at[-1];
        *at = x;
        middles[g] += 1.0;
    }
    for (int64_t i = 0; i < n; i++) known[i] = (int64_t)middles[group[i]];
    for (int64_t g = 0; g < num_groups; g++) {
        const int64_t num = (int64_t)middles[g];
        const double *first = sorted + begins[g];
        middles[g] = num ? 0.5 * (first[(num - 1) / 2] + first[num / 2]) : NAN;
    }
    for (int64_t i = 0; i < n; i++) median[i] = middles[group[i]];
}
