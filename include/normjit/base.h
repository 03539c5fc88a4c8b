/* Configuration, error text, checked arithmetic, hashing, locks. */
#include <float.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef _WIN32
#ifndef WIN32_LEAN_AND_MEAN
#define WIN32_LEAN_AND_MEAN
#endif
#include <windows.h>
#else
#include <pthread.h>
#endif

/* ---- what the user may define --------------------------------------------------------------- */

/* NJ_MALLOC(bytes) and NJ_FREE(pointer) go together; the result is aligned as malloc's is, and
   freeing NULL does nothing. */
#ifndef NJ_MALLOC
#define NJ_MALLOC(bytes) malloc(bytes)
#define NJ_FREE(pointer) free(pointer)
#endif

/* ---- compilers ------------------------------------------------------------------------------ */

#if defined(__GNUC__) || defined(__clang__)
#define NJI_PRINTF(text, first) __attribute__((format(printf, text, first)))
#else
#define NJI_PRINTF(text, first)
#endif

#if defined(__cplusplus)
#define NJI_THREAD_LOCAL thread_local
#define NJI_STATIC_ASSERT(condition, text) static_assert(condition, text)
#elif defined(_MSC_VER)
#define NJI_THREAD_LOCAL __declspec(thread)
#define NJI_STATIC_ASSERT(condition, text) typedef char nji_assert_[(condition) ? 1 : -1]
#elif defined(__STDC_VERSION__) && __STDC_VERSION__ >= 201112L
#define NJI_THREAD_LOCAL _Thread_local
#define NJI_STATIC_ASSERT(condition, text) _Static_assert(condition, text)
#else
#define NJI_THREAD_LOCAL __thread
#define NJI_STATIC_ASSERT(condition, text) typedef char nji_assert_[(condition) ? 1 : -1]
#endif

NJI_STATIC_ASSERT(sizeof(nji_problem) == NJI_PROBLEM_BYTES,
                  "host and device disagree on nji_problem");

/* ---- the thread's last error ---------------------------------------------------------------- */

typedef struct nji_error {
    nj_error_info info;
    char text[4096]; /* room for the first screens of a compiler's log */
} nji_error;

static NJI_THREAD_LOCAL nji_error nji_last;

/* Records and returns a failure. `needed` and `got` fill nj_error_info. */
NJI_PRINTF(4, 5)
static nj_status nji_fail_sized(nj_status status, uint64_t needed, uint64_t got, const char *format,
                                ...) {
    va_list arguments;
    nji_last.info.status = (int32_t)status;
    nji_last.info.driver_error = 0;
    nji_last.info.needed = needed;
    nji_last.info.got = got;
    va_start(arguments, format);
    vsnprintf(nji_last.text, sizeof nji_last.text, format, arguments);
    va_end(arguments);
    return status;
}

#define nji_fail(status, ...) nji_fail_sized(status, 0, 0, __VA_ARGS__)

static nj_status nji_out_of_memory(const char *call, size_t bytes) {
    return nji_fail_sized(NJ_OUT_OF_MEMORY, bytes, 0,
                          "%s: %zu bytes of host memory could not be had", call, bytes);
}

/* ---- checked arithmetic --------------------------------------------------------------------- */

static int nji_is_i32(int64_t value) {
    return value >= INT32_MIN && value <= INT32_MAX;
}

/* 1 and *out on success, 0 when the result does not fit. Divisions are slow: small factors, the
   usual ones, do without. */
static int nji_mul_i64(int64_t a, int64_t b, int64_t *out) {
    if (!(nji_is_i32(a) && nji_is_i32(b)) && a != 0 && b != 0) {
        if (a > 0 ? (b > 0 ? a > INT64_MAX / b : b < INT64_MIN / a)
                  : (b > 0 ? a < INT64_MIN / b : b < INT64_MAX / a))
            return 0;
    }
    *out = a * b;
    return 1;
}

static int nji_add_i64(int64_t a, int64_t b, int64_t *out) {
    if (b > 0 ? a > INT64_MAX - b : a < INT64_MIN - b) return 0;
    *out = a + b;
    return 1;
}

static int64_t nji_min_i64(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static int64_t nji_ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

/* ---- hashing (FNV-1a, 64 bits; keys of caches, no defence against an adversary) ------------- */

#define NJI_HASH_SEED 14695981039346656037ull

static uint64_t nji_hash(uint64_t hash, const void *bytes, size_t count) {
    const unsigned char *p = (const unsigned char *)bytes;
    size_t i;
    for (i = 0; i < count; i++) hash = (hash ^ p[i]) * 1099511628211ull;
    return hash;
}

/* The terminating zero goes in, so that "ab","c" and "a","bc" differ. */
static uint64_t nji_hash_text(uint64_t hash, const char *text) {
    return nji_hash(hash, text, strlen(text) + 1);
}

/* ---- locks ---------------------------------------------------------------------------------- */

#ifdef _WIN32
typedef SRWLOCK nji_lock;
static void nji_lock_init(nji_lock *lock) {
    InitializeSRWLock(lock);
}
static void nji_lock_enter(nji_lock *lock) {
    AcquireSRWLockExclusive(lock);
}
static void nji_lock_leave(nji_lock *lock) {
    ReleaseSRWLockExclusive(lock);
}
static void nji_lock_free(nji_lock *lock) {
    (void)lock;
}
#else
typedef pthread_mutex_t nji_lock;
static void nji_lock_init(nji_lock *lock) {
    pthread_mutex_init(lock, NULL);
}
static void nji_lock_enter(nji_lock *lock) {
    pthread_mutex_lock(lock);
}
static void nji_lock_leave(nji_lock *lock) {
    pthread_mutex_unlock(lock);
}
static void nji_lock_free(nji_lock *lock) {
    pthread_mutex_destroy(lock);
}
#endif

/* ---- logging -------------------------------------------------------------------------------- */

typedef struct nji_log {
    nj_log_fn call; /* NULL: silent */
    void *user;
} nji_log;

NJI_PRINTF(3, 4)
static void nji_note(const nji_log *log, nj_log_level level, const char *format, ...) {
    char text[1024];
    va_list arguments;
    if (!log->call) return;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    log->call(log->user, level, text);
}
