/* Runs LayerNorm forward and backward and compares every output with a naive reference in a wider
   type. Prints the largest error of each output, and that error beside what rounding allows there.

     check [auto|host|cuda]                exit 1 when an error is larger than rounding explains */
#define NORMJIT_IMPLEMENTATION
#include "normjit.h"

#include "../examples/gpu.h"
#include "../tests/oracle.h"

enum { ROWS = 509, COLS = 768 }; /* rows prime: no blocking divides them */

enum { X, DY, GAMMA, BETA, MEAN, RSTD, Y, DX, DGAMMA, DBETA, OPERANDS };

typedef struct operand {
    const char *name;
    int rows, cols;   /* extents; 1 where it has none */
    int rank;         /* of its tensor */
    nj_dtype dtype;
    double *values;   /* on this side */
    void *data;       /* where the backend reads and writes */
} operand;

typedef struct check {
    int on_gpu;
    gpu gpu;
    nj_ctx *ctx;
    operand operands[OPERANDS];
} check;

static void die(const char *what, const char *why) {
    fprintf(stderr, "check: %s: %s\n", what, why);
    exit(1);
}

static void require(nj_status status) {
    if (status != NJ_OK) die(nj_status_string(status), nj_last_error());
}

static void *allocate(size_t bytes) {
    void *p = calloc(1, bytes);
    if (!p) die("calloc", "out of memory");
    return p;
}

/* ---- operands: doubles here, their type there ------------------------------------------------ */

static size_t operand_count(const operand *o) {
    return (size_t)o->rows * (size_t)o->cols;
}

/* f32, or the upper half of one, which is bf16. */
static void encode(const operand *o, char *bytes) {
    size_t i, size = nj_dtype_size(o->dtype);
    for (i = 0; i < operand_count(o); i++) {
        float value = (float)o->values[i];
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        bits >>= 8 * (4 - size);
        memcpy(bytes + i * size, &bits, size);
    }
}

static void decode(const operand *o, const char *bytes) {
    size_t i, size = nj_dtype_size(o->dtype);
    for (i = 0; i < operand_count(o); i++) {
        float value;
        uint32_t bits = 0;
        memcpy(&bits, bytes + i * size, size);
        bits <<= 8 * (4 - size);
        memcpy(&value, &bits, sizeof value);
        o->values[i] = value;
    }
}

/* Brings the values into their type and to the backend; they come back as that type holds them. */
static void operand_send(check *c, operand *o) {
    size_t bytes = operand_count(o) * nj_dtype_size(o->dtype);
    char *buffer = allocate(bytes);
    encode(o, buffer);
    decode(o, buffer);
    if (c->on_gpu) {
        o->data = gpu_alloc(&c->gpu, bytes);
        if (!o->data || !gpu_upload(&c->gpu, o->data, buffer, bytes)) die("CUDA", c->gpu.error);
        free(buffer);
    } else {
        o->data = buffer;
    }
}

static void operand_fetch(check *c, const operand *o) {
    size_t bytes = operand_count(o) * nj_dtype_size(o->dtype);
    if (c->on_gpu) {
        char *buffer = allocate(bytes);
        if (!gpu_download(&c->gpu, buffer, o->data, bytes)) die("CUDA", c->gpu.error);
        decode(o, buffer);
        free(buffer);
    } else {
        decode(o, (const char *)o->data);
    }
}

static void operand_free(check *c, operand *o) {
    if (c->on_gpu) gpu_free(&c->gpu, o->data);
    else free(o->data);
    free(o->values);
}

static nj_tensor operand_tensor(const operand *o) {
    int64_t shape[2];
    shape[0] = o->rank == 2 ? o->rows : o->cols;
    shape[1] = o->cols;
    return nj_packed(o->data, o->rank, shape);
}

static void operands_make(check *c, nj_dtype dtype) {
    static const char *const name[OPERANDS] = {"x",    "dy", "gamma", "beta",   "mean",
                                               "rstd", "y",  "dx",    "dgamma", "dbeta"};
    uint32_t state = 1;
    int i;
    for (i = 0; i < OPERANDS; i++) {
        operand *o = &c->operands[i];
        int is_parameter = i == GAMMA || i == BETA || i == DGAMMA || i == DBETA;
        int is_statistic = i == MEAN || i == RSTD;
        size_t k;
        o->name = name[i];
        o->rank = is_parameter ? 1 : 2;
        o->rows = is_parameter ? 1 : ROWS;
        o->cols = is_statistic ? 1 : COLS;
        o->dtype = is_statistic ? NJ_F32 : dtype;
        o->values = allocate(operand_count(o) * sizeof *o->values);
        for (k = 0; k < operand_count(o); k++) {
            state = state * 1664525u + 1013904223u;
            o->values[k] = (double)(state >> 8) / (1 << 23) - (i == X ? 0 : 1); /* x: mean 1 */
        }
        operand_send(c, o);
    }
}

/* ---- the comparison -------------------------------------------------------------------------- */

/* Prints the largest error; returns the largest ratio of error to bound. The bound: what arithmetic
   in f32 may be off, and half a unit of the type that the result is stored in. */
static double compare(const operand *o, const estimate *expected) {
    double unit = o->dtype == NJ_BF16 ? 0x1p-8 : 0x1p-24;
    double worst = 0, ratio = 0;
    size_t i;
    for (i = 0; i < operand_count(o); i++) {
        double error = fabs(o->values[i] - expected[i].value);
        double bound = expected[i].error + unit * (fabs(expected[i].value) + expected[i].error);
        if (isnan(error)) error = INFINITY;
        worst = fmax(worst, error);
        if (error > 0) ratio = fmax(ratio, error / bound);
    }
    printf("  %s %.1e", o->name, worst);
    return ratio;
}

static void run(check *c, nj_op op, nj_dtype dtype, const nj_args *args) {
    nj_desc desc = {0};
    nj_plan *plan;
    size_t bytes;
    void *workspace = NULL;
    desc.rank = 2;
    desc.norm_axes = 1u << 1;
    desc.shape[0] = ROWS;
    desc.shape[1] = COLS;
    desc.op = op;
    desc.dtype = dtype;
    desc.has_gamma = desc.has_beta = 1;
    desc.eps = op == NJ_OP_LAYER_NORM_FORWARD ? 1e-5 : 0;
    require(nj_plan_select(&plan, c->ctx, &desc, NULL));
    bytes = nj_plan_workspace_size(plan);
    if (bytes) workspace = c->on_gpu ? gpu_alloc(&c->gpu, bytes) : allocate(bytes);
    if (bytes && !workspace) die("CUDA", c->gpu.error);
    require(nj_plan_run(plan, args, workspace, bytes, c->gpu.stream));
    if (c->on_gpu && !gpu_wait(&c->gpu)) die("CUDA", c->gpu.error);
    if (c->on_gpu) gpu_free(&c->gpu, workspace);
    else free(workspace);
    nj_plan_destroy(plan);
}

static double check_type(check *c, nj_dtype dtype, const char *dtype_name) {
    estimate *expected[OPERANDS] = {NULL}, mean[ROWS], rstd[ROWS];
    const operand *at = c->operands;
    nj_args args = {0};
    oracle o = {0};
    double worst = 0;
    int i;
    operands_make(c, dtype);
    args.x = nj_as_const(operand_tensor(&at[X]));
    args.dy = nj_as_const(operand_tensor(&at[DY]));
    args.gamma = nj_as_const(operand_tensor(&at[GAMMA]));
    args.beta = nj_as_const(operand_tensor(&at[BETA]));
    args.mean = operand_tensor(&at[MEAN]);
    args.rstd = operand_tensor(&at[RSTD]);
    args.y = operand_tensor(&at[Y]);
    args.dx = operand_tensor(&at[DX]);
    args.dgamma = operand_tensor(&at[DGAMMA]);
    args.dbeta = operand_tensor(&at[DBETA]);
    run(c, NJ_OP_LAYER_NORM_FORWARD, dtype, &args);
    run(c, NJ_OP_LAYER_NORM_BACKWARD, dtype, &args);
    for (i = MEAN; i < OPERANDS; i++) {
        operand_fetch(c, &at[i]);
        expected[i] = allocate(operand_count(&at[i]) * sizeof *expected[i]);
    }

    o.rows = ROWS;
    o.cols = COLS;
    o.x = at[X].values;
    o.dy = at[DY].values;
    o.gamma = at[GAMMA].values;
    o.beta = at[BETA].values;
    o.eps = 1e-5;
    o.unit = 0x1p-24;
    o.tiny = 0x1p-149;
    for (i = 0; i < ROWS; i++) { /* the statistics that the backward read, bit for bit */
        mean[i].value = at[MEAN].values[i];
        rstd[i].value = at[RSTD].values[i];
        mean[i].error = rstd[i].error = 0;
    }
    oracle_forward(&o, expected[MEAN], expected[RSTD], expected[Y]);
    oracle_backward(&o, mean, rstd, expected[DX], expected[DGAMMA], expected[DBETA]);
    printf("%5s max error:", dtype_name);
    for (i = MEAN; i < OPERANDS; i++) {
        worst = fmax(worst, compare(&at[i], expected[i]));
        free(expected[i]);
    }
    printf("\n      %.2f of what rounding allows: %s\n", worst, worst <= 1 ? "ok" : "FAILED");
    for (i = 0; i < OPERANDS; i++) operand_free(c, &c->operands[i]);
    return worst;
}

int main(int argc, char **argv) {
    static check c;
    const char *where = argc == 2 ? argv[1] : "auto";
    nj_ctx_desc how = {0};
    int good;
    if (argc > 2 || (strcmp(where, "auto") && strcmp(where, "host") && strcmp(where, "cuda"))) {
        fprintf(stderr, "usage: check [auto|host|cuda]\n");
        return 2;
    }
    if (strcmp(where, "host") == 0) how.backend = NJ_BACKEND_HOST;
    if (strcmp(where, "cuda") == 0) how.backend = NJ_BACKEND_CUDA;
    if (how.backend != NJ_BACKEND_HOST) c.on_gpu = gpu_open(&c.gpu, 0);
    if (how.backend == NJ_BACKEND_CUDA && !c.on_gpu) die("CUDA", c.gpu.error);
    require(nj_ctx_create(&c.ctx, &how));
    if (c.on_gpu && nj_ctx_backend(c.ctx) == NJ_BACKEND_HOST) { /* normjit cannot use the device */
        gpu_close(&c.gpu);
        c.on_gpu = 0;
    }
    printf("LayerNorm %d x %d, forward and backward, on %s\n", ROWS, COLS, nj_ctx_info(c.ctx));
    good = check_type(&c, NJ_F32, "f32") <= 1;
    good = check_type(&c, NJ_BF16, "bf16") <= 1 && good;
    nj_ctx_destroy(c.ctx);
    if (c.on_gpu) gpu_close(&c.gpu);
    return good ? 0 : 1;
}
