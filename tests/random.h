/* Random numbers of a test, which sets random_state first. */
#ifndef TESTS_RANDOM_H
#define TESTS_RANDOM_H

#include <stdint.h>

static uint64_t random_state;

/* splitmix64: the same numbers on every system. */
static uint64_t random_bits(void) {
    uint64_t z = random_state += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

/* low..high, both included. */
static int64_t random_in(int64_t low, int64_t high) {
    return low + (int64_t)(random_bits() % (uint64_t)(high - low + 1));
}

#endif
