/* A program's main file with functions of its own: no warning for those that it does not call, and no
   clash with the public ones of another file. */
#define NJ_STATIC
#define NORMJIT_IMPLEMENTATION
#include "normjit.h"

int main(void) {
    return nj_version() == NJ_VERSION ? 0 : 1;
}
