/* Says what normjit finds on this machine, and what to do about what it does not find.

     doctor                                exit 0 when some backend works */
#define NORMJIT_IMPLEMENTATION
#include "normjit.h"

#include "../examples/gpu.h"

static void print_log(void *user, nj_log_level level, const char *text) {
    (void)user;
    printf("    %s%s\n", level == NJ_LOG_WARNING ? "warning: " : "", text);
}

/* Selects a small backward and runs it; g NULL: on the host. */
static int try_plan(nj_ctx *ctx, gpu *g) {
    enum { ROWS = 4, COLS = 64 };
    static const char *const source[] = {"?", "host code", "NVRTC", "the embedded PTX"};
    const int64_t shape[2] = {ROWS, COLS}, stat[2] = {ROWS, 1};
    const size_t full = ROWS * COLS * sizeof(float);
    nj_desc desc = {0};
    nj_args args = {0};
    nj_plan *plan = NULL;
    nj_sku sku;
    nj_status status;
    char *memory = NULL;
    size_t workspace = 0, bytes;
    int worked = 0;
    desc.rank = 2;
    desc.norm_axes = 1u << 1;
    desc.shape[0] = ROWS;
    desc.shape[1] = COLS;
    desc.op = NJ_OP_LAYER_NORM_BACKWARD;
    desc.dtype = NJ_F32;
    status = nj_plan_select(&plan, ctx, &desc, NULL);
    if (status != NJ_OK) goto done;
    workspace = (nj_plan_workspace_size(plan) + 255) / 256 * 256;
    bytes = workspace + 5 * full; /* x, dy, dx, mean, rstd */
    memory = (char *)(g ? gpu_alloc(g, bytes) : calloc(1, bytes));
    if (!memory || (g && !gpu_fill(g, memory, 0, bytes))) {
        printf("    memory: %s\n", g ? g->error : "calloc failed");
        goto done;
    }
    args.x = nj_packed_const(memory + workspace, 2, shape);
    args.dy = nj_packed_const(memory + workspace + full, 2, shape);
    args.dx = nj_packed(memory + workspace + 2 * full, 2, shape);
    args.mean = nj_packed(memory + workspace + 3 * full, 2, stat);
    args.rstd = nj_packed(memory + workspace + 4 * full, 2, stat);
    status = nj_plan_run(plan, &args, memory, workspace, g ? g->stream : NULL);
    if (status == NJ_OK) status = nj_plan_sku(plan, &args, &sku);
    if (status != NJ_OK) goto done;
    if (g && !gpu_wait(g)) {
        printf("    %s\n", g->error);
        goto done;
    }
    printf("    works: %s, from %s\n", sku.kernel, source[sku.source]);
    worked = 1;
done:
    if (status != NJ_OK) printf("    %s: %s\n", nj_status_string(status), nj_last_error());
    if (g) gpu_free(g, memory);
    else free(memory);
    nj_plan_destroy(plan);
    return worked;
}

static int examine(nj_backend backend, int device, const char *cache_dir, gpu *g) {
    nj_ctx_desc how = {0};
    nj_ctx *ctx;
    int worked;
    how.backend = backend;
    how.device = device;
    how.cache_dir = cache_dir;
    how.log = print_log;
    if (nj_ctx_create(&ctx, &how) != NJ_OK) {
        printf("    %s\n", nj_last_error());
        return 0;
    }
    worked = try_plan(ctx, g);
    nj_ctx_destroy(ctx);
    return worked;
}

/* Number of devices on which a kernel ran. */
static int examine_devices(const char *cache_dir) {
    static gpu g;
    int device, worked = 0;
    for (device = 0; gpu_open(&g, device); device++) {
        size_t available = 0, total = 0;
        int version = gpu_driver_version(&g);
        gpu_memory(&g, &available, &total);
        printf("CUDA device %d\n", device);
        printf("    %s, sm_%d, %d SMs, %.1f of %.1f GB free, driver for CUDA %d.%d\n", g.name,
               g.arch, g.processors, 1e-9 * (double)available, 1e-9 * (double)total, version / 1000,
               version % 1000 / 10);
        worked += examine(NJ_BACKEND_CUDA, device, cache_dir, &g);
        gpu_close(&g);
    }
    if (device == 0) {
        printf("CUDA device\n    none: %s\n", g.error);
    } else if (!worked) {
        printf("    advice: needs sm_75 (Turing) or newer and a driver for CUDA 11.4 or newer\n");
    }
    return worked;
}

int main(void) {
    char folder[1024];
    const char *cache_dir = NULL;
    int on_host, on_cuda;
    printf("normjit %s\n", NJ_VERSION_STRING);
    if (nj_default_cache_dir(folder, sizeof folder) == NJ_OK) cache_dir = folder;
    printf("kernel cache\n    %s\n", cache_dir ? cache_dir : nj_last_error());
    printf("host\n");
    on_host = examine(NJ_BACKEND_HOST, 0, NULL, NULL);
#ifndef _OPENMP
    printf("    advice: this build runs on one thread; compile with -fopenmp for more\n");
#endif
    on_cuda = examine_devices(cache_dir);
    printf("default backend\n    %s\n", on_cuda ? "CUDA" : on_host ? "host" : "none works");
    return on_cuda || on_host ? 0 : 1;
}
