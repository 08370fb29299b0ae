"""What an encoder's config.json says."""

from __future__ import annotations

from dataclasses import dataclass

from quire.checks import shown
from quire.errors import ModelError
from quire.models.checkpoints.json_fields import (
    MOST_FEATURES,
    MOST_LAYERS,
    MOST_TOKENS,
    Raw,
    number,
    text,
    whole_number,
)
from quire.models.config import CheckpointConfig
from quire.models.encoders.activations import ACTIVATIONS


@dataclass(frozen=True)
class EncoderConfig(CheckpointConfig):
    """`max_position_embeddings` are those that texts have, so without any that come before."""

    num_positions: int  # that the checkpoint has
    first_position: int  # of a text's first token among them
    num_types: int  # of tokens: those of the first and of the second text of a pair
    layer_norm_eps: float
    activation: str


def read_encoder_config(raw: Raw, architecture: str, counts_from_padding: bool) -> EncoderConfig:
    """`counts_from_padding`: positions of texts begin behind that of the padding token."""
    hidden = whole_number(raw, "hidden_size", most=MOST_FEATURES)
    heads = whole_number(raw, "num_attention_heads", most=MOST_FEATURES)
    if hidden % heads:
        raise ModelError(
            f"The model's {hidden:,} features cannot be dealt out to {heads:,} attention heads "
            f"evenly: its config is damaged."
        )
    _refuse_unsupported(raw)
    positions = whole_number(raw, "max_position_embeddings", most=MOST_TOKENS)
    first = 0
    if counts_from_padding:
        first = 1 + whole_number(raw, "pad_token_id", 1, most=MOST_TOKENS, least=0)
    if first >= positions:
        raise ModelError(
            f"The model's {positions:,} positions begin at {first:,}: its config is damaged."
        )
    return EncoderConfig(
        architecture=architecture,
        vocab_size=whole_number(raw, "vocab_size", most=MOST_TOKENS),
        hidden_size=hidden,
        intermediate_size=whole_number(raw, "intermediate_size", most=16 * MOST_FEATURES),
        num_layers=whole_number(raw, "num_hidden_layers", most=MOST_LAYERS),
        num_heads=heads,
        max_position_embeddings=positions - first,
        dtype=text(raw, "dtype") or text(raw, "torch_dtype"),
        num_positions=positions,
        first_position=first,
        num_types=whole_number(raw, "type_vocab_size", 0, most=MOST_FEATURES, least=0),
        layer_norm_eps=number(raw, "layer_norm_eps", 1e-12, most=1.0, least=0.0),
        activation=text(raw, "hidden_act") or "gelu",
    )


def _refuse_unsupported(raw: Raw) -> None:
    """What would load and compute, and be wrong."""
    activation = text(raw, "hidden_act") or "gelu"
    if activation not in ACTIVATIONS:
        raise ModelError(
            f"The model's activation is {shown(activation)}; Quire computes "
            f"{', '.join(ACTIVATIONS)} in encoders."
        )
    kind = raw.get("position_embedding_type", "absolute")
    if kind != "absolute":
        raise ModelError(
            f"The model's positions are {shown(kind)}; Quire computes absolute ones in encoders."
        )
