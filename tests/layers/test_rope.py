"""Rotary positions against transformers', for every kind of scaling."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as glm4_turn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as phi3_turn

from quire.kernels.plain import rotate
from quire.layers import rope
from quire.layers.rope import RopeConfig, RotaryEmbedding
from quire.models.rope import read_partial_rope, read_rope, softmax_magnitude

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
    {"rope_type": "yarn", "rope_theta": 1e4, **SCALED, "factor": None},
    {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "mscale": 0.8,
        "mscale_all_dim": 1.1,
        **SCALED,
        "factor": None,
    },
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
    rotation = RotaryEmbedding(HEAD_DIM, read_rope(raw, HEAD_DIM))(positions, 4000, dtype)
    got = rotate(torch.cat((q, k), dim=1), rotation)
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("factor", [None, 16.0])
def test_a_factor_that_is_null_is_what_texts_are_longer_by(factor: float | None) -> None:
    yarn = {"rope_type": "yarn", "mscale_all_dim": 0.7, **SCALED, "factor": factor}
    raw = {"max_position_embeddings": 1024, "rope_parameters": yarn}
    assert read_rope(raw, HEAD_DIM).factor == 16
    assert softmax_magnitude(raw) == (0.07 * math.log(16) + 1) ** 2


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


def test_a_table_does_not_move_for_the_type_of_rotations() -> None:
    """A recorded step reads where the table was."""
    embedding, positions = RotaryEmbedding(HEAD_DIM, RopeConfig()), torch.arange(9)
    embedding.reserve(100, torch.device("cpu"))
    table = embedding.table
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.bfloat16):
        cos, _ = embedding(positions, 100, dtype)
        assert torch.equal(cos, table[:9, 0].to(dtype))
        embedding.reserve(100, torch.device("cpu"))
        assert embedding.table is table


@pytest.mark.parametrize("rotated", [0, 2, 16, 62, 64])
@pytest.mark.parametrize("neighbours", [False, True])
def test_scores_of_partly_turned_heads(rotated: int, neighbours: bool) -> None:
    """Reordered and turned over the whole width, q and k score as turned in part where they are."""
    config = RopeConfig(rotated=rotated)
    q, k = torch.randn(2, 9, 1, HEAD_DIM).unbind()
    positions = torch.arange(9)
    order = rope.rotation_order(HEAD_DIM, config, neighbours)
    assert sorted(order or range(HEAD_DIM)) == list(range(HEAD_DIM))
    assert (order == ()) == (rotated in (0, HEAD_DIM) and not (neighbours and rotated))
    turned = []
    for x in (q, k):
        ours = x[..., list(order)] if order else x
        rotation = RotaryEmbedding(HEAD_DIM, config)(positions, 9, torch.float32)
        turned.append(rotate(ours, rotation)[:, 0])
    wanted = []
    apply = glm4_turn if neighbours else phi3_turn
    if rotated == 0:
        wanted = [q[:, 0], k[:, 0]]
    else:
        angles = positions[:, None] * rope.inverse_frequencies(rotated, config)
        both = torch.cat((angles, angles), dim=-1)[None]
        heads = (x.transpose(0, 1)[None] for x in (q, k))
        wanted = [x[0, 0] for x in apply(*heads, both.cos(), both.sin())]
    torch.testing.assert_close(
        turned[0] @ turned[1].T, wanted[0] @ wanted[1].T, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("longest", [64, 65, 4096])
def test_longrope_is_chosen_by_the_longest_text(longest: int) -> None:
    """transformers chooses by the text at hand; for the longest one it chooses the same."""
    factors = [1.0 + i / 4 for i in range(24)]
    parameters = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": factors,
        "long_factor": [factor**2 for factor in factors],
        "original_max_position_embeddings": 64,
        "partial_rotary_factor": 0.75,
    }
    raw = {"max_position_embeddings": 4096, "rope_parameters": parameters}
    config = read_partial_rope(raw, HEAD_DIM)
    assert config == config.for_length(4096)
    more = {"head_dim": HEAD_DIM, "original_max_position_embeddings": 64, "pad_token_id": None}
    shape = {"hidden_size": 4 * HEAD_DIM, "num_attention_heads": 4}
    oracle = Phi3RotaryEmbedding(Phi3Config(**raw, **more, **shape))
    positions = torch.arange(longest)
    cos, sin = oracle(torch.zeros(1), positions[None])
    ours = RotaryEmbedding(HEAD_DIM, config.for_length(longest))(positions, longest, torch.float32)
    half = HEAD_DIM // 2
    torch.testing.assert_close(ours.cos[:, 0, :24], cos[0, :, :24], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours.sin[:, 0, half : half + 24], sin[0, :, :24])
    assert (ours.cos[:, 0, 24:half] == 1).all() and (ours.sin[:, 0, 24:half] == 0).all()


def test_ready_made_divisors_slow_their_own_pairs() -> None:
    divisors = tuple(float(1 + i) for i in range(HEAD_DIM // 2))
    plain = rope.inverse_frequencies(HEAD_DIM, RopeConfig())
    slowed = rope.inverse_frequencies(HEAD_DIM, RopeConfig(divisors=divisors))
    torch.testing.assert_close(slowed * torch.tensor(divisors), plain)
