"""How work is dealt out to ranks."""

from __future__ import annotations

import pytest
import torch

from quire.errors import ConfigError
from quire.layers.tp import SINGLE, TensorParallel


def parts(method: str, size: int, *arguments: object) -> list[range]:
    return [getattr(TensorParallel(rank, size), method)(*arguments) for rank in range(size)]


def test_split_covers_all_units_once() -> None:
    assert parts("split", 4, 12, "heads") == [range(3), range(3, 6), range(6, 9), range(9, 12)]


def test_uneven_split_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=4 .* 6 attention heads"):
        parts("split", 4, 6, "attention heads")


def test_fewer_kv_heads_than_ranks_are_shared_by_neighbours() -> None:
    assert [part.start for part in parts("split_or_share", 8, 2, "KV heads")] == [0] * 4 + [1] * 4
    assert parts("split_or_share", 2, 8, "KV heads") == [range(4), range(4, 8)]
    with pytest.raises(ConfigError):
        parts("split_or_share", 8, 3, "KV heads")


def test_padded_split_reaches_past_the_end() -> None:
    assert parts("split_padded", 3, 10) == [range(4), range(4, 8), range(8, 12)]


def test_one_rank_has_nothing_to_exchange() -> None:
    x = torch.randn(3)
    assert SINGLE.all_reduce(x) is x
    assert SINGLE.gather(x) is x
