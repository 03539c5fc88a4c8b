/* Contexts and what belongs to no plan: lifetimes, the fall to the host, errors by thread,
 * versions. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pthread.h>

#define NORMJIT_IMPLEMENTATION
#include "normjit.h"

#define NO_DRIVER "/nonexistent/libcuda.so.1"

static nj_ctx_desc ctx_desc(nj_backend backend) {
    nj_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.backend = backend;
    return desc;
}

static nj_ctx *host_ctx(void) {
    nj_ctx_desc desc = ctx_desc(NJ_BACKEND_HOST);
    nj_ctx *ctx;
    assert_int_equal(nj_ctx_create(&ctx, &desc), NJ_OK);
    return ctx;
}

/* A forward of 2 x 3 without parameters. */
static nj_plan *small_plan(nj_ctx *ctx) {
    nj_desc desc;
    nj_plan *plan;
    memset(&desc, 0, sizeof desc);
    desc.op = NJ_OP_LAYER_NORM_FORWARD;
    desc.dtype = NJ_F32;
    desc.rank = 2;
    desc.shape[0] = 2;
    desc.shape[1] = 3;
    desc.norm_axes = 1u << 1;
    assert_int_equal(nj_plan_select(&plan, ctx, &desc, NULL), NJ_OK);
    return plan;
}

static void assert_small_plan_runs(const nj_plan *plan) {
    static const int64_t shape[] = {2, 3};
    float x[6] = {1, 2, 3, 4, 5, 6}, y[6];
    nj_args args;
    memset(&args, 0, sizeof args);
    args.x = nj_packed_const(x, 2, shape);
    args.y = nj_packed(y, 2, shape);
    assert_int_equal(nj_plan_run(plan, &args, NULL, 0, NULL), NJ_OK);
}

static void assert_failed(nj_status got, nj_status status, const char *text) {
    nj_error_info info;
    assert_string_equal(nj_last_error(), text);
    assert_int_equal(got, status);
    nj_last_error_info(&info);
    assert_int_equal(info.status, status);
}

/* What the log callback was told. */
typedef struct heard {
    int lines;
    nj_log_level level[8];
    char text[8][1100];
} heard;

static void hear(void *user, nj_log_level level, const char *text) {
    heard *log = (heard *)user;
    assert_true(log->lines < 8);
    log->level[log->lines] = level;
    snprintf(log->text[log->lines++], sizeof log->text[0], "%s", text);
}

/* ---- lifetimes ------------------------------------------------------------------------------ */

static void plan_outlives_the_callers_ctx(void **state) {
    nj_ctx *ctx = host_ctx();
    nj_plan *first = small_plan(ctx), *second = small_plan(ctx);
    (void)state;
    nj_ctx_destroy(ctx);
    assert_small_plan_runs(first);
    nj_plan_destroy(first);
    assert_small_plan_runs(second);
    nj_plan_destroy(second); /* the ctx goes here: sanitizers see to it that it does, and once */
}

static void ctx_outlives_its_plans(void **state) {
    nj_ctx *ctx = host_ctx();
    nj_plan *plan = small_plan(ctx);
    (void)state;
    nj_plan_destroy(plan);
    plan = small_plan(ctx);
    assert_small_plan_runs(plan);
    nj_plan_destroy(plan);
    nj_ctx_destroy(ctx);
}

static void two_ctx_are_apart(void **state) {
    nj_ctx *a = host_ctx(), *b = host_ctx();
    nj_plan *of_a = small_plan(a), *of_b = small_plan(b);
    (void)state;
    assert_ptr_not_equal(a, b);
    nj_ctx_destroy(a);
    nj_plan_destroy(of_a);
    assert_small_plan_runs(of_b);
    nj_ctx_destroy(b);
    nj_plan_destroy(of_b);
}

static void null_is_harmless(void **state) {
    nj_cache_stats stats;
    size_t i;
    (void)state;
    nj_ctx_destroy(NULL);
    nj_plan_destroy(NULL);
    nj_last_error_info(NULL);
    assert_int_equal(nj_ctx_backend(NULL), NJ_BACKEND_AUTO);
    assert_string_equal(nj_ctx_info(NULL), "");
    assert_failed(nj_ctx_create(NULL, NULL), NJ_INVALID_ARGUMENT,
                  "nj_ctx_create: out = NULL: nowhere to put the ctx");
    memset(&stats, 0xa5, sizeof stats);
    assert_failed(nj_ctx_cache_stats(NULL, &stats), NJ_INVALID_ARGUMENT,
                  "nj_ctx_cache_stats: ctx = NULL: a ctx is required");
    for (i = 0; i < sizeof stats; i++)
        assert_int_equal(((unsigned char *)&stats)[i], 0);
}

/* ---- descriptor ----------------------------------------------------------------------------- */

static void create_refuses(const nj_ctx_desc *desc, const char *text) {
    nj_ctx *ctx = (nj_ctx *)&ctx; /* anything but NULL */
    assert_failed(nj_ctx_create(&ctx, desc), NJ_INVALID_ARGUMENT, text);
    assert_null(ctx);
}

static void malformed_ctx_desc_is_refused(void **state) {
    nj_ctx_desc desc = ctx_desc(NJ_BACKEND_HOST);
    (void)state;
    desc.device = -1;
    create_refuses(&desc, "nj_ctx_create: desc.device = -1: a device ordinal is 0 or more");
    desc = ctx_desc(NJ_BACKEND_HOST);
    desc.flags = NJ_CTX_CHECK_POINTERS | 4;
    create_refuses(&desc, "nj_ctx_create: desc.flags = 0x5: only NJ_CTX_* bits may be set");
    desc = ctx_desc((nj_backend)3);
    create_refuses(&desc, "nj_ctx_create: desc.backend = 3: must be one of NJ_BACKEND_*");
}

/* ---- without a driver ----------------------------------------------------------------------- */

static void auto_without_a_driver_gives_a_host_ctx_and_logs_why(void **state) {
    nj_ctx_desc desc = ctx_desc(NJ_BACKEND_AUTO);
    static heard log;
    nj_error_info before, after;
    nj_ctx *ctx;
    (void)state;
    assert_failed(nj_ctx_cache_stats(NULL, NULL), NJ_INVALID_ARGUMENT,
                  "nj_ctx_cache_stats: out = NULL: nowhere to put the counts");
    nj_last_error_info(&before);
    memset(&log, 0, sizeof log);
    desc.driver_path = NO_DRIVER;
    desc.log = hear;
    desc.log_user = &log;
    assert_int_equal(nj_ctx_create(&ctx, &desc), NJ_OK);
    assert_int_equal(nj_ctx_backend(ctx), NJ_BACKEND_HOST);
    assert_int_equal(log.lines, 2);
    assert_ptr_equal(strstr(log.text[0], "using the host backend: nj_ctx_create: "), log.text[0]);
    assert_non_null(strstr(log.text[0], NO_DRIVER));
    assert_int_equal(log.level[0], NJ_LOG_INFO);
    assert_string_equal(log.text[1], nj_ctx_info(ctx));
    /* what failed before is still the last error */
    assert_string_equal(nj_last_error(),
                        "nj_ctx_cache_stats: out = NULL: nowhere to put the counts");
    nj_last_error_info(&after);
    assert_memory_equal(&before, &after, sizeof before);
    nj_ctx_destroy(ctx);
}

static void cuda_without_a_driver_is_library_not_found(void **state) {
    nj_ctx_desc desc = ctx_desc(NJ_BACKEND_CUDA);
    nj_ctx *ctx = (nj_ctx *)&desc;
    nj_error_info info;
    (void)state;
    desc.driver_path = NO_DRIVER;
    assert_int_equal(nj_ctx_create(&ctx, &desc), NJ_LIBRARY_NOT_FOUND);
    assert_null(ctx);
    assert_ptr_equal(strstr(nj_last_error(), "nj_ctx_create: "), nj_last_error());
    assert_non_null(strstr(nj_last_error(), NO_DRIVER));
    nj_last_error_info(&info);
    assert_int_equal(info.status, NJ_LIBRARY_NOT_FOUND);
}

static void host_ctx_asks_for_no_driver(void **state) {
    nj_ctx_desc desc = ctx_desc(NJ_BACKEND_HOST);
    static heard log;
    nj_ctx *ctx;
    (void)state;
    memset(&log, 0, sizeof log);
    desc.driver_path = NO_DRIVER;
    desc.log = hear;
    desc.log_user = &log;
    assert_int_equal(nj_ctx_create(&ctx, &desc), NJ_OK);
    assert_int_equal(log.lines, 1);
    assert_string_equal(log.text[0], nj_ctx_info(ctx));
    assert_true(strlen(nj_ctx_info(ctx)) > 0);
    assert_null(strchr(nj_ctx_info(ctx), '\n'));
    nj_ctx_destroy(ctx);
}

static void host_ctx_counts_no_cache_traffic(void **state) {
    nj_ctx *ctx = host_ctx();
    nj_plan *plan = small_plan(ctx);
    nj_cache_stats stats, zero;
    (void)state;
    memset(&stats, 0xa5, sizeof stats);
    memset(&zero, 0, sizeof zero);
    assert_int_equal(nj_ctx_cache_stats(ctx, &stats), NJ_OK);
    assert_memory_equal(&stats, &zero, sizeof stats);
    nj_plan_destroy(plan);
    nj_ctx_destroy(ctx);
}

/* ---- the sku is comparable bytes ------------------------------------------------------------- */

static void equal_plans_have_equal_sku_bytes(void **state) {
    nj_ctx *ctx = host_ctx();
    nj_plan *a = small_plan(ctx), *b = small_plan(ctx);
    nj_sku of_a, of_b;
    (void)state;
    memset(&of_a, 0x00, sizeof of_a);
    memset(&of_b, 0xff, sizeof of_b);
    assert_int_equal(nj_plan_sku(a, NULL, &of_a), NJ_OK);
    assert_int_equal(nj_plan_sku(b, NULL, &of_b), NJ_OK);
    assert_memory_equal(&of_a, &of_b, sizeof of_a);
    assert_true(of_a.kernel[0] != 0);
    assert_true(memchr(of_a.kernel, 0, sizeof of_a.kernel) != NULL);
    nj_plan_destroy(a);
    nj_plan_destroy(b);
    nj_ctx_destroy(ctx);
}

/* ---- errors --------------------------------------------------------------------------------- */

static void every_status_has_its_name(void **state) {
    (void)state;
    assert_string_equal(nj_status_string(NJ_OK), "NJ_OK");
    assert_string_equal(nj_status_string(NJ_INVALID_ARGUMENT), "NJ_INVALID_ARGUMENT");
    assert_string_equal(nj_status_string(NJ_INVALID_PROBLEM), "NJ_INVALID_PROBLEM");
    assert_string_equal(nj_status_string(NJ_UNSUPPORTED), "NJ_UNSUPPORTED");
    assert_string_equal(nj_status_string(NJ_MISALIGNED_OPERAND), "NJ_MISALIGNED_OPERAND");
    assert_string_equal(nj_status_string(NJ_BUFFER_TOO_SMALL), "NJ_BUFFER_TOO_SMALL");
    assert_string_equal(nj_status_string(NJ_WORKSPACE_TOO_SMALL), "NJ_WORKSPACE_TOO_SMALL");
    assert_string_equal(nj_status_string(NJ_OUT_OF_MEMORY), "NJ_OUT_OF_MEMORY");
    assert_string_equal(nj_status_string(NJ_LIBRARY_NOT_FOUND), "NJ_LIBRARY_NOT_FOUND");
    assert_string_equal(nj_status_string(NJ_COMPILE_FAILED), "NJ_COMPILE_FAILED");
    assert_string_equal(nj_status_string(NJ_DRIVER), "NJ_DRIVER");
    assert_string_equal(nj_status_string((nj_status)(NJ_DRIVER + 1)), "unknown nj_status");
    assert_string_equal(nj_status_string((nj_status)-1), "unknown nj_status");
}

static void *fail_in_thread(void *arg) {
    nj_error_info info;
    (void)arg;
    /* nothing has failed in this thread yet */
    if (nj_last_error()[0] != 0) return "the thread began with another's error";
    nj_last_error_info(&info);
    if (info.status != NJ_OK) return "the thread began with another's status";
    if (nj_ctx_create(NULL, NULL) != NJ_INVALID_ARGUMENT) return "nj_ctx_create took NULL";
    if (strcmp(nj_last_error(), "nj_ctx_create: out = NULL: nowhere to put the ctx") != 0) {
        return "the thread's own error is not its last";
    }
    return NULL;
}

static void last_error_belongs_to_its_thread(void **state) {
    static const char mine[] = "nj_plan_precision: out = NULL: nowhere to put it";
    pthread_t thread;
    void *complaint;
    (void)state;
    assert_failed(nj_plan_precision(NULL, NULL), NJ_INVALID_ARGUMENT, mine);
    assert_int_equal(pthread_create(&thread, NULL, fail_in_thread, NULL), 0);
    assert_int_equal(pthread_join(thread, &complaint), 0);
    if (complaint) fail_msg("%s", (const char *)complaint);
    assert_string_equal(nj_last_error(), mine);
}

/* Plans of one ctx made, run and destroyed by many threads while the caller lets go of the ctx. */
static void *use_ctx(void *arg) {
    nj_ctx *ctx = (nj_ctx *)arg;
    int i;
    for (i = 0; i < 200; i++) {
        nj_plan *plan = small_plan(ctx);
        assert_small_plan_runs(plan);
        nj_plan_destroy(plan);
    }
    return NULL;
}

static void one_ctx_serves_many_threads(void **state) {
    nj_ctx *ctx = host_ctx();
    pthread_t thread[4];
    int i;
    (void)state;
    for (i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&thread[i], NULL, use_ctx, ctx), 0);
    for (i = 0; i < 4; i++)
        assert_int_equal(pthread_join(thread[i], NULL), 0);
    assert_int_equal(ctx->references, 1);
    nj_ctx_destroy(ctx);
}

/* ---- version -------------------------------------------------------------------------------- */

static void versions_agree(void **state) {
    char text[32];
    (void)state;
    snprintf(text, sizeof text, "%d.%d.%d", NJ_VERSION_MAJOR, NJ_VERSION_MINOR, NJ_VERSION_PATCH);
    assert_string_equal(NJ_VERSION_STRING, text);
    assert_string_equal(NJ_MESON_VERSION, text);
    assert_int_equal(nj_version(), NJ_VERSION);
    assert_int_equal(nj_version(),
                     NJ_VERSION_MAJOR * 10000 + NJ_VERSION_MINOR * 100 + NJ_VERSION_PATCH);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plan_outlives_the_callers_ctx),
        cmocka_unit_test(ctx_outlives_its_plans),
        cmocka_unit_test(two_ctx_are_apart),
        cmocka_unit_test(null_is_harmless),
        cmocka_unit_test(malformed_ctx_desc_is_refused),
        cmocka_unit_test(auto_without_a_driver_gives_a_host_ctx_and_logs_why),
        cmocka_unit_test(cuda_without_a_driver_is_library_not_found),
        cmocka_unit_test(host_ctx_asks_for_no_driver),
        cmocka_unit_test(host_ctx_counts_no_cache_traffic),
        cmocka_unit_test(equal_plans_have_equal_sku_bytes),
        cmocka_unit_test(every_status_has_its_name),
        cmocka_unit_test(last_error_belongs_to_its_thread),
        cmocka_unit_test(one_ctx_serves_many_threads),
        cmocka_unit_test(versions_agree),
    };
    return cmocka_run_group_tests_name("ctx", tests, NULL, NULL);
}
