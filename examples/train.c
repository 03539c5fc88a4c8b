/* Trains a small character-level language model on a text file, then lets it write.

     cc -O2 -o train examples/train.c -lm -ldl -lpthread      (-fopenmp, -O3 -march=native: faster)
     ./train /usr/share/common-licenses/GPL-3

   The model sees the last `context` characters and guesses the next one: an embedding, a linear
   layer, pre-norm residual blocks x + W2 gelu(W1 norm(x)), a last norm and a linear layer to the
   logits; softmax cross-entropy, Adam. Every norm is normjit's. With the CUDA backend the norms run
   on the device, their operands copied there and back, and the rest stays on the host: it shows how
   a program drives both backends, not how to train fast on a GPU.

   Every gradient is added to (the caller zeroes them once a step), so the norms' backward passes
   accumulate: dx of a norm goes straight into the gradient of the residual stream.

   TRAIN_REAL double computes all in double. TRAIN_NO_MAIN leaves main out, for tests that include
   this file. */
#define NORMJIT_IMPLEMENTATION
#include "../include/normjit.h"

#include "gpu.h"

#include <ctype.h>
#include <errno.h>
#include <float.h>
#include <tgmath.h> /* exp, sqrt and erf in the precision of their argument */
#include <time.h>

#ifndef TRAIN_REAL
#define TRAIN_REAL float
#endif
typedef TRAIN_REAL real;
static const nj_dtype real_dtype = sizeof(real) == sizeof(double) ? NJ_F64 : NJ_F32;
static const double real_epsilon = sizeof(real) == sizeof(double) ? DBL_EPSILON : FLT_EPSILON;

/* ---- the model ------------------------------------------------------------------------------- */

typedef struct config {
    int context, embedding; /* characters seen, numbers per character */
    int width, hidden;      /* residual stream, inside of a block */
    int blocks, batch;      /* batch: characters guessed per step */
} config;

enum { MAX_BLOCKS = 8, MAX_PARAMS = 64, MAX_ARRAYS = 512 };

typedef struct param {
    char name[32];
    int count;
    real *value, *grad;
    real *moment1, *moment2; /* Adam's running means of grad and of its square */
} param;

typedef struct linear {
    int in, out;
    param *weight, *bias; /* in x out, out */
} linear;

/* Operands of a norm that have a copy on the device when the norms run there. dy takes Y's place. */
enum { X, Y, GAMMA, BETA, MEAN, RSTD, DX, DGAMMA, DBETA, OPERANDS };

typedef struct norm {
    param *gamma, *beta;
    real *mean, *rstd; /* one per row; kept from forward to backward, on the host backend here */
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
    real *arrays[MAX_ARRAYS]; /* all memory of the model, for model_close */
    int array_count;

    param *embedding; /* vocabulary x embedding */
    linear input, output;
    block blocks[MAX_BLOCKS];
    norm last;

    int *tokens, *targets;    /* batch x context, batch */
    real *gathered;           /* batch x context*embedding: the embedded tokens */
    real *stream[MAX_BLOCKS + 1], *normed, *logits; /* residual stream before each block and at the end */
    real *d_gathered, *d_stream, *d_normed, *d_hidden;

    nj_ctx *ctx;
    nj_plan *forward, *forward_one, *backward; /* batch rows, one row, batch rows */
    int on_device;
    gpu gpu;
    void *workspace;
    size_t workspace_size;
    char error[512];
} model;

static int model_fail(model *m, const char *what, const char *why) {
    snprintf(m->error, sizeof m->error, "%s: %s", what, why);
    return 0;
}

/* count zeroes, freed by model_close; NULL and the error when there is no memory. */
static real *model_array(model *m, size_t count) {
    real *array = m->array_count < MAX_ARRAYS ? calloc(count ? count : 1, sizeof *array) : NULL;
    if (array) m->arrays[m->array_count++] = array;
    else model_fail(m, "model", "out of memory");
    return array;
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

/* A tensor of count numbers, uniform in [middle - spread, middle + spread). */
static param *model_param(model *m, const char *name, int count, double middle, double spread,
                          uint64_t *seed) {
    param *p = &m->params[m->param_count];
    int i;
    if (m->param_count == MAX_PARAMS) {
        model_fail(m, "model", "more tensors than MAX_PARAMS");
        return NULL;
    }
    snprintf(p->name, sizeof p->name, "%s", name);
    p->count = count;
    p->value = model_array(m, (size_t)count);
    p->grad = model_array(m, (size_t)count);
    p->moment1 = model_array(m, (size_t)count);
    p->moment2 = model_array(m, (size_t)count);
    if (!p->value || !p->grad || !p->moment1 || !p->moment2) return NULL;
    for (i = 0; i < count; i++)
        p->value[i] = (real)(middle + spread * (2.0 * random_unit(seed) - 1.0));
    m->param_count++;
    return p;
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

enum { TILE_ROWS = 4, TILE_COLS = 32, TILE_DEPTH = 256 }; /* the panel of b fills the L1 cache */

/* The first `rows` rows of one tile: c += a * panel. */
static void matmul_tile(int rows, int cols, int depth, view a, const real *panel, real *c, int c_row) {
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
        for (j = 0; j < cols; j++) c[i * c_row + j] += sum[i][j];
}

/* c += a * b: m x n, m x k, k x n; c is packed. One thread sums an element, in the order of k: the
   result does not depend on the number of threads. */
static void matmul_add(int m, int n, int k, view a, view b, real *c) {
    int first;
#ifdef _OPENMP
#pragma omp parallel for schedule(static)
#endif
    for (first = 0; first < n; first += TILE_COLS) {
        const int cols = n - first < TILE_COLS ? n - first : TILE_COLS;
        real panel[TILE_DEPTH * TILE_COLS];
        int i, j, p, start;
        for (start = 0; start < k; start += TILE_DEPTH) {
            const int depth = k - start < TILE_DEPTH ? k - start : TILE_DEPTH;
            for (p = 0; p < depth; p++)
                for (j = 0; j < TILE_COLS; j++)
                    panel[p * TILE_COLS + j] =
                        j < cols ? b.data[(size_t)(start + p) * b.row + (size_t)(first + j) * b.col] : 0;
            for (i = 0; i < m; i += TILE_ROWS) {
                view part = a;
                part.data += (size_t)i * a.row + (size_t)start * a.col;
                matmul_tile(m - i < TILE_ROWS ? m - i : TILE_ROWS, cols, depth, part, panel,
                            c + (size_t)i * (size_t)n + first, n);
            }
        }
    }
}

static int linear_open(model *m, linear *l, const char *name, int in, int out, uint64_t *seed) {
    char text[32];
    l->in = in;
    l->out = out;
    snprintf(text, sizeof text, "%s weight", name);
    l->weight = model_param(m, text, in * out, 0.0, sqrt(1.0 / in), seed);
    snprintf(text, sizeof text, "%s bias", name);
    l->bias = model_param(m, text, out, 0.0, 0.0, seed);
    return l->weight && l->bias;
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
    char text[32];
    int i;
    snprintf(text, sizeof text, "%s gamma", name);
    n->gamma = model_param(m, text, width, 1.0, 0.0, seed);
    snprintf(text, sizeof text, "%s beta", name);
    n->beta = model_param(m, text, width, 0.0, 0.0, seed);
    n->mean = model_array(m, (size_t)batch);
    n->rstd = model_array(m, (size_t)batch);
    if (!n->gamma || !n->beta || !n->mean || !n->rstd) return 0;
    for (i = 0; m->on_device && i < OPERANDS; i++) { /* room for the largest operand in each */
        n->device[i] = gpu_alloc(&m->gpu, sizeof(real) * (size_t)batch * (size_t)width);
        if (!n->device[i]) return model_fail(m, name, m->gpu.error);
    }
    return 1;
}

/* Where the backend finds an operand that the host holds at `host`. */
static void *norm_at(const model *m, const norm *n, int operand, real *host) {
    return m->on_device ? n->device[operand] : (void *)host;
}

static int norm_put(model *m, norm *n, int operand, const real *host, int count) {
    if (!m->on_device || gpu_upload(&m->gpu, n->device[operand], host, sizeof *host * (size_t)count))
        return 1;
    return model_fail(m, "upload", m->gpu.error);
}

static int norm_get(model *m, norm *n, int operand, real *host, int count) {
    if (!m->on_device ||
        gpu_download(&m->gpu, host, n->device[operand], sizeof *host * (size_t)count))
        return 1;
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
           norm_get(m, n, DX, dx, rows * width) &&
           norm_get(m, n, DGAMMA, n->gamma->grad, width) &&
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
    desc.dtype = real_dtype;
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
    m->workspace =
        m->on_device ? gpu_alloc(&m->gpu, m->workspace_size) : malloc(m->workspace_size);
    return m->workspace || model_fail(m, "workspace", m->on_device ? m->gpu.error : "out of memory");
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
    free(m->tokens);
    free(m->targets);
    memset(m, 0, sizeof *m);
}

/* 1, or 0 and m->error; either way model_close. */
static int model_open(model *m, const config *shape, int vocabulary, nj_backend backend,
                      uint64_t *seed) {
    const int batch = shape->batch, width = shape->width;
    const size_t stream = (size_t)batch * (size_t)width, hidden = (size_t)batch * (size_t)shape->hidden;
    const size_t gathered = (size_t)batch * (size_t)(shape->context * shape->embedding);
    char name[16];
    int i;
    memset(m, 0, sizeof *m);
    m->shape = *shape;
    m->vocabulary = vocabulary;
    if (!backend_open(m, backend)) return 0;

    m->embedding = model_param(m, "embedding", vocabulary * shape->embedding, 0.0, 1.0, seed);
    if (!m->embedding) return 0;
    if (!linear_open(m, &m->input, "input", shape->context * shape->embedding, width, seed)) return 0;
    for (i = 0; i < shape->blocks; i++) {
        block *b = &m->blocks[i];
        snprintf(name, sizeof name, "block %d", i);
        if (!norm_open(m, &b->norm, name, seed)) return 0;
        snprintf(name, sizeof name, "block %d up", i);
        if (!linear_open(m, &b->up, name, width, shape->hidden, seed)) return 0;
        snprintf(name, sizeof name, "block %d down", i);
        if (!linear_open(m, &b->down, name, shape->hidden, width, seed)) return 0;
        if (!(b->normed = model_array(m, stream)) || !(b->active = model_array(m, hidden)) ||
            !(b->slope = model_array(m, hidden)))
            return 0;
    }
    if (!norm_open(m, &m->last, "last", seed)) return 0;
    if (!linear_open(m, &m->output, "output", width, vocabulary, seed)) return 0;

    for (i = 0; i <= shape->blocks; i++)
        if (!(m->stream[i] = model_array(m, stream))) return 0;
    if (!(m->gathered = model_array(m, gathered)) || !(m->d_gathered = model_array(m, gathered)) ||
        !(m->normed = model_array(m, stream)) || !(m->d_normed = model_array(m, stream)) ||
        !(m->d_stream = model_array(m, stream)) || !(m->d_hidden = model_array(m, hidden)) ||
        !(m->logits = model_array(m, (size_t)batch * (size_t)vocabulary)))
        return 0;
    m->tokens = calloc((size_t)batch * (size_t)shape->context, sizeof *m->tokens);
    m->targets = calloc((size_t)batch, sizeof *m->targets);
    return (m->tokens && m->targets) || model_fail(m, "model", "out of memory");
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
    for (i = 0; i < rows * s->context; i++)
        for (j = 0; j < s->embedding; j++)
            m->embedding->grad[m->tokens[i] * s->embedding + j] += m->d_gathered[i * s->embedding + j];
    return 1;
}

/* ---- text ------------------------------------------------------------------------------------ */

typedef struct text {
    int *tokens;
    long count;
    int vocabulary;             /* distinct bytes */
    unsigned char symbols[256]; /* token -> byte */
} text;

/* The bytes as tokens, in the order of the bytes' values. 0 when there is no memory. */
static int text_from_bytes(text *t, const unsigned char *bytes, long count) {
    int token[256] = {0};
    long i;
    memset(t, 0, sizeof *t);
    t->tokens = malloc(sizeof *t->tokens * (size_t)count);
    if (!t->tokens) return 0;
    for (i = 0; i < count; i++) token[bytes[i]] = 1;
    for (i = 0; i < 256; i++)
        if (token[i]) {
            token[i] = t->vocabulary;
            t->symbols[t->vocabulary++] = (unsigned char)i;
        }
    for (i = 0; i < count; i++) t->tokens[i] = token[bytes[i]];
    t->count = count;
    return 1;
}

/* 1, or 0 and the reason in err. */
static int text_from_file(text *t, const char *path, long least, FILE *err) {
    const long most = 64L << 20;
    unsigned char *bytes = malloc((size_t)most + 1);
    FILE *file = fopen(path, "rb");
    long count = 0;
    int good = 0;
    if (!file) {
        fprintf(err, "train: %s: %s\n", path, strerror(errno));
        goto done;
    }
    if (!bytes) {
        fprintf(err, "train: out of memory\n");
        goto done;
    }
    errno = 0;
    count = (long)fread(bytes, 1, (size_t)most + 1, file);
    if (ferror(file)) fprintf(err, "train: %s: %s\n", path, strerror(errno)); /* a folder, say */
    else if (count == 0) fprintf(err, "train: %s: the file is empty\n", path);
    else if (count < least)
        fprintf(err, "train: %s: %ld bytes: at least %ld are needed\n", path, count, least);
    else if (count > most)
        fprintf(err, "train: %s: more than the %ld bytes that are allowed\n", path, most);
    else if (!text_from_bytes(t, bytes, count)) fprintf(err, "train: out of memory\n");
    else good = 1;
done:
    if (file) fclose(file);
    free(bytes);
    return good;
}

/* Fills the model's tokens and targets from random places. */
static void text_batch(const text *t, model *m, uint64_t *seed) {
    const int context = m->shape.context;
    int i;
    for (i = 0; i < m->shape.batch; i++) {
        const long at = (long)(random_bits(seed) % (uint64_t)(t->count - context));
        memcpy(m->tokens + i * context, t->tokens + at, sizeof(int) * (size_t)context);
        m->targets[i] = t->tokens[at + context];
    }
}

/* ---- training -------------------------------------------------------------------------------- */

static void adam(model *m, double rate, long step) {
    const double keep1 = 0.9, keep2 = 0.99; /* of the running means; both start at 0, hence: */
    const real scale1 = (real)(1.0 / (1.0 - pow(keep1, (double)step)));
    const real scale2 = (real)(1.0 / (1.0 - pow(keep2, (double)step)));
    int i, j;
    for (i = 0; i < m->param_count; i++) {
        param *p = &m->params[i];
        for (j = 0; j < p->count; j++) {
            const real g = p->grad[j];
            p->moment1[j] += (real)(1.0 - keep1) * (g - p->moment1[j]);
            p->moment2[j] += (real)(1.0 - keep2) * (g * g - p->moment2[j]);
            p->value[j] -= (real)rate * p->moment1[j] * scale1 /
                           (sqrt(p->moment2[j] * scale2) + (real)1e-8);
        }
    }
}

/* The gradient of the batch that the model holds, into every param's grad, and the loss. */
static int model_gradient(model *m, double *loss) {
    int i;
    for (i = 0; i < m->param_count; i++) zero(m->params[i].grad, m->params[i].count);
    if (!model_forward(m, m->shape.batch)) return 0;
    *loss = model_loss(m);
    return model_backward(m);
}

static double seconds_now(void) {
    struct timespec now;
    timespec_get(&now, TIME_UTC);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

typedef struct options {
    const char *path;
    nj_backend backend;
    long steps, sample;
    double seconds; /* 0: no limit */
    uint64_t seed;
    int check;
} options;

/* Stops after o->steps, or past o->seconds. *first: the loss before the first update; *last: the mean
   of the last (up to) 50 steps, as one batch is noisy. */
static int train(model *m, const text *t, const options *o, uint64_t *seed, FILE *out, double *first,
                 double *last) {
    enum { RECENT = 50 };
    const double start = seconds_now();
    double recent[RECENT], loss = 0, elapsed = 0;
    long step, i;
    for (step = 1; step <= o->steps && (o->seconds == 0 || elapsed < o->seconds); step++) {
        const double warm = step < 20 ? step / 20.0 : 1.0;
        const double rate = 0.004 * warm * (1.0 - 0.95 * (double)step / (double)o->steps);
        text_batch(t, m, seed);
        if (!model_gradient(m, &loss)) return 0;
        if (!isfinite(loss)) return model_fail(m, "training", "the loss is no longer finite");
        adam(m, rate, step);
        elapsed = seconds_now() - start;
        if (step == 1) *first = loss;
        recent[step % RECENT] = loss;
        if (step == 1 || step % 100 == 0) {
            fprintf(out, "step %5ld/%ld  loss %.3f  %.0f tokens/s\n", step, o->steps, loss,
                    (double)step * m->shape.batch / elapsed);
            fflush(out);
        }
    }
    step--;
    for (*last = 0, i = 0; i < RECENT && i < step; i++) *last += recent[(step - i) % RECENT];
    *last /= (double)i;
    return 1;
}

/* Prints o->sample characters that the model makes up after a piece of the text. */
static int write_sample(model *m, const text *t, const options *o, uint64_t *seed, FILE *out) {
    const int context = m->shape.context;
    long i;
    int token;
    text_batch(t, m, seed); /* the first row of the batch is the piece */
    for (i = 0; i < o->sample; i++) {
        double left = random_unit(seed);
        unsigned char c;
        if (!model_forward(m, 1)) return 0;
        softmax(m->vocabulary, m->logits, 0.7);
        for (token = 0; token < m->vocabulary - 1; token++)
            if ((left -= (double)m->logits[token]) < 0) break;
        c = t->symbols[token];
        fputc(iscntrl(c) && c != '\n' && c != '\t' ? '?' : c, out);
        memmove(m->tokens, m->tokens + 1, sizeof(int) * (size_t)(context - 1));
        m->tokens[context - 1] = token;
    }
    fputc('\n', out);
    return 1;
}

/* Compares every gradient of the batch that the model holds (grad: as model_gradient left them) with
   a central difference of the loss. *worst: the largest error in units of the tolerance; *where: its
   tensor.

   A difference over 2h errs by h^2/6 |loss'''| and by the rounding of the two losses over 2h; the
   step h = cbrt(3 eps) balances the two at about eps^(2/3) each when loss''' and the loss are near 1.
   The factor 64 leaves room for the roundings in the layers that a loss goes through and for the third
   derivatives of the norms. */
static int check_gradients(model *m, double *worst, const char **where) {
    const double h = cbrt(3.0 * real_epsilon);
    const double tolerance = 64.0 * pow(real_epsilon, 2.0 / 3.0);
    int i, j;
    *worst = 0;
    *where = "none";
    for (i = 0; i < m->param_count; i++) {
        param *p = &m->params[i];
        for (j = 0; j < p->count; j++) {
            const real value = p->value[j], above = value + (real)h, below = value - (real)h;
            double high, low, error;
            p->value[j] = above;
            if (!model_forward(m, m->shape.batch)) return 0;
            high = model_loss(m);
            p->value[j] = below;
            if (!model_forward(m, m->shape.batch)) return 0;
            low = model_loss(m);
            p->value[j] = value;
            error = fabs((high - low) / ((double)above - (double)below) - (double)p->grad[j]) / tolerance;
            if (error <= *worst) continue;
            *worst = error; /* a NaN lands here too */
            *where = p->name;
            if (!isfinite(error)) return 1;
        }
    }
    return 1;
}

/* ---- the program ----------------------------------------------------------------------------- */

static const config training_shape = {16, 16, 128, 256, 2, 64};
static const config checking_shape = {3, 4, 8, 12, 2, 6}; /* every parameter costs two forward passes */
static const char checking_text[] = "the quick brown fox jumps over the lazy dog";

static void usage(FILE *out) {
    fprintf(out, "usage: train [options] FILE\n"
                 "  --backend auto|host|cuda  where the norms run (auto)\n"
                 "  --steps N                 updates (2000)\n"
                 "  --seconds S               stop after S seconds (no limit)\n"
                 "  --seed N                  of weights, batches and sample (1)\n"
                 "  --sample N                characters to write at the end (400)\n"
                 "  --check                   compare gradients with finite differences, then exit;\n"
                 "                            needs no FILE\n");
}

/* All of `from` as a number in [least, most]. */
static int parse_number(const char *from, double least, double most, double *out) {
    char *end = NULL;
    *out = strtod(from, &end);
    return end != from && *end == '\0' && *out >= least && *out <= most;
}

static int parse_count(const char *from, double least, double *out) {
    return parse_number(from, least, 0x1p53, out) && *out == floor(*out); /* exact in a double */
}

/* 1; 0 and the reason in err. */
static int parse_options(options *o, int argc, char **argv, FILE *err) {
    int i;
    memset(o, 0, sizeof *o);
    o->steps = 2000;
    o->sample = 400;
    o->seed = 1;
    for (i = 1; i < argc; i++) {
        const char *name = argv[i], *value = i + 1 < argc ? argv[i + 1] : "";
        double number = 0;
        int good = 1;
        if (name[0] != '-') {
            if (o->path) {
                fprintf(err, "train: one file at a time: %s\n", name);
                return 0;
            }
            o->path = name;
            continue;
        }
        if (strcmp(name, "--check") == 0) {
            o->check = 1;
            continue;
        }
        i++; /* the others have a value */
        if (strcmp(name, "--backend") == 0) {
            if (strcmp(value, "auto") == 0) o->backend = NJ_BACKEND_AUTO;
            else if (strcmp(value, "host") == 0) o->backend = NJ_BACKEND_HOST;
            else if (strcmp(value, "cuda") == 0) o->backend = NJ_BACKEND_CUDA;
            else good = 0;
        } else if (strcmp(name, "--steps") == 0) {
            good = parse_count(value, 1, &number);
            o->steps = (long)number;
        } else if (strcmp(name, "--sample") == 0) {
            good = parse_count(value, 0, &number);
            o->sample = (long)number;
        } else if (strcmp(name, "--seed") == 0) {
            good = parse_count(value, 0, &number);
            o->seed = (uint64_t)number;
        } else if (strcmp(name, "--seconds") == 0) {
            good = parse_number(value, 0, 1e9, &o->seconds);
        } else {
            fprintf(err, "train: no such option: %s\n", name);
            return 0;
        }
        if (!good) {
            fprintf(err, "train: %s %s: not a value for this option\n", name, value);
            return 0;
        }
    }
    if (!o->path && !o->check) fprintf(err, "train: no FILE given\n");
    return o->path || o->check;
}

/* The exit status: 0; 1 for a file, backend or check that fails; 2 for bad options. */
static int train_main(int argc, char **argv, FILE *out, FILE *err) {
    const config *shape = &training_shape;
    options o;
    text t;
    model *m = calloc(1, sizeof *m);
    uint64_t seed;
    double first = 0, last = 0, worst = 0;
    const char *where = "";
    int status = 1;
    memset(&t, 0, sizeof t);
    if (!m) {
        fprintf(err, "train: out of memory\n");
        goto done;
    }
    if (argc == 2 && strcmp(argv[1], "--help") == 0) {
        usage(out);
        status = 0;
        goto done;
    }
    if (!parse_options(&o, argc, argv, err)) {
        usage(err);
        status = 2;
        goto done;
    }
    if (o.check) shape = &checking_shape;
    if (o.path ? !text_from_file(&t, o.path, shape->context + 1, err)
               : !text_from_bytes(&t, (const unsigned char *)checking_text, sizeof checking_text - 1))
        goto done;
    seed = o.seed;
    if (!model_open(m, shape, t.vocabulary, o.backend, &seed)) goto failed;
    fprintf(out, "norms: %s\ntext: %ld characters, %d different\n", nj_ctx_info(m->ctx), t.count,
            t.vocabulary);
    if (o.check) {
        text_batch(&t, m, &seed);
        if (!model_gradient(m, &first) || !check_gradients(m, &worst, &where)) goto failed;
        status = worst <= 1.0 ? 0 : 1;
        fprintf(out, "check: %s: the worst error is %.2g of the tolerance (%s)\n",
                status == 0 ? "passed" : "FAILED", worst, where);
        goto done;
    }
    if (!train(m, &t, &o, &seed, out, &first, &last)) goto failed;
    fprintf(out, "loss: first %.2f last %.2f\nsample:\n", first, last);
    if (!write_sample(m, &t, &o, &seed, out)) goto failed;
    if (fflush(out) == 0) status = 0;
    else fprintf(err, "train: the output cannot be written\n");
    goto done;
failed:
    fprintf(err, "train: %s\n", m->error);
done:
    if (m) model_close(m);
    free(m);
    free(t.tokens);
    return status;
}

#ifndef TRAIN_NO_MAIN
int main(int argc, char **argv) {
    return train_main(argc, argv, stdout, stderr);
}
#endif
