/* Every entry point that would run a device kernel: each fails and says which operator asked, so that an operator without
 * an emulated kernel can never pass silently. */
#include "emulator.h"

static aclError refuse(const char *operator_name) {
    return emulator_fail(ERROR_NO_KERNEL,
                         "no emulated kernel for operator %s; ascend_emulator.register_kernel() adds one",
                         operator_name ? operator_name : "(unnamed)");
}

EMULATOR_API aclError aclopCompileAndExecute(const char *opType, int numInputs, const aclTensorDesc *const inputDesc[],
                                             const aclDataBuffer *const inputs[], int numOutputs,
                                             const aclTensorDesc *const outputDesc[], aclDataBuffer *const outputs[],
                                             const aclopAttr *attr, aclopEngineType engineType,
                                             aclopCompileType compileFlag, const char *opPath, aclrtStream stream) {
    (void)numInputs; (void)inputDesc; (void)inputs; (void)numOutputs; (void)outputDesc; (void)outputs; (void)attr;
    (void)engineType; (void)compileFlag; (void)opPath; (void)stream;
    return refuse(opType);
}

EMULATOR_API aclError aclopCompileAndExecuteV2(const char *opType, int numInputs, aclTensorDesc *inputDesc[],
                                               aclDataBuffer *inputs[], int numOutputs, aclTensorDesc *outputDesc[],
                                               aclDataBuffer *outputs[], aclopAttr *attr, aclopEngineType engineType,
                                               aclopCompileType compileFlag, const char *opPath, aclrtStream stream) {
    (void)numInputs; (void)inputDesc; (void)inputs; (void)numOutputs; (void)outputDesc; (void)outputs; (void)attr;
    (void)engineType; (void)compileFlag; (void)opPath; (void)stream;
    return refuse(opType);
}

EMULATOR_API aclError aclrtLaunchKernelWithHostArgs(aclrtFuncHandle funcHandle, uint32_t blockDim, aclrtStream stream,
                                                    aclrtLaunchKernelCfg *cfg, void *hostArgs, size_t argsSize,
                                                    aclrtPlaceHolderInfo *placeHolderArray, size_t placeHolderNum) {
    (void)funcHandle; (void)blockDim; (void)stream; (void)cfg; (void)hostArgs; (void)argsSize; (void)placeHolderArray;
    (void)placeHolderNum;
    return refuse("(compiled kernel)");
}

/* Runtime calls below ACL; their headers are not part of the wheel. */
EMULATOR_API int rtKernelLaunch(const void *stub, uint32_t blocks, void *args, uint32_t size, void *sm, void *stream) {
    (void)stub; (void)blocks; (void)args; (void)size; (void)sm; (void)stream;
    return refuse("(raw kernel)");
}

EMULATOR_API int rtDevBinaryRegister(const void *binary, void **handle) {
    (void)binary; (void)handle;
    return refuse("(kernel binary)");
}

EMULATOR_API int rtFunctionRegister(void *handle, const void *stub, const char *name, const void *device_function,
                                    uint32_t mode) {
    (void)handle; (void)stub; (void)device_function; (void)mode;
    return refuse(name);
}
