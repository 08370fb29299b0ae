"""Blocks that belong to tenants."""

from __future__ import annotations

from block_images import chain

from quire.kv.image import BlockName
from quire.kv.keys import tenant_tag


def blocks_of(tenant: str, count: int, salt: int = 0) -> list[BlockName]:
    """The blocks of one prompt; a tenant's prompts may be in namespaces of their own, by salt."""
    number = int.from_bytes(tenant.encode(), "little") << 32 | salt
    return [name._replace(tenant=tenant_tag(tenant)) for name in chain(count, number)]
