/* Declared, implemented, then included again both ways: the functions come once. */
#include "normjit.h"
#define NORMJIT_IMPLEMENTATION
#include "normjit.h"
#include "normjit.h"
#undef NORMJIT_IMPLEMENTATION
#include "normjit.h"

int use_twice(void);

int use_twice(void) {
    return nj_version();
}
