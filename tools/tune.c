/* Measures candidate geometries of the rows kernels against an elementwise add (backward) or copy
   (forward) in the same process, through graph replays over rotating buffer sets. For developers: the
   tuning table and ptx_src/DIARY.md come from it.

     tune CACHE_DIR fwd|bwd DTYPE rows cols [rows cols ...] */
#define NORMJIT_IMPLEMENTATION
#include "normjit.h"

#include "../examples/gpu.h"

#include <sys/wait.h>
#include <unistd.h>

#define MAX_CANDIDATES 512
#define CALLS 24 /* in a graph */

static const char roofline_source[] =
    "extern \"C\" __global__ void add(uint4 *o, const uint4 *a, const uint4 *b, long long n) {"
    "  long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;"
    "  if (i < n) { uint4 x = a[i], y = b[i]; o[i] = make_uint4(x.x ^ y.x, x.y ^ y.y, x.z ^ y.z, x.w ^ y.w); } }"
    "extern \"C\" __global__ void copy(uint4 *o, const uint4 *a, long long n) {"
    "  long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;"
    "  if (i < n) o[i] = a[i]; }";

typedef struct candidate {
    nji_tuning tuning;
    nji_choice choice;
    float us;
} candidate;

static int same_choice(const nji_choice *a, const nji_choice *b) {
    return memcmp(a, b, sizeof *a) == 0;
}

/* All geometries worth trying for a shape. */
static int candidates(const nj_desc *desc, int64_t rows, int64_t cols, const nji_device_facts *facts,
                      candidate *out) {
    static const int elements[] = {4, 8, 16, 24, 32};
    static const int resident[] = {256, 384, 512, 768, 1024, 2048};
    static const int lanes[] = {32, 128, 256, 512, 1024};
    static const int threads[] = {64, 128, 256};
    int forward = desc->op == NJ_OP_LAYER_NORM_FORWARD;
    int count = 0, e, r, l, t, p, i;
    for (e = 0; e < 5; e++)
        for (r = 0; r < 6; r++)
            for (l = 0; l < 5; l++)
                for (t = 0; t < 3; t++)
                    for (p = 0; p < 2; p++) {
                        candidate *c = &out[count];
                        nj_preference pref;
                        int64_t per_thread;
                        memset(c, 0, sizeof *c);
                        memset(&pref, 0, sizeof pref);
                        if (lanes[l] > 32 && t > 0) continue;
                        if (forward && p == 1) continue;
                        c->tuning.elements = elements[e];
                        c->tuning.max_lanes = lanes[l];
                        c->tuning.threads = threads[t];
                        c->tuning.max_slices = 8;
                        c->tuning.resident = resident[r];
                        c->tuning.prefetch = p;
                        if (c->tuning.elements < 16 / (int)nj_dtype_size(desc->dtype)) continue;
                        c->choice.forward = forward;
                        nji_cut_row(desc, &c->tuning, cols, facts->arch, &c->choice);
                        if (c->choice.family != NJI_ROWS || c->choice.threads > 1024) continue;
                        per_thread = (int64_t)c->choice.chunks * c->choice.vec;
                        if (per_thread > 32) continue;
                        /* Registers: accumulators, gamma, both rows; a rough bound. */
                        if (!forward) {
                            int wide = desc->dtype == NJ_F32 ? 2 : 1;
                            int registers = (int)(per_thread * (3 + wide * (1 + p)) + 24);
                            int have = 65536 / (c->choice.blocks * c->choice.threads);
                            if (registers > (have > 255 ? 255 : have)) continue;
                        }
                        if (c->choice.blocks > 32 || c->choice.blocks * c->choice.threads > 2048) continue;
                        if (c->choice.slices > 1 && c->choice.lanes < 128) continue;
                        if (nji_choose_parts(desc, rows, cols, facts, &pref, &c->choice, "tune") != NJ_OK) {
                            continue;
                        }
                        for (i = 0; i < count; i++) {
                            if (same_choice(&out[i].choice, &c->choice)) break;
                        }
                        if (i == count && count < MAX_CANDIDATES - 1) count++;
                    }
    return count;
}

static void describe(nj_desc *desc, int forward, nj_dtype dtype, int64_t rows, int64_t cols) {
    int64_t r, c;
    memset(desc, 0, sizeof *desc);
    desc->rank = 2;
    desc->shape[0] = rows;
    desc->shape[1] = cols;
    desc->norm_axes = 2;
    desc->op = forward ? NJ_OP_LAYER_NORM_FORWARD : NJ_OP_LAYER_NORM_BACKWARD;
    desc->dtype = dtype;
    desc->has_gamma = desc->has_beta = 1;
    desc->eps = 1e-5;
    nji_check_desc(desc, &r, &c, "tune");
}

/* Fills the disk cache from several processes: NVRTC is the slow part. */
static void compile_all(const char *cache, const nj_desc *desc, int64_t cols, int arch, candidate *list,
                        int count) {
    int workers = 16, w;
    for (w = 0; w < workers; w++) {
        nj_ctx_desc ctx_desc;
        nji_jit jit;
        int i;
        if (fork() != 0) continue;
        memset(&ctx_desc, 0, sizeof ctx_desc);
        ctx_desc.cache_dir = cache;
        memset(&jit, 0, sizeof jit);
        if (nji_jit_open(&jit, &ctx_desc, "tune") != NJ_OK) _exit(1);
        for (i = w; i < count; i += workers) {
            nji_options options;
            nji_jit_request request;
            nji_image image;
            nji_fast_options(desc, cols, &list[i].choice, &options);
            request.name = "norm_rows.cu";
            request.lines = nji_program_rows;
            request.source_hash = NJI_PROGRAM_ROWS_HASH;
            request.options = options.list;
            request.option_count = options.count;
            request.arch = arch;
            request.arch_specific = 0;
            if (nji_jit_image(&jit, &request, &image, "tune") == NJ_OK) nji_image_free(&image);
            else fprintf(stderr, "%s\n", nj_last_error());
        }
        _exit(0);
    }
    while (wait(NULL) > 0) {
    }
}

static float replay(gpu *g, void *exec) {
    float best[7];
    int i, j;
    void *from = gpu_event(g), *to = gpu_event(g);
    gpu_graph_launch(g, exec);
    for (i = 0; i < 7; i++) {
        gpu_record(g, from);
        gpu_graph_launch(g, exec);
        gpu_record(g, to);
        gpu_wait(g);
        best[i] = gpu_elapsed_ms(g, from, to) * 1000.0f / CALLS;
    }
    for (i = 0; i < 7; i++)
        for (j = i + 1; j < 7; j++)
            if (best[j] < best[i]) {
                float swap = best[i];
                best[i] = best[j];
                best[j] = swap;
            }
    gpu_event_free(g, from);
    gpu_event_free(g, to);
    return best[3];
}

static int by_time(const void *a, const void *b) {
    float x = ((const candidate *)a)->us, y = ((const candidate *)b)->us;
    return x < y ? -1 : x > y;
}

int main(int argc, char **argv) {
    static candidate list[MAX_CANDIDATES];
    nj_ctx_desc ctx_desc;
    nj_ctx *ctx;
    gpu g;
    int forward, s, i;
    nj_dtype dtype;
    void *add = NULL, *copy = NULL;
    if (argc < 6) return 2;
    forward = argv[2][0] == 'f';
    dtype = (nj_dtype)atoi(argv[3]);
    for (s = 4; s + 1 < argc; s += 2) { /* before the driver: fork */
        nj_desc desc;
        nji_device_facts facts;
        int count;
        facts.arch = 90;
        facts.multiprocessors = 132;
        describe(&desc, forward, dtype, atoll(argv[s]), atoll(argv[s + 1]));
        count = candidates(&desc, atoll(argv[s]), atoll(argv[s + 1]), &facts, list);
        compile_all(argv[1], &desc, atoll(argv[s + 1]), 90, list, count);
    }
    if (!gpu_open(&g, 0)) return printf("%s\n", g.error), 1;
    memset(&ctx_desc, 0, sizeof ctx_desc);
    ctx_desc.cache_dir = argv[1];
    ctx_desc.backend = NJ_BACKEND_CUDA;
    if (nj_ctx_create(&ctx, &ctx_desc) != NJ_OK) return printf("%s\n", nj_last_error()), 1;
    {
        const char *lines[2] = {roofline_source, NULL};
        nji_jit_request request;
        nji_image image;
        void *module = NULL;
        memset(&request, 0, sizeof request);
        request.name = "roofline";
        request.lines = lines;
        request.source_hash = nji_hash_text(NJI_HASH_SEED, roofline_source);
        request.arch = ctx->cuda.facts.arch;
        if (nji_jit_image(&ctx->cuda.jit, &request, &image, "tune") != NJ_OK) return printf("%s\n", nj_last_error()), 1;
        ctx->cuda.driver.cuModuleLoadDataEx(&module, image.data, 0, NULL, NULL);
        ctx->cuda.driver.cuModuleGetFunction(&add, module, "add");
        ctx->cuda.driver.cuModuleGetFunction(&copy, module, "copy");
    }
    for (s = 4; s + 1 < argc; s += 2) {
        int64_t rows = atoll(argv[s]), cols = atoll(argv[s + 1]);
        nj_desc desc;
        nj_plan *plan;
        int64_t shape[2], pshape[1], sshape[2];
        size_t bytes, set_bytes;
        int sets, count, k;
        void *x[64], *dy[64], *out[64], *mean, *rstd, *gamma, *beta, *dgamma, *dbeta, *workspace, *exec;
        float roofline;
        unsigned short *fill;
        describe(&desc, forward, dtype, rows, cols);
        if (nj_plan_select(&plan, ctx, &desc, NULL) != NJ_OK) return printf("%s\n", nj_last_error()), 1;
        shape[0] = sshape[0] = rows;
        shape[1] = pshape[0] = cols;
        sshape[1] = 1;
        bytes = (size_t)(rows * cols) * nj_dtype_size(dtype);
        set_bytes = bytes * (forward ? 2 : 3);
        sets = (int)(256000000 / set_bytes) + 2;
        if (sets > CALLS) sets = CALLS;
        fill = (unsigned short *)malloc(bytes);
        srand(1);
        for (size_t b = 0; b < bytes / 2; b++) {
            union { float f; unsigned u; } v;
            v.f = (float)rand() / (float)RAND_MAX * 2 - 1;
            fill[b] = (unsigned short)(v.u >> 16);
        }
        for (k = 0; k < sets; k++) {
            x[k] = gpu_alloc(&g, bytes);
            dy[k] = forward ? NULL : gpu_alloc(&g, bytes);
            out[k] = gpu_alloc(&g, bytes);
            if (!out[k]) return printf("%s\n", g.error), 1;
            gpu_upload(&g, x[k], fill, bytes);
            if (!forward) gpu_upload(&g, dy[k], fill, bytes);
        }
        mean = gpu_alloc(&g, (size_t)rows * 8);
        rstd = gpu_alloc(&g, (size_t)rows * 8);
        gpu_fill(&g, mean, 0, (size_t)rows * 8);
        gpu_fill(&g, rstd, 0x3f, (size_t)rows * 8);
        gamma = gpu_alloc(&g, (size_t)cols * 8);
        beta = gpu_alloc(&g, (size_t)cols * 8);
        dgamma = gpu_alloc(&g, (size_t)cols * 8);
        dbeta = gpu_alloc(&g, (size_t)cols * 8);
        gpu_upload(&g, gamma, fill, (size_t)cols * 2);
        gpu_upload(&g, beta, fill, (size_t)cols * 2);
        workspace = gpu_alloc(&g, (size_t)cols * 2 * 8 * 132 * 16 + 1024);
        free(fill);
        gpu_capture_begin(&g);
        for (k = 0; k < CALLS; k++) {
            long long n = (long long)(bytes / 16);
            void *p[4];
            p[0] = &out[k % sets];
            p[1] = &x[k % sets];
            p[2] = forward ? (void *)&n : (void *)&dy[k % sets];
            p[3] = &n;
            ctx->cuda.driver.cuLaunchKernel(forward ? copy : add, (unsigned)((n + 255) / 256), 1, 1, 256, 1, 1, 0, g.stream, p, NULL);
        }
        exec = gpu_capture_end(&g);
        roofline = replay(&g, exec);
        gpu_graph_free(&g, exec);
        count = candidates(&desc, rows, cols, &ctx->cuda.facts, list);
        for (i = -1; i < count; i++) {
            candidate *c = i < 0 ? NULL : &list[i];
            float us;
            int k2;
            nj_status status = NJ_OK;
            if (c) {
                plan->cuda.choice = c->choice;
                plan->workspace_bytes = (size_t)nji_workspace_of(&c->choice);
                status = nji_cuda_select_fast(&ctx->cuda, &plan->cuda, cols, "tune");
            }
            if (status != NJ_OK) return printf("%s\n", nj_last_error()), 1;
            gpu_capture_begin(&g);
            for (k2 = 0; k2 < CALLS && status == NJ_OK; k2++) {
                nj_args args;
                memset(&args, 0, sizeof args);
                k = k2 % sets;
                args.x = nj_packed_const(x[k], 2, shape);
                args.dy = nj_packed_const(dy[k], 2, shape);
                args.gamma = nj_packed_const(gamma, 1, pshape);
                args.beta = nj_packed_const(beta, 1, pshape);
                args.mean = nj_packed(mean, 2, sshape);
                args.rstd = nj_packed(rstd, 2, sshape);
                args.y = args.dx = nj_packed(out[k], 2, shape);
                args.dgamma = nj_packed(dgamma, 1, pshape);
                args.dbeta = nj_packed(dbeta, 1, pshape);
                status = nj_plan_run(plan, &args, workspace, plan->workspace_bytes, g.stream);
            }
            exec = gpu_capture_end(&g);
            if (status != NJ_OK || !exec) {
                return printf("failed: %s %s\n", nj_last_error(), g.error), 1;
            }
            us = replay(&g, exec);
            gpu_graph_free(&g, exec);
            if (c) c->us = us;
            else printf("%lld x %lld %s dtype %d: roofline %.1f table %.1f us ratio %.3f\n", (long long)rows,
                        (long long)cols, forward ? "fwd" : "bwd", (int)dtype, roofline, us, roofline / us);
        }
        qsort(list, (size_t)count, sizeof list[0], by_time);
        for (i = 0; i < count && i < 7; i++) {
            candidate *c = &list[i];
            printf("   %.1f us ratio %.3f: elements %d lanes %d/%d chunks %d threads %d slices %d blocks %d resident %d prefetch %d parts %d\n",
                   c->us, roofline / c->us, c->tuning.elements, c->choice.lanes, c->tuning.max_lanes, c->choice.chunks, c->choice.threads,
                   c->choice.slices, c->choice.blocks, c->tuning.resident, c->choice.prefetch, c->choice.parts);
        }
        printf("   of %d candidates\n", count);
        fflush(stdout);
        for (k = 0; k < sets; k++) {
            gpu_free(&g, x[k]);
            if (dy[k]) gpu_free(&g, dy[k]);
            gpu_free(&g, out[k]);
        }
        gpu_free(&g, workspace);
        nj_plan_destroy(plan);
    }
    nj_ctx_destroy(ctx);
    gpu_close(&g);
    return 0;
}
