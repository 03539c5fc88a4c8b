/* Measures candidate geometries of the rows kernels beside the plan that the tuning table gives, the
   alternatives that NJ_TUNE_MEASURE knows and the one that it chooses, and the elementwise kernel
   that moves the same bytes. For developers: the tuning table in include/normjit/select.h and
   ptx_src/DIARY.md come from it. `tune --help` says how to call it.

   Each number is the median of 7 replays of a graph of 24 calls over buffer sets that take turns
   and together exceed 256 MB, or as many sets as calls. */
#define _POSIX_C_SOURCE 200809L
#define NORMJIT_IMPLEMENTATION
#include "normjit.h"

#include "../examples/gpu.h"

#include <sys/wait.h>
#include <unistd.h>

enum {
    CALLS = 24,   /* in a graph; sets of buffers at most */
    REPLAYS = 7,  /* of a graph */
    WORKERS = 16, /* processes that compile */
    SHOWN = 7,    /* candidates of a shape, fastest first */
    MAX_CANDIDATES = 512
};

/* What is compiled for before the driver is opened, which no process that forks may have done: an
   H200. On another device candidates compile one by one, when they are measured. */
static const nji_device_facts FORK_FACTS = {90, 132};

static void die(const char *what, const char *why) {
    fprintf(stderr, "tune: %s: %s\n", what, why);
    exit(1);
}

static void require(nj_status status) {
    if (status != NJ_OK) die(nj_status_string(status), nj_last_error());
}

/* ---- the shape at hand ----------------------------------------------------------------------- */

typedef struct problem {
    nj_desc desc; /* defaults filled in */
    int64_t rows, cols;
    size_t bytes; /* of x */
} problem;

static int is_forward(const problem *p) {
    return p->desc.op == NJ_OP_LAYER_NORM_FORWARD;
}

static problem problem_of(nj_op op, nj_dtype dtype, int64_t rows, int64_t cols) {
    problem p;
    memset(&p, 0, sizeof p);
    p.desc.rank = 2;
    p.desc.shape[0] = rows;
    p.desc.shape[1] = cols;
    p.desc.norm_axes = 1u << 1;
    p.desc.op = op;
    p.desc.dtype = dtype;
    p.desc.has_gamma = p.desc.has_beta = 1;
    p.desc.eps = op == NJ_OP_LAYER_NORM_FORWARD ? 1e-5 : 0;
    require(nji_check_desc(&p.desc, &p.rows, &p.cols, "tune"));
    p.bytes = (size_t)(rows * cols) * nj_dtype_size(dtype);
    return p;
}

/* ---- candidates ------------------------------------------------------------------------------ */

typedef struct candidate {
    nji_tuning tuning;
    nji_choice choice;
    double us;
} candidate;

typedef struct candidates {
    candidate list[MAX_CANDIDATES];
    int count;
} candidates;

/* A rough bound: gamma and two accumulators for each column that a thread keeps, x and dy of one
   row, or of two with prefetch, packed two to a register when they are narrow. */
static int fits_registers(const problem *p, const nji_choice *c, int prefetch) {
    int per_thread = c->chunks * c->vec, rows = 1 + prefetch;
    int row = (p->desc.dtype == NJ_F32 ? 2 : 1) * rows;
    int have = 65536 / (c->blocks * c->threads);
    return per_thread * (3 + row) + 24 <= (have < 255 ? have : 255);
}

static int is_worth_a_try(const problem *p, const candidate *c) {
    const nji_choice *choice = &c->choice;
    if (choice->family != NJI_ROWS || choice->threads > 1024) return 0;
    if (choice->chunks * choice->vec > 32) return 0;
    if (choice->blocks > 32 || choice->blocks * choice->threads > 2048) return 0;
    if (choice->slices > 1 && choice->lanes < 128) return 0;
    return is_forward(p) || fits_registers(p, choice, c->tuning.prefetch);
}

/* Adds what the tuning row makes of the shape, unless another row has made the same of it. */
static void candidates_add(candidates *all, const problem *p, const nji_device_facts *facts,
                           const nji_tuning *tuning) {
    candidate *c = &all->list[all->count];
    nj_preference no_demands;
    int i;
    if (all->count == MAX_CANDIDATES) die("candidates", "too many");
    memset(c, 0, sizeof *c); /* padding, too: choices are compared bytewise */
    memset(&no_demands, 0, sizeof no_demands);
    c->tuning = *tuning;
    c->choice.forward = is_forward(p);
    nji_cut_row(&p->desc, tuning, p->cols, nji_vec_of(&p->desc, p->cols), facts->arch,
                &c->choice);
    if (!is_worth_a_try(p, c)) return;
    require(nji_choose_parts(&p->desc, p->rows, p->cols, facts, &no_demands, &c->choice, "tune"));
    for (i = 0; i < all->count; i++) {
        if (memcmp(&all->list[i].choice, &c->choice, sizeof c->choice) == 0) return;
    }
    all->count++;
}

#define COUNT(array) ((int)(sizeof(array) / sizeof(array)[0]))

/* All geometries that may be worth it. */
static void candidates_find(candidates *all, const problem *p, const nji_device_facts *facts) {
    static const int elements[] = {4, 8, 16, 24, 32};
    static const int resident[] = {256, 384, 512, 768, 1024, 2048};
    static const int lanes[] = {32, 128, 256, 512, 1024};
    static const int threads[] = {64, 128, 256};
    int e, r, l, t, prefetch;
    all->count = 0;
    for (e = 0; e < COUNT(elements); e++) {
        if (elements[e] < 16 / (int)nj_dtype_size(p->desc.dtype)) continue;
        for (r = 0; r < COUNT(resident); r++) {
            for (l = 0; l < COUNT(lanes); l++) {
                for (t = 0; t < (lanes[l] > 32 ? 1 : COUNT(threads)); t++) {
                    for (prefetch = 0; prefetch < (is_forward(p) ? 1 : 2); prefetch++) {
                        nji_tuning tuning;
                        memset(&tuning, 0, sizeof tuning);
                        tuning.elements = elements[e];
                        tuning.max_lanes = lanes[l];
                        tuning.threads = threads[t];
                        tuning.max_slices = 8;
                        tuning.resident = resident[r];
                        tuning.prefetch = prefetch;
                        candidates_add(all, p, facts, &tuning);
                    }
                }
            }
        }
    }
}

/* What NJ_TUNE_MEASURE chooses from; the table's choice first. */
typedef struct alternatives {
    nji_choice choice[NJI_TUNE_CANDIDATES];
    int count;
} alternatives;

static alternatives alternatives_of(const problem *p, const nji_device_facts *facts) {
    alternatives a;
    nj_preference no_demands;
    memset(&no_demands, 0, sizeof no_demands);
    a.count = nji_alternatives(&p->desc, p->rows, p->cols, facts, &no_demands, a.choice,
                               NJI_TUNE_CANDIDATES);
    return a;
}

static int by_time(const void *a, const void *b) {
    double x = ((const candidate *)a)->us, y = ((const candidate *)b)->us;
    return (x > y) - (x < y);
}

static void candidates_print(candidates *all, double roofline_us) {
    int i;
    qsort(all->list, (size_t)all->count, sizeof all->list[0], by_time);
    for (i = 0; i < all->count && i < SHOWN; i++) {
        const candidate *c = &all->list[i];
        printf("   %.1f us ratio %.3f: elements %d lanes %d/%d chunks %d threads %d slices %d "
               "blocks %d resident %d prefetch %d parts %d\n",
               c->us, roofline_us / c->us, c->tuning.elements, c->choice.lanes, c->tuning.max_lanes,
               c->choice.chunks, c->choice.threads, c->choice.slices, c->choice.blocks,
               c->tuning.resident, c->choice.prefetch, c->choice.parts);
    }
    printf("   of %d candidates\n", all->count);
    fflush(stdout);
}

/* ---- compiling ahead ------------------------------------------------------------------------- */

/* Every WORKERS-th candidate into the disk cache. */
static void compile_share(const char *cache, const problem *p, const candidates *all, int worker) {
    nj_ctx_desc how;
    nji_jit jit;
    int i;
    memset(&how, 0, sizeof how);
    memset(&jit, 0, sizeof jit);
    how.cache_dir = cache;
    require(nji_jit_open(&jit, &how, "tune"));
    for (i = worker; i < all->count; i += WORKERS) {
        const nji_fast_program *program = nji_fast_program_of(&all->list[i].choice);
        nji_options options;
        nji_jit_request request;
        nji_image image;
        nji_fast_options(&p->desc, p->cols, &all->list[i].choice, &options);
        request.name = program->name;
        request.lines = program->lines;
        request.source_hash = program->hash;
        request.options = options.list;
        request.option_count = options.count;
        request.arch = FORK_FACTS.arch;
        request.arch_specific = 0;
        if (nji_jit_image(&jit, &request, &image, "tune") == NJ_OK)
            nji_image_free(&image);
        else
            fprintf(stderr, "%s\n", nj_last_error());
    }
    nji_jit_close(&jit);
}

/* NVRTC is the slow part, and runs on one core: several processes fill the disk cache. */
static void compile_ahead(const char *cache, const problem *p) {
    static candidates all;
    int worker;
    candidates_find(&all, p, &FORK_FACTS);
    for (worker = 0; worker < WORKERS; worker++) {
        pid_t child = fork();
        if (child < 0) die("fork", "failed");
        if (child == 0) {
            compile_share(cache, p, &all, worker);
            _exit(0);
        }
    }
    while (wait(NULL) > 0) {
    }
}

/* ---- the device ------------------------------------------------------------------------------ */

typedef struct machine {
    gpu gpu;
    nj_ctx *ctx;
    void *add, *copy; /* the elementwise kernels */
} machine;

static void machine_require(machine *m, int ok) {
    if (!ok) die("CUDA", m->gpu.error);
}

static void machine_load_roofline(machine *m) {
    static const char source[] =
        "extern \"C\" __global__ void add(uint4 *o, const uint4 *a, const uint4 *b, long long n) "
        "{\n"
        "    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;\n"
        "    if (i < n) {\n"
        "        uint4 x = a[i], y = b[i];\n"
        "        o[i] = make_uint4(x.x ^ y.x, x.y ^ y.y, x.z ^ y.z, x.w ^ y.w);\n"
        "    }\n"
        "}\n"
        "extern \"C\" __global__ void copy(uint4 *o, const uint4 *a, long long n) {\n"
        "    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;\n"
        "    if (i < n) o[i] = a[i];\n"
        "}\n";
    const char *const lines[] = {source, NULL};
    const nji_driver *driver = &m->ctx->cuda.driver;
    nji_jit_request request;
    nji_image image;
    void *module;
    memset(&request, 0, sizeof request);
    request.name = "roofline";
    request.lines = lines;
    request.source_hash = nji_hash_text(NJI_HASH_SEED, source);
    request.arch = m->ctx->cuda.facts.arch;
    require(nji_jit_image(&m->ctx->cuda.jit, &request, &image, "tune"));
    machine_require(m,
                    gpu_ok(&m->gpu, driver->cuModuleLoadDataEx(&module, image.data, 0, NULL, NULL),
                           "cuModuleLoadDataEx") &&
                        gpu_ok(&m->gpu, driver->cuModuleGetFunction(&m->add, module, "add"),
                               "cuModuleGetFunction") &&
                        gpu_ok(&m->gpu, driver->cuModuleGetFunction(&m->copy, module, "copy"),
                               "cuModuleGetFunction"));
    nji_image_free(&image);
}

static void machine_open(machine *m, const char *cache) {
    nj_ctx_desc how;
    machine_require(m, gpu_open(&m->gpu, 0));
    memset(&how, 0, sizeof how);
    how.cache_dir = cache;
    how.backend = NJ_BACKEND_CUDA;
    require(nj_ctx_create(&m->ctx, &how));
    machine_load_roofline(m);
}

static void machine_close(machine *m) {
    nj_ctx_destroy(m->ctx);
    gpu_close(&m->gpu);
}

static void *machine_alloc(machine *m, size_t bytes) {
    void *p = gpu_alloc(&m->gpu, bytes);
    machine_require(m, p != NULL);
    return p;
}

/* ---- operands -------------------------------------------------------------------------------- */

typedef struct operands {
    nj_plan *plan;
    int sets;
    nj_args args[CALLS]; /* those of a set; sets share statistics and parameters */
    void *memory[CALLS]; /* x, dy and the output of a set */
    void *shared;        /* statistics and parameters */
    void *workspace;
} operands;

static size_t padded(size_t bytes) {
    return (bytes + 255) / 256 * 256;
}

/* The upper halves of numbers in [-1, 1): bf16; read as f16 or f32, finite numbers below 2. */
static void *random_bytes(size_t bytes) {
    uint16_t *halves = (uint16_t *)malloc(bytes);
    size_t i;
    if (!halves) die("malloc", "out of memory");
    srand(1);
    for (i = 0; i < bytes / 2; i++) {
        float value = (float)rand() / (float)RAND_MAX * 2 - 1;
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        halves[i] = (uint16_t)(bits >> 16);
    }
    return halves;
}

static void operands_fill_set(machine *m, const problem *p, operands *o, const void *fill,
                              int set) {
    char *at = (char *)machine_alloc(m, 3 * padded(p->bytes));
    nj_args *args = &o->args[set];
    o->memory[set] = at;
    args->x = nj_packed_const(at, 2, p->desc.shape);
    args->dy = nj_packed_const(at + padded(p->bytes), 2, p->desc.shape);
    args->y = args->dx = nj_packed(at + 2 * padded(p->bytes), 2, p->desc.shape);
    machine_require(m, gpu_upload(&m->gpu, at, fill, p->bytes) &&
                           gpu_upload(&m->gpu, at + padded(p->bytes), fill, p->bytes));
}

/* One mean of 0, one rstd near 0.75 for all rows; gamma and beta like x. */
static void operands_fill_shared(machine *m, const problem *p, operands *o, const void *fill) {
    size_t stat = padded((size_t)p->rows * sizeof(double));
    size_t param = padded((size_t)p->cols * sizeof(double));
    size_t param_bytes = (size_t)p->cols * nj_dtype_size(p->desc.dtype);
    char *at = (char *)machine_alloc(m, 2 * stat + 4 * param), *params = at + 2 * stat;
    int64_t stat_shape[2];
    int set;
    o->shared = at;
    machine_require(m, gpu_fill(&m->gpu, at, 0, stat) && gpu_fill(&m->gpu, at + stat, 0x3f, stat) &&
                           gpu_upload(&m->gpu, params, fill, param_bytes) &&
                           gpu_upload(&m->gpu, params + param, fill, param_bytes));
    stat_shape[0] = p->rows;
    stat_shape[1] = 1;
    for (set = 0; set < o->sets; set++) {
        nj_args *args = &o->args[set];
        args->mean = nj_packed(at, 2, stat_shape);
        args->rstd = nj_packed(at + stat, 2, stat_shape);
        args->gamma = nj_packed_const(params, 1, &p->cols);
        args->beta = nj_packed_const(params + param, 1, &p->cols);
        args->dgamma = nj_packed(params + 2 * param, 1, &p->cols);
        args->dbeta = nj_packed(params + 3 * param, 1, &p->cols);
    }
}

/* The workspace is large enough for every candidate and alternative. */
static void operands_open(machine *m, const problem *p, const candidates *all, operands *o) {
    alternatives others = alternatives_of(p, &m->ctx->cuda.facts);
    size_t moved = p->bytes * (is_forward(p) ? 2 : 3), workspace;
    void *fill = random_bytes(p->bytes);
    int i;
    memset(o, 0, sizeof *o);
    require(nj_plan_select(&o->plan, m->ctx, &p->desc, NULL));
    o->sets = (int)(256000000 / moved) + 2;
    if (o->sets > CALLS) o->sets = CALLS;
    for (i = 0; i < o->sets; i++)
        operands_fill_set(m, p, o, fill, i);
    operands_fill_shared(m, p, o, fill);
    free(fill);
    workspace = o->plan->workspace_bytes;
    for (i = 0; i < all->count; i++) {
        size_t needed = (size_t)nji_workspace_of(&all->list[i].choice);
        if (needed > workspace) workspace = needed;
    }
    for (i = 0; i < others.count; i++) {
        size_t needed = (size_t)nji_workspace_of(&others.choice[i]);
        if (needed > workspace) workspace = needed;
    }
    o->workspace = machine_alloc(m, workspace + 1); /* a forward may need none */
}

static void operands_close(machine *m, operands *o) {
    int set;
    for (set = 0; set < o->sets; set++)
        gpu_free(&m->gpu, o->memory[set]);
    gpu_free(&m->gpu, o->shared);
    gpu_free(&m->gpu, o->workspace);
    nj_plan_destroy(o->plan);
}

/* ---- timing ---------------------------------------------------------------------------------- */

typedef void (*call_fn)(machine *m, const problem *p, const operands *o, int set);

static void call_norm(machine *m, const problem *p, const operands *o, int set) {
    (void)p;
    require(
        nj_plan_run(o->plan, &o->args[set], o->workspace, o->plan->workspace_bytes, m->gpu.stream));
}

static void call_roofline(machine *m, const problem *p, const operands *o, int set) {
    const nj_args *args = &o->args[set];
    const void *x = args->x.data, *dy = args->dy.data;
    void *out = args->dx.data, *parameters[4];
    long long count = (long long)(p->bytes / 16);
    int n = 0;
    parameters[n++] = &out;
    parameters[n++] = &x;
    if (!is_forward(p)) parameters[n++] = &dy;
    parameters[n++] = &count;
    machine_require(m, gpu_ok(&m->gpu,
                              m->ctx->cuda.driver.cuLaunchKernel(
                                  is_forward(p) ? m->copy : m->add, (unsigned)((count + 255) / 256),
                                  1, 1, 256, 1, 1, 0, m->gpu.stream, parameters, NULL),
                              "cuLaunchKernel"));
}

static int by_value(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Microseconds of one call. */
static double measure(machine *m, const problem *p, const operands *o, call_fn call) {
    gpu *g = &m->gpu;
    void *graph, *from = gpu_event(g), *to = gpu_event(g);
    float ms[REPLAYS];
    int i;
    machine_require(m, from && to && gpu_capture_begin(g));
    for (i = 0; i < CALLS; i++)
        call(m, p, o, i % o->sets);
    graph = gpu_capture_end(g);
    machine_require(m, graph && gpu_graph_launch(g, graph)); /* warms up */
    for (i = 0; i < REPLAYS; i++) {
        machine_require(m, gpu_record(g, from) && gpu_graph_launch(g, graph) && gpu_record(g, to));
        ms[i] = gpu_elapsed_ms(g, from, to);
        machine_require(m, ms[i] >= 0);
    }
    qsort(ms, REPLAYS, sizeof ms[0], by_value);
    gpu_graph_free(g, graph);
    gpu_event_free(g, from);
    gpu_event_free(g, to);
    return 1e3 * ms[REPLAYS / 2] / CALLS;
}

/* Puts the candidate's kernels into the plan in place of those there. */
static void plan_take(machine *m, const problem *p, nj_plan *plan, const nji_choice *choice) {
    plan->cuda.choice = *choice;
    plan->cuda.fast[0].second = NULL; /* the table may have chosen two kernels */
    require(nji_cuda_select(&m->ctx->cuda, &plan->cuda, p->cols, "tune"));
    plan->workspace_bytes = plan->cuda.workspace_bytes;
}

/* ---- measured selection ---------------------------------------------------------------------- */

/* What NJ_TUNE_MEASURE takes, with as much memory as it can use, beside what it chose from. */
static void alternatives_print(machine *m, const problem *p, operands *o, double roofline) {
    alternatives a = alternatives_of(p, &m->ctx->cuda.facts);
    nj_preference pref;
    nj_cache_stats before, after;
    nj_plan *plan;
    nj_sku sku;
    size_t least, enough;
    int i;
    for (i = 0; i < a.count; i++) {
        const nji_choice *c = &a.choice[i];
        double us;
        plan_take(m, p, o->plan, c);
        us = measure(m, p, o, call_norm);
        printf("   alternative %d: %.1f us ratio %.3f: lanes %d chunks %d threads %d slices %d "
               "blocks %d prefetch %d ahead %d parts %d\n",
               i, us, roofline / us, c->lanes, c->chunks, c->threads, c->slices, c->blocks,
               c->prefetch, c->ahead, c->parts);
    }
    memset(&pref, 0, sizeof pref);
    require(nj_tune_scratch_size(m->ctx, &p->desc, NULL, &least, &enough));
    if (enough == 0) return;
    pref.tune = NJ_TUNE_MEASURE;
    pref.tune_scratch = machine_alloc(m, enough);
    pref.tune_scratch_bytes = enough;
    pref.tune_stream = m->gpu.stream;
    require(nj_ctx_cache_stats(m->ctx, &before));
    require(nj_plan_select(&plan, m->ctx, &p->desc, &pref));
    require(nj_ctx_cache_stats(m->ctx, &after));
    require(nj_plan_sku(plan, NULL, &sku));
    printf("   alternative %d is chosen (%s; scratch %zu to %zu bytes)\n", sku.candidate,
           after.tunes > before.tunes ? "measured now" : "remembered", least, enough);
    nj_plan_destroy(plan);
    gpu_free(&m->gpu, pref.tune_scratch);
}

/* ---- the command line ------------------------------------------------------------------------ */

static const char *const dtype_name[] = {"", "f16", "bf16", "f32", "f64"};

static void tune(machine *m, const problem *p) {
    static candidates all;
    operands o;
    double roofline, table;
    int i;
    candidates_find(&all, p, &m->ctx->cuda.facts);
    operands_open(m, p, &all, &o);
    roofline = measure(m, p, &o, call_roofline);
    table = measure(m, p, &o, call_norm);
    printf("%lld x %lld %s %s: roofline %.1f table %.1f us ratio %.3f\n", (long long)p->rows,
           (long long)p->cols, is_forward(p) ? "fwd" : "bwd", dtype_name[p->desc.dtype], roofline,
           table, roofline / table);
    alternatives_print(m, p, &o, roofline);
    for (i = 0; i < all.count; i++) {
        plan_take(m, p, o.plan, &all.list[i].choice);
        all.list[i].us = measure(m, p, &o, call_norm);
    }
    candidates_print(&all, roofline);
    operands_close(m, &o);
}

static void usage(FILE *to) {
    fputs("usage: tune CACHE_DIR fwd|bwd f16|bf16|f32|f64 ROWS COLS [ROWS COLS ...]\n"
          "  CACHE_DIR  kernels are kept there from run to run\n"
          "Prints for each shape the elementwise kernel, what the tuning table gives, what\n"
          "NJ_TUNE_MEASURE chooses from and takes, and the fastest candidates. Needs a GPU;\n"
          "compiles hundreds of kernels.\n",
          to);
}

static void misuse(const char *what, const char *value) {
    fprintf(stderr, "tune: %s %s\n", what, value);
    usage(stderr);
    exit(2);
}

static nj_op parse_op(const char *text) {
    if (strcmp(text, "fwd") == 0) return NJ_OP_LAYER_NORM_FORWARD;
    if (strcmp(text, "bwd") != 0) misuse("neither fwd nor bwd:", text);
    return NJ_OP_LAYER_NORM_BACKWARD;
}

static nj_dtype parse_dtype(const char *text) {
    int i;
    for (i = 1; i < COUNT(dtype_name); i++) {
        if (strcmp(text, dtype_name[i]) == 0) return (nj_dtype)i;
    }
    misuse("no such type:", text);
    return NJ_DTYPE_UNSET;
}

static int64_t parse_extent(const char *text) {
    char *end;
    long long n = strtoll(text, &end, 10);
    if (end == text || *end || n < 1 || n > INT32_MAX) misuse("neither rows nor cols:", text);
    return n;
}

int main(int argc, char **argv) {
    machine m;
    nj_op op;
    nj_dtype dtype;
    int pass, i;
    if (argc == 2 && strcmp(argv[1], "--help") == 0) {
        usage(stdout);
        return 0;
    }
    if (argc < 6 || argc % 2 != 0) misuse("too few arguments, or rows without cols", "");
    op = parse_op(argv[2]);
    dtype = parse_dtype(argv[3]);
    for (pass = 0; pass < 2; pass++) {
        if (pass == 1) machine_open(&m, argv[1]);
        for (i = 4; i < argc; i += 2) {
            problem p = problem_of(op, dtype, parse_extent(argv[i]), parse_extent(argv[i + 1]));
            if (pass == 0)
                compile_ahead(argv[1], &p);
            else
                tune(&m, &p);
        }
    }
    machine_close(&m);
    return 0;
}
