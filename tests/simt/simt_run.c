/* Runs a kernel: each thread of a block is a fiber that goes on until it waits for others. Clusters (a
   block where there are none) run one after the other; the next begins early when those that have begun
   cannot go on. One segment of shared memory serves all blocks, which exchange its content. The order in
   which threads get their turn changes from turn to turn, upwards and downwards. */
#undef _FORTIFY_SOURCE /* its longjmp takes another fiber's stack for an error */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "simt_engine.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

enum { PAGE = 4096 };

simt_machine simt_now;

static struct {
    jmp_buf scheduler;
    void *shadow;
    const void *stack; /* the scheduler's */
    size_t stack_bytes;
    unsigned turn;
    simt_cluster **clusters; /* those that run, then spare ones; kept from launch to launch */
    uint32_t running, made, room;
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
static void resume(simt_fiber *f) {
    simt_now.current = f;
    simt_now.launch->object->thread = &f->place;
    leave_stack(&run.shadow, f->stack, SIMT_STACK);
    if (_setjmp(run.scheduler) == 0) {
        if (f->has_begun) _longjmp(f->at, 1);
        f->has_begun = 1;
        setcontext(&f->begin);
    }
    enter_stack(run.shadow, NULL, NULL);
    if (f->state == SIMT_DONE) f->block->alive--;
}

/* Back to the scheduler; returns when the fiber is resumed. */
void simt_wait(simt_state why) {
    simt_fiber *f = simt_now.current;
    f->state = why;
    leave_stack(&f->shadow, run.stack, run.stack_bytes);
    if (_setjmp(f->at) == 0) _longjmp(run.scheduler, 1);
    enter_stack(simt_now.current->shadow, NULL, NULL);
}

/* A fiber runs one thread after the other, launch after launch. */
static void fiber_main(void) {
    enter_stack(NULL, &run.stack, &run.stack_bytes);
    for (;;) {
        simt_now.launch->kernel(*simt_now.problem);
        simt_wait(SIMT_DONE);
    }
}

/* With a page that nobody may touch below its end. */
static char *make_stack(void) {
    char *stack = mmap(NULL, PAGE + SIMT_STACK, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED || mprotect(stack, PAGE, PROT_NONE) != 0) return NULL;
    return stack + PAGE;
}

static simt_fiber *make_fiber(void) {
    simt_fiber *made = calloc(1, sizeof *made);
    made->stack = make_stack();
    return made->stack ? made : NULL;
}

static int make_fibers(simt_cluster *of, uint32_t count) {
    if (count > of->fiber_room) {
        of->fibers = realloc(of->fibers, count * sizeof(simt_fiber *));
        memset(of->fibers + of->fiber_room, 0, (count - of->fiber_room) * sizeof(simt_fiber *));
        of->fiber_room = count;
    }
    while (count--) {
        if (!of->fibers[count]) of->fibers[count] = make_fiber();
        if (!of->fibers[count]) return 0;
    }
    return 1;
}

/* Ready for a new thread, whatever became of the one before. */
static void renew(simt_fiber *f) {
    if (!f->has_begun || f->state != SIMT_DONE) {
        getcontext(&f->begin);
        f->begin.uc_stack.ss_sp = f->stack;
        f->begin.uc_stack.ss_size = SIMT_STACK;
        f->begin.uc_link = NULL;
        makecontext(&f->begin, fiber_main, 0);
        f->has_begun = 0;
    }
    f->state = SIMT_READY;
    f->has_waited = !simt_now.launch->is_dependent;
    f->actor.now = simt_now.time;
    simt_clock_set(&f->actor.clock, NULL);
    f->cluster_arrivals = f->cluster_waits = 0;
    f->copy_count = 0;
    f->group = 0;
}

/* ---- faults --------------------------------------------------------------------------------- */

void simt_fail(int result, const char *format, ...) {
    va_list list;
    int length = snprintf(run.fault, run.fault_size, "%s: ", simt_now.launch->name);
    va_start(list, format);
    vsnprintf(run.fault + length, run.fault_size - (size_t)length, format, list);
    va_end(list);
    simt_now.result = result;
}

void simt_fault(int result, const char *format, ...) {
    const simt_fiber *f = simt_now.current;
    char what[320];
    va_list list;
    va_start(list, format);
    vsnprintf(what, sizeof what, format, list);
    va_end(list);
    simt_fail(result, "thread %u of block (%u, %u) %s", f->number, f->place.block.x,
              f->place.block.y, what);
    for (;;) simt_wait(SIMT_READY); /* it is not resumed */
}

/* ---- shared memory -------------------------------------------------------------------------- */

size_t simt_shared_bytes(const simt_object *object, size_t dynamic_bytes) {
    const int is_dynamic = dynamic_bytes > 0 && object->dynamic_begin != object->dynamic_end;
    return (size_t)(is_dynamic ? object->dynamic_begin + dynamic_bytes - object->shared_begin
                               : object->shared_end - object->shared_begin);
}

unsigned char *simt_shared_of(const simt_block *block) {
    return block == simt_now.in_place ? block->space.begin : block->image;
}

static void put_in_place(simt_block *block) {
    simt_block *before = simt_now.in_place;
    if (block == before) return;
    if (before) memcpy(before->image, before->space.begin, before->space.bytes);
    memcpy(block->space.begin, block->image, block->space.bytes);
    simt_now.in_place = block;
}

/* Poisoned: all ones, a NaN of every type. */
static void begin_shared(simt_block *block, const simt_launch *launch) {
    const simt_object *object = launch->object;
    const size_t bytes = simt_shared_bytes(object, launch->dynamic_bytes);
    if (bytes > block->image_room) {
        free(block->image);
        block->image = malloc(bytes);
        block->image_room = bytes;
    }
    if (bytes) memset(block->image, 0xFF, bytes);
    simt_space_reset(&block->space, (unsigned char *)object->shared_begin, bytes, simt_now.time);
}

/* ---- a block -------------------------------------------------------------------------------- */

/* 0, 1, ... or ..., 1, 0: what the i-th to have its turn is. */
static uint32_t turn_of(uint32_t i, uint32_t count, unsigned turn) {
    return turn & 1 ? count - 1 - i : i;
}

static int all_are(simt_fiber *const *fibers, uint32_t count, simt_state wanted) {
    uint32_t i;
    for (i = 0; i < count; i++) {
        if (fibers[i]->state != wanted) return 0;
    }
    return 1;
}

static void release(simt_fiber *const *fibers, uint32_t count) {
    uint32_t i;
    for (i = 0; i < count; i++) fibers[i]->state = SIMT_READY;
}

static void exchange(simt_fiber *const *warp) {
    unsigned long long value[SIMT_WARP];
    int lane;
    for (lane = 0; lane < SIMT_WARP; lane++) value[lane] = warp[lane]->value;
    for (lane = 0; lane < SIMT_WARP; lane++) warp[lane]->value = value[warp[lane]->lane];
}

/* Runs a warp until its lanes wait for other warps. 1 when any of them did anything. */
static int run_warp(simt_fiber *const *warp, uint32_t lanes) {
    const unsigned turn = run.turn++;
    int moved = 0;
    for (;;) {
        uint32_t i;
        for (i = 0; i < lanes; i++) {
            simt_fiber *f = warp[turn_of(i, lanes, turn)];
            if (f->state != SIMT_READY) continue;
            resume(f);
            moved = 1;
            if (simt_now.result) return 1;
        }
        if (all_are(warp, lanes, SIMT_AT_EXCHANGE)) exchange(warp);
        else if (all_are(warp, lanes, SIMT_AT_WARP_BARRIER)) simt_order(warp, lanes);
        else return moved;
        release(warp, lanes);
    }
}

/* Opens a barrier that all have reached who take part, the first of whom is given. */
static int open_barrier(const simt_block *block, const simt_fiber *first) {
    simt_fiber *group[SIMT_THREADS] = {NULL};
    uint32_t count = 0, i;
    int all = 1;
    for (i = 0; i < simt_now.block_threads; i++) {
        simt_fiber *f = block->fibers[i];
        if (f->state != SIMT_AT_BARRIER || f->barrier != first->barrier) continue;
        group[count++] = f;
        all &= f->value != 0;
    }
    if (count < first->expected) return 0;
    for (i = 0; i < count; i++) {
        if (count != group[i]->expected) {
            simt_fail(SIMT_LAUNCH_FAILED,
                      "%u threads of block %u are at barrier %d, one expects %u", count,
                      block->number, first->barrier, group[i]->expected);
            return 0;
        }
        group[i]->value = (unsigned long long)all;
    }
    simt_order(group, count);
    release(group, count);
    return 1;
}

static int open_barriers(const simt_block *block) {
    int opened = 0;
    uint32_t i;
    for (i = 0; i < simt_now.block_threads && !simt_now.result; i++) {
        const simt_fiber *f = block->fibers[i];
        if (f->state == SIMT_AT_BARRIER) opened |= open_barrier(block, f);
    }
    return opened;
}

/* Runs a block until its threads wait for other blocks. */
static int run_block(simt_block *block) {
    const uint32_t threads = simt_now.block_threads, warps = (threads + SIMT_WARP - 1) / SIMT_WARP;
    int moved = 0;
    put_in_place(block);
    do {
        const unsigned turn = run.turn++ / 2;
        uint32_t i;
        block->was_woken = 0;
        for (i = 0; i < warps && !simt_now.result; i++) {
            const uint32_t first = SIMT_WARP * turn_of(i, warps, turn), left = threads - first;
            moved |= run_warp(block->fibers + first, left < SIMT_WARP ? left : SIMT_WARP);
        }
    } while (!simt_now.result && (open_barriers(block) || block->was_woken));
    if (block->alive == 0 && moved && !simt_now.result) simt_end_block(block);
    return moved;
}

/* ---- clusters ------------------------------------------------------------------------------- */

static uint32_t cluster_threads(void) {
    return simt_now.block_threads * simt_now.cluster_blocks;
}

/* What the phase lacks that a thread waits for. */
static void describe_phase(const simt_fiber *f, char *text, size_t size) {
    const simt_barrier *barrier = &f->block->barriers[f->barrier];
    snprintf(
        text, size,
        ": thread %u of block %u at the barrier at +%u, which lacks %u arrivals and %lld bytes",
        f->number, f->block->number, barrier->offset, barrier->pending, (long long)barrier->bytes);
}

/* All threads are stuck, or some ended while others wait for them. */
static void report_deadlock(const simt_cluster *cluster) {
    uint32_t count[SIMT_STATES] = {0}, i;
    char wanted[200] = "";
    for (i = 0; i < cluster_threads(); i++) {
        const simt_fiber *f = cluster->fibers[i];
        if (f->state == SIMT_AT_PHASE && count[SIMT_AT_PHASE] == 0)
            describe_phase(f, wanted, sizeof wanted);
        count[f->state]++;
    }
    simt_fail(
        SIMT_LAUNCH_FAILED,
        "block or cluster %u hangs: %u threads wait at a barrier, %u at one of the cluster, %u to "
        "exchange within their warp, %u for their warp, %u have ended, %u wait for a phase%s",
        cluster->number, count[SIMT_AT_BARRIER], count[SIMT_AT_CLUSTER_BARRIER],
        count[SIMT_AT_EXCHANGE], count[SIMT_AT_WARP_BARRIER], count[SIMT_DONE],
        count[SIMT_AT_PHASE], wanted);
}

/* Runs a cluster until its threads wait for other clusters, or have ended. */
static void run_cluster(simt_cluster *cluster) {
    int moved = 1;
    while (moved && !simt_now.result) {
        const unsigned turn = run.turn / 4;
        uint32_t i;
        moved = 0;
        for (i = 0; i < simt_now.cluster_blocks && !simt_now.result; i++)
            moved |= run_block(&cluster->blocks[turn_of(i, simt_now.cluster_blocks, turn)]);
        if (!moved && !simt_now.result) moved = simt_deliver(cluster);
    }
}

static void begin_block(simt_block *block, const simt_launch *launch) {
    const uint32_t threads = simt_now.block_threads;
    uint32_t i;
    begin_shared(block, launch);
    simt_barriers_clear(block);
    block->alive = threads;
    block->fibers = block->cluster->fibers + block->rank * threads;
    for (i = 0; i < threads; i++) {
        simt_fiber *f = block->fibers[i];
        renew(f);
        f->block = block;
        f->number = i;
        f->actor.thread = f->actor.mark = block->number * simt_now.block_marks + i;
        f->place.threads = launch->threads;
        f->place.blocks = launch->blocks;
        f->place.block.x = block->number % launch->blocks.x;
        f->place.block.y = block->number / launch->blocks.x;
        f->place.block.z = 0;
        f->place.thread.x = i % launch->threads.x;
        f->place.thread.y = i / launch->threads.x;
        f->place.thread.z = 0;
    }
}

/* The next to run; NULL: there is no memory for it. */
static simt_cluster *new_cluster(void) {
    simt_cluster *made;
    if (run.running == run.room) {
        run.room = 2 * run.room + 8;
        run.clusters = realloc(run.clusters, run.room * sizeof(simt_cluster *));
    }
    if (run.running == run.made) run.clusters[run.made++] = calloc(1, sizeof *made);
    made = run.clusters[run.running];
    if (!make_fibers(made, cluster_threads())) return NULL;
    run.running++;
    return made;
}

static void begin_cluster(uint32_t number) {
    simt_cluster *cluster = new_cluster();
    uint32_t rank;
    if (!cluster) {
        simt_fail(SIMT_LAUNCH_FAILED, "no memory for the stacks of fibers");
        return;
    }
    simt_now.time++;
    cluster->number = number;
    cluster->arrived = cluster->phase = 0;
    simt_signal_clear(&cluster->arriving);
    simt_clock_set(&cluster->passed, NULL);
    simt_deliveries_clear(cluster);
    for (rank = 0; rank < simt_now.cluster_blocks; rank++) {
        simt_block *block = &cluster->blocks[rank];
        block->cluster = cluster;
        block->rank = rank;
        block->number = number * simt_now.cluster_blocks + rank;
        begin_block(block, simt_now.launch);
    }
}

static void end_cluster(uint32_t index) {
    simt_cluster *ended = run.clusters[index];
    simt_now.in_place = NULL;
    run.clusters[index] = run.clusters[--run.running];
    run.clusters[run.running] = ended;
}

int simt_run(const simt_launch *launch, const nji_problem *problem, char *fault, size_t fault_size) {
    const uint32_t clusters = launch->blocks.x * launch->blocks.y / (uint32_t)launch->object->cluster;
    uint32_t next;
    simt_now.launch = launch;
    simt_now.problem = problem;
    simt_now.block_threads = launch->threads.x * launch->threads.y;
    simt_now.block_marks = (simt_now.block_threads + SIMT_BARRIERS + 255) / 256 * 256;
    simt_now.cluster_blocks = (uint32_t)launch->object->cluster;
    simt_now.in_place = NULL;
    simt_now.result = SIMT_SUCCESS;
    run.fault = fault;
    run.fault_size = fault_size;
    run.running = 0;
    if (simt_now.cluster_blocks > SIMT_CLUSTER || launch->blocks.x % simt_now.cluster_blocks != 0) {
        simt_fail(SIMT_INVALID_VALUE, "%u blocks in clusters of %u", launch->blocks.x,
                  simt_now.cluster_blocks);
        return simt_now.result;
    }
    launch->object->host = &simt_calls;
    simt_memory_open(launch->object, problem, strstr(launch->name, "forward") != NULL, ++simt_now.time);
    for (next = 0; next < clusters && !simt_now.result; next++) {
        begin_cluster(next);
        if (simt_now.result) break;
        run_cluster(run.clusters[0]);
        if (simt_now.result) break;
        if (all_are(run.clusters[0]->fibers, cluster_threads(), SIMT_DONE)) end_cluster(0);
        else report_deadlock(run.clusters[0]);
    }
    return simt_now.result;
}
