/* The CUDA driver's interface over the SIMT host: one device, whose kernels are run by this machine's
   processor before a launch returns. For what include/normjit/loader.h and examples/gpu.h ask of a
   driver; graphs are not supported.

   Environment, read at every call:
       NJ_SIMT_CC=80     compute capability; default 90
       NJ_SIMT_MS=5,3    times that events measure, in turn from the first event on; default 1
       NJ_SIMT_SMS=4     multiprocessors; default 132. Few of them make few blocks, each with much to do */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "simt_engine.h"

enum { INVALID_IMAGE = 200, NO_BINARY_FOR_GPU = 209, NOT_FOUND = 500, NOT_SUPPORTED = 801 };

enum {
    USUAL_SHARED = 48 << 10, /* bytes of a block that a function has without asking */
    USUAL_CLUSTER = 8,       /* blocks, likewise */
    DEPENDENT_LAUNCH = 6     /* launch attribute */
};

typedef struct module module;

typedef struct function {
    struct function *next;
    module *module;
    simt_kernel kernel;
    char name[64];
    int dynamic_shared; /* bytes that it asked for; 0: it did not */
    int is_large;       /* clusters may have more than 8 blocks */
} function;

struct module {
    void *library;
    simt_object *object;
    function *functions;
};

/* CUlaunchAttribute and CUlaunchConfig. */
typedef struct attribute {
    int id, pad;
    union {
        char bytes[64];
        int dependent;
    } value;
} attribute;

typedef struct config {
    unsigned grid[3], block[3], shared;
    void *stream;
    const attribute *attributes;
    unsigned attribute_count;
} config;

/* Of launches and device memory. One that checks: a test that jumps out of a crashed kernel leaves it
   locked, and the next lock in that thread must not wait for itself. */
static pthread_mutex_t lock = PTHREAD_ERRORCHECK_MUTEX_INITIALIZER_NP;
static struct {
    char name[64];
    int count;
} launched[32];                                          /* of each kernel */
static char fault[512];                                  /* of the latest launch that failed */
static int primary;                                      /* the one context: its address */
static _Thread_local void *stack[16];
static _Thread_local int stack_size;

static int number_of(const char *variable, int otherwise) {
    const char *text = getenv(variable);
    return text && *text ? atoi(text) : otherwise;
}

/* ---- errors and the device ------------------------------------------------------------------ */

static const struct {
    int code;
    const char *name, *text;
} errors[] = {{SIMT_SUCCESS, "CUDA_SUCCESS", "no error"},
              {SIMT_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
              {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
              {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "no object of the SIMT host's compiler"},
              {NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU", "PTX, or for another device"},
              {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
              {SIMT_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", fault},
              {SIMT_MISALIGNED_ADDRESS, "CUDA_ERROR_MISALIGNED_ADDRESS", fault},
              {SIMT_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", fault},
              {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "the SIMT host does not do this"}};

static int find_error(int code) {
    int i = (int)(sizeof errors / sizeof errors[0]);
    while (--i >= 0 && errors[i].code != code) {
    }
    return i;
}

int cuGetErrorName(int code, const char **name) {
    int i = find_error(code);
    *name = i < 0 ? NULL : errors[i].name;
    return i < 0 ? SIMT_INVALID_VALUE : SIMT_SUCCESS;
}

int cuGetErrorString(int code, const char **text) {
    int i = find_error(code);
    *text = i < 0 ? NULL : errors[i].text;
    return i < 0 ? SIMT_INVALID_VALUE : SIMT_SUCCESS;
}

int cuInit(unsigned flags) {
    return flags == 0 ? SIMT_SUCCESS : SIMT_INVALID_VALUE;
}

int cuDriverGetVersion(int *version) {
    *version = 13000;
    return SIMT_SUCCESS;
}

int cuDeviceGetCount(int *count) {
    *count = 1;
    return SIMT_SUCCESS;
}

int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return ordinal == 0 ? SIMT_SUCCESS : SIMT_INVALID_VALUE;
}

int cuDeviceGetName(char *name, int size, int device) {
    (void)device;
    snprintf(name, (size_t)size, "SIMT host");
    return SIMT_SUCCESS;
}

static int capability(void) {
    return number_of("NJ_SIMT_CC", 90);
}

/* Most bytes of shared memory that a block may ask for. */
static int most_shared(void) {
    switch (capability()) {
    case 75: return 64 << 10;
    case 80: return 163 << 10;
    case 90:
    case 100: return 227 << 10;
    default: return 99 << 10;
    }
}

int cuDeviceGetAttribute(int *value, int which, int device) {
    (void)device;
    switch (which) {
    case 8: *value = USUAL_SHARED; return SIMT_SUCCESS;
    case 16: *value = number_of("NJ_SIMT_SMS", 132); return SIMT_SUCCESS;
    case 75: *value = capability() / 10; return SIMT_SUCCESS;
    case 76: *value = capability() % 10; return SIMT_SUCCESS;
    case 97: *value = most_shared(); return SIMT_SUCCESS;
    default: return SIMT_INVALID_VALUE;
    }
}

/* ---- contexts: one, that is always alive ---------------------------------------------------- */

int cuDevicePrimaryCtxRetain(void **context, int device) {
    (void)device;
    *context = &primary;
    return SIMT_SUCCESS;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
    (void)device;
    return SIMT_SUCCESS;
}

int cuCtxGetCurrent(void **context) {
    *context = stack_size ? stack[stack_size - 1] : NULL;
    return SIMT_SUCCESS;
}

int cuCtxSetCurrent(void *context) {
    if (!stack_size) stack_size = 1;
    stack[stack_size - 1] = context;
    return SIMT_SUCCESS;
}

int cuCtxGetDevice(int *device) {
    *device = 0;
    return SIMT_SUCCESS;
}

int cuCtxPushCurrent_v2(void *context) {
    if (stack_size == 16) return SIMT_INVALID_VALUE;
    stack[stack_size++] = context;
    return SIMT_SUCCESS;
}

int cuCtxPopCurrent_v2(void **context) {
    if (stack_size == 0) return SIMT_INVALID_VALUE;
    *context = stack[--stack_size];
    return SIMT_SUCCESS;
}

/* ---- modules -------------------------------------------------------------------------------- */

static int write_image(int file, const unsigned char *image) {
    Elf64_Ehdr head;
    size_t bytes; /* a linker puts the table of sections last */
    memcpy(&head, image, sizeof head);
    bytes = head.e_shoff + (size_t)head.e_shnum * head.e_shentsize;
    while (bytes) {
        ssize_t written = write(file, image, bytes);
        if (written <= 0) return 0;
        image += written;
        bytes -= (size_t)written;
    }
    return 1;
}

/* The loader wants a file: a temporary one, gone again at once. */
static void *load_image(const unsigned char *image) {
    const char *parent = getenv("TMPDIR");
    char path[512];
    void *library = NULL;
    int file;
    snprintf(path, sizeof path, "%s/normjit-simt-module-XXXXXX", parent && *parent ? parent : "/tmp");
    file = mkstemp(path);
    if (file < 0) return NULL;
    if (write_image(file, image)) library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    close(file);
    unlink(path);
    return library;
}

/* Dynamic shared memory follows what the program declares, as simt_device.h asks the linker. */
static int is_behind(const simt_object *object) {
    return object->dynamic_begin == object->dynamic_end || object->dynamic_begin >= object->shared_end;
}

int cuModuleLoadDataEx(void **out, const void *image, unsigned option_count, int *options,
                       void **values) {
    module *made;
    int result = SIMT_SUCCESS;
    (void)option_count, (void)options, (void)values;
    if (memcmp(image, ELFMAG, SELFMAG) != 0) return NO_BINARY_FOR_GPU;
    made = calloc(1, sizeof *made);
    made->library = load_image(image);
    made->object = made->library ? (simt_object *)dlsym(made->library, "simt_this") : NULL;
    if (!made->object) result = INVALID_IMAGE;
    else if (made->object->arch != capability()) result = NO_BINARY_FOR_GPU;
    else if (simt_shared_bytes(made->object, 0) > USUAL_SHARED || !is_behind(made->object))
        result = INVALID_IMAGE;
    if (result == SIMT_SUCCESS) {
        *out = made;
        return SIMT_SUCCESS;
    }
    if (made->library) dlclose(made->library);
    free(made);
    return result;
}

int cuModuleUnload(void *handle) {
    module *gone = handle;
    while (gone->functions) {
        function *f = gone->functions;
        gone->functions = f->next;
        free(f);
    }
    dlclose(gone->library);
    free(gone);
    return SIMT_SUCCESS;
}

int cuModuleGetFunction(void **out, void *handle, const char *name) {
    module *in = handle;
    void *symbol = dlsym(in->library, name);
    function *made;
    if (!symbol) return NOT_FOUND;
    made = calloc(1, sizeof *made);
    made->module = in;
    made->next = in->functions;
    in->functions = made;
    memcpy(&made->kernel, &symbol, sizeof symbol);
    snprintf(made->name, sizeof made->name, "%s", name);
    *out = made;
    return SIMT_SUCCESS;
}

int cuFuncSetAttribute(void *handle, int which, int value) {
    function *f = handle;
    switch (which) {
    case 8: /* most bytes of dynamic shared memory */
        if (value < 0 || simt_shared_bytes(f->module->object, 0) + (size_t)value > (size_t)most_shared())
            return SIMT_INVALID_VALUE;
        f->dynamic_shared = value;
        return SIMT_SUCCESS;
    case 14: /* clusters of a size that not every device has */
        f->is_large = value;
        return capability() >= 90 ? SIMT_SUCCESS : SIMT_INVALID_VALUE;
    default: return SIMT_INVALID_VALUE;
    }
}

/* ---- launches ------------------------------------------------------------------------------- */

static int is_shape(const config *c) {
    const unsigned *grid = c->grid, *block = c->block;
    return grid[0] && grid[0] <= 0x7fffffffu && grid[1] && grid[1] <= 65535 && grid[2] == 1 &&
           block[0] && block[1] && block[2] == 1 && block[0] * block[1] <= SIMT_THREADS;
}

static int is_granted(const config *c, const function *f) {
    const simt_object *object = f->module->object;
    const size_t usual = USUAL_SHARED - simt_shared_bytes(object, 0), asked = (size_t)f->dynamic_shared;
    return c->shared <= (usual > asked ? usual : asked) &&
           object->cluster <= (f->is_large ? SIMT_CLUSTER : USUAL_CLUSTER);
}

static int *launches_of(const char *name) {
    int i = 0;
    while (i < 31 && launched[i].name[0] && strcmp(launched[i].name, name) != 0) i++;
    snprintf(launched[i].name, sizeof launched[i].name, "%s", name);
    return &launched[i].count;
}

/* For tests: how often a kernel has been launched. */
int simt_launches(const char *name) {
    int count;
    pthread_mutex_lock(&lock);
    count = *launches_of(name);
    pthread_mutex_unlock(&lock);
    return count;
}

static int launch(const config *c, const function *f, void **parameters) {
    simt_launch launch;
    unsigned i;
    int result;
    if (!is_shape(c) || !is_granted(c, f) || !parameters || !parameters[0]) return SIMT_INVALID_VALUE;
    memset(&launch, 0, sizeof launch);
    launch.object = f->module->object;
    launch.kernel = f->kernel;
    launch.name = f->name;
    launch.dynamic_bytes = c->shared;
    launch.blocks.x = c->grid[0];
    launch.blocks.y = c->grid[1];
    launch.blocks.z = launch.threads.z = 1;
    launch.threads.x = c->block[0];
    launch.threads.y = c->block[1];
    for (i = 0; i < c->attribute_count; i++) {
        if (c->attributes[i].id != DEPENDENT_LAUNCH || capability() < 90) return SIMT_INVALID_VALUE;
        launch.is_dependent = c->attributes[i].value.dependent;
    }
    pthread_mutex_lock(&lock);
    ++*launches_of(f->name);
    result = simt_run(&launch, parameters[0], fault, sizeof fault);
    pthread_mutex_unlock(&lock);
    return result;
}

int cuLaunchKernel(void *handle, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared, void *stream, void **parameters,
                   void **extra) {
    config c = {{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared, stream, NULL, 0};
    (void)extra;
    return launch(&c, handle, parameters);
}

int cuLaunchKernelEx(const config *c, void *handle, void **parameters, void **extra) {
    (void)extra;
    return launch(c, handle, parameters);
}

/* ---- memory --------------------------------------------------------------------------------- */

int cuMemGetInfo_v2(size_t *available, size_t *total) {
    *available = *total = (size_t)256 << 20;
    return SIMT_SUCCESS;
}

int cuMemAlloc_v2(uintptr_t *address, size_t bytes) {
    pthread_mutex_lock(&lock);
    *address = (uintptr_t)simt_memory_alloc(bytes);
    pthread_mutex_unlock(&lock);
    return *address ? SIMT_SUCCESS : 2;
}

int cuMemFree_v2(uintptr_t address) {
    int done;
    pthread_mutex_lock(&lock);
    done = simt_memory_free((void *)address);
    pthread_mutex_unlock(&lock);
    return done ? SIMT_SUCCESS : SIMT_INVALID_VALUE;
}

static int is_device(uintptr_t address, size_t bytes) {
    int found;
    pthread_mutex_lock(&lock);
    found = simt_memory_find((void *)address, bytes) != NULL;
    pthread_mutex_unlock(&lock);
    return found;
}

int cuMemcpyHtoDAsync_v2(uintptr_t to, const void *from, size_t bytes, void *stream) {
    (void)stream;
    if (!is_device(to, bytes)) return SIMT_INVALID_VALUE;
    memcpy((void *)to, from, bytes);
    return SIMT_SUCCESS;
}

int cuMemcpyDtoHAsync_v2(void *to, uintptr_t from, size_t bytes, void *stream) {
    (void)stream;
    if (!is_device(from, bytes)) return SIMT_INVALID_VALUE;
    memcpy(to, (const void *)from, bytes);
    return SIMT_SUCCESS;
}

int cuMemsetD8Async(uintptr_t to, unsigned char value, size_t bytes, void *stream) {
    (void)stream;
    if (!is_device(to, bytes)) return SIMT_INVALID_VALUE;
    memset((void *)to, value, bytes);
    return SIMT_SUCCESS;
}

int cuPointerGetAttribute(void *value, int which, unsigned long long address) {
    if (!is_device((uintptr_t)address, 1) || (which != 2 && which != 9)) return SIMT_INVALID_VALUE;
    if (which == 2) *(unsigned *)value = 2; /* memory of a device */
    else *(int *)value = 0;                 /* its ordinal */
    return SIMT_SUCCESS;
}

/* ---- streams: all work is done when it has been asked for ----------------------------------- */

int cuStreamCreate(void **stream, unsigned flags) {
    (void)flags;
    *stream = &primary;
    return SIMT_SUCCESS;
}

int cuStreamDestroy_v2(void *stream) {
    (void)stream;
    return SIMT_SUCCESS;
}

int cuStreamSynchronize(void *stream) {
    (void)stream;
    return SIMT_SUCCESS;
}

int cuStreamIsCapturing(void *stream, int *status) {
    (void)stream;
    *status = 0;
    return SIMT_SUCCESS;
}

/* ---- events: real times would say nothing of a GPU -------------------------------------------- */

static int live_events, times_asked; /* one thread measures */

int cuEventCreate(void **event, unsigned flags) {
    (void)flags;
    if (live_events++ == 0) times_asked = 0;
    *event = &primary;
    return SIMT_SUCCESS;
}

int cuEventDestroy_v2(void *event) {
    (void)event;
    live_events--;
    return SIMT_SUCCESS;
}

int cuEventRecord(void *event, void *stream) {
    (void)event, (void)stream;
    return SIMT_SUCCESS;
}

int cuEventSynchronize(void *event) {
    (void)event;
    return SIMT_SUCCESS;
}

int cuEventElapsedTime(float *ms, void *from, void *to) {
    const char *at = getenv("NJ_SIMT_MS");
    int count = 1, turn, i;
    (void)from, (void)to;
    *ms = 1;
    if (!at || !*at) return SIMT_SUCCESS;
    for (i = 0; at[i]; i++) count += at[i] == ',';
    for (turn = times_asked++ % count; turn > 0; turn--) at = strchr(at, ',') + 1;
    *ms = strtof(at, NULL);
    return SIMT_SUCCESS;
}

/* ---- not supported -------------------------------------------------------------------------- */

#define NOT_SUPPORTED_HERE(name)                                                                       \
    int name(void);                                                                                    \
    int name(void) {                                                                                   \
        return NOT_SUPPORTED;                                                                          \
    }
NOT_SUPPORTED_HERE(cuFuncGetAttribute)
NOT_SUPPORTED_HERE(cuOccupancyMaxActiveBlocksPerMultiprocessor)
NOT_SUPPORTED_HERE(cuThreadExchangeStreamCaptureMode)
NOT_SUPPORTED_HERE(cuStreamBeginCapture_v2)
NOT_SUPPORTED_HERE(cuStreamEndCapture)
NOT_SUPPORTED_HERE(cuGraphInstantiateWithFlags)
NOT_SUPPORTED_HERE(cuGraphLaunch)
NOT_SUPPORTED_HERE(cuGraphDestroy)
NOT_SUPPORTED_HERE(cuGraphExecDestroy)
