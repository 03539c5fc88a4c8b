/* Clocks: what a thread knows to be over. They are shared between the threads that know the same, which
   after a barrier is all of them, and copied when one that is shared changes. */
#include <stdlib.h>
#include <string.h>

#include "simt_engine.h"

enum { STRETCH = 256 /* threads: a clock begins and ends at a multiple */ };

/* The join before: threads that knew the same and learn the same get one clock. */
static struct {
    simt_clock *a, *b, *joined;
} latest;

static simt_clock *make_clock(uint32_t first, uint32_t end) {
    simt_clock *clock;
    first = first / STRETCH * STRETCH;
    end = (end + STRETCH - 1) / STRETCH * STRETCH;
    clock = calloc(1, sizeof *clock + (end - first) * sizeof clock->time[0]);
    clock->holders = 1;
    clock->first = first;
    clock->count = end - first;
    return clock;
}

simt_clock *simt_clock_hold(simt_clock *clock) {
    if (clock) clock->holders++;
    return clock;
}

void simt_clock_drop(simt_clock *clock) {
    if (clock && --clock->holders == 0) free(clock);
}

void simt_clock_set(simt_clock **at, simt_clock *held) {
    simt_clock_drop(*at);
    *at = held;
}

static void add(simt_clock *to, const simt_clock *from) {
    uint32_t *at = to->time + (from->first - to->first), i;
    for (i = 0; i < from->count; i++) {
        if (at[i] < from->time[i]) at[i] = from->time[i];
    }
}

static simt_clock *union_of(const simt_clock *a, const simt_clock *b) {
    const uint32_t a_end = a->first + a->count, b_end = b->first + b->count;
    simt_clock *made =
        make_clock(a->first < b->first ? a->first : b->first, a_end > b_end ? a_end : b_end);
    add(made, a);
    add(made, b);
    return made;
}

simt_clock *simt_clock_join(simt_clock *a, simt_clock *b) {
    if (a == b || !b) return simt_clock_hold(a);
    if (!a) return simt_clock_hold(b);
    if (latest.a != a || latest.b != b) {
        simt_clock *joined = union_of(a, b);
        simt_clock_set(&latest.a, simt_clock_hold(a));
        simt_clock_set(&latest.b, simt_clock_hold(b));
        simt_clock_set(&latest.joined, joined);
    }
    return simt_clock_hold(latest.joined);
}

void simt_clock_put(simt_clock **at, uint32_t thread, uint32_t time) {
    simt_clock *clock = *at;
    if (!clock) {
        *at = clock = make_clock(thread, thread + 1);
    } else if (clock->holders > 1 || thread - clock->first >= clock->count) {
        simt_clock *place = make_clock(thread, thread + 1), *wider = union_of(clock, place);
        simt_clock_drop(place);
        simt_clock_drop(clock);
        *at = clock = wider;
    }
    clock->time[thread - clock->first] = time;
}

void simt_signal_clear(simt_signal *signal) {
    simt_clock_set(&signal->clock, NULL);
    simt_clock_set(&signal->latest, NULL);
}
