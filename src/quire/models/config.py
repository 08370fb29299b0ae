"""A model's shape in one form, whatever family it is of and whatever file it came from."""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import ModelError
from quire.layers.rope import RopeConfig as RopeConfig
from quire.models.json_fields import Raw, number, token_ids, whole_number
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

    @classmethod
    def from_hf(cls, raw: Raw) -> ModelConfig:
        """Read a config.json, as transformers 4 and 5 write them."""
        from quire.models.registry import family  # which imports the families, and they this

        architecture = read_architecture(raw)
        model = family(architecture)
        refuse_unsupported(raw)
        heads = whole_number(raw, "num_attention_heads")
        hidden = whole_number(raw, "hidden_size")
        layers = whole_number(raw, "num_hidden_layers")
        config = cls(
            architecture=architecture,
            vocab_size=whole_number(raw, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=whole_number(raw, "intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=whole_number(raw, "num_key_value_heads", heads),
            head_dim=whole_number(raw, "head_dim", hidden // heads),
            rms_norm_eps=number(raw, "rms_norm_eps", 1e-6),
            rope=read_rope(raw),
            max_position_embeddings=whole_number(raw, "max_position_embeddings"),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            attention_bias=False,
            output_bias=False,
            mlp_bias=False,
            qk_norm=False,
            windows=(None,) * layers,
            eos_token_ids=token_ids(raw, "eos_token_id"),
            bos_token_id=next(iter(token_ids(raw, "bos_token_id")), None),
            dtype=raw.get("dtype") or raw.get("torch_dtype"),
        )
        return model.adapt(config, raw)


def read_architecture(raw: Raw) -> str:
    names = raw.get("architectures")
    if not isinstance(names, list) or not names:
        raise ModelError("config.json names no architecture, so it is not a language model's.")
    return str(names[0])


def refuse_unsupported(raw: Raw) -> None:
    """What would load and compute, and be wrong."""
    if quantised := raw.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise ModelError(
            f"The weights are quantised ({method}), which Quire reads only from GGUF: "
            f"use the model's original weights or a GGUF file of it."
        )
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"The model's activation is {activation!r}; Quire computes only 'silu'.")
