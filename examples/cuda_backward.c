/* LayerNorm forward and backward in a program that uses the CUDA driver API itself: normjit binds
   to the context that is current and runs on the program's own stream. The gradients are compared
   with a loop in C. Needs the CUDA toolkit's header and a driver.

     cc -Iinclude -I/usr/local/cuda/include -o cuda_backward examples/cuda_backward.c \
        -L/usr/local/cuda/lib64/stubs -lcuda -lm -ldl -lpthread */
#define NORMJIT_IMPLEMENTATION
#include "normjit.h"

#include <cuda.h>
#include <float.h>

enum { ROWS = 1000, COLS = 768 };

static void check(CUresult result, int line) {
    const char *text = NULL;
    if (result == CUDA_SUCCESS) return;
    cuGetErrorString(result, &text); /* leaves NULL for a number that it does not know */
    fprintf(stderr, "line %d: CUDA error %d: %s\n", line, (int)result, text ? text : "?");
    exit(1);
}
#define CHECK(call) check(call, __LINE__)

static void check_nj(nj_status status) {
    if (status == NJ_OK) return;
    fprintf(stderr, "%s: %s\n", nj_status_string(status), nj_last_error());
    exit(1);
}

/* count floats on the device, copied from host or, where that is NULL, not set. */
static float *device_array(const float *host, size_t count, CUstream stream) {
    CUdeviceptr p;
    CHECK(cuMemAlloc(&p, count * sizeof *host));
    if (host) CHECK(cuMemcpyHtoDAsync(p, host, count * sizeof *host, stream));
    return (float *)(uintptr_t)p;
}

/* NaN when either is: fmax would drop it. */
static double larger(double a, double b) {
    return a > b || isnan(a) ? a : b;
}

static float x[ROWS * COLS], dy[ROWS * COLS], dx[ROWS * COLS], gamma_[COLS], dgamma[COLS];
static double want_dgamma[COLS];

/* The largest error of dx; fills want_dgamma. */
static double compare_rows(double eps) {
    double worst = 0;
    int r, c;
    for (r = 0; r < ROWS; r++) {
        const float *xr = x + r * COLS, *dyr = dy + r * COLS, *dxr = dx + r * COLS;
        double mean = 0, var = 0, g_mean = 0, gx_mean = 0, rstd;
        for (c = 0; c < COLS; c++) mean += xr[c] / (double)COLS;
        for (c = 0; c < COLS; c++) var += (xr[c] - mean) * (xr[c] - mean) / COLS;
        rstd = 1.0 / sqrt(var + eps);
        for (c = 0; c < COLS; c++) {
            const double xhat = (xr[c] - mean) * rstd, g = (double)dyr[c] * gamma_[c];
            g_mean += g / COLS;
            gx_mean += g * xhat / COLS;
            want_dgamma[c] += dyr[c] * xhat;
        }
        for (c = 0; c < COLS; c++) {
            const double xhat = (xr[c] - mean) * rstd, g = (double)dyr[c] * gamma_[c];
            worst = larger(worst, fabs(dxr[c] - rstd * (g - g_mean - xhat * gx_mean)));
        }
    }
    return worst;
}

int main(void) {
    const int64_t shape[2] = {ROWS, COLS}, stats[2] = {ROWS, 1}, params[1] = {COLS};
    /* x is in [0, 4): the sum behind its mean gathers sqrt(COLS) random roundings of partial sums
       up to 2 COLS, so the mean errs by 2 sqrt(COLS) eps, and dx no more. dgamma's terms are random
       and below 2: partial sums up to 2 sqrt(ROWS), sqrt(ROWS) roundings of those. Both times 4. */
    const double dx_tolerance = 8.0 * FLT_EPSILON * sqrt(COLS);
    const double dgamma_tolerance = 8.0 * FLT_EPSILON * ROWS;
    CUdevice device;
    CUcontext context;
    CUstream stream;
    CUdeviceptr workspace = 0;
    nj_ctx_desc ctx_desc = {0};
    nj_desc desc = {0};
    nj_args args = {0};
    nj_ctx *ctx;
    nj_plan *forward, *backward;
    size_t size;
    double dx_error, dgamma_error = 0;
    float *d_x, *d_dy, *d_gamma, *d_mean, *d_rstd, *d_y, *d_dx, *d_dgamma;
    int i;

    for (i = 0; i < ROWS * COLS; i++) {
        x[i] = (float)((uint32_t)i * 2654435761u >> 8) / (float)(1 << 24) * 4.0f; /* in [0, 4) */
        dy[i] = (float)((uint32_t)i * 2246822519u >> 8) / (float)(1 << 24) * 2.0f - 1.0f;
    }
    for (i = 0; i < COLS; i++) gamma_[i] = 0.5f + (float)i / COLS;

    CHECK(cuInit(0));
    CHECK(cuDeviceGet(&device, 0));
    CHECK(cuDevicePrimaryCtxRetain(&context, device));
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));

    ctx_desc.backend = NJ_BACKEND_CUDA;
    check_nj(nj_ctx_create(&ctx, &ctx_desc));
    printf("%s\n", nj_ctx_info(ctx));
    desc.op = NJ_OP_LAYER_NORM_FORWARD;
    desc.rank = 2;
    desc.shape[0] = ROWS;
    desc.shape[1] = COLS;
    desc.norm_axes = 1u << 1;
    desc.dtype = NJ_F32;
    desc.has_gamma = 1;
    desc.eps = 1e-5;
    check_nj(nj_plan_select(&forward, ctx, &desc, NULL)); /* compiles here, once */
    desc.op = NJ_OP_LAYER_NORM_BACKWARD;                  /* dx and dgamma by default */
    check_nj(nj_plan_select(&backward, ctx, &desc, NULL));
    size = nj_plan_workspace_size(forward);
    if (size < nj_plan_workspace_size(backward)) size = nj_plan_workspace_size(backward);
    if (size > 0) CHECK(cuMemAlloc(&workspace, size));

    d_x = device_array(x, ROWS * COLS, stream);
    d_dy = device_array(dy, ROWS * COLS, stream);
    d_gamma = device_array(gamma_, COLS, stream);
    d_mean = device_array(NULL, ROWS, stream);
    d_rstd = device_array(NULL, ROWS, stream);
    d_y = device_array(NULL, ROWS * COLS, stream);
    d_dx = device_array(NULL, ROWS * COLS, stream);
    d_dgamma = device_array(NULL, COLS, stream);
    args.x = nj_packed_const(d_x, 2, shape);
    args.dy = nj_packed_const(d_dy, 2, shape);
    args.gamma = nj_packed_const(d_gamma, 1, params);
    args.mean = nj_packed(d_mean, 2, stats);
    args.rstd = nj_packed(d_rstd, 2, stats);
    args.y = nj_packed(d_y, 2, shape);
    args.dx = nj_packed(d_dx, 2, shape);
    args.dgamma = nj_packed(d_dgamma, 1, params);
    /* Enqueued one after the other; could be captured into a graph just so. */
    check_nj(nj_plan_run(forward, &args, (void *)(uintptr_t)workspace, size, stream));
    check_nj(nj_plan_run(backward, &args, (void *)(uintptr_t)workspace, size, stream));
    CHECK(cuMemcpyDtoHAsync(dx, (CUdeviceptr)(uintptr_t)d_dx, sizeof dx, stream));
    CHECK(cuMemcpyDtoHAsync(dgamma, (CUdeviceptr)(uintptr_t)d_dgamma, sizeof dgamma, stream));
    CHECK(cuStreamSynchronize(stream));

    dx_error = compare_rows(desc.eps);
    for (i = 0; i < COLS; i++)
        dgamma_error = larger(dgamma_error, fabs(dgamma[i] - want_dgamma[i]));
    printf("dx: largest error %.2g, tolerance %.2g\n", dx_error, dx_tolerance);
    printf("dgamma: largest error %.2g, tolerance %.2g\n", dgamma_error, dgamma_tolerance);

    nj_plan_destroy(backward);
    nj_plan_destroy(forward);
    nj_ctx_destroy(ctx);
    {
        float *const arrays[] = {d_x, d_dy, d_gamma, d_mean, d_rstd, d_y, d_dx, d_dgamma};
        for (i = 0; i < (int)(sizeof arrays / sizeof *arrays); i++)
            CHECK(cuMemFree((CUdeviceptr)(uintptr_t)arrays[i]));
    }
    if (workspace) CHECK(cuMemFree(workspace));
    CHECK(cuStreamDestroy(stream));
    CHECK(cuDevicePrimaryCtxRelease(device));
    return dx_error <= dx_tolerance && dgamma_error <= dgamma_tolerance ? 0 : 1;
}
