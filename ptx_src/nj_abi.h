/* The one struct that crosses from the host to a kernel, after axes are collapsed. The host backend
   reads the same struct. Valid C and CUDA C: NVRTC has no <stdint.h>. */
#ifndef NJI_ABI_H
#define NJI_ABI_H

#define NJI_DIMS 8

/* Strides are in elements, one for each collapsed dim: row dims first, then col dims, outermost
   first within each. A statistic has stride 0 in the col dims, a parameter in the row dims. */
typedef struct nji_operand {
    void *data; /* element (0, 0, ...); null: absent */
    long long stride[NJI_DIMS];
} nji_operand;

typedef struct nji_problem {
    nji_operand x, dy, gamma, beta, mean, rstd, y, dx, dgamma, dbeta;
    long long extent[NJI_DIMS]; /* of the row dims, then of the col dims */
    long long rows, cols;       /* products of the two groups */
    double eps;
    void *partial; /* workspace: accumulators [parts][2][cols], dgamma before dbeta */
    void *sums;    /* workspace of the split kernels: accumulators [rows][slices][2] */
    int row_dims, col_dims;
    int parts;
    int param_dtype, stat_dtype; /* nj_dtype; kernels built for any type read them here */
    int row_lanes;               /* strided kernels: rows that a block works on */
    int rows_fast;               /* strided kernels: neighbouring threads take neighbouring rows */
    unsigned grads, accumulate;  /* NJ_GRAD_* */
    int reserved;
} nji_problem;

/* Threads of a block of the strided kernels. */
#define NJI_STRIDED_THREADS 256

/* The kernel that adds parts: threads of a block along columns, columns of a thread, lanes over
   parts, parts that a lane loads at once. */
#define NJI_SUM_THREADS 16
#define NJI_SUM_WIDTH 4
#define NJI_SUM_COLS (NJI_SUM_THREADS * NJI_SUM_WIDTH)
#define NJI_SUM_LANES 32
#define NJI_SUM_BATCH 4

/* Both compilers must lay it out alike; each asserts this size. */
#define NJI_PROBLEM_BYTES 864

#endif
