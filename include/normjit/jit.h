/* Kernel source -> image for the device, through NVRTC or from the disk cache. The one part that
   knows how NVRTC is used, and files. */
#include <errno.h>
#include <time.h>

#ifdef _WIN32
#include <sys/utime.h>
#else
#include <dirent.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>
#include <utime.h>
#endif

typedef struct nji_jit {
    nji_nvrtc nvrtc;
    int has_nvrtc;
    char *cache_dir;          /* NULL: off */
    uint64_t cache_max_bytes; /* never 0 */
    nji_log log;
    int ptx_noted;        /* the log knows that NVRTC is older than the device */
    nj_cache_stats stats; /* guarded by the caller's lock, which nji_jit_image needs */
} nji_jit;

typedef struct nji_jit_request {
    const char *name;           /* of the program, for messages: "norm_rows.cu" */
    const char *const *lines;   /* the source: pieces of text, NULL-terminated */
    uint64_t source_hash;       /* of the joined pieces, computed when the header was made */
    const char *const *options; /* -DNAME=VALUE ... */
    int option_count;
    int arch;          /* 90 for sm_90 */
    int arch_specific; /* 1: sm_90a, where there is such */
} nji_jit_request;

typedef struct nji_image {
    void *data; /* from NJ_MALLOC; PTX ends with a zero */
    size_t size;
    int is_ptx; /* 0: a cubin */
} nji_image;

static void nji_image_free(nji_image *image) {
    NJ_FREE(image->data);
    memset(image, 0, sizeof *image);
}

/* ---- files and folders ---------------------------------------------------------------------- */

#define NJI_JIT_PATH_BYTES 4096
#define NJI_JIT_NAME_BYTES 128 /* kept free in a path for a slash and our longest file name */

typedef void (*nji_folder_fn)(void *user, const char *name, uint64_t bytes, int64_t modified);

#ifdef _WIN32
static void nji_folder_make_one(const char *path) {
    CreateDirectoryA(path, NULL);
}

static int nji_folder_exists(const char *path) {
    DWORD attributes = GetFileAttributesA(path);
    return attributes != INVALID_FILE_ATTRIBUTES && (attributes & FILE_ATTRIBUTE_DIRECTORY) != 0;
}

static int nji_file_move_over(const char *from, const char *to) {
    return MoveFileExA(from, to, MOVEFILE_REPLACE_EXISTING) != 0;
}

static void nji_file_touch(const char *path) {
    _utime(path, NULL);
}

static unsigned long nji_process_id(void) {
    return (unsigned long)GetCurrentProcessId();
}

/* modified: seconds since 1970, from ticks of 100 ns since 1601 */
static void nji_folder_each(const char *folder, nji_folder_fn visit, void *user) {
    char pattern[NJI_JIT_PATH_BYTES];
    WIN32_FIND_DATAA found;
    HANDLE search;
    snprintf(pattern, sizeof pattern, "%s\\*", folder);
    search = FindFirstFileA(pattern, &found);
    if (search == INVALID_HANDLE_VALUE) return;
    do {
        uint64_t ticks = ((uint64_t)found.ftLastWriteTime.dwHighDateTime << 32) |
                         found.ftLastWriteTime.dwLowDateTime;
        if (found.dwFileAttributes & FILE_ATTRIBUTE_DIRECTORY) continue;
        visit(user, found.cFileName, ((uint64_t)found.nFileSizeHigh << 32) | found.nFileSizeLow,
              (int64_t)(ticks / 10000000u) - 11644473600);
    } while (FindNextFileA(search, &found));
    FindClose(search);
}
#else
static void nji_folder_make_one(const char *path) {
    mkdir(path, 0700);
}

static int nji_folder_exists(const char *path) {
    struct stat info;
    return stat(path, &info) == 0 && S_ISDIR(info.st_mode);
}

static int nji_file_move_over(const char *from, const char *to) {
    return rename(from, to) == 0;
}

static void nji_file_touch(const char *path) {
    utime(path, NULL);
}

static unsigned long nji_process_id(void) {
    return (unsigned long)getpid();
}

/* modified: seconds since 1970. Files that vanish meanwhile are passed over. */
static void nji_folder_each(const char *folder, nji_folder_fn visit, void *user) {
    char path[NJI_JIT_PATH_BYTES];
    struct dirent *found;
    struct stat info;
    DIR *search = opendir(folder);
    if (!search) return;
    while ((found = readdir(search)) != NULL) {
        int length = snprintf(path, sizeof path, "%s/%s", folder, found->d_name);
        if (length < 0 || (size_t)length >= sizeof path) continue;
        if (stat(path, &info) != 0 || !S_ISREG(info.st_mode)) continue;
        visit(user, found->d_name, (uint64_t)info.st_size, (int64_t)info.st_mtime);
    }
    closedir(search);
}
#endif

/* Makes the folder and its parents, private to the user. 1 when it is there in the end: what single
   steps answer differs between systems (EEXIST, EACCES, EROFS), so only the end counts. */
static int nji_folder_make(const char *folder) {
    char path[NJI_JIT_PATH_BYTES];
    size_t i, length = strlen(folder);
    if (nji_folder_exists(folder)) return 1;
    memcpy(path, folder, length + 1);
    for (i = 1; i < length; i++) {
        if (path[i] != '/' && path[i] != '\\') continue;
        path[i] = '\0';
        nji_folder_make_one(path);
        path[i] = folder[i];
    }
    nji_folder_make_one(path);
    return nji_folder_exists(folder);
}

/* ---- keys ----------------------------------------------------------------------------------- */

/* Raise it when the entry's layout, or what an image holds for equal requests, changes. */
#define NJI_JIT_FORMAT 1

/* Two hashes of one request that share no arithmetic: what collides in one does not in the other.
 */
typedef struct nji_jit_digest {
    uint64_t key, check;
} nji_jit_digest;

static uint64_t nji_jit_check_text(uint64_t hash, const char *text) {
    size_t i, count = strlen(text) + 1;
    for (i = 0; i < count; i++) {
        hash = (hash + (unsigned char)text[i] + 1) * 0x9e3779b97f4a7c15ull;
        hash ^= hash >> 32;
    }
    return hash;
}

static nji_jit_digest nji_jit_digest_of(const char *text) {
    nji_jit_digest digest;
    digest.key = nji_hash_text(NJI_HASH_SEED, text);
    digest.check = nji_jit_check_text(0, text);
    return digest;
}

static void nji_jit_digest_add(nji_jit_digest *digest, const char *text) {
    digest->key = nji_hash_text(digest->key, text);
    digest->check = nji_jit_check_text(digest->check, text);
}

static nji_jit_digest nji_jit_digest_make(const nji_jit *jit, const nji_jit_request *request) {
    nji_jit_digest digest;
    char head[160];
    int i;
    snprintf(head, sizeof head, "%d %d nvrtc %d.%d sm_%d%s %016llx", NJI_JIT_FORMAT, NJ_VERSION,
             jit->nvrtc.major, jit->nvrtc.minor, request->arch, request->arch_specific ? "a" : "",
             (unsigned long long)request->source_hash);
    digest = nji_jit_digest_of(head);
    for (i = 0; i < request->option_count; i++) nji_jit_digest_add(&digest, request->options[i]);
    return digest;
}

/* Of the content alone, equal in every process: source, options, arch, NVRTC's and our version. */
static uint64_t nji_jit_key(const nji_jit *jit, const nji_jit_request *request) {
    return nji_jit_digest_make(jit, request).key;
}

/* ---- the disk cache ------------------------------------------------------------------------- */

/* Files are named by digest, <32 hex digits>.njc: this header, then the image. A writer fills a
   <32 hex digits>.<unique>.tmp and renames it, so a reader sees whole entries or none, without
   locks. */
typedef struct nji_jit_entry {
    char magic[8];
    uint32_t format;  /* in the writer's byte order: another's entry is foreign */
    uint32_t version; /* NJ_VERSION */
    nji_jit_digest digest;
    uint64_t size; /* of the image */
    uint32_t is_ptx;
    uint32_t reserved;
    uint64_t hash; /* of all before it, then of the image */
} nji_jit_entry;

#define NJI_JIT_DIGEST_DIGITS 32
#define NJI_JIT_SUFFIX ".njc"
#define NJI_JIT_TEMPORARY_SUFFIX ".tmp"
#define NJI_JIT_TEMPORARY_SECONDS 3600 /* older ones were left by a process that died */
#define NJI_JIT_DEFAULT_BYTES ((uint64_t)256 << 20)

static void nji_jit_entry_path(const nji_jit *jit, const nji_jit_digest *digest,
                               char path[NJI_JIT_PATH_BYTES]) {
    snprintf(path, NJI_JIT_PATH_BYTES, "%s/%016llx%016llx" NJI_JIT_SUFFIX, jit->cache_dir,
             (unsigned long long)digest->key, (unsigned long long)digest->check);
}

static nji_jit_entry nji_jit_entry_make(const nji_jit_digest *digest, const nji_image *image) {
    nji_jit_entry entry;
    memset(&entry, 0, sizeof entry);
    memcpy(entry.magic, "normjit", 8);
    entry.format = NJI_JIT_FORMAT;
    entry.version = NJ_VERSION;
    entry.digest = *digest;
    entry.size = image->size;
    entry.is_ptx = (uint32_t)image->is_ptx;
    entry.hash = nji_hash(NJI_HASH_SEED, &entry, offsetof(nji_jit_entry, hash));
    entry.hash = nji_hash(entry.hash, image->data, image->size);
    return entry;
}

/* Reads the entry whose header is at the file's start; 1 when it is whole and the one asked for. */
static int nji_jit_read_entry(FILE *file, const nji_jit_digest *digest, nji_image *out) {
    nji_jit_entry entry, expected;
    long end;
    if (fread(&entry, sizeof entry, 1, file) != 1) return 0;
    if (fseek(file, 0, SEEK_END) != 0) return 0;
    end = ftell(file);
    /* the file's length, before memory is asked for by a number that may be garbage */
    if (end <= (long)sizeof entry || entry.size != (uint64_t)end - sizeof entry) return 0;
    if (fseek(file, (long)sizeof entry, SEEK_SET) != 0) return 0;
    out->size = (size_t)entry.size;
    out->is_ptx = entry.is_ptx != 0;
    out->data = NJ_MALLOC(out->size);
    if (!out->data || fread(out->data, out->size, 1, file) != 1) return 0;
    expected = nji_jit_entry_make(digest, out);
    return memcmp(&entry, &expected, sizeof entry) == 0;
}

/* 1 on a hit. Whatever is wrong with an entry makes it a miss; it is then written anew. */
static int nji_jit_load(nji_jit *jit, const nji_jit_digest *digest, nji_image *out) {
    char path[NJI_JIT_PATH_BYTES];
    FILE *file;
    int hit;
    nji_jit_entry_path(jit, digest, path);
    file = fopen(path, "rb");
    if (!file) return 0;
    hit = nji_jit_read_entry(file, digest, out);
    fclose(file);
    if (hit) {
        nji_file_touch(path); /* eviction takes the least recently used */
    } else {
        nji_image_free(out);
    }
    return hit;
}

typedef struct nji_jit_file {
    char name[NJI_JIT_DIGEST_DIGITS + sizeof NJI_JIT_SUFFIX];
    uint64_t bytes;
    int64_t modified;
} nji_jit_file;

typedef struct nji_jit_listing {
    const nji_jit *jit;
    int64_t now;
    nji_jit_file *files;
    size_t count, capacity;
    uint64_t bytes; /* of all entries, also those that found no room in files */
} nji_jit_listing;

static void nji_jit_remove(const nji_jit *jit, const char *name) {
    char path[NJI_JIT_PATH_BYTES];
    snprintf(path, sizeof path, "%s/%s", jit->cache_dir, name);
    remove(path); /* another process may have been faster */
}

static int nji_jit_listing_grow(nji_jit_listing *listing) {
    size_t capacity = listing->capacity ? 2 * listing->capacity : 64;
    nji_jit_file *files = (nji_jit_file *)NJ_MALLOC(capacity * sizeof *files);
    if (!files) return 0;
    if (listing->count) memcpy(files, listing->files, listing->count * sizeof *files);
    NJ_FREE(listing->files);
    listing->files = files;
    listing->capacity = capacity;
    return 1;
}

/* Lists our entries and removes abandoned temporaries. Other people's files are left alone. */
static void nji_jit_listing_visit(void *user, const char *name, uint64_t bytes, int64_t modified) {
    nji_jit_listing *listing = (nji_jit_listing *)user;
    size_t length = strlen(name);
    const char *rest = name + NJI_JIT_DIGEST_DIGITS;
    nji_jit_file *file;
    if (strspn(name, "0123456789abcdef") != NJI_JIT_DIGEST_DIGITS || *rest != '.') return;
    if (length >= NJI_JIT_NAME_BYTES - 1) return;
    if (strcmp(name + length - (sizeof NJI_JIT_TEMPORARY_SUFFIX - 1), NJI_JIT_TEMPORARY_SUFFIX) ==
        0) {
        if (listing->now - modified > NJI_JIT_TEMPORARY_SECONDS) nji_jit_remove(listing->jit, name);
        return;
    }
    if (strcmp(rest, NJI_JIT_SUFFIX) != 0) return;
    listing->bytes += bytes;
    if (listing->count == listing->capacity && !nji_jit_listing_grow(listing)) return;
    file = &listing->files[listing->count++];
    memcpy(file->name, name, length + 1);
    file->bytes = bytes;
    file->modified = modified;
}

static int nji_jit_file_compare(const void *a, const void *b) {
    const nji_jit_file *x = (const nji_jit_file *)a, *y = (const nji_jit_file *)b;
    if (x->modified != y->modified) return x->modified < y->modified ? -1 : 1;
    return strcmp(x->name, y->name);
}

/* Keeps the folder within its bound. Down to three quarters, so that not every write has to evict.
 */
static void nji_jit_evict(const nji_jit *jit) {
    nji_jit_listing listing;
    size_t i;
    memset(&listing, 0, sizeof listing);
    listing.jit = jit;
    listing.now = (int64_t)time(NULL);
    nji_folder_each(jit->cache_dir, nji_jit_listing_visit, &listing);
    if (listing.bytes > jit->cache_max_bytes && listing.count) {
        qsort(listing.files, listing.count, sizeof listing.files[0], nji_jit_file_compare);
        for (i = 0; i < listing.count; i++) {
            if (listing.bytes <= jit->cache_max_bytes / 4 * 3) break;
            nji_jit_remove(jit, listing.files[i].name);
            listing.bytes -= listing.files[i].bytes;
        }
    }
    NJ_FREE(listing.files);
}

/* Opens a file of a name that no thread or process uses: the process, the ctx and its count tell
   apart all of one machine; attempts count on when another machine shares the folder. */
static FILE *nji_jit_temporary_open(const nji_jit *jit, const nji_jit_digest *digest,
                                    char path[NJI_JIT_PATH_BYTES]) {
    uint64_t turn = jit->stats.disk_writes + jit->stats.disk_write_failures;
    FILE *file = NULL;
    int attempt;
    for (attempt = 0; attempt < 16 && !file; attempt++) {
        snprintf(path, NJI_JIT_PATH_BYTES,
                 "%s/%016llx%016llx.%lx.%llx.%llx.%d" NJI_JIT_TEMPORARY_SUFFIX, jit->cache_dir,
                 (unsigned long long)digest->key, (unsigned long long)digest->check,
                 nji_process_id(), (unsigned long long)(uintptr_t)jit, (unsigned long long)turn,
                 attempt);
        file = fopen(path, "wbx");
        if (!file && errno != EEXIST) break;
    }
    return file;
}

static int nji_jit_write(const nji_jit *jit, const nji_jit_digest *digest, const nji_image *image) {
    char temporary[NJI_JIT_PATH_BYTES], path[NJI_JIT_PATH_BYTES];
    nji_jit_entry entry = nji_jit_entry_make(digest, image);
    FILE *file;
    int written;
    if (!nji_folder_make(jit->cache_dir)) return 0; /* gone since the ctx was made? */
    file = nji_jit_temporary_open(jit, digest, temporary);
    if (!file) return 0;
    written = fwrite(&entry, sizeof entry, 1, file) == 1 &&
              fwrite(image->data, image->size, 1, file) == 1;
    if (fclose(file) != 0) written = 0;
    nji_jit_entry_path(jit, digest, path);
    if (written && nji_file_move_over(temporary, path)) return 1;
    remove(temporary);
    return 0;
}

/* A failure costs the next process the work that `what` took, nothing else. */
static void nji_jit_store(nji_jit *jit, const nji_jit_digest *digest, const nji_image *image,
                          const char *what) {
    if (nji_jit_write(jit, digest, image)) {
        jit->stats.disk_writes++;
        nji_jit_evict(jit);
    } else {
        jit->stats.disk_write_failures++;
        nji_note(&jit->log, NJ_LOG_WARNING, "%s could not be kept in %s", what, jit->cache_dir);
    }
}

/* Looks an image up on disk and counts; 0 also when the cache is off. */
static int nji_jit_find(nji_jit *jit, const nji_jit_digest *digest, nji_image *out) {
    int hit;
    memset(out, 0, sizeof *out);
    if (!jit->cache_dir) return 0;
    hit = nji_jit_load(jit, digest, out);
    if (hit) jit->stats.disk_hits++;
    else jit->stats.disk_misses++;
    return hit;
}

/* A few bytes that a caller wants to find again: an entry like that of a kernel, whose digest its
   text must tell apart from kernels'. 1 when record was filled. */
static int nji_jit_recall(nji_jit *jit, const nji_jit_digest *digest, void *record, size_t size) {
    nji_image image;
    int hit = nji_jit_find(jit, digest, &image) && image.size == size;
    if (hit) memcpy(record, image.data, size);
    nji_image_free(&image);
    return hit;
}

static void nji_jit_remember(nji_jit *jit, const nji_jit_digest *digest, void *record, size_t size,
                             const char *what) {
    nji_image image;
    if (!jit->cache_dir) return;
    image.data = record;
    image.size = size;
    image.is_ptx = 0;
    nji_jit_store(jit, digest, &image, what);
}

/* ---- compiling ------------------------------------------------------------------------------ */

/* Joins pieces of text into one, zero-terminated; *size is without the zero. NJ_FREE it. */
static nj_status nji_jit_join(const char *const *lines, char **out, size_t *size,
                              const char *call) {
    size_t total = 0, used = 0, i;
    *out = NULL;
    *size = 0;
    for (i = 0; lines[i]; i++)
        total += strlen(lines[i]);
    *out = (char *)NJ_MALLOC(total + 1);
    if (!*out) return nji_out_of_memory(call, total + 1);
    for (i = 0; lines[i]; i++) {
        size_t length = strlen(lines[i]);
        memcpy(*out + used, lines[i], length);
        used += length;
    }
    (*out)[total] = '\0';
    *size = total;
    return NJ_OK;
}

typedef struct nji_jit_target {
    char option[48];  /* --gpu-architecture=sm_90 */
    const char *name; /* sm_90, within option */
    int is_ptx;
    int knows_minimal; /* NVRTC has --minimal */
} nji_jit_target;

/* A cubin for arch when this NVRTC knows it, else PTX for the newest virtual architecture below. */
static nj_status nji_jit_target_choose(const nji_jit *jit, const nji_jit_request *request,
                                       nji_jit_target *out, const char *call) {
    static const char prefix[] = "--gpu-architecture=";
    const nji_nvrtc *nvrtc = &jit->nvrtc;
    int count = 0, best = 0, i;
    int *archs;
    if (nvrtc->nvrtcGetNumSupportedArchs(&count) != NJI_NVRTC_SUCCESS || count < 1) count = 0;
    archs = (int *)NJ_MALLOC(((size_t)count + 1) * sizeof *archs);
    if (!archs) return nji_out_of_memory(call, ((size_t)count + 1) * sizeof *archs);
    if (count > 0 && nvrtc->nvrtcGetSupportedArchs(archs) != NJI_NVRTC_SUCCESS) count = 0;
    for (i = 0; i < count; i++) {
        if (archs[i] <= request->arch && archs[i] > best) best = archs[i];
    }
    NJ_FREE(archs);
    if (best == 0) {
        return nji_fail(NJ_UNSUPPORTED,
                        "%s: NVRTC %d.%d knows neither sm_%d nor an older architecture", call,
                        nvrtc->major, nvrtc->minor, request->arch);
    }
    out->is_ptx = best != request->arch;
    snprintf(out->option, sizeof out->option, "%s%s_%d%s", prefix, out->is_ptx ? "compute" : "sm",
             best, !out->is_ptx && request->arch_specific && best >= 90 ? "a" : "");
    out->name = out->option + sizeof prefix - 1;
    out->knows_minimal = nvrtc->major > 12 || (nvrtc->major == 12 && nvrtc->minor >= 4);
    return NJ_OK;
}

/* NVRTC's log; NULL when it is empty or cannot be had. NJ_FREE it. */
static char *nji_jit_log_text(const nji_nvrtc *nvrtc, nji_nvrtc_program program) {
    size_t size = 0;
    char *text;
    if (!program || nvrtc->nvrtcGetProgramLogSize(program, &size) != NJI_NVRTC_SUCCESS) return NULL;
    if (size < 2) return NULL; /* its zero alone */
    text = (char *)NJ_MALLOC(size);
    if (text && nvrtc->nvrtcGetProgramLog(program, text) != NJI_NVRTC_SUCCESS) {
        NJ_FREE(text);
        text = NULL;
    }
    return text;
}

static nj_status nji_jit_compile_fail(const nji_jit *jit, const nji_jit_request *request,
                                      const nji_jit_target *target, nji_nvrtc_program program,
                                      int result, const char *call) {
    const nji_nvrtc *nvrtc = &jit->nvrtc;
    char options[1024] = "no options", builtins[1280] = "";
    char *log = nji_jit_log_text(nvrtc, program);
    size_t used = 0;
    int i;
    for (i = 0; i < request->option_count && used < sizeof options; i++) {
        int length = snprintf(options + used, sizeof options - used, "%s%s", used ? " " : "",
                              request->options[i]);
        if (length > 0) used += (size_t)length;
    }
    if (result == NJI_NVRTC_BUILTINS_FAILED) {
        snprintf(builtins, sizeof builtins,
                 "; NVRTC was loaded as %s and needs " NJI_NVRTC_BUILTINS " beside it", nvrtc->path,
                 nvrtc->major, nvrtc->minor);
    }
    nji_fail(result == NJI_NVRTC_OUT_OF_MEMORY ? NJ_OUT_OF_MEMORY : NJ_COMPILE_FAILED,
             "%s: NVRTC %d.%d could not compile %s for %s with %s: %s%s%s%s", call, nvrtc->major,
             nvrtc->minor, request->name, target->name, options, nvrtc->nvrtcGetErrorString(result),
             builtins, log ? "\n" : "", log ? log : "");
    nji_last.info.driver_error = (int32_t)result;
    NJ_FREE(log);
    return (nj_status)nji_last.info.status;
}

/* NVRTC's defaults are the accurate ones (denormals kept, division and square root rounded
   correctly) and stay. No --restrict: an output may be an input. Helpers need no __device__. */
static const char *const nji_jit_common_options[] = {"--std=c++14",
                                                     "--device-as-default-execution-space"};
#define NJI_JIT_COMMON (int)(sizeof nji_jit_common_options / sizeof nji_jit_common_options[0])

/* The target, the common options, the request's. NJ_FREE it. */
static nj_status nji_jit_options_make(const nji_jit_request *request, const nji_jit_target *target,
                                      const char ***out, int *count, const char *call) {
    size_t bytes = (size_t)(2 + NJI_JIT_COMMON + request->option_count) * sizeof **out;
    int used = 0, i;
    const char **options = (const char **)NJ_MALLOC(bytes);
    *out = options;
    if (!options) return nji_out_of_memory(call, bytes);
    options[used++] = target->option;
    for (i = 0; i < NJI_JIT_COMMON; i++)
        options[used++] = nji_jit_common_options[i];
    /* leaves out declarations that no kernel of ours uses, and halves the time */
    if (target->knows_minimal) options[used++] = "--minimal";
    for (i = 0; i < request->option_count; i++)
        options[used++] = request->options[i];
    *count = used;
    return NJ_OK;
}

/* *result is NVRTC's. Errors here: OUT_OF_MEMORY. */
static nj_status nji_jit_image_take(const nji_nvrtc *nvrtc, nji_nvrtc_program program, int is_ptx,
                                    nji_image *out, int *result, const char *call) {
    *result = (is_ptx ? nvrtc->nvrtcGetPTXSize : nvrtc->nvrtcGetCUBINSize)(program, &out->size);
    if (*result != NJI_NVRTC_SUCCESS) return NJ_OK;
    out->is_ptx = is_ptx;
    out->data = NJ_MALLOC(out->size);
    if (!out->data) return nji_out_of_memory(call, out->size);
    *result = (is_ptx ? nvrtc->nvrtcGetPTX : nvrtc->nvrtcGetCUBIN)(program, (char *)out->data);
    return NJ_OK;
}

/* Once is enough: it will be so for every kernel. */
static void nji_jit_note_ptx(nji_jit *jit, const nji_jit_request *request,
                             const nji_jit_target *target) {
    if (jit->ptx_noted) return;
    jit->ptx_noted = 1;
    nji_note(
        &jit->log, NJ_LOG_WARNING,
        "NVRTC %d.%d does not know sm_%d: it compiles to PTX for %s, which the driver assembles",
        jit->nvrtc.major, jit->nvrtc.minor, request->arch, target->name);
}

/* Warnings of the compiler are told to nobody: a user could not act on them. */
static nj_status nji_jit_compile(nji_jit *jit, const nji_jit_request *request, nji_image *out,
                                 const char *call) {
    const nji_nvrtc *nvrtc = &jit->nvrtc;
    nji_nvrtc_program program = NULL;
    nji_jit_target target;
    const char **options = NULL;
    char *source = NULL;
    size_t size;
    int result, option_count = 0;
    nj_status status = nji_jit_target_choose(jit, request, &target, call);
    if (status != NJ_OK) return status;
    if (target.is_ptx) nji_jit_note_ptx(jit, request, &target);
    status = nji_jit_join(request->lines, &source, &size, call);
    if (status != NJ_OK) goto done;
    status = nji_jit_options_make(request, &target, &options, &option_count, call);
    if (status != NJ_OK) goto done;
    result = nvrtc->nvrtcCreateProgram(&program, source, request->name, 0, NULL, NULL);
    if (result == NJI_NVRTC_SUCCESS) {
        result = nvrtc->nvrtcCompileProgram(program, option_count, options);
    }
    if (result == NJI_NVRTC_SUCCESS) {
        status = nji_jit_image_take(nvrtc, program, target.is_ptx, out, &result, call);
        if (status != NJ_OK) goto done;
    }
    if (result != NJI_NVRTC_SUCCESS) {
        status = nji_jit_compile_fail(jit, request, &target, program, result, call);
        goto done;
    }
    jit->stats.compiles++;
done:
    if (status != NJ_OK) nji_image_free(out);
    if (program) nvrtc->nvrtcDestroyProgram(&program);
    NJ_FREE((void *)options);
    NJ_FREE(source);
    return status;
}

/* The image for a request: from the disk cache, else compiled (and kept there). One thread at a
   time on one jit. Errors: LIBRARY_NOT_FOUND (no NVRTC); UNSUPPORTED (NVRTC knows only newer
   devices); COMPILE_FAILED; OUT_OF_MEMORY. *out is zeroed on failure; nji_image_free it. */
static nj_status nji_jit_image(nji_jit *jit, const nji_jit_request *request, nji_image *out,
                               const char *call) {
    nji_jit_digest digest;
    nj_status status;
    memset(out, 0, sizeof *out);
    if (!jit->has_nvrtc) return nji_fail(NJ_LIBRARY_NOT_FOUND, "%s: there is no NVRTC", call);
    digest = nji_jit_digest_make(jit, request);
    if (nji_jit_find(jit, &digest, out)) return NJ_OK;
    status = nji_jit_compile(jit, request, out, call);
    if (status == NJ_OK && jit->cache_dir) {
        nji_jit_store(jit, &digest, out, "a compiled kernel");
    }
    return status;
}

/* ---- open and close ------------------------------------------------------------------------- */

static void nji_jit_close(nji_jit *jit) {
    nji_nvrtc_close(&jit->nvrtc);
    NJ_FREE(jit->cache_dir);
    memset(jit, 0, sizeof *jit);
}

static nj_status nji_jit_cache_open(nji_jit *jit, const nj_ctx_desc *desc, const char *call) {
    size_t length = strlen(desc->cache_dir);
    if (length == 0) {
        return nji_fail(NJ_INVALID_ARGUMENT, "%s: desc.cache_dir = \"\": NULL turns the cache off",
                        call);
    }
    if (length > NJI_JIT_PATH_BYTES - NJI_JIT_NAME_BYTES) {
        return nji_fail(NJ_INVALID_ARGUMENT,
                        "%s: desc.cache_dir has %zu bytes: at most %d are possible", call, length,
                        NJI_JIT_PATH_BYTES - NJI_JIT_NAME_BYTES);
    }
    jit->cache_dir = (char *)NJ_MALLOC(length + 1);
    if (!jit->cache_dir) return nji_out_of_memory(call, length + 1);
    memcpy(jit->cache_dir, desc->cache_dir, length + 1);
    jit->cache_max_bytes = desc->cache_max_bytes ? desc->cache_max_bytes : NJI_JIT_DEFAULT_BYTES;
    if (!nji_folder_make(jit->cache_dir)) {
        nji_note(&jit->log, NJ_LOG_WARNING, "the cache folder %s could not be made",
                 jit->cache_dir);
    }
    return NJ_OK;
}

/* A missing NVRTC is a failure only when the caller named it. */
static nj_status nji_jit_nvrtc_open(nji_jit *jit, const nj_ctx_desc *desc, const char *call) {
    nji_error before = nji_last; /* what is no failure leaves the thread's last error alone */
    nj_status status = nji_nvrtc_open(&jit->nvrtc, desc->nvrtc_path, call);
    jit->has_nvrtc = status == NJ_OK;
    if (status == NJ_OK || desc->nvrtc_path) return status;
    nji_note(&jit->log, NJ_LOG_WARNING, "the embedded PTX serves: %s", nji_last.text);
    nji_last = before;
    return NJ_OK;
}

/* Opens NVRTC (unless NJ_CTX_FALLBACK_PTX) and the cache folder (when one is named). Errors:
   INVALID_ARGUMENT; OUT_OF_MEMORY; with nvrtc_path those of nji_nvrtc_open. Zeroed on failure. */
static nj_status nji_jit_open(nji_jit *jit, const nj_ctx_desc *desc, const char *call) {
    nj_status status = NJ_OK;
    memset(jit, 0, sizeof *jit);
    jit->log.call = desc->log;
    jit->log.user = desc->log_user;
    if (!(desc->flags & NJ_CTX_FALLBACK_PTX)) status = nji_jit_nvrtc_open(jit, desc, call);
    if (status == NJ_OK && desc->cache_dir) status = nji_jit_cache_open(jit, desc, call);
    if (status != NJ_OK) nji_jit_close(jit);
    return status;
}
