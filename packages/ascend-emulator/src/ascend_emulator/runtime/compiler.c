/* libacl_op_compiler: compile options of operators. Nothing is compiled here, so the options have no effect. */
#include <stdint.h>
#include <string.h>

#include "acl/acl_op_compiler.h"

#define EMULATOR_API __attribute__((visibility("default")))

EMULATOR_API aclError aclSetCompileopt(aclCompileOpt opt, const char *value) { (void)opt; (void)value; return ACL_SUCCESS; }

EMULATOR_API aclError aclGetCompileopt(aclCompileOpt opt, char *value, size_t length) {
    (void)opt;
    if (length) memset(value, 0, length);
    return ACL_SUCCESS;
}

EMULATOR_API size_t aclGetCompileoptSize(aclCompileOpt opt) { (void)opt; return 1; }
EMULATOR_API aclError aclrtSetSysParamOpt(aclSysParamOpt opt, int64_t value) { (void)opt; (void)value; return ACL_SUCCESS; }
EMULATOR_API aclError aclrtGetSysParamOpt(aclSysParamOpt opt, int64_t *value) { (void)opt; *value = 0; return ACL_SUCCESS; }
EMULATOR_API aclError aclrtCtxSetSysParamOpt(aclSysParamOpt opt, int64_t value) {
    (void)opt;
    (void)value;
    return ACL_SUCCESS;
}
