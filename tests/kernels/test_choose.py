"""The choice of experts that kernels make themselves is the one that is made before them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels.activation import ClampedSwiGLU
from quire.kernels.experts import RouterProducts, Routing
from quire.kernels.four_bits import FourBitExperts
from quire.layers.router import RoutingRule, Scores

RULE = RoutingRule(4, Scores.NONE, rounded=True)
NAN, INF = float("nan"), float("inf")


def made_before(products: RouterProducts) -> Routing:
    return RULE.on_gpu(products.numbers, None, products.is_padding)


def random_products(tokens: int, experts: int, device: str) -> RouterProducts:
    """Of which many are the same; one token is padding."""
    numbers = torch.randn(tokens, experts).mul(3).round() / 3
    is_padding = torch.arange(tokens) == tokens - 1
    return RouterProducts(numbers.to(device, torch.float16), is_padding.to(device), RULE.top_k)


def chosen(products: RouterProducts) -> tuple[Tensor, Tensor, Tensor]:
    """Of each place the expert, the same found for it alone, and what it counts."""
    from choice_probe import write_choice

    numbers, is_padding, top_k = products
    tokens, count = numbers.shape
    alone, experts = (numbers.new_empty(tokens, top_k, dtype=torch.int64) for _ in range(2))
    shares = numbers.new_empty(tokens, top_k, dtype=torch.float32)
    pads = is_padding.view(torch.int8)
    write_choice[(tokens,)](numbers, pads, alone, experts, shares, TOP_K=top_k, EXPERTS=count)
    return experts, alone, shares


@pytest.mark.parametrize("experts", [32, 64, 128])
def test_it_is_the_same_choice(triton_device: str, experts: int) -> None:
    from quire.kernels.triton.experts.choose import can_choose

    torch.manual_seed(experts)
    products = random_products(40, experts, triton_device)
    assert can_choose(products)
    right = made_before(products)
    found, alone, shares = chosen(products)
    assert torch.equal(found, right.experts) and torch.equal(alone, right.experts)
    assert torch.equal(shares[-1], torch.zeros_like(shares[-1]))
    torch.testing.assert_close(shares[:-1], right.weights[:-1].float(), atol=0, rtol=1e-3)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # which it is about
def test_of_numbers_that_are_none(triton_device: str) -> None:
    rows = [[NAN] * 32, [-INF] * 32, [-0.0, 0.0] * 16, [INF, NAN, 0.0, -INF] * 8]
    numbers = torch.tensor(rows, device=triton_device, dtype=torch.float16)
    numbers[0].view(torch.int16).fill_(0x7FFF)  # the largest number that is none
    pads = torch.zeros(4, dtype=torch.bool, device=triton_device)
    products = RouterProducts(numbers, pads, RULE.top_k)
    found, alone, _ = chosen(products)
    assert torch.equal(found, made_before(products).experts)
    assert torch.equal(alone, found)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_of_numbers_that_are_none_with_a_sign(triton_device: str) -> None:
    """The sign of a NaN means nothing, and a GPU drops it where it converts one: then the launch
    before puts it first, and kernels, which go by the bits, last. Either choice will do if it is
    one: of as many experts as are wanted, the same in all programs."""
    rows = [[NAN] * 32, [INF, NAN, NAN, -INF] * 8]
    numbers = torch.tensor(rows, device=triton_device, dtype=torch.float16)
    bits = numbers.view(torch.int16)
    bits[0].fill_(-1)  # which become the least of all keys
    bits[1, 2::4] = -0x200  # as it is in the other places, and negative
    pads = torch.zeros(2, dtype=torch.bool, device=triton_device)
    found, alone, _ = chosen(RouterProducts(numbers, pads, RULE.top_k))
    assert torch.equal(alone, found)
    for experts in found.tolist():
        assert len(set(experts)) == RULE.top_k
        assert set(experts) <= set(range(32))


@pytest.mark.parametrize(
    ("shape", "dtype", "is_contiguous"),
    [
        ((1, 30), torch.float16, True),
        ((1, 256), torch.float16, True),
        ((1, 32), torch.float32, True),
        ((2, 32), torch.float16, False),
    ],
)
def test_what_is_left_to_a_launch_before(
    triton_device: str, shape: tuple[int, int], dtype: torch.dtype, is_contiguous: bool
) -> None:
    from quire.kernels.triton.experts.choose import can_choose

    numbers = torch.zeros(shape, dtype=dtype, device=triton_device)
    numbers = numbers if is_contiguous else numbers.T.contiguous().T
    pads = torch.zeros(shape[0], dtype=torch.bool, device=triton_device)
    assert not can_choose(RouterProducts(numbers, pads, 4))


@pytest.mark.parametrize("tokens", [1, 2])
def test_experts_of_mxfp4(triton_device: str, tokens: int) -> None:
    from quire.kernels.triton.experts.hopper_few_fours import few_gated, few_summed

    is_fast = triton_device != "cpu" and torch.cuda.get_device_capability()[0] >= 9
    dtype = torch.bfloat16 if is_fast else torch.float16
    hidden, features, count = 96, 64, 32
    torch.manual_seed(tokens)

    def matrix(rows: int, columns: int) -> tuple[FourBitExperts, Tensor]:
        quarter = -(-columns // 128) * 32
        codes = torch.randint(-(1 << 15), 1 << 15, (count, rows, quarter), dtype=torch.int16)
        words = torch.randint(120, 124, (count, quarter // 32, rows, 4), dtype=torch.uint8)
        packed = FourBitExperts(
            codes.to(triton_device), words.view(torch.int32)[..., 0].to(triton_device)
        )
        return packed, torch.randn(count, rows).to(triton_device, dtype)

    x = torch.randn(tokens, hidden).to(triton_device, dtype)
    (first, bias), (second, down_bias) = matrix(2 * features, hidden), matrix(hidden, features)
    products = RouterProducts(
        torch.randn(tokens, count).to(triton_device, dtype),
        torch.tensor([False, True][:tokens], device=triton_device),
        RULE.top_k,
    )
    gating, results = ClampedSwiGLU(1.702, 7.0), []
    for choice in (made_before(products), products):
        between = few_gated(x, first, choice, gating, bias, fast=is_fast)
        results.append(few_summed(between, second, choice, down_bias, fast=is_fast))
    assert results[0].abs().sum() > 0
    assert torch.equal(*results)
