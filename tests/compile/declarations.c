/* A file that only calls: names every public function and type, compiled but not linked. */
#include "normjit.h"

int use_declarations(nj_ctx *ctx, nj_plan *plan, void *buffer);

int use_declarations(nj_ctx *ctx, nj_plan *plan, void *buffer) {
    static const int64_t shape[2] = {2, 3};
    int64_t cols, extents[NJ_MAX_RANK];
    int32_t rank;
    size_t least, enough;
    char folder[64];
    nj_ctx_desc ctx_desc;
    nj_desc desc;
    nj_preference pref;
    nj_args args;
    nj_sku sku;
    nj_precision precision;
    nj_cache_stats stats;
    nj_error_info info;
    nj_tensor y = nj_packed(buffer, 2, shape);
    nj_const_tensor x = nj_packed_const(buffer, 2, shape);
    int calls = 0;
    args.x = x;
    args.dy = nj_as_const(y);
    args.y = y;
    ctx_desc.log = 0;
    desc.op = NJ_OP_LAYER_NORM_FORWARD;
    desc.dtype = NJ_BF16;
    pref.prefer_backend = NJ_BACKEND_AUTO;
    pref.tune = NJ_TUNE_MEASURE;
    calls += nj_ctx_create(&ctx, &ctx_desc) == NJ_OK;
    calls += nj_ctx_backend(ctx) == NJ_BACKEND_HOST;
    calls += nj_ctx_info(ctx) != 0;
    calls += nj_ctx_cache_stats(ctx, &stats) == NJ_OK;
    calls += nj_default_cache_dir(folder, sizeof folder) == NJ_OK;
    calls += nj_tune_scratch_size(ctx, &desc, &pref, &least, &enough) == NJ_OK;
    calls += nj_plan_select(&plan, ctx, &desc, &pref) == NJ_OK;
    calls += nj_plan_can_implement(plan, &args) == NJ_OK;
    calls += nj_plan_workspace_size(plan) == 0;
    calls += nj_plan_run(plan, &args, 0, 0, 0) == NJ_OK;
    calls += nj_plan_sku(plan, &args, &sku) == NJ_OK;
    calls += nj_plan_precision(plan, &precision) == NJ_OK;
    calls += nj_desc_cols(&desc, &cols) == NJ_OK;
    calls += nj_desc_stat_shape(&desc, &rank, extents) == NJ_OK;
    calls += nj_desc_param_shape(&desc, &rank, extents) == NJ_OK;
    calls += nj_dtype_size(desc.dtype) == 2;
    calls += nj_status_string(NJ_DRIVER) != nj_last_error();
    calls += nj_version() == NJ_VERSION;
    nj_last_error_info(&info);
    nj_plan_destroy(plan);
    nj_ctx_destroy(ctx);
    return calls;
}
