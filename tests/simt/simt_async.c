/* What goes on without a thread: barriers in shared memory (mbarrier), copies and stores whose
   bytes such a barrier counts. A barrier's word in shared memory holds its number. What is on its
   way arrives when no thread of its cluster can go on, in any order, or at once: a wait that is
   missing then shows by the clocks. A copy acts for its barrier: whoever has seen the end of the
   phase knows it to be over. */
#include <stdlib.h>
#include <string.h>

#include "simt_engine.h"

enum { MOST = (1 << 20) - 1 /* arrivals of a phase, and bytes that it waits for */ };

static const uint64_t word_mark = 0x6d62617272000000; /* with the number: a barrier's word */

/* ---- barriers ------------------------------------------------------------------------------- */

static uint32_t mark_of(const simt_block *block, uint32_t barrier) {
    return (block->number + 1) * simt_now.block_marks - SIMT_BARRIERS + barrier;
}

void simt_barriers_clear(simt_block *block) {
    while (block->barrier_count) {
        simt_barrier *gone = &block->barriers[--block->barrier_count];
        simt_signal_clear(&gone->arriving);
        simt_clock_set(&gone->passed, NULL);
    }
}

static simt_barrier *make_barrier(simt_block *block) {
    simt_barrier *made = &block->barriers[block->barrier_count];
    if (block->barrier_count == SIMT_BARRIERS)
        simt_fault(SIMT_LAUNCH_FAILED, "makes more than %d barriers", SIMT_BARRIERS);
    memset(made, 0, sizeof *made);
    block->barrier_count++;
    return made;
}

static simt_block *aim_at_home(unsigned address) {
    simt_block *block = simt_aim(address, 8);
    if (block != simt_now.current->block)
        simt_fault(SIMT_ILLEGAL_ADDRESS, "takes a barrier of block %u for its own", block->number);
    return block;
}

void simt_barrier_init(unsigned address, int arrivals) {
    const simt_actor *actor = &simt_now.current->actor;
    simt_block *block = aim_at_home(address);
    const uint32_t offset = simt_offset_of(address);
    unsigned char *at = block->space.begin + offset;
    simt_barrier *made;
    uint64_t word = word_mark + block->barrier_count;
    if (arrivals < 1 || arrivals > MOST)
        simt_fault(SIMT_LAUNCH_FAILED, "makes a barrier for %d arrivals", arrivals);
    simt_judge(&block->space, "shared", at, 8, SIMT_WRITE, actor);
    simt_space_date(&block->space, at, 8, actor->mark, SIMT_IS_BARRIER);
    made = make_barrier(block);
    made->offset = offset;
    made->arrivals = made->pending = (uint32_t)arrivals;
    made->by = actor->thread;
    made->since = actor->now;
    memcpy(simt_shared_of(block) + offset, &word, sizeof word);
}

/* Tells all that is not of a thread's own block, too. */
void simt_barrier_fence(void) {
    const simt_actor *actor = &simt_now.current->actor;
    simt_block *block = simt_now.current->block;
    uint32_t i;
    for (i = 0; i < block->barrier_count; i++) {
        if (block->barriers[i].by == actor->thread) block->barriers[i].fenced = actor->now;
    }
}

static uint32_t find_barrier(const simt_block *block, unsigned address) {
    const uint32_t offset = simt_offset_of(address);
    uint64_t number;
    memcpy(&number, simt_shared_of(block) + offset, sizeof number);
    number -= word_mark;
    if (number >= block->barrier_count || block->barriers[number].offset != offset)
        simt_fault(SIMT_ILLEGAL_ADDRESS, "uses +%u of block %u as a barrier", offset,
                   block->number);
    return (uint32_t)number;
}

static int knows(const simt_barrier *barrier, uint32_t time) {
    const simt_actor *actor = &simt_now.current->actor;
    return barrier->by == actor->thread || simt_clock_knows(actor->clock, barrier->by, time);
}

static uint32_t find_own(unsigned address) {
    const simt_block *block = aim_at_home(address);
    const uint32_t number = find_barrier(block, address);
    if (!knows(&block->barriers[number], block->barriers[number].since))
        simt_fault(SIMT_ILLEGAL_ADDRESS,
                   "uses the barrier at +%u, no barrier is between it and its making",
                   simt_offset_of(address));
    return number;
}

/* For a copy: it is no thread of the block, and learns of a barrier by a fence. */
static uint32_t find_for_copy(const simt_block *block, unsigned address) {
    const uint32_t number = find_barrier(block, address);
    const simt_barrier *barrier = &block->barriers[number];
    if (!barrier->fenced || !knows(barrier, barrier->fenced))
        simt_fault(SIMT_ILLEGAL_ADDRESS,
                   "copies by the barrier at +%u, whose making no fence has told", barrier->offset);
    return number;
}

/* ---- phases --------------------------------------------------------------------------------- */

static void wake(simt_block *block, simt_barrier *barrier) {
    while (barrier->waiting) {
        simt_fiber *f = barrier->waiting;
        barrier->waiting = f->next;
        simt_learn(&f->actor, barrier->passed);
        f->state = SIMT_READY;
        block->was_woken = 1;
    }
}

static void end_phase(simt_block *block, uint32_t number) {
    simt_barrier *barrier = &block->barriers[number];
    if (barrier->pending || barrier->bytes) return;
    if (barrier->arrived)
        simt_clock_put(&barrier->arriving.clock, mark_of(block, number), ++simt_now.time);
    simt_clock_set(&barrier->passed, simt_clock_hold(barrier->arriving.clock));
    simt_signal_clear(&barrier->arriving);
    barrier->phase++;
    barrier->pending = barrier->arrivals;
    wake(block, barrier);
}

/* More bytes that the phase waits for; less when they have come. */
static void count_bytes(const simt_block *block, simt_barrier *barrier, int64_t bytes) {
    barrier->bytes += bytes;
    if (barrier->bytes < -MOST || barrier->bytes > MOST)
        simt_fail(SIMT_LAUNCH_FAILED, "the barrier at +%u of block %u counts %lld bytes",
                  barrier->offset, block->number, (long long)barrier->bytes);
}

void simt_barrier_arrive(unsigned address, int bytes) {
    simt_fiber *f = simt_now.current;
    const uint32_t number = find_own(address);
    simt_barrier *barrier = &f->block->barriers[number];
    if (bytes < 0 || bytes > MOST) simt_fault(SIMT_LAUNCH_FAILED, "expects %d bytes", bytes);
    if (barrier->pending == 0)
        simt_fault(SIMT_LAUNCH_FAILED,
                   "arrives at the barrier at +%u, whose phase lacks %lld bytes only",
                   barrier->offset, (long long)barrier->bytes);
    simt_leave(&barrier->arriving, &f->actor);
    count_bytes(f->block, barrier, bytes);
    barrier->pending--;
    end_phase(f->block, number);
}

/* Two phases that end before a thread looks again are one too many: it could not tell. */
void simt_barrier_wait(unsigned address, unsigned parity) {
    simt_fiber *f = simt_now.current;
    const uint32_t number = find_own(address);
    simt_barrier *barrier = &f->block->barriers[number];
    const uint32_t phase = barrier->phase;
    if (parity > 1) simt_fault(SIMT_LAUNCH_FAILED, "waits for a phase of parity %u", parity);
    if ((phase & 1) != parity) {
        simt_learn(&f->actor, barrier->passed);
        return;
    }
    f->barrier = (int)number;
    f->next = barrier->waiting;
    barrier->waiting = f;
    simt_wait(SIMT_AT_PHASE);
    if (barrier->phase - phase > 1)
        simt_fault(SIMT_LAUNCH_FAILED,
                   "waits for a phase of the barrier at +%u, and the next ends, too",
                   barrier->offset);
}

/* ---- what is on its way --------------------------------------------------------------------- */

/* The same from run to run, and any. */
static uint32_t chance(void) {
    static uint32_t state = 2463534242u;
    state ^= state << 13;
    state ^= state >> 17;
    state ^= state << 5;
    return state;
}

static void arrive(simt_delivery *d) {
    simt_block *block = d->block;
    simt_barrier *barrier = &block->barriers[d->barrier];
    memcpy(simt_shared_of(block) + d->offset, d->from ? d->from : d->value, d->bytes);
    barrier->arrived = ++simt_now.time;
    barrier->under_way--;
    simt_space_date(&block->space, block->space.begin + d->offset, d->bytes,
                    mark_of(block, d->barrier), barrier->arrived);
    if (!d->from) {
        simt_clock_set(&barrier->arriving.clock,
                       simt_clock_join(barrier->arriving.clock, d->sender.clock));
        simt_clock_put(&barrier->arriving.clock, d->sender.thread, d->sender.now);
        simt_clock_set(&d->sender.clock, NULL);
    }
    count_bytes(block, barrier, -(int64_t)d->bytes);
    end_phase(block, d->barrier);
}

int simt_deliver(simt_cluster *cluster) {
    const uint32_t count = cluster->delivery_count, sure = count ? chance() % count : 0;
    uint32_t i;
    for (i = count; i-- > 0 && !simt_now.result;) {
        if (i != sure && (chance() & 1)) continue;
        arrive(&cluster->deliveries[i]);
        cluster->deliveries[i] = cluster->deliveries[--cluster->delivery_count];
    }
    return count > 0;
}

void simt_deliveries_clear(simt_cluster *cluster) {
    while (cluster->delivery_count)
        simt_clock_set(&cluster->deliveries[--cluster->delivery_count].sender.clock, NULL);
}

/* Starts on its way what the rest of the delivery tells. Sometimes it is there at once. */
static void start(simt_delivery *d, unsigned to, unsigned barrier) {
    simt_fiber *f = simt_now.current;
    simt_cluster *cluster = f->block->cluster;
    simt_actor copy = f->actor;
    unsigned char *at;
    d->block = simt_aim(to, d->bytes);
    if (simt_aim(barrier, 8) != d->block)
        simt_fault(SIMT_ILLEGAL_ADDRESS, "copies to a block whose barrier is another's");
    d->barrier = find_for_copy(d->block, barrier);
    d->offset = simt_offset_of(to);
    copy.mark = mark_of(d->block, d->barrier);
    copy.now = ++simt_now.time;
    at = d->block->space.begin + d->offset;
    if (d->from) simt_judge_device(d->from, d->bytes, SIMT_READ, &copy);
    simt_judge(&d->block->space, d->block == f->block ? "shared" : "its cluster's shared", at,
               d->bytes, SIMT_WRITE, &copy);
    simt_space_date(&d->block->space, at, d->bytes, copy.mark, SIMT_UNDER_WAY);
    d->block->barriers[d->barrier].under_way++;
    simt_clock_hold(d->sender.clock); /* no fault can lose it any more */
    if (chance() % 4 == 0) {
        arrive(d);
        return;
    }
    if (cluster->delivery_count == cluster->delivery_room) {
        cluster->delivery_room = 2 * cluster->delivery_room + 64;
        cluster->deliveries =
            realloc(cluster->deliveries, cluster->delivery_room * sizeof *cluster->deliveries);
    }
    cluster->deliveries[cluster->delivery_count++] = *d;
}

void simt_copy_bulk(unsigned to, const void *from, int bytes, unsigned barrier) {
    simt_delivery d = {0};
    if (to % 16 != 0 || (uintptr_t)from % 16 != 0 || bytes % 16 != 0 || bytes <= 0)
        simt_fault(SIMT_MISALIGNED_ADDRESS, "copies %d bytes from %p to +%u", bytes, from,
                   simt_offset_of(to));
    d.from = from;
    d.bytes = (uint32_t)bytes;
    start(&d, to, barrier);
}

/* Its barrier tells also what the sender did before. */
void simt_send(unsigned to, const void *value, size_t bytes, unsigned barrier) {
    simt_actor *sender = &simt_now.current->actor;
    simt_delivery d = {0};
    memcpy(d.value, value, bytes);
    d.bytes = (uint32_t)bytes;
    sender->now = ++simt_now.time;
    d.sender = *sender;
    start(&d, to, barrier);
}

void simt_end_block(simt_block *block) {
    uint32_t i, k;
    for (i = 0; i < block->barrier_count; i++) {
        const simt_barrier *barrier = &block->barriers[i];
        for (k = 0; barrier->arrived && k < simt_now.block_threads; k++) {
            const simt_clock *clock = block->fibers[k]->actor.clock;
            if (simt_clock_knows(clock, mark_of(block, i), barrier->arrived)) break;
        }
        if (barrier->under_way || (barrier->arrived && k == simt_now.block_threads)) {
            simt_fail(SIMT_LAUNCH_FAILED,
                      "block %u has ended, and none of it has waited for a copy that the barrier "
                      "at +%u counts",
                      block->number, barrier->offset);
            return;
        }
    }
}
