"""The demo model as `transformers` has it, in float32."""

from __future__ import annotations

from typing import Any

import torch

from quire.models.source import open_model, read_whole


def transformers_demo() -> tuple[Any, Any]:
    """It, and its tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    source = open_model("smollm2", progress=False)
    config = LlamaConfig(
        vocab_size=source.config.vocab_size,
        hidden_size=source.config.hidden_size,
        intermediate_size=source.config.intermediate_size,
        num_hidden_layers=source.config.num_layers,
        num_attention_heads=source.config.num_heads,
        num_key_value_heads=source.config.num_kv_heads,
        max_position_embeddings=source.config.max_position_embeddings,
        rms_norm_eps=source.config.rms_norm_eps,
        rope_theta=source.config.rope.theta,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):  # random weights, to be overwritten, would take seconds
        model = LlamaForCausalLM(config)
    model.to_empty(device="cpu").float()
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    model.load_state_dict(read_whole(source), strict=False)
    model.tie_weights()
    return model.eval(), source.tokenizer()
