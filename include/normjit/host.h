/* Stub until the host backend lands. */
static int64_t nji_host_workspace(const nj_desc *desc, int64_t rows, int64_t cols) {
    (void)desc; (void)rows; (void)cols; return 0;
}
static void nji_host_run(const nj_desc *desc, const nji_problem *problem, void *workspace) {
    (void)desc; (void)problem; (void)workspace;
}
static void nji_host_describe(char *text, size_t size) { snprintf(text, size, "host"); }
static void nji_host_sku(const nj_desc *desc, const nji_problem *problem, nj_sku *out) {
    (void)desc; (void)problem;
    out->source = NJ_SOURCE_HOST;
}
