/* What passes between the SIMT host's driver (simt_cuda.c and its neighbours) and the objects that its
   compiler (simt_nvrtc.c) makes of the kernels with simt_device.h. C and C++. */
#ifndef SIMT_H
#define SIMT_H

#include <stddef.h>

typedef struct simt_index {
    unsigned x, y, z;
} simt_index;

typedef struct simt_thread {
    simt_index thread, block, threads, blocks; /* threadIdx, blockIdx, blockDim, gridDim */
} simt_thread;

/* What a thread of a kernel asks for. A fault does not return. Addresses of shared memory are those of
   the cluster's window: the block's rank above, the offset below. */
typedef struct simt_host {
    /* Before every access to memory that is not the compiler's own. */
    void (*access)(const void *address, size_t bytes, int writes);
    /* 0 threads: all of the block. Whether the predicate holds for all who meet. */
    int (*barrier)(int number, unsigned threads, int predicate);
    void (*warp_barrier)(unsigned mask);
    void (*cluster_arrive)(void);
    void (*cluster_wait)(void);
    /* The value of another lane. All 32 lanes take part. */
    unsigned long long (*exchange)(unsigned long long value, unsigned lane);
    unsigned (*shared_address)(const void *address);
    void (*store_cluster)(unsigned address, const void *value, size_t bytes);
    /* `filled` bytes come from global memory, zeros are the rest. */
    void (*copy)(unsigned to, const void *from, int bytes, int filled);
    void (*commit_copies)(void);
    /* Until no more than so many groups are under way; -1: nor any copy without a group. */
    void (*wait_for_copies)(int groups);
    /* Barriers that lie in shared memory (mbarrier). */
    void (*barrier_init)(unsigned address, int arrivals);
    void (*barrier_fence)(void);
    void (*barrier_arrive)(unsigned address, int bytes); /* bytes: more that the phase waits for */
    void (*barrier_wait)(unsigned address, unsigned parity);
    /* Copies, and stores to a block of the cluster, whose bytes such a barrier counts. */
    void (*copy_bulk)(unsigned to, const void *from, int bytes, unsigned barrier);
    void (*send)(unsigned to, const void *value, size_t bytes, unsigned barrier);
    void (*wait_for_earlier_kernels)(void);
    void (*prefetch)(unsigned long long address, long long bytes);
} simt_host;

#define SIMT_RANK_SHIFT 24 /* of a block's rank in an address of that window */

/* One compiled program; the symbol is simt_this. */
typedef struct simt_object {
    int arch;            /* 90 for sm_90 */
    int element_bytes;   /* of NJI_X */
    int slices, cluster; /* of a row; blocks of a cluster, 1 = none */
    char *shared_begin, *shared_end;
    char *dynamic_begin, *dynamic_end; /* room for what a launch adds */
    /* Set by the driver: */
    const simt_host *host;
    const simt_thread *thread; /* the one that runs */
} simt_object;

#endif
