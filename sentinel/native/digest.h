/* One closed step, in one pass over the rows of its ranks: which are judged, merged to logical tensors, and what is odd. */

/* The rows of one rank, and what its tensor ids stand for; native/layout.py has the same as a numpy dtype. */
typedef struct {
    const char *rows;
    int64_t num_rows, stride;
    const int32_t *to_logical, *to_copy;
    int64_t table_size;
    int64_t rank;
} StepPart;

/* Copy the statistics of the rows that a table gives an entry (to_logical >= 0; to_copy is not read), in their order,
 * their entries, and how many each part has (counts). There is room for all rows. Returns how many there are. */
EXPORT int64_t sentinel_take_rows(const StepPart *parts, int64_t num_parts, Stats *stats, int32_t *entries, int64_t *counts)
{
    int64_t num = 0;
    for (int64_t p = 0; p < num_parts; p++) {
        const StepPart part = parts[p];
        const int64_t before = num;
        for (int64_t i = 0; i < part.num_rows; i++) {
            const char *row = part.rows + i * part.stride;
            uint32_t id;
            memcpy(&id, row, sizeof id);
            if (id >= part.table_size || part.to_logical[id] < 0) continue;
            memcpy(&stats[num], row + offsetof(Row, stats), sizeof *stats);
            entries[num++] = part.to_logical[id];
        }
        counts[p] = num - before;
    }
    return num;
}

/* Write the root mean square of the rows that a table gives an entry, and how many each entry has that hold any element,
 * finite or not: at place[entry], where the entries of a part begin at its `rank`. `values` and `counts` come as they are
 * where there is no row. A row with a non-finite element, or without any finite one, has NaN. Returns 1, with both half
 * written, where an entry has two rows: then their moments are to be merged. */
EXPORT int64_t sentinel_take_rms(const StepPart *parts, int64_t num_parts, const int64_t *place, double *values,
                                 int64_t *counts)
{
    for (int64_t p = 0; p < num_parts; p++) {
        const StepPart part = parts[p];
        for (int64_t i = 0; i < part.num_rows; i++) {
            const char *row = part.rows + i * part.stride;
            uint32_t id;
            memcpy(&id, row, sizeof id);
            if (id >= part.table_size || part.to_logical[id] < 0) continue;
            const int64_t entry = place[part.rank + part.to_logical[id]];
            Stats one;
            memcpy(&one, row + offsetof(Row, stats), sizeof one);
            const int64_t num_bad = (int64_t)((uint64_t)one.num_nan + (uint64_t)one.num_pos_inf + (uint64_t)one.num_neg_inf);
            if (!(one.count | one.num_nan | one.num_pos_inf | one.num_neg_inf)) continue;
            if (counts[entry]++) return 1;
            values[entry] = num_bad > 0 || one.count <= 0 ? NAN : hypot(one.mean, sqrt(one.m2 / (double)one.count));
        }
    }
    return 0;
}

/* A row counts for its logical tensor when its rank is the first, in the order of parts, to have that copy; never where
 * left_out[tensor]. out, written whole: stats [num_tensors], then present and bad [num_tensors] bytes. words: first the
 * number of odd copies, then 2 x (num_copies + 1) of scratch, then room for all rows, which gets the numbers of those that
 * hold a non-finite value; behind `num_rows` of them [num_copies + 1] bytes, which of the replicated copies came with
 * different checksums. Returns the number of bad rows. */
EXPORT int64_t sentinel_digest_rows(const StepPart *parts, int64_t num_parts, int64_t num_rows, const uint8_t *left_out,
                                    const uint8_t *is_replicated, int64_t num_tensors, int64_t num_copies, char *out,
                                    int64_t *words)
{
    Stats *stats = (Stats *)out;
    uint8_t *present = (uint8_t *)(stats + num_tensors), *bad = present + num_tensors;
    int64_t *num_odd = words, *speaker = words + 1, *bad_rows = speaker + 2 * (num_copies + 1);
    uint64_t *first = (uint64_t *)(speaker + num_copies + 1);
    uint8_t *odd = (uint8_t *)(bad_rows + num_rows);
    int64_t num_bad = 0, number = 0;
    memset(present, 0, 2 * num_tensors);
    memset(odd, 0, num_copies + 1);
    memset(speaker, 0xff, (num_copies + 1) * sizeof *speaker);
    *num_odd = 0;
    for (int64_t p = 0; p < num_parts; p++) {
        const StepPart part = parts[p];
        for (int64_t i = 0; i < part.num_rows; i++, number++) {
            const char *row = part.rows + i * part.stride;
            uint32_t id;
            Stats one;
            memcpy(&id, row, sizeof id);
            memcpy(&one, row + offsetof(Row, stats), sizeof one);
            const int64_t tensor = id < part.table_size ? part.to_logical[id] : -1;
            const int64_t copy = id < part.table_size ? part.to_copy[id] : -1;
            if (one.num_nan | one.num_pos_inf | one.num_neg_inf) {
                bad_rows[num_bad++] = number;
                if (tensor >= 0) bad[tensor] = 1;
            }
            if (copy < 0 || tensor < 0) continue;
            if (speaker[copy] < 0) {
                speaker[copy] = part.rank;
                first[copy] = one.checksum;
            } else if (one.checksum != first[copy] && is_replicated[copy] && !odd[copy]) {
                odd[copy] = 1;
                ++*num_odd;
            }
            if (speaker[copy] != part.rank || left_out[tensor]) continue;
            if (!present[tensor]) {
                present[tensor] = 1;
                if (one.count > 0) {
                    stats[tensor] = one;
                    continue;
                }
                stats[tensor] = empty;
            }
            merge(&stats[tensor], &one);
        }
    }
    for (int64_t t = 0; t < num_tensors; t++)
        if (!present[t]) stats[t] = empty;
    return num_bad;
}
