"""Owns paged K/V pools for serving: memory, pages, writers and the manifest that transfer reads.

The prefix cache in host memory is `kv_pool.hicache`, what engines ask is `kv_pool.integrations`; the README says which
module has what. It does not own attention, transfer or graphs. Importing it imports torch and kv_planner, never
torch_npu.
"""

from __future__ import annotations

from kv_pool._paged import Pool
from kv_pool.adopted import adopt
from kv_pool.allocator import PageAllocator, PageUse
from kv_pool.copies import PageCopy
from kv_pool.errors import (
    AgreementError,
    AliasedRows,
    BudgetError,
    CacheError,
    CanaryMismatch,
    DeviceMismatch,
    DeviceUnavailable,
    DoubleFree,
    DtypeMismatch,
    ForeignPage,
    HeadRangeError,
    HitError,
    HostPoolError,
    IntegrityError,
    KvPoolError,
    LayoutError,
    LibraryUnavailable,
    MoveRefused,
    OutOfPages,
    PageError,
    PoolSizeError,
    RowMismatch,
    SharedTail,
    SlotOutOfRange,
    StorageDamaged,
    StorageError,
    TableError,
    UnheldComponent,
    UnknownForm,
    UnknownLayer,
    UnknownWriter,
    UnmirroredComponent,
    UnrepeatableKeys,
    UnsupportedMover,
    WidthMismatch,
    WriteError,
)
from kv_pool.host_memory import available_host_bytes
from kv_pool.hybrid import HybridPool, WindowPages, WriteSlots
from kv_pool.mha import MhaPool
from kv_pool.mla import MlaPool, packed_record_bytes
from kv_pool.page_map import PageMap
from kv_pool.sizing import MemoryPlan, PoolBudget, PoolShare, plan_memory
from kv_pool.slots import SlotAllocator
from kv_pool.state import StateKind, StatePool
from kv_pool.tables import block_table, narrow_slots, slots_for
from kv_pool.writers import Writer, WriterName, create_writer, writer_names

__all__ = [
    "AgreementError",
    "AliasedRows",
    "BudgetError",
    "CacheError",
    "CanaryMismatch",
    "DeviceMismatch",
    "DeviceUnavailable",
    "DoubleFree",
    "DtypeMismatch",
    "ForeignPage",
    "HeadRangeError",
    "HitError",
    "HostPoolError",
    "HybridPool",
    "IntegrityError",
    "KvPoolError",
    "LayoutError",
    "LibraryUnavailable",
    "MemoryPlan",
    "MhaPool",
    "MlaPool",
    "MoveRefused",
    "OutOfPages",
    "PageAllocator",
    "PageCopy",
    "PageError",
    "PageMap",
    "PageUse",
    "Pool",
    "PoolBudget",
    "PoolShare",
    "PoolSizeError",
    "RowMismatch",
    "SharedTail",
    "SlotAllocator",
    "SlotOutOfRange",
    "StateKind",
    "StatePool",
    "StorageDamaged",
    "StorageError",
    "TableError",
    "UnheldComponent",
    "UnknownForm",
    "UnknownLayer",
    "UnknownWriter",
    "UnmirroredComponent",
    "UnrepeatableKeys",
    "UnsupportedMover",
    "WidthMismatch",
    "WindowPages",
    "WriteError",
    "WriteSlots",
    "Writer",
    "WriterName",
    "adopt",
    "available_host_bytes",
    "block_table",
    "create_writer",
    "narrow_slots",
    "packed_record_bytes",
    "plan_memory",
    "slots_for",
    "writer_names",
]
__version__ = "0.1.0"
