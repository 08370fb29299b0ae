"""Which adapter this is: a digest of all that its results depend on, worked out while it is read.

    SHA-256("quire.adapter", then of each tensor: name, scale, type, shape, numbers)

Blocks of KV are named after it, also on disk. Neither an adapter's name nor its folder is part of
it, and what is read is what is hashed: a file that changes meanwhile is another adapter.
"""

from __future__ import annotations

import hashlib
import struct

from torch import Tensor

from quire.models.adapters.tensors import Named, as_bytes


class ContentDigest:
    def __init__(self) -> None:
        self._sha256 = hashlib.sha256(b"quire.adapter")

    def read(self, name: str, scale: float, named: Named) -> Tensor:
        """All of a tensor; tensors are read in the same order on every rank."""
        tensor = named.read()
        kind = f"{tensor.dtype}{list(tensor.shape)}".encode()
        for said in (name.encode(), struct.pack("<d", scale), kind):
            self._sha256.update(struct.pack("<Q", len(said)) + said)
        self._sha256.update(as_bytes(tensor))
        return tensor

    def result(self) -> str:
        return self._sha256.hexdigest()
