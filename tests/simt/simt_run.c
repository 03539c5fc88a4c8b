/* Runs a kernel: each thread of a block is a fiber that goes on until it waits for others. Blocks (and
   clusters) take turns, so one segment of shared memory serves all; the blocks of a cluster exchange its
   content. The order in which threads get their turn changes from turn to turn, upwards and downwards. */
#undef _FORTIFY_SOURCE /* its longjmp takes another fiber's stack for an error */
#define _GNU_SOURCE
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include "simt_engine.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

enum { WARP = 32, CLUSTER = 8 /* blocks at most */, THREADS = 1024, STACK_BYTES = 128 << 10, PAGE = 4096 };

typedef enum state { READY, AT_BARRIER, AT_CLUSTER_BARRIER, AT_EXCHANGE, DONE } state;

typedef struct fiber {
    ucontext_t begin;
    jmp_buf at;
    char *stack;
    int has_begun;
    void *shadow; /* of the address sanitizer */
    state state;
    simt_thread place;
    uint32_t thread;          /* number in the block */
    int rank;                 /* of its block in the cluster */
    int has_waited;           /* for earlier kernels */
    unsigned long long value; /* exchanged */
    unsigned mask;
} fiber;

static struct {
    const simt_launch *launch;
    const nji_problem *problem;
    uint32_t block_threads, cluster_blocks;
    fiber *fibers; /* of a cluster, block by block; kept from launch to launch */
    fiber *current;
    jmp_buf scheduler;
    void *shadow;
    const void *stack; /* the scheduler's */
    size_t stack_bytes;
    uint32_t time, cluster, block_time[CLUSTER], cluster_time;
    uint32_t cluster_begin; /* the cluster's time before its first barrier */
    unsigned turn;
    unsigned char *shared[CLUSTER]; /* of the blocks whose turn it is not */
    size_t shared_room;
    simt_space shared_space[CLUSTER];
    int result;
    char *fault;
    size_t fault_size;
} run;

/* ---- fibers --------------------------------------------------------------------------------- */

#ifdef __SANITIZE_ADDRESS__
static void leave_stack(void **shadow, const void *to, size_t bytes) {
    __sanitizer_start_switch_fiber(shadow, to, bytes);
}
static void enter_stack(void *shadow, const void **from, size_t *bytes) {
    __sanitizer_finish_switch_fiber(shadow, from, bytes);
}
#else
static void leave_stack(void **shadow, const void *to, size_t bytes) {
    (void)shadow, (void)to, (void)bytes;
}
static void enter_stack(void *shadow, const void **from, size_t *bytes) {
    (void)shadow, (void)from, (void)bytes;
}
#endif

/* Lets a fiber go on until it waits or ends. */
static void resume(fiber *f) {
    run.current = f;
    run.launch->object->thread = &f->place;
    leave_stack(&run.shadow, f->stack, STACK_BYTES);
    if (_setjmp(run.scheduler) == 0) {
        if (f->has_begun) _longjmp(f->at, 1);
        f->has_begun = 1;
        setcontext(&f->begin);
    }
    enter_stack(run.shadow, NULL, NULL);
}

/* Back to the scheduler; returns when the fiber is resumed. */
static void wait_in(state why) {
    fiber *f = run.current;
    f->state = why;
    leave_stack(&f->shadow, run.stack, run.stack_bytes);
    if (_setjmp(f->at) == 0) _longjmp(run.scheduler, 1);
    enter_stack(run.current->shadow, NULL, NULL);
}

/* A fiber runs one thread after the other, launch after launch. */
static void fiber_main(void) {
    enter_stack(NULL, &run.stack, &run.stack_bytes);
    for (;;) {
        run.launch->kernel(*run.problem);
        wait_in(DONE);
    }
}

/* With a page that nobody may touch below its end. */
static char *make_stack(void) {
    char *stack = mmap(NULL, PAGE + STACK_BYTES, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED || mprotect(stack, PAGE, PROT_NONE) != 0) return NULL;
    return stack + PAGE;
}

static int make_fibers(uint32_t count) {
    uint32_t i;
    if (!run.fibers) run.fibers = calloc(CLUSTER * THREADS, sizeof *run.fibers);
    for (i = 0; run.fibers && i < count; i++) {
        if (!run.fibers[i].stack) run.fibers[i].stack = make_stack();
        if (!run.fibers[i].stack) return 0;
    }
    return run.fibers != NULL;
}

/* Ready for a new thread, whatever became of the one before. */
static void renew(fiber *f) {
    if (!f->has_begun || f->state != DONE) {
        getcontext(&f->begin);
        f->begin.uc_stack.ss_sp = f->stack;
        f->begin.uc_stack.ss_size = STACK_BYTES;
        f->begin.uc_link = NULL;
        makecontext(&f->begin, fiber_main, 0);
        f->has_begun = 0;
    }
    f->state = READY;
    f->has_waited = !run.launch->is_dependent;
}

/* ---- faults --------------------------------------------------------------------------------- */

static void fail(int result, const char *format, ...) {
    va_list list;
    int length = snprintf(run.fault, run.fault_size, "%s: ", run.launch->name);
    va_start(list, format);
    vsnprintf(run.fault + length, run.fault_size - (size_t)length, format, list);
    va_end(list);
    run.result = result;
}

/* Ends the launch from a thread of it. */
static _Noreturn void fail_thread(int result, const char *format, ...) {
    const fiber *f = run.current;
    char what[320];
    va_list list;
    va_start(list, format);
    vsnprintf(what, sizeof what, format, list);
    va_end(list);
    fail(result, "thread %u of block (%u, %u) %s", f->thread, f->place.block.x, f->place.block.y, what);
    for (;;) wait_in(READY); /* it is not resumed */
}

/* ---- what the kernel calls ------------------------------------------------------------------ */

static uint32_t block_number(const fiber *f) {
    return f->place.block.x + f->place.block.y * f->place.blocks.x;
}

static simt_actor actor_of(const fiber *f) {
    simt_actor actor;
    actor.block = block_number(f);
    actor.thread = actor.block * run.block_threads + f->thread;
    actor.cluster = run.cluster;
    actor.block_time = run.block_time[f->rank];
    actor.cluster_time = run.cluster_time;
    actor.block_threads = run.block_threads;
    actor.cluster_blocks = run.cluster_blocks;
    return actor;
}

static int is_aligned(const void *address, size_t bytes) {
    return bytes > 16 || (bytes & (bytes - 1)) != 0 || (uintptr_t)address % bytes == 0;
}

static void judge(simt_space *space, const char *memory, const void *address, size_t bytes, int writes) {
    const simt_actor actor = actor_of(run.current);
    char reason[160];
    if (!simt_space_access(space, address, bytes, writes, &actor, reason, sizeof reason)) {
        fail_thread(SIMT_ILLEGAL_ADDRESS, "%s %zu bytes of %s memory at +%zu: %s",
                    writes ? "writes" : "reads", bytes, memory,
                    (size_t)((const unsigned char *)address - space->begin), reason);
    }
}

static void on_access(const void *address, size_t bytes, int writes) {
    const fiber *f = run.current;
    const char *at = address;
    simt_space *space = &run.shared_space[f->rank];
    if (at >= f->stack && at < f->stack + STACK_BYTES) return;
    if (!is_aligned(address, bytes))
        fail_thread(SIMT_MISALIGNED_ADDRESS, "touches %zu bytes at %p", bytes, address);
    if (simt_space_holds(space, address, bytes)) {
        judge(space, "shared", address, bytes, writes);
        return;
    }
    space = simt_memory_find(address, bytes);
    if (!space) {
        fail_thread(SIMT_ILLEGAL_ADDRESS, "%s %zu bytes at %p: no memory of the device",
                    writes ? "writes" : "reads", bytes, address);
    }
    if (!f->has_waited) {
        fail_thread(SIMT_LAUNCH_FAILED, "touches device memory before it waits for earlier kernels");
    }
    judge(space, "device", address, bytes, writes);
}

static void on_barrier(void) {
    wait_in(AT_BARRIER);
}

static void on_cluster_barrier(void) {
    wait_in(AT_CLUSTER_BARRIER);
}

static unsigned long long on_exchange(unsigned long long value, unsigned mask) {
    fiber *f = run.current;
    if (run.block_threads % WARP != 0 || mask >= WARP)
        fail_thread(SIMT_LAUNCH_FAILED, "exchanges with a lane that does not exist");
    f->value = value;
    f->mask = mask;
    wait_in(AT_EXCHANGE);
    return f->value;
}

static unsigned on_shared_address(const void *address) {
    const simt_space *space = &run.shared_space[run.current->rank];
    if (!simt_space_holds(space, address, 1))
        fail_thread(SIMT_ILLEGAL_ADDRESS, "takes %p for shared memory", address);
    return (unsigned)run.current->rank << SIMT_RANK_SHIFT |
           (unsigned)((const unsigned char *)address - space->begin);
}

static void on_store_cluster(unsigned address, const void *value, size_t bytes) {
    const unsigned rank = address >> SIMT_RANK_SHIFT, offset = address & ((1u << SIMT_RANK_SHIFT) - 1);
    simt_space *space;
    unsigned char *to;
    if (rank >= run.cluster_blocks || offset + bytes > run.shared_space[rank].bytes) {
        fail_thread(SIMT_ILLEGAL_ADDRESS, "writes +%u of block %u of its cluster", offset, rank);
    }
    if ((int)rank != run.current->rank && run.cluster_time == run.cluster_begin)
        fail_thread(SIMT_LAUNCH_FAILED, "writes to block %u of its cluster, which may not have begun", rank);
    space = &run.shared_space[rank];
    judge(space, "its cluster's shared", space->begin + offset, bytes, 1);
    to = (int)rank == run.current->rank ? space->begin : run.shared[rank];
    memcpy(to + offset, value, bytes);
}

static void on_wait(void) {
    run.current->has_waited = 1;
}

static void on_prefetch(unsigned long long address, long long bytes) {
    const void *from = (const void *)(uintptr_t)address;
    if (address % 16 != 0 || bytes % 16 != 0 || bytes <= 0)
        fail_thread(SIMT_MISALIGNED_ADDRESS, "prefetches %lld bytes at %p", bytes, from);
    if (!simt_memory_find(from, (size_t)bytes))
        fail_thread(SIMT_ILLEGAL_ADDRESS, "prefetches %lld bytes at %p", bytes, from);
}

static const simt_host host = {on_access,         on_barrier,       on_cluster_barrier, on_exchange,
                               on_shared_address, on_store_cluster, on_wait,            on_prefetch};

/* ---- the scheduler -------------------------------------------------------------------------- */

/* 0, 1, ... or ..., 1, 0: what the i-th to have its turn is. */
static uint32_t turn_of(uint32_t i, uint32_t count, unsigned turn) {
    return turn & 1 ? count - 1 - i : i;
}

static int all_are(const fiber *fibers, uint32_t count, state wanted) {
    uint32_t i;
    for (i = 0; i < count; i++) {
        if (fibers[i].state != wanted) return 0;
    }
    return 1;
}

static void release(fiber *fibers, uint32_t count) {
    uint32_t i;
    for (i = 0; i < count; i++) fibers[i].state = READY;
}

static void exchange(fiber *warp) {
    unsigned long long value[WARP];
    int lane;
    for (lane = 0; lane < WARP; lane++) value[lane] = warp[lane].value;
    for (lane = 0; lane < WARP; lane++) warp[lane].value = value[(unsigned)lane ^ warp[lane].mask];
}

/* Runs a warp until its lanes wait for other warps. 1 when any of them did anything. */
static int run_warp(fiber *warp, uint32_t lanes) {
    const unsigned turn = run.turn++;
    int moved = 0;
    for (;;) {
        uint32_t i;
        for (i = 0; i < lanes; i++) {
            fiber *f = &warp[turn_of(i, lanes, turn)];
            if (f->state != READY) continue;
            resume(f);
            moved = 1;
            if (run.result) return 1;
        }
        if (!all_are(warp, lanes, AT_EXCHANGE)) return moved;
        exchange(warp);
        release(warp, lanes);
    }
}

/* Runs a block until its threads wait for other blocks. */
static int run_block(int rank) {
    fiber *fibers = run.fibers + (uint32_t)rank * run.block_threads;
    const uint32_t warps = (run.block_threads + WARP - 1) / WARP;
    int moved = 0;
    for (;;) {
        const unsigned turn = run.turn++ / 2;
        uint32_t i;
        for (i = 0; i < warps; i++) {
            const uint32_t first = WARP * turn_of(i, warps, turn), left = run.block_threads - first;
            moved |= run_warp(fibers + first, left < WARP ? left : WARP);
            if (run.result) return 1;
        }
        if (!all_are(fibers, run.block_threads, AT_BARRIER)) return moved;
        release(fibers, run.block_threads);
        run.block_time[rank] = ++run.time;
    }
}

static void exchange_shared(int rank, int enters) {
    simt_space *space = &run.shared_space[rank];
    if (run.cluster_blocks == 1 || space->bytes == 0) return;
    if (enters) memcpy(space->begin, run.shared[rank], space->bytes);
    else memcpy(run.shared[rank], space->begin, space->bytes);
}

static void pass_cluster_barrier(void) {
    uint32_t rank;
    release(run.fibers, run.block_threads * run.cluster_blocks);
    run.cluster_time = ++run.time;
    for (rank = 0; rank < run.cluster_blocks; rank++) run.block_time[rank] = run.time;
}

/* All threads are stuck, or some ended while others wait for them. */
static void report_deadlock(void) {
    uint32_t count[DONE + 1] = {0}, i;
    for (i = 0; i < run.block_threads * run.cluster_blocks; i++) count[run.fibers[i].state]++;
    fail(SIMT_LAUNCH_FAILED,
         "block or cluster %u hangs: %u threads wait at a barrier, %u at one of the cluster, %u to "
         "exchange within their warp, %u have ended",
         run.cluster, count[AT_BARRIER], count[AT_CLUSTER_BARRIER], count[AT_EXCHANGE], count[DONE]);
}

static void run_cluster(void) {
    const uint32_t threads = run.block_threads * run.cluster_blocks;
    while (!run.result && !all_are(run.fibers, threads, DONE)) {
        const unsigned turn = run.turn / 4;
        int moved = 0, i;
        for (i = 0; i < (int)run.cluster_blocks && !run.result; i++) {
            const int rank = (int)turn_of((uint32_t)i, run.cluster_blocks, turn);
            exchange_shared(rank, 1);
            moved |= run_block(rank);
            exchange_shared(rank, 0);
        }
        if (run.result) return;
        if (all_are(run.fibers, threads, AT_CLUSTER_BARRIER)) pass_cluster_barrier();
        else if (!moved) report_deadlock();
    }
}

/* Shared memory is poisoned: all ones, a NaN of every type. */
static void begin_block(const simt_launch *launch, int rank, simt_index block) {
    const simt_object *object = launch->object;
    const size_t bytes = (size_t)(object->shared_end - object->shared_begin);
    void *shared = run.cluster_blocks == 1 ? (void *)object->shared_begin : run.shared[rank];
    uint32_t i;
    if (bytes) memset(shared, 0xFF, bytes);
    simt_space_reset(&run.shared_space[rank], (unsigned char *)object->shared_begin, bytes, run.time);
    run.block_time[rank] = run.time;
    for (i = 0; i < run.block_threads; i++) {
        fiber *f = &run.fibers[(uint32_t)rank * run.block_threads + i];
        renew(f);
        f->rank = rank;
        f->thread = i;
        f->place.threads = launch->threads;
        f->place.blocks = launch->blocks;
        f->place.block = block;
        f->place.thread.x = i % launch->threads.x;
        f->place.thread.y = i / launch->threads.x;
        f->place.thread.z = 0;
    }
}

static void make_shared(size_t bytes) {
    int rank;
    if (bytes <= run.shared_room) return;
    for (rank = 0; rank < CLUSTER; rank++) {
        free(run.shared[rank]);
        run.shared[rank] = malloc(bytes);
    }
    run.shared_room = bytes;
}

int simt_run(const simt_launch *launch, const nji_problem *problem, char *fault, size_t fault_size) {
    simt_index block = {0, 0, 0};
    run.launch = launch;
    run.problem = problem;
    run.fault = fault;
    run.fault_size = fault_size;
    run.block_threads = launch->threads.x * launch->threads.y;
    run.cluster_blocks = (uint32_t)launch->object->cluster;
    run.result = SIMT_SUCCESS;
    if (run.cluster_blocks > CLUSTER || launch->blocks.x % run.cluster_blocks != 0) {
        fail(SIMT_INVALID_VALUE, "%u blocks in clusters of %u", launch->blocks.x, run.cluster_blocks);
        return run.result;
    }
    if (!make_fibers(run.block_threads * run.cluster_blocks)) {
        fail(SIMT_LAUNCH_FAILED, "no memory for the stacks of fibers");
        return run.result;
    }
    launch->object->host = &host;
    make_shared((size_t)(launch->object->shared_end - launch->object->shared_begin));
    simt_memory_open(launch->object, problem, strstr(launch->name, "forward") != NULL, ++run.time);
    for (run.cluster = 0; block.y < launch->blocks.y && !run.result; block.y++) {
        for (block.x = 0; block.x < launch->blocks.x && !run.result; run.cluster++) {
            int rank;
            run.cluster_time = run.cluster_begin = ++run.time;
            for (rank = 0; rank < (int)run.cluster_blocks; rank++, block.x++)
                begin_block(launch, rank, block);
            run_cluster();
        }
    }
    return run.result;
}
