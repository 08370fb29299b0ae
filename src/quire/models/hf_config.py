"""Reads a config.json, as transformers 4 and 5 write them."""

from __future__ import annotations

from quire.checks import shown
from quire.errors import ModelError
from quire.kernels.activation import Activation
from quire.models.causal_lm import CausalLM
from quire.models.checkpoints.json_fields import (
    MOST_FEATURES,
    MOST_HEAD_FEATURES,
    MOST_LAYERS,
    MOST_TOKENS,
    Raw,
    flag,
    number,
    text,
    token_ids,
    whole_number,
)
from quire.models.config import ModelConfig
from quire.models.quantization.read import read_formats
from quire.models.registry import family

ACTIVATIONS = {
    Activation.SILU: ("silu", "swish"),
    Activation.GELU_TANH: ("gelu_pytorch_tanh",),
}


def read_hf_config(raw: Raw) -> ModelConfig:
    """The config of a checkpoint; each family adds what only its own config.json says."""
    architecture = read_architecture(raw)
    model = family(architecture)
    raw = model.text_config(raw)
    raw = {**raw, **{key: v for key, v in model.defaults.items() if raw.get(key) is None}}
    refuse_unsupported(raw, model)
    heads = whole_number(raw, "num_attention_heads", most=MOST_FEATURES)
    hidden = whole_number(raw, "hidden_size", most=MOST_FEATURES)
    layers = whole_number(raw, "num_hidden_layers", most=MOST_LAYERS)
    head_dim = read_head_dim(raw, model.head_dim_field, hidden // heads)
    vocab = whole_number(raw, "vocab_size", most=MOST_TOKENS)
    # An id that the model cannot draw ends nothing; some checkpoints have one.
    ends = [i for i in token_ids(raw, "eos_token_id") if 0 <= i < vocab]
    config = ModelConfig(
        architecture=architecture,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=whole_number(raw, "intermediate_size", most=16 * MOST_FEATURES),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=whole_number(raw, "num_key_value_heads", heads, most=MOST_FEATURES),
        head_dim=head_dim,
        rms_norm_eps=number(raw, "rms_norm_eps", 1e-6, most=1.0, least=0.0),
        rope=model.rope(raw, head_dim),
        max_position_embeddings=whole_number(raw, "max_position_embeddings"),
        tie_word_embeddings=flag(raw, "tie_word_embeddings"),
        windows=(None,) * layers,
        eos_token_ids=tuple(ends),
        bos_token_id=next(iter(token_ids(raw, "bos_token_id")), None),
        dtype=text(raw, "dtype") or text(raw, "torch_dtype"),
        formats=read_formats(raw),
    )
    return model.adapt(config, raw)


def read_architecture(raw: Raw) -> str:
    names = raw.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ModelError("config.json names no architecture, so it is not a language model's.")
    return names[0]


def read_head_dim(raw: Raw, field: str, default: int) -> int:
    head_dim = whole_number(raw, field, default, most=MOST_HEAD_FEATURES)
    if head_dim % 2:
        raise ModelError(
            f"The model has {field}={head_dim}, which cannot be rotated in pairs: its config is "
            f"damaged."
        )
    return head_dim


def refuse_unsupported(raw: Raw, model: type[CausalLM]) -> None:
    """What would load and compute, and be wrong."""
    wanted = model.activation
    activation = raw.get(model.activation_field, wanted.value)
    if activation not in ACTIVATIONS[wanted]:
        raise ModelError(
            f"The model's activation is {shown(activation)}; Quire computes only "
            f"{wanted.value!r} for its family."
        )
