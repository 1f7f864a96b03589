/* Graph capture: which streams belong to which capture, and the entry points that hand graphs, task groups and updates to
 * Python (_graphs.py), which owns the nodes. */
#include <stdio.h>

#include "emulator.h"

EMULATOR_API int emulator_stream_count(void);
EMULATOR_API Stream *emulator_stream_at(int index);

static uint64_t last_model, last_group;
static int global_captures; /* open ones of mode GLOBAL */
static _Thread_local int own_captures; /* open ones that this thread began, of mode GLOBAL or THREAD_LOCAL */
static _Thread_local aclmdlRICaptureMode thread_mode = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;

static uint64_t next(uint64_t *counter) { return __atomic_add_fetch(counter, 1, __ATOMIC_SEQ_CST); }

/* Calls that neither a capture records nor a stream orders are refused while one is open, as its mode says. */
aclError emulator_unsafe(const char *function) {
    if (thread_mode == ACL_MODEL_RI_CAPTURE_MODE_RELAXED) return ACL_SUCCESS;
    if (!own_captures && !(thread_mode == ACL_MODEL_RI_CAPTURE_MODE_GLOBAL && global_captures)) return ACL_SUCCESS;
    return emulator_fail(ERROR_CAPTURE_MODE, "error code is 107030 (stream is captured, not support current oper): %s "
                         "while a graph is being captured", function);
}

static void count_capture(aclmdlRICaptureMode mode, int change) {
    if (mode == ACL_MODEL_RI_CAPTURE_MODE_RELAXED) return;
    own_captures += change;
    if (mode == ACL_MODEL_RI_CAPTURE_MODE_GLOBAL) __atomic_add_fetch(&global_captures, change, __ATOMIC_SEQ_CST);
}

EMULATOR_API aclError aclmdlRICaptureBegin(aclrtStream stream, aclmdlRICaptureMode mode) {
    Stream *on = stream;
    if (!on) return emulator_fail(ERROR_PARAMETER, "capture on a null stream");
    if (on->model) return emulator_fail(ERROR_STREAM_CAPTURED, "stream %d is already being captured", on->index);
    uint64_t model = next(&last_model);
    aclError code = emulator_call(CALL_CAPTURE_BEGIN, on, NULL, NULL, model, 0);
    if (code) return code;
    pthread_mutex_lock(&emulator_lock);
    lane_begin(on, model, mode);
    pthread_mutex_unlock(&emulator_lock);
    count_capture(mode, 1);
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
    pthread_mutex_lock(&emulator_lock);
    int is_origin = lane_is_origin(stream);
    int unjoined = is_origin ? lane_unjoined(stream) : -1;
    if (is_origin) count_capture(lane_end(model), -1);
    pthread_mutex_unlock(&emulator_lock);
    if (!is_origin)
        return emulator_fail(ERROR_CAPTURE_UNMATCHED, "the capture was not begun on stream %d", ((Stream *)stream)->index);
    __atomic_sub_fetch(&emulator_captures, 1, __ATOMIC_SEQ_CST);
    *modelRI = (aclmdlRI)(uintptr_t)model;
    /* A failed capture ends without an error here: torch_npu's allocator would never leave the capture. Python raises. */
    return emulator_call(CALL_CAPTURE_END, stream, NULL, NULL, model, (uint64_t)(unjoined + 1));
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

EMULATOR_API aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode *mode) {
    aclmdlRICaptureMode before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return ACL_SUCCESS;
}

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
