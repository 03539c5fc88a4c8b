/* LayerNorm forward and backward on the host.

     cc -Iinclude -o hello_host examples/hello_host.c -lm -ldl -lpthread */
#define NORMJIT_IMPLEMENTATION
#include "normjit.h"

enum { ROWS = 4, COLS = 8 };

static void check(nj_status status) {
    if (status == NJ_OK) return;
    fprintf(stderr, "%s: %s\n", nj_status_string(status), nj_last_error());
    exit(1);
}

int main(void) {
    const int64_t shape[2] = {ROWS, COLS}, stats[2] = {ROWS, 1}, params[1] = {COLS};
    float x[ROWS * COLS], dy[ROWS * COLS], y[ROWS * COLS], dx[ROWS * COLS];
    float gamma[COLS], beta[COLS], dgamma[COLS], dbeta[COLS], mean[ROWS], rstd[ROWS];
    const float near = 1e-5f; /* some 100 roundings of numbers near 1 */
    nj_ctx *ctx;
    nj_plan *forward, *backward;
    nj_ctx_desc ctx_desc = {0};
    nj_desc desc = {0};
    nj_args args = {0};
    size_t workspace_size;
    void *workspace;
    int i, r, good = 1;

    for (i = 0; i < ROWS * COLS; i++) {
        x[i] = (float)(i * i % 13);
        dy[i] = (float)(i % 5) - 2.0f;
    }
    for (i = 0; i < COLS; i++) {
        gamma[i] = 2.0f;
        beta[i] = 0.5f;
    }

    ctx_desc.backend = NJ_BACKEND_HOST;
    check(nj_ctx_create(&ctx, &ctx_desc));
    printf("%s\n", nj_ctx_info(ctx));

    desc.op = NJ_OP_LAYER_NORM_FORWARD;
    desc.rank = 2;
    desc.shape[0] = ROWS;
    desc.shape[1] = COLS;
    desc.norm_axes = 1u << 1; /* the last axis */
    desc.dtype = NJ_F32;
    desc.has_gamma = desc.has_beta = 1;
    desc.eps = 1e-5;
    check(nj_plan_select(&forward, ctx, &desc, NULL));
    desc.op = NJ_OP_LAYER_NORM_BACKWARD; /* dx, dgamma and dbeta by default */
    check(nj_plan_select(&backward, ctx, &desc, NULL));

    workspace_size = nj_plan_workspace_size(forward);
    if (workspace_size < nj_plan_workspace_size(backward))
        workspace_size = nj_plan_workspace_size(backward);
    workspace = malloc(workspace_size + 1); /* + 1: malloc(0) may give NULL */
    if (!workspace) return 1;

    args.x = nj_packed_const(x, 2, shape);
    args.gamma = nj_packed_const(gamma, 1, params);
    args.beta = nj_packed_const(beta, 1, params);
    args.mean = nj_packed(mean, 2, stats);
    args.rstd = nj_packed(rstd, 2, stats);
    args.y = nj_packed(y, 2, shape);
    args.dy = nj_packed_const(dy, 2, shape);
    args.dx = nj_packed(dx, 2, shape);
    args.dgamma = nj_packed(dgamma, 1, params);
    args.dbeta = nj_packed(dbeta, 1, params);
    check(nj_plan_run(forward, &args, workspace, workspace_size, NULL));
    check(nj_plan_run(backward, &args, workspace, workspace_size, NULL));

    /* A row of y averages to beta. A row's dx sums to 0: shifting the row would not change y. */
    for (r = 0; r < ROWS; r++) {
        float y_mean = 0, dx_sum = 0;
        for (i = 0; i < COLS; i++) {
            y_mean += y[r * COLS + i] / COLS;
            dx_sum += dx[r * COLS + i];
        }
        printf("row %d: mean %.3f rstd %.3f   y %.3f %.3f ...   dx %.3f %.3f ...\n", r, mean[r],
               rstd[r], y[r * COLS], y[r * COLS + 1], dx[r * COLS], dx[r * COLS + 1]);
        good = good && fabsf(y_mean - beta[0]) < near && fabsf(dx_sum) < near;
    }
    /* dbeta is the column sums of dy, here of small whole numbers: exact. */
    for (i = 0; i < COLS; i++) {
        float sum = 0;
        for (r = 0; r < ROWS; r++) sum += dy[r * COLS + i];
        good = good && sum == dbeta[i];
    }
    printf("%s\n", good ? "as it should be" : "WRONG");

    free(workspace);
    nj_plan_destroy(backward);
    nj_plan_destroy(forward);
    nj_ctx_destroy(ctx);
    return good ? 0 : 1;
}
