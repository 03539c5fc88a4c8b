/* Axes and strides against brute force: whatever the closed forms say of random views, walking
   every element must say too. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#define NORMJIT_IMPLEMENTATION
#include "normjit.h"

#include "random.h"

#define COUNT_OF(array) (sizeof(array) / sizeof(array)[0])

/* ---- random views --------------------------------------------------------------------------- */

static int random_is(int percent) {
    return random_in(0, 99) < percent;
}

/* Axes of a rank in random order. */
static void random_order(int rank, int order[NJ_MAX_RANK]) {
    int i;
    for (i = 0; i < rank; i++) order[i] = i;
    for (i = rank - 1; i > 0; i--) {
        int j = (int)random_in(0, i), held = order[i];
        order[i] = order[j];
        order[j] = held;
    }
}

/* Strides that nest in a random order of the axes, with padding now and then: all that an output
   may have. An axis of extent 1 gets any stride. */
static void random_output_strides(int rank, const int64_t *shape, int64_t *stride) {
    int order[NJ_MAX_RANK], i;
    int64_t next = random_is(70) ? 1 : random_in(2, 3);
    int shuffled = random_is(50);
    random_order(rank, order);
    for (i = 0; i < rank; i++) {
        int axis = shuffled ? order[i] : rank - 1 - i;
        if (shape[axis] == 1) {
            stride[axis] = random_in(-9, 9);
            continue;
        }
        stride[axis] = next;
        next *= shape[axis];
        if (random_is(25)) next += random_in(1, 3);
    }
}

/* An input may be broadcast and flipped besides; *offset is what the flipped axes need. */
static void random_input_strides(int rank, const int64_t *shape, int64_t *stride, int64_t *offset) {
    int axis;
    random_output_strides(rank, shape, stride);
    *offset = random_in(0, 3);
    for (axis = 0; axis < rank; axis++) {
        if (random_is(15)) stride[axis] = 0;
        if (random_is(15)) stride[axis] = -stride[axis];
        if (stride[axis] < 0 && shape[axis] > 1) *offset -= (shape[axis] - 1) * stride[axis];
    }
}

/* Room for the elements of small views. */
#define ARENA_BYTES 4096

static _Alignas(8) unsigned char arena[ARENA_BYTES];

/* ---- walking a view ------------------------------------------------------------------------- */

/* Steps an index through extents, the last axis fastest; 0 after the last. */
static int next_index(int rank, const int64_t *extent, int64_t *index) {
    int axis;
    for (axis = rank - 1; axis >= 0; axis--) {
        if (++index[axis] < extent[axis]) return 1;
        index[axis] = 0;
    }
    return 0;
}

static int64_t dot(int rank, const int64_t *index, const int64_t *stride) {
    int64_t sum = 0;
    int axis;
    for (axis = 0; axis < rank; axis++) sum += index[axis] * stride[axis];
    return sum;
}

/* ---- reach ---------------------------------------------------------------------------------- */

/* A view with its own room for shape and strides, of any extents. */
typedef struct small_view {
    nji_view view;
    int64_t shape[NJ_MAX_RANK], stride[NJ_MAX_RANK];
} small_view;

static void point_to_own_arrays(small_view *small) {
    small->view.name = "x";
    small->view.shape = small->shape;
    small->view.stride = small->stride;
}

static void reach_is_the_lowest_and_highest_element_walked(void **state) {
    int round;
    (void)state;
    random_state = 1;
    for (round = 0; round < 20000; round++) {
        small_view v;
        int64_t index[NJ_MAX_RANK] = {0}, low = INT64_MAX, high = INT64_MIN;
        int axis;
        nj_status status;
        memset(&v, 0, sizeof v);
        point_to_own_arrays(&v);
        v.view.rank = (int32_t)random_in(1, 4);
        v.view.size = 4;
        v.view.offset = random_in(0, 40);
        v.view.count = random_in(0, 80);
        for (axis = 0; axis < v.view.rank; axis++) {
            v.shape[axis] = random_in(1, 4);
            v.stride[axis] = random_in(-9, 9);
        }
        do {
            int64_t element = v.view.offset;
            for (axis = 0; axis < v.view.rank; axis++) element += index[axis] * v.stride[axis];
            if (element < low) low = element;
            if (element > high) high = element;
        } while (next_index(v.view.rank, v.shape, index));
        status = nji_check_view_reach(&v.view, "reach");
        if (low < 0) {
            assert_int_equal(status, NJ_INVALID_ARGUMENT);
        } else if (v.view.count && high >= v.view.count) {
            assert_int_equal(status, NJ_BUFFER_TOO_SMALL);
        } else {
            assert_int_equal(status, NJ_OK);
            assert_int_equal(v.view.low, low);
            assert_int_equal(v.view.high, high);
        }
    }
}

/* ---- self-overlap --------------------------------------------------------------------------- */

#define WALK_LIMIT 512

/* Whether some element is visited twice. Strides are not negative. */
static int walks_an_element_twice(const small_view *v) {
    unsigned char seen[WALK_LIMIT] = {0};
    int64_t index[NJ_MAX_RANK] = {0};
    do {
        int64_t element = dot(v->view.rank, index, v->stride);
        assert_in_range(element, 0, WALK_LIMIT - 1);
        if (seen[element]++) return 1;
    } while (next_index(v->view.rank, v->shape, index));
    return 0;
}

static void no_output_that_overlaps_itself_is_accepted(void **state) {
    int round, accepted = 0, overlapping = 0;
    (void)state;
    random_state = 2;
    for (round = 0; round < 50000; round++) {
        small_view v;
        int axis, overlaps;
        nj_status status;
        memset(&v, 0, sizeof v);
        point_to_own_arrays(&v);
        v.view.rank = (int32_t)random_in(1, 4);
        for (axis = 0; axis < v.view.rank; axis++) {
            v.shape[axis] = random_in(1, 4);
            v.stride[axis] = random_in(1, 30);
        }
        overlaps = walks_an_element_twice(&v);
        status = nji_check_output_is_injective(&v.view, "self");
        if (overlaps) assert_int_equal(status, NJ_INVALID_ARGUMENT);
        accepted += status == NJ_OK;
        overlapping += overlaps;
    }
    assert_true(accepted > 1000 && overlapping > 1000);
}

static void outputs_with_nested_strides_in_any_order_are_accepted(void **state) {
    int round;
    (void)state;
    random_state = 3;
    for (round = 0; round < 20000; round++) {
        small_view v;
        int axis;
        memset(&v, 0, sizeof v);
        point_to_own_arrays(&v);
        v.view.rank = (int32_t)random_in(1, NJ_MAX_RANK);
        for (axis = 0; axis < v.view.rank; axis++) v.shape[axis] = random_in(1, 4);
        random_output_strides(v.view.rank, v.shape, v.stride);
        assert_int_equal(nji_check_output_is_injective(&v.view, "self"), NJ_OK);
    }
}

/* ---- a glance at packed views --------------------------------------------------------------- */

/* Changes one thing about a view, to what may be wrong, unusual or the same. */
static void change_one_thing(small_view *v) {
    static const int64_t numbers[] = {INT64_MIN,           -1,       0, 1, 2, 3, 40, 41, 42, 60,
                                      NJI_MAX_ELEMENT - 1, INT64_MAX};
    const int64_t number = numbers[random_in(0, COUNT_OF(numbers) - 1)];
    const int axis = (int)random_in(0, v->view.rank - 1);
    switch (random_in(0, 5)) {
    case 0: v->view.rank = (int32_t)random_in(1, NJ_MAX_RANK); break;
    case 1: v->shape[axis] = number; break;
    case 2: v->stride[axis] = number; break;
    case 3: v->view.offset = number; break;
    case 4: v->view.count = number; break;
    default: v->view.data = random_is(30) ? NULL : arena + random_in(0, 8); break;
    }
}

static void a_glance_takes_packed_views_and_none_that_a_closer_look_refuses(void **state) {
    int round, taken = 0, refused = 0;
    (void)state;
    random_state = 7;
    for (round = 0; round < 50000; round++) {
        const int changes = (int)random_in(0, 2);
        small_view v;
        nji_view closer;
        nj_desc desc;
        nj_tensor packed;
        int i;
        memset(&desc, 0, sizeof desc);
        desc.rank = (int32_t)random_in(1, 4);
        for (i = 0; i < desc.rank; i++) desc.shape[i] = random_is(5) ? 0 : random_in(1, 4);
        packed = nj_packed(arena, desc.rank, desc.shape);
        memset(&v, 0, sizeof v);
        point_to_own_arrays(&v);
        memcpy(v.shape, packed.shape, sizeof v.shape);
        memcpy(v.stride, packed.stride, sizeof v.stride);
        v.view.kind = NJI_FULL;
        v.view.data = arena;
        v.view.rank = desc.rank;
        v.view.size = 1 << random_in(1, 3);
        v.view.offset = random_in(0, 40);
        v.view.count = random_is(50) ? 0 : packed.count + v.view.offset;
        v.view.writable = random_is(50);
        for (i = 0; i < changes; i++) change_one_thing(&v);
        closer = v.view;
        if (!nji_is_packed_view(&v.view, &packed)) {
            assert_true(changes > 0 || packed.count == 0);
            refused++;
            continue;
        }
        taken++;
        assert_int_equal(nji_check_view(&desc, &closer, "glance"), NJ_OK);
        assert_int_equal(v.view.empty, closer.empty);
        assert_int_equal(v.view.low, closer.low);
        assert_int_equal(v.view.high, closer.high);
        assert_true(v.view.first_byte == closer.first_byte && v.view.last_byte == closer.last_byte);
    }
    assert_true(taken > 10000 && refused > 10000);
}

/* ---- overlap of two views ------------------------------------------------------------------- */

/* A view somewhere in the arena; 0 when the draw does not fit. */
static int random_view_in_arena(small_view *v) {
    static const int32_t sizes[] = {2, 4, 8};
    int axis;
    memset(v, 0, sizeof *v);
    point_to_own_arrays(v);
    v->view.rank = (int32_t)random_in(1, 4);
    v->view.size = sizes[random_in(0, 2)];
    v->view.offset = random_in(0, 30);
    v->view.data = arena + random_in(0, 12) * v->view.size;
    for (axis = 0; axis < v->view.rank; axis++) {
        v->shape[axis] = random_in(1, 4);
        v->stride[axis] = random_is(20) ? random_in(-12, 12) : random_in(1, 12);
    }
    return nji_check_view_reach(&v->view, "overlap") == NJ_OK &&
           v->view.last_byte < (uintptr_t)arena + ARENA_BYTES;
}

static void mark_bytes(const small_view *v, unsigned char *marks) {
    int64_t index[NJ_MAX_RANK] = {0};
    size_t base = (size_t)((unsigned char *)v->view.data - arena);
    do {
        int64_t element = v->view.offset + dot(v->view.rank, index, v->stride);
        memset(marks + base + (size_t)element * (size_t)v->view.size, 1, (size_t)v->view.size);
    } while (next_index(v->view.rank, v->shape, index));
}

static int share_a_byte(const small_view *a, const small_view *b) {
    unsigned char of_a[ARENA_BYTES] = {0}, of_b[ARENA_BYTES] = {0};
    int i;
    mark_bytes(a, of_a);
    mark_bytes(b, of_b);
    for (i = 0; i < ARENA_BYTES; i++) {
        if (of_a[i] && of_b[i]) return 1;
    }
    return 0;
}

static int overlap(const small_view *a, const small_view *b) {
    return !nji_views_are_apart(&a->view, &b->view) && nji_views_overlap(&a->view, &b->view);
}

static void proven_overlap_is_real_overlap_both_ways(void **state) {
    int pairs = 0, apart = 0, interleaved = 0;
    (void)state;
    random_state = 4;
    while (pairs < 20000) {
        small_view a, b;
        int real;
        if (!random_view_in_arena(&a) || !random_view_in_arena(&b)) continue;
        pairs++;
        real = share_a_byte(&a, &b);
        assert_int_equal(overlap(&a, &b), real);
        assert_int_equal(overlap(&b, &a), real);
        apart += nji_views_are_apart(&a.view, &b.view);
        interleaved += !nji_views_are_apart(&a.view, &b.view) && !real;
    }
    assert_true(apart > 500 && interleaved > 500 && pairs - apart - interleaved > 500);
}

/* Sizes that no one can walk: what decides must not depend on the extents. */
static void large_views_are_told_apart(void **state) {
    small_view a, b;
    (void)state;
    memset(&a, 0, sizeof a);
    point_to_own_arrays(&a);
    a.view.data = arena;
    a.view.rank = 2;
    a.view.size = 2;
    a.shape[0] = (int64_t)1 << 30; /* the left half of each row */
    a.shape[1] = 4096;
    a.stride[0] = 8192;
    a.stride[1] = 1;
    b = a;
    point_to_own_arrays(&b);
    b.view.offset = 4096;
    assert_int_equal(nji_check_view_reach(&a.view, "large"), NJ_OK);
    assert_int_equal(nji_check_view_reach(&b.view, "large"), NJ_OK);
    assert_int_equal(overlap(&a, &b), 0);
    b.view.offset = 4095;
    assert_int_equal(nji_check_view_reach(&b.view, "large"), NJ_OK);
    assert_int_equal(overlap(&a, &b), 1);
    a.stride[1] = b.stride[1] = 2; /* even and odd columns */
    b.view.offset = 1;
    assert_int_equal(nji_check_view_reach(&a.view, "large"), NJ_OK);
    assert_int_equal(nji_check_view_reach(&b.view, "large"), NJ_OK);
    assert_int_equal(overlap(&a, &b), 0);
    b.view.offset = (int64_t)8192 * 12345678 + 2;
    assert_int_equal(nji_check_view_reach(&b.view, "large"), NJ_OK);
    assert_int_equal(overlap(&a, &b), 1);
}

/* ---- collapse ------------------------------------------------------------------------------- */

/* One operand of a random problem: its own tensor in nj_args and the room for its reach. */
static const struct {
    size_t at; /* in nj_args */
    nji_kind kind;
    int is_output;
} operands[] = {
    {offsetof(nj_args, x), NJI_FULL, 0},       {offsetof(nj_args, dy), NJI_FULL, 0},
    {offsetof(nj_args, gamma), NJI_PARAM, 0},  {offsetof(nj_args, beta), NJI_PARAM, 0},
    {offsetof(nj_args, mean), NJI_STAT, 1},    {offsetof(nj_args, rstd), NJI_STAT, 1},
    {offsetof(nj_args, y), NJI_FULL, 1},       {offsetof(nj_args, dx), NJI_FULL, 1},
    {offsetof(nj_args, dgamma), NJI_PARAM, 1}, {offsetof(nj_args, dbeta), NJI_PARAM, 1}};

/* Addresses are compared, never followed: every operand gets a range of its own. */
#define OPERAND_BYTES ((size_t)1 << 24)

static nj_desc random_desc(int zero_percent) {
    nj_desc desc;
    int axis;
    int64_t all = 1;
    memset(&desc, 0, sizeof desc);
    desc.rank = (int32_t)random_in(1, NJ_MAX_RANK);
    desc.norm_axes = (uint32_t)random_in(1, (1 << desc.rank) - 1);
    for (axis = 0; axis < desc.rank; axis++) {
        desc.shape[axis] = all > 200 || random_is(25) ? 1 : random_in(2, 5);
        if (random_is(zero_percent)) desc.shape[axis] = 0;
        if (desc.shape[axis]) all *= desc.shape[axis];
    }
    desc.op = random_is(40) ? NJ_OP_LAYER_NORM_FORWARD : NJ_OP_LAYER_NORM_BACKWARD;
    desc.dtype = random_is(50) ? NJ_F32 : NJ_BF16;
    desc.has_gamma = random_is(70);
    desc.has_beta = random_is(70);
    if (desc.op == NJ_OP_LAYER_NORM_BACKWARD && random_is(40)) {
        desc.grads = (uint32_t)random_in(1, 7);
        if (!desc.has_gamma) desc.grads &= ~NJ_GRAD_DGAMMA;
        if (!desc.has_beta) desc.grads &= ~NJ_GRAD_DBETA;
    }
    return desc;
}

static void random_args(const nj_desc *desc, nj_args *args) {
    size_t i;
    for (i = 0; i < COUNT_OF(operands); i++) {
        nj_tensor *tensor = (nj_tensor *)(void *)((char *)args + operands[i].at);
        memset(tensor, 0, sizeof *tensor);
        tensor->data = (void *)(uintptr_t)((i + 1) * OPERAND_BYTES);
        nji_expected_shape(desc, operands[i].kind, &tensor->rank, tensor->shape);
        if (operands[i].is_output) {
            random_output_strides(tensor->rank, tensor->shape, tensor->stride);
            tensor->offset = random_in(0, 5);
        } else {
            random_input_strides(tensor->rank, tensor->shape, tensor->stride, &tensor->offset);
        }
    }
}

#define MAX_LINES 1024 /* rows or columns of a random problem */

/* For each row and each column the sum, over its elements, of a hash of all the addresses that meet
   there. Sums do not depend on order, and finish() sorts them: equal prints mean the same rows and
   the same columns, made of the same elements. */
typedef struct fingerprint {
    int64_t elements;
    uint64_t rows[MAX_LINES], cols[MAX_LINES];
} fingerprint;

static uint64_t mixed(uint64_t hash) {
    hash = (hash ^ (hash >> 33)) * 0xff51afd7ed558ccdull;
    return hash ^ (hash >> 29);
}

static int compare_sums(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

static void finish(fingerprint *print, int64_t rows, int64_t cols) {
    assert_in_range(rows, 1, MAX_LINES);
    assert_in_range(cols, 1, MAX_LINES);
    qsort(print->rows, (size_t)rows, sizeof *print->rows, compare_sums);
    qsort(print->cols, (size_t)cols, sizeof *print->cols, compare_sums);
}

/* By the descriptor: each index of x, its row and column counted in row-major order. */
static void walk_descriptor(const nj_desc *desc, const nji_views *set, fingerprint *print) {
    int64_t index[NJ_MAX_RANK] = {0}, rows = 1, cols = 1;
    int axis;
    memset(print, 0, sizeof *print);
    do {
        uint64_t hash = NJI_HASH_SEED;
        int64_t row = 0, col = 0;
        int i;
        rows = cols = 1;
        for (axis = 0; axis < desc->rank; axis++) {
            int64_t *number = nji_is_normalized(desc, axis) ? &col : &row;
            int64_t *total = nji_is_normalized(desc, axis) ? &cols : &rows;
            *number = *number * desc->shape[axis] + index[axis];
            *total *= desc->shape[axis];
        }
        for (i = 0; i < set->count; i++) {
            const nji_view *view = &set->view[i];
            int64_t element = view->offset;
            uint64_t address;
            int own = 0;
            for (axis = 0; axis < desc->rank; axis++) {
                int normalized = nji_is_normalized(desc, axis);
                if (view->kind == NJI_PARAM && !normalized) continue;
                if (view->kind != NJI_STAT || !normalized)
                    element += index[axis] * view->stride[own];
                own++;
            }
            address = (uint64_t)(uintptr_t)view->data + (uint64_t)(element * view->size);
            hash = nji_hash(hash, &view->slot, sizeof view->slot);
            hash = nji_hash(hash, &address, sizeof address);
        }
        print->elements++;
        print->rows[row] += mixed(hash);
        print->cols[col] += mixed(hash);
    } while (next_index(desc->rank, desc->shape, index));
    finish(print, rows, cols);
}

/* By the collapsed problem. */
static void walk_problem(const nji_views *set, const nji_problem *problem, fingerprint *print) {
    int dims = problem->row_dims + problem->col_dims;
    int64_t index[NJI_DIMS] = {0}, extent[NJI_DIMS], rows = 1, cols = 1;
    int d;
    memset(print, 0, sizeof *print);
    for (d = 0; d < dims; d++) extent[d] = problem->extent[d];
    do {
        uint64_t hash = NJI_HASH_SEED;
        int64_t row = 0, col = 0;
        int i;
        rows = cols = 1;
        for (d = 0; d < dims; d++) {
            int64_t *number = d < problem->row_dims ? &row : &col;
            int64_t *total = d < problem->row_dims ? &rows : &cols;
            *number = *number * extent[d] + index[d];
            *total *= extent[d];
        }
        for (i = 0; i < set->count; i++) {
            const nji_operand *operand =
                (const nji_operand *)(const void *)((const char *)problem + set->view[i].slot);
            uint64_t address = (uint64_t)(uintptr_t)operand->data;
            for (d = 0; d < dims; d++) {
                address += (uint64_t)(index[d] * operand->stride[d] * set->view[i].size);
            }
            hash = nji_hash(hash, &set->view[i].slot, sizeof set->view[i].slot);
            hash = nji_hash(hash, &address, sizeof address);
        }
        print->elements++;
        print->rows[row] += mixed(hash);
        print->cols[col] += mixed(hash);
    } while (next_index(dims, extent, index));
    finish(print, rows, cols);
}

/* Lists and checks the operands of a plan, and collapses them as run does. */
static void collapse(nj_desc *desc, const nj_args *args, nji_views *set, nji_problem *problem) {
    nj_plan plan;
    memset(&plan, 0, sizeof plan);
    assert_int_equal(nji_check_desc(desc, &plan.rows, &plan.cols, "collapse"), NJ_OK);
    plan.desc = *desc;
    plan.backend = NJ_BACKEND_HOST;
    if (nji_check_args(&plan, args, set, "collapse") != NJ_OK) fail_msg("%s", nj_last_error());
    nji_bind(&plan.desc, plan.rows, plan.cols, set, problem);
}

static void collapsed_problem_visits_the_same_rows_columns_and_addresses(void **state) {
    static fingerprint by_axes, by_dims;
    int round, merged = 0, many_dims = 0;
    (void)state;
    random_state = 5;
    for (round = 0; round < 6000; round++) {
        nj_desc desc = random_desc(0);
        nj_args args;
        nji_views set;
        nji_problem problem;
        random_args(&desc, &args);
        collapse(&desc, &args, &set, &problem);
        walk_descriptor(&desc, &set, &by_axes);
        walk_problem(&set, &problem, &by_dims);
        assert_int_equal(by_dims.elements, by_axes.elements);
        assert_int_equal(problem.rows * problem.cols, by_axes.elements);
        assert_memory_equal(by_dims.rows, by_axes.rows, sizeof by_axes.rows);
        assert_memory_equal(by_dims.cols, by_axes.cols, sizeof by_axes.cols);
        merged += problem.row_dims + problem.col_dims < desc.rank;
        many_dims += problem.row_dims + problem.col_dims >= 5;
    }
    assert_true(merged > 500 && many_dims > 50);
}

static void collapse_of_empty_problems_is_empty_and_touches_no_stride_of_the_empty(void **state) {
    int round, seen = 0;
    (void)state;
    random_state = 6;
    for (round = 0; round < 6000; round++) {
        nj_desc desc = random_desc(20);
        nj_args args;
        nji_views set;
        nji_problem problem;
        int64_t product = 1;
        int d, i, axis;
        random_args(&desc, &args);
        for (axis = 0; axis < desc.rank; axis++) {
            if (desc.shape[axis] == 0) break;
        }
        if (axis == desc.rank) continue;
        seen++;
        for (axis = 0; axis < NJ_MAX_RANK; axis++) args.x.stride[axis] = INT64_MAX;
        args.x.offset = INT64_MAX;
        collapse(&desc, &args, &set, &problem);
        for (d = 0; d < problem.row_dims; d++) product *= problem.extent[d];
        assert_int_equal(product, problem.rows);
        for (product = 1; d < problem.row_dims + problem.col_dims; d++)
            product *= problem.extent[d];
        assert_int_equal(product, problem.cols);
        for (i = 0; i < set.count; i++) {
            const nji_operand *operand =
                (const nji_operand *)(const void *)((const char *)&problem + set.view[i].slot);
            if (!set.view[i].empty) {
                assert_non_null(operand->data);
                continue;
            }
            assert_null(operand->data);
            for (d = 0; d < NJI_DIMS; d++) assert_int_equal(operand->stride[d], 0);
        }
    }
    assert_true(seen > 1000);
}

/* Operands as nj_packed makes them, each somewhere in its range. A forward may go without
 * statistics. */
static void random_packed_args(const nj_desc *desc, nj_args *args) {
    size_t i;
    for (i = 0; i < COUNT_OF(operands); i++) {
        nj_tensor *tensor = (nj_tensor *)(void *)((char *)args + operands[i].at);
        int64_t shape[NJ_MAX_RANK];
        int32_t rank;
        nji_expected_shape(desc, operands[i].kind, &rank, shape);
        *tensor = nj_packed((void *)(uintptr_t)((i + 1) * OPERAND_BYTES), rank, shape);
        tensor->offset = random_in(0, 5);
        tensor->count = 0;
    }
    if (nji_is_forward(desc) && random_is(30)) memset(&args->mean, 0, sizeof args->mean);
    if (nji_is_forward(desc) && random_is(30)) memset(&args->rstd, 0, sizeof args->rstd);
}

static void packed_operands_bind_to_what_they_collapse_to(void **state) {
    int round, seen = 0;
    (void)state;
    random_state = 8;
    for (round = 0; round < 6000; round++) {
        nj_desc desc = random_desc(5);
        nj_args args;
        nj_plan plan;
        nji_views set;
        nji_problem at_once, collapsed;
        random_packed_args(&desc, &args);
        memset(&plan, 0, sizeof plan);
        plan.desc = desc;
        plan.backend = NJ_BACKEND_HOST;
        assert_int_equal(nji_check_desc(&plan.desc, &plan.rows, &plan.cols, "bind"), NJ_OK);
        nji_prepare_packed(&plan);
        assert_int_equal(nji_check_args(&plan, &args, &set, "bind"), NJ_OK);
        assert_int_equal(set.packed, plan.packed[NJI_FULL].count > 0);
        nji_plan_bind(&plan, &set, &at_once);
        set.packed = 0;
        nji_plan_bind(&plan, &set, &collapsed);
        /* Nobody reads the strides of an operand that is not there. */
        if (!collapsed.mean.data) memset(at_once.mean.stride, 0, sizeof at_once.mean.stride);
        if (!collapsed.rstd.data) memset(at_once.rstd.stride, 0, sizeof at_once.rstd.stride);
        assert_memory_equal(&at_once, &collapsed, sizeof collapsed);
        seen += plan.packed[NJI_FULL].count > 0;
    }
    assert_true(seen > 3000);
}

/* The problem of a forward on x and y with these strides (NULL: packed), parameters packed. */
static nji_problem forward_problem(int rank, const int64_t *shape, uint32_t norm_axes,
                                   const int64_t *x_stride, const int64_t *y_stride) {
    nj_desc desc;
    nj_args args;
    nji_views set;
    nji_problem problem;
    int64_t param[NJ_MAX_RANK], stat[NJ_MAX_RANK];
    int32_t param_rank = 0, stat_rank = 0;
    memset(&desc, 0, sizeof desc);
    desc.rank = rank;
    memcpy(desc.shape, shape, (size_t)rank * sizeof *shape);
    desc.norm_axes = norm_axes;
    desc.op = NJ_OP_LAYER_NORM_FORWARD;
    desc.dtype = NJ_F32;
    desc.has_gamma = desc.has_beta = 1;
    assert_int_equal(nj_desc_param_shape(&desc, &param_rank, param), NJ_OK);
    assert_int_equal(nj_desc_stat_shape(&desc, &stat_rank, stat), NJ_OK);
    memset(&args, 0, sizeof args);
    args.x = nj_packed_const((void *)(uintptr_t)(1 * OPERAND_BYTES), rank, shape);
    args.y = nj_packed((void *)(uintptr_t)(2 * OPERAND_BYTES), rank, shape);
    args.gamma = nj_packed_const((void *)(uintptr_t)(3 * OPERAND_BYTES), param_rank, param);
    args.beta = nj_packed_const((void *)(uintptr_t)(4 * OPERAND_BYTES), param_rank, param);
    args.mean = nj_packed((void *)(uintptr_t)(5 * OPERAND_BYTES), stat_rank, stat);
    args.x.count = args.y.count = 0;
    if (x_stride) memcpy(args.x.stride, x_stride, (size_t)rank * sizeof *x_stride);
    if (y_stride) memcpy(args.y.stride, y_stride, (size_t)rank * sizeof *y_stride);
    collapse(&desc, &args, &set, &problem);
    return problem;
}

static void packed_tensors_collapse_to_one_row_and_one_column_dim(void **state) {
    static const int64_t shape[] = {2, 3, 5, 7};
    nji_problem p = forward_problem(4, shape, 1u << 2 | 1u << 3, NULL, NULL);
    (void)state;
    assert_int_equal(p.row_dims, 1);
    assert_int_equal(p.col_dims, 1);
    assert_int_equal(p.extent[0], 6);
    assert_int_equal(p.extent[1], 35);
    assert_int_equal(p.x.stride[0], 35);
    assert_int_equal(p.x.stride[1], 1);
    assert_int_equal(p.mean.stride[0], 1);
    assert_int_equal(p.mean.stride[1], 0);
    assert_int_equal(p.gamma.stride[0], 0);
    assert_int_equal(p.gamma.stride[1], 1);
    assert_null(p.rstd.data);
    assert_int_equal(nji_layout_of(&p), NJ_LAYOUT_PACKED);
}

static void axes_in_permuted_memory_order_are_sorted_and_merged(void **state) {
    static const int64_t shape[] = {2, 3, 5, 7};
    static const int64_t swapped[] = {35, 70, 7, 1}; /* rows stored as (3, 2) */
    nji_problem p = forward_problem(4, shape, 1u << 2 | 1u << 3, swapped, swapped);
    (void)state;
    assert_int_equal(p.row_dims, 2); /* mean is stored as (2, 3): the rows cannot join */
    assert_int_equal(p.extent[0], 3);
    assert_int_equal(p.extent[1], 2);
    assert_int_equal(p.y.stride[0], 70);
    assert_int_equal(p.y.stride[1], 35);
    assert_int_equal(p.mean.stride[0], 1);
    assert_int_equal(p.mean.stride[1], 3);
    assert_int_equal(p.col_dims, 1);
}

static void axes_of_extent_1_vanish(void **state) {
    static const int64_t shape[] = {1, 3, 1, 1, 7, 1};
    static const int64_t odd[] = {-3, 7, 0, 100, 1, INT64_MAX};
    nji_problem p = forward_problem(6, shape, 1u << 3 | 1u << 4 | 1u << 5, odd, odd);
    (void)state;
    assert_int_equal(p.row_dims, 1);
    assert_int_equal(p.col_dims, 1);
    assert_int_equal(p.extent[0], 3);
    assert_int_equal(p.extent[1], 7);
    assert_int_equal(nji_layout_of(&p), NJ_LAYOUT_PACKED);
}

static void one_element_has_no_dims_and_is_packed(void **state) {
    static const int64_t shape[] = {1, 1};
    nji_problem p = forward_problem(2, shape, 1u << 1, NULL, NULL);
    (void)state;
    assert_int_equal(p.row_dims, 0);
    assert_int_equal(p.col_dims, 0);
    assert_int_equal(nji_layout_of(&p), NJ_LAYOUT_PACKED);
}

static void rank_8_with_alternating_axes_keeps_8_dims(void **state) {
    static const int64_t shape[] = {2, 3, 2, 3, 2, 3, 2, 3};
    nji_problem p = forward_problem(8, shape, 0xaa, NULL, NULL);
    int d;
    (void)state;
    assert_int_equal(p.row_dims, 4);
    assert_int_equal(p.col_dims, 4);
    for (d = 0; d < 4; d++) {
        assert_int_equal(p.extent[d], 2);
        assert_int_equal(p.extent[4 + d], 3);
    }
    assert_int_equal(p.x.stride[0], 648);
    assert_int_equal(p.x.stride[3], 3);
    assert_int_equal(p.x.stride[4], 216);
    assert_int_equal(p.x.stride[7], 1);
    assert_int_equal(p.gamma.stride[4], 27);
    assert_int_equal(p.gamma.stride[7], 1);
    assert_int_equal(p.mean.stride[0], 8);
    assert_int_equal(p.mean.stride[3], 1);
    assert_int_equal(nji_layout_of(&p), NJ_LAYOUT_STRIDED);
}

/* ---- layout --------------------------------------------------------------------------------- */

static void layouts_are_told_by_strides(void **state) {
    static const int64_t bct[] = {2, 3, 5};
    static const int64_t padded[] = {24, 8, 1}; /* rows of 5 in 8 */
    static const int64_t every_other[] = {30, 10, 2};
    static const int64_t broadcast[] = {0, 0, 0};
    static const int64_t transposed[] = {15, 1, 3}; /* (2, 5, 3) in memory */
    static const int64_t nchw[] = {2, 3, 4, 5};
    static const int64_t nhwc[] = {60, 1, 15, 3};
    static const int64_t one_row[] = {1, 5};
    nji_problem p;
    (void)state;
    p = forward_problem(3, bct, 1u << 2, NULL, NULL);
    assert_int_equal(nji_layout_of(&p), NJ_LAYOUT_PACKED);
    p = forward_problem(3, bct, 1u << 2, padded, NULL);
    assert_int_equal(nji_layout_of(&p), NJ_LAYOUT_PADDED_ROWS);
    p = forward_problem(3, bct, 1u << 2, NULL, padded);
    assert_int_equal(nji_layout_of(&p), NJ_LAYOUT_PADDED_ROWS);
    p = forward_problem(3, bct, 1u << 2, every_other, NULL);
    assert_int_equal(nji_layout_of(&p), NJ_LAYOUT_STRIDED);
    p = forward_problem(3, bct, 1u << 2, broadcast, NULL);
    assert_int_equal(nji_layout_of(&p), NJ_LAYOUT_STRIDED);
    p = forward_problem(3, bct, 1u << 2, transposed, transposed);
    assert_int_equal(nji_layout_of(&p), NJ_LAYOUT_CHANNELS_FIRST);
    p = forward_problem(4, nchw, 1u << 1, NULL, NULL);
    assert_int_equal(nji_layout_of(&p), NJ_LAYOUT_CHANNELS_FIRST);
    assert_int_equal(p.row_dims, 2);
    assert_int_equal(p.extent[1], 20);
    p = forward_problem(4, nchw, 1u << 1, nhwc, nhwc);
    assert_int_equal(nji_layout_of(&p), NJ_LAYOUT_PACKED); /* rows of 3, one after the other */
    assert_int_equal(p.rows, 40);
    p = forward_problem(4, nchw, 0xf, NULL, NULL); /* no rows to speak of */
    assert_int_equal(nji_layout_of(&p), NJ_LAYOUT_PACKED);
    p = forward_problem(2, one_row, 1u << 1, NULL, NULL);
    assert_int_equal(nji_layout_of(&p), NJ_LAYOUT_PACKED);
}

/* ---- arithmetic that all of it rests on ------------------------------------------------------ */

static void checked_arithmetic_agrees_with_wider_arithmetic_at_the_edges(void **state) {
    static const int64_t edges[] = {INT64_MIN,
                                    INT64_MIN + 1,
                                    -((int64_t)1 << 32),
                                    (int64_t)INT32_MIN - 1,
                                    INT32_MIN,
                                    -3037000500,
                                    -2,
                                    -1,
                                    0,
                                    1,
                                    2,
                                    INT32_MAX,
                                    (int64_t)INT32_MAX + 1,
                                    3037000499,
                                    (int64_t)1 << 32,
                                    INT64_MAX / 2,
                                    INT64_MAX / 2 + 1,
                                    INT64_MAX - 1,
                                    INT64_MAX};
    size_t i, j;
    (void)state;
    for (i = 0; i < COUNT_OF(edges); i++) {
        for (j = 0; j < COUNT_OF(edges); j++) {
            int64_t got, expected;
            int fits = !__builtin_mul_overflow(edges[i], edges[j], &expected);
            assert_int_equal(nji_mul_i64(edges[i], edges[j], &got), fits);
            if (fits) assert_int_equal(got, expected);
            fits = !__builtin_add_overflow(edges[i], edges[j], &expected);
            assert_int_equal(nji_add_i64(edges[i], edges[j], &got), fits);
            if (fits) assert_int_equal(got, expected);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(checked_arithmetic_agrees_with_wider_arithmetic_at_the_edges),
        cmocka_unit_test(reach_is_the_lowest_and_highest_element_walked),
        cmocka_unit_test(no_output_that_overlaps_itself_is_accepted),
        cmocka_unit_test(outputs_with_nested_strides_in_any_order_are_accepted),
        cmocka_unit_test(a_glance_takes_packed_views_and_none_that_a_closer_look_refuses),
        cmocka_unit_test(proven_overlap_is_real_overlap_both_ways),
        cmocka_unit_test(large_views_are_told_apart),
        cmocka_unit_test(collapsed_problem_visits_the_same_rows_columns_and_addresses),
        cmocka_unit_test(collapse_of_empty_problems_is_empty_and_touches_no_stride_of_the_empty),
        cmocka_unit_test(packed_operands_bind_to_what_they_collapse_to),
        cmocka_unit_test(packed_tensors_collapse_to_one_row_and_one_column_dim),
        cmocka_unit_test(axes_in_permuted_memory_order_are_sorted_and_merged),
        cmocka_unit_test(axes_of_extent_1_vanish),
        cmocka_unit_test(one_element_has_no_dims_and_is_packed),
        cmocka_unit_test(rank_8_with_alternating_axes_keeps_8_dims),
        cmocka_unit_test(layouts_are_told_by_strides),
    };
    return cmocka_run_group_tests_name("shape", tests, NULL, NULL);
}
