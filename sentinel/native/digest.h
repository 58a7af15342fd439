/* One closed step, in one pass over the rows of its ranks: which are judged, merged to logical tensors, and what is odd. */

/* The rows of one rank, and what its tensor ids stand for; native/layout.py has the same as a numpy dtype. */
typedef struct {
    const char *rows;
    int64_t num_rows, stride;
    const int32_t *to_logical, *to_copy;
    int64_t table_size;
    int64_t rank;
} StepPart;

/* stats, present, bad: [num_tensors], written whole. A row counts for its logical tensor when its rank is the first, in
 * the order of parts, to have that copy; never where left_out[tensor]. bad_rows: room for all rows, gets the numbers of
 * those that hold a non-finite value. speaker, first: [num_copies + 1] scratch. odd: [num_copies + 1], gets which of the
 * replicated copies came with different checksums. Returns the number of bad rows; num_odd: of odd copies. */
EXPORT int64_t sentinel_digest(const StepPart *parts, int64_t num_parts, const uint8_t *left_out, const uint8_t *is_replicated,
                               int64_t num_tensors, int64_t num_copies, Stats *stats, uint8_t *present, uint8_t *bad,
                               int64_t *bad_rows, int64_t *speaker, uint64_t *first, uint8_t *odd, int64_t *num_odd)
{
    int64_t num_bad = 0, number = 0;
    memset(present, 0, num_tensors);
    memset(bad, 0, num_tensors);
    memset(odd, 0, num_copies + 1);
    for (int64_t c = 0; c <= num_copies; c++) speaker[c] = -1;
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
