/* Graph capture: which streams belong to which capture, and the entry points that hand graphs, task groups and updates to
 * Python (_graphs.py), which owns the nodes. */
#include <stdio.h>

#include "emulator.h"

EMULATOR_API int emulator_stream_count(void);
EMULATOR_API Stream *emulator_stream_at(int index);

static uint64_t last_model, last_group;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static uint64_t next(uint64_t *counter) {
    pthread_mutex_lock(&lock);
    uint64_t value = ++*counter;
    pthread_mutex_unlock(&lock);
    return value;
}

EMULATOR_API aclError aclmdlRICaptureBegin(aclrtStream stream, aclmdlRICaptureMode mode) {
    (void)mode;
    Stream *on = stream;
    if (!on) return emulator_fail(ERROR_PARAMETER, "capture on a null stream");
    if (on->model) return emulator_fail(ERROR_STREAM_CAPTURED, "stream %d is already being captured", on->index);
    uint64_t model = next(&last_model);
    aclError code = emulator_call(CALL_CAPTURE_BEGIN, on, NULL, NULL, model, 0);
    if (code) return code;
    on->model = model;
    __atomic_add_fetch(&emulator_captures, 1, __ATOMIC_SEQ_CST);
    return ACL_SUCCESS;
}

EMULATOR_API aclError aclmdlRICaptureGetInfo(aclrtStream stream, aclmdlRICaptureStatus *status, aclmdlRI *modelRI) {
    uint64_t model = stream ? ((Stream *)stream)->model : 0;
    *status = model ? ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE : ACL_MODEL_RI_CAPTURE_STATUS_NONE;
    if (modelRI) *modelRI = (aclmdlRI)(uintptr_t)model;
    return ACL_SUCCESS;
}

EMULATOR_API aclError aclmdlRICaptureEnd(aclrtStream stream, aclmdlRI *modelRI) {
    uint64_t model = stream ? ((Stream *)stream)->model : 0;
    if (!model) return emulator_fail(ERROR_NOT_CAPTURING, "end of a capture on a stream that is not being captured");
    for (int i = 0; i < emulator_stream_count(); i++) {
        Stream *other = emulator_stream_at(i);
        if (other->model == model) other->model = 0;
    }
    __atomic_sub_fetch(&emulator_captures, 1, __ATOMIC_SEQ_CST);
    *modelRI = (aclmdlRI)(uintptr_t)model;
    return emulator_call(CALL_CAPTURE_END, stream, NULL, NULL, model, 0);
}

EMULATOR_API aclError aclmdlRIExecuteAsync(aclmdlRI modelRI, aclrtStream stream) {
    if (stream && ((Stream *)stream)->model)
        return emulator_fail(ERROR_STREAM_CAPTURED, "replay on a stream that is being captured");
    return emulator_call(CALL_EXECUTE, stream, NULL, NULL, (uint64_t)(uintptr_t)modelRI, 0);
}

EMULATOR_API aclError aclmdlRIDestroy(aclmdlRI modelRI) {
    return emulator_call(CALL_DESTROY, NULL, NULL, NULL, (uint64_t)(uintptr_t)modelRI, 0);
}

EMULATOR_API aclError aclmdlRICaptureTaskGrpBegin(aclrtStream stream) {
    if (!stream || !((Stream *)stream)->model)
        return emulator_fail(ERROR_NOT_CAPTURING, "task group outside a capture");
    return emulator_call(CALL_GROUP_BEGIN, stream, NULL, NULL, next(&last_group), 0);
}

EMULATOR_API aclError aclmdlRICaptureTaskGrpEnd(aclrtStream stream, aclrtTaskGrp *handle) {
    uint64_t group = 0;
    aclError code = emulator_call(CALL_GROUP_END, stream, &group, NULL, 0, 0);
    *handle = (aclrtTaskGrp)(uintptr_t)group;
    return code;
}

EMULATOR_API aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream stream, aclrtTaskGrp handle) {
    return emulator_call(CALL_UPDATE_BEGIN, stream, NULL, NULL, (uint64_t)(uintptr_t)handle, 0);
}

EMULATOR_API aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream stream) {
    return emulator_call(CALL_UPDATE_END, stream, NULL, NULL, 0, 0);
}

EMULATOR_API aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode *mode) { (void)mode; return ACL_SUCCESS; }

EMULATOR_API aclError aclmdlRIDebugJsonPrint(aclmdlRI modelRI, const char *path, uint32_t flags) {
    (void)modelRI;
    (void)path;
    (void)flags;
    return emulator_fail(ERROR_UNSUPPORTED, "debug_dump of a graph is not emulated");
}

/* --- external events: one word of device memory each --- */

EMULATOR_API aclError aclrtValueWait(void *devAddr, uint64_t value, uint32_t flag, aclrtStream stream) {
    return emulator_call(CALL_VALUE_WAIT, stream, devAddr, NULL, value, flag);
}

EMULATOR_API aclError aclrtValueWrite(void *devAddr, uint64_t value, uint32_t flag, aclrtStream stream) {
    return emulator_call(CALL_VALUE_WRITE, stream, devAddr, NULL, value, flag);
}
