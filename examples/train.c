/* Trains a small character-level language model on a text file, then lets it write.

     cc -O2 -fopenmp -Iinclude -o train examples/train.c -lm -ldl -lpthread
     ./train /usr/share/common-licenses/GPL-3

   train_model.h holds the model and shows how normjit is called; here are the text, the optimizer,
   the gradient check and the options. The loss is the training loss: no text is held out.

   TRAIN_REAL double computes all in double. TRAIN_NO_MAIN leaves main out, for tests that include
   this file. */
#define NORMJIT_IMPLEMENTATION
#include "normjit.h"

#include "train_model.h"

#include <ctype.h>
#include <errno.h>
#include <float.h>
#include <time.h>

/* ---- text ------------------------------------------------------------------------------------ */

typedef struct text {
    int *tokens;
    long count;
    int vocabulary;             /* distinct bytes */
    unsigned char symbols[256]; /* token -> byte */
} text;

/* The bytes as tokens, in the order of the bytes' values. 0 and the reason in err. */
static int text_from_bytes(text *t, const char *bytes, long count, FILE *err) {
    int token[256] = {0};
    long i;
    memset(t, 0, sizeof *t);
    t->tokens = (int *)malloc(sizeof *t->tokens * (size_t)count);
    if (!t->tokens) {
        fprintf(err, "train: out of memory\n");
        return 0;
    }
    for (i = 0; i < count; i++) token[(unsigned char)bytes[i]] = 1;
    for (i = 0; i < 256; i++)
        if (token[i]) {
            token[i] = t->vocabulary;
            t->symbols[t->vocabulary++] = (unsigned char)i;
        }
    for (i = 0; i < count; i++) t->tokens[i] = token[(unsigned char)bytes[i]];
    t->count = count;
    return 1;
}

/* 0 and the reason in err: no such file, no file, or fewer than `least` bytes. */
static int text_from_file(text *t, const char *path, long least, FILE *err) {
    enum { MOST = 64 << 20 };
    char *bytes = (char *)malloc(MOST + 1);
    FILE *file = fopen(path, "rb");
    size_t count = file && bytes ? fread(bytes, 1, MOST + 1, file) : 0;
    int good = 0;
    if (!file || ferror(file)) fprintf(err, "train: %s: %s\n", path, strerror(errno));
    else if (!bytes) fprintf(err, "train: out of memory\n");
    else if (count > MOST) fprintf(err, "train: %s: more than %d bytes\n", path, (int)MOST);
    else if (count < (size_t)least)
        fprintf(err, "train: %s: %zu bytes, at least %ld are needed\n", path, count, least);
    else good = text_from_bytes(t, bytes, (long)count, err);
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
            p->mean[j] += (real)(1.0 - keep1) * (g - p->mean[j]);
            p->square[j] += (real)(1.0 - keep2) * (g * g - p->square[j]);
            p->value[j] -=
                (real)rate * p->mean[j] * scale1 / (sqrt(p->square[j] * scale2) + (real)1e-8);
        }
    }
}

static double seconds_now(void) {
    struct timespec now;
    timespec_get(&now, TIME_UTC);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

typedef struct options {
    const char *path;
    nj_backend backend;
    double steps, seed, sample; /* whole numbers */
    double seconds;             /* 0: no limit */
    int check;
} options;

/* Stops after o->steps, or past o->seconds. *first: the loss before the first update; *last: the
   mean of the last (up to) 50 steps, as one batch is noisy. */
static int train(model *m, const text *t, const options *o, uint64_t *seed, FILE *out,
                 double *first, double *last) {
    enum { RECENT = 50 };
    const double start = seconds_now();
    double recent[RECENT], loss = 0, elapsed = 0;
    long step, i;
    for (step = 1; (double)step <= o->steps && (o->seconds == 0 || elapsed < o->seconds); step++) {
        const double warm = step < 20 ? (double)step / 20.0 : 1.0;
        const double rate = 0.004 * warm * (1.0 - 0.95 * (double)step / o->steps);
        text_batch(t, m, seed);
        if (!model_gradient(m, &loss)) return 0;
        if (!isfinite(loss)) return model_fail(m, "training", "the loss is no longer finite");
        adam(m, rate, step);
        elapsed = seconds_now() - start;
        if (step == 1) *first = loss;
        recent[step % RECENT] = loss;
        if (step == 1 || step % 100 == 0) {
            fprintf(out, "step %5ld/%.0f  loss %.3f  %.0f tokens/s\n", step, o->steps, loss,
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
    double i;
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

/* Compares every gradient of the batch that the model holds (as model_gradient left them) with a
   central difference of the loss. *worst: the largest error in units of the tolerance; *where: its
   tensor. A tensor whose gradient is all 0 counts as infinitely wrong: nothing leads from it to the
   loss.

   A difference over 2h errs by h^2/6 |loss'''| and by some eps |loss| / h of rounding. The loss is
   near 3 and its third derivatives near 100 where norms have few columns: h = cbrt(3 eps 3/100) is
   the best step, and the two errors are 3.3 and 6.7 times eps^(2/3). The tolerance is about three
   times their sum, as rounding errors gather from layer to layer. */
static int check_gradients(model *m, double *worst, const char **where) {
    const double epsilon = sizeof(real) == sizeof(double) ? DBL_EPSILON : FLT_EPSILON;
    const double h = cbrt(0.09 * epsilon), tolerance = 32.0 * pow(epsilon, 2.0 / 3.0);
    int i, j;
    *worst = 0;
    *where = "none";
    for (i = 0; i < m->param_count; i++) {
        param *p = &m->params[i];
        for (j = 0; j < p->count && p->grad[j] == 0; j++) continue;
        if (j == p->count) {
            *worst = HUGE_VAL;
            *where = p->name;
            return 1;
        }
        for (j = 0; j < p->count; j++) {
            const real value = p->value[j], above = value + (real)h, below = value - (real)h;
            double high, low, slope, error;
            p->value[j] = above;
            if (!model_forward(m, m->shape.batch)) return 0;
            high = model_loss(m);
            p->value[j] = below;
            if (!model_forward(m, m->shape.batch)) return 0;
            low = model_loss(m);
            p->value[j] = value;
            slope = (high - low) / ((double)above - (double)below);
            error = fabs(slope - (double)p->grad[j]) / tolerance;
            if (error <= *worst) continue;
            *worst = error; /* a NaN comes here too */
            *where = p->name;
            if (!isfinite(error)) return 1;
        }
    }
    return 1;
}

/* ---- the program ----------------------------------------------------------------------------- */

static const config training_shape = {16, 16, 128, 256, 2, 64};
static const config checking_shape = {3, 4, 8, 12, 2, 6}; /* two forward passes a parameter */
static const char checking_text[] = "the quick brown fox jumps over the lazy dog";

static const char usage[] =
    "usage: train [options] FILE\n"
    "  --backend auto|host|cuda  where the norms run (auto)\n"
    "  --steps N                 updates (2000)\n"
    "  --seconds S               stop after S seconds (no limit)\n"
    "  --seed N                  of weights, batches and sample (1)\n"
    "  --sample N                characters to write at the end (400)\n"
    "  --check                   compare gradients with finite differences (FILE: optional)\n";

static int parse_backend(nj_backend *out, const char *value) {
    if (strcmp(value, "auto") == 0) *out = NJ_BACKEND_AUTO;
    else if (strcmp(value, "host") == 0) *out = NJ_BACKEND_HOST;
    else if (strcmp(value, "cuda") == 0) *out = NJ_BACKEND_CUDA;
    else return 0;
    return 1;
}

/* All of value as a number >= least; whole: an integer that a double holds exactly. */
static int parse_number(double *out, const char *value, double least, int whole) {
    char *end = NULL;
    *out = strtod(value, &end);
    return end != value && *end == '\0' && *out >= least && *out <= 0x1p53 &&
           (!whole || *out == floor(*out));
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
        int good;
        if (strcmp(name, "--check") == 0) {
            o->check = 1;
            continue;
        }
        if (name[0] != '-' && !o->path) {
            o->path = name;
            continue;
        }
        if (strcmp(name, "--backend") == 0) good = parse_backend(&o->backend, value);
        else if (strcmp(name, "--steps") == 0) good = parse_number(&o->steps, value, 1, 1);
        else if (strcmp(name, "--seconds") == 0) good = parse_number(&o->seconds, value, 0, 0);
        else if (strcmp(name, "--seed") == 0) good = parse_number(&o->seed, value, 0, 1);
        else if (strcmp(name, "--sample") == 0) good = parse_number(&o->sample, value, 0, 1);
        else {
            fprintf(err, "train: %s: no such option, or a second file\n", name);
            return 0;
        }
        if (!good) {
            fprintf(err, "train: %s %s: not a value for this option\n", name, value);
            return 0;
        }
        i++; /* past the value */
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
    int status = 1, good;
    memset(&t, 0, sizeof t);
    if (!m) {
        fprintf(err, "train: out of memory\n");
        goto done;
    }
    if (argc == 2 && strcmp(argv[1], "--help") == 0) {
        fputs(usage, out);
        status = 0;
        goto done;
    }
    if (!parse_options(&o, argc, argv, err)) {
        fputs(usage, err);
        status = 2;
        goto done;
    }
    if (o.check) shape = &checking_shape;
    if (o.path) good = text_from_file(&t, o.path, shape->context + 1, err);
    else good = text_from_bytes(&t, checking_text, (long)strlen(checking_text), err);
    if (!good) goto done;
    seed = (uint64_t)o.seed;
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
