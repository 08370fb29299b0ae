"""What config.json says of a model's experts."""

from __future__ import annotations

from quire.models.checkpoints.json_fields import (
    MOST_EXPERTS,
    MOST_FEATURES,
    MOST_LAYERS,
    Raw,
    refusal,
    whole_number,
)
from quire.models.config import ExpertsConfig


def read_experts(
    raw: Raw,
    num_layers: int,
    features: str = "moe_intermediate_size",
    shared_features: str | None = None,
) -> ExpertsConfig:
    """The last two are the names of fields."""
    count = "num_local_experts" if raw.get("num_local_experts") is not None else "num_experts"
    size = {"most": MOST_FEATURES}
    return ExpertsConfig(
        count=whole_number(raw, count, most=MOST_EXPERTS),
        top_k=whole_number(raw, "num_experts_per_tok", most=MOST_EXPERTS),
        features=whole_number(raw, features, **size),
        layers=sparse_layers(raw, num_layers),
        shared_features=whole_number(raw, shared_features, **size) if shared_features else 0,
    )


def sparse_layers(raw: Raw, num_layers: int) -> tuple[bool, ...]:
    """Every `decoder_sparse_step`-th layer has experts, but for those in `mlp_only_layers`."""
    step = whole_number(raw, "decoder_sparse_step", 1, most=MOST_LAYERS)
    dense = raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise refusal("mlp_only_layers", dense, "a list of layers")
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers))
