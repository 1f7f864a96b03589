/* Symbols that torch_npu links and that decide nothing: descriptors and attributes of operators that launch.c will refuse,
 * logs, dumps, profiler hooks, settings. */
#include <stdlib.h>
#include <string.h>

#include "emulator.h"

#define MAX_DIMS 32

struct aclTensorDesc {
    aclDataType data_type;
    aclFormat format;
    size_t dim_count;
    int64_t dims[MAX_DIMS];
};
struct aclDataBuffer {
    void *data;
    size_t size;
};
struct aclopAttr {
    char unused;
};

EMULATOR_API aclTensorDesc *aclCreateTensorDesc(aclDataType dataType, int numDims, const int64_t *dims, aclFormat format) {
    aclTensorDesc *desc = calloc(1, sizeof *desc);
    if (!desc) return NULL;
    desc->data_type = dataType;
    desc->format = format;
    desc->dim_count = numDims > 0 && numDims <= MAX_DIMS ? (size_t)numDims : 0;
    if (desc->dim_count) memcpy(desc->dims, dims, desc->dim_count * sizeof *dims);
    return desc;
}

EMULATOR_API void aclDestroyTensorDesc(const aclTensorDesc *desc) { free((void *)desc); }

EMULATOR_API aclError aclGetTensorDescDimV2(const aclTensorDesc *desc, size_t index, int64_t *dimSize) {
    if (index >= desc->dim_count) return emulator_fail(ERROR_PARAMETER, "dimension %zu of %zu", index, desc->dim_count);
    *dimSize = desc->dims[index];
    return ACL_SUCCESS;
}

EMULATOR_API aclFormat aclGetTensorDescFormat(const aclTensorDesc *desc) { return desc->format; }
EMULATOR_API size_t aclGetTensorDescNumDims(const aclTensorDesc *desc) { return desc->dim_count; }
EMULATOR_API aclDataType aclGetTensorDescType(const aclTensorDesc *desc) { return desc->data_type; }
EMULATOR_API void aclSetTensorDescName(aclTensorDesc *desc, const char *name) { (void)desc; (void)name; }

EMULATOR_API aclError aclSetTensorFormat(aclTensorDesc *desc, aclFormat format) {
    (void)desc; (void)format;
    return ACL_SUCCESS;
}

EMULATOR_API aclError aclSetTensorPlaceMent(aclTensorDesc *desc, aclMemType memType) {
    (void)desc; (void)memType;
    return ACL_SUCCESS;
}

EMULATOR_API aclError aclSetTensorShape(aclTensorDesc *desc, int numDims, const int64_t *dims) {
    (void)desc; (void)numDims; (void)dims;
    return ACL_SUCCESS;
}

EMULATOR_API aclDataBuffer *aclCreateDataBuffer(void *data, size_t size) {
    aclDataBuffer *buffer = calloc(1, sizeof *buffer);
    if (buffer) *buffer = (aclDataBuffer){data, size};
    return buffer;
}

EMULATOR_API aclError aclDestroyDataBuffer(const aclDataBuffer *dataBuffer) {
    free((void *)dataBuffer);
    return ACL_SUCCESS;
}

EMULATOR_API aclopAttr *aclopCreateAttr(void) { return calloc(1, sizeof(aclopAttr)); }
EMULATOR_API void aclopDestroyAttr(const aclopAttr *attr) { free((void *)attr); }

#define ATTRIBUTE(name, ...) \
    EMULATOR_API aclError name(aclopAttr *attr, const char *attrName, __VA_ARGS__)
#define IGNORED (void)attr; (void)attrName; return ACL_SUCCESS;
ATTRIBUTE(aclopSetAttrBool, uint8_t value) { (void)value; IGNORED }
ATTRIBUTE(aclopSetAttrDataType, aclDataType value) { (void)value; IGNORED }
ATTRIBUTE(aclopSetAttrFloat, float value) { (void)value; IGNORED }
ATTRIBUTE(aclopSetAttrInt, int64_t value) { (void)value; IGNORED }
ATTRIBUTE(aclopSetAttrString, const char *value) { (void)value; IGNORED }
ATTRIBUTE(aclopSetAttrListBool, int count, const uint8_t *values) { (void)count; (void)values; IGNORED }
ATTRIBUTE(aclopSetAttrListFloat, int count, const float *values) { (void)count; (void)values; IGNORED }
ATTRIBUTE(aclopSetAttrListInt, int count, const int64_t *values) { (void)count; (void)values; IGNORED }
ATTRIBUTE(aclopSetAttrListListInt, int lists, const int *counts, const int64_t *const values[]) {
    (void)lists; (void)counts; (void)values;
    IGNORED
}

EMULATOR_API void aclAppLog(aclLogLevel logLevel, const char *func, const char *file, uint32_t line, const char *fmt, ...) {
    (void)logLevel; (void)func; (void)file; (void)line; (void)fmt;
}

EMULATOR_API aclError aclmdlInitDump(void) { return ACL_SUCCESS; }
EMULATOR_API aclError aclmdlFinalizeDump(void) { return ACL_SUCCESS; }
EMULATOR_API aclError aclmdlSetDump(const char *dumpCfgPath) { (void)dumpCfgPath; return ACL_SUCCESS; }

EMULATOR_API aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode mode) { (void)mode; return ACL_SUCCESS; }
EMULATOR_API aclError aclrtSetOpWaitTimeout(uint32_t timeout) { (void)timeout; return ACL_SUCCESS; }
EMULATOR_API aclError aclrtSetOpExecuteTimeOut(uint32_t timeout) { (void)timeout; return ACL_SUCCESS; }

EMULATOR_API aclError aclrtSetOpExecuteTimeOutV2(uint64_t timeout, uint64_t *actualTimeout) {
    if (actualTimeout) *actualTimeout = timeout;
    return ACL_SUCCESS;
}

EMULATOR_API aclError aclrtPeekAtLastError(aclrtLastErrLevel level) { (void)level; return ACL_SUCCESS; }
EMULATOR_API aclError aclrtGetLastError(aclrtLastErrLevel level) { (void)level; return ACL_SUCCESS; }

EMULATOR_API aclError aclrtCmoAsync(void *src, size_t size, aclrtCmoType cmoType, aclrtStream stream) {
    (void)src; (void)size; (void)cmoType; (void)stream; /* a prefetch hint */
    return ACL_SUCCESS;
}

/* Profiler hooks; their headers are not part of the wheel. */
EMULATOR_API uint64_t MsprofGetHashId(const char *text, size_t length) { (void)text; (void)length; return 0; }
EMULATOR_API uint64_t MsprofSysCycleTime(void) { return (uint64_t)(emulator_now() * 1e6); }
EMULATOR_API int32_t MsprofReportApi(uint32_t flag, const void *api) { (void)flag; (void)api; return 0; }
EMULATOR_API int32_t MsprofReportCompactInfo(uint32_t flag, const void *data, uint32_t length) {
    (void)flag; (void)data; (void)length;
    return 0;
}
EMULATOR_API int32_t MsprofReportAdditionalInfo(uint32_t flag, const void *data, uint32_t length) {
    (void)flag; (void)data; (void)length;
    return 0;
}
EMULATOR_API int32_t MsprofRegisterCallback(uint32_t module, void *handle) { (void)module; (void)handle; return 0; }
