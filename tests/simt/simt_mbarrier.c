/* Barriers in shared memory that count arrivals and bytes, and the copies that bring the bytes. A copy
   ends as late as it may: when somebody waits for it. */
#include <stdlib.h>
#include <string.h>

#include "simt_engine.h"

enum { BARRIER_BYTES = 8, PIECE = 16 /* bytes: of bulk copies and their addresses */ };

struct simt_mbarrier {
    simt_block *block;
    uint32_t arrivals, missing; /* of a phase; still to come */
    int64_t bytes;              /* still to come; those that came too early count below 0 */
    uint32_t phase, waiting;
    simt_signal arriving;
    simt_clock *passed; /* the phase before */
};

/* A copy under way. */
typedef struct delivery {
    simt_mbarrier *barrier;
    size_t at, bytes; /* in the block's shared memory */
    const void *from; /* global memory; NULL: the value */
    unsigned char value[PIECE];
    uint32_t thread, began, told; /* when its thread began it; what it did before `told` is known */
    simt_clock *clock;            /* what it knew */
} delivery;

/* Of the cluster that runs. */
static struct {
    simt_mbarrier **at[SIMT_CLUSTER]; /* by the offset */
    size_t room[SIMT_CLUSTER];
    delivery *list;
    uint32_t count, list_room;
} now;

/* ---- barriers ------------------------------------------------------------------------------- */

static void free_barrier(simt_mbarrier *barrier) {
    if (!barrier) return;
    simt_signal_clear(&barrier->arriving);
    simt_clock_set(&barrier->passed, NULL);
    free(barrier);
}

void simt_mbarriers_begin(void) {
    uint32_t rank, i;
    for (rank = 0; rank < SIMT_CLUSTER; rank++) {
        size_t slot;
        for (slot = 0; slot < now.room[rank]; slot++) {
            free_barrier(now.at[rank][slot]);
            now.at[rank][slot] = NULL;
        }
    }
    for (i = 0; i < now.count; i++) simt_clock_drop(now.list[i].clock);
    now.count = 0;
}

uint32_t simt_mbarriers_under_way(void) {
    return now.count;
}

static simt_mbarrier **slot_of(const simt_block *block, unsigned address) {
    const size_t slot = simt_offset_of(address) / BARRIER_BYTES;
    simt_mbarrier ***at = &now.at[block->rank];
    size_t *room = &now.room[block->rank];
    if (slot >= *room) {
        *at = realloc(*at, (slot + 1) * sizeof **at);
        memset(*at + *room, 0, (slot + 1 - *room) * sizeof **at);
        *room = slot + 1;
    }
    return *at + slot;
}

/* The threads that wait at it look again. */
static void wake(simt_mbarrier *barrier) {
    uint32_t i;
    for (i = 0; barrier->waiting > 0 && i < simt_now.block_threads; i++) {
        simt_fiber *f = barrier->block->fibers[i];
        if (f->state != SIMT_AT_MBARRIER || f->mbarrier != barrier) continue;
        f->state = SIMT_READY;
        barrier->waiting--;
    }
}

static void end_phase(simt_mbarrier *barrier) {
    if (barrier->missing > 0 || barrier->bytes != 0) return;
    simt_clock_set(&barrier->passed, simt_clock_hold(barrier->arriving.clock));
    simt_signal_clear(&barrier->arriving);
    barrier->missing = barrier->arrivals;
    barrier->phase++;
    wake(barrier);
}

/* Its own, or with a copy that of another block. */
static simt_mbarrier *find(unsigned address) {
    simt_block *block = simt_aim(address, BARRIER_BYTES);
    simt_mbarrier *found = *slot_of(block, address);
    if (!found) simt_fault(SIMT_LAUNCH_FAILED, "uses an mbarrier that nobody initialised");
    simt_judge(&block->space, "shared", block->space.begin + simt_offset_of(address), BARRIER_BYTES,
               SIMT_READ);
    return found;
}

static simt_mbarrier *find_own(unsigned address) {
    simt_mbarrier *found = find(address);
    if (found->block != simt_now.current->block)
        simt_fault(SIMT_ILLEGAL_ADDRESS, "uses the mbarrier of another block");
    return found;
}

void simt_mbarrier_init(unsigned address, unsigned arrivals) {
    simt_block *block = simt_aim(address, BARRIER_BYTES);
    simt_mbarrier **slot = slot_of(block, address);
    if (block != simt_now.current->block)
        simt_fault(SIMT_ILLEGAL_ADDRESS, "initialises the mbarrier of another block");
    if (arrivals == 0) simt_fault(SIMT_LAUNCH_FAILED, "initialises an mbarrier for no arrivals");
    simt_judge(&block->space, "shared", block->space.begin + simt_offset_of(address), BARRIER_BYTES,
               SIMT_WRITE);
    free_barrier(*slot);
    *slot = calloc(1, sizeof **slot);
    (*slot)->block = block;
    (*slot)->arrivals = (*slot)->missing = arrivals;
}

void simt_mbarrier_arrive(unsigned address, int bytes) {
    simt_mbarrier *barrier = find_own(address);
    if (barrier->missing == 0) {
        simt_fault(SIMT_LAUNCH_FAILED, "arrives at an mbarrier whose %u arrivals have all come",
                   barrier->arrivals);
    }
    simt_leave(&barrier->arriving, &simt_now.current->actor);
    barrier->bytes += bytes;
    barrier->missing--;
    end_phase(barrier);
}

/* ---- copies --------------------------------------------------------------------------------- */

static void deliver(const delivery *d) {
    simt_mbarrier *barrier = d->barrier;
    simt_block *block = barrier->block;
    memcpy(simt_shared_of(block) + d->at, d->from ? d->from : d->value, d->bytes);
    simt_space_date(&block->space, block->space.begin + d->at, d->bytes, d->thread, d->began);
    simt_clock_set(&barrier->arriving.clock, simt_clock_join(barrier->arriving.clock, d->clock));
    if (!simt_clock_knows(barrier->arriving.clock, d->thread, d->began))
        simt_clock_put(&barrier->arriving.clock, d->thread, d->told);
    simt_clock_drop(d->clock);
    barrier->bytes -= (int64_t)d->bytes;
    end_phase(barrier);
}

/* What is under way to the barrier arrives, oldest first, until its phase ends. */
static void receive(const simt_mbarrier *barrier) {
    const uint32_t phase = barrier->phase;
    uint32_t i, kept = 0;
    for (i = 0; i < now.count; i++) {
        if (now.list[i].barrier == barrier && barrier->phase == phase) deliver(&now.list[i]);
        else now.list[kept++] = now.list[i];
    }
    now.count = kept;
}

void simt_mbarrier_wait(unsigned address, unsigned parity) {
    simt_fiber *f = simt_now.current;
    simt_mbarrier *barrier = find_own(address);
    while ((barrier->phase & 1) == parity) {
        receive(barrier);
        if ((barrier->phase & 1) != parity) break;
        f->mbarrier = barrier;
        barrier->waiting++;
        simt_wait(SIMT_AT_MBARRIER);
    }
    simt_learn(&f->actor, barrier->passed);
}

/* Begins a copy; the caller adds what is copied. */
static delivery *begin_copy(unsigned to, size_t bytes, unsigned address) {
    simt_actor *actor = &simt_now.current->actor;
    simt_block *block = simt_aim(to, bytes);
    simt_mbarrier *barrier = find(address);
    delivery *d;
    if (barrier->block != block)
        simt_fault(SIMT_ILLEGAL_ADDRESS, "copies to one block and tells the mbarrier of another");
    if (now.count == now.list_room) {
        now.list_room = 2 * now.list_room + 64;
        now.list = realloc(now.list, now.list_room * sizeof *now.list);
    }
    d = &now.list[now.count];
    d->barrier = barrier;
    d->at = simt_offset_of(to);
    d->bytes = bytes;
    d->from = NULL;
    d->thread = actor->thread;
    d->began = actor->now;
    d->clock = NULL;
    simt_judge(&block->space, "shared", block->space.begin + d->at, bytes, SIMT_WRITE);
    simt_space_date(&block->space, block->space.begin + d->at, bytes, d->thread, SIMT_UNDER_WAY);
    d->told = actor->now = ++simt_now.time; /* later than the copy, for all that follows it */
    now.count++;
    wake(barrier);
    return d;
}

void simt_copy_bulk(unsigned to, const void *from, int bytes, unsigned barrier) {
    if (bytes <= 0 || bytes % PIECE != 0 || (uintptr_t)from % PIECE != 0 || to % PIECE != 0)
        simt_fault(SIMT_MISALIGNED_ADDRESS, "copies %d bytes in bulk from %p", bytes, from);
    simt_judge_device(from, (size_t)bytes, SIMT_READ);
    if (simt_aim(to, (size_t)bytes) != simt_now.current->block)
        simt_fault(SIMT_ILLEGAL_ADDRESS, "copies in bulk to another block");
    begin_copy(to, (size_t)bytes, barrier)->from = from;
}

/* Tells, too, what its thread did before: its values hang on all that it read. */
void simt_send(unsigned to, const void *value, size_t bytes, unsigned barrier) {
    delivery *d = begin_copy(to, bytes, barrier);
    memcpy(d->value, value, bytes);
    d->clock = simt_clock_hold(simt_now.current->actor.clock);
}
