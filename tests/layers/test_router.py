"""Routing rules against the routers of `transformers`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels.experts import NOWHERE
from quire.layers.router import Groups, Router, RoutingRule, Scores

HIDDEN, EXPERTS = 24, 16
SHAPE = {"hidden_size": HIDDEN, "num_experts_per_tok": 4, "num_attention_heads": 2}


def theirs(family: str, module: str, **settings: Any) -> Any:
    import transformers

    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **settings})
    modeling = getattr(transformers.models, module)
    router = getattr(modeling, f"modeling_{module}")
    name = next(
        n for n in vars(router) if n.startswith(family) and n.lower().endswith("topkrouter")
    )
    return getattr(router, name)(config)


QWEN = ("Qwen3Moe", "qwen3_moe", {"num_experts": EXPERTS})
DEEPSEEK = {"n_routed_experts": EXPERTS, "n_group": 4, "topk_group": 2}
V2 = ("DeepseekV2", "deepseek_v2")
V3 = ("DeepseekV3", "deepseek_v3")
CASES: dict[str, tuple[RoutingRule, tuple[str, str, dict[str, Any]]]] = {
    "mixtral": (
        RoutingRule(4, renormalised=True),
        ("Mixtral", "mixtral", {"num_local_experts": EXPERTS}),
    ),
    "qwen": (RoutingRule(4, rounded=True), QWEN),
    "qwen-renormalised": (
        RoutingRule(4, renormalised=True, rounded=True),
        (*QWEN[:2], {**QWEN[2], "norm_topk_prob": True}),
    ),
    "gpt-oss": (
        RoutingRule(4, Scores.NONE, rounded=True),
        ("GptOss", "gpt_oss", {"num_local_experts": EXPERTS}),
    ),
    "deepseek-v2": (
        RoutingRule(4, groups=Groups(4, 2), scale=2.5),
        (*V2, {**DEEPSEEK, "topk_method": "group_limited_greedy", "routed_scaling_factor": 2.5}),
    ),
    "deepseek-v3": (
        RoutingRule(4, Scores.SIGMOID, renormalised=True, groups=Groups(4, 2, best=2), scale=2.5),
        (*V3, {**DEEPSEEK, "norm_topk_prob": True, "routed_scaling_factor": 2.5}),
    ),
}


def by_expert(experts: Tensor, weights: Tensor) -> Tensor:
    return torch.zeros(len(experts), EXPERTS).scatter_(1, experts, weights.float())


@pytest.mark.parametrize("case", CASES)
def test_rules(case: str) -> None:
    rule, oracle = CASES[case]
    torch.manual_seed(1)
    router = theirs(oracle[0], oracle[1], **oracle[2])
    correction = None
    with torch.no_grad():
        for parameter in (*router.parameters(), *router.buffers()):
            parameter.normal_(std=0.3)
        x = torch.randn(50, HIDDEN)
        products, weights, experts = router(x)
        correction = getattr(router, "e_score_correction_bias", None)
    found = rule(products, correction)
    torch.testing.assert_close(
        by_expert(found.experts, found.weights), by_expert(experts, weights), atol=1e-6, rtol=0
    )


def test_weights_in_the_type_of_the_model_or_not() -> None:
    products = torch.randn(5, EXPERTS, dtype=torch.bfloat16)
    assert RoutingRule(2, rounded=True)(products).weights.dtype == torch.bfloat16
    assert RoutingRule(2)(products).weights.dtype == torch.float32


def test_rows_that_pad_a_step_go_nowhere() -> None:
    router = Router(HIDDEN, EXPERTS, RoutingRule(3))
    torch.nn.init.normal_(router.weight)
    is_padding = torch.tensor([False, True, False])
    experts = router.route(torch.randn(3, HIDDEN), is_padding).experts
    assert (experts == NOWHERE).all(1).tolist() == is_padding.tolist()
    assert bool((experts[~is_padding] >= 0).all())
