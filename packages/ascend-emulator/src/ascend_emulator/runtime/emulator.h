/* What the runtime's files share: error text, streams, events, clocks and the call into Python that schedules work.
 * It owns no behaviour; every file says at its top what it owns. */
#ifndef ASCEND_EMULATOR_H
#define ASCEND_EMULATOR_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#include "acl/acl.h"
#include "acl/acl_op_compiler.h"

#define EMULATOR_API __attribute__((visibility("default")))
#define EMULATOR_MAX_DEVICES 16

enum {
    EMULATOR_POISON = 0xFF,
    STEP_BITS = 20, /* of a stamp: what a stream published since its last finished item */
    ERROR_PARAMETER = 107000,
    ERROR_DEVICE = 107001,
    ERROR_NO_CONTEXT = 107002,
    ERROR_EVENT = 107003,
    ERROR_STREAM_CAPTURED = 107027,
    ERROR_CAPTURED_EVENT = 107028,
    ERROR_NOT_CAPTURING = 107029,
    ERROR_CAPTURE_MODE = 107030,
    ERROR_CAPTURE_UNMATCHED = 107036,
    ERROR_UNSUPPORTED = 207000,
    ERROR_MEMORY = 207001,
    ERROR_NO_KERNEL = 500002,
    ERROR_DEFERRED = 507015
};

/* A point in a stream's work: number of the item << STEP_BITS | what the stream published since the item before it. */
typedef uint64_t Stamp;

/* Vector clock: work of stream i with a stamp below entry i is ordered before the owner. */
typedef struct {
    Stamp *entries;
    int count;
} Clock;

/* One record of an event, which the event and the waits for it share. */
typedef struct Point {
    int references;
    int reached;
    struct Stream *stream;
    uint64_t ticket; /* reached once stream->executed >= ticket */
    double time;     /* milliseconds, when reached */
    Clock clock;     /* what is ordered before it, when reached */
    struct Point *next;
} Point;

/* Something that a stream knows from one of its queued items on: what the host had waited for when it was issued. */
typedef struct Join {
    uint64_t ticket;
    Clock clock;
    struct Join *next;
} Join;

/* The first five fields are read by _runtime.py: keep both in step. */
typedef struct Stream {
    int32_t device;
    int32_t index;
    uint64_t model;
    uint64_t enqueued;
    uint64_t executed;
    uint64_t step;
    uint64_t host_seen, host_queued; /* version of the host's clock in `clock`, and behind the last queued item */
    Clock clock;                     /* what is ordered before the item that runs next */
    Point *waiting;                  /* recorded behind pending work */
    Join *joins, *last_join;
    struct Lane *lane;               /* while it is captured (order.c) */
} Stream;

typedef struct Event {
    uint32_t flags;
    uint64_t model; /* capture that recorded it, 0 when none */
    Point *point;   /* NULL before the first record */
} Event;

/* Who touches memory: a stream, or a stream inside a capture. */
typedef struct {
    int lane;
    Stamp stamp;
    const Clock *clock;
} Actor;

/* Kinds of call into Python (_runtime.py: class Call). */
enum {
    CALL_WAIT_EVENT = 1,
    CALL_VALUE_WAIT,
    CALL_VALUE_WRITE,
    CALL_MEMCPY,
    CALL_MEMSET,
    CALL_HOST_FUNCTION,
    CALL_EXECUTE,
    CALL_SYNCHRONIZE_STREAM,
    CALL_SYNCHRONIZE_EVENT,
    CALL_SYNCHRONIZE_DEVICE,
    CALL_CAPTURE_BEGIN,
    CALL_CAPTURE_END,
    CALL_DESTROY,
    CALL_GROUP_BEGIN,
    CALL_GROUP_END,
    CALL_UPDATE_BEGIN,
    CALL_UPDATE_END,
    CALL_RACE,
    CALL_CAPTURE_FAILED
};

aclError emulator_fail(aclError code, const char *format, ...) __attribute__((format(printf, 2, 3)));
aclError emulator_call(int kind, void *stream, void *first, const void *second, uint64_t value, uint64_t size);

/* Nonzero while Python holds pending work, deliveries or checks on any stream. */
extern EMULATOR_API int emulator_active;
/* Nonzero while an operator has to look at its stream before it runs; read by native/fallback.cpp. */
extern EMULATOR_API int emulator_slow;
extern EMULATOR_API int emulator_captures;

/* Guards streams, events, clocks and the order of accesses. */
extern pthread_mutex_t emulator_lock;

void clock_merge(Clock *into, const Clock *from);
void clock_see(Clock *clock, int lane, Stamp bound);
void clock_free(Clock *clock);
Stamp emulator_publish(Stream *stream); /* bound of all that the stream has done; what follows is beyond it */
void emulator_settle(Stream *stream, uint64_t ticket);
void emulator_host_sees_stream(Stream *stream);

/* order.c; the lanes' functions are called under emulator_lock. */
extern EMULATOR_API int emulator_order_on;
aclError emulator_order_copy(Stream *stream, const char *name, const void *target, const void *source, size_t size);
void order_drop(const void *address, size_t size);
void lane_record(Stream *stream, Point *point);
void lane_join(Stream *stream, uint64_t model, const Point *point);
void lane_begin(Stream *stream, uint64_t model, aclmdlRICaptureMode mode);
int lane_is_origin(const Stream *stream);
int lane_unjoined(const Stream *origin); /* index of a stream that the capture's origin has not waited for, or -1 */
aclmdlRICaptureMode lane_end(uint64_t model);

aclError emulator_unsafe(const char *function); /* graph.c */
int emulator_locate(const void *address, uint64_t *start, uint64_t *size);

int emulator_device(void);
int emulator_device_count(void);
int emulator_pending(const Stream *stream);
double emulator_now(void);

#endif
