// Inside nvcc: the header's functions beside a kernel, in one file.
#define NORMJIT_IMPLEMENTATION
#include "normjit.h"

__global__ void twice(float *x) {
    x[threadIdx.x] *= 2;
}

int main() {
    return nj_version() == NJ_VERSION ? 0 : 1;
}
