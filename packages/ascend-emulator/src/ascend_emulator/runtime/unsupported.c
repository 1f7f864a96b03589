/* What torch_npu 2.13 links and 2.12 looked up by name, and what is not emulated: memory that is mapped piece by piece
 * (expandable segments, handles shared with other processes) and compiled kernels. Each fails and says its name. */
#include "emulator.h"

static aclError refuse(const char *function) {
    return emulator_fail(ERROR_UNSUPPORTED, "%s is not emulated", function);
}

EMULATOR_API aclError aclrtReserveMemAddress(void **virPtr, size_t size, size_t alignment, void *expectPtr,
                                             uint64_t flags) {
    (void)virPtr; (void)size; (void)alignment; (void)expectPtr; (void)flags;
    return refuse(__func__);
}

EMULATOR_API aclError aclrtReleaseMemAddress(void *virPtr) {
    (void)virPtr;
    return refuse(__func__);
}

EMULATOR_API aclError aclrtMallocPhysical(aclrtDrvMemHandle *handle, size_t size, const aclrtPhysicalMemProp *prop,
                                          uint64_t flags) {
    (void)handle; (void)size; (void)prop; (void)flags;
    return refuse(__func__);
}

EMULATOR_API aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
    (void)handle;
    return refuse(__func__);
}

EMULATOR_API aclError aclrtMapMem(void *virPtr, size_t size, size_t offset, aclrtDrvMemHandle handle, uint64_t flags) {
    (void)virPtr; (void)size; (void)offset; (void)handle; (void)flags;
    return refuse(__func__);
}

EMULATOR_API aclError aclrtUnmapMem(void *virPtr) {
    (void)virPtr;
    return refuse(__func__);
}

EMULATOR_API aclError aclrtMemExportToShareableHandle(aclrtDrvMemHandle handle, aclrtMemHandleType handleType,
                                                      uint64_t flags, uint64_t *shareableHandle) {
    (void)handle; (void)handleType; (void)flags; (void)shareableHandle;
    return refuse(__func__);
}

EMULATOR_API aclError aclrtMemImportFromShareableHandle(uint64_t shareableHandle, int32_t deviceId,
                                                        aclrtDrvMemHandle *handle) {
    (void)shareableHandle; (void)deviceId; (void)handle;
    return refuse(__func__);
}

EMULATOR_API aclError aclrtMemSetPidToShareableHandle(uint64_t shareableHandle, int32_t *pid, size_t pidNum) {
    (void)shareableHandle; (void)pid; (void)pidNum;
    return refuse(__func__);
}

EMULATOR_API aclError aclrtBinaryLoadFromData(const void *data, size_t length, const aclrtBinaryLoadOptions *options,
                                              aclrtBinHandle *binHandle) {
    (void)data; (void)length; (void)options; (void)binHandle;
    return refuse(__func__);
}

EMULATOR_API aclError aclrtBinaryGetFunction(const aclrtBinHandle binHandle, const char *kernelName,
                                             aclrtFuncHandle *funcHandle) {
    (void)binHandle; (void)kernelName; (void)funcHandle;
    return refuse(__func__);
}

EMULATOR_API aclError aclrtGetFunctionAddr(aclrtFuncHandle funcHandle, void **aicAddr, void **aivAddr) {
    (void)funcHandle; (void)aicAddr; (void)aivAddr;
    return refuse(__func__);
}

/* Its header is not part of the wheel's runtime headers. */
EMULATOR_API int rtGetC2cCtrlAddr(uint64_t *address, uint32_t *length) {
    (void)address; (void)length;
    return refuse(__func__);
}
