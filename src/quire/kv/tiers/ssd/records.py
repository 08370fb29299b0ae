"""What each slot holds: one record of fixed size a slot, read a thousand at a time.

    key | parent | root | tenant | check | last use         128 bytes; all zero: the slot is empty

`check` covers what is before it, so a record that was written in part is told from a whole one.
The time of last use is outside it: it changes often, and a wrong one does no harm. The check is a
sum of mixed words and not a hash, because numpy can make a million of them in a fraction of a
second; it guards against accidents, while the header in the slot says what is true.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.kv.image import NO_TENANT
from quire.kv.tiers.ssd.geometry import RECORD_BYTES

RECORD = np.dtype(
    [
        ("key", "V32"),
        ("parent", "V32"),
        ("root", "V32"),
        ("tenant", "V16"),
        ("check", "<u8"),
        ("used", "<u8"),
    ]
)
assert RECORD.itemsize == RECORD_BYTES

Records = npt.NDArray[np.void]
Words = npt.NDArray[np.uint64]
Slots = npt.NDArray[np.int64]

USED_OFFSET = 120
_COVERED = 14  # words of eight bytes that the check covers
_SEED = np.uint64(0x9E3779B97F4A7C15)  # so that nothing but zeros is not a whole record
_ODD = _SEED * np.arange(1, 2 * _COVERED, 2, dtype=np.uint64)
_SHIFT = np.uint64(29)


def make_record(
    key: bytes, parent: bytes, root: bytes, used: int, tenant: bytes = NO_TENANT
) -> bytes:
    record = np.zeros(1, RECORD)
    record["key"], record["parent"], record["root"], record["tenant"] = key, parent, root, tenant
    record["check"] = checks(record)
    record["used"] = used
    return record.tobytes()


def checks(records: Records) -> Words:
    """The check that each record should have."""
    words = _words(records)[:, :_COVERED]
    total: Words = (words ^ (words >> _SHIFT)) @ _ODD + _SEED
    return total ^ (total >> _SHIFT)


def _words(records: Records) -> Words:
    return records.view(np.uint64).reshape(-1, RECORD_BYTES // 8)


@dataclass
class Held:
    """The records that are whole, least recently used first, and the slots of those that are not"""

    slots: Slots
    records: Records
    torn: Slots

    @classmethod
    def among(cls, first_slot: int, records: Records) -> Held:
        """What is whole of the records of consecutive slots."""
        whole = checks(records) == records["check"]
        others = np.flatnonzero(~whole)
        torn = others[_words(records)[others, : _COVERED + 1].any(axis=1)]
        return cls(first_slot + np.flatnonzero(whole), records[whole], first_slot + torn)

    @classmethod
    def joined(cls, parts: list[Held]) -> Held:
        parts = parts or [cls.among(0, np.zeros(0, RECORD))]
        slots = np.concatenate([part.slots for part in parts])
        records = np.concatenate([part.records for part in parts])
        torn = np.concatenate([part.torn for part in parts])
        order = np.argsort(records["used"], kind="stable")
        return cls(slots[order], records[order], torn)

    def __len__(self) -> int:
        return len(self.slots)

    def only(self, chosen: npt.NDArray[np.bool_] | npt.NDArray[np.int64]) -> Held:
        """Those that are chosen, by a flag for each or by their numbers in a new order."""
        if chosen.dtype == np.bool_ and chosen.all():
            return self
        return Held(self.slots[chosen], self.records[chosen], self.torn)

    def keys(self) -> list[bytes]:
        found: list[bytes] = self.records["key"].tolist()
        return found

    def parents(self) -> list[bytes]:
        found: list[bytes] = self.records["parent"].tolist()
        return found

    def roots(self) -> list[bytes]:
        found: list[bytes] = self.records["root"].tolist()
        return found

    def tenants(self) -> list[bytes]:
        found: list[bytes] = self.records["tenant"].tolist()
        return found

    def twins(self) -> npt.NDArray[np.bool_]:
        """Which are there again, more recently used."""
        is_twin = np.zeros(len(self), dtype=np.bool_)
        first_words = np.sort(_words(self.records)[:, 0])
        if (first_words[1:] == first_words[:-1]).any():  # hashes: they hardly ever begin alike
            last = dict(zip(self.keys(), range(len(self)), strict=True))
            is_twin[:] = True
            is_twin[list(last.values())] = False
        return is_twin
