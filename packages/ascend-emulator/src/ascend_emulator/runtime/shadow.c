/* Bytes and their last accesses: per 64 KiB page a sorted list of spans, each with the last write and the reads since, one
 * a stream. Spans of one access share a state. What an access is ordered against is decided by its actor's clock. */
#include <stdlib.h>
#include <string.h>

#include "shadow.h"

#define PAGE_BITS 16
#define PAGE_SIZE ((uint64_t)1 << PAGE_BITS)

typedef struct State {
    int references;
    int count; /* reads */
    Access *write;
    Access *reads[];
} State;

typedef struct {
    uint32_t low, high; /* within the page */
    State *state;
} Span;

typedef struct Page {
    uint64_t number;
    struct Page *next;
    int count, capacity;
    Span *spans;
} Page;

struct Shadow {
    Page **buckets;
    size_t bucket_count, page_count;
};

static Span *scratch; /* used under the caller's lock */
static int scratch_capacity;

static void access_release(Access *access) {
    if (access && !--access->references) free(access);
}

static void state_release(State *state) {
    if (!state || --state->references) return;
    access_release(state->write);
    for (int i = 0; i < state->count; i++) access_release(state->reads[i]);
    free(state);
}

static State *state_new(Access *write, int reads) {
    State *state = malloc(sizeof *state + (size_t)reads * sizeof(Access *));
    if (!state) abort();
    *state = (State){.references = 1, .count = 0, .write = write};
    if (write) write->references++;
    return state;
}

static void state_add(State *state, Access *read) {
    state->reads[state->count++] = read;
    read->references++;
}

static Access *made(Touch *touch) {
    if (!touch->made) {
        Access *access = malloc(sizeof *access);
        if (!access) abort();
        *access = (Access){.references = 1, .lane = touch->actor->lane, .stamp = touch->actor->stamp, .what = *touch->what};
        touch->made = access;
    }
    return touch->made;
}

/* --- order --- */

static int ordered(const Access *access, const Actor *actor) {
    if (access->lane == actor->lane) return 1;
    const Clock *clock = actor->clock;
    return access->lane < clock->count && access->stamp < clock->entries[access->lane];
}

static int same(const Access *access, const Actor *actor) {
    return access->lane == actor->lane && access->stamp == actor->stamp;
}

static const Access *conflict(const State *state, const Touch *touch) {
    if (state->write && !ordered(state->write, touch->actor)) return state->write;
    if (touch->what->write)
        for (int i = 0; i < state->count; i++)
            if (!ordered(state->reads[i], touch->actor)) return state->reads[i];
    return NULL;
}

/* Whether the state says already all that this access would add: one at the same point of the same stream. */
static int known(const State *state, const Touch *touch) {
    if (state->write && same(state->write, touch->actor) && (!touch->what->write || !state->count)) return 1;
    if (!touch->what->write)
        for (int i = 0; i < state->count; i++)
            if (same(state->reads[i], touch->actor)) return 1;
    return 0;
}

static State *after_read(State *state, Touch *touch) {
    if (touch->from == state) return touch->to;
    State *next = state_new(state->write, state->count + 1);
    for (int i = 0; i < state->count; i++) /* a read that is ordered before this one says nothing more */
        if (!ordered(state->reads[i], touch->actor)) state_add(next, state->reads[i]);
    state_add(next, made(touch));
    state_release(touch->from);
    state_release(touch->to);
    touch->from = state;
    state->references++;
    touch->to = next;
    return next;
}

void touch_end(Touch *touch) {
    access_release(touch->made);
    state_release(touch->written);
    state_release(touch->first_read);
    state_release(touch->from);
    state_release(touch->to);
}

/* --- spans of a page --- */

static int first_after(const Page *page, uint32_t low) { /* first span that ends after low */
    int left = 0, right = page->count;
    while (left < right) {
        int middle = (left + right) / 2;
        if (page->spans[middle].high <= low) left = middle + 1; else right = middle;
    }
    return left;
}

static void put(int *count, uint32_t low, uint32_t high, State *state) {
    if (low >= high) return;
    if (*count && scratch[*count - 1].high == low && scratch[*count - 1].state == state) {
        scratch[*count - 1].high = high;
        return;
    }
    state->references++;
    scratch[(*count)++] = (Span){low, high, state};
}

static void replace(Page *page, int first, int last, int count) { /* spans [first, last) by those in scratch */
    for (int i = first; i < last; i++) state_release(page->spans[i].state);
    int total = page->count - (last - first) + count;
    if (total > page->capacity) {
        int capacity = page->capacity * 2 > total ? page->capacity * 2 : total;
        Span *grown = realloc(page->spans, (size_t)capacity * sizeof *grown);
        if (!grown) abort();
        page->spans = grown;
        page->capacity = capacity;
    }
    memmove(page->spans + first + count, page->spans + last, (size_t)(page->count - last) * sizeof(Span));
    if (count) memcpy(page->spans + first, scratch, (size_t)count * sizeof(Span));
    page->count = total;
}

static void reserve(int spans) {
    if (spans <= scratch_capacity) return;
    Span *grown = realloc(scratch, (size_t)spans * 2 * sizeof *grown);
    if (!grown) abort();
    scratch = grown;
    scratch_capacity = spans * 2;
}

static int start(const Page *page, uint32_t low, const Touch *touch) {
    int at = touch->at;
    if (page != touch->page || at > page->count || (at && page->spans[at - 1].high > low)) return first_after(page, low);
    return at == page->count || page->spans[at].high > low ? at : first_after(page, low);
}

static int touch_page(Page *page, uint32_t low, uint32_t high, Touch *touch) {
    int first = start(page, low, touch), last = first, news = 0;
    touch->page = page;
    uint32_t covered = low;
    for (; last < page->count && page->spans[last].low < high; last++) {
        const Span *span = &page->spans[last];
        const Access *earlier = conflict(span->state, touch);
        if (earlier) {
            uint64_t base = page->number << PAGE_BITS;
            touch->other = earlier;
            touch->earlier = earlier->what;
            touch->low = base + (span->low > low ? span->low : low);
            touch->high = base + (span->high < high ? span->high : high);
            return 1;
        }
        if (span->low > covered || !known(span->state, touch)) news = 1;
        covered = span->high;
    }
    touch->at = last;
    if (touch->probe || (!news && covered >= high)) return 0;
    reserve(2 * (last - first) + 4);
    int count = 0;
    Span left = {0}, right = {0}; /* what stays of the outer two */
    if (first < last) {
        left = (Span){page->spans[first].low, low, page->spans[first].state};
        right = (Span){high, page->spans[last - 1].high, page->spans[last - 1].state};
        put(&count, left.low, left.high, left.state);
    }
    if (touch->what->write) {
        if (!touch->written) touch->written = state_new(made(touch), 0);
        put(&count, low, high, touch->written);
    } else {
        if (!touch->first_read) {
            touch->first_read = state_new(NULL, 1);
            state_add(touch->first_read, made(touch));
        }
        uint32_t at = low;
        for (int i = first; i < last; i++) {
            Span span = page->spans[i];
            uint32_t start = span.low > low ? span.low : low, end = span.high < high ? span.high : high;
            put(&count, at, start, touch->first_read);
            put(&count, start, end, known(span.state, touch) ? span.state : after_read(span.state, touch));
            at = end;
        }
        put(&count, at, high, touch->first_read);
    }
    int behind = count;
    if (right.state) put(&count, right.low, right.high, right.state);
    replace(page, first, last, count);
    touch->at = first + behind;
    return 0;
}

/* --- pages --- */

static Page **slot(const Shadow *shadow, uint64_t number) {
    Page **link = &shadow->buckets[(number * 0x9E3779B97F4A7C15u >> 32) & (shadow->bucket_count - 1)];
    while (*link && (*link)->number != number) link = &(*link)->next;
    return link;
}

static void rehash(Shadow *shadow, size_t count) {
    Page **old = shadow->buckets;
    size_t old_count = shadow->bucket_count;
    shadow->buckets = calloc(count, sizeof *shadow->buckets);
    if (!shadow->buckets) abort();
    shadow->bucket_count = count;
    for (size_t i = 0; i < old_count; i++)
        for (Page *page = old[i], *next; page; page = next) {
            next = page->next;
            page->next = NULL;
            *slot(shadow, page->number) = page;
        }
    free(old);
}

static Page *page_at(Shadow *shadow, uint64_t number) {
    Page **link = slot(shadow, number);
    if (!*link) {
        if (++shadow->page_count > shadow->bucket_count) {
            rehash(shadow, shadow->bucket_count * 2);
            link = slot(shadow, number);
        }
        *link = calloc(1, sizeof **link);
        if (!*link) abort();
        (*link)->number = number;
    }
    return *link;
}

Shadow *shadow_new(void) {
    Shadow *shadow = calloc(1, sizeof *shadow);
    if (!shadow) abort();
    rehash(shadow, 64);
    return shadow;
}

static void page_free(Page *page) {
    for (int i = 0; i < page->count; i++) state_release(page->spans[i].state);
    free(page->spans);
    free(page);
}

void shadow_free(Shadow *shadow) {
    for (size_t i = 0; i < shadow->bucket_count; i++)
        for (Page *page = shadow->buckets[i], *next; page; page = next) {
            next = page->next;
            page_free(page);
        }
    free(shadow->buckets);
    free(shadow);
}

/* A conflict was found: how far does it go on, with the same access? */
static void extend(const Shadow *shadow, Touch *touch, uint64_t high) {
    while (touch->high < high) {
        uint64_t number = touch->high >> PAGE_BITS, base = number << PAGE_BITS;
        const Page *page = *slot(shadow, number);
        if (!page) return;
        uint32_t from = (uint32_t)(touch->high - base);
        int at = first_after(page, from);
        if (at == page->count || page->spans[at].low > from || conflict(page->spans[at].state, touch) != touch->other)
            return;
        uint64_t end = base + page->spans[at].high;
        touch->high = end < high ? end : high;
    }
}

int shadow_touch(Shadow *shadow, Touch *touch, uint64_t low, uint64_t high) {
    while (low < high) {
        uint64_t number = low >> PAGE_BITS, end = (number + 1) << PAGE_BITS;
        if (end > high) end = high;
        uint64_t base = number << PAGE_BITS;
        Page *page = touch->page && touch->page->number == number ? touch->page : page_at(shadow, number);
        if (touch_page(page, (uint32_t)(low - base), (uint32_t)(end - base), touch)) {
            extend(shadow, touch, high);
            return 1;
        }
        low = end;
    }
    return 0;
}

/* Bytes that cease to exist. */
void shadow_drop(Shadow *shadow, uint64_t low, uint64_t high) {
    while (low < high) {
        uint64_t number = low >> PAGE_BITS, end = (number + 1) << PAGE_BITS;
        if (end > high) end = high;
        Page *page = *slot(shadow, number);
        if (page) {
            uint32_t from = (uint32_t)(low & (PAGE_SIZE - 1)), to = (uint32_t)(end - (number << PAGE_BITS));
            int first = first_after(page, from), last = first, count = 0;
            while (last < page->count && page->spans[last].low < to) last++;
            reserve(4);
            if (first < last) {
                put(&count, page->spans[first].low, from, page->spans[first].state);
                put(&count, to, page->spans[last - 1].high, page->spans[last - 1].state);
            }
            replace(page, first, last, count);
        }
        low = end;
    }
}

static State *without(State *state, int lane) {
    State *next = state_new(state->write && state->write->lane != lane ? state->write : NULL, state->count);
    for (int i = 0; i < state->count; i++)
        if (state->reads[i]->lane != lane) state_add(next, state->reads[i]);
    return next;
}

/* What a stream did to these bytes is ordered before everything from now on. Whole spans: the range is a block's. */
void shadow_forget(Shadow *shadow, uint64_t low, uint64_t high, int lane) {
    for (uint64_t number = low >> PAGE_BITS; number << PAGE_BITS < high; number++) {
        Page *page = *slot(shadow, number);
        if (!page) continue;
        uint64_t base = number << PAGE_BITS;
        for (int i = 0; i < page->count; i++) {
            Span *span = &page->spans[i];
            if (base + span->low < low || base + span->high > high) continue;
            State *next = without(span->state, lane);
            state_release(span->state);
            span->state = next;
        }
    }
}
