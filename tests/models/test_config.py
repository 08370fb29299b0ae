"""Reading config.json: the words of transformers 4 and 5, the families' defaults, the refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest

from quire.errors import ModelError
from quire.layers.rope import RopeConfig
from quire.models.config import ModelConfig
from quire.models.gemma import GemmaConfig
from quire.models.gemma3 import Gemma3Config
from quire.models.hf_config import read_hf_config
from quire.models.llama import LlamaConfig
from quire.models.smollm3 import SmolLM3Config

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 512,
}


def read(**changes: Any) -> ModelConfig:
    return read_hf_config({**BASE, **changes})


def family(name: str, **changes: Any) -> ModelConfig:
    return read(architectures=[f"{name}ForCausalLM"], **changes)


def test_what_is_unsaid_has_its_usual_value() -> None:
    config = read()
    assert (config.num_kv_heads, config.head_dim) == (8, 8)
    assert (config.rms_norm_eps, config.rope) == (1e-6, RopeConfig(10_000.0))
    assert config.windows == (None,) * 4
    assert isinstance(config, LlamaConfig)
    assert not (config.tie_word_embeddings or config.attention_bias)
    assert (config.eos_token_ids, config.bos_token_id, config.dtype) == ((), None, None)


def test_both_generations_of_rope_fields() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    old = read(rope_theta=5e5, rope_scaling=scaling)
    new = read(rope_parameters={**scaling, "rope_theta": 5e5})
    assert old == new
    assert new.rope == RopeConfig(
        5e5, "llama3", 8.0, 128, low_freq_factor=1.0, high_freq_factor=4.0
    )
    assert read(rope_scaling={"type": "linear", "factor": 2}).rope == RopeConfig(1e4, "linear", 2.0)
    assert read(rope_scaling=None, rope_theta=1e6).rope == RopeConfig(1e6)


def test_both_generations_of_dtype() -> None:
    assert read(torch_dtype="bfloat16").dtype == read(dtype="bfloat16").dtype == "bfloat16"


@pytest.mark.parametrize(("given", "ids"), [(None, ()), (2, (2,)), ([2, 5, 2], (2, 5)), (0, (0,))])
def test_end_of_text_ids(given: Any, ids: tuple[int, ...]) -> None:
    assert read(eos_token_id=given).eos_token_ids == ids


def test_llama_biases() -> None:
    config = family("Llama", attention_bias=True, mlp_bias=True)
    assert isinstance(config, LlamaConfig)
    assert config.attention_bias and config.output_bias and config.mlp_bias


def test_mistral_windows() -> None:
    assert family("Mistral", sliding_window=None).windows == (None,) * 4
    assert family("Mistral", sliding_window=32).windows == (32,) * 4
    assert family("Mistral").windows == (4096,) * 4  # transformers' default, where nothing is said


@pytest.mark.parametrize("name", ["Qwen2", "Qwen3"])
def test_qwen_windows(name: str) -> None:
    assert family(name, sliding_window=32).windows == (None,) * 4
    off = {"use_sliding_window": False, "sliding_window": 32, "max_window_layers": 0}
    assert family(name, **off).windows == (None,) * 4
    assert family(name, use_sliding_window=True, sliding_window=None).windows == (None,) * 4
    on = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 3}
    assert family(name, **on).windows == (None, None, None, 32)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert family(name, **on, layer_types=kinds).windows == (32, None, 32, None)
    with pytest.raises(ModelError, match="layer_types"):
        family(name, **on, layer_types=kinds[:3])
    with pytest.raises(ModelError, match="chunked"):
        family(name, **on, layer_types=["chunked_attention"] * 4)


def test_what_a_family_leaves_unsaid() -> None:
    assert (family("Qwen3").head_dim, family("Qwen3", head_dim=32).head_dim) == (128, 32)
    assert family("Qwen3", head_dim=None).head_dim == 128


@pytest.mark.parametrize(("name", "count"), [("GptOss", 128), ("Mixtral", 8), ("Qwen3Moe", 128)])
def test_experts_that_are_not_counted(name: str, count: int) -> None:
    experts, few = family(name).experts, family(name, num_local_experts=60).experts
    assert experts is not None and experts.count == count
    assert few is not None and few.count == 60


def test_smollm3_layers() -> None:
    config = family("SmolLM3", use_sliding_window=True, sliding_window=32)
    assert isinstance(config, SmolLM3Config)
    assert config.has_rope == (True, True, True, False)
    assert config.windows == (None, None, None, 32)
    assert (config.tie_word_embeddings, config.rope.theta) == (True, 2e6)
    given = family("SmolLM3", no_rope_layers=[0, 1, 0, 1, 1], tie_word_embeddings=False)
    assert isinstance(given, SmolLM3Config)
    assert (given.has_rope, given.tie_word_embeddings) == ((False, True, False, True), False)


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
def test_phi3_positions(name: str) -> None:
    factors = {"short_factor": [1, 2, 3], "long_factor": [4, 5, 6]}
    rope = {"type": name, **factors, "partial_rotary_factor": 0.75}
    long = family("Phi3", rope_scaling=rope, original_max_position_embeddings=128)
    assert (long.rope.rotated, long.rope.divisors) == (6, (4.0, 5.0, 6.0))
    assert long.rope.attention_factor == math.sqrt(1 + math.log(4) / math.log(128))
    assert long.for_length(512) == long
    assert long.for_length(128).rope.divisors == (1.0, 2.0, 3.0)
    short = family("Phi3", rope_scaling=rope)  # the model is shorter than what is usual
    assert (short.rope.divisors, short.rope.attention_factor) == ((1.0, 2.0, 3.0), 1.0)


def test_glm4_turns_half_of_each_head() -> None:
    assert family("Glm4", head_dim=16).rope.rotated == 8
    assert family("Glm4", head_dim=16, partial_rotary_factor=1.0).rope.rotated is None
    with pytest.raises(ModelError, match=r"partial_rotary_factor=0\.4"):
        family("Glm4", head_dim=16, partial_rotary_factor=0.45)


def test_gemma2_layers() -> None:
    config = family("Gemma2", hidden_activation="gelu_pytorch_tanh", hidden_act="gelu")
    assert isinstance(config, GemmaConfig)
    assert config.windows == (4096, None, 4096, None)
    assert (config.attention_softcap, config.logit_softcap) == (50.0, 30.0)
    assert (config.query_pre_attn_scalar, config.head_dim) == (256, 256)
    assert (config.tie_word_embeddings, config.eos_token_ids) == (True, (1,))
    plain = family("Gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert isinstance(plain, GemmaConfig)
    assert plain.attention_softcap is plain.logit_softcap is None


def test_gemma3_has_two_rotations() -> None:
    """In the words of transformers 4, and in those of 5."""
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = family(
        "Gemma3",
        sliding_window=32,
        sliding_window_pattern=3,
        rope_theta=5e5,
        rope_local_base_freq=1e3,
        rope_scaling=scaling,
    )
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    ropes = {
        "full_attention": {**scaling, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
    }
    new = family("Gemma3", sliding_window=32, layer_types=kinds, rope_parameters=ropes)
    assert old == new
    assert isinstance(new, Gemma3Config)
    assert new.windows == (32, 32, None, 32)
    assert (new.rope, new.local_rope) == (RopeConfig(5e5, "linear", 8.0), RopeConfig(1e3))
    unsaid = family("Gemma3", num_hidden_layers=6)
    assert isinstance(unsaid, Gemma3Config)
    assert (unsaid.rope, unsaid.local_rope) == (RopeConfig(1e6), RopeConfig(1e4))
    assert unsaid.windows == (4096,) * 5 + (None,)


def test_gemma3_within_a_model_that_sees() -> None:
    """As google/gemma-3-4b-it has it: most is left unsaid."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = read_hf_config(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "eos_token_id": [1, 106],
            "text_config": text,
            "torch_dtype": "bfloat16",
            "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
        }
    )
    assert (config.hidden_size, config.num_layers, config.vocab_size) == (2560, 34, 262_208)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert (config.eos_token_ids, config.dtype) == ((1, 106), "bfloat16")
    assert (config.windows.count(None), config.windows[5]) == (5, None)
    assert config.max_position_embeddings == 131_072


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("Gemma2", {"hidden_activation": "gelu"}, "'gelu'"),
        ("Gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping=0"),
        ("Gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("Gemma3", {"sliding_window_pattern": 0}, "sliding_window_pattern=0"),
        ("SmolLM3", {"no_rope_layers": [1, 0]}, "no_rope_layers=[1, 0]"),
        ("SmolLM3", {"no_rope_layers": [2] * 4}, "no_rope_layers"),
        ("Granite", {"logits_scaling": 0}, "logits_scaling=0"),
        ("Phi3", {"rope_scaling": {"type": "su", "short_factor": [1]}}, "short_factor=[1]"),
        ("Phi3", {"sliding_window": -1}, "sliding_window=-1"),
    ],
)
def test_what_a_family_refuses(name: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError) as error:
        family(name, **changes)
    assert words in str(error.value)


def test_an_unknown_architecture_gets_the_list_of_known_ones() -> None:
    with pytest.raises(ModelError, match="'GPT2LMHeadModel'") as error:
        read(architectures=["GPT2LMHeadModel"])
    for name in ("Llama", "Mistral", "Qwen2", "Qwen3"):
        assert f"{name}ForCausalLM" in str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": None}, "no architecture"),
        ({"architectures": []}, "no architecture"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "default, linear, llama3, yarn",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor=None"),
        ({"rope_scaling": {"rope_type": "linear", "factor": None}}, "factor=None"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, "factor='4'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor=None"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor=0.25"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "some layers"),
        ({"hidden_size": None}, "hidden_size=None"),
        ({"vocab_size": -3}, "vocab_size=-3"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers='4'"),
        ({"num_attention_heads": True}, "num_attention_heads=True"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps='small'"),
        ({"num_key_value_heads": 3}, "3 KV heads"),
        ({"eos_token_id": "</s>"}, "eos_token_id='</s>'"),
        ({"head_dim": 7}, "head_dim=7"),
    ],
)
def test_what_would_be_wrong_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError) as error:
        read(**changes)
    assert words in str(error.value)
