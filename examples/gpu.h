/* A small GPU layer for the examples, the tests and the benchmark: memory, copies, a stream, graphs
   and events over the driver API, opened at run time, so that nothing of CUDA is needed to build.
   Linux; link with -ldl where libc has no dlopen of its own.

   Functions that return int give 1 on success and 0 on failure, those that return a pointer give
   NULL on failure; g->error then holds the text. Everything runs in order on g->stream: a copy is
   enqueued there and waited for. A gpu belongs to one thread at a time; gpu_make_current readies
   another. */
#ifndef EXAMPLES_GPU_H
#define EXAMPLES_GPU_H

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

/* Another library in the driver's place: a program that includes this file may name one before. */
#ifndef GPU_DRIVER
#define GPU_DRIVER "libcuda.so.1"
#endif

/* The driver's types are an enum (CUresult), an int (CUdevice), an address (CUdeviceptr) and
   pointers to structs that nobody looks into. */
typedef struct gpu_api {
    int (*init)(unsigned flags);
    int (*get_error_string)(int result, const char **text);
    int (*driver_get_version)(int *version);
    int (*device_get)(int *device, int ordinal);
    int (*device_get_count)(int *count);
    int (*device_get_name)(char *name, int size, int device);
    int (*device_get_attribute)(int *value, int attribute, int device);
    int (*primary_retain)(void **context, int device);
    int (*primary_release)(int device);
    int (*ctx_set_current)(void *context);
    int (*mem_get_info)(size_t *available, size_t *total);
    int (*mem_alloc)(uintptr_t *address, size_t bytes);
    int (*mem_free)(uintptr_t address);
    int (*copy_to_device)(uintptr_t dst, const void *src, size_t bytes, void *stream);
    int (*copy_to_host)(void *dst, uintptr_t src, size_t bytes, void *stream);
    int (*memset_d8)(uintptr_t dst, unsigned char value, size_t bytes, void *stream);
    int (*stream_create)(void **stream, unsigned flags);
    int (*stream_destroy)(void *stream);
    int (*stream_synchronize)(void *stream);
    int (*begin_capture)(void *stream, int mode);
    int (*end_capture)(void *stream, void **graph);
    int (*graph_instantiate)(void **exec, void *graph, unsigned long long flags);
    int (*graph_launch)(void *exec, void *stream);
    int (*graph_destroy)(void *graph);
    int (*graph_exec_destroy)(void *exec);
    int (*event_create)(void **event, unsigned flags);
    int (*event_destroy)(void *event);
    int (*event_record)(void *event, void *stream);
    int (*event_synchronize)(void *event);
    int (*event_elapsed)(float *ms, void *from, void *to);
} gpu_api;

typedef struct gpu {
    gpu_api api;
    void *context;  /* the device's primary context */
    void *stream;   /* non-blocking: does not wait for the legacy default stream */
    int device;     /* CUdevice */
    int arch;       /* 90 for sm_90 */
    int processors; /* streaming multiprocessors */
    char name[128];
    char error[256];
} gpu;

/* 1 when result is success, else 0 and the text. */
static inline int gpu_ok(gpu *g, int result, const char *call) {
    const char *text = NULL;
    if (result == 0) return 1;
    if (g->api.get_error_string(result, &text) != 0 || !text) text = "no text for this error";
    snprintf(g->error, sizeof g->error, "%s: error %d: %s", call, result, text);
    return 0;
}

/* slot: the address of a function pointer. ISO C converts no object pointer to one, POSIX lets the
   bytes be copied. */
static inline int gpu_symbol(gpu *g, void *library, const char *name, void *slot) {
    void *symbol = dlsym(library, name);
    memcpy(slot, &symbol, sizeof symbol);
    if (!symbol) snprintf(g->error, sizeof g->error, GPU_DRIVER " lacks %s", name);
    return symbol != NULL;
}

/* The names with _v2 are those that cuda.h's macros stand for; the plain ones are older forms. */
static inline int gpu_load(gpu *g, void *library) {
    gpu_api *a = &g->api;
    return gpu_symbol(g, library, "cuInit", &a->init) &&
           gpu_symbol(g, library, "cuGetErrorString", &a->get_error_string) &&
           gpu_symbol(g, library, "cuDriverGetVersion", &a->driver_get_version) &&
           gpu_symbol(g, library, "cuDeviceGet", &a->device_get) &&
           gpu_symbol(g, library, "cuDeviceGetCount", &a->device_get_count) &&
           gpu_symbol(g, library, "cuDeviceGetName", &a->device_get_name) &&
           gpu_symbol(g, library, "cuDeviceGetAttribute", &a->device_get_attribute) &&
           gpu_symbol(g, library, "cuDevicePrimaryCtxRetain", &a->primary_retain) &&
           gpu_symbol(g, library, "cuDevicePrimaryCtxRelease_v2", &a->primary_release) &&
           gpu_symbol(g, library, "cuCtxSetCurrent", &a->ctx_set_current) &&
           gpu_symbol(g, library, "cuMemGetInfo_v2", &a->mem_get_info) &&
           gpu_symbol(g, library, "cuMemAlloc_v2", &a->mem_alloc) &&
           gpu_symbol(g, library, "cuMemFree_v2", &a->mem_free) &&
           gpu_symbol(g, library, "cuMemcpyHtoDAsync_v2", &a->copy_to_device) &&
           gpu_symbol(g, library, "cuMemcpyDtoHAsync_v2", &a->copy_to_host) &&
           gpu_symbol(g, library, "cuMemsetD8Async", &a->memset_d8) &&
           gpu_symbol(g, library, "cuStreamCreate", &a->stream_create) &&
           gpu_symbol(g, library, "cuStreamDestroy_v2", &a->stream_destroy) &&
           gpu_symbol(g, library, "cuStreamSynchronize", &a->stream_synchronize) &&
           gpu_symbol(g, library, "cuStreamBeginCapture_v2", &a->begin_capture) &&
           gpu_symbol(g, library, "cuStreamEndCapture", &a->end_capture) &&
           gpu_symbol(g, library, "cuGraphInstantiateWithFlags", &a->graph_instantiate) &&
           gpu_symbol(g, library, "cuGraphLaunch", &a->graph_launch) &&
           gpu_symbol(g, library, "cuGraphDestroy", &a->graph_destroy) &&
           gpu_symbol(g, library, "cuGraphExecDestroy", &a->graph_exec_destroy) &&
           gpu_symbol(g, library, "cuEventCreate", &a->event_create) &&
           gpu_symbol(g, library, "cuEventDestroy_v2", &a->event_destroy) &&
           gpu_symbol(g, library, "cuEventRecord", &a->event_record) &&
           gpu_symbol(g, library, "cuEventSynchronize", &a->event_synchronize) &&
           gpu_symbol(g, library, "cuEventElapsedTime", &a->event_elapsed);
}

/* Leaves no context current in this thread. Does nothing the second time, or after a gpu_open that
   failed. The driver stays loaded: it has threads of its own. */
static inline void gpu_close(gpu *g) {
    if (!g->context) return;
    if (g->stream) g->api.stream_destroy(g->stream);
    g->api.ctx_set_current(NULL); /* once released the context may be gone */
    g->api.primary_release(g->device);
    g->stream = NULL;
    g->context = NULL;
}

/* Makes the device's context current in this thread; gpu_open has done so in its own. */
static inline int gpu_make_current(gpu *g) {
    return gpu_ok(g, g->api.ctx_set_current(g->context), "cuCtxSetCurrent");
}

/* Retains the primary context of the device with that ordinal and makes it current in this thread.
   0: no driver, no such device, or a failure; g->error says which. g need not be initialised. */
static inline int gpu_open(gpu *g, int ordinal) {
    const int attribute_processors = 16, attribute_major = 75, attribute_minor = 76;
    const unsigned non_blocking = 1;
    void *library = dlopen(GPU_DRIVER, RTLD_NOW | RTLD_LOCAL);
    int count = 0, major = 0, minor = 0;
    memset(g, 0, sizeof *g);
    if (!library) {
        const char *text = dlerror();
        snprintf(g->error, sizeof g->error, "no CUDA driver: %s", text ? text : GPU_DRIVER);
        return 0;
    }
    if (!gpu_load(g, library)) return 0;
    if (!gpu_ok(g, g->api.init(0), "cuInit")) return 0;
    if (!gpu_ok(g, g->api.device_get_count(&count), "cuDeviceGetCount")) return 0;
    if (ordinal < 0 || ordinal >= count) {
        snprintf(g->error, sizeof g->error, "no CUDA device %d: the driver has %d", ordinal, count);
        return 0;
    }
    if (!gpu_ok(g, g->api.device_get(&g->device, ordinal), "cuDeviceGet")) return 0;
    if (!gpu_ok(g, g->api.device_get_name(g->name, (int)sizeof g->name, g->device),
                "cuDeviceGetName") ||
        !gpu_ok(g, g->api.device_get_attribute(&major, attribute_major, g->device),
                "cuDeviceGetAttribute") ||
        !gpu_ok(g, g->api.device_get_attribute(&minor, attribute_minor, g->device),
                "cuDeviceGetAttribute") ||
        !gpu_ok(g, g->api.device_get_attribute(&g->processors, attribute_processors, g->device),
                "cuDeviceGetAttribute"))
        return 0;
    g->arch = 10 * major + minor;
    if (!gpu_ok(g, g->api.primary_retain(&g->context, g->device), "cuDevicePrimaryCtxRetain")) {
        g->context = NULL;
        return 0;
    }
    if (gpu_make_current(g) &&
        gpu_ok(g, g->api.stream_create(&g->stream, non_blocking), "cuStreamCreate"))
        return 1;
    g->stream = NULL;
    gpu_close(g);
    return 0;
}

/* 13000 for CUDA 13.0: the newest CUDA that the driver knows; 0 on failure. */
static inline int gpu_driver_version(gpu *g) {
    int version = 0;
    return gpu_ok(g, g->api.driver_get_version(&version), "cuDriverGetVersion") ? version : 0;
}

/* Bytes of device memory. */
static inline int gpu_memory(gpu *g, size_t *available, size_t *total) {
    return gpu_ok(g, g->api.mem_get_info(available, total), "cuMemGetInfo");
}

/* Aligned to 256 bytes or more. bytes > 0. */
static inline void *gpu_alloc(gpu *g, size_t bytes) {
    uintptr_t address = 0;
    return gpu_ok(g, g->api.mem_alloc(&address, bytes), "cuMemAlloc") ? (void *)address : NULL;
}

/* Waits for the work that may use p. NULL is a no-op. */
static inline void gpu_free(gpu *g, void *p) {
    if (p) gpu_ok(g, g->api.mem_free((uintptr_t)p), "cuMemFree");
}

/* Waits until all that was enqueued on g->stream is done. */
static inline int gpu_wait(gpu *g) {
    return gpu_ok(g, g->api.stream_synchronize(g->stream), "cuStreamSynchronize");
}

/* To the device; dst is complete on return. */
static inline int gpu_upload(gpu *g, void *dst, const void *src, size_t bytes) {
    return gpu_ok(g, g->api.copy_to_device((uintptr_t)dst, src, bytes, g->stream),
                  "cuMemcpyHtoDAsync") &&
           gpu_wait(g);
}

/* To the host, after the work enqueued so far; dst is complete on return. */
static inline int gpu_download(gpu *g, void *dst, const void *src, size_t bytes) {
    return gpu_ok(g, g->api.copy_to_host(dst, (uintptr_t)src, bytes, g->stream),
                  "cuMemcpyDtoHAsync") &&
           gpu_wait(g);
}

/* Sets each byte; enqueued, not waited for. */
static inline int gpu_fill(gpu *g, void *dst, unsigned char value, size_t bytes) {
    return gpu_ok(g, g->api.memset_d8((uintptr_t)dst, value, bytes, g->stream), "cuMemsetD8Async");
}

/* From here to gpu_capture_end work on g->stream is recorded, not run. */
static inline int gpu_capture_begin(gpu *g) {
    const int mode_thread_local = 1; /* other threads may go on allocating */
    return gpu_ok(g, g->api.begin_capture(g->stream, mode_thread_local), "cuStreamBeginCapture");
}

/* The recorded work, ready for gpu_graph_launch. */
static inline void *gpu_capture_end(gpu *g) {
    void *graph = NULL, *exec = NULL;
    int made;
    if (!gpu_ok(g, g->api.end_capture(g->stream, &graph), "cuStreamEndCapture")) return NULL;
    made = gpu_ok(g, g->api.graph_instantiate(&exec, graph, 0), "cuGraphInstantiateWithFlags");
    g->api.graph_destroy(graph);
    return made ? exec : NULL;
}

static inline int gpu_graph_launch(gpu *g, void *exec) {
    return gpu_ok(g, g->api.graph_launch(exec, g->stream), "cuGraphLaunch");
}

static inline void gpu_graph_free(gpu *g, void *exec) {
    if (exec) gpu_ok(g, g->api.graph_exec_destroy(exec), "cuGraphExecDestroy");
}

static inline void *gpu_event(gpu *g) {
    void *event = NULL;
    return gpu_ok(g, g->api.event_create(&event, 0), "cuEventCreate") ? event : NULL;
}

/* The event happens when the work enqueued so far is done. */
static inline int gpu_record(gpu *g, void *event) {
    return gpu_ok(g, g->api.event_record(event, g->stream), "cuEventRecord");
}

/* Waits for `to`; milliseconds, negative on failure. */
static inline float gpu_elapsed_ms(gpu *g, void *from, void *to) {
    float ms = -1.0f;
    if (!gpu_ok(g, g->api.event_synchronize(to), "cuEventSynchronize") ||
        !gpu_ok(g, g->api.event_elapsed(&ms, from, to), "cuEventElapsedTime"))
        return -1.0f;
    return ms;
}

static inline void gpu_event_free(gpu *g, void *event) {
    if (event) gpu_ok(g, g->api.event_destroy(event), "cuEventDestroy");
}

#endif /* EXAMPLES_GPU_H */
