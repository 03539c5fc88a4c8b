/* Device memory, and a judge of accesses to it and to shared memory: that the bytes belong to an operand
   which the kernel may read or write, and that no two threads touch the same bytes, one of them writing,
   unless the second knows that the first is done. */
#include <stdlib.h>
#include <string.h>

#include "simt_engine.h"

enum { MAY_READ = 1, MAY_WRITE = 2, CELL = 2 /* bytes: no element is smaller */ };

#define MOST_BYTES ((size_t)256 << 20)

/* The latest write and the reads since, with the mark of who did it. Times below a space's start
   mean never. */
struct simt_cell {
    uint32_t writer, written; /* mark and its time */
    uint32_t reader, read;
    uint32_t readers : 31; /* of several that know nothing of each other: 1 + their index in `sets` */
    uint32_t is_strong : 1;
};

static simt_space *spaces, *found; /* found: the latest that was */
static size_t used;

/* When the launch that runs began. */
static uint32_t opened;

/* The times at which threads read, of cells that several read; NULL: free. */
static simt_clock **sets;
static uint32_t set_count, set_room;

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
    if (found == gone) found = NULL;
    used -= gone->bytes;
    free(gone->begin);
    free(gone->may);
    free(gone->cells);
    free(gone);
    return 1;
}

simt_space *simt_memory_find(const void *address, size_t bytes) {
    simt_space *space = spaces;
    if (found && simt_space_holds(found, address, bytes)) return found;
    while (space && !simt_space_holds(space, address, bytes)) space = space->next;
    if (space) found = space;
    return space;
}

static void forget_readers(simt_cell *cell) {
    if (cell->readers) simt_clock_set(&sets[cell->readers - 1], NULL);
    cell->readers = 0;
}

void simt_space_reset(simt_space *space, unsigned char *begin, size_t bytes, uint32_t time) {
    size_t i;
    if (space->start >= opened) {
        for (i = 0; i < cells_of(space->bytes); i++) forget_readers(&space->cells[i]);
    }
    if (bytes > space->room) {
        free(space->cells);
        space->cells = malloc(cells_of(bytes) * sizeof *space->cells);
        space->room = bytes;
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
    opened = time;
    while (set_count) simt_clock_set(&sets[--set_count], NULL);
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

static int is_over(uint32_t mark, uint32_t time, const simt_actor *actor) {
    if (time >= SIMT_IS_BARRIER) return 0;
    return mark == actor->thread || simt_clock_knows(actor->clock, mark, time);
}

/* An index of a set, which is empty. */
static uint32_t new_set(void) {
    static uint32_t next; /* search goes on where it ended */
    uint32_t i;
    for (i = 0; i < 16 && set_count; i++) {
        next = (next + 1) % set_count;
        if (!sets[next]) return next;
    }
    if (set_count == set_room) {
        set_room = 2 * set_room + 64;
        sets = realloc(sets, set_room * sizeof(simt_clock *));
    }
    sets[set_count] = NULL;
    return set_count++;
}

static simt_verdict judge_write_before(const simt_cell *cell, uint32_t start, int how,
                                       const simt_actor *actor) {
    if (cell->written < start || is_over(cell->writer, cell->written, actor)) return SIMT_FINE;
    if (cell->is_strong && (how & SIMT_STRONG)) return SIMT_FINE;
    if (cell->written == SIMT_IS_BARRIER) return SIMT_ON_BARRIER;
    return cell->written == SIMT_UNDER_WAY ? SIMT_AFTER_COPY : SIMT_AFTER_WRITE;
}

/* Leaves in cell->reader one whose read is not over. */
static simt_verdict judge_reads_before(simt_cell *cell, uint32_t start, const simt_actor *actor) {
    const simt_clock *set;
    uint32_t i;
    if (cell->read < start) return SIMT_FINE;
    set = cell->readers ? sets[cell->readers - 1] : NULL;
    if (!set) return is_over(cell->reader, cell->read, actor) ? SIMT_FINE : SIMT_AFTER_READ;
    for (i = 0; i < set->count; i++) {
        if (set->time[i] == 0 || is_over(set->first + i, set->time[i], actor)) continue;
        cell->reader = set->first + i;
        return SIMT_AFTER_READ;
    }
    return SIMT_FINE;
}

static void note_read(simt_cell *cell, uint32_t start, const simt_actor *actor) {
    if (cell->read < start) {
        cell->readers = 0;
    } else if (!cell->readers && !is_over(cell->reader, cell->read, actor)) {
        cell->readers = new_set() + 1;
        simt_clock_put(&sets[cell->readers - 1], cell->reader, cell->read);
    }
    if (cell->readers) simt_clock_put(&sets[cell->readers - 1], actor->mark, actor->now);
    cell->reader = actor->mark;
    cell->read = actor->now;
}

static void note_write(simt_cell *cell, uint32_t start, int how, const simt_actor *actor) {
    if (cell->read >= start) forget_readers(cell);
    cell->readers = 0;
    cell->read = 0;
    cell->writer = actor->mark;
    cell->written = actor->now;
    cell->is_strong = (how & SIMT_STRONG) != 0;
}

/* Reads of what nobody may write need not be noted. */
static simt_verdict judge(simt_cell *cell, uint32_t start, int how, int is_noted,
                          const simt_actor *actor) {
    simt_verdict verdict = judge_write_before(cell, start, how, actor);
    if (verdict == SIMT_FINE && (how & SIMT_WRITE)) verdict = judge_reads_before(cell, start, actor);
    if (verdict != SIMT_FINE) return verdict;
    if (how & SIMT_WRITE) note_write(cell, start, how, actor);
    else if (is_noted && !(how & SIMT_STRONG)) note_read(cell, start, actor);
    return SIMT_FINE;
}

simt_reason simt_space_access(simt_space *space, const void *address, size_t bytes, int how,
                              const simt_actor *actor) {
    const size_t first = (size_t)((const unsigned char *)address - space->begin);
    const unsigned char need = how & SIMT_WRITE ? MAY_WRITE : MAY_READ;
    simt_reason reason = {SIMT_FINE, 0};
    size_t i;
    for (i = first; space->may && i < first + bytes; i++) {
        if (space->may[i] & need) continue;
        reason.verdict = SIMT_NOT_OPEN;
        return reason;
    }
    for (i = first / CELL; i < cells_of(first + bytes) && reason.verdict == SIMT_FINE; i++) {
        simt_cell *cell = &space->cells[i];
        const int is_noted = !space->may || (space->may[i * CELL] & MAY_WRITE);
        reason.verdict = judge(cell, space->start, how, is_noted, actor);
        reason.mark = reason.verdict == SIMT_AFTER_READ ? cell->reader : cell->writer;
    }
    return reason;
}

void simt_space_date(simt_space *space, const void *address, size_t bytes, uint32_t mark,
                     uint32_t time) {
    const size_t first = (size_t)((const unsigned char *)address - space->begin);
    size_t i;
    for (i = first / CELL; i < cells_of(first + bytes); i++) {
        space->cells[i].writer = mark;
        space->cells[i].written = time;
    }
}
