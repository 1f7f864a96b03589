/* The profiler's entry points, which torch_npu looks up by name: ranges, marks and a profiling session work and record
 * nothing, since there is no device time to record. */
#include <stdlib.h>

#include "emulator.h"
#include "acl/acl_prof.h"

struct aclprofConfig {
    char unused;
};

EMULATOR_API aclError aclprofInit(const char *path, size_t length) { (void)path; (void)length; return ACL_SUCCESS; }
EMULATOR_API aclError aclprofFinalize(void) { return ACL_SUCCESS; }

EMULATOR_API aclprofConfig *aclprofCreateConfig(uint32_t *devices, uint32_t count, aclprofAicoreMetrics metrics,
                                                const aclprofAicoreEvents *events, uint64_t data) {
    (void)devices; (void)count; (void)metrics; (void)events; (void)data;
    return calloc(1, sizeof(struct aclprofConfig));
}

EMULATOR_API aclError aclprofDestroyConfig(const aclprofConfig *config) { free((void *)config); return ACL_SUCCESS; }
EMULATOR_API aclError aclprofStart(const aclprofConfig *config) { (void)config; return ACL_SUCCESS; }
EMULATOR_API aclError aclprofStop(const aclprofConfig *config) { (void)config; return ACL_SUCCESS; }

EMULATOR_API aclError aclprofSetConfig(aclprofConfigType type, const char *config, size_t length) {
    (void)type; (void)config; (void)length;
    return ACL_SUCCESS;
}

EMULATOR_API aclError aclprofMarkEx(const char *text, size_t length, aclrtStream stream) {
    (void)text; (void)length; (void)stream;
    return ACL_SUCCESS;
}

EMULATOR_API aclprofStepInfo *aclprofCreateStepInfo(void) { return calloc(1, sizeof(int)); }
EMULATOR_API void aclprofDestroyStepInfo(aclprofStepInfo *info) { free(info); }

EMULATOR_API aclError aclprofGetStepTimestamp(aclprofStepInfo *info, aclprofStepTag tag, aclrtStream stream) {
    (void)info; (void)tag; (void)stream;
    return ACL_SUCCESS;
}
