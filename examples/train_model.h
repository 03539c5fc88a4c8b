/* The model of train.c: it sees the last `context` characters and guesses the next. An embedding,
   a linear layer, pre-norm residual blocks x + W2 gelu(W1 norm(x)), a last norm and a linear layer
   to the logits; softmax cross-entropy.

   Every norm is normjit's. With the CUDA backend the norms run on the device, their operands copied
   there and back, and the rest stays on the host: this shows how one program drives both backends,
   not how to train fast on a GPU.

   Every gradient is added to, and the caller zeroes them once a step. So a norm's backward pass
   accumulates: its dx goes straight into the gradient of the residual stream.

   Include normjit.h first. */
#ifndef EXAMPLES_TRAIN_MODEL_H
#define EXAMPLES_TRAIN_MODEL_H

#include "gpu.h"

#include <tgmath.h> /* exp, sqrt and erf in the precision of their argument */

#ifndef TRAIN_REAL
#define TRAIN_REAL float
#endif
typedef TRAIN_REAL real;

/* ---- the model ------------------------------------------------------------------------------- */

typedef struct config {
    int context, embedding; /* characters seen, numbers per character */
    int width, hidden;      /* of the residual stream, inside of a block */
    int blocks, batch;      /* batch: characters guessed per step */
} config;

enum { MAX_BLOCKS = 4, MAX_PARAMS = 32, MAX_ARRAYS = 80 };

typedef struct param {
    char name[32];
    int count;
    real *value, *grad, *mean, *square; /* the last two: Adam's running means of grad and grad^2 */
} param;

typedef struct linear {
    int in, out;
    param *weight, *bias; /* in x out, out */
} linear;

/* A norm's operands that have a copy on the device when the norms run there; dy takes Y's place. */
enum { X, Y, GAMMA, BETA, MEAN, RSTD, DX, DGAMMA, DBETA, OPERANDS };

typedef struct norm {
    param *gamma, *beta;
    real *mean, *rstd; /* one per row, kept from forward to backward (there or on the device) */
    void *device[OPERANDS];
} norm;

typedef struct block {
    norm norm;
    linear up, down;
    real *normed, *active, *slope; /* norm(x), gelu and gelu' of up's output: batch rows of each */
} block;

typedef struct model {
    config shape;
    int vocabulary;
    param params[MAX_PARAMS];
    int param_count;
    void *arrays[MAX_ARRAYS]; /* all host memory of the model, for model_close */
    int array_count;

    param *embedding; /* vocabulary x embedding */
    linear input, output;
    block blocks[MAX_BLOCKS];
    norm last;

    int *tokens, *targets;        /* batch x context, batch */
    real *gathered;               /* batch x context*embedding: the tokens, embedded */
    real *stream[MAX_BLOCKS + 1]; /* batch x width: before each block, and at the end */
    real *normed, *logits;        /* batch x width, batch x vocabulary */
    real *d_gathered, *d_stream, *d_normed, *d_hidden; /* gradients */

    nj_ctx *ctx;
    nj_plan *forward, *forward_one, *backward; /* batch rows, one row, batch rows */
    int on_device;
    gpu gpu;
    void *workspace;
    size_t workspace_size;
    char error[4224]; /* nj_last_error may hold a compiler's log */
} model;

static int model_fail(model *m, const char *what, const char *why) {
    snprintf(m->error, sizeof m->error, "%s: %s", what, why);
    return 0;
}

/* count zeroed items, freed by model_close. NULL and the error when there is no memory. */
static void *model_array(model *m, size_t count, size_t size) {
    void *array = m->array_count < MAX_ARRAYS ? calloc(count, size) : NULL;
    if (array) m->arrays[m->array_count++] = array;
    else model_fail(m, "model", "out of memory");
    return array;
}

/* *out = rows x columns zeroes. */
static int model_matrix(model *m, real **out, int rows, int columns) {
    *out = (real *)model_array(m, (size_t)rows * (size_t)columns, sizeof **out);
    return *out != NULL;
}

/* splitmix64 */
static uint64_t random_bits(uint64_t *state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* In [0, 1). */
static double random_unit(uint64_t *state) {
    return (double)(random_bits(state) >> 11) * 0x1p-53;
}

/* *out = a tensor of count numbers, uniform in [middle - spread, middle + spread). */
static int model_param(model *m, param **out, const char *layer, const char *part, int count,
                       double middle, double spread, uint64_t *seed) {
    param *p = &m->params[m->param_count];
    int i;
    if (m->param_count == MAX_PARAMS) return model_fail(m, layer, "more tensors than MAX_PARAMS");
    if (!model_matrix(m, &p->value, 4, count)) return 0;
    p->grad = p->value + count;
    p->mean = p->grad + count;
    p->square = p->mean + count;
    p->count = count;
    snprintf(p->name, sizeof p->name, "%s %s", layer, part);
    for (i = 0; i < count; i++)
        p->value[i] = (real)(middle + spread * (2.0 * random_unit(seed) - 1.0));
    m->param_count++;
    *out = p;
    return 1;
}

/* ---- linear layers --------------------------------------------------------------------------- */

/* Element (i, j) is data[i*row + j*col]: swapping the strides transposes. */
typedef struct view {
    const real *data;
    size_t row, col;
} view;

static view packed(const real *data, int columns) {
    view v = {data, (size_t)columns, 1};
    return v;
}

static view transposed(const real *data, int columns) {
    view v = {data, 1, (size_t)columns};
    return v;
}

static int smaller(int a, int b) {
    return a < b ? a : b;
}

enum { TILE_ROWS = 4, TILE_COLS = 32, TILE_DEPTH = 256 }; /* a float panel of b fills an L1 cache */

/* c += a * panel, of one tile's first rows and cols; n: from a row of c to the next. */
static void matmul_tile(int rows, int cols, int depth, view a, const real *panel, real *c, int n) {
    real sum[TILE_ROWS][TILE_COLS] = {{0}};
    const real *from[TILE_ROWS];
    int i, j, p;
    for (i = 0; i < TILE_ROWS; i++) /* rows past the edge repeat the last one */
        from[i] = a.data + (size_t)(i < rows ? i : rows - 1) * a.row;
    for (p = 0; p < depth; p++)
        for (i = 0; i < TILE_ROWS; i++) {
            const real factor = from[i][(size_t)p * a.col];
            for (j = 0; j < TILE_COLS; j++) sum[i][j] += factor * panel[p * TILE_COLS + j];
        }
    for (i = 0; i < rows; i++)
        for (j = 0; j < cols; j++) c[i * n + j] += sum[i][j];
}

/* c += a * b: m x n, m x k, k x n; c is packed. One thread sums an element, in the order of k: the
   result does not depend on the number of threads. */
static void matmul_add(int m, int n, int k, view a, view b, real *c) {
    int left;
#ifdef _OPENMP
#pragma omp parallel for schedule(static)
#endif
    for (left = 0; left < n; left += TILE_COLS) {
        const int cols = smaller(n - left, TILE_COLS);
        real panel[TILE_DEPTH * TILE_COLS];
        int i, j, p, start;
        for (start = 0; start < k; start += TILE_DEPTH) {
            const int depth = smaller(k - start, TILE_DEPTH);
            const real *corner = b.data + (size_t)start * b.row + (size_t)left * b.col;
            for (p = 0; p < depth; p++)
                for (j = 0; j < TILE_COLS; j++)
                    panel[p * TILE_COLS + j] =
                        j < cols ? corner[(size_t)p * b.row + (size_t)j * b.col] : 0;
            for (i = 0; i < m; i += TILE_ROWS) {
                view part = a;
                part.data += (size_t)i * a.row + (size_t)start * a.col;
                matmul_tile(smaller(m - i, TILE_ROWS), cols, depth, part, panel,
                            c + (size_t)i * (size_t)n + left, n);
            }
        }
    }
}

static int linear_open(model *m, linear *l, const char *name, int in, int out, uint64_t *seed) {
    l->in = in;
    l->out = out;
    return model_param(m, &l->weight, name, "weight", in * out, 0.0, sqrt(1.0 / in), seed) &&
           model_param(m, &l->bias, name, "bias", out, 0.0, 0.0, seed);
}

/* y += x W + b */
static void linear_forward(const linear *l, int rows, const real *x, real *y) {
    int i, j;
    for (i = 0; i < rows; i++)
        for (j = 0; j < l->out; j++) y[i * l->out + j] += l->bias->value[j];
    matmul_add(rows, l->out, l->in, packed(x, l->in), packed(l->weight->value, l->out), y);
}

/* dW += x' dy, db += column sums of dy, dx += dy W' */
static void linear_backward(const linear *l, int rows, const real *x, const real *dy, real *dx) {
    int i, j;
    for (i = 0; i < rows; i++)
        for (j = 0; j < l->out; j++) l->bias->grad[j] += dy[i * l->out + j];
    matmul_add(l->in, l->out, rows, transposed(x, l->in), packed(dy, l->out), l->weight->grad);
    matmul_add(rows, l->in, l->out, packed(dy, l->out), transposed(l->weight->value, l->out), dx);
}

/* ---- norms ----------------------------------------------------------------------------------- */

static int norm_open(model *m, norm *n, const char *name, uint64_t *seed) {
    const int batch = m->shape.batch, width = m->shape.width;
    int i;
    for (i = 0; m->on_device && i < OPERANDS; i++) { /* each with room for the largest */
        n->device[i] = gpu_alloc(&m->gpu, sizeof(real) * (size_t)batch * (size_t)width);
        if (!n->device[i]) return model_fail(m, name, m->gpu.error);
    }
    return model_param(m, &n->gamma, name, "gamma", width, 1.0, 0.0, seed) &&
           model_param(m, &n->beta, name, "beta", width, 0.0, 0.0, seed) &&
           model_matrix(m, &n->mean, batch, 1) && model_matrix(m, &n->rstd, batch, 1);
}

/* Where the backend finds an operand that the host holds at `host`. */
static void *norm_at(const model *m, const norm *n, int operand, real *host) {
    return m->on_device ? n->device[operand] : (void *)host;
}

static int norm_put(model *m, norm *n, int operand, const real *host, int count) {
    const size_t bytes = sizeof *host * (size_t)count;
    if (!m->on_device || gpu_upload(&m->gpu, n->device[operand], host, bytes)) return 1;
    return model_fail(m, "upload", m->gpu.error);
}

static int norm_get(model *m, norm *n, int operand, real *host, int count) {
    const size_t bytes = sizeof *host * (size_t)count;
    if (!m->on_device || gpu_download(&m->gpu, host, n->device[operand], bytes)) return 1;
    return model_fail(m, "download", m->gpu.error);
}

static int norm_run(model *m, const nj_plan *plan, const nj_args *args) {
    void *stream = m->on_device ? m->gpu.stream : NULL;
    if (nj_plan_run(plan, args, m->workspace, m->workspace_size, stream) == NJ_OK) return 1;
    return model_fail(m, "norm", nj_last_error());
}

/* The operands that both directions read. */
static void norm_args(model *m, norm *n, int rows, real *x, nj_args *args) {
    const int64_t shape[2] = {rows, m->shape.width}, stats[2] = {rows, 1};
    memset(args, 0, sizeof *args);
    args->x = nj_packed_const(norm_at(m, n, X, x), 2, shape);
    args->gamma = nj_packed_const(norm_at(m, n, GAMMA, n->gamma->value), 1, shape + 1);
    args->mean = nj_packed(norm_at(m, n, MEAN, n->mean), 2, stats);
    args->rstd = nj_packed(norm_at(m, n, RSTD, n->rstd), 2, stats);
}

/* y = norm(x); rows: the batch or 1. */
static int norm_forward(model *m, norm *n, int rows, real *x, real *y) {
    const int width = m->shape.width;
    const int64_t shape[2] = {rows, width};
    nj_args args;
    norm_args(m, n, rows, x, &args);
    args.beta = nj_packed_const(norm_at(m, n, BETA, n->beta->value), 1, shape + 1);
    args.y = nj_packed(norm_at(m, n, Y, y), 2, shape);
    return norm_put(m, n, X, x, rows * width) && norm_put(m, n, GAMMA, n->gamma->value, width) &&
           norm_put(m, n, BETA, n->beta->value, width) &&
           norm_run(m, rows == m->shape.batch ? m->forward : m->forward_one, &args) &&
           norm_get(m, n, Y, y, rows * width);
}

/* dx += ..., and so gamma's and beta's gradients; x, mean and rstd (and gamma, on the device) are
   those of the batch's last norm_forward. */
static int norm_backward(model *m, norm *n, real *x, real *dy, real *dx) {
    const int rows = m->shape.batch, width = m->shape.width;
    const int64_t shape[2] = {rows, width};
    nj_args args;
    norm_args(m, n, rows, x, &args);
    args.dy = nj_packed_const(norm_at(m, n, Y, dy), 2, shape);
    args.dx = nj_packed(norm_at(m, n, DX, dx), 2, shape);
    args.dgamma = nj_packed(norm_at(m, n, DGAMMA, n->gamma->grad), 1, shape + 1);
    args.dbeta = nj_packed(norm_at(m, n, DBETA, n->beta->grad), 1, shape + 1);
    return norm_put(m, n, Y, dy, rows * width) && norm_put(m, n, DX, dx, rows * width) &&
           norm_put(m, n, DGAMMA, n->gamma->grad, width) &&
           norm_put(m, n, DBETA, n->beta->grad, width) && norm_run(m, m->backward, &args) &&
           norm_get(m, n, DX, dx, rows * width) && norm_get(m, n, DGAMMA, n->gamma->grad, width) &&
           norm_get(m, n, DBETA, n->beta->grad, width);
}

/* ---- opening and closing --------------------------------------------------------------------- */

static int plan_open(model *m, nj_plan **plan, nj_op op, int rows) {
    nj_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.op = op;
    desc.rank = 2;
    desc.shape[0] = rows;
    desc.shape[1] = m->shape.width;
    desc.norm_axes = 1u << 1;
    desc.dtype = sizeof(real) == sizeof(double) ? NJ_F64 : NJ_F32;
    desc.has_gamma = desc.has_beta = 1;
    desc.eps = 1e-5;
    if (op == NJ_OP_LAYER_NORM_BACKWARD) {
        desc.grads = NJ_GRAD_DX | NJ_GRAD_DGAMMA | NJ_GRAD_DBETA;
        desc.accumulate = desc.grads;
    }
    if (nj_plan_select(plan, m->ctx, &desc, NULL) != NJ_OK)
        return model_fail(m, "norm", nj_last_error());
    if (nj_plan_workspace_size(*plan) > m->workspace_size)
        m->workspace_size = nj_plan_workspace_size(*plan);
    return 1;
}

static int backend_open(model *m, nj_backend backend) {
    nj_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.backend = backend;
    if (nj_ctx_create(&m->ctx, &desc) != NJ_OK) return model_fail(m, "backend", nj_last_error());
    m->on_device = nj_ctx_backend(m->ctx) == NJ_BACKEND_CUDA;
    if (m->on_device && !gpu_open(&m->gpu, desc.device))
        return model_fail(m, "backend", m->gpu.error);
    if (!plan_open(m, &m->forward, NJ_OP_LAYER_NORM_FORWARD, m->shape.batch) ||
        !plan_open(m, &m->forward_one, NJ_OP_LAYER_NORM_FORWARD, 1) ||
        !plan_open(m, &m->backward, NJ_OP_LAYER_NORM_BACKWARD, m->shape.batch))
        return 0;
    if (m->workspace_size == 0) return 1;
    if (m->on_device) m->workspace = gpu_alloc(&m->gpu, m->workspace_size);
    else m->workspace = malloc(m->workspace_size);
    if (m->workspace) return 1;
    return model_fail(m, "workspace", m->on_device ? m->gpu.error : "out of memory");
}

/* Frees what a model holds, also after a model_open that failed. */
static void model_close(model *m) {
    int i, j;
    for (j = 0; j < OPERANDS; j++) {
        for (i = 0; i < m->shape.blocks; i++) gpu_free(&m->gpu, m->blocks[i].norm.device[j]);
        gpu_free(&m->gpu, m->last.device[j]);
    }
    if (m->on_device) gpu_free(&m->gpu, m->workspace);
    else free(m->workspace);
    nj_plan_destroy(m->backward);
    nj_plan_destroy(m->forward_one);
    nj_plan_destroy(m->forward);
    nj_ctx_destroy(m->ctx);
    gpu_close(&m->gpu);
    for (i = 0; i < m->array_count; i++) free(m->arrays[i]);
    memset(m, 0, sizeof *m);
}

static int block_open(model *m, block *b, int index, uint64_t *seed) {
    const config *s = &m->shape;
    char norm_name[16], up_name[16], down_name[16];
    snprintf(norm_name, sizeof norm_name, "norm %d", index);
    snprintf(up_name, sizeof up_name, "up %d", index);
    snprintf(down_name, sizeof down_name, "down %d", index);
    return norm_open(m, &b->norm, norm_name, seed) &&
           linear_open(m, &b->up, up_name, s->width, s->hidden, seed) &&
           linear_open(m, &b->down, down_name, s->hidden, s->width, seed) &&
           model_matrix(m, &b->normed, s->batch, s->width) &&
           model_matrix(m, &b->active, s->batch, s->hidden) &&
           model_matrix(m, &b->slope, s->batch, s->hidden) &&
           model_matrix(m, &m->stream[index + 1], s->batch, s->width);
}

/* 1, or 0 and m->error; either way model_close. */
static int model_open(model *m, const config *s, int vocabulary, nj_backend backend,
                      uint64_t *seed) {
    const int window = s->context * s->embedding;
    int i;
    memset(m, 0, sizeof *m);
    m->shape = *s;
    m->vocabulary = vocabulary;
    if (!backend_open(m, backend) ||
        !model_param(m, &m->embedding, "embedding", "table", vocabulary * s->embedding, 0.0, 1.0,
                     seed) ||
        !linear_open(m, &m->input, "input", window, s->width, seed) ||
        !model_matrix(m, &m->stream[0], s->batch, s->width))
        return 0;
    for (i = 0; i < s->blocks; i++)
        if (!block_open(m, &m->blocks[i], i, seed)) return 0;
    m->tokens = (int *)model_array(m, (size_t)(s->batch * s->context), sizeof *m->tokens);
    m->targets = (int *)model_array(m, (size_t)s->batch, sizeof *m->targets);
    return m->tokens && m->targets && norm_open(m, &m->last, "last norm", seed) &&
           linear_open(m, &m->output, "output", s->width, vocabulary, seed) &&
           model_matrix(m, &m->gathered, s->batch, window) &&
           model_matrix(m, &m->normed, s->batch, s->width) &&
           model_matrix(m, &m->logits, s->batch, vocabulary) &&
           model_matrix(m, &m->d_gathered, s->batch, window) &&
           model_matrix(m, &m->d_stream, s->batch, s->width) &&
           model_matrix(m, &m->d_normed, s->batch, s->width) &&
           model_matrix(m, &m->d_hidden, s->batch, s->hidden);
}

/* ---- forward, loss, backward ----------------------------------------------------------------- */

/* In place, with the derivative for the backward pass. */
static void gelu(int count, real *x, real *slope) {
    int i;
    for (i = 0; i < count; i++) {
        const real below = (real)0.5 * (1 + erf(x[i] * (real)0.70710678118654752));
        slope[i] = below + x[i] * (real)0.39894228040143268 * exp((real)-0.5 * x[i] * x[i]);
        x[i] *= below;
    }
}

static void zero(real *array, int count) {
    memset(array, 0, sizeof *array * (size_t)count);
}

/* tokens -> logits, of `rows` rows: the batch or 1. */
static int model_forward(model *m, int rows) {
    const config *s = &m->shape;
    int i;
    for (i = 0; i < rows * s->context; i++)
        memcpy(m->gathered + i * s->embedding, m->embedding->value + m->tokens[i] * s->embedding,
               sizeof(real) * (size_t)s->embedding);
    zero(m->stream[0], rows * s->width);
    linear_forward(&m->input, rows, m->gathered, m->stream[0]);
    for (i = 0; i < s->blocks; i++) {
        block *b = &m->blocks[i];
        if (!norm_forward(m, &b->norm, rows, m->stream[i], b->normed)) return 0;
        zero(b->active, rows * s->hidden);
        linear_forward(&b->up, rows, b->normed, b->active);
        gelu(rows * s->hidden, b->active, b->slope);
        memcpy(m->stream[i + 1], m->stream[i], sizeof(real) * (size_t)(rows * s->width));
        linear_forward(&b->down, rows, b->active, m->stream[i + 1]);
    }
    if (!norm_forward(m, &m->last, rows, m->stream[s->blocks], m->normed)) return 0;
    zero(m->logits, rows * m->vocabulary);
    linear_forward(&m->output, rows, m->normed, m->logits);
    return 1;
}

/* Turns one row of logits into probabilities at this temperature. */
static void softmax(int count, real *row, double temperature) {
    real most = row[0], sum = 0;
    int i;
    for (i = 1; i < count; i++) most = row[i] > most ? row[i] : most;
    for (i = 0; i < count; i++) sum += row[i] = exp((row[i] - most) / (real)temperature);
    for (i = 0; i < count; i++) row[i] /= sum;
}

/* The batch's mean cross-entropy in nats; replaces the logits by its gradient. */
static double model_loss(model *m) {
    const int batch = m->shape.batch, v = m->vocabulary;
    double sum = 0;
    int i, j;
    for (i = 0; i < batch; i++) {
        real *row = m->logits + i * v;
        softmax(v, row, 1.0);
        sum -= log((double)row[m->targets[i]]);
        row[m->targets[i]] -= 1;
        for (j = 0; j < v; j++) row[j] /= (real)batch;
    }
    return sum / batch;
}

/* Adds the batch's gradient to every param's; after model_forward and model_loss. */
static int model_backward(model *m) {
    const config *s = &m->shape;
    const int rows = s->batch;
    int i, j;
    zero(m->d_normed, rows * s->width);
    zero(m->d_stream, rows * s->width);
    linear_backward(&m->output, rows, m->normed, m->logits, m->d_normed);
    if (!norm_backward(m, &m->last, m->stream[s->blocks], m->d_normed, m->d_stream)) return 0;
    for (i = s->blocks - 1; i >= 0; i--) {
        block *b = &m->blocks[i];
        zero(m->d_hidden, rows * s->hidden);
        linear_backward(&b->down, rows, b->active, m->d_stream, m->d_hidden);
        for (j = 0; j < rows * s->hidden; j++) m->d_hidden[j] *= b->slope[j];
        zero(m->d_normed, rows * s->width);
        linear_backward(&b->up, rows, b->normed, m->d_hidden, m->d_normed);
        if (!norm_backward(m, &b->norm, m->stream[i], m->d_normed, m->d_stream)) return 0;
    }
    zero(m->d_gathered, rows * s->context * s->embedding);
    linear_backward(&m->input, rows, m->gathered, m->d_stream, m->d_gathered);
    for (i = 0; i < rows * s->context; i++) {
        real *grad = m->embedding->grad + m->tokens[i] * s->embedding;
        for (j = 0; j < s->embedding; j++) grad[j] += m->d_gathered[i * s->embedding + j];
    }
    return 1;
}

/* The gradient of the batch that the model holds, into every param's grad, and the loss. */
static int model_gradient(model *m, double *loss) {
    int i;
    for (i = 0; i < m->param_count; i++) zero(m->params[i].grad, m->params[i].count);
    if (!model_forward(m, m->shape.batch)) return 0;
    *loss = model_loss(m);
    return model_backward(m);
}

#endif /* EXAMPLES_TRAIN_MODEL_H */
