/* Streams, events and what each knows of the others (clock.c). Work itself is queued and run by Python (_queue.py); here are the
 * counters that say how far each stream got, so that recording and querying events never needs Python's lock. */
#include <stdlib.h>
#include <string.h>

#include "emulator.h"

#define MAX_STREAMS 4096

pthread_mutex_t emulator_lock = PTHREAD_MUTEX_INITIALIZER;
static Stream *streams[MAX_STREAMS];
static int stream_count;
static Clock host; /* what the host has waited for; its threads count as one */
static uint64_t host_version = 1;

/* The bound of a whole item. */
static Stamp after(uint64_t ticket) { return (ticket + 1) << STEP_BITS; }

Stamp emulator_publish(Stream *stream) {
    if (stream->step + 1 == (uint64_t)1 << STEP_BITS && stream->executed == stream->enqueued) {
        stream->enqueued++; /* as if an empty item had run */
        stream->executed++;
        stream->step = 0;
    }
    return (((stream->executed + 1) << STEP_BITS) | stream->step++) + 1;
}

/* Let the stream know what it has to know before the item `ticket`. */
void emulator_settle(Stream *stream, uint64_t ticket) {
    while (stream->joins && stream->joins->ticket <= ticket) {
        Join *join = stream->joins;
        clock_merge(&stream->clock, &join->clock);
        stream->joins = join->next;
        if (!stream->joins) stream->last_join = NULL;
        clock_free(&join->clock);
        free(join);
    }
    if (stream->executed == stream->enqueued && stream->host_seen != host_version) {
        clock_merge(&stream->clock, &host);
        stream->host_seen = host_version;
    }
}

static void join_later(Stream *stream, uint64_t ticket, const Clock *clock) {
    Join *join = calloc(1, sizeof *join);
    if (!join) return;
    join->ticket = ticket;
    clock_merge(&join->clock, clock);
    if (stream->last_join) stream->last_join->next = join; else stream->joins = join;
    stream->last_join = join;
}

static void host_sees(const Clock *clock) {
    clock_merge(&host, clock);
    host_version++;
}

static void release_point(Point *point) {
    if (!point || --point->references) return;
    clock_free(&point->clock);
    free(point);
}

static void reach(Point *point, Stamp own) {
    clock_merge(&point->clock, &point->stream->clock);
    clock_see(&point->clock, point->stream->index, own);
    point->time = emulator_now();
    point->reached = 1;
}

/* --- streams --- */

int emulator_pending(const Stream *stream) { return stream && stream->executed < stream->enqueued; }

static aclError create_stream(aclrtStream *out) {
    Stream *stream = calloc(1, sizeof *stream);
    if (!stream) return emulator_fail(ERROR_MEMORY, "no host memory for a stream");
    pthread_mutex_lock(&emulator_lock);
    if (stream_count == MAX_STREAMS) {
        pthread_mutex_unlock(&emulator_lock);
        free(stream);
        return emulator_fail(ERROR_MEMORY, "more than %d streams", MAX_STREAMS);
    }
    stream->device = emulator_device();
    stream->index = stream_count;
    streams[stream_count++] = stream;
    pthread_mutex_unlock(&emulator_lock);
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

static aclError captured(const Stream *stream, const char *what) {
    emulator_call(CALL_CAPTURE_FAILED, NULL, NULL, what, stream->model, 0);
    return emulator_fail(ERROR_STREAM_CAPTURED, "%s while a graph is being captured", what);
}

EMULATOR_API aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus *status) {
    if (stream && ((Stream *)stream)->model) return captured(stream, "query of the stream");
    *status = emulator_pending(stream) ? ACL_STREAM_STATUS_NOT_READY : ACL_STREAM_STATUS_COMPLETE;
    return ACL_SUCCESS;
}

/* --- what Python asks and tells --- */

EMULATOR_API int emulator_stream_count(void) { return stream_count; }
EMULATOR_API Stream *emulator_stream_at(int index) { return streams[index]; }

/* Number of a new queued item. */
EMULATOR_API uint64_t emulator_enqueue(Stream *stream) {
    pthread_mutex_lock(&emulator_lock);
    uint64_t ticket = ++stream->enqueued;
    if (stream->host_queued != host_version) {
        join_later(stream, ticket, &host);
        stream->host_queued = host_version;
    }
    pthread_mutex_unlock(&emulator_lock);
    return ticket;
}

/* The item of a stream is done: events recorded behind it are reached. */
EMULATOR_API void emulator_advance(Stream *stream) {
    pthread_mutex_lock(&emulator_lock);
    emulator_settle(stream, stream->executed + 1);
    stream->executed++;
    stream->step = 0;
    for (Point **link = &stream->waiting; *link;) {
        Point *point = *link;
        if (point->ticket <= stream->executed) {
            reach(point, after(point->ticket));
            *link = point->next;
            release_point(point);
        } else {
            link = &point->next;
        }
    }
    pthread_mutex_unlock(&emulator_lock);
}

/* Ticket up to which the host has waited for a stream. */
EMULATOR_API uint64_t emulator_host_saw(int stream_index) {
    pthread_mutex_lock(&emulator_lock);
    Stamp bound = stream_index < host.count ? host.entries[stream_index] : 0;
    pthread_mutex_unlock(&emulator_lock);
    return bound >> STEP_BITS ? (bound >> STEP_BITS) - 1 : 0;
}

/* A stream goes on after all that another one has done. */
EMULATOR_API void emulator_join_stream(Stream *stream, Stream *other) {
    pthread_mutex_lock(&emulator_lock);
    emulator_settle(other, other->executed + 1);
    clock_merge(&stream->clock, &other->clock);
    clock_see(&stream->clock, other->index, emulator_publish(other));
    pthread_mutex_unlock(&emulator_lock);
}

EMULATOR_API void emulator_host_sees_stream(Stream *stream) {
    pthread_mutex_lock(&emulator_lock);
    emulator_settle(stream, stream->executed + 1);
    Clock seen = {0};
    clock_merge(&seen, &stream->clock);
    clock_see(&seen, stream->index, emulator_publish(stream));
    host_sees(&seen);
    clock_free(&seen);
    pthread_mutex_unlock(&emulator_lock);
}

EMULATOR_API void emulator_host_sees_event(const Event *event) {
    pthread_mutex_lock(&emulator_lock);
    if (event->point && event->point->reached && !event->model) host_sees(&event->point->clock);
    pthread_mutex_unlock(&emulator_lock);
}

EMULATOR_API Stream *emulator_event_point(const Event *event, uint64_t *ticket) {
    *ticket = event->point && !event->model ? event->point->ticket : 0;
    return event->point ? event->point->stream : NULL;
}

/* A stream has waited for a point; the wait's hold on it ends. */
EMULATOR_API void emulator_join_point(Stream *stream, Point *point) {
    pthread_mutex_lock(&emulator_lock);
    if (point->reached) clock_merge(&stream->clock, &point->clock);
    release_point(point);
    pthread_mutex_unlock(&emulator_lock);
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

static int done(const Event *event) {
    const Point *point = event->point;
    return !point || event->model || point->stream->executed >= point->ticket;
}

static void forget(Event *event) {
    release_point(event->point);
    event->point = NULL;
    event->model = 0;
}

EMULATOR_API aclError aclrtDestroyEvent(aclrtEvent event) {
    pthread_mutex_lock(&emulator_lock);
    forget(event);
    pthread_mutex_unlock(&emulator_lock);
    free(event);
    return ACL_SUCCESS;
}

EMULATOR_API aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
    Event *it = event;
    Stream *on = stream;
    if (!on) return emulator_fail(ERROR_PARAMETER, "event recorded on a null stream");
    Point *point = calloc(1, sizeof *point);
    if (!point) return emulator_fail(ERROR_MEMORY, "no host memory for an event");
    *point = (Point){.references = 1, .stream = on, .ticket = on->enqueued};
    pthread_mutex_lock(&emulator_lock);
    forget(it);
    it->point = point;
    it->model = on->model;
    if (on->model) {
        lane_record(on, point);
    } else if (emulator_pending(on)) {
        point->references++;
        point->next = on->waiting;
        on->waiting = point;
    } else {
        emulator_settle(on, on->executed + 1);
        reach(point, emulator_publish(on));
    }
    pthread_mutex_unlock(&emulator_lock);
    return ACL_SUCCESS;
}

EMULATOR_API aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) {
    Event *it = event;
    Stream *on = stream;
    if (!on) return emulator_fail(ERROR_PARAMETER, "a null stream waits for an event");
    pthread_mutex_lock(&emulator_lock);
    Point *point = it->point;
    if (it->model && point->stream->model == it->model) { /* the capture forks or joins */
        uint64_t model = on->model;
        if (!model || model == it->model) lane_join(on, it->model, point);
        pthread_mutex_unlock(&emulator_lock);
        if (model && model != it->model)
            return emulator_fail(ERROR_CAPTURED_EVENT, "stream %d is in another capture than the event", on->index);
        return ACL_SUCCESS;
    }
    if (on->model || it->model || !point || point->stream == on) { /* before the capture as a whole, or already so */
        pthread_mutex_unlock(&emulator_lock);
        return ACL_SUCCESS;
    }
    int finished = point->reached;
    if (!finished) point->references++;
    else if (emulator_pending(on)) join_later(on, on->enqueued + 1, &point->clock);
    else clock_merge(&on->clock, &point->clock);
    Stream *other = point->stream;
    uint64_t ticket = point->ticket;
    pthread_mutex_unlock(&emulator_lock);
    if (finished) return ACL_SUCCESS;
    return emulator_call(CALL_WAIT_EVENT, on, other, point, ticket, 0);
}

EMULATOR_API aclError aclrtResetEvent(aclrtEvent event, aclrtStream stream) {
    (void)stream;
    pthread_mutex_lock(&emulator_lock);
    forget(event);
    pthread_mutex_unlock(&emulator_lock);
    return ACL_SUCCESS;
}

static int in_capture(const Event *event) { return event->model && event->point->stream->model == event->model; }

static aclError captured_event(const char *what) {
    return emulator_fail(ERROR_CAPTURED_EVENT, "%s of an event that was recorded in the running capture", what);
}

EMULATOR_API aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus *status) {
    if (in_capture(event)) return captured_event("query");
    *status = done(event) ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
    return ACL_SUCCESS;
}

EMULATOR_API aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus *status) {
    *status = done(event) ? ACL_EVENT_WAIT_STATUS_COMPLETE : ACL_EVENT_WAIT_STATUS_NOT_READY;
    return ACL_SUCCESS;
}

EMULATOR_API aclError aclrtEventElapsedTime(float *ms, aclrtEvent startEvent, aclrtEvent endEvent) {
    const Point *first = ((Event *)startEvent)->point, *last = ((Event *)endEvent)->point;
    if (!first || !last || !first->reached || !last->reached)
        return emulator_fail(ERROR_EVENT, "elapsed time of an event that was not recorded or not reached");
    *ms = (float)(last->time - first->time);
    return ACL_SUCCESS;
}

EMULATOR_API aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t *timestamp) {
    const Point *point = ((Event *)event)->point;
    *timestamp = point ? (uint64_t)(point->time * 1e3) : 0;
    return ACL_SUCCESS;
}

/* --- waits of the host --- */

EMULATOR_API aclError aclrtSynchronizeStream(aclrtStream stream) {
    Stream *on = stream;
    if (!on) return ACL_SUCCESS;
    if (on->model) return captured(on, "synchronize of the stream");
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
    if (in_capture(it)) return captured_event("synchronize");
    if (emulator_active && it->point) return emulator_call(CALL_SYNCHRONIZE_EVENT, NULL, it, NULL, 0, 0);
    emulator_host_sees_event(it);
    return ACL_SUCCESS;
}

EMULATOR_API aclError aclrtSynchronizeDevice(void) {
    int device = emulator_device();
    for (int i = 0; i < stream_count; i++)
        if (streams[i]->device == device && streams[i]->model) return captured(streams[i], "synchronize of the device");
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
