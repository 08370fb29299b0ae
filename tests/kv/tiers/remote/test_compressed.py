"""Compressed values: the same bytes come back, and what does not decompress is torn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from block_images import BLOCK_SIZE, chain, empty, filled, same
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("zstandard")

from quire.kv.tiers.remote.archive.codec import Codec
from quire.kv.tiers.remote.archive.compressed import WIDTHS, Compressed, join, split
from quire.kv.tiers.remote.client import Value
from quire.kv.tiers.remote.open import open_remote

HEAD = 184


def numbers(dtype: torch.dtype, count: int) -> bytes:
    """As keys and values are: small numbers around zero."""
    made = torch.randn(count, generator=torch.Generator().manual_seed(0)).to(dtype)
    return made.view(torch.uint8).numpy().tobytes()


def plain_split(image: bytes, planes: int) -> bytes:
    whole = len(image) // planes * planes
    return b"".join(image[at:whole:planes] for at in range(planes)) + image[whole:]


@settings(max_examples=examples(60), deadline=None)
@given(st.binary(max_size=200), st.sampled_from(WIDTHS))
def test_planes_are_split_and_joined(image: bytes, planes: int) -> None:
    apart = bytes(split(image, planes))
    assert apart == plain_split(image, planes)
    back = bytearray(len(image))
    join(apart, planes, memoryview(back))
    assert bytes(back) == image


@pytest.mark.parametrize(
    ("dtype", "smaller_than"), [(torch.bfloat16, 0.8), (torch.float32, 0.9), (torch.float16, 0.95)]
)
def test_images_of_numbers_become_smaller_and_come_back(
    dtype: torch.dtype, smaller_than: float
) -> None:
    image = numbers(dtype, 100_000)
    noise = np.random.default_rng(0).bytes(len(image))  # which does not become smaller
    heads = [bytes([at]) * HEAD for at in range(3)]
    images = [image, noise, bytes(len(image))]
    raw = b"".join(h + i for h, i in zip(heads, images, strict=True))
    codec = Compressed(HEAD, compresses=True)
    stored, sizes = codec.pack(raw, [HEAD + len(image)] * 3)
    assert sum(sizes) == len(stored)
    assert sizes[0] < smaller_than * len(image) and sizes[2] < 2 * HEAD
    assert sizes[1] == HEAD + len(noise)
    for reads in (codec, Compressed(HEAD, compresses=False)):
        at = 0
        for head, wanted, size in zip(heads, images, sizes, strict=True):
            value = Value(memoryview(bytearray(HEAD)), memoryview(bytearray(len(image))))
            assert reads.unpack(stored[at : at + size], value) == len(value)
            assert (bytes(value.head), bytes(value.image)) == (head, wanted)
            at += size


def test_what_does_not_decompress_is_not_whole() -> None:
    image = numbers(torch.bfloat16, 10_000)
    codec = Compressed(HEAD, compresses=True)
    stored, [size] = codec.pack(bytes(HEAD) + image, [HEAD + len(image)])
    value = Value(memoryview(bytearray(HEAD)), memoryview(bytearray(len(image))))
    bad = [stored[:-1], stored[: HEAD + 3], stored[:HEAD] + b"\x09" + stored[HEAD + 1 :]]
    bad += [stored[: HEAD + 1] + bytes(size - HEAD - 1), stored[:10], b""]
    for each in bad:
        assert codec.unpack(each, value) not in (0, len(value))
    assert Codec().unpack(stored, value) == 0  # without the package: a miss, and no damage
    assert not any(value.image)


def test_engines_with_and_without_compression_share_an_archive(tmp_path: Path) -> None:
    names, size = chain(4), 40_000
    images = filled(4, size)
    images[0][:size] = images[3][:size] = numbers(torch.bfloat16, size // 2)
    plain, packed = (
        open_remote(f"file://{tmp_path}?timeout=60{more}", size, BLOCK_SIZE)
        for more in ("", "&compress=zstd")
    )
    assert all(packed.write(names[:2], images[:2])) and all(plain.write(names[2:], images[2:]))
    files = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert 3 * size < files < 3.9 * size
    for tier in (plain, packed):
        tier.close()
        again = open_remote(f"file://{tmp_path}?timeout=60", size, BLOCK_SIZE)
        found = empty(4, size)
        assert all(again.read(names, found)) and same(found, images, size)
        again.close()
