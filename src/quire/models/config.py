"""What the engine asks of a model's shape, whatever family it is of and whatever file it came from.

A family that has more to say of itself has a subclass of `ModelConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

from quire.errors import ConfigError, ModelError
from quire.layers.formats import AllDense, MatrixFormats
from quire.layers.rope import RopeConfig
from quire.models.checkpoints.json_fields import MOST_FEATURES

C = TypeVar("C", bound="ModelConfig")


@dataclass(frozen=True)
class ExpertsConfig:
    """The experts that some layers have instead of an MLP."""

    count: int
    top_k: int  # that a token goes through
    features: int  # of the MLP of one
    layers: tuple[bool, ...]  # of each layer, whether it has them
    shared_features: int = 0  # of one that all tokens go through

    def __post_init__(self) -> None:
        if self.top_k > self.count:
            raise ModelError(
                f"The model's tokens would choose {self.top_k:,} of {self.count:,} experts: its "
                f"config is damaged."
            )


@dataclass(frozen=True)
class CheckpointConfig:
    """What every model says of itself, those that generate and those that only read."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_position_embeddings: int
    dtype: str | None  # of the checkpoint
    formats: MatrixFormats = field(default=AllDense(), kw_only=True)


@dataclass(frozen=True)
class ModelConfig(CheckpointConfig):
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    windows: tuple[int | None, ...]  # one for each layer: how far back it sees, None: to the start
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    experts: ExpertsConfig | None = field(default=None, kw_only=True)

    by_layer: ClassVar[tuple[str, ...]] = ("windows",)  # the fields with an element for each layer

    @property
    def attention_values(self) -> int:
        """Numbers in the matrices of one layer's attention: q and o, k and v."""
        heads = 2 * self.num_heads + 2 * self.num_kv_heads
        return heads * self.head_dim * self.hidden_size

    @property
    def attended_values(self) -> int:
        """Numbers that a head of a prompt multiplies for each position it sees: K, then V."""
        return 2 * self.head_dim

    def for_length(self: C, max_len: int) -> C:
        """The same model, for texts of at most `max_len` tokens."""
        return replace(self, rope=self.rope.for_length(max_len))

    def with_mtp(self: C) -> C:
        """The same model, whose blocks have room for what its MTP layer caches."""
        raise no_mtp()

    def with_one_layer_of_each_kind(self: C) -> C:
        """A thin model, whose layers do all that this one's do."""
        has_experts = self.experts.layers if self.experts else (False,) * self.num_layers
        each_layer = zip(has_experts, *(getattr(self, name) for name in self.by_layer), strict=True)
        kinds = list(dict.fromkeys(each_layer))
        with_experts, *fields = zip(*kinds, strict=True)
        thin: dict[str, Any] = dict(zip(self.by_layer, fields, strict=True))
        return replace(
            self,
            num_layers=len(kinds),
            experts=self.experts and replace(self.experts, layers=with_experts),
            **thin,
        )

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"The model's {self.num_heads} attention heads cannot share "
                f"{self.num_kv_heads} KV heads evenly: its config is damaged."
            )
        if self.num_heads * self.head_dim > MOST_FEATURES:
            raise ModelError(
                f"The model has {self.num_heads:,} attention heads of {self.head_dim:,} features "
                f"each, which no model has: its config is damaged."
            )


def no_mtp() -> ConfigError:
    return ConfigError(
        "speculative='mtp' drafts with the MTP layer of a DeepSeek V3 checkpoint, and this model "
        "has none: use ngram or a smaller model."
    )
