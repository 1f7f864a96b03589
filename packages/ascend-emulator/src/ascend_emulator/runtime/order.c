/* The order of accesses: who touches what, and whether that is ordered after what others did to the same bytes. It knows
 * streams and captures; the bytes are shadow.c's, the clocks stream.c's. A capture has clocks and a shadow of its own: its
 * streams are compared with each other while it is captured, and it as a whole with the rest at each replay. */
#include <stdlib.h>
#include <string.h>

#include "shadow.h"

int emulator_order_on;
#define MAX_DIMS 64
static Shadow *memory;
static uint64_t sequence; /* accesses and allocations, in the order in which they were told */

/* What emulator_order_access found; read by _race.py. */
typedef struct {
    Description earlier, later;
    uint64_t low, high;
    uint64_t allocated; /* sequence number of the last allocation that holds the bytes, 0 when none was told */
    uint64_t capture;   /* not a race: the later access is outside of this capture, which only records the earlier one */
} Race;
static _Thread_local Race race;

EMULATOR_API const Race *emulator_order_race(void) { return &race; }

EMULATOR_API void emulator_order_enable(int on) {
    pthread_mutex_lock(&emulator_lock);
    if (memory) shadow_free(memory);
    memory = on ? shadow_new() : NULL;
    emulator_order_on = on;
    pthread_mutex_unlock(&emulator_lock);
}

/* --- captures --- */

typedef struct Lane {
    int index;
    uint64_t step, last; /* last: of the lane's last node */
    Clock clock;
    struct Capture *capture;
} Lane;

typedef struct Capture {
    uint64_t model;
    aclmdlRICaptureMode mode;
    const Stream *origin;
    uint64_t sequence; /* when it began */
    int lanes;
    Shadow *shadow;
    struct Capture *next;
} Capture;
static Capture *captures;

static void enter(Stream *stream, Capture *capture) {
    Lane *lane = calloc(1, sizeof *lane);
    if (!lane) abort();
    *lane = (Lane){.index = capture->lanes++, .step = 1, .capture = capture};
    stream->lane = lane;
    stream->model = capture->model;
}

void lane_begin(Stream *stream, uint64_t model, aclmdlRICaptureMode mode) {
    Capture *capture = calloc(1, sizeof *capture);
    if (!capture) abort();
    *capture = (Capture){.model = model, .mode = mode, .origin = stream, .sequence = ++sequence, .shadow = shadow_new(), .next = captures};
    captures = capture;
    enter(stream, capture);
}

void lane_record(Stream *stream, Point *point) {
    Lane *lane = stream->lane;
    clock_merge(&point->clock, &lane->clock);
    clock_see(&point->clock, lane->index, ++lane->step);
    point->reached = 1;
}

void lane_join(Stream *stream, uint64_t model, const Point *point) {
    Capture *capture = captures;
    while (capture && capture->model != model) capture = capture->next;
    if (!capture) return;
    if (!stream->lane) enter(stream, capture);
    clock_merge(&stream->lane->clock, &point->clock);
}

EMULATOR_API Stream *emulator_stream_at(int index);
EMULATOR_API int emulator_stream_count(void);

int lane_is_origin(const Stream *stream) { return stream->lane && stream->lane->capture->origin == stream; }

int lane_unjoined(const Stream *origin) {
    const Clock *clock = &origin->lane->clock;
    for (int i = 0; i < emulator_stream_count(); i++) {
        const Stream *stream = emulator_stream_at(i);
        const Lane *lane = stream->lane;
        if (stream == origin || !lane || lane->capture != origin->lane->capture) continue;
        if (lane->last && (lane->index >= clock->count || lane->last >= clock->entries[lane->index])) return i;
    }
    return -1;
}

aclmdlRICaptureMode lane_end(uint64_t model) {
    for (int i = 0; i < emulator_stream_count(); i++) {
        Stream *stream = emulator_stream_at(i);
        if (stream->model != model) continue;
        clock_free(&stream->lane->clock);
        free(stream->lane);
        stream->lane = NULL;
        stream->model = 0;
    }
    for (Capture **link = &captures; *link; link = &(*link)->next)
        if ((*link)->model == model) {
            Capture *capture = *link;
            aclmdlRICaptureMode mode = capture->mode;
            *link = capture->next;
            shadow_free(capture->shadow);
            free(capture);
            return mode;
        }
    return ACL_MODEL_RI_CAPTURE_MODE_RELAXED;
}

/* A node was added to a capture by this stream. */
EMULATOR_API void emulator_order_node(Stream *stream) {
    pthread_mutex_lock(&emulator_lock);
    if (stream->lane) stream->lane->last = stream->lane->step;
    pthread_mutex_unlock(&emulator_lock);
}

/* --- allocations: the caching allocator reuses a block without a word to the runtime --- */

typedef struct {
    uint64_t low, high, sequence;
} Allocation;
static Allocation *allocations; /* open addressing by low; low 0 is free */
static size_t allocation_count, allocation_capacity;

typedef struct Shared { /* record_stream: the allocator waits for this stream before it reuses the block */
    uint64_t low, high;
    int lane;
    struct Shared *next;
} Shared;
static Shared *shared;

static Allocation *allocation_slot(uint64_t low) {
    size_t at = (low >> 9) * 0x9E3779B97F4A7C15u >> 20 & (allocation_capacity - 1);
    while (allocations[at].low && allocations[at].low != low) at = (at + 1) & (allocation_capacity - 1);
    return &allocations[at];
}

static void note_allocation(uint64_t low, uint64_t high) {
    if (2 * allocation_count >= allocation_capacity) {
        Allocation *old = allocations;
        size_t old_capacity = allocation_capacity;
        allocation_capacity = old_capacity ? old_capacity * 2 : 1024;
        allocations = calloc(allocation_capacity, sizeof *allocations);
        if (!allocations) abort();
        for (size_t i = 0; i < old_capacity; i++)
            if (old[i].low) *allocation_slot(old[i].low) = old[i];
        free(old);
    }
    Allocation *slot = allocation_slot(low);
    if (!slot->low) allocation_count++;
    *slot = (Allocation){low, high, ++sequence};
}

static uint64_t allocated_at(uint64_t address) {
    uint64_t last = 0;
    for (size_t i = 0; i < allocation_capacity; i++) {
        const Allocation *it = &allocations[i];
        if (it->low && it->low <= address && address < it->high && it->sequence > last) last = it->sequence;
    }
    return last;
}

/* A tensor got this memory from the allocator. */
EMULATOR_API void emulator_order_allocated(uint64_t address, uint64_t size) {
    if (!emulator_order_on || !size) return;
    pthread_mutex_lock(&emulator_lock);
    note_allocation(address, address + size);
    for (Shared **link = &shared; *link;) {
        Shared *it = *link;
        if (it->low >= address + size || it->high <= address) {
            link = &it->next;
            continue;
        }
        if (memory) shadow_forget(memory, it->low, it->high, it->lane);
        *link = it->next;
        free(it);
    }
    pthread_mutex_unlock(&emulator_lock);
}

EMULATOR_API void emulator_order_shared(uint64_t address, uint64_t size, const Stream *stream) {
    if (!emulator_order_on || !size) return;
    pthread_mutex_lock(&emulator_lock);
    Shared *it = shared;
    while (it && (it->low != address || it->high != address + size || it->lane != stream->index)) it = it->next;
    if (!it && (it = malloc(sizeof *it))) {
        *it = (Shared){address, address + size, stream->index, shared};
        shared = it;
    }
    pthread_mutex_unlock(&emulator_lock);
}

void order_drop(const void *address, size_t size) {
    pthread_mutex_lock(&emulator_lock);
    if (memory) shadow_drop(memory, (uint64_t)(uintptr_t)address, (uint64_t)(uintptr_t)address + size);
    pthread_mutex_unlock(&emulator_lock);
}

/* --- accesses --- */

/* Touch the bytes of a strided tensor, in runs: sizes and strides of `dims` dimensions, strides in bytes. */
static int touch_strided(Shadow *shadow, Touch *touch, uint64_t address, uint64_t run, int dims, int64_t *sizes,
                         int64_t *strides) {
    int kept = 0;
    for (int i = 0; i < dims; i++) {
        if (!sizes[i]) return 0;
        if (sizes[i] == 1 || !strides[i]) continue;
        int at = kept++;
        int64_t size = sizes[i], stride = strides[i];
        for (; at && strides[at - 1] > stride; at--) sizes[at] = sizes[at - 1], strides[at] = strides[at - 1];
        sizes[at] = size, strides[at] = stride;
    }
    int inner = 0; /* dimensions whose runs touch each other are one run */
    for (; inner < kept && (uint64_t)strides[inner] <= run; inner++) run += (uint64_t)((sizes[inner] - 1) * strides[inner]);
    int64_t index[MAX_DIMS] = {0};
    for (;;) {
        if (shadow_touch(shadow, touch, address, address + run)) return 1;
        int d = inner;
        for (; d < kept; d++) {
            address += (uint64_t)strides[d];
            if (++index[d] < sizes[d]) break;
            address -= (uint64_t)(sizes[d] * strides[d]);
            index[d] = 0;
        }
        if (d == kept) return 0;
    }
}

static Actor actor_of(Stream *stream, Shadow **shadow) {
    if (stream->lane) {
        const Lane *lane = stream->lane;
        *shadow = lane->capture->shadow;
        return (Actor){lane->index, lane->step, &lane->clock};
    }
    emulator_settle(stream, stream->executed + 1);
    *shadow = memory;
    return (Actor){stream->index, ((stream->executed + 1) << STEP_BITS) | stream->step, &stream->clock};
}

static int refuse(const Touch *touch) {
    race = (Race){touch->earlier, *touch->what, touch->low, touch->high, allocated_at(touch->low), 0};
    return 1;
}

/* Memory that was allocated and written in an open capture holds nothing yet: who is outside must not touch it. */
static int touches_capture(const Description *what, int dims, const int64_t *sizes, const int64_t *strides, uint64_t run) {
    static const Clock nothing;
    const Actor outside = {-1, 0, &nothing};
    for (const Capture *capture = captures; capture; capture = capture->next) {
        Touch touch = {.actor = &outside, .what = what, .probe = 1};
        int64_t own_sizes[MAX_DIMS], own_strides[MAX_DIMS];
        memcpy(own_sizes, sizes, (size_t)dims * sizeof *sizes);
        memcpy(own_strides, strides, (size_t)dims * sizeof *strides);
        if (!touch_strided(capture->shadow, &touch, what->address, run, dims, own_sizes, own_strides)) continue;
        if (!touch.earlier.write || allocated_at(touch.low) <= capture->sequence) continue;
        refuse(&touch);
        race.capture = capture->model;
        return 1;
    }
    return 0;
}

/* Tell that what a stream does now, or its next queued item, touches tensors. `words` holds, per tensor: operator name,
 * argument name, dtype name (addresses of texts that stay), whether it is written, bytes of an element, address of the
 * first element, graph << 32 | node + 1 in a replay (else 0), dimensions n, n sizes, n strides in elements. 1: a race,
 * see emulator_order_race(); the tensors before it count as touched. */
EMULATOR_API int emulator_order_access(Stream *stream, const int64_t *words, size_t count) {
    if (!emulator_order_on) return 0;
    int found = 0;
    pthread_mutex_lock(&emulator_lock);
    Shadow *shadow;
    Actor actor = actor_of(stream, &shadow);
    sequence++;
    for (const int64_t *at = words, *end = words + count; at < end && !found && shadow;) {
        int dims = (int)at[7];
        const int64_t *sizes = at + 8, *strides = sizes + dims;
        Description what = {(const char *)(intptr_t)at[0], (const char *)(intptr_t)at[1], (const char *)(intptr_t)at[2],
                            at[3], stream->index, stream->device, dims < ACCESS_DIMS ? dims : ACCESS_DIMS, {0},
                            (uint64_t)at[5], sequence, at[6]};
        int64_t own_sizes[MAX_DIMS], own_strides[MAX_DIMS];
        for (int i = 0; i < dims && i < MAX_DIMS; i++) {
            if (i < ACCESS_DIMS) what.sizes[i] = sizes[i];
            own_sizes[i] = sizes[i];
            own_strides[i] = strides[i] * at[4];
        }
        Touch touch = {.actor = &actor, .what = &what};
        if (captures && !stream->lane && touches_capture(&what, dims, own_sizes, own_strides, (uint64_t)at[4])) found = 1;
        else if (touch_strided(shadow, &touch, what.address, (uint64_t)at[4], dims, own_sizes, own_strides))
            found = refuse(&touch);
        touch_end(&touch);
        at = strides + dims;
    }
    pthread_mutex_unlock(&emulator_lock);
    return found;
}

static size_t describe(int64_t *words, const char *name, const char *argument, const void *address, size_t size, int write) {
    if (emulator_locate(address, NULL, NULL) == -2) return 0;
    int64_t own[] = {(intptr_t)name, (intptr_t)argument, (intptr_t) "bytes", write, 1, (intptr_t)address, 0, 1, (int64_t)size, 1};
    memcpy(words, own, sizeof own);
    return sizeof own / sizeof *own;
}

/* The same for a copy or fill (source NULL) of plain bytes that torch_npu issues by itself. */
aclError emulator_order_copy(Stream *stream, const char *name, const void *target, const void *source, size_t size) {
    if (!emulator_order_on || !stream) return ACL_SUCCESS;
    int64_t words[20];
    size_t count = source ? describe(words, name, "source", source, size, 0) : 0;
    count += describe(words + count, name, "target", target, size, 1);
    if (!emulator_order_access(stream, words, count)) return ACL_SUCCESS;
    return emulator_call(CALL_RACE, stream, NULL, NULL, 0, 0);
}

/* --- flags: words of device memory by which streams wait for each other (external events) --- */

typedef struct Flag {
    uint64_t address;
    Clock clock;
    struct Flag *next;
} Flag;
static Flag *flags;

static Flag *flag_at(uint64_t address) {
    Flag *flag = flags;
    while (flag && flag->address != address) flag = flag->next;
    return flag;
}

/* The item that a stream runs has written a flag: who finds it knows what is before it. */
EMULATOR_API void emulator_order_write_flag(Stream *stream, uint64_t address) {
    pthread_mutex_lock(&emulator_lock);
    emulator_settle(stream, stream->executed + 1);
    Flag *flag = flag_at(address);
    if (!flag && (flag = calloc(1, sizeof *flag))) {
        flag->address = address;
        flag->next = flags;
        flags = flag;
    }
    if (flag) {
        clock_free(&flag->clock);
        clock_merge(&flag->clock, &stream->clock);
        clock_see(&flag->clock, stream->index, emulator_publish(stream));
    }
    pthread_mutex_unlock(&emulator_lock);
}

EMULATOR_API void emulator_order_read_flag(Stream *stream, uint64_t address) {
    pthread_mutex_lock(&emulator_lock);
    emulator_settle(stream, stream->executed + 1);
    const Flag *flag = flag_at(address);
    if (flag) clock_merge(&stream->clock, &flag->clock);
    pthread_mutex_unlock(&emulator_lock);
}
