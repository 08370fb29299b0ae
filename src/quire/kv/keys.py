"""The identity of a block outside this process: the same on every machine, for ever.

    key(root)  = H("quire.root",  namespace)
    key(block) = H("quire.block", key(parent), token ids)

`H` is BLAKE2b-256 over a typed, length-prefixed encoding, so that no two different lists of fields
encode alike. `tests/kv/block_keys.json` freezes the result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import numpy as np

from quire.kv.image import LAYOUT_VERSION

Field = str | bytes | int | float | None


@dataclass(frozen=True)
class Namespace:
    """Everything besides its tokens that the bytes of a block depend on, and who may see them."""

    model: str  # fingerprint of configuration and weights
    dtype: str
    kv_dtype: str
    block_size: int
    layout: str  # layers, KV heads, head size and the tensor-parallel split
    rope: str
    adapter: str = ""
    salt: str = ""  # the tenant's
    layout_version: int = LAYOUT_VERSION

    def root_key(self) -> bytes:
        named: list[Field] = []
        for field, value in zip(fields(self), astuple(self), strict=True):
            named += [field.name, value]
        return _digest("quire.root", *named)


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of the block that holds `token_ids` behind the block (or root) `parent`."""
    return _digest("quire.block", parent, np.asarray(token_ids, dtype="<i8").tobytes())


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
        tag, body = b"s", value.encode()
    elif isinstance(value, int):
        tag, body = b"i", str(value).encode()
    else:
        tag, body = b"f", float(value).hex().encode()
    return tag + len(body).to_bytes(8, "little") + body
