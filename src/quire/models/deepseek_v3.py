"""DeepSeek V3 and R1: V2, whose experts are scored each by itself and chosen with corrections."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from typing import ClassVar

from quire.kv_groups import KVGroup
from quire.layers.router import RoutingRule, Scores
from quire.layers.tp import TensorParallel
from quire.models.checkpoints.json_fields import (
    MOST_LAYERS,
    Raw,
    flag,
    positive_number,
    whole_number,
)
from quire.models.config import ExpertsConfig, ModelConfig
from quire.models.deepseek_v2 import DeepseekConfig, DeepseekForCausalLM, read_groups

LAYER = re.compile(r"model\.layers\.(\d+)\.")
OF_MTP = re.compile(LAYER.pattern + r"(eh_proj|enorm|hnorm|shared_head|embed_tokens)\.")


class DeepseekV3ForCausalLM(DeepseekForCausalLM):
    corrected = True
    config: DeepseekConfig
    defaults: ClassVar[Raw] = {
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "n_group": 8,
        "topk_group": 4,
        "num_nextn_predict_layers": 1,
    }

    @classmethod
    def adapt(cls, config: ModelConfig, raw: Raw) -> DeepseekConfig:
        layers = whole_number(raw, "num_nextn_predict_layers", least=0, most=MOST_LAYERS)
        interleaved = flag(raw, "rope_interleave", True)  # V2 has no such field
        return replace(super().adapt(config, raw), mtp_layers=layers, interleaved=interleaved)

    def kv_groups(self, tp: TensorParallel) -> tuple[KVGroup, ...]:
        """The KV of an MTP layer that drafts is that of one more layer, in the same blocks."""
        groups = super().kv_groups(tp)
        if not self.config.caches_mtp:
            return groups
        (group,) = groups
        return (replace(group, layers=(*group.layers, self.config.num_layers)),)

    def text_tensor(self, name: str) -> str | None:
        """Checkpoints have a layer more, which guesses the token after the next one (MTP). Some
        configs deny it, so that there may always be one."""
        behind = layer_of(name) - self.config.num_layers
        return None if 0 <= behind < max(1, self.config.mtp_layers) else name

    def unexpected(self, left_out: Collection[str]) -> list[str]:
        """Those of layers without what MTP layers alone have: the model's own, which its config
        does not count."""
        guessing = {layer_of(name) for name in left_out if OF_MTP.match(name)}
        return [name for name in left_out if layer_of(name) not in guessing]

    def left_out(self, count: int) -> str | None:
        if self.config.caches_mtp:  # `DeepseekMTP` has them
            return None
        said = f"The MTP layer ({count:,} tensors) is not loaded"
        return f"{said}; speculative=mtp drafts with it." if self.config.mtp_layers else f"{said}."

    @classmethod
    def rule(cls, raw: Raw, experts: ExpertsConfig) -> RoutingRule:
        return RoutingRule(
            experts.top_k,
            Scores.SIGMOID,
            renormalised=flag(raw, "norm_topk_prob"),
            groups=read_groups(raw, experts, 2),
            scale=positive_number(raw, "routed_scaling_factor"),
        )


def layer_of(name: str) -> int:
    """The number of the layer that a checkpoint's tensor belongs to; -1: to none."""
    found = LAYER.match(name)
    return int(found[1]) if found is not None else -1
