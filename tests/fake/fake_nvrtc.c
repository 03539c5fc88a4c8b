/* An NVRTC that compiles nothing, for tests: an image names its target and a hash of source and
   options, so that equal requests give equal images and others do not.

   Environment, read at every call:
       NJ_FAKE_NVRTC_VERSION=12.4      default 13.0
       NJ_FAKE_NVRTC_ARCHS=75,80       architectures; default 75,80,86,89,90,100,120
       NJ_FAKE_NVRTC_FAIL=text         compiling fails, with this log
       NJ_FAKE_NVRTC_FAIL_CODE=7       with this result; default 6, NVRTC_ERROR_COMPILATION
       NJ_FAKE_NVRTC_LOG=text          compiling succeeds, with this log
       NJ_FAKE_NVRTC_BYTES=100000      images are filled up to this size

   A source with a line "#error" fails like a real one. A test finds the fake_nvrtc_* functions with
   dlsym. Build: cc -shared -fPIC. */
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    SUCCESS = 0,
    INVALID_INPUT = 3,
    INVALID_PROGRAM = 4,
    INVALID_OPTION = 5,
    COMPILATION = 6,
    ARCHS = 32
};

typedef struct program {
    char *source, *name;
    char log[512];
    char *image;
    size_t size;
    int is_ptx;
} program;

static atomic_int compiles, programs;
static char last_options[2048]; /* one a line */

static char *copy_of(const char *text) {
    char *copy = malloc(strlen(text) + 1);
    memcpy(copy, text, strlen(text) + 1);
    return copy;
}

static const char *text_of(const char *variable, const char *otherwise) {
    const char *text = getenv(variable);
    return text && *text ? text : otherwise;
}

static int list_archs(int archs[ARCHS]) {
    const char *at = text_of("NJ_FAKE_NVRTC_ARCHS", "75,80,86,89,90,100,120");
    int count = 0;
    while (*at && count < ARCHS) {
        archs[count++] = (int)strtol(at, (char **)&at, 10);
        if (*at == ',') at++;
    }
    return count;
}

const char *nvrtcGetErrorString(int result) {
    static const char *const names[] = {"NVRTC_SUCCESS",
                                        "NVRTC_ERROR_OUT_OF_MEMORY",
                                        "NVRTC_ERROR_PROGRAM_CREATION_FAILURE",
                                        "NVRTC_ERROR_INVALID_INPUT",
                                        "NVRTC_ERROR_INVALID_PROGRAM",
                                        "NVRTC_ERROR_INVALID_OPTION",
                                        "NVRTC_ERROR_COMPILATION",
                                        "NVRTC_ERROR_BUILTIN_OPERATION_FAILURE"};
    return result >= 0 && result < 8 ? names[result] : "NVRTC_ERROR unknown";
}

int nvrtcVersion(int *major, int *minor) {
    return sscanf(text_of("NJ_FAKE_NVRTC_VERSION", "13.0"), "%d.%d", major, minor) == 2
               ? SUCCESS
               : INVALID_INPUT;
}

int nvrtcGetNumSupportedArchs(int *count) {
    int archs[ARCHS];
    *count = list_archs(archs);
    return SUCCESS;
}

int nvrtcGetSupportedArchs(int *archs) {
    list_archs(archs);
    return SUCCESS;
}

int nvrtcCreateProgram(void **out, const char *source, const char *name, int header_count,
                       const char *const *headers, const char *const *include_names) {
    program *made;
    if (!out || !source || header_count || headers || include_names) return INVALID_INPUT;
    made = calloc(1, sizeof *made);
    made->source = copy_of(source);
    made->name = copy_of(name);
    *out = made;
    programs++;
    return SUCCESS;
}

int nvrtcDestroyProgram(void **out) {
    program *gone;
    if (!out || !*out) return INVALID_PROGRAM;
    gone = *out;
    free(gone->source);
    free(gone->name);
    free(gone->image);
    free(gone);
    *out = NULL;
    programs--;
    return SUCCESS;
}

static uint64_t hash_of(uint64_t hash, const char *text) {
    for (; *text; text++)
        hash = (hash ^ (unsigned char)*text) * 1099511628211ull;
    return hash * 1099511628211ull;
}

static int failed(program *p, int result, const char *log) {
    snprintf(p->log, sizeof p->log, "%s", log);
    return result;
}

/* sm_90, sm_90a or compute_90, of an architecture that is listed. */
static int is_target(const char *target) {
    int archs[ARCHS], count = list_archs(archs), i;
    for (i = 0; i < count; i++) {
        char sm[32], specific[32], virtual_arch[32];
        snprintf(sm, sizeof sm, "sm_%d", archs[i]);
        snprintf(specific, sizeof specific, "sm_%da", archs[i]);
        snprintf(virtual_arch, sizeof virtual_arch, "compute_%d", archs[i]);
        if (strcmp(target, sm) == 0 || strcmp(target, virtual_arch) == 0) return 1;
        if (archs[i] >= 90 && strcmp(target, specific) == 0) return 1;
    }
    return 0;
}

/* A cubin begins with "FAKE CUBIN sm_90", which the fake driver reads. PTX looks like PTX and holds
   the source, so that the driver finds a kernel's name in it. */
static void make_image(program *p, const char *target, uint64_t hash) {
    size_t least = (size_t)atoi(text_of("NJ_FAKE_NVRTC_BYTES", "0"));
    size_t used, room = strlen(p->source) + 256;
    if (room < least) room = least;
    p->is_ptx = strncmp(target, "compute_", 8) == 0;
    free(p->image);
    p->image = calloc(1, room);
    if (p->is_ptx) {
        used = (size_t)snprintf(p->image, room, "// %016llx\n.version 8.0\n.target sm_%s\n",
                                (unsigned long long)hash, target + 8);
        used += (size_t)snprintf(p->image + used, room - used, "// %s", p->source);
    } else {
        used = (size_t)snprintf(p->image, room, "FAKE CUBIN %s %016llx", target,
                                (unsigned long long)hash);
    }
    p->size = used + 1 > least ? used + 1 : least;
}

int nvrtcCompileProgram(void *handle, int option_count, const char *const *options) {
    static const char architecture[] = "--gpu-architecture=";
    program *p = handle;
    const char *target = NULL;
    uint64_t hash;
    size_t used = 0;
    int i;
    if (!p) return INVALID_PROGRAM;
    compiles++;
    hash = hash_of(14695981039346656037ull, p->source);
    p->log[0] = '\0';
    for (i = 0; i < option_count; i++) {
        hash = hash_of(hash, options[i]);
        used +=
            (size_t)snprintf(last_options + used, sizeof last_options - used, "%s\n", options[i]);
        if (used >= sizeof last_options) return failed(p, INVALID_OPTION, "too many options");
        if (strncmp(options[i], architecture, sizeof architecture - 1) == 0) {
            target = options[i] + sizeof architecture - 1;
        }
    }
    if (!target || !is_target(target)) {
        return failed(p, INVALID_OPTION,
                      "nvrtc: error: invalid value for --gpu-architecture (-arch)\n");
    }
    if (getenv("NJ_FAKE_NVRTC_FAIL")) {
        return failed(p, atoi(text_of("NJ_FAKE_NVRTC_FAIL_CODE", "6")),
                      getenv("NJ_FAKE_NVRTC_FAIL"));
    }
    if (strstr(p->source, "#error")) {
        snprintf(p->log, sizeof p->log, "%s(1): catastrophic error: #error directive\n", p->name);
        return COMPILATION;
    }
    snprintf(p->log, sizeof p->log, "%s", text_of("NJ_FAKE_NVRTC_LOG", ""));
    make_image(p, target, hash);
    return SUCCESS;
}

int nvrtcGetProgramLogSize(void *handle, size_t *size) {
    *size = strlen(((program *)handle)->log) + 1;
    return SUCCESS;
}

int nvrtcGetProgramLog(void *handle, char *log) {
    memcpy(log, ((program *)handle)->log, strlen(((program *)handle)->log) + 1);
    return SUCCESS;
}

/* Each kind of image is there or not, as with a real one: PTX of a virtual target alone here. */
static int image_size(const program *p, int is_ptx, size_t *size) {
    if (!p->image || p->is_ptx != is_ptx) return INVALID_PROGRAM;
    *size = p->size;
    return SUCCESS;
}

static int image_copy(const program *p, int is_ptx, char *out) {
    if (!p->image || p->is_ptx != is_ptx) return INVALID_PROGRAM;
    memcpy(out, p->image, p->size);
    return SUCCESS;
}

int nvrtcGetPTXSize(void *handle, size_t *size) {
    return image_size(handle, 1, size);
}

int nvrtcGetPTX(void *handle, char *ptx) {
    return image_copy(handle, 1, ptx);
}

int nvrtcGetCUBINSize(void *handle, size_t *size) {
    return image_size(handle, 0, size);
}

int nvrtcGetCUBIN(void *handle, char *cubin) {
    return image_copy(handle, 0, cubin);
}

/* ---- for tests ------------------------------------------------------------------------------ */

/* Compilations tried since the start or the last reset. */
int fake_nvrtc_compiles(void) {
    return compiles;
}

/* Programs created and not destroyed. */
int fake_nvrtc_live_programs(void) {
    return programs;
}

/* The latest compilation's options, one a line. Not for many threads. */
const char *fake_nvrtc_last_options(void) {
    return last_options;
}

void fake_nvrtc_reset(void) {
    compiles = 0;
    last_options[0] = '\0';
}
