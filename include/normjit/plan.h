/* Bodies of the public functions: descriptors, arguments, plans, contexts. */

struct nj_ctx {
    nj_backend backend;
    nji_log log;
    nji_lock lock;  /* guards references and everything in cuda that select changes */
    int references; /* the user's and one for each plan */
    nji_cuda cuda;
    char info[512];
};

struct nj_plan {
    nj_ctx *ctx;
    nj_desc desc; /* defaults filled in */
    nj_backend backend;
    int64_t rows, cols;
    size_t workspace_bytes;
    nj_tensor packed[3];        /* what a packed operand of each nji_kind looks like */
    nji_problem packed_problem; /* what packed operands bind to, but for their addresses */
    nji_cuda_plan cuda;
};

/* ---- descriptor ----------------------------------------------------------------------------- */

static nj_status nji_check_types(nj_desc *desc, const char *call) {
    if (!nj_dtype_size(desc->dtype)) {
        return nji_fail(NJ_INVALID_ARGUMENT,
                        "%s: desc.dtype = %d: must be NJ_F16, BF16, F32 or F64", call,
                        (int)desc->dtype);
    }
    if (desc->param_dtype == NJ_DTYPE_UNSET) desc->param_dtype = desc->dtype;
    if (!nj_dtype_size(desc->param_dtype)) {
        return nji_fail(NJ_INVALID_ARGUMENT,
                        "%s: desc.param_dtype = %d: must be NJ_F16, BF16, F32, F64 or 0 (dtype)",
                        call, (int)desc->param_dtype);
    }
    if (desc->param_dtype == NJ_F64 && desc->dtype != NJ_F64) {
        return nji_fail(NJ_UNSUPPORTED, "%s: desc.param_dtype = NJ_F64: needs dtype NJ_F64", call);
    }
    if (desc->stat_dtype == NJ_DTYPE_UNSET) {
        desc->stat_dtype = desc->dtype == NJ_F64 ? NJ_F64 : NJ_F32;
    }
    if (!nj_dtype_size(desc->stat_dtype)) {
        return nji_fail(
            NJ_INVALID_ARGUMENT,
            "%s: desc.stat_dtype = %d: must be NJ_F16, BF16, F32, F64 or 0 (f32; f64 for f64)",
            call, (int)desc->stat_dtype);
    }
    if (desc->stat_dtype != desc->dtype && (desc->stat_dtype != NJ_F32 || desc->dtype == NJ_F64)) {
        return nji_fail(
            NJ_UNSUPPORTED,
            "%s: desc.stat_dtype = %d: must be dtype (%d), or NJ_F32 with a narrower dtype", call,
            (int)desc->stat_dtype, (int)desc->dtype);
    }
    return NJ_OK;
}

static nj_status nji_check_grads(nj_desc *desc, const char *call) {
    const unsigned all = NJ_GRAD_DX | NJ_GRAD_DGAMMA | NJ_GRAD_DBETA;
    if (desc->grads & ~all) {
        return nji_fail(NJ_INVALID_ARGUMENT,
                        "%s: desc.grads = 0x%x: only NJ_GRAD_* bits may be set", call,
                        (unsigned)desc->grads);
    }
    if (desc->accumulate & ~all) {
        return nji_fail(NJ_INVALID_ARGUMENT,
                        "%s: desc.accumulate = 0x%x: only NJ_GRAD_* bits may be set", call,
                        (unsigned)desc->accumulate);
    }
    if (nji_is_forward(desc)) {
        if (desc->grads | desc->accumulate) {
            return nji_fail(NJ_INVALID_PROBLEM, "%s: desc.%s = 0x%x: a forward has no gradients",
                            call, desc->grads ? "grads" : "accumulate",
                            (unsigned)(desc->grads ? desc->grads : desc->accumulate));
        }
        return NJ_OK;
    }
    if (!desc->grads) {
        desc->grads = NJ_GRAD_DX | (desc->has_gamma ? NJ_GRAD_DGAMMA : 0u) |
                      (desc->has_beta ? NJ_GRAD_DBETA : 0u);
    }
    if ((desc->grads & NJ_GRAD_DGAMMA) && !desc->has_gamma) {
        return nji_fail(NJ_INVALID_PROBLEM, "%s: desc.grads = 0x%x: dgamma needs has_gamma", call,
                        (unsigned)desc->grads);
    }
    if ((desc->grads & NJ_GRAD_DBETA) && !desc->has_beta) {
        return nji_fail(NJ_INVALID_PROBLEM, "%s: desc.grads = 0x%x: dbeta needs has_beta", call,
                        (unsigned)desc->grads);
    }
    if (desc->accumulate & ~desc->grads) {
        return nji_fail(NJ_INVALID_PROBLEM, "%s: desc.accumulate = 0x%x: not all in grads (0x%x)",
                        call, (unsigned)desc->accumulate, (unsigned)desc->grads);
    }
    return NJ_OK;
}

/* Checks a descriptor and fills in its defaults. */
static nj_status nji_check_desc(nj_desc *desc, int64_t *rows, int64_t *cols, const char *call) {
    nj_status status = nji_check_shape(desc, rows, cols, call);
    if (status != NJ_OK) return status;
    switch (desc->op) {
    case NJ_OP_LAYER_NORM_FORWARD:
    case NJ_OP_LAYER_NORM_BACKWARD: break;
    case NJ_OP_RMS_NORM_FORWARD:
    case NJ_OP_RMS_NORM_BACKWARD:
        return nji_fail(NJ_UNSUPPORTED, "%s: desc.op = %d: RMSNorm is not in this version", call,
                        (int)desc->op);
    default:
        return nji_fail(NJ_INVALID_ARGUMENT, "%s: desc.op = %d: must be one of NJ_OP_*", call,
                        (int)desc->op);
    }
    desc->has_gamma = desc->has_gamma != 0;
    desc->has_beta = desc->has_beta != 0;
    status = nji_check_types(desc, call);
    if (status != NJ_OK) return status;
    if (nji_is_forward(desc) && !(desc->eps >= 0 && desc->eps <= DBL_MAX)) {
        return nji_fail(NJ_INVALID_ARGUMENT, "%s: desc.eps = %g: must be finite and 0 or more",
                        call, desc->eps);
    }
    return nji_check_grads(desc, call);
}

/* ---- arguments ------------------------------------------------------------------------------ */

/* The one validator: can_implement and run both come here. */
static nj_status nji_check_args(const nj_plan *plan, const nj_args *args, nji_views *set,
                                const char *call) {
    nj_status status;
    int i;
    if (!plan) return nji_fail(NJ_INVALID_ARGUMENT, "%s: plan = NULL: a plan is required", call);
    if (!args) return nji_fail(NJ_INVALID_ARGUMENT, "%s: args = NULL: operands are required", call);
    nji_list_views(&plan->desc, args, set);
    set->packed = 1;
    for (i = 0; i < set->count; i++) {
        if (nji_is_packed_view(&set->view[i], &plan->packed[set->view[i].kind])) continue;
        set->packed = 0;
        status = nji_check_view(&plan->desc, &set->view[i], call);
        if (status != NJ_OK) return status;
    }
    status = nji_check_overlaps(set->view, set->count, call);
    if (status != NJ_OK || plan->backend != NJ_BACKEND_CUDA) return status;
    return nji_cuda_check_operands(&plan->ctx->cuda, set->view, set->count, call);
}

static nj_status nji_check_workspace(const nj_plan *plan, const nji_views *set,
                                     const void *workspace, size_t size, const char *call) {
    const uintptr_t alignment = plan->backend == NJ_BACKEND_CUDA ? 256 : 16;
    const uintptr_t first = (uintptr_t)workspace;
    int i;
    if (plan->workspace_bytes == 0) return NJ_OK;
    if (!workspace) {
        return nji_fail(NJ_INVALID_ARGUMENT, "%s: workspace = NULL: the plan needs %zu bytes", call,
                        plan->workspace_bytes);
    }
    if (size < plan->workspace_bytes) {
        return nji_fail_sized(NJ_WORKSPACE_TOO_SMALL, plan->workspace_bytes, size,
                              "%s: workspace_size = %zu: the plan needs %zu bytes", call, size,
                              plan->workspace_bytes);
    }
    if ((first & (alignment - 1)) != 0) {
        return nji_fail(NJ_MISALIGNED_OPERAND, "%s: workspace = %p: must be a multiple of %d bytes",
                        call, workspace, (int)alignment);
    }
    for (i = 0; i < set->count; i++) {
        const nji_view *view = &set->view[i];
        if (view->empty || view->last_byte < first ||
            view->first_byte >= first + plan->workspace_bytes) {
            continue;
        }
        return nji_fail(NJ_INVALID_ARGUMENT, "%s: workspace overlaps args.%s: it must be apart",
                        call, view->name);
    }
    return NJ_OK;
}

/* Checked views -> what a backend computes. */
static void nji_plan_bind(const nj_plan *plan, const nji_views *set, nji_problem *problem) {
    int i;
    if (!set->packed) {
        nji_bind(&plan->desc, plan->rows, plan->cols, set, problem);
        return;
    }
    *problem = plan->packed_problem;
    problem->mean.data = problem->rstd.data = NULL; /* a forward need not be given them */
    for (i = 0; i < set->count; i++) {
        nji_operand_of(problem, &set->view[i])->data = nji_first_element(&set->view[i]);
    }
}

/* What the plan knows of packed operands, at a made-up address. */
static void nji_prepare_packed(nj_plan *plan) {
    nj_args args;
    nji_views set;
    nji_packed_args(&plan->desc, (void *)(uintptr_t)4096, &args);
    plan->packed[NJI_FULL] = args.y;
    plan->packed[NJI_STAT] = args.mean;
    plan->packed[NJI_PARAM] = args.dgamma;
    nji_list_views(&plan->desc, &args, &set);
    nji_bind(&plan->desc, plan->rows, plan->cols, &set, &plan->packed_problem);
}

/* ---- contexts ------------------------------------------------------------------------------- */

static void nji_ctx_retain(nj_ctx *ctx) {
    nji_lock_enter(&ctx->lock);
    ctx->references++;
    nji_lock_leave(&ctx->lock);
}

static void nji_ctx_release(nj_ctx *ctx) {
    int left;
    nji_lock_enter(&ctx->lock);
    left = --ctx->references;
    nji_lock_leave(&ctx->lock);
    if (left > 0) return;
    if (ctx->backend == NJ_BACKEND_CUDA) nji_cuda_close(&ctx->cuda);
    nji_lock_free(&ctx->lock);
    NJ_FREE(ctx);
}

static nj_status nji_check_ctx_desc(const nj_ctx_desc *desc, const char *call) {
    if (desc->device < 0) {
        return nji_fail(NJ_INVALID_ARGUMENT, "%s: desc.device = %d: a device ordinal is 0 or more",
                        call, (int)desc->device);
    }
    if (desc->flags & ~(uint32_t)(NJ_CTX_CHECK_POINTERS | NJ_CTX_FALLBACK_PTX)) {
        return nji_fail(NJ_INVALID_ARGUMENT, "%s: desc.flags = 0x%x: only NJ_CTX_* bits may be set",
                        call, (unsigned)desc->flags);
    }
    if (desc->backend != NJ_BACKEND_AUTO && desc->backend != NJ_BACKEND_CUDA &&
        desc->backend != NJ_BACKEND_HOST) {
        return nji_fail(NJ_INVALID_ARGUMENT, "%s: desc.backend = %d: must be one of NJ_BACKEND_*",
                        call, (int)desc->backend);
    }
    return NJ_OK;
}

/* Tries CUDA. With AUTO a failure is a log line, and the thread's last error stays what it was. */
static nj_status nji_ctx_open(nj_ctx *ctx, const nj_ctx_desc *desc, const char *call) {
    nj_status status;
    nji_error before;
    if (desc->backend == NJ_BACKEND_HOST) return NJ_OK;
    before = nji_last;
    status = nji_cuda_open(&ctx->cuda, desc, call);
    if (status == NJ_OK) {
        ctx->backend = NJ_BACKEND_CUDA;
    } else if (desc->backend == NJ_BACKEND_AUTO) {
        nji_note(&ctx->log, NJ_LOG_INFO, "using the host backend: %s", nji_last.text);
        nji_last = before;
        status = NJ_OK;
    }
    return status;
}

NJ_API nj_status nj_ctx_create(nj_ctx **out, const nj_ctx_desc *desc) {
    static const char call[] = "nj_ctx_create";
    nj_ctx_desc defaults;
    nj_status status;
    nj_ctx *ctx;
    if (!out) return nji_fail(NJ_INVALID_ARGUMENT, "%s: out = NULL: nowhere to put the ctx", call);
    *out = NULL;
    memset(&defaults, 0, sizeof defaults);
    if (!desc) desc = &defaults;
    status = nji_check_ctx_desc(desc, call);
    if (status != NJ_OK) return status;
    ctx = (nj_ctx *)NJ_MALLOC(sizeof *ctx);
    if (!ctx) return nji_out_of_memory(call, sizeof *ctx);
    memset(ctx, 0, sizeof *ctx);
    ctx->backend = NJ_BACKEND_HOST;
    ctx->references = 1;
    ctx->log.call = desc->log;
    ctx->log.user = desc->log_user;
    nji_lock_init(&ctx->lock);
    status = nji_ctx_open(ctx, desc, call);
    if (status != NJ_OK) {
        nji_ctx_release(ctx);
        return status;
    }
    if (ctx->backend == NJ_BACKEND_CUDA) {
        nji_cuda_describe(&ctx->cuda, ctx->info, sizeof ctx->info);
    } else {
        nji_host_describe(ctx->info, sizeof ctx->info);
    }
    nji_note(&ctx->log, NJ_LOG_INFO, "%s", ctx->info);
    *out = ctx;
    return NJ_OK;
}

NJ_API void nj_ctx_destroy(nj_ctx *ctx) {
    if (ctx) nji_ctx_release(ctx);
}

NJ_API nj_backend nj_ctx_backend(const nj_ctx *ctx) {
    return ctx ? ctx->backend : NJ_BACKEND_AUTO;
}

NJ_API const char *nj_ctx_info(const nj_ctx *ctx) {
    return ctx ? ctx->info : "";
}

NJ_API nj_status nj_ctx_cache_stats(nj_ctx *ctx, nj_cache_stats *out) {
    static const char call[] = "nj_ctx_cache_stats";
    if (!out)
        return nji_fail(NJ_INVALID_ARGUMENT, "%s: out = NULL: nowhere to put the counts", call);
    memset(out, 0, sizeof *out);
    if (!ctx) return nji_fail(NJ_INVALID_ARGUMENT, "%s: ctx = NULL: a ctx is required", call);
    nji_lock_enter(&ctx->lock);
    if (ctx->backend == NJ_BACKEND_CUDA) *out = ctx->cuda.jit.stats;
    nji_lock_leave(&ctx->lock);
    return NJ_OK;
}

NJ_API nj_status nj_default_cache_dir(char *buffer, size_t size) {
    static const char call[] = "nj_default_cache_dir";
#ifdef _WIN32
    static const char *const variable[] = {"LOCALAPPDATA"};
    static const char *const suffix[] = {"\\normjit\\cache"};
#else
    static const char *const variable[] = {"XDG_CACHE_HOME", "HOME"};
    static const char *const suffix[] = {"/normjit", "/.cache/normjit"};
#endif
    size_t i;
    if (!buffer) return nji_fail(NJ_INVALID_ARGUMENT, "%s: buffer = NULL: nowhere to put it", call);
    if (!size)
        return nji_fail(NJ_INVALID_ARGUMENT, "%s: size = 0: no room for the end of text", call);
    buffer[0] = 0;
    for (i = 0; i < sizeof variable / sizeof variable[0]; i++) {
        const char *root = getenv(variable[i]);
        size_t needed;
        if (!root || !root[0]) continue;
        needed = strlen(root) + strlen(suffix[i]) + 1;
        if (needed > size) {
            return nji_fail_sized(NJ_BUFFER_TOO_SMALL, needed, size,
                                  "%s: size = %zu: needs %zu bytes", call, size, needed);
        }
        snprintf(buffer, size, "%s%s", root, suffix[i]);
        return NJ_OK;
    }
    return nji_fail(NJ_UNSUPPORTED, "%s: no variable names a folder: set %s", call, variable[0]);
}

/* ---- plans ---------------------------------------------------------------------------------- */

static nj_status nji_check_preference(const nj_ctx *ctx, const nj_preference *pref,
                                      nj_backend *backend, const char *call) {
    *backend = pref->prefer_backend == NJ_BACKEND_AUTO ? ctx->backend : pref->prefer_backend;
    if (*backend != NJ_BACKEND_CUDA && *backend != NJ_BACKEND_HOST) {
        return nji_fail(NJ_INVALID_ARGUMENT,
                        "%s: pref.prefer_backend = %d: must be one of NJ_BACKEND_*", call,
                        (int)pref->prefer_backend);
    }
    if (*backend == NJ_BACKEND_CUDA && ctx->backend != NJ_BACKEND_CUDA) {
        return nji_fail(NJ_UNSUPPORTED, "%s: pref.prefer_backend = CUDA: the ctx is a host ctx",
                        call);
    }
    if (pref->tune != NJ_TUNE_TABLE && pref->tune != NJ_TUNE_MEASURE) {
        return nji_fail(NJ_INVALID_ARGUMENT, "%s: pref.tune = %d: must be one of NJ_TUNE_*", call,
                        (int)pref->tune);
    }
    return NJ_OK; /* every kernel is deterministic and batch-invariant: those demands are met */
}

static nj_status nji_select_host(nj_plan *plan, const nj_preference *pref, const char *call) {
    int64_t bytes = nji_host_workspace(&plan->desc, plan->rows, plan->cols);
    if (bytes < 0 || (uint64_t)bytes > SIZE_MAX) {
        return nji_fail(NJ_UNSUPPORTED, "%s: desc.shape: the workspace would overflow size_t",
                        call);
    }
    if (pref->max_workspace_bytes && (uint64_t)bytes > pref->max_workspace_bytes) {
        return nji_fail_sized(
            NJ_UNSUPPORTED, (uint64_t)bytes, pref->max_workspace_bytes,
            "%s: pref.max_workspace_bytes = %llu: the host backend needs %llu bytes", call,
            (unsigned long long)pref->max_workspace_bytes, (unsigned long long)bytes);
    }
    plan->workspace_bytes = (size_t)bytes;
    return NJ_OK;
}

static nj_status nji_select_cuda(nj_plan *plan, nj_ctx *ctx, const nj_preference *pref,
                                 const char *call) {
    nji_cuda_plan *cuda = &plan->cuda;
    nj_status status =
        nji_cuda_choose(&ctx->cuda, &plan->desc, plan->rows, plan->cols, pref, cuda, call);
    if (status != NJ_OK) return status;
    nji_lock_enter(&ctx->lock);
    if (pref->tune == NJ_TUNE_MEASURE)
        status = nji_tune(&ctx->cuda, cuda, plan->rows, plan->cols, pref, call);
    if (status == NJ_OK) status = nji_cuda_select(&ctx->cuda, cuda, plan->cols, call);
    nji_lock_leave(&ctx->lock);
    plan->workspace_bytes = cuda->workspace_bytes;
    return status;
}

/* Checks what a plan is selected from, and fills in all of the plan that follows from it alone. */
static nj_status nji_plan_begin(nj_plan *plan, const nj_ctx *ctx, const nj_desc *desc,
                                const nj_preference *pref, const char *call) {
    nj_status status;
    memset(plan, 0, sizeof *plan);
    plan->desc = *desc;
    status = nji_check_desc(&plan->desc, &plan->rows, &plan->cols, call);
    return status == NJ_OK ? nji_check_preference(ctx, pref, &plan->backend, call) : status;
}

/* ctx and desc are there. */
static nj_status nji_check_given(const nj_ctx *ctx, const nj_desc *desc, const char *call) {
    if (!ctx) return nji_fail(NJ_INVALID_ARGUMENT, "%s: ctx = NULL: a ctx is required", call);
    if (!desc)
        return nji_fail(NJ_INVALID_ARGUMENT, "%s: desc = NULL: a descriptor is required", call);
    return NJ_OK;
}

static nj_preference nji_preference_of(const nj_preference *pref) {
    nj_preference no_demands;
    memset(&no_demands, 0, sizeof no_demands);
    return pref ? *pref : no_demands;
}

NJ_API nj_status nj_plan_select(nj_plan **out, nj_ctx *ctx, const nj_desc *desc,
                                const nj_preference *pref) {
    static const char call[] = "nj_plan_select";
    const nj_preference demands = nji_preference_of(pref);
    nj_plan *plan;
    nj_status status;
    if (!out) return nji_fail(NJ_INVALID_ARGUMENT, "%s: out = NULL: nowhere to put the plan", call);
    *out = NULL;
    status = nji_check_given(ctx, desc, call);
    if (status != NJ_OK) return status;
    plan = (nj_plan *)NJ_MALLOC(sizeof *plan);
    if (!plan) return nji_out_of_memory(call, sizeof *plan);
    status = nji_plan_begin(plan, ctx, desc, &demands, call);
    if (status == NJ_OK) {
        status = plan->backend == NJ_BACKEND_HOST ? nji_select_host(plan, &demands, call)
                                                  : nji_select_cuda(plan, ctx, &demands, call);
    }
    if (status != NJ_OK) {
        NJ_FREE(plan);
        return status;
    }
    nji_prepare_packed(plan);
    nji_ctx_retain(ctx);
    plan->ctx = ctx;
    *out = plan;
    return NJ_OK;
}

NJ_API nj_status nj_tune_scratch_size(nj_ctx *ctx, const nj_desc *desc, const nj_preference *pref,
                                      size_t *least, size_t *enough) {
    static const char call[] = "nj_tune_scratch_size";
    const nj_preference demands = nji_preference_of(pref);
    nj_plan plan;
    nj_status status;
    if (!least || !enough) {
        return nji_fail(NJ_INVALID_ARGUMENT, "%s: %s = NULL: nowhere to put it", call,
                        least ? "enough" : "least");
    }
    *least = *enough = 0;
    status = nji_check_given(ctx, desc, call);
    if (status != NJ_OK) return status;
    status = nji_plan_begin(&plan, ctx, desc, &demands, call);
    if (status != NJ_OK || plan.backend == NJ_BACKEND_HOST) return status;
    status =
        nji_cuda_choose(&ctx->cuda, &plan.desc, plan.rows, plan.cols, &demands, &plan.cuda, call);
    if (status != NJ_OK) return status;
    nji_lock_enter(&ctx->lock);
    nji_tune_scratch(&ctx->cuda, &plan.cuda, plan.rows, plan.cols, &demands, least, enough);
    nji_lock_leave(&ctx->lock);
    return NJ_OK;
}

NJ_API void nj_plan_destroy(nj_plan *plan) {
    if (!plan) return;
    nji_ctx_release(plan->ctx);
    NJ_FREE(plan);
}

NJ_API nj_status nj_plan_can_implement(const nj_plan *plan, const nj_args *args) {
    nji_views set;
    return nji_check_args(plan, args, &set, "nj_plan_can_implement");
}

NJ_API size_t nj_plan_workspace_size(const nj_plan *plan) {
    return plan ? plan->workspace_bytes : 0;
}

NJ_API nj_status nj_plan_run(const nj_plan *plan, const nj_args *args, void *workspace,
                             size_t workspace_size, void *stream) {
    static const char call[] = "nj_plan_run";
    nji_views set;
    nji_problem problem;
    nj_status status = nji_check_args(plan, args, &set, call);
    if (status == NJ_OK) status = nji_check_workspace(plan, &set, workspace, workspace_size, call);
    if (status != NJ_OK) return status;
    nji_plan_bind(plan, &set, &problem);
    if (plan->backend == NJ_BACKEND_HOST) {
        nji_host_run(&plan->desc, &problem, workspace);
        return NJ_OK;
    }
    problem.partial = workspace;
    return nji_cuda_run(&plan->ctx->cuda, &plan->cuda, &problem, stream, call);
}

NJ_API nj_status nj_plan_sku(const nj_plan *plan, const nj_args *args, nj_sku *out) {
    static const char call[] = "nj_plan_sku";
    nji_views set;
    nji_problem problem;
    if (!out) return nji_fail(NJ_INVALID_ARGUMENT, "%s: out = NULL: nowhere to put the sku", call);
    memset(out, 0, sizeof *out);
    if (args) {
        nj_status status = nji_check_args(plan, args, &set, call);
        if (status != NJ_OK) return status;
        nji_plan_bind(plan, &set, &problem);
    } else {
        if (!plan)
            return nji_fail(NJ_INVALID_ARGUMENT, "%s: plan = NULL: a plan is required", call);
        problem = plan->packed_problem;
    }
    out->op = (int32_t)plan->desc.op;
    out->dtype = (int32_t)plan->desc.dtype;
    out->param_dtype = (int32_t)plan->desc.param_dtype;
    out->stat_dtype = (int32_t)plan->desc.stat_dtype;
    out->layout = (int32_t)nji_layout_of(&problem);
    out->backend = (int32_t)plan->backend;
    out->math = (int32_t)(plan->desc.dtype == NJ_F64 ? NJ_F64 : NJ_F32);
    out->grads = (int32_t)plan->desc.grads;
    out->accumulate = (int32_t)plan->desc.accumulate;
    if (plan->backend == NJ_BACKEND_HOST) {
        nji_host_sku(&plan->desc, out);
    } else {
        nji_cuda_sku(&plan->ctx->cuda, &plan->cuda, &problem, out);
    }
    return NJ_OK;
}

NJ_API nj_status nj_plan_precision(const nj_plan *plan, nj_precision *out) {
    static const char call[] = "nj_plan_precision";
    if (!out) return nji_fail(NJ_INVALID_ARGUMENT, "%s: out = NULL: nowhere to put it", call);
    memset(out, 0, sizeof *out);
    if (!plan) return nji_fail(NJ_INVALID_ARGUMENT, "%s: plan = NULL: a plan is required", call);
    out->math = out->accumulator = (int32_t)(plan->desc.dtype == NJ_F64 ? NJ_F64 : NJ_F32);
    out->deterministic = 1;
    /* the order in which rows are added up is the winner's, and another time another may win */
    out->bit_stable_on_same_hardware = !(plan->cuda.measured && nji_wants_params(&plan->desc));
    out->batch_invariant = 1;
    return NJ_OK;
}

/* ---- shapes --------------------------------------------------------------------------------- */

NJ_API nj_status nj_desc_cols(const nj_desc *desc, int64_t *cols) {
    static const char call[] = "nj_desc_cols";
    int64_t rows, product;
    nj_status status;
    if (!cols) return nji_fail(NJ_INVALID_ARGUMENT, "%s: cols = NULL: nowhere to put it", call);
    status = nji_check_shape(desc, &rows, &product, call);
    if (status == NJ_OK) *cols = product;
    return status;
}

static nj_status nji_desc_shape(const nj_desc *desc, nji_kind kind, int32_t *rank, int64_t *shape,
                                const char *call) {
    int64_t rows, cols;
    nj_status status;
    if (!rank || !shape) {
        return nji_fail(NJ_INVALID_ARGUMENT, "%s: %s = NULL: nowhere to put it", call,
                        rank ? "shape" : "rank");
    }
    status = nji_check_shape(desc, &rows, &cols, call);
    if (status == NJ_OK) nji_expected_shape(desc, kind, rank, shape);
    return status;
}

NJ_API nj_status nj_desc_stat_shape(const nj_desc *desc, int32_t *rank,
                                    int64_t shape[NJ_MAX_RANK]) {
    return nji_desc_shape(desc, NJI_STAT, rank, shape, "nj_desc_stat_shape");
}

NJ_API nj_status nj_desc_param_shape(const nj_desc *desc, int32_t *rank,
                                     int64_t shape[NJ_MAX_RANK]) {
    return nji_desc_shape(desc, NJI_PARAM, rank, shape, "nj_desc_param_shape");
}

NJ_API nj_const_tensor nj_as_const(nj_tensor tensor) {
    nj_const_tensor out;
    out.data = tensor.data;
    out.offset = tensor.offset;
    out.count = tensor.count;
    out.rank = tensor.rank;
    memcpy(out.shape, tensor.shape, sizeof out.shape);
    memcpy(out.stride, tensor.stride, sizeof out.stride);
    return out;
}

NJ_API nj_tensor nj_packed(void *data, int32_t rank, const int64_t *shape) {
    nj_tensor out;
    int64_t count = 1;
    int axis;
    memset(&out, 0, sizeof out);
    if (rank < 1 || rank > NJ_MAX_RANK || !shape) return out;
    for (axis = rank - 1; axis >= 0; axis--) {
        out.shape[axis] = shape[axis];
        out.stride[axis] = count > 0 ? count : 1;
        if (shape[axis] < 0 || !nji_mul_i64(count, shape[axis], &count)) {
            memset(&out, 0, sizeof out);
            return out;
        }
    }
    out.data = data;
    out.count = count;
    out.rank = rank;
    return out;
}

NJ_API nj_const_tensor nj_packed_const(const void *data, int32_t rank, const int64_t *shape) {
    return nj_as_const(nj_packed((void *)(uintptr_t)data, rank, shape));
}

NJ_API size_t nj_dtype_size(nj_dtype dtype) {
    switch (dtype) {
    case NJ_F16:
    case NJ_BF16: return 2;
    case NJ_F32: return 4;
    case NJ_F64: return 8;
    default: return 0;
    }
}

/* ---- errors --------------------------------------------------------------------------------- */

NJ_API const char *nj_status_string(nj_status status) {
    static const char *const name[] = {"NJ_OK",
                                       "NJ_INVALID_ARGUMENT",
                                       "NJ_INVALID_PROBLEM",
                                       "NJ_UNSUPPORTED",
                                       "NJ_MISALIGNED_OPERAND",
                                       "NJ_BUFFER_TOO_SMALL",
                                       "NJ_WORKSPACE_TOO_SMALL",
                                       "NJ_OUT_OF_MEMORY",
                                       "NJ_LIBRARY_NOT_FOUND",
                                       "NJ_COMPILE_FAILED",
                                       "NJ_DRIVER"};
    size_t index = (size_t)status;
    return index < sizeof name / sizeof name[0] ? name[index] : "unknown nj_status";
}

NJ_API const char *nj_last_error(void) {
    return nji_last.text;
}

NJ_API void nj_last_error_info(nj_error_info *out) {
    if (out) *out = nji_last.info;
}

NJ_API int nj_version(void) {
    return NJ_VERSION;
}
