"""Rotary positions against transformers', for every kind of scaling."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from quire.kernels.plain import rotate
from quire.layers import rope
from quire.layers.rope import RopeConfig, RotaryEmbedding
from quire.models.rope import read_rope

HEAD_DIM = 64
SCALED = {"original_max_position_embeddings": 64, "factor": 4.0}
PARAMETERS = [
    {"rope_type": "default", "rope_theta": 1e4},
    {"rope_type": "default", "rope_theta": 1e6},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5},
    {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        **SCALED,
    },
    {"rope_type": "yarn", "rope_theta": 1e4, **SCALED},
    {"rope_type": "yarn", "rope_theta": 1e4, "attention_factor": 0.7, "beta_fast": 16, **SCALED},
]


@pytest.mark.parametrize("parameters", PARAMETERS, ids=lambda p: str(p["rope_type"]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_equals_transformers(parameters: dict[str, object], dtype: torch.dtype) -> None:
    raw = {"max_position_embeddings": 4096, "rope_parameters": parameters}
    oracle = LlamaRotaryEmbedding(LlamaConfig(head_dim=HEAD_DIM, **raw))
    positions = torch.tensor([0, 1, 2, 17, 63, 64, 1000, 3999])
    q, k = torch.randn(8, 6, HEAD_DIM, dtype=dtype), torch.randn(8, 2, HEAD_DIM, dtype=dtype)
    cos, sin = oracle(q, positions[None])
    wanted = torch.cat(apply_rotary_pos_emb(q, k, cos[0], sin[0]), dim=1)
    rotation = RotaryEmbedding(HEAD_DIM, read_rope(raw))(positions, 4000, dtype)
    got = rotate(torch.cat((q, k), dim=1), rotation)
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=4 * tolerance)


def test_input_may_be_a_part_of_something_wider_and_is_left_alone() -> None:
    wide = torch.randn(5, 9, HEAD_DIM)
    before = wide.clone()
    rotation = RotaryEmbedding(HEAD_DIM, RopeConfig())(torch.arange(5), 5, torch.float32)
    got = rotate(wide[:, :6], rotation)
    torch.testing.assert_close(got, rotate(wide[:, :6].contiguous(), rotation))
    assert torch.equal(wide, before)


def test_table_is_as_long_as_it_has_to_be() -> None:
    embedding = RotaryEmbedding(HEAD_DIM, RopeConfig())
    cpu = torch.device("cpu")
    embedding.reserve(10, cpu)
    table = embedding.table
    assert len(table) == rope.FIRST_TABLE
    embedding.reserve(rope.FIRST_TABLE, cpu)
    assert embedding.table is table
    embedding.reserve(rope.FIRST_TABLE + 1, cpu)
    assert len(embedding.table) == 2 * rope.FIRST_TABLE
    assert torch.equal(embedding.table[: len(table)], table)


def test_ready_made_divisors_slow_their_own_pairs() -> None:
    divisors = tuple(float(1 + i) for i in range(HEAD_DIM // 2))
    plain = rope.inverse_frequencies(HEAD_DIM, RopeConfig())
    slowed = rope.inverse_frequencies(HEAD_DIM, RopeConfig(divisors=divisors))
    torch.testing.assert_close(slowed * torch.tensor(divisors), plain)
