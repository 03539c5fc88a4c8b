/* The loader, the JIT and its disk cache, against a fake driver and a fake NVRTC; and against a
   real NVRTC where one is installed. */
#define _XOPEN_SOURCE 700 /* mkdtemp, nftw, setenv */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <utime.h>

/* The allocator fails at the call numbered fail_at (1 = the next; 0 = never) and counts what is
   held. */
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

#ifdef __GNUC__
#pragma GCC diagnostic ignored "-Wunused-function" /* what later parts use */
#endif
#include "nj_abi.h"
#include "normjit/api.h"
#include "normjit/base.h"
#include "normjit/loader.h"
#include "normjit/jit.h"

#define COUNT_OF(array) (sizeof(array) / sizeof(array)[0])
#define CREATE "nj_ctx_create"
#define SELECT "nj_plan_select"

/* ---- what every test uses ------------------------------------------------------------------- */

static char scratch[64]; /* a folder of this test's own */

static int remove_one(const char *path, const struct stat *info, int type, struct FTW *at) {
    (void)info;
    (void)type;
    (void)at;
    return remove(path);
}

static int set_up(void **state) {
    static const char *const variables[] = {
        "NJ_FAKE_FAIL",          "NJ_FAKE_DEVICES",    "NJ_FAKE_VERSION",
        "NJ_FAKE_NVRTC_VERSION", "NJ_FAKE_NVRTC_FAIL", "NJ_FAKE_NVRTC_FAIL_CODE",
        "NJ_FAKE_NVRTC_ARCHS",   "NJ_FAKE_NVRTC_LOG",  "NJ_FAKE_NVRTC_BYTES"};
    (void)state;
    for (size_t i = 0; i < COUNT_OF(variables); i++)
        unsetenv(variables[i]);
    memset(&nji_last, 0, sizeof nji_last);
    fail_at = 0;
    strcpy(scratch, "/tmp/normjit_test_XXXXXX");
    return mkdtemp(scratch) ? 0 : -1;
}

static int tear_down(void **state) {
    (void)state;
    assert_int_equal(blocks_held, 0);
    return nftw(scratch, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

/* "<scratch>/<name>", in one of a few buffers that are used in turn. */
static const char *in_scratch(const char *name) {
    static char paths[8][512];
    static int turn;
    char *path = paths[turn++ % 8];
    snprintf(path, sizeof paths[0], "%s/%s", scratch, name);
    return path;
}

static void set(const char *variable, const char *value) {
    assert_int_equal(setenv(variable, value, 1), 0);
}

/* The whole text, the code twice. */
static void assert_failed(nj_status got, nj_status status, const char *text) {
    assert_string_equal(nji_last.text, text);
    assert_int_equal(got, status);
    assert_int_equal(nji_last.info.status, status);
}

static char *read_file(const char *path, size_t *size) {
    FILE *file = fopen(path, "rb");
    char *bytes;
    assert_non_null(file);
    fseek(file, 0, SEEK_END);
    *size = (size_t)ftell(file);
    rewind(file);
    bytes = malloc(*size + 1);
    assert_int_equal(fread(bytes, 1, *size, file), *size);
    fclose(file);
    return bytes;
}

static void write_file(const char *path, const void *bytes, size_t size) {
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, size, file), size);
    assert_int_equal(fclose(file), 0);
}

static void copy(const char *from, const char *to) {
    size_t size;
    char *bytes = read_file(from, &size);
    write_file(to, bytes, size);
    free(bytes);
}

/* Copies a library with a name within it replaced by another of its length. */
static void copy_renamed(const char *from, const char *to, const char *name, const char *other) {
    size_t size, i, length = strlen(name), found = 0;
    char *bytes = read_file(from, &size);
    assert_int_equal(strlen(other), length);
    for (i = 0; i + length < size; i++) {
        if (memcmp(bytes + i, name, length + 1) != 0) continue;
        memcpy(bytes + i, other, length);
        found++;
    }
    assert_true(found > 0);
    write_file(to, bytes, size);
    free(bytes);
}

static int is_zero(const void *bytes, size_t size) {
    for (size_t i = 0; i < size; i++) {
        if (((const unsigned char *)bytes)[i] != 0) return 0;
    }
    return 1;
}

/* What the log was told. */
typedef struct heard {
    int lines;
    nj_log_level level[64];
    char text[64][1024];
} heard;

static void hear(void *user, nj_log_level level, const char *text) {
    heard *log = user;
    if (log->lines == 64) return;
    log->level[log->lines] = level;
    snprintf(log->text[log->lines++], sizeof log->text[0], "%s", text);
}

/* A jit with the fake NVRTC; cache_dir NULL = none, else a folder in scratch. */
static void open_jit(nji_jit *jit, const char *cache_dir, heard *log) {
    nj_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.nvrtc_path = NJ_FAKE_NVRTC;
    desc.cache_dir = cache_dir ? in_scratch(cache_dir) : NULL;
    if (log) {
        memset(log, 0, sizeof *log);
        desc.log = hear;
        desc.log_user = log;
    }
    assert_int_equal(nji_jit_open(jit, &desc, CREATE), NJ_OK);
    assert_true(jit->has_nvrtc);
}

static const char *const source[] = {"extern \"C\" __global__ void k(float *x) {\n",
                                     "    x[threadIdx.x] += N;\n", "}\n", NULL};
static const char *const options[] = {"-DN=2", "-DM=3"};

static nji_jit_request make_request(void) {
    nji_jit_request request;
    memset(&request, 0, sizeof request);
    request.name = "k.cu";
    request.lines = source;
    request.source_hash = 0x0123456789abcdef;
    request.options = options;
    request.option_count = 2;
    request.arch = 90;
    return request;
}

/* The image of a request, which must be had. */
static nji_image get_image(nji_jit *jit, const nji_jit_request *request) {
    nji_image image;
    assert_int_equal(nji_jit_image(jit, request, &image, SELECT), NJ_OK);
    assert_non_null(image.data);
    assert_true(image.size > 0);
    return image;
}

static void assert_same_image(const nji_image *a, const nji_image *b) {
    assert_int_equal(a->size, b->size);
    assert_int_equal(a->is_ptx, b->is_ptx);
    assert_memory_equal(a->data, b->data, a->size);
}

/* A function of the fake NVRTC, as loaded by a jit. */
static int of_nvrtc(const nji_jit *jit, const char *name) {
    int (*function)(void);
    void *symbol = dlsym(jit->nvrtc.library, name);
    assert_non_null(symbol);
    memcpy(&function, &symbol, sizeof function);
    return function();
}

static const char *last_options(const nji_jit *jit) {
    const char *(*function)(void);
    void *symbol = dlsym(jit->nvrtc.library, "fake_nvrtc_last_options");
    assert_non_null(symbol);
    memcpy(&function, &symbol, sizeof function);
    return function();
}

/* ---- the driver ----------------------------------------------------------------------------- */

static nj_status open_fake_driver(nji_driver *driver) {
    return nji_driver_open(driver, NJ_FAKE_CUDA, CREATE);
}

static void refuses_driver(const char *path, nj_status status, const char *text) {
    nji_driver driver;
    memset(&driver, 0xa5, sizeof driver);
    assert_failed(nji_driver_open(&driver, path, CREATE), status, text);
    assert_true(is_zero(&driver, sizeof driver));
}

static void driver_opens_with_every_function_and_closes_to_zero(void **state) {
    nji_driver driver;
    (void)state;
    set("NJ_FAKE_VERSION", "12040");
    assert_int_equal(open_fake_driver(&driver), NJ_OK);
    assert_int_equal(driver.version, 12040);
    for (size_t i = 0; i < COUNT_OF(nji_driver_symbols); i++) {
        void *found, *wanted = dlsym(driver.library, nji_driver_symbols[i].name);
        memcpy(&found, (char *)&driver + nji_driver_symbols[i].offset, sizeof found);
        assert_non_null(wanted);
        assert_ptr_equal(found, wanted);
    }
    nji_driver_close(&driver);
    assert_true(is_zero(&driver, sizeof driver));
    nji_driver_close(&driver);
}

static void driver_at_a_path_is_sought_nowhere_else(void **state) {
    (void)state;
    refuses_driver("/nonexistent/libcuda.so.1", NJ_LIBRARY_NOT_FOUND,
                   "nj_ctx_create: no CUDA driver could be opened; tried "
                   "/nonexistent/libcuda.so.1 (cannot open shared object file: No such file or "
                   "directory)");
}

static void driver_search_lists_every_name_with_its_reason(void **state) {
    nji_driver driver;
    nj_status status = nji_driver_open(&driver, NULL, CREATE);
    (void)state;
    if (status != NJ_LIBRARY_NOT_FOUND || strstr(nji_last.text, "stub")) {
        nji_driver_close(&driver);
        print_message("skipped: this machine has a CUDA driver\n");
        skip();
    }
    assert_failed(status, NJ_LIBRARY_NOT_FOUND,
                  "nj_ctx_create: no CUDA driver could be opened; tried "
                  "libcuda.so.1 (cannot open shared object file: No such file or directory), "
                  "libcuda.so (cannot open shared object file: No such file or directory), "
                  "/usr/lib/wsl/lib/libcuda.so.1 (cannot open shared object file: No such file or "
                  "directory)");
}

static void library_that_is_no_driver_is_refused(void **state) {
    (void)state;
    refuses_driver(NJ_FAKE_NVRTC, NJ_LIBRARY_NOT_FOUND,
                   "nj_ctx_create: no CUDA driver could be opened; tried " NJ_FAKE_NVRTC
                   " (no CUDA driver: it lacks cuInit)");
}

static void driver_without_a_required_function_is_refused_by_its_name(void **state) {
    const char *path = in_scratch("libcuda.so");
    char text[512];
    (void)state;
    copy_renamed(NJ_FAKE_CUDA, path, "cuCtxPushCurrent_v2", "cuCtxPushCurrent_v9");
    snprintf(text, sizeof text,
             "nj_ctx_create: no CUDA driver could be opened; tried %s (it lacks "
             "cuCtxPushCurrent_v2: a driver for CUDA 11.4 or newer is needed)",
             path);
    refuses_driver(path, NJ_UNSUPPORTED, text);
}

static void driver_may_lack_the_extended_launch(void **state) {
    const char *path = in_scratch("libcuda.so");
    nji_driver driver;
    (void)state;
    copy_renamed(NJ_FAKE_CUDA, path, "cuLaunchKernelEx", "cuLaunchKernelXX");
    assert_int_equal(nji_driver_open(&driver, path, CREATE), NJ_OK);
    assert_null(driver.cuLaunchKernelEx);
    assert_non_null(driver.cuLaunchKernel);
    nji_driver_close(&driver);
}

static void driver_older_than_11_4_is_refused_with_both_versions(void **state) {
    nji_driver driver;
    (void)state;
    set("NJ_FAKE_VERSION", "11030");
    refuses_driver(NJ_FAKE_CUDA, NJ_UNSUPPORTED,
                   "nj_ctx_create: the driver is for CUDA 11.3: one for CUDA 11.4 or newer is "
                   "needed");
    assert_int_equal(nji_last.info.needed, 11040);
    assert_int_equal(nji_last.info.got, 11030);
    set("NJ_FAKE_VERSION", "11040");
    assert_int_equal(open_fake_driver(&driver), NJ_OK);
    nji_driver_close(&driver);
}

static void machine_without_a_device_is_unsupported(void **state) {
    (void)state;
    set("NJ_FAKE_DEVICES", "0");
    refuses_driver(NJ_FAKE_CUDA, NJ_UNSUPPORTED, "nj_ctx_create: no CUDA device");
}

static void toolkits_stub_is_no_driver(void **state) {
    (void)state;
    set("NJ_FAKE_FAIL", "cuInit=34");
    refuses_driver(NJ_FAKE_CUDA, NJ_LIBRARY_NOT_FOUND,
                   "nj_ctx_create: the CUDA driver found is the toolkit's stub: install NVIDIA's "
                   "driver");
}

static void failure_to_start_the_driver_is_told_in_its_words(void **state) {
    (void)state;
    set("NJ_FAKE_FAIL", "cuInit=3");
    refuses_driver(NJ_FAKE_CUDA, NJ_DRIVER,
                   "nj_ctx_create: cuInit failed: CUDA_ERROR_NOT_INITIALIZED (3): initialization "
                   "error");
    assert_int_equal(nji_last.info.driver_error, 3);
    set("NJ_FAKE_FAIL", "cuDriverGetVersion=12345");
    refuses_driver(NJ_FAKE_CUDA, NJ_DRIVER,
                   "nj_ctx_create: cuDriverGetVersion failed: unknown error (12345): no "
                   "description");
    assert_int_equal(nji_last.info.driver_error, 12345);
}

static void driver_out_of_memory_has_its_own_status(void **state) {
    nji_driver driver;
    (void)state;
    assert_int_equal(open_fake_driver(&driver), NJ_OK);
    assert_failed(nji_driver_fail(&driver, 2, SELECT, "cuModuleLoadDataEx"), NJ_OUT_OF_MEMORY,
                  "nj_plan_select: cuModuleLoadDataEx failed: CUDA_ERROR_OUT_OF_MEMORY (2): out of "
                  "memory");
    assert_int_equal(nji_last.info.driver_error, 2);
    nji_driver_close(&driver);
}

/* ---- finding NVRTC -------------------------------------------------------------------------- */

static void refuses_nvrtc(const char *path, nj_status status, const char *reason) {
    char text[1024];
    nji_nvrtc nvrtc;
    snprintf(text, sizeof text, "nj_ctx_create: no NVRTC could be opened; tried %s (%s)", path,
             reason);
    memset(&nvrtc, 0xa5, sizeof nvrtc);
    assert_failed(nji_nvrtc_open(&nvrtc, path, CREATE), status, text);
    assert_true(is_zero(&nvrtc, sizeof nvrtc));
}

static void nvrtc_opens_by_path_and_says_its_version(void **state) {
    nji_nvrtc nvrtc;
    (void)state;
    set("NJ_FAKE_NVRTC_VERSION", "11.2");
    assert_int_equal(nji_nvrtc_open(&nvrtc, NJ_FAKE_NVRTC, CREATE), NJ_OK);
    assert_int_equal(nvrtc.major, 11);
    assert_int_equal(nvrtc.minor, 2);
    assert_string_equal(nvrtc.path, NJ_FAKE_NVRTC);
    nji_nvrtc_close(&nvrtc);
    assert_true(is_zero(&nvrtc, sizeof nvrtc));
}

static void nvrtc_at_a_path_is_sought_nowhere_else(void **state) {
    (void)state;
    refuses_nvrtc("/nonexistent/libnvrtc.so.13", NJ_LIBRARY_NOT_FOUND,
                  "cannot open shared object file: No such file or directory");
}

static void library_that_is_no_nvrtc_is_refused(void **state) {
    (void)state;
    refuses_nvrtc(NJ_FAKE_CUDA, NJ_LIBRARY_NOT_FOUND, "no NVRTC: nvrtcVersion is absent or fails");
}

static void nvrtc_older_than_11_2_is_refused_with_both_versions(void **state) {
    (void)state;
    set("NJ_FAKE_NVRTC_VERSION", "11.1");
    refuses_nvrtc(NJ_FAKE_NVRTC, NJ_UNSUPPORTED, "version 11.1: 11.2 or newer is needed");
    set("NJ_FAKE_NVRTC_VERSION", "10.2");
    refuses_nvrtc(NJ_FAKE_NVRTC, NJ_UNSUPPORTED, "version 10.2: 11.2 or newer is needed");
}

static void nvrtc_without_a_required_function_is_refused_by_its_name(void **state) {
    const char *path = in_scratch("libnvrtc.so");
    (void)state;
    copy_renamed(NJ_FAKE_NVRTC, path, "nvrtcGetCUBINSize", "nvrtcGetCUBINSiXe");
    refuses_nvrtc(path, NJ_UNSUPPORTED, "version 13.0, but it lacks nvrtcGetCUBINSize");
}

/* The line that a command prints. */
static void line_of(const char *command, char *line, size_t size) {
    FILE *pipe = popen(command, "r");
    assert_non_null(pipe);
    assert_non_null(fgets(line, (int)size, pipe));
    assert_int_equal(pclose(pipe), 0);
}

static char self[1024]; /* this program */

static int print_wheel(void) {
    nji_nvrtc nvrtc;
    nji_search search;
    memset(&nvrtc, 0, sizeof nvrtc);
    memset(&search, 0, sizeof search);
    if (nji_nvrtc_load_wheel(&nvrtc, &search)) {
        puts(nvrtc.path);
        nji_nvrtc_close(&nvrtc);
    } else {
        printf("none: %s\n", search.text);
    }
    return 0;
}

static void make_folders(const char *path) {
    assert_true(nji_folder_make(in_scratch(path)));
}

/* Loads a library by name, then searches. */
static int print_found(const char *loaded) {
    nji_nvrtc nvrtc;
    void *library = loaded ? dlopen(loaded, RTLD_NOW) : NULL;
    if ((loaded && !library) || nji_nvrtc_open(&nvrtc, NULL, CREATE) != NJ_OK) return 1;
    printf("%s %d.%d\n", nvrtc.path, nvrtc.major, nvrtc.minor);
    nji_nvrtc_close(&nvrtc);
    if (library) dlclose(library);
    return 0;
}

/* What a process finds whose library path begins with scratch. */
static void finds_nvrtc(const char *argument, const char *wanted) {
    char command[2048], line[256];
    snprintf(command, sizeof command, "LD_LIBRARY_PATH=%s:$LD_LIBRARY_PATH '%s' %s", scratch, self,
             argument);
    line_of(command, line, sizeof line);
    assert_string_equal(line, wanted);
}

static void newest_nvrtc_is_taken_but_a_loaded_one_comes_first(void **state) {
    static const char *const names[] = {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2"};
    (void)state;
    for (size_t i = 0; i < COUNT_OF(names); i++)
        copy(NJ_FAKE_NVRTC, in_scratch(names[i]));
    set("NJ_FAKE_NVRTC_VERSION", "11.9"); /* which no real one answers */
    finds_nvrtc("--find", "libnvrtc.so.13 11.9\n");
    finds_nvrtc("--find libnvrtc.so.12", "libnvrtc.so.12 11.9\n");
    finds_nvrtc("--find libnvrtc.so.11.2", "libnvrtc.so.11.2 11.9\n");
}

/* A virtual environment, whose bin/python links to a program elsewhere. */
static void nvrtc_is_found_in_the_wheel_beside_the_program(void **state) {
    static const char *const wheels[] = {"cuda_nvrtc/lib/libnvrtc.so.11.2",
                                         "cuda_nvrtc/lib/libnvrtc.so.12",
                                         "cu13/lib/libnvrtc.so.13"};
    const char *python = in_scratch("venv/bin/python");
    char line[1024], path[256], wanted[512], command[512];
    (void)state;
    make_folders("venv/bin");
    make_folders("venv/lib/python3.11/site-packages/nvidia/cuda_nvrtc/lib");
    make_folders("venv/lib/python3.11/site-packages/nvidia/cu13/lib");
    assert_int_equal(symlink(self, python), 0);
    snprintf(command, sizeof command, "'%s' --wheel", python);
    line_of(command, line, sizeof line);
    snprintf(wanted, sizeof wanted, "none: %s/venv/bin/../lib/python3.11/site-packages/nvidia/%s (",
             scratch, wheels[2]);
    assert_memory_equal(line, wanted, strlen(wanted));
    for (size_t i = 0; i < COUNT_OF(wheels); i++) { /* each newer one is preferred */
        snprintf(path, sizeof path, "venv/lib/python3.11/site-packages/nvidia/%s", wheels[i]);
        copy(NJ_FAKE_NVRTC, in_scratch(path));
        line_of(command, line, sizeof line);
        snprintf(wanted, sizeof wanted, "%s/venv/bin/../lib/python3.11/site-packages/nvidia/%s\n",
                 scratch, wheels[i]);
        assert_string_equal(line, wanted);
    }
}

/* ---- opening -------------------------------------------------------------------------------- */

static void jit_that_may_not_use_nvrtc_compiles_nothing(void **state) {
    nj_ctx_desc desc;
    nji_jit jit;
    nji_image image;
    nji_jit_request request = make_request();
    (void)state;
    memset(&desc, 0, sizeof desc);
    desc.flags = NJ_CTX_FALLBACK_PTX;
    desc.nvrtc_path = NJ_FAKE_NVRTC;
    assert_int_equal(nji_jit_open(&jit, &desc, CREATE), NJ_OK);
    assert_false(jit.has_nvrtc);
    assert_null(jit.nvrtc.library);
    memset(&image, 0xa5, sizeof image);
    assert_failed(nji_jit_image(&jit, &request, &image, SELECT), NJ_LIBRARY_NOT_FOUND,
                  "nj_plan_select: there is no NVRTC");
    assert_true(is_zero(&image, sizeof image));
    nji_jit_close(&jit);
    assert_true(is_zero(&jit, sizeof jit));
}

static void nvrtc_that_was_named_must_be_there(void **state) {
    nj_ctx_desc desc;
    nji_jit jit;
    (void)state;
    memset(&desc, 0, sizeof desc);
    desc.nvrtc_path = "/nonexistent/libnvrtc.so";
    desc.cache_dir = in_scratch("cache");
    assert_failed(nji_jit_open(&jit, &desc, CREATE), NJ_LIBRARY_NOT_FOUND,
                  "nj_ctx_create: no NVRTC could be opened; tried /nonexistent/libnvrtc.so (cannot "
                  "open shared object file: No such file or directory)");
    assert_true(is_zero(&jit, sizeof jit));
}

/* Here the search must find nothing, so machines with an NVRTC skip it. */
static void nvrtc_that_is_nowhere_is_noted_and_no_failure(void **state) {
    static heard log;
    nj_ctx_desc desc;
    nji_jit jit;
    (void)state;
    memset(&log, 0, sizeof log);
    memset(&desc, 0, sizeof desc);
    desc.log = hear;
    desc.log_user = &log;
    nji_fail(NJ_INVALID_PROBLEM, "what failed before");
    assert_int_equal(nji_jit_open(&jit, &desc, CREATE), NJ_OK);
    assert_failed(NJ_INVALID_PROBLEM, NJ_INVALID_PROBLEM, "what failed before");
    if (jit.has_nvrtc) {
        nji_jit_close(&jit);
        print_message("skipped: this machine has an NVRTC\n");
        skip();
    }
    assert_int_equal(log.lines, 1);
    assert_int_equal(log.level[0], NJ_LOG_WARNING);
    assert_non_null(strstr(log.text[0], "the embedded PTX serves: nj_ctx_create: no NVRTC could be "
                                        "opened; tried libnvrtc.so.13 ("));
    assert_non_null(strstr(log.text[0], "libnvrtc.so.12 ("));
    assert_non_null(strstr(log.text[0], "libnvrtc.so.11.2 ("));
    assert_non_null(strstr(log.text[0], "/usr/local/cuda/lib64/libnvrtc.so ("));
    nji_jit_close(&jit);
}

static void refuses_cache_dir(const char *cache_dir, const char *text) {
    nj_ctx_desc desc;
    nji_jit jit;
    memset(&desc, 0, sizeof desc);
    desc.nvrtc_path = NJ_FAKE_NVRTC;
    desc.cache_dir = cache_dir;
    assert_failed(nji_jit_open(&jit, &desc, CREATE), NJ_INVALID_ARGUMENT, text);
    assert_true(is_zero(&jit, sizeof jit));
}

static void cache_dir_that_cannot_be_a_path_is_refused(void **state) {
    char path[3970];
    nj_ctx_desc desc;
    nji_jit jit;
    (void)state;
    refuses_cache_dir("", "nj_ctx_create: desc.cache_dir = \"\": NULL turns the cache off");
    memset(path, 'a', sizeof path);
    path[3969] = '\0';
    refuses_cache_dir(path, "nj_ctx_create: desc.cache_dir has 3969 bytes: at most 3968 are "
                            "possible");
    path[0] = '/';
    path[3968] = '\0'; /* legal for us; no system makes it, which is noted */
    memset(&desc, 0, sizeof desc);
    desc.nvrtc_path = NJ_FAKE_NVRTC;
    desc.cache_dir = path;
    assert_int_equal(nji_jit_open(&jit, &desc, CREATE), NJ_OK);
    nji_jit_close(&jit);
}

static void cache_folder_is_made_with_its_parents_for_the_user_alone(void **state) {
    static const char *const folders[] = {"a", "a/b", "a/b/c"};
    nji_jit jit;
    (void)state;
    open_jit(&jit, "a/b/c", NULL);
    for (size_t i = 0; i < COUNT_OF(folders); i++) {
        struct stat info;
        assert_int_equal(stat(in_scratch(folders[i]), &info), 0);
        assert_true(S_ISDIR(info.st_mode));
        assert_int_equal(info.st_mode & 0777, 0700);
    }
    nji_jit_close(&jit);
}

/* ---- compiling ------------------------------------------------------------------------------ */

static void joined_pieces_are_one_text(void **state) {
    static const char *const none[] = {NULL};
    char *text;
    size_t size;
    (void)state;
    assert_int_equal(nji_jit_join(source, &text, &size, SELECT), NJ_OK);
    assert_string_equal(text, "extern \"C\" __global__ void k(float *x) {\n"
                              "    x[threadIdx.x] += N;\n}\n");
    assert_int_equal(size, strlen(text));
    NJ_FREE(text);
    assert_int_equal(nji_jit_join(none, &text, &size, SELECT), NJ_OK);
    assert_string_equal(text, "");
    assert_int_equal(size, 0);
    NJ_FREE(text);
    fail_at = 1;
    assert_failed(nji_jit_join(none, &text, &size, SELECT), NJ_OUT_OF_MEMORY,
                  "nj_plan_select: 1 bytes of host memory could not be had");
    assert_null(text);
}

/* The target that a request leads to, as the image names it. */
static void compiles_to(int arch, int arch_specific, const char *target) {
    nji_jit jit;
    nji_image image;
    nji_jit_request request = make_request();
    char wanted[64];
    request.arch = arch;
    request.arch_specific = arch_specific;
    open_jit(&jit, NULL, NULL);
    image = get_image(&jit, &request);
    snprintf(wanted, sizeof wanted, "FAKE CUBIN %s ", target);
    assert_false(image.is_ptx);
    assert_memory_equal(image.data, wanted, strlen(wanted));
    nji_image_free(&image);
    assert_true(is_zero(&image, sizeof image));
    nji_jit_close(&jit);
}

static void known_architecture_gets_a_cubin(void **state) {
    (void)state;
    compiles_to(75, 0, "sm_75");
    compiles_to(90, 0, "sm_90");
    compiles_to(90, 1, "sm_90a");
    compiles_to(100, 1, "sm_100a");
    compiles_to(89, 1, "sm_89"); /* there is no sm_89a */
}

static void unknown_architecture_gets_ptx_of_the_newest_below(void **state) {
    static heard log;
    nji_jit jit;
    nji_image image;
    nji_jit_request request = make_request();
    (void)state;
    set("NJ_FAKE_NVRTC_ARCHS", "120,75,89,80");
    open_jit(&jit, NULL, &log);
    request.arch = 103;
    request.arch_specific = 1; /* PTX of such a target would not run elsewhere */
    image = get_image(&jit, &request);
    assert_true(image.is_ptx);
    assert_non_null(strstr(image.data, "\n.target sm_89\n"));
    assert_int_equal(((char *)image.data)[image.size - 1], 0); /* as the driver needs it */
    assert_non_null(strstr(last_options(&jit), "--gpu-architecture=compute_89\n"));
    assert_int_equal(log.lines, 1);
    assert_int_equal(log.level[0], NJ_LOG_WARNING);
    assert_string_equal(log.text[0], "NVRTC 13.0 does not know sm_103: it compiles to PTX for "
                                     "compute_89, which the driver assembles");
    nji_image_free(&image);
    image = get_image(&jit, &request);
    assert_int_equal(log.lines, 1); /* said once */
    nji_image_free(&image);
    nji_jit_close(&jit);
}

static void device_older_than_all_that_nvrtc_knows_is_unsupported(void **state) {
    nji_jit jit;
    nji_image image;
    nji_jit_request request = make_request();
    (void)state;
    set("NJ_FAKE_NVRTC_ARCHS", "80,90");
    open_jit(&jit, NULL, NULL);
    request.arch = 75;
    assert_failed(nji_jit_image(&jit, &request, &image, SELECT), NJ_UNSUPPORTED,
                  "nj_plan_select: NVRTC 13.0 knows neither sm_75 nor an older architecture");
    assert_true(is_zero(&image, sizeof image));
    nji_jit_close(&jit);
}

static void asserts_options(const char *version, const char *wanted) {
    nji_jit jit;
    nji_image image;
    nji_jit_request request = make_request();
    set("NJ_FAKE_NVRTC_VERSION", version);
    open_jit(&jit, NULL, NULL);
    image = get_image(&jit, &request);
    assert_string_equal(last_options(&jit), wanted);
    nji_image_free(&image);
    nji_jit_close(&jit);
}

/* The whole list: nothing that lets the arithmetic be less than exact may slip in. */
static void options_are_the_target_ours_and_the_requests(void **state) {
    (void)state;
    asserts_options("12.3", "--gpu-architecture=sm_90\n--std=c++14\n"
                            "--device-as-default-execution-space\n-DN=2\n-DM=3\n");
    asserts_options("12.4", "--gpu-architecture=sm_90\n--std=c++14\n"
                            "--device-as-default-execution-space\n--minimal\n-DN=2\n-DM=3\n");
    asserts_options("13.0", "--gpu-architecture=sm_90\n--std=c++14\n"
                            "--device-as-default-execution-space\n--minimal\n-DN=2\n-DM=3\n");
}

static void fails_to_compile(nji_jit_request request, nj_status status, int code,
                             const char *text) {
    nji_jit jit;
    nji_image image;
    open_jit(&jit, NULL, NULL);
    memset(&image, 0xa5, sizeof image);
    assert_failed(nji_jit_image(&jit, &request, &image, SELECT), status, text);
    assert_int_equal(nji_last.info.driver_error, code);
    assert_true(is_zero(&image, sizeof image));
    assert_int_equal(jit.stats.compiles, 0);
    assert_int_equal(of_nvrtc(&jit, "fake_nvrtc_live_programs"), 0);
    nji_jit_close(&jit);
}

static void failed_compilation_tells_all_that_is_known(void **state) {
    static const char *const broken[] = {"#error\n", NULL};
    nji_jit_request request = make_request();
    (void)state;
    request.lines = broken;
    fails_to_compile(request, NJ_COMPILE_FAILED, 6,
                     "nj_plan_select: NVRTC 13.0 could not compile k.cu for sm_90 with -DN=2 "
                     "-DM=3: NVRTC_ERROR_COMPILATION\nk.cu(1): catastrophic error: #error "
                     "directive\n");
    request.option_count = 0;
    set("NJ_FAKE_NVRTC_FAIL", ""); /* an empty log */
    fails_to_compile(request, NJ_COMPILE_FAILED, 6,
                     "nj_plan_select: NVRTC 13.0 could not compile k.cu for sm_90 with no options: "
                     "NVRTC_ERROR_COMPILATION");
    set("NJ_FAKE_NVRTC_FAIL", "no memory");
    set("NJ_FAKE_NVRTC_FAIL_CODE", "1");
    fails_to_compile(request, NJ_OUT_OF_MEMORY, 1,
                     "nj_plan_select: NVRTC 13.0 could not compile k.cu for sm_90 with no options: "
                     "NVRTC_ERROR_OUT_OF_MEMORY\nno memory");
}

static void missing_builtins_are_named_with_nvrtcs_place(void **state) {
    nji_jit_request request = make_request();
    (void)state;
    set("NJ_FAKE_NVRTC_VERSION", "12.4");
    set("NJ_FAKE_NVRTC_FAIL", "nvrtc: error: failed to open libnvrtc-builtins.so.12.4.");
    set("NJ_FAKE_NVRTC_FAIL_CODE", "7");
    fails_to_compile(
        request, NJ_COMPILE_FAILED, 7,
        "nj_plan_select: NVRTC 12.4 could not compile k.cu for sm_90 with -DN=2 "
        "-DM=3: NVRTC_ERROR_BUILTIN_OPERATION_FAILURE; NVRTC was loaded as " NJ_FAKE_NVRTC
        " and needs libnvrtc-builtins.so.12.4 beside it\n"
        "nvrtc: error: failed to open libnvrtc-builtins.so.12.4.");
}

/* Options a little longer than the message's room for them, 1024 bytes. */
static void long_messages_are_cut_not_overrun(void **state) {
    static char option[1033];
    const char *list[] = {option, "-DLAST=1"};
    nji_jit jit;
    nji_image image;
    nji_jit_request request = make_request();
    (void)state;
    memset(option, 'x', sizeof option - 1);
    memcpy(option, "-D", 2);
    request.options = list;
    set("NJ_FAKE_NVRTC_FAIL", "the log");
    open_jit(&jit, NULL, NULL);
    assert_int_equal(nji_jit_image(&jit, &request, &image, SELECT), NJ_COMPILE_FAILED);
    assert_non_null(strstr(nji_last.text, "NVRTC_ERROR_COMPILATION\nthe log"));
    assert_null(strstr(nji_last.text, "-DLAST=1"));
    nji_jit_close(&jit);
}

static void compilers_warnings_are_not_told(void **state) {
    static heard log;
    nji_jit jit;
    nji_image image;
    nji_jit_request request = make_request();
    (void)state;
    set("NJ_FAKE_NVRTC_LOG", "k.cu(2): warning: variable is unused");
    open_jit(&jit, NULL, &log);
    image = get_image(&jit, &request);
    assert_int_equal(log.lines, 0);
    nji_image_free(&image);
    nji_jit_close(&jit);
}

/* Each allocation fails once, with and without a cache, in success and in failure. */
static void no_allocation_that_fails_leaks_or_goes_unnoticed(void **state) {
    static const char *const folders[] = {NULL, "cache"};
    nji_jit_request request = make_request();
    int step, fails, exhausted = 0;
    (void)state;
    for (fails = 0; fails < 2; fails++) {
        if (fails) set("NJ_FAKE_NVRTC_FAIL", "a log");
        for (size_t i = 0; i < COUNT_OF(folders); i++) {
            for (step = 1;; step++) {
                nji_jit jit;
                nji_image image;
                nj_status status;
                int reached;
                open_jit(&jit, folders[i], NULL);
                request.source_hash++; /* never in the cache */
                fail_at = step;
                status = nji_jit_image(&jit, &request, &image, SELECT);
                reached = fail_at == 0;
                fail_at = 0;
                if (status == NJ_OUT_OF_MEMORY) {
                    assert_non_null(strstr(nji_last.text, "bytes of host memory could not be had"));
                    exhausted++;
                } else { /* the log or the listing of the folder can be done without */
                    assert_int_equal(status, fails ? NJ_COMPILE_FAILED : NJ_OK);
                }
                if (status != NJ_OK) assert_true(is_zero(&image, sizeof image));
                nji_image_free(&image);
                assert_int_equal(of_nvrtc(&jit, "fake_nvrtc_live_programs"), 0);
                nji_jit_close(&jit);
                assert_int_equal(blocks_held, 0);
                if (!reached) break;
            }
        }
    }
    assert_int_equal(exhausted, 2 * (4 + 3)); /* architectures, source, options; image in success */
}

/* ---- keys ----------------------------------------------------------------------------------- */

static void keys_depend_on_content_and_on_all_of_it(void **state) {
    static const char *const swapped[] = {"-DM=3", "-DN=2"};
    static const char *const shifted[] = {"-DN=2-", "DM=3"};
    static const char *const joined[] = {"-DN=2-DM=3"};
    static const char *const elsewhere[] = {"other", NULL};
    char texts[2][8];
    const char *copied[2];
    nji_jit jit;
    nji_jit_request request;
    uint64_t keys[10];
    int count = 0;
    (void)state;
    open_jit(&jit, NULL, NULL);
    request = make_request();
    keys[count++] = nji_jit_key(&jit, &request);

    strcpy(texts[0], options[0]);
    strcpy(texts[1], options[1]);
    copied[0] = texts[0];
    copied[1] = texts[1];
    request.options = copied; /* other addresses; name and lines are covered by the hash */
    request.name = "renamed.cu";
    request.lines = elsewhere;
    assert_true(nji_jit_key(&jit, &request) == keys[0]);

    request = make_request();
    request.options = swapped;
    keys[count++] = nji_jit_key(&jit, &request);
    request.options = shifted;
    keys[count++] = nji_jit_key(&jit, &request);
    request.options = joined;
    request.option_count = 1;
    keys[count++] = nji_jit_key(&jit, &request);
    request = make_request();
    request.option_count = 1;
    keys[count++] = nji_jit_key(&jit, &request);
    request = make_request();
    request.arch = 89;
    keys[count++] = nji_jit_key(&jit, &request);
    request = make_request();
    request.arch_specific = 1;
    keys[count++] = nji_jit_key(&jit, &request);
    request = make_request();
    request.source_hash++;
    keys[count++] = nji_jit_key(&jit, &request);
    nji_jit_close(&jit);

    request = make_request();
    set("NJ_FAKE_NVRTC_VERSION", "13.1");
    open_jit(&jit, NULL, NULL);
    keys[count++] = nji_jit_key(&jit, &request);
    nji_jit_close(&jit);
    set("NJ_FAKE_NVRTC_VERSION", "12.0");
    open_jit(&jit, NULL, NULL);
    keys[count++] = nji_jit_key(&jit, &request);
    nji_jit_close(&jit);
    for (int i = 0; i < count; i++) {
        for (int j = 0; j < i; j++)
            assert_true(keys[i] != keys[j]);
    }
}

static int print_key(void) {
    nji_jit jit;
    nji_jit_request request = make_request();
    open_jit(&jit, NULL, NULL);
    printf("%016llx\n", (unsigned long long)nji_jit_key(&jit, &request));
    nji_jit_close(&jit);
    return 0;
}

static void keys_are_equal_in_every_process(void **state) {
    nji_jit jit;
    nji_jit_request request = make_request();
    char wanted[32], line[32], command[1100];
    (void)state;
    open_jit(&jit, NULL, NULL);
    snprintf(wanted, sizeof wanted, "%016llx\n", (unsigned long long)nji_jit_key(&jit, &request));
    nji_jit_close(&jit);
    snprintf(command, sizeof command, "'%s' --key", self);
    line_of(command, line, sizeof line);
    assert_string_equal(line, wanted);
}

/* ---- the disk cache: hits ------------------------------------------------------------------- */

/* Files in a folder of scratch whose name ends so; their bytes together; the last one's path. */
static int files_in(const char *folder, const char *suffix, uint64_t *bytes, char path[512]) {
    DIR *list = opendir(in_scratch(folder));
    struct dirent *entry;
    int count = 0;
    if (bytes) *bytes = 0;
    assert_non_null(list);
    while ((entry = readdir(list)) != NULL) {
        size_t length = strlen(entry->d_name);
        char at[512];
        struct stat info;
        if (length < strlen(suffix) || strcmp(entry->d_name + length - strlen(suffix), suffix) != 0)
            continue;
        snprintf(at, sizeof at, "%s/%s", in_scratch(folder), entry->d_name);
        if (stat(at, &info) != 0 || !S_ISREG(info.st_mode)) continue;
        if (bytes) *bytes += (uint64_t)info.st_size;
        if (path) strcpy(path, at);
        count++;
    }
    closedir(list);
    return count;
}

static void assert_stats(const nji_jit *jit, int hits, int misses, int writes, int failures,
                         int compiles) {
    assert_int_equal(jit->stats.disk_hits, hits);
    assert_int_equal(jit->stats.disk_misses, misses);
    assert_int_equal(jit->stats.disk_writes, writes);
    assert_int_equal(jit->stats.disk_write_failures, failures);
    assert_int_equal(jit->stats.compiles, compiles);
}

static void image_is_compiled_once_for_all_jits_of_a_folder(void **state) {
    nji_jit first, second;
    nji_image compiled, read;
    nji_jit_request request = make_request();
    char path[512];
    (void)state;
    open_jit(&first, "cache", NULL);
    compiled = get_image(&first, &request);
    assert_stats(&first, 0, 1, 1, 0, 1);
    assert_int_equal(files_in("cache", "", NULL, path), 1);
    assert_int_equal(strlen(strrchr(path, '/')), 1 + 32 + 4);
    assert_string_equal(strrchr(path, '.'), ".njc");

    read = get_image(&first, &request);
    assert_stats(&first, 1, 1, 1, 0, 1);
    assert_same_image(&read, &compiled);
    nji_image_free(&read);

    open_jit(&second, "cache", NULL);
    read = get_image(&second, &request);
    assert_stats(&second, 1, 0, 0, 0, 0);
    assert_same_image(&read, &compiled);
    nji_image_free(&read);
    nji_image_free(&compiled);
    nji_jit_close(&second);
    nji_jit_close(&first);
}

static void ptx_comes_back_from_disk_as_ptx(void **state) {
    nji_jit jit;
    nji_image compiled, read;
    nji_jit_request request = make_request();
    (void)state;
    set("NJ_FAKE_NVRTC_ARCHS", "75,80");
    open_jit(&jit, "cache", NULL);
    compiled = get_image(&jit, &request);
    read = get_image(&jit, &request);
    assert_stats(&jit, 1, 1, 1, 0, 1);
    assert_true(read.is_ptx);
    assert_same_image(&read, &compiled);
    nji_image_free(&read);
    nji_image_free(&compiled);
    nji_jit_close(&jit);
}

static void without_a_cache_every_request_compiles(void **state) {
    nji_jit jit;
    nji_image image;
    nji_jit_request request = make_request();
    (void)state;
    open_jit(&jit, NULL, NULL);
    for (int i = 0; i < 2; i++) {
        image = get_image(&jit, &request);
        nji_image_free(&image);
    }
    assert_stats(&jit, 0, 0, 0, 0, 2);
    nji_jit_close(&jit);
}

static void image_of_another_nvrtc_is_a_miss(void **state) {
    nji_jit jit;
    nji_image image;
    nji_jit_request request = make_request();
    (void)state;
    open_jit(&jit, "cache", NULL);
    image = get_image(&jit, &request);
    nji_image_free(&image);
    nji_jit_close(&jit);
    set("NJ_FAKE_NVRTC_VERSION", "13.1");
    open_jit(&jit, "cache", NULL);
    image = get_image(&jit, &request);
    assert_stats(&jit, 0, 1, 1, 0, 1);
    nji_image_free(&image);
    nji_jit_close(&jit);
    assert_int_equal(files_in("cache", ".njc", NULL, NULL), 2);
}

/* ---- the disk cache: what is wrong with an entry is a miss, and healed ----------------------- */

/* One request whose sound entry lies in the cache. */
typedef struct entry_case {
    nji_jit jit;
    nji_jit_request request;
    nji_image image;
    char path[512];
    char *bytes;
    size_t size;
} entry_case;

static void open_entry(entry_case *c) {
    c->request = make_request();
    open_jit(&c->jit, "cache", NULL);
    c->image = get_image(&c->jit, &c->request);
    assert_int_equal(files_in("cache", ".njc", NULL, c->path), 1);
    c->bytes = read_file(c->path, &c->size);
}

static void close_entry(entry_case *c) {
    free(c->bytes);
    nji_image_free(&c->image);
    nji_jit_close(&c->jit);
}

/* The entry's file holds these bytes: a miss, after which the file is as it was at first. */
static void misses_and_heals(entry_case *c, const void *bytes, size_t size) {
    nj_cache_stats before = c->jit.stats;
    nji_image image;
    size_t healed_size;
    char *healed;
    write_file(c->path, bytes, size);
    image = get_image(&c->jit, &c->request);
    assert_same_image(&image, &c->image);
    nji_image_free(&image);
    assert_int_equal(c->jit.stats.disk_hits, before.disk_hits);
    assert_int_equal(c->jit.stats.disk_misses, before.disk_misses + 1);
    assert_int_equal(c->jit.stats.disk_writes, before.disk_writes + 1);
    healed = read_file(c->path, &healed_size);
    assert_int_equal(healed_size, c->size);
    assert_memory_equal(healed, c->bytes, c->size);
    free(healed);
}

static void entry_with_any_bit_flipped_is_a_miss(void **state) {
    entry_case c;
    (void)state;
    open_entry(&c);
    for (size_t i = 0; i < c.size; i++) {
        char *bad = malloc(c.size);
        memcpy(bad, c.bytes, c.size);
        bad[i] ^= (char)(1 << (i % 8));
        misses_and_heals(&c, bad, c.size);
        free(bad);
    }
    close_entry(&c);
}

static void entry_of_any_other_length_is_a_miss(void **state) {
    entry_case c;
    char *longer;
    (void)state;
    open_entry(&c);
    for (size_t size = 0; size < c.size; size++)
        misses_and_heals(&c, c.bytes, size);
    longer = calloc(1, c.size + 1);
    memcpy(longer, c.bytes, c.size);
    misses_and_heals(&c, longer, c.size + 1);
    free(longer);
    close_entry(&c);
}

static void foreign_file_is_a_miss(void **state) {
    static const char text[] =
        "a file that somebody else has put here, longer than a header of ours\n";
    entry_case c;
    (void)state;
    open_entry(&c);
    misses_and_heals(&c, text, sizeof text - 1);
    close_entry(&c);
}

/* Writes the sound entry with a changed header whose hash is right. */
static void resealed_misses(entry_case *c, const nji_jit_entry *changed) {
    nji_jit_entry entry = *changed;
    char *bytes = malloc(c->size);
    entry.hash = nji_hash(NJI_HASH_SEED, &entry, offsetof(nji_jit_entry, hash));
    entry.hash = nji_hash(entry.hash, c->image.data, c->image.size);
    memcpy(bytes, c->bytes, c->size);
    memcpy(bytes, &entry, sizeof entry);
    misses_and_heals(c, bytes, c->size);
    free(bytes);
}

static void whole_entry_of_other_times_or_requests_is_a_miss(void **state) {
    entry_case c;
    nji_jit_entry sound, changed;
    nji_jit_digest digest;
    (void)state;
    open_entry(&c);
    memcpy(&sound, c.bytes, sizeof sound);
    digest = nji_jit_digest_make(&c.jit, &c.request);
    assert_int_equal(sound.version, NJ_VERSION);
    assert_int_equal(sound.format, NJI_JIT_FORMAT);
    assert_memory_equal(&sound.digest, &digest, sizeof digest);
    changed = sound;
    changed.version = NJ_VERSION + 1;
    resealed_misses(&c, &changed);
    changed = sound;
    changed.format = NJI_JIT_FORMAT + 1;
    resealed_misses(&c, &changed);
    changed = sound;
    changed.digest.key++;
    resealed_misses(&c, &changed);
    changed = sound;
    changed.digest.check++; /* another request whose 64-bit key is the same */
    resealed_misses(&c, &changed);
    close_entry(&c);
}

/* Nothing can be written where a folder lies. */
static void folder_in_an_entrys_place_is_a_miss_and_a_failed_write(void **state) {
    entry_case c;
    nji_image image;
    (void)state;
    open_entry(&c);
    assert_int_equal(remove(c.path), 0);
    assert_int_equal(mkdir(c.path, 0700), 0);
    image = get_image(&c.jit, &c.request);
    assert_same_image(&image, &c.image);
    assert_stats(&c.jit, 0, 2, 1, 1, 2);
    assert_int_equal(files_in("cache", "", NULL, NULL), 0); /* no temporary either */
    nji_image_free(&image);
    close_entry(&c);
}

static void key_collision_has_an_entry_of_its_own(void **state) {
    nji_jit_digest a = {1, 2}, b = {1, 3};
    char path_a[NJI_JIT_PATH_BYTES], path_b[NJI_JIT_PATH_BYTES];
    nji_jit jit;
    (void)state;
    open_jit(&jit, "cache", NULL);
    nji_jit_entry_path(&jit, &a, path_a);
    nji_jit_entry_path(&jit, &b, path_b);
    assert_string_not_equal(path_a, path_b);
    nji_jit_close(&jit);
}

/* ---- the disk cache: folders ---------------------------------------------------------------- */

static void folder_that_cannot_be_had_costs_nothing_but_the_cache(void **state) {
    static heard log;
    nji_jit jit;
    nji_image image;
    nji_jit_request request = make_request();
    char wanted[512];
    (void)state;
    write_file(in_scratch("file"), "x", 1);
    open_jit(&jit, "file/cache", &log); /* fails for root too, whom no mode stops */
    snprintf(wanted, sizeof wanted, "the cache folder %s could not be made",
             in_scratch("file/cache"));
    assert_int_equal(log.lines, 1);
    assert_int_equal(log.level[0], NJ_LOG_WARNING);
    assert_string_equal(log.text[0], wanted);
    for (int i = 0; i < 2; i++) {
        image = get_image(&jit, &request);
        nji_image_free(&image);
    }
    assert_stats(&jit, 0, 2, 0, 2, 2);
    snprintf(wanted, sizeof wanted, "a compiled kernel could not be kept in %s",
             in_scratch("file/cache"));
    assert_int_equal(log.lines, 3);
    assert_int_equal(log.level[1], NJ_LOG_WARNING);
    assert_string_equal(log.text[1], wanted);
    nji_jit_close(&jit);
}

static void folder_without_write_permission_is_still_read(void **state) {
    nji_jit jit;
    nji_image image;
    nji_jit_request request = make_request();
    (void)state;
    if (geteuid() == 0) {
        print_message("skipped: no permission stops root\n");
        skip();
    }
    open_jit(&jit, "cache", NULL);
    image = get_image(&jit, &request);
    nji_image_free(&image);
    assert_int_equal(chmod(in_scratch("cache"), 0500), 0);
    image = get_image(&jit, &request);
    nji_image_free(&image);
    assert_stats(&jit, 1, 1, 1, 0, 1);
    request.source_hash++;
    image = get_image(&jit, &request);
    nji_image_free(&image);
    assert_stats(&jit, 1, 2, 1, 1, 2);
    assert_int_equal(chmod(in_scratch("cache"), 0700), 0);
    nji_jit_close(&jit);
}

static void folder_that_was_removed_comes_back(void **state) {
    nji_jit jit;
    nji_image image;
    nji_jit_request request = make_request();
    (void)state;
    open_jit(&jit, "a/cache", NULL);
    assert_int_equal(rmdir(in_scratch("a/cache")), 0);
    assert_int_equal(rmdir(in_scratch("a")), 0);
    image = get_image(&jit, &request);
    assert_stats(&jit, 0, 1, 1, 0, 1);
    assert_int_equal(files_in("a/cache", ".njc", NULL, NULL), 1);
    nji_image_free(&image);
    nji_jit_close(&jit);
}

static void age(const char *path, int seconds) {
    struct utimbuf times;
    times.actime = times.modtime = time(NULL) - seconds;
    assert_int_equal(utime(path, &times), 0);
}

/* Entries of equal size are written one by one, each older than the next. The bound holds seven;
   the first is used again before the bound is reached, so the second to the fourth have to go: an
   eviction leaves at most three quarters, five. */
static void least_recently_used_entries_go_when_the_bound_is_passed(void **state) {
    enum { ENTRY = 10000 + sizeof(nji_jit_entry) };
    nji_jit jit;
    nji_image image;
    nji_jit_request request = make_request();
    char path[9][NJI_JIT_PATH_BYTES];
    int i;
    (void)state;
    set("NJ_FAKE_NVRTC_BYTES", "10000");
    open_jit(&jit, "cache", NULL);
    assert_true(jit.cache_max_bytes == (uint64_t)256 << 20);
    jit.cache_max_bytes = 7 * ENTRY;
    for (i = 1; i <= 8; i++) {
        nji_jit_digest digest;
        if (i == 8) {
            request.source_hash = 1;
            image = get_image(&jit, &request); /* a hit makes it the youngest */
            nji_image_free(&image);
            assert_int_equal(jit.stats.disk_hits, 1);
            age(path[1], 0);
            assert_int_equal(files_in("cache", ".njc", NULL, NULL), 7);
        }
        request.source_hash = (uint64_t)i;
        digest = nji_jit_digest_make(&jit, &request);
        nji_jit_entry_path(&jit, &digest, path[i]);
        image = get_image(&jit, &request);
        nji_image_free(&image);
        if (i < 8) age(path[i], 1000 - i);
    }
    for (i = 1; i <= 8; i++) {
        int kept = i == 1 || i >= 5;
        if (access(path[i], F_OK) != (kept ? 0 : -1)) fail_msg("entry %d", i);
    }
    nji_jit_close(&jit);
}

static void hit_makes_an_entry_young(void **state) {
    entry_case c;
    struct stat info;
    nji_image image;
    (void)state;
    open_entry(&c);
    age(c.path, 5000);
    image = get_image(&c.jit, &c.request);
    nji_image_free(&image);
    assert_int_equal(stat(c.path, &info), 0);
    assert_true(time(NULL) - info.st_mtime < 1000);
    close_entry(&c);
}

/* A bound of one byte removes every entry, and nothing that is not ours. */
static void only_our_files_are_removed(void **state) {
    static const char *const kept[] = {
        "cache/notes.txt",
        "cache/.njc",
        "cache/x.tmp",
        "cache/0123456789abcdef.njc",
        "cache/0123456789abcdef0123456789abcdef.txt",
        "cache/0123456789abcdef0123456789abcdef.njc.bak",
        "cache/0123456789abcdef0123456789abcdef0.njc",
        "cache/0123456789ABCDEF0123456789ABCDEF.njc",
        "cache/0123456789abcdef0123456789abcdef.1.2.3.0.tmp", /* young: somebody may be at it */
    };
    static const char *const gone[] = {"cache/00000000000000000000000000000000.njc",
                                       "cache/0123456789abcdef0123456789abcdef.9.9.9.0.tmp"};
    static const char folder[] = "cache/ffffffffffffffffffffffffffffffff.njc";
    nji_jit jit;
    nji_image image;
    nji_jit_request request = make_request();
    size_t i;
    (void)state;
    open_jit(&jit, "cache", NULL);
    jit.cache_max_bytes = 1;
    for (i = 0; i < COUNT_OF(kept); i++) {
        write_file(in_scratch(kept[i]), "xx", 2);
        age(in_scratch(kept[i]), i + 1 == COUNT_OF(kept) ? 3000 : 8000);
    }
    for (i = 0; i < COUNT_OF(gone); i++) {
        write_file(in_scratch(gone[i]), "xx", 2);
        age(in_scratch(gone[i]), 4000);
    }
    assert_int_equal(mkdir(in_scratch(folder), 0700), 0);
    image = get_image(&jit, &request);
    nji_image_free(&image);
    assert_stats(&jit, 0, 1, 1, 0, 1);
    for (i = 0; i < COUNT_OF(kept); i++) {
        if (access(in_scratch(kept[i]), F_OK) != 0) fail_msg("%s is gone", kept[i]);
    }
    for (i = 0; i < COUNT_OF(gone); i++) {
        if (access(in_scratch(gone[i]), F_OK) == 0) fail_msg("%s is still there", gone[i]);
    }
    assert_int_equal(access(in_scratch(folder), F_OK), 0);
    assert_int_equal(files_in("cache", "", NULL, NULL), (int)COUNT_OF(kept));
    nji_jit_close(&jit);
}

static void temporary_of_the_same_name_is_not_written_to(void **state) {
    nji_jit jit;
    nji_image image;
    nji_jit_request request = make_request();
    char path[NJI_JIT_PATH_BYTES];
    nji_jit_digest digest;
    size_t size;
    char *bytes;
    FILE *file;
    (void)state;
    open_jit(&jit, "cache", NULL);
    digest = nji_jit_digest_make(&jit, &request);
    file = nji_jit_temporary_open(&jit, &digest, path); /* as by another machine's process */
    assert_non_null(file);
    fputs("theirs", file);
    fclose(file);
    image = get_image(&jit, &request);
    nji_image_free(&image);
    assert_stats(&jit, 0, 1, 1, 0, 1);
    bytes = read_file(path, &size);
    assert_int_equal(size, 6);
    assert_memory_equal(bytes, "theirs", 6);
    free(bytes);
    nji_jit_close(&jit);
}

/* ---- the disk cache: records of a few bytes -------------------------------------------------- */

static void record_comes_back_to_who_asks_for_it_and_its_size(void **state) {
    nji_jit first, second;
    nji_jit_digest digest = nji_jit_digest_of("a record"), other = digest;
    uint32_t kept[2] = {3, 4}, got[3] = {0, 0, 0};
    (void)state;
    nji_jit_digest_add(&other, "of another");
    open_jit(&first, "cache", NULL);
    assert_false(nji_jit_recall(&first, &digest, got, sizeof kept));
    nji_jit_remember(&first, &digest, kept, sizeof kept, "a record");
    assert_stats(&first, 0, 1, 1, 0, 0);
    nji_jit_close(&first);
    open_jit(&second, "cache", NULL);
    assert_true(nji_jit_recall(&second, &digest, got, sizeof kept));
    assert_memory_equal(got, kept, sizeof kept);
    got[0] = 0;
    assert_false(nji_jit_recall(&second, &digest, got, sizeof got));
    assert_false(nji_jit_recall(&second, &digest, got, sizeof got[0]));
    assert_false(nji_jit_recall(&second, &other, got, sizeof kept));
    assert_int_equal(got[0], 0);
    nji_jit_close(&second);
}

static void record_is_kept_nowhere_without_a_cache(void **state) {
    static heard log;
    nji_jit jit;
    nji_jit_digest digest = nji_jit_digest_of("a record");
    uint32_t kept = 5, got = 0;
    char wanted[512];
    (void)state;
    open_jit(&jit, NULL, NULL);
    nji_jit_remember(&jit, &digest, &kept, sizeof kept, "a record");
    assert_false(nji_jit_recall(&jit, &digest, &got, sizeof got));
    assert_stats(&jit, 0, 0, 0, 0, 0);
    nji_jit_close(&jit);
    write_file(in_scratch("file"), "x", 1);
    open_jit(&jit, "file/cache", &log);
    nji_jit_remember(&jit, &digest, &kept, sizeof kept, "a record");
    assert_false(nji_jit_recall(&jit, &digest, &got, sizeof got));
    assert_stats(&jit, 0, 1, 0, 1, 0);
    snprintf(wanted, sizeof wanted, "a record could not be kept in %s", in_scratch("file/cache"));
    assert_int_equal(log.lines, 2);
    assert_string_equal(log.text[1], wanted);
    nji_jit_close(&jit);
}

/* ---- the disk cache: many processes --------------------------------------------------------- */

#define PROCESSES 8

/* Runs `work` in several processes that start together; each must return 0. */
static void in_processes(int (*work)(int index)) {
    pid_t children[PROCESSES];
    int gate[2], i, status, failures = 0;
    char byte;
    assert_int_equal(pipe(gate), 0);
    fflush(NULL);
    for (i = 0; i < PROCESSES; i++) {
        children[i] = fork();
        assert_true(children[i] >= 0);
        if (children[i] == 0) {
            close(gate[1]);
            if (read(gate[0], &byte, 1) != 0) _exit(2); /* ends when the parent closes it */
            _exit(work(i));
        }
    }
    close(gate[0]);
    close(gate[1]);
    for (i = 0; i < PROCESSES; i++) {
        assert_int_equal(waitpid(children[i], &status, 0), children[i]);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) failures++;
    }
    assert_int_equal(failures, 0);
}

/* The image of a request, as told by a second, cacheless jit. 0 when right. In a child no cmocka
   assertion may run. */
static int check_image(nji_jit *jit, nji_jit *plain, const nji_jit_request *request) {
    nji_image image, wanted;
    int wrong;
    if (nji_jit_image(jit, request, &image, SELECT) != NJ_OK) return 1;
    if (nji_jit_image(plain, request, &wanted, SELECT) != NJ_OK) return 1;
    wrong = image.size != wanted.size || image.is_ptx != wanted.is_ptx ||
            memcmp(image.data, wanted.data, image.size) != 0;
    nji_image_free(&image);
    nji_image_free(&wanted);
    return wrong;
}

static int in_two_jits(int index, uint64_t cache_max_bytes, int rounds,
                       uint64_t (*hash_of)(int index, int round), int remove_every) {
    nj_ctx_desc desc;
    nji_jit jit, plain;
    nji_jit_request request = make_request();
    int round, wrong = 0;
    memset(&desc, 0, sizeof desc);
    desc.nvrtc_path = NJ_FAKE_NVRTC;
    if (nji_jit_open(&plain, &desc, CREATE) != NJ_OK) return 1;
    desc.cache_dir = in_scratch("cache");
    desc.cache_max_bytes = cache_max_bytes;
    if (nji_jit_open(&jit, &desc, CREATE) != NJ_OK) return 1;
    for (round = 0; round < rounds; round++) {
        request.source_hash = hash_of(index, round);
        wrong |= check_image(&jit, &plain, &request);
        if (remove_every && (round + index) % remove_every == 0) {
            nji_jit_digest digest = nji_jit_digest_make(&jit, &request);
            char path[NJI_JIT_PATH_BYTES];
            nji_jit_entry_path(&jit, &digest, path);
            remove(path);
        }
    }
    wrong |= jit.stats.disk_write_failures != 0;
    wrong |= (int)(jit.stats.disk_hits + jit.stats.disk_misses) != rounds;
    nji_jit_close(&jit);
    nji_jit_close(&plain);
    return wrong;
}

static uint64_t always_one(int index, int round) {
    (void)index;
    (void)round;
    return 1;
}

static int work_on_one_key(int index) {
    return in_two_jits(index, 0, 60, always_one, 7);
}

static void processes_that_race_for_one_key_all_succeed(void **state) {
    (void)state;
    in_processes(work_on_one_key);
    assert_int_equal(files_in("cache", ".tmp", NULL, NULL), 0);
    assert_true(files_in("cache", "", NULL, NULL) <= 1);
}

enum { EVICTION_ENTRY = 2000 + sizeof(nji_jit_entry), EVICTION_BOUND = 10 * EVICTION_ENTRY };

/* Half of the entries are shared with the neighbours. */
static uint64_t shared_hash(int index, int round) {
    return (uint64_t)(round % 2 ? round : 1000 * (index + 1) + round);
}

static int work_on_eviction(int index) {
    return in_two_jits(index, EVICTION_BOUND, 40, shared_hash, 0);
}

static void processes_that_race_to_evict_all_succeed(void **state) {
    uint64_t bytes;
    (void)state;
    set("NJ_FAKE_NVRTC_BYTES", "2000");
    in_processes(work_on_eviction);
    assert_int_equal(files_in("cache", ".tmp", NULL, NULL), 0);
    assert_true(files_in("cache", ".njc", &bytes, NULL) > 0);
    assert_true(bytes <= EVICTION_BOUND); /* whoever wrote last has looked at all */
}

/* ---- a real NVRTC --------------------------------------------------------------------------- */

static void open_real(nji_jit *jit, heard *log) {
    nj_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    memset(log, 0, sizeof *log);
    desc.log = hear;
    desc.log_user = log;
    assert_int_equal(nji_jit_open(jit, &desc, CREATE), NJ_OK);
    if (!jit->has_nvrtc) {
        nji_jit_close(jit);
        print_message("skipped: this machine has no NVRTC\n");
        skip();
    }
}

static void assert_is_cuda_elf(const nji_image *image) {
    const unsigned char *bytes = image->data;
    assert_false(image->is_ptx);
    assert_true(image->size > 64);
    assert_memory_equal(bytes, "\177ELF", 4);
    assert_int_equal(bytes[18] | bytes[19] << 8, 190); /* EM_CUDA */
}

static void real_nvrtc_gives_a_cubin_for_each_architecture_it_knows(void **state) {
    static heard log;
    nji_jit jit;
    nji_image image;
    nji_jit_request request = make_request();
    int archs[64], count = 0;
    (void)state;
    open_real(&jit, &log);
    assert_int_equal(jit.nvrtc.nvrtcGetNumSupportedArchs(&count), 0);
    assert_in_range(count, 1, 64);
    assert_int_equal(jit.nvrtc.nvrtcGetSupportedArchs(archs), 0);
    for (int i = 0; i < count; i++) {
        request.arch = archs[i];
        request.arch_specific = 0;
        image = get_image(&jit, &request);
        assert_is_cuda_elf(&image);
        nji_image_free(&image);
        if (archs[i] < 90 || jit.nvrtc.major < 12) continue;
        request.arch_specific = 1;
        image = get_image(&jit, &request);
        assert_is_cuda_elf(&image);
        nji_image_free(&image);
    }
    assert_int_equal(log.lines, 0); /* our own options please every version */
    nji_jit_close(&jit);
}

static void real_nvrtc_gives_ptx_for_an_architecture_of_the_future(void **state) {
    static heard log;
    nji_jit jit;
    nji_image image;
    nji_jit_request request = make_request();
    int archs[64], count = 0, newest = 0;
    char wanted[32];
    (void)state;
    open_real(&jit, &log);
    assert_int_equal(jit.nvrtc.nvrtcGetNumSupportedArchs(&count), 0);
    assert_in_range(count, 1, 64);
    assert_int_equal(jit.nvrtc.nvrtcGetSupportedArchs(archs), 0);
    for (int i = 0; i < count; i++)
        newest = archs[i] > newest ? archs[i] : newest;
    request.arch = newest + 100;
    image = get_image(&jit, &request);
    assert_true(image.is_ptx);
    assert_int_equal(((char *)image.data)[image.size - 1], 0);
    snprintf(wanted, sizeof wanted, ".target sm_%d", newest);
    assert_non_null(strstr(image.data, wanted));
    assert_non_null(strstr(image.data, ".entry k("));
    nji_image_free(&image);
    nji_jit_close(&jit);
}

static void real_nvrtcs_log_is_in_the_error(void **state) {
    static const char *const broken[] = {"extern \"C\" __global__ void k() {\n",
                                         "    undeclared();\n", "}\n", NULL};
    static heard log;
    nji_jit jit;
    nji_image image;
    nji_jit_request request = make_request();
    (void)state;
    open_real(&jit, &log);
    request.lines = broken;
    assert_int_equal(nji_jit_image(&jit, &request, &image, SELECT), NJ_COMPILE_FAILED);
    assert_non_null(strstr(nji_last.text, "could not compile k.cu for sm_90 with -DN=2 -DM=3: "
                                          "NVRTC_ERROR_COMPILATION\nk.cu(2): error: identifier "
                                          "\"undeclared\" is undefined"));
    nji_jit_close(&jit);
}

/* --------------------------------------------------------------------------------------------- */

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

/* Sets `self` to the absolute path. */
static int find_self(const char *name) {
    char *path = realpath(name, NULL);
    int fits = path && strlen(path) < sizeof self;
    if (fits) memcpy(self, path, strlen(path) + 1);
    free(path);
    return fits;
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        TEST(driver_opens_with_every_function_and_closes_to_zero),
        TEST(driver_at_a_path_is_sought_nowhere_else),
        TEST(driver_search_lists_every_name_with_its_reason),
        TEST(library_that_is_no_driver_is_refused),
        TEST(driver_without_a_required_function_is_refused_by_its_name),
        TEST(driver_may_lack_the_extended_launch),
        TEST(driver_older_than_11_4_is_refused_with_both_versions),
        TEST(machine_without_a_device_is_unsupported),
        TEST(toolkits_stub_is_no_driver),
        TEST(failure_to_start_the_driver_is_told_in_its_words),
        TEST(driver_out_of_memory_has_its_own_status),
        TEST(nvrtc_opens_by_path_and_says_its_version),
        TEST(nvrtc_at_a_path_is_sought_nowhere_else),
        TEST(library_that_is_no_nvrtc_is_refused),
        TEST(nvrtc_older_than_11_2_is_refused_with_both_versions),
        TEST(nvrtc_without_a_required_function_is_refused_by_its_name),
        TEST(newest_nvrtc_is_taken_but_a_loaded_one_comes_first),
        TEST(nvrtc_is_found_in_the_wheel_beside_the_program),
        TEST(jit_that_may_not_use_nvrtc_compiles_nothing),
        TEST(nvrtc_that_was_named_must_be_there),
        TEST(cache_dir_that_cannot_be_a_path_is_refused),
        TEST(cache_folder_is_made_with_its_parents_for_the_user_alone),
        TEST(joined_pieces_are_one_text),
        TEST(known_architecture_gets_a_cubin),
        TEST(unknown_architecture_gets_ptx_of_the_newest_below),
        TEST(device_older_than_all_that_nvrtc_knows_is_unsupported),
        TEST(options_are_the_target_ours_and_the_requests),
        TEST(failed_compilation_tells_all_that_is_known),
        TEST(missing_builtins_are_named_with_nvrtcs_place),
        TEST(long_messages_are_cut_not_overrun),
        TEST(compilers_warnings_are_not_told),
        TEST(no_allocation_that_fails_leaks_or_goes_unnoticed),
        TEST(keys_depend_on_content_and_on_all_of_it),
        TEST(keys_are_equal_in_every_process),
        TEST(image_is_compiled_once_for_all_jits_of_a_folder),
        TEST(ptx_comes_back_from_disk_as_ptx),
        TEST(without_a_cache_every_request_compiles),
        TEST(image_of_another_nvrtc_is_a_miss),
        TEST(entry_with_any_bit_flipped_is_a_miss),
        TEST(entry_of_any_other_length_is_a_miss),
        TEST(foreign_file_is_a_miss),
        TEST(whole_entry_of_other_times_or_requests_is_a_miss),
        TEST(folder_in_an_entrys_place_is_a_miss_and_a_failed_write),
        TEST(key_collision_has_an_entry_of_its_own),
        TEST(folder_that_cannot_be_had_costs_nothing_but_the_cache),
        TEST(record_comes_back_to_who_asks_for_it_and_its_size),
        TEST(record_is_kept_nowhere_without_a_cache),
        TEST(folder_without_write_permission_is_still_read),
        TEST(folder_that_was_removed_comes_back),
        TEST(least_recently_used_entries_go_when_the_bound_is_passed),
        TEST(hit_makes_an_entry_young),
        TEST(only_our_files_are_removed),
        TEST(temporary_of_the_same_name_is_not_written_to),
        TEST(processes_that_race_for_one_key_all_succeed),
        TEST(processes_that_race_to_evict_all_succeed),
        TEST(nvrtc_that_is_nowhere_is_noted_and_no_failure),
        TEST(real_nvrtc_gives_a_cubin_for_each_architecture_it_knows),
        TEST(real_nvrtc_gives_ptx_for_an_architecture_of_the_future),
        TEST(real_nvrtcs_log_is_in_the_error),
    };
    if (!find_self(argv[0])) return 1;
    if (argc == 2 && strcmp(argv[1], "--wheel") == 0) return print_wheel();
    if (argc == 2 && strcmp(argv[1], "--key") == 0) return print_key();
    if (argc >= 2 && strcmp(argv[1], "--find") == 0) return print_found(argv[2]);
    return cmocka_run_group_tests_name("jit", tests, NULL, NULL);
}
