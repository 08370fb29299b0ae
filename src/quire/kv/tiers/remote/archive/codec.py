"""How values are stored in a pack: as they are, or with their images compressed."""

from __future__ import annotations

from quire.kv.tiers.remote.archive.objects import Bytes
from quire.kv.tiers.remote.client import Value

_ZSTD = b"\x28\xb5\x2f\xfd"  # a frame of zstd begins so


class Codec:
    """As they are: header and image, one behind the other."""

    def pack(self, raw: bytes, sizes: list[int]) -> tuple[bytes, list[int]]:
        """Values of these sizes, as they are stored, and the sizes that they then have."""
        return raw, sizes

    def unpack(self, stored: Bytes, value: Value) -> int:
        """Fill `value`; how many bytes it has, any other number if it is not whole, 0 if
        it is of no use here."""
        middle = len(value.head)
        if bytes(stored[middle + 1 : middle + 5]) == _ZSTD and len(stored) < len(value):
            return 0  # compressed, and right for engines that have the package
        if len(stored) != len(value):
            return len(stored) or 1  # zero would say that there is no such value
        value.head[:] = stored[:middle]
        value.image[:] = stored[middle:]
        return len(value)
