/* NVRTC's interface over the C++ compiler of this machine: programs become shared objects that
   simt_cuda.c runs. The image is the object file itself, an ELF file as a cubin is.

   Environment: NJ_SIMT_FLAGS, more flags for the compiler, separated by spaces:
       NJ_SIMT_FLAGS="-fsanitize=undefined -fno-sanitize=alignment -fsanitize-undefined-trap-on-error"
   Alignment simt_cuda.c checks by itself.
   The build defines NJ_SIMT_CXX (the compiler) and NJ_SIMT_FOLDER (where simt_device.h lies). */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_INPUT = 3, INVALID_PROGRAM = 4, INVALID_OPTION = 5, COMPILATION = 6 };

typedef struct program {
    char *source;
    char *log;
    char *image;
    size_t size;
} program;

extern char **environ;

static const int archs[] = {75, 80, 86, 89, 90, 100, 120};
#define ARCHS (int)(sizeof archs / sizeof archs[0])

/* ---- text ----------------------------------------------------------------------------------- */

typedef struct text {
    char *bytes;
    size_t used, room;
} text;

static void append(text *to, const char *from, size_t length) {
    if (to->used + length + 1 > to->room) {
        to->room = 2 * (to->used + length) + 256;
        to->bytes = realloc(to->bytes, to->room);
    }
    memcpy(to->bytes + to->used, from, length);
    to->used += length;
    to->bytes[to->used] = '\0';
}

static void append_text(text *to, const char *from) {
    append(to, from, strlen(from));
}

static char *read_file(const char *path, size_t *size) {
    char *bytes = NULL;
    FILE *file = fopen(path, "rb");
    long length;
    *size = 0;
    if (!file) return NULL;
    if (fseek(file, 0, SEEK_END) == 0 && (length = ftell(file)) >= 0) {
        rewind(file);
        bytes = malloc((size_t)length + 1);
        *size = fread(bytes, 1, (size_t)length, file);
        bytes[*size] = '\0';
    }
    fclose(file);
    return bytes;
}

/* ---- PTX to calls --------------------------------------------------------------------------- */

static int is_name(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
}

static const char *skip_space(const char *at) {
    return at + strspn(at, " \t\n");
}

/* Past a string literal; its content, but for escaped characters (\n), to out unless NULL. */
static const char *skip_literal(const char *at, text *out) {
    for (at++; *at && *at != '"'; at++) {
        if (*at == '\\') at++;
        else if (out) append(out, at, 1);
    }
    return *at ? at + 1 : at;
}

static const char *skip_parentheses(const char *at) {
    int depth = 0;
    do {
        depth += (*at == '(') - (*at == ')');
        at++;
    } while (*at && depth > 0);
    return at;
}

enum { OPERANDS = 10 };

typedef struct assembly {
    text instructions;
    const char *operand[OPERANDS]; /* C expressions in parentheses */
    size_t length[OPERANDS];
    int count;
} assembly;

/* Reads from the parenthesis of an asm statement to past its end. */
static const char *read_assembly(const char *at, assembly *out) {
    memset(out, 0, sizeof *out);
    at = skip_space(at + 1);
    for (; *at == '"'; at = skip_space(at)) at = skip_literal(at, &out->instructions);
    while (*at && *at != ')') {
        if (*at == '"') {
            at = skip_space(skip_literal(at, NULL));
            if (*at == '(' && out->count < OPERANDS) { /* else a clobber */
                const char *end = skip_parentheses(at);
                out->operand[out->count] = at;
                out->length[out->count++] = (size_t)(end - at);
                at = end;
            }
        } else {
            at++;
        }
    }
    return *at ? at + 1 : at;
}

/* A word of an instruction: "%1" is an operand, brackets are left out, and "_" is no result wanted. */
static const char *write_operand(const char *at, const assembly *from, int *written, text *out) {
    const char *end = at;
    while (is_name(*end) || *end == '%' || *end == '-') end++;
    if (end == at) return at + 1;
    if (end == at + 1 && *at == '_') return end;
    if ((*written)++) append_text(out, ",");
    if (*at == '%' && at[1] - '0' >= 0 && at[1] - '0' < from->count)
        append(out, from->operand[at[1] - '0'], from->length[at[1] - '0']);
    else append(out, at, (size_t)(end - at));
    return end;
}

/* "mapa.shared::cluster.u32 %0, %1, %2;" -> ptx_mapa_shared__cluster_u32((there),(here),(rank)); */
static const char *write_call(const char *at, const assembly *from, text *out) {
    int written = 0;
    append_text(out, "ptx_");
    for (; *at && *at != ';' && *at != ' '; at++) append(out, is_name(*at) ? at : "_", 1);
    append_text(out, "(");
    while (*at && *at != ';') at = write_operand(at, from, &written, out);
    append_text(out, ");");
    return *at ? at + 1 : at;
}

/* A brace stands for itself, ".reg .pred p;" declares a variable of the type simt_reg_pred; all else are
   instructions without a guard ("@p"). */
static const char *write_statement(const char *at, const assembly *from, text *out) {
    if (*at == '{' || *at == '}') {
        append(out, at, 1);
        return at + 1;
    }
    if (strncmp(at, ".reg .", 6) == 0) {
        append_text(out, "simt_reg_");
        for (at += 6; *at && *at != ';'; at++) append(out, at, 1);
        append_text(out, ";");
        return *at ? at + 1 : at;
    }
    return write_call(at, from, out);
}

/* extern __shared__ T name[]; -> SIMT_DYNAMIC T name[SIMT_DYNAMIC_COUNT]; */
static const char *write_dynamic(const char *at, text *out) {
    static const char shared[] = "__shared__";
    const char *type = strstr(at, shared) + sizeof shared - 1, *bracket = strchr(type, '[');
    append_text(out, "SIMT_DYNAMIC");
    append(out, type, (size_t)(bracket + 1 - type));
    append_text(out, "SIMT_DYNAMIC_COUNT");
    return bracket + 1;
}

static void translate(const char *source, text *out) {
    const char *at = source;
    while (*at) {
        const char *next = at + 1;
        if (strncmp(at, "extern __shared__", 17) == 0 && strchr(at, '[')) {
            at = write_dynamic(at, out);
            continue;
        }
        if (strncmp(at, "asm", 3) == 0 && !is_name(at[3]) && (at == source || !is_name(at[-1]))) {
            next = skip_space(at + 3);
            if (strncmp(next, "volatile", 8) == 0) next = skip_space(next + 8);
        }
        if (next > at + 1 && *next == '(') {
            assembly found;
            const char *statement;
            at = read_assembly(next, &found);
            append_text(out, "{");
            statement = skip_space(found.instructions.bytes ? found.instructions.bytes : "");
            while (*statement) statement = skip_space(write_statement(statement, &found, out));
            append_text(out, "}");
            free(found.instructions.bytes);
        } else {
            append(out, at, 1);
            at++;
        }
    }
    append_text(out, "\nSIMT_OBJECT\n");
}

/* ---- compiling ------------------------------------------------------------------------------ */

/* Objects of this process, by the hash of what they were made from; gone with it. */
static char folder[512];
static pthread_once_t folder_once = PTHREAD_ONCE_INIT;

static void make_folder(void) {
    const char *parent = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/normjit-simt-XXXXXX", parent && *parent ? parent : "/tmp");
    if (!mkdtemp(folder)) folder[0] = '\0';
}

__attribute__((destructor)) static void remove_folder(void) {
    DIR *listing = folder[0] ? opendir(folder) : NULL;
    struct dirent *entry;
    if (!listing) return;
    while ((entry = readdir(listing))) unlinkat(dirfd(listing), entry->d_name, 0);
    closedir(listing);
    rmdir(folder);
}

static uint64_t hash_of(uint64_t hash, const char *bytes) {
    for (; *bytes; bytes++) hash = (hash ^ (unsigned char)*bytes) * 1099511628211ull;
    return hash * 1099511628211ull;
}

typedef struct arguments {
    char *list[64];
    int count;
} arguments;

static void add_argument(arguments *to, const char *argument) {
    if (to->count < 63) to->list[to->count++] = strdup(argument);
    to->list[to->count] = NULL;
}

static void add_words(arguments *to, const char *words) {
    char *copy = strdup(words), *rest = copy, *word;
    while ((word = strtok_r(rest, " ", &rest))) add_argument(to, word);
    free(copy);
}

/* Runs the compiler, its words in the file log. 1 when it succeeded. */
static int run(char *const *list, const char *log) {
    posix_spawn_file_actions_t actions;
    pid_t child;
    int status = -1;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 1, log, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    posix_spawn_file_actions_adddup2(&actions, 1, 2);
    if (posix_spawnp(&child, list[0], &actions, NULL, list, environ) != 0 ||
        waitpid(child, &status, 0) != child)
        status = -1;
    posix_spawn_file_actions_destroy(&actions);
    return status == 0;
}

/* No runtime is linked: simt_device.h defines what the instrumentation calls. Types are punned as
   NVRTC allows it. */
static const char flags[] =
    "-std=c++14 -Og -w -fPIC -shared -nostdlib -fno-exceptions -fno-rtti -fno-strict-aliasing "
    "-fno-math-errno -fno-stack-protector -U_FORTIFY_SOURCE -fvisibility=hidden -fsanitize=thread "
    "-Wl,-Bsymbolic -include " NJ_SIMT_FOLDER "/simt_device.h";

static int failed(program *p, int result, const char *log) {
    free(p->log);
    p->log = strdup(log);
    return result;
}

/* The object for the program at `base`.cpp, unless it is there. */
static int build(program *p, arguments *command, const char *base, const text *source) {
    char path[640], made[640], object[640], log[640];
    FILE *file;
    size_t size;
    int ok;
    snprintf(object, sizeof object, "%s.so", base);
    p->image = read_file(object, &p->size);
    if (p->image) return SUCCESS;
    snprintf(path, sizeof path, "%s.%p.cpp", base, (void *)p);
    snprintf(made, sizeof made, "%s.%p.so", base, (void *)p);
    snprintf(log, sizeof log, "%s.%p.log", base, (void *)p);
    file = fopen(path, "w");
    if (!file) return failed(p, COMPILATION, "the program could not be written");
    fwrite(source->bytes, 1, source->used, file);
    fclose(file);
    add_argument(command, path);
    add_argument(command, "-o");
    add_argument(command, made);
    ok = run(command->list, log);
    free(p->log);
    p->log = read_file(log, &size);
    if (!p->log) p->log = strdup("the compiler " NJ_SIMT_CXX " could not be run");
    if (!ok) return COMPILATION;
    rename(made, object);
    p->image = read_file(object, &p->size);
    return p->image ? SUCCESS : COMPILATION;
}

int nvrtcCompileProgram(void *handle, int option_count, const char *const *options) {
    static const char architecture[] = "--gpu-architecture=sm_";
    const char *more = getenv("NJ_SIMT_FLAGS");
    program *p = handle;
    arguments command = {{NULL}, 0};
    text source = {NULL, 0, 0};
    char define[64], base[600];
    uint64_t hash;
    int arch = 0, result, i;
    if (!p) return INVALID_PROGRAM;
    pthread_once(&folder_once, make_folder);
    if (!folder[0]) return failed(p, COMPILATION, "no temporary folder could be made");
    add_argument(&command, NJ_SIMT_CXX);
    add_words(&command, flags);
    if (more) add_words(&command, more);
    for (i = 0; i < option_count; i++) {
        if (strncmp(options[i], architecture, sizeof architecture - 1) == 0)
            arch = atoi(options[i] + sizeof architecture - 1);
        if (strncmp(options[i], "-D", 2) == 0) add_argument(&command, options[i]);
    }
    if (!arch) return failed(p, INVALID_OPTION, "only real architectures can be compiled for");
    snprintf(define, sizeof define, "-D__CUDA_ARCH__=%d", 10 * arch);
    add_argument(&command, define);
    translate(p->source, &source);
    hash = hash_of(14695981039346656037ull, source.bytes);
    for (i = 0; i < command.count; i++) hash = hash_of(hash, command.list[i]);
    snprintf(base, sizeof base, "%s/%016llx", folder, (unsigned long long)hash);
    result = build(p, &command, base, &source);
    for (i = 0; i < command.count; i++) free(command.list[i]);
    free(source.bytes);
    return result;
}

/* ---- the rest of the interface -------------------------------------------------------------- */

int nvrtcVersion(int *major, int *minor) {
    *major = 13;
    *minor = 0;
    return SUCCESS;
}

const char *nvrtcGetErrorString(int result) {
    static const char *const names[] = {"NVRTC_SUCCESS",
                                        "NVRTC_ERROR_OUT_OF_MEMORY",
                                        "NVRTC_ERROR_PROGRAM_CREATION_FAILURE",
                                        "NVRTC_ERROR_INVALID_INPUT",
                                        "NVRTC_ERROR_INVALID_PROGRAM",
                                        "NVRTC_ERROR_INVALID_OPTION",
                                        "NVRTC_ERROR_COMPILATION"};
    return result >= 0 && result <= COMPILATION ? names[result] : "NVRTC_ERROR unknown";
}

int nvrtcGetNumSupportedArchs(int *count) {
    *count = ARCHS;
    return SUCCESS;
}

int nvrtcGetSupportedArchs(int *out) {
    memcpy(out, archs, sizeof archs);
    return SUCCESS;
}

int nvrtcCreateProgram(void **out, const char *source, const char *name, int header_count,
                       const char *const *headers, const char *const *include_names) {
    program *made;
    (void)name;
    if (!out || !source || header_count || headers || include_names) return INVALID_INPUT;
    made = calloc(1, sizeof *made);
    made->source = strdup(source);
    *out = made;
    return SUCCESS;
}

int nvrtcDestroyProgram(void **out) {
    program *gone;
    if (!out || !*out) return INVALID_PROGRAM;
    gone = *out;
    free(gone->source);
    free(gone->log);
    free(gone->image);
    free(gone);
    *out = NULL;
    return SUCCESS;
}

static const char *log_of(const program *p) {
    return p->log ? p->log : "";
}

int nvrtcGetProgramLogSize(void *handle, size_t *size) {
    *size = strlen(log_of(handle)) + 1;
    return SUCCESS;
}

int nvrtcGetProgramLog(void *handle, char *log) {
    memcpy(log, log_of(handle), strlen(log_of(handle)) + 1);
    return SUCCESS;
}

int nvrtcGetCUBINSize(void *handle, size_t *size) {
    program *p = handle;
    *size = p->size;
    return p->image ? SUCCESS : INVALID_PROGRAM;
}

int nvrtcGetCUBIN(void *handle, char *cubin) {
    program *p = handle;
    if (!p->image) return INVALID_PROGRAM;
    memcpy(cubin, p->image, p->size);
    return SUCCESS;
}

int nvrtcGetPTXSize(void *handle, size_t *size) {
    (void)handle;
    *size = 0;
    return INVALID_PROGRAM;
}

int nvrtcGetPTX(void *handle, char *ptx) {
    (void)handle;
    (void)ptx;
    return INVALID_PROGRAM;
}
