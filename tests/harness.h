/* Runs a LayerNorm on any backend through the public API and compares it with oracle.h.

   A problem is a descriptor and ten operands that are views of one block of memory, the image:

       open_problem      all operands packed, each in a buffer of its own
       ...               views are changed: strides, offsets, buffers shared
       fill_problem      the image is made: poison, then inputs from a small generator
       check_forward     outputs poisoned, run, outputs compared, every other byte compared with
   before set_statistics    mean and rstd of the oracle, rounded to their type check_backward judged
   with the statistics that lie in the image, bit for bit

   The image is what goes to a GPU and back, whole, so the cases do not know where they run. Poison
   is all ones: a NaN of every type, so arithmetic on padding or on an output's old content shows.

   A failed check ends the test by longjmp; what it held then is left to the process's end. */
#ifndef TESTS_HARNESS_H
#define TESTS_HARNESS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define NORMJIT_IMPLEMENTATION
#include "normjit.h"

#include "../examples/gpu.h"
#include "oracle.h"

#define POISON 0xFF
#define ALIGNMENT 256 /* what CUDA wants of a workspace; no operand relies on it */
#define GUARD 256     /* bytes of poison around every buffer */
#define COUNT_OF(array) (sizeof(array) / sizeof(array)[0])

/* ---- element types -------------------------------------------------------------------------- */

/* digits: of the significand, with the hidden one. least: exponent of the smallest subnormal. */
typedef struct format {
    const char *name;
    int size, digits, least;
    double largest;
} format;

static inline const format *format_of(nj_dtype type) {
    static const format formats[] = {{"unset", 0, 0, 0, 0},
                                     {"f16", 2, 11, -24, 65504.0},
                                     {"bf16", 2, 8, -133, 0x1.fep127},
                                     {"f32", 4, 24, -149, 0x1.fffffep127},
                                     {"f64", 8, 53, -1074, 0x1.fffffffffffffp1023}};
    return &formats[type];
}

/* Half a unit in the last place, relative; the most that rounding to the type changes a value. */
static inline double unit_of(nj_dtype type) {
    return ldexp(1.0, -format_of(type)->digits);
}

static inline double tiny_of(nj_dtype type) {
    return ldexp(1.0, format_of(type)->least);
}

/* The type of arithmetic and sums. */
static inline nj_dtype math_of(nj_dtype type) {
    return type == NJ_F64 ? NJ_F64 : NJ_F32;
}

/* The nearest value of the type, ties to even. */
static inline double round_to(nj_dtype type, double value) {
    const format *f = format_of(type);
    int exponent, last;
    double rounded;
    if (value == 0 || !isfinite(value)) return value;
    frexp(value, &exponent);
    last = exponent - f->digits > f->least ? exponent - f->digits : f->least;
    rounded = ldexp(nearbyint(ldexp(value, -last)), last);
    return fabs(rounded) > f->largest ? copysign(INFINITY, value) : rounded;
}

static inline void store(nj_dtype type, void *to, double value) {
    const double rounded = round_to(type, value);
    const float single = (float)rounded; /* exact but for f64 */
    uint32_t bits;
    uint16_t half;
    int exponent;
    switch (type) {
    case NJ_F64: memcpy(to, &rounded, 8); return;
    case NJ_F32: memcpy(to, &single, 4); return;
    case NJ_BF16:
        memcpy(&bits, &single, 4);
        half = (uint16_t)(bits >> 16);
        break;
    default:
        half = signbit(rounded) ? 0x8000 : 0;
        frexp(rounded, &exponent);
        if (isnan(rounded)) {
            half |= 0x7E00;
        } else if (isinf(rounded)) {
            half |= 0x7C00;
        } else if (fabs(rounded) < 0x1p-14) { /* subnormal: counts of 2^-24 */
            half |= (uint16_t)ldexp(fabs(rounded), 24);
        } else { /* the hidden digit carries 1 into the exponent's field */
            half |= (uint16_t)(((exponent + 13) << 10) + (int)ldexp(fabs(rounded), 11 - exponent));
        }
    }
    memcpy(to, &half, 2);
}

static inline double load(nj_dtype type, const void *from) {
    uint16_t half;
    uint32_t bits;
    float single;
    double value;
    int exponent, fraction;
    switch (type) {
    case NJ_F64: memcpy(&value, from, 8); return value;
    case NJ_F32: memcpy(&single, from, 4); return single;
    case NJ_BF16:
        memcpy(&half, from, 2);
        bits = (uint32_t)half << 16;
        memcpy(&single, &bits, 4);
        return single;
    default:
        memcpy(&half, from, 2);
        exponent = half >> 10 & 31;
        fraction = half & 1023;
        if (exponent == 31) {
            value = fraction ? NAN : INFINITY;
        } else if (exponent == 0) {
            value = ldexp(fraction, -24);
        } else {
            value = ldexp(1024 + fraction, exponent - 25);
        }
        return half & 0x8000 ? -value : value;
    }
}

/* ---- a generator of inputs ------------------------------------------------------------------ */

/* Spread evenly over [-1, 1); a function of its arguments alone: a row can be made again. */
static inline double uniform(uint64_t seed, uint64_t stream, uint64_t index) {
    uint64_t z =
        seed * 0x9E3779B97F4A7C15u + stream * 0xBF58476D1CE4E5B9u + index * 0x94D049BB133111EBu;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    z ^= z >> 31;
    return ldexp((double)(z >> 11), -52) - 1.0;
}

/* ---- backends ------------------------------------------------------------------------------- */

typedef struct backend {
    nj_ctx *ctx; /* NULL: not to be had here */
    int on_gpu;
    int fallback; /* the ctx uses the embedded PTX */
    gpu gpu;
    char missing[512];
} backend;

static backend bed; /* where the tests of the group that is running run */

static inline int open_backend(nj_backend kind, uint32_t flags) {
    nj_ctx_desc desc = {0};
    memset(&bed, 0, sizeof bed);
    bed.on_gpu = kind == NJ_BACKEND_CUDA;
    bed.fallback = (flags & NJ_CTX_FALLBACK_PTX) != 0;
    if (bed.on_gpu && !gpu_open(&bed.gpu, 0)) {
        snprintf(bed.missing, sizeof bed.missing, "%s", bed.gpu.error);
        return 0;
    }
    desc.backend = kind;
    desc.flags = flags;
#ifdef HARNESS_NVRTC /* with GPU_DRIVER: stand-ins that run kernels without a GPU */
    desc.driver_path = GPU_DRIVER;
    desc.nvrtc_path = HARNESS_NVRTC;
#endif
    if (nj_ctx_create(&bed.ctx, &desc) != NJ_OK) {
        print_error("%s\n", nj_last_error());
        return -1;
    }
    print_message("%s\n", nj_ctx_info(bed.ctx));
    return 0;
}

static inline int open_host(void **state) {
    (void)state;
    return open_backend(NJ_BACKEND_HOST, 0);
}

static inline int open_cuda(void **state) {
    (void)state;
    return open_backend(NJ_BACKEND_CUDA, 0);
}

static inline int open_fallback(void **state) {
    (void)state;
    return open_backend(NJ_BACKEND_CUDA, NJ_CTX_FALLBACK_PTX);
}

static inline int close_backend(void **state) {
    (void)state;
    nj_ctx_destroy(bed.ctx);
    if (bed.on_gpu) gpu_close(&bed.gpu);
    bed.ctx = NULL;
    return 0;
}

/* Ends a test that has nothing to run on. */
static inline void need_backend(void) {
    if (bed.ctx) return;
    print_message("skipped: %s\n", bed.missing);
    skip();
}

static inline void need_gpu(void) {
    need_backend();
    if (bed.on_gpu) return;
    print_message("skipped: needs a GPU\n");
    skip();
}

static inline void need_host(void) {
    need_backend();
    if (!bed.on_gpu) return;
    print_message("skipped: about the host backend\n");
    skip();
}

/* The number of failed tests. */
static inline int run_on_every_backend(const struct CMUnitTest *tests, size_t count) {
#ifdef HARNESS_NVRTC
    return _cmocka_run_group_tests("SIMT host", tests, count, open_cuda, close_backend);
#endif
    return _cmocka_run_group_tests("host", tests, count, open_host, close_backend) +
           _cmocka_run_group_tests("cuda", tests, count, open_cuda, close_backend) +
           _cmocka_run_group_tests("cuda, embedded PTX", tests, count, open_fallback,
                                   close_backend);
}

static inline void require_ok(nj_status status) {
    if (status != NJ_OK) fail_msg("%s: %s", nj_status_string(status), nj_last_error());
}

static inline void require_gpu_ok(int ok) {
    if (!ok) fail_msg("%s", bed.gpu.error);
}

/* ---- operands and problems ------------------------------------------------------------------ */

enum { X, DY, GAMMA, BETA, MEAN, RSTD, Y, DX, DGAMMA, DBETA, OPERANDS };

#define BIT(operand) (1u << (operand))
#define FULL_OPERANDS (BIT(X) | BIT(DY) | BIT(Y) | BIT(DX))
#define PARAM_OPERANDS (BIT(GAMMA) | BIT(BETA) | BIT(DGAMMA) | BIT(DBETA))
#define STAT_OPERANDS (BIT(MEAN) | BIT(RSTD))

static const char *const operand_name[OPERANDS] = {"x",    "dy", "gamma", "beta",   "mean",
                                                   "rstd", "y",  "dx",    "dgamma", "dbeta"};

typedef struct operand {
    nj_dtype dtype;
    int32_t rank;
    int64_t shape[NJ_MAX_RANK], stride[NJ_MAX_RANK];
    int64_t offset, count; /* elements, as in nj_tensor */
    int64_t lead;          /* elements by which the buffer's start misses its alignment */
    int home;              /* the operand whose buffer it lives in; its own index: one of its own */
    int replaces;          /* an output that is the same view as the input at home */
    int absent;            /* data is NULL */
    size_t base;           /* bytes from the image to the buffer */
    int64_t *row_at, *col_at; /* elements from element (0, 0, ...) to each row and column */
} operand;

typedef struct problem {
    nj_desc desc; /* op is set by the run */
    nj_preference pref;
    operand op[OPERANDS];
    int64_t rows, cols;
    double x_scale, x_shift; /* x is about x_shift +- x_scale */
    unsigned char *image;
    size_t bytes;
    /* While selected: */
    nj_plan *plan;
    nj_args args;
    unsigned char *device; /* the image on the GPU */
    unsigned char *workspace, *workspace_block;
    size_t workspace_bytes, workspace_block_bytes;
} problem;

static inline int is_normalized(const nj_desc *desc, int axis) {
    return (int)(desc->norm_axes >> axis & 1u);
}

static inline nj_desc make_desc(nj_dtype dtype, int32_t rank, const int64_t *shape, uint32_t axes) {
    nj_desc desc = {0};
    desc.rank = rank;
    desc.norm_axes = axes;
    for (int axis = 0; axis < rank; axis++) desc.shape[axis] = shape[axis];
    desc.dtype = dtype;
    desc.has_gamma = desc.has_beta = 1;
    desc.eps = 1e-5;
    return desc;
}

static inline nj_desc make_matrix(nj_dtype dtype, int64_t rows, int64_t cols) {
    const int64_t shape[2] = {rows, cols};
    return make_desc(dtype, 2, shape, 2u);
}

/* Strides and count of a buffer that holds the view and no more; order: axes, outermost first. */
static inline void view_in_order(operand *o, const int *order) {
    o->offset = 0;
    o->count = 1;
    for (int i = o->rank - 1; i >= 0; i--) {
        o->stride[order[i]] = o->count > 0 ? o->count : 1;
        o->count *= o->shape[order[i]];
    }
}

static inline void view_packed(operand *o) {
    static const int order[NJ_MAX_RANK] = {0, 1, 2, 3, 4, 5, 6, 7};
    view_in_order(o, order);
}

static inline void open_problem(problem *p, const nj_desc *desc) {
    need_backend();
    memset(p, 0, sizeof *p);
    p->desc = *desc;
    p->x_scale = 1;
    p->rows = p->cols = 1;
    for (int axis = 0; axis < desc->rank; axis++) {
        *(is_normalized(desc, axis) ? &p->cols : &p->rows) *= desc->shape[axis];
    }
    for (int i = 0; i < OPERANDS; i++) {
        operand *o = &p->op[i];
        const nj_dtype param = desc->param_dtype ? desc->param_dtype : desc->dtype;
        const nj_dtype stat = desc->stat_dtype ? desc->stat_dtype : math_of(desc->dtype);
        const int is_param = BIT(i) & PARAM_OPERANDS ? 1 : 0,
                  is_stat = BIT(i) & STAT_OPERANDS ? 1 : 0;
        o->dtype = is_param ? param : is_stat ? stat : desc->dtype;
        for (int axis = 0; axis < desc->rank; axis++) {
            if (is_param && !is_normalized(desc, axis)) continue;
            o->shape[o->rank++] = is_stat && is_normalized(desc, axis) ? 1 : desc->shape[axis];
        }
        o->home = i;
        view_packed(o);
    }
    p->op[GAMMA].absent = p->op[DGAMMA].absent = !desc->has_gamma;
    p->op[BETA].absent = p->op[DBETA].absent = !desc->has_beta;
}

/* The output becomes the same view as the input. */
static inline void place_over(problem *p, int output, int input) {
    operand *out = &p->op[output];
    const operand *in = &p->op[input];
    memcpy(out->stride, in->stride, sizeof out->stride);
    out->offset = in->offset;
    out->count = in->count;
    out->lead = in->lead;
    out->home = input;
    out->replaces = 1;
}

/* Offsets of all index tuples over the axes given, row-major. Free with free. */
static inline int64_t *walk_axes(int rank, const int64_t *shape, const int64_t *stride,
                                 uint32_t axes, int64_t count) {
    int64_t *at = (int64_t *)calloc((size_t)count + 1, sizeof *at);
    for (int64_t i = 0; i < count; i++) {
        int64_t rest = i;
        for (int axis = rank - 1; axis >= 0; axis--) {
            if (!(axes >> axis & 1u)) continue;
            at[i] += rest % shape[axis] * stride[axis];
            rest /= shape[axis];
        }
    }
    return at;
}

static inline void index_operand(const problem *p, int i, operand *o) {
    const uint32_t cols = p->desc.norm_axes;
    if (BIT(i) & PARAM_OPERANDS) {
        o->row_at = NULL;
        o->col_at = walk_axes(o->rank, o->shape, o->stride, ~0u, p->cols);
        return;
    }
    o->row_at = walk_axes(o->rank, o->shape, o->stride, ~cols, p->rows);
    o->col_at = NULL;
    if (BIT(i) & FULL_OPERANDS) o->col_at = walk_axes(o->rank, o->shape, o->stride, cols, p->cols);
}

static inline int64_t rows_of(const problem *p, int i) {
    return BIT(i) & PARAM_OPERANDS ? 1 : p->rows;
}

static inline int64_t cols_of(const problem *p, int i) {
    return BIT(i) & STAT_OPERANDS ? 1 : p->cols;
}

/* Where an element lies in a copy of the image. */
static inline unsigned char *element(const problem *p, unsigned char *image, int i, int64_t row,
                                     int64_t col) {
    const operand *o = &p->op[i];
    const int64_t at =
        o->offset + (o->row_at ? o->row_at[row] : 0) + (o->col_at ? o->col_at[col] : 0);
    return image + o->base + at * format_of(o->dtype)->size;
}

static inline double get(const problem *p, int i, int64_t row, int64_t col) {
    return load(p->op[i].dtype, element(p, p->image, i, row, col));
}

static inline void put(problem *p, int i, int64_t row, int64_t col, double value) {
    store(p->op[i].dtype, element(p, p->image, i, row, col), value);
}

/* Lays the buffers out, poisoned. */
static inline void make_image(problem *p) {
    size_t at = GUARD;
    for (int i = 0; i < OPERANDS; i++) {
        operand *o = &p->op[i];
        const size_t size = (size_t)format_of(o->dtype)->size;
        index_operand(p, i, o);
        if (o->home != i) continue;
        o->base = at + (size_t)o->lead * size;
        at = o->base + (size_t)o->count * size + GUARD;
        at = (at + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    }
    for (int i = 0; i < OPERANDS; i++) p->op[i].base = p->op[p->op[i].home].base;
    p->bytes = at;
    p->image = (unsigned char *)aligned_alloc(ALIGNMENT, p->bytes);
    assert_non_null(p->image);
    memset(p->image, POISON, p->bytes);
}

/* A value for each operand and place: rows of x differ in mean and spread, dy has a mean, gamma
   changes its sign, so that no term of the formulas is hidden by symmetry. */
static inline double made_value(const problem *p, int i, uint64_t seed, int64_t row, int64_t col) {
    const double noise = uniform(seed, (uint64_t)i + 16u * (uint64_t)row, (uint64_t)col) +
                         uniform(seed + 1, (uint64_t)i + 16u * (uint64_t)row, (uint64_t)col);
    switch (i) {
    case X: return p->x_shift + p->x_scale * (noise * (1 + row % 3) + 0.25 * (double)(row % 5));
    case DY: return noise + 0.375;
    case GAMMA: return 0.75 + noise;
    default: return noise;
    }
}

static inline void fill_operand(problem *p, int i, uint64_t seed) {
    for (int64_t r = 0; r < rows_of(p, i); r++) {
        for (int64_t c = 0; c < cols_of(p, i); c++) put(p, i, r, c, made_value(p, i, seed, r, c));
    }
}

/* Makes the image (again): poison, inputs, and what accumulated outputs hold before. */
static inline void fill_problem(problem *p, uint64_t seed) {
    if (!p->image) make_image(p);
    memset(p->image, POISON, p->bytes);
    fill_operand(p, X, seed);
    fill_operand(p, DY, seed);
    fill_operand(p, GAMMA, seed);
    fill_operand(p, BETA, seed);
    if (p->desc.accumulate & NJ_GRAD_DX && !p->op[DX].replaces) fill_operand(p, DX, seed);
    if (p->desc.accumulate & NJ_GRAD_DGAMMA) fill_operand(p, DGAMMA, seed);
    if (p->desc.accumulate & NJ_GRAD_DBETA) fill_operand(p, DBETA, seed);
}

static inline void describe(const problem *p, char *text, size_t size) {
    int used = snprintf(text, size, "%s of %s, params %s, stats %s, shape",
                        p->desc.op == NJ_OP_LAYER_NORM_FORWARD ? "forward" : "backward",
                        format_of(p->desc.dtype)->name, format_of(p->op[GAMMA].dtype)->name,
                        format_of(p->op[MEAN].dtype)->name);
    for (int axis = 0; axis < p->desc.rank && used < (int)size; axis++) {
        used += snprintf(text + used, size - (size_t)used, " %lld%s",
                         (long long)p->desc.shape[axis], is_normalized(&p->desc, axis) ? "*" : "");
    }
}

/* ---- running -------------------------------------------------------------------------------- */

/* The gradients that the descriptor asks for, defaults filled in. */
static inline uint32_t wanted_grads(const nj_desc *desc) {
    if (desc->grads) return desc->grads;
    return NJ_GRAD_DX | (desc->has_gamma ? NJ_GRAD_DGAMMA : 0u) |
           (desc->has_beta ? NJ_GRAD_DBETA : 0u);
}

/* Operands that the current op writes. */
static inline uint32_t outputs_of(const problem *p) {
    const uint32_t grads = wanted_grads(&p->desc);
    if (p->desc.op == NJ_OP_LAYER_NORM_FORWARD) {
        return BIT(Y) | (p->op[MEAN].absent ? 0u : BIT(MEAN)) |
               (p->op[RSTD].absent ? 0u : BIT(RSTD));
    }
    return (grads & NJ_GRAD_DX ? BIT(DX) : 0u) | (grads & NJ_GRAD_DGAMMA ? BIT(DGAMMA) : 0u) |
           (grads & NJ_GRAD_DBETA ? BIT(DBETA) : 0u);
}

/* Outputs whose old content the current op adds to. */
static inline uint32_t accumulated(const problem *p) {
    if (p->desc.op == NJ_OP_LAYER_NORM_FORWARD) return 0;
    return (p->desc.accumulate & NJ_GRAD_DX ? BIT(DX) : 0u) |
           (p->desc.accumulate & NJ_GRAD_DGAMMA ? BIT(DGAMMA) : 0u) |
           (p->desc.accumulate & NJ_GRAD_DBETA ? BIT(DBETA) : 0u);
}

static inline nj_tensor tensor_of(const operand *o, unsigned char *image) {
    nj_tensor t = {0};
    if (o->absent) return t;
    t.data = image + o->base;
    t.offset = o->offset;
    t.count = o->count;
    t.rank = o->rank;
    memcpy(t.shape, o->shape, sizeof t.shape);
    memcpy(t.stride, o->stride, sizeof t.stride);
    return t;
}

static inline void make_args(problem *p, unsigned char *image) {
    p->args.x = nj_as_const(tensor_of(&p->op[X], image));
    p->args.dy = nj_as_const(tensor_of(&p->op[DY], image));
    p->args.gamma = nj_as_const(tensor_of(&p->op[GAMMA], image));
    p->args.beta = nj_as_const(tensor_of(&p->op[BETA], image));
    p->args.mean = tensor_of(&p->op[MEAN], image);
    p->args.rstd = tensor_of(&p->op[RSTD], image);
    p->args.y = tensor_of(&p->op[Y], image);
    p->args.dx = tensor_of(&p->op[DX], image);
    p->args.dgamma = tensor_of(&p->op[DGAMMA], image);
    p->args.dbeta = tensor_of(&p->op[DBETA], image);
}

/* Memory for one run of p->plan at a time: a workspace between guards, on a GPU also the image. */
static inline void make_room(problem *p) {
    p->workspace_bytes = nj_plan_workspace_size(p->plan);
    p->workspace_block_bytes =
        (p->workspace_bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT + 2 * ALIGNMENT;
    if (bed.on_gpu) {
        p->workspace_block = (unsigned char *)gpu_alloc(&bed.gpu, p->workspace_block_bytes);
        p->device = (unsigned char *)gpu_alloc(&bed.gpu, p->bytes);
        require_gpu_ok(p->workspace_block && p->device);
        require_gpu_ok(gpu_fill(&bed.gpu, p->workspace_block, POISON, p->workspace_block_bytes));
        p->workspace = p->workspace_block + ALIGNMENT;
    } else {
        p->workspace_block = (unsigned char *)aligned_alloc(ALIGNMENT, p->workspace_block_bytes);
        assert_non_null(p->workspace_block);
        memset(p->workspace_block, POISON, p->workspace_block_bytes);
        p->workspace = p->workspace_block + 16; /* aligned as malloc aligns, no better */
    }
    make_args(p, bed.on_gpu ? p->device : p->image);
}

/* Checks the workspace's guards. */
static inline void release_room(problem *p) {
    const size_t first = (size_t)(p->workspace - p->workspace_block);
    unsigned char *copy = p->workspace_block;
    if (bed.on_gpu) {
        copy = (unsigned char *)malloc(p->workspace_block_bytes);
        require_gpu_ok(gpu_download(&bed.gpu, copy, p->workspace_block, p->workspace_block_bytes));
        gpu_free(&bed.gpu, p->workspace_block);
        gpu_free(&bed.gpu, p->device);
    }
    for (size_t i = 0; i < p->workspace_block_bytes; i++) {
        if (i >= first && i < first + p->workspace_bytes) continue;
        if (copy[i] != POISON) fail_msg("byte %zu around the workspace was written", i);
    }
    free(copy);
}

static inline void select_plan(problem *p, nj_op op) {
    nj_desc desc;
    p->desc.op = op;
    desc = p->desc;
    if (op == NJ_OP_LAYER_NORM_FORWARD) desc.grads = desc.accumulate = 0;
    require_ok(nj_plan_select(&p->plan, bed.ctx, &desc, &p->pref));
    make_room(p);
}

static inline void upload(problem *p) {
    if (bed.on_gpu) require_gpu_ok(gpu_upload(&bed.gpu, p->device, p->image, p->bytes));
}

static inline void download(problem *p) {
    if (bed.on_gpu) require_gpu_ok(gpu_download(&bed.gpu, p->image, p->device, p->bytes));
}

static inline void launch(problem *p) {
    require_ok(nj_plan_run(p->plan, &p->args, p->workspace_bytes ? p->workspace : NULL,
                           p->workspace_bytes, bed.gpu.stream));
}

static inline void release_plan(problem *p) {
    if (!p->plan) return;
    release_room(p);
    nj_plan_destroy(p->plan);
    p->plan = NULL;
}

static inline void close_problem(problem *p) {
    release_plan(p);
    for (int i = 0; i < OPERANDS; i++) {
        free(p->op[i].row_at);
        free(p->op[i].col_at);
    }
    free(p->image);
    p->image = NULL;
}

/* Outputs that are not added to and replace no input get poison: what is not written shows. */
static inline void poison_outputs(problem *p) {
    const uint32_t poisoned = outputs_of(p) & ~accumulated(p);
    for (int i = 0; i < OPERANDS; i++) {
        if (!(poisoned & BIT(i)) || p->op[i].replaces) continue;
        for (int64_t r = 0; r < rows_of(p, i); r++) {
            for (int64_t c = 0; c < cols_of(p, i); c++) {
                memset(element(p, p->image, i, r, c), POISON,
                       (size_t)format_of(p->op[i].dtype)->size);
            }
        }
    }
}

/* Poisons the outputs, selects, runs once on the image, releases. */
static inline void run_once(problem *p, nj_op op) {
    p->desc.op = op;
    poison_outputs(p);
    select_plan(p, op);
    upload(p);
    launch(p);
    download(p);
    release_plan(p);
}

/* ---- comparing ------------------------------------------------------------------------------ */

static inline double *gather(const problem *p, int i) {
    const int64_t rows = rows_of(p, i), cols = cols_of(p, i);
    double *values;
    if (p->op[i].absent) return NULL;
    values = (double *)malloc((size_t)(rows * cols + 1) * sizeof *values);
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t c = 0; c < cols; c++) values[r * cols + c] = get(p, i, r, c);
    }
    return values;
}

/* Expected outputs; NULL those that the op does not write. */
typedef struct expectation {
    estimate *of[OPERANDS];
} expectation;

static inline estimate *new_estimates(const problem *p, int i) {
    return (estimate *)calloc((size_t)(rows_of(p, i) * cols_of(p, i)) + 1, sizeof(estimate));
}

static inline void free_expectation(expectation *e) {
    for (int i = 0; i < OPERANDS; i++) free(e->of[i]);
}

static inline oracle oracle_of(const problem *p) {
    oracle o = {0};
    o.rows = p->rows;
    o.cols = p->cols;
    o.x = gather(p, X);
    o.dy = gather(p, DY);
    o.gamma = gather(p, GAMMA);
    o.beta = gather(p, BETA);
    o.eps = p->desc.eps;
    o.unit = unit_of(math_of(p->desc.dtype));
    o.tiny = tiny_of(math_of(p->desc.dtype));
    return o;
}

static inline void free_oracle(oracle *o) {
    free((void *)(uintptr_t)o->x);
    free((void *)(uintptr_t)o->dy);
    free((void *)(uintptr_t)o->gamma);
    free((void *)(uintptr_t)o->beta);
}

static inline void expect_forward(const problem *p, expectation *e) {
    oracle o = oracle_of(p);
    memset(e, 0, sizeof *e);
    e->of[MEAN] = new_estimates(p, MEAN);
    e->of[RSTD] = new_estimates(p, RSTD);
    e->of[Y] = new_estimates(p, Y);
    oracle_forward(&o, e->of[MEAN], e->of[RSTD], e->of[Y]);
    free_oracle(&o);
}

/* With the statistics in the image when mean and rstd are NULL. */
static inline void expect_backward(const problem *p, const estimate *mean, const estimate *rstd,
                                   expectation *e) {
    oracle o = oracle_of(p);
    estimate *given_mean = new_estimates(p, MEAN), *given_rstd = new_estimates(p, RSTD);
    for (int64_t r = 0; r < p->rows; r++) {
        given_mean[r].value = get(p, MEAN, r, 0);
        given_rstd[r].value = get(p, RSTD, r, 0);
    }
    memset(e, 0, sizeof *e);
    e->of[DX] = new_estimates(p, DX);
    e->of[DGAMMA] = new_estimates(p, DGAMMA);
    e->of[DBETA] = new_estimates(p, DBETA);
    oracle_backward(&o, mean ? mean : given_mean, rstd ? rstd : given_rstd, e->of[DX],
                    e->of[DGAMMA], e->of[DBETA]);
    free(given_mean);
    free(given_rstd);
    free_oracle(&o);
}

/* Adds what accumulated outputs held, and the rounding of that sum. */
static inline void expect_accumulation(const problem *p, expectation *e) {
    for (int i = 0; i < OPERANDS; i++) {
        if (!(accumulated(p) & BIT(i))) continue;
        for (int64_t r = 0; r < rows_of(p, i); r++) {
            for (int64_t c = 0; c < cols_of(p, i); c++) {
                estimate *at = &e->of[i][r * cols_of(p, i) + c];
                at->value += get(p, i, r, c);
                at->error += unit_of(math_of(p->desc.dtype)) * fabs(at->value);
            }
        }
    }
}

/* What rounding an estimate to its type allows. */
static inline double bound_of(const estimate *expected, nj_dtype type) {
    return expected->error + unit_of(type) * (fabs(expected->value) + expected->error) +
           tiny_of(type);
}

static inline int is_close(double got, const estimate *expected, nj_dtype type) {
    const double bound = bound_of(expected, type);
    if (isnan(expected->value)) return isnan(got);
    if (isinf(expected->value)) return got == expected->value;
    if (isinf(got)) { /* right where the value may have rounded past the largest finite one */
        return fabs(expected->value) + bound > format_of(type)->largest &&
               (got > 0) == (expected->value > 0);
    }
    return fabs(got - expected->value) <= bound;
}

static inline int is_poison(const unsigned char *at, nj_dtype type) {
    for (int i = 0; i < format_of(type)->size; i++) {
        if (at[i] != POISON) return 0;
    }
    return 1;
}

static inline void compare_operand(const problem *p, int i, const estimate *expected) {
    const operand *o = &p->op[i];
    const int64_t rows = rows_of(p, i), cols = cols_of(p, i);
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t c = 0; c < cols; c++) {
            const estimate *want = &expected[r * cols + c];
            const unsigned char *at = element(p, p->image, i, r, c);
            const double got = load(o->dtype, at);
            char what[256];
            if (!is_poison(at, o->dtype) && is_close(got, want, o->dtype)) continue;
            describe(p, what, sizeof what);
            fail_msg("%s: %s[row %lld, col %lld] = %.9g%s, expected %.9g +- %.3g", what,
                     operand_name[i], (long long)r, (long long)c, got,
                     is_poison(at, o->dtype) ? " (never written)" : "", want->value,
                     bound_of(want, o->dtype));
        }
    }
}

/* Outputs as expected, and no other byte of the image changed. */
static inline void compare_image(const problem *p, const unsigned char *before,
                                 const expectation *e) {
    const uint32_t outputs = outputs_of(p);
    unsigned char *allowed = (unsigned char *)malloc(p->bytes);
    memcpy(allowed, before, p->bytes);
    for (int i = 0; i < OPERANDS; i++) {
        if (!(outputs & BIT(i))) continue;
        compare_operand(p, i, e->of[i]);
        for (int64_t r = 0; r < rows_of(p, i); r++) {
            for (int64_t c = 0; c < cols_of(p, i); c++) {
                memcpy(element(p, allowed, i, r, c), element(p, p->image, i, r, c),
                       (size_t)format_of(p->op[i].dtype)->size);
            }
        }
    }
    if (memcmp(allowed, p->image, p->bytes) != 0) {
        size_t at = 0;
        int nearest = 0;
        char what[256];
        while (allowed[at] == p->image[at]) at++;
        for (int i = 0; i < OPERANDS; i++) {
            if (p->op[i].base <= at && p->op[i].base >= p->op[nearest].base) nearest = i;
        }
        describe(p, what, sizeof what);
        fail_msg("%s: wrote outside its outputs, at byte %lld from the buffer of %s", what,
                 (long long)at - (long long)p->op[nearest].base, operand_name[nearest]);
    }
    free(allowed);
}

static inline unsigned char *copy_image(const problem *p) {
    unsigned char *copy = (unsigned char *)malloc(p->bytes);
    memcpy(copy, p->image, p->bytes);
    return copy;
}

/* Runs op once on the image and compares everything. */
static inline void check_run(problem *p, nj_op op, expectation *e) {
    unsigned char *before;
    p->desc.op = op;
    expect_accumulation(p, e);
    before = copy_image(p);
    run_once(p, op);
    compare_image(p, before, e);
    free(before);
    free_expectation(e);
}

static inline void check_forward(problem *p) {
    expectation e;
    expect_forward(p, &e);
    check_run(p, NJ_OP_LAYER_NORM_FORWARD, &e);
}

/* Judged with the statistics in the image. */
static inline void check_backward(problem *p) {
    expectation e;
    expect_backward(p, NULL, NULL, &e);
    check_run(p, NJ_OP_LAYER_NORM_BACKWARD, &e);
}

static inline void set_statistics(problem *p) {
    expectation e;
    expect_forward(p, &e);
    for (int64_t r = 0; r < p->rows; r++) {
        put(p, MEAN, r, 0, e.of[MEAN][r].value);
        put(p, RSTD, r, 0, e.of[RSTD][r].value);
    }
    free_expectation(&e);
}

/* Forward; backward from its statistics; backward from the oracle's. */
static inline void check_both(problem *p, uint64_t seed) {
    fill_problem(p, seed);
    check_forward(p);
    check_backward(p);
    fill_problem(p, seed + 2);
    set_statistics(p);
    check_backward(p);
}

/* The whole of a case whose operands are packed. */
static inline void check_packed(const nj_desc *desc, uint64_t seed) {
    problem p;
    open_problem(&p, desc);
    check_both(&p, seed);
    close_problem(&p);
}

#endif
