/* Times a norm beside the elementwise kernel that moves the same bytes: for a backward
   dx[i] = x[i] + dy[i], for a forward y[i] = x[i]. That kernel is the practical roofline: it runs
   in the same process, on the same buffers, turn by turn with ours. `bench --help` lists options.

   bytes     the fewest that must move: x, dy and dx (x and y) once; statistics, parameters, padding
             and a dy that is one number not counted. The elementwise kernel moves them packed
   host      median of --repeats calls of each kind; three or more buffer sets take turns, so that
             nobody finds its own operands in a cache. Buffers lie as malloc gives them (16 bytes
             past a page), and the elementwise loop is vectorized: without `simd` gcc -O2 leaves it
             scalar, which flatters the ratio by a third
   CUDA      graphs of enough calls to last 2 ms over buffer sets that together exceed four times
             60 MB; median of --repeats replays; the fastest of several shapes of the elementwise
             kernel counts

   --list prints the shapes of a suite instead: tools/bench_peers.py has them from there. */
#define _POSIX_C_SOURCE 200809L
#define NORMJIT_IMPLEMENTATION
#include "normjit.h"

#include "../examples/gpu.h"
#include "scratch.h"

#include <errno.h>
#include <math.h>
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

/* Numbered as in the enums of normjit.h; 0: not given. */
static const char *const op_name[] = {"", "fwd", "bwd", NULL};
static const char *const op_key[] = {"", "layer_norm_fwd", "layer_norm_bwd"}; /* in JSON */
static const char *const dtype_name[] = {"", "f16", "bf16", "f32", "f64", NULL};
static const char *const backend_name[] = {"", "cuda", "host", NULL};

/* How x, dy and the output lie; columns have stride 1 but in channels-first. */
typedef enum layout {
    LAYOUT_UNSET,
    PACKED,
    PADDED,         /* PAD elements between rows */
    CHANNELS_FIRST, /* (outer, cols, inner), normalized over axis 1 */
    MISALIGNED,     /* packed, one element past an aligned address */
    BROADCAST_DY    /* packed, but dy is one number: all its strides are 0 */
} layout;

static const char *const layout_name[] = {"",           "packed",       "padded", "channels-first",
                                          "misaligned", "broadcast-dy", NULL};

enum { PAD = 64 }; /* keeps rows as well aligned as cols does, to 128 bytes at most */

/* x has shape (outer, cols), channels-first (outer, cols, inner). */
typedef struct problem {
    nj_op op;
    nj_dtype dtype;
    layout layout;
    int64_t outer, cols, inner; /* inner: 1 but in channels-first */
} problem;

static const nj_op FORWARD = NJ_OP_LAYER_NORM_FORWARD, BACKWARD = NJ_OP_LAYER_NORM_BACKWARD;

typedef enum suite { SUITE_UNSET, HOST, MODELS, EDGE, SWEEP } suite;

static const char *const suite_name[] = {"", "host", "models", "edge", "sweep", NULL};

/* Outer, cols and, channels-first, inner; ended by outer 0. */
typedef int64_t shape[3];

static const shape host_shapes[] = {
    {8192, 768}, {4096, 4096}, {1024, 12288}, {131072, 128}, {0, 0}};

static const shape models_backward[] = {{16384, 4096}, {8192, 8192},  {4096, 16384}, {8192, 5120},
                                        {1024, 12288}, {8192, 4096},  {4096, 6144},  {4096, 8192},
                                        {2048, 4096},  {131072, 128}, {8192, 128},   {4096, 2048},
                                        {16384, 128},  {8192, 768},   {32768, 1024}, {0, 0}};
static const shape models_forward[] = {{16384, 4096}, {8192, 8192},  {4096, 16384}, {1024, 12288},
                                       {8192, 768},   {131072, 128}, {0, 0}};
static const shape models_other_types[] = {{16384, 4096}, {1024, 12288}, {8192, 768},
                                           {131072, 128}, {4096, 16384}, {0, 0}};

static const shape edge_backward[] = {{4096, 1023},  {4096, 12345}, {512, 65536}, {512, 131072},
                                      {512, 262144}, {16, 8192},    {16, 65536},  {1048576, 64},
                                      {401408, 24},  {0, 0}};
static const shape edge_channels_first[] = {
    {32, 256, 3136}, {8, 96, 50176}, {64, 768, 196}, {0, 0}};
static const shape edge_layouts[] = {{16384, 4096}, {8192, 768}, {0, 0}};
static const shape edge_forward[] = {{4096, 1023}, {4096, 12345}, {512, 65536},
                                     {16, 8192},   {1048576, 64}, {0, 0}};
static const shape edge_other_types[] = {{4096, 12345}, {512, 65536}, {1048576, 64}, {0, 0}};
static const shape edge_one[] = {{32, 256, 3136}, {0, 0}};

enum { SWEEP_SHAPES = 200 };
static shape sweep_shapes[SWEEP_SHAPES + 1]; /* made by sweep_draw */

static const struct suite_part {
    suite suite;
    nj_op op;
    nj_dtype dtype;
    layout layout;
    const shape *shapes;
} suites[] = {
    {HOST, NJ_OP_LAYER_NORM_BACKWARD, NJ_F32, PACKED, host_shapes},
    {HOST, NJ_OP_LAYER_NORM_FORWARD, NJ_F32, PACKED, host_shapes},
    {MODELS, NJ_OP_LAYER_NORM_BACKWARD, NJ_BF16, PACKED, models_backward},
    {MODELS, NJ_OP_LAYER_NORM_FORWARD, NJ_BF16, PACKED, models_forward},
    {MODELS, NJ_OP_LAYER_NORM_BACKWARD, NJ_F16, PACKED, models_other_types},
    {MODELS, NJ_OP_LAYER_NORM_BACKWARD, NJ_F32, PACKED, models_other_types},
    {MODELS, NJ_OP_LAYER_NORM_FORWARD, NJ_F16, PACKED, models_other_types},
    {MODELS, NJ_OP_LAYER_NORM_FORWARD, NJ_F32, PACKED, models_other_types},
    {EDGE, NJ_OP_LAYER_NORM_BACKWARD, NJ_BF16, PACKED, edge_backward},
    {EDGE, NJ_OP_LAYER_NORM_BACKWARD, NJ_BF16, CHANNELS_FIRST, edge_channels_first},
    {EDGE, NJ_OP_LAYER_NORM_BACKWARD, NJ_BF16, PADDED, edge_layouts},
    {EDGE, NJ_OP_LAYER_NORM_BACKWARD, NJ_BF16, BROADCAST_DY, edge_layouts},
    {EDGE, NJ_OP_LAYER_NORM_BACKWARD, NJ_BF16, MISALIGNED, edge_layouts},
    {EDGE, NJ_OP_LAYER_NORM_FORWARD, NJ_BF16, PACKED, edge_forward},
    {EDGE, NJ_OP_LAYER_NORM_FORWARD, NJ_BF16, CHANNELS_FIRST, edge_one},
    {EDGE, NJ_OP_LAYER_NORM_BACKWARD, NJ_F16, PACKED, edge_other_types},
    {EDGE, NJ_OP_LAYER_NORM_BACKWARD, NJ_F32, PACKED, edge_other_types},
    {EDGE, NJ_OP_LAYER_NORM_BACKWARD, NJ_F32, CHANNELS_FIRST, edge_one},
    {SWEEP, NJ_OP_LAYER_NORM_BACKWARD, NJ_BF16, PACKED,
     (const shape *)sweep_shapes}, /* a cast: to C11, arrays of const are another type */
};

/* The next number of [0, 1) from a generator (xorshift). */
static double random_unit(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return (double)(*state >> 11) * 0x1p-53;
}

/* Shapes that nobody picked, always the same: rows and cols log-uniform, kept when they have 2^18
   to 2^27 elements. What divides cols decides how wide accesses may be, so it is given: half of
   the cols are multiples of 8, a quarter are odd, an eighth each odd multiples of 2 and of 4. */
static void sweep_draw(void) {
    static const int64_t divisors[8] = {8, 1, 8, 2, 8, 1, 8, 4};
    const double most_rows = 300000, most_cols = 65536;
    uint64_t state = 88172645463325252u;
    int n = 0;
    while (n < SWEEP_SHAPES) {
        int64_t divisor = divisors[n % 8];
        int64_t rows = (int64_t)exp(random_unit(&state) * log(most_rows));
        int64_t times = (int64_t)exp(random_unit(&state) * log(most_cols)) / divisor;
        int64_t cols = (divisor == 8 ? times : times | 1) * divisor;
        if (rows * cols < (int64_t)1 << 18 || rows * cols > (int64_t)1 << 27) continue;
        sweep_shapes[n][0] = rows;
        sweep_shapes[n][1] = cols;
        n++;
    }
}

static int64_t rows_of(const problem *p) {
    return p->outer * p->inner;
}

static int rank_of(const problem *p) {
    return p->layout == CHANNELS_FIRST ? 3 : 2;
}

static nj_dtype stat_dtype(const problem *p) {
    return p->dtype == NJ_F64 ? NJ_F64 : NJ_F32;
}

/* Whether a whole dy must be read: the elementwise kernel then adds, else it copies. */
static int reads_dy(const problem *p) {
    return p->op == BACKWARD && p->layout != BROADCAST_DY;
}

static nj_desc describe(const problem *p) {
    nj_desc desc = {0};
    desc.rank = rank_of(p);
    desc.norm_axes = 1u << 1;
    desc.shape[0] = p->outer;
    desc.shape[1] = p->cols;
    desc.shape[2] = p->inner;
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
    void *empty;          /* the kernel of load_empty */
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
    if (m->on_gpu)
        gpu_free(&m->gpu, p);
    else
        free(p);
}

static void machine_upload(machine *m, void *dst, const void *src, size_t bytes) {
    if (m->on_gpu)
        machine_require(m, gpu_upload(&m->gpu, dst, src, bytes));
    else
        memcpy(dst, src, bytes);
}

/* The kernel of that name in a text of PTX. Modules stay loaded until the process ends. */
static void *machine_load(machine *m, const char *ptx, const char *name) {
    void *module, *function;
    machine_require(m, gpu_ok(&m->gpu, m->module_load(&module, ptx), "cuModuleLoadData"));
    machine_require(
        m, gpu_ok(&m->gpu, m->module_function(&function, module, name), "cuModuleGetFunction"));
    return function;
}

static void machine_launch(machine *m, void *function, uint64_t blocks, unsigned threads,
                           void **parameters) {
    machine_require(m, gpu_ok(&m->gpu,
                              m->launch(function, (unsigned)blocks, 1, 1, threads, 1, 1, 0,
                                        m->gpu.stream, parameters, NULL),
                              "cuLaunchKernel"));
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
    nj_args *args; /* one for each set */
    void **memory; /* likewise: all tensors of a set */
    void *workspace;
    size_t workspace_bytes;
    int launches;  /* kernels of a call on packed rows that one block or cluster can hold */
    int64_t bytes; /* of x's elements */
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

/* Elements of the buffer behind a tensor of x's shape. */
static int64_t full_count(const problem *p) {
    int64_t count = rows_of(p) * p->cols;
    if (p->layout == PADDED) count += p->outer * PAD;
    if (p->layout == MISALIGNED) count++;
    return count;
}

/* Of x's shape, but with that many columns; packed. */
static nj_tensor view(const problem *p, void *data, int64_t cols) {
    int64_t extents[3];
    extents[0] = p->outer;
    extents[1] = cols;
    extents[2] = p->inner;
    return nj_packed(data, rank_of(p), extents);
}

static nj_tensor take_full(machine *m, char **at, const problem *p) {
    int64_t count = full_count(p);
    nj_tensor tensor = view(p, take(m, at, p->dtype, count), p->cols);
    tensor.count = count;
    if (p->layout == PADDED) tensor.stride[0] += PAD;
    if (p->layout == MISALIGNED) tensor.offset = 1;
    return tensor;
}

static nj_tensor take_stat(machine *m, char **at, const problem *p) {
    return view(p, take(m, at, stat_dtype(p), rows_of(p)), 1);
}

static nj_tensor take_param(machine *m, char **at, const problem *p) {
    return nj_packed(take(m, at, p->dtype, p->cols), 1, &p->cols);
}

static void operands_fill_set(machine *m, const problem *p, operands *o, int set) {
    nj_args *a = &o->args[set];
    char *at = machine_alloc(m, 3 * tensor_bytes(p->dtype, full_count(p)) +
                                    4 * tensor_bytes(p->dtype, p->cols) +
                                    2 * tensor_bytes(stat_dtype(p), rows_of(p)));
    o->memory[set] = at;
    a->x = nj_as_const(take_full(m, &at, p));
    a->dy = nj_as_const(take_full(m, &at, p));
    if (p->layout == BROADCAST_DY) memset(a->dy.stride, 0, sizeof a->dy.stride);
    a->y = a->dx = take_full(m, &at, p);
    a->gamma = nj_as_const(take_param(m, &at, p));
    a->beta = nj_as_const(take_param(m, &at, p));
    a->dgamma = take_param(m, &at, p);
    a->dbeta = take_param(m, &at, p);
    a->mean = take_stat(m, &at, p);
    a->rstd = take_stat(m, &at, p);
}

/* Sets: an odd number, so that two kernels taking turns over them change sets each time. */
static void operands_open(machine *m, const problem *p, operands *o) {
    const double beyond_cache = 256e6;
    const int most = 513;
    nj_desc desc = describe(p);
    int set;
    memset(o, 0, sizeof *o);
    require(nj_plan_select(&o->plan, m->ctx, &desc, NULL));
    o->launches = p->op == FORWARD ? 1 : 2;
    o->bytes = rows_of(p) * p->cols * (int64_t)nj_dtype_size(p->dtype);
    o->moved = (reads_dy(p) ? 3.0 : 2.0) * (double)o->bytes;
    o->sets = o->moved * most < beyond_cache ? most : (int)(beyond_cache / o->moved) + 1;
    if (o->sets < 3) o->sets = 3;
    o->sets |= 1;
    o->args = calloc((size_t)o->sets, sizeof *o->args);
    o->memory = calloc((size_t)o->sets, sizeof *o->memory);
    if (!o->args || !o->memory) die("out of memory", "operands");
    for (set = 0; set < o->sets; set++)
        operands_fill_set(m, p, o, set);
    o->workspace_bytes = nj_plan_workspace_size(o->plan);
    if (o->workspace_bytes) o->workspace = machine_alloc(m, o->workspace_bytes);
}

static void operands_close(machine *m, operands *o) {
    int set;
    for (set = 0; set < o->sets; set++)
        machine_free(m, o->memory[set]);
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
    if (!reads_dy(p)) {
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
        for (k = r; is_add && k < r + 4; k++)
            EMIT("add.u32 a%d, a%d, b%d;\n", k, k, k);
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
    machine_launch(m, r->function, (count + block - 1) / block, r->threads, parameters);
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
        machine_require(m, gpu_download(&m->gpu, x, (const char *)a->x.data + at, bytes) &&
                               gpu_download(&m->gpu, dy, (const char *)a->dy.data + at, bytes) &&
                               gpu_download(&m->gpu, out, (const char *)a->dx.data + at, bytes));
        for (i = 0; i < bytes / 4; i++) {
            if (out[i] != (is_add ? x[i] + dy[i] : x[i])) die("roofline", "its output is wrong");
        }
    }
}

/* The kernel of that unrolling, loaded and checked when first asked for. */
static roofline roofline_get(machine *m, const operands *o, int is_add, int log2_unroll) {
    void **function = &m->roofline[is_add][log2_unroll];
    roofline r = {*function, 1 << log2_unroll, 256};
    if (!r.function) {
        char text[8192];
        roofline_write(text, sizeof text, is_add, r.unroll);
        r.function = *function = machine_load(m, text, "roofline");
        roofline_check(m, &r, o, is_add);
    }
    return r;
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
        if (r)
            roofline_launch(m, r, o, i % o->sets);
        else
            run_norm(m, o, i % o->sets);
    }
    out->exec = gpu_capture_end(&m->gpu);
    out->calls = calls;
    machine_require(m, out->exec != NULL);
}

/* Launches `count` graphs in turn without a pause; ms[i] is what graphs[i % kinds] took. */
static void replay_time(machine *m, const replay *graphs, int kinds, int count, double *ms) {
    static void *event[2 * MAX_REPEATS + 1];
    int i;
    for (i = 0; i <= count; i++)
        machine_require(m, (event[i] = gpu_event(&m->gpu)) != NULL);
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
    for (i = 0; i <= count; i++)
        gpu_event_free(&m->gpu, event[i]);
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
        roofline r = roofline_get(m, o, reads_dy(p), log2_unroll);
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
    for (i = 0; i < 2 * repeats; i++)
        values[i % 2][i / 2] = 1e-3 * ms[i] / graphs[i % 2].calls;
    out.ours = median(values[0], repeats);
    out.roofline = median(values[1], repeats);
    gpu_graph_free(&m->gpu, graphs[0].exec);
    gpu_graph_free(&m->gpu, graphs[1].exec);
    return out;
}

/* ---- tables ---------------------------------------------------------------------------------- */

typedef enum format { TEXT, MARKDOWN, JSON } format;

typedef struct column {
    const char *title, *key; /* for people, in JSON; NULL: not shown there */
    int width;               /* in plain text; negative: holds words, which align left */
} column;

typedef struct table {
    format format;
    const column *columns; /* ended by width 0 */
    const column *next;    /* of the row at hand */
} table;

/* What every table begins with. outer and inner tell channels-first shapes of equal rows apart. */
#define PROBLEM_COLUMNS                                                                            \
    {"op", "op", -3}, {"dtype", "dtype", -5}, {"layout", "layout", -14}, {"rows", "rows", 8},      \
        {"cols", "cols", 7}, {NULL, "outer", 8}, {                                                 \
        NULL, "inner", 8                                                                           \
    }
#define END_OF_COLUMNS                                                                             \
    { NULL, NULL, 0 }

static void table_cell(table *t, const char *text) {
    const column *c = t->next++;
    int first = c == t->columns;
    if (t->format == JSON) {
        const char *quote = c->width < 0 ? "\"" : "";
        if (c->key) {
            printf("%s\"%s\": %s%s%s", first ? "" : ", ", c->key, quote, text, quote);
        }
    } else if (c->title) {
        if (t->format == MARKDOWN)
            printf("| %s ", text);
        else
            printf("%s%*s", first ? "" : "  ", c->width, text);
    }
}

/* NaN: nothing to show. */
static void table_number(table *t, int decimals, double value) {
    char text[32];
    if (isnan(value))
        snprintf(text, sizeof text, t->format == JSON ? "null" : "-");
    else
        snprintf(text, sizeof text, "%.*f", decimals, value);
    table_cell(t, text);
}

static void table_row_begin(table *t, const problem *p) {
    if (t->format == JSON) printf(",\n{");
    t->next = t->columns;
    table_cell(t, t->format == JSON ? op_key[p->op] : op_name[p->op]);
    table_cell(t, dtype_name[p->dtype]);
    table_cell(t, layout_name[p->layout]);
    table_number(t, 0, (double)rows_of(p));
    table_number(t, 0, (double)p->cols);
    table_number(t, 0, (double)p->outer);
    table_number(t, 0, (double)p->inner);
}

static void table_row_end(table *t) {
    printf(t->format == JSON ? "}" : t->format == MARKDOWN ? "|\n" : "\n");
    fflush(stdout);
}

static void table_begin(table *t, const char *info) {
    const column *c;
    if (t->format == JSON) {
        printf("[{\"op\": \"meta\", \"info\": \"");
        for (; *info; info++)
            printf(*info == '"' || *info == '\\' ? "\\%c" : "%c", *info);
        printf("\"}");
        return;
    }
    printf("%s\n\n", info);
    t->next = t->columns;
    for (c = t->columns; c->width; c++)
        table_cell(t, c->title);
    printf(t->format == MARKDOWN ? "|\n" : "\n");
    if (t->format != MARKDOWN) return;
    for (c = t->columns; c->width; c++) {
        if (c->title) printf(c->width < 0 ? "|---" : "|--:");
    }
    printf("|\n");
}

static void table_end(const table *t) {
    if (t->format == JSON) printf("\n]\n");
}

/* ---- the measurements ------------------------------------------------------------------ */

/* Adds a row to the table. repeats 0: the measurement's own number. */
typedef void (*measure_fn)(machine *m, const problem *p, int repeats, table *t);

static const column norm_columns[] = {
    PROBLEM_COLUMNS,
    {NULL, "impl", -1},
    {"roofline us", "roofline_us", 11},
    {"ours us", "us", 11},
    {"MB", NULL, 8},
    {"GB/s", NULL, 7},
    {"ours/roof", NULL, 9},
    {"roof/ours", NULL, 9},
    {"kernel", "kernel", -1},
    END_OF_COLUMNS,
};

static void measure_norm(machine *m, const problem *p, int repeats, table *t) {
    operands o;
    nj_sku sku;
    times found;
    if (!repeats) repeats = m->on_gpu ? 7 : 15;
    operands_open(m, p, &o);
    require(nj_plan_sku(o.plan, &o.args[0], &sku));
    found = m->on_gpu ? time_gpu(m, p, &o, repeats) : time_host(m, p, &o, repeats);
    table_row_begin(t, p);
    table_cell(t, "normjit");
    table_number(t, 3, 1e6 * found.roofline);
    table_number(t, 3, 1e6 * found.ours);
    table_number(t, 1, 1e-6 * o.moved);
    table_number(t, 1, 1e-9 * o.moved / found.ours);
    table_number(t, 3, found.ours / found.roofline);
    table_number(t, 3, found.roofline / found.ours);
    table_cell(t, sku.kernel);
    table_row_end(t);
    operands_close(m, &o);
}

static const column overhead_columns[] = {PROBLEM_COLUMNS,
                                          {"run us", "run_us", 11},
                                          {"checks us", "checks_us", 11},
                                          {"bare launches us", "bare_launches_us", 16},
                                          END_OF_COLUMNS};

static void check_norm(machine *m, const operands *o, int set) {
    (void)m;
    require(nj_plan_can_implement(o->plan, &o->args[set]));
}

/* A kernel that does nothing and takes the parameter of ours: nji_problem, a private type. */
static void *load_empty(machine *m) {
    char text[256];
    snprintf(text, sizeof text,
             ".version 6.3\n.target sm_75\n.address_size 64\n"
             ".visible .entry empty(.param .align 8 .b8 problem[%zu])\n{\nret;\n}\n",
             sizeof(nji_problem));
    return machine_load(m, text, "empty");
}

/* As many launches as a run makes. */
static void launch_bare(machine *m, const operands *o, int set) {
    static nji_problem problem;
    void *parameters[1];
    int i;
    (void)set;
    parameters[0] = &problem;
    for (i = 0; i < o->launches; i++)
        machine_launch(m, m->empty, 1, 32, parameters);
}

/* Microseconds that this thread spends in one call: a median. */
static double thread_us(machine *m, const operands *o, int repeats,
                        void (*call)(machine *m, const operands *o, int set)) {
    enum { CALLS = 64 }; /* few enough not to fill the driver's queue, which would block */
    static double seconds[MAX_REPEATS];
    int i, k;
    for (i = -1; i < repeats; i++) { /* the first turn warms up */
        double start = now();
        for (k = 0; k < CALLS; k++)
            call(m, o, k % o->sets);
        if (i >= 0) seconds[i] = (now() - start) / CALLS;
        if (m->on_gpu) machine_require(m, gpu_wait(&m->gpu));
    }
    return 1e6 * median(seconds, repeats);
}

/* CPU time of nj_plan_run, of the checks in it, and of its launches had they been made without us.
   On the host a run is the work itself, and nothing is launched. */
static void measure_overhead(machine *m, const problem *p, int repeats, table *t) {
    operands o;
    if (!repeats) repeats = 21;
    if (m->on_gpu && !m->empty) m->empty = load_empty(m);
    operands_open(m, p, &o);
    table_row_begin(t, p);
    table_number(t, 3, thread_us(m, &o, repeats, run_norm));
    table_number(t, 3, thread_us(m, &o, repeats, check_norm));
    table_number(t, 3, m->on_gpu ? thread_us(m, &o, repeats, launch_bare) : NAN);
    table_row_end(t);
    operands_close(m, &o);
}

static const column select_columns[] = {PROBLEM_COLUMNS,
                                        {"cold ms", "cold_ms", 11},
                                        {"disk ms", "disk_ms", 11},
                                        {"memory us", "memory_us", 11},
                                        END_OF_COLUMNS};

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

/* Medians over turns. Each turn: a new ctx on an empty cache folder (cold), a new ctx on the folder
   that this leaves (disk), the same ctx again (memory). Making the ctx is not counted, nor, in the
   median, what NVRTC does at its first use in a process. */
static void measure_select(machine *m, const problem *p, int repeats, table *t) {
    static double cold[MAX_REPEATS], disk[MAX_REPEATS], memory[MAX_REPEATS];
    const int least_repeats = 5;
    nj_desc desc = describe(p);
    int i;
    if (repeats < least_repeats) repeats = least_repeats;
    for (i = 0; i < repeats; i++) {
        char folder[1024];
        nj_ctx_desc how = {0};
        nj_ctx *ctx;
        how.backend = nj_ctx_backend(m->ctx);
        how.cache_dir = folder;
        if (!scratch_open(folder, sizeof folder)) die(folder, strerror(errno));
        require(nj_ctx_create(&ctx, &how));
        cold[i] = seconds_of_select(ctx, &desc, 1);
        nj_ctx_destroy(ctx);
        require(nj_ctx_create(&ctx, &how));
        disk[i] = seconds_of_select(ctx, &desc, 1);
        memory[i] = seconds_of_select(ctx, &desc, 64);
        nj_ctx_destroy(ctx);
        scratch_close(folder);
    }
    table_row_begin(t, p);
    table_number(t, 3, 1e3 * median(cold, repeats));
    table_number(t, 3, 1e3 * median(disk, repeats));
    table_number(t, 3, 1e6 * median(memory, repeats));
    table_row_end(t);
}

static const column list_columns[] = {PROBLEM_COLUMNS, END_OF_COLUMNS};

static void list_norm(machine *m, const problem *p, int repeats, table *t) {
    (void)m;
    (void)repeats;
    table_row_begin(t, p);
    table_row_end(t);
}

/* ---- the command line ------------------------------------------------------------------------ */

typedef enum mode { TIME_NORM, TIME_RUN, TIME_SELECT, LIST } mode;

static const struct measurement {
    measure_fn measure;
    const column *columns;
} measurements[] = {
    {measure_norm, norm_columns},
    {measure_overhead, overhead_columns},
    {measure_select, select_columns},
    {list_norm, list_columns},
};

typedef struct options {
    int64_t op, dtype, layout, backend, suite; /* all numbers: 0 when not given */
    int64_t rows, outer, cols, inner, repeats;
    mode mode;
    format format;
} options;

static void usage(FILE *to) {
    fputs("usage: bench [options]\n"
          "  --op fwd|bwd              default bwd\n"
          "  --dtype f16|bf16|f32|f64  default f32 on the host, bf16 on a GPU\n"
          "  --rows N --cols N         one shape; default 8192 x 768\n"
          "  --layout packed|padded|misaligned|broadcast-dy\n"
          "                            how x, dy and the output lie; default packed. padded: 64\n"
          "                            elements between rows. misaligned: one element past an\n"
          "                            aligned address. broadcast-dy: dy is one number\n"
          "  --layout channels-first --outer N --cols C --inner S\n"
          "                            x of shape (N, C, S), normalized over axis 1; N * S rows;\n"
          "                            default (64, 768, 196)\n"
          "  --suite host|models|edge|sweep\n"
          "                            for CPUs; hidden sizes of known models; odd lengths, very\n"
          "                            long rows, strange layouts; 200 random shapes. --op,\n"
          "                            --dtype, --layout narrow it\n"
          "  --list                    print the suite's shapes, time nothing\n"
          "  --backend cuda|host       default: cuda when there is one\n"
          "  --repeats N               default 15 calls on the host, 7 replays on a GPU\n"
          "  --select                  time nj_plan_select: cold, from disk, from memory; medians\n"
          "                            of 5 turns or more, each with a new ctx and cache folder\n"
          "  --host-overhead           CPU time of one nj_plan_run, of the checks in it, and of\n"
          "                            launching as many empty kernels through the driver\n"
          "  --markdown, --json        default: plain text\n",
          to);
}

static void misuse(const char *what, const char *value) {
    fprintf(stderr, "bench: %s %s\n", what, value);
    usage(stderr);
    exit(2);
}

/* The number of a word in a list; 0, which is no word, is not found. */
static int64_t choose(const char *option, const char *value, const char *const *words) {
    int64_t i;
    for (i = 1; words[i]; i++) {
        if (strcmp(value, words[i]) == 0) return i;
    }
    misuse(option, value);
    return 0;
}

static int64_t positive(const char *option, const char *value, int64_t most) {
    char *end;
    long long n = strtoll(value, &end, 10);
    if (end == value || *end || n < 1 || n > most) misuse(option, value);
    return n;
}

static void parse_value(options *o, const char *name, const char *value) {
    const int64_t most = (int64_t)1 << 31;
    const struct {
        const char *name;
        int64_t *number;
        const char *const *words; /* NULL: a count */
        int64_t most;             /* of a count */
    } known[] = {
        {"--op", &o->op, op_name, 0},
        {"--dtype", &o->dtype, dtype_name, 0},
        {"--layout", &o->layout, layout_name, 0},
        {"--backend", &o->backend, backend_name, 0},
        {"--suite", &o->suite, suite_name, 0},
        {"--rows", &o->rows, NULL, most},
        {"--outer", &o->outer, NULL, most},
        {"--cols", &o->cols, NULL, most},
        {"--inner", &o->inner, NULL, most},
        {"--repeats", &o->repeats, NULL, MAX_REPEATS},
    };
    size_t i;
    for (i = 0; i < sizeof known / sizeof known[0]; i++) {
        if (strcmp(name, known[i].name) != 0) continue;
        *known[i].number = known[i].words ? choose(name, value, known[i].words)
                                          : positive(name, value, known[i].most);
        return;
    }
    misuse("no such option:", name);
}

static void check_options(const options *o) {
    if (o->suite && (o->rows || o->outer || o->cols || o->inner)) {
        misuse("--suite:", "brings its own shapes");
    }
    if (o->layout == CHANNELS_FIRST && o->rows) misuse("--rows:", "channels-first has --outer");
    if (o->layout != CHANNELS_FIRST && (o->outer || o->inner)) {
        misuse("--outer, --inner:", "need --layout channels-first");
    }
    if (o->layout == BROADCAST_DY && o->op == FORWARD) misuse("broadcast-dy:", "needs --op bwd");
}

static options parse(int argc, char **argv) {
    options o = {0};
    int i;
    for (i = 1; i < argc; i++) {
        const char *name = argv[i];
        if (strcmp(name, "--help") == 0) {
            usage(stdout);
            exit(0);
        } else if (strcmp(name, "--select") == 0) {
            o.mode = TIME_SELECT;
        } else if (strcmp(name, "--host-overhead") == 0) {
            o.mode = TIME_RUN;
        } else if (strcmp(name, "--list") == 0) {
            o.mode = LIST;
        } else if (strcmp(name, "--markdown") == 0) {
            o.format = MARKDOWN;
        } else if (strcmp(name, "--json") == 0) {
            o.format = JSON;
        } else {
            parse_value(&o, name, i + 1 < argc ? argv[i + 1] : "");
            i++;
        }
    }
    check_options(&o);
    return o;
}

static int64_t given_or(int64_t given, int64_t otherwise) {
    return given ? given : otherwise;
}

static problem one_problem(const options *o, int on_gpu) {
    problem p;
    p.op = (nj_op)given_or(o->op, BACKWARD);
    p.dtype = (nj_dtype)given_or(o->dtype, on_gpu ? NJ_BF16 : NJ_F32);
    p.layout = (layout)given_or(o->layout, PACKED);
    p.cols = given_or(o->cols, 768);
    p.outer = p.layout == CHANNELS_FIRST ? given_or(o->outer, 64) : given_or(o->rows, 8192);
    p.inner = p.layout == CHANNELS_FIRST ? given_or(o->inner, 196) : 1;
    return p;
}

static int is_asked_for(const struct suite_part *part, const options *o) {
    return part->suite == (suite)o->suite && (!o->op || part->op == (nj_op)o->op) &&
           (!o->dtype || part->dtype == (nj_dtype)o->dtype) &&
           (!o->layout || part->layout == (layout)o->layout);
}

static void measure_suite(const options *o, machine *m, measure_fn measure, table *t) {
    size_t i;
    for (i = 0; i < sizeof suites / sizeof suites[0]; i++) {
        const struct suite_part *part = &suites[i];
        const shape *at;
        problem p;
        if (!is_asked_for(part, o)) continue;
        p.op = part->op;
        p.dtype = part->dtype;
        p.layout = part->layout;
        for (at = part->shapes; (*at)[0]; at++) {
            p.outer = (*at)[0];
            p.cols = (*at)[1];
            p.inner = given_or((*at)[2], 1);
            measure(m, &p, (int)o->repeats, t);
        }
    }
}

int main(int argc, char **argv) {
    options o = parse(argc, argv);
    const struct measurement *chosen = &measurements[o.mode];
    machine m;
    table t;
    t.format = o.format;
    t.columns = chosen->columns;
    machine_open(&m, o.mode == LIST ? NJ_BACKEND_HOST : (nj_backend)o.backend);
    table_begin(&t, nj_ctx_info(m.ctx));
    if (o.suite == SWEEP) sweep_draw();
    if (o.suite) {
        measure_suite(&o, &m, chosen->measure, &t);
    } else {
        problem p = one_problem(&o, m.on_gpu);
        chosen->measure(&m, &p, (int)o.repeats, &t);
    }
    table_end(&t);
    machine_close(&m);
    return 0;
}
