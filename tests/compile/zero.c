/* Structs that users fill begin as {0}, in C and in C++: no enum may come first in them. */
#include "normjit.h"

int use_zero(void);

int use_zero(void) {
    nj_ctx_desc ctx_desc = {0};
    nj_desc desc = {0};
    nj_preference pref = {0};
    nj_args args = {0};
    nj_tensor tensor = {0};
    nj_const_tensor const_tensor = {0};
    return ctx_desc.cache_dir == 0 && desc.rank == 0 && pref.deterministic == 0 &&
           args.dbeta.data == 0 && tensor.data == 0 && const_tensor.rank == 0;
}
