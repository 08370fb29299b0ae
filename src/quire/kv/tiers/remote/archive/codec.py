"""How values are stored in a pack: as they are, or with their images compressed."""

from __future__ import annotations

from quire.kv.tiers.remote.archive.objects import Bytes
from quire.kv.tiers.remote.client import Value


class Codec:
    """As they are: header and image, one behind the other."""

    def pack(self, raw: bytes, sizes: list[int]) -> tuple[bytes, list[int]]:
        """Values of these sizes, as they are stored, and the sizes that they then have."""
        return raw, sizes

    def unpack(self, stored: Bytes, value: Value) -> int:
        """Fill `value`; how many bytes it has, and any other number if it is not whole."""
        if len(stored) != len(value):
            return len(stored) or 1  # zero would say that there is no such value
        middle = len(value.head)
        value.head[:] = stored[:middle]
        value.image[:] = stored[middle:]
        return len(value)
