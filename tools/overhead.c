/* What the library itself costs on the CPU: nj_plan_run, by thread CPU time and by the clock,
   outside and inside stream capture, and nj_plan_select. `overhead --help` lists options.

   checks    nj_plan_can_implement
   ours      nj_plan_run with driver calls that return at once: checks, choice of the kernel, its
             parameter. They are put into the ctx's table of the driver's functions, a private
             thing that a program which compiles the library in can reach
   run       nj_plan_run as it is, on an idle stream; the driver's part is run - ours
   capture   the same, recorded into a graph

   Without a GPU, --driver and --nvrtc name libraries that stand in (tests/fake): then `checks` and
   `ours` are what they are on a GPU, and run and capture are left out. */
#define _XOPEN_SOURCE 700
#define NORMJIT_IMPLEMENTATION
#include "normjit.h"

#include "../examples/gpu.h"
#include "scratch.h"

#include <errno.h>
#include <time.h>
#include <unistd.h>

enum { SKIPPED = 77, REPEATS = 31 };

static void die(const char *what, const char *why) {
    fprintf(stderr, "overhead: %s: %s\n", what, why);
    exit(1);
}

static void require(nj_status status) {
    if (status != NJ_OK) die(nj_status_string(status), nj_last_error());
}

typedef struct machine {
    nj_ctx_desc how;
    nj_ctx *ctx;
    int on_gpu; /* else on libraries that stand in, and memory is the host's */
    gpu gpu;
    nji_driver driver; /* the ctx's, while it calls ones that do nothing */
    int markdown;
} machine;

static void require_gpu(machine *m, int ok) {
    if (!ok) die("GPU", m->gpu.error);
}

/* ---- driver calls that return at once ------------------------------------------------------- */

static nji_cu_context own_context;

static int current_context(nji_cu_context *context) {
    *context = own_context;
    return 0;
}

static int launch(nji_cu_function function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                  unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                  nji_cu_stream stream, void **parameters, void **extra) {
    (void)function, (void)grid_x, (void)grid_y, (void)grid_z, (void)block_x, (void)block_y;
    (void)block_z, (void)shared_bytes, (void)stream, (void)parameters, (void)extra;
    return 0;
}

static int launch_ex(const nji_cu_launch_config *config, nji_cu_function function,
                     void **parameters, void **extra) {
    (void)config, (void)function, (void)parameters, (void)extra;
    return 0;
}

static void silence_driver(machine *m) {
    nji_driver *driver = &m->ctx->cuda.driver;
    m->driver = *driver;
    own_context = m->ctx->cuda.context;
    driver->cuCtxGetCurrent = current_context;
    driver->cuLaunchKernel = launch;
    if (driver->cuLaunchKernelEx) driver->cuLaunchKernelEx = launch_ex;
}

static void restore_driver(machine *m) {
    m->ctx->cuda.driver = m->driver;
}

/* ---- what is run ---------------------------------------------------------------------------- */

typedef enum layout { PACKED, PADDED, PERMUTED } layout;

typedef struct workload {
    const char *name;
    nj_op op;
    int32_t rank;
    int64_t shape[4];
    uint32_t norm_axes;
    layout layout;
} workload;

/* bf16; small, so that the device keeps up with the launches. */
static const workload workloads[] = {
    {"forward", NJ_OP_LAYER_NORM_FORWARD, 2, {128, 768}, 2, PACKED},
    {"backward", NJ_OP_LAYER_NORM_BACKWARD, 2, {128, 768}, 2, PACKED},
    {"backward, one row", NJ_OP_LAYER_NORM_BACKWARD, 2, {1, 4096}, 2, PACKED},
    {"backward, 4 axes", NJ_OP_LAYER_NORM_BACKWARD, 4, {2, 4, 16, 768}, 8, PACKED},
    {"backward, padded rows", NJ_OP_LAYER_NORM_BACKWARD, 3, {4, 32, 768}, 4, PADDED},
    {"backward, permuted axes", NJ_OP_LAYER_NORM_BACKWARD, 4, {2, 4, 16, 768}, 8, PERMUTED},
    {"backward, channels first", NJ_OP_LAYER_NORM_BACKWARD, 4, {2, 64, 8, 8}, 2, PACKED},
};

enum { WORKLOADS = sizeof workloads / sizeof workloads[0] };

typedef struct operands {
    nj_plan *plan;
    nj_args args;
    char *memory, *workspace;
    size_t workspace_bytes;
} operands;

static nj_desc describe(const workload *w) {
    nj_desc desc = {0};
    int axis;
    desc.rank = w->rank;
    desc.norm_axes = w->norm_axes;
    for (axis = 0; axis < w->rank; axis++) desc.shape[axis] = w->shape[axis];
    desc.op = w->op;
    desc.dtype = NJ_BF16;
    desc.has_gamma = desc.has_beta = 1;
    desc.eps = 1e-5;
    return desc;
}

static char *allocate(machine *m, size_t bytes) {
    char *p = m->on_gpu ? gpu_alloc(&m->gpu, bytes) : aligned_alloc(256, (bytes + 255) / 256 * 256);
    require_gpu(m, p != NULL);
    if (m->on_gpu) require_gpu(m, gpu_fill(&m->gpu, p, 0, bytes));
    return p;
}

static void release(machine *m, char *p) {
    if (m->on_gpu) gpu_free(&m->gpu, p);
    else free(p);
}

enum { PAD = 8 }; /* elements between rows */

/* x, dy or the output. */
static nj_tensor full_tensor(void *data, const workload *w) {
    const int64_t cols = w->shape[w->rank - 1];
    nj_tensor t = nj_packed(data, w->rank, w->shape);
    int axis;
    if (w->layout == PADDED) {
        for (axis = 0; axis < w->rank - 1; axis++) t.stride[axis] += t.stride[axis] / cols * PAD;
        t.count += t.count / cols * PAD;
    }
    if (w->layout == PERMUTED) { /* in memory axis 1 comes before axis 0 */
        t.stride[0] = t.stride[1];
        t.stride[1] *= w->shape[0];
    }
    return t;
}

static void open_operands(machine *m, const workload *w, operands *o) {
    const nj_desc desc = describe(w);
    const size_t room = (size_t)1 << 20; /* of each operand: the largest takes 200 KB */
    int64_t shape[NJ_MAX_RANK];
    int32_t rank;
    char *at;
    memset(o, 0, sizeof *o);
    require(nj_plan_select(&o->plan, m->ctx, &desc, NULL));
    at = o->memory = allocate(m, 9 * room);
    o->args.x = nj_as_const(full_tensor(at, w));
    o->args.dy = nj_as_const(full_tensor(at + room, w));
    o->args.y = o->args.dx = full_tensor(at + 2 * room, w);
    require(nj_desc_param_shape(&desc, &rank, shape));
    o->args.gamma = nj_packed_const(at + 3 * room, rank, shape);
    o->args.beta = nj_packed_const(at + 4 * room, rank, shape);
    o->args.dgamma = nj_packed(at + 5 * room, rank, shape);
    o->args.dbeta = nj_packed(at + 6 * room, rank, shape);
    require(nj_desc_stat_shape(&desc, &rank, shape));
    o->args.mean = nj_packed(at + 7 * room, rank, shape);
    o->args.rstd = nj_packed(at + 8 * room, rank, shape);
    o->workspace_bytes = nj_plan_workspace_size(o->plan);
    if (o->workspace_bytes) o->workspace = allocate(m, o->workspace_bytes);
    require_gpu(m, !m->on_gpu || gpu_wait(&m->gpu));
}

static void close_operands(machine *m, operands *o) {
    release(m, o->memory);
    if (o->workspace) release(m, o->workspace);
    nj_plan_destroy(o->plan);
}

/* ---- timing --------------------------------------------------------------------------------- */

static double now(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, int count) {
    qsort(values, (size_t)count, sizeof *values, by_value);
    return values[count / 2];
}

typedef struct cost {
    double cpu, wall; /* nanoseconds of one call */
} cost;

static void run(machine *m, const operands *o) {
    require(nj_plan_run(o->plan, &o->args, o->workspace, o->workspace_bytes, m->gpu.stream));
}

static void check(machine *m, const operands *o) {
    (void)m;
    require(nj_plan_can_implement(o->plan, &o->args));
}

typedef enum how { PLAIN, ON_DEVICE, CAPTURED } how;

/* Medians over turns of some calls, the first of which warms up. */
static cost time_calls(machine *m, const operands *o, how way,
                       void (*call)(machine *m, const operands *o)) {
    /* Few enough not to fill the driver's queue, which would block. */
    const int calls = way == PLAIN ? 2000 : 64;
    double cpu[REPEATS], wall[REPEATS];
    cost found;
    int i, k;
    for (i = -1; i < REPEATS; i++) {
        double cpu_start, wall_start;
        void *graph;
        if (way == CAPTURED) require_gpu(m, gpu_capture_begin(&m->gpu));
        cpu_start = now(CLOCK_THREAD_CPUTIME_ID);
        wall_start = now(CLOCK_MONOTONIC);
        for (k = 0; k < calls; k++) call(m, o);
        if (i >= 0) {
            wall[i] = (now(CLOCK_MONOTONIC) - wall_start) / calls;
            cpu[i] = (now(CLOCK_THREAD_CPUTIME_ID) - cpu_start) / calls;
        }
        if (way == CAPTURED) {
            graph = gpu_capture_end(&m->gpu);
            require_gpu(m, graph != NULL);
            gpu_graph_free(&m->gpu, graph);
        }
        if (way == ON_DEVICE) require_gpu(m, gpu_wait(&m->gpu));
    }
    found.cpu = 1e9 * median(cpu, REPEATS);
    found.wall = 1e9 * median(wall, REPEATS);
    return found;
}

/* ---- tables --------------------------------------------------------------------------------- */

/* NULL ends a table's columns. */
static void print_header(const machine *m, const char *const *column) {
    int i;
    for (i = 0; column[i]; i++) printf(m->markdown ? "| %s " : i ? " %14s" : "%-26s", column[i]);
    printf(m->markdown ? "|\n" : "\n");
    for (i = 0; m->markdown && column[i]; i++) printf(i ? "|---:" : "|---");
    if (m->markdown) printf("|\n");
}

static void print_name(const machine *m, const char *name) {
    printf(m->markdown ? "| %s " : "%-26s", name);
}

/* A negative number is one that was not measured. */
static void print_number(const machine *m, double value) {
    char text[32] = "-";
    if (value >= 0) snprintf(text, sizeof text, "%.*f", value < 10 ? 2 : 0, value);
    printf(m->markdown ? "| %s " : " %14s", text);
}

static void end_row(const machine *m) {
    printf(m->markdown ? "|\n" : "\n");
}

/* ---- run ------------------------------------------------------------------------------------ */

static void measure_runs(machine *m) {
    static const char *const columns[] = {"run, ns",  "checks",      "ours",         "run CPU",
                                          "run wall", "capture CPU", "capture wall", NULL};
    const cost unknown = {-1, -1};
    int i;
    print_header(m, columns);
    for (i = 0; i < WORKLOADS; i++) {
        cost checks, ours, whole = unknown, captured = unknown;
        operands o;
        open_operands(m, &workloads[i], &o);
        if (m->on_gpu) {
            whole = time_calls(m, &o, ON_DEVICE, run);
            captured = time_calls(m, &o, CAPTURED, run);
        }
        checks = time_calls(m, &o, PLAIN, check);
        silence_driver(m);
        ours = time_calls(m, &o, PLAIN, run);
        restore_driver(m);
        print_name(m, workloads[i].name);
        print_number(m, checks.cpu);
        print_number(m, ours.cpu);
        print_number(m, whole.cpu);
        print_number(m, whole.wall);
        print_number(m, captured.cpu);
        print_number(m, captured.wall);
        end_row(m);
        close_operands(m, &o);
    }
}

/* ---- select --------------------------------------------------------------------------------- */

/* Seconds of one select; of many in a row. */
static double time_select(nj_ctx *ctx, const nj_desc *desc, int calls) {
    double seconds = 0;
    int i;
    for (i = 0; i < calls; i++) {
        const double start = now(CLOCK_MONOTONIC);
        nj_plan *plan;
        require(nj_plan_select(&plan, ctx, desc, NULL));
        seconds += now(CLOCK_MONOTONIC) - start;
        nj_plan_destroy(plan);
    }
    return seconds / calls;
}

/* Medians over turns. Each turn: a new ctx on an empty cache folder (cold), a new one on the folder
   that this leaves (disk), the same again (memory). Making the ctx is not counted, nor, in the
   median, what NVRTC does at its first use in a process. */
static void measure_selects(machine *m) {
    enum { TURNS = 5 };
    static const char *const columns[] = {"select", "cold ms", "disk ms", "memory us", NULL};
    int i, turn;
    print_header(m, columns);
    for (i = 0; i < WORKLOADS; i++) {
        const nj_desc desc = describe(&workloads[i]);
        double cold[TURNS], disk[TURNS], memory[TURNS];
        for (turn = 0; turn < TURNS; turn++) {
            char folder[1024];
            nj_ctx_desc how = m->how;
            nj_ctx *ctx;
            if (!scratch_open(folder, sizeof folder)) die(folder, strerror(errno));
            how.cache_dir = folder;
            require(nj_ctx_create(&ctx, &how));
            cold[turn] = time_select(ctx, &desc, 1);
            nj_ctx_destroy(ctx);
            require(nj_ctx_create(&ctx, &how));
            disk[turn] = time_select(ctx, &desc, 1);
            memory[turn] = time_select(ctx, &desc, 64);
            nj_ctx_destroy(ctx);
            scratch_close(folder);
        }
        print_name(m, workloads[i].name);
        print_number(m, 1e3 * median(cold, TURNS));
        print_number(m, 1e3 * median(disk, TURNS));
        print_number(m, 1e6 * median(memory, TURNS));
        end_row(m);
    }
}

/* ---- the command line ----------------------------------------------------------------------- */

static void usage(FILE *to) {
    fputs("usage: overhead [--markdown] [--driver PATH --nvrtc PATH]\n"
          "  --driver PATH --nvrtc PATH  libraries that stand in for a GPU (tests/fake)\n"
          "exit: 77 without a GPU and without those\n",
          to);
}

int main(int count, char **arguments) {
    static machine m;
    int i;
    m.how.backend = NJ_BACKEND_CUDA;
    for (i = 1; i < count; i++) {
        const char *name = arguments[i], *value = i + 1 < count ? arguments[i + 1] : NULL;
        if (strcmp(name, "--markdown") == 0) {
            m.markdown = 1;
        } else if (strcmp(name, "--driver") == 0 && value) {
            m.how.driver_path = arguments[++i];
        } else if (strcmp(name, "--nvrtc") == 0 && value) {
            m.how.nvrtc_path = arguments[++i];
        } else {
            const int is_asked = strcmp(name, "--help") == 0;
            usage(is_asked ? stdout : stderr);
            return is_asked ? 0 : 2;
        }
    }
    m.on_gpu = !m.how.driver_path;
    if (m.on_gpu && !gpu_open(&m.gpu, 0)) {
        printf("overhead: skipped: %s\n", m.gpu.error);
        return SKIPPED;
    }
    require(nj_ctx_create(&m.ctx, &m.how));
    printf("%s\n\n", nj_ctx_info(m.ctx));
    measure_runs(&m);
    printf("\n");
    measure_selects(&m);
    nj_ctx_destroy(m.ctx);
    if (m.on_gpu) gpu_close(&m.gpu);
    return 0;
}
