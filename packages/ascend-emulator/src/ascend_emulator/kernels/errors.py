"""Errors of the operator kernels: refusals of documented constraints, device faults, forms that are not computed.

This module owns the classes and the wording of their texts. Which constraint exists is listed in ``rules.py``; when
one is checked is decided beside each op.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from ascend_emulator.errors import EmulatorError

from .pose import EVERYWHERE, Scope

AICORE_EXCEPTION = 507015
"""Code with which the CANN runtime reports a kernel that accessed memory it must not."""

ACLNN_PARAM_INVALID = 161002
"""Code with which an aclnn operator reports an argument outside its documented limits."""

ACLNN_NAMES = {
    "npu::npu_fused_infer_attention_score": "aclnnFusedInferAttentionScoreV3",
    "npu::npu_fused_infer_attention_score_v2": "aclnnFusedInferAttentionScoreV4",
    "npu::npu_scatter_nd_update": "aclnnScatterNdUpdate",
    "npu::npu_scatter_nd_update_": "aclnnScatterNdUpdate",
}
"""Operator behind each op, for error texts that look like the ones on a device."""


class KernelError(EmulatorError, RuntimeError):
    """Base of every error raised by the operator kernels."""


@dataclass(frozen=True)
class Rule:
    """One documented constraint of an op.

    Attributes:
        id: short name; the key of ``rules.RULES`` and of the rows of ``docs/refusals.md``.
        op: op or family of ops that it binds.
        allowed: what is allowed.
        source: document that says so.
        remedy: what a caller does about it.
        test: file of tests/kernels with a call that breaks it.
        scope: CANN releases and chips for which it holds.
    """

    id: str
    op: str
    allowed: str
    source: str
    remedy: str
    test: str
    scope: Scope = EVERYWHERE


def _stamp(code: str) -> str:
    now = time.strftime("%Y-%m-%d-%H:%M:%S", time.localtime())
    return f"[ERROR] {now} (PID:{os.getpid()}, Device:-1, RankID:-1) {code} PTA call acl api failed"


class OpRefused(KernelError, ValueError):
    """An argument lies outside what the op's document allows; nothing was computed or written.

    Attributes:
        op: full op name.
        argument: name of the refused argument.
        value: what was given.
        rule: the constraint, with its source.
    """

    acl_code = ACLNN_PARAM_INVALID

    def __init__(self, op: str, argument: str, value: object, rule: Rule) -> None:
        self.op = op
        self.argument = argument
        self.value = value
        self.rule = rule
        call = ACLNN_NAMES.get(op)
        failed = f"call {call} failed, error code is {ACLNN_PARAM_INVALID}" if call else "invalid argument"
        super().__init__(
            f"{op}: NPU function error: {failed}\n{_stamp('ERR00100')}\n"
            f"[ascend-emulator] {argument}: got {value}; allowed: {rule.allowed}. The op does not run; {rule.remedy}. "
            f"(rule {rule.id}; source: {rule.source})"
        )


class KernelNotCovered(KernelError, NotImplementedError):
    """A documented form of an op that this emulator does not compute. It says so instead of answering wrongly.

    Attributes:
        op: full op name.
        argument: argument that asks for the form.
        value: what was given.
    """

    def __init__(self, op: str, argument: str, value: object) -> None:
        self.op = op
        self.argument = argument
        self.value = value
        super().__init__(
            f"{op}: {argument}={value} asks for a form that ascend-emulator does not compute. A device may run it; "
            f"register a kernel of your own with ascend_emulator.register_kernel({op!r}, fn) to emulate it."
        )


class DeviceFault(KernelError):
    """The kernel touched memory that it must not: a block outside the cache, an unwritten slot, an index out of range.

    On a device this surfaces at the next synchronisation as code 507015, without saying where. Here it says where.

    Attributes:
        code: 507015.
        op: full op name.
        detail: what was touched and by which request.
        layer, page, slot: where, when known. ``slot`` counts tokens over the whole cache (page * page size + offset).
    """

    acl_code = AICORE_EXCEPTION
    code = AICORE_EXCEPTION

    def __init__(
        self, op: str, detail: str, *, layer: int | None = None, page: int | None = None, slot: int | None = None
    ) -> None:
        self.op = op
        self.detail = detail
        self.layer = layer
        self.page = page
        self.slot = slot
        super().__init__(
            f"{op}: NPU function error: AclrtSynchronizeDeviceWithTimeout, error code is {self.code}\n"
            f"{_stamp('ERR00100')}\n"
            "[Error]: The aicore execution is abnormal. \n"
            "        Rectify the fault based on the error information in the ascend log.\n"
            f"[ascend-emulator] {detail}"
        )
