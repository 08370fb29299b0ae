"""DeepSeek V2 and V2-Lite: latent attention, first layers dense, experts beside shared ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from quire.errors import ModelError
from quire.layers.attention import Step
from quire.layers.latent import LatentAttention, LatentShape
from quire.layers.rope import RopeConfig, RotaryEmbedding
from quire.layers.router import Groups, Router, RoutingRule
from quire.layers.tp import SINGLE, TensorParallel
from quire.models.blocks import GatedMLP, PreNormLayer
from quire.models.checkpoints.json_fields import (
    MOST_EXPERTS,
    MOST_FEATURES,
    MOST_HEAD_FEATURES,
    MOST_LAYERS,
    Raw,
    flag,
    positive_number,
    refusal,
    text,
    whole_number,
)
from quire.models.config import ExpertsConfig, ModelConfig
from quire.models.decoder import DecoderForCausalLM
from quire.models.deepseek_gguf import DEEPSEEK2
from quire.models.rope import scaled_rope, softmax_magnitude
from quire.models.sparse import SparseLayer, SparseMLP


@dataclass(frozen=True)
class DeepseekConfig(ModelConfig):
    latent: LatentShape
    attention_scale: float
    interleaved: bool  # neighbours turn, not halves
    rule: RoutingRule
    mtp_layers: int = 0  # that the checkpoint has behind the last one; the first of them drafts
    caches_mtp: bool = False  # blocks have room for its KV, too: it drafts

    @property
    def attention_values(self) -> int:
        latent, heads = self.latent, self.num_heads
        values = self.hidden_size * (latent.width + heads * latent.values)  # kv_a and o
        values += latent.rank * heads * (latent.nope + latent.values)
        if latent.q_rank is None:
            return values + self.hidden_size * heads * self.head_dim
        return values + latent.q_rank * (self.hidden_size + heads * self.head_dim)

    @property
    def attended_values(self) -> int:
        return self.head_dim + self.latent.values

    def with_mtp(self) -> DeepseekConfig:
        return replace(self, caches_mtp=True) if self.mtp_layers else super().with_mtp()


def deepseek_attention(config: DeepseekConfig, layer: int, tp: TensorParallel) -> LatentAttention:
    return LatentAttention(
        config.hidden_size,
        config.num_heads,
        config.latent,
        config.rope,
        config.interleaved,
        config.attention_scale,
        layer,
        tp,
    )


class DeepseekMLP(SparseMLP):
    """Experts, and one MLP that all tokens go through, without a gate of its own."""

    def __init__(
        self, config: DeepseekConfig, shape: ExpertsConfig, tp: TensorParallel, corrected: bool
    ) -> None:
        super().__init__(config, replace(shape, shared_features=0), config.rule, tp)
        self.gate = Router(
            config.hidden_size, shape.count, config.rule, in_float32=True, corrected=corrected
        )
        self.shared_experts = GatedMLP(config, tp, features=shape.shared_features)

    def forward(self, x: Tensor, step: Step, products: Tensor | None = None) -> Tensor:
        routing = self.gate(x, step, products)
        # A GPU may compute both at once. A CPU's matrices may have copies, which are faster.
        shared = self.shared_experts.as_shared_experts() if x.is_cuda else None
        out: Tensor = self.experts(x, routing, step.backend, shared)
        if shared is None:
            self.shared_experts.add_partial(x, out, step.backend)
        return self.tp.all_reduce(out)


class DeepseekForCausalLM(DecoderForCausalLM):
    """What V2 and V3 share."""

    corrected: ClassVar[bool]  # whether routers have learned corrections of the choice
    head_dim_field = "qk_rope_head_dim"  # the rest of a head, which adds to its width, never turns

    def __init__(self, config: DeepseekConfig, tp: TensorParallel = SINGLE) -> None:
        super().__init__(config, tp)
        assert config.experts is not None
        rope = RotaryEmbedding(config.latent.rope, config.rope)
        for i, has_experts in enumerate(config.experts.layers):
            attention = deepseek_attention(config, i, tp)
            if has_experts:
                mlp = DeepseekMLP(config, config.experts, tp, self.corrected)
                self.model.append(SparseLayer(config, attention, mlp), rope)
            else:
                self.model.append(PreNormLayer(config, attention, GatedMLP(config, tp)), rope)

    @classmethod
    def rope(cls, raw: Raw, head_dim: int) -> RopeConfig:
        return scaled_rope(raw, head_dim)

    @classmethod
    def adapt(cls, config: ModelConfig, raw: Raw) -> DeepseekConfig:
        for bias in ("attention_bias", "mlp_bias"):
            if flag(raw, bias):
                raise ModelError(f"The model has {bias}, which DeepSeek's do not have here.")
        latent, experts = read_latent(raw), read_shared_experts(raw, config.num_layers)
        head_dim = latent.nope + latent.rope
        return DeepseekConfig(
            **vars(replace(config, head_dim=head_dim, experts=experts)),
            latent=latent,
            attention_scale=head_dim**-0.5 * softmax_magnitude(raw),
            interleaved=True,
            rule=cls.rule(raw, experts),
        )

    @classmethod
    def rule(cls, raw: Raw, experts: ExpertsConfig) -> RoutingRule:
        raise NotImplementedError


class DeepseekV2ForCausalLM(DeepseekForCausalLM):
    corrected = False
    defaults: ClassVar[Raw] = {
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "first_k_dense_replace": 0,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
    }
    gguf = DEEPSEEK2

    @classmethod
    def rule(cls, raw: Raw, experts: ExpertsConfig) -> RoutingRule:
        method = text(raw, "topk_method")
        if method not in ("greedy", "group_limited_greedy"):
            raise refusal("topk_method", method, "greedy or group_limited_greedy")
        groups = read_groups(raw, experts, 1) if method != "greedy" else None
        scale = positive_number(raw, "routed_scaling_factor")
        return RoutingRule(experts.top_k, groups=groups, scale=scale)


def read_latent(raw: Raw) -> LatentShape:
    head = {"most": MOST_HEAD_FEATURES}
    q_rank = None
    if raw.get("q_lora_rank", 1536) is not None:
        q_rank = whole_number(raw, "q_lora_rank", 1536, most=MOST_FEATURES)
    return LatentShape(
        rank=whole_number(raw, "kv_lora_rank", most=MOST_FEATURES),
        nope=whole_number(raw, "qk_nope_head_dim", **head),
        rope=whole_number(raw, "qk_rope_head_dim", **head),
        values=whole_number(raw, "v_head_dim", **head),
        q_rank=q_rank,
    )


def read_shared_experts(raw: Raw, num_layers: int) -> ExpertsConfig:
    """Layers from `first_k_dense_replace` on have them, and `n_shared_experts` as one MLP."""
    features = whole_number(raw, "moe_intermediate_size", most=MOST_FEATURES)
    dense = whole_number(raw, "first_k_dense_replace", least=0, most=MOST_LAYERS)
    return ExpertsConfig(
        count=whole_number(raw, "n_routed_experts", most=MOST_EXPERTS),
        top_k=whole_number(raw, "num_experts_per_tok", most=MOST_EXPERTS),
        features=features,
        layers=tuple(i >= dense for i in range(num_layers)),
        shared_features=features * whole_number(raw, "n_shared_experts", most=MOST_EXPERTS),
    )


def read_groups(raw: Raw, experts: ExpertsConfig, best: int) -> Groups | None:
    """`best`: how many of a group's experts are its score."""
    count = whole_number(raw, "n_group", 1, most=MOST_EXPERTS)
    kept = whole_number(raw, "topk_group", count, most=MOST_EXPERTS)
    if experts.count % count or kept > count:
        raise refusal(
            "n_group", count, f"a divisor of {experts.count} experts, and topk_group no more"
        )
    if kept == count:
        return None
    size = experts.count // count
    if size < best or size * kept < experts.top_k:
        raise ModelError(
            f"The model chooses {experts.top_k} experts from {kept} groups of {size}, by the "
            f"{'best' if best == 1 else f'{best} best'} of each: its config is damaged."
        )
    return Groups(count, kept, best)
