"""Products with interleaved float32 matrices, and what else experts need of a CPU's kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("numba")

from quire.kernels.experts import NOWHERE, RouterScores, Routing
from quire.kernels.numba import experts
from quire.kernels.numba.float_product import FEW, FloatProduct, can_interleave
from quire.layers.router import RoutingRule, Scores


def gated(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 7, 8, 15, FEW + 9])
@pytest.mark.parametrize("shape", [(16, 4), (48, 20), (96, 512), (576, 576)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.usefixtures("threads")
def test_products_are_those_of_float64(tokens: int, shape: tuple[int, int], has_bias: bool) -> None:
    torch.manual_seed(tokens)
    x, weight = torch.randn(tokens, shape[1]), torch.randn(shape)
    bias = torch.randn(shape[0]) if has_bias else None
    product = FloatProduct(weight[None])
    assert product.nbytes == weight.nbytes
    wanted = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    close = {"atol": 2e-4, "rtol": 1e-5}
    torch.testing.assert_close(product(x, bias), wanted.float(), **close)
    assert product.gates == (shape[0] % 32 == 0)
    if product.gates:
        found = product(x, bias, gated=True)
        torch.testing.assert_close(found, gated(wanted).float(), atol=2e-3, rtol=1e-5)


@pytest.mark.usefixtures("threads")
def test_a_token_has_the_same_product_beside_any_others() -> None:
    torch.manual_seed(0)
    x, product = torch.randn(31, 64), FloatProduct(torch.randn(1, 80, 64))
    together = product(x)
    for count in (1, 2, 5, 8, 20):
        for first in range(0, 31 - count, count):
            part = slice(first, first + count)
            assert torch.equal(product(x[part]), together[part])


@pytest.mark.usefixtures("threads")
def test_runs_of_tokens_have_a_matrix_each() -> None:
    torch.manual_seed(0)
    weights, x = torch.randn(5, 64, 32), torch.randn(17, 32)
    runs = [(4, 0, 3), (1, 3, 4), (2, 4, 17)]
    found = FloatProduct(weights)(x, runs=torch.tensor([len(runs), *sum(runs, ())]))
    for matrix, begin, end in runs:
        wanted = x[begin:end].double() @ weights[matrix].double().T
        torch.testing.assert_close(found[begin:end], wanted.float(), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("shape", [(15, 8), (16, 7), (0, 8), (16, 0)])
def test_shapes_that_stay_torchs(shape: tuple[int, int]) -> None:
    assert not can_interleave(torch.zeros(shape))


RULES = {
    "mixtral": RoutingRule(2, renormalised=True),
    "qwen": RoutingRule(4),
    "gpt-oss": RoutingRule(4, Scores.NONE),
    "sigmoid": RoutingRule(3, Scores.SIGMOID, renormalised=True, scale=2.5),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("count", [8, 37])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.usefixtures("threads")
def test_the_choice_of_experts(rule: RoutingRule, count: int, has_bias: bool) -> None:
    """As the rule makes it, in torch. Rows that only pad the step go nowhere."""
    torch.manual_seed(count)
    x, weight, bias, correction = (
        torch.randn(shape) for shape in ((33, 64), (count, 64), (count,), (count,))
    )
    scores = RouterScores(
        weight,
        bias if has_bias else None,
        correction if rule.scores is Scores.SIGMOID else None,
        rule.top_k,
        rule.scores is Scores.SOFTMAX,
        rule.scores is Scores.SIGMOID,
        rule.renormalised,
        rule.scale,
    )
    assert experts.can_route(x, scores)
    slots = torch.arange(33)
    slots[5] = -1
    found = experts.route(x, scores, slots.data_ptr(), torch.get_num_threads())
    wanted = rule(F.linear(x, weight, scores.bias), scores.correction)
    is_padding = slots < 0
    assert (found.experts[is_padding] == NOWHERE).all()
    assert torch.equal(found.experts[~is_padding], wanted.experts[~is_padding])
    torch.testing.assert_close(
        found.weights[~is_padding], wanted.weights[~is_padding], atol=1e-5, rtol=1e-4
    )


def test_pairs_are_sorted_by_expert_and_added_up() -> None:
    torch.manual_seed(0)
    x, count = torch.randn(21, 32), 6
    chosen = torch.stack([torch.randperm(count + 2)[:3] for _ in range(21)])  # 6 and 7 are no one's
    routing = Routing(chosen, torch.rand(21, 3))
    pairs = experts.sort(x, routing, count)
    number, runs = int(pairs.runs[0]), pairs.runs[1:].view(-1, 3)
    seen = 0
    for expert, begin, end in runs[:number].tolist():
        assert begin == seen
        tokens, slots = (chosen == expert).nonzero(as_tuple=True)
        assert pairs.places[tokens, slots].tolist() == list(range(begin, end))
        assert torch.equal(pairs.rows[begin:end], x[tokens])
        seen = end
    assert seen == int((chosen < count).sum())
    assert (pairs.places[chosen >= count] == NOWHERE).all()

    found = experts.combine(pairs.rows, pairs, routing.weights, 2)
    counted = (routing.weights * (chosen < count)).sum(1, keepdim=True)
    torch.testing.assert_close(found, x * counted)
