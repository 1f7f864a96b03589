"""Owns the keys of stored pages: everything that decides what the bytes of a page mean goes into them.

The same in every process: canonical JSON and SHA-256, nothing of the language's own hashing. It does not own the hash
chain over tokens (that is the planner's).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from kv_planner import page_digests

from kv_pool._arguments import check_kind
from kv_pool.errors import HostPoolError, TableError
from kv_pool.hicache.host_pool import HostPool
from kv_pool.tables import as_index_array

if TYPE_CHECKING:
    from kv_pool.hicache.acquired import Namespace
    from kv_pool.tables import IndexLike

__all__ = ["SCHEMA_VERSION", "ComponentIdentity", "StorageIdentity", "page_keys"]

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class ComponentIdentity:
    """One component as it lies in a stored page.

    Attributes:
        component: Which component.
        part: Target or draft: a page written with a draft part is never read as one without.
        layer_ids: Global layer ids, in the order of the bytes.
        dtype: Element type.
        tokens: Tokens in a page.
        heads: Heads held.
        dims: Elements of a head.
        head_range: Global heads, half-open.
        total_heads: Heads over all ranks.
    """

    component: str
    part: str
    layer_ids: tuple[int, ...]
    dtype: str
    tokens: int
    heads: int
    dims: int
    head_range: tuple[int, int]
    total_heads: int


@dataclass(frozen=True)
class StorageIdentity:
    """What a page of one rank means, apart from its tokens; a change of any field changes every key.

    Attributes:
        schema_version: Version of this record.
        format_version: Version of the layout's meaning.
        fingerprint: Identity of the model.
        page_size: Tokens in a page.
        host_layout: Order of the axes in a stored page.
        components: What a page holds, in the order of the bytes.
        pp: Pipeline rank and size.
        tp_size: Tensor-parallel size, `None` when every rank holds all heads: then all of them share the pages.
        dcp: Decode-context-parallel rank and size.
        salt: Anything else that the operator wants to keep apart.
        canary: Whether a checksum a token follows the components.
    """

    schema_version: int
    format_version: int
    fingerprint: str
    page_size: int
    host_layout: str
    components: tuple[ComponentIdentity, ...]
    pp: tuple[int, int]
    tp_size: int | None
    dcp: tuple[int, int]
    salt: str = ""
    canary: bool = False

    @classmethod
    def of(cls, host: HostPool, *, salt: str = "", canary: bool = False) -> StorageIdentity:
        """Describe the pages of a host pool and of the device pool that it mirrors.

        Raises:
            HostPoolError: An argument of another kind.
        """
        check_kind("host", host, HostPool, HostPoolError)
        check_kind("salt", salt, str, HostPoolError)
        check_kind("canary", canary, bool, HostPoolError)
        manifest = host.pool.manifest()
        layout, place = manifest.layout, manifest.placement
        heads = {(entry.component, entry.part): entry.head_range for entry in manifest.entries}
        components = []
        for mirror in host.mirrors:
            spec = layout.spec(mirror.component, mirror.part)
            _, tokens, held, dims = mirror.layers[0].shape
            components.append(
                ComponentIdentity(
                    mirror.component,
                    mirror.part,
                    mirror.layer_ids,
                    spec.dtype,
                    tokens,
                    held,
                    dims,
                    heads[mirror.component, mirror.part],
                    spec.total_heads,
                )
            )
        whole = all(item.heads == item.total_heads for item in components)
        return cls(
            SCHEMA_VERSION,
            layout.format_version,
            layout.fingerprint,
            host.page_size,
            host.layout,
            tuple(components),
            (place.pp_rank, place.pp_size),
            None if whole else place.tp_size,
            (place.dcp_rank, place.dcp_size),
            salt,
            canary,
        )

    @property
    def digest(self) -> bytes:
        """SHA-256 over the canonical JSON of all fields. 32 bytes."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode()).digest()


def page_keys(digest: bytes, tokens: IndexLike, page_size: int, namespace: Namespace = None) -> list[str]:
    """Return the key of each whole page of a text.

    Args:
        digest: `StorageIdentity.digest`.
        tokens: The text from its beginning. Shape: [tokens].
        page_size: Tokens in a page.
        namespace: As for `HiCacheController.acquire`.

    Returns:
        One key a page: 64 hexadecimal digits of SHA-256 over the identity and the page's digest, which chains the
        namespace, all pages before it and its own tokens.

    Raises:
        TableError: The digest is no bytes, or the tokens are no integers.
        PlanError: An impossible page size, or no namespace.
    """
    prefix = hashlib.sha256(b"kv-pool page\0" + check_kind("digest", digest, bytes, TableError))
    keys = []
    for row in page_digests(as_index_array("tokens", tokens), page_size, namespace=namespace):
        key = prefix.copy()
        key.update(row.tobytes())
        keys.append(key.hexdigest())
    return keys
