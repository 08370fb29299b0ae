"""DeepSeek V3 and R1: V2, whose experts are scored each by itself and chosen with corrections."""

from __future__ import annotations

import re
from typing import ClassVar

from quire.layers.router import RoutingRule, Scores
from quire.models.checkpoints.json_fields import Raw, flag, positive_number
from quire.models.config import ExpertsConfig
from quire.models.deepseek_v2 import DeepseekForCausalLM, read_groups

LAYER = re.compile(r"model\.layers\.(\d+)\.")


class DeepseekV3ForCausalLM(DeepseekForCausalLM):
    corrected = True
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
    }

    def text_tensor(self, name: str) -> str | None:
        """Checkpoints have a layer more, which guesses the token after the next one (MTP)."""
        found = LAYER.match(name)
        return name if found is None or int(found[1]) < self.config.num_layers else None

    @classmethod
    def rule(cls, raw: Raw, experts: ExpertsConfig) -> RoutingRule:
        return RoutingRule(
            experts.top_k,
            Scores.SIGMOID,
            renormalised=flag(raw, "norm_topk_prob"),
            groups=read_groups(raw, experts.count, 2),
            scale=positive_number(raw, "routed_scaling_factor"),
        )
