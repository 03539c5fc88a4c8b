/* Every refusal of descriptors, preferences, operands and workspace: its code, its whole text, the
   numbers that go with it, and that nothing is written. The other way round, what must be accepted.
 */
#define _POSIX_C_SOURCE 200809L /* setenv */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>

/* The allocator fails at the call numbered fail_at (1 = the next; 0 = never) and counts what is
 * held. */
static int fail_at, blocks_held;

static void *counted_malloc(size_t bytes) {
    void *block;
    if (fail_at > 0 && --fail_at == 0) return NULL;
    block = malloc(bytes);
    if (block) blocks_held++;
    return block;
}

static void counted_free(void *block) {
    if (block) blocks_held--;
    free(block);
}

#define NJ_MALLOC(bytes) counted_malloc(bytes)
#define NJ_FREE(pointer) counted_free(pointer)
#define NORMJIT_IMPLEMENTATION
#include "normjit.h"

/* ---- what every test uses ------------------------------------------------------------------- */

#define ROWS 4
#define COLS 8

#define ALL_GRADS (NJ_GRAD_DX | NJ_GRAD_DGAMMA | NJ_GRAD_DBETA)

static nj_ctx *host;
static nj_plan *forward_plan, *backward_plan; /* f32, ROWS x COLS, gamma and beta */

static nj_desc desc_of(nj_op op, nj_dtype dtype, int64_t rows, int64_t cols) {
    nj_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.op = op;
    desc.dtype = dtype;
    desc.rank = 2;
    desc.shape[0] = rows;
    desc.shape[1] = cols;
    desc.norm_axes = 1u << 1;
    desc.has_gamma = desc.has_beta = 1;
    return desc;
}

static nj_desc forward_desc(void) {
    return desc_of(NJ_OP_LAYER_NORM_FORWARD, NJ_F32, ROWS, COLS);
}

static nj_desc backward_desc(void) {
    return desc_of(NJ_OP_LAYER_NORM_BACKWARD, NJ_F32, ROWS, COLS);
}

static nj_plan *plan_of(nj_desc desc) {
    nj_plan *plan;
    if (nj_plan_select(&plan, host, &desc, NULL) != NJ_OK) fail_msg("%s", nj_last_error());
    return plan;
}

static int open_host(void **state) {
    nj_ctx_desc desc;
    (void)state;
    memset(&desc, 0, sizeof desc);
    desc.backend = NJ_BACKEND_HOST;
    assert_int_equal(nj_ctx_create(&host, &desc), NJ_OK);
    forward_plan = plan_of(forward_desc());
    backward_plan = plan_of(backward_desc());
    return 0;
}

static int close_host(void **state) {
    (void)state;
    nj_plan_destroy(forward_plan);
    nj_plan_destroy(backward_plan);
    nj_ctx_destroy(host);
    assert_int_equal(blocks_held, 0);
    return 0;
}

/* Operands lie in slots of one arena, which is poisoned before each call and compared after a
 * refusal. */
#define SLOT_BYTES 1024
#define SLOTS 12
#define POISON 0xa5

static _Alignas(256) unsigned char arena[SLOTS * SLOT_BYTES];
static _Alignas(256) unsigned char workspace[1 << 16];

static void *slot(int index) {
    return arena + index * SLOT_BYTES;
}

static nj_tensor packed_2d(void *data, int64_t rows, int64_t cols) {
    int64_t shape[2];
    shape[0] = rows;
    shape[1] = cols;
    return nj_packed(data, 2, shape);
}

static nj_tensor packed_1d(void *data, int64_t cols) {
    return nj_packed(data, 1, &cols);
}

/* All operands of a rows x cols problem, packed, each in its own slot, where 0 < bytes <=
 * SLOT_BYTES. */
static nj_args args_of(int64_t rows, int64_t cols) {
    nj_args args;
    args.x = nj_as_const(packed_2d(slot(0), rows, cols));
    args.dy = nj_as_const(packed_2d(slot(1), rows, cols));
    args.gamma = nj_as_const(packed_1d(slot(2), cols));
    args.beta = nj_as_const(packed_1d(slot(3), cols));
    args.mean = packed_2d(slot(4), rows, 1);
    args.rstd = packed_2d(slot(5), rows, 1);
    args.y = packed_2d(slot(6), rows, cols);
    args.dx = packed_2d(slot(7), rows, cols);
    args.dgamma = packed_1d(slot(8), cols);
    args.dbeta = packed_1d(slot(9), cols);
    return args;
}

static nj_args good_args(void) {
    return args_of(ROWS, COLS);
}

/* The call failed with this status, text and numbers. */
static void assert_failed_sized(nj_status got, nj_status status, uint64_t needed, uint64_t had,
                                const char *text) {
    nj_error_info info;
    assert_string_equal(nj_last_error(), text);
    assert_int_equal(got, status);
    nj_last_error_info(&info);
    assert_int_equal(info.status, status);
    assert_int_equal(info.driver_error, 0);
    assert_int_equal(info.needed, needed);
    assert_int_equal(info.got, had);
}

static void assert_failed(nj_status got, nj_status status, const char *text) {
    assert_failed_sized(got, status, 0, 0, text);
}

static void assert_arena_is_poisoned(void) {
    size_t i;
    for (i = 0; i < sizeof arena; i++)
        assert_int_equal(arena[i], POISON);
}

static int all_bytes_are_zero(const void *bytes, size_t size) {
    const unsigned char *p = (const unsigned char *)bytes;
    size_t i;
    for (i = 0; i < size; i++) {
        if (p[i]) return 0;
    }
    return 1;
}

/* can_implement, run and sku refuse the operands alike: same code, same numbers, same text behind
   the name of the call. Nothing is written; the sku is zeroed. */
static void refuses_sized(const nj_plan *plan, const nj_args *args, nj_status status,
                          uint64_t needed, uint64_t got, const char *rule, ...) {
    char body[512], text[600];
    va_list arguments;
    nj_sku sku;
    va_start(arguments, rule);
    vsnprintf(body, sizeof body, rule, arguments);
    va_end(arguments);
    memset(arena, POISON, sizeof arena);
    memset(&sku, POISON, sizeof sku);
    snprintf(text, sizeof text, "nj_plan_can_implement: %s", body);
    assert_failed_sized(nj_plan_can_implement(plan, args), status, needed, got, text);
    snprintf(text, sizeof text, "nj_plan_run: %s", body);
    assert_failed_sized(nj_plan_run(plan, args, workspace, sizeof workspace, NULL), status, needed,
                        got, text);
    snprintf(text, sizeof text, "nj_plan_sku: %s", body);
    assert_failed_sized(nj_plan_sku(plan, args, &sku), status, needed, got, text);
    assert_true(all_bytes_are_zero(&sku, sizeof sku));
    assert_arena_is_poisoned();
}

#define refuses(plan, args, status, ...) refuses_sized(plan, args, status, 0, 0, __VA_ARGS__)

/* can_implement, run and sku take the operands, and leave the last error alone. */
static void accepts(const nj_plan *plan, const nj_args *args) {
    nj_sku sku;
    char before[sizeof nji_last.text];
    strcpy(before, nj_last_error());
    memset(arena, 0, sizeof arena);
    if (nj_plan_can_implement(plan, args) != NJ_OK) fail_msg("%s", nj_last_error());
    assert_int_equal(nj_plan_run(plan, args, workspace, sizeof workspace, NULL), NJ_OK);
    assert_int_equal(nj_plan_sku(plan, args, &sku), NJ_OK);
    assert_string_equal(nj_last_error(), before);
}

static void select_refuses_sized(const nj_desc *desc, const nj_preference *pref, nj_status status,
                                 uint64_t needed, uint64_t got, const char *text) {
    int held = blocks_held;
    nj_plan *plan = forward_plan;
    assert_failed_sized(nj_plan_select(&plan, host, desc, pref), status, needed, got, text);
    assert_null(plan);
    assert_int_equal(blocks_held, held);
}

static void select_refuses(const nj_desc *desc, nj_status status, const char *text) {
    select_refuses_sized(desc, NULL, status, 0, 0, text);
}

static void select_accepts(const nj_desc *desc) {
    nj_plan_destroy(plan_of(*desc));
}

/* ---- descriptors ---------------------------------------------------------------------------- */

/* The shape checks are those of select and of nj_desc_*, which must leave their results alone. */
static void shape_refused(const nj_desc *desc, const char *rule) {
    char text[256];
    int64_t cols = 77, shape[NJ_MAX_RANK] = {77, 77, 77, 77, 77, 77, 77, 77};
    int32_t rank = 77;
    int axis;
    snprintf(text, sizeof text, "nj_plan_select: %s", rule);
    select_refuses(desc, NJ_INVALID_ARGUMENT, text);
    snprintf(text, sizeof text, "nj_desc_cols: %s", rule);
    assert_failed(nj_desc_cols(desc, &cols), NJ_INVALID_ARGUMENT, text);
    snprintf(text, sizeof text, "nj_desc_stat_shape: %s", rule);
    assert_failed(nj_desc_stat_shape(desc, &rank, shape), NJ_INVALID_ARGUMENT, text);
    snprintf(text, sizeof text, "nj_desc_param_shape: %s", rule);
    assert_failed(nj_desc_param_shape(desc, &rank, shape), NJ_INVALID_ARGUMENT, text);
    assert_int_equal(cols, 77);
    assert_int_equal(rank, 77);
    for (axis = 0; axis < NJ_MAX_RANK; axis++)
        assert_int_equal(shape[axis], 77);
}

static void descriptor_is_required(void **state) {
    (void)state;
    shape_refused(NULL, "desc = NULL: a descriptor is required");
}

static void rank_outside_1_to_8_is_refused(void **state) {
    nj_desc desc = forward_desc();
    (void)state;
    desc.rank = 0;
    shape_refused(&desc, "desc.rank = 0: a rank is 1 to 8");
    desc.rank = -1;
    shape_refused(&desc, "desc.rank = -1: a rank is 1 to 8");
    desc.rank = 9;
    shape_refused(&desc, "desc.rank = 9: a rank is 1 to 8");
}

static void unset_or_foreign_norm_axes_are_refused(void **state) {
    nj_desc desc = forward_desc();
    (void)state;
    desc.norm_axes = 0;
    shape_refused(&desc, "desc.norm_axes = 0: at least one axis must be normalized");
    desc.norm_axes = 1u << 2;
    shape_refused(&desc, "desc.norm_axes = 0x4: rank 2 has axes 0 to 1 only");
    desc.norm_axes = 0x80000002u;
    shape_refused(&desc, "desc.norm_axes = 0x80000002: rank 2 has axes 0 to 1 only");
}

static void negative_extent_is_refused(void **state) {
    nj_desc desc = forward_desc();
    (void)state;
    desc.shape[1] = -8;
    shape_refused(&desc, "desc.shape[1] = -8: an extent is 0 or more");
    desc.shape[1] = 8;
    desc.shape[0] = INT64_MIN;
    shape_refused(&desc, "desc.shape[0] = -9223372036854775808: an extent is 0 or more");
}

static void overflowing_shape_is_refused(void **state) {
    nj_desc desc = forward_desc();
    (void)state;
    desc.shape[0] = desc.shape[1] = (int64_t)1 << 32;
    shape_refused(&desc, "desc.shape[1] = 4294967296: the product of the extents overflows int64");
    desc.shape[1] = (int64_t)1 << 27; /* 2^59 elements of 8 bytes fit, 2^60 do not */
    select_accepts(&desc);
    desc.shape[1] *= 2;
    shape_refused(&desc,
                  "desc.shape: 1152921504606846976 elements: their bytes would overflow int64");
    /* no elements, but code that multiplies from one end would overflow before it meets the 0 */
    desc.rank = 3;
    desc.shape[0] = desc.shape[1] = (int64_t)1 << 40;
    desc.shape[2] = 0;
    shape_refused(&desc,
                  "desc.shape[1] = 1099511627776: the product of the extents overflows int64");
}

static void desc_queries_need_somewhere_to_write(void **state) {
    nj_desc desc = forward_desc();
    int64_t shape[NJ_MAX_RANK];
    int32_t rank;
    (void)state;
    assert_failed(nj_desc_cols(&desc, NULL), NJ_INVALID_ARGUMENT,
                  "nj_desc_cols: cols = NULL: nowhere to put it");
    assert_failed(nj_desc_stat_shape(&desc, NULL, shape), NJ_INVALID_ARGUMENT,
                  "nj_desc_stat_shape: rank = NULL: nowhere to put it");
    assert_failed(nj_desc_stat_shape(&desc, &rank, NULL), NJ_INVALID_ARGUMENT,
                  "nj_desc_stat_shape: shape = NULL: nowhere to put it");
    assert_failed(nj_desc_param_shape(&desc, NULL, shape), NJ_INVALID_ARGUMENT,
                  "nj_desc_param_shape: rank = NULL: nowhere to put it");
    assert_failed(nj_desc_param_shape(&desc, &rank, NULL), NJ_INVALID_ARGUMENT,
                  "nj_desc_param_shape: shape = NULL: nowhere to put it");
}

static void unset_or_unknown_op_is_refused(void **state) {
    nj_desc desc = forward_desc();
    (void)state;
    desc.op = NJ_OP_UNSET;
    select_refuses(&desc, NJ_INVALID_ARGUMENT,
                   "nj_plan_select: desc.op = 0: must be one of NJ_OP_*");
    desc.op = (nj_op)5;
    select_refuses(&desc, NJ_INVALID_ARGUMENT,
                   "nj_plan_select: desc.op = 5: must be one of NJ_OP_*");
}

static void rms_norm_is_unsupported(void **state) {
    nj_desc desc = forward_desc();
    (void)state;
    desc.op = NJ_OP_RMS_NORM_FORWARD;
    select_refuses(&desc, NJ_UNSUPPORTED,
                   "nj_plan_select: desc.op = 3: RMSNorm is not in this version");
    desc.op = NJ_OP_RMS_NORM_BACKWARD;
    select_refuses(&desc, NJ_UNSUPPORTED,
                   "nj_plan_select: desc.op = 4: RMSNorm is not in this version");
}

static void unset_or_unknown_types_are_refused(void **state) {
    nj_desc desc = forward_desc();
    (void)state;
    desc.dtype = NJ_DTYPE_UNSET;
    select_refuses(&desc, NJ_INVALID_ARGUMENT,
                   "nj_plan_select: desc.dtype = 0: must be NJ_F16, BF16, F32 or F64");
    desc.dtype = (nj_dtype)5;
    select_refuses(&desc, NJ_INVALID_ARGUMENT,
                   "nj_plan_select: desc.dtype = 5: must be NJ_F16, BF16, F32 or F64");
    desc = forward_desc();
    desc.param_dtype = (nj_dtype)6;
    select_refuses(
        &desc, NJ_INVALID_ARGUMENT,
        "nj_plan_select: desc.param_dtype = 6: must be NJ_F16, BF16, F32, F64 or 0 (dtype)");
    desc = forward_desc();
    desc.stat_dtype = (nj_dtype)7;
    select_refuses(
        &desc, NJ_INVALID_ARGUMENT,
        "nj_plan_select: desc.stat_dtype = 7: must be NJ_F16, BF16, F32, F64 or 0 (f32; f64 "
        "for f64)");
}

/* Of the 4 x 5 x 5 combinations those must be accepted that nj_desc's comment names, no others. */
static void type_combinations_are_those_documented(void **state) {
    int dtype, param, stat;
    (void)state;
    for (dtype = NJ_F16; dtype <= NJ_F64; dtype++) {
        for (param = NJ_DTYPE_UNSET; param <= NJ_F64; param++) {
            for (stat = NJ_DTYPE_UNSET; stat <= NJ_F64; stat++) {
                int param_is_wide = param == NJ_F64 && dtype != NJ_F64;
                int stat_is_good =
                    stat == NJ_DTYPE_UNSET || stat == dtype || (stat == NJ_F32 && dtype != NJ_F64);
                nj_desc desc = forward_desc();
                char text[160];
                desc.dtype = (nj_dtype)dtype;
                desc.param_dtype = (nj_dtype)param;
                desc.stat_dtype = (nj_dtype)stat;
                if (param_is_wide) {
                    select_refuses(&desc, NJ_UNSUPPORTED,
                                   "nj_plan_select: desc.param_dtype = NJ_F64: needs dtype NJ_F64");
                } else if (!stat_is_good) {
                    snprintf(text, sizeof text,
                             "nj_plan_select: desc.stat_dtype = %d: must be dtype (%d), or NJ_F32 "
                             "with a "
                             "narrower dtype",
                             stat, dtype);
                    select_refuses(&desc, NJ_UNSUPPORTED, text);
                } else {
                    select_accepts(&desc);
                }
            }
        }
    }
}

static void eps_of_a_forward_must_be_finite_and_not_negative(void **state) {
    nj_desc desc = forward_desc();
    (void)state;
    desc.eps = -1e-5;
    select_refuses(&desc, NJ_INVALID_ARGUMENT,
                   "nj_plan_select: desc.eps = -1e-05: must be finite and 0 or more");
    desc.eps = HUGE_VAL;
    select_refuses(&desc, NJ_INVALID_ARGUMENT,
                   "nj_plan_select: desc.eps = inf: must be finite and 0 or more");
    desc.eps = strtod("nan", NULL);
    select_refuses(&desc, NJ_INVALID_ARGUMENT,
                   "nj_plan_select: desc.eps = nan: must be finite and 0 or more");
    desc.eps = 0;
    select_accepts(&desc);
    desc.eps = DBL_MAX;
    select_accepts(&desc);
}

static void eps_of_a_backward_is_ignored(void **state) {
    nj_desc desc = backward_desc();
    (void)state;
    desc.eps = strtod("nan", NULL);
    select_accepts(&desc);
}

static void forward_with_gradients_is_refused(void **state) {
    nj_desc desc = forward_desc();
    (void)state;
    desc.grads = NJ_GRAD_DX;
    select_refuses(&desc, NJ_INVALID_PROBLEM,
                   "nj_plan_select: desc.grads = 0x1: a forward has no gradients");
    desc.grads = 0;
    desc.accumulate = NJ_GRAD_DBETA;
    select_refuses(&desc, NJ_INVALID_PROBLEM,
                   "nj_plan_select: desc.accumulate = 0x4: a forward has no gradients");
}

static void unknown_gradient_bits_are_refused(void **state) {
    nj_desc desc = backward_desc();
    (void)state;
    desc.grads = 8;
    select_refuses(&desc, NJ_INVALID_ARGUMENT,
                   "nj_plan_select: desc.grads = 0x8: only NJ_GRAD_* bits may be set");
    desc.grads = 0;
    desc.accumulate = 0x80000001u;
    select_refuses(&desc, NJ_INVALID_ARGUMENT,
                   "nj_plan_select: desc.accumulate = 0x80000001: only NJ_GRAD_* bits may be set");
}

static void gradients_of_absent_parameters_are_refused(void **state) {
    nj_desc desc = backward_desc();
    (void)state;
    desc.grads = ALL_GRADS;
    desc.has_gamma = 0;
    select_refuses(&desc, NJ_INVALID_PROBLEM,
                   "nj_plan_select: desc.grads = 0x7: dgamma needs has_gamma");
    desc.has_gamma = 1;
    desc.has_beta = 0;
    select_refuses(&desc, NJ_INVALID_PROBLEM,
                   "nj_plan_select: desc.grads = 0x7: dbeta needs has_beta");
}

static void accumulating_what_is_not_computed_is_refused(void **state) {
    nj_desc desc = backward_desc();
    (void)state;
    desc.grads = NJ_GRAD_DGAMMA;
    desc.accumulate = NJ_GRAD_DGAMMA | NJ_GRAD_DX;
    select_refuses(&desc, NJ_INVALID_PROBLEM,
                   "nj_plan_select: desc.accumulate = 0x3: not all in grads (0x2)");
    /* against the default, too, which without beta has no dbeta */
    desc.grads = 0;
    desc.has_beta = 0;
    desc.accumulate = NJ_GRAD_DBETA;
    select_refuses(&desc, NJ_INVALID_PROBLEM,
                   "nj_plan_select: desc.accumulate = 0x4: not all in grads (0x3)");
}

static void default_gradients_follow_the_parameters(void **state) {
    int has_gamma, has_beta;
    (void)state;
    for (has_gamma = 0; has_gamma <= 1; has_gamma++) {
        for (has_beta = 0; has_beta <= 1; has_beta++) {
            nj_desc desc = backward_desc();
            nj_plan *plan;
            nj_sku sku;
            desc.has_gamma = has_gamma * -3; /* any value but 0 is yes */
            desc.has_beta = has_beta;
            plan = plan_of(desc);
            assert_int_equal(nj_plan_sku(plan, NULL, &sku), NJ_OK);
            assert_int_equal(sku.grads, 1 + 2 * has_gamma + 4 * has_beta);
            assert_int_equal(sku.accumulate, 0);
            nj_plan_destroy(plan);
        }
    }
}

static void select_needs_out_and_ctx(void **state) {
    nj_desc desc = forward_desc();
    nj_plan *plan = forward_plan;
    (void)state;
    assert_failed(nj_plan_select(NULL, host, &desc, NULL), NJ_INVALID_ARGUMENT,
                  "nj_plan_select: out = NULL: nowhere to put the plan");
    assert_failed(nj_plan_select(&plan, NULL, &desc, NULL), NJ_INVALID_ARGUMENT,
                  "nj_plan_select: ctx = NULL: a ctx is required");
    assert_null(plan);
}

/* ---- preferences ---------------------------------------------------------------------------- */

static void preferring_an_unknown_backend_is_refused(void **state) {
    nj_desc desc = forward_desc();
    nj_preference pref;
    (void)state;
    memset(&pref, 0, sizeof pref);
    pref.prefer_backend = (nj_backend)3;
    select_refuses_sized(&desc, &pref, NJ_INVALID_ARGUMENT, 0, 0,
                         "nj_plan_select: pref.prefer_backend = 3: must be one of NJ_BACKEND_*");
}

static void preferring_cuda_on_a_host_ctx_is_unsupported(void **state) {
    nj_desc desc = forward_desc();
    nj_preference pref;
    (void)state;
    memset(&pref, 0, sizeof pref);
    pref.prefer_backend = NJ_BACKEND_CUDA;
    select_refuses_sized(&desc, &pref, NJ_UNSUPPORTED, 0, 0,
                         "nj_plan_select: pref.prefer_backend = CUDA: the ctx is a host ctx");
}

static void workspace_limit_that_cannot_be_met_is_unsupported(void **state) {
    nj_desc desc = desc_of(NJ_OP_LAYER_NORM_BACKWARD, NJ_F32, 4096, 256);
    nj_preference pref;
    nj_plan *plan = plan_of(desc);
    size_t needed = nj_plan_workspace_size(plan);
    char text[160];
    (void)state;
    nj_plan_destroy(plan);
    assert_true(needed > 1);
    memset(&pref, 0, sizeof pref);
    pref.max_workspace_bytes = needed - 1;
    snprintf(text, sizeof text,
             "nj_plan_select: pref.max_workspace_bytes = %zu: the host backend needs %zu bytes",
             needed - 1, needed);
    select_refuses_sized(&desc, &pref, NJ_UNSUPPORTED, needed, needed - 1, text);
    pref.max_workspace_bytes = needed;
    assert_int_equal(nj_plan_select(&plan, host, &desc, &pref), NJ_OK);
    assert_int_equal(nj_plan_workspace_size(plan), needed);
    nj_plan_destroy(plan);
}

static void demands_that_every_kernel_meets_are_accepted(void **state) {
    nj_desc desc = backward_desc();
    nj_preference pref;
    nj_precision precision;
    nj_plan *plan;
    (void)state;
    memset(&pref, 0, sizeof pref);
    pref.deterministic = pref.batch_invariant = pref.allow_arch_specific = 1;
    pref.prefer_backend = NJ_BACKEND_HOST;
    assert_int_equal(nj_plan_select(&plan, host, &desc, &pref), NJ_OK);
    assert_int_equal(nj_plan_precision(plan, &precision), NJ_OK);
    assert_int_equal(precision.deterministic, 1);
    assert_int_equal(precision.batch_invariant, 1);
    nj_plan_destroy(plan);
}

/* ---- operands: present, of the right shape --------------------------------------------------- */

/* nj_tensor and nj_const_tensor have the same fields, so that a table can name any operand. */
typedef struct operand {
    const char *name;
    size_t at; /* in nj_args */
    int32_t rank;
} operand;

#define OPERAND(field, rank)                                                                       \
    { #field, offsetof(nj_args, field), rank }

static const operand forward_operands[] = {OPERAND(y, 2),    OPERAND(x, 2),    OPERAND(gamma, 1),
                                           OPERAND(beta, 1), OPERAND(mean, 2), OPERAND(rstd, 2)};
static const operand backward_operands[] = {OPERAND(dx, 2),     OPERAND(dy, 2),   OPERAND(x, 2),
                                            OPERAND(mean, 2),   OPERAND(rstd, 2), OPERAND(gamma, 1),
                                            OPERAND(dgamma, 1), OPERAND(dbeta, 1)};

#define COUNT_OF(array) (sizeof(array) / sizeof(array)[0])

static nj_tensor *tensor_at(nj_args *args, const operand *which) {
    return (nj_tensor *)(void *)((char *)args + which->at);
}

/* Runs a check on each operand of the forward and of the backward, in a fresh set of arguments. */
typedef void (*operand_check)(const nj_plan *plan, nj_args *args, nj_tensor *tensor,
                              const operand *which);

static void for_each_operand(operand_check check) {
    size_t i;
    assert_int_equal(sizeof(nj_tensor), sizeof(nj_const_tensor));
    for (i = 0; i < COUNT_OF(forward_operands); i++) {
        nj_args args = good_args();
        check(forward_plan, &args, tensor_at(&args, &forward_operands[i]), &forward_operands[i]);
    }
    for (i = 0; i < COUNT_OF(backward_operands); i++) {
        nj_args args = good_args();
        check(backward_plan, &args, tensor_at(&args, &backward_operands[i]), &backward_operands[i]);
    }
}

/* A forward may do without its statistics. */
static int is_optional(const nj_plan *plan, const operand *which) {
    return plan == forward_plan && (!strcmp(which->name, "mean") || !strcmp(which->name, "rstd"));
}

static void check_missing(const nj_plan *plan, nj_args *args, nj_tensor *tensor,
                          const operand *which) {
    tensor->data = NULL;
    if (is_optional(plan, which)) {
        accepts(plan, args);
    } else {
        refuses(plan, args, NJ_INVALID_ARGUMENT, "args.%s.data = NULL: this plan needs the operand",
                which->name);
    }
    memset(tensor, 0, sizeof *tensor);
    if (is_optional(plan, which)) {
        accepts(plan, args);
    } else {
        refuses(plan, args, NJ_INVALID_ARGUMENT, "args.%s.data = NULL: this plan needs the operand",
                which->name);
    }
}

static void missing_operand_is_refused(void **state) {
    (void)state;
    for_each_operand(check_missing);
}

static void check_rank(const nj_plan *plan, nj_args *args, nj_tensor *tensor,
                       const operand *which) {
    static const int32_t wrong[] = {-1, 0, 3, 9, INT32_MAX};
    size_t i;
    for (i = 0; i < COUNT_OF(wrong); i++) {
        tensor->rank = wrong[i];
        refuses(plan, args, NJ_INVALID_ARGUMENT, "args.%s.rank = %d: this operand has rank %d",
                which->name, (int)wrong[i], (int)which->rank);
    }
}

static void wrong_rank_is_refused(void **state) {
    (void)state;
    for_each_operand(check_rank);
}

static void check_shape(const nj_plan *plan, nj_args *args, nj_tensor *tensor,
                        const operand *which) {
    int axis;
    for (axis = 0; axis < which->rank; axis++) {
        int64_t right = tensor->shape[axis], wrong;
        for (wrong = -1; wrong <= COLS + 1; wrong++) {
            if (wrong == right) continue;
            tensor->shape[axis] = wrong;
            refuses(plan, args, NJ_INVALID_ARGUMENT,
                    "args.%s.shape[%d] = %lld: the plan wants %lld", which->name, axis,
                    (long long)wrong, (long long)right);
        }
        tensor->shape[axis] = right;
    }
}

static void wrong_shape_is_refused(void **state) {
    (void)state;
    for_each_operand(check_shape);
}

static void check_count_and_offset(const nj_plan *plan, nj_args *args, nj_tensor *tensor,
                                   const operand *which) {
    tensor->count = -1;
    refuses(plan, args, NJ_INVALID_ARGUMENT, "args.%s.count = -1: a count is 0 (not known) or more",
            which->name);
    tensor->count = 0;
    tensor->offset = -1;
    refuses(plan, args, NJ_INVALID_ARGUMENT, "args.%s.offset = -1: an offset is 0 or more",
            which->name);
}

static void negative_count_or_offset_is_refused(void **state) {
    (void)state;
    for_each_operand(check_count_and_offset);
}

static void check_alignment(const nj_plan *plan, nj_args *args, nj_tensor *tensor,
                            const operand *which) {
    int shift;
    for (shift = 1; shift < 4; shift++) {
        nj_args moved = *args;
        nj_tensor *there = (nj_tensor *)(void *)((char *)&moved + which->at);
        there->data = (char *)tensor->data + shift;
        refuses(plan, &moved, NJ_MISALIGNED_OPERAND,
                "args.%s.data = %p: must be a multiple of the element size 4", which->name,
                there->data);
    }
    tensor->data = (char *)tensor->data + 4;
    accepts(plan, args);
}

static void address_that_the_type_forbids_is_refused(void **state) {
    (void)state;
    for_each_operand(check_alignment);
}

static void alignment_is_that_of_each_operands_own_type(void **state) {
    nj_desc desc = desc_of(NJ_OP_LAYER_NORM_FORWARD, NJ_BF16, ROWS, COLS);
    nj_plan *plan;
    nj_args args = good_args();
    (void)state;
    desc.param_dtype = NJ_F32;
    desc.stat_dtype = NJ_BF16;
    plan = plan_of(desc);
    args.x.data = (char *)slot(0) + 2;
    args.y.data = (char *)slot(6) + 6;
    args.mean.data = (char *)slot(4) + 2;
    accepts(plan, &args);
    args.gamma.data = (char *)slot(2) + 2;
    refuses(plan, &args, NJ_MISALIGNED_OPERAND,
            "args.gamma.data = %p: must be a multiple of the element size 4", args.gamma.data);
    nj_plan_destroy(plan);

    plan = plan_of(desc_of(NJ_OP_LAYER_NORM_FORWARD, NJ_F64, ROWS, COLS));
    args = good_args();
    args.x.data = (char *)slot(0) + 4;
    refuses(plan, &args, NJ_MISALIGNED_OPERAND,
            "args.x.data = %p: must be a multiple of the element size 8", args.x.data);
    nj_plan_destroy(plan);
}

static void run_needs_plan_and_args(void **state) {
    nj_args args = good_args();
    nj_sku sku;
    (void)state;
    refuses(NULL, &args, NJ_INVALID_ARGUMENT, "plan = NULL: a plan is required");
    assert_failed(nj_plan_can_implement(forward_plan, NULL), NJ_INVALID_ARGUMENT,
                  "nj_plan_can_implement: args = NULL: operands are required");
    assert_failed(nj_plan_run(forward_plan, NULL, NULL, 0, NULL), NJ_INVALID_ARGUMENT,
                  "nj_plan_run: args = NULL: operands are required");
    memset(&sku, POISON, sizeof sku);
    assert_failed(nj_plan_sku(NULL, NULL, &sku), NJ_INVALID_ARGUMENT,
                  "nj_plan_sku: plan = NULL: a plan is required");
    assert_true(all_bytes_are_zero(&sku, sizeof sku));
    assert_int_equal(nj_plan_workspace_size(NULL), 0);
    nj_plan_destroy(NULL);
}

static void operands_that_the_plan_does_not_use_are_not_looked_at(void **state) {
    nj_args args = good_args();
    nj_desc desc = backward_desc();
    nj_plan *plan;
    int i;
    (void)state;
    memset(&args.dy, POISON, sizeof args.dy);
    memset(&args.dx, POISON, sizeof args.dx);
    memset(&args.dgamma, POISON, sizeof args.dgamma);
    memset(&args.dbeta, POISON, sizeof args.dbeta);
    accepts(forward_plan, &args);

    args = good_args(); /* dbeta alone is a sum of dy */
    desc.grads = NJ_GRAD_DBETA;
    plan = plan_of(desc);
    memset(&args.x, POISON, sizeof args.x);
    memset(&args.gamma, POISON, sizeof args.gamma);
    memset(&args.beta, POISON, sizeof args.beta);
    memset(&args.mean, POISON, sizeof args.mean);
    memset(&args.rstd, POISON, sizeof args.rstd);
    memset(&args.y, POISON, sizeof args.y);
    memset(&args.dx, POISON, sizeof args.dx);
    memset(&args.dgamma, POISON, sizeof args.dgamma);
    accepts(plan, &args);
    for (i = 0; i < ROWS * COLS; i++)
        ((float *)slot(1))[i] = (float)(i / COLS);
    assert_int_equal(nj_plan_run(plan, &args, workspace, sizeof workspace, NULL), NJ_OK);
    for (i = 0; i < COLS; i++)
        assert_true(((float *)slot(9))[i] == 0 + 1 + 2 + 3);
    nj_plan_destroy(plan);
}

/* ---- operands: reach ------------------------------------------------------------------------ */

static void buffer_smaller_than_the_reach_is_refused(void **state) {
    nj_args args = good_args();
    (void)state;
    args.x.count = ROWS * COLS - 1;
    refuses_sized(forward_plan, &args, NJ_BUFFER_TOO_SMALL, 32, 31,
                  "args.x.count = 31: offset and strides need 32 elements");
    args.x.count = ROWS * COLS;
    args.x.offset = 1;
    refuses_sized(forward_plan, &args, NJ_BUFFER_TOO_SMALL, 33, 32,
                  "args.x.count = 32: offset and strides need 33 elements");
    args = good_args();
    args.y.stride[0] = 16; /* 32 elements, spread over 3 * 16 + 8 */
    refuses_sized(forward_plan, &args, NJ_BUFFER_TOO_SMALL, 56, 32,
                  "args.y.count = 32: offset and strides need 56 elements");
    args.y.count = 56;
    accepts(forward_plan, &args);
    args.y.count = 0; /* not known: not checked */
    accepts(forward_plan, &args);
}

static void broadcast_input_needs_one_element(void **state) {
    nj_args args = good_args();
    (void)state;
    args.dy.stride[0] = args.dy.stride[1] = 0;
    args.dy.count = 1;
    accepts(backward_plan, &args);
    args.dy.offset = 1;
    refuses_sized(backward_plan, &args, NJ_BUFFER_TOO_SMALL, 2, 1,
                  "args.dy.count = 1: offset and strides need 2 elements");
}

static void reach_below_the_buffers_start_is_refused(void **state) {
    nj_args args = good_args();
    (void)state;
    args.x.stride[0] = -COLS;
    refuses(forward_plan, &args, NJ_INVALID_ARGUMENT,
            "args.x: offset and strides reach element -24: the buffer starts at 0");
    args.x.offset = 23;
    refuses(forward_plan, &args, NJ_INVALID_ARGUMENT,
            "args.x: offset and strides reach element -1: the buffer starts at 0");
    args.x.offset = 24; /* the rows from the last to the first */
    accepts(forward_plan, &args);
    args.x.offset = 25;
    refuses_sized(forward_plan, &args, NJ_BUFFER_TOO_SMALL, 33, 32,
                  "args.x.count = 32: offset and strides need 33 elements");
}

static void overflowing_reach_is_refused(void **state) {
    nj_args args = good_args();
    (void)state;
    args.x.count = 0;
    args.x.stride[0] = INT64_MAX;
    refuses(forward_plan, &args, NJ_INVALID_ARGUMENT,
            "args.x.stride[0] = 9223372036854775807: the reach of the strides overflows int64");
    args.x.stride[0] = INT64_MIN;
    refuses(forward_plan, &args, NJ_INVALID_ARGUMENT,
            "args.x.stride[0] = -9223372036854775808: the reach of the strides overflows int64");
    args.x.stride[0] = COLS;
    args.x.offset = INT64_MAX;
    refuses(forward_plan, &args, NJ_INVALID_ARGUMENT,
            "args.x.stride[0] = 8: the reach of the strides overflows int64");
    args.x.offset = 0;
    args.x.stride[0] = (int64_t)1 << 60;
    refuses(
        forward_plan, &args, NJ_INVALID_ARGUMENT,
        "args.x: offset and strides reach element 3458764513820540935: no address is that high");
}

static void axes_of_extent_1_ignore_their_stride(void **state) {
    nj_plan *plan;
    nj_args args = good_args();
    (void)state;
    args.mean.stride[1] = -5;
    args.rstd.stride[1] = 0;
    accepts(forward_plan, &args);
    plan = plan_of(desc_of(NJ_OP_LAYER_NORM_FORWARD, NJ_F32, 1, COLS));
    args = args_of(1, COLS);
    args.x.stride[0] = INT64_MIN;
    args.y.stride[0] = INT64_MAX;
    args.mean.stride[0] = args.mean.stride[1] = INT64_MIN;
    accepts(plan, &args);
    nj_plan_destroy(plan);
}

/* ---- operands: outputs ---------------------------------------------------------------------- */

static void check_output_stride(const nj_plan *plan, nj_args *args, nj_tensor *tensor,
                                const operand *which) {
    static const int64_t wrong[] = {0, -1, -COLS};
    size_t i;
    int axis;
    int written = which->name[0] == 'd' ? strcmp(which->name, "dy") != 0
                                        : which->name[0] == 'y' || is_optional(plan, which);
    tensor->count = 0;
    tensor->offset = 7 * COLS; /* room for the columns at the stride of -COLS */
    for (axis = 0; axis < which->rank; axis++) {
        int64_t right = tensor->stride[axis];
        if (tensor->shape[axis] == 1) continue;
        for (i = 0; i < COUNT_OF(wrong); i++) {
            tensor->stride[axis] = wrong[i];
            if (written) {
                refuses(plan, args, NJ_INVALID_ARGUMENT,
                        "args.%s.stride[%d] = %lld: an output's stride must be positive",
                        which->name, axis, (long long)wrong[i]);
            } else {
                accepts(plan, args);
            }
        }
        tensor->stride[axis] = right;
    }
}

static void strides_of_outputs_must_be_positive_those_of_inputs_may_be_anything(void **state) {
    (void)state;
    for_each_operand(check_output_stride);
}

static void output_that_overlaps_itself_is_refused(void **state) {
    nj_args args = good_args();
    (void)state;
    args.y.stride[0] = COLS - 1;
    refuses(
        forward_plan, &args, NJ_INVALID_ARGUMENT,
        "args.y.stride[0] = 7: the smaller strides reach 8 elements: an output's stride must step "
        "past them");
    args.y.stride[0] = args.y.stride[1] = 1;
    refuses(
        forward_plan, &args, NJ_INVALID_ARGUMENT,
        "args.y.stride[1] = 1: the smaller strides reach 4 elements: an output's stride must step "
        "past them");
    args = good_args();
    args.x.stride[0] = COLS - 1; /* an input may */
    accepts(forward_plan, &args);
}

static void transposed_output_is_accepted(void **state) {
    nj_args args = good_args();
    (void)state;
    args.y.stride[0] = 1;
    args.y.stride[1] = ROWS;
    accepts(forward_plan, &args);
    args.y.stride[1] = ROWS - 1;
    refuses(
        forward_plan, &args, NJ_INVALID_ARGUMENT,
        "args.y.stride[1] = 3: the smaller strides reach 4 elements: an output's stride must step "
        "past them");
}

/* ---- overlap of operands -------------------------------------------------------------------- */

static void refuses_overlap(const nj_plan *plan, const nj_args *args, const char *output,
                            const char *other) {
    refuses(
        plan, args, NJ_INVALID_ARGUMENT,
        "args.%s overlaps args.%s: an output must be apart from every other operand, or the same "
        "view as an input of x's shape",
        output, other);
}

static void output_may_be_the_same_view_as_an_input_of_its_shape(void **state) {
    nj_args args = good_args();
    (void)state;
    args.y.data = slot(0);
    accepts(forward_plan, &args);
    args.dx.data = slot(0);
    accepts(backward_plan, &args);
    args.dx.data = slot(1);
    accepts(backward_plan, &args);
    args.x.data = slot(1); /* dx, dy and x all one */
    accepts(backward_plan, &args);
}

static void same_view_may_be_strided(void **state) {
    nj_args args = good_args();
    (void)state;
    args.x.stride[0] = args.y.stride[0] = 2 * COLS + 3;
    args.x.stride[1] = args.y.stride[1] = 2;
    args.x.offset = args.y.offset = 5;
    args.x.count = args.y.count = 0;
    args.y.data = slot(0);
    accepts(forward_plan, &args);
    args.y.offset = 7;
    refuses_overlap(forward_plan, &args, "y", "x");
}

static void output_that_meets_an_input_otherwise_is_refused(void **state) {
    nj_args args = good_args();
    (void)state;
    args.y.data = (char *)slot(0) + 4; /* shifted by one element */
    refuses_overlap(forward_plan, &args, "y", "x");
    args.y = packed_2d(slot(0), ROWS, COLS);
    args.y.offset = COLS; /* by one row */
    args.y.count = 0;
    refuses_overlap(forward_plan, &args, "y", "x");
    args.y.offset = ROWS * COLS - 1; /* the last element of x alone */
    refuses_overlap(forward_plan, &args, "y", "x");
    args.y.offset = ROWS * COLS;
    accepts(forward_plan, &args);
    args.y.offset = 0;
    args.y.stride[0] = 1; /* the same elements in another order */
    args.y.stride[1] = ROWS;
    refuses_overlap(forward_plan, &args, "y", "x");
    /* the same elements, but not by the same data and offset */
    args = good_args();
    args.x.count = args.y.count = 0;
    args.x.offset = COLS;
    args.y.data = (char *)slot(0) + COLS * 4;
    refuses_overlap(forward_plan, &args, "y", "x");
}

static void same_view_of_another_kind_is_refused(void **state) {
    nj_args args = good_args();
    nj_plan *plan;
    (void)state;
    args.dgamma.data = slot(2);
    refuses_overlap(backward_plan, &args, "dgamma", "gamma");
    /* one column: a statistic has x's very shape and strides */
    plan = plan_of(desc_of(NJ_OP_LAYER_NORM_FORWARD, NJ_F32, ROWS, 1));
    args = args_of(ROWS, 1);
    args.mean.data = slot(0);
    refuses_overlap(plan, &args, "mean", "x");
    args = args_of(ROWS, 1);
    args.y.data = slot(4);
    refuses_overlap(plan, &args, "y", "mean");
    nj_plan_destroy(plan);
}

static void outputs_may_not_meet_each_other(void **state) {
    nj_args args = good_args();
    (void)state;
    args.rstd.data = slot(4);
    refuses_overlap(forward_plan, &args, "mean", "rstd");
    args = good_args();
    args.mean.data = (char *)slot(6) + 4 * (ROWS * COLS - 1);
    refuses_overlap(forward_plan, &args, "y", "mean");
    args = good_args();
    args.dbeta.data = slot(8);
    refuses_overlap(backward_plan, &args, "dgamma", "dbeta");
    args = good_args();
    args.dbeta.data = (char *)slot(7) + 4 * COLS;
    refuses_overlap(backward_plan, &args, "dx", "dbeta");
}

/* Every output laid on every operand that the plan uses, one element into it. */
static void every_pair_with_an_output_is_checked(void **state) {
    size_t i, j;
    (void)state;
    for (i = 0; i < COUNT_OF(backward_operands); i++) {
        for (j = 0; j < COUNT_OF(backward_operands); j++) {
            const operand *a = &backward_operands[i], *b = &backward_operands[j];
            nj_args args = good_args();
            int a_is_output = a->name[0] == 'd' && strcmp(a->name, "dy") != 0;
            int b_is_output = b->name[0] == 'd' && strcmp(b->name, "dy") != 0;
            if (i == j || !a_is_output) continue;
            tensor_at(&args, a)->data = (char *)tensor_at(&args, b)->data + 4;
            /* of two outputs the one that nj_plan_run lists first is named first */
            if (b_is_output && j < i) {
                refuses_overlap(backward_plan, &args, b->name, a->name);
            } else {
                refuses_overlap(backward_plan, &args, a->name, b->name);
            }
        }
    }
}

static void inputs_may_overlap(void **state) {
    nj_args args = good_args();
    (void)state;
    args.gamma.data = args.beta.data = slot(0);
    accepts(forward_plan, &args);
    args = good_args();
    args.dy.data = (char *)slot(0) + 4;
    args.mean.data = args.rstd.data = slot(0);
    accepts(backward_plan, &args);
}

static void interleaved_but_disjoint_views_are_accepted(void **state) {
    nj_args args = good_args();
    (void)state;
    /* even and odd elements of one buffer */
    args.x.stride[0] = args.y.stride[0] = 2 * COLS;
    args.x.stride[1] = args.y.stride[1] = 2;
    args.x.count = args.y.count = 2 * ROWS * COLS;
    args.y.data = slot(0);
    args.y.offset = 1;
    accepts(forward_plan, &args);
    args.y.offset = 2;
    args.y.count = 0;
    refuses_overlap(forward_plan, &args, "y", "x");
    /* left and right half of each row */
    args = good_args();
    args.x.stride[0] = args.y.stride[0] = 2 * COLS;
    args.x.count = args.y.count = 2 * ROWS * COLS;
    args.y.data = slot(0);
    args.y.offset = COLS;
    accepts(forward_plan, &args);
    args.y.offset = COLS - 1;
    refuses_overlap(forward_plan, &args, "y", "x");
    /* rows in turn, and the statistics in the padding behind each row */
    args = good_args();
    args.x.stride[0] = args.y.stride[0] = 2 * COLS + 4;
    args.x.count = args.y.count = 0;
    args.y.data = args.mean.data = args.rstd.data = slot(0);
    args.y.offset = COLS + 1;
    args.mean.count = args.rstd.count = 0;
    args.mean.stride[0] = args.rstd.stride[0] = 2 * COLS + 4;
    args.mean.offset = COLS;
    args.rstd.offset = 2 * COLS + 2;
    accepts(forward_plan, &args);
    args.mean.offset = COLS + 1;
    refuses_overlap(forward_plan, &args, "y", "mean");
}

static void views_of_types_of_other_sizes_meet_by_bytes(void **state) {
    nj_desc desc = desc_of(NJ_OP_LAYER_NORM_FORWARD, NJ_F16, ROWS, COLS);
    nj_plan *plan;
    nj_args args = good_args();
    (void)state;
    plan = plan_of(desc);
    /* each row: 16 bytes of x, 4 bytes of mean, 12 bytes free */
    args.x.stride[0] = 16;
    args.x.count = 0;
    args.mean.data = slot(0);
    args.mean.stride[0] = 8;
    args.mean.count = 0;
    args.mean.offset = 4;
    accepts(plan, &args);
    args.mean.offset = 3; /* bytes 12 to 15: x's last two columns */
    refuses_overlap(plan, &args, "mean", "x");
    nj_plan_destroy(plan);
}

/* ---- problems without elements --------------------------------------------------------------- */

static void empty_operands_need_no_data_and_no_sound_strides(void **state) {
    nj_plan *plan = plan_of(desc_of(NJ_OP_LAYER_NORM_BACKWARD, NJ_F32, 0, COLS));
    nj_args args = args_of(0, COLS);
    (void)state;
    args.x.data = NULL;
    args.x.offset = INT64_MAX;
    args.dy.data = (char *)slot(1) + 1;
    args.dy.stride[0] = args.dy.stride[1] = INT64_MAX;
    args.dx.stride[0] = 0;
    args.mean.data = args.rstd.data = NULL;
    accepts(plan, &args);
    args.dgamma.data = NULL; /* has elements all the same, which become 0 */
    refuses(plan, &args, NJ_INVALID_ARGUMENT,
            "args.dgamma.data = NULL: this plan needs the operand");
    args = args_of(0, COLS);
    args.dy.shape[0] = 1; /* the shape counts, empty or not */
    refuses(plan, &args, NJ_INVALID_ARGUMENT, "args.dy.shape[0] = 1: the plan wants 0");
    nj_plan_destroy(plan);

    plan = plan_of(desc_of(NJ_OP_LAYER_NORM_FORWARD, NJ_F32, ROWS, 0));
    args = args_of(ROWS, 0);
    args.x.data = args.gamma.data = args.beta.data = args.y.data = NULL;
    accepts(plan, &args);
    args.rstd.stride[0] = 0;
    refuses(plan, &args, NJ_INVALID_ARGUMENT,
            "args.rstd.stride[0] = 0: an output's stride must be positive");
    nj_plan_destroy(plan);
}

static void empty_operands_overlap_nothing(void **state) {
    nj_plan *plan = plan_of(desc_of(NJ_OP_LAYER_NORM_BACKWARD, NJ_F32, 0, COLS));
    nj_args args = args_of(0, COLS);
    (void)state;
    args.x.data = args.dx.data = args.dgamma.data;
    accepts(plan, &args);
    nj_plan_destroy(plan);
}

/* ---- workspace ------------------------------------------------------------------------------ */

/* run refuses the workspace, and writes nothing. Copies of a plan stand for one that needs 1024
   bytes and for one on the GPU, where a refusal comes before anything that needs a device. */
static void run_refuses_workspace(const nj_plan *plan, const nj_args *args, void *there,
                                  size_t size, nj_status status, uint64_t needed, uint64_t got,
                                  const char *rule, ...) {
    char body[256], text[300];
    va_list arguments;
    va_start(arguments, rule);
    vsnprintf(body, sizeof body, rule, arguments);
    va_end(arguments);
    memset(arena, POISON, sizeof arena);
    snprintf(text, sizeof text, "nj_plan_run: %s", body);
    assert_failed_sized(nj_plan_run(plan, args, there, size, NULL), status, needed, got, text);
    assert_arena_is_poisoned();
}

static void workspace_must_be_there_large_enough_and_aligned(void **state) {
    nj_plan plan = *backward_plan;
    nj_args args = good_args();
    (void)state;
    plan.workspace_bytes = 1024;
    run_refuses_workspace(&plan, &args, NULL, 1024, NJ_INVALID_ARGUMENT, 0, 0,
                          "workspace = NULL: the plan needs 1024 bytes");
    run_refuses_workspace(&plan, &args, workspace, 1023, NJ_WORKSPACE_TOO_SMALL, 1024, 1023,
                          "workspace_size = 1023: the plan needs 1024 bytes");
    run_refuses_workspace(&plan, &args, workspace, 0, NJ_WORKSPACE_TOO_SMALL, 1024, 0,
                          "workspace_size = 0: the plan needs 1024 bytes");
    run_refuses_workspace(&plan, &args, workspace + 8, 2048, NJ_MISALIGNED_OPERAND, 0, 0,
                          "workspace = %p: must be a multiple of 16 bytes",
                          (void *)(workspace + 8));
}

static void workspace_may_not_overlap_an_operand(void **state) {
    nj_plan plan = *backward_plan;
    nj_args args = good_args();
    (void)state;
    plan.workspace_bytes = SLOT_BYTES;
    run_refuses_workspace(&plan, &args, slot(2), SLOT_BYTES, NJ_INVALID_ARGUMENT, 0, 0,
                          "workspace overlaps args.gamma: it must be apart");
    run_refuses_workspace(&plan, &args, (char *)slot(9) + 16, SLOT_BYTES, NJ_INVALID_ARGUMENT, 0, 0,
                          "workspace overlaps args.dbeta: it must be apart");
    /* up to the byte before dx, with slot 6 free in a backward */
    assert_int_equal(nj_plan_run(&plan, &args, slot(6), SLOT_BYTES, NULL), NJ_OK);
    plan.workspace_bytes = SLOT_BYTES + 1;
    run_refuses_workspace(&plan, &args, slot(6), SLOT_BYTES + 1, NJ_INVALID_ARGUMENT, 0, 0,
                          "workspace overlaps args.dx: it must be apart");
}

static void operands_are_checked_before_the_workspace(void **state) {
    nj_plan plan = *backward_plan;
    nj_args args = good_args();
    (void)state;
    plan.workspace_bytes = 1024;
    args.dx.rank = 1;
    run_refuses_workspace(&plan, &args, NULL, 0, NJ_INVALID_ARGUMENT, 0, 0,
                          "args.dx.rank = 1: this operand has rank 2");
}

static void plan_that_needs_no_workspace_takes_none(void **state) {
    nj_args args = good_args();
    (void)state;
    assert_int_equal(nj_plan_workspace_size(forward_plan), 0);
    assert_int_equal(nj_plan_run(forward_plan, &args, NULL, 0, NULL), NJ_OK);
    assert_int_equal(nj_plan_run(forward_plan, &args, slot(0), 1, NULL), NJ_OK);
}

/* ---- queries -------------------------------------------------------------------------------- */

static void sku_and_precision_need_somewhere_to_write(void **state) {
    nj_precision precision;
    (void)state;
    assert_failed(nj_plan_sku(forward_plan, NULL, NULL), NJ_INVALID_ARGUMENT,
                  "nj_plan_sku: out = NULL: nowhere to put the sku");
    assert_failed(nj_plan_precision(forward_plan, NULL), NJ_INVALID_ARGUMENT,
                  "nj_plan_precision: out = NULL: nowhere to put it");
    memset(&precision, POISON, sizeof precision);
    assert_failed(nj_plan_precision(NULL, &precision), NJ_INVALID_ARGUMENT,
                  "nj_plan_precision: plan = NULL: a plan is required");
    assert_true(all_bytes_are_zero(&precision, sizeof precision));
}

static void sku_says_what_was_asked_for(void **state) {
    nj_desc desc = desc_of(NJ_OP_LAYER_NORM_BACKWARD, NJ_BF16, ROWS, COLS);
    nj_args args = good_args();
    nj_plan *plan;
    nj_sku sku;
    (void)state;
    desc.param_dtype = NJ_F32;
    desc.grads = NJ_GRAD_DX | NJ_GRAD_DGAMMA;
    desc.accumulate = NJ_GRAD_DGAMMA;
    plan = plan_of(desc);
    assert_int_equal(nj_plan_sku(plan, NULL, &sku), NJ_OK);
    assert_int_equal(sku.op, NJ_OP_LAYER_NORM_BACKWARD);
    assert_int_equal(sku.dtype, NJ_BF16);
    assert_int_equal(sku.param_dtype, NJ_F32);
    assert_int_equal(sku.stat_dtype, NJ_F32);
    assert_int_equal(sku.layout, NJ_LAYOUT_PACKED);
    assert_int_equal(sku.backend, NJ_BACKEND_HOST);
    assert_int_equal(sku.source, NJ_SOURCE_HOST);
    assert_int_equal(sku.arch, 0);
    assert_int_equal(sku.math, NJ_F32);
    assert_int_equal(sku.grads, NJ_GRAD_DX | NJ_GRAD_DGAMMA);
    assert_int_equal(sku.accumulate, NJ_GRAD_DGAMMA);
    assert_int_equal(sku.threads, 0);
    args.x.count = args.dy.count = args.dx.count = 0;
    args.dy.stride[0] = COLS + 2;
    assert_int_equal(nj_plan_sku(plan, &args, &sku), NJ_OK);
    assert_int_equal(sku.layout, NJ_LAYOUT_PADDED_ROWS);
    args.dy.stride[0] = 2 * COLS;
    args.dy.stride[1] = 2;
    assert_int_equal(nj_plan_sku(plan, &args, &sku), NJ_OK);
    assert_int_equal(sku.layout, NJ_LAYOUT_STRIDED);
    nj_plan_destroy(plan);
}

static void packed_sku_is_that_of_packed_operands(void **state) {
    static const nj_op ops[] = {NJ_OP_LAYER_NORM_FORWARD, NJ_OP_LAYER_NORM_BACKWARD};
    size_t i;
    (void)state;
    for (i = 0; i < COUNT_OF(ops); i++) {
        nj_plan *plan = plan_of(desc_of(ops[i], NJ_F32, ROWS, COLS));
        nj_args args = good_args();
        nj_sku packed, same;
        memset(&packed, 0x5a, sizeof packed);
        memset(&same, POISON, sizeof same);
        assert_int_equal(nj_plan_sku(plan, NULL, &packed), NJ_OK);
        assert_int_equal(nj_plan_sku(plan, &args, &same), NJ_OK);
        assert_memory_equal(&packed, &same, sizeof packed);
        nj_plan_destroy(plan);
    }
}

static void math_is_f64_for_f64_alone(void **state) {
    int dtype;
    (void)state;
    for (dtype = NJ_F16; dtype <= NJ_F64; dtype++) {
        nj_plan *plan = plan_of(desc_of(NJ_OP_LAYER_NORM_FORWARD, (nj_dtype)dtype, ROWS, COLS));
        int expected = dtype == NJ_F64 ? NJ_F64 : NJ_F32;
        nj_precision precision;
        nj_sku sku;
        assert_int_equal(nj_plan_precision(plan, &precision), NJ_OK);
        assert_int_equal(nj_plan_sku(plan, NULL, &sku), NJ_OK);
        assert_int_equal(precision.math, expected);
        assert_int_equal(precision.accumulator, expected);
        assert_int_equal(sku.math, expected);
        assert_int_equal(sku.stat_dtype, expected);
        nj_plan_destroy(plan);
    }
}

static void shapes_of_statistics_and_parameters_follow_the_axes(void **state) {
    nj_desc desc = forward_desc();
    int64_t shape[NJ_MAX_RANK], cols;
    int32_t rank;
    (void)state;
    desc.rank = 4;
    desc.shape[0] = 2;
    desc.shape[1] = 3;
    desc.shape[2] = 5;
    desc.shape[3] = 7;
    desc.norm_axes = 1u << 1 | 1u << 3;
    assert_int_equal(nj_desc_cols(&desc, &cols), NJ_OK);
    assert_int_equal(cols, 21);
    assert_int_equal(nj_desc_stat_shape(&desc, &rank, shape), NJ_OK);
    assert_int_equal(rank, 4);
    assert_int_equal(shape[0], 2);
    assert_int_equal(shape[1], 1);
    assert_int_equal(shape[2], 5);
    assert_int_equal(shape[3], 1);
    assert_int_equal(nj_desc_param_shape(&desc, &rank, shape), NJ_OK);
    assert_int_equal(rank, 2);
    assert_int_equal(shape[0], 3);
    assert_int_equal(shape[1], 7);
}

/* ---- constructors --------------------------------------------------------------------------- */

static void packed_views_are_row_major(void **state) {
    static const int64_t shape[] = {3, 1, 5, 7};
    static const int64_t stride[] = {35, 35, 7, 1};
    nj_tensor view = nj_packed(arena, 4, shape);
    nj_const_tensor same = nj_packed_const(arena, 4, shape), other = nj_as_const(view);
    (void)state;
    assert_ptr_equal(view.data, arena);
    assert_int_equal(view.offset, 0);
    assert_int_equal(view.count, 105);
    assert_int_equal(view.rank, 4);
    assert_memory_equal(view.shape, shape, sizeof shape);
    assert_memory_equal(view.stride, stride, sizeof stride);
    assert_ptr_equal(same.data, arena);
    assert_int_equal(same.count, 105);
    assert_memory_equal(same.shape, view.shape, sizeof view.shape);
    assert_memory_equal(same.stride, view.stride, sizeof view.stride);
    assert_ptr_equal(other.data, arena);
    assert_int_equal(other.count, 105);
    assert_int_equal(other.rank, 4);
    assert_memory_equal(other.shape, view.shape, sizeof view.shape);
    assert_memory_equal(other.stride, view.stride, sizeof view.stride);
}

static void packed_view_of_a_bad_shape_is_one_that_the_checks_refuse(void **state) {
    static const int64_t overflowing[] = {(int64_t)1 << 62, 2}, negative[] = {4, -8};
    static const int64_t nine[9] = {1, 1, 1, 1, 1, 1, 1, 1, 1};
    nj_tensor bad[5];
    size_t i;
    (void)state;
    bad[0] = nj_packed(arena, 0, nine);
    bad[1] = nj_packed(arena, 9, nine);
    bad[2] = nj_packed(arena, 2, NULL);
    bad[3] = nj_packed(arena, 2, overflowing);
    bad[4] = nj_packed(arena, 2, negative);
    for (i = 0; i < COUNT_OF(bad); i++) {
        nj_args args = good_args();
        args.y = bad[i];
        refuses(forward_plan, &args, NJ_INVALID_ARGUMENT,
                "args.y.data = NULL: this plan needs the operand");
    }
}

static void dtype_sizes_are_right(void **state) {
    (void)state;
    assert_int_equal(nj_dtype_size(NJ_F16), 2);
    assert_int_equal(nj_dtype_size(NJ_BF16), 2);
    assert_int_equal(nj_dtype_size(NJ_F32), 4);
    assert_int_equal(nj_dtype_size(NJ_F64), 8);
    assert_int_equal(nj_dtype_size(NJ_DTYPE_UNSET), 0);
    assert_int_equal(nj_dtype_size((nj_dtype)5), 0);
    assert_int_equal(nj_dtype_size((nj_dtype)-1), 0);
}

/* ---- the cache folder ----------------------------------------------------------------------- */

static void default_cache_dir_follows_the_environment(void **state) {
    char folder[64];
    (void)state;
    assert_int_equal(setenv("HOME", "/home/someone", 1), 0);
    assert_int_equal(setenv("XDG_CACHE_HOME", "/var/caches", 1), 0);
    assert_int_equal(nj_default_cache_dir(folder, sizeof folder), NJ_OK);
    assert_string_equal(folder, "/var/caches/normjit");
    assert_int_equal(setenv("XDG_CACHE_HOME", "", 1), 0); /* empty is unset */
    assert_int_equal(nj_default_cache_dir(folder, sizeof folder), NJ_OK);
    assert_string_equal(folder, "/home/someone/.cache/normjit");
    assert_int_equal(unsetenv("XDG_CACHE_HOME"), 0);
    assert_int_equal(nj_default_cache_dir(folder, sizeof folder), NJ_OK);
    assert_string_equal(folder, "/home/someone/.cache/normjit");
    assert_int_equal(unsetenv("HOME"), 0);
    assert_failed(nj_default_cache_dir(folder, sizeof folder), NJ_UNSUPPORTED,
                  "nj_default_cache_dir: no variable names a folder: set XDG_CACHE_HOME");
    assert_string_equal(folder, "");
}

static void default_cache_dir_needs_room(void **state) {
    char folder[8] = "before";
    char exact[sizeof "/c/normjit"];
    (void)state;
    assert_int_equal(setenv("XDG_CACHE_HOME", "/c", 1), 0);
    assert_failed(nj_default_cache_dir(NULL, 8), NJ_INVALID_ARGUMENT,
                  "nj_default_cache_dir: buffer = NULL: nowhere to put it");
    assert_failed(nj_default_cache_dir(folder, 0), NJ_INVALID_ARGUMENT,
                  "nj_default_cache_dir: size = 0: no room for the end of text");
    assert_string_equal(folder, "before");
    assert_failed_sized(nj_default_cache_dir(folder, sizeof folder), NJ_BUFFER_TOO_SMALL, 11, 8,
                        "nj_default_cache_dir: size = 8: needs 11 bytes");
    assert_string_equal(folder, "");
    assert_int_equal(nj_default_cache_dir(exact, sizeof exact), NJ_OK);
    assert_string_equal(exact, "/c/normjit");
}

/* ---- out of memory -------------------------------------------------------------------------- */

/* A call that allocates n times fails n times, once for each of them, then succeeds. */
static void ctx_create_survives_each_failing_allocation(void **state) {
    int nth, held = blocks_held;
    (void)state;
    for (nth = 1;; nth++) {
        nj_ctx_desc desc;
        nj_ctx *ctx = host;
        nj_status status;
        memset(&desc, 0, sizeof desc);
        desc.backend = NJ_BACKEND_HOST;
        fail_at = nth;
        status = nj_ctx_create(&ctx, &desc);
        if (status == NJ_OK) {
            nj_ctx_destroy(ctx);
            break;
        }
        assert_int_equal(status, NJ_OUT_OF_MEMORY);
        assert_null(ctx);
        assert_int_equal(blocks_held, held);
    }
    fail_at = 0;
    assert_true(nth > 1);
    assert_int_equal(blocks_held, held);
}

static void select_survives_each_failing_allocation(void **state) {
    nj_desc desc = backward_desc();
    int nth, held = blocks_held;
    (void)state;
    for (nth = 1;; nth++) {
        nj_plan *plan = backward_plan;
        nj_status status;
        fail_at = nth;
        status = nj_plan_select(&plan, host, &desc, NULL);
        if (status == NJ_OK) {
            nj_plan_destroy(plan);
            break;
        }
        assert_int_equal(status, NJ_OUT_OF_MEMORY);
        assert_null(plan);
        assert_int_equal(blocks_held, held);
    }
    fail_at = 0;
    assert_true(nth > 1);
    assert_int_equal(blocks_held, held);
}

static void out_of_memory_says_how_much_was_asked_for(void **state) {
    nj_desc desc = forward_desc();
    nj_plan *plan;
    char text[128];
    (void)state;
    fail_at = 1;
    snprintf(text, sizeof text, "nj_plan_select: %zu bytes of host memory could not be had",
             sizeof(nj_plan));
    assert_failed_sized(nj_plan_select(&plan, host, &desc, NULL), NJ_OUT_OF_MEMORY, sizeof(nj_plan),
                        0, text);
}

/* run and the queries take no memory, whatever the operands. */
static void run_does_not_allocate(void **state) {
    nj_args args = good_args();
    nj_sku sku;
    (void)state;
    fail_at = 1;
    args.dx.data = slot(1);
    assert_int_equal(nj_plan_run(forward_plan, &args, NULL, 0, NULL), NJ_OK);
    assert_int_equal(nj_plan_run(backward_plan, &args, workspace, sizeof workspace, NULL), NJ_OK);
    assert_int_equal(nj_plan_can_implement(backward_plan, &args), NJ_OK);
    assert_int_equal(nj_plan_sku(backward_plan, &args, &sku), NJ_OK);
    assert_int_equal(fail_at, 1);
    fail_at = 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(descriptor_is_required),
        cmocka_unit_test(rank_outside_1_to_8_is_refused),
        cmocka_unit_test(unset_or_foreign_norm_axes_are_refused),
        cmocka_unit_test(negative_extent_is_refused),
        cmocka_unit_test(overflowing_shape_is_refused),
        cmocka_unit_test(desc_queries_need_somewhere_to_write),
        cmocka_unit_test(unset_or_unknown_op_is_refused),
        cmocka_unit_test(rms_norm_is_unsupported),
        cmocka_unit_test(unset_or_unknown_types_are_refused),
        cmocka_unit_test(type_combinations_are_those_documented),
        cmocka_unit_test(eps_of_a_forward_must_be_finite_and_not_negative),
        cmocka_unit_test(eps_of_a_backward_is_ignored),
        cmocka_unit_test(forward_with_gradients_is_refused),
        cmocka_unit_test(unknown_gradient_bits_are_refused),
        cmocka_unit_test(gradients_of_absent_parameters_are_refused),
        cmocka_unit_test(accumulating_what_is_not_computed_is_refused),
        cmocka_unit_test(default_gradients_follow_the_parameters),
        cmocka_unit_test(select_needs_out_and_ctx),
        cmocka_unit_test(preferring_an_unknown_backend_is_refused),
        cmocka_unit_test(preferring_cuda_on_a_host_ctx_is_unsupported),
        cmocka_unit_test(workspace_limit_that_cannot_be_met_is_unsupported),
        cmocka_unit_test(demands_that_every_kernel_meets_are_accepted),
        cmocka_unit_test(missing_operand_is_refused),
        cmocka_unit_test(wrong_rank_is_refused),
        cmocka_unit_test(wrong_shape_is_refused),
        cmocka_unit_test(negative_count_or_offset_is_refused),
        cmocka_unit_test(address_that_the_type_forbids_is_refused),
        cmocka_unit_test(alignment_is_that_of_each_operands_own_type),
        cmocka_unit_test(run_needs_plan_and_args),
        cmocka_unit_test(operands_that_the_plan_does_not_use_are_not_looked_at),
        cmocka_unit_test(buffer_smaller_than_the_reach_is_refused),
        cmocka_unit_test(broadcast_input_needs_one_element),
        cmocka_unit_test(reach_below_the_buffers_start_is_refused),
        cmocka_unit_test(overflowing_reach_is_refused),
        cmocka_unit_test(axes_of_extent_1_ignore_their_stride),
        cmocka_unit_test(strides_of_outputs_must_be_positive_those_of_inputs_may_be_anything),
        cmocka_unit_test(output_that_overlaps_itself_is_refused),
        cmocka_unit_test(transposed_output_is_accepted),
        cmocka_unit_test(output_may_be_the_same_view_as_an_input_of_its_shape),
        cmocka_unit_test(same_view_may_be_strided),
        cmocka_unit_test(output_that_meets_an_input_otherwise_is_refused),
        cmocka_unit_test(same_view_of_another_kind_is_refused),
        cmocka_unit_test(outputs_may_not_meet_each_other),
        cmocka_unit_test(every_pair_with_an_output_is_checked),
        cmocka_unit_test(inputs_may_overlap),
        cmocka_unit_test(interleaved_but_disjoint_views_are_accepted),
        cmocka_unit_test(views_of_types_of_other_sizes_meet_by_bytes),
        cmocka_unit_test(empty_operands_need_no_data_and_no_sound_strides),
        cmocka_unit_test(empty_operands_overlap_nothing),
        cmocka_unit_test(workspace_must_be_there_large_enough_and_aligned),
        cmocka_unit_test(workspace_may_not_overlap_an_operand),
        cmocka_unit_test(operands_are_checked_before_the_workspace),
        cmocka_unit_test(plan_that_needs_no_workspace_takes_none),
        cmocka_unit_test(sku_and_precision_need_somewhere_to_write),
        cmocka_unit_test(sku_says_what_was_asked_for),
        cmocka_unit_test(packed_sku_is_that_of_packed_operands),
        cmocka_unit_test(math_is_f64_for_f64_alone),
        cmocka_unit_test(shapes_of_statistics_and_parameters_follow_the_axes),
        cmocka_unit_test(packed_views_are_row_major),
        cmocka_unit_test(packed_view_of_a_bad_shape_is_one_that_the_checks_refuse),
        cmocka_unit_test(dtype_sizes_are_right),
        cmocka_unit_test(default_cache_dir_follows_the_environment),
        cmocka_unit_test(default_cache_dir_needs_room),
        cmocka_unit_test(ctx_create_survives_each_failing_allocation),
        cmocka_unit_test(select_survives_each_failing_allocation),
        cmocka_unit_test(out_of_memory_says_how_much_was_asked_for),
        cmocka_unit_test(run_does_not_allocate),
    };
    return cmocka_run_group_tests_name("checks", tests, open_host, close_host);
}
