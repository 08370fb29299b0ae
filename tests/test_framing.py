"""Frames: whole messages come out, however the bytes are cut; an end within one is an error."""

from __future__ import annotations

import io
import random

import pytest

from quire.framing import FrameReader, frame, pack, read_frame, read_frame_from

MESSAGES = [{}, {"a": [1, 2.5, None]}, "é" * 1000, [], {"text": "x" * 70_000}]


@pytest.mark.parametrize("seed", range(5))
def test_messages_come_whole_however_the_bytes_are_cut(seed):
    dice = random.Random(seed)
    stream, reader, seen = b"".join(map(pack, MESSAGES)), FrameReader(), []
    while stream:
        count = dice.choice([1, 3, 5, 100, 50_000])
        seen += reader.feed(stream[:count])
        stream = stream[count:]
    assert seen == MESSAGES


def test_frames_of_any_bytes_are_read_one_by_one():
    file = io.BytesIO(frame(b"") + frame(b"\0" * 9) + frame(b"end"))
    assert [read_frame(file.read), read_frame_from(file), read_frame_from(file)] == [
        b"",
        b"\0" * 9,
        b"end",
    ]
    with pytest.raises(EOFError):
        read_frame_from(file)


@pytest.mark.parametrize("length", [1, 3, 4, 6])
def test_an_end_within_a_frame_is_an_error(length):
    with pytest.raises(EOFError):
        read_frame_from(io.BytesIO(frame(b"whole")[:length]))
