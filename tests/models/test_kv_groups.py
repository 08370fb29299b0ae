"""What models declare of their KV: layers of one shape and one reach are a group."""

from __future__ import annotations

from typing import Any

import pytest
from families import SHAPE

from quire.kv_groups import KVGroup, KVStream
from quire.layers.tp import SINGLE, TensorParallel
from quire.models.hf_config import read_hf_config
from quire.models.source import shapes


def groups(name: str, tp: TensorParallel = SINGLE, **changes: Any) -> tuple[KVGroup, ...]:
    raw = {**SHAPE, "architectures": [f"{name}ForCausalLM"], **changes}
    return shapes(read_hf_config(raw)).kv_groups(tp)


def test_one_group_of_k_and_v() -> None:
    assert groups("Llama") == (KVGroup((0, 1, 2), (KVStream(2, 8), KVStream(2, 8))),)
    (group,) = groups("Mistral", sliding_window=9)
    assert (group.layers, group.window) == ((0, 1, 2), 9)


def test_layers_with_a_window_are_a_group_of_their_own() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    found = groups("Qwen3", use_sliding_window=True, sliding_window=7, layer_types=kinds)
    assert [(group.layers, group.window) for group in found] == [((0, 2), 7), ((1,), None)]


@pytest.mark.parametrize(("size", "heads"), [(1, 2), (2, 1), (4, 1)])
def test_ranks_have_their_own_heads_or_share_one(size: int, heads: int) -> None:
    (group,) = groups("Qwen2", TensorParallel(0, size))
    assert group.streams == (KVStream(heads, 8),) * 2
