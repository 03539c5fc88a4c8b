/* The whole CUDA path on a driver and an NVRTC that compute nothing but check and count every call:
   contexts, selection, caches, launches, and every failure on the way. */
#define _XOPEN_SOURCE 700 /* setenv, mkdtemp, nftw */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <dlfcn.h>
#include <ftw.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

/* The allocator fails at the call numbered fail_at (1 = the next; 0 = never) and counts what is
   held. */
static int fail_at, blocks_held;

static void *counted_malloc(size_t bytes) {
    void *block;
    if (fail_at > 0 && --fail_at == 0) return NULL;
    block = malloc(bytes);
    if (block) __atomic_add_fetch(&blocks_held, 1, __ATOMIC_RELAXED);
    return block;
}

static void counted_free(void *block) {
    if (block) __atomic_sub_fetch(&blocks_held, 1, __ATOMIC_RELAXED);
    free(block);
}

#define NJ_MALLOC(bytes) counted_malloc(bytes)
#define NJ_FREE(pointer) counted_free(pointer)
#define NORMJIT_IMPLEMENTATION
#include "normjit.h"

#define COUNT_OF(array) (sizeof(array) / sizeof(array)[0])
#define ALL_GRADS (NJ_GRAD_DX | NJ_GRAD_DGAMMA | NJ_GRAD_DBETA)

/* ---- the fakes' own functions --------------------------------------------------------------- */

static struct {
    int (*count)(const char *function);
    int (*live_modules)(void);
    int (*live_events)(void);
    void *(*timed_stream)(void);
    int (*live_contexts)(void);
    int (*pushed)(void);
    void *(*own_context)(int device);
    int (*register_memory)(const void *pointer, size_t bytes, int device);
    int (*launch_shape)(int back, unsigned out[12]);
    const char *(*launch_name)(int back);
    void *(*launch_stream)(int back);
    const void *(*launch_problem)(int back);
    void (*reset)(void);
    int (*push)(void *context);
    int (*pop)(void **context);
    int (*current)(void **context);
    int (*init)(unsigned flags);
    int (*nvrtc_compiles)(void);
    int (*nvrtc_live_programs)(void);
    const char *(*nvrtc_last_options)(void);
    void (*nvrtc_reset)(void);
} fake;

static void find(void *library, const char *name, void *function) {
    void *symbol = dlsym(library, name);
    if (!symbol) fail_msg("the fake lacks %s", name);
    memcpy(function, &symbol, sizeof symbol);
}

static int open_fakes(void **state) {
    void *cuda = dlopen(NJ_FAKE_CUDA, RTLD_NOW), *nvrtc = dlopen(NJ_FAKE_NVRTC, RTLD_NOW);
    (void)state;
    if (!cuda || !nvrtc) fail_msg("%s", dlerror());
    find(cuda, "fake_cuda_count", &fake.count);
    find(cuda, "fake_cuda_live_modules", &fake.live_modules);
    find(cuda, "fake_cuda_live_events", &fake.live_events);
    find(cuda, "fake_cuda_timed_stream", &fake.timed_stream);
    find(cuda, "fake_cuda_live_contexts", &fake.live_contexts);
    find(cuda, "fake_cuda_pushed", &fake.pushed);
    find(cuda, "fake_cuda_own_context", &fake.own_context);
    find(cuda, "fake_cuda_register", &fake.register_memory);
    find(cuda, "fake_cuda_launch_shape", &fake.launch_shape);
    find(cuda, "fake_cuda_launch_name", &fake.launch_name);
    find(cuda, "fake_cuda_launch_stream", &fake.launch_stream);
    find(cuda, "fake_cuda_launch_problem", &fake.launch_problem);
    find(cuda, "fake_cuda_reset", &fake.reset);
    find(cuda, "cuCtxPushCurrent_v2", &fake.push);
    find(cuda, "cuCtxPopCurrent_v2", &fake.pop);
    find(cuda, "cuCtxGetCurrent", &fake.current);
    find(cuda, "cuInit", &fake.init);
    find(nvrtc, "fake_nvrtc_compiles", &fake.nvrtc_compiles);
    find(nvrtc, "fake_nvrtc_live_programs", &fake.nvrtc_live_programs);
    find(nvrtc, "fake_nvrtc_last_options", &fake.nvrtc_last_options);
    find(nvrtc, "fake_nvrtc_reset", &fake.nvrtc_reset);
    return 0;
}

static void set(const char *variable, const char *value) {
    assert_int_equal(setenv(variable, value, 1), 0);
}

/* What was held before the test: 0, but after a test that failed. */
static int modules_before, contexts_before, programs_before, blocks_before;

static int set_up(void **state) {
    static const char *const variables[] = {
        "NJ_FAKE_FAIL",      "NJ_FAKE_DEVICES",    "NJ_FAKE_VERSION",     "NJ_FAKE_CC",
        "NJ_FAKE_CAPTURING", "NJ_FAKE_NVRTC_FAIL", "NJ_FAKE_NVRTC_ARCHS", "NJ_FAKE_NVRTC_LOG",
        "NJ_FAKE_MS"};
    (void)state;
    for (size_t i = 0; i < COUNT_OF(variables); i++)
        unsetenv(variables[i]);
    fail_at = 0;
    fake.reset();
    fake.nvrtc_reset();
    while (fake.pushed() > 0)
        fake.pop(NULL);
    modules_before = fake.live_modules();
    contexts_before = fake.live_contexts();
    programs_before = fake.nvrtc_live_programs();
    blocks_before = blocks_held;
    return 0;
}

/* Nothing is left behind: no module, context, program, block, and no context on the stack. */
static void assert_all_released(void) {
    assert_int_equal(fake.live_modules(), modules_before);
    assert_int_equal(fake.live_events(), 0);
    assert_int_equal(fake.live_contexts(), contexts_before);
    assert_int_equal(fake.pushed(), 0);
    assert_int_equal(fake.nvrtc_live_programs(), programs_before);
    assert_int_equal(blocks_held, blocks_before);
}

static int tear_down(void **state) {
    (void)state;
    assert_all_released();
    return 0;
}

/* ---- what every test uses ------------------------------------------------------------------- */

#define ROWS 1000
#define COLS 768

static nj_ctx_desc cuda_desc(void) {
    nj_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.backend = NJ_BACKEND_CUDA;
    desc.driver_path = NJ_FAKE_CUDA;
    desc.nvrtc_path = NJ_FAKE_NVRTC;
    return desc;
}

static nj_ctx *ctx_of(const nj_ctx_desc *desc) {
    nj_ctx *ctx;
    if (nj_ctx_create(&ctx, desc) != NJ_OK) fail_msg("%s", nj_last_error());
    assert_int_equal(nj_ctx_backend(ctx), NJ_BACKEND_CUDA);
    return ctx;
}

static nj_ctx *cuda_ctx(void) {
    nj_ctx_desc desc = cuda_desc();
    return ctx_of(&desc);
}

static nj_desc desc_of(nj_op op, int64_t rows, int64_t cols) {
    nj_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.op = op;
    desc.dtype = NJ_BF16;
    desc.rank = 2;
    desc.shape[0] = rows;
    desc.shape[1] = cols;
    desc.norm_axes = 1u << 1;
    desc.has_gamma = desc.has_beta = 1;
    return desc;
}

static nj_desc forward_desc(void) {
    return desc_of(NJ_OP_LAYER_NORM_FORWARD, ROWS, COLS);
}

static nj_desc backward_desc(void) {
    return desc_of(NJ_OP_LAYER_NORM_BACKWARD, ROWS, COLS);
}

static nj_plan *plan_of(nj_ctx *ctx, nj_desc desc) {
    nj_plan *plan;
    if (nj_plan_select(&plan, ctx, &desc, NULL) != NJ_OK) fail_msg("%s", nj_last_error());
    return plan;
}

/* Addresses that the driver checks and nobody follows, far apart, as cuMemAlloc aligns them. */
#define MEMORY_BYTES ((uintptr_t)1 << 32)

static void *memory(int index) {
    return (void *)((uintptr_t)(index + 1) * MEMORY_BYTES);
}

#define WORKSPACE memory(20)

static nj_args args_of(const nj_desc *desc) {
    int64_t stat[NJ_MAX_RANK], param[NJ_MAX_RANK];
    int32_t stat_rank = 0, param_rank = 0;
    nj_args args;
    assert_int_equal(nj_desc_stat_shape(desc, &stat_rank, stat), NJ_OK);
    assert_int_equal(nj_desc_param_shape(desc, &param_rank, param), NJ_OK);
    args.x = nj_packed_const(memory(0), desc->rank, desc->shape);
    args.dy = nj_packed_const(memory(1), desc->rank, desc->shape);
    args.gamma = nj_packed_const(memory(2), param_rank, param);
    args.beta = nj_packed_const(memory(3), param_rank, param);
    args.mean = nj_packed(memory(4), stat_rank, stat);
    args.rstd = nj_packed(memory(5), stat_rank, stat);
    args.y = nj_packed(memory(6), desc->rank, desc->shape);
    args.dx = nj_packed(memory(7), desc->rank, desc->shape);
    args.dgamma = nj_packed(memory(8), param_rank, param);
    args.dbeta = nj_packed(memory(9), param_rank, param);
    return args;
}

static nj_status run(const nj_plan *plan, const nj_args *args) {
    return nj_plan_run(plan, args, WORKSPACE, nj_plan_workspace_size(plan), NULL);
}

static void assert_runs(const nj_plan *plan, const nj_desc *desc) {
    nj_args args = args_of(desc);
    if (run(plan, &args) != NJ_OK) fail_msg("%s", nj_last_error());
}

static int launches(void) {
    return fake.count("cuLaunchKernel") + fake.count("cuLaunchKernelEx");
}

static void assert_failed_by(nj_status got, nj_status status, int driver_error, const char *text) {
    nj_error_info info;
    assert_string_equal(nj_last_error(), text);
    assert_int_equal(got, status);
    nj_last_error_info(&info);
    assert_int_equal(info.status, status);
    assert_int_equal(info.driver_error, driver_error);
}

static void create_fails(const nj_ctx_desc *desc, nj_status status, int driver_error,
                         const char *text) {
    nj_ctx *ctx = (nj_ctx *)&ctx; /* anything but NULL */
    assert_failed_by(nj_ctx_create(&ctx, desc), status, driver_error, text);
    assert_null(ctx);
    assert_all_released();
}

static void select_fails(nj_ctx *ctx, nj_desc desc, nj_status status, int driver_error,
                         const char *text) {
    nj_plan *plan = (nj_plan *)&plan;
    assert_failed_by(nj_plan_select(&plan, ctx, &desc, NULL), status, driver_error, text);
    assert_null(plan);
    assert_int_equal(fake.pushed(), 0);
}

/* What the log callback was told, all in one. */
static char heard[4096];

static void hear(void *user, nj_log_level level, const char *text) {
    size_t used = strlen(heard);
    (void)user;
    snprintf(heard + used, sizeof heard - used, "%s%s\n",
             level == NJ_LOG_WARNING ? "warning: " : "", text);
}

/* ---- making a ctx --------------------------------------------------------------------------- */

static void info_names_device_driver_and_nvrtc(void **state) {
    nj_ctx *ctx = cuda_ctx();
    (void)state;
    assert_string_equal(nj_ctx_info(ctx), "CUDA device 0: Fake GPU 0 (sm_90, 132 multiprocessors), "
                                          "driver 13.0, NVRTC 13.0");
    nj_ctx_destroy(ctx);
}

static void auto_takes_the_gpu(void **state) {
    nj_ctx_desc desc = cuda_desc();
    nj_ctx *ctx;
    (void)state;
    desc.backend = NJ_BACKEND_AUTO;
    ctx = ctx_of(&desc);
    nj_ctx_destroy(ctx);
}

static void no_device_is_unsupported(void **state) {
    nj_ctx_desc desc = cuda_desc();
    (void)state;
    set("NJ_FAKE_DEVICES", "0");
    create_fails(&desc, NJ_UNSUPPORTED, 0, "nj_ctx_create: no CUDA device");
}

static void device_that_is_not_there_is_unsupported(void **state) {
    nj_ctx_desc desc = cuda_desc();
    (void)state;
    desc.device = 1;
    create_fails(&desc, NJ_UNSUPPORTED, 0,
                 "nj_ctx_create: desc.device = 1: the driver sees 1 CUDA device(s)");
}

static void old_driver_is_unsupported(void **state) {
    nj_ctx_desc desc = cuda_desc();
    (void)state;
    set("NJ_FAKE_VERSION", "11030");
    create_fails(
        &desc, NJ_UNSUPPORTED, 0,
        "nj_ctx_create: the driver is for CUDA 11.3: one for CUDA 11.4 or newer is needed");
}

static void old_device_is_unsupported(void **state) {
    nj_ctx_desc desc = cuda_desc();
    (void)state;
    set("NJ_FAKE_CC", "70");
    create_fails(&desc, NJ_UNSUPPORTED, 0,
                 "nj_ctx_create: desc.device = 0: Fake GPU 0 is sm_70: sm_75 or later is needed");
}

static void auto_falls_to_the_host_where_cuda_fails(void **state) {
    static const char *const faults[][3] = {
        {"NJ_FAKE_DEVICES", "0", "nj_ctx_create: no CUDA device"},
        {"NJ_FAKE_CC", "61",
         "nj_ctx_create: desc.device = 0: Fake GPU 0 is sm_61: sm_75 or later is needed"},
        {"NJ_FAKE_FAIL", "cuDevicePrimaryCtxRetain=2",
         "nj_ctx_create: cuDevicePrimaryCtxRetain failed: CUDA_ERROR_OUT_OF_MEMORY (2): out of "
         "memory"}};
    size_t i;
    (void)state;
    for (i = 0; i < COUNT_OF(faults); i++) {
        nj_ctx_desc desc = cuda_desc();
        nj_desc problem = forward_desc();
        char expected[1024];
        nj_ctx *ctx;
        set_up(state);
        set(faults[i][0], faults[i][1]);
        desc.backend = NJ_BACKEND_AUTO;
        desc.log = hear;
        heard[0] = 0;
        assert_int_equal(nj_ctx_create(&ctx, &desc), NJ_OK);
        assert_int_equal(nj_ctx_backend(ctx), NJ_BACKEND_HOST);
        snprintf(expected, sizeof expected, "using the host backend: %s\n%s\n", faults[i][2],
                 nj_ctx_info(ctx));
        assert_string_equal(heard, expected);
        nj_plan_destroy(plan_of(ctx, problem));
        nj_ctx_destroy(ctx);
        assert_all_released();
    }
}

static void nvrtc_that_was_named_must_be_there(void **state) {
    nj_ctx_desc desc = cuda_desc();
    nj_ctx *ctx = (nj_ctx *)&desc;
    (void)state;
    desc.nvrtc_path = "/nonexistent/libnvrtc.so";
    assert_int_equal(nj_ctx_create(&ctx, &desc), NJ_LIBRARY_NOT_FOUND);
    assert_null(ctx);
    assert_non_null(strstr(nj_last_error(), "/nonexistent/libnvrtc.so"));
    assert_ptr_equal(strstr(nj_last_error(), "nj_ctx_create: "), nj_last_error());
}

/* ---- contexts of CUDA ------------------------------------------------------------------------ */

static void ctx_holds_the_primary_context_until_its_last_plan_goes(void **state) {
    nj_ctx *ctx = cuda_ctx();
    nj_desc desc = forward_desc();
    nj_plan *plan;
    (void)state;
    assert_int_equal(fake.live_contexts(), 1);
    plan = plan_of(ctx, desc);
    assert_true(fake.live_modules() > 0);
    nj_ctx_destroy(ctx);
    assert_int_equal(fake.live_contexts(), 1);
    assert_runs(plan, &desc);
    nj_plan_destroy(plan); /* tear_down sees that all is gone */
}

static void ctx_binds_to_the_callers_context_of_its_device(void **state) {
    nj_desc desc = backward_desc();
    nj_ctx *ctx;
    nj_plan *plan;
    (void)state;
    assert_int_equal(fake.init(0), 0);
    assert_int_equal(fake.push(fake.own_context(0)), 0);
    ctx = cuda_ctx();
    assert_int_equal(fake.live_contexts(), 0);
    plan = plan_of(ctx, desc);
    fake.reset();
    assert_runs(plan, &desc);
    assert_int_equal(fake.count("cuCtxPushCurrent_v2"), 0); /* it is current already */
    assert_int_equal(fake.pop(NULL), 0);
    assert_runs(plan, &desc); /* and need not be */
    nj_plan_destroy(plan);
    nj_ctx_destroy(ctx);
}

static void callers_context_is_current_again_after_every_call(void **state) {
    nj_desc desc = forward_desc();
    nj_args args = args_of(&desc);
    nj_ctx *ctx;
    nj_plan *plan;
    void *current;
    (void)state;
    set("NJ_FAKE_DEVICES", "2");
    assert_int_equal(fake.init(0), 0);
    assert_int_equal(fake.push(fake.own_context(1)), 0);
    ctx = cuda_ctx(); /* for device 0, where the caller has no context */
    assert_int_equal(fake.live_contexts(), 1);
    plan = plan_of(ctx, desc);
    assert_int_equal(run(plan, &args), NJ_OK);
    set("NJ_FAKE_FAIL", "cuLaunchKernelEx=700");
    assert_int_equal(run(plan, &args), NJ_DRIVER);
    set("NJ_FAKE_FAIL", "");
    nj_plan_destroy(plan);
    nj_ctx_destroy(ctx);
    assert_int_equal(fake.pushed(), 1);
    assert_int_equal(fake.current(&current), 0);
    assert_ptr_equal(current, fake.own_context(1));
    assert_int_equal(fake.pop(NULL), 0);
}

static void two_devices_each_get_their_own_modules_and_launches(void **state) {
    nj_ctx_desc desc[2] = {cuda_desc(), cuda_desc()};
    nj_desc problem = forward_desc();
    nj_ctx *ctx[2];
    nj_plan *plan[2];
    int i;
    (void)state;
    set("NJ_FAKE_DEVICES", "2");
    desc[1].device = 1;
    for (i = 0; i < 2; i++) {
        int before = fake.live_modules();
        ctx[i] = ctx_of(&desc[i]);
        plan[i] = plan_of(ctx[i], problem);
        assert_true(fake.live_modules() > before);
    }
    for (i = 1; i >= 0; i--) {
        unsigned shape[12];
        assert_runs(plan[i], &problem);
        assert_true(fake.launch_shape(0, shape));
        assert_int_equal(shape[11], i);
        nj_plan_destroy(plan[i]);
        nj_ctx_destroy(ctx[i]);
    }
}

/* ---- selecting ------------------------------------------------------------------------------ */

static void kernels_are_compiled_for_the_device_and_the_sku_says_so(void **state) {
    nj_ctx *ctx = cuda_ctx();
    nj_desc desc = forward_desc();
    nj_plan *plan = plan_of(ctx, desc);
    nj_precision precision;
    nj_sku sku;
    (void)state;
    assert_int_equal(nj_plan_sku(plan, NULL, &sku), NJ_OK);
    assert_int_equal(sku.backend, NJ_BACKEND_CUDA);
    assert_int_equal(sku.source, NJ_SOURCE_NVRTC);
    assert_int_equal(sku.arch, 90);
    assert_int_equal(sku.arch_specific, 0);
    assert_int_equal(sku.layout, NJ_LAYOUT_PACKED);
    assert_string_equal(sku.kernel, "nj_rows_forward");
    assert_int_equal(sku.vector_bytes, 16);
    assert_non_null(strstr(fake.nvrtc_last_options(), "--gpu-architecture=sm_90\n"));
    assert_int_equal(nj_plan_precision(plan, &precision), NJ_OK);
    assert_int_equal(precision.accumulator, NJ_F32);
    nj_plan_destroy(plan);
    nj_ctx_destroy(ctx);
}

static void arch_specific_code_is_made_only_when_allowed(void **state) {
    nj_ctx *ctx = cuda_ctx();
    nj_desc desc = forward_desc();
    nj_preference pref;
    nj_plan *plan;
    nj_sku sku;
    (void)state;
    memset(&pref, 0, sizeof pref);
    pref.allow_arch_specific = 1;
    assert_int_equal(nj_plan_select(&plan, ctx, &desc, &pref), NJ_OK);
    assert_non_null(strstr(fake.nvrtc_last_options(), "--gpu-architecture=sm_90a\n"));
    assert_int_equal(nj_plan_sku(plan, NULL, &sku), NJ_OK);
    assert_int_equal(sku.arch_specific, 1);
    nj_plan_destroy(plan);
    nj_ctx_destroy(ctx);
}

static void device_newer_than_nvrtc_gets_ptx_and_a_warning(void **state) {
    nj_ctx_desc ctx_desc = cuda_desc();
    nj_desc desc = forward_desc();
    nj_ctx *ctx;
    nj_plan *plan;
    (void)state;
    set("NJ_FAKE_NVRTC_ARCHS", "75,80");
    ctx_desc.log = hear;
    ctx = ctx_of(&ctx_desc);
    heard[0] = 0;
    plan = plan_of(ctx, desc);
    assert_non_null(strstr(fake.nvrtc_last_options(), "--gpu-architecture=compute_80\n"));
    assert_non_null(strstr(heard, "warning: NVRTC 13.0 does not know sm_90: it compiles to PTX for "
                                  "compute_80, which the driver assembles\n"));
    assert_runs(plan, &desc);
    nj_plan_destroy(plan);
    nj_ctx_destroy(ctx);
}

static void without_nvrtc_the_embedded_ptx_serves_every_type_and_direction(void **state) {
    nj_ctx_desc ctx_desc = cuda_desc();
    nj_ctx *ctx;
    int dtype, forward;
    (void)state;
    ctx_desc.flags = NJ_CTX_FALLBACK_PTX;
    ctx = ctx_of(&ctx_desc);
    assert_non_null(strstr(nj_ctx_info(ctx), "no NVRTC: embedded PTX"));
    for (dtype = NJ_F16; dtype <= NJ_F64; dtype++) {
        for (forward = 0; forward <= 1; forward++) {
            nj_desc desc = forward ? forward_desc() : backward_desc();
            nj_plan *plan;
            nj_sku sku;
            desc.dtype = (nj_dtype)dtype;
            plan = plan_of(ctx, desc);
            assert_int_equal(nj_plan_sku(plan, NULL, &sku), NJ_OK);
            assert_int_equal(sku.source, NJ_SOURCE_FALLBACK_PTX);
            assert_string_equal(sku.kernel, forward ? "nj_strided_forward" : "nj_strided_backward");
            assert_runs(plan, &desc);
            nj_plan_destroy(plan);
        }
    }
    assert_int_equal(fake.live_modules(), 4); /* one for each type */
    assert_int_equal(fake.nvrtc_compiles(), 0);
    nj_ctx_destroy(ctx);
}

static void failed_compilation_gives_nvrtcs_log(void **state) {
    nj_ctx *ctx = cuda_ctx();
    nj_desc desc = forward_desc();
    nj_plan *plan = (nj_plan *)&desc;
    nj_error_info info;
    (void)state;
    set("NJ_FAKE_NVRTC_FAIL", "norm_rows.cu(7): error: no such thing");
    assert_int_equal(nj_plan_select(&plan, ctx, &desc, NULL), NJ_COMPILE_FAILED);
    assert_null(plan);
    assert_ptr_equal(strstr(nj_last_error(), "nj_plan_select: NVRTC 13.0 could not compile "
                                             "norm_rows.cu for sm_90 with -DNJI_X=nji_bf16 "),
                     nj_last_error());
    assert_non_null(strstr(nj_last_error(), ": NVRTC_ERROR_COMPILATION"));
    assert_non_null(strstr(nj_last_error(), "\nnorm_rows.cu(7): error: no such thing"));
    nj_last_error_info(&info);
    assert_int_equal(info.driver_error, 6);
    assert_int_equal(fake.live_modules(), 0);
    unsetenv("NJ_FAKE_NVRTC_FAIL");
    nj_plan_destroy(plan_of(ctx, desc)); /* the ctx is as good as before */
    nj_ctx_destroy(ctx);
}

static void refused_image_gives_the_drivers_word(void **state) {
    nj_ctx *ctx = cuda_ctx();
    (void)state;
    set("NJ_FAKE_FAIL", "cuModuleLoadDataEx=200");
    select_fails(
        ctx, forward_desc(), NJ_DRIVER, 200,
        "nj_plan_select: cuModuleLoadDataEx failed: CUDA_ERROR_INVALID_IMAGE (200): device "
        "kernel image is invalid (norm_rows.cu for sm_90)\nfake driver: the image was "
        "refused");
    assert_int_equal(fake.live_modules(), 0);
    nj_ctx_destroy(ctx);
}

static void driver_older_than_nvrtc_gets_the_embedded_ptx_and_a_warning(void **state) {
    static const char *const refusal[] = {"209", "218", "222"};
    size_t i;
    (void)state;
    for (i = 0; i < sizeof refusal / sizeof refusal[0]; i++) {
        nj_ctx_desc ctx_desc = cuda_desc();
        nj_desc desc = backward_desc();
        char fail[64];
        nj_ctx *ctx;
        nj_plan *plan;
        nj_sku sku;
        ctx_desc.log = hear;
        ctx = ctx_of(&ctx_desc);
        heard[0] = 0;
        fake.reset();
        snprintf(fail, sizeof fail, "cuModuleLoadDataEx=%s@1", refusal[i]);
        set("NJ_FAKE_FAIL", fail);
        plan = plan_of(ctx, desc);
        set("NJ_FAKE_FAIL", "");
        assert_non_null(strstr(heard, "warning: using the embedded PTX: nj_plan_select: "
                                      "cuModuleLoadDataEx failed: "));
        assert_int_equal(nj_plan_sku(plan, NULL, &sku), NJ_OK);
        assert_int_equal(sku.source, NJ_SOURCE_FALLBACK_PTX);
        assert_runs(plan, &desc);
        nj_plan_destroy(plan);
        nj_ctx_destroy(ctx);
    }
}

static void device_out_of_memory_is_out_of_memory(void **state) {
    nj_ctx *ctx = cuda_ctx();
    nj_desc desc = forward_desc();
    nj_plan *plan = (nj_plan *)&desc;
    (void)state;
    set("NJ_FAKE_FAIL", "cuModuleLoadDataEx=2");
    assert_int_equal(nj_plan_select(&plan, ctx, &desc, NULL), NJ_OUT_OF_MEMORY);
    assert_null(plan);
    assert_ptr_equal(strstr(nj_last_error(), "nj_plan_select: cuModuleLoadDataEx failed: "
                                             "CUDA_ERROR_OUT_OF_MEMORY (2): out of memory"),
                     nj_last_error());
    nj_ctx_destroy(ctx);
}

static void missing_kernel_is_a_driver_error(void **state) {
    nj_ctx *ctx = cuda_ctx();
    (void)state;
    set("NJ_FAKE_FAIL", "cuModuleGetFunction=500");
    select_fails(ctx, forward_desc(), NJ_DRIVER, 500,
                 "nj_plan_select: cuModuleGetFunction failed: CUDA_ERROR_NOT_FOUND (500): named "
                 "symbol not found");
    nj_ctx_destroy(ctx);
}

static void select_during_capture_is_refused_before_anything_is_made(void **state) {
    static const char refusal[] =
        "nj_plan_select: a stream is being captured: select plans before the capture begins";
    nj_ctx *ctx = cuda_ctx();
    (void)state;
    set("NJ_FAKE_CAPTURING", "1");
    select_fails(ctx, forward_desc(), NJ_UNSUPPORTED, 0, refusal);
    set("NJ_FAKE_CAPTURING", "0"); /* another thread's capture shows as an error of the question */
    set("NJ_FAKE_FAIL", "cuStreamIsCapturing=906");
    select_fails(ctx, forward_desc(), NJ_UNSUPPORTED, 0, refusal);
    assert_int_equal(fake.nvrtc_compiles(), 0);
    assert_int_equal(fake.count("cuModuleLoadDataEx"), 0);
    set("NJ_FAKE_FAIL", "cuModuleLoadDataEx=900"); /* or as one of the load */
    select_fails(ctx, forward_desc(), NJ_UNSUPPORTED, 0, refusal);
    nj_ctx_destroy(ctx);
}

/* ---- caches --------------------------------------------------------------------------------- */

static void second_select_compiles_and_loads_nothing(void **state) {
    nj_ctx *ctx = cuda_ctx();
    nj_desc desc = backward_desc(), more_rows;
    nj_plan *first = plan_of(ctx, desc), *second;
    nj_cache_stats before, after;
    int compiles = fake.nvrtc_compiles(), modules = fake.live_modules();
    (void)state;
    assert_int_equal(nj_ctx_cache_stats(ctx, &before), NJ_OK);
    assert_int_equal(before.compiles, compiles);
    assert_int_equal(before.modules, modules);
    assert_int_equal(before.memory_hits, 0);
    assert_int_equal(before.memory_misses, modules);
    second = plan_of(ctx, desc);
    nj_plan_destroy(second);
    more_rows = desc; /* rows are arguments: one kernel serves every batch */
    more_rows.shape[0] = 12 * ROWS;
    second = plan_of(ctx, more_rows);
    assert_int_equal(fake.nvrtc_compiles(), compiles);
    assert_int_equal(fake.live_modules(), modules);
    assert_int_equal(nj_ctx_cache_stats(ctx, &after), NJ_OK);
    assert_int_equal(after.memory_hits, 2 * modules);
    assert_int_equal(after.memory_misses, modules);
    assert_int_equal(after.disk_hits + after.disk_misses + after.disk_writes, 0);
    nj_plan_destroy(first);
    nj_plan_destroy(second);
    nj_ctx_destroy(ctx);
}

static int remove_one(const char *path, const struct stat *info, int type, struct FTW *at) {
    (void)info;
    (void)type;
    (void)at;
    return remove(path);
}

static void remove_folder(const char *folder) {
    if (access(folder, F_OK) != 0) return;
    assert_int_equal(nftw(folder, remove_one, 16, FTW_DEPTH | FTW_PHYS), 0);
}

static void second_ctx_finds_the_kernels_on_disk(void **state) {
    char folder[] = "/tmp/normjit_test_XXXXXX";
    nj_ctx_desc ctx_desc = cuda_desc();
    nj_desc desc = forward_desc();
    int turn, modules = 0;
    (void)state;
    assert_non_null(mkdtemp(folder));
    ctx_desc.cache_dir = folder;
    for (turn = 0; turn < 2; turn++) {
        nj_ctx *ctx = ctx_of(&ctx_desc);
        nj_plan *plan;
        nj_cache_stats stats;
        nj_sku sku;
        fake.nvrtc_reset();
        plan = plan_of(ctx, desc);
        modules = fake.live_modules();
        assert_int_equal(fake.nvrtc_compiles(), turn == 0 ? modules : 0);
        assert_int_equal(nj_ctx_cache_stats(ctx, &stats), NJ_OK);
        assert_int_equal(stats.disk_hits, turn == 0 ? 0 : modules);
        assert_int_equal(stats.disk_misses, turn == 0 ? modules : 0);
        assert_int_equal(stats.disk_writes, turn == 0 ? modules : 0);
        assert_int_equal(stats.compiles, turn == 0 ? modules : 0);
        assert_int_equal(nj_plan_sku(plan, NULL, &sku), NJ_OK);
        assert_int_equal(sku.source, NJ_SOURCE_NVRTC);
        assert_runs(plan, &desc);
        nj_plan_destroy(plan);
        nj_ctx_destroy(ctx);
    }
    remove_folder(folder);
}

/* ---- workspace ------------------------------------------------------------------------------ */

/* A limit is kept or refused with a need that, granted, is enough. */
static void assert_limit_is_kept(nj_ctx *ctx, const nj_desc *desc, uint64_t limit) {
    nj_preference pref;
    nj_error_info info;
    nj_plan *plan;
    nj_status status;
    memset(&pref, 0, sizeof pref);
    pref.max_workspace_bytes = limit;
    status = nj_plan_select(&plan, ctx, desc, &pref);
    if (status != NJ_OK) {
        assert_int_equal(status, NJ_UNSUPPORTED);
        nj_last_error_info(&info);
        assert_int_equal(info.got, limit);
        assert_true(info.needed > limit);
        pref.max_workspace_bytes = info.needed;
        if (nj_plan_select(&plan, ctx, desc, &pref) != NJ_OK) fail_msg("%s", nj_last_error());
    }
    assert_in_range(nj_plan_workspace_size(plan), 0, pref.max_workspace_bytes);
    assert_runs(plan, desc);
    nj_plan_destroy(plan);
}

static void workspace_limits_are_kept(void **state) {
    static const int64_t lengths[] = {8, 100, 768, 4097, 20001, 200001};
    nj_ctx *ctx = cuda_ctx();
    size_t i;
    (void)state;
    for (i = 0; i < COUNT_OF(lengths); i++) {
        nj_desc desc = desc_of(NJ_OP_LAYER_NORM_BACKWARD, 300, lengths[i]);
        nj_plan *plan = plan_of(ctx, desc);
        uint64_t most = nj_plan_workspace_size(plan), limit;
        nj_plan_destroy(plan);
        assert_true(most > 0);
        for (limit = 1; limit <= most + 1; limit += limit / 3 + 1)
            assert_limit_is_kept(ctx, &desc, limit);
        for (limit = most > 64 ? most - 64 : 1; limit <= most; limit += 7)
            assert_limit_is_kept(ctx, &desc, limit);
    }
    nj_ctx_destroy(ctx);
}

static void workspace_of_the_gpu_is_aligned_to_256_bytes(void **state) {
    nj_ctx *ctx = cuda_ctx();
    nj_desc desc = backward_desc();
    nj_args args = args_of(&desc);
    nj_plan *plan = plan_of(ctx, desc);
    char *there = (char *)WORKSPACE + 128;
    char text[128];
    (void)state;
    fake.reset();
    snprintf(text, sizeof text, "nj_plan_run: workspace = %p: must be a multiple of 256 bytes",
             (void *)there);
    assert_failed_by(nj_plan_run(plan, &args, there, nj_plan_workspace_size(plan), NULL),
                     NJ_MISALIGNED_OPERAND, 0, text);
    assert_int_equal(launches(), 0);
    nj_plan_destroy(plan);
    nj_ctx_destroy(ctx);
}

/* ---- running -------------------------------------------------------------------------------- */

/* Every function of the driver that the library knows, but those that a run may call. */
static void assert_no_other_calls(void) {
    static const char *const may[] = {"cuCtxGetCurrent", "cuCtxPushCurrent_v2",
                                      "cuCtxPopCurrent_v2", "cuLaunchKernel", "cuLaunchKernelEx"};
    size_t i, j;
    for (i = 0; i < COUNT_OF(nji_driver_symbols); i++) {
        int allowed = 0;
        for (j = 0; j < COUNT_OF(may); j++)
            allowed |= strcmp(nji_driver_symbols[i].name, may[j]) == 0;
        if (!allowed && fake.count(nji_driver_symbols[i].name) != 0) {
            fail_msg("run called %s", nji_driver_symbols[i].name);
        }
    }
}

/* Runs once and counts. */
static void assert_run_is_lean(const nj_plan *plan, const nj_args *args, int least, int most) {
    int compiles = fake.nvrtc_compiles(), held = blocks_held;
    fake.reset();
    fail_at = 1; /* an allocation would fail, and be noticed below */
    if (run(plan, args) != NJ_OK) fail_msg("%s", nj_last_error());
    assert_int_equal(fail_at, 1);
    fail_at = 0;
    assert_in_range(launches(), least, most);
    assert_int_equal(fake.count("cuCtxPushCurrent_v2"), 1);
    assert_int_equal(fake.count("cuCtxPopCurrent_v2"), 1);
    assert_no_other_calls();
    assert_int_equal(fake.nvrtc_compiles(), compiles);
    assert_int_equal(blocks_held, held);
}

static void run_launches_and_does_nothing_else(void **state) {
    static const int64_t lengths[] = {1, 8, 768, 769, 4096, 20000, 300000};
    static const int64_t heights[] = {1, 1000, 3000000};
    nj_ctx *ctx = cuda_ctx();
    size_t c, r;
    (void)state;
    for (c = 0; c < COUNT_OF(lengths); c++) {
        for (r = 0; r < COUNT_OF(heights); r++) {
            uint32_t grads;
            for (grads = 0; grads <= ALL_GRADS; grads++) { /* 0: the forward */
                nj_op op = grads ? NJ_OP_LAYER_NORM_BACKWARD : NJ_OP_LAYER_NORM_FORWARD;
                nj_desc desc = desc_of(op, heights[r], lengths[c]);
                nj_args args = args_of(&desc);
                nj_plan *plan;
                int most = grads & (NJ_GRAD_DGAMMA | NJ_GRAD_DBETA) ? 3 : 2;
                /* a buffer may not be longer than the room between two of them */
                if (heights[r] * lengths[c] * 2 > (int64_t)MEMORY_BYTES) continue;
                desc.grads = grads;
                plan = plan_of(ctx, desc);
                assert_run_is_lean(plan, &args, 1, most);
                args.x.stride[1] = 2; /* strided */
                args.x.count = 0;
                if ((heights[r] * lengths[c] + heights[r]) * 4 < (int64_t)MEMORY_BYTES) {
                    args.x.stride[0] = 2 * lengths[c] + 1;
                    assert_run_is_lean(plan, &args, 1, most);
                }
                nj_plan_destroy(plan);
            }
        }
    }
    nj_ctx_destroy(ctx);
}

static void empty_problems_launch_only_what_has_elements_to_write(void **state) {
    nj_ctx *ctx = cuda_ctx();
    nj_desc desc = desc_of(NJ_OP_LAYER_NORM_FORWARD, 0, COLS);
    nj_args args = args_of(&desc);
    nj_plan *plan = plan_of(ctx, desc);
    (void)state;
    assert_run_is_lean(plan, &args, 0, 0);
    nj_plan_destroy(plan);
    desc = desc_of(NJ_OP_LAYER_NORM_BACKWARD, 0, COLS); /* dgamma and dbeta become 0 */
    plan = plan_of(ctx, desc);
    assert_run_is_lean(plan, &args, 1, 1);
    assert_string_equal(fake.launch_name(0), "nj_params_sum");
    nj_plan_destroy(plan);
    desc = desc_of(NJ_OP_LAYER_NORM_FORWARD, ROWS, 0); /* mean and rstd become NaN */
    args = args_of(&desc);
    plan = plan_of(ctx, desc);
    assert_run_is_lean(plan, &args, 1, 1);
    nj_plan_destroy(plan);
    desc = desc_of(NJ_OP_LAYER_NORM_BACKWARD, ROWS, 0);
    plan = plan_of(ctx, desc);
    assert_run_is_lean(plan, &args, 0, 0);
    nj_plan_destroy(plan);
    nj_ctx_destroy(ctx);
}

static void launch_carries_the_problem_to_the_callers_stream(void **state) {
    nj_ctx *ctx = cuda_ctx();
    nj_desc desc = backward_desc();
    nj_args args = args_of(&desc);
    nj_plan *plan = plan_of(ctx, desc);
    const nji_problem *problem;
    unsigned shape[12];
    void *stream = memory(30);
    nj_sku sku;
    (void)state;
    assert_int_equal(nj_plan_run(plan, &args, WORKSPACE, nj_plan_workspace_size(plan), stream),
                     NJ_OK);
    assert_int_equal(launches(), 2); /* the rows, then the sum of the partial gradients */
    assert_string_equal(fake.launch_name(1), "nj_ring_backward");
    assert_string_equal(fake.launch_name(0), "nj_params_sum");
    assert_ptr_equal(fake.launch_stream(0), stream);
    assert_ptr_equal(fake.launch_stream(1), stream);
    problem = (const nji_problem *)fake.launch_problem(1);
    assert_int_equal(problem->rows, ROWS);
    assert_int_equal(problem->cols, COLS);
    assert_ptr_equal(problem->x.data, args.x.data);
    assert_ptr_equal(problem->dbeta.data, args.dbeta.data);
    assert_ptr_equal(problem->partial, WORKSPACE);
    assert_true(fake.launch_shape(1, shape));
    assert_int_equal(nj_plan_sku(plan, &args, &sku), NJ_OK);
    assert_string_equal(sku.kernel, "nj_ring_backward");
    assert_int_equal(shape[3], sku.threads);
    assert_int_equal(shape[10], 1); /* it may start early: it waits by itself */
    assert_true(fake.launch_shape(0, shape));
    assert_int_equal(shape[10], 1);
    nj_plan_destroy(plan);
    nj_ctx_destroy(ctx);
}

/* One cluster then writes the gradients itself. */
static void few_rows_take_one_launch(void **state) {
    static const struct {
        int64_t rows, cols;
        int launches;
    } cases[] = {{16, 8192, 1}, {17, 8192, 2}, {8, 16384, 1}, {1, 768, 1}, {200, 768, 2}, {16, 128, 2}};
    nj_ctx *ctx = cuda_ctx();
    size_t i;
    (void)state;
    for (i = 0; i < COUNT_OF(cases); i++) {
        nj_desc desc = desc_of(NJ_OP_LAYER_NORM_BACKWARD, cases[i].rows, cases[i].cols);
        nj_plan *plan = plan_of(ctx, desc);
        unsigned shape[12];
        fake.reset();
        assert_runs(plan, &desc);
        assert_int_equal(launches(), cases[i].launches);
        if (cases[i].launches == 1) {
            assert_string_equal(fake.launch_name(0), "nj_ring_backward");
            assert_true(fake.launch_shape(0, shape));
            assert_int_equal(shape[0], plan->cuda.choice.slices);
        }
        nj_plan_destroy(plan);
    }
    nj_ctx_destroy(ctx);
}

/* The partial gradients of all blocks lie within the workspace that the plan asked for. */
static void partial_gradients_fit_the_workspace(void **state) {
    static const int64_t lengths[] = {1, 100, 768, 5000, 20000, 300001};
    static const int64_t heights[] = {1, 63, 1000, 20000};
    nj_ctx *ctx = cuda_ctx();
    size_t c, r;
    (void)state;
    for (c = 0; c < COUNT_OF(lengths); c++) {
        for (r = 0; r < COUNT_OF(heights); r++) {
            nj_desc desc = desc_of(NJ_OP_LAYER_NORM_BACKWARD, heights[r], lengths[c]);
            nj_args args = args_of(&desc);
            nj_plan *plan;
            size_t bytes;
            int layout, back;
            if (heights[r] * lengths[c] * 4 > (int64_t)MEMORY_BYTES) continue;
            plan = plan_of(ctx, desc);
            bytes = nj_plan_workspace_size(plan);
            for (layout = 0; layout < 3; layout++) {
                args = args_of(&desc);
                if (layout == 1) args.dy.stride[0] = args.dy.stride[1] = 0; /* loose */
                if (layout == 2) {
                    args.x.stride[0] = args.dx.stride[0] = 1;
                    args.x.stride[1] = args.dx.stride[1] = heights[r];
                }
                fake.reset();
                assert_int_equal(run(plan, &args), NJ_OK);
                for (back = 0; back < launches(); back++) {
                    const nji_problem *problem = (const nji_problem *)fake.launch_problem(back);
                    size_t end = (size_t)problem->parts * 2 * (size_t)lengths[c] * sizeof(float);
                    assert_true(problem->parts >= 1);
                    assert_in_range(end, 1, bytes);
                    if (problem->sums && strstr(fake.launch_name(back), "split_")) {
                        size_t at = (size_t)((char *)problem->sums - (char *)WORKSPACE);
                        assert_in_range(at, end, bytes);
                        assert_int_equal(at % 256, 0);
                    }
                }
            }
            nj_plan_destroy(plan);
        }
    }
    nj_ctx_destroy(ctx);
}

/* Which kernel takes the operands, and that it is what runs. */
static void assert_taken_by(const nj_plan *plan, const nj_args *args, const char *kernel,
                            nj_layout layout, int vector_bytes) {
    unsigned shape[12];
    nj_sku sku;
    int back;
    if (nj_plan_sku(plan, args, &sku) != NJ_OK) fail_msg("%s", nj_last_error());
    assert_string_equal(sku.kernel, kernel);
    assert_int_equal(sku.layout, layout);
    assert_int_equal(sku.vector_bytes, vector_bytes);
    assert_int_equal(sku.source, NJ_SOURCE_NVRTC);
    fake.reset();
    if (run(plan, args) != NJ_OK) fail_msg("%s", nj_last_error());
    for (back = 0; strcmp(fake.launch_name(back), kernel) != 0; back++)
        assert_true(back + 1 < launches());
    assert_true(fake.launch_shape(back, shape));
    assert_int_equal(shape[3], sku.threads);
}

static void forward_operands_that_the_rows_kernels_cannot_read_take_the_loose_ones(void **state) {
    nj_ctx *ctx = cuda_ctx();
    nj_desc desc = forward_desc();
    nj_plan *plan = plan_of(ctx, desc);
    nj_layout layout = NJ_LAYOUT_PACKED;
    nj_args args;
    int which;
    (void)state;
    for (which = 0; which < 7; which++) {
        args = args_of(&desc);
        args.x.count = args.y.count = args.gamma.count = 0;
        if (which == 1) layout = NJ_LAYOUT_PADDED_ROWS;
        if (which == 3) layout = NJ_LAYOUT_PACKED;
        if (which == 4) layout = NJ_LAYOUT_STRIDED;
        if (which == 0) args.x.offset = 1;      /* not aligned to 16 bytes */
        if (which == 1) args.y.stride[0] = 769; /* nor every row */
        if (which == 2) args.x.stride[0] = 769;
        if (which == 3) args.gamma.data = (char *)memory(2) + 2;
        if (which == 4) args.x.stride[1] = 0;
        if (which == 5) args.y.stride[1] = 2, args.y.stride[0] = 2 * COLS;
        if (which == 6) args.gamma.stride[0] = -1, args.gamma.offset = COLS - 1;
        assert_taken_by(plan, &args, "nj_loose_rows_forward", layout, 2);
    }
    args = args_of(&desc);
    args.x.stride[0] = args.y.stride[0] = 776; /* padded rows that stay aligned do not */
    args.x.count = args.y.count = 0;
    assert_taken_by(plan, &args, "nj_rows_forward", NJ_LAYOUT_PADDED_ROWS, 16);
    args = args_of(&desc); /* columns first: neighbouring rows are adjacent */
    args.x.stride[0] = args.y.stride[0] = 1;
    args.x.stride[1] = args.y.stride[1] = ROWS;
    assert_taken_by(plan, &args, "nj_strided_forward", NJ_LAYOUT_CHANNELS_FIRST, 2);
    nj_plan_destroy(plan);
    nj_ctx_destroy(ctx);
}

static void broadcast_gradient_takes_the_loose_kernels(void **state) {
    static const int64_t lengths[] = {COLS, COLS + 1, 4096, 20000};
    nj_ctx *ctx = cuda_ctx();
    size_t i;
    (void)state;
    for (i = 0; i < COUNT_OF(lengths); i++) {
        const int is_split = lengths[i] > 16384;
        nj_desc desc = desc_of(NJ_OP_LAYER_NORM_BACKWARD, ROWS, lengths[i]);
        nj_plan *plan = plan_of(ctx, desc);
        nj_args args = args_of(&desc);
        args.dy.stride[0] = args.dy.stride[1] = 0; /* as of a sum */
        assert_taken_by(plan, &args,
                        is_split ? "nj_loose_split_backward_sums" : "nj_loose_rows_backward",
                        NJ_LAYOUT_STRIDED, 2);
        assert_int_equal(launches(), is_split ? 3 : 2);
        assert_string_equal(fake.launch_name(launches() - 2), "nj_params_sum");
        args.x.stride[0] = args.dx.stride[0] = 1; /* where dx says so, columns come first */
        args.x.stride[1] = args.dx.stride[1] = ROWS;
        assert_taken_by(plan, &args, "nj_strided_backward", NJ_LAYOUT_CHANNELS_FIRST, 2);
        nj_plan_destroy(plan);
    }
    nj_ctx_destroy(ctx);
}

/* What is channels-first by its shape may lie in memory channels-last. */
static void tiles_plan_takes_packed_rows_with_the_loose_kernels(void **state) {
    nj_ctx *ctx = cuda_ctx();
    nj_desc desc = backward_desc();
    nj_args args;
    nj_plan *plan;
    (void)state;
    desc.rank = 3;
    desc.shape[0] = 4;
    desc.shape[1] = 96;
    desc.shape[2] = 128;
    plan = plan_of(ctx, desc);
    args = args_of(&desc);
    assert_taken_by(plan, &args, "nj_tiles_backward", NJ_LAYOUT_CHANNELS_FIRST, 16);
    args.x.stride[1] = args.dy.stride[1] = args.dx.stride[1] = 1;
    args.x.stride[2] = args.dy.stride[2] = args.dx.stride[2] = 96;
    assert_taken_by(plan, &args, "nj_loose_rows_backward", NJ_LAYOUT_PACKED, 2);
    nj_plan_destroy(plan);
    nj_ctx_destroy(ctx);
}

static void columns_of_two_strides_take_the_strided_kernels(void **state) {
    nj_ctx *ctx = cuda_ctx();
    nj_desc desc = forward_desc();
    nj_args args;
    nj_plan *plan;
    (void)state;
    desc.rank = 3;
    desc.shape[1] = 8;
    desc.shape[2] = 96;
    desc.norm_axes = 6;
    plan = plan_of(ctx, desc);
    args = args_of(&desc);
    args.x.stride[1] = 100;
    args.x.stride[0] = 800;
    args.x.count = 0;
    assert_taken_by(plan, &args, "nj_strided_forward", NJ_LAYOUT_STRIDED, 2);
    nj_plan_destroy(plan);
    nj_ctx_destroy(ctx);
}

static void failed_launch_names_the_call_and_the_error(void **state) {
    nj_ctx *ctx = cuda_ctx();
    nj_desc desc = backward_desc();
    nj_args args = args_of(&desc);
    nj_plan *plan = plan_of(ctx, desc);
    (void)state;
    set("NJ_FAKE_FAIL", "cuLaunchKernelEx=700");
    assert_failed_by(run(plan, &args), NJ_DRIVER, 700,
                     "nj_plan_run: cuLaunchKernelEx failed: CUDA_ERROR_ILLEGAL_ADDRESS (700): an "
                     "illegal memory access was encountered");
    fake.reset();
    set("NJ_FAKE_FAIL", "cuLaunchKernelEx=1@2");
    assert_failed_by(run(plan, &args), NJ_DRIVER, 1,
                     "nj_plan_run: cuLaunchKernelEx failed: CUDA_ERROR_INVALID_VALUE (1): invalid "
                     "argument");
    set("NJ_FAKE_FAIL", "cuCtxPushCurrent_v2=201");
    assert_failed_by(run(plan, &args), NJ_DRIVER, 201,
                     "nj_plan_run: cuCtxPushCurrent failed: CUDA_ERROR_INVALID_CONTEXT (201): "
                     "invalid device context");
    set("NJ_FAKE_FAIL", "");
    nj_plan_destroy(plan);
    nj_ctx_destroy(ctx);
}

/* Graphs take dependent launches since CUDA 12.3, devices since sm_90. */
static void older_drivers_and_devices_get_plain_launches(void **state) {
    static const char *const older[][2] = {{"NJ_FAKE_VERSION", "12020"}, {"NJ_FAKE_CC", "89"}};
    size_t i;
    (void)state;
    for (i = 0; i < sizeof older / sizeof older[0]; i++) {
        nj_desc desc = backward_desc();
        nj_args args = args_of(&desc);
        nj_ctx *ctx;
        nj_plan *plan;
        set(older[i][0], older[i][1]);
        ctx = cuda_ctx();
        plan = plan_of(ctx, desc);
        fake.reset();
        assert_int_equal(run(plan, &args), NJ_OK);
        assert_int_equal(fake.count("cuLaunchKernel"), 2);
        assert_int_equal(fake.count("cuLaunchKernelEx"), 0);
        set("NJ_FAKE_FAIL", "cuLaunchKernel=700");
        assert_failed_by(run(plan, &args), NJ_DRIVER, 700,
                         "nj_plan_run: cuLaunchKernel failed: CUDA_ERROR_ILLEGAL_ADDRESS (700): an "
                         "illegal memory access was encountered");
        set("NJ_FAKE_FAIL", "");
        nj_plan_destroy(plan);
        nj_ctx_destroy(ctx);
        unsetenv(older[i][0]);
    }
}

static void host_plan_of_a_cuda_ctx_asks_nothing_of_the_driver(void **state) {
    static const int64_t shape[] = {2, 4};
    nj_ctx *ctx = cuda_ctx();
    nj_desc desc = desc_of(NJ_OP_LAYER_NORM_FORWARD, 2, 4);
    float x[8] = {1, 2, 3, 4, 5, 6, 7, 8}, y[8];
    nj_preference pref;
    nj_args args;
    nj_plan *plan;
    nj_sku sku;
    size_t i;
    (void)state;
    desc.dtype = NJ_F32;
    desc.has_gamma = desc.has_beta = 0;
    memset(&pref, 0, sizeof pref);
    memset(&args, 0, sizeof args);
    pref.prefer_backend = NJ_BACKEND_HOST;
    args.x = nj_packed_const(x, 2, shape);
    args.y = nj_packed(y, 2, shape);
    fake.reset();
    assert_int_equal(nj_plan_select(&plan, ctx, &desc, &pref), NJ_OK);
    assert_int_equal(nj_plan_run(plan, &args, NULL, 0, NULL), NJ_OK);
    assert_int_equal(nj_plan_sku(plan, &args, &sku), NJ_OK);
    assert_int_equal(sku.backend, NJ_BACKEND_HOST);
    for (i = 0; i < COUNT_OF(nji_driver_symbols); i++)
        assert_int_equal(fake.count(nji_driver_symbols[i].name), 0);
    nj_plan_destroy(plan);
    nj_ctx_destroy(ctx);
}

/* ---- where operands live -------------------------------------------------------------------- */

static void register_all(int device) {
    int i;
    for (i = 0; i < 10; i++)
        assert_true(fake.register_memory(memory(i), MEMORY_BYTES, device));
}

static void pointers_are_checked_when_asked_for(void **state) {
    nj_ctx_desc ctx_desc = cuda_desc();
    nj_desc desc = backward_desc();
    nj_args args = args_of(&desc);
    nj_ctx *ctx;
    nj_plan *plan;
    char text[256];
    (void)state;
    set("NJ_FAKE_DEVICES", "2");
    ctx_desc.flags = NJ_CTX_CHECK_POINTERS;
    ctx = ctx_of(&ctx_desc);
    plan = plan_of(ctx, desc);
    register_all(0);
    assert_int_equal(run(plan, &args), NJ_OK);

    fake.reset();
    register_all(0);
    args.dbeta.data = memory(11); /* nobody's */
    snprintf(text, sizeof text,
             "nj_plan_run: args.dbeta.data = %p: host memory that the driver does not know: a CUDA "
             "plan needs device memory",
             args.dbeta.data);
    assert_failed_by(run(plan, &args), NJ_INVALID_ARGUMENT, 0, text);
    assert_int_equal(launches(), 0);

    assert_true(fake.register_memory(memory(11), MEMORY_BYTES, 1));
    snprintf(text, sizeof text,
             "nj_plan_can_implement: args.dbeta.data = %p: memory of device 1: the plan is for "
             "device 0",
             args.dbeta.data);
    assert_failed_by(nj_plan_can_implement(plan, &args), NJ_INVALID_ARGUMENT, 0, text);
    assert_int_equal(fake.pushed(), 0);
    nj_plan_destroy(plan);
    nj_ctx_destroy(ctx);
}

static void pointers_are_not_asked_about_otherwise(void **state) {
    nj_ctx *ctx = cuda_ctx();
    nj_desc desc = backward_desc();
    nj_plan *plan = plan_of(ctx, desc);
    (void)state;
    assert_runs(plan, &desc); /* none of its memory is registered */
    assert_int_equal(fake.count("cuPointerGetAttribute"), 0);
    nj_plan_destroy(plan);
    nj_ctx_destroy(ctx);
}

/* ---- every call fails once ------------------------------------------------------------------- */

/* Makes a ctx, selects and runs a forward and a backward, and takes all down. The first failure
   ends it; its status. */
static nj_status whole_life(const char *cache_dir) {
    nj_ctx_desc ctx_desc = cuda_desc();
    nj_desc desc[2] = {forward_desc(), backward_desc()};
    nj_plan *plan[2] = {NULL, NULL};
    nj_ctx *ctx;
    nj_status status;
    int i;
    ctx_desc.cache_dir = cache_dir;
    status = nj_ctx_create(&ctx, &ctx_desc);
    if (status != NJ_OK) {
        assert_null(ctx);
        return status;
    }
    for (i = 0; i < 2 && status == NJ_OK; i++) {
        nj_args args = args_of(&desc[i]);
        status = nj_plan_select(&plan[i], ctx, &desc[i], NULL);
        if (status != NJ_OK) assert_null(plan[i]);
        if (status == NJ_OK) status = run(plan[i], &args);
    }
    nj_plan_destroy(plan[0]);
    nj_ctx_destroy(ctx);
    nj_plan_destroy(plan[1]);
    return status;
}

static void everything_is_released_whichever_driver_call_fails(void **state) {
    /* what takes down cannot be held responsible for what stays; asking for the current context may
       fail: it is then made current anyhow */
    static const char *const without_effect[] = {"cuCtxGetCurrent", "cuCtxGetDevice"};
    static const char *const releases[] = {"cuModuleUnload", "cuDevicePrimaryCtxRelease_v2",
                                           "cuCtxPopCurrent_v2"};
    size_t i, j;
    int faults = 0;
    (void)state;
    assert_int_equal(whole_life(NULL), NJ_OK);
    for (i = 0; i < COUNT_OF(nji_driver_symbols); i++) {
        const char *name = nji_driver_symbols[i].name;
        int calls, call, is_release = 0, has_effect = 1;
        if (strncmp(name, "cuGetError", 10) == 0) continue; /* are not injected */
        for (j = 0; j < COUNT_OF(releases); j++)
            is_release |= strcmp(name, releases[j]) == 0;
        for (j = 0; j < COUNT_OF(without_effect); j++)
            has_effect &= strcmp(name, without_effect[j]) != 0;
        if (is_release) continue;
        fake.reset();
        set("NJ_FAKE_FAIL", "");
        assert_int_equal(whole_life(NULL), NJ_OK);
        calls = fake.count(name);
        for (call = 1; call <= calls; call++) {
            char fault[96];
            nj_status status;
            snprintf(fault, sizeof fault, "%s=999@%d", name, call);
            fake.reset();
            set("NJ_FAKE_FAIL", fault);
            status = whole_life(NULL);
            /* the last pushes come from taking down, which has nobody to tell */
            if (has_effect && strcmp(name, "cuCtxPushCurrent_v2") != 0) {
                if (status != NJ_DRIVER) fail_msg("%s: status %d", fault, (int)status);
            }
            if (status == NJ_OK && strcmp(name, "cuCtxPushCurrent_v2") == 0) {
                assert_int_equal(call, calls);
                assert_int_equal(fake.live_contexts(), 0);
                set_up(state); /* the modules went with the context: no one unloaded them */
                continue;
            }
            set("NJ_FAKE_FAIL", "");
            assert_all_released();
            faults++;
        }
    }
    assert_true(faults > 20);
}

static void everything_is_released_whichever_allocation_fails(void **state) {
    char folder[] = "/tmp/normjit_test_XXXXXX";
    int nth;
    (void)state;
    assert_non_null(mkdtemp(folder));
    for (nth = 1;; nth++) {
        nj_status status;
        remove_folder(folder); /* every life writes it anew */
        fail_at = nth;
        status = whole_life(folder);
        assert_all_released();
        if (fail_at > 0) { /* there were fewer */
            assert_int_equal(status, NJ_OK);
            break;
        }
        /* the caches do without: a write or an eviction that finds no memory is no failure */
        if (status != NJ_OK) assert_int_equal(status, NJ_OUT_OF_MEMORY);
    }
    fail_at = 0;
    assert_true(nth > 10);
    remove_folder(folder);
}

/* ---- measured selection ---------------------------------------------------------------------- */

#define SCRATCH memory(40)
#define TUNE_STREAM memory(31)

static nj_preference measuring(void) {
    nj_preference pref;
    memset(&pref, 0, sizeof pref);
    pref.tune = NJ_TUNE_MEASURE;
    pref.tune_scratch = SCRATCH;
    pref.tune_scratch_bytes = MEMORY_BYTES;
    pref.tune_stream = TUNE_STREAM;
    return pref;
}

/* The same where the answer must be known: there is no memory to find it with. */
static nj_preference recalling(void) {
    nj_preference pref = measuring();
    pref.tune_scratch = NULL;
    pref.tune_scratch_bytes = 0;
    return pref;
}

static nj_plan *plan_with(nj_ctx *ctx, nj_desc desc, nj_preference pref) {
    nj_plan *plan;
    if (nj_plan_select(&plan, ctx, &desc, &pref) != NJ_OK) fail_msg("%s", nj_last_error());
    assert_int_equal(fake.pushed(), 0);
    return plan;
}

static int candidates_of(nj_ctx *ctx, nj_desc desc, nji_choice choice[NJI_TUNE_CANDIDATES]) {
    nj_preference pref;
    int64_t rows, cols;
    memset(&pref, 0, sizeof pref);
    assert_int_equal(nji_check_desc(&desc, &rows, &cols, "test"), NJ_OK);
    return nji_alternatives(&desc, rows, cols, &ctx->cuda.facts, &pref, choice,
                            NJI_TUNE_CANDIDATES);
}

/* Of the plan's loose kernels. */
static int64_t loose_workspace(nj_ctx *ctx, nj_desc desc) {
    nj_preference pref;
    nji_choice choice;
    int64_t rows, cols;
    memset(&pref, 0, sizeof pref);
    assert_int_equal(nji_check_desc(&desc, &rows, &cols, "test"), NJ_OK);
    assert_int_equal(
        nji_choose_loose(&desc, rows, cols, &ctx->cuda.facts, &pref, &choice, "test"), NJ_OK);
    return nji_workspace_of(&choice);
}

static int candidate_of(const nj_plan *plan) {
    nj_sku sku;
    assert_int_equal(nj_plan_sku(plan, NULL, &sku), NJ_OK);
    return sku.candidate;
}

static uint64_t tunes_of(nj_ctx *ctx) {
    nj_cache_stats stats;
    assert_int_equal(nj_ctx_cache_stats(ctx, &stats), NJ_OK);
    return stats.tunes;
}

/* Events say that the winner takes half the time of the others. */
static void let_win(int winner, int count) {
    char times[64] = "";
    int i;
    for (i = 0; i < count; i++) strcat(strcat(times, i ? "," : ""), i == winner ? "5" : "10");
    set("NJ_FAKE_MS", times);
}

static void fastest_geometry_is_the_plans(void **state) {
    nji_choice choice[NJI_TUNE_CANDIDATES];
    nj_desc desc = backward_desc();
    int winner, count = 2;
    (void)state;
    for (winner = 0; winner < count; winner++) {
        nj_ctx *ctx = cuda_ctx();
        nj_plan *plan;
        unsigned shape[12];
        int64_t workspace;
        int compiles;
        count = candidates_of(ctx, desc, choice);
        assert_in_range(count, 2, NJI_TUNE_CANDIDATES);
        let_win(winner, count);
        compiles = fake.nvrtc_compiles();
        plan = plan_with(ctx, desc, measuring());
        assert_int_equal(candidate_of(plan), winner);
        workspace = nji_workspace_of(&choice[winner]);
        if (workspace < loose_workspace(ctx, desc)) workspace = loose_workspace(ctx, desc);
        assert_int_equal(nj_plan_workspace_size(plan), workspace);
        assert_int_equal(fake.nvrtc_compiles() - compiles, count + 2); /* loose, strided */
        assert_int_equal(tunes_of(ctx), 1);
        fake.reset();
        assert_runs(plan, &desc);
        assert_true(fake.launch_shape(launches() - 1, shape));
        assert_int_equal(shape[0], choice[winner].parts * choice[winner].slices);
        assert_int_equal(shape[3], choice[winner].threads);
        nj_plan_destroy(plan);
        nj_ctx_destroy(ctx);
    }
}

static void tables_geometry_stays_unless_another_is_clearly_faster(void **state) {
    static const struct {
        float ms[4];
        int winner;
    } cases[] = {{{10, 10, 10, 10}, 0}, {{10, 9.81f, 10, 10}, 0}, {{10, 9.79f, 10, 10}, 1},
                 {{10, 12, 9, 9}, 2},   {{10, 9, 8, 7}, 3},       {{9, 10, 10, 10}, 0}};
    size_t i;
    (void)state;
    for (i = 0; i < COUNT_OF(cases); i++)
        assert_int_equal(nji_tune_winner(cases[i].ms, 4), cases[i].winner);
}

static void least_time_counts_and_the_first_round_does_not(void **state) {
    nj_ctx *ctx = cuda_ctx();
    nj_desc desc = backward_desc();
    nji_choice choice[NJI_TUNE_CANDIDATES];
    int count = candidates_of(ctx, desc, choice), round, i;
    char times[256] = "";
    nj_plan *plan;
    (void)state;
    assert_true(count >= 3);
    for (round = 0; round <= NJI_TUNE_ROUNDS; round++) {
        for (i = 0; i < count; i++) {
            const char *ms = round == 0 && i == 1 ? "1," : round == 3 && i == 2 ? "6," : "10,";
            strcat(times, round == NJI_TUNE_ROUNDS && i == count - 1 ? "10" : ms);
        }
    }
    set("NJ_FAKE_MS", times);
    plan = plan_with(ctx, desc, measuring());
    assert_int_equal(candidate_of(plan), 2);
    nj_plan_destroy(plan);
    nj_ctx_destroy(ctx);
}

/* Every operand that a launch was given. */
static void assert_within_scratch(const nji_problem *problem, const nj_desc *desc, size_t bytes) {
    const nji_operand *operand = &problem->x;
    uintptr_t begin = (uintptr_t)SCRATCH, end = begin + bytes;
    int i, d, seen = 0;
    for (i = 0; i < 10; i++, operand++) {
        int64_t size = (int64_t)nj_dtype_size(desc->dtype), reach = 0;
        if (!operand->data) continue;
        if (operand == &problem->mean || operand == &problem->rstd)
            size = (int64_t)nj_dtype_size(NJ_F32);
        for (d = 0; d < problem->row_dims + problem->col_dims; d++)
            reach += operand->stride[d] * (problem->extent[d] - 1);
        assert_in_range((uintptr_t)operand->data, begin, end);
        assert_in_range((uintptr_t)operand->data + (uintptr_t)((reach + 1) * size), begin, end);
        seen++;
    }
    assert_in_range(seen, 4, 10);
    if (problem->partial) assert_in_range((uintptr_t)problem->partial, begin, end);
    if (problem->sums) assert_in_range((uintptr_t)problem->sums, begin, end);
}

/* Operands and workspace of one launch may not share a byte: it would be measured faster than it is. */
static void assert_apart(const nji_problem *problem, const nj_desc *desc) {
    const nji_operand *a = &problem->x, *b;
    int64_t rows = problem->rows, cols = problem->cols;
    const char *workspace_end =
        (char *)problem->partial + problem->parts * 2 * cols * (int64_t)sizeof(float);
    for (; a < &problem->x + 10; a++) {
        int is_stat = a == &problem->mean || a == &problem->rstd;
        int is_full = a == &problem->x || a == &problem->dy || a == &problem->y || a == &problem->dx;
        size_t bytes = is_stat ? (size_t)rows * 4
                               : (size_t)(is_full ? rows * cols : cols) * nj_dtype_size(desc->dtype);
        if (!a->data) continue;
        assert_true(!problem->partial || (char *)a->data >= workspace_end);
        for (b = &problem->x; b < &problem->x + 10; b++) {
            if (b == a || !b->data || b->data < a->data) continue;
            assert_true((char *)b->data >= (char *)a->data + bytes);
        }
    }
}

static void measuring_launches_on_the_given_stream_and_within_the_scratch(void **state) {
    static const int64_t lengths[] = {64, 768, 4096, 20000};
    static const int64_t heights[] = {5, 1000, 40000};
    nj_ctx *ctx = cuda_ctx();
    size_t c, r;
    int measured = 0, which;
    (void)state;
    for (c = 0; c < COUNT_OF(lengths); c++) {
        for (r = 0; r < COUNT_OF(heights); r++) {
            nj_desc desc = desc_of(NJ_OP_LAYER_NORM_BACKWARD, heights[r], lengths[c]);
            size_t size[2];
            for (which = 0; which < 2; which++) {
                nj_preference pref = measuring();
                nj_plan *plan;
                int back;
                assert_int_equal(nj_tune_scratch_size(ctx, &desc, NULL, &size[0], &size[1]), NJ_OK);
                assert_true(size[0] <= size[1]);
                if (size[0] == 0) continue;
                /* as many rows as differ make it measure anew */
                desc.shape[0] -= which;
                pref.tune_scratch_bytes = size[which];
                fake.reset();
                plan = plan_with(ctx, desc, pref);
                assert_in_range(launches(), 2 * 6 * NJI_TUNE_LAUNCHES, 3 * 4 * 6 * NJI_TUNE_LAUNCHES);
                for (back = 0; back < 500 && back < launches(); back++) {
                    const nji_problem *problem = (const nji_problem *)fake.launch_problem(back);
                    assert_ptr_equal(fake.launch_stream(back), TUNE_STREAM);
                    assert_null(strstr(fake.launch_name(back), "strided"));
                    assert_in_range(problem->rows, 1, desc.shape[0]);
                    assert_within_scratch(problem, &desc, size[which]);
                    assert_apart(problem, &desc);
                }
                assert_ptr_equal(fake.timed_stream(), TUNE_STREAM);
                nj_plan_destroy(plan);
                measured++;
            }
        }
    }
    assert_in_range(measured, 8, 24);
    assert_int_equal(tunes_of(ctx), measured);
    nj_ctx_destroy(ctx);
}

static void winner_is_remembered_in_the_ctx(void **state) {
    nj_ctx *ctx = cuda_ctx();
    nj_desc desc = backward_desc(), other = desc;
    nji_choice choice[NJI_TUNE_CANDIDATES];
    nj_preference none = recalling();
    nj_plan *first, *second, *refused;
    (void)state;
    let_win(1, candidates_of(ctx, desc, choice));
    first = plan_with(ctx, desc, measuring());
    fake.reset();
    second = plan_with(ctx, desc, none);
    assert_int_equal(candidate_of(first), 1);
    assert_int_equal(candidate_of(second), 1);
    assert_int_equal(launches(), 0);
    assert_int_equal(tunes_of(ctx), 1);
    nj_plan_destroy(second);
    second = plan_of(ctx, desc); /* who does not ask gets the table's */
    assert_int_equal(candidate_of(second), 0);
    other.shape[0]++; /* another problem, another answer */
    assert_int_equal(nj_plan_select(&refused, ctx, &other, &none), NJ_WORKSPACE_TOO_SMALL);
    assert_null(refused);
    nj_plan_destroy(first);
    nj_plan_destroy(second);
    nj_ctx_destroy(ctx);
}

static void winner_is_remembered_on_disk(void **state) {
    char folder[] = "/tmp/normjit_test_XXXXXX";
    nj_ctx_desc ctx_desc = cuda_desc();
    nj_desc desc = backward_desc();
    nji_choice choice[NJI_TUNE_CANDIDATES];
    nj_preference none = recalling();
    nj_plan *plan;
    nj_ctx *ctx;
    int i;
    (void)state;
    assert_non_null(mkdtemp(folder));
    ctx_desc.cache_dir = folder;
    ctx = ctx_of(&ctx_desc);
    let_win(1, candidates_of(ctx, desc, choice));
    nj_plan_destroy(plan_with(ctx, desc, measuring()));
    nj_ctx_destroy(ctx);
    fake.reset();
    ctx = ctx_of(&ctx_desc);
    plan = plan_with(ctx, desc, none);
    assert_int_equal(candidate_of(plan), 1);
    assert_int_equal(launches(), 0);
    assert_int_equal(tunes_of(ctx), 0);
    assert_int_equal(ctx->cuda.jit.stats.compiles, 0);
    assert_int_equal(fake.live_modules(), modules_before + 3); /* the losers were not even loaded */
    assert_int_equal(ctx->cuda.jit.stats.disk_hits, 4);        /* three programs and the record */
    nj_plan_destroy(plan);
    plan = plan_with(ctx, desc, none); /* the ctx knows it by now */
    assert_int_equal(candidate_of(plan), 1);
    assert_int_equal(ctx->cuda.jit.stats.disk_hits, 4);
    nj_plan_destroy(plan);
    nj_ctx_destroy(ctx);
    for (i = 0; i < 2; i++) { /* an answer is for its architecture and for devices of its name */
        if (i == 0) set("NJ_FAKE_CC", "80");
        else set("NJ_FAKE_DEVICES", "2");
        ctx_desc.device = i;
        ctx = ctx_of(&ctx_desc);
        assert_int_equal(nj_plan_select(&plan, ctx, &desc, &none), NJ_WORKSPACE_TOO_SMALL);
        nj_ctx_destroy(ctx);
        unsetenv("NJ_FAKE_CC");
    }
    remove_folder(folder);
}

static char record_path[512];

static int find_record(const char *path, const struct stat *info, int type, struct FTW *at) {
    (void)at;
    if (type == FTW_F && info->st_size == sizeof(nji_jit_entry) + sizeof(nji_tune_record))
        snprintf(record_path, sizeof record_path, "%s", path);
    return 0;
}

/* Selects in a new ctx; 1 when it measured, whether or not another ctx had. */
static int measures(const nj_ctx_desc *ctx_desc, nj_desc desc, int expected) {
    nj_ctx *ctx = ctx_of(ctx_desc);
    nj_plan *plan = plan_with(ctx, desc, measuring());
    int tunes = (int)tunes_of(ctx);
    assert_int_equal(candidate_of(plan), expected);
    nj_plan_destroy(plan);
    nj_ctx_destroy(ctx);
    return tunes;
}

static void damaged_record_is_measured_again(void **state) {
    char folder[] = "/tmp/normjit_test_XXXXXX";
    unsigned char sound[sizeof(nji_jit_entry) + sizeof(nji_tune_record)];
    nji_choice choice[NJI_TUNE_CANDIDATES];
    nj_ctx_desc ctx_desc = cuda_desc();
    nj_desc desc = backward_desc();
    nj_ctx *ctx;
    size_t i;
    FILE *file;
    (void)state;
    assert_non_null(mkdtemp(folder));
    ctx_desc.cache_dir = folder;
    ctx = ctx_of(&ctx_desc);
    let_win(1, candidates_of(ctx, desc, choice));
    nj_ctx_destroy(ctx);
    assert_int_equal(measures(&ctx_desc, desc, 1), 1);
    assert_int_equal(measures(&ctx_desc, desc, 1), 0);
    record_path[0] = 0;
    assert_int_equal(nftw(folder, find_record, 16, FTW_PHYS), 0);
    file = fopen(record_path, "rb");
    assert_non_null(file);
    assert_int_equal(fread(sound, sizeof sound, 1, file), 1);
    fclose(file);
    for (i = 0; i < sizeof sound; i += 5) {
        unsigned char bad[sizeof sound];
        memcpy(bad, sound, sizeof bad);
        bad[i] ^= 1;
        file = fopen(record_path, "wb");
        assert_int_equal(fwrite(bad, sizeof bad, 1, file), 1);
        fclose(file);
        assert_int_equal(measures(&ctx_desc, desc, 1), 1);
        assert_int_equal(measures(&ctx_desc, desc, 1), 0); /* it was written anew */
    }
    remove_folder(folder);
}

/* A record may be whole and still make no sense: one of another list, or past the list's end. */
static void record_of_no_candidate_is_measured_again(void **state) {
    char folder[] = "/tmp/normjit_test_XXXXXX";
    nji_tune_record wrong[3];
    nji_choice choice[NJI_TUNE_CANDIDATES];
    nj_ctx_desc ctx_desc = cuda_desc();
    nj_desc desc = backward_desc();
    size_t i;
    (void)state;
    assert_non_null(mkdtemp(folder));
    ctx_desc.cache_dir = folder;
    for (i = 0; i < COUNT_OF(wrong); i++) {
        nj_ctx *ctx = ctx_of(&ctx_desc);
        nji_cuda *cuda = &ctx->cuda;
        nj_preference pref = measuring();
        uint32_t count = (uint32_t)candidates_of(ctx, desc, choice);
        nji_jit_digest digest;
        nji_cuda_plan plan;
        nji_trial trial;
        nj_desc full = desc;
        int64_t rows, cols;
        assert_int_equal(nji_check_desc(&full, &rows, &cols, "test"), NJ_OK);
        assert_int_equal(nji_cuda_choose(cuda, &full, rows, cols, &pref, &plan, "test"), NJ_OK);
        nji_trial_make(&trial, cuda, &plan, rows, cols, &pref);
        digest = nji_tune_digest(cuda, &plan, &trial, rows);
        wrong[i].candidate = i == 0 ? count : i == 1 ? UINT32_MAX : 0;
        wrong[i].count = i == 2 ? count + 1 : count;
        nji_jit_remember(&cuda->jit, &digest, &wrong[i], sizeof wrong[i], "a wrong record");
        nj_ctx_destroy(ctx);
        let_win(1, (int)count);
        assert_int_equal(measures(&ctx_desc, desc, 1), 1);
        assert_int_equal(measures(&ctx_desc, desc, 1), 0);
    }
    remove_folder(folder);
}

static void assert_measuring_fails(nj_ctx *ctx, nj_desc desc, const nj_preference *pref,
                                   nj_status status, const char *text) {
    nj_plan *plan = (nj_plan *)&plan;
    assert_failed_by(nj_plan_select(&plan, ctx, &desc, pref), status, 0, text);
    assert_null(plan);
    assert_int_equal(fake.pushed(), 0);
    assert_int_equal(launches(), 0);
    assert_int_equal(fake.nvrtc_compiles(), 0);
    assert_int_equal(fake.live_events(), 0);
}

static void scratch_that_will_not_do_is_refused_before_anything_is_compiled(void **state) {
    nj_ctx *ctx = cuda_ctx();
    nj_desc desc = backward_desc();
    nj_preference pref = measuring();
    nj_error_info info;
    size_t least, enough;
    char text[256];
    (void)state;
    assert_int_equal(nj_tune_scratch_size(ctx, &desc, NULL, &least, &enough), NJ_OK);
    assert_in_range(least, 1, enough);
    pref.tune_scratch_bytes = least - 1;
    snprintf(text, sizeof text,
             "nj_plan_select: pref.tune_scratch_bytes = %zu: measuring needs %zu bytes", least - 1,
             least);
    assert_measuring_fails(ctx, desc, &pref, NJ_WORKSPACE_TOO_SMALL, text);
    nj_last_error_info(&info);
    assert_int_equal(info.needed, least);
    assert_int_equal(info.got, least - 1);
    pref.tune_scratch_bytes = least;
    pref.tune_scratch = NULL;
    snprintf(text, sizeof text, "nj_plan_select: pref.tune_scratch = NULL: measuring needs %zu bytes",
             least);
    assert_measuring_fails(ctx, desc, &pref, NJ_INVALID_ARGUMENT, text);
    pref.tune_scratch = (char *)SCRATCH + 128;
    snprintf(text, sizeof text,
             "nj_plan_select: pref.tune_scratch = %p: must be a multiple of 256 bytes",
             pref.tune_scratch);
    assert_measuring_fails(ctx, desc, &pref, NJ_MISALIGNED_OPERAND, text);
    pref = measuring();
    pref.tune = (nj_tune)2;
    assert_measuring_fails(ctx, desc, &pref, NJ_INVALID_ARGUMENT,
                           "nj_plan_select: pref.tune = 2: must be one of NJ_TUNE_*");
    pref = measuring();
    pref.tune_scratch_bytes = least; /* is enough */
    nj_plan_destroy(plan_with(ctx, desc, pref));
    nj_ctx_destroy(ctx);
}

static void measuring_is_refused_during_capture(void **state) {
    static const char refusal[] =
        "nj_plan_select: a stream is being captured: select plans before the capture begins";
    static const char *const calls[] = {"cuStreamIsCapturing=906@1", "cuStreamIsCapturing=900@2",
                                        "cuEventRecord=900", "cuEventSynchronize=906"};
    nj_ctx *ctx = cuda_ctx();
    nj_preference pref = measuring();
    size_t i;
    (void)state;
    set("NJ_FAKE_CAPTURING", "1");
    assert_measuring_fails(ctx, backward_desc(), &pref, NJ_UNSUPPORTED, refusal);
    set("NJ_FAKE_CAPTURING", "0");
    for (i = 0; i < COUNT_OF(calls); i++) {
        nj_desc desc = backward_desc();
        nj_plan *plan;
        fake.reset();
        set("NJ_FAKE_FAIL", calls[i]);
        assert_failed_by(nj_plan_select(&plan, ctx, &desc, &pref), NJ_UNSUPPORTED, 0, refusal);
        assert_null(plan);
        assert_int_equal(fake.live_events(), 0);
    }
    assert_int_equal(tunes_of(ctx), 0);
    nj_ctx_destroy(ctx);
}

static void driver_without_events_is_unsupported(void **state) {
    nj_ctx *ctx = cuda_ctx();
    nj_desc desc = backward_desc();
    nj_preference pref = measuring();
    nj_plan *plan;
    (void)state;
    ctx->cuda.driver.cuEventElapsedTime = NULL;
    assert_failed_by(nj_plan_select(&plan, ctx, &desc, &pref), NJ_UNSUPPORTED, 0,
                     "nj_plan_select: pref.tune = NJ_TUNE_MEASURE: this driver has no events");
    assert_null(plan);
    nj_plan_destroy(plan_of(ctx, desc));
    nj_ctx_destroy(ctx);
}

static void nothing_is_measured_where_there_is_no_choice(void **state) {
    nj_desc desc[5] = {backward_desc(), backward_desc(), backward_desc(), backward_desc(),
                       backward_desc()};
    int i;
    (void)state;
    desc[0].shape[0] = 0;
    desc[1].shape[1] = 0;
    /* 2: the host; 3: the embedded PTX */
    desc[4].shape[1] = (int64_t)1 << 29; /* more columns than the fast kernels take */
    desc[4].shape[0] = 1;
    for (i = 0; i < 5; i++) {
        nj_ctx_desc ctx_desc = cuda_desc();
        nj_preference pref = recalling();
        nj_precision precision;
        size_t least = 1, enough = 1;
        nj_plan *plan;
        nj_ctx *ctx;
        if (i == 2) pref.prefer_backend = NJ_BACKEND_HOST;
        if (i == 3) ctx_desc.flags = NJ_CTX_FALLBACK_PTX;
        ctx = ctx_of(&ctx_desc);
        assert_int_equal(nj_tune_scratch_size(ctx, &desc[i], &pref, &least, &enough), NJ_OK);
        assert_int_equal(least, 0);
        assert_int_equal(enough, 0);
        plan = plan_with(ctx, desc[i], pref);
        assert_int_equal(candidate_of(plan), 0);
        assert_int_equal(nj_plan_precision(plan, &precision), NJ_OK);
        assert_int_equal(precision.bit_stable_on_same_hardware, 1);
        assert_int_equal(launches(), 0);
        assert_int_equal(tunes_of(ctx), 0);
        nj_plan_destroy(plan);
        nj_ctx_destroy(ctx);
    }
}

static void scratch_sizes_are_asked_for_with_a_sound_descriptor(void **state) {
    nj_ctx *ctx = cuda_ctx();
    nj_desc desc = backward_desc();
    size_t least = 1, enough = 1;
    (void)state;
    assert_failed_by(nj_tune_scratch_size(NULL, &desc, NULL, &least, &enough), NJ_INVALID_ARGUMENT,
                     0, "nj_tune_scratch_size: ctx = NULL: a ctx is required");
    assert_int_equal(least, 0);
    assert_int_equal(enough, 0);
    assert_failed_by(nj_tune_scratch_size(ctx, NULL, NULL, &least, &enough), NJ_INVALID_ARGUMENT, 0,
                     "nj_tune_scratch_size: desc = NULL: a descriptor is required");
    assert_failed_by(nj_tune_scratch_size(ctx, &desc, NULL, NULL, &enough), NJ_INVALID_ARGUMENT, 0,
                     "nj_tune_scratch_size: least = NULL: nowhere to put it");
    assert_failed_by(nj_tune_scratch_size(ctx, &desc, NULL, &least, NULL), NJ_INVALID_ARGUMENT, 0,
                     "nj_tune_scratch_size: enough = NULL: nowhere to put it");
    desc.rank = 0;
    assert_failed_by(nj_tune_scratch_size(ctx, &desc, NULL, &least, &enough), NJ_INVALID_ARGUMENT,
                     0, "nj_tune_scratch_size: desc.rank = 0: a rank is 1 to 8");
    nj_ctx_destroy(ctx);
}

/* Only the order in which rows are added up is the winner's. */
static void measured_plan_says_which_bits_it_can_promise(void **state) {
    nj_ctx *ctx = cuda_ctx();
    nj_desc desc = backward_desc();
    nj_preference pref = measuring();
    uint32_t grads;
    (void)state;
    pref.deterministic = pref.batch_invariant = 1;
    for (grads = 1; grads <= ALL_GRADS; grads++) {
        nj_precision precision;
        nj_plan *plan;
        desc.grads = grads;
        plan = plan_with(ctx, desc, pref);
        assert_int_equal(nj_plan_precision(plan, &precision), NJ_OK);
        assert_int_equal(precision.deterministic, 1);
        assert_int_equal(precision.batch_invariant, 1);
        assert_int_equal(precision.bit_stable_on_same_hardware, grads == NJ_GRAD_DX);
        nj_plan_destroy(plan);
    }
    nj_ctx_destroy(ctx);
}

static void measuring_releases_everything_whichever_driver_call_fails(void **state) {
    static const char *const calls[] = {
        "cuCtxPushCurrent_v2", "cuStreamIsCapturing", "cuModuleLoadDataEx", "cuModuleGetFunction",
        "cuLaunchKernelEx",    "cuEventCreate",       "cuEventRecord",      "cuEventSynchronize",
        "cuEventElapsedTime"};
    nj_desc desc = backward_desc();
    nj_preference pref = measuring();
    size_t i;
    (void)state;
    for (i = 0; i < COUNT_OF(calls); i++) {
        nj_ctx *ctx = cuda_ctx();
        int count, call;
        fake.reset();
        nj_plan_destroy(plan_with(ctx, desc, pref));
        count = fake.count(calls[i]);
        nj_ctx_destroy(ctx);
        assert_in_range(count, 1, 10000);
        for (call = 1; call <= count; call += call < 12 ? 1 : 29) {
            char fault[96];
            nj_plan *plan = (nj_plan *)&plan;
            ctx = cuda_ctx();
            fake.reset();
            snprintf(fault, sizeof fault, "%s=999@%d", calls[i], call);
            set("NJ_FAKE_FAIL", fault);
            if (nj_plan_select(&plan, ctx, &desc, &pref) != NJ_DRIVER)
                fail_msg("%s: %s", fault, nj_last_error());
            assert_null(plan);
            assert_int_equal(fake.live_events(), 0);
            assert_int_equal(fake.pushed(), 0);
            set("NJ_FAKE_FAIL", "");
            plan = plan_with(ctx, desc, pref); /* the ctx is as good as before */
            nj_plan_destroy(plan);
            nj_ctx_destroy(ctx);
            assert_all_released();
        }
    }
}

static void measuring_releases_everything_whichever_allocation_fails(void **state) {
    char folder[] = "/tmp/normjit_test_XXXXXX";
    nj_ctx_desc ctx_desc = cuda_desc();
    nj_desc desc = backward_desc();
    nj_preference pref = measuring();
    int nth, left = 0;
    (void)state;
    assert_non_null(mkdtemp(folder));
    ctx_desc.cache_dir = folder;
    for (nth = 1; left == 0; nth++) {
        nj_ctx *ctx = ctx_of(&ctx_desc);
        nj_plan *plan;
        nj_status status;
        fail_at = nth;
        status = nj_plan_select(&plan, ctx, &desc, &pref);
        left = fail_at;
        fail_at = 0;
        if (status != NJ_OK) assert_int_equal(status, NJ_OUT_OF_MEMORY);
        nj_plan_destroy(plan);
        nj_ctx_destroy(ctx);
        assert_all_released();
        remove_folder(folder);
    }
    assert_true(nth > 10);
}

/* A driver too old for this NVRTC's kernels: the embedded PTX, as without measuring. */
static void refused_candidates_leave_the_embedded_ptx(void **state) {
    nj_ctx *ctx = cuda_ctx();
    nj_desc desc = backward_desc();
    char before[4096];
    nj_plan *plan;
    nj_sku sku;
    (void)state;
    snprintf(before, sizeof before, "%s", nj_last_error());
    fake.reset();
    set("NJ_FAKE_FAIL", "cuModuleLoadDataEx=222@1,cuModuleLoadDataEx=222@2");
    plan = plan_with(ctx, desc, measuring());
    assert_int_equal(nj_plan_sku(plan, NULL, &sku), NJ_OK);
    assert_int_equal(sku.source, NJ_SOURCE_FALLBACK_PTX);
    assert_int_equal(sku.candidate, 0);
    assert_string_equal(nj_last_error(), before); /* what is no failure leaves it alone */
    assert_int_equal(tunes_of(ctx), 0);
    nj_plan_destroy(plan);
    nj_ctx_destroy(ctx);
}

/* ---- threads -------------------------------------------------------------------------------- */

typedef struct worker {
    nj_ctx *ctx;
    const nj_plan *plan;
    const char *complaint;
} worker;

/* A thread without a CUDA context of its own runs the shared plan and selects plans of its own. */
static void *work(void *arg) {
    worker *w = (worker *)arg;
    nj_desc desc = forward_desc();
    nj_args args = args_of(&desc);
    int i;
    for (i = 0; i < 50 && !w->complaint; i++) {
        nj_plan *plan;
        if (run(w->plan, &args) != NJ_OK) w->complaint = "run failed";
        desc.shape[1] = 512 + 8 * (i % 5);
        if (nj_plan_select(&plan, w->ctx, &desc, NULL) != NJ_OK) {
            w->complaint = "select failed";
        } else {
            nj_plan_destroy(plan);
        }
        if (fake.pushed() != 0) w->complaint = "a context stayed current";
    }
    return NULL;
}

static void threads_share_a_ctx_and_a_plan(void **state) {
    nj_ctx *ctx = cuda_ctx();
    nj_plan *plan = plan_of(ctx, forward_desc());
    pthread_t thread[4];
    worker workers[4];
    nj_cache_stats stats;
    int i;
    (void)state;
    fake.reset();
    for (i = 0; i < 4; i++) {
        workers[i].ctx = ctx;
        workers[i].plan = plan;
        workers[i].complaint = NULL;
        assert_int_equal(pthread_create(&thread[i], NULL, work, &workers[i]), 0);
    }
    for (i = 0; i < 4; i++) {
        assert_int_equal(pthread_join(thread[i], NULL), 0);
        if (workers[i].complaint) fail_msg("%s", workers[i].complaint);
    }
    assert_int_equal(launches(), 4 * 50);
    assert_int_equal(nj_ctx_cache_stats(ctx, &stats), NJ_OK);
    /* two programs for each of 6 lengths and the strided one, each compiled once */
    assert_int_equal(stats.compiles, 13);
    assert_int_equal(stats.modules, 13);
    nj_plan_destroy(plan);
    nj_ctx_destroy(ctx);
}

static void *measure_too(void *arg) {
    worker *w = (worker *)arg;
    nj_desc desc = backward_desc();
    nj_preference pref = measuring();
    nj_plan *plan;
    if (nj_plan_select(&plan, w->ctx, &desc, &pref) != NJ_OK) w->complaint = "select failed";
    else if (plan->cuda.candidate != 1) w->complaint = "another won";
    nj_plan_destroy(plan);
    return NULL;
}

static void threads_measure_one_descriptor_once(void **state) {
    nj_ctx *ctx = cuda_ctx();
    nji_choice choice[NJI_TUNE_CANDIDATES];
    pthread_t thread[4];
    worker workers[4];
    int i;
    (void)state;
    let_win(1, candidates_of(ctx, backward_desc(), choice));
    for (i = 0; i < 4; i++) {
        workers[i].ctx = ctx;
        workers[i].complaint = NULL;
        assert_int_equal(pthread_create(&thread[i], NULL, measure_too, &workers[i]), 0);
    }
    for (i = 0; i < 4; i++) {
        assert_int_equal(pthread_join(thread[i], NULL), 0);
        if (workers[i].complaint) fail_msg("%s", workers[i].complaint);
    }
    assert_int_equal(tunes_of(ctx), 1);
    nj_ctx_destroy(ctx);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(info_names_device_driver_and_nvrtc),
        TEST(auto_takes_the_gpu),
        TEST(no_device_is_unsupported),
        TEST(device_that_is_not_there_is_unsupported),
        TEST(old_driver_is_unsupported),
        TEST(old_device_is_unsupported),
        TEST(auto_falls_to_the_host_where_cuda_fails),
        TEST(nvrtc_that_was_named_must_be_there),
        TEST(ctx_holds_the_primary_context_until_its_last_plan_goes),
        TEST(ctx_binds_to_the_callers_context_of_its_device),
        TEST(callers_context_is_current_again_after_every_call),
        TEST(two_devices_each_get_their_own_modules_and_launches),
        TEST(kernels_are_compiled_for_the_device_and_the_sku_says_so),
        TEST(arch_specific_code_is_made_only_when_allowed),
        TEST(device_newer_than_nvrtc_gets_ptx_and_a_warning),
        TEST(without_nvrtc_the_embedded_ptx_serves_every_type_and_direction),
        TEST(failed_compilation_gives_nvrtcs_log),
        TEST(refused_image_gives_the_drivers_word),
        TEST(driver_older_than_nvrtc_gets_the_embedded_ptx_and_a_warning),
        TEST(device_out_of_memory_is_out_of_memory),
        TEST(missing_kernel_is_a_driver_error),
        TEST(select_during_capture_is_refused_before_anything_is_made),
        TEST(second_select_compiles_and_loads_nothing),
        TEST(second_ctx_finds_the_kernels_on_disk),
        TEST(workspace_limits_are_kept),
        TEST(workspace_of_the_gpu_is_aligned_to_256_bytes),
        TEST(run_launches_and_does_nothing_else),
        TEST(empty_problems_launch_only_what_has_elements_to_write),
        TEST(launch_carries_the_problem_to_the_callers_stream),
        TEST(few_rows_take_one_launch),
        TEST(partial_gradients_fit_the_workspace),
        TEST(forward_operands_that_the_rows_kernels_cannot_read_take_the_loose_ones),
        TEST(broadcast_gradient_takes_the_loose_kernels),
        TEST(tiles_plan_takes_packed_rows_with_the_loose_kernels),
        TEST(columns_of_two_strides_take_the_strided_kernels),
        TEST(failed_launch_names_the_call_and_the_error),
        TEST(older_drivers_and_devices_get_plain_launches),
        TEST(host_plan_of_a_cuda_ctx_asks_nothing_of_the_driver),
        TEST(pointers_are_checked_when_asked_for),
        TEST(pointers_are_not_asked_about_otherwise),
        TEST(everything_is_released_whichever_driver_call_fails),
        TEST(everything_is_released_whichever_allocation_fails),
        TEST(fastest_geometry_is_the_plans),
        TEST(tables_geometry_stays_unless_another_is_clearly_faster),
        TEST(least_time_counts_and_the_first_round_does_not),
        TEST(measuring_launches_on_the_given_stream_and_within_the_scratch),
        TEST(winner_is_remembered_in_the_ctx),
        TEST(winner_is_remembered_on_disk),
        TEST(damaged_record_is_measured_again),
        TEST(record_of_no_candidate_is_measured_again),
        TEST(scratch_that_will_not_do_is_refused_before_anything_is_compiled),
        TEST(measuring_is_refused_during_capture),
        TEST(driver_without_events_is_unsupported),
        TEST(nothing_is_measured_where_there_is_no_choice),
        TEST(scratch_sizes_are_asked_for_with_a_sound_descriptor),
        TEST(measured_plan_says_which_bits_it_can_promise),
        TEST(measuring_releases_everything_whichever_driver_call_fails),
        TEST(measuring_releases_everything_whichever_allocation_fails),
        TEST(refused_candidates_leave_the_embedded_ptx),
        TEST(threads_share_a_ctx_and_a_plan),
        TEST(threads_measure_one_descriptor_once),
    };
    return cmocka_run_group_tests_name("CUDA path", tests, open_fakes, NULL);
}
