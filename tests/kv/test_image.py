"""The header of a block image: only the right block with the right bytes is whole."""

from __future__ import annotations

import pytest

from quire.kv.image import BlockName, Verdict, examine, header, header_bytes, name_in

NAME = BlockName(b"k" * 32, b"p" * 32, b"r" * 32, bytes(range(64)))
IMAGE = memoryview(bytes(range(256)) * 16)


def test_the_right_block_is_whole():
    head = header(NAME, IMAGE)
    assert len(head) == header_bytes(block_size=16)
    assert examine(NAME, head, IMAGE) is Verdict.WHOLE


@pytest.mark.parametrize("field", ["key", "parent", "root", "tokens"])
def test_every_field_of_the_name_is_compared(field):
    other = NAME._replace(**{field: b"x" + getattr(NAME, field)[1:]})
    assert examine(NAME, header(other, IMAGE), IMAGE) is Verdict.FOREIGN


def test_a_flipped_bit_anywhere_is_seen():
    head = header(NAME, IMAGE)
    for at in range(0, len(IMAGE), 97):
        broken = bytearray(IMAGE)
        broken[at] ^= 1
        assert examine(NAME, head, memoryview(broken)) is Verdict.CORRUPT
    for at in range(len(head)):
        broken = bytearray(head)
        broken[at] ^= 1
        assert examine(NAME, bytes(broken), IMAGE) is not Verdict.WHOLE


def test_less_than_all_is_torn():
    head = header(NAME, IMAGE)
    assert examine(NAME, head, IMAGE[:-1]) is Verdict.TORN
    assert examine(NAME, b"", IMAGE) is Verdict.TORN
    assert examine(NAME, bytes(len(head)), IMAGE) is Verdict.TORN
    assert examine(NAME, head[:-4], IMAGE) is not Verdict.WHOLE


def test_a_header_tells_whose_it_is():
    head = header(NAME, IMAGE)
    assert name_in(head) == name_in(memoryview(head + b"more")) == NAME
    assert name_in(b"x" + head[1:]) is None
    assert name_in(head[:50]) is None
