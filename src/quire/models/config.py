"""A model's shape in one form, whatever family it is of and whatever file it came from."""

from __future__ import annotations

from dataclasses import dataclass

from quire.checks import shown
from quire.errors import ModelError
from quire.layers.rope import RopeConfig as RopeConfig
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
from quire.models.rope import read_rope


@dataclass(frozen=True)
class ModelConfig:
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool  # on q, k and v
    output_bias: bool  # on what follows the attention
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]  # one for each layer: how far back it sees, None: to the start
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str | None  # of the checkpoint

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"The model's {self.num_heads} attention heads cannot share "
                f"{self.num_kv_heads} KV heads evenly: its config is damaged."
            )
        if self.head_dim % 2:
            raise ModelError(
                f"The model has head_dim={self.head_dim}, which cannot be rotated in pairs: its "
                f"config is damaged."
            )
        if self.num_heads * self.head_dim > MOST_FEATURES:
            raise ModelError(
                f"The model has {self.num_heads:,} attention heads of {self.head_dim:,} features "
                f"each, which no model has: its config is damaged."
            )

    @classmethod
    def from_hf(cls, raw: Raw) -> ModelConfig:
        """Read a config.json, as transformers 4 and 5 write them."""
        from quire.models.registry import family  # which imports the families, and they this

        architecture = read_architecture(raw)
        model = family(architecture)
        refuse_unsupported(raw)
        heads = whole_number(raw, "num_attention_heads", most=MOST_FEATURES)
        hidden = whole_number(raw, "hidden_size", most=MOST_FEATURES)
        layers = whole_number(raw, "num_hidden_layers", most=MOST_LAYERS)
        head_dim = whole_number(raw, "head_dim", hidden // heads, most=MOST_HEAD_FEATURES)
        vocab = whole_number(raw, "vocab_size", most=MOST_TOKENS)
        # An id that the model cannot draw ends nothing; some checkpoints have one.
        ends = [i for i in token_ids(raw, "eos_token_id") if 0 <= i < vocab]
        config = cls(
            architecture=architecture,
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=whole_number(raw, "intermediate_size", most=16 * MOST_FEATURES),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=whole_number(raw, "num_key_value_heads", heads, most=MOST_FEATURES),
            head_dim=head_dim,
            rms_norm_eps=number(raw, "rms_norm_eps", 1e-6, most=1.0, least=0.0),
            rope=read_rope(raw),
            max_position_embeddings=whole_number(raw, "max_position_embeddings"),
            tie_word_embeddings=flag(raw, "tie_word_embeddings"),
            attention_bias=False,
            output_bias=False,
            mlp_bias=False,
            qk_norm=False,
            windows=(None,) * layers,
            eos_token_ids=tuple(ends),
            bos_token_id=next(iter(token_ids(raw, "bos_token_id")), None),
            dtype=text(raw, "dtype") or text(raw, "torch_dtype"),
        )
        return model.adapt(config, raw)


def read_architecture(raw: Raw) -> str:
    names = raw.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ModelError("config.json names no architecture, so it is not a language model's.")
    return names[0]


def refuse_unsupported(raw: Raw) -> None:
    """What would load and compute, and be wrong."""
    if quantised := raw.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise ModelError(
            f"The weights are quantised ({shown(method)}), which Quire reads only from GGUF: "
            f"use the model's original weights or a GGUF file of it."
        )
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(
            f"The model's activation is {shown(activation)}; Quire computes only 'silu'."
        )
