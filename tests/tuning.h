/* Shapes that reach given rows of the tuning table. After normjit.h, with the implementation. */
#ifndef TESTS_TUNING_H
#define TESTS_TUNING_H

#define TUNING_ROWS (sizeof nji_tuning_table / sizeof nji_tuning_table[0])
#define RING_ROWS (sizeof nji_ring_table / sizeof nji_ring_table[0])

/* A descriptor of rows x cols, its columns normalized. grads: of a backward; 0 = all. */
static inline nj_desc tuning_desc(int forward, nj_dtype dtype, int64_t rows, int64_t cols) {
    nj_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.op = forward ? NJ_OP_LAYER_NORM_FORWARD : NJ_OP_LAYER_NORM_BACKWARD;
    desc.dtype = dtype;
    desc.rank = 2;
    desc.shape[0] = rows;
    desc.shape[1] = cols;
    desc.norm_axes = 2;
    desc.has_gamma = desc.has_beta = 1;
    desc.eps = 1e-5;
    return desc;
}

/* What select takes for it; STRIDED when it refuses. */
static inline nji_family tuning_family(const nj_desc *desc, const nji_device_facts *facts) {
    nj_desc checked = *desc;
    nj_preference no_demands;
    nji_choice choice;
    int64_t rows, cols;
    memset(&no_demands, 0, sizeof no_demands);
    if (nji_check_desc(&checked, &rows, &cols, "test") != NJ_OK ||
        nji_choose(&checked, rows, cols, facts, &no_demands, &choice, "test") != NJ_OK) {
        return NJI_STRIDED;
    }
    return choice.family;
}

/* The fewest columns, `rest` more than a multiple of 16, with which select takes that row of the
   table and that family; 0 when there are none. A row begins where another ends or keeps no more.
 */
static inline int64_t tuning_cols(const nji_tuning *row, nji_family family, nj_dtype dtype,
                                  const nji_device_facts *facts, int rest) {
    int64_t best = 0;
    size_t i;
    for (i = 0; i < 2 * TUNING_ROWS + 1; i++) {
        const nji_tuning *other = &nji_tuning_table[i / 2 % TUNING_ROWS];
        const int64_t kept = (int64_t)other->elements * other->max_lanes * other->max_slices;
        const int64_t end = i == 2 * TUNING_ROWS ? 0 : i % 2 ? kept : other->max_cols;
        const int64_t cols = end / 16 * 16 + rest;
        int64_t at;
        if (end == NJI_ANY_COLS) continue;
        for (at = cols; at <= cols + 16; at += 16) {
            const nj_desc desc = tuning_desc(row->forward, dtype, 64, at);
            if (at > end && (best == 0 || at < best) &&
                nji_find_tuning(&desc, row->forward, at, nji_vec_of(&desc, at), facts) == row &&
                tuning_family(&desc, facts) == family) {
                best = at;
            }
        }
    }
    return best;
}

/* The fewest columns of a row of the ring's table, or the most. */
static inline int64_t ring_cols(const nji_ring_tuning *row, int is_most) {
    return is_most ? row->max_cols : (row->min_cols + 15) / 16 * 16;
}

/* Rows too many for one cluster. */
static inline int64_t ring_rows(const nji_ring_tuning *row, int64_t cols) {
    return NJI_RING_LAUNCH_BYTES * NJI_RING_MOST_SLICES / (cols * 3 * row->element_bytes) + 1;
}

#endif
