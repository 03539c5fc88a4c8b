/* Equal bits: run after run, for a row among any other rows, for any number of OpenMP threads, for
   many threads on one plan. */
#include "harness.h"

#ifdef _OPENMP
#include <omp.h>
#endif

static const nj_dtype dtypes[] = {NJ_F16, NJ_BF16, NJ_F32, NJ_F64};

/* ---- comparing bits ------------------------------------------------------------------------- */

static void assert_same_bits(const problem *p, unsigned char *a, unsigned char *b,
                             const char *when) {
    const uint32_t outputs = outputs_of(p);
    char what[256];
    if (memcmp(a, b, p->bytes) == 0) return;
    describe(p, what, sizeof what);
    for (int i = 0; i < OPERANDS; i++) {
        if (!(outputs & BIT(i))) continue;
        for (int64_t r = 0; r < rows_of(p, i); r++) {
            for (int64_t c = 0; c < cols_of(p, i); c++) {
                const unsigned char *left = element(p, a, i, r, c), *right = element(p, b, i, r, c);
                if (memcmp(left, right, (size_t)format_of(p->op[i].dtype)->size) == 0) continue;
                fail_msg("%s: %s[row %lld, col %lld]: %.17g, %s %.17g", what, operand_name[i],
                         (long long)r, (long long)c, load(p->op[i].dtype, left), when,
                         load(p->op[i].dtype, right));
            }
        }
    }
    fail_msg("%s: bytes outside the outputs differ %s", what, when);
}

/* A forward's results lie in the image afterwards, poison where the backward writes. */
static void open_backward(problem *p, nj_dtype dtype, int64_t rows, int64_t cols, uint64_t seed) {
    const nj_desc desc = make_matrix(dtype, rows, cols);
    open_problem(p, &desc);
    fill_problem(p, seed);
    run_once(p, NJ_OP_LAYER_NORM_FORWARD);
}

/* ---- run after run -------------------------------------------------------------------------- */

static void poison_on_backend(problem *p, int i) {
    const operand *o = &p->op[i];
    const size_t bytes = (size_t)(o->count * format_of(o->dtype)->size);
    if (bed.on_gpu) {
        require_gpu_ok(gpu_fill(&bed.gpu, p->device + o->base, POISON, bytes));
    } else {
        memset(p->image + o->base, POISON, bytes);
    }
}

static void check_repeated(nj_op op, nj_dtype dtype, int64_t rows, int64_t cols, int times) {
    nj_precision precision;
    problem p;
    unsigned char *first;
    open_backward(&p, dtype, rows, cols, 1);
    select_plan(&p, op);
    require_ok(nj_plan_precision(p.plan, &precision));
    assert_true(precision.deterministic && precision.bit_stable_on_same_hardware);
    upload(&p);
    launch(&p);
    download(&p);
    first = copy_image(&p);
    for (int run = 1; run < times; run++) {
        for (int i = 0; i < OPERANDS; i++) {
            if (outputs_of(&p) & BIT(i)) poison_on_backend(&p, i);
        }
        launch(&p);
        download(&p);
        assert_same_bits(&p, first, p.image, "in a later run");
    }
    free(first);
    close_problem(&p);
}

static void a_hundred_backwards_give_equal_bits(void **state) {
    static const int64_t shapes[][2] = {{37, 96}, {300, 1000}, {3000, 17}, {2, 20000}};
    (void)state;
    for (size_t k = 0; k < COUNT_OF(shapes) * COUNT_OF(dtypes); k++) {
        const int64_t *shape = shapes[k / COUNT_OF(dtypes)];
        check_repeated(NJ_OP_LAYER_NORM_BACKWARD, dtypes[k % COUNT_OF(dtypes)], shape[0], shape[1],
                       100);
    }
}

static void a_hundred_forwards_give_equal_bits(void **state) {
    (void)state;
    for (size_t d = 0; d < COUNT_OF(dtypes); d++) {
        check_repeated(NJ_OP_LAYER_NORM_FORWARD, dtypes[d], 300, 1000, 100);
    }
}

static void a_hundred_backwards_of_8192_by_2048_give_equal_bits(void **state) {
    (void)state;
    need_backend();
    check_repeated(NJ_OP_LAYER_NORM_BACKWARD, NJ_BF16, bed.on_gpu ? 8192 : 1024, 2048, 100);
    check_repeated(NJ_OP_LAYER_NORM_BACKWARD, NJ_F32, bed.on_gpu ? 8192 : 512, 2048, 100);
}

/* ---- a row and its neighbours --------------------------------------------------------------- */

/* x and dy of a row that is the same wherever it stands. */
static void put_probe(problem *p, int64_t row) {
    for (int64_t c = 0; c < p->cols; c++) {
        put(p, X, row, c, 0.3 + 2 * uniform(1234, 0, (uint64_t)c));
        put(p, DY, row, c, 0.1 + uniform(1234, 1, (uint64_t)c));
    }
}

static void assert_equal_row(const problem *alone, const problem *among, int64_t row) {
    static const int outputs[] = {Y, DX, MEAN, RSTD};
    for (size_t k = 0; k < COUNT_OF(outputs); k++) {
        const int i = outputs[k];
        const size_t size = (size_t)format_of(alone->op[i].dtype)->size;
        for (int64_t c = 0; c < cols_of(alone, i); c++) {
            if (memcmp(element(alone, alone->image, i, 0, c),
                       element(among, among->image, i, row, c), size) == 0) {
                continue;
            }
            fail_msg("%s of %s, col %lld of %lld: %.17g alone, %.17g as row %lld of %lld",
                     operand_name[i], format_of(alone->desc.dtype)->name, (long long)c,
                     (long long)alone->cols, get(alone, i, 0, c), get(among, i, row, c),
                     (long long)row, (long long)among->rows);
        }
    }
}

static void run_both_ways(problem *p) {
    run_once(p, NJ_OP_LAYER_NORM_FORWARD);
    run_once(p, NJ_OP_LAYER_NORM_BACKWARD);
}

static void check_batch_invariance(nj_dtype dtype, int64_t cols, const int64_t *rows, size_t n) {
    const nj_desc single = make_matrix(dtype, 1, cols);
    problem alone;
    open_problem(&alone, &single);
    fill_problem(&alone, 3);
    put_probe(&alone, 0);
    run_both_ways(&alone);
    for (size_t i = 0; i < n; i++) {
        const nj_desc desc = make_matrix(dtype, rows[i], cols);
        const int64_t at[] = {0, rows[i] / 2, rows[i] - 1};
        problem among;
        open_problem(&among, &desc);
        fill_problem(&among, 3); /* gamma and beta as above */
        for (size_t k = 0; k < COUNT_OF(at); k++) put_probe(&among, at[k]);
        run_both_ways(&among);
        for (size_t k = 0; k < COUNT_OF(at); k++) assert_equal_row(&alone, &among, at[k]);
        close_problem(&among);
    }
    close_problem(&alone);
}

static void a_row_has_the_same_bits_among_any_rows(void **state) {
    static const int64_t rows[] = {1, 7, 4096, 70000};
    (void)state;
    for (size_t d = 0; d < COUNT_OF(dtypes); d++) {
        check_batch_invariance(dtypes[d], 24, rows, 4);
        check_batch_invariance(dtypes[d], 200, rows, 2);
        check_batch_invariance(dtypes[d], 1025, rows, 2);
        check_batch_invariance(dtypes[d], 20000, rows, 2);
    }
    check_batch_invariance(NJ_F32, 96, rows, 3);
    check_batch_invariance(NJ_BF16, 768, rows, 3);
}

/* ---- threads -------------------------------------------------------------------------------- */

static void any_number_of_openmp_threads_gives_equal_bits(void **state) {
#ifdef _OPENMP
    static const int64_t shapes[][2] = {{777, 96}, {64, 1000}, {5000, 40}, {3, 70000}};
    static const int threads[] = {1, 2, 3, 5};
    const int before = omp_get_max_threads();
    (void)state;
    need_host();
    for (size_t k = 0; k < COUNT_OF(shapes) * COUNT_OF(dtypes); k++) {
        const int64_t *shape = shapes[k / COUNT_OF(dtypes)];
        unsigned char *first = NULL;
        problem p;
        omp_set_num_threads(1);
        open_backward(&p, dtypes[k % COUNT_OF(dtypes)], shape[0], shape[1], k);
        for (size_t t = 0; t < COUNT_OF(threads); t++) {
            omp_set_num_threads(threads[t]);
            run_both_ways(&p);
            if (first) {
                assert_same_bits(&p, first, p.image, "with more threads");
            } else {
                first = copy_image(&p);
            }
        }
        free(first);
        close_problem(&p);
    }
    omp_set_num_threads(before);
#else
    (void)state;
    print_message("skipped: compiled without OpenMP\n");
    skip();
#endif
}

/* One thread's view of a plan that it shares: image, workspace and stream of its own. It reports by
   its status, for an assertion may only fail in the test's thread. */
typedef struct worker {
    problem p;
    gpu gpu;
    pthread_t thread;
    nj_status status;
} worker;

static void *work(void *argument) {
    worker *w = (worker *)argument;
    w->status = NJ_OK;
    if (bed.on_gpu && !gpu_make_current(&w->gpu)) w->status = NJ_DRIVER;
    for (int run = 0; run < 20 && w->status == NJ_OK; run++) {
        w->status = nj_plan_run(w->p.plan, &w->p.args, w->p.workspace_bytes ? w->p.workspace : NULL,
                                w->p.workspace_bytes, w->gpu.stream);
    }
    if (bed.on_gpu && !gpu_wait(&w->gpu)) w->status = NJ_DRIVER;
    return NULL;
}

static void start_worker(worker *w, const problem *shared) {
    w->p = *shared; /* indices and plan stay the first problem's */
    w->p.image = copy_image(shared);
    w->gpu = bed.gpu;
    make_room(&w->p);
    upload(&w->p);
    if (bed.on_gpu) {
        require_gpu_ok(
            gpu_ok(&bed.gpu, bed.gpu.api.stream_create(&w->gpu.stream, 1), "cuStreamCreate"));
    }
    assert_int_equal(pthread_create(&w->thread, NULL, work, w), 0);
}

static void finish_worker(worker *w, problem *shared) {
    require_ok(w->status);
    download(&w->p);
    assert_same_bits(shared, shared->image, w->p.image, "in another thread");
    if (bed.on_gpu) bed.gpu.api.stream_destroy(w->gpu.stream);
    release_room(&w->p);
    free(w->p.image);
}

static void many_threads_may_run_one_plan(void **state) {
    enum { THREADS = 8 };
    static const int64_t shapes[][2] = {{500, 256}, {64, 3000}};
    static const nj_op ops[] = {NJ_OP_LAYER_NORM_BACKWARD, NJ_OP_LAYER_NORM_FORWARD};
    static worker workers[THREADS];
    (void)state;
    for (size_t k = 0; k < COUNT_OF(shapes) * COUNT_OF(ops); k++) {
        problem p;
        open_backward(&p, k % 2 ? NJ_F32 : NJ_BF16, shapes[k / 2][0], shapes[k / 2][1], k);
        select_plan(&p, ops[k % 2]);
        poison_outputs(&p);
        for (int t = 0; t < THREADS; t++) start_worker(&workers[t], &p);
        for (int t = 0; t < THREADS; t++) pthread_join(workers[t].thread, NULL);
        upload(&p);
        launch(&p);
        download(&p);
        for (int t = 0; t < THREADS; t++) finish_worker(&workers[t], &p);
        close_problem(&p);
    }
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_hundred_backwards_give_equal_bits),
        cmocka_unit_test(a_hundred_forwards_give_equal_bits),
        cmocka_unit_test(a_hundred_backwards_of_8192_by_2048_give_equal_bits),
        cmocka_unit_test(a_row_has_the_same_bits_among_any_rows),
        cmocka_unit_test(any_number_of_openmp_threads_gives_equal_bits),
        cmocka_unit_test(many_threads_may_run_one_plan),
    };
    return run_on_every_backend(tests, COUNT_OF(tests));
}
