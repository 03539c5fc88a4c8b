/* The choice of kernels, a pure function: what it may depend on, and how much workspace it asks
   for. Needs neither a GPU nor a compiler. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#define NORMJIT_IMPLEMENTATION
#include "normjit.h"

#include "random.h"
#include "tuning.h"

#define COUNT_OF(array) (sizeof(array) / sizeof(array)[0])

static const int archs[] = {75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121};

/* ---- random descriptors --------------------------------------------------------------------- */

/* 0 to 2^bits, as many of each magnitude, round numbers and odd ones. */
static int64_t random_size(int bits) {
    int64_t size = (int64_t)1 << random_in(0, bits);
    switch (random_in(0, 3)) {
    case 0: return size;
    case 1: return size - 1;
    case 2: return size + size / 2;
    default: return random_in(size / 2, size);
    }
}

typedef struct draw {
    nj_desc desc;
    int64_t rows, cols;
    nji_device_facts facts;
} draw;

/* x of up to 2^58 elements. Channels-first now and then. */
static draw random_draw(void) {
    draw d;
    const int channels_first = random_in(0, 3) == 0;
    memset(&d, 0, sizeof d);
    d.desc.op = random_in(0, 2) ? NJ_OP_LAYER_NORM_BACKWARD : NJ_OP_LAYER_NORM_FORWARD;
    d.desc.dtype = (nj_dtype)random_in(NJ_F16, NJ_F64);
    d.desc.rank = channels_first ? 3 : 2;
    d.desc.norm_axes = 2;
    d.desc.shape[0] = random_size(26);
    d.desc.shape[1] = random_size(channels_first ? 16 : 32);
    d.desc.shape[2] = random_size(16);
    d.desc.has_gamma = random_in(0, 3) > 0;
    d.desc.has_beta = random_in(0, 3) > 0;
    assert_int_equal(nji_check_desc(&d.desc, &d.rows, &d.cols, "test"), NJ_OK);
    d.facts.arch = archs[random_in(0, COUNT_OF(archs) - 1)];
    d.facts.multiprocessors = (int)random_in(1, 200);
    return d;
}

static nji_choice choose(const draw *d) {
    nj_preference no_demands;
    nji_choice choice;
    memset(&no_demands, 0, sizeof no_demands);
    assert_int_equal(
        nji_choose(&d->desc, d->rows, d->cols, &d->facts, &no_demands, &choice, "test"), NJ_OK);
    return choice;
}

/* For the operands that the kernels of the other choice do not take. */
static nji_choice choose_loose(const draw *d) {
    nj_preference no_demands;
    nji_choice choice;
    memset(&no_demands, 0, sizeof no_demands);
    assert_int_equal(
        nji_choose_loose(&d->desc, d->rows, d->cols, &d->facts, &no_demands, &choice, "test"),
        NJ_OK);
    return choice;
}

/* ---- workspace ------------------------------------------------------------------------------ */

static int64_t larger(int64_t a, int64_t b) {
    return a > b ? a : b;
}

/* Bytes of partial sums for each column. */
static int64_t pair_bytes(const draw *d) {
    return d->desc.dtype == NJ_F64 ? 16 : 8;
}

/* The bounds that api.h states for nj_plan_workspace_size. */
static int64_t cuda_bound(const draw *d, int is_split) {
    const int64_t x_bytes = d->rows * d->cols * (int64_t)nj_dtype_size(d->desc.dtype);
    const int wants_params = (d->desc.grads & (NJ_GRAD_DGAMMA | NJ_GRAD_DBETA)) != 0;
    const int64_t partials =
        wants_params ? larger(131072 * d->facts.multiprocessors, pair_bytes(d) * d->cols) : 0;
    return partials + (is_split ? x_bytes / 512 + NJI_WORKSPACE_ALIGNMENT : 0);
}

static int64_t host_bound(const draw *d) {
    const int64_t line =
        64; /* of each part, dgamma and dbeta are rounded up to it; so is the start */
    if (!(d->desc.grads & (NJ_GRAD_DGAMMA | NJ_GRAD_DBETA))) return 0;
    return larger(1 << 20, 64 * (pair_bytes(d) * d->cols + 2 * line)) + line;
}

static void workspace_keeps_within_the_bounds_that_are_promised(void **state) {
    int seen[NJI_STRIDED + 1] = {0}, near[NJI_STRIDED + 1] = {0}, round, family;
    (void)state;
    random_state = 1;
    for (round = 0; round < 200000; round++) {
        const draw d = random_draw();
        const nji_choice choice = choose(&d), loose = choose_loose(&d);
        const int is_split = choice.family == NJI_SPLIT || loose.family == NJI_SPLIT;
        const int64_t bytes = larger(nji_workspace_of(&choice), nji_workspace_of(&loose));
        const int64_t bound = cuda_bound(&d, is_split);
        const int64_t host = nji_host_workspace(&d.desc, d.rows, d.cols);
        if (bytes > bound)
            fail_msg("sm_%d with %d multiprocessors, dtype %d, %lld x %lld: %lld bytes, bound %lld",
                     d.facts.arch, d.facts.multiprocessors, (int)d.desc.dtype, (long long)d.rows,
                     (long long)d.cols, (long long)bytes, (long long)bound);
        if (host < 0 || host > host_bound(&d))
            fail_msg("host, dtype %d, %lld x %lld: %lld bytes, bound %lld", (int)d.desc.dtype,
                     (long long)d.rows, (long long)d.cols, (long long)host,
                     (long long)host_bound(&d));
        assert_true(!is_split || d.cols > 4096);
        assert_true(choice.sums_bytes == loose.sums_bytes); /* what is enough for one is for both */
        seen[choice.family]++;
        near[choice.family] += bytes > bound / 2;
    }
    for (family = 0; family <= NJI_STRIDED; family++) {
        assert_true(seen[family] > 2000);
        if (family == NJI_TILES || family == NJI_RING) continue; /* use little of it */
        assert_true(near[family] > 100);                       /* a bound that says something */
    }
}

/* ---- geometry ------------------------------------------------------------------------------- */

/* What decides the order of the sums within a row. */
typedef struct geometry {
    int family, vec, lanes, chunks, threads, slices, cluster;
} geometry;

static geometry geometry_of(const draw *d, nji_choice c) {
    if (c.family == NJI_RING) { /* warps have their columns wherever they are */
        const int warps = (int)nji_ceil_div(d->cols, 32 * c.chunks * c.vec);
        const geometry ring = {
            (int)c.family, c.vec, warps, c.chunks, c.lanes / 32 * c.slices <= 8, 0, 0};
        return ring;
    }
    const geometry g = {(int)c.family, c.vec, c.lanes, c.chunks, c.threads, c.slices, c.cluster};
    return g;
}

/* dx and y of a row then cannot depend on how many rows there are, nor on how many multiprocessors.
 */
static void geometry_within_a_row_depends_on_neither_rows_nor_multiprocessors(void **state) {
    int round;
    (void)state;
    random_state = 2;
    for (round = 0; round < 100000; round++) {
        draw d = random_draw();
        const geometry before = geometry_of(&d, choose(&d));
        const geometry loose_before = geometry_of(&d, choose_loose(&d));
        geometry after, loose_after;
        if (d.cols == 1) continue; /* a sum of one has no order */
        d.desc.shape[0] = random_size(26);
        d.desc.grads = 0;
        d.facts.multiprocessors = (int)random_in(1, 200);
        assert_int_equal(nji_check_desc(&d.desc, &d.rows, &d.cols, "test"), NJ_OK);
        after = geometry_of(&d, choose(&d));
        loose_after = geometry_of(&d, choose_loose(&d));
        assert_memory_equal(&after, &before, sizeof before);
        assert_memory_equal(&loose_after, &loose_before, sizeof before);
    }
}

/* One element at a time, whatever the columns would allow; every shape that the rows kernels can
   number has loose kernels. */
static void loose_choice_reads_elements_of_every_shape_of_fast_kernels(void **state) {
    int round;
    (void)state;
    random_state = 3;
    for (round = 0; round < 100000; round++) {
        const draw d = random_draw();
        const nji_choice loose = choose_loose(&d);
        const int fits = d.cols > 0 && d.cols <= NJI_MAX_ROWS_COLS;
        assert_int_equal(loose.family == NJI_ROWS || loose.family == NJI_SPLIT, fits);
        if (!fits) continue;
        assert_int_equal(loose.vec, 1);
        assert_true((int64_t)loose.slices * loose.lanes * loose.chunks >= d.cols);
        assert_in_range(loose.threads, loose.lanes, 1024);
    }
}

/* ---- the tuning table ----------------------------------------------------------------------- */

/* Whether some shape takes the row on some architecture; the row's own tests rely on finding it. */
static int is_reached(const nji_tuning *row) {
    size_t a;
    int dtype, rest, family;
    for (a = 0; a < COUNT_OF(archs); a++) {
        const nji_device_facts facts = {archs[a], 132};
        for (dtype = NJ_F16; dtype <= NJ_F64; dtype++) {
            for (rest = 0; rest <= 1; rest++) {
                for (family = NJI_ROWS; family < NJI_STRIDED; family++) {
                    if (tuning_cols(row, (nji_family)family, (nj_dtype)dtype, &facts, rest))
                        return 1;
                }
            }
        }
    }
    return 0;
}

static void every_row_of_the_tuning_table_serves_some_shape(void **state) {
    size_t i;
    (void)state;
    for (i = 0; i < TUNING_ROWS; i++) {
        if (!is_reached(&nji_tuning_table[i])) fail_msg("row %zu of the table serves nothing", i);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(workspace_keeps_within_the_bounds_that_are_promised),
        cmocka_unit_test(geometry_within_a_row_depends_on_neither_rows_nor_multiprocessors),
        cmocka_unit_test(loose_choice_reads_elements_of_every_shape_of_fast_kernels),
        cmocka_unit_test(every_row_of_the_tuning_table_serves_some_shape),
    };
    return cmocka_run_group_tests_name("select", tests, NULL, NULL);
}
