/* Stub until the CUDA backend lands. */
typedef struct nji_cuda {
    struct { nj_cache_stats stats; } jit;
} nji_cuda;
typedef struct nji_cuda_plan {
    size_t workspace_bytes;
} nji_cuda_plan;
static nj_status nji_cuda_open(nji_cuda *cuda, const nj_ctx_desc *desc, const char *call) {
    (void)cuda; (void)desc;
    return nji_fail(NJ_UNSUPPORTED, "%s: no CUDA yet", call);
}
static void nji_cuda_close(nji_cuda *cuda) { (void)cuda; }
static void nji_cuda_describe(const nji_cuda *cuda, char *text, size_t size) {
    (void)cuda; snprintf(text, size, "cuda");
}
static nj_status nji_cuda_check_operands(const nji_cuda *cuda, const nji_view *view, int count, const char *call) {
    (void)cuda; (void)view; (void)count; (void)call; return NJ_OK;
}
static nj_status nji_cuda_select(nji_cuda *cuda, const nj_desc *desc, int64_t rows, int64_t cols,
                                 const nj_preference *pref, nji_cuda_plan *plan, const char *call) {
    (void)cuda; (void)desc; (void)rows; (void)cols; (void)pref; (void)plan;
    return nji_fail(NJ_UNSUPPORTED, "%s: no CUDA yet", call);
}
static nj_status nji_cuda_run(const nji_cuda *cuda, const nji_cuda_plan *plan, nji_problem *problem,
                              void *stream, const char *call) {
    (void)cuda; (void)plan; (void)problem; (void)stream; (void)call; return NJ_OK;
}
static void nji_cuda_sku(const nji_cuda *cuda, const nji_cuda_plan *plan, const nji_problem *problem, nj_sku *out) {
    (void)cuda; (void)plan; (void)problem; (void)out;
}
