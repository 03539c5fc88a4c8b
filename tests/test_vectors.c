/* The cases of vectors/layernorm_cases.txt: inputs by their bits, results in float64 that another
   implementation computed. Path as the argument, else relative to the repository's root. */
#include "harness.h"

#define MAX_CASES 128

/* One array of the file, as it stands there. */
typedef struct array {
    nj_dtype type;
    int64_t count;
    uint64_t *bits;
} array;

typedef struct vector_case {
    char name[64];
    nj_desc desc;
    int64_t x_stride[NJ_MAX_RANK], dy_stride[NJ_MAX_RANK], x_offset, dy_offset;
    array of[OPERANDS]; /* inputs in their type; mean, rstd and outputs in f64 */
} vector_case;

static vector_case cases[MAX_CASES];
static size_t case_count;

/* ---- reading -------------------------------------------------------------------------------- */

static nj_dtype parse_type(const char *word) {
    for (int type = NJ_F16; word && type <= NJ_F64; type++) {
        if (strcmp(word, format_of((nj_dtype)type)->name) == 0) return (nj_dtype)type;
    }
    return NJ_DTYPE_UNSET;
}

static int parse_integers(char *rest, int64_t *out) {
    int n = 0;
    for (char *word = strtok(rest, " \n"); word && n < NJ_MAX_RANK; word = strtok(NULL, " \n")) {
        out[n++] = strtoll(word, NULL, 10);
    }
    return n;
}

/* "type count bits..." */
static int parse_array(char *rest, array *out) {
    const char *word;
    out->type = parse_type(strtok(rest, " \n"));
    word = strtok(NULL, " \n");
    out->count = word ? strtoll(word, NULL, 10) : -1;
    if (!out->type || out->count < 0) return 0;
    out->bits = (uint64_t *)calloc((size_t)out->count + 1, sizeof *out->bits);
    for (int64_t i = 0; i < out->count; i++) {
        word = strtok(NULL, " \n");
        if (!word) return 0;
        out->bits[i] = strtoull(word, NULL, 16);
    }
    return strtok(NULL, " \n") == NULL;
}

/* 0: a line that this reader does not understand, which would be a case not tested. */
static int parse_field(vector_case *to, const char *name, char *rest) {
    int64_t number[NJ_MAX_RANK] = {0};
    for (int i = 0; i < OPERANDS; i++) {
        const char *key = i == RSTD ? "inv_std" : operand_name[i];
        if (strcmp(name, key) == 0) return parse_array(rest, &to->of[i]);
    }
    if (strcmp(name, "dtype") == 0) return (to->desc.dtype = parse_type(strtok(rest, " \n"))) != 0;
    if (strcmp(name, "param_dtype") == 0) {
        return (to->desc.param_dtype = parse_type(strtok(rest, " \n"))) != 0;
    }
    if (strcmp(name, "eps") == 0) {
        to->desc.eps = strtod(rest, NULL);
        return 1;
    }
    if (strcmp(name, "shape") == 0) {
        to->desc.rank = parse_integers(rest, to->desc.shape);
    } else if (strcmp(name, "x_stride") == 0) {
        parse_integers(rest, to->x_stride);
    } else if (strcmp(name, "dy_stride") == 0) {
        parse_integers(rest, to->dy_stride);
    } else {
        parse_integers(rest, number);
        if (strcmp(name, "norm_axes") == 0)
            to->desc.norm_axes = (uint32_t)number[0];
        else if (strcmp(name, "has_gamma") == 0)
            to->desc.has_gamma = (int32_t)number[0];
        else if (strcmp(name, "has_beta") == 0)
            to->desc.has_beta = (int32_t)number[0];
        else if (strcmp(name, "x_offset") == 0)
            to->x_offset = number[0];
        else if (strcmp(name, "dy_offset") == 0)
            to->dy_offset = number[0];
        else
            return 0;
    }
    return 1;
}

static int read_cases(const char *path) {
    enum { LONGEST = 1 << 20 };
    static char line[LONGEST];
    FILE *file = fopen(path, "r");
    vector_case *open = NULL;
    int number = 0, understood = 1;
    if (!file) {
        fprintf(stderr, "%s: cannot be opened\n", path);
        return 0;
    }
    while (understood && fgets(line, sizeof line, file)) {
        char *rest = line + strcspn(line, " \n");
        number++;
        if (line[0] == '#' || rest == line) continue;
        if (*rest) *rest++ = 0;
        if (strcmp(line, "case") == 0) {
            understood = !open && case_count < MAX_CASES;
            if (!understood) break;
            open = &cases[case_count];
            rest[strcspn(rest, "\n")] = 0;
            snprintf(open->name, sizeof open->name, "%s", rest);
        } else if (strcmp(line, "end") == 0) {
            understood = open != NULL;
            case_count++;
            open = NULL;
        } else {
            understood = open && parse_field(open, line, rest);
        }
    }
    fclose(file);
    if (!understood || open) fprintf(stderr, "%s:%d: not understood\n", path, number);
    return understood && !open;
}

/* ---- a case as a problem -------------------------------------------------------------------- */

/* A whole buffer of the file; its bits go in as they are. */
static void copy_buffer(problem *p, int i, const array *from) {
    const size_t size = (size_t)format_of(from->type)->size;
    assert_int_equal(from->type, p->op[i].dtype);
    for (int64_t k = 0; k < from->count; k++) {
        memcpy(p->image + p->op[i].base + (size_t)k * size, &from->bits[k],
               size); /* little-endian */
    }
}

static double f64_of(const array *from, int64_t index) {
    assert_int_equal(from->type, NJ_F64);
    return load(NJ_F64, &from->bits[index]);
}

static void open_case(problem *p, const vector_case *from) {
    open_problem(p, &from->desc);
    memcpy(p->op[X].stride, from->x_stride, sizeof from->x_stride);
    memcpy(p->op[DY].stride, from->dy_stride, sizeof from->dy_stride);
    p->op[X].offset = from->x_offset;
    p->op[DY].offset = from->dy_offset;
    p->op[X].count = from->of[X].count;
    p->op[DY].count = from->of[DY].count;
    fill_problem(p, 0);
    copy_buffer(p, X, &from->of[X]);
    copy_buffer(p, DY, &from->of[DY]);
    if (from->desc.has_gamma) copy_buffer(p, GAMMA, &from->of[GAMMA]);
    if (from->desc.has_beta) copy_buffer(p, BETA, &from->of[BETA]);
}

/* The file's results in the order of an expectation: rows by columns, where the file has the order
   of the shape. */
static double *file_values(const problem *p, const vector_case *from, int i) {
    const int64_t rows = rows_of(p, i), cols = cols_of(p, i);
    operand dense = p->op[i];
    double *values = (double *)malloc((size_t)(rows * cols + 1) * sizeof *values);
    assert_int_equal(from->of[i].count, rows * cols);
    view_packed(&dense);
    index_operand(p, i, &dense);
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t c = 0; c < cols; c++) {
            values[r * cols + c] = f64_of(&from->of[i], (dense.row_at ? dense.row_at[r] : 0) +
                                                            (dense.col_at ? dense.col_at[c] : 0));
        }
    }
    free(dense.row_at);
    free(dense.col_at);
    return values;
}

/* The oracle's forward, its bounds widened for f64 by what the file itself is off: its variance was
   updated value by value, so that a deviation is off by about as much as the mean is. */
static void expect_forward_of_file(const problem *p, expectation *e) {
    expect_forward(p, e);
    if (p->desc.dtype != NJ_F64) return;
    for (int64_t r = 0; r < p->rows; r++) {
        estimate *rstd = &e->of[RSTD][r];
        rstd->error += e->of[MEAN][r].error * rstd->value * rstd->value;
    }
}

/* Puts the file's values in the place of the oracle's and leaves the oracle's bounds, which are
   made of the operands. For f64 the file has rounded as the library does: twice the bound. */
static void expect_the_file(const problem *p, const vector_case *from, expectation *e) {
    const double share = p->desc.dtype == NJ_F64 ? 2 : 1;
    for (int i = 0; i < OPERANDS; i++) {
        double *values;
        if (!e->of[i] || p->op[i].absent) continue;
        values = file_values(p, from, i);
        for (int64_t k = 0; k < from->of[i].count; k++) {
            e->of[i][k].value = values[k];
            e->of[i][k].error *= share;
        }
        free(values);
    }
}

/* The file's statistics, and how far those that a backward is given may be from those that the
   file's gradients were made of: rounding to their type, and what a computation of them is off when
   either side has made one in the type judged. */
static void state_statistics(const problem *p, const vector_case *from, int computed,
                             estimate *mean, estimate *rstd) {
    const nj_dtype type = p->op[MEAN].dtype;
    expectation e;
    expect_forward_of_file(p, &e);
    for (int64_t r = 0; r < p->rows; r++) {
        mean[r].value = f64_of(&from->of[MEAN], r);
        rstd[r].value = f64_of(&from->of[RSTD], r);
        mean[r].error = unit_of(type) * fabs(mean[r].value) + tiny_of(type);
        rstd[r].error = unit_of(type) * rstd[r].value + tiny_of(type);
        if (!computed) continue;
        mean[r].error += e.of[MEAN][r].error;
        rstd[r].error += e.of[RSTD][r].error;
    }
    free_expectation(&e);
}

/* ---- tests ---------------------------------------------------------------------------------- */

static void a_forward_gives_the_file_s_results(problem *p, const vector_case *from) {
    expectation e;
    expect_forward_of_file(p, &e);
    expect_the_file(p, from, &e);
    check_run(p, NJ_OP_LAYER_NORM_FORWARD, &e);
}

static void a_backward_gives_the_file_s_results(problem *p, const vector_case *from,
                                                const estimate *mean, const estimate *rstd) {
    expectation e;
    expect_backward(p, mean, rstd, &e);
    expect_the_file(p, from, &e);
    check_run(p, NJ_OP_LAYER_NORM_BACKWARD, &e);
}

/* Forward; backward with the file's statistics; backward with those that the forward saved. */
static void a_case_of_the_file(void **state) {
    const vector_case *from = (const vector_case *)*state;
    problem p;
    estimate *mean, *rstd;
    open_case(&p, from);
    mean = new_estimates(&p, MEAN);
    rstd = new_estimates(&p, RSTD);
    state_statistics(&p, from, p.desc.dtype == NJ_F64, mean, rstd);
    for (int64_t r = 0; r < p.rows; r++) {
        put(&p, MEAN, r, 0, mean[r].value);
        put(&p, RSTD, r, 0, rstd[r].value);
    }
    a_backward_gives_the_file_s_results(&p, from, mean, rstd);
    a_forward_gives_the_file_s_results(&p, from);
    state_statistics(&p, from, 1, mean, rstd);
    a_backward_gives_the_file_s_results(&p, from, mean, rstd);
    free(mean);
    free(rstd);
    close_problem(&p);
}

/* The judge is judged: each of its values is within f64 rounding of the file's. */
static void the_oracle_agrees_with_the_file(void **state) {
    (void)state;
    need_host();
    for (size_t k = 0; k < case_count; k++) {
        problem p;
        expectation e[2];
        estimate *mean, *rstd;
        double *values;
        open_case(&p, &cases[k]);
        mean = new_estimates(&p, MEAN);
        rstd = new_estimates(&p, RSTD);
        for (int pass = 0; pass < 2; pass++) {
            oracle o = oracle_of(&p);
            o.unit = unit_of(NJ_F64);
            o.tiny = tiny_of(NJ_F64);
            memset(&e[pass], 0, sizeof e[pass]);
            if (pass == 0) {
                e[0].of[Y] = new_estimates(&p, Y);
                oracle_forward(&o, mean, rstd, e[0].of[Y]);
            } else {
                e[1].of[DX] = new_estimates(&p, DX);
                e[1].of[DGAMMA] = new_estimates(&p, DGAMMA);
                e[1].of[DBETA] = new_estimates(&p, DBETA);
                oracle_backward(&o, mean, rstd, e[1].of[DX], e[1].of[DGAMMA], e[1].of[DBETA]);
            }
            for (int i = 0; i < OPERANDS; i++) {
                if (!e[pass].of[i] || p.op[i].absent) continue;
                values = file_values(&p, &cases[k], i);
                for (int64_t j = 0; j < cases[k].of[i].count; j++) {
                    if (is_close(values[j], &e[pass].of[i][j], NJ_F64)) continue;
                    fail_msg("%s: %s[%lld]: the oracle has %.17g, the file %.17g", cases[k].name,
                             operand_name[i], (long long)j, e[pass].of[i][j].value, values[j]);
                }
                free(values);
            }
            free_oracle(&o);
        }
        free_expectation(&e[0]);
        free_expectation(&e[1]);
        free(mean);
        free(rstd);
        close_problem(&p);
    }
}

int main(int argc, char **argv) {
    static struct CMUnitTest tests[MAX_CASES + 1];
    if (!read_cases(argc > 1 ? argv[1] : "tests/vectors/layernorm_cases.txt")) return 1;
    tests[0].name = "the_oracle_agrees_with_the_file";
    tests[0].test_func = the_oracle_agrees_with_the_file;
    for (size_t k = 0; k < case_count; k++) {
        tests[k + 1].name = cases[k].name;
        tests[k + 1].test_func = a_case_of_the_file;
        tests[k + 1].initial_state = &cases[k];
    }
    return run_on_every_backend(tests, case_count + 1);
}
