/* The CUDA driver and NVRTC, opened at run time through prototypes of our own: neither a header nor
   a library of CUDA is needed to build. The one part that knows dlopen and LoadLibrary. */
#ifndef _WIN32
#include <dlfcn.h>
#endif
#ifdef __linux__
#include <sys/auxv.h>
#include <sys/stat.h>
#endif

/* ---- what we use of the driver's interface (values and layouts of cuda.h) ------------------- */

#ifdef _WIN32
#define NJI_CU_CALL __stdcall
#else
#define NJI_CU_CALL
#endif

typedef int nji_cu_result;
typedef int nji_cu_device;
typedef void *nji_cu_context;
typedef void *nji_cu_module;
typedef void *nji_cu_function;
typedef void *nji_cu_stream;
typedef void *nji_cu_event;
typedef unsigned long long nji_cu_pointer;

/* CUresult */
enum {
    NJI_CU_SUCCESS = 0,
    NJI_CU_OUT_OF_MEMORY = 2,
    NJI_CU_STUB_LIBRARY = 34,
    NJI_CU_NO_DEVICE = 100,
    NJI_CU_NO_BINARY_FOR_GPU = 209,
    NJI_CU_INVALID_PTX = 218,
    NJI_CU_UNSUPPORTED_PTX_VERSION = 222
};

/* CUdevice_attribute */
enum {
    NJI_CU_DEVICE_MULTIPROCESSORS = 16,
    NJI_CU_DEVICE_CC_MAJOR = 75,
    NJI_CU_DEVICE_CC_MINOR = 76
};

/* CUpointer_attribute; the first is answered with a CUmemorytype */
enum {
    NJI_CU_POINTER_MEMORY_TYPE = 2,
    NJI_CU_POINTER_DEVICE_ORDINAL = 9,
    NJI_CU_MEMORY_DEVICE = 2
};

/* CUjit_option; sizes travel in the value itself, not through a pointer */
enum {
    NJI_CU_JIT_ERROR_LOG = 5,
    NJI_CU_JIT_ERROR_LOG_BYTES = 6
};

/* CUfunction_attribute */
enum { NJI_CU_FUNC_MOST_DYNAMIC_SHARED = 8 };

/* CUstreamCaptureStatus */
enum { NJI_CU_CAPTURE_NONE = 0 };

/* CUlaunchAttributeID */
enum { NJI_CU_LAUNCH_PROGRAMMATIC_SERIALIZATION = 6 };

typedef struct nji_cu_launch_attribute {
    int id;
    int pad;
    union {
        char bytes[64]; /* the size that the driver steps by */
        int programmatic_serialization;
        uint64_t alignment;
    } value;
} nji_cu_launch_attribute;

typedef struct nji_cu_launch_config {
    unsigned grid_x, grid_y, grid_z;
    unsigned block_x, block_y, block_z;
    unsigned shared_bytes;
    nji_cu_stream stream;
    nji_cu_launch_attribute *attributes;
    unsigned attribute_count;
} nji_cu_launch_config;

/* Members bear the plain name; the table below holds the versioned name that is looked up. */
typedef struct nji_driver {
    void *library; /* null: closed */
    int version;   /* 12040 for CUDA 12.4 */
    nji_cu_result(NJI_CU_CALL *cuInit)(unsigned flags);
    nji_cu_result(NJI_CU_CALL *cuDriverGetVersion)(int *version);
    nji_cu_result(NJI_CU_CALL *cuGetErrorName)(nji_cu_result error, const char **name);
    nji_cu_result(NJI_CU_CALL *cuGetErrorString)(nji_cu_result error, const char **text);
    nji_cu_result(NJI_CU_CALL *cuDeviceGetCount)(int *count);
    nji_cu_result(NJI_CU_CALL *cuDeviceGet)(nji_cu_device *device, int ordinal);
    nji_cu_result(NJI_CU_CALL *cuDeviceGetName)(char *name, int size, nji_cu_device device);
    nji_cu_result(NJI_CU_CALL *cuDeviceGetAttribute)(int *value, int attribute,
                                                     nji_cu_device device);
    nji_cu_result(NJI_CU_CALL *cuDevicePrimaryCtxRetain)(nji_cu_context *context,
                                                         nji_cu_device device);
    nji_cu_result(NJI_CU_CALL *cuDevicePrimaryCtxRelease)(nji_cu_device device);
    nji_cu_result(NJI_CU_CALL *cuCtxGetCurrent)(nji_cu_context *context);
    nji_cu_result(NJI_CU_CALL *cuCtxGetDevice)(nji_cu_device *device);
    nji_cu_result(NJI_CU_CALL *cuCtxPushCurrent)(nji_cu_context context);
    nji_cu_result(NJI_CU_CALL *cuCtxPopCurrent)(nji_cu_context *context);
    nji_cu_result(NJI_CU_CALL *cuModuleLoadDataEx)(nji_cu_module *module, const void *image,
                                                   unsigned option_count, int *options,
                                                   void **values);
    nji_cu_result(NJI_CU_CALL *cuModuleUnload)(nji_cu_module module);
    nji_cu_result(NJI_CU_CALL *cuModuleGetFunction)(nji_cu_function *function, nji_cu_module module,
                                                    const char *name);
    nji_cu_result(NJI_CU_CALL *cuFuncSetAttribute)(nji_cu_function function, int attribute,
                                                   int value);
    nji_cu_result(NJI_CU_CALL *cuLaunchKernel)(nji_cu_function function, unsigned grid_x,
                                               unsigned grid_y, unsigned grid_z, unsigned block_x,
                                               unsigned block_y, unsigned block_z,
                                               unsigned shared_bytes, nji_cu_stream stream,
                                               void **parameters, void **extra);
    nji_cu_result(NJI_CU_CALL *cuLaunchKernelEx)(const nji_cu_launch_config *config,
                                                 nji_cu_function function, void **parameters,
                                                 void **extra); /* null before CUDA 11.8 */
    nji_cu_result(NJI_CU_CALL *cuPointerGetAttribute)(void *value, int attribute,
                                                      nji_cu_pointer pointer);
    nji_cu_result(NJI_CU_CALL *cuStreamIsCapturing)(nji_cu_stream stream, int *status);
    /* for measured selection alone */
    nji_cu_result(NJI_CU_CALL *cuEventCreate)(nji_cu_event *event, unsigned flags);
    nji_cu_result(NJI_CU_CALL *cuEventDestroy)(nji_cu_event event);
    nji_cu_result(NJI_CU_CALL *cuEventRecord)(nji_cu_event event, nji_cu_stream stream);
    nji_cu_result(NJI_CU_CALL *cuEventSynchronize)(nji_cu_event event);
    nji_cu_result(NJI_CU_CALL *cuEventElapsedTime)(float *milliseconds, nji_cu_event from,
                                                   nji_cu_event to);
} nji_driver;

/* ---- what we use of NVRTC's interface ------------------------------------------------------- */

typedef void *nji_nvrtc_program;

/* nvrtcResult */
enum { NJI_NVRTC_SUCCESS = 0, NJI_NVRTC_OUT_OF_MEMORY = 1, NJI_NVRTC_BUILTINS_FAILED = 7 };

typedef struct nji_nvrtc {
    void *library; /* null: closed */
    int major, minor;
    char path[1024]; /* the name it was opened by */
    int (*nvrtcVersion)(int *major, int *minor);
    const char *(*nvrtcGetErrorString)(int result);
    int (*nvrtcCreateProgram)(nji_nvrtc_program *program, const char *source, const char *name,
                              int header_count, const char *const *headers,
                              const char *const *include_names);
    int (*nvrtcDestroyProgram)(nji_nvrtc_program *program);
    int (*nvrtcCompileProgram)(nji_nvrtc_program program, int option_count,
                               const char *const *options);
    int (*nvrtcGetProgramLogSize)(nji_nvrtc_program program, size_t *size);
    int (*nvrtcGetProgramLog)(nji_nvrtc_program program, char *log);
    int (*nvrtcGetPTXSize)(nji_nvrtc_program program, size_t *size);
    int (*nvrtcGetPTX)(nji_nvrtc_program program, char *ptx);
    int (*nvrtcGetCUBINSize)(nji_nvrtc_program program, size_t *size);
    int (*nvrtcGetCUBIN)(nji_nvrtc_program program, char *cubin);
    int (*nvrtcGetNumSupportedArchs)(int *count);
    int (*nvrtcGetSupportedArchs)(int *archs);
} nji_nvrtc;

/* ---- shared libraries ----------------------------------------------------------------------- */

#ifdef _WIN32
static void *nji_library_open(const char *name, char *reason, size_t reason_size) {
    HMODULE module = LoadLibraryA(name);
    if (!module) snprintf(reason, reason_size, "error %lu", (unsigned long)GetLastError());
    return (void *)module;
}

static void *nji_library_open_loaded(const char *name) {
    HMODULE module;
    return GetModuleHandleExA(0, name, &module) ? (void *)module : NULL;
}

static void *nji_library_symbol(void *library, const char *name) {
    FARPROC function = GetProcAddress((HMODULE)library, name);
    void *symbol;
    memcpy(&symbol, &function, sizeof symbol);
    return symbol;
}

static void nji_library_close(void *library) {
    FreeLibrary((HMODULE)library);
}
#else
/* The driver and NVRTC leave threads and exit handlers behind, so their code stays mapped when the
   last handle is closed. */
#ifdef RTLD_NODELETE
#define NJI_DLOPEN_FLAGS (RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE)
#else
#define NJI_DLOPEN_FLAGS (RTLD_NOW | RTLD_LOCAL)
#endif

static void *nji_library_open(const char *name, char *reason, size_t reason_size) {
    void *library = dlopen(name, NJI_DLOPEN_FLAGS);
    const char *error;
    size_t length = strlen(name);
    if (library) return library;
    error = dlerror();
    if (!error) error = "no reason given";
    /* "name: reason" is usual, and our lists name the library already */
    if (strncmp(error, name, length) == 0 && strncmp(error + length, ": ", 2) == 0)
        error += length + 2;
    snprintf(reason, reason_size, "%s", error);
    return NULL;
}

static void *nji_library_open_loaded(const char *name) {
    return dlopen(name, NJI_DLOPEN_FLAGS | RTLD_NOLOAD);
}

static void *nji_library_symbol(void *library, const char *name) {
    return dlsym(library, name);
}

static void nji_library_close(void *library) {
    dlclose(library);
}
#endif

typedef struct nji_symbol {
    const char *name;
    size_t offset; /* of the function pointer in its table */
    int optional;
} nji_symbol;

/* Fills the table as far as the library goes. Returns the first required name that it lacks, or
 * NULL. */
static const char *nji_symbols_resolve(void *table, void *library, const nji_symbol *symbols,
                                       size_t count) {
    const char *lacking = NULL;
    size_t i;
    for (i = 0; i < count; i++) {
        void *symbol = nji_library_symbol(library, symbols[i].name);
        /* copied, since ISO C knows no conversion from an object's to a function's address */
        memcpy((char *)table + symbols[i].offset, &symbol, sizeof symbol);
        if (!symbol && !symbols[i].optional && !lacking) lacking = symbols[i].name;
    }
    return lacking;
}

/* The libraries tried in vain: "name (reason), name (reason)". */
typedef struct nji_search {
    nj_status status; /* UNSUPPORTED when one was found but too old, else LIBRARY_NOT_FOUND */
    size_t used;
    char text[3072];
} nji_search;

static void nji_search_note(nji_search *search, nj_status status, const char *name,
                            const char *reason) {
    size_t room = sizeof search->text - search->used;
    int length = snprintf(search->text + search->used, room, "%s%s (%s)", search->used ? ", " : "",
                          name, reason);
    if (length > 0) search->used += (size_t)length < room ? (size_t)length : room - 1;
    if (search->status != NJ_UNSUPPORTED) search->status = status;
}

/* ---- the driver ----------------------------------------------------------------------------- */

#define NJI_DRIVER_LEAST 11040 /* 11.4 */

#define NJI_DRIVER_SYMBOL(member, name)                                                            \
    { name, offsetof(nji_driver, member), 0 }
#define NJI_DRIVER_OPTIONAL(member, name)                                                          \
    { name, offsetof(nji_driver, member), 1 }
static const nji_symbol nji_driver_symbols[] = {
    NJI_DRIVER_SYMBOL(cuInit, "cuInit"),
    NJI_DRIVER_SYMBOL(cuDriverGetVersion, "cuDriverGetVersion"),
    NJI_DRIVER_SYMBOL(cuGetErrorName, "cuGetErrorName"),
    NJI_DRIVER_SYMBOL(cuGetErrorString, "cuGetErrorString"),
    NJI_DRIVER_SYMBOL(cuDeviceGetCount, "cuDeviceGetCount"),
    NJI_DRIVER_SYMBOL(cuDeviceGet, "cuDeviceGet"),
    NJI_DRIVER_SYMBOL(cuDeviceGetName, "cuDeviceGetName"),
    NJI_DRIVER_SYMBOL(cuDeviceGetAttribute, "cuDeviceGetAttribute"),
    NJI_DRIVER_SYMBOL(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain"),
    NJI_DRIVER_SYMBOL(cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2"),
    NJI_DRIVER_SYMBOL(cuCtxGetCurrent, "cuCtxGetCurrent"),
    NJI_DRIVER_SYMBOL(cuCtxGetDevice, "cuCtxGetDevice"),
    NJI_DRIVER_SYMBOL(cuCtxPushCurrent, "cuCtxPushCurrent_v2"),
    NJI_DRIVER_SYMBOL(cuCtxPopCurrent, "cuCtxPopCurrent_v2"),
    NJI_DRIVER_SYMBOL(cuModuleLoadDataEx, "cuModuleLoadDataEx"),
    NJI_DRIVER_SYMBOL(cuModuleUnload, "cuModuleUnload"),
    NJI_DRIVER_SYMBOL(cuModuleGetFunction, "cuModuleGetFunction"),
    NJI_DRIVER_SYMBOL(cuFuncSetAttribute, "cuFuncSetAttribute"),
    NJI_DRIVER_SYMBOL(cuLaunchKernel, "cuLaunchKernel"),
    NJI_DRIVER_SYMBOL(cuPointerGetAttribute, "cuPointerGetAttribute"),
    NJI_DRIVER_SYMBOL(cuStreamIsCapturing, "cuStreamIsCapturing"),
    NJI_DRIVER_OPTIONAL(cuLaunchKernelEx, "cuLaunchKernelEx"),
    NJI_DRIVER_OPTIONAL(cuEventCreate, "cuEventCreate"),
    NJI_DRIVER_OPTIONAL(cuEventDestroy, "cuEventDestroy_v2"),
    NJI_DRIVER_OPTIONAL(cuEventRecord, "cuEventRecord"),
    NJI_DRIVER_OPTIONAL(cuEventSynchronize, "cuEventSynchronize"),
    NJI_DRIVER_OPTIONAL(cuEventElapsedTime, "cuEventElapsedTime")};
#undef NJI_DRIVER_SYMBOL
#undef NJI_DRIVER_OPTIONAL

static void nji_driver_close(nji_driver *driver) {
    if (driver->library) nji_library_close(driver->library);
    memset(driver, 0, sizeof *driver);
}

/* Records a driver call's failure. The driver's own words for it, when it has some. */
static nj_status nji_driver_fail(const nji_driver *driver, int result, const char *call,
                                 const char *function) {
    const char *name = NULL, *text = NULL;
    if (driver->cuGetErrorName(result, &name) != NJI_CU_SUCCESS || !name) name = "unknown error";
    if (driver->cuGetErrorString(result, &text) != NJI_CU_SUCCESS || !text) text = "no description";
    nji_fail(result == NJI_CU_OUT_OF_MEMORY ? NJ_OUT_OF_MEMORY : NJ_DRIVER,
             "%s: %s failed: %s (%d): %s", call, function, name, result, text);
    nji_last.info.driver_error = (int32_t)result;
    return (nj_status)nji_last.info.status;
}

/* Opens one library and fills the table; library stays null, and the reason is noted, when it is no
   driver for us. */
static void nji_driver_load(nji_driver *driver, const char *name, nji_search *search) {
    char reason[256];
    const char *lacking;
    driver->library = nji_library_open(name, reason, sizeof reason);
    if (!driver->library) {
        nji_search_note(search, NJ_LIBRARY_NOT_FOUND, name, reason);
        return;
    }
    lacking = nji_symbols_resolve(driver, driver->library, nji_driver_symbols,
                                  sizeof nji_driver_symbols / sizeof nji_driver_symbols[0]);
    if (!lacking) return;
    if (!driver->cuInit) {
        nji_search_note(search, NJ_LIBRARY_NOT_FOUND, name, "no CUDA driver: it lacks cuInit");
    } else {
        snprintf(reason, sizeof reason, "it lacks %s: a driver for CUDA %d.%d or newer is needed",
                 lacking, NJI_DRIVER_LEAST / 1000, NJI_DRIVER_LEAST % 1000 / 10);
        nji_search_note(search, NJ_UNSUPPORTED, name, reason);
    }
    nji_driver_close(driver);
}

static nj_status nji_driver_start(nji_driver *driver, const char *call) {
    int result = driver->cuInit(0);
    if (result == NJI_CU_NO_DEVICE) return nji_fail(NJ_UNSUPPORTED, "%s: no CUDA device", call);
    if (result == NJI_CU_STUB_LIBRARY) {
        return nji_fail(NJ_LIBRARY_NOT_FOUND,
                        "%s: the CUDA driver found is the toolkit's stub: "
                        "install NVIDIA's driver",
                        call);
    }
    if (result != NJI_CU_SUCCESS) return nji_driver_fail(driver, result, call, "cuInit");
    result = driver->cuDriverGetVersion(&driver->version);
    if (result != NJI_CU_SUCCESS)
        return nji_driver_fail(driver, result, call, "cuDriverGetVersion");
    if (driver->version < NJI_DRIVER_LEAST) {
        return nji_fail_sized(
            NJ_UNSUPPORTED, NJI_DRIVER_LEAST, (uint64_t)driver->version,
            "%s: the driver is for CUDA %d.%d: one for CUDA %d.%d or newer is needed", call,
            driver->version / 1000, driver->version % 1000 / 10, NJI_DRIVER_LEAST / 1000,
            NJI_DRIVER_LEAST % 1000 / 10);
    }
    return NJ_OK;
}

/* Opens and initializes the driver: path and nothing else when given, else the system's. A driver
   that is loaded already is found by its name. Errors: LIBRARY_NOT_FOUND (the text lists what was
   tried); UNSUPPORTED (no device, too old); OUT_OF_MEMORY; DRIVER. Zeroed on failure. */
static nj_status nji_driver_open(nji_driver *driver, const char *path, const char *call) {
#ifdef _WIN32
    static const char *const names[] = {"nvcuda.dll"};
#else
    static const char *const names[] = {"libcuda.so.1", "libcuda.so",
                                        "/usr/lib/wsl/lib/libcuda.so.1"};
#endif
    const char *const *candidates = path ? &path : names;
    size_t i, count = path ? 1 : sizeof names / sizeof names[0];
    nji_search search;
    nj_status status;
    memset(driver, 0, sizeof *driver);
    memset(&search, 0, sizeof search);
    for (i = 0; i < count && !driver->library; i++)
        nji_driver_load(driver, candidates[i], &search);
    if (!driver->library) {
        return nji_fail(search.status, "%s: no CUDA driver could be opened; tried %s", call,
                        search.text);
    }
    status = nji_driver_start(driver, call);
    if (status != NJ_OK) nji_driver_close(driver);
    return status;
}

/* ---- NVRTC ---------------------------------------------------------------------------------- */

/* 11.2 is the first that says which architectures it knows, and gives cubins. */
#define NJI_NVRTC_LEAST_MAJOR 11
#define NJI_NVRTC_LEAST_MINOR 2

/* The file that NVRTC opens when it compiles; its version in it. */
#ifdef _WIN32
#define NJI_NVRTC_BUILTINS "nvrtc-builtins64_%d%d.dll"
#else
#define NJI_NVRTC_BUILTINS "libnvrtc-builtins.so.%d.%d"
#endif

#define NJI_NVRTC_SYMBOL(name)                                                                     \
    { #name, offsetof(nji_nvrtc, name), 0 }
static const nji_symbol nji_nvrtc_symbols[] = {
    NJI_NVRTC_SYMBOL(nvrtcVersion),          NJI_NVRTC_SYMBOL(nvrtcGetErrorString),
    NJI_NVRTC_SYMBOL(nvrtcCreateProgram),    NJI_NVRTC_SYMBOL(nvrtcDestroyProgram),
    NJI_NVRTC_SYMBOL(nvrtcCompileProgram),   NJI_NVRTC_SYMBOL(nvrtcGetProgramLogSize),
    NJI_NVRTC_SYMBOL(nvrtcGetProgramLog),    NJI_NVRTC_SYMBOL(nvrtcGetPTXSize),
    NJI_NVRTC_SYMBOL(nvrtcGetPTX),           NJI_NVRTC_SYMBOL(nvrtcGetCUBINSize),
    NJI_NVRTC_SYMBOL(nvrtcGetCUBIN),         NJI_NVRTC_SYMBOL(nvrtcGetNumSupportedArchs),
    NJI_NVRTC_SYMBOL(nvrtcGetSupportedArchs)};
#undef NJI_NVRTC_SYMBOL

static void nji_nvrtc_close(nji_nvrtc *nvrtc) {
    if (nvrtc->library) nji_library_close(nvrtc->library);
    memset(nvrtc, 0, sizeof *nvrtc);
}

/* Takes over an open library. Notes the reason, and closes it, when it is no NVRTC for us. */
static int nji_nvrtc_adopt(nji_nvrtc *nvrtc, void *library, const char *name, nji_search *search) {
    char reason[256];
    nj_status status = NJ_UNSUPPORTED;
    const char *lacking = nji_symbols_resolve(
        nvrtc, library, nji_nvrtc_symbols, sizeof nji_nvrtc_symbols / sizeof nji_nvrtc_symbols[0]);
    nvrtc->library = library;
    if (!nvrtc->nvrtcVersion ||
        nvrtc->nvrtcVersion(&nvrtc->major, &nvrtc->minor) != NJI_NVRTC_SUCCESS) {
        status = NJ_LIBRARY_NOT_FOUND;
        snprintf(reason, sizeof reason, "no NVRTC: nvrtcVersion is absent or fails");
    } else if (nvrtc->major < NJI_NVRTC_LEAST_MAJOR ||
               (nvrtc->major == NJI_NVRTC_LEAST_MAJOR && nvrtc->minor < NJI_NVRTC_LEAST_MINOR)) {
        snprintf(reason, sizeof reason, "version %d.%d: %d.%d or newer is needed", nvrtc->major,
                 nvrtc->minor, NJI_NVRTC_LEAST_MAJOR, NJI_NVRTC_LEAST_MINOR);
    } else if (lacking) {
        snprintf(reason, sizeof reason, "version %d.%d, but it lacks %s", nvrtc->major,
                 nvrtc->minor, lacking);
    } else {
        snprintf(nvrtc->path, sizeof nvrtc->path, "%s", name);
        return 1;
    }
    nji_search_note(search, status, name, reason);
    nji_nvrtc_close(nvrtc);
    return 0;
}

static int nji_nvrtc_load(nji_nvrtc *nvrtc, const char *name, nji_search *search) {
    char reason[256];
    void *library = nji_library_open(name, reason, sizeof reason);
    if (library) return nji_nvrtc_adopt(nvrtc, library, name, search);
    nji_search_note(search, NJ_LIBRARY_NOT_FOUND, name, reason);
    return 0;
}

#ifdef __linux__
/* NVRTC as a PyPI wheel, in the site-packages beside the program when that is a Python (or a script
   in a virtual environment's bin). The path it was started by, since /proc/self/exe would lead out
   of the virtual environment. */
static int nji_nvrtc_load_wheel(nji_nvrtc *nvrtc, nji_search *search) {
    static const char *const files[] = {"cu13/lib/libnvrtc.so.13", "cuda_nvrtc/lib/libnvrtc.so.12",
                                        "cuda_nvrtc/lib/libnvrtc.so.11.2"};
    const char *program = (const char *)getauxval(AT_EXECFN);
    const char *slash = program ? strrchr(program, '/') : NULL;
    char folder[960], path[1024];
    struct stat info;
    size_t i;
    int minor;
    if (!slash || slash - program > 800) return 0;
    for (minor = 6; minor < 32; minor++) {
        snprintf(folder, sizeof folder, "%.*s/../lib/python3.%d/site-packages/nvidia",
                 (int)(slash - program), program, minor);
        if (stat(folder, &info) != 0) continue;
        for (i = 0; i < sizeof files / sizeof files[0]; i++) {
            snprintf(path, sizeof path, "%s/%s", folder, files[i]);
            if (nji_nvrtc_load(nvrtc, path, search)) return 1;
        }
    }
    return 0;
}
#endif

/* The one that the process has loaded, whichever it is, comes first: a second NVRTC costs 100 MB.
 */
static int nji_nvrtc_find(nji_nvrtc *nvrtc, nji_search *search) {
#ifdef _WIN32
    static const char *const names[] = {"nvrtc64_130_0.dll", "nvrtc64_120_0.dll",
                                        "nvrtc64_112_0.dll"};
#else
    static const char *const names[] = {"libnvrtc.so.13",
                                        "libnvrtc.so.12",
                                        "libnvrtc.so.11.2",
                                        "libnvrtc.so",
                                        "/usr/local/cuda/lib64/libnvrtc.so",
                                        "/opt/cuda/lib64/libnvrtc.so"};
#endif
    size_t i, count = sizeof names / sizeof names[0];
    for (i = 0; i < count; i++) {
        void *library = nji_library_open_loaded(names[i]);
        if (library && nji_nvrtc_adopt(nvrtc, library, names[i], search)) return 1;
    }
    for (i = 0; i < count; i++) {
        if (nji_nvrtc_load(nvrtc, names[i], search)) return 1;
    }
#ifdef __linux__
    return nji_nvrtc_load_wheel(nvrtc, search);
#else
    return 0;
#endif
}

/* Opens NVRTC: path and nothing else when given, else it is searched for. Errors: LIBRARY_NOT_FOUND
   and UNSUPPORTED (all that were found are too old); the text lists what was tried. Zeroed on
   failure. */
static nj_status nji_nvrtc_open(nji_nvrtc *nvrtc, const char *path, const char *call) {
    nji_search search;
    memset(nvrtc, 0, sizeof *nvrtc);
    memset(&search, 0, sizeof search);
    if (path ? nji_nvrtc_load(nvrtc, path, &search) : nji_nvrtc_find(nvrtc, &search)) return NJ_OK;
    return nji_fail(search.status, "%s: no NVRTC could be opened; tried %s", call, search.text);
}
