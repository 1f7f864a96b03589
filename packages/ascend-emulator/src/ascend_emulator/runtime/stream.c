/* Streams, events and the vector clocks that order them. Work itself is queued and run by Python (_queue.py); here are the
 * counters that say how far each stream got, so that recording and querying events never needs Python's lock. */
#include <stdlib.h>
#include <string.h>

#include "emulator.h"

#define MAX_STREAMS 4096

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Stream *streams[MAX_STREAMS];
static int stream_count;
static Clock host; /* what the host has waited for */

static int grow(Clock *clock, int count) {
    if (clock->count >= count) return 1;
    uint64_t *entries = realloc(clock->entries, (size_t)count * sizeof *entries);
    if (!entries) return 0;
    memset(entries + clock->count, 0, (size_t)(count - clock->count) * sizeof *entries);
    clock->entries = entries;
    clock->count = count;
    return 1;
}

static void merge(Clock *into, const Clock *from) {
    if (!grow(into, from->count)) return;
    for (int i = 0; i < from->count; i++)
        if (from->entries[i] > into->entries[i]) into->entries[i] = from->entries[i];
}

static void observe(Clock *clock, const Stream *stream, uint64_t ticket) {
    if (grow(clock, stream->index + 1) && clock->entries[stream->index] < ticket) clock->entries[stream->index] = ticket;
}

int emulator_pending(const Stream *stream) { return stream && stream->executed < stream->enqueued; }

static aclError create_stream(aclrtStream *out) {
    Stream *stream = calloc(1, sizeof *stream);
    if (!stream) return emulator_fail(ERROR_MEMORY, "no host memory for a stream");
    pthread_mutex_lock(&lock);
    if (stream_count == MAX_STREAMS) {
        pthread_mutex_unlock(&lock);
        free(stream);
        return emulator_fail(ERROR_MEMORY, "more than %d streams", MAX_STREAMS);
    }
    stream->device = emulator_device();
    stream->index = stream_count;
    streams[stream_count++] = stream;
    pthread_mutex_unlock(&lock);
    *out = stream;
    return ACL_SUCCESS;
}

EMULATOR_API aclError aclrtCreateStream(aclrtStream *stream) { return create_stream(stream); }

EMULATOR_API aclError aclrtCreateStreamWithConfig(aclrtStream *stream, uint32_t priority, uint32_t flag) {
    (void)priority;
    (void)flag;
    return create_stream(stream);
}

/* Stream objects stay: events and clocks refer to them, and a process has few. */
EMULATOR_API aclError aclrtDestroyStream(aclrtStream stream) { (void)stream; return ACL_SUCCESS; }
EMULATOR_API aclError aclrtDestroyStreamForce(aclrtStream stream) { (void)stream; return ACL_SUCCESS; }

EMULATOR_API aclError aclrtStreamGetId(aclrtStream stream, int32_t *streamId) {
    *streamId = stream ? ((Stream *)stream)->index : 0;
    return ACL_SUCCESS;
}

EMULATOR_API aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus *status) {
    *status = emulator_pending(stream) ? ACL_STREAM_STATUS_NOT_READY : ACL_STREAM_STATUS_COMPLETE;
    return ACL_SUCCESS;
}

/* --- what Python asks and tells --- */

EMULATOR_API int emulator_stream_count(void) { return stream_count; }
EMULATOR_API Stream *emulator_stream_at(int index) { return streams[index]; }

/* The item of a stream is done: events recorded behind it get their time. */
EMULATOR_API void emulator_advance(Stream *stream) {
    pthread_mutex_lock(&lock);
    stream->executed++;
    for (Event **link = &stream->waiting; *link;) {
        Event *event = *link;
        if (event->ticket <= stream->executed) {
            event->time = emulator_now();
            *link = event->next;
            event->next = NULL;
        } else {
            link = &event->next;
        }
    }
    pthread_mutex_unlock(&lock);
}

EMULATOR_API uint64_t emulator_host_saw(int stream_index) {
    pthread_mutex_lock(&lock);
    uint64_t ticket = stream_index < host.count ? host.entries[stream_index] : 0;
    pthread_mutex_unlock(&lock);
    return ticket;
}

EMULATOR_API void emulator_host_sees_stream(Stream *stream) {
    pthread_mutex_lock(&lock);
    observe(&stream->clock, stream, stream->enqueued);
    merge(&host, &stream->clock);
    pthread_mutex_unlock(&lock);
}

EMULATOR_API void emulator_host_sees_event(Event *event) {
    pthread_mutex_lock(&lock);
    if (event->stream) merge(&host, &event->clock);
    pthread_mutex_unlock(&lock);
}

EMULATOR_API Stream *emulator_event_point(Event *event, uint64_t *ticket) {
    *ticket = event->ticket;
    return event->stream;
}

/* --- events --- */

static aclError create_event(aclrtEvent *out, uint32_t flags) {
    Event *event = calloc(1, sizeof *event);
    if (!event) return emulator_fail(ERROR_MEMORY, "no host memory for an event");
    event->flags = flags;
    *out = event;
    return ACL_SUCCESS;
}

EMULATOR_API aclError aclrtCreateEvent(aclrtEvent *event) { return create_event(event, 0); }
EMULATOR_API aclError aclrtCreateEventWithFlag(aclrtEvent *event, uint32_t flag) { return create_event(event, flag); }
EMULATOR_API aclError aclrtCreateEventExWithFlag(aclrtEvent *event, uint32_t flag) { return create_event(event, flag); }

static void forget(Event *event) {
    if (!event->stream) return;
    for (Event **link = &event->stream->waiting; *link; link = &(*link)->next)
        if (*link == event) { *link = event->next; event->next = NULL; return; }
}

static int done(const Event *event) { return !event->stream || event->stream->executed >= event->ticket; }

EMULATOR_API aclError aclrtDestroyEvent(aclrtEvent event) {
    Event *it = event;
    pthread_mutex_lock(&lock);
    forget(it);
    pthread_mutex_unlock(&lock);
    free(it->clock.entries);
    free(it);
    return ACL_SUCCESS;
}

EMULATOR_API aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
    Event *it = event;
    Stream *on = stream;
    if (!on) return emulator_fail(ERROR_PARAMETER, "event recorded on a null stream");
    pthread_mutex_lock(&lock);
    forget(it);
    it->model = on->model;
    it->stream = on;
    it->ticket = on->model ? 0 : on->enqueued;
    it->time = 0;
    if (!on->model) {
        observe(&on->clock, on, on->enqueued);
        if (it->clock.count) memset(it->clock.entries, 0, (size_t)it->clock.count * sizeof *it->clock.entries);
        merge(&it->clock, &on->clock);
        if (done(it)) {
            it->time = emulator_now();
        } else {
            it->next = on->waiting;
            on->waiting = it;
        }
    }
    pthread_mutex_unlock(&lock);
    return ACL_SUCCESS;
}

EMULATOR_API aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) {
    Event *it = event;
    Stream *on = stream;
    if (!on) return emulator_fail(ERROR_PARAMETER, "a null stream waits for an event");
    if (it->model && it->stream && it->stream->model == it->model) { /* the capture forks or joins */
        if (on->model && on->model != it->model)
            return emulator_fail(ERROR_CAPTURED_EVENT, "stream %d is in another capture than the event", on->index);
        on->model = it->model;
        return ACL_SUCCESS;
    }
    if (on->model) return ACL_SUCCESS; /* ordered before the capture as a whole */
    pthread_mutex_lock(&lock);
    merge(&on->clock, &it->clock);
    int finished = done(it);
    Stream *other = it->stream;
    uint64_t ticket = it->ticket;
    pthread_mutex_unlock(&lock);
    if (finished || other == on) return ACL_SUCCESS;
    return emulator_call(CALL_WAIT_EVENT, on, other, NULL, ticket, 0);
}

EMULATOR_API aclError aclrtResetEvent(aclrtEvent event, aclrtStream stream) {
    (void)stream;
    pthread_mutex_lock(&lock);
    forget(event);
    ((Event *)event)->stream = NULL;
    pthread_mutex_unlock(&lock);
    return ACL_SUCCESS;
}

EMULATOR_API aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus *status) {
    *status = done(event) ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
    return ACL_SUCCESS;
}

EMULATOR_API aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus *status) {
    *status = done(event) ? ACL_EVENT_WAIT_STATUS_COMPLETE : ACL_EVENT_WAIT_STATUS_NOT_READY;
    return ACL_SUCCESS;
}

EMULATOR_API aclError aclrtEventElapsedTime(float *ms, aclrtEvent startEvent, aclrtEvent endEvent) {
    const Event *first = startEvent, *last = endEvent;
    if (first->time == 0 || last->time == 0)
        return emulator_fail(ERROR_EVENT, "elapsed time of an event that was not recorded or not reached");
    *ms = (float)(last->time - first->time);
    return ACL_SUCCESS;
}

EMULATOR_API aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t *timestamp) {
    *timestamp = (uint64_t)(((Event *)event)->time * 1e3);
    return ACL_SUCCESS;
}

/* --- waits of the host --- */

static aclError captured(const char *what) {
    return emulator_fail(ERROR_STREAM_CAPTURED, "%s while a graph is being captured", what);
}

EMULATOR_API aclError aclrtSynchronizeStream(aclrtStream stream) {
    Stream *on = stream;
    if (!on) return ACL_SUCCESS;
    if (on->model) return captured("synchronize of the stream");
    if (emulator_active) return emulator_call(CALL_SYNCHRONIZE_STREAM, on, NULL, NULL, 0, 0);
    emulator_host_sees_stream(on);
    return ACL_SUCCESS;
}

EMULATOR_API aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t timeout) {
    (void)timeout;
    return aclrtSynchronizeStream(stream);
}

EMULATOR_API aclError aclrtSynchronizeEvent(aclrtEvent event) {
    Event *it = event;
    if (it->model && it->stream && it->stream->model == it->model)
        return emulator_fail(ERROR_CAPTURED_EVENT, "synchronize of an event that was recorded in the running capture");
    if (emulator_active && it->stream) return emulator_call(CALL_SYNCHRONIZE_EVENT, NULL, it, NULL, 0, 0);
    emulator_host_sees_event(it);
    return ACL_SUCCESS;
}

EMULATOR_API aclError aclrtSynchronizeDevice(void) {
    int device = emulator_device();
    for (int i = 0; i < stream_count; i++)
        if (streams[i]->device == device && streams[i]->model) return captured("synchronize of the device");
    if (emulator_active) return emulator_call(CALL_SYNCHRONIZE_DEVICE, NULL, NULL, NULL, (uint64_t)device, 0);
    for (int i = 0; i < stream_count; i++)
        if (streams[i]->device == device) emulator_host_sees_stream(streams[i]);
    return ACL_SUCCESS;
}

EMULATOR_API aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout) {
    (void)timeout;
    return aclrtSynchronizeDevice();
}

/* --- settings that change nothing here --- */
EMULATOR_API aclError aclrtSetStreamFailureMode(aclrtStream stream, uint64_t mode) {
    (void)stream;
    (void)mode;
    return ACL_SUCCESS;
}

EMULATOR_API aclError aclrtSetStreamAttribute(aclrtStream stream, aclrtStreamAttr stmAttrType, aclrtStreamAttrValue *value) {
    (void)stream;
    (void)stmAttrType;
    (void)value;
    return ACL_SUCCESS;
}

EMULATOR_API aclError aclrtSetStreamOverflowSwitch(aclrtStream stream, uint32_t flag) {
    (void)stream;
    (void)flag;
    return ACL_SUCCESS;
}
