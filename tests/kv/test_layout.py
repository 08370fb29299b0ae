"""Where every value of a block lies, for one KV group and for several."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.fp8 import FP8
from quire.kv.layout import KVLayout
from quire.kv_groups import KVGroup, KVStream, even_groups

SIZE = 4
PLAIN = KVLayout.plain(3, 2, 8, SIZE, torch.float32)
MIXED = KVLayout(
    (
        KVGroup.keys_and_values([1, 3], 2, 8),
        KVGroup((0, 4), (KVStream(2, 8), KVStream(2, 4)), 6),  # V is half as wide as K
        KVGroup.keys_and_values([2], 2, 8, 6),
    ),
    SIZE,
    torch.bfloat16,
)


@pytest.mark.parametrize("dtype", [torch.float32, FP8])
@pytest.mark.parametrize("heads", [1, 2, 8])
def test_one_group_lies_as_images_that_were_stored_before(heads: int, dtype: torch.dtype) -> None:
    """`[layers, K and V, heads, tokens, width]`, and for fp8 the scales behind all of it."""
    layout = KVLayout.plain(3, heads, 8, SIZE, dtype)
    rows, item = heads * SIZE, dtype.itemsize
    for layer in range(3):
        for number, place in enumerate(layout.places[layer]):
            before = (2 * layer + number) * rows
            assert place.values == before * 8 * item
            scales = 3 * 2 * rows * 8 + 4 * before
            assert place.scales == (scales if dtype == FP8 else None)
    assert layout.image_bytes == (layout.block_bytes,)
    assert layout.block_bytes == SIZE * layout.token_bytes
    assert layout.shape_name == f"3x2x{heads}x8"


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
def test_streams_fill_an_image_without_gaps_or_overlaps(dtype: torch.dtype) -> None:
    layout = KVLayout(MIXED.groups, SIZE, dtype)
    for number, group in enumerate(layout.groups):
        pieces = []
        for layer in group.layers:
            assert layout.group_of[layer] == number
            for place in layout.places[layer]:
                rows = place.stream.heads * SIZE
                pieces.append((place.values, rows * place.stream.width * dtype.itemsize))
                if place.scales is not None:
                    pieces.append((place.scales, rows * 4))
        at = 0
        for begin, size in sorted(pieces):
            assert begin == at
            at += size
        assert at == layout.image_bytes[number] <= layout.block_bytes
    assert layout.block_bytes == max(layout.image_bytes)


def test_a_token_has_no_padding() -> None:
    assert MIXED.image_bytes == (2 * 4 * 32 * 2, 2 * 4 * 24 * 2, 4 * 32 * 2)
    assert MIXED.token_bytes * SIZE == sum(MIXED.image_bytes)


def test_grouping_is_part_of_the_name() -> None:
    declared = [KVGroup.keys_and_values(range(4), 2, 8), KVGroup.keys_and_values(range(4, 8), 2, 8)]
    names = {
        KVLayout(groups, SIZE, torch.float32).shape_name
        for groups in (
            (KVGroup.keys_and_values(range(8), 2, 8),),
            tuple(declared),
            tuple(reversed(declared)),
            even_groups([declared[0], KVGroup.keys_and_values(range(4, 8), 2, 8, 64)]),
            (KVGroup(tuple(range(8)), (KVStream(2, 8), KVStream(2, 4))),),
        )
    }
    assert len(names) == 5


class TestBlocksOfASequence:
    LAYOUT = KVLayout(
        (KVGroup.keys_and_values([0], 1, 8), KVGroup.keys_and_values([1], 1, 8, 10)),
        SIZE,
        torch.float32,
    )

    def test_without_a_window_all_tokens_are_kept(self) -> None:
        assert [PLAIN.most_blocks(n, 7) for n in (1, 4, 5, 400)] == [1, 1, 2, 100]

    @pytest.mark.parametrize("step", [1, 3, 8])
    def test_a_window_is_bounded_however_a_sequence_grows(self, step: int) -> None:
        """Two steps are planned before the first of them is committed."""
        for first_count in range(1, step + 1):
            committed, planned = 0, 0
            for count in [first_count, *[step] * 40]:
                first = max(0, committed // SIZE * SIZE - 10 + 1) // SIZE
                planned += count
                held = -(-planned // SIZE) - first
                assert held <= self.LAYOUT.most_table_blocks(1, 10_000, step)
                committed = planned - count

    def test_short_sequences_have_as_many_blocks_in_every_group(self) -> None:
        assert self.LAYOUT.most_blocks(9, 8) == 6

    @pytest.mark.parametrize("num_blocks", [0, 1, 2, 9, 30, 77])
    def test_the_longest_sequence_is_the_longest_that_fits(self, num_blocks: int) -> None:
        for layout in (PLAIN, self.LAYOUT):
            found = layout.longest_sequence(num_blocks, 3, most=250)
            assert layout.most_blocks(found, 3) <= num_blocks or found == 0
            assert found == 250 or layout.most_blocks(found + 1, 3) > num_blocks

    def test_one_group_uses_the_whole_pool(self) -> None:
        assert PLAIN.longest_sequence(30, 3, most=10_000) == 30 * SIZE
