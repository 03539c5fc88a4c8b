/* A program's main file: the functions are in another. Exits with 0 when a forward on the host works. */
#include "normjit.h"

#include <string.h>

int main(void) {
    static const int64_t shape[2] = {1, 2};
    const float x[2] = {1, 3};
    float y[2] = {0, 0};
    nj_ctx_desc ctx_desc;
    nj_desc desc;
    nj_args args;
    nj_ctx *ctx;
    nj_plan *plan;
    memset(&ctx_desc, 0, sizeof ctx_desc);
    memset(&desc, 0, sizeof desc);
    memset(&args, 0, sizeof args);
    ctx_desc.backend = NJ_BACKEND_HOST;
    desc.op = NJ_OP_LAYER_NORM_FORWARD;
    desc.dtype = NJ_F32;
    desc.rank = 2;
    desc.shape[0] = 1;
    desc.shape[1] = 2;
    desc.norm_axes = 2;
    args.x = nj_packed_const(x, 2, shape);
    args.y = nj_packed(y, 2, shape);
    if (nj_ctx_create(&ctx, &ctx_desc) != NJ_OK) return 1;
    if (nj_plan_select(&plan, ctx, &desc, NULL) != NJ_OK) return 2;
    if (nj_plan_run(plan, &args, NULL, 0, NULL) != NJ_OK) return 3;
    nj_plan_destroy(plan);
    nj_ctx_destroy(ctx);
    return y[0] == -1 && y[1] == 1 ? 0 : 4; /* (1 - 2) / 1, (3 - 2) / 1: exact */
}
