"""How declared KV groups are cut so that all blocks fit rows of one size."""

from __future__ import annotations

import pytest

from quire.kv_groups import KVGroup, KVStream, even_groups

KV = (KVStream(8, 64), KVStream(8, 64))


def shapes(*declared: KVGroup) -> list[tuple[int, int | None]]:
    return [(len(group.layers), group.window) for group in even_groups(declared)]


def group(count: int, window: int | None = None, streams=KV) -> KVGroup:
    return KVGroup(tuple(range(count)), streams, window)


def test_one_group_stays_whole() -> None:
    assert even_groups([group(32)]) == (group(32),)


def test_as_many_windows_as_full_layers_are_two_tables() -> None:
    assert shapes(group(12), group(12, 128)) == [(12, None), (12, 128)]


def test_five_windows_for_each_full_layer() -> None:
    """Gemma 3 with 62 layers: remainders are spread evenly, and full layers have no padding."""
    windows = [(9, 1024)] * 4 + [(8, 1024)] * 2
    assert shapes(group(10), group(52, 1024)) == [(10, None), *windows]


def test_layers_of_other_widths_share_rows() -> None:
    wide, narrow = group(4), group(8, 256, (KVStream(4, 64), KVStream(4, 64)))
    assert shapes(wide, narrow) == [(4, None), (8, 256)]


@pytest.mark.parametrize("full", range(1, 12))
@pytest.mark.parametrize("windows", [1, 2, 7, 29, 52])
def test_every_layer_is_in_one_group(full: int, windows: int) -> None:
    layers = tuple(range(full + windows))
    declared = [KVGroup(layers[:full], KV), KVGroup(layers[full:], KV, 512)]
    found = even_groups(declared)
    assert tuple(layer for each in found for layer in each.layers) == layers
    assert {each.window for each in found} == {None, 512}
    sizes = [len(each.layers) for each in found if each.window]
    assert max(sizes) - min(sizes) <= 1
