/* What users' own headers may define, and the allocator of theirs. The standard headers come first, as
   they do for such users: their own C++ forms do not survive these macros either. */
#include <float.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define min(a, b) ((a) < (b) ? (a) : (b))
#define max(a, b) ((a) > (b) ? (a) : (b))
#define MIN(a, b) min(a, b)
#define MAX(a, b) max(a, b)
#define ABS(a) ((a) < 0 ? -(a) : (a))
#define ARRAY_SIZE(a) (sizeof(a) / sizeof(a)[0])
#define CHECK(condition) ((void)(condition))
#define ASSERT(condition) ((void)(condition))
#define TRUE 1
#define FALSE 0
#define ROWS 1
#define COLS 2
#define WARP 32

static void *my_malloc(size_t bytes) {
    return malloc(bytes);
}
static void my_free(void *block) {
    free(block);
}
#define NJ_MALLOC(bytes) my_malloc(bytes)
#define NJ_FREE(block) my_free(block)

#define NORMJIT_IMPLEMENTATION
#include "normjit.h"
