"""The identity of a block outside this process: the same on every machine, for ever.

    key(root)  = H("quire.root",  namespace)
    key(block) = H("quire.block", key(parent), token ids)
    key(block in KV group g > 0) = H("quire.group", key(block), g)

Blocks of the first group have the keys of the chain itself, so that a model with one group finds
what was stored before there were groups.

`H` is BLAKE2b-256 over a typed, length-prefixed encoding, so that no two different lists of fields
encode alike. `tests/kv/block_keys.json` freezes the result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from quire.kv.image import LAYOUT_VERSION, NO_TENANT, BlockName

Field = str | bytes | int | float | None
ADAPTER_MARK = "\0"


@dataclass(frozen=True)
class Namespace:
    """Everything besides its tokens that the bytes of a block depend on, and who sees them."""

    model: str  # fingerprint of configuration and weights
    dtype: str
    kv_dtype: str
    block_size: int
    layout: str  # layers, KV heads, head size and the tensor-parallel split
    rope: str
    adapter: str = ""
    salt: str = ""  # the tenant's
    layout_version: int = LAYOUT_VERSION

    def salted(self, salt: str) -> Namespace:
        """The same for one tenant."""
        return replace(self, salt=salt)

    def root_of(self, salt: str) -> bytes:
        """The root key of one tenant, found once."""
        return _root_of(self, salt)

    def root_key(self) -> bytes:
        named: list[Field] = []
        for field, value in zip(fields(self), astuple(self), strict=True):
            named += [field.name, value]
        return _digest("quire.root", *named)


@lru_cache(maxsize=4096)  # tenants come and go
def _root_of(namespace: Namespace, salt: str) -> bytes:
    return namespace.salted(salt).root_key()


def adapter_namespace(salt: str, fingerprint: str) -> str:
    """What stands in the place of a salt for blocks that were computed with an adapter.

    It is no salt of any request: those have no NUL in them. It begins with the salt, so that what
    belongs to a tenant is still found by that.
    """
    return f"{salt}{ADAPTER_MARK}{fingerprint}" if fingerprint else salt


def block_key(parent: bytes, token_ids: Sequence[int] | npt.NDArray[np.int32]) -> bytes:
    """The key of the block that holds `token_ids` behind the block (or root) `parent`."""
    return _digest("quire.block", parent, np.asarray(token_ids, dtype="<i8").tobytes())


def group_key(key: bytes, group: int) -> bytes:
    """The key of one group's block at the place of the chain that has this key."""
    return _digest("quire.group", key, group) if group else key


def group_name(name: BlockName, group: int) -> BlockName:
    """The name of one group's block at this place of the chain."""
    return name._replace(key=group_key(name.key, group), group=group) if group else name


def group_keys(keys: Sequence[bytes], group: int) -> list[bytes]:
    """The keys of one group's blocks along a chain: `group_key` of each, but quick."""
    if not group or not keys:
        return list(keys)
    before = hashlib.blake2b(
        _encode("quire.group") + _encode(keys[0])[: -len(keys[0])], digest_size=32
    )
    behind = _encode(group)
    found = []
    for key in keys:
        digest = before.copy()
        digest.update(key + behind)
        found.append(digest.digest())
    return found


def chain_keys(parent: bytes, tokens: Sequence[bytes]) -> list[bytes]:
    """The keys of blocks one behind the other; `tokens` are each one's ids, as int32.

    The same as `block_key` again and again, but quick: prompts have thousands of blocks.
    """
    if not tokens:
        return []
    wide = np.frombuffer(b"".join(tokens), dtype="<i4").astype("<i8").tobytes()
    width = len(wide) // len(tokens)
    before = hashlib.blake2b(
        _encode("quire.block") + _encode(parent)[: -len(parent)], digest_size=32
    )
    between = _encode(bytes(width))[:-width]
    keys = []
    for at in range(0, len(wide), width):
        digest = before.copy()
        digest.update(parent + between + wide[at : at + width])
        parent = digest.digest()
        keys.append(parent)
    return keys


def block_names(
    root: bytes, parent: bytes, tokens: Sequence[bytes], tenant: bytes
) -> list[BlockName]:
    """The names of blocks one behind the other; `tokens` are each one's ids, as int32."""
    keys = chain_keys(parent, tokens)
    each = zip(keys, [parent, *keys], tokens, strict=False)
    return [BlockName(key, above, root, ids, tenant) for key, above, ids in each]


@lru_cache(maxsize=4096)  # tenants come and go
def tenant_tag(tenant: str) -> bytes:
    """What stands for a tenant in the tiers: it is on disk, and says nothing of a salt."""
    return _digest("quire.tenant", tenant)[: len(NO_TENANT)]


def _digest(*values: Field) -> bytes:
    digest = hashlib.blake2b(digest_size=32)
    for value in values:
        digest.update(_encode(value))
    return digest.digest()


def _encode(value: Field) -> bytes:
    if value is None:
        tag, body = b"n", b""
    elif isinstance(value, bytes):
        tag, body = b"b", value
    elif isinstance(value, str):
        tag, body = b"s", value.encode("utf-8", "surrogatepass")  # any string may be a salt
    elif isinstance(value, int):
        tag, body = b"i", str(value).encode()
    else:
        tag, body = b"f", float(value).hex().encode()
    return tag + len(body).to_bytes(8, "little") + body
