/* Times a norm beside the elementwise kernel that moves the same bytes: for a backward
   dx[i] = x[i] + dy[i], for a forward y[i] = x[i]. That kernel is the practical roofline: it runs
   in the same process, on the same buffers, turn by turn with ours. `bench --help` lists options.

   bytes     the fewest that must move: x, dy and dx (x and y) once; statistics and parameters not
             counted
   host      median of --repeats calls of each kind; three or more buffer sets take turns, so that
             nobody finds its own operands in a cache. Buffers lie as malloc gives them (16 bytes
             past a page), and the elementwise loop is vectorized: without `simd` gcc -O2 leaves it
             scalar, which flatters the ratio by a third
   CUDA      graphs of enough calls to last 2 ms over buffer sets that together exceed four times
             60 MB; median of --repeats replays; the fastest of several shapes of the elementwise
             kernel counts */
#define _POSIX_C_SOURCE 200809L
#define NORMJIT_IMPLEMENTATION
#include "normjit.h"

#include "../examples/gpu.h"

#include <dirent.h>
#include <errno.h>
#include <time.h>
#include <unistd.h>

static void die(const char *what, const char *why) {
    fprintf(stderr, "bench: %s: %s\n", what, why);
    exit(1);
}

static void require(nj_status status) {
    if (status != NJ_OK) die(nj_status_string(status), nj_last_error());
}

/* ---- what is timed --------------------------------------------------------------------------- */

typedef struct problem {
    nj_op op;
    nj_dtype dtype;
    int64_t rows, cols;
} problem;

static const nj_op FORWARD = NJ_OP_LAYER_NORM_FORWARD, BACKWARD = NJ_OP_LAYER_NORM_BACKWARD;

static const char *const dtype_name[] = {"", "f16", "bf16", "f32", "f64"};

/* Rows and cols of each suite; ended by 0 rows. */
typedef struct suite_part {
    const char *suite;
    nj_op op;
    nj_dtype dtype;
    int64_t shapes[24][2];
} suite_part;

static const suite_part suites[] = {
    {"host", NJ_OP_LAYER_NORM_BACKWARD, NJ_F32,
     {{8192, 768}, {4096, 4096}, {1024, 12288}, {131072, 128}}},
    {"host", NJ_OP_LAYER_NORM_FORWARD, NJ_F32,
     {{8192, 768}, {4096, 4096}, {1024, 12288}, {131072, 128}}},
    {"models", NJ_OP_LAYER_NORM_BACKWARD, NJ_BF16,
     {{16384, 4096}, {8192, 8192}, {4096, 16384}, {8192, 5120}, {1024, 12288},  {8192, 4096},
      {4096, 6144},  {4096, 8192}, {2048, 4096},  {131072, 128}, {8192, 128},   {4096, 2048},
      {16384, 128},  {8192, 768},  {32768, 1024}, {4096, 1023},  {4096, 12345}, {512, 65536},
      {512, 262144}, {16, 8192},   {1048576, 64}, {401408, 24}}},
    {"models", NJ_OP_LAYER_NORM_FORWARD, NJ_BF16,
     {{16384, 4096}, {8192, 8192}, {4096, 16384}, {1024, 12288}, {8192, 768}, {131072, 128}}},
    {"models", NJ_OP_LAYER_NORM_BACKWARD, NJ_F32,
     {{16384, 4096}, {1024, 12288}, {8192, 768}, {131072, 128}, {4096, 16384}}},
};

static nj_desc describe(const problem *p) {
    nj_desc desc = {0};
    desc.rank = 2;
    desc.norm_axes = 1u << 1;
    desc.shape[0] = p->rows;
    desc.shape[1] = p->cols;
    desc.op = p->op;
    desc.dtype = p->dtype;
    desc.has_gamma = desc.has_beta = 1;
    desc.eps = p->op == FORWARD ? 1e-5 : 0;
    return desc;
}

/* ---- where it runs --------------------------------------------------------------------------- */

typedef struct machine {
    int on_gpu;
    gpu gpu;
    nj_ctx *ctx;
    int (*module_load)(void **module, const void *image);
    int (*module_function)(void **function, void *module, const char *name);
    int (*launch)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                  unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                  void *stream, void **parameters, void **extra);
    void *roofline[2][3]; /* elementwise kernels: copy and add, by log2 of the unrolling */
} machine;

static void machine_require(machine *m, int ok) {
    if (!ok) die("CUDA", m->gpu.error);
}

static void machine_open(machine *m, nj_backend backend) {
    nj_ctx_desc how = {0};
    void *driver;
    memset(m, 0, sizeof *m);
    how.backend = backend;
    m->on_gpu = backend != NJ_BACKEND_HOST && gpu_open(&m->gpu, 0);
    if (backend == NJ_BACKEND_CUDA) machine_require(m, m->on_gpu);
    require(nj_ctx_create(&m->ctx, &how));
    if (nj_ctx_backend(m->ctx) == NJ_BACKEND_HOST) { /* asked for, or no device serves */
        if (m->on_gpu) gpu_close(&m->gpu);
        m->on_gpu = 0;
        return;
    }
    driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    machine_require(m, gpu_symbol(&m->gpu, driver, "cuModuleLoadData", &m->module_load));
    machine_require(m, gpu_symbol(&m->gpu, driver, "cuModuleGetFunction", &m->module_function));
    machine_require(m, gpu_symbol(&m->gpu, driver, "cuLaunchKernel", &m->launch));
}

static void machine_close(machine *m) {
    nj_ctx_destroy(m->ctx);
    if (m->on_gpu) gpu_close(&m->gpu);
}

static void *machine_alloc(machine *m, size_t bytes) {
    void *p = m->on_gpu ? gpu_alloc(&m->gpu, bytes) : malloc(bytes);
    if (!p) die("out of memory", m->on_gpu ? m->gpu.error : "malloc");
    return p;
}

static void machine_free(machine *m, void *p) {
    if (m->on_gpu) gpu_free(&m->gpu, p);
    else free(p);
}

static void machine_upload(machine *m, void *dst, const void *src, size_t bytes) {
    if (m->on_gpu) machine_require(m, gpu_upload(&m->gpu, dst, src, bytes));
    else memcpy(dst, src, bytes);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- operands -------------------------------------------------------------------------------- */

enum { FILL_BYTES = 1 << 20 };

/* count numbers of a type: sign and mantissa from a generator, exponent that of [0.5, 1). */
static void fill_random(machine *m, void *dst, nj_dtype dtype, int64_t count) {
    static const uint64_t half[] = {0, 0x3800, 0x3f00, 0x3f000000, 0x3fe0000000000000};
    static const uint64_t free_bits[] = {0, 0x83ff, 0x807f, 0x807fffff, 0x800fffffffffffff};
    static unsigned char tile[FILL_BYTES];
    size_t size = nj_dtype_size(dtype), bytes = (size_t)count * size, done, i;
    uint64_t state = 88172645463325252u;
    for (i = 0; i < FILL_BYTES; i += size) {
        uint64_t bits;
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bits = half[dtype] | ((state >> 8 * (8 - size)) & free_bits[dtype]);
        memcpy(tile + i, &bits, size); /* little-endian, as every machine with CUDA is */
    }
    for (done = 0; done < bytes; done += FILL_BYTES) {
        size_t part = bytes - done < FILL_BYTES ? bytes - done : FILL_BYTES;
        machine_upload(m, (char *)dst + done, tile, part);
    }
}

typedef struct operands {
    nj_plan *plan;
    int sets;
    nj_args *args;  /* one for each set */
    void **memory;  /* likewise: all tensors of a set */
    void *workspace;
    size_t workspace_bytes;
    int64_t bytes; /* of x */
    double moved;  /* bytes that one call must move */
} operands;

static size_t tensor_bytes(nj_dtype dtype, int64_t count) {
    return ((size_t)count * nj_dtype_size(dtype) + 255) / 256 * 256;
}

/* The next count numbers at *at. Outputs are filled, too: a page must not be touched first by a
   kernel that is timed. */
static void *take(machine *m, char **at, nj_dtype dtype, int64_t count) {
    void *tensor = *at;
    fill_random(m, tensor, dtype, count);
    *at += tensor_bytes(dtype, count);
    return tensor;
}

static void operands_fill_set(machine *m, const problem *p, operands *o, int set) {
    const nj_dtype stat_dtype = p->dtype == NJ_F64 ? NJ_F64 : NJ_F32;
    int64_t full[2], stat[2], param[1], count = p->rows * p->cols;
    nj_args *a = &o->args[set];
    char *at = machine_alloc(m, 3 * tensor_bytes(p->dtype, count) +
                                    4 * tensor_bytes(p->dtype, p->cols) +
                                    2 * tensor_bytes(stat_dtype, p->rows));
    o->memory[set] = at;
    full[0] = stat[0] = p->rows;
    full[1] = param[0] = p->cols;
    stat[1] = 1;
    a->x = nj_packed_const(take(m, &at, p->dtype, count), 2, full);
    a->dy = nj_packed_const(take(m, &at, p->dtype, count), 2, full);
    a->y = a->dx = nj_packed(take(m, &at, p->dtype, count), 2, full);
    a->gamma = nj_packed_const(take(m, &at, p->dtype, p->cols), 1, param);
    a->beta = nj_packed_const(take(m, &at, p->dtype, p->cols), 1, param);
    a->dgamma = nj_packed(take(m, &at, p->dtype, p->cols), 1, param);
    a->dbeta = nj_packed(take(m, &at, p->dtype, p->cols), 1, param);
    a->mean = nj_packed(take(m, &at, stat_dtype, p->rows), 2, stat);
    a->rstd = nj_packed(take(m, &at, stat_dtype, p->rows), 2, stat);
}

/* Sets: an odd number, so that two kernels taking turns over them change sets each time. */
static void operands_open(machine *m, const problem *p, operands *o) {
    const double beyond_cache = 256e6;
    const int most = 513;
    nj_desc desc = describe(p);
    int set;
    memset(o, 0, sizeof *o);
    require(nj_plan_select(&o->plan, m->ctx, &desc, NULL));
    o->bytes = p->rows * p->cols * (int64_t)nj_dtype_size(p->dtype);
    o->moved = (p->op == FORWARD ? 2.0 : 3.0) * (double)o->bytes;
    o->sets = o->moved * most < beyond_cache ? most : (int)(beyond_cache / o->moved) + 1;
    if (o->sets < 3) o->sets = 3;
    o->sets |= 1;
    o->args = calloc((size_t)o->sets, sizeof *o->args);
    o->memory = calloc((size_t)o->sets, sizeof *o->memory);
    if (!o->args || !o->memory) die("out of memory", "operands");
    for (set = 0; set < o->sets; set++) operands_fill_set(m, p, o, set);
    o->workspace_bytes = nj_plan_workspace_size(o->plan);
    if (o->workspace_bytes) o->workspace = machine_alloc(m, o->workspace_bytes);
}

static void operands_close(machine *m, operands *o) {
    int set;
    for (set = 0; set < o->sets; set++) machine_free(m, o->memory[set]);
    if (o->workspace) machine_free(m, o->workspace);
    free(o->args);
    free(o->memory);
    nj_plan_destroy(o->plan);
}

static void run_norm(machine *m, const operands *o, int set) {
    require(nj_plan_run(o->plan, &o->args[set], o->workspace, o->workspace_bytes, m->gpu.stream));
}

/* ---- the roofline on the host ---------------------------------------------------------------- */

#ifdef _OPENMP
#define PARALLEL_SIMD _Pragma("omp parallel for simd schedule(static)")
#else
#define PARALLEL_SIMD
#endif

/* Integers: the same bytes whatever the element type. */
static void host_add(const uint32_t *x, const uint32_t *dy, uint32_t *out, int64_t words) {
    int64_t i;
    PARALLEL_SIMD
    for (i = 0; i < words; i++) out[i] = x[i] + dy[i];
}

static void host_copy(const uint32_t *x, uint32_t *out, int64_t words) {
    int64_t i;
    PARALLEL_SIMD
    for (i = 0; i < words; i++) out[i] = x[i];
}

static void host_roofline(const problem *p, const operands *o, int set) {
    const nj_args *a = &o->args[set];
    int64_t words = o->bytes / (int64_t)sizeof(uint32_t);
    if (p->op == FORWARD) {
        host_copy((const uint32_t *)a->x.data, (uint32_t *)a->y.data, words);
    } else {
        host_add((const uint32_t *)a->x.data, (const uint32_t *)a->dy.data,
                 (uint32_t *)a->dx.data, words);
    }
}

/* ---- the roofline on a GPU ------------------------------------------------------------------- */

/* An elementwise kernel: each thread takes `unroll` vectors of 16 bytes, a block's width apart, and
   loads all of them before it adds and stores. PTX, so that timing needs no compiler. */
typedef struct roofline {
    void *function;
    int unroll;
    unsigned threads;
} roofline;

enum { MAX_UNROLL = 4 };

static void roofline_write(char *text, size_t room, int is_add, int unroll) {
    size_t n = 0;
    int u;
#define EMIT(...) n += (size_t)snprintf(text + n, n < room ? room - n : 0, __VA_ARGS__)
    EMIT(".version 6.3\n.target sm_75\n.address_size 64\n"
         ".visible .entry roofline(.param .u64 px, .param .u64 py, .param .u64 pout, "
         ".param .u64 pcount)\n{\n"
         ".reg .pred in<%d>;\n.reg .b32 block, threads, lane, a<16>, b<16>;\n"
         ".reg .b64 x, y, out, count, first, step, i, at<%d>, p;\n",
         MAX_UNROLL, MAX_UNROLL);
    EMIT("ld.param.u64 x, [px];\nld.param.u64 y, [py];\nld.param.u64 out, [pout];\n"
         "ld.param.u64 count, [pcount];\n"
         "mov.u32 block, %%ctaid.x;\nmov.u32 threads, %%ntid.x;\nmov.u32 lane, %%tid.x;\n"
         "cvt.u64.u32 step, threads;\nmul.wide.u32 first, block, threads;\n"
         "mul.lo.u64 first, first, %d;\ncvt.u64.u32 i, lane;\nadd.u64 i, i, first;\n",
         unroll);
    for (u = 0; u < unroll; u++) {
        int r = 4 * u;
        EMIT("setp.lt.u64 in%d, i, count;\nshl.b64 at%d, i, 4;\nadd.u64 i, i, step;\n"
             "add.u64 p, x, at%d;\n@in%d ld.global.nc.v4.u32 {a%d, a%d, a%d, a%d}, [p];\n",
             u, u, u, u, r, r + 1, r + 2, r + 3);
        if (!is_add) continue;
        EMIT("add.u64 p, y, at%d;\n@in%d ld.global.nc.v4.u32 {b%d, b%d, b%d, b%d}, [p];\n", u, u, r,
             r + 1, r + 2, r + 3);
    }
    for (u = 0; u < unroll; u++) {
        int r = 4 * u, k;
        for (k = r; is_add && k < r + 4; k++) EMIT("add.u32 a%d, a%d, b%d;\n", k, k, k);
        EMIT("add.u64 p, out, at%d;\n@in%d st.global.v4.u32 [p], {a%d, a%d, a%d, a%d};\n", u, u, r,
             r + 1, r + 2, r + 3);
    }
    EMIT("ret;\n}\n");
#undef EMIT
    if (n >= room) die("roofline", "PTX does not fit");
}

static void roofline_launch(machine *m, const roofline *r, const operands *o, int set) {
    const nj_args *a = &o->args[set];
    uint64_t count = (uint64_t)o->bytes / 16, block = (uint64_t)r->unroll * r->threads;
    const void *x = a->x.data, *dy = a->dy.data;
    void *out = a->dx.data, *parameters[4];
    parameters[0] = &x;
    parameters[1] = &dy;
    parameters[2] = &out;
    parameters[3] = &count;
    machine_require(m, gpu_ok(&m->gpu,
                              m->launch(r->function, (unsigned)((count + block - 1) / block), 1, 1,
                                        r->threads, 1, 1, 0, m->gpu.stream, parameters, NULL),
                              "cuLaunchKernel"));
}

/* Compares the first and last MiB of one launch's output with what it should be. */
static void roofline_check(machine *m, const roofline *r, const operands *o, int is_add) {
    static uint32_t x[FILL_BYTES / 4], dy[FILL_BYTES / 4], out[FILL_BYTES / 4];
    const nj_args *a = &o->args[0];
    size_t whole = (size_t)o->bytes / 16 * 16, bytes = whole < FILL_BYTES ? whole : FILL_BYTES, i;
    int end;
    machine_require(m, gpu_fill(&m->gpu, a->dx.data, 0xff, (size_t)o->bytes));
    roofline_launch(m, r, o, 0);
    for (end = 0; end < 2; end++) {
        size_t at = end ? whole - bytes : 0;
        machine_require(m,
                        gpu_download(&m->gpu, x, (const char *)a->x.data + at, bytes) &&
                            gpu_download(&m->gpu, dy, (const char *)a->dy.data + at, bytes) &&
                            gpu_download(&m->gpu, out, (const char *)a->dx.data + at, bytes));
        for (i = 0; i < bytes / 4; i++) {
            if (out[i] != (is_add ? x[i] + dy[i] : x[i])) die("roofline", "its output is wrong");
        }
    }
}

/* The kernel of that shape, compiled and checked when first asked for. */
static void roofline_get(machine *m, const operands *o, int is_add, int log2_unroll, roofline *r) {
    void **function = &m->roofline[is_add][log2_unroll], *module;
    char text[8192];
    r->unroll = 1 << log2_unroll;
    if (!*function) {
        roofline_write(text, sizeof text, is_add, r->unroll);
        machine_require(m, gpu_ok(&m->gpu, m->module_load(&module, text), "cuModuleLoadData") &&
                               gpu_ok(&m->gpu, m->module_function(function, module, "roofline"),
                                      "cuModuleGetFunction"));
        r->function = *function;
        r->threads = 256;
        roofline_check(m, r, o, is_add);
    }
    r->function = *function;
}

/* ---- timing ---------------------------------------------------------------------------------- */

typedef struct times {
    double ours, roofline; /* seconds of one call */
} times;

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, int count) {
    qsort(values, (size_t)count, sizeof *values, by_value);
    return count % 2 ? values[count / 2] : (values[count / 2 - 1] + values[count / 2]) / 2;
}

enum { MAX_REPEATS = 1000 };

static times time_host(machine *m, const problem *p, const operands *o, int repeats) {
    static double ours[MAX_REPEATS], roofline[MAX_REPEATS];
    times out;
    int i;
    for (i = -1; i < repeats; i++) { /* the first turn warms up */
        int turn = 2 * (i + 1);
        double t0 = now(), t1, t2;
        run_norm(m, o, turn % o->sets);
        t1 = now();
        host_roofline(p, o, (turn + 1) % o->sets);
        t2 = now();
        if (i < 0) continue;
        ours[i] = t1 - t0;
        roofline[i] = t2 - t1;
    }
    out.ours = median(ours, repeats);
    out.roofline = median(roofline, repeats);
    return out;
}

/* A graph of calls over the sets in turn; r NULL: of the norm. */
typedef struct replay {
    void *exec;
    int calls;
    double seconds; /* of one call, first look */
} replay;

static void replay_capture(machine *m, const operands *o, const roofline *r, int calls,
                           replay *out) {
    int i;
    machine_require(m, gpu_capture_begin(&m->gpu));
    for (i = 0; i < calls; i++) {
        if (r) roofline_launch(m, r, o, i % o->sets);
        else run_norm(m, o, i % o->sets);
    }
    out->exec = gpu_capture_end(&m->gpu);
    out->calls = calls;
    machine_require(m, out->exec != NULL);
}

/* Launches `count` graphs in turn without a pause; ms[i] is what graphs[i % kinds] took. */
static void replay_time(machine *m, const replay *graphs, int kinds, int count, double *ms) {
    static void *event[2 * MAX_REPEATS + 1];
    int i;
    for (i = 0; i <= count; i++) machine_require(m, (event[i] = gpu_event(&m->gpu)) != NULL);
    machine_require(m, gpu_graph_launch(&m->gpu, graphs[kinds - 1].exec)); /* warms up */
    for (i = 0; i < count; i++) {
        machine_require(m, gpu_record(&m->gpu, event[i]) &&
                               gpu_graph_launch(&m->gpu, graphs[i % kinds].exec));
    }
    machine_require(m, gpu_record(&m->gpu, event[count]));
    for (i = 0; i < count; i++) {
        ms[i] = gpu_elapsed_ms(&m->gpu, event[i], event[i + 1]);
        machine_require(m, ms[i] >= 0);
    }
    for (i = 0; i <= count; i++) gpu_event_free(&m->gpu, event[i]);
}

/* A graph of whole turns over the sets that lasts 2 ms or more. */
static void replay_open(machine *m, const operands *o, const roofline *r, replay *out) {
    const double least_ms = 2.0;
    double ms;
    replay_capture(m, o, r, o->sets, out);
    replay_time(m, out, 1, 1, &ms);
    if (ms < least_ms) {
        int turns = (int)(1.2 * least_ms / ms) + 1;
        gpu_graph_free(&m->gpu, out->exec);
        replay_capture(m, o, r, turns * o->sets, out);
        replay_time(m, out, 1, 1, &ms);
    }
    out->seconds = 1e-3 * ms / out->calls;
}

/* The fastest shape of the elementwise kernel for these operands. */
static void replay_open_roofline(machine *m, const problem *p, const operands *o, replay *best) {
    static const unsigned threads[] = {256, 512, 1024};
    size_t t;
    int log2_unroll;
    best->exec = NULL;
    for (log2_unroll = 0; 1 << log2_unroll <= MAX_UNROLL; log2_unroll++) {
        roofline r;
        roofline_get(m, o, p->op == BACKWARD, log2_unroll, &r);
        for (t = 0; t < sizeof threads / sizeof threads[0]; t++) {
            replay other;
            r.threads = threads[t];
            replay_open(m, o, &r, &other);
            if (!best->exec || other.seconds < best->seconds) {
                gpu_graph_free(&m->gpu, best->exec);
                *best = other;
            } else {
                gpu_graph_free(&m->gpu, other.exec);
            }
        }
    }
}

static times time_gpu(machine *m, const problem *p, const operands *o, int repeats) {
    static double ms[2 * MAX_REPEATS], values[2][MAX_REPEATS];
    replay graphs[2];
    times out;
    int i;
    replay_open(m, o, NULL, &graphs[0]);
    replay_open_roofline(m, p, o, &graphs[1]);
    replay_time(m, graphs, 2, 2 * repeats, ms);
    for (i = 0; i < 2 * repeats; i++) values[i % 2][i / 2] = 1e-3 * ms[i] / graphs[i % 2].calls;
    out.ours = median(values[0], repeats);
    out.roofline = median(values[1], repeats);
    gpu_graph_free(&m->gpu, graphs[0].exec);
    gpu_graph_free(&m->gpu, graphs[1].exec);
    return out;
}

/* ---- tables ---------------------------------------------------------------------------------- */

typedef enum format { TEXT, MARKDOWN, JSON } format;

typedef struct column {
    const char *title, *key; /* for people, for JSON */
} column;

enum { FIRST_NUMBER = 2, MAX_COLUMNS = 10 }; /* op and dtype are text, all other cells numbers */

typedef struct table {
    format format;
    const column *columns;
    int count, rows;
} table;

static void table_begin(table *t, const char *info) {
    int i;
    t->rows = 0;
    if (t->format == JSON) {
        const char *c;
        printf("{\"info\": \"");
        for (c = info; *c; c++) printf(*c == '"' || *c == '\\' ? "\\%c" : "%c", *c);
        printf("\", \"rows\": [");
        return;
    }
    printf("%s\n\n", info);
    for (i = 0; i < t->count; i++) {
        printf(t->format == MARKDOWN ? "| %s " : "%12s", t->columns[i].title);
    }
    printf(t->format == MARKDOWN ? "|\n" : "\n");
    for (i = 0; t->format == MARKDOWN && i < t->count; i++) {
        printf(i < FIRST_NUMBER ? "|---" : "|--:");
    }
    if (t->format == MARKDOWN) printf("|\n");
}

/* Numbers: as integers when they are, else with three decimals. */
static void table_row(table *t, const problem *p, const double *numbers) {
    char cells[MAX_COLUMNS][32];
    int i;
    snprintf(cells[0], sizeof cells[0], "%s", p->op == FORWARD ? "fwd" : "bwd");
    snprintf(cells[1], sizeof cells[1], "%s", dtype_name[p->dtype]);
    for (i = FIRST_NUMBER; i < t->count; i++) {
        double v = i == 2 ? (double)p->rows : i == 3 ? (double)p->cols : numbers[i - 4];
        snprintf(cells[i], sizeof cells[i], i < 4 ? "%.0f" : "%.3f", v);
    }
    for (i = 0; i < t->count; i++) {
        if (t->format == JSON) {
            printf("%s\"%s\": %s%s%s", i ? ", " : t->rows ? ",\n{" : "\n{", t->columns[i].key,
                   i < FIRST_NUMBER ? "\"" : "", cells[i], i < FIRST_NUMBER ? "\"" : "");
        } else {
            printf(t->format == MARKDOWN ? "| %s " : "%12s", cells[i]);
        }
    }
    printf(t->format == JSON ? "}" : t->format == MARKDOWN ? "|\n" : "\n");
    t->rows++;
    fflush(stdout);
}

static void table_end(const table *t) {
    if (t->format == JSON) printf("\n]}\n");
}

#define PROBLEM_COLUMNS {"op", "op"}, {"dtype", "dtype"}, {"rows", "rows"}, {"cols", "cols"}

/* ---- the three measurements ------------------------------------------------------------------ */

typedef struct options {
    const char *suite;
    problem one;
    nj_backend backend;
    int repeats; /* 0: 15 on the host, 7 on a GPU */
    int select, overhead;
    format format;
} options;

typedef void (*measure_fn)(const options *options, machine *m, const problem *p, table *t);

static const column norm_columns[] = {PROBLEM_COLUMNS,
                                      {"roofline us", "roofline_us"},
                                      {"ours us", "ours_us"},
                                      {"MB", "megabytes"},
                                      {"GB/s", "gigabytes_per_second"},
                                      {"ours/roof", "ours_over_roofline"},
                                      {"roof/ours", "roofline_over_ours"}};

static void measure_norm(const options *options, machine *m, const problem *p, table *t) {
    int repeats = options->repeats ? options->repeats : m->on_gpu ? 7 : 15;
    double numbers[6];
    operands o;
    times found;
    operands_open(m, p, &o);
    found = m->on_gpu ? time_gpu(m, p, &o, repeats) : time_host(m, p, &o, repeats);
    numbers[0] = 1e6 * found.roofline;
    numbers[1] = 1e6 * found.ours;
    numbers[2] = 1e-6 * o.moved;
    numbers[3] = 1e-9 * o.moved / found.ours;
    numbers[4] = found.ours / found.roofline;
    numbers[5] = found.roofline / found.ours;
    table_row(t, p, numbers);
    operands_close(m, &o);
}

static const column overhead_columns[] = {PROBLEM_COLUMNS, {"run us", "run_us"}};

/* CPU time of nj_plan_run. On the host that is the work itself: ask for a tiny shape. */
static void measure_overhead(const options *options, machine *m, const problem *p, table *t) {
    enum { CALLS = 64 }; /* few enough not to fill the driver's queue, which would block */
    static double seconds[MAX_REPEATS];
    int repeats = options->repeats ? options->repeats : 21, i, call;
    double median_us;
    operands o;
    operands_open(m, p, &o);
    for (i = -1; i < repeats; i++) { /* the first turn warms up */
        double start = now();
        for (call = 0; call < CALLS; call++) run_norm(m, &o, call % o.sets);
        if (i >= 0) seconds[i] = (now() - start) / CALLS;
        if (m->on_gpu) machine_require(m, gpu_wait(&m->gpu));
    }
    median_us = 1e6 * median(seconds, repeats);
    table_row(t, p, &median_us);
    operands_close(m, &o);
}

static const column select_columns[] = {PROBLEM_COLUMNS,
                                        {"cold ms", "cold_ms"},
                                        {"disk ms", "disk_ms"},
                                        {"memory us", "memory_us"}};

/* A folder of our own under TMPDIR or /tmp. */
static void scratch_open(char *path, size_t size) {
    const char *root = getenv("TMPDIR");
    snprintf(path, size, "%s/normjit-bench-XXXXXX", root && root[0] ? root : "/tmp");
    if (!mkdtemp(path)) die(path, strerror(errno));
}

static void scratch_close(const char *path) {
    DIR *folder = opendir(path);
    struct dirent *entry;
    while (folder && (entry = readdir(folder)) != NULL) {
        char name[4096];
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        snprintf(name, sizeof name, "%s/%s", path, entry->d_name);
        remove(name);
    }
    if (folder) closedir(folder);
    rmdir(path);
}

/* Of one select in a row of them. */
static double seconds_of_select(nj_ctx *ctx, const nj_desc *desc, int calls) {
    double seconds = 0;
    int i;
    for (i = 0; i < calls; i++) {
        double start = now();
        nj_plan *plan;
        require(nj_plan_select(&plan, ctx, desc, NULL));
        seconds += now() - start;
        nj_plan_destroy(plan);
    }
    return seconds / calls;
}

/* Each turn: an empty cache folder, then a new ctx on the full one, then the same ctx again. */
static void measure_select(const options *options, machine *m, const problem *p, table *t) {
    static double cold[MAX_REPEATS], disk[MAX_REPEATS], memory[MAX_REPEATS];
    int repeats = options->repeats ? options->repeats : 5, i;
    nj_desc desc = describe(p);
    double numbers[3];
    for (i = 0; i < repeats; i++) {
        char folder[1024];
        nj_ctx_desc how = {0};
        nj_ctx *ctx;
        how.backend = nj_ctx_backend(m->ctx);
        how.cache_dir = folder;
        scratch_open(folder, sizeof folder);
        require(nj_ctx_create(&ctx, &how));
        cold[i] = seconds_of_select(ctx, &desc, 1);
        nj_ctx_destroy(ctx);
        require(nj_ctx_create(&ctx, &how));
        disk[i] = seconds_of_select(ctx, &desc, 1);
        memory[i] = seconds_of_select(ctx, &desc, 64);
        nj_ctx_destroy(ctx);
        scratch_close(folder);
    }
    numbers[0] = 1e3 * median(cold, repeats);
    numbers[1] = 1e3 * median(disk, repeats);
    numbers[2] = 1e6 * median(memory, repeats);
    table_row(t, p, numbers);
}

/* ---- the command line ------------------------------------------------------------------------ */

static void usage(FILE *to) {
    fputs("usage: bench [options]\n"
          "  --op fwd|bwd             default bwd\n"
          "  --dtype f16|bf16|f32|f64 default f32 on the host, bf16 on a GPU\n"
          "  --rows N --cols N        one shape; default 8192 x 768\n"
          "  --suite host|models      the shapes of a table; --op and --dtype then narrow it\n"
          "  --backend host|cuda      default: cuda when there is one\n"
          "  --repeats N              default 15 calls on the host, 7 replays on a GPU\n"
          "  --select                 time nj_plan_select: cold, from disk, from memory\n"
          "  --host-overhead          CPU time of one nj_plan_run\n"
          "  --markdown, --json       default: plain text\n",
          to);
}

static void misuse(const char *what, const char *value) {
    fprintf(stderr, "bench: %s %s\n", what, value);
    usage(stderr);
    exit(2);
}

static int choose(const char *option, const char *value, const char *const *names, int count) {
    int i;
    for (i = 0; i < count; i++) {
        if (strcmp(value, names[i]) == 0) return i;
    }
    misuse(option, value);
    return -1;
}

static int64_t positive(const char *option, const char *value, int64_t most) {
    char *end;
    long long n = strtoll(value, &end, 10);
    if (end == value || *end || n < 1 || n > most) misuse(option, value);
    return n;
}

static options parse(int argc, char **argv) {
    static const char *const ops[] = {"fwd", "bwd"}, *const backends[] = {"host", "cuda"},
                       *const suite_names[] = {"host", "models"};
    const int64_t most = (int64_t)1 << 31;
    options o = {0};
    int i;
    for (i = 1; i < argc; i++) {
        const char *name = argv[i], *value = i + 1 < argc ? argv[i + 1] : "";
        if (strcmp(name, "--help") == 0) {
            usage(stdout);
            exit(0);
        } else if (strcmp(name, "--select") == 0) {
            o.select = 1;
        } else if (strcmp(name, "--host-overhead") == 0) {
            o.overhead = 1;
        } else if (strcmp(name, "--markdown") == 0) {
            o.format = MARKDOWN;
        } else if (strcmp(name, "--json") == 0) {
            o.format = JSON;
        } else {
            i++;
            if (strcmp(name, "--op") == 0) {
                o.one.op = choose(name, value, ops, 2) ? BACKWARD : FORWARD;
            } else if (strcmp(name, "--dtype") == 0) {
                o.one.dtype = (nj_dtype)(1 + choose(name, value, dtype_name + 1, 4));
            } else if (strcmp(name, "--rows") == 0) {
                o.one.rows = positive(name, value, most);
            } else if (strcmp(name, "--cols") == 0) {
                o.one.cols = positive(name, value, most);
            } else if (strcmp(name, "--suite") == 0) {
                o.suite = suite_names[choose(name, value, suite_names, 2)];
            } else if (strcmp(name, "--backend") == 0) {
                o.backend = choose(name, value, backends, 2) ? NJ_BACKEND_CUDA : NJ_BACKEND_HOST;
            } else if (strcmp(name, "--repeats") == 0) {
                o.repeats = (int)positive(name, value, MAX_REPEATS);
            } else {
                misuse("no such option:", name);
            }
        }
    }
    if (o.select && o.overhead) misuse("--select and --host-overhead:", "choose one");
    if (o.suite && (o.one.rows || o.one.cols)) misuse("--suite:", "brings its own rows and cols");
    return o;
}

static void measure_all(const options *o, machine *m, measure_fn measure, table *t) {
    problem p = o->one;
    size_t part, i;
    if (!o->suite) {
        if (!p.op) p.op = BACKWARD;
        if (!p.dtype) p.dtype = m->on_gpu ? NJ_BF16 : NJ_F32;
        if (!p.rows) p.rows = 8192;
        if (!p.cols) p.cols = 768;
        measure(o, m, &p, t);
        return;
    }
    for (part = 0; part < sizeof suites / sizeof suites[0]; part++) {
        const suite_part *s = &suites[part];
        if (strcmp(s->suite, o->suite) != 0) continue;
        if (o->one.op && o->one.op != s->op) continue;
        if (o->one.dtype && o->one.dtype != s->dtype) continue;
        p.op = s->op;
        p.dtype = s->dtype;
        for (i = 0; i < sizeof s->shapes / sizeof s->shapes[0] && s->shapes[i][0]; i++) {
            p.rows = s->shapes[i][0];
            p.cols = s->shapes[i][1];
            measure(o, m, &p, t);
        }
    }
}

int main(int argc, char **argv) {
    options o = parse(argc, argv);
    measure_fn measure = measure_norm;
    machine m;
    table t;
    t.format = o.format;
    t.columns = norm_columns;
    t.count = (int)(sizeof norm_columns / sizeof norm_columns[0]);
    if (o.select) {
        measure = measure_select;
        t.columns = select_columns;
        t.count = (int)(sizeof select_columns / sizeof select_columns[0]);
    } else if (o.overhead) {
        measure = measure_overhead;
        t.columns = overhead_columns;
        t.count = (int)(sizeof overhead_columns / sizeof overhead_columns[0]);
    }
    machine_open(&m, o.backend);
    table_begin(&t, nj_ctx_info(m.ctx));
    measure_all(&o, &m, measure, &t);
    table_end(&t);
    machine_close(&m);
    return 0;
}
