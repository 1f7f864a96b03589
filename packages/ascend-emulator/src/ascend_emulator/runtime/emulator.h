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
    ERROR_PARAMETER = 107000,
    ERROR_DEVICE = 107001,
    ERROR_NO_CONTEXT = 107002,
    ERROR_EVENT = 107003,
    ERROR_STREAM_CAPTURED = 107027,
    ERROR_CAPTURED_EVENT = 107028,
    ERROR_NOT_CAPTURING = 107029,
    ERROR_UNSUPPORTED = 207000,
    ERROR_MEMORY = 207001,
    ERROR_NO_KERNEL = 500002,
    ERROR_DEFERRED = 507015
};

/* Vector clock: entry i is the number of work items of stream i that are ordered before the owner. */
typedef struct {
    uint64_t *entries;
    int count;
} Clock;

/* The first five fields are read (and `enqueued` is written) by _runtime.py: keep both in step. */
typedef struct Stream {
    int32_t device;
    int32_t index;
    uint64_t model;
    uint64_t enqueued;
    uint64_t executed;
    Clock clock;
    struct Event *waiting; /* events recorded behind pending work: their time is taken when the work is done */
} Stream;

typedef struct Event {
    uint32_t flags;
    uint64_t model;  /* capture that recorded it, 0 when none */
    Stream *stream;  /* NULL before the first record */
    uint64_t ticket; /* done once stream->executed >= ticket */
    double time;     /* milliseconds, 0 when not reached */
    Clock clock;
    struct Event *next;
} Event;

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
    CALL_UPDATE_END
};

aclError emulator_fail(aclError code, const char *format, ...) __attribute__((format(printf, 2, 3)));
aclError emulator_call(int kind, void *stream, void *first, const void *second, uint64_t value, uint64_t size);

/* Nonzero while Python holds pending work, deliveries or checks on any stream. */
extern EMULATOR_API int emulator_active;
/* Nonzero while an operator has to look at its stream before it runs; read by native/fallback.cpp. */
extern EMULATOR_API int emulator_slow;
extern EMULATOR_API int emulator_captures;

int emulator_device(void);
int emulator_device_count(void);
int emulator_pending(const Stream *stream);
double emulator_now(void);

#endif
