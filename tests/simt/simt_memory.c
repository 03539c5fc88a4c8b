/* Device memory, and a judge of accesses to it and to shared memory: that the bytes belong to an operand
   which the kernel may read or write, and that no two threads touch the same bytes, one of them writing,
   without a barrier between. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "simt_engine.h"

enum { MAY_READ = 1, MAY_WRITE = 2, CELL = 2 /* bytes: no element is smaller */ };

#define MOST_BYTES ((size_t)256 << 20)

/* The latest write and the latest reads of some bytes. Times below a space's start mean never. */
struct simt_cell {
    uint32_t writer, written; /* thread and the time of its block */
    uint32_t reader, read;
    uint8_t several; /* other threads that no barrier parts from the reader read, too */
    uint8_t foreign; /* threads of other clusters read, too */
};

static simt_space *spaces;
static size_t used;

/* ---- device memory -------------------------------------------------------------------------- */

static size_t cells_of(size_t bytes) {
    return (bytes + CELL - 1) / CELL;
}

void *simt_memory_alloc(size_t bytes) {
    simt_space *space;
    if (bytes == 0 || bytes > MOST_BYTES - used) return NULL;
    space = calloc(1, sizeof *space);
    space->bytes = bytes;
    space->begin = aligned_alloc(256, (bytes + 255) / 256 * 256);
    space->may = calloc(bytes, 1);
    space->cells = calloc(cells_of(bytes), sizeof *space->cells);
    space->next = spaces;
    spaces = space;
    used += bytes;
    return space->begin;
}

int simt_memory_free(void *begin) {
    simt_space **at = &spaces, *gone;
    while (*at && (*at)->begin != begin) at = &(*at)->next;
    if (!*at) return 0;
    gone = *at;
    *at = gone->next;
    used -= gone->bytes;
    free(gone->begin);
    free(gone->may);
    free(gone->cells);
    free(gone);
    return 1;
}

int simt_space_holds(const simt_space *space, const void *address, size_t bytes) {
    const uintptr_t at = (uintptr_t)address, begin = (uintptr_t)space->begin;
    return at >= begin && at - begin <= space->bytes && space->bytes - (at - begin) >= bytes;
}

simt_space *simt_memory_find(const void *address, size_t bytes) {
    simt_space *space = spaces;
    while (space && !simt_space_holds(space, address, bytes)) space = space->next;
    return space;
}

void simt_space_reset(simt_space *space, unsigned char *begin, size_t bytes, uint32_t time) {
    if (bytes > space->bytes) {
        free(space->cells);
        space->cells = malloc(cells_of(bytes) * sizeof *space->cells);
    }
    if (bytes) memset(space->cells, 0, cells_of(bytes) * sizeof *space->cells);
    space->begin = begin;
    space->bytes = bytes;
    space->start = time;
}

/* ---- what a kernel may touch ---------------------------------------------------------------- */

static size_t type_bytes(int dtype) {
    return dtype == 4 ? 8 : dtype == 3 ? 4 : 2; /* nj_dtype */
}

static void open_bytes(void *address, size_t bytes, unsigned char may) {
    simt_space *space = simt_memory_find(address, bytes);
    unsigned char *at;
    if (!space) return; /* whoever goes there is told so */
    at = space->may + ((unsigned char *)address - space->begin);
    while (bytes--) *at++ |= may;
}

/* Every element. A dim of stride 0 adds none. */
static void open_operand(const nji_problem *p, const nji_operand *operand, size_t bytes,
                         unsigned char may) {
    long long index[NJI_DIMS] = {0}, offset = 0;
    int dims = p->row_dims + p->col_dims, d;
    if (!operand->data) return;
    for (d = 0; d < dims; d++) {
        if (p->extent[d] == 0 && operand->stride[d] != 0) return;
    }
    do {
        open_bytes((char *)operand->data + offset * (long long)bytes, bytes, may);
        for (d = dims - 1; d >= 0; d--) {
            if (operand->stride[d] == 0) continue;
            offset += operand->stride[d];
            if (++index[d] < p->extent[d]) break;
            offset -= p->extent[d] * operand->stride[d];
            index[d] = 0;
        }
    } while (d >= 0);
}

/* A result that is added to is read, too. */
static unsigned char result(unsigned accumulated) {
    return accumulated ? MAY_READ | MAY_WRITE : MAY_WRITE;
}

void simt_memory_open(const simt_object *object, const nji_problem *p, int is_forward,
                      uint32_t time) {
    const size_t x = (size_t)object->element_bytes, param = type_bytes(p->param_dtype);
    const size_t stat = type_bytes(p->stat_dtype), sum = x == 8 ? 8 : 4;
    const unsigned char stat_may = is_forward ? MAY_WRITE : MAY_READ;
    simt_space *space;
    for (space = spaces; space; space = space->next) {
        memset(space->may, 0, space->bytes);
        space->start = time;
    }
    if (p->rows > 0 && p->cols > 0) {
        open_operand(p, &p->x, x, MAY_READ);
        open_operand(p, &p->dy, x, MAY_READ);
        open_operand(p, &p->y, x, MAY_WRITE);
        open_operand(p, &p->dx, x, result(p->accumulate & 1));
    }
    open_operand(p, &p->mean, stat, stat_may);
    open_operand(p, &p->rstd, stat, stat_may);
    open_operand(p, &p->gamma, param, MAY_READ);
    open_operand(p, &p->beta, param, MAY_READ);
    open_operand(p, &p->dgamma, param, result(p->accumulate & 2));
    open_operand(p, &p->dbeta, param, result(p->accumulate & 4));
    if (p->partial)
        open_bytes(p->partial, (size_t)p->parts * 2 * (size_t)p->cols * sum, MAY_READ | MAY_WRITE);
    if (p->sums && object->slices > 1 && object->cluster == 1)
        open_bytes(p->sums, (size_t)p->rows * (size_t)object->slices * 2 * sum, MAY_READ | MAY_WRITE);
}

/* ---- the order of accesses ------------------------------------------------------------------ */

/* Whether something that a thread did when its block's time was `time` is over for the actor. */
static int is_ordered(uint32_t thread, uint32_t time, const simt_actor *actor) {
    const uint32_t block = thread / actor->block_threads;
    if (thread == actor->thread) return 1;
    if (block == actor->block) return time < actor->block_time;
    return block / actor->cluster_blocks == actor->cluster && time < actor->cluster_time;
}

static int is_foreign(uint32_t thread, const simt_actor *actor) {
    return thread / actor->block_threads / actor->cluster_blocks != actor->cluster;
}

static int note_read(simt_cell *cell, uint32_t start, const simt_actor *actor) {
    if (cell->written >= start && !is_ordered(cell->writer, cell->written, actor)) return 0;
    if (cell->read < start) {
        cell->several = cell->foreign = 0;
    } else if (!is_ordered(cell->reader, cell->read, actor)) {
        cell->several = 1;
        if (is_foreign(cell->reader, actor)) cell->foreign = 1;
    } else if (cell->read < actor->block_time) {
        cell->several = 0;
    }
    cell->reader = actor->thread;
    cell->read = actor->block_time;
    return 1;
}

static int note_write(simt_cell *cell, uint32_t start, const simt_actor *actor) {
    if (cell->written >= start && !is_ordered(cell->writer, cell->written, actor)) return 0;
    if (cell->read >= start) {
        if (cell->foreign || !is_ordered(cell->reader, cell->read, actor)) return 0;
        if (cell->several && cell->read >= actor->block_time) return 0;
    }
    cell->writer = actor->thread;
    cell->written = actor->block_time;
    return 1;
}

int simt_space_access(simt_space *space, const void *address, size_t bytes, int writes,
                      const simt_actor *actor, char *reason, size_t reason_size) {
    const size_t first = (size_t)((const unsigned char *)address - space->begin);
    const unsigned char need = writes ? MAY_WRITE : MAY_READ;
    size_t i;
    for (i = first; space->may && i < first + bytes; i++) {
        if (space->may[i] & need) continue;
        snprintf(reason, reason_size, "no operand that it may %s", writes ? "write" : "read");
        return 0;
    }
    for (i = first / CELL; i < cells_of(first + bytes); i++) {
        simt_cell *cell = &space->cells[i], before = *cell;
        if (writes ? note_write(cell, space->start, actor) : note_read(cell, space->start, actor))
            continue;
        if (before.written >= space->start &&
            !is_ordered(before.writer, before.written, actor)) {
            snprintf(reason, reason_size, "thread %u of block %u wrote it, no barrier is between",
                     before.writer % actor->block_threads, before.writer / actor->block_threads);
        } else {
            snprintf(reason, reason_size,
                     "thread %u of block %u read it (and maybe others), no barrier is between",
                     before.reader % actor->block_threads, before.reader / actor->block_threads);
        }
        return 0;
    }
    return 1;
}
