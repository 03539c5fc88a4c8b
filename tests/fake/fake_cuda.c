/* A CUDA driver without a GPU, for tests: the symbols that the loader looks up, with the driver's
   checks of arguments, contexts and lifetimes, and a record of what was asked. Kernels do not run.

   Environment, read at every call:
       NJ_FAKE_FAIL=cuLaunchKernel=700,cuInit=3   these functions return these codes
       NJ_FAKE_FAIL=cuModuleGetFunction=500@2     the same at the second call since the reset alone
       NJ_FAKE_DEVICES=2                          devices; default 1
       NJ_FAKE_VERSION=11000                      of the driver; default 13000
       NJ_FAKE_CC=80                              compute capability; default 90
       NJ_FAKE_CAPTURING=1                        status of every stream's capture; default 0
       NJ_FAKE_MS=5,3,4                           milliseconds that events measure, in turn; default 1

   A test finds the fake_cuda_* functions with dlsym. Build: cc -shared -fPIC -pthread. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../ptx_src/nj_abi.h"

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    NO_BINARY_FOR_GPU = 209,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    INVALID_CLUSTER_SIZE = 912
};

enum {
    DEVICES = 2,
    MULTIPROCESSORS = 132, /* an H200's numbers */
    SHARED_DEFAULT = 49152,
    SHARED_MOST = 232448,
    STACK = 16, /* contexts per thread */
    FUNCTIONS = 16,
    COUNTERS = 48,
    LAUNCHES = 512, /* remembered */
    EVENTS = 8,
    RANGES = 64
};

typedef struct fake_context {
    int device;
    int holds; /* of a primary context; a test's own context is always alive */
} fake_context;

typedef struct fake_module fake_module;

typedef struct fake_function {
    fake_module *module;
    char name[64];
    unsigned shared_most; /* dynamic shared memory that a launch may ask for */
} fake_function;

struct fake_module {
    fake_module *next;
    fake_context *context;
    char *text; /* of PTX, to look names up in; NULL for a cubin */
    fake_function functions[FUNCTIONS];
    int function_count;
};

typedef struct fake_launch {
    char name[64];
    unsigned grid[3], block[3], shared, cluster[3];
    int programmatic;
    int device;
    void *stream;
    unsigned char problem[NJI_PROBLEM_BYTES];
} fake_launch;

typedef struct fake_event {
    fake_context *context; /* NULL: free */
    int recorded, done;
    void *stream;
} fake_event;

/* CUlaunchAttribute and CUlaunchConfig. */
typedef struct fake_attribute {
    int id, pad;
    union {
        char bytes[64];
        unsigned cluster[3];
        int programmatic;
        uint64_t align;
    } value;
} fake_attribute;

typedef struct fake_config {
    unsigned grid[3], block[3], shared;
    void *stream;
    const fake_attribute *attributes;
    unsigned attribute_count;
} fake_config;

/* All guarded by `lock`, but the thread's own. */
static struct {
    int initialized;
    fake_context primary[DEVICES], own[DEVICES];
    fake_module *modules;
    struct {
        char name[64];
        int count;
    } counters[COUNTERS];
    fake_launch launches[LAUNCHES];
    int launch_count;
    fake_event events[EVENTS];
    int times_asked;    /* since the first event */
    void *timed_stream; /* where both events of the latest time were recorded */
    struct {
        uintptr_t begin, end;
        int device;
    } ranges[RANGES];
    int range_count;
} fake = {.primary = {{0, 0}, {1, 0}}, .own = {{0, 1}, {1, 1}}};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local fake_context *stack[STACK];
static _Thread_local int stack_size;

/* ---- bookkeeping ---------------------------------------------------------------------------- */

static int number_of(const char *variable, int otherwise) {
    const char *text = getenv(variable);
    return text && *text ? atoi(text) : otherwise;
}

static int injected(const char *function, int call) {
    const char *at = getenv("NJ_FAKE_FAIL");
    size_t length = strlen(function);
    while (at && *at) {
        if (strncmp(at, function, length) == 0 && at[length] == '=') {
            char *end;
            int code = (int)strtol(at + length + 1, &end, 10);
            if (*end != '@' || atoi(end + 1) == call) return code;
        }
        at = strchr(at, ',');
        if (at) at++;
    }
    return SUCCESS;
}

static int *counter_of(const char *function) {
    int i = 0;
    while (i < COUNTERS - 1 && fake.counters[i].name[0] &&
           strcmp(fake.counters[i].name, function)) {
        i++;
    }
    snprintf(fake.counters[i].name, sizeof fake.counters[i].name, "%s", function);
    return &fake.counters[i].count;
}

/* Counts the call and takes the lock; what the call must return, when not SUCCESS. */
static int enter_any(const char *function) {
    pthread_mutex_lock(&lock);
    return injected(function, ++*counter_of(function));
}

static int enter(const char *function) {
    int result = enter_any(function);
    return result == SUCCESS && !fake.initialized ? NOT_INITIALIZED : result;
}

static fake_context *current(void) {
    return stack_size ? stack[stack_size - 1] : NULL;
}

static int enter_context(const char *function) {
    int result = enter(function);
    if (result != SUCCESS) return result;
    return current() && current()->holds ? SUCCESS : INVALID_CONTEXT;
}

static int leave(int result) {
    pthread_mutex_unlock(&lock);
    return result;
}

static int devices(void) {
    int count = number_of("NJ_FAKE_DEVICES", 1);
    return count > DEVICES ? DEVICES : count;
}

static int is_device(int device) {
    return device >= 0 && device < devices();
}

static int is_function(const fake_function *function) {
    const fake_module *module;
    for (module = fake.modules; module; module = module->next) {
        if (function >= module->functions &&
            function < module->functions + module->function_count) {
            return 1;
        }
    }
    return 0;
}

/* ---- errors and devices --------------------------------------------------------------------- */

static const struct {
    int code;
    const char *name, *text;
} errors[] = {{0, "CUDA_SUCCESS", "no error"},
              {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
              {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
              {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
              {34, "CUDA_ERROR_STUB_LIBRARY", "CUDA driver is a stub library"},
              {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
              {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
              {200, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
              {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
              {209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for the device"},
              {600, "CUDA_ERROR_NOT_READY", "device not ready"},
              {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
              {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
              {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
              {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
               "operation not permitted when stream is capturing"},
              {906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
               "operation would make the legacy stream depend on a capturing blocking stream"},
              {912, "CUDA_ERROR_INVALID_CLUSTER_SIZE", "cluster misconfiguration"}};

int cuGetErrorName(int error, const char **name) {
    *name = NULL;
    for (size_t i = 0; i < sizeof errors / sizeof errors[0]; i++) {
        if (errors[i].code == error) *name = errors[i].name;
    }
    return *name ? SUCCESS : INVALID_VALUE;
}

int cuGetErrorString(int error, const char **text) {
    *text = NULL;
    for (size_t i = 0; i < sizeof errors / sizeof errors[0]; i++) {
        if (errors[i].code == error) *text = errors[i].text;
    }
    return *text ? SUCCESS : INVALID_VALUE;
}

int cuInit(unsigned flags) {
    int result = enter_any("cuInit");
    if (result == SUCCESS && flags != 0) result = INVALID_VALUE;
    if (result == SUCCESS && devices() < 1) result = NO_DEVICE;
    if (result == SUCCESS) fake.initialized = 1;
    return leave(result);
}

int cuDriverGetVersion(int *version) {
    int result = enter_any("cuDriverGetVersion");
    if (result == SUCCESS && !version) result = INVALID_VALUE;
    if (result == SUCCESS) *version = number_of("NJ_FAKE_VERSION", 13000);
    return leave(result);
}

int cuDeviceGetCount(int *count) {
    int result = enter("cuDeviceGetCount");
    if (result == SUCCESS && !count) result = INVALID_VALUE;
    if (result == SUCCESS) *count = devices();
    return leave(result);
}

int cuDeviceGet(int *device, int ordinal) {
    int result = enter("cuDeviceGet");
    if (result == SUCCESS && !device) result = INVALID_VALUE;
    if (result == SUCCESS && !is_device(ordinal)) result = INVALID_DEVICE;
    if (result == SUCCESS) *device = ordinal;
    return leave(result);
}

int cuDeviceGetName(char *name, int size, int device) {
    int result = enter("cuDeviceGetName");
    if (result == SUCCESS && (!name || size < 1)) result = INVALID_VALUE;
    if (result == SUCCESS && !is_device(device)) result = INVALID_DEVICE;
    if (result == SUCCESS) snprintf(name, (size_t)size, "Fake GPU %d", device);
    return leave(result);
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    int result = enter("cuDeviceGetAttribute");
    if (result == SUCCESS && !value) result = INVALID_VALUE;
    if (result == SUCCESS && !is_device(device)) result = INVALID_DEVICE;
    if (result != SUCCESS) return leave(result);
    switch (attribute) {
    case 16: *value = MULTIPROCESSORS; break;
    case 75: *value = number_of("NJ_FAKE_CC", 90) / 10; break;
    case 76: *value = number_of("NJ_FAKE_CC", 90) % 10; break;
    default: result = INVALID_VALUE;
    }
    return leave(result);
}

/* ---- contexts ------------------------------------------------------------------------------- */

int cuDevicePrimaryCtxRetain(void **context, int device) {
    int result = enter("cuDevicePrimaryCtxRetain");
    if (result == SUCCESS && !context) result = INVALID_VALUE;
    if (result == SUCCESS && !is_device(device)) result = INVALID_DEVICE;
    if (result != SUCCESS) return leave(result);
    fake.primary[device].holds++;
    *context = &fake.primary[device];
    return leave(SUCCESS);
}

int cuDevicePrimaryCtxRelease_v2(int device) {
    int result = enter("cuDevicePrimaryCtxRelease_v2");
    if (result == SUCCESS && !is_device(device)) result = INVALID_DEVICE;
    if (result == SUCCESS && fake.primary[device].holds == 0) result = INVALID_CONTEXT;
    if (result == SUCCESS) fake.primary[device].holds--;
    return leave(result);
}

int cuCtxGetCurrent(void **context) {
    int result = enter("cuCtxGetCurrent");
    if (result == SUCCESS && !context) result = INVALID_VALUE;
    if (result == SUCCESS) *context = current();
    return leave(result);
}

int cuCtxGetDevice(int *device) {
    int result = enter_context("cuCtxGetDevice");
    if (result == SUCCESS && !device) result = INVALID_VALUE;
    if (result == SUCCESS) *device = current()->device;
    return leave(result);
}

int cuCtxPushCurrent_v2(void *context) {
    int result = enter("cuCtxPushCurrent_v2");
    fake_context *pushed = context;
    if (result == SUCCESS && (!pushed || !pushed->holds || stack_size == STACK)) {
        result = INVALID_CONTEXT;
    }
    if (result == SUCCESS) stack[stack_size++] = pushed;
    return leave(result);
}

int cuCtxPopCurrent_v2(void **context) {
    int result = enter("cuCtxPopCurrent_v2");
    if (result == SUCCESS && stack_size == 0) result = INVALID_CONTEXT;
    if (result != SUCCESS) return leave(result);
    stack_size--;
    if (context) *context = stack[stack_size];
    return leave(SUCCESS);
}

/* ---- modules and functions ------------------------------------------------------------------ */

/* A cubin of the fake NVRTC for this device, any ELF file, or PTX. */
static int check_image(const char *image, int *is_ptx) {
    int arch;
    *is_ptx = 0;
    if (memcmp(image, "\177ELF", 4) == 0) return SUCCESS;
    if (sscanf(image, "FAKE CUBIN sm_%d", &arch) == 1) {
        return arch == number_of("NJ_FAKE_CC", 90) ? SUCCESS : NO_BINARY_FOR_GPU;
    }
    *is_ptx = strstr(image, ".version") != NULL;
    return *is_ptx ? SUCCESS : INVALID_IMAGE;
}

/* Options 5 and 6: the error log's buffer and its size, the latter by value. */
static void write_error_log(unsigned count, const int *options, void **values) {
    char *buffer = NULL;
    size_t size = 0;
    for (unsigned i = 0; i < count; i++) {
        if (options[i] == 5) buffer = values[i];
        if (options[i] == 6) size = (size_t)(uintptr_t)values[i];
    }
    if (buffer && size) snprintf(buffer, size, "fake driver: the image was refused");
}

int cuModuleLoadDataEx(void **module, const void *image, unsigned option_count, int *options,
                       void **values) {
    int result = enter_context("cuModuleLoadDataEx");
    int is_ptx = 0;
    fake_module *made = NULL;
    if (result == SUCCESS && (!module || !image || (option_count && (!options || !values)))) {
        return leave(INVALID_VALUE);
    }
    if (result == SUCCESS) result = check_image(image, &is_ptx);
    if (result != SUCCESS) {
        write_error_log(option_count, options, values);
        return leave(result);
    }
    made = calloc(1, sizeof *made);
    if (is_ptx) {
        made->text = malloc(strlen(image) + 1);
        memcpy(made->text, image, strlen(image) + 1);
    }
    made->context = current();
    made->next = fake.modules;
    fake.modules = made;
    *module = made;
    return leave(SUCCESS);
}

int cuModuleUnload(void *module) {
    int result = enter_context("cuModuleUnload");
    fake_module **at = &fake.modules;
    if (result != SUCCESS) return leave(result);
    while (*at && *at != module)
        at = &(*at)->next;
    if (!*at) return leave(INVALID_HANDLE);
    *at = (*at)->next;
    free(((fake_module *)module)->text);
    free(module);
    return leave(SUCCESS);
}

/* PTX is asked for its entries; a cubin is taken to hold every name. */
int cuModuleGetFunction(void **function, void *module, const char *name) {
    int result = enter_context("cuModuleGetFunction");
    fake_module *in = fake.modules;
    fake_function *made;
    if (result == SUCCESS && (!function || !name || !*name)) result = INVALID_VALUE;
    if (result != SUCCESS) return leave(result);
    while (in && in != module)
        in = in->next;
    if (!in || in->context != current()) return leave(INVALID_HANDLE);
    if (in->text && !strstr(in->text, name)) return leave(NOT_FOUND);
    for (int i = 0; i < in->function_count; i++) {
        if (strcmp(in->functions[i].name, name) == 0) {
            *function = &in->functions[i];
            return leave(SUCCESS);
        }
    }
    if (in->function_count == FUNCTIONS) return leave(NOT_FOUND);
    made = &in->functions[in->function_count++];
    made->module = in;
    snprintf(made->name, sizeof made->name, "%s", name);
    made->shared_most = SHARED_DEFAULT;
    *function = made;
    return leave(SUCCESS);
}

int cuFuncSetAttribute(fake_function *function, int attribute, int value) {
    int result = enter_context("cuFuncSetAttribute");
    if (result == SUCCESS && !is_function(function)) result = INVALID_HANDLE;
    /* CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES */
    if (result == SUCCESS && (attribute != 8 || value < 0 || value > SHARED_MOST)) {
        result = INVALID_VALUE;
    }
    if (result == SUCCESS) function->shared_most = (unsigned)value;
    return leave(result);
}

/* ---- launches ------------------------------------------------------------------------------- */

static int check_grid(const fake_config *config) {
    const unsigned *grid = config->grid, *block = config->block;
    for (int i = 0; i < 3; i++) {
        if (grid[i] == 0 || block[i] == 0) return INVALID_VALUE;
    }
    if (grid[0] > 0x7fffffffu || grid[1] > 65535 || grid[2] > 65535) return INVALID_VALUE;
    if (block[0] > 1024 || block[1] > 1024 || block[2] > 64) return INVALID_VALUE;
    return block[0] * block[1] * block[2] > 1024 ? INVALID_VALUE : SUCCESS;
}

static int check_attributes(const fake_config *config, fake_launch *launch) {
    if (config->attribute_count && !config->attributes) return INVALID_VALUE;
    for (unsigned i = 0; i < config->attribute_count; i++) {
        const fake_attribute *attribute = &config->attributes[i];
        if (attribute->id == 6) {
            launch->programmatic = attribute->value.programmatic;
        } else if (attribute->id == 4) {
            const unsigned *cluster = attribute->value.cluster;
            for (int d = 0; d < 3; d++) {
                if (cluster[d] == 0 || config->grid[d] % cluster[d]) return INVALID_CLUSTER_SIZE;
                launch->cluster[d] = cluster[d];
            }
            if (cluster[0] * cluster[1] * cluster[2] > 8) return INVALID_CLUSTER_SIZE;
        } else {
            return INVALID_VALUE;
        }
    }
    return SUCCESS;
}

/* The lock is held. */
static int launch_checked(const fake_config *config, const fake_function *function,
                          void **parameters, void **extra) {
    fake_launch *launch = &fake.launches[fake.launch_count % LAUNCHES];
    int result;
    if (!function || !parameters || !parameters[0] || extra) return INVALID_VALUE;
    if (!is_function(function) || function->module->context != current()) return INVALID_HANDLE;
    result = check_grid(config);
    if (result != SUCCESS) return result;
    if (config->shared > function->shared_most) return INVALID_VALUE;
    memset(launch, 0, sizeof *launch);
    result = check_attributes(config, launch);
    if (result != SUCCESS) return result;
    snprintf(launch->name, sizeof launch->name, "%s", function->name);
    memcpy(launch->grid, config->grid, sizeof launch->grid);
    memcpy(launch->block, config->block, sizeof launch->block);
    launch->shared = config->shared;
    launch->stream = config->stream;
    launch->device = current()->device;
    memcpy(launch->problem, parameters[0], sizeof launch->problem);
    fake.launch_count++;
    return SUCCESS;
}

int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                   unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                   void *stream, void **parameters, void **extra) {
    fake_config config = {
        {grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared, stream, NULL, 0};
    int result = enter_context("cuLaunchKernel");
    if (result == SUCCESS) result = launch_checked(&config, function, parameters, extra);
    return leave(result);
}

int cuLaunchKernelEx(const fake_config *config, void *function, void **parameters, void **extra) {
    int result = enter_context("cuLaunchKernelEx");
    if (result == SUCCESS && !config) result = INVALID_VALUE;
    if (result == SUCCESS) result = launch_checked(config, function, parameters, extra);
    return leave(result);
}

/* ---- pointers and streams ------------------------------------------------------------------- */

int cuPointerGetAttribute(void *value, int attribute, unsigned long long pointer) {
    int result = enter_context("cuPointerGetAttribute");
    int i = 0;
    if (result == SUCCESS && !value) result = INVALID_VALUE;
    if (result != SUCCESS) return leave(result);
    while (i < fake.range_count &&
           (pointer < fake.ranges[i].begin || pointer >= fake.ranges[i].end)) {
        i++;
    }
    if (i == fake.range_count) return leave(INVALID_VALUE);
    switch (attribute) {
    case 2: *(unsigned *)value = 2; break; /* CU_MEMORYTYPE_DEVICE */
    case 9: *(int *)value = fake.ranges[i].device; break;
    default: result = INVALID_VALUE;
    }
    return leave(result);
}

int cuStreamIsCapturing(void *stream, int *status) {
    int result = enter_context("cuStreamIsCapturing");
    (void)stream;
    if (result == SUCCESS && !status) result = INVALID_VALUE;
    if (result == SUCCESS) *status = number_of("NJ_FAKE_CAPTURING", 0);
    return leave(result);
}

/* ---- events --------------------------------------------------------------------------------- */

static fake_event *event_of(void *event) {
    fake_event *e = event;
    return e >= fake.events && e < fake.events + EVENTS && e->context == current() ? e : NULL;
}

static int live_events(void) {
    int count = 0;
    for (int i = 0; i < EVENTS; i++) count += fake.events[i].context != NULL;
    return count;
}

int cuEventCreate(void **event, unsigned flags) {
    int result = enter_context("cuEventCreate"), i = 0;
    if (result == SUCCESS && (!event || flags)) result = INVALID_VALUE;
    if (result != SUCCESS) return leave(result);
    while (i < EVENTS && fake.events[i].context) i++;
    if (i == EVENTS) return leave(INVALID_VALUE);
    if (live_events() == 0) fake.times_asked = 0;
    memset(&fake.events[i], 0, sizeof fake.events[i]);
    fake.events[i].context = current();
    *event = &fake.events[i];
    return leave(SUCCESS);
}

int cuEventDestroy_v2(void *event) {
    int result = enter_context("cuEventDestroy_v2");
    if (result == SUCCESS && !event_of(event)) result = INVALID_HANDLE;
    if (result == SUCCESS) event_of(event)->context = NULL;
    return leave(result);
}

int cuEventRecord(void *event, void *stream) {
    int result = enter_context("cuEventRecord");
    if (result == SUCCESS && !event_of(event)) result = INVALID_HANDLE;
    if (result != SUCCESS) return leave(result);
    event_of(event)->recorded = 1;
    event_of(event)->stream = stream;
    event_of(event)->done = 0;
    return leave(SUCCESS);
}

/* Waiting for one event ends all before it, which is all. */
int cuEventSynchronize(void *event) {
    int result = enter_context("cuEventSynchronize");
    if (result == SUCCESS && !event_of(event)) result = INVALID_HANDLE;
    for (int i = 0; result == SUCCESS && i < EVENTS; i++) fake.events[i].done = 1;
    return leave(result);
}

int cuEventElapsedTime(float *ms, void *from, void *to) {
    int result = enter_context("cuEventElapsedTime");
    const char *times = getenv("NJ_FAKE_MS"), *at = times;
    const fake_event *a = event_of(from), *b = event_of(to);
    if (result == SUCCESS && (!a || !b || !a->recorded || !b->recorded)) result = INVALID_HANDLE;
    if (result == SUCCESS && (!a->done || !b->done)) result = NOT_READY;
    if (result != SUCCESS) return leave(result);
    fake.timed_stream = a->stream == b->stream ? a->stream : NULL;
    *ms = 1;
    if (times && *times) {
        int count = 1;
        for (; *at; at++) count += *at == ',';
        at = times;
        for (int turn = fake.times_asked++ % count; turn > 0; turn--) at = strchr(at, ',') + 1;
        *ms = strtof(at, NULL);
    }
    return leave(SUCCESS);
}

/* ---- for tests ------------------------------------------------------------------------------ */

/* Calls of a function since the start or the last reset. */
int fake_cuda_count(const char *function) {
    int count;
    pthread_mutex_lock(&lock);
    count = *counter_of(function);
    pthread_mutex_unlock(&lock);
    return count;
}

int fake_cuda_live_modules(void) {
    int count = 0;
    pthread_mutex_lock(&lock);
    for (fake_module *module = fake.modules; module; module = module->next)
        count++;
    pthread_mutex_unlock(&lock);
    return count;
}

int fake_cuda_live_events(void) {
    int count;
    pthread_mutex_lock(&lock);
    count = live_events();
    pthread_mutex_unlock(&lock);
    return count;
}

void *fake_cuda_timed_stream(void) {
    return fake.timed_stream;
}

/* Holds on primary contexts. */
int fake_cuda_live_contexts(void) {
    int count = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < DEVICES; i++)
        count += fake.primary[i].holds;
    pthread_mutex_unlock(&lock);
    return count;
}

/* How deep the calling thread's stack of contexts is. */
int fake_cuda_pushed(void) {
    return stack_size;
}

/* A context of the device that is not its primary one. */
void *fake_cuda_own_context(int device) {
    return device >= 0 && device < DEVICES ? &fake.own[device] : NULL;
}

/* From now on [pointer, pointer + bytes) is memory of the device; the latest registration of an
   address counts. 0 when there is no room. */
int fake_cuda_register(const void *pointer, size_t bytes, int device) {
    int room;
    pthread_mutex_lock(&lock);
    room = fake.range_count < RANGES;
    if (room) {
        memmove(fake.ranges + 1, fake.ranges, (size_t)fake.range_count * sizeof fake.ranges[0]);
        fake.ranges[0].begin = (uintptr_t)pointer;
        fake.ranges[0].end = (uintptr_t)pointer + bytes;
        fake.ranges[0].device = device;
        fake.range_count++;
    }
    pthread_mutex_unlock(&lock);
    return room;
}

/* The launch before the last `back` ones (0: the last); NULL when it is not remembered. */
static const fake_launch *launch_at(int back) {
    int index = fake.launch_count - 1 - back;
    return back >= 0 && back < LAUNCHES && index >= 0 ? &fake.launches[index % LAUNCHES] : NULL;
}

/* grid, block, shared bytes, cluster, programmatic serialization, device. 0 when there is none. */
int fake_cuda_launch_shape(int back, unsigned out[12]) {
    const fake_launch *launch = launch_at(back);
    if (!launch) return 0;
    memcpy(out, launch->grid, sizeof launch->grid);
    memcpy(out + 3, launch->block, sizeof launch->block);
    out[6] = launch->shared;
    memcpy(out + 7, launch->cluster, sizeof launch->cluster);
    out[10] = (unsigned)launch->programmatic;
    out[11] = (unsigned)launch->device;
    return 1;
}

const char *fake_cuda_launch_name(int back) {
    const fake_launch *launch = launch_at(back);
    return launch ? launch->name : NULL;
}

void *fake_cuda_launch_stream(int back) {
    const fake_launch *launch = launch_at(back);
    return launch ? launch->stream : NULL;
}

/* NJI_PROBLEM_BYTES of the first parameter. */
const void *fake_cuda_launch_problem(int back) {
    const fake_launch *launch = launch_at(back);
    return launch ? launch->problem : NULL;
}

/* Forgets counts, launches and registered memory; what is alive stays. */
void fake_cuda_reset(void) {
    pthread_mutex_lock(&lock);
    memset(fake.counters, 0, sizeof fake.counters);
    fake.launch_count = 0;
    fake.range_count = 0;
    pthread_mutex_unlock(&lock);
}
