/* Gradient accumulation: two micro-batches add their parameter gradients to the same buffers, and
   the sum is compared with the gradients of the whole batch.

     cc -Iinclude -o grad_accumulation examples/grad_accumulation.c -lm -ldl -lpthread */
#define NORMJIT_IMPLEMENTATION
#include "normjit.h"

#include <float.h>

enum { ROWS = 64, COLS = 32, PARTS = 2 };

static void check(nj_status status) {
    if (status == NJ_OK) return;
    fprintf(stderr, "%s: %s\n", nj_status_string(status), nj_last_error());
    exit(1);
}

/* NaN when either is: fmax would drop it. */
static double larger(double a, double b) {
    return a > b || isnan(a) ? a : b;
}

static void run(const nj_plan *plan, const nj_args *args) {
    const size_t size = nj_plan_workspace_size(plan);
    void *workspace = malloc(size + 1); /* + 1: malloc(0) may give NULL */
    if (!workspace) exit(1);
    check(nj_plan_run(plan, args, workspace, size, NULL));
    free(workspace);
}

int main(void) {
    const int64_t shape[2] = {ROWS, COLS}, part[2] = {ROWS / PARTS, COLS};
    const int64_t stats[2] = {ROWS, 1}, part_stats[2] = {ROWS / PARTS, 1}, params[1] = {COLS};
    static float x[ROWS * COLS], dy[ROWS * COLS], y[ROWS * COLS], dx[ROWS * COLS];
    static float whole_dx[ROWS * COLS], mean[ROWS], rstd[ROWS], gamma[COLS], beta[COLS];
    static float whole_dgamma[COLS], whole_dbeta[COLS], dgamma[COLS], dbeta[COLS];
    nj_ctx_desc ctx_desc = {0};
    nj_ctx *ctx;
    nj_desc desc = {0};
    nj_plan *forward, *backward, *accumulate;
    nj_args args = {0}, micro;
    double worst = 0, tolerance;
    int i;

    for (i = 0; i < ROWS * COLS; i++) {
        x[i] = (float)(i * 37 % 101) / 50.0f;
        dy[i] = (float)(i * 53 % 97) / 48.0f - 1.0f; /* in [-1, 1] */
    }
    for (i = 0; i < COLS; i++) gamma[i] = 1.0f + (float)i / COLS;

    ctx_desc.backend = NJ_BACKEND_HOST;
    check(nj_ctx_create(&ctx, &ctx_desc));
    desc.op = NJ_OP_LAYER_NORM_FORWARD;
    desc.rank = 2;
    desc.shape[0] = ROWS;
    desc.shape[1] = COLS;
    desc.norm_axes = 1u << 1;
    desc.dtype = NJ_F32;
    desc.has_gamma = desc.has_beta = 1;
    desc.eps = 1e-5;
    check(nj_plan_select(&forward, ctx, &desc, NULL));
    desc.op = NJ_OP_LAYER_NORM_BACKWARD;
    desc.grads = NJ_GRAD_DX | NJ_GRAD_DGAMMA | NJ_GRAD_DBETA;
    check(nj_plan_select(&backward, ctx, &desc, NULL));
    desc.shape[0] = ROWS / PARTS;
    desc.accumulate = NJ_GRAD_DGAMMA | NJ_GRAD_DBETA; /* dx is a row's own: overwritten */
    check(nj_plan_select(&accumulate, ctx, &desc, NULL));

    args.x = nj_packed_const(x, 2, shape);
    args.dy = nj_packed_const(dy, 2, shape);
    args.gamma = nj_packed_const(gamma, 1, params);
    args.beta = nj_packed_const(beta, 1, params); /* zeroes */
    args.mean = nj_packed(mean, 2, stats);
    args.rstd = nj_packed(rstd, 2, stats);
    args.y = nj_packed(y, 2, shape);
    args.dx = nj_packed(whole_dx, 2, shape);
    args.dgamma = nj_packed(whole_dgamma, 1, params);
    args.dbeta = nj_packed(whole_dbeta, 1, params);
    run(forward, &args);
    run(backward, &args);

    memset(dgamma, 0, sizeof dgamma); /* once, before the first micro-batch */
    memset(dbeta, 0, sizeof dbeta);
    micro = args;
    micro.dgamma = nj_packed(dgamma, 1, params);
    micro.dbeta = nj_packed(dbeta, 1, params);
    for (i = 0; i < PARTS; i++) {
        const int64_t row = (int64_t)i * part[0];
        micro.x = nj_packed_const(x + row * COLS, 2, part);
        micro.dy = nj_packed_const(dy + row * COLS, 2, part);
        micro.mean = nj_packed(mean + row, 2, part_stats);
        micro.rstd = nj_packed(rstd + row, 2, part_stats);
        micro.dx = nj_packed(dx + row * COLS, 2, part);
        run(accumulate, &micro);
    }

    /* The two sums differ by the order of ROWS random terms below 2 in size: partial sums up to
       2 sqrt(ROWS), and sqrt(ROWS) roundings of those in either order. */
    tolerance = 2.0 * 2.0 * ROWS * FLT_EPSILON;
    for (i = 0; i < COLS; i++) {
        double sum = 0; /* dbeta by its definition */
        int r;
        for (r = 0; r < ROWS; r++) sum += dy[r * COLS + i];
        worst = larger(worst, fabs(dbeta[i] - sum));
        worst = larger(worst, fabs((double)dbeta[i] - (double)whole_dbeta[i]));
        worst = larger(worst, fabs((double)dgamma[i] - (double)whole_dgamma[i]));
    }
    printf("dgamma %.5f %.5f ...  whole batch %.5f %.5f ...\n", dgamma[0], dgamma[1],
           whole_dgamma[0], whole_dgamma[1]);
    printf("largest difference %.2g, tolerance %.2g; dx %s\n", worst, tolerance,
           memcmp(dx, whole_dx, sizeof dx) == 0 ? "equal" : "DIFFERS");

    nj_plan_destroy(accumulate);
    nj_plan_destroy(backward);
    nj_plan_destroy(forward);
    nj_ctx_destroy(ctx);
    return worst <= tolerance && memcmp(dx, whole_dx, sizeof dx) == 0 ? 0 : 1;
}
