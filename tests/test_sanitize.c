/* Every kernel in every geometry once, for compute-sanitizer (tools/sanitize.sh). Rows are few, for
   there a kernel is a hundred times slower; results are compared with the oracle all the same.

   Each operand has a buffer of exactly its size, so that an access outside meets no other. Inputs
   are initialised, outputs are not: reading what nobody wrote is found. Exit 77: there is no GPU.
 */
#include "harness.h"
#include "tuning.h"

enum { SKIPPED = 77 };

/* ---- one run -------------------------------------------------------------------------------- */

static uint32_t inputs_of(const problem *p) {
    if (p->desc.op == NJ_OP_LAYER_NORM_FORWARD) return BIT(X) | BIT(GAMMA) | BIT(BETA);
    return BIT(X) | BIT(DY) | BIT(GAMMA) | BIT(MEAN) | BIT(RSTD) | accumulated(p);
}

static size_t buffer_bytes(const operand *o) {
    return (size_t)(o->count * format_of(o->dtype)->size);
}

/* Buffers for what the op uses; the rest of the args has no data. An output with gaps is
   initialised, too: it comes back whole. */
static void open_buffers(problem *p, void *buffer[OPERANDS]) {
    for (int i = 0; i < OPERANDS; i++) {
        const operand *o = &p->op[i];
        buffer[i] = NULL;
        if (o->absent || !((inputs_of(p) | outputs_of(p)) & BIT(i))) continue;
        buffer[i] = gpu_alloc(&bed.gpu, buffer_bytes(o));
        require_gpu_ok(buffer[i] != NULL);
        if (inputs_of(p) & BIT(i) || o->count > rows_of(p, i) * cols_of(p, i))
            require_gpu_ok(gpu_upload(&bed.gpu, buffer[i], p->image + o->base, buffer_bytes(o)));
    }
    make_args(p, p->image);
    p->args.x.data = buffer[X];
    p->args.dy.data = buffer[DY];
    p->args.gamma.data = buffer[GAMMA];
    p->args.beta.data = buffer[BETA];
    p->args.mean.data = buffer[MEAN];
    p->args.rstd.data = buffer[RSTD];
    p->args.y.data = buffer[Y];
    p->args.dx.data = buffer[DX];
    p->args.dgamma.data = buffer[DGAMMA];
    p->args.dbeta.data = buffer[DBETA];
}

static void close_buffers(problem *p, void *buffer[OPERANDS]) {
    for (int i = 0; i < OPERANDS; i++) {
        const operand *o = &p->op[i];
        if (buffer[i] && outputs_of(p) & BIT(i)) {
            require_gpu_ok(gpu_download(&bed.gpu, p->image + o->base, buffer[i], buffer_bytes(o)));
        }
        gpu_free(&bed.gpu, buffer[i]);
    }
}

static nji_choice choose(const nj_desc *like) {
    nj_desc desc = *like;
    nj_preference no_demands = {0};
    nji_choice choice;
    int64_t rows, cols;
    require_ok(nji_check_desc(&desc, &rows, &cols, "test"));
    require_ok(nji_choose(&desc, rows, cols, &bed.ctx->cuda.facts, &no_demands, &choice, "test"));
    return choice;
}

/* Selects with room for two partial gradients: two blocks then walk over all rows. */
static void select_few_blocks(problem *p) {
    nj_desc desc = p->desc;
    nj_preference pref = {0};
    if (desc.op == NJ_OP_LAYER_NORM_FORWARD) {
        desc.grads = desc.accumulate = 0;
    } else if (wanted_grads(&desc) & (NJ_GRAD_DGAMMA | NJ_GRAD_DBETA)) {
        nji_choice choice = choose(&desc);
        choice.partial_bytes = 2 * 2 * p->cols * nji_accumulator_bytes(&desc);
        pref.max_workspace_bytes = (uint64_t)nji_workspace_of(&choice);
    }
    require_ok(nj_plan_select(&p->plan, bed.ctx, &desc, &pref));
}

/* kernel: a part of the name of the one that must run. The workspace is initialised, for a kernel
   may load partial sums that nobody wrote as long as it does not use them; it is NaN, so that a use
   would show. */
static void run_apart(problem *p, const char *kernel) {
    void *buffer[OPERANDS], *workspace = NULL;
    nj_sku sku;
    size_t bytes;
    select_few_blocks(p);
    bytes = nj_plan_workspace_size(p->plan);
    open_buffers(p, buffer);
    require_ok(nj_plan_sku(p->plan, &p->args, &sku));
    if (!strstr(sku.kernel, kernel)) fail_msg("%s would run, not %s", sku.kernel, kernel);
    if (bytes) {
        workspace = gpu_alloc(&bed.gpu, bytes);
        require_gpu_ok(workspace && gpu_fill(&bed.gpu, workspace, POISON, bytes));
    }
    require_ok(nj_plan_run(p->plan, &p->args, workspace, bytes, bed.gpu.stream));
    require_gpu_ok(gpu_wait(&bed.gpu));
    close_buffers(p, buffer);
    gpu_free(&bed.gpu, workspace);
    nj_plan_destroy(p->plan);
    p->plan = NULL;
}

static void check_apart(problem *p, nj_op op, const char *kernel) {
    expectation e;
    unsigned char *before;
    p->desc.op = op;
    fill_problem(p, 5);
    set_statistics(p);
    if (op == NJ_OP_LAYER_NORM_FORWARD) expect_forward(p, &e);
    else expect_backward(p, NULL, NULL, &e);
    expect_accumulation(p, &e);
    before = copy_image(p);
    run_apart(p, kernel);
    compare_image(p, before, &e);
    free(before);
    free_expectation(&e);
}

static void check_packed_apart(const nj_desc *desc, nj_op op, const char *kernel) {
    problem p;
    open_problem(&p, desc);
    p.op[DX].absent = !(wanted_grads(desc) & NJ_GRAD_DX);
    p.op[DGAMMA].absent = !(wanted_grads(desc) & NJ_GRAD_DGAMMA);
    p.op[DBETA].absent = !(wanted_grads(desc) & NJ_GRAD_DBETA);
    check_apart(&p, op, kernel);
    close_problem(&p);
}

/* ---- the tuning table ----------------------------------------------------------------------- */

static const char *const family_kernel[] = {"rows", "split", "tiles", "ring", "strided"};

/* Enough rows for two blocks to take two turns or more, the last of them not full; but few of those
   that are long. */
static int64_t few_rows(const nj_desc *desc) {
    const nji_choice choice = choose(desc);
    const int64_t wanted = 5 * nji_block_rows(&choice) - 1, most = 60000 / desc->shape[1];
    return wanted < most ? wanted : most > 5 ? most : 5;
}

/* By whole packs and by single elements; rows that are not for this device are counted. */
static void every_row_of_the_tuning_table(void **state) {
    int others = 0;
    (void)state;
    for (size_t r = 0; r < TUNING_ROWS; r++) {
        const nji_tuning *row = &nji_tuning_table[r];
        const nj_dtype dtype = row->element_bytes == 2   ? (r % 2 ? NJ_F16 : NJ_BF16)
                               : row->element_bytes == 4 ? NJ_F32
                                                         : NJ_F64;
        const nj_op op = row->forward ? NJ_OP_LAYER_NORM_FORWARD : NJ_OP_LAYER_NORM_BACKWARD;
        int reached = 0;
        for (int k = 0; k < 4; k++) {
            const nji_family family = k / 2 ? NJI_SPLIT : NJI_ROWS;
            const int64_t cols = tuning_cols(row, family, dtype, &bed.ctx->cuda.facts, k % 2);
            nj_desc desc = tuning_desc(row->forward, dtype, 64, cols);
            if (cols == 0) continue;
            desc.shape[0] = few_rows(&desc);
            check_packed_apart(&desc, op, family_kernel[family]);
            reached = 1;
        }
        others += !reached;
    }
    print_message("%d of %zu rows are for other architectures\n", others, TUNING_ROWS);
    assert_true(others < (int)TUNING_ROWS / 2);
}

/* ---- the other kernels ---------------------------------------------------------------------- */

typedef struct shape_case {
    nji_family family;
    int32_t rank;
    int64_t shape[4];
    uint32_t norm_axes;
} shape_case;

static const shape_case shapes[] = {
    {NJI_ROWS, 2, {61, 40}, 2},         {NJI_ROWS, 3, {3, 7, 1001}, 4},
    {NJI_TILES, 3, {3, 24, 72}, 2},     {NJI_TILES, 3, {2, 7, 33}, 2},
    {NJI_TILES, 3, {2, 300, 20}, 2},    {NJI_TILES, 3, {1, 1500, 24}, 2},
    {NJI_RING, 3, {3, 7, 1000}, 4},     {NJI_RING, 3, {2, 3, 4104}, 4},
    {NJI_STRIDED, 3, {1, 12400, 2}, 2}, {NJI_STRIDED, 4, {5, 9, 7, 11}, 10},
};

static nj_desc desc_of(const shape_case *c, nj_dtype dtype) {
    return make_desc(dtype, c->rank, c->shape, c->norm_axes);
}

/* The ring serves the backward of up to 4 bytes, on sm_90 and later; the rows kernels do the rest. */
static const char *kernel_of(const shape_case *c, nj_dtype dtype, nj_op op) {
    const int has_ring = op == NJ_OP_LAYER_NORM_BACKWARD && dtype != NJ_F64 &&
                         bed.ctx->cuda.facts.arch >= 90;
    if (bed.fallback) return "strided";
    return family_kernel[c->family == NJI_RING && !has_ring ? NJI_ROWS : c->family];
}

static void every_family_in_every_type(void **state) {
    (void)state;
    for (size_t k = 0; k < COUNT_OF(shapes); k++) {
        for (int dtype = NJ_F16; dtype <= NJ_F64; dtype++) {
            const nj_desc desc = desc_of(&shapes[k], (nj_dtype)dtype);
            for (int op = NJ_OP_LAYER_NORM_FORWARD; op <= NJ_OP_LAYER_NORM_BACKWARD; op++) {
                check_packed_apart(&desc, (nj_op)op,
                                   kernel_of(&shapes[k], (nj_dtype)dtype, (nj_op)op));
            }
        }
    }
}

static void gradients_one_by_one_and_added(void **state) {
    static const uint32_t masks[][2] = {{1, 1}, {2, 0}, {4, 4}, {6, 2}, {7, 7}};
    (void)state;
    for (size_t k = 0; k < COUNT_OF(shapes) * COUNT_OF(masks); k++) {
        const shape_case *c = &shapes[k / COUNT_OF(masks)];
        const uint32_t *mask = masks[k % COUNT_OF(masks)];
        nj_desc desc = desc_of(c, NJ_BF16);
        desc.grads = mask[0];
        desc.accumulate = mask[1];
        check_packed_apart(&desc, NJ_OP_LAYER_NORM_BACKWARD, "");
    }
}

/* Four elements between the outermost: strides that packs still fit, and two axes of rows. */
static void padded_outer_strides(void **state) {
    (void)state;
    for (size_t k = 0; k < COUNT_OF(shapes); k++) {
        const nj_desc desc = desc_of(&shapes[k], NJ_F32);
        problem p;
        open_problem(&p, &desc);
        for (int i = 0; i < OPERANDS; i++) {
            operand *o = &p.op[i];
            if (!(BIT(i) & FULL_OPERANDS)) continue;
            o->stride[0] += 4;
            o->count += 4 * (o->shape[0] - 1); /* ends with the last element */
        }
        check_apart(&p, NJ_OP_LAYER_NORM_FORWARD, "");
        check_apart(&p, NJ_OP_LAYER_NORM_BACKWARD, "");
        close_problem(&p);
    }
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_row_of_the_tuning_table),
        cmocka_unit_test(every_family_in_every_type),
        cmocka_unit_test(gradients_one_by_one_and_added),
        cmocka_unit_test(padded_outer_strides),
    };
    gpu present;
    int failed;
    if (!gpu_open(&present, 0)) {
        printf("skipped: %s\n", present.error);
        return SKIPPED;
    }
    gpu_close(&present);
    failed = _cmocka_run_group_tests("kernels", tests, COUNT_OF(tests), open_cuda, close_backend);
#ifndef HARNESS_NVRTC /* the SIMT host runs no PTX */
    failed += _cmocka_run_group_tests("embedded PTX", tests + 1, 1, open_fallback, close_backend);
#endif
    return failed > 0;
}
