/* Devices, contexts, error text and the hook into Python. It does not own memory (memory.c) or streams (stream.c). */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "emulator.h"

typedef aclError (*PythonCall)(int kind, void *stream, void *first, const void *second, uint64_t value, uint64_t size);

static _Thread_local char message[4096];
static _Thread_local int current_device = -1; /* a thread has no device before its first aclrtSetDevice */
static char contexts[EMULATOR_MAX_DEVICES];
static int device_count = 1;
static PythonCall python_call;

int emulator_active;
int emulator_slow;
int emulator_captures;

EMULATOR_API void emulator_set_call(PythonCall call) { python_call = call; }
EMULATOR_API void emulator_set_message(const char *text) { snprintf(message, sizeof message, "%s", text); }
EMULATOR_API void emulator_set_device_count(int count) { device_count = count; }

aclError emulator_fail(aclError code, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int used = snprintf(message, sizeof message, "ascend_emulator: ");
    vsnprintf(message + used, sizeof message - used, format, arguments);
    va_end(arguments);
    return code;
}

aclError emulator_call(int kind, void *stream, void *first, const void *second, uint64_t value, uint64_t size) {
    if (!python_call) return emulator_fail(ERROR_UNSUPPORTED, "the runtime was used before install() had finished");
    return python_call(kind, stream, first, second, value, size);
}

int emulator_device(void) { return current_device < 0 ? 0 : current_device; }
int emulator_device_count(void) { return device_count; }

double emulator_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e3 + now.tv_nsec * 1e-6;
}

EMULATOR_API const char *aclGetRecentErrMsg(void) { return message; }
EMULATOR_API aclError aclInit(const char *configPath) { (void)configPath; return ACL_SUCCESS; }
EMULATOR_API aclError aclFinalize(void) { return ACL_SUCCESS; }
EMULATOR_API const char *aclrtGetSocName(void) { return "Ascend910B3"; }

EMULATOR_API aclError aclrtGetDeviceCount(uint32_t *count) { *count = (uint32_t)device_count; return ACL_SUCCESS; }

EMULATOR_API aclError aclrtSetDevice(int32_t deviceId) {
    if (deviceId < 0 || deviceId >= device_count)
        return emulator_fail(ERROR_DEVICE, "device %d does not exist: install(devices=%d) gives npu:0..npu:%d", deviceId,
                             device_count, device_count - 1);
    current_device = deviceId;
    return ACL_SUCCESS;
}

EMULATOR_API aclError aclrtGetDevice(int32_t *deviceId) {
    if (current_device < 0) return emulator_fail(ERROR_NO_CONTEXT, "this thread has set no device");
    *deviceId = current_device;
    return ACL_SUCCESS;
}

EMULATOR_API aclError aclrtResetDevice(int32_t deviceId) { (void)deviceId; return ACL_SUCCESS; }

EMULATOR_API aclError aclrtGetCurrentContext(aclrtContext *context) {
    if (current_device < 0) return emulator_fail(ERROR_NO_CONTEXT, "this thread has set no device");
    *context = &contexts[current_device];
    return ACL_SUCCESS;
}

EMULATOR_API aclError aclrtSetCurrentContext(aclrtContext context) {
    ptrdiff_t device = (char *)context - contexts;
    if (device < 0 || device >= device_count) return emulator_fail(ERROR_PARAMETER, "unknown context %p", context);
    current_device = (int)device;
    return ACL_SUCCESS;
}

EMULATOR_API aclError aclrtGetPrimaryCtxState(int32_t deviceId, uint32_t *flags, int32_t *active) {
    (void)deviceId;
    if (flags) *flags = 0;
    *active = 1;
    return ACL_SUCCESS;
}

EMULATOR_API aclError aclGetDeviceCapability(uint32_t deviceId, aclDeviceInfo deviceInfo, int64_t *value) {
    (void)deviceId;
    (void)deviceInfo;
    *value = 24; /* AI cores */
    return ACL_SUCCESS;
}

EMULATOR_API aclError aclrtGetDeviceInfo(uint32_t deviceId, aclrtDevAttr attr, int64_t *value) {
    (void)deviceId;
    (void)attr;
    *value = 0;
    return ACL_SUCCESS;
}

EMULATOR_API aclError aclrtGetDeviceUtilizationRate(int32_t deviceId, aclrtUtilizationInfo *utilizationInfo) {
    (void)deviceId;
    memset(utilizationInfo, 0, sizeof *utilizationInfo);
    return ACL_SUCCESS;
}

EMULATOR_API aclError aclrtDeviceGetBareTgid(int32_t *pid) { *pid = (int32_t)getpid(); return ACL_SUCCESS; }

EMULATOR_API aclError aclrtDeviceCanAccessPeer(int32_t *canAccessPeer, int32_t deviceId, int32_t peerDeviceId) {
    *canAccessPeer = deviceId != peerDeviceId;
    return ACL_SUCCESS;
}

EMULATOR_API aclError aclrtDeviceEnablePeerAccess(int32_t peerDeviceId, uint32_t flags) {
    (void)peerDeviceId;
    (void)flags;
    return ACL_SUCCESS;
}
