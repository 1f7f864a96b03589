/* Copies, fills and host functions that torch_npu issues by itself. On an idle stream they run at once; in a capture, or
 * behind pending work, Python queues them. Tensor copies do not come here: _copies.py has them. */
#include <string.h>
#include <unistd.h>

#include "emulator.h"

static int at_once(const Stream *stream) { return !stream || (!stream->model && !emulator_pending(stream)); }

static aclError check(size_t room, size_t count) {
    if (count <= room) return ACL_SUCCESS;
    return emulator_fail(ERROR_PARAMETER, "copy of %zu bytes into a destination of %zu", count, room);
}

EMULATOR_API aclError aclrtMemcpy(void *dst, size_t destMax, const void *src, size_t count, aclrtMemcpyKind kind) {
    (void)kind;
    aclError code = check(destMax, count);
    if (!code) code = emulator_unsafe("aclrtMemcpy");
    if (!code) memmove(dst, src, count);
    return code;
}

EMULATOR_API aclError aclrtMemcpyAsync(void *dst, size_t destMax, const void *src, size_t count, aclrtMemcpyKind kind,
                                       aclrtStream stream) {
    (void)kind;
    aclError code = check(destMax, count);
    if (code) return code;
    if (!at_once(stream)) return emulator_call(CALL_MEMCPY, stream, dst, src, 0, count);
    code = emulator_order_copy(stream, "aclrtMemcpyAsync", dst, src, count);
    if (!code) memmove(dst, src, count);
    return code;
}

EMULATOR_API aclError aclrtMemcpyBatch(void **dsts, size_t *destMaxs, void **srcs, size_t *sizes, size_t numBatches,
                                       aclrtMemcpyBatchAttr *attrs, size_t *attrsIndexes, size_t numAttrs,
                                       size_t *failIndex) {
    (void)attrs;
    (void)attrsIndexes;
    (void)numAttrs;
    for (size_t i = 0; i < numBatches; i++) {
        aclError code = check(destMaxs[i], sizes[i]);
        if (code) { *failIndex = i; return code; }
        memmove(dsts[i], srcs[i], sizes[i]);
    }
    return ACL_SUCCESS;
}

EMULATOR_API aclError aclrtMemset(void *devPtr, size_t maxCount, int32_t value, size_t count) {
    aclError code = check(maxCount, count);
    if (!code) code = emulator_unsafe("aclrtMemset");
    if (!code) memset(devPtr, value, count);
    return code;
}

EMULATOR_API aclError aclrtMemsetAsync(void *devPtr, size_t maxCount, int32_t value, size_t count, aclrtStream stream) {
    aclError code = check(maxCount, count);
    if (code) return code;
    if (!at_once(stream)) return emulator_call(CALL_MEMSET, stream, devPtr, NULL, (uint64_t)value, count);
    code = emulator_order_copy(stream, "aclrtMemsetAsync", devPtr, NULL, count);
    if (!code) memset(devPtr, value, count);
    return code;
}

EMULATOR_API aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc fn, void *args) {
    if (!at_once(stream)) return emulator_call(CALL_HOST_FUNCTION, stream, (void *)fn, args, 0, 0);
    if (stream) emulator_host_sees_stream(stream); /* it may tell any thread of the host */
    fn(args);
    return ACL_SUCCESS;
}

EMULATOR_API aclError aclrtLaunchCallback(aclrtCallback fn, void *userData, aclrtCallbackBlockType blockType,
                                          aclrtStream stream) {
    (void)blockType;
    if (!at_once(stream)) return emulator_call(CALL_HOST_FUNCTION, stream, (void *)fn, userData, 0, 0);
    if (stream) emulator_host_sees_stream(stream);
    fn(userData);
    return ACL_SUCCESS;
}

EMULATOR_API aclError aclrtSubscribeReport(uint64_t threadId, aclrtStream stream) {
    (void)threadId;
    (void)stream;
    return ACL_SUCCESS;
}

EMULATOR_API aclError aclrtUnSubscribeReport(uint64_t threadId, aclrtStream stream) {
    (void)threadId;
    (void)stream;
    return ACL_SUCCESS;
}

EMULATOR_API aclError aclrtProcessReport(int32_t timeout) {
    (void)timeout;
    usleep(1000);
    return ACL_SUCCESS;
}
