/* NCHW, normalized over the channels (axis 1), without a transposing copy: strides describe the
   data as it lies. Then the same over every second row of the images, x[:, :, ::2, :], written
   channels-last. On the GPU when there is one, else on the host.

     cc -Iinclude -o channels_first examples/channels_first.c -lm -ldl -lpthread */
#define NORMJIT_IMPLEMENTATION
#include "normjit.h"

#include "gpu.h"

#include <float.h>

enum { N = 2, C = 48, H = 6, W = 10, COUNT = N * C * H * W };

static gpu device;
static int on_device;

static void check(int good, const char *why) {
    if (good) return;
    fprintf(stderr, "channels_first: %s\n", why);
    exit(1);
}

static void check_nj(nj_status status) {
    check(status == NJ_OK, nj_last_error());
}

/* Where the backend computes; bytes may be 0. */
static void *allocate(size_t bytes) {
    void *p = on_device ? gpu_alloc(&device, bytes + 1) : malloc(bytes + 1);
    check(p != NULL, on_device ? device.error : "out of memory");
    return p;
}

static void release(void *p) {
    if (on_device) gpu_free(&device, p);
    else free(p);
}

/* y = norm(x) over axis 1, without gamma and beta. */
static void norm_channels(nj_ctx *ctx, nj_const_tensor x, nj_tensor y) {
    nj_desc desc = {0};
    nj_args args = {0};
    nj_plan *plan;
    nj_sku sku;
    size_t size;
    void *workspace;
    desc.op = NJ_OP_LAYER_NORM_FORWARD;
    desc.rank = x.rank;
    memcpy(desc.shape, x.shape, sizeof desc.shape);
    desc.norm_axes = 1u << 1;
    desc.dtype = NJ_F32;
    desc.eps = 1e-5;
    check_nj(nj_plan_select(&plan, ctx, &desc, NULL));
    args.x = x;
    args.y = y; /* mean and rstd are not wanted: left out */
    check_nj(nj_plan_sku(plan, &args, &sku));
    printf("kernel %s\n", sku.kernel);
    size = nj_plan_workspace_size(plan);
    workspace = allocate(size);
    check_nj(nj_plan_run(plan, &args, workspace, size, on_device ? device.stream : NULL));
    if (on_device) check(gpu_wait(&device), device.error);
    release(workspace);
    nj_plan_destroy(plan);
}

static float at(const float *data, nj_const_tensor t, int n, int c, int h, int w) {
    return data[t.offset + n * t.stride[0] + c * t.stride[1] + h * t.stride[2] + w * t.stride[3]];
}

/* NaN when either is: fmax would drop it. */
static double larger(double a, double b) {
    return a > b || isnan(a) ? a : b;
}

/* The largest difference from the formula in double. */
static double compare(const float *x_host, nj_const_tensor x, const float *y_host,
                      nj_const_tensor y) {
    double worst = 0;
    int n, c, h, w;
    for (n = 0; n < x.shape[0]; n++)
        for (h = 0; h < x.shape[2]; h++)
            for (w = 0; w < x.shape[3]; w++) {
                double mean = 0, var = 0;
                for (c = 0; c < C; c++) mean += at(x_host, x, n, c, h, w) / (double)C;
                for (c = 0; c < C; c++) var += pow(at(x_host, x, n, c, h, w) - mean, 2) / C;
                for (c = 0; c < C; c++) {
                    const double want = (at(x_host, x, n, c, h, w) - mean) / sqrt(var + 1e-5);
                    worst = larger(worst, fabs(want - at(y_host, y, n, c, h, w)));
                }
            }
    return worst;
}

int main(void) {
    const int64_t shape[4] = {N, C, H, W};
    /* x is in [0, 2) and y below 3: a mean of C numbers errs by at most C roundings of them, and y
       by that over the standard deviation, near 0.6. */
    const double tolerance = C * FLT_EPSILON * 2.0 / 0.6 * 3.0;
    static float x_host[COUNT], y_host[COUNT];
    float *x_data, *y_data;
    double whole, slice;
    nj_ctx *ctx;
    nj_const_tensor x;
    nj_tensor y;
    int i;

    check_nj(nj_ctx_create(&ctx, NULL)); /* AUTO */
    printf("%s\n", nj_ctx_info(ctx));
    on_device = nj_ctx_backend(ctx) == NJ_BACKEND_CUDA;
    if (on_device) check(gpu_open(&device, 0), device.error);
    for (i = 0; i < COUNT; i++) x_host[i] = (float)(i * 37 % 101) / 50.5f;
    x_data = (float *)allocate(sizeof x_host);
    y_data = (float *)allocate(sizeof y_host);
    if (on_device) check(gpu_upload(&device, x_data, x_host, sizeof x_host), device.error);
    else memcpy(x_data, x_host, sizeof x_host);

    x = nj_packed_const(x_data, 4, shape); /* NCHW as it lies */
    y = nj_packed(y_data, 4, shape);
    norm_channels(ctx, x, y);
    if (on_device) check(gpu_download(&device, y_host, y_data, sizeof y_host), device.error);
    else memcpy(y_host, y_data, sizeof y_host);
    whole = compare(x_host, x, y_host, nj_as_const(y));

    x.shape[2] = y.shape[2] = H / 2; /* x[:, :, ::2, :] */
    x.stride[2] *= 2;
    y.stride[0] = C * (H / 2) * W; /* y in the order NHWC */
    y.stride[1] = 1;
    y.stride[2] = C * W;
    y.stride[3] = C;
    norm_channels(ctx, x, y);
    if (on_device) check(gpu_download(&device, y_host, y_data, sizeof y_host), device.error);
    else memcpy(y_host, y_data, sizeof y_host);
    slice = compare(x_host, x, y_host, nj_as_const(y));

    printf("largest errors %.2g and %.2g, tolerance %.2g\n", whole, slice, tolerance);
    release(y_data);
    release(x_data);
    nj_ctx_destroy(ctx);
    if (on_device) gpu_close(&device);
    return whole <= tolerance && slice <= tolerance ? 0 : 1;
}
