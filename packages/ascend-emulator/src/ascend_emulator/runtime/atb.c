/* libatb: the C++ names that torch_npu's ATB plugin links (their headers are not part of the wheel). The plugin loads and
 * declares its operators; creating one of the library's operations fails, because only registered kernels run here. */
#include <stdint.h>

#define EMULATOR_API __attribute__((visibility("default")))
enum { ATB_OK = 0, ATB_INTERNAL_ERROR = 6 };

EMULATOR_API int32_t _ZN3atb13CreateContextEPPNS_7ContextE(void **context) { *context = 0; return ATB_INTERNAL_ERROR; }
EMULATOR_API int32_t _ZN3atb14DestroyContextEPNS_7ContextE(void *context) { (void)context; return ATB_OK; }
EMULATOR_API int32_t _ZN3atb16DestroyOperationEPNS_9OperationE(void *operation) { (void)operation; return ATB_OK; }
EMULATOR_API uint64_t _ZN3atb5Utils13GetTensorSizeERKNS_6TensorE(const void *tensor) { (void)tensor; return 0; }

#define CREATE(name)                                                              \
    EMULATOR_API int32_t _ZN3atb15CreateOperationINS_5infer##name##EEEiRKT_PPNS_9OperationE( \
        const void *parameters, void **operation) {                               \
        (void)parameters;                                                         \
        *operation = 0;                                                           \
        return ATB_INTERNAL_ERROR;                                                \
    }
CREATE(11LinearParam)
CREATE(12ElewiseParam)
CREATE(12RmsNormParam)
CREATE(14GroupTopkParam)
CREATE(18SelfAttentionParam)
CREATE(19PagedAttentionParam)
CREATE(20ReshapeAndCacheParam)
CREATE(9RopeParam)
