/* Rooms of the SIMT host's driver: simt_cuda.c is the interface, simt_run.c runs a kernel, simt_memory.c
   judges its accesses. One launch at a time. */
#ifndef SIMT_ENGINE_H
#define SIMT_ENGINE_H

#include <stddef.h>
#include <stdint.h>

#include "../../ptx_src/nj_abi.h"
#include "simt.h"

/* CUresult */
enum {
    SIMT_SUCCESS = 0,
    SIMT_INVALID_VALUE = 1,
    SIMT_ILLEGAL_ADDRESS = 700,
    SIMT_MISALIGNED_ADDRESS = 716,
    SIMT_LAUNCH_FAILED = 719
};

/* ---- simt_memory.c -------------------------------------------------------------------------- */

/* A thread as far as the order of accesses goes. Times are counts of barriers and of blocks begun: two
   threads of a block are ordered by a barrier of the block, two of a cluster by one of the cluster,
   any others by nothing. */
typedef struct simt_actor {
    uint32_t thread, block, cluster; /* numbers in the grid */
    uint32_t block_time;             /* of the block's latest barrier */
    uint32_t cluster_time;           /* of the cluster's latest barrier */
    uint32_t block_threads, cluster_blocks;
} simt_actor;

typedef struct simt_cell simt_cell;

/* A stretch of device memory, or the shared memory of a block. */
typedef struct simt_space {
    unsigned char *begin;
    size_t bytes;
    unsigned char *may; /* of each byte: 1 = it may be read, 2 = written; NULL: both */
    simt_cell *cells;   /* of each 2 bytes: who was there */
    uint32_t start;     /* what happened before this time is forgotten */
    struct simt_space *next;
} simt_space;

/* Device memory, aligned to 256 bytes; NULL: there is none left. */
void *simt_memory_alloc(size_t bytes);
int simt_memory_free(void *begin);
int simt_space_holds(const simt_space *space, const void *address, size_t bytes);
/* The device memory that holds all those bytes; NULL: none does. */
simt_space *simt_memory_find(const void *address, size_t bytes);

/* Opens the operands of the problem, and nothing else, to a kernel that begins at that time. */
void simt_memory_open(const simt_object *object, const nji_problem *problem, int is_forward,
                      uint32_t time);
/* Empty cells for shared memory. */
void simt_space_reset(simt_space *space, unsigned char *begin, size_t bytes, uint32_t time);

/* Notes an access that lies in the space. 1, or 0 with the reason: not open, or not ordered. */
int simt_space_access(simt_space *space, const void *address, size_t bytes, int writes,
                      const simt_actor *actor, char *reason, size_t reason_size);

/* ---- simt_run.c ----------------------------------------------------------------------------- */

typedef void (*simt_kernel)(nji_problem problem);

typedef struct simt_launch {
    simt_object *object;
    simt_kernel kernel;
    const char *name;
    simt_index blocks, threads;
    int is_dependent; /* may begin before the kernels ahead of it have ended */
} simt_launch;

/* Runs every block. A CUresult; of a failure, fault says more. */
int simt_run(const simt_launch *launch, const nji_problem *problem, char *fault, size_t fault_size);

#endif
