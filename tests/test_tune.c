/* Measured selection: it runs within the scratch memory that it was given, every geometry that it
   chooses from computes what the formulas say, and which of them wins changes no bit of a row. */
#include "harness.h"

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

/* ---- cases ---------------------------------------------------------------------------------- */

/* Small enough for the SIMT host, and of more rows than a few multiprocessors work on at a time. */
static const struct {
    nj_dtype dtype, param_dtype;
    int64_t rows, cols;
} cases[] = {{NJ_BF16, NJ_F32, 150, 64},   {NJ_F32, NJ_F32, 70, 200},   {NJ_BF16, NJ_BF16, 60, 768},
             {NJ_F16, NJ_F16, 37, 1000},   {NJ_BF16, NJ_F32, 23, 4096}, {NJ_F32, NJ_F32, 23, 4096},
             {NJ_BF16, NJ_BF16, 11, 8192}, {NJ_F64, NJ_F64, 20, 300}};

static nj_desc desc_of(size_t i, nj_op op) {
    nj_desc desc = make_matrix(cases[i].dtype, cases[i].rows, cases[i].cols);
    desc.param_dtype = cases[i].param_dtype;
    desc.op = op;
    return desc;
}

static const nj_op ops[] = {NJ_OP_LAYER_NORM_FORWARD, NJ_OP_LAYER_NORM_BACKWARD};

/* ---- which candidate ------------------------------------------------------------------------ */

/* Candidates of the descriptor; makes the ctx remember `winner` as the one that was measured best. */
static int remember(nj_desc desc, int winner) {
    nji_cuda *cuda = &bed.ctx->cuda;
    nj_preference pref;
    nji_cuda_plan plan;
    nji_trial trial;
    nji_jit_digest digest;
    int64_t rows, cols;
    memset(&pref, 0, sizeof pref);
    require_ok(nji_check_desc(&desc, &rows, &cols, "test"));
    require_ok(nji_cuda_choose(cuda, &desc, rows, cols, &pref, &plan, "test"));
    nji_trial_make(&trial, cuda, &plan, rows, cols, &pref);
    digest = nji_tune_digest(cuda, &plan, &trial, rows);
    nji_tuned_keep(cuda, &digest, winner);
    return trial.count;
}

static void assert_row_bits(const problem *p, unsigned char *image, unsigned char *expected,
                            int candidate) {
    const uint32_t outputs = outputs_of(p) & (FULL_OPERANDS | STAT_OPERANDS);
    for (int i = 0; i < OPERANDS; i++) {
        if (!(outputs & BIT(i))) continue;
        for (int64_t r = 0; r < rows_of(p, i); r++) {
            for (int64_t c = 0; c < cols_of(p, i); c++) {
                if (memcmp(element(p, image, i, r, c), element(p, expected, i, r, c),
                           (size_t)format_of(p->op[i].dtype)->size) == 0) {
                    continue;
                }
                fail_msg("%lld x %lld: %s[row %lld, col %lld] of candidate %d has other bits",
                         (long long)p->rows, (long long)p->cols, operand_name[i], (long long)r,
                         (long long)c, candidate);
            }
        }
    }
}

static void every_candidate_is_right_and_gives_rows_the_same_bits(void **state) {
    int others = 0;
    (void)state;
    need_gpu();
    if (bed.fallback) skip();
    for (size_t i = 0; i < COUNT(cases); i++) {
        for (size_t o = 0; o < COUNT(ops); o++) {
            const nj_desc desc = desc_of(i, ops[o]);
            unsigned char *first = NULL;
            problem p;
            int candidate = 0, count = 1;
            open_problem(&p, &desc);
            p.pref.tune = NJ_TUNE_MEASURE; /* no scratch: it must be remembered */
            for (; candidate < count; candidate++) {
                nj_sku sku;
                count = remember(desc, candidate);
                if (count < 2) break;
                fill_problem(&p, i);
                if (o == 0) {
                    check_forward(&p);
                } else {
                    set_statistics(&p);
                    check_backward(&p);
                }
                if (!first) first = copy_image(&p);
                else assert_row_bits(&p, p.image, first, candidate);
                select_plan(&p, ops[o]);
                require_ok(nj_plan_sku(p.plan, NULL, &sku));
                assert_int_equal(sku.candidate, candidate);
                release_plan(&p);
                others += candidate > 0;
            }
            free(first);
            close_problem(&p);
        }
    }
    assert_true(others > 0);
}

/* ---- measuring ------------------------------------------------------------------------------ */

enum { SURROUNDINGS = 4096 };

static void assert_untouched(const unsigned char *device) {
    unsigned char copy[SURROUNDINGS];
    require_gpu_ok(gpu_download(&bed.gpu, copy, device, sizeof copy));
    for (size_t i = 0; i < sizeof copy; i++) {
        if (copy[i] != POISON) fail_msg("byte %zu around the scratch memory was written", i);
    }
}

/* Measures with that many bytes, then runs what won. */
static void check_measured(const nj_desc *desc, size_t bytes) {
    unsigned char *block;
    nj_cache_stats before, after;
    problem p;
    block = (unsigned char *)gpu_alloc(&bed.gpu, bytes + 2 * SURROUNDINGS);
    require_gpu_ok(block != NULL);
    require_gpu_ok(gpu_fill(&bed.gpu, block, POISON, bytes + 2 * SURROUNDINGS));
    require_ok(nj_ctx_cache_stats(bed.ctx, &before));
    open_problem(&p, desc);
    p.pref.tune = NJ_TUNE_MEASURE;
    p.pref.tune_scratch = block + SURROUNDINGS;
    p.pref.tune_scratch_bytes = bytes;
    p.pref.tune_stream = bed.gpu.stream;
    fill_problem(&p, 1);
    if (desc->op == NJ_OP_LAYER_NORM_FORWARD) {
        check_forward(&p);
    } else {
        set_statistics(&p);
        check_backward(&p);
    }
    close_problem(&p);
    require_ok(nj_ctx_cache_stats(bed.ctx, &after));
    assert_int_equal(after.tunes, before.tunes + 1);
    assert_untouched(block);
    assert_untouched(block + SURROUNDINGS + bytes);
    gpu_free(&bed.gpu, block);
}

static void measuring_stays_within_the_scratch_and_what_wins_is_right(void **state) {
    int measured = 0;
    (void)state;
    need_gpu();
    for (size_t i = 0; i < COUNT(cases); i += 2) {
        for (size_t o = 0; o < COUNT(ops); o++) {
            nj_desc desc = desc_of(i, ops[o]);
            size_t least, enough;
            desc.shape[0] += 3; /* nobody has measured it */
            require_ok(nj_tune_scratch_size(bed.ctx, &desc, NULL, &least, &enough));
            if (least == 0) continue;
            check_measured(&desc, o == 0 ? least : enough < 2 * least ? enough : 2 * least);
            measured++;
        }
    }
    if (!bed.fallback) assert_true(measured > 0);
}

static void host_takes_the_preference_and_needs_no_scratch(void **state) {
    const nj_desc desc = desc_of(0, NJ_OP_LAYER_NORM_BACKWARD);
    size_t least = 1, enough = 1;
    problem p;
    (void)state;
    need_host();
    require_ok(nj_tune_scratch_size(bed.ctx, &desc, NULL, &least, &enough));
    assert_int_equal(least, 0);
    assert_int_equal(enough, 0);
    open_problem(&p, &desc);
    p.pref.tune = NJ_TUNE_MEASURE;
    check_both(&p, 1);
    close_problem(&p);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_candidate_is_right_and_gives_rows_the_same_bits),
        cmocka_unit_test(measuring_stays_within_the_scratch_and_what_wins_is_right),
        cmocka_unit_test(host_takes_the_preference_and_needs_no_scratch),
    };
    return run_on_every_backend(tests, COUNT(tests));
}
