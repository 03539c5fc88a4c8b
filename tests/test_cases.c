/* Inputs that are known to break implementations of LayerNorm: shapes, strides, sizes, numbers,
   repetition. Sizes that only a GPU's memory and speed bear are small on the host. */
#include "harness.h"

static void put_row(problem *p, int i, int64_t row, const double *values) {
    for (int64_t c = 0; c < cols_of(p, i); c++) put(p, i, row, c, values[c]);
}

static void put_all(problem *p, int i, double value) {
    for (int64_t r = 0; r < rows_of(p, i); r++) {
        for (int64_t c = 0; c < cols_of(p, i); c++) put(p, i, r, c, value);
    }
}

/* relative: what the digits that the value was written with are worth, or what the case's condition
   leaves of them. */
static void assert_is(double got, double want, double relative) {
    if (!(fabs(got - want) <= relative * fabs(want))) fail_msg("%.9g, expected %.9g", got, want);
}

/* Backward with the oracle's statistics, and nothing else. */
static void check_only_backward(const nj_desc *desc, uint64_t seed) {
    problem p;
    open_problem(&p, desc);
    fill_problem(&p, seed);
    set_statistics(&p);
    check_backward(&p);
    close_problem(&p);
}

/* ---- gradients and shapes ------------------------------------------------------------------- */

static void parameter_gradients_of_two_axes_have_their_shape_over_many_rows(void **state) {
    static const int64_t shapes[][3] = {{100000, 8, 16}, {65537, 6, 129}};
    (void)state;
    need_backend();
    for (size_t i = 0; i < COUNT_OF(shapes); i++) {
        nj_desc desc = make_desc(NJ_F32, 3, shapes[i], 6u);
        if (!bed.on_gpu) desc.shape[0] /= 37;
        check_only_backward(&desc, i);
    }
}

static void dbeta_without_gamma_is_the_sum_of_dy(void **state) {
    static const int64_t shapes[][3] = {{70000, 2, 3}, {517, 6, 129}};
    (void)state;
    for (size_t i = 0; i < COUNT_OF(shapes); i++) {
        nj_desc desc = make_desc(NJ_F32, 3, shapes[i], 6u);
        desc.has_gamma = 0;
        check_only_backward(&desc, i);
    }
}

static void leading_axes_are_all_rows(void **state) {
    static const int64_t shape[3] = {2, 3, 8};
    const nj_desc desc = make_desc(NJ_F32, 3, shape, 4u);
    int32_t rank;
    int64_t stats[NJ_MAX_RANK];
    (void)state;
    need_backend();
    require_ok(nj_desc_stat_shape(&desc, &rank, stats));
    assert_int_equal(rank, 3);
    assert_true(stats[0] == 2 && stats[1] == 3 && stats[2] == 1);
    check_packed(&desc, 1);
}

static void every_row_of_a_tall_matrix_counts(void **state) {
    static const int64_t shapes[][2] = {{2048, 2}, {8096, 32}, {1025, 32}};
    (void)state;
    for (size_t i = 0; i < COUNT_OF(shapes); i++) {
        const nj_desc single = make_matrix(NJ_F32, shapes[i][0], shapes[i][1]);
        const nj_desc half = make_matrix(NJ_F16, shapes[i][0], shapes[i][1]);
        check_packed(&single, i);
        check_packed(&half, i);
    }
}

/* gamma = 1, 2, 3, 4 and dy = 4, 3, 2, 1 at x = 1, 2, 3, 4, eps 0: by hand, g = 4, 6, 6, 4 has mean
   5 and no part along xhat = (-3, -1, 1, 3)/sqrt(5), so dx = (2/sqrt(5))*(-1, 1, 1, -1). */
static void gamma_weighs_dy_before_the_means_are_taken(void **state) {
    static const double x[4] = {1, 2, 3, 4}, gamma[4] = {1, 2, 3, 4}, dy[4] = {4, 3, 2, 1};
    static const double sign[4] = {-1, 1, 1, -1};
    nj_desc desc = make_matrix(NJ_F32, 1, 4);
    problem p;
    (void)state;
    desc.eps = 0;
    open_problem(&p, &desc);
    fill_problem(&p, 0);
    put_row(&p, X, 0, x);
    put_row(&p, GAMMA, 0, gamma);
    put_row(&p, DY, 0, dy);
    check_forward(&p);
    check_backward(&p);
    /* Some ten roundings in f32 of numbers not above 6*s. */
    for (int c = 0; c < 4; c++) assert_is(get(&p, DX, 0, c), sign[c] * 2 / sqrt(5.0), 60 * 0x1p-24);
    close_problem(&p);
}

static void a_residual_gradient_is_added_to(void **state) {
    (void)state;
    for (int half = 0; half < 2; half++) {
        nj_desc desc = make_matrix(half ? NJ_BF16 : NJ_F32, 37, 1024);
        desc.accumulate = NJ_GRAD_DX;
        check_packed(&desc, (uint64_t)half);
    }
}

/* check_backward compares every byte that is no output with what it was. */
static void dy_is_left_as_it_was(void **state) {
    const nj_desc desc = make_matrix(NJ_BF16, 129, 768);
    problem p;
    unsigned char *before;
    (void)state;
    open_problem(&p, &desc);
    fill_problem(&p, 3);
    set_statistics(&p);
    before = copy_image(&p);
    check_backward(&p);
    check_backward(&p);
    assert_memory_equal(element(&p, before, DY, 0, 0), element(&p, p.image, DY, 0, 0),
                        129 * 768 * 2);
    free(before);
    close_problem(&p);
}

static void gamma_0_gives_dx_exactly_0(void **state) {
    static const nj_dtype dtypes[] = {NJ_F16, NJ_BF16, NJ_F32, NJ_F64};
    (void)state;
    for (size_t d = 0; d < COUNT_OF(dtypes); d++) {
        const nj_desc desc = make_matrix(dtypes[d], 5, 100);
        problem p;
        open_problem(&p, &desc);
        fill_problem(&p, d);
        put_all(&p, GAMMA, 0);
        for (int64_t r = 0; r < 5; r++) {
            for (int64_t c = 0; c < 100; c++) put(&p, DY, r, c, (double)c + 1);
        }
        set_statistics(&p);
        check_backward(&p);
        for (int64_t r = 0; r < 5; r++) {
            for (int64_t c = 0; c < 100; c++) assert_true(get(&p, DX, r, c) == 0);
        }
        close_problem(&p);
    }
}

static void every_column_of_dgamma_is_written(void **state) {
    static const int64_t rows[] = {127, 128, 129, 1000};
    (void)state;
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        nj_desc desc = make_matrix(NJ_F32, rows[i], 64);
        desc.grads = NJ_GRAD_DGAMMA;
        check_only_backward(&desc, i);
    }
}

/* ---- strides and alignment ------------------------------------------------------------------ */

static void one_element_may_stand_for_all_of_dy(void **state) {
    static const int64_t shape[3] = {2, 1024, 256};
    const nj_desc desc = make_desc(NJ_BF16, 3, shape, 4u);
    problem p;
    (void)state;
    open_problem(&p, &desc);
    memset(p.op[DY].stride, 0, sizeof p.op[DY].stride);
    p.op[DY].count = 1;
    fill_problem(&p, 1);
    set_statistics(&p);
    check_backward(&p);
    close_problem(&p);
}

static void every_second_column_may_be_taken(void **state) {
    static const int64_t shape[3] = {3, 17, 192};
    (void)state;
    for (int i = 0; i < 3; i++) {
        const nj_desc desc = make_desc(i == 2 ? NJ_F32 : NJ_F16, 3, shape, 4u);
        problem p;
        open_problem(&p, &desc);
        for (int axis = 0; axis < 3; axis++) {
            if (i != 1) p.op[X].stride[axis] *= 2;
            if (i != 0) p.op[DY].stride[axis] *= 2;
        }
        if (i != 1) p.op[X].count *= 2;
        if (i != 0) p.op[DY].count *= 2;
        check_both(&p, (uint64_t)i);
        close_problem(&p);
    }
}

static void a_transposed_x_may_be_read(void **state) {
    static const int64_t shapes[][3] = {{4, 4, 4}, {1, 300, 70}};
    static const int order[3] = {0, 2, 1};
    (void)state;
    for (size_t i = 0; i < COUNT_OF(shapes); i++) {
        const nj_desc desc = make_desc(NJ_F32, 3, shapes[i], 4u);
        problem p;
        open_problem(&p, &desc);
        view_in_order(&p.op[X], order);
        check_both(&p, i);
        close_problem(&p);
    }
}

static void bases_one_element_past_alignment_work(void **state) {
    static const int64_t cols[] = {3584, 3585};
    (void)state;
    for (size_t i = 0; i < COUNT_OF(cols); i++) {
        const nj_desc desc = make_matrix(NJ_BF16, 7, cols[i]);
        problem p;
        open_problem(&p, &desc);
        for (int o = 0; o < OPERANDS; o++) p.op[o].lead = 1;
        check_both(&p, i);
        close_problem(&p);
    }
}

static void channels_first_images_are_normalized_over_channels(void **state) {
    static const int64_t shapes[][4] = {{2, 96, 14, 14}, {3, 64, 7, 9}, {1, 3, 64, 64}};
    static const nj_dtype dtypes[] = {NJ_F16, NJ_F32, NJ_BF16};
    static const int channels_last[4] = {0, 2, 3, 1};
    (void)state;
    for (size_t i = 0; i < COUNT_OF(shapes); i++) {
        const nj_desc desc = make_desc(dtypes[i], 4, shapes[i], 2u);
        problem p;
        check_packed(&desc, i);
        open_problem(&p, &desc);
        view_in_order(&p.op[X], channels_last);
        view_in_order(&p.op[Y], channels_last);
        check_both(&p, i);
        close_problem(&p);
    }
}

/* ---- sizes ---------------------------------------------------------------------------------- */

/* Memory of the backend, with a guard behind it. */
static unsigned char *take(size_t bytes) {
    unsigned char *room;
    if (bed.on_gpu) {
        room = (unsigned char *)gpu_alloc(&bed.gpu, bytes + GUARD);
        require_gpu_ok(room && gpu_fill(&bed.gpu, room, POISON, bytes + GUARD));
    } else {
        room = (unsigned char *)malloc(bytes + GUARD);
        assert_non_null(room);
        memset(room, POISON, bytes + GUARD);
    }
    return room;
}

static void copy_in(unsigned char *to, const void *from, size_t bytes) {
    if (bed.on_gpu) {
        require_gpu_ok(gpu_upload(&bed.gpu, to, from, bytes));
    } else {
        memcpy(to, from, bytes);
    }
}

static void copy_out(void *to, const unsigned char *from, size_t bytes) {
    if (bed.on_gpu) {
        require_gpu_ok(gpu_download(&bed.gpu, to, from, bytes));
    } else {
        memcpy(to, from, bytes);
    }
}

static void give(unsigned char *room, size_t bytes) {
    unsigned char guard[GUARD];
    copy_out(guard, room + bytes, GUARD);
    for (int i = 0; i < GUARD; i++) {
        if (guard[i] != POISON) fail_msg("byte %d behind a buffer was written", i);
    }
    if (bed.on_gpu) {
        gpu_free(&bed.gpu, room);
    } else {
        free(room);
    }
}

/* A matrix of many rows whose rows repeat with a period: only the period is made, judged and kept
   here, and any row of the results can be checked by itself. */
typedef struct tall {
    problem period;
    int64_t rows, cols;
    expectation forward, backward, rest; /* rest: of the last rows % period rows */
    nj_args args;
} tall;

static int64_t period_rows(const tall *t) {
    return t->period.rows;
}

/* Statistics as a backward reads them: off by what the forward may be off, and rounded. */
static void allow_for_saving(const tall *t, expectation *forward) {
    static const int stats[2] = {MEAN, RSTD};
    for (int s = 0; s < 2; s++) {
        for (int64_t r = 0; r < period_rows(t); r++) {
            estimate *e = &forward->of[stats[s]][r];
            e->error = bound_of(e, t->period.op[stats[s]].dtype);
        }
    }
}

static void open_tall(tall *t, nj_dtype dtype, int64_t rows, int64_t cols, int64_t period) {
    nj_desc desc = make_matrix(dtype, period, cols);
    memset(t, 0, sizeof *t);
    t->rows = rows;
    t->cols = cols;
    open_problem(&t->period, &desc);
    fill_problem(&t->period, 11);
    expect_forward(&t->period, &t->forward);
    {
        expectation saved;
        expect_forward(&t->period, &saved);
        allow_for_saving(t, &saved);
        expect_backward(&t->period, saved.of[MEAN], saved.of[RSTD], &t->backward);
        t->period.rows = rows % period;
        expect_backward(&t->period, saved.of[MEAN], saved.of[RSTD], &t->rest);
        t->period.rows = period;
        free_expectation(&saved);
    }
}

static void close_tall(tall *t) {
    free_expectation(&t->forward);
    free_expectation(&t->backward);
    free_expectation(&t->rest);
    close_problem(&t->period);
}

/* Fills `to` with the period's rows over and over. */
static void copy_rows_in(const tall *t, unsigned char *to, int i) {
    problem p = t->period;
    const int64_t row = t->cols * format_of(p.op[i].dtype)->size, total = t->rows * row;
    const int64_t period = period_rows(t) * row;
    const int64_t chunk = ((64 << 20) / period + 1) * period;
    unsigned char *staging = (unsigned char *)malloc((size_t)chunk);
    for (int64_t at = 0; at < chunk; at += period) {
        memcpy(staging + at, element(&p, p.image, i, 0, 0), (size_t)period);
    }
    for (int64_t at = 0; at < total; at += chunk) {
        copy_in(to + at, staging, (size_t)(total - at < chunk ? total - at : chunk));
    }
    free(staging);
}

static void check_values(const tall *t, int i, int64_t row, const unsigned char *got, int64_t count,
                         const estimate *want) {
    const nj_dtype type = t->period.op[i].dtype;
    const int size = format_of(type)->size;
    for (int64_t c = 0; c < count; c++) {
        const unsigned char *at = got + c * size;
        if (!is_poison(at, type) && is_close(load(type, at), &want[c], type)) continue;
        fail_msg("%s[row %lld of %lld, col %lld] = %.9g%s, expected %.9g +- %.3g", operand_name[i],
                 (long long)row, (long long)t->rows, (long long)c, load(type, at),
                 is_poison(at, type) ? " (never written)" : "", want[c].value,
                 bound_of(&want[c], type));
    }
}

/* One row of an output that lies packed at from. */
static void check_row(const tall *t, int i, const unsigned char *from, int64_t row,
                      const estimate *expected) {
    const int64_t cols = cols_of(&t->period, i);
    const size_t bytes = (size_t)(cols * format_of(t->period.op[i].dtype)->size);
    unsigned char *got = (unsigned char *)malloc(bytes);
    copy_out(got, from + (size_t)row * bytes, bytes);
    check_values(t, i, row, got, cols, expected + row % period_rows(t) * cols);
    free(got);
}

/* The whole periods count as often as there are; the sum has the roundings of all rows. */
static void check_parameter_gradient(const tall *t, int i, const unsigned char *from) {
    const int64_t periods = t->rows / period_rows(t);
    const double growth = (double)(oracle_growth(t->rows) / oracle_growth(period_rows(t)));
    const size_t bytes = (size_t)(t->cols * format_of(t->period.op[i].dtype)->size);
    unsigned char *got = (unsigned char *)malloc(bytes);
    estimate *want = (estimate *)malloc((size_t)t->cols * sizeof *want);
    for (int64_t c = 0; c < t->cols; c++) {
        const estimate *one = &t->backward.of[i][c], *rest = &t->rest.of[i][c];
        want[c].value = (double)periods * one->value + rest->value;
        want[c].error = ((double)periods * one->error + rest->error) * growth;
    }
    copy_out(got, from, bytes);
    check_values(t, i, 0, got, t->cols, want);
    free(want);
    free(got);
}

static void run_tall(nj_op op, const tall *t) {
    nj_desc desc = make_matrix(t->period.desc.dtype, t->rows, t->cols);
    nj_plan *plan = NULL;
    unsigned char *workspace;
    size_t bytes;
    desc.op = op;
    require_ok(nj_plan_select(&plan, bed.ctx, &desc, NULL));
    bytes = nj_plan_workspace_size(plan);
    workspace = take(bytes);
    require_ok(nj_plan_run(plan, &t->args, workspace, bytes, bed.gpu.stream));
    give(workspace, bytes);
    nj_plan_destroy(plan);
}

/* Rows at both ends, in the middle, and where the element index passes 2^31 and 2^32. */
static int sampled_rows(const tall *t, int64_t *out) {
    static const int64_t powers[] = {(int64_t)1 << 31, (int64_t)1 << 32};
    int n = 0;
    out[n++] = 0;
    out[n++] = t->rows / 2;
    for (size_t i = 0; i < COUNT_OF(powers); i++) {
        const int64_t row = powers[i] / t->cols;
        for (int64_t d = -1; d <= 1; d++) {
            if (row + d > 0 && row + d < t->rows) out[n++] = row + d;
        }
    }
    for (int64_t d = 1; d <= 20; d++) {
        if (t->rows - d > 0) out[n++] = t->rows - d;
    }
    return n;
}

static int have_memory_for(size_t bytes) {
    size_t available = 0, total = 0;
    if (!bed.on_gpu) return 1;
    require_gpu_ok(gpu_memory(&bed.gpu, &available, &total));
    return bytes < available;
}

static void check_tall(nj_dtype dtype, int64_t rows, int64_t cols, int64_t period) {
    const size_t size = (size_t)format_of(dtype)->size;
    const size_t full = (size_t)(rows * cols) * size, stat = (size_t)rows * sizeof(float);
    const size_t param = (size_t)cols * size;
    const int64_t shape[2] = {rows, cols}, stat_shape[2] = {rows, 1};
    tall t;
    unsigned char *of[OPERANDS];
    int64_t sample[32];
    int samples;
    if (!have_memory_for(4 * full + 2 * stat + ((size_t)1 << 30))) {
        print_message("skipped: too little free memory for %lld x %lld\n", (long long)rows,
                      (long long)cols);
        skip();
    }
    open_tall(&t, dtype, rows, cols, period);
    for (int i = 0; i < OPERANDS; i++) {
        of[i] = take(BIT(i) & FULL_OPERANDS ? full : BIT(i) & STAT_OPERANDS ? stat : param);
    }
    copy_rows_in(&t, of[X], X);
    copy_rows_in(&t, of[DY], DY);
    copy_in(of[GAMMA], element(&t.period, t.period.image, GAMMA, 0, 0), param);
    copy_in(of[BETA], element(&t.period, t.period.image, BETA, 0, 0), param);
    t.args.x = nj_packed_const(of[X], 2, shape);
    t.args.dy = nj_packed_const(of[DY], 2, shape);
    t.args.y = nj_packed(of[Y], 2, shape);
    t.args.dx = nj_packed(of[DX], 2, shape);
    t.args.mean = nj_packed(of[MEAN], 2, stat_shape);
    t.args.rstd = nj_packed(of[RSTD], 2, stat_shape);
    t.args.gamma = nj_packed_const(of[GAMMA], 1, &cols);
    t.args.beta = nj_packed_const(of[BETA], 1, &cols);
    t.args.dgamma = nj_packed(of[DGAMMA], 1, &cols);
    t.args.dbeta = nj_packed(of[DBETA], 1, &cols);
    run_tall(NJ_OP_LAYER_NORM_FORWARD, &t);
    run_tall(NJ_OP_LAYER_NORM_BACKWARD, &t);
    samples = sampled_rows(&t, sample);
    for (int s = 0; s < samples; s++) {
        check_row(&t, MEAN, of[MEAN], sample[s], t.forward.of[MEAN]);
        check_row(&t, RSTD, of[RSTD], sample[s], t.forward.of[RSTD]);
        check_row(&t, Y, of[Y], sample[s], t.forward.of[Y]);
        check_row(&t, DX, of[DX], sample[s], t.backward.of[DX]);
    }
    check_parameter_gradient(&t, DGAMMA, of[DGAMMA]);
    check_parameter_gradient(&t, DBETA, of[DBETA]);
    for (int i = 0; i < OPERANDS; i++) {
        give(of[i], BIT(i) & FULL_OPERANDS ? full : BIT(i) & STAT_OPERANDS ? stat : param);
    }
    close_tall(&t);
}

static void the_tail_of_more_than_2_to_the_31_elements_is_right(void **state) {
    (void)state;
    need_backend();
    check_tall(NJ_BF16, bed.on_gpu ? (1 << 23) + 16 : 2049, 256, 251);
}

static void the_tail_of_more_than_2_to_the_32_elements_is_right(void **state) {
    (void)state;
    need_backend();
    check_tall(NJ_F16, bed.on_gpu ? 1048641 : 131, 4096, 61);
}

static void a_million_rows_of_7168_work(void **state) {
    (void)state;
    need_backend();
    check_tall(NJ_BF16, bed.on_gpu && !bed.fallback ? 1048576 : 65, 7168, 31);
}

static void rows_65535_and_65536_are_equally_exact(void **state) {
    (void)state;
    need_backend();
    check_tall(NJ_F32, 65535, 24, 509);
    check_tall(NJ_F32, 65536, 24, 509);
    check_tall(NJ_F16, 65536, 24, 509);
}

static void common_and_odd_widths_work(void **state) {
    static const int64_t cols[] = {1, 32, 256, 1600, 8200, 16384};
    (void)state;
    for (size_t i = 0; i < COUNT_OF(cols); i++) {
        const nj_desc single = make_matrix(NJ_F32, 33, cols[i]);
        const nj_desc half = make_matrix(i % 2 ? NJ_F16 : NJ_BF16, 19, cols[i]);
        check_packed(&single, i);
        check_packed(&half, i);
    }
}

static void a_batch_of_no_tokens_gives_zero_gradients(void **state) {
    static const int64_t shape[3] = {3, 0, 2520};
    const nj_desc desc = make_desc(NJ_BF16, 3, shape, 4u);
    problem p;
    (void)state;
    open_problem(&p, &desc);
    fill_problem(&p, 1);
    check_forward(&p);
    check_backward(&p);
    for (int64_t c = 0; c < 2520; c++) {
        assert_true(get(&p, DGAMMA, 0, c) == 0);
        assert_true(get(&p, DBETA, 0, c) == 0);
    }
    close_problem(&p);
}

/* ---- numerics ------------------------------------------------------------------------------- */

/* Plain normalization of one row: no gamma, no beta, f32. */
static void open_row(problem *p, int64_t cols, const double *x, const double *dy) {
    nj_desc desc = make_matrix(NJ_F32, 1, cols);
    desc.has_gamma = desc.has_beta = 0;
    open_problem(p, &desc);
    fill_problem(p, 0);
    put_row(p, X, 0, x);
    put_row(p, DY, 0, dy);
    check_forward(p);
    check_backward(p);
}

/* Two close values: a variance of 2.5e-5 under a mean of 1.8. Rounding x to f32 alone is 2e-5 of
   their distance, hence 1e-4 of a gradient. */
static void two_close_values_have_the_gradient_that_eps_leaves(void **state) {
    static const double x[2] = {-1.83965693, -1.82964566}, both[2] = {1, 1}, first[2] = {1, 0};
    problem p;
    (void)state;
    open_row(&p, 2, x, both);
    assert_is(get(&p, Y, 0, 0), -0.8454272, 1e-4);
    assert_is(get(&p, Y, 0, 1), 0.8454272, 1e-4);
    /* Truly 0. A mean off by its own rounding and its sum's, 2^-24 each, moves both xhat by rstd =
       169 times that, and their mean, times rstd again, is what dx keeps. */
    assert_true(fabs(get(&p, DX, 0, 0)) <= 2 * 0x1p-24 * 169 * 169);
    close_problem(&p);
    open_row(&p, 2, x, first);
    assert_is(get(&p, DX, 0, 0), 24.0888, 1e-4);
    assert_is(get(&p, DX, 0, 1), -24.0888, 1e-4);
    close_problem(&p);
}

/* Sums of squares of x need 33 bits here; those of x - mean do not. */
static void integers_around_40000_keep_their_variance(void **state) {
    static const double x[4] = {40000, 40001, 40002, 40003}, dy[4] = {1, 0, 0, 0};
    static const double dx[4] = {.2683303, -.3577684, -.0894434, .1788815};
    problem p;
    (void)state;
    open_row(&p, 4, x, dy);
    assert_is(get(&p, RSTD, 0, 0), 0.8944236, 1e-6);
    for (int c = 0; c < 4; c++) assert_is(get(&p, DX, 0, c), dx[c], 2e-6);
    close_problem(&p);
}

/* The expected values are those of the rounded x. A tree over 16 values of 1000 rounds its mean
   five times by 2^-24*1000: 3e-4, a twentieth of the deviation of 5.6e-3. Sums of squares would
   have no digit right. */
static void thousandths_on_top_of_1000_keep_their_variance(void **state) {
    double x[16], dy[16] = {1};
    problem p;
    (void)state;
    for (int c = 0; c < 16; c++) x[c] = 1000 + c * 0.001;
    open_row(&p, 16, x, dy);
    assert_is(get(&p, Y, 0, 0), -1.341508, 0.06);
    assert_is(get(&p, DX, 0, 0), 147.5758, 0.06);
    close_problem(&p);
}

static void f16_zeros_with_an_eps_below_f16_stay_finite(void **state) {
    nj_desc desc = make_matrix(NJ_F16, 3, 64);
    problem p;
    (void)state;
    desc.eps = 1e-12;
    desc.has_beta = 0;
    open_problem(&p, &desc);
    fill_problem(&p, 0);
    put_all(&p, X, 0);
    check_forward(&p);
    for (int64_t r = 0; r < 3; r++) {
        assert_is(get(&p, RSTD, r, 0), 1e6, 1e-6);
        for (int64_t c = 0; c < 64; c++) assert_true(get(&p, Y, r, c) == 0);
    }
    close_problem(&p);
}

/* x is rounded to 2^-13 at 2000, so a row's variance is still 1 to about 2^-12. */
static void rows_shifted_by_2000_come_out_with_variance_1(void **state) {
    nj_desc desc = make_matrix(NJ_F32, 5, 4);
    problem p;
    (void)state;
    desc.has_gamma = desc.has_beta = 0;
    open_problem(&p, &desc);
    p.x_shift = 2000;
    fill_problem(&p, 4);
    check_forward(&p);
    for (int64_t r = 0; r < 5; r++) {
        double sum = 0, squares = 0;
        for (int64_t c = 0; c < 4; c++) {
            sum += get(&p, Y, r, c);
            squares += get(&p, Y, r, c) * get(&p, Y, r, c);
        }
        assert_is(squares / 4 - sum * sum / 16, 1, 1e-3);
    }
    close_problem(&p);
}

static void large_means_cost_what_f32_costs_and_no_more(void **state) {
    static const double shifts[] = {1e2, 1e4, 1e6};
    (void)state;
    for (size_t i = 0; i < COUNT_OF(shifts); i++) {
        const nj_desc desc = make_matrix(NJ_F32, 6, 768);
        problem p;
        open_problem(&p, &desc);
        p.x_shift = shifts[i];
        check_both(&p, i);
        close_problem(&p);
    }
}

/* A bf16 running sum of ones stops at 256. */
static void bf16_parameter_gradients_are_summed_in_f32(void **state) {
    const nj_desc desc = make_matrix(NJ_BF16, 65536, 8);
    problem p;
    (void)state;
    open_problem(&p, &desc);
    fill_problem(&p, 5);
    put_all(&p, DY, 1);
    set_statistics(&p);
    check_backward(&p);
    for (int64_t c = 0; c < 8; c++) assert_true(get(&p, DBETA, 0, c) == 65536);
    close_problem(&p);
}

static void bf16_with_f32_parameters_works(void **state) {
    nj_desc desc = make_matrix(NJ_BF16, 65, 768);
    (void)state;
    desc.param_dtype = NJ_F32;
    check_packed(&desc, 1);
}

/* A NaN and an infinity in one row each, a NaN in dy: the oracle says where they may be seen. */
static void nan_and_infinity_stay_in_their_rows(void **state) {
    static const nj_dtype dtypes[] = {NJ_F16, NJ_BF16, NJ_F32, NJ_F64};
    static const int64_t cols[] = {24, 1024};
    (void)state;
    for (size_t d = 0; d < COUNT_OF(dtypes); d++) {
        for (size_t i = 0; i < COUNT_OF(cols); i++) {
            const nj_desc desc = make_matrix(dtypes[d], 9, cols[i]);
            problem p;
            open_problem(&p, &desc);
            fill_problem(&p, d);
            put(&p, X, 2, 5, NAN);
            put(&p, X, 4, 6, -INFINITY);
            put(&p, DY, 7, 3, NAN);
            check_forward(&p);
            check_backward(&p);
            for (int64_t c = 0; c < cols[i]; c++) {
                assert_true(isnan(get(&p, Y, 2, c)) && isfinite(get(&p, Y, 3, c)));
                assert_true(isnan(get(&p, DX, 7, c)) && isfinite(get(&p, DX, 8, c)));
            }
            close_problem(&p);
        }
    }
}

/* ---- repetition and graphs ------------------------------------------------------------------ */

/* Old + new in f32 of equal parts has no rounding. */
static void accumulating_twice_gives_exactly_twice(void **state) {
    nj_desc desc = make_matrix(NJ_F32, 300, 96);
    problem p;
    double *once[OPERANDS] = {NULL};
    (void)state;
    desc.accumulate = NJ_GRAD_DX | NJ_GRAD_DGAMMA | NJ_GRAD_DBETA;
    open_problem(&p, &desc);
    fill_problem(&p, 6);
    set_statistics(&p);
    for (int i = DX; i < OPERANDS; i++) put_all(&p, i, 0);
    check_backward(&p);
    for (int i = DX; i < OPERANDS; i++) once[i] = gather(&p, i);
    check_backward(&p);
    for (int i = DX; i < OPERANDS; i++) {
        for (int64_t r = 0; r < rows_of(&p, i); r++) {
            for (int64_t c = 0; c < cols_of(&p, i); c++) {
                assert_true(get(&p, i, r, c) == 2 * once[i][r * cols_of(&p, i) + c]);
            }
        }
        free(once[i]);
    }
    close_problem(&p);
}

/* Compares what lies on the device after a replay. */
static void check_replay(problem *p, void *graph) {
    expectation e;
    unsigned char *before;
    expect_backward(p, NULL, NULL, &e);
    expect_accumulation(p, &e);
    poison_outputs(p);
    before = copy_image(p);
    upload(p);
    require_gpu_ok(gpu_graph_launch(&bed.gpu, graph));
    download(p);
    compare_image(p, before, &e);
    free(before);
    free_expectation(&e);
}

/* The first replay with the captured inputs, then with others, then once more: nothing may be left
   of a run that the next one counts on. */
static void a_captured_backward_replays_with_new_gradients(void **state) {
    static const int64_t shapes[][2] = {{2048, 1024}, {40, 64}, {70000, 16}};
    (void)state;
    need_gpu();
    for (size_t i = 0; i < COUNT_OF(shapes); i++) {
        const nj_desc desc = make_matrix(NJ_BF16, shapes[i][0], shapes[i][1]);
        problem p;
        void *graph;
        open_problem(&p, &desc);
        fill_problem(&p, i);
        set_statistics(&p);
        select_plan(&p, NJ_OP_LAYER_NORM_BACKWARD);
        require_gpu_ok(gpu_capture_begin(&bed.gpu));
        launch(&p);
        graph = gpu_capture_end(&bed.gpu);
        require_gpu_ok(graph != NULL);
        check_replay(&p, graph);
        fill_operand(&p, DY, 77);
        check_replay(&p, graph);
        check_replay(&p, graph);
        gpu_graph_free(&bed.gpu, graph);
        close_problem(&p);
    }
}

static void a_captured_forward_replays_with_new_inputs(void **state) {
    const nj_desc desc = make_matrix(NJ_F16, 300, 4096);
    problem p;
    void *graph;
    (void)state;
    need_gpu();
    open_problem(&p, &desc);
    fill_problem(&p, 1);
    select_plan(&p, NJ_OP_LAYER_NORM_FORWARD);
    require_gpu_ok(gpu_capture_begin(&bed.gpu));
    launch(&p);
    graph = gpu_capture_end(&bed.gpu);
    require_gpu_ok(graph != NULL);
    for (uint64_t seed = 2; seed < 4; seed++) {
        expectation e;
        unsigned char *before;
        fill_problem(&p, seed);
        expect_forward(&p, &e);
        before = copy_image(&p);
        upload(&p);
        require_gpu_ok(gpu_graph_launch(&bed.gpu, graph));
        download(&p);
        compare_image(&p, before, &e);
        free(before);
        free_expectation(&e);
    }
    gpu_graph_free(&bed.gpu, graph);
    close_problem(&p);
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(parameter_gradients_of_two_axes_have_their_shape_over_many_rows),
        cmocka_unit_test(dbeta_without_gamma_is_the_sum_of_dy),
        cmocka_unit_test(leading_axes_are_all_rows),
        cmocka_unit_test(every_row_of_a_tall_matrix_counts),
        cmocka_unit_test(gamma_weighs_dy_before_the_means_are_taken),
        cmocka_unit_test(a_residual_gradient_is_added_to),
        cmocka_unit_test(dy_is_left_as_it_was),
        cmocka_unit_test(gamma_0_gives_dx_exactly_0),
        cmocka_unit_test(every_column_of_dgamma_is_written),
        cmocka_unit_test(one_element_may_stand_for_all_of_dy),
        cmocka_unit_test(every_second_column_may_be_taken),
        cmocka_unit_test(a_transposed_x_may_be_read),
        cmocka_unit_test(bases_one_element_past_alignment_work),
        cmocka_unit_test(channels_first_images_are_normalized_over_channels),
        cmocka_unit_test(the_tail_of_more_than_2_to_the_31_elements_is_right),
        cmocka_unit_test(the_tail_of_more_than_2_to_the_32_elements_is_right),
        cmocka_unit_test(a_million_rows_of_7168_work),
        cmocka_unit_test(rows_65535_and_65536_are_equally_exact),
        cmocka_unit_test(common_and_odd_widths_work),
        cmocka_unit_test(a_batch_of_no_tokens_gives_zero_gradients),
        cmocka_unit_test(two_close_values_have_the_gradient_that_eps_leaves),
        cmocka_unit_test(integers_around_40000_keep_their_variance),
        cmocka_unit_test(thousandths_on_top_of_1000_keep_their_variance),
        cmocka_unit_test(f16_zeros_with_an_eps_below_f16_stay_finite),
        cmocka_unit_test(rows_shifted_by_2000_come_out_with_variance_1),
        cmocka_unit_test(large_means_cost_what_f32_costs_and_no_more),
        cmocka_unit_test(bf16_parameter_gradients_are_summed_in_f32),
        cmocka_unit_test(bf16_with_f32_parameters_works),
        cmocka_unit_test(nan_and_infinity_stay_in_their_rows),
        cmocka_unit_test(accumulating_twice_gives_exactly_twice),
        cmocka_unit_test(a_captured_backward_replays_with_new_gradients),
        cmocka_unit_test(a_captured_forward_replays_with_new_inputs),
    };
    return run_on_every_backend(tests, COUNT_OF(tests));
}
