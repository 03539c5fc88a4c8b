/* Backward against forward: finite differences, identities of the formulas, powers of two, and one
   backend against the other. None of this needs the oracle's backward. */
#include "harness.h"

/* ---- finite differences --------------------------------------------------------------------- */

/* The forward's loss: sum of y*dy, so that dy is its gradient with respect to y. magnitude: of the
   terms, which scales its rounding. */
static long double loss_of(problem *p, long double *magnitude) {
    long double loss = 0, scale = 0;
    upload(p);
    launch(p);
    download(p);
    for (int64_t r = 0; r < p->rows; r++) {
        for (int64_t c = 0; c < p->cols; c++) {
            const long double term = (long double)get(p, Y, r, c) * get(p, DY, r, c);
            loss += term;
            scale += fabsl(term);
        }
    }
    *magnitude = scale;
    return loss;
}

/* Compares the gradient in operand `gradient` with central differences of the loss along `input`.
   Of the two errors, rounding: y carries some 8 roundings of 2^-53 of its terms (growth of short
   sums included: 8 + cols), divided by the step. Curvature: step^2/6 times the third derivative,
   which for y is gamma*rstd^3 times a polynomial of xhat of degree 4 with coefficients below 18;
   beta and gamma enter linearly and have none. */
static void compare_with_differences(problem *p, int input, int gradient, const double *got,
                                     double step, double third_derivative) {
    for (int64_t r = 0; r < rows_of(p, input); r++) {
        for (int64_t c = 0; c < cols_of(p, input); c++) {
            const double at = get(p, input, r, c);
            long double above, below, magnitude;
            double slope, bound;
            put(p, input, r, c, at + step);
            above = loss_of(p, &magnitude);
            put(p, input, r, c, at - step);
            below = loss_of(p, &magnitude);
            put(p, input, r, c, at);
            slope = (double)((above - below) / (2 * (long double)step));
            bound = (double)((8 + p->cols) * 0x1p-53L * magnitude) / step +
                    step * step / 6 * third_derivative;
            if (fabs(slope - got[r * cols_of(p, input) + c]) <= bound) continue;
            fail_msg("%s[row %lld, col %lld] = %.12g, the loss has slope %.12g +- %.3g",
                     operand_name[gradient], (long long)r, (long long)c,
                     got[r * cols_of(p, input) + c], slope, bound);
        }
    }
}

static double third_derivative_of(const problem *p) {
    double rstd = 0, xhat = 0, weight = 0;
    for (int64_t r = 0; r < p->rows; r++) {
        double sum = 0;
        if (get(p, RSTD, r, 0) > rstd) rstd = get(p, RSTD, r, 0);
        for (int64_t c = 0; c < p->cols; c++) {
            const double here = fabs((get(p, X, r, c) - get(p, MEAN, r, 0)) * get(p, RSTD, r, 0));
            if (here > xhat) xhat = here;
            sum += fabs(get(p, DY, r, c) * (p->op[GAMMA].absent ? 1 : get(p, GAMMA, 0, c)));
        }
        if (sum > weight) weight = sum;
    }
    return 18 * pow(1 + xhat, 4) * pow(rstd, 3) * weight;
}

/* Everything in f64. The gradients come from a chain of the library's own forward and backward. */
static void check_differences(const nj_desc *desc, uint64_t seed) {
    const double step = 0x1p-16; /* near the cube root of 2^-53, where the two errors meet */
    problem p;
    double *dx, *dgamma, *dbeta, third;
    open_problem(&p, desc);
    fill_problem(&p, seed);
    run_once(&p, NJ_OP_LAYER_NORM_FORWARD);
    run_once(&p, NJ_OP_LAYER_NORM_BACKWARD);
    dx = gather(&p, DX);
    dgamma = gather(&p, DGAMMA);
    dbeta = gather(&p, DBETA);
    third = third_derivative_of(&p);
    select_plan(&p, NJ_OP_LAYER_NORM_FORWARD);
    compare_with_differences(&p, X, DX, dx, step, third);
    if (dgamma) compare_with_differences(&p, GAMMA, DGAMMA, dgamma, 1, 0);
    if (dbeta) compare_with_differences(&p, BETA, DBETA, dbeta, 1, 0);
    free(dx);
    free(dgamma);
    free(dbeta);
    close_problem(&p);
}

static void gradients_are_the_slopes_of_the_loss(void **state) {
    static const int64_t shape[3] = {3, 4, 5};
    static const uint32_t axes[] = {4u, 6u, 2u, 5u, 7u};
    (void)state;
    for (size_t a = 0; a < COUNT_OF(axes); a++) {
        const nj_desc desc = make_desc(NJ_F64, 3, shape, axes[a]);
        check_differences(&desc, a);
    }
}

static void gradients_without_gamma_or_beta_are_slopes(void **state) {
    (void)state;
    for (int has = 0; has < 3; has++) {
        nj_desc desc = make_matrix(NJ_F64, 3, 9);
        desc.has_gamma = has & 1;
        desc.has_beta = has >> 1;
        check_differences(&desc, (uint64_t)has);
    }
}

/* eps of the variance's size: its part in the gradient is no rounding matter. */
static void a_large_eps_takes_part_in_the_gradient(void **state) {
    nj_desc desc = make_matrix(NJ_F64, 4, 6);
    (void)state;
    desc.eps = 0.5;
    check_differences(&desc, 3);
    desc.eps = 0;
    check_differences(&desc, 4);
}

/* ---- identities ----------------------------------------------------------------------------- */

/* A row's dx adds up to 0, and along xhat to what eps leaves: cols*mean(g*xhat)*rstd*(eps*rstd^2).
   Each of the cols terms is off by some (20 + cols) roundings of rstd*(|g| + |xhat*g*xhat|). */
static void dx_has_no_part_along_1_and_only_eps_along_xhat(void **state) {
    static const int64_t cols[] = {2, 7, 64, 1000};
    (void)state;
    for (size_t i = 0; i < COUNT_OF(cols); i++) {
        nj_desc desc = make_matrix(NJ_F64, 6, cols[i]);
        problem p;
        desc.eps = 0.25;
        open_problem(&p, &desc);
        fill_problem(&p, i);
        run_once(&p, NJ_OP_LAYER_NORM_FORWARD);
        run_once(&p, NJ_OP_LAYER_NORM_BACKWARD);
        for (int64_t r = 0; r < p.rows; r++) {
            const double mean = get(&p, MEAN, r, 0), rstd = get(&p, RSTD, r, 0), n = (double)p.cols;
            long double sum = 0, along = 0, gx = 0, g_scale = 0, x_scale = 0, gx_scale = 0;
            double unit, eps_part;
            for (int64_t c = 0; c < p.cols; c++) {
                const long double xhat = ((long double)get(&p, X, r, c) - mean) * rstd;
                const long double g = (long double)get(&p, DY, r, c) * get(&p, GAMMA, 0, c);
                sum += get(&p, DX, r, c);
                along += get(&p, DX, r, c) * xhat;
                gx += g * xhat;
                gx_scale += fabsl(g * xhat);
                g_scale += fabsl(g);
                if (fabsl(xhat) > x_scale) x_scale = fabsl(xhat);
            }
            unit = 0x1p-53 * (20 + n) * rstd * (double)(g_scale + x_scale * gx_scale);
            eps_part = (double)gx * rstd * (desc.eps * rstd * rstd);
            if (!(fabsl(sum) <= unit))
                fail_msg("row %d: dx sums to %.3Lg +- %.3g", (int)r, sum, unit);
            if (!(fabsl(along - eps_part) <= unit * (1 + (double)x_scale))) {
                fail_msg("row %d: dx along xhat is %.12Lg, eps says %.12g", (int)r, along,
                         eps_part);
            }
        }
        close_problem(&p);
    }
}

static void dbeta_is_the_sum_of_dy(void **state) {
    static const int64_t shape[3] = {31, 6, 17};
    static const uint32_t axes[] = {4u, 2u, 6u};
    (void)state;
    for (size_t a = 0; a < COUNT_OF(axes); a++) {
        const nj_desc desc = make_desc(NJ_F64, 3, shape, axes[a]);
        problem p;
        open_problem(&p, &desc);
        fill_problem(&p, a);
        set_statistics(&p);
        run_once(&p, NJ_OP_LAYER_NORM_BACKWARD);
        for (int64_t c = 0; c < p.cols; c++) {
            long double sum = 0, scale = 0;
            for (int64_t r = 0; r < p.rows; r++) {
                sum += get(&p, DY, r, c);
                scale += fabsl((long double)get(&p, DY, r, c));
            }
            assert_true(fabsl(get(&p, DBETA, 0, c) - sum) <= p.rows * 0x1p-53L * scale);
        }
        close_problem(&p);
    }
}

/* Multiplies an operand by a power of two: exact, so every rounding of the run stays as it was. */
static void scale_operand(problem *p, int i, double factor) {
    for (int64_t r = 0; r < rows_of(p, i); r++) {
        for (int64_t c = 0; c < cols_of(p, i); c++) put(p, i, r, c, get(p, i, r, c) * factor);
    }
}

static void assert_scaled(const problem *p, int i, const double *before, double factor) {
    for (int64_t r = 0; r < rows_of(p, i); r++) {
        for (int64_t c = 0; c < cols_of(p, i); c++) {
            const double want = before[r * cols_of(p, i) + c] * factor;
            if (get(p, i, r, c) == want) continue;
            fail_msg("%s[row %lld, col %lld] = %.17g, not exactly %.17g", operand_name[i],
                     (long long)r, (long long)c, get(p, i, r, c), want);
        }
    }
}

typedef struct scaling {
    const char *name;
    int operand;
    double factor, eps_factor;
    double y, dx, dgamma, dbeta, rstd; /* what becomes of the results */
} scaling;

static const scaling scalings[] = {
    {"x and the root of eps times 4 leave y and divide dx", X, 4, 16, 1, 0.25, 1, 1, 0.25},
    {"dy times 2 doubles every gradient", DY, 2, 1, 1, 2, 2, 2, 1},
    {"gamma times 8 multiplies y and dx", GAMMA, 8, 1, 8, 8, 1, 1, 1},
};

/* beta is absent, so that y scales with gamma. */
static void powers_of_two_pass_through_exactly(void **state) {
    static const nj_dtype dtypes[] = {NJ_F32, NJ_BF16, NJ_F64};
    static const int64_t shapes[][2] = {{9, 48}, {5, 1000}, {3, 4100}};
    const scaling *row = (const scaling *)*state;
    for (size_t k = 0; k < COUNT_OF(dtypes) * COUNT_OF(shapes); k++) {
        const int64_t *shape = shapes[k / COUNT_OF(dtypes)];
        nj_desc desc = make_matrix(dtypes[k % COUNT_OF(dtypes)], shape[0], shape[1]);
        const double factor[OPERANDS] = {
            [RSTD] = row->rstd, [Y] = row->y, [DX] = row->dx, [DGAMMA] = row->dgamma};
        double *before[OPERANDS] = {NULL};
        problem p;
        desc.has_beta = 0;
        open_problem(&p, &desc);
        fill_problem(&p, k);
        run_once(&p, NJ_OP_LAYER_NORM_FORWARD);
        run_once(&p, NJ_OP_LAYER_NORM_BACKWARD);
        for (int i = 0; i < OPERANDS; i++) before[i] = factor[i] != 0 ? gather(&p, i) : NULL;
        scale_operand(&p, row->operand, row->factor);
        p.desc.eps *= row->eps_factor;
        run_once(&p, NJ_OP_LAYER_NORM_FORWARD);
        run_once(&p, NJ_OP_LAYER_NORM_BACKWARD);
        for (int i = 0; i < OPERANDS; i++) {
            if (before[i]) assert_scaled(&p, i, before[i], factor[i]);
            free(before[i]);
        }
        close_problem(&p);
    }
}

/* Integers, a power of two of them: sums and means are exact, so a shift changes no bit of y. */
static void a_shift_of_x_changes_the_mean_alone(void **state) {
    static const double shifts[] = {64, -4096};
    static const int64_t cols[] = {32, 1024};
    (void)state;
    for (size_t i = 0; i < COUNT_OF(cols); i++) {
        const nj_desc desc = make_matrix(NJ_F32, 4, cols[i]);
        problem p;
        double *y, *mean;
        open_problem(&p, &desc);
        fill_problem(&p, i);
        for (int64_t r = 0; r < 4; r++) {
            for (int64_t c = 0; c < cols[i]; c++) put(&p, X, r, c, nearbyint(8 * get(&p, X, r, c)));
        }
        run_once(&p, NJ_OP_LAYER_NORM_FORWARD);
        y = gather(&p, Y);
        mean = gather(&p, MEAN);
        for (int64_t r = 0; r < 4; r++) {
            for (int64_t c = 0; c < cols[i]; c++) put(&p, X, r, c, get(&p, X, r, c) + shifts[i]);
        }
        run_once(&p, NJ_OP_LAYER_NORM_FORWARD);
        assert_scaled(&p, Y, y, 1);
        for (int64_t r = 0; r < 4; r++) assert_true(get(&p, MEAN, r, 0) == mean[r] + shifts[i]);
        free(y);
        free(mean);
        close_problem(&p);
    }
}

/* ---- backends ------------------------------------------------------------------------------- */

/* Each may be off by its bound: together twice that. */
static void host_and_cuda_agree(void **state) {
    static const nj_dtype dtypes[] = {NJ_F16, NJ_BF16, NJ_F32, NJ_F64};
    static const int outputs[] = {MEAN, RSTD, Y, DX, DGAMMA, DBETA};
    nj_ctx *host = NULL;
    nj_ctx_desc on_host = {0};
    (void)state;
    need_gpu();
    on_host.backend = NJ_BACKEND_HOST;
    require_ok(nj_ctx_create(&host, &on_host));
    for (size_t d = 0; d < COUNT_OF(dtypes); d++) {
        const nj_desc desc = make_matrix(dtypes[d], 300, 1000);
        problem p;
        expectation forward, backward;
        double *on_gpu[OPERANDS] = {NULL};
        backend device;
        open_problem(&p, &desc);
        fill_problem(&p, d);
        set_statistics(&p);
        expect_forward(&p, &forward);
        expect_backward(&p, NULL, NULL, &backward);
        run_once(&p, NJ_OP_LAYER_NORM_BACKWARD);
        run_once(&p, NJ_OP_LAYER_NORM_FORWARD);
        for (size_t k = 0; k < COUNT_OF(outputs); k++) on_gpu[outputs[k]] = gather(&p, outputs[k]);
        device = bed;
        bed.ctx = host;
        bed.on_gpu = 0;
        set_statistics(&p);
        run_once(&p, NJ_OP_LAYER_NORM_BACKWARD);
        run_once(&p, NJ_OP_LAYER_NORM_FORWARD);
        bed = device;
        for (size_t k = 0; k < COUNT_OF(outputs); k++) {
            const int i = outputs[k];
            const estimate *bounds = forward.of[i] ? forward.of[i] : backward.of[i];
            for (int64_t r = 0; r < rows_of(&p, i); r++) {
                for (int64_t c = 0; c < cols_of(&p, i); c++) {
                    const int64_t at = r * cols_of(&p, i) + c;
                    const double bound = 2 * bound_of(&bounds[at], p.op[i].dtype);
                    assert_true(fabs(get(&p, i, r, c) - on_gpu[i][at]) <= bound);
                }
            }
            free(on_gpu[i]);
        }
        free_expectation(&forward);
        free_expectation(&backward);
        close_problem(&p);
    }
    nj_ctx_destroy(host);
}

int main(void) {
    static const struct CMUnitTest plain[] = {
        cmocka_unit_test(gradients_are_the_slopes_of_the_loss),
        cmocka_unit_test(gradients_without_gamma_or_beta_are_slopes),
        cmocka_unit_test(a_large_eps_takes_part_in_the_gradient),
        cmocka_unit_test(dx_has_no_part_along_1_and_only_eps_along_xhat),
        cmocka_unit_test(dbeta_is_the_sum_of_dy),
        cmocka_unit_test(a_shift_of_x_changes_the_mean_alone),
        cmocka_unit_test(host_and_cuda_agree),
    };
    struct CMUnitTest tests[COUNT_OF(scalings) + COUNT_OF(plain)];
    memset(tests, 0, sizeof tests);
    for (size_t i = 0; i < COUNT_OF(scalings); i++) {
        tests[i].name = scalings[i].name;
        tests[i].test_func = powers_of_two_pass_through_exactly;
        tests[i].initial_state = (void *)(uintptr_t)&scalings[i];
    }
    memcpy(tests + COUNT_OF(scalings), plain, sizeof plain);
    return run_on_every_backend(tests, COUNT_OF(tests));
}
