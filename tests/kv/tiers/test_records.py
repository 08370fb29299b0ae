"""Records: whole ones are found in the order of use, others are counted; the format is frozen."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from quire.bench.kv.disk_bandwidth import _fill_index, restart_seconds
from quire.kv.tiers.ssd.geometry import RECORD_BYTES, Geometry
from quire.kv.tiers.ssd.records import RECORD, Held, checks, make_record

ONE = make_record(b"k" * 32, b"p" * 32, b"r" * 32, used=7)


def held(*packed: bytes) -> Held:
    return Held.joined([Held.among(10, np.frombuffer(b"".join(packed), RECORD))])


def record(key: int, used: int) -> bytes:
    return make_record(key.to_bytes(32, "big"), bytes(32), bytes(32), used)


def test_a_record_is_read_as_it_was_made() -> None:
    found = held(bytes(RECORD_BYTES), ONE)
    assert found.slots.tolist() == [11] and not len(found.torn)
    assert (found.keys(), found.parents(), found.roots()) == ([b"k" * 32], [b"p" * 32], [b"r" * 32])


def test_keys_that_end_in_zeros_keep_them() -> None:
    key = b"k" + bytes(31)
    assert held(make_record(key, key, key, 0)).keys() == [key]


def test_a_flipped_bit_anywhere_but_in_the_time_is_seen() -> None:
    for bit in range(8 * RECORD_BYTES):
        broken = bytearray(ONE)
        broken[bit // 8] ^= 1 << bit % 8
        found = held(bytes(broken))
        in_the_time = bit // 8 >= 120
        assert (len(found), len(found.torn)) == ((1, 0) if in_the_time else (0, 1))


def test_any_part_of_a_record_is_torn_or_nothing() -> None:
    for size in range(1, 120):
        found = held(ONE[:size].ljust(RECORD_BYTES, b"\0"))
        assert (len(found), len(found.torn)) == (0, 1)


def test_a_time_alone_is_an_empty_slot() -> None:
    found = held(bytes(120) + b"\1" * 8)
    assert (len(found), len(found.torn)) == (0, 0)


def test_they_come_in_the_order_of_use() -> None:
    found = held(record(1, used=30), record(2, used=10), record(3, used=20))
    assert found.slots.tolist() == [11, 12, 10]


def test_of_two_with_one_key_the_one_used_last_stays() -> None:
    found = held(record(1, used=30), record(2, used=5), record(1, used=10))
    assert found.slots[found.twins()].tolist() == [12]
    assert not held(record(1, used=30), record(2, used=5)).twins().any()


def test_keys_that_only_begin_alike_are_two() -> None:
    first, second = bytes(31) + b"\1", bytes(31) + b"\2"
    both = held(make_record(first, first, first, 0), make_record(second, first, first, 0))
    assert not both.twins().any()


def test_the_format_is_frozen() -> None:
    """These bytes are on people's disks: change the magic of the first page with them."""
    digest = hashlib.sha256(ONE + Geometry(2_359_296, 16, layout_version=1).first_page())
    assert digest.hexdigest() == (
        "6c2027d30cea968ad47f452807550e077977ee5751024b4d2b9000503c3b0851"
    )


def test_checks_are_the_same_one_by_one_and_together(tmp_path: Path) -> None:
    path = tmp_path / "index"
    path.write_bytes(bytes(4096))
    _fill_index(path, 1000)
    records = np.frombuffer(path.read_bytes()[4096:], RECORD)
    assert [int(checks(records[at : at + 1])[0]) for at in range(1000)] == checks(records).tolist()


def test_a_large_index_is_read_quickly(tmp_path: Path) -> None:
    """Forty times less than a million; a loop over fields in Python would take seconds here too."""
    told = restart_seconds(tmp_path, 25_000, image_bytes=100)
    assert told["blocks"] == 25_000
    assert told["restart s"] < 1.5
