/* Small groups of numbers: what group detectors ask of the ranks of a step. */

/* Groups of so many members are sorted by insertion; of larger ones the middle is selected. */
#define FEW_MEMBERS 24

static void sort_few(double *values, int64_t n)
{
    for (int64_t i = 1; i < n; i++) {
        const double x = values[i];
        int64_t at = i;
        for (; at > 0 && values[at - 1] > x; at--) values[at] = values[at - 1];
        values[at] = x;
    }
}

static double middle_of_three(double a, double b, double c)
{
    const double low = a < b ? a : b, high = a < b ? b : a;
    return c < low ? low : c > high ? high : c;
}

/* Put the k-th smallest (from 0) of n values, none of them NaN, in its place, smaller ones before it and larger ones behind.
 * Hoare's selection, about the middle of three. */
static void select_kth(double *values, int64_t n, int64_t k)
{
    int64_t low = 0, high = n - 1;
    while (high - low >= FEW_MEMBERS) {
        const double pivot = middle_of_three(values[low], values[low + (high - low) / 2], values[high]);
        int64_t i = low, j = high;
        while (i <= j) {
            while (values[i] < pivot) i++;
            while (values[j] > pivot) j--;
            if (i > j) break;
            const double x = values[i];
            values[i++] = values[j];
            values[j--] = x;
        }
        if (k <= j)
            high = j;
        else if (k >= i)
            low = i;
        else
            return;
    }
    sort_few(values + low, high - low + 1);
}

/* The median of n values, at least one, none of them NaN; moves them. */
static double group_median(double *values, int64_t n)
{
    const int64_t half = n / 2;
    if (n <= FEW_MEMBERS) {
        sort_few(values, n);
        return 0.5 * (values[(n - 1) / 2] + values[half]);
    }
    select_kth(values, n, half);
    double low = values[half];
    if (n % 2 == 0) {
        low = values[0];
        for (int64_t i = 1; i < half; i++) low = values[i] > low ? values[i] : low;
    }
    return 0.5 * (low + values[half]);
}

/* For each of n members the median of its group, NaN left out and 0.5 * (low + high) of an even number, NaN where none is
 * known; and how many are known. group: [n] in [0, num_groups). begins: [num_groups + 1], middles: [num_groups],
 * gathered: [n] scratch. */
EXPORT void sentinel_group_medians(const double *values, const int64_t *group, int64_t n, int64_t num_groups, double *median,
                                   int64_t *known, int64_t *begins, double *middles, double *gathered)
{
    for (int64_t g = 0; g <= num_groups; g++) begins[g] = 0;
    for (int64_t i = 0; i < n; i++) begins[group[i] + 1]++;
    for (int64_t g = 0; g < num_groups; g++) {
        begins[g + 1] += begins[g];
        middles[g] = 0.0;
    }
    /* middles counts how many of a group stand in `gathered` so far. */
    for (int64_t i = 0; i < n; i++) {
        const int64_t g = group[i];
        const double x = values[i];
        if (x != x) continue;
        gathered[begins[g] + (int64_t)middles[g]] = x;
        middles[g] += 1.0;
    }
    for (int64_t i = 0; i < n; i++) known[i] = (int64_t)middles[group[i]];
    for (int64_t g = 0; g < num_groups; g++) {
        const int64_t num = (int64_t)middles[g];
        middles[g] = num ? group_median(gathered + begins[g], num) : NAN;
    }
    for (int64_t i = 0; i < n; i++) median[i] = middles[group[i]];
}
