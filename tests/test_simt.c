/* The CUDA backend without a GPU: the kernels' own sources, compiled for this processor and run thread by
   thread by the SIMT host (tests/simt), which also watches every access to memory. Here: that the host
   notices what it should, and each kernel at each kind of geometry, on three architectures with so few
   multiprocessors that blocks have much to walk over. test_layouts and others run on it, too. */
#define _POSIX_C_SOURCE 200809L /* setenv */
#include "harness.h"

static int (*simt_launches)(const char *name);
static int (*set_attribute)(nji_cu_function function, int which, int value);

static int find_in(void *library, const char *name, void *to) {
    void *symbol = library ? dlsym(library, name) : NULL;
    memcpy(to, &symbol, sizeof symbol);
    return symbol != NULL;
}

static int open_device(const char *capability, const char *multiprocessors) {
    void *library = dlopen(GPU_DRIVER, RTLD_NOW | RTLD_LOCAL);
    setenv("NJ_SIMT_CC", capability, 1);
    setenv("NJ_SIMT_SMS", multiprocessors, 1);
    return find_in(library, "simt_launches", &simt_launches) &&
                   find_in(library, "cuFuncSetAttribute", &set_attribute)
               ? open_cuda(NULL)
               : -1;
}

static int open_sm_90(void **state) {
    (void)state;
    return open_device("90", "3");
}

static int open_sm_80(void **state) {
    (void)state;
    return open_device("80", "2");
}

static int open_sm_75(void **state) {
    (void)state;
    return open_device("75", "1");
}

/* ---- kernels that are wrong in one way each ------------------------------------------------- */

enum { BLOCKS = 2, THREADS = 64 };

/* Statements of a kernel nj_probe_forward with 64 threads in each of 2 blocks. x and y hold 64 floats;
   x may be read and y written; p.partial holds 128 that may be both. `text` is what the error's text must
   hold; NULL: no error. */
typedef struct probe {
    const char *name, *body, *text;
    int is_cluster;
    unsigned dynamic; /* bytes of shared memory that the launch adds */
} probe;

#define CODE(...) #__VA_ARGS__
static const char helpers[] = CODE(
    NJI_INLINE unsigned at(const void *shared) { return (unsigned)__cvta_generic_to_shared(shared); }
    NJI_INLINE void copy4(float *to, const float *from) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(at(to)), "l"(from) : "memory");
    }
    NJI_INLINE void copy16(float *to, const float *from, int filled) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at(to)), "l"(from),
                     "r"(filled) : "memory");
    }
    NJI_INLINE void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
    template <int GROUPS> NJI_INLINE void wait() {
        asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
    }
    NJI_INLINE void wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }
    NJI_INLINE void meet(int barrier, int threads) {
        asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
    }
);

#define SETUP                                                                                          \
    "nji_begin(); const int t = threadIdx.x; const float *x = (const float *)p.x.data;"                \
    "float *y = (float *)p.y.data; const bool first = blockIdx.x == 0;\n"                              \
    "__shared__ float s[64];\n"

/* A ring of one slot r, which `full` says is filled and `gone` that all have read; and room q for what
   other blocks send. */
#define RING_SETUP                                                                                     \
    SETUP "__shared__ __align__(16) float r[64], q[128]; __shared__ nji_barrier full, gone;"           \
          "if (t == 0) { nji_barrier_init(&full, 1); nji_barrier_init(&gone, 64);"                     \
          "nji_barrier_init_fence(); } __syncthreads();\n"
#define FILL "if (t == 0) { nji_copy_bulk(r, x, 256, &full); nji_barrier_expect(&full, 256); }\n"
#define CLUSTER_SETUP RING_SETUP "const int other = 1 - blockIdx.x; nji_cluster_sync();\n"
#define SEND "nji_cluster_send(q + 2 * t, x[t ^ 33], 0, &full, other);\n"

static const probe probes[] = {
    {"a sound kernel passes",
     SETUP "s[t] = x[t]; __syncthreads(); const float v = nji_swap(s[t ^ 32], 1);"
           "if (first) y[t] = v;",
     NULL, 0, 0},
    {"a barrier that some threads do not reach is noticed",
     SETUP "if (t < 32) __syncthreads(); if (first) y[t] = x[t];", "hangs", 0, 0},
    {"a thread that ends while others wait is noticed",
     SETUP "if (t == 5) return; __syncthreads(); if (first) y[t] = x[t];", "1 have ended", 0, 0},
    {"an exchange that lacks a lane is noticed",
     SETUP "if (first) y[t] = t == 3 ? 0 : nji_swap(x[t], 1);", "to exchange within their warp", 0, 0},
    {"a read past an operand is noticed", SETUP "if (first) y[t] = x[t + 1];",
     "thread 63 of block (0, 0) reads 4 bytes of device memory", 0, 0},
    {"a write past an operand is noticed", SETUP "if (first) y[t + 1] = x[t];",
     "no operand that it may write", 0, 0},
    {"a write to an input is noticed", SETUP "if (first) ((float *)x)[t] = 0;",
     "no operand that it may write", 0, 0},
    {"a read of an output is noticed", SETUP "if (first) y[t] += x[t];", "no operand that it may read",
     0, 0},
    {"an access to no memory of the device is noticed", SETUP "if (first) y[t] = x[1ll << 40];",
     "no memory of the device", 0, 0},
    {"an access that is not aligned is noticed",
     SETUP "if (first && t == 0) { nji_pack<float, 4> q; q.load(x + 1); q.store(y); }",
     "CUDA_ERROR_MISALIGNED_ADDRESS", 0, 0},
    {"a barrier that is missing before a read is noticed",
     SETUP "s[t] = x[t]; const float v = s[t ^ 1]; if (first) y[t] = v;", "no barrier is between", 0, 0},
    {"a barrier that is missing after a read is noticed",
     SETUP "s[t] = x[t]; __syncthreads(); const float v = s[t ^ 1]; s[t] = 0; if (first) y[t] = v;",
     "no barrier is between", 0, 0},
    {"two threads that write one element are noticed", SETUP "y[t] = x[t];",
     "of block 0 wrote it, no barrier is between", 0, 0},
    {"memory touched before earlier kernels have ended is noticed",
     "if (threadIdx.x == 0 && blockIdx.x == 0) *(float *)p.y.data = *(const float *)p.x.data;",
     "before it waits for earlier kernels", 0, 0},
    {"blocks of a cluster exchange shared memory",
     SETUP "nji_cluster_sync(); nji_cluster_store(&s[t], 1 - blockIdx.x, x[t ^ 33]);"
           "nji_cluster_sync(); if (first) y[t] = s[t];",
     NULL, 1, 0},
    {"a missing barrier of the cluster is noticed",
     SETUP "nji_cluster_sync(); s[t] = 0; nji_cluster_store(&s[t], 1 - blockIdx.x, x[t]); nji_cluster_sync();"
           "if (first) y[t] = s[t];",
     "no barrier is between", 1, 0},
    {"a store to a block that may not have begun is noticed",
     SETUP "nji_cluster_store(&s[t], 1 - blockIdx.x, x[t]); nji_cluster_sync();",
     "may not have begun", 1, 0},
    {"a cluster barrier that a block does not reach is noticed",
     SETUP "if (first) nji_cluster_sync();", "64 at one of the cluster", 1, 0},
    {"a store past a cluster is noticed",
     SETUP "nji_cluster_sync(); nji_cluster_store(&s[t], 2, x[t]); nji_cluster_sync();",
     "of block 2 of its cluster", 1, 0},
    {"a warp's barrier orders its lanes",
     SETUP "s[t] = x[t ^ 32]; __syncwarp(); if (first) y[t] = s[t ^ 1];", NULL, 0, 0},
    {"a warp's barrier does not order other warps",
     SETUP "s[t] = x[t]; __syncwarp(); if (first) y[t] = s[t ^ 32];", "no barrier is between", 0, 0},
    {"a warp's barrier that lacks a lane is noticed", SETUP "if (t != 3) __syncwarp();",
     "31 for their warp, 33 have ended", 0, 0},
    {"a named barrier orders those who meet there",
     SETUP "s[t] = x[t ^ 32]; meet(1 + t / 32, 32); if (first) y[t] = s[t ^ 1];", NULL, 0, 0},
    {"a named barrier does not order others",
     SETUP "s[t] = x[t]; meet(1 + t / 32, 32); if (first) y[t] = s[t ^ 32];", "no barrier is between",
     0, 0},
    {"a named barrier that some do not reach is noticed", SETUP "if (t < 32) meet(1, 64);",
     "32 threads wait at a barrier", 0, 0},
    {"a named barrier of two sizes is noticed", SETUP "meet(1, t < 32 ? 32 : 64);", "at barrier 1, one expects 32", 0, 0},
    {"a named barrier of half a warp is noticed", SETUP "meet(1, 16);",
     "meets 16 threads at barrier 1", 0, 0},
    {"a barrier tells whether all agree",
     SETUP "const int all = __syncthreads_and(t < 64), most = __syncthreads_and(t != 5);"
           "if (first) y[t] = all && !most ? x[t ^ 33] : 0;",
     NULL, 0, 0},
    {"a lane may take any lane's value",
     SETUP "const float v = __shfl_sync(~0u, x[t ^ 32], t ^ 1); if (first) y[t] = v;", NULL, 0, 0},
    {"a copy that is waited for passes",
     SETUP "copy4(s + t, x + (t ^ 33)); commit(); wait<0>(); if (first) y[t] = s[t];", NULL, 0, 0},
    {"a copy that is not waited for is noticed",
     SETUP "copy4(s + t, x + t); commit(); if (first) y[t] = s[t];",
     "of block 0 is under way", 0, 0},
    {"a copy of an older group may be read",
     SETUP "__shared__ float r[64]; copy4(s + t, x + (t ^ 33)); commit(); copy4(r + t, x + t); commit();"
           "wait<1>(); if (first) y[t] = s[t];",
     NULL, 0, 0},
    {"a copy of a group that is not waited for is noticed",
     SETUP "__shared__ float r[64]; copy4(r + t, x + t); commit(); copy4(s + t, x + t); commit();"
           "wait<1>(); if (first) y[t] = s[t];",
     "is under way", 0, 0},
    {"a copy without a group is noticed", SETUP "copy4(s + t, x + t); wait<0>(); if (first) y[t] = s[t];",
     "is under way", 0, 0},
    {"a copy and a barrier serve other threads",
     SETUP "copy4(s + t, x + t); wait_all(); __syncthreads(); if (first) y[t] = s[t ^ 33];", NULL, 0, 0},
    {"a copy that only its thread waited for is noticed",
     SETUP "copy4(s + t, x + t); wait_all(); if (first) y[t] = s[t ^ 1];", "no barrier is between", 0, 0},
    {"a copy over what others may still read is noticed",
     SETUP "s[t] = 0; __syncthreads(); const float v = s[t ^ 1]; copy4(s + t, x + t); wait_all();"
           "if (first) y[t] = v;",
     "no barrier is between", 0, 0},
    {"a copy over one that is under way is noticed", SETUP "copy4(s + t, x + t); copy4(s + t, x + t);",
     "writes 4 bytes of shared memory at +0: a copy", 0, 0},
    {"a copy from past an operand is noticed", SETUP "copy4(s + t, x + t + 1);",
     "no operand that it may read", 0, 0},
    {"a copy to past shared memory is noticed", SETUP "copy4(s + t + 1, x + t);", "for shared memory",
     0, 0},
    {"zeros fill what a copy leaves",
     SETUP "if (t % 4 == 0) copy16(s + t, x + t, t < 32 ? 16 : 0); wait_all(); __syncthreads();"
           "if (first) y[t] = t < 32 ? s[t ^ 1] + 32 : x[t ^ 33] + s[t];",
     NULL, 0, 0},
    {"a copy that is not aligned is noticed", SETUP "if (t == 0) copy16(s, x + 1, 16);",
     "CUDA_ERROR_MISALIGNED_ADDRESS", 0, 0},
    {"a launch brings shared memory",
     SETUP "extern __shared__ __align__(16) unsigned char bytes[]; float *more = (float *)bytes;"
           "s[t] = 0; more[t] = x[t]; __syncthreads(); if (first) y[t] = more[t ^ 33];",
     NULL, 0, 64 * sizeof(float)},
    {"shared memory past what a launch brings is noticed",
     SETUP "extern __shared__ __align__(16) unsigned char bytes[]; float *more = (float *)bytes;"
           "more[t] = x[t];",
     "thread 63 of block (0, 0) writes 4 bytes at", 0, 63 * sizeof(float)},
    {"an exchange orders no accesses",
     SETUP "s[t] = x[t]; const float v = nji_swap(0, 1) + s[t ^ 1]; if (first) y[t] = v;",
     "no barrier is between", 0, 0},
    {"a bulk copy that is waited for passes",
     RING_SETUP FILL "nji_barrier_wait(&full, 0); if (first) y[t] = r[t ^ 33];", NULL, 0, 0},
    {"a slot may be filled again when all have released it",
     RING_SETUP FILL "nji_barrier_wait(&full, 0); const float v = r[t ^ 33]; nji_barrier_arrive(&gone);"
                     "if (t == 0) nji_barrier_wait(&gone, 0);" FILL
                     "nji_barrier_wait(&full, 1); if (first) y[t] = v + r[t] - x[t];",
     NULL, 0, 0},
    {"the phase before the first has ended",
     RING_SETUP "nji_barrier_wait(&gone, 1);" FILL "nji_barrier_wait(&full, 0); if (first) y[t] = r[t ^ 33];",
     NULL, 0, 0},
    {"a bulk copy that nobody waited for is noticed",
     RING_SETUP FILL "__syncthreads(); if (first) y[t] = r[t];", "counted by the barrier at +", 0, 0},
    {"a bulk copy that other threads waited for is noticed",
     RING_SETUP FILL "__syncthreads(); if (t < 32) nji_barrier_wait(&full, 0); if (first) y[t] = r[t];",
     "counted by the barrier at +", 0, 0},
    /* Reader and copy come in any order. */
    {"a slot filled again before its release is noticed",
     RING_SETUP FILL "nji_barrier_wait(&full, 0); const float v = r[t]; nji_barrier_arrive(&gone);" FILL
                     "nji_barrier_wait(&full, 1); if (first) y[t] = v;",
     " of shared memory at +", 0, 0},
    {"a slot filled again before all have released it is noticed",
     RING_SETUP "__shared__ nji_barrier half; if (t == 0) nji_barrier_init(&half, 32); __syncthreads();" FILL
                "nji_barrier_wait(&full, 0); const float v = r[t]; if (t < 32) nji_barrier_arrive(&half);"
                "if (t == 0) nji_barrier_wait(&half, 0);" FILL
                "nji_barrier_wait(&full, 1); if (first) y[t] = v;",
     " of shared memory at +", 0, 0},
    {"a bulk copy over one that is under way is noticed", RING_SETUP FILL FILL,
     "counted by the barrier at +", 0, 0},
    {"fewer bytes expected than come are noticed",
     RING_SETUP "if (t == 0) { nji_copy_bulk(r, x, 256, &full); nji_barrier_expect(&full, 128); }"
                "nji_barrier_wait(&full, 0);",
     "which lacks 0 arrivals and -128 bytes", 0, 0},
    {"more bytes expected than come are noticed",
     RING_SETUP "if (t == 0) { nji_copy_bulk(r, x, 256, &full); nji_barrier_expect(&full, 512); }"
                "nji_barrier_wait(&full, 0);",
     "which lacks 0 arrivals and 256 bytes", 0, 0},
    {"an arrival that is missing is noticed",
     RING_SETUP "if (t != 7) nji_barrier_arrive(&gone); nji_barrier_wait(&gone, 0);",
     "64 wait for a phase: thread 0 of block 0 at the barrier at +", 0, 0},
    {"an arrival too many is noticed",
     RING_SETUP "if (t < 2) nji_barrier_expect(&full, 16);", "whose phase lacks 16 bytes only", 0, 0},
    {"a wait that two phases overtake is noticed",
     RING_SETUP "if (t == 0) nji_barrier_wait(&full, 0);"
                "if (t == 32) { nji_barrier_arrive(&full); nji_barrier_arrive(&full); }",
     "the barrier at +", 0, 0},
    {"a bulk copy from an address that is not aligned is noticed",
     RING_SETUP "if (t == 0) nji_copy_bulk(r, x + 1, 128, &full);", "CUDA_ERROR_MISALIGNED_ADDRESS", 0, 0},
    {"a bulk copy to an address that is not aligned is noticed",
     RING_SETUP "if (t == 0) nji_copy_bulk(r + 2, x, 128, &full);", "CUDA_ERROR_MISALIGNED_ADDRESS", 0, 0},
    {"a bulk copy of a size that is not whole is noticed",
     RING_SETUP "if (t == 0) nji_copy_bulk(r, x, 100, &full);", "CUDA_ERROR_MISALIGNED_ADDRESS", 0, 0},
    {"a bulk copy from past an operand is noticed",
     RING_SETUP "if (t == 0) nji_copy_bulk(r, x + 4, 256, &full);", "no operand that it may read", 0, 0},
    {"a bulk copy to past shared memory is noticed",
     RING_SETUP "if (t == 0) nji_copy_bulk(r, x, 1 << 16, &full);", "of its cluster", 0, 0},
    {"a bulk copy before earlier kernels have ended is noticed",
     "__shared__ __align__(16) float r[64]; __shared__ nji_barrier full; if (threadIdx.x == 0) {"
     "nji_barrier_init(&full, 1); nji_barrier_init_fence(); nji_copy_bulk(r, p.x.data, 256, &full); }",
     "before it waits for earlier kernels", 0, 0},
    {"the source of a bulk copy may be written after it",
     RING_SETUP "float *both = (float *)p.partial;"
                "if (first && t == 0) { nji_copy_bulk(r, both, 256, &full); nji_barrier_expect(&full, 256); }"
                "if (first) { nji_barrier_wait(&full, 0); both[t] = 0; y[t] = x[t ^ 33]; }",
     NULL, 0, 0},
    {"the source of a bulk copy that is written before it is noticed",
     RING_SETUP "float *both = (float *)p.partial;"
                "if (first && t == 0) { nji_copy_bulk(r, both, 256, &full); nji_barrier_expect(&full, 256); }"
                "__syncthreads(); if (first) { both[t] = 0; nji_barrier_wait(&full, 0); }",
     "counted by the barrier at +", 0, 0},
    {"a block that ends before its bulk copy is noticed",
     RING_SETUP FILL, "has ended, and none of it has waited for a copy", 0, 0},
    {"a barrier that nobody made is noticed",
     SETUP "__shared__ nji_barrier full; nji_barrier_arrive(&full);", "as a barrier", 0, 0},
    {"a barrier used before all know of it is noticed",
     SETUP "__shared__ nji_barrier full; if (t == 0) nji_barrier_init(&full, 64); nji_barrier_arrive(&full);",
     "of block (0, 0) uses ", 0, 0},
    {"a barrier without a fence that a copy uses is noticed",
     SETUP "__shared__ __align__(16) float r[64]; __shared__ nji_barrier full;"
           "if (t == 0) nji_barrier_init(&full, 1); __syncthreads();" FILL,
     "whose making no fence has told", 0, 0},
    {"a barrier that is read like other memory is noticed", RING_SETUP "if (full) y[t] = 0;",
     "a barrier lies there", 0, 0},
    {"a barrier that is made twice is noticed", RING_SETUP "if (t == 0) nji_barrier_init(&full, 1);",
     "a barrier lies there", 0, 0},
    {"a barrier of no arrivals is noticed", RING_SETUP "__shared__ nji_barrier none;"
     "nji_barrier_init(&none, 0);", "for 0 arrivals", 0, 0},
    {"what a block sends passes",
     CLUSTER_SETUP SEND "if (t == 0) nji_barrier_expect(&full, 512); nji_barrier_wait(&full, 0);"
                        "if (first) y[t] = q[2 * t] + q[2 * t + 1];",
     NULL, 1, 0},
    {"what a block sends and nobody waits for is noticed",
     CLUSTER_SETUP SEND "nji_cluster_sync(); if (first) y[t] = q[2 * t]; nji_cluster_sync();",
     "counted by the barrier at +", 1, 0},
    {"what a block sends twice to one place is noticed", CLUSTER_SETUP SEND SEND "nji_cluster_sync();",
     "counted by the barrier at +", 1, 0},
    {"what is sent over what others may still read is noticed",
     CLUSTER_SETUP "q[2 * t] = 0; nji_cluster_sync(); const float v = q[2 * t];" SEND
                   "if (t == 0) nji_barrier_expect(&full, 512); nji_barrier_wait(&full, 0); y[t] = v;",
     "shared memory at +", 1, 0},
    {"what is sent to a block that may not have begun is noticed",
     RING_SETUP "const int other = 1 - blockIdx.x;" SEND "nji_cluster_sync();", "may not have begun", 1, 0},
    {"what is sent to a block that has ended is noticed", CLUSTER_SETUP "if (first) {" SEND "}",
     "has ended", 1, 0},
    {"what is sent past a cluster is noticed",
     CLUSTER_SETUP "nji_cluster_send(q + 2 * t, 0, 0, &full, 2); nji_cluster_sync();",
     "of block 2 of its cluster", 1, 0},
    {"what is sent to an address that is not aligned is noticed",
     CLUSTER_SETUP "nji_cluster_send(q + 2 * t + 1, 0, 0, &full, other); nji_cluster_sync();",
     "CUDA_ERROR_MISALIGNED_ADDRESS", 1, 0},
    {"PTX that the host does not know does not compile",
     SETUP "asm volatile(\"membar.gl;\" ::: \"memory\");", "ptx_membar_gl", 0, 0},
};

/* The strided program with neither of its kernels is our types and helpers; the probe follows. */
static const char **probe_lines(const char *body) {
    size_t count = 0;
    const char **lines;
    while (nji_program_strided[count]) count++;
    lines = (const char **)calloc(count + 5, sizeof *lines);
    memcpy(lines, nji_program_strided, count * sizeof *lines);
    lines[count] = helpers;
    lines[count + 1] = "\nextern \"C\" __global__ void nj_probe_forward(NJI_PARAMETER p) {\n";
    lines[count + 2] = body;
    lines[count + 3] = "\n}\n";
    return lines;
}

static nj_status compile_probe(const probe *row, void **function) {
    const char *options[] = {"-DNJI_X=float",     "-DNJI_PARAM_CODE=3", "-DNJI_STAT_CODE=3",
                             "-DNJI_FORWARD=0",   "-DNJI_BACKWARD=0",   "-DNJI_SLICES=2",
                             "-DNJI_CLUSTER=1"};
    const nji_module *module;
    nji_jit_request request = {0};
    nj_status status;
    request.name = "probe";
    request.lines = probe_lines(row->body);
    request.source_hash = nji_hash_text(NJI_HASH_SEED, row->body);
    request.options = options;
    request.option_count = row->is_cluster ? 7 : 5;
    request.arch = bed.ctx->cuda.facts.arch;
    status = nji_cuda_compiled(&bed.ctx->cuda, &request, &module, "compile_probe");
    if (status == NJ_OK) {
        status = nji_cuda_function(&bed.ctx->cuda, module, "nj_probe_forward", function, "probe");
    }
    free((void *)request.lines);
    return status;
}

static nji_problem probe_problem(float *x, float *y, float *both) {
    nji_problem p;
    memset(&p, 0, sizeof p);
    p.x.data = x;
    p.y.data = y;
    p.partial = both;
    p.parts = both != NULL;
    p.extent[0] = p.x.stride[1] = p.y.stride[1] = 1;
    p.extent[1] = p.cols = THREADS;
    p.x.stride[0] = p.y.stride[0] = THREADS;
    p.rows = p.row_dims = p.col_dims = 1;
    return p;
}

static int launch_probe(void *function, unsigned dynamic, nji_problem *p) {
    nji_cu_launch_attribute attribute = {0};
    nji_cu_launch_config config = {0};
    void *parameters[1];
    parameters[0] = p;
    attribute.id = NJI_CU_LAUNCH_PROGRAMMATIC_SERIALIZATION;
    attribute.value.programmatic_serialization = 1;
    config.grid_x = BLOCKS;
    config.block_x = THREADS;
    config.grid_y = config.grid_z = config.block_y = config.block_z = 1;
    config.shared_bytes = dynamic;
    config.stream = bed.gpu.stream;
    config.attributes = &attribute;
    config.attribute_count = 1;
    return bed.ctx->cuda.driver.cuLaunchKernelEx(&config, function, parameters, NULL);
}

static void the_host_notices(void **state) {
    const probe *row = (const probe *)*state;
    float values[THREADS], *x, *y, *both;
    void *function = NULL;
    nji_problem p;
    nj_status status;
    need_backend();
    status = compile_probe(row, &function);
    for (int i = 0; i < THREADS; i++) values[i] = (float)i;
    x = (float *)gpu_alloc(&bed.gpu, 2 * sizeof values); /* with room behind it */
    y = (float *)gpu_alloc(&bed.gpu, 2 * sizeof values);
    both = (float *)gpu_alloc(&bed.gpu, 2 * sizeof values);
    require_gpu_ok(x && y && both && gpu_upload(&bed.gpu, x, values, sizeof values));
    p = probe_problem(x, y, both);
    if (status == NJ_OK) {
        int result = launch_probe(function, row->dynamic, &p);
        if (result) status = nji_driver_fail(&bed.ctx->cuda.driver, result, "the_host_notices", "launch");
    }
    if (row->text) {
        assert_int_not_equal(status, NJ_OK);
        if (!strstr(nj_last_error(), row->text)) fail_msg("the error is %s", nj_last_error());
    } else {
        require_ok(status);
        require_gpu_ok(gpu_download(&bed.gpu, values, y, sizeof values));
        for (int i = 0; i < THREADS; i++) assert_true(values[i] == (float)(i ^ 33));
    }
    gpu_free(&bed.gpu, x);
    gpu_free(&bed.gpu, y);
    gpu_free(&bed.gpu, both);
}

static void shared_memory_beyond_48_kilobytes_must_be_asked_for(void **state) {
    static const probe empty = {"", "", NULL, 0, 0};
    const int most_dynamic = 8, limit = 227 << 10;
    nji_problem p = probe_problem(NULL, NULL, NULL);
    void *function;
    (void)state;
    need_backend();
    require_ok(compile_probe(&empty, &function));
    assert_int_equal(launch_probe(function, 48 << 10, &p), 0);
    assert_int_not_equal(launch_probe(function, (48 << 10) + 1, &p), 0);
    assert_int_not_equal(set_attribute(function, most_dynamic, limit + 1), 0);
    assert_int_equal(set_attribute(function, most_dynamic, limit), 0);
    assert_int_equal(launch_probe(function, (unsigned)limit, &p), 0);
    assert_int_not_equal(launch_probe(function, (unsigned)limit + 1, &p), 0);
}

/* ---- the geometry of a choice, and which of it the cases reached ---------------------------- */

typedef struct geometry {
    int family, vec, lanes, chunks, warps; /* warps: that share a row, of all blocks of a cluster */
    int rows, cluster, prefetch, is_exact; /* rows: of a block; cluster: its blocks */
    int keep, alone;                       /* of a ring */
} geometry;

static geometry geometry_of(const nji_choice *c, int64_t cols) {
    geometry g;
    const int is_tile = c->family == NJI_TILES;
    const int64_t along = is_tile ? c->threads / c->lanes : (int64_t)c->lanes * c->vec;
    g.family = c->family;
    g.vec = c->vec;
    g.lanes = c->lanes;
    g.chunks = c->chunks;
    g.cluster = c->cluster ? c->slices : 1;
    g.warps = (c->lanes + 31) / 32 * g.cluster;
    g.rows = nji_block_rows(c);
    g.prefetch = c->prefetch;
    g.keep = c->keep;
    g.alone = c->alone;
    g.is_exact = along * c->chunks * c->slices == cols;
    return g;
}

/* A field of the geometry within bounds, in one of the directions or in both. */
typedef struct feature {
    int family;
    const char *name;
    size_t field;
    int least, most;
    int is_of[2]; /* backward, forward */
} feature;

#define FIELD(name) #name, offsetof(geometry, name)
static const feature features[] = {
    {NJI_ROWS, FIELD(lanes), 1, 1, {1, 1}},      {NJI_ROWS, FIELD(lanes), 2, 16, {1, 1}},
    {NJI_ROWS, FIELD(lanes), 32, 32, {1, 1}},    {NJI_ROWS, FIELD(lanes), 33, 1024, {1, 1}},
    {NJI_ROWS, FIELD(warps), 2, 8, {1, 1}},      {NJI_ROWS, FIELD(warps), 9, 32, {1, 1}},
    {NJI_ROWS, FIELD(warps), 33, 256, {1, 1}},   {NJI_ROWS, FIELD(rows), 1, 1, {1, 1}},
    {NJI_ROWS, FIELD(rows), 2, 32, {1, 1}},      {NJI_ROWS, FIELD(rows), 33, 256, {1, 1}},
    {NJI_ROWS, FIELD(vec), 1, 1, {1, 1}},        {NJI_ROWS, FIELD(vec), 2, 2, {1, 1}},
    {NJI_ROWS, FIELD(vec), 4, 4, {1, 1}},        {NJI_ROWS, FIELD(vec), 8, 8, {1, 1}},
    {NJI_ROWS, FIELD(chunks), 1, 1, {1, 1}},     {NJI_ROWS, FIELD(chunks), 2, 64, {1, 1}},
    {NJI_ROWS, FIELD(cluster), 2, 2, {1, 1}},    {NJI_ROWS, FIELD(cluster), 4, 4, {1, 1}},
    {NJI_ROWS, FIELD(cluster), 8, 8, {1, 1}},    {NJI_ROWS, FIELD(is_exact), 0, 0, {1, 1}},
    {NJI_ROWS, FIELD(is_exact), 1, 1, {1, 1}},   {NJI_ROWS, FIELD(prefetch), 0, 0, {1, 1}},
    {NJI_ROWS, FIELD(prefetch), 1, 1, {1, 0}},   {NJI_SPLIT, FIELD(is_exact), 0, 0, {1, 1}},
    {NJI_SPLIT, FIELD(is_exact), 1, 1, {1, 1}},  {NJI_SPLIT, FIELD(prefetch), 0, 0, {1, 1}},
    {NJI_SPLIT, FIELD(prefetch), 1, 1, {1, 0}},  {NJI_TILES, FIELD(lanes), 1, 1, {1, 1}},
    {NJI_TILES, FIELD(lanes), 2, 2, {1, 1}},     {NJI_TILES, FIELD(lanes), 4, 4, {1, 1}},
    {NJI_TILES, FIELD(lanes), 8, 8, {1, 1}},     {NJI_TILES, FIELD(lanes), 16, 16, {1, 1}},
    {NJI_TILES, FIELD(lanes), 32, 32, {1, 1}},   {NJI_TILES, FIELD(vec), 1, 1, {1, 1}},
    {NJI_TILES, FIELD(vec), 2, 2, {1, 1}},       {NJI_TILES, FIELD(vec), 4, 4, {1, 1}},
    {NJI_TILES, FIELD(vec), 8, 8, {1, 1}},       {NJI_TILES, FIELD(chunks), 1, 1, {1, 1}},
    {NJI_TILES, FIELD(chunks), 2, 16, {1, 1}},   {NJI_TILES, FIELD(is_exact), 0, 0, {1, 1}},
    {NJI_TILES, FIELD(is_exact), 1, 1, {1, 1}},  {NJI_RING, FIELD(warps), 1, 1, {1, 0}},
    {NJI_RING, FIELD(warps), 2, 8, {1, 1}},      {NJI_RING, FIELD(warps), 9, 32, {1, 1}},
    {NJI_RING, FIELD(warps), 33, 256, {1, 1}},   {NJI_RING, FIELD(rows), 1, 1, {1, 1}},
    {NJI_RING, FIELD(rows), 2, 4, {1, 1}},       {NJI_RING, FIELD(rows), 5, 16, {1, 1}},
    {NJI_RING, FIELD(cluster), 1, 1, {1, 1}},    {NJI_RING, FIELD(cluster), 2, 2, {1, 1}},
    {NJI_RING, FIELD(cluster), 4, 4, {1, 1}},    {NJI_RING, FIELD(cluster), 8, 8, {1, 1}},
    {NJI_RING, FIELD(keep), 1, 1, {1, 0}},       {NJI_RING, FIELD(keep), 2, 2, {1, 0}},
    {NJI_RING, FIELD(keep), 1, 1, {0, 1}},       {NJI_RING, FIELD(keep), 5, 5, {0, 1}},
    {NJI_RING, FIELD(is_exact), 0, 0, {1, 1}},   {NJI_RING, FIELD(is_exact), 1, 1, {1, 1}},
    {NJI_RING, FIELD(alone), 0, 0, {1, 0}},      {NJI_RING, FIELD(alone), 1, 1, {1, 0}},
};

static int reached[COUNT_OF(features)][2];
static int reached_ring[COUNT_OF(nji_ring_table)]; /* by which of its rows the cases cut */

static const char *const family_name[] = {"rows", "split", "tiles", "ring", "strided"};

static void note_ring(const nj_desc *desc, int64_t cols) {
    for (size_t i = 0; i < COUNT_OF(nji_ring_table); i++) {
        const nji_ring_tuning *row = &nji_ring_table[i];
        if (row->forward == nji_is_forward(desc) && cols >= row->min_cols && cols <= row->max_cols &&
            (size_t)row->element_bytes == nj_dtype_size(desc->dtype)) {
            reached_ring[i] = 1;
            return;
        }
    }
}

static void note_geometry(const nji_choice *choice, int64_t cols) {
    geometry g;
    if (choice->family == NJI_STRIDED) return; /* no geometry of its own */
    g = geometry_of(choice, cols);
    for (size_t i = 0; i < COUNT_OF(features); i++) {
        int value;
        memcpy(&value, (const char *)&g + features[i].field, sizeof value);
        if (g.family == features[i].family && value >= features[i].least && value <= features[i].most)
            reached[i][choice->forward] = 1;
    }
}

/* A tuning table that changes may take a case from what it was meant to reach: then add another. */
static void the_cases_reached_every_kind_of_geometry(void **state) {
    int missing = 0;
    (void)state;
    need_backend();
    for (size_t i = 0; i < COUNT_OF(features); i++) {
        for (int forward = 0; forward < 2; forward++) {
            if (reached[i][forward] || !features[i].is_of[forward]) continue;
            print_error("no case has %s, %s, with %s of %d to %d\n", family_name[features[i].family],
                        forward ? "forward" : "backward", features[i].name, features[i].least,
                        features[i].most);
            missing++;
        }
    }
    for (size_t i = 0; i < COUNT_OF(nji_ring_table); i++) {
        if (reached_ring[i]) continue;
        print_error("no case is cut by row %zu of the ring's table\n", i);
        missing++;
    }
    assert_int_equal(missing, 0);
}

/* ---- cases ---------------------------------------------------------------------------------- */

typedef struct simt_case {
    const char *name;
    nji_family family[2]; /* of the backward and of the forward */
    nj_dtype dtype, param_dtype, stat_dtype;
    int64_t shape[4];
    uint32_t norm_axes;
} simt_case;

#define ROWS                                                                                           \
    { NJI_ROWS, NJI_ROWS }
#define SPLIT                                                                                          \
    { NJI_SPLIT, NJI_SPLIT }
#define TILES                                                                                          \
    { NJI_TILES, NJI_TILES }
#define RING                                                                                           \
    { NJI_RING, NJI_RING }
#define RING_BACKWARD                                                                                  \
    { NJI_RING, NJI_ROWS }
#define STRIDED                                                                                        \
    { NJI_STRIDED, NJI_STRIDED }
#define SPLIT_BACKWARD                                                                                 \
    { NJI_SPLIT, NJI_ROWS }

/* Shapes of two, three or four axes. */
static const simt_case on_sm_90[] = {
    {"a lane for each row", ROWS, NJ_BF16, NJ_F32, NJ_F32, {7001, 2}, 2},
    {"a few lanes", ROWS, NJ_F16, NJ_F16, NJ_F16, {901, 12}, 2},
    {"many rows in a block, all columns taken", ROWS, NJ_F32, NJ_BF16, NJ_F32, {501, 64}, 2},
    {"a warp with single elements", ROWS, NJ_F32, NJ_F32, NJ_F32, {201, 33}, 2},
    {"a warp, all columns taken", ROWS, NJ_BF16, NJ_BF16, NJ_BF16, {301, 256}, 2},
    {"a warp with several packs", RING_BACKWARD, NJ_F16, NJ_F32, NJ_F32, {75, 760}, 2},
    {"a warp with packs of two doubles", ROWS, NJ_F64, NJ_F64, NJ_F64, {90, 100}, 2},
    {"doubles one by one", ROWS, NJ_F64, NJ_F32, NJ_F64, {120, 7}, 2},
    {"two and more warps", RING_BACKWARD, NJ_BF16, NJ_F32, NJ_F32, {70, 1000}, 2},
    {"warps with single elements", ROWS, NJ_F16, NJ_F16, NJ_F32, {30, 1027}, 2},
    {"warps, all columns taken", RING, NJ_F32, NJ_F32, NJ_F32, {30, 2048}, 2},
    {"more than eight warps, few rows", RING, NJ_F16, NJ_BF16, NJ_F32, {9, 8200}, 2},
    {"three packs of each thread", RING, NJ_BF16, NJ_F32, NJ_F32, {35, 12288}, 2},
    {"a cluster of two", RING, NJ_BF16, NJ_BF16, NJ_BF16, {70, 2056}, 2},
    {"a cluster of four, with a warp each", RING, NJ_F16, NJ_F16, NJ_F32, {3, 1600}, 2},
    {"one row through a cluster", RING, NJ_F32, NJ_F32, NJ_F32, {1, 4096}, 2},
    {"a cluster of four", RING, NJ_F32, NJ_F16, NJ_F32, {11, 8200}, 2},
    {"a cluster of eight, one row at a time", RING, NJ_BF16, NJ_F32, NJ_F32, {4, 40000}, 2},
    {"a cluster of eight forward, with some empty", RING, NJ_F32, NJ_F32, NJ_F32, {3, 33000}, 2},
    {"a cluster of eight", RING, NJ_F32, NJ_F32, NJ_F32, {7, 17000}, 2},
    {"more than eight warps", ROWS, NJ_F16, NJ_F16, NJ_F32, {5, 9001}, 2},
    {"clusters of single elements", ROWS, NJ_F32, NJ_F32, NJ_F32, {3, 20001}, 2},
    {"a cluster of eight forward, with some empty", RING, NJ_F32, NJ_F32, NJ_F32, {3, 33000}, 2},
    {"a cluster of eight forward", SPLIT_BACKWARD, NJ_BF16, NJ_BF16, NJ_F32, {4, 66000}, 2},
    {"a cluster of two forward, of four backward", ROWS, NJ_F64, NJ_F64, NJ_F64, {7, 8200}, 2},
    {"a cluster of four forward, of eight backward", ROWS, NJ_F64, NJ_F64, NJ_F64, {4, 16386}, 2},
    {"a cluster of eight forward, of doubles", SPLIT_BACKWARD, NJ_F64, NJ_F64, NJ_F64, {3, 33000}, 2},
    {"rows too long for a cluster", SPLIT, NJ_F32, NJ_F32, NJ_F32, {3, 132001}, 2},
    {"tiles of a few channels", TILES, NJ_BF16, NJ_F32, NJ_F32, {3, 3, 2, 100}, 2},
    {"tiles of single pixels", TILES, NJ_BF16, NJ_BF16, NJ_BF16, {3, 7, 33}, 2},
    {"tiles of pairs", TILES, NJ_F16, NJ_F32, NJ_F32, {3, 96, 50}, 2},
    {"tiles of eight lanes", TILES, NJ_F32, NJ_F32, NJ_F32, {2, 40, 50}, 2},
    {"tiles that fill, and the last of a run that does not", TILES, NJ_BF16, NJ_F32, NJ_F32,
     {3, 40, 152}, 2},
    {"tiles of many channels", TILES, NJ_F32, NJ_BF16, NJ_F32, {2, 768, 36}, 2},
    {"tiles that leave columns out", TILES, NJ_F32, NJ_F32, NJ_F32, {2, 300, 20}, 2},
    {"tiles of one lane", TILES, NJ_BF16, NJ_BF16, NJ_F32, {2, 1500, 24}, 2},
    {"tiles of doubles", TILES, NJ_F64, NJ_F64, NJ_F64, {2, 300, 50}, 2},
    {"tiles of columns that rows follow and precede", TILES, NJ_F32, NJ_F32, NJ_F32, {70, 20}, 1},
    {"tiles of two lanes", TILES, NJ_F16, NJ_F32, NJ_F32, {2, 737, 24}, 2},
    {"too many channels for tiles", STRIDED, NJ_F16, NJ_F16, NJ_F32, {2, 12400, 2}, 2},
    {"columns in two axes that do not merge", STRIDED, NJ_F32, NJ_F32, NJ_F32, {5, 9, 7, 11}, 10},
    {"rows in two axes that do not merge", STRIDED, NJ_F64, NJ_F32, NJ_F64, {40, 3, 9, 2}, 5},
    {"many columns in two axes", STRIDED, NJ_BF16, NJ_F32, NJ_BF16, {37, 11, 39}, 5},
    {"a ring of a warp for each row, all columns taken", RING_BACKWARD, NJ_BF16, NJ_BF16, NJ_BF16, {3, 33, 768}, 4},
    {"a ring of teams that have no row", RING_BACKWARD, NJ_F16, NJ_F32, NJ_F16, {2, 520}, 2},
    {"a ring of fewer rows than it has room for", RING, NJ_BF16, NJ_BF16, NJ_F32, {13, 1608}, 2},
    {"a ring of a cluster of two", RING, NJ_BF16, NJ_F32, NJ_F32, {41, 2056}, 2},
    {"a ring of a cluster of two, all columns taken", RING, NJ_F16, NJ_F16, NJ_F32, {5, 6144}, 2},
    {"a ring of a cluster of four, all columns taken", RING, NJ_BF16, NJ_BF16, NJ_F32, {17, 8192}, 2},
    {"a ring that reads a row twice", RING, NJ_F16, NJ_F16, NJ_F32, {18, 8200}, 2},
    {"a ring of a cluster of four, of two teams", RING, NJ_BF16, NJ_F32, NJ_F32, {9, 12296}, 2},
    {"a ring of a cluster of eight, one of them without columns", RING, NJ_F16, NJ_BF16, NJ_F32,
     {13, 16392}, 2},
    {"a ring of a cluster of eight, all columns taken", RING, NJ_BF16, NJ_BF16, NJ_F32, {4, 65536}, 2},
    {"a ring of floats", RING_BACKWARD, NJ_F32, NJ_F32, NJ_F32, {70, 516}, 2},
    {"a ring of floats in a cluster of two", RING, NJ_F32, NJ_BF16, NJ_F32, {19, 4100}, 2},
    {"a ring of floats in a cluster of four", RING, NJ_F32, NJ_F32, NJ_F32, {9, 8200}, 2},
    {"a ring of floats in a cluster of eight", RING, NJ_F32, NJ_F32, NJ_F32, {11, 17000}, 2},
    {"a ring of one row", RING, NJ_F32, NJ_F32, NJ_F32, {1, 4096}, 2},
    {"no rows", ROWS, NJ_BF16, NJ_F32, NJ_F32, {0, 40}, 2},
    {"one row", ROWS, NJ_F16, NJ_F16, NJ_F32, {1, 40}, 2},
};

/* No clusters: long rows are split. */
static const simt_case on_sm_80[] = {
    {"split rows", SPLIT, NJ_BF16, NJ_BF16, NJ_F32, {5, 17000}, 2},
    {"split rows, all columns taken", SPLIT, NJ_F32, NJ_F32, NJ_F32, {9, 32768}, 2},
    {"split doubles", SPLIT, NJ_F64, NJ_F64, NJ_F64, {4, 9001}, 2},
    {"halves in rows", ROWS, NJ_F16, NJ_F32, NJ_F32, {60, 300}, 2},
    {"halves in tiles", TILES, NJ_F16, NJ_F32, NJ_F32, {2, 40, 40}, 2},
};

/* Conversions to bfloat16 and of pairs are code of ours there. */
static const simt_case on_sm_75[] = {
    {"halves in rows", ROWS, NJ_F16, NJ_F32, NJ_F32, {60, 72}, 2},
    {"bfloat16 in rows", ROWS, NJ_BF16, NJ_BF16, NJ_BF16, {60, 1000}, 2},
    {"bfloat16 in tiles", TILES, NJ_BF16, NJ_F32, NJ_F32, {2, 20, 40}, 2},
    {"bfloat16 in split rows", SPLIT, NJ_BF16, NJ_F16, NJ_F32, {4, 20000}, 2},
    {"bfloat16 in strided rows", STRIDED, NJ_BF16, NJ_BF16, NJ_BF16, {4, 5, 6, 7}, 10},
};

static nj_desc desc_of(const simt_case *row) {
    int32_t rank = 4;
    nj_desc desc;
    while (rank > 2 && row->shape[rank - 1] == 0) rank--;
    desc = make_desc(row->dtype, rank, row->shape, row->norm_axes);
    desc.param_dtype = row->param_dtype;
    desc.stat_dtype = row->stat_dtype;
    return desc;
}

static void note_choice(const nj_desc *like, nj_op op, nji_family ran) {
    nj_desc desc = *like;
    nj_plan *plan;
    desc.op = op;
    if (op == NJ_OP_LAYER_NORM_FORWARD) desc.grads = desc.accumulate = 0;
    require_ok(nj_plan_select(&plan, bed.ctx, &desc, NULL));
    if (plan->cuda.choice.family == ran) note_geometry(&plan->cuda.choice, plan->cols);
    if (ran == NJI_RING) note_ring(&desc, plan->cols);
    nj_plan_destroy(plan);
}

/* The kernel that ends a run of a family. */
static const char *kernel_of(nji_family family, int forward) {
    static const char *const names[][2] = {{"nj_rows_backward", "nj_rows_forward"},
                                           {"nj_split_backward_write", "nj_split_forward_write"},
                                           {"nj_tiles_backward", "nj_tiles_forward"},
                                           {"nj_ring_backward", "nj_ring_forward"},
                                           {"nj_strided_backward", "nj_strided_forward"}};
    return names[family][forward];
}

static void a_case_is_right(void **state) {
    const simt_case *row = (const simt_case *)*state;
    const nj_desc desc = desc_of(row);
    int before[2];
    need_backend();
    for (int i = 0; i < 2; i++) before[i] = simt_launches(kernel_of(row->family[i], i));
    check_packed(&desc, 3);
    for (int i = 0; i < 2 && row->shape[0]; i++) {
        const char *kernel = kernel_of(row->family[i], i);
        if (simt_launches(kernel) == before[i]) fail_msg("%s did not run", kernel);
        note_choice(&desc, i ? NJ_OP_LAYER_NORM_FORWARD : NJ_OP_LAYER_NORM_BACKWARD,
                    row->family[i]);
    }
}

/* ---- what every family does besides --------------------------------------------------------- */

/* A case for each family, and for clusters; small. */
static const simt_case families[] = {
    {"rows", ROWS, NJ_F32, NJ_F32, NJ_F32, {70, 20}, 2},
    {"rows of several warps", ROWS, NJ_F16, NJ_F16, NJ_F32, {20, 1002}, 2},
    {"clusters", ROWS, NJ_F64, NJ_F64, NJ_F64, {4, 8200}, 2},
    {"split", SPLIT, NJ_F64, NJ_F64, NJ_F64, {3, 32770 * 2}, 2},
    {"tiles", TILES, NJ_BF16, NJ_BF16, NJ_F32, {3, 20, 72}, 2},
    {"ring", RING_BACKWARD, NJ_F16, NJ_F16, NJ_F32, {5, 9, 1000}, 4},
    {"ring of a warp for each row", RING_BACKWARD, NJ_BF16, NJ_F32, NJ_F32, {3, 3, 11, 520}, 8},
    {"ring of a cluster", RING, NJ_F32, NJ_F32, NJ_F32, {2, 5, 4100}, 4},
    {"ring that reads rows twice", RING, NJ_BF16, NJ_BF16, NJ_F32, {6, 8200}, 2},
    {"strided", STRIDED, NJ_F32, NJ_F32, NJ_F32, {5, 9, 7, 11}, 10},
};

static void gradients_may_be_wanted_one_by_one_and_added(void **state) {
    static const uint32_t masks[][2] = {{1, 1}, {2, 0}, {4, 4}, {5, 0}, {6, 2}, {7, 7}};
    (void)state;
    for (size_t f = 0; f < COUNT_OF(families); f++) {
        for (size_t i = 0; i < COUNT_OF(masks); i++) {
            nj_desc desc = desc_of(&families[f]);
            problem p;
            desc.grads = masks[i][0];
            desc.accumulate = masks[i][1];
            open_problem(&p, &desc);
            p.op[DX].absent = !(desc.grads & NJ_GRAD_DX);
            p.op[DGAMMA].absent = !(desc.grads & NJ_GRAD_DGAMMA);
            p.op[DBETA].absent = !(desc.grads & NJ_GRAD_DBETA);
            fill_problem(&p, i);
            set_statistics(&p);
            check_backward(&p);
            close_problem(&p);
        }
    }
}

static void neither_gamma_nor_beta_need_be_there(void **state) {
    (void)state;
    for (size_t f = 0; f < COUNT_OF(families); f++) {
        nj_desc desc = desc_of(&families[f]);
        desc.has_beta = 0;
        check_packed(&desc, f);
        desc.has_gamma = 0;
        check_packed(&desc, f);
    }
}

static void outputs_may_replace_inputs(void **state) {
    static const int pairs[][2] = {{Y, X}, {DX, X}, {DX, DY}};
    (void)state;
    for (size_t f = 0; f < COUNT_OF(families); f++) {
        for (size_t i = 0; i < COUNT_OF(pairs); i++) {
            const nj_desc desc = desc_of(&families[f]);
            problem p;
            open_problem(&p, &desc);
            place_over(&p, pairs[i][0], pairs[i][1]);
            fill_problem(&p, f);
            set_statistics(&p);
            if (pairs[i][0] == Y) check_forward(&p);
            else check_backward(&p);
            close_problem(&p);
        }
    }
}

/* 16 elements between rows (or images), so that packs stay aligned. */
static void pad_outermost(operand *o) {
    if (o->rank < 2 || o->shape[o->rank - 1] == 1) return;
    o->stride[0] += 16;
    o->count = o->stride[0] * o->shape[0];
}

static void outer_strides_may_be_padded(void **state) {
    (void)state;
    for (size_t f = 0; f < COUNT_OF(families); f++) {
        const nj_desc desc = desc_of(&families[f]);
        const char *kernel = kernel_of(families[f].family[0], 0);
        const int before = (need_backend(), simt_launches(kernel));
        problem p;
        open_problem(&p, &desc);
        for (int i = 0; i < OPERANDS; i++) {
            if (BIT(i) & FULL_OPERANDS) pad_outermost(&p.op[i]);
        }
        check_both(&p, f);
        close_problem(&p);
        if (simt_launches(kernel) == before) fail_msg("%s did not run", kernel);
    }
}

/* For the loose kernels: dy is one value, x has every second column, outputs begin off alignment. */
static void loosen(problem *p) {
    for (int axis = 0; axis < p->op[X].rank; axis++) {
        p->op[DY].stride[axis] = 0;
        p->op[X].stride[axis] *= 2;
    }
    p->op[X].count *= 2;
    p->op[Y].lead = p->op[DX].lead = p->op[GAMMA].lead = 1;
}

static void columns_of_any_stride_are_right(void **state) {
    static const simt_case cases[] = {
        {"one column", ROWS, NJ_F32, NJ_F32, NJ_F32, {300, 1}, 2},
        {"one channel", ROWS, NJ_F16, NJ_F16, NJ_F16, {2, 1, 264}, 2},
        {"a lane for each row", ROWS, NJ_BF16, NJ_F32, NJ_F32, {301, 2}, 2},
        {"rows that share a warp", ROWS, NJ_F32, NJ_F32, NJ_F32, {70, 20}, 2},
        {"a warp", ROWS, NJ_BF16, NJ_BF16, NJ_F32, {20, 768}, 2},
        {"several warps", ROWS, NJ_F16, NJ_F16, NJ_F32, {20, 1024}, 2},
        {"many warps", ROWS, NJ_BF16, NJ_F32, NJ_F32, {9, 8000}, 2},
        {"clusters of halves backward", ROWS, NJ_BF16, NJ_BF16, NJ_F32, {5, 8200}, 2},
        {"clusters of doubles", ROWS, NJ_F64, NJ_F64, NJ_F64, {4, 8200}, 2},
        {"halves split backward", SPLIT_BACKWARD, NJ_BF16, NJ_BF16, NJ_F32, {3, 16400}, 2},
        {"split", SPLIT, NJ_F64, NJ_F64, NJ_F64, {3, 32770 * 2}, 2},
    };
    static const char *const kernel[2][2] = {
        {"nj_loose_rows_backward", "nj_loose_rows_forward"},
        {"nj_loose_split_backward_write", "nj_loose_split_forward_write"}};
    (void)state;
    need_backend();
    for (size_t c = 0; c < COUNT_OF(cases); c++) {
        const nj_desc desc = desc_of(&cases[c]);
        int before[2];
        problem p;
        for (int i = 0; i < 2; i++) before[i] = simt_launches(kernel[cases[c].family[i]][i]);
        open_problem(&p, &desc);
        loosen(&p);
        check_both(&p, c);
        close_problem(&p);
        for (int i = 0; i < 2; i++) {
            if (simt_launches(kernel[cases[c].family[i]][i]) == before[i])
                fail_msg("%s: %s did not run", cases[c].name, kernel[cases[c].family[i]][i]);
        }
    }
}

/* Within their rows, and in the parameter gradients. */
static void nan_and_infinity_stay_in_their_rows(void **state) {
    (void)state;
    for (size_t f = 0; f < COUNT_OF(families); f++) {
        const nj_desc desc = desc_of(&families[f]);
        problem p;
        open_problem(&p, &desc);
        fill_problem(&p, f);
        set_statistics(&p);
        put(&p, X, 0, 3, NAN);
        put(&p, X, 1, 2, INFINITY);
        put(&p, DY, 2, 4, NAN);
        check_backward(&p);
        check_forward(&p);
        check_backward(&p);
        close_problem(&p);
    }
}

/* ---- the whole ------------------------------------------------------------------------------ */

static size_t add_cases(struct CMUnitTest *tests, const simt_case *rows, size_t count) {
    for (size_t i = 0; i < count; i++) {
        tests[i].name = rows[i].name;
        tests[i].test_func = a_case_is_right;
        tests[i].initial_state = (void *)(uintptr_t)&rows[i];
    }
    return count;
}

static int run_on_sm_90(void) {
    static const struct CMUnitTest plain[] = {
        cmocka_unit_test(shared_memory_beyond_48_kilobytes_must_be_asked_for),
        cmocka_unit_test(gradients_may_be_wanted_one_by_one_and_added),
        cmocka_unit_test(neither_gamma_nor_beta_need_be_there),
        cmocka_unit_test(outputs_may_replace_inputs),
        cmocka_unit_test(outer_strides_may_be_padded),
        cmocka_unit_test(columns_of_any_stride_are_right),
        cmocka_unit_test(nan_and_infinity_stay_in_their_rows),
    };
    struct CMUnitTest tests[COUNT_OF(probes) + COUNT_OF(on_sm_90) + COUNT_OF(plain)];
    size_t n = 0;
    memset(tests, 0, sizeof tests);
    for (; n < COUNT_OF(probes); n++) {
        tests[n].name = probes[n].name;
        tests[n].test_func = the_host_notices;
        tests[n].initial_state = (void *)(uintptr_t)&probes[n];
    }
    n += add_cases(tests + n, on_sm_90, COUNT_OF(on_sm_90));
    memcpy(tests + n, plain, sizeof plain);
    return _cmocka_run_group_tests("sm_90", tests, COUNT_OF(tests), open_sm_90, close_backend);
}

static int run_on_sm_80(void) {
    struct CMUnitTest tests[COUNT_OF(on_sm_80)];
    memset(tests, 0, sizeof tests);
    add_cases(tests, on_sm_80, COUNT_OF(on_sm_80));
    return _cmocka_run_group_tests("sm_80", tests, COUNT_OF(tests), open_sm_80, close_backend);
}

/* Last: the coverage of all. */
static int run_on_sm_75(void) {
    struct CMUnitTest tests[COUNT_OF(on_sm_75) + 1];
    memset(tests, 0, sizeof tests);
    add_cases(tests, on_sm_75, COUNT_OF(on_sm_75));
    tests[COUNT_OF(on_sm_75)].name = "the_cases_reached_every_kind_of_geometry";
    tests[COUNT_OF(on_sm_75)].test_func = the_cases_reached_every_kind_of_geometry;
    return _cmocka_run_group_tests("sm_75", tests, COUNT_OF(tests), open_sm_75, close_backend);
}

int main(void) {
    return run_on_sm_90() + run_on_sm_80() + run_on_sm_75();
}
