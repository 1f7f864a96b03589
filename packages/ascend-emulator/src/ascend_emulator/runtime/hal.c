/* The driver's functions that torch_npu looks up: the number of devices, and facts of a clock that is not there. */
#include "emulator.h"

EMULATOR_API int drvGetDevNum(uint32_t *count) { return aclrtGetDeviceCount(count); }

EMULATOR_API int halGetDeviceInfo(uint32_t device, int32_t module, int32_t info, int64_t *value) {
    (void)device; (void)module; (void)info; (void)value;
    return -1; /* not known: torch_npu then uses the host's clock */
}

EMULATOR_API int halGetAPIVersion(int *version) { *version = 0; return 0; }
