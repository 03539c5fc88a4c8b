/* What a kernel's threads ask for: accesses, barriers, copies. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "simt_engine.h"

/* ---- order ---------------------------------------------------------------------------------- */

void simt_order(simt_fiber *const *group, uint32_t count) {
    const uint32_t time = ++simt_now.time;
    simt_clock *clock = NULL;
    uint32_t i;
    for (i = 0; i < count; i++) {
        if (i && group[i]->actor.clock == group[i - 1]->actor.clock) continue;
        simt_clock_set(&clock, simt_clock_join(clock, group[i]->actor.clock));
    }
    for (i = 0; i < count; i++) simt_clock_put(&clock, group[i]->actor.thread, time);
    for (i = 0; i < count; i++) {
        simt_clock_set(&group[i]->actor.clock, simt_clock_hold(clock));
        group[i]->actor.now = time;
    }
    simt_clock_drop(clock);
}

void simt_leave(simt_signal *to, simt_actor *from) {
    from->now = ++simt_now.time;
    if (!to->latest || to->latest != from->clock) {
        simt_clock_set(&to->clock, simt_clock_join(to->clock, from->clock));
        simt_clock_set(&to->latest, simt_clock_hold(from->clock));
    }
    simt_clock_put(&to->clock, from->thread, from->now);
}

void simt_learn(simt_actor *to, simt_clock *from) {
    simt_clock_set(&to->clock, simt_clock_join(to->clock, from));
}

/* ---- accesses ------------------------------------------------------------------------------- */

static int is_aligned(const void *address, size_t bytes) {
    return bytes > 16 || (bytes & (bytes - 1)) != 0 || (uintptr_t)address % bytes == 0;
}

static int is_of_barrier(uint32_t mark) {
    return mark % simt_now.block_marks >= simt_now.block_marks - SIMT_BARRIERS;
}

/* Who was there before. */
static const char *name_of(uint32_t mark) {
    static char name[96];
    const uint32_t block = mark / simt_now.block_marks, in_block = mark % simt_now.block_marks;
    const simt_cluster *cluster = simt_now.current->block->cluster;
    const simt_barrier *barrier = cluster->blocks[block % simt_now.cluster_blocks].barriers;
    if (is_of_barrier(mark)) {
        barrier += in_block - (simt_now.block_marks - SIMT_BARRIERS);
        snprintf(name, sizeof name, "a copy to block %u, counted by the barrier at +%u,", block,
                 barrier->offset);
    } else {
        snprintf(name, sizeof name, "thread %u of block %u", in_block, block);
    }
    return name;
}

void simt_judge(simt_space *space, const char *memory, const void *address, size_t bytes, int how,
                const simt_actor *actor) {
    const simt_reason reason = simt_space_access(space, address, bytes, how, actor);
    const char *verb = how & SIMT_WRITE ? "writes" : "reads";
    const size_t at = (size_t)((const unsigned char *)address - space->begin);
    switch (reason.verdict) {
    case SIMT_FINE: return;
    case SIMT_NOT_OPEN:
        simt_fault(SIMT_ILLEGAL_ADDRESS, "%s %zu bytes of %s memory at +%zu: no operand that it may %s",
                   verb, bytes, memory, at, how & SIMT_WRITE ? "write" : "read");
    case SIMT_AFTER_COPY:
        simt_fault(SIMT_ILLEGAL_ADDRESS, "%s %zu bytes of %s memory at +%zu: %s%s is under way",
                   verb, bytes, memory, at, is_of_barrier(reason.mark) ? "" : "a copy of ",
                   name_of(reason.mark));
    case SIMT_ON_BARRIER:
        simt_fault(SIMT_ILLEGAL_ADDRESS, "%s %zu bytes of %s memory at +%zu: a barrier lies there",
                   verb, bytes, memory, at);
    case SIMT_AFTER_WRITE:
    case SIMT_AFTER_READ:
        simt_fault(SIMT_ILLEGAL_ADDRESS,
                   "%s %zu bytes of %s memory at +%zu: %s %s, no barrier is between", verb, bytes,
                   memory, at, name_of(reason.mark),
                   reason.verdict == SIMT_AFTER_WRITE ? "wrote it" : "read it (and maybe others)");
    }
}

void simt_judge_device(const void *address, size_t bytes, int how, const simt_actor *actor) {
    simt_space *space = simt_memory_find(address, bytes);
    if (!space) {
        simt_fault(SIMT_ILLEGAL_ADDRESS, "%s %zu bytes at %p: no memory of the device",
                   how & SIMT_WRITE ? "writes" : "reads", bytes, address);
    }
    if (!simt_now.current->has_waited)
        simt_fault(SIMT_LAUNCH_FAILED, "touches device memory before it waits for earlier kernels");
    simt_judge(space, "device", address, bytes, how, actor);
}

static void on_access(const void *address, size_t bytes, int writes) {
    const simt_fiber *f = simt_now.current;
    const char *at = address;
    if (at >= f->stack && at < f->stack + SIMT_STACK) return;
    if (!is_aligned(address, bytes))
        simt_fault(SIMT_MISALIGNED_ADDRESS, "touches %zu bytes at %p", bytes, address);
    if (simt_space_holds(&f->block->space, address, bytes))
        simt_judge(&f->block->space, "shared", address, bytes, writes, &f->actor);
    else simt_judge_device(address, bytes, writes, &f->actor);
}

/* ---- barriers and exchange ------------------------------------------------------------------ */

static int on_barrier(int number, unsigned threads, int predicate) {
    simt_fiber *f = simt_now.current;
    if (number < 0 || number > 15 || threads % SIMT_WARP != 0 || threads > simt_now.block_threads)
        simt_fault(SIMT_LAUNCH_FAILED, "meets %u threads at barrier %d", threads, number);
    f->barrier = number;
    f->expected = threads ? threads : simt_now.block_threads;
    f->value = predicate != 0;
    simt_wait(SIMT_AT_BARRIER);
    return (int)f->value;
}

static void on_warp_barrier(unsigned mask) {
    if (mask != 0xffffffffu) simt_fault(SIMT_LAUNCH_FAILED, "meets only lanes %#x of its warp", mask);
    simt_wait(SIMT_AT_WARP_BARRIER);
}

static void on_cluster_arrive(void) {
    simt_fiber *f = simt_now.current;
    simt_cluster *cluster = f->block->cluster;
    const uint32_t threads = simt_now.block_threads * simt_now.cluster_blocks;
    uint32_t i;
    if (f->cluster_arrivals++ != f->cluster_waits)
        simt_fault(SIMT_LAUNCH_FAILED, "arrives at the cluster's barrier before it waits there");
    simt_leave(&cluster->arriving, &f->actor);
    if (++cluster->arrived < threads) return;
    simt_clock_set(&cluster->passed, simt_clock_hold(cluster->arriving.clock));
    simt_signal_clear(&cluster->arriving);
    cluster->arrived = 0;
    cluster->phase++;
    for (i = 0; i < threads; i++) {
        if (cluster->fibers[i]->state == SIMT_AT_CLUSTER_BARRIER) cluster->fibers[i]->state = SIMT_READY;
    }
}

static void on_cluster_wait(void) {
    simt_fiber *f = simt_now.current;
    const simt_cluster *cluster = f->block->cluster;
    if (++f->cluster_waits != f->cluster_arrivals)
        simt_fault(SIMT_LAUNCH_FAILED, "waits at the cluster's barrier before it arrives there");
    if (cluster->phase < f->cluster_waits) simt_wait(SIMT_AT_CLUSTER_BARRIER);
    simt_learn(&f->actor, cluster->passed);
}

static unsigned long long on_exchange(unsigned long long value, unsigned lane) {
    simt_fiber *f = simt_now.current;
    if (simt_now.block_threads % SIMT_WARP != 0 || lane >= SIMT_WARP)
        simt_fault(SIMT_LAUNCH_FAILED, "exchanges with a lane that does not exist");
    f->value = value;
    f->lane = lane;
    simt_wait(SIMT_AT_EXCHANGE);
    return f->value;
}

/* ---- the cluster's window on shared memory -------------------------------------------------- */

static unsigned on_shared_address(const void *address) {
    const simt_block *block = simt_now.current->block;
    if (!simt_space_holds(&block->space, address, 1))
        simt_fault(SIMT_ILLEGAL_ADDRESS, "takes %p for shared memory", address);
    return block->rank << SIMT_RANK_SHIFT |
           (unsigned)((const unsigned char *)address - block->space.begin);
}

unsigned simt_offset_of(unsigned address) {
    return address & ((1u << SIMT_RANK_SHIFT) - 1);
}

simt_block *simt_aim(unsigned address, size_t bytes) {
    const simt_block *here = simt_now.current->block;
    const unsigned rank = address >> SIMT_RANK_SHIFT;
    simt_block *there = &here->cluster->blocks[rank % SIMT_CLUSTER];
    if (rank >= simt_now.cluster_blocks || simt_offset_of(address) + bytes > there->space.bytes) {
        simt_fault(SIMT_ILLEGAL_ADDRESS, "aims at +%u of block %u of its cluster",
                   simt_offset_of(address), rank);
    }
    if (there != here && simt_now.current->cluster_waits == 0) {
        simt_fault(SIMT_LAUNCH_FAILED, "aims at block %u of its cluster, which may not have begun",
                   rank);
    }
    if (there->alive == 0)
        simt_fault(SIMT_ILLEGAL_ADDRESS, "aims at block %u of its cluster, which has ended", rank);
    if (!is_aligned(there->space.begin + simt_offset_of(address), bytes))
        simt_fault(SIMT_MISALIGNED_ADDRESS, "touches %zu bytes of shared memory at +%u", bytes,
                   simt_offset_of(address));
    return there;
}

static void on_store_cluster(unsigned address, const void *value, size_t bytes) {
    simt_block *there = simt_aim(address, bytes);
    simt_judge(&there->space, "its cluster's shared", there->space.begin + simt_offset_of(address),
               bytes, SIMT_WRITE, &simt_now.current->actor);
    memcpy(simt_shared_of(there) + simt_offset_of(address), value, bytes);
}

/* ---- copies that a thread waits for --------------------------------------------------------- */

static simt_copy *new_copy(simt_fiber *f) {
    if (f->copy_count == f->copy_room) {
        f->copy_room = 2 * f->copy_room + 8;
        f->copies = realloc(f->copies, (size_t)f->copy_room * sizeof *f->copies);
    }
    return &f->copies[f->copy_count++];
}

/* Its bytes arrive only when the thread waits: then a source that has changed shows, too. */
static void on_copy(unsigned to, const void *from, int bytes, int filled) {
    simt_fiber *f = simt_now.current;
    simt_block *block = simt_aim(to, (size_t)bytes);
    simt_copy *copy;
    if (block != f->block) simt_fault(SIMT_ILLEGAL_ADDRESS, "copies to another block");
    if (filled < 0 || filled > bytes || !is_aligned(from, (size_t)bytes))
        simt_fault(SIMT_MISALIGNED_ADDRESS, "copies %d of %d bytes from %p", filled, bytes, from);
    if (filled) simt_judge_device(from, (size_t)filled, SIMT_READ, &f->actor);
    copy = new_copy(f);
    copy->to = block->space.begin + simt_offset_of(to);
    copy->from = from;
    copy->bytes = (size_t)bytes;
    copy->filled = (size_t)filled;
    copy->group = f->group;
    simt_judge(&block->space, "shared", copy->to, copy->bytes, SIMT_WRITE, &f->actor);
    simt_space_date(&block->space, copy->to, copy->bytes, f->actor.thread, SIMT_UNDER_WAY);
}

static void on_commit_copies(void) {
    simt_now.current->group++;
}

static void end_copy(simt_fiber *f, const simt_copy *copy) {
    memcpy(copy->to, copy->from, copy->filled);
    memset(copy->to + copy->filled, 0, copy->bytes - copy->filled);
    simt_space_date(&f->block->space, copy->to, copy->bytes, f->actor.thread, f->actor.now);
}

static void on_wait_for_copies(int groups) {
    simt_fiber *f = simt_now.current;
    int ended = 0;
    while (ended < f->copy_count && (int)(f->group - f->copies[ended].group) > groups)
        end_copy(f, &f->copies[ended++]);
    if (ended == 0) return;
    f->copy_count -= ended;
    memmove(f->copies, f->copies + ended, (size_t)f->copy_count * sizeof *f->copies);
}

/* ---- earlier kernels, prefetch -------------------------------------------------------------- */

static void on_wait_for_earlier_kernels(void) {
    simt_now.current->has_waited = 1;
}

static void on_prefetch(unsigned long long address, long long bytes) {
    const void *from = (const void *)(uintptr_t)address;
    if (address % 16 != 0 || bytes % 16 != 0 || bytes <= 0)
        simt_fault(SIMT_MISALIGNED_ADDRESS, "prefetches %lld bytes at %p", bytes, from);
    if (!simt_memory_find(from, (size_t)bytes))
        simt_fault(SIMT_ILLEGAL_ADDRESS, "prefetches %lld bytes at %p", bytes, from);
}

const simt_host simt_calls = {on_access,          on_barrier,          on_warp_barrier,
                              on_cluster_arrive,  on_cluster_wait,     on_exchange,
                              on_shared_address,  on_store_cluster,    on_copy,
                              on_commit_copies,   on_wait_for_copies,  simt_barrier_init,
                              simt_barrier_fence, simt_barrier_arrive, simt_barrier_wait,
                              simt_copy_bulk,     simt_send,           on_wait_for_earlier_kernels,
                              on_prefetch};
