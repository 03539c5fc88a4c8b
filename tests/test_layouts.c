/* Shapes, axes, types, strides, gradients wanted: each on every backend against the oracle. */
#include "harness.h"

static const nj_dtype dtypes[] = {NJ_F16, NJ_BF16, NJ_F32, NJ_F64};

/* ---- layouts: one operand, or all of them, laid out in one way ------------------------------ */

static void pad_rows(operand *o) {
    const int last = o->rank - 1;
    int64_t step = o->shape[last] + 3;
    for (int axis = last - 1; axis >= 0; axis--) {
        o->stride[axis] = step;
        step *= o->shape[axis];
    }
    o->count = o->rank > 1 ? step : o->count;
}

static void reverse_axes(operand *o) {
    int order[NJ_MAX_RANK];
    for (int i = 0; i < o->rank; i++) order[i] = o->rank - 1 - i;
    view_in_order(o, order);
}

static void swap_last_axes(operand *o) {
    int order[NJ_MAX_RANK];
    for (int i = 0; i < o->rank; i++) order[i] = i;
    if (o->rank > 1) {
        order[o->rank - 1] = o->rank - 2;
        order[o->rank - 2] = o->rank - 1;
    }
    view_in_order(o, order);
}

static void rotate_axes(operand *o) {
    int order[NJ_MAX_RANK];
    for (int i = 0; i < o->rank; i++) order[i] = (i + 1) % o->rank;
    view_in_order(o, order);
}

static void take_every_second(operand *o) {
    for (int axis = 0; axis < o->rank; axis++) o->stride[axis] *= 2;
    o->count *= 2;
}

static void start_later(operand *o) {
    o->offset += 5;
    o->count += 7;
}

static void shift_base(operand *o) {
    o->lead = 1;
}

static void flip_axis(operand *o, int axis) {
    o->offset += (o->shape[axis] - 1) * o->stride[axis];
    o->stride[axis] = -o->stride[axis];
}

static void flip_last(operand *o) {
    flip_axis(o, o->rank - 1);
}

static void flip_every_axis(operand *o) {
    for (int axis = 0; axis < o->rank; axis++) flip_axis(o, axis);
}

static void repeat_first(operand *o) {
    o->stride[0] = 0;
}

static void repeat_last(operand *o) {
    o->stride[o->rank - 1] = 0;
}

static void repeat_all(operand *o) {
    for (int axis = 0; axis < o->rank; axis++) o->stride[axis] = 0;
}

static void scramble_strides_of_one(operand *o) {
    for (int axis = 0; axis < o->rank; axis++) {
        if (o->shape[axis] == 1) o->stride[axis] = axis % 2 ? -1234567 : 0;
    }
}

static void everything_at_once(operand *o) {
    rotate_axes(o);
    take_every_second(o);
    start_later(o);
    shift_base(o);
}

typedef struct layout {
    const char *name;
    void (*apply)(operand *o);
    uint32_t operands;
} layout;

#define INPUTS (BIT(X) | BIT(DY) | BIT(GAMMA) | BIT(BETA))
#define ALL (BIT(OPERANDS) - 1)

/* Strides of 0 or below are for what is only read. */
static const layout layouts[] = {
    {"padded rows of x", pad_rows, BIT(X)},
    {"padded rows of dy", pad_rows, BIT(DY)},
    {"padded rows of y and dx", pad_rows, BIT(Y) | BIT(DX)},
    {"padded rows of every tensor", pad_rows, FULL_OPERANDS},
    {"x with reversed axes", reverse_axes, BIT(X)},
    {"dy with reversed axes", reverse_axes, BIT(DY)},
    {"y and dx with reversed axes", reverse_axes, BIT(Y) | BIT(DX)},
    {"everything with reversed axes", reverse_axes, ALL},
    {"x with its last axes swapped", swap_last_axes, BIT(X)},
    {"dy with its last axes swapped", swap_last_axes, BIT(DY)},
    {"y and dx with their last axes swapped", swap_last_axes, BIT(Y) | BIT(DX)},
    {"every tensor with rotated axes", rotate_axes, FULL_OPERANDS},
    {"every second element of x", take_every_second, BIT(X)},
    {"every second element of dy", take_every_second, BIT(DY)},
    {"every second element of y and dx", take_every_second, BIT(Y) | BIT(DX)},
    {"every second element of mean and rstd", take_every_second, STAT_OPERANDS},
    {"every second element of mean", take_every_second, BIT(MEAN)},
    {"every second element of gamma and beta", take_every_second, BIT(GAMMA) | BIT(BETA)},
    {"every second element of dgamma", take_every_second, BIT(DGAMMA)},
    {"every second element of dbeta", take_every_second, BIT(DBETA)},
    {"mean and rstd with reversed axes", reverse_axes, STAT_OPERANDS},
    {"params with reversed axes", reverse_axes, PARAM_OPERANDS},
    {"x flipped along its last axis", flip_last, BIT(X)},
    {"dy flipped along every axis", flip_every_axis, BIT(DY)},
    {"every input flipped", flip_every_axis, INPUTS},
    {"x repeated along its first axis", repeat_first, BIT(X)},
    {"dy repeated along its first axis", repeat_first, BIT(DY)},
    {"dy repeated along its last axis", repeat_last, BIT(DY)},
    {"one element serving as all of dy", repeat_all, BIT(DY)},
    {"one element serving as all of x", repeat_all, BIT(X)},
    {"one element serving as all of gamma", repeat_all, BIT(GAMMA)},
    {"offsets into every buffer", start_later, ALL},
    {"an offset into x", start_later, BIT(X)},
    {"bases one element past alignment", shift_base, ALL},
    {"dy's base one element past alignment", shift_base, BIT(DY)},
    {"outputs' bases one element past alignment", shift_base, BIT(Y) | BIT(DX) | BIT(DGAMMA)},
    {"everything rotated, strided, offset and misaligned", everything_at_once, ALL},
};

static void check_layout_on(const layout *row, const nj_desc *desc, uint64_t seed) {
    problem p;
    open_problem(&p, desc);
    for (int i = 0; i < OPERANDS; i++) {
        if (row->operands & BIT(i)) row->apply(&p.op[i]);
    }
    check_both(&p, seed);
    close_problem(&p);
}

static void a_layout_gives_what_its_packed_copy_gives(void **state) {
    static const int64_t shape[3] = {5, 6, 8};
    static const uint32_t axes[] = {4u, 6u, 2u, 5u};
    const layout *row = (const layout *)*state;
    for (size_t d = 0; d < COUNT_OF(dtypes); d++) {
        for (size_t a = 0; a < COUNT_OF(axes); a++) {
            const nj_desc desc = make_desc(dtypes[d], 3, shape, axes[a]);
            check_layout_on(row, &desc, 10 * d + a);
        }
    }
}

static void axes_of_extent_1_ignore_their_stride(void **state) {
    static const int64_t shape[5] = {1, 4, 1, 6, 1};
    static const layout row = {"", scramble_strides_of_one, ALL};
    static const uint32_t axes[] = {8u, 24u, 2u, 21u};
    (void)state;
    for (size_t a = 0; a < COUNT_OF(axes); a++) {
        const nj_desc desc = make_desc(NJ_F32, 5, shape, axes[a]);
        check_layout_on(&row, &desc, a);
    }
}

static void wide_rows_may_be_padded_and_misaligned(void **state) {
    static const layout rows[] = {{"", pad_rows, FULL_OPERANDS},
                                  {"", shift_base, ALL},
                                  {"", take_every_second, FULL_OPERANDS}};
    (void)state;
    for (size_t d = 0; d < COUNT_OF(dtypes); d++) {
        const nj_desc desc = make_matrix(dtypes[d], 9, 1000);
        for (size_t i = 0; i < COUNT_OF(rows); i++) check_layout_on(&rows[i], &desc, d);
    }
}

/* x and dx, dy and y: the left and right halves of buffers twice as wide. */
static void column_halves_of_one_buffer_are_neighbours(void **state) {
    static const int halves[2][2] = {{X, DX}, {DY, Y}};
    (void)state;
    for (size_t d = 0; d < COUNT_OF(dtypes); d++) {
        const nj_desc desc = make_matrix(dtypes[d], 7, 40);
        problem p;
        open_problem(&p, &desc);
        for (int i = 0; i < 2; i++) {
            operand *left = &p.op[halves[i][0]], *right = &p.op[halves[i][1]];
            left->stride[0] = right->stride[0] = 80;
            left->count = right->count = 7 * 80;
            right->offset = 40;
            right->home = halves[i][0];
        }
        check_both(&p, d);
        close_problem(&p);
    }
}

/* ---- in place ------------------------------------------------------------------------------- */

typedef struct replacement {
    const char *name;
    int output, input;
    uint32_t accumulate;
} replacement;

static const replacement replacements[] = {{"y over x", Y, X, 0},
                                           {"dx over x", DX, X, 0},
                                           {"dx over dy", DX, DY, 0},
                                           {"dx added to dy", DX, DY, NJ_GRAD_DX}};

/* The parameter gradients must not see the dx that took the place of their input. */
static void an_output_may_replace_an_input(void **state) {
    static const int64_t shape[3] = {5, 6, 8};
    static const uint32_t axes[] = {4u, 2u, 5u};
    const replacement *row = (const replacement *)*state;
    for (size_t d = 0; d < COUNT_OF(dtypes); d++) {
        for (size_t a = 0; a < COUNT_OF(axes); a++) {
            for (int strided = 0; strided < 2; strided++) {
                nj_desc desc = make_desc(dtypes[d], 3, shape, axes[a]);
                problem p;
                desc.accumulate = row->accumulate;
                open_problem(&p, &desc);
                if (strided) take_every_second(&p.op[row->input]);
                place_over(&p, row->output, row->input);
                fill_problem(&p, 7 + a);
                set_statistics(&p);
                if (row->output == Y) {
                    check_forward(&p);
                } else {
                    check_backward(&p);
                }
                close_problem(&p);
            }
        }
    }
}

static void large_outputs_may_replace_their_inputs(void **state) {
    (void)state;
    for (size_t i = 0; i < COUNT_OF(replacements); i++) {
        nj_desc desc = make_matrix(NJ_BF16, 33, 2048);
        problem p;
        desc.accumulate = replacements[i].accumulate;
        open_problem(&p, &desc);
        place_over(&p, replacements[i].output, replacements[i].input);
        fill_problem(&p, i);
        set_statistics(&p);
        if (replacements[i].output == Y) {
            check_forward(&p);
        } else {
            check_backward(&p);
        }
        close_problem(&p);
    }
}

/* ---- axes, ranks, types --------------------------------------------------------------------- */

static void every_set_of_axes_of_rank_4_is_right(void **state) {
    static const int64_t shape[4] = {3, 4, 5, 6};
    (void)state;
    for (uint32_t axes = 1; axes < 16; axes++) {
        const nj_desc desc = make_desc(dtypes[axes % COUNT_OF(dtypes)], 4, shape, axes);
        const layout rotated = {"", rotate_axes, ALL};
        check_packed(&desc, axes);
        check_layout_on(&rotated, &desc, axes);
    }
}

static void ranks_1_to_8_are_right(void **state) {
    static const int64_t shape[8] = {3, 2, 4, 1, 3, 2, 2, 5};
    (void)state;
    for (int32_t rank = 1; rank <= NJ_MAX_RANK; rank++) {
        const uint32_t last = 1u << (rank - 1);
        const nj_desc by_last = make_desc(NJ_F32, rank, shape, last);
        const nj_desc by_all = make_desc(NJ_F16, rank, shape, 2 * last - 1);
        const nj_desc by_odd = make_desc(NJ_F64, rank, shape, 0x55u & (2 * last - 1));
        check_packed(&by_last, (uint64_t)rank);
        check_packed(&by_all, (uint64_t)rank);
        check_packed(&by_odd, (uint64_t)rank);
    }
}

/* Rank 8, alternating axes, no two of which merge. */
static void eight_axes_that_cannot_merge_are_right(void **state) {
    static const int64_t shape[8] = {2, 3, 2, 3, 2, 3, 2, 3};
    const layout rotated = {"", everything_at_once, ALL};
    nj_desc desc = make_desc(NJ_F32, 8, shape, 0xAAu);
    (void)state;
    check_packed(&desc, 1);
    check_layout_on(&rotated, &desc, 2);
    desc.norm_axes = 0xFFu;
    check_layout_on(&rotated, &desc, 3);
    desc.norm_axes = 0x7Fu;
    check_layout_on(&rotated, &desc, 4);
}

static void every_combination_of_types_is_right(void **state) {
    (void)state;
    for (size_t d = 0; d < COUNT_OF(dtypes); d++) {
        for (size_t param = 0; param < COUNT_OF(dtypes); param++) {
            for (int own_stat = 0; own_stat < 2; own_stat++) {
                nj_desc desc = make_matrix(dtypes[d], 6, 72);
                if (dtypes[param] == NJ_F64 && dtypes[d] != NJ_F64) continue;
                desc.param_dtype = dtypes[param];
                desc.stat_dtype = own_stat ? dtypes[d] : NJ_DTYPE_UNSET;
                check_packed(&desc, 100 * d + param);
                desc.norm_axes = 1u;
                check_packed(&desc, 200 * d + param);
            }
        }
    }
}

/* ---- what is wanted ------------------------------------------------------------------------- */

static void gamma_and_beta_are_independent(void **state) {
    (void)state;
    for (int has = 0; has < 4; has++) {
        nj_desc desc = make_matrix(NJ_F32, 11, 24);
        desc.has_gamma = has & 1;
        desc.has_beta = has >> 1;
        check_packed(&desc, (uint64_t)has);
        desc.norm_axes = 1u;
        check_packed(&desc, (uint64_t)has);
    }
}

/* Masks of gradients and, within each, of the accumulated ones. The operands that a mask does not
   need are absent. */
static void check_every_mask(const nj_desc *packed) {
    for (uint32_t grads = 1; grads < 8; grads++) {
        for (uint32_t accumulate = 0; accumulate <= grads; accumulate++) {
            nj_desc desc = *packed;
            problem p;
            if (accumulate & ~grads) continue;
            desc.grads = grads;
            desc.accumulate = accumulate;
            open_problem(&p, &desc);
            p.op[DX].absent = !(grads & NJ_GRAD_DX);
            p.op[DGAMMA].absent = !(grads & NJ_GRAD_DGAMMA);
            p.op[DBETA].absent = !(grads & NJ_GRAD_DBETA);
            fill_problem(&p, grads);
            set_statistics(&p);
            check_backward(&p);
            close_problem(&p);
        }
    }
}

static void every_mask_of_gradients_and_accumulation_is_right(void **state) {
    static const nj_dtype some[] = {NJ_F32, NJ_BF16};
    static const int64_t channels_first[3] = {3, 40, 24};
    (void)state;
    for (size_t d = 0; d < COUNT_OF(some); d++) {
        const nj_desc rows = make_matrix(some[d], 70, 40);
        const nj_desc tiles = make_desc(some[d], 3, channels_first, 2u);
        check_every_mask(&rows);
        check_every_mask(&tiles);
    }
}

static void accumulation_follows_strides(void **state) {
    static const int64_t shape[3] = {5, 6, 8};
    static const uint32_t axes[] = {4u, 2u, 6u};
    (void)state;
    for (size_t a = 0; a < COUNT_OF(axes); a++) {
        const layout row = {"", everything_at_once, BIT(DX) | BIT(DGAMMA) | BIT(DBETA)};
        nj_desc desc = make_desc(NJ_F16, 3, shape, axes[a]);
        desc.accumulate = NJ_GRAD_DX | NJ_GRAD_DGAMMA | NJ_GRAD_DBETA;
        check_layout_on(&row, &desc, a);
    }
}

static void statistics_that_are_not_wanted_are_not_written(void **state) {
    (void)state;
    for (int absent = 1; absent < 4; absent++) {
        const nj_desc desc = make_matrix(NJ_F16, 9, 56);
        problem p;
        open_problem(&p, &desc);
        p.op[MEAN].absent = absent & 1;
        p.op[RSTD].absent = absent >> 1;
        fill_problem(&p, (uint64_t)absent);
        check_forward(&p);
        close_problem(&p);
    }
}

/* ---- sizes ---------------------------------------------------------------------------------- */

static void cols_1_to_70_are_right(void **state) {
    (void)state;
    for (int64_t cols = 1; cols <= 70; cols++) {
        for (size_t d = 0; d < COUNT_OF(dtypes); d++) {
            const nj_desc desc = make_matrix(dtypes[d], 7, cols);
            /* NVRTC compiles a kernel for each cols and type: a type in turn there, each type at
               cols of every remainder of 4. */
            if (bed.on_gpu && !bed.fallback && (size_t)(cols + cols / 4) % 4 != d) continue;
            check_packed(&desc, (uint64_t)cols);
        }
    }
}

static void cols_off_and_on_powers_of_two_are_right(void **state) {
    static const int64_t cols[] = {127,  255,  256,  257,  384,   511,   513,
                                   768,  1023, 1024, 1025, 1600,  2047,  3584,
                                   4096, 5120, 8192, 8200, 12288, 12345, 16384};
    (void)state;
    for (size_t i = 0; i < COUNT_OF(cols); i++) {
        const nj_desc desc = make_matrix(dtypes[i % COUNT_OF(dtypes)], 5, cols[i]);
        const nj_desc half = make_matrix(i % 2 ? NJ_F16 : NJ_BF16, 6, cols[i]);
        check_packed(&desc, i);
        check_packed(&half, i);
    }
}

static void very_long_rows_are_right(void **state) {
    static const int64_t cols[] = {65536, 65537, 262144};
    (void)state;
    for (size_t i = 0; i < COUNT_OF(cols); i++) {
        const nj_desc single = make_matrix(NJ_F32, 3, cols[i]);
        const nj_desc half = make_matrix(i % 2 ? NJ_F16 : NJ_BF16, 2, cols[i]);
        check_packed(&single, i);
        check_packed(&half, i);
    }
}

static void rows_just_past_65536_are_right(void **state) {
    static const int64_t rows[] = {65535, 65536, 65537};
    (void)state;
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        const nj_desc desc = make_matrix(dtypes[i], rows[i], 5 + (int64_t)i);
        check_packed(&desc, i);
    }
}

/* Channels first with more rows than a grid's second dimension holds. */
/* Few and many channels; pixels that fill their last tile, that do not, and an odd number of them. */
static void channels_first_of_any_size_is_right(void **state) {
    static const int64_t shapes[][3] = {{2, 1, 8},    {1, 7, 33},   {2, 96, 50}, {3, 256, 64},
                                        {2, 300, 98}, {2, 768, 36}, {1, 512, 49}, {1, 1500, 24}};
    (void)state;
    for (size_t d = 0; d < COUNT_OF(dtypes); d++) {
        for (size_t i = 0; i < COUNT_OF(shapes); i++) {
            const nj_desc desc = make_desc(dtypes[d], 3, shapes[i], 2u);
            check_packed(&desc, i);
        }
    }
}

static void many_pixels_normalized_over_channels_are_right(void **state) {
    static const int64_t shape[4] = {2, 3, 181, 182};
    const nj_desc desc = make_desc(NJ_F16, 4, shape, 2u);
    (void)state;
    check_packed(&desc, 5);
}

/* Overwritten: zero. Accumulated: left as they are. */
static void no_rows_give_zero_parameter_gradients(void **state) {
    static const uint32_t accumulate[] = {0, NJ_GRAD_DGAMMA, NJ_GRAD_DGAMMA | NJ_GRAD_DBETA};
    (void)state;
    for (size_t d = 0; d < COUNT_OF(dtypes); d++) {
        for (size_t i = 0; i < COUNT_OF(accumulate); i++) {
            nj_desc desc = make_matrix(dtypes[d], 0, 33);
            desc.accumulate = accumulate[i];
            check_packed(&desc, i);
        }
    }
}

static void no_columns_give_nan_statistics(void **state) {
    static const int64_t shape[3] = {4, 0, 3};
    (void)state;
    for (size_t d = 0; d < COUNT_OF(dtypes); d++) {
        const nj_desc desc = make_desc(dtypes[d], 3, shape, 2u);
        problem p;
        open_problem(&p, &desc);
        fill_problem(&p, d);
        check_forward(&p); /* which wants NaN: the oracle divides 0 by 0 */
        check_backward(&p);
        close_problem(&p);
    }
}

static void one_column_gives_dx_0(void **state) {
    (void)state;
    for (size_t d = 0; d < COUNT_OF(dtypes); d++) {
        const nj_desc desc = make_matrix(dtypes[d], 300, 1);
        problem p;
        open_problem(&p, &desc);
        check_both(&p, d);
        for (int64_t r = 0; r < p.rows; r++) assert_true(get(&p, DX, r, 0) == 0);
        close_problem(&p);
    }
}

int main(void) {
    static const struct CMUnitTest plain[] = {
        cmocka_unit_test(axes_of_extent_1_ignore_their_stride),
        cmocka_unit_test(wide_rows_may_be_padded_and_misaligned),
        cmocka_unit_test(column_halves_of_one_buffer_are_neighbours),
        cmocka_unit_test(large_outputs_may_replace_their_inputs),
        cmocka_unit_test(every_set_of_axes_of_rank_4_is_right),
        cmocka_unit_test(ranks_1_to_8_are_right),
        cmocka_unit_test(eight_axes_that_cannot_merge_are_right),
        cmocka_unit_test(every_combination_of_types_is_right),
        cmocka_unit_test(gamma_and_beta_are_independent),
        cmocka_unit_test(every_mask_of_gradients_and_accumulation_is_right),
        cmocka_unit_test(accumulation_follows_strides),
        cmocka_unit_test(statistics_that_are_not_wanted_are_not_written),
        cmocka_unit_test(cols_1_to_70_are_right),
        cmocka_unit_test(cols_off_and_on_powers_of_two_are_right),
        cmocka_unit_test(very_long_rows_are_right),
        cmocka_unit_test(rows_just_past_65536_are_right),
        cmocka_unit_test(channels_first_of_any_size_is_right),
        cmocka_unit_test(many_pixels_normalized_over_channels_are_right),
        cmocka_unit_test(no_rows_give_zero_parameter_gradients),
        cmocka_unit_test(no_columns_give_nan_statistics),
        cmocka_unit_test(one_column_gives_dx_0),
    };
    struct CMUnitTest tests[COUNT_OF(layouts) + COUNT_OF(replacements) + COUNT_OF(plain)];
    size_t n = 0;
    memset(tests, 0, sizeof tests);
    for (size_t i = 0; i < COUNT_OF(layouts); i++, n++) {
        tests[n].name = layouts[i].name;
        tests[n].test_func = a_layout_gives_what_its_packed_copy_gives;
        tests[n].initial_state = (void *)(uintptr_t)&layouts[i];
    }
    for (size_t i = 0; i < COUNT_OF(replacements); i++, n++) {
        tests[n].name = replacements[i].name;
        tests[n].test_func = an_output_may_replace_an_input;
        tests[n].initial_state = (void *)(uintptr_t)&replacements[i];
    }
    memcpy(tests + n, plain, sizeof plain);
    return run_on_every_backend(tests, COUNT_OF(tests));
}
