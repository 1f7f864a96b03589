/* Vector clocks: what is ordered before their owner. Whose they are and when they grow is stream.c's and order.c's. */
#include <stdlib.h>
#include <string.h>

#include "emulator.h"

static int grow(Clock *clock, int count) {
    if (clock->count >= count) return 1;
    Stamp *entries = realloc(clock->entries, (size_t)count * sizeof *entries);
    if (!entries) return 0;
    memset(entries + clock->count, 0, (size_t)(count - clock->count) * sizeof *entries);
    clock->entries = entries;
    clock->count = count;
    return 1;
}

void clock_merge(Clock *into, const Clock *from) {
    if (!grow(into, from->count)) return;
    for (int i = 0; i < from->count; i++)
        if (from->entries[i] > into->entries[i]) into->entries[i] = from->entries[i];
}

void clock_see(Clock *clock, int lane, Stamp bound) {
    if (grow(clock, lane + 1) && clock->entries[lane] < bound) clock->entries[lane] = bound;
}

void clock_free(Clock *clock) {
    free(clock->entries);
    *clock = (Clock){0};
}
