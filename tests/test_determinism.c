/* Equal bits: run after run, for a row among any other rows, for any number of OpenMP threads, for
   many threads on one plan. */
#include "harness.h"
#include "tuning.h"

#ifdef _OPENMP
#include <omp.h>
#endif

/* On the SIMT host, where a thread of a kernel takes microseconds: fewer and smaller cases. */
#ifdef HARNESS_NVRTC
#define SLOW 1
#else
#define SLOW 0
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

static size_t operand_bytes(const problem *p, int i) {
    return (size_t)(p->op[i].count * format_of(p->op[i].dtype)->size);
}

static void poison_outputs_on_backend(problem *p) {
    for (int i = 0; i < OPERANDS; i++) {
        const size_t base = p->op[i].base, bytes = operand_bytes(p, i);
        if (!(outputs_of(p) & BIT(i))) continue;
        if (bed.on_gpu) require_gpu_ok(gpu_fill(&bed.gpu, p->device + base, POISON, bytes));
        else memset(p->image + base, POISON, bytes);
    }
}

/* From a GPU into the image. */
static void download_operand(problem *p, int i) {
    const size_t base = p->op[i].base;
    if (!bed.on_gpu) return;
    require_gpu_ok(gpu_download(&bed.gpu, p->image + base, p->device + base, operand_bytes(p, i)));
}

enum { RUNS = 100, RUNS_BETWEEN_LOOKS = 20 };

/* graph: of a run; NULL: the plan is run. The parameter gradients are compared after every run, the
   rest after some: to copy a large image takes longer than to run. */
static void compare_runs(problem *p, void *graph) {
    unsigned char *first = NULL;
    for (int i = 0; i < RUNS; i++) {
        poison_outputs_on_backend(p);
        if (graph) require_gpu_ok(gpu_graph_launch(&bed.gpu, graph));
        else launch(p);
        if (i % RUNS_BETWEEN_LOOKS == 0 || i == RUNS - 1) {
            download(p);
        } else {
            download_operand(p, DGAMMA);
            download_operand(p, DBETA);
        }
        if (first) assert_same_bits(p, first, p->image, "in a later run");
        else first = copy_image(p);
    }
    free(first);
}

static void check_repeated(nj_op op, nj_dtype dtype, int64_t rows, int64_t cols) {
    nj_precision precision;
    problem p;
    open_backward(&p, dtype, rows, cols, 1);
    select_plan(&p, op);
    require_ok(nj_plan_precision(p.plan, &precision));
    assert_true(precision.deterministic && precision.bit_stable_on_same_hardware);
    upload(&p);
    compare_runs(&p, NULL);
    close_problem(&p);
}

static void a_hundred_backwards_give_equal_bits(void **state) {
    static const int64_t shapes[][2] = {{37, 96},    {11, 1000}, {300, 17},   {300, 1000},
                                        {3000, 200}, {2, 20000}, {777, 5000}, {9, 70000}};
    const size_t count = SLOW ? 3 : COUNT_OF(shapes);
    (void)state;
    need_backend();
    for (size_t k = 0; k < count; k++) { /* bf16, and the other types in turn */
        static const nj_dtype others[] = {NJ_F32, NJ_F64, NJ_F16};
        check_repeated(NJ_OP_LAYER_NORM_BACKWARD, NJ_BF16, shapes[k][0], shapes[k][1]);
        check_repeated(NJ_OP_LAYER_NORM_BACKWARD, others[k % 3], shapes[k][0], shapes[k][1]);
    }
}

static void a_hundred_forwards_give_equal_bits(void **state) {
    (void)state;
    need_backend();
    for (size_t d = 0; d < COUNT_OF(dtypes); d++) {
        check_repeated(NJ_OP_LAYER_NORM_FORWARD, dtypes[d], SLOW ? 3 : 300, 1000);
    }
}

static void a_hundred_backwards_of_8192_by_2048_give_equal_bits(void **state) {
    (void)state;
    need_gpu();
    if (SLOW) skip();
    check_repeated(NJ_OP_LAYER_NORM_BACKWARD, NJ_BF16, 8192, 2048);
    check_repeated(NJ_OP_LAYER_NORM_BACKWARD, NJ_F32, 8192, 2048);
}

static void a_hundred_replays_of_a_graph_give_equal_bits(void **state) {
    static const int64_t shapes[][2] = {{3000, 200}, {777, 5000}, {64, 20000}};
    (void)state;
    need_gpu();
    if (SLOW) skip(); /* the SIMT host has no graphs */
    for (size_t k = 0; k < COUNT_OF(shapes); k++) {
        void *graph;
        problem p;
        open_backward(&p, k % 2 ? NJ_F32 : NJ_BF16, shapes[k][0], shapes[k][1], k);
        select_plan(&p, NJ_OP_LAYER_NORM_BACKWARD);
        upload(&p);
        require_gpu_ok(gpu_capture_begin(&bed.gpu));
        launch(&p);
        graph = gpu_capture_end(&bed.gpu);
        require_gpu_ok(graph != NULL);
        compare_runs(&p, graph);
        gpu_graph_free(&bed.gpu, graph);
        close_problem(&p);
    }
}

/* ---- a row and its neighbours --------------------------------------------------------------- */

/* Packed operands whose axis 0 is the batch: `units` equal pieces, each of one row or more. Too
   large for an image that goes to a GPU and back: the probe, a unit of random numbers, stands in
   three places, and every other byte is the same. */
typedef struct batch {
    nj_desc desc;
    int64_t units;
    nj_tensor tensor[OPERANDS];
    size_t unit_bytes[OPERANDS]; /* of a parameter: all of it */
} batch;

enum { PLACES = 3, FILLER = 0x3c /* elements of 0.01; in f16 of 1.06, in f64 of 1e-18 */ };

#define INPUTS (BIT(X) | BIT(DY) | BIT(GAMMA) | BIT(BETA))
#define UNIT_OUTPUTS (BIT(Y) | BIT(MEAN) | BIT(RSTD) | BIT(DX))

static unsigned char *allocate(size_t bytes, unsigned char fill) {
    unsigned char *p = (unsigned char *)(bed.on_gpu ? gpu_alloc(&bed.gpu, bytes) : malloc(bytes));
    if (!p) fail_msg("no memory: %zu bytes", bytes);
    if (bed.on_gpu) require_gpu_ok(gpu_fill(&bed.gpu, p, fill, bytes));
    else memset(p, fill, bytes);
    return p;
}

static void release(void *p) {
    if (bed.on_gpu) gpu_free(&bed.gpu, p);
    else free(p);
}

static unsigned char *unit_at(const batch *b, int i, int nth_place) {
    const int64_t place[PLACES] = {0, b->units / 2, b->units - 1};
    const size_t unit = BIT(i) & PARAM_OPERANDS ? 0 : (size_t)place[nth_place];
    return (unsigned char *)b->tensor[i].data + unit * b->unit_bytes[i];
}

/* Equal numbers in every place and in every batch. */
static void put_probe(const batch *b, int i) {
    const size_t size = nj_dtype_size(b->desc.dtype), bytes = b->unit_bytes[i];
    unsigned char *numbers = (unsigned char *)malloc(bytes);
    for (size_t k = 0; k < bytes / size; k++)
        store(b->desc.dtype, numbers + k * size, 0.3 + 2 * uniform(1234, (uint64_t)i, k));
    for (int nth = 0; nth < PLACES; nth++) {
        if (bed.on_gpu) require_gpu_ok(gpu_upload(&bed.gpu, unit_at(b, i, nth), numbers, bytes));
        else memcpy(unit_at(b, i, nth), numbers, bytes);
    }
    free(numbers);
}

static void open_batch(batch *b, const nj_desc *like, int64_t units) {
    nj_desc *desc = &b->desc;
    *desc = *like;
    desc->shape[0] = b->units = units;
    for (int i = 0; i < OPERANDS; i++) {
        const int is_param = (BIT(i) & PARAM_OPERANDS) != 0,
                  is_stat = (BIT(i) & STAT_OPERANDS) != 0;
        const nj_dtype dtype = is_stat ? math_of(desc->dtype) : desc->dtype;
        int64_t shape[NJ_MAX_RANK];
        size_t bytes;
        nji_expected_shape(desc,
                           is_param  ? NJI_PARAM
                           : is_stat ? NJI_STAT
                                     : NJI_FULL,
                           &b->tensor[i].rank, shape);
        b->tensor[i] = nj_packed(NULL, b->tensor[i].rank, shape);
        bytes = (size_t)b->tensor[i].count * nj_dtype_size(dtype);
        b->unit_bytes[i] = is_param ? bytes : bytes / (size_t)units;
        b->tensor[i].data = allocate(bytes, BIT(i) & INPUTS ? FILLER : POISON);
        if (BIT(i) & INPUTS) put_probe(b, i);
    }
}

static void close_batch(batch *b) {
    for (int i = 0; i < OPERANDS; i++) release(b->tensor[i].data);
}

static void run_batch(const batch *b, nj_op op) {
    nj_desc desc = b->desc;
    nj_args args;
    nj_plan *plan;
    unsigned char *workspace;
    size_t bytes;
    desc.op = op;
    args.x = nj_as_const(b->tensor[X]);
    args.dy = nj_as_const(b->tensor[DY]);
    args.gamma = nj_as_const(b->tensor[GAMMA]);
    args.beta = nj_as_const(b->tensor[BETA]);
    args.mean = b->tensor[MEAN];
    args.rstd = b->tensor[RSTD];
    args.y = b->tensor[Y];
    args.dx = b->tensor[DX];
    args.dgamma = b->tensor[DGAMMA];
    args.dbeta = b->tensor[DBETA];
    require_ok(nj_plan_select(&plan, bed.ctx, &desc, NULL));
    bytes = nj_plan_workspace_size(plan);
    workspace = allocate(bytes + 1, POISON);
    require_ok(nj_plan_run(plan, &args, workspace, bytes, bed.gpu.stream));
    if (bed.on_gpu) require_gpu_ok(gpu_wait(&bed.gpu));
    release(workspace);
    nj_plan_destroy(plan);
}

/* Free with free. */
static unsigned char *copy_unit(const batch *b, int i, int nth_place) {
    const size_t bytes = b->unit_bytes[i];
    unsigned char *copy = (unsigned char *)malloc(bytes);
    const unsigned char *unit = unit_at(b, i, nth_place);
    if (bed.on_gpu) require_gpu_ok(gpu_download(&bed.gpu, copy, unit, bytes));
    else memcpy(copy, unit, bytes);
    return copy;
}

/* The probe's outputs in every place are those of the probe alone, and were written. */
static void compare_units(const batch *alone, const batch *among) {
    for (int k = 0; k < OPERANDS * PLACES; k++) {
        const int i = k / PLACES, nth = k % PLACES;
        const nj_dtype dtype =
            BIT(i) & STAT_OPERANDS ? math_of(alone->desc.dtype) : alone->desc.dtype;
        const size_t size = nj_dtype_size(dtype);
        unsigned char *expected, *got;
        if (!(BIT(i) & UNIT_OUTPUTS)) continue;
        expected = copy_unit(alone, i, 0);
        got = copy_unit(among, i, nth);
        for (size_t at = 0; at < alone->unit_bytes[i]; at += size) {
            if (!is_poison(got + at, dtype) && memcmp(got + at, expected + at, size) == 0) continue;
            fail_msg("%s of %s, element %zu of %zu: %.17g alone, %.17g %s %lld", operand_name[i],
                     format_of(dtype)->name, at / size, alone->unit_bytes[i] / size,
                     load(dtype, expected + at), load(dtype, got + at),
                     nth == 0   ? "first of"
                     : nth == 1 ? "in the middle of"
                                : "last of",
                     (long long)among->units);
        }
        free(expected);
        free(got);
    }
}

static int64_t most_units(const batch *one) {
    size_t room = SLOW ? (size_t)128 << 10 : (size_t)16 << 20, total;
    if (bed.on_gpu && !SLOW) {
        require_gpu_ok(gpu_memory(&bed.gpu, &room, &total));
        room /= 16; /* four such operands, and as much again for others */
    }
    return room / one->unit_bytes[X] < 2 ? 2 : (int64_t)(room / one->unit_bytes[X]);
}

static void check_batch_invariance(const nj_desc *like) {
    static const int64_t counts[] = {7, SLOW ? 300 : 4096, 70000};
    batch alone;
    int64_t most, units = 1;
    open_batch(&alone, like, 1);
    run_batch(&alone, NJ_OP_LAYER_NORM_FORWARD);
    run_batch(&alone, NJ_OP_LAYER_NORM_BACKWARD);
    most = most_units(&alone);
    for (size_t k = 0; k < COUNT_OF(counts) && units < most; k++) {
        batch among;
        units = counts[k] < most ? counts[k] : most;
        open_batch(&among, like, units);
        run_batch(&among, NJ_OP_LAYER_NORM_FORWARD);
        run_batch(&among, NJ_OP_LAYER_NORM_BACKWARD);
        compare_units(&alone, &among);
        close_batch(&among);
    }
    close_batch(&alone);
}

/* Columns that take each row of the tuning tables, by whole packs and by single elements; 0 where
   there are none, or where it is slow and another type takes them. */
static int64_t nth_cols(nj_dtype dtype, size_t k) {
    const nji_family family = k & 1 ? NJI_SPLIT : NJI_ROWS;
    const int rest = (int)(k >> 1 & 1);
    if (k >= 4 * TUNING_ROWS) {
        const nji_ring_tuning *row = &nji_ring_table[k / 2 - 2 * TUNING_ROWS];
        return row->element_bytes == (int)nj_dtype_size(dtype) ? ring_cols(row, k & 1) : 0;
    }
    if (SLOW && rest != (dtype == NJ_F32)) return 0;
    return tuning_cols(&nji_tuning_table[k / 4], family, dtype, &bed.ctx->cuda.facts, rest);
}

/* f16 takes the same as bf16. */
static void a_row_has_the_same_bits_among_any_rows_in_every_geometry(void **state) {
    enum { MOST = 4 * TUNING_ROWS + 2 * RING_ROWS };
    (void)state;
    need_gpu();
    if (bed.fallback) skip(); /* has no geometry: see below */
    for (int dtype = NJ_BF16; dtype <= NJ_F64; dtype++) {
        int64_t seen[MOST], count = 0, before;
        for (size_t k = 0; k < MOST; k++) {
            const int64_t cols = nth_cols((nj_dtype)dtype, k);
            const nj_desc desc = tuning_desc(1, (nj_dtype)dtype, 1, cols);
            if (cols == 0 || (SLOW && cols > 9000)) continue;
            for (before = 0; before < count && seen[before] != cols; before++) {
            }
            if (before < count) continue;
            seen[count++] = cols;
            check_batch_invariance(&desc);
        }
        assert_true(count >= 3);
    }
}

/* Axis 0 is the batch. Lengths that the host's and the strided kernels tell apart; channels-first;
   axes that do not merge. */
static void a_row_has_the_same_bits_among_any_rows_in_every_layout(void **state) {
    static const struct {
        int32_t rank;
        int64_t shape[4];
        uint32_t norm_axes;
    } cases[] = {{2, {1, 1}, 2},       {2, {1, 3}, 2},       {2, {1, 24}, 2},
                 {2, {1, 200}, 2},     {2, {1, 1025}, 2},    {2, {1, 20000}, 2},
                 {3, {1, 24, 48}, 2},  {3, {1, 7, 33}, 2},   {3, {1, 300, 20}, 2},
                 {3, {1, 768, 36}, 2}, {3, {1, 5000, 8}, 2}, {4, {1, 9, 7, 11}, 10},
                 {4, {1, 3, 9, 2}, 4}, {4, {1, 2, 6, 70}, 8}};
    const size_t last = SLOW ? 1 : COUNT_OF(dtypes);
    (void)state;
    need_backend();
    for (size_t k = 0; k < COUNT_OF(cases) * last; k++) {
        const size_t c = k / last;
        const nj_desc desc = make_desc(dtypes[(c + k % last) % COUNT_OF(dtypes)], cases[c].rank,
                                       cases[c].shape, cases[c].norm_axes);
        check_batch_invariance(&desc);
    }
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
            run_once(&p, NJ_OP_LAYER_NORM_FORWARD);
            run_once(&p, NJ_OP_LAYER_NORM_BACKWARD);
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
        cmocka_unit_test(a_hundred_replays_of_a_graph_give_equal_bits),
        cmocka_unit_test(a_row_has_the_same_bits_among_any_rows_in_every_geometry),
        cmocka_unit_test(a_row_has_the_same_bits_among_any_rows_in_every_layout),
        cmocka_unit_test(any_number_of_openmp_threads_gives_equal_bits),
        cmocka_unit_test(many_threads_may_run_one_plan),
    };
    return run_on_every_backend(tests, COUNT_OF(tests));
}
