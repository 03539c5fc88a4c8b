/* Rooms of the SIMT host's driver: simt_cuda.c is the interface, simt_run.c runs a kernel,
   simt_calls.c does what its threads ask for, simt_async.c what goes on without them, simt_memory.c
   judges accesses by the clocks of simt_clock.c. One launch at a time. */
#ifndef SIMT_ENGINE_H
#define SIMT_ENGINE_H

#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <ucontext.h>

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

enum {
    SIMT_WARP = 32,
    SIMT_THREADS = 1024,
    SIMT_CLUSTER = 16,
    SIMT_STACK = 128 << 10,
    SIMT_BARRIERS = 128 /* in the shared memory of a block */
};

/* ---- simt_clock.c --------------------------------------------------------------------------- */

/* What is known to be over: of each thread, all that it did before a time. Threads are numbered through
   the grid, time counts what orders threads. NULL knows nothing. */
typedef struct simt_clock {
    uint32_t holders;
    uint32_t first, count; /* threads */
    uint32_t time[];
} simt_clock;

simt_clock *simt_clock_hold(simt_clock *clock);
void simt_clock_drop(simt_clock *clock);
/* Drops what was there. */
void simt_clock_set(simt_clock **at, simt_clock *held);
/* What either knows; the caller holds it. */
simt_clock *simt_clock_join(simt_clock *a, simt_clock *b);
/* From now on `*at` knows what the thread did before that time. */
void simt_clock_put(simt_clock **at, uint32_t thread, uint32_t time);
static inline int simt_clock_knows(const simt_clock *clock, uint32_t thread, uint32_t time) {
    return clock && thread - clock->first < clock->count &&
           time < clock->time[thread - clock->first];
}

/* Where threads leave what they know for others. */
typedef struct simt_signal {
    simt_clock *clock;
    simt_clock *latest; /* the clock that came in last: most threads bring the same */
} simt_signal;

void simt_signal_clear(simt_signal *signal);
/* ---- simt_memory.c -------------------------------------------------------------------------- */

/* A thread as far as the order of accesses goes. A copy acts for the barrier that counts it, and
   knows what the thread does that starts it. */
typedef struct simt_actor {
    uint32_t thread;
    uint32_t mark;     /* who is noted to have been there: the thread, or the barrier's number */
    uint32_t now;      /* the time at which it last told others what it did */
    simt_clock *clock; /* what it knows of others */
} simt_actor;

typedef struct simt_cell simt_cell;

/* A stretch of device memory, or the shared memory of a block. */
typedef struct simt_space {
    unsigned char *begin;
    size_t bytes, room; /* room: of the cells */
    unsigned char *may; /* of each byte: 1 = it may be read, 2 = written; NULL: both */
    simt_cell *cells;   /* of each 2 bytes: who was there */
    uint32_t start;     /* what happened before this time is forgotten */
    struct simt_space *next;
} simt_space;

enum { SIMT_READ = 0, SIMT_WRITE = 1, SIMT_STRONG = 2 /* of a flag: needs no order among its like */ };

/* Times: not over yet, whoever asks; and what lies there is a barrier. */
#define SIMT_UNDER_WAY UINT32_MAX
#define SIMT_IS_BARRIER (UINT32_MAX - 1)

/* Device memory, aligned to 256 bytes; NULL: there is none left. */
void *simt_memory_alloc(size_t bytes);
int simt_memory_free(void *begin);
static inline int simt_space_holds(const simt_space *space, const void *address, size_t bytes) {
    const uintptr_t at = (uintptr_t)address, begin = (uintptr_t)space->begin;
    return at >= begin && at - begin <= space->bytes && space->bytes - (at - begin) >= bytes;
}
/* The device memory that holds all those bytes; NULL: none does. */
simt_space *simt_memory_find(const void *address, size_t bytes);

/* Opens the operands of the problem, and nothing else, to a kernel that begins at that time. */
void simt_memory_open(const simt_object *object, const nji_problem *problem, int is_forward,
                      uint32_t time);
/* Empty cells for shared memory. */
void simt_space_reset(simt_space *space, unsigned char *begin, size_t bytes, uint32_t time);

/* Why an access that lies in the space is wrong. */
typedef enum simt_verdict {
    SIMT_FINE,
    SIMT_NOT_OPEN,
    SIMT_AFTER_COPY, /* that is under way */
    SIMT_ON_BARRIER,
    SIMT_AFTER_WRITE,
    SIMT_AFTER_READ
} simt_verdict;

typedef struct simt_reason {
    simt_verdict verdict;
    uint32_t mark; /* of who was there before */
} simt_reason;

/* Notes an access; how: SIMT_READ or SIMT_WRITE, maybe with SIMT_STRONG. */
simt_reason simt_space_access(simt_space *space, const void *address, size_t bytes, int how,
                              const simt_actor *actor);
/* Says when who wrote there, after simt_space_access found that it may. */
void simt_space_date(simt_space *space, const void *address, size_t bytes, uint32_t mark,
                     uint32_t time);

/* ---- simt_run.c ----------------------------------------------------------------------------- */

typedef void (*simt_kernel)(nji_problem problem);

typedef struct simt_launch {
    simt_object *object;
    simt_kernel kernel;
    const char *name;
    simt_index blocks, threads;
    size_t dynamic_bytes; /* of shared memory */
    int is_dependent;     /* may begin before the kernels ahead of it have ended */
} simt_launch;

typedef enum simt_state {
    SIMT_READY,
    SIMT_AT_BARRIER,
    SIMT_AT_CLUSTER_BARRIER,
    SIMT_AT_WARP_BARRIER,
    SIMT_AT_EXCHANGE,
    SIMT_AT_PHASE, /* of a barrier in shared memory */
    SIMT_DONE,
    SIMT_STATES
} simt_state;

typedef struct simt_block simt_block;
typedef struct simt_cluster simt_cluster;

/* A copy of cp.async, from the instruction to the wait for it. */
typedef struct simt_copy {
    unsigned char *to;
    const void *from;
    size_t bytes, filled; /* filled: from the source; zeros follow */
    unsigned group;
} simt_copy;

/* A thread. */
typedef struct simt_fiber {
    ucontext_t begin;
    jmp_buf at;
    char *stack;
    int has_begun;
    void *shadow; /* of the address sanitizer */
    simt_state state;
    simt_thread place;
    simt_block *block;
    uint32_t number;          /* in the block */
    simt_actor actor;
    int has_waited;           /* for earlier kernels */
    /* What it waits with: */
    unsigned long long value; /* exchanged; at a barrier: a predicate */
    unsigned lane;            /* whose value it takes */
    int barrier;              /* its number */
    uint32_t expected;        /* threads at that barrier */
    uint32_t cluster_arrivals, cluster_waits;
    struct simt_fiber *next; /* who waits for the same phase */
    uint32_t phase;
    /* Its copies under way, oldest first, and its groups committed so far. */
    simt_copy *copies;
    int copy_count, copy_room;
    unsigned group;
} simt_fiber;

/* A barrier in shared memory (mbarrier). */
typedef struct simt_barrier {
    uint32_t offset; /* in the block's shared memory */
    uint32_t by, since,
        fenced; /* the thread that made it, when, and when it made that known; 0: not */
    uint32_t arrivals, pending; /* of a phase, and those that it lacks */
    int64_t bytes;  /* that the phase waits for; below 0 when they come before they are expected */
    uint32_t phase; /* that runs; counts */
    uint32_t under_way; /* copies */
    uint32_t arrived;   /* when the latest copy was complete; 0: none was */
    simt_signal arriving;
    simt_clock *passed; /* the phase before */
    simt_fiber *waiting;
} simt_barrier;

/* What is on its way to shared memory, and which barrier counts it. */
typedef struct simt_delivery {
    simt_block *block;
    uint32_t offset, bytes, barrier;
    const void *from; /* NULL: the value */
    unsigned char value[16];
    simt_actor sender; /* whose doings the barrier tells; clock held */
} simt_delivery;

struct simt_block {
    simt_cluster *cluster;
    uint32_t number, rank;
    simt_fiber **fibers;
    simt_space space;
    unsigned char *image; /* of its shared memory while another block's is in place */
    size_t image_room;
    uint32_t alive; /* threads that have not ended */
    int was_woken;  /* threads of it, since it had its turn */
    simt_barrier barriers[SIMT_BARRIERS];
    uint32_t barrier_count;
};

struct simt_cluster {
    uint32_t number;
    simt_fiber **fibers; /* block by block */
    uint32_t fiber_room;
    simt_block blocks[SIMT_CLUSTER];
    /* Its barrier: */
    uint32_t arrived, phase;
    simt_signal arriving;
    simt_clock *passed; /* the phase before */
    simt_delivery *deliveries;
    uint32_t delivery_count, delivery_room;
};

/* The launch that runs. */
typedef struct simt_machine {
    const simt_launch *launch;
    const nji_problem *problem;
    uint32_t block_threads, cluster_blocks;
    uint32_t block_marks; /* its threads and barriers, as clocks count them */
    uint32_t time;
    simt_fiber *current;
    simt_block *in_place; /* whose shared memory lies where the kernel sees it */
    int result;
} simt_machine;

extern simt_machine simt_now;

/* Runs every block. A CUresult; of a failure, fault says more. */
int simt_run(const simt_launch *launch, const nji_problem *problem, char *fault, size_t fault_size);

/* For simt_calls.c. Lets others go on; returns when the state is SIMT_READY again. */
void simt_wait(simt_state why);
/* Ends the launch: from a thread of it, with its name; and from anywhere. */
_Noreturn void simt_fault(int result, const char *format, ...);
void simt_fail(int result, const char *format, ...);
/* Of a block: what the program declares, and what the launch adds. */
size_t simt_shared_bytes(const simt_object *object, size_t dynamic_bytes);
/* Where a block's shared memory lies at the moment. */
unsigned char *simt_shared_of(const simt_block *block);

/* ---- simt_calls.c --------------------------------------------------------------------------- */

extern const simt_host simt_calls;

/* From now on each of the threads knows what all of them did. */
void simt_order(simt_fiber *const *group, uint32_t count);
/* Leaves all that the thread knows and did. */
void simt_leave(simt_signal *to, simt_actor *from);
void simt_learn(simt_actor *to, simt_clock *from);

/* Notes an access, or faults. */
void simt_judge(simt_space *space, const char *memory, const void *address, size_t bytes, int how,
                const simt_actor *actor);
void simt_judge_device(const void *address, size_t bytes, int how, const simt_actor *actor);
/* The block at whose shared memory the thread aims: rank and offset. Faults unless it
   may go there. */
simt_block *simt_aim(unsigned address, size_t bytes);
unsigned simt_offset_of(unsigned address);

/* ---- simt_async.c --------------------------------------------------------------------------- */

void simt_barrier_init(unsigned address, int arrivals);
void simt_barrier_fence(void);
void simt_barrier_arrive(unsigned address, int bytes);
void simt_barrier_wait(unsigned address, unsigned parity);
void simt_copy_bulk(unsigned to, const void *from, int bytes, unsigned barrier);
void simt_send(unsigned to, const void *value, size_t bytes, unsigned barrier);

/* Some of what is on its way arrives. 0 when there is nothing. */
int simt_deliver(simt_cluster *cluster);
/* Fails unless all that was sent to the block, which ends, has been waited for there. */
void simt_end_block(simt_block *block);
/* Forgets the barriers of the block's threads. */
void simt_barriers_clear(simt_block *block);
void simt_deliveries_clear(simt_cluster *cluster);

#endif
