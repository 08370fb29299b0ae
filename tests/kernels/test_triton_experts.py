"""The kernels of experts, each against what it stands for in plain torch."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from random_slots import on, random_batch, random_slots
from torch import Tensor

from quire.kernels.activation import Activation, ClampedSwiGLU, Gating
from quire.kernels.codes import BlockScales, CodeFormat, quantise
from quire.kernels.dequantise import from_codes, from_e8m0, from_fp4, spread, unpack_nibbles
from quire.kernels.experts import (
    NOWHERE,
    CodedExperts,
    ExpertAdapters,
    ExpertMatrices,
    ExpertMLPs,
    Routing,
    SharedExperts,
)
from quire.kernels.four_bits import (
    FourBitExperts,
    exponent_words,
    from_quarters,
    scale_words,
    to_quarters,
)
from quire.kernels.quantise import to_fp8, to_groups, to_mxfp4
from quire.kernels.reference import ReferenceBackend
from quire.layers.router import RoutingRule, Scores

DEVICES = [
    pytest.param(
        "cpu",
        marks=pytest.mark.skipif(
            torch.cuda.is_available() or importlib.util.find_spec("triton") is None,
            reason="needs Triton, and no GPU (its kernels are tested there)",
        ),
    ),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
COUNT, TOP_K, HIDDEN, FEATURES = 6, 2, 80, 48


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def random_mlps(dtype: torch.dtype, device: str, gating: Gating, biased: bool) -> ExpertMLPs:
    """Of a size that keeps numbers about 1."""

    def matrices(rows: int, columns: int) -> ExpertMatrices:
        weights = (torch.randn(COUNT, rows, columns) * columns**-0.5).to(device, dtype)
        biases = torch.randn(COUNT, rows).to(device, dtype) if biased else None

        def multiply(expert: int, x: Tensor) -> Tensor:
            return F.linear(x, weights[expert], None if biases is None else biases[expert])

        return ExpertMatrices(multiply, weights, biases)

    down = matrices(HIDDEN, FEATURES)
    return ExpertMLPs(COUNT, matrices(2 * FEATURES, HIDDEN), gating, down)


GATINGS = {
    "silu": (Activation.SILU, False),
    "gelu": (Activation.GELU_TANH, True),
    "clamped": (ClampedSwiGLU(1.702, 1.5), True),
}


def random_routing(tokens: int, device: str) -> Routing:
    """The last expert has no token, a token has no expert, and of one an expert is elsewhere."""
    scores = torch.rand(tokens, COUNT - 1)
    scores[: tokens // 2, 0] += 1
    weights, experts = scores.topk(TOP_K)
    experts[tokens // 2] = NOWHERE
    experts[-1, 0] = COUNT + 3
    weights[tokens // 2] = torch.nan  # of padding, nothing is known
    return Routing(experts.to(device), weights.to(device))


def expected(x: Tensor, routing: Routing, mlps: ExpertMLPs) -> Tensor:
    return ReferenceBackend().experts(x, routing, mlps)


@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize(("tokens", "chunk"), [(1, 4096), (9, 4096), (70, 4096), (70, 32)])
def test_blocks_hold_each_pair_of_an_expert_once(
    device: str, tokens: int, chunk: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire.kernels.triton.experts import order

    monkeypatch.setattr(order, "_CHUNK", chunk)
    torch.manual_seed(tokens)
    experts = random_routing(tokens, device).experts
    blocks = order.sort_by_expert(experts, COUNT, size)
    found: dict[int, list[int]] = {expert: [] for expert in range(COUNT)}
    for expert, begin, end in blocks.table.t().tolist():
        if expert >= 0:
            assert 0 < end - begin <= size
            found[expert] += blocks.order[begin:end].tolist()
    chosen = experts.flatten()
    assert found == {e: (chosen == e).nonzero().flatten().tolist() for e in range(COUNT)}


def test_tokens_in_the_order_of_experts(device: str) -> None:
    from quire.kernels.triton.experts.gather import by_expert
    from quire.kernels.triton.experts.order import sort_by_expert

    torch.manual_seed(3)
    x = torch.randn(70, 1100).to(device)
    blocks = sort_by_expert(random_routing(70, device).experts, COUNT, 16)
    found = by_expert(x, blocks, TOP_K)
    for expert, begin, end in blocks.table.t().tolist():
        if expert >= 0:
            assert torch.equal(found[begin:end], x[blocks.order[begin:end].long() // TOP_K])


def test_tokens_block_by_block(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With zeros behind those of a block; nothing is written where there is no block."""
    from quire.kernels.triton.experts.gather import by_block
    from quire.kernels.triton.experts.order import sort_by_expert

    torch.manual_seed(3)
    x = torch.randn(70, 1100).to(device)
    blocks = sort_by_expert(random_routing(70, device).experts, COUNT, 16)
    monkeypatch.setattr(torch, "empty", lambda *args, **kw: torch.full(*args, torch.nan, **kw))
    found = by_block(x, blocks, TOP_K).unflatten(0, (blocks.number, blocks.size))
    for block, (expert, begin, end) in zip(found, blocks.table.t().tolist(), strict=True):
        if expert >= 0:
            pairs = end - begin
            assert torch.equal(block[:pairs], x[blocks.order[begin:end].long() // TOP_K])
            assert torch.equal(block[pairs:], torch.zeros_like(block[pairs:]))
        else:
            assert block.isnan().all()


@pytest.mark.parametrize("gating", GATINGS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_grouped_products(device: str, tokens: int, dtype: torch.dtype, gating: str) -> None:
    from quire.kernels.triton import TritonBackend

    torch.manual_seed(tokens)
    mlps = random_mlps(dtype, device, *GATINGS[gating])
    x = torch.randn(tokens, HIDDEN).to(device, dtype)
    routing = random_routing(tokens, device)
    found = TritonBackend().experts(x, routing, mlps)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    right = expected(x, routing, mlps)
    torch.testing.assert_close(found, right, atol=tolerance, rtol=tolerance)
    assert not found[tokens // 2].any()


@pytest.mark.diagonal
@pytest.mark.parametrize("as_many", [1, 2])  # as experts; a tile of two choices has no room for any
@pytest.mark.parametrize("top_k", [2, 3])
@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_shared_experts_beside_the_others(
    device: str, tokens: int, top_k: int, as_many: int
) -> None:
    from quire.kernels.triton import TritonBackend
    from quire.kernels.triton.experts.mlps import experts_and_shared

    torch.manual_seed(tokens)
    dtype = torch.float16
    mlps = random_mlps(dtype, device, Activation.SILU, False)
    features = as_many * FEATURES
    gate_up = torch.randn(2 * features, HIDDEN) * HIDDEN**-0.5
    down = torch.randn(HIDDEN, features) * features**-0.5
    shared = SharedExperts(gate_up.to(device, dtype), down.to(device, dtype))
    mlps = replace(mlps, shared=shared)
    x = torch.randn(tokens, HIDDEN).to(device, dtype)
    weights, experts = torch.rand(tokens, COUNT).topk(top_k)
    routing = Routing(experts.to(device), weights.to(device))
    are_together = experts_and_shared(x, routing, mlps, shared) is not None
    assert are_together == (tokens <= 2 and top_k == 3 and as_many == 1)
    found = TritonBackend().experts(x, routing, mlps)
    torch.testing.assert_close(found, expected(x, routing, mlps), atol=1e-2, rtol=1e-2)


RULES = {
    "softmax": RoutingRule(3),
    "renormalised": RoutingRule(4, renormalised=True, rounded=True),
    "of the chosen": RoutingRule(4, Scores.NONE),
    "sigmoid": RoutingRule(2, Scores.SIGMOID, renormalised=True, scale=2.5),
}


@pytest.mark.parametrize("few", [512, 0])  # tokens, up to which experts are ranked
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_choice_is_that_of_the_rule(
    device: str, rule: RoutingRule, corrected: bool, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire.kernels.triton.experts import route

    monkeypatch.setattr(route, "_FEW", few)
    torch.manual_seed(1)
    products = torch.randn(5, 12).to(device, torch.float16)
    correction = torch.randn(12).to(device) if corrected else None
    is_padding = torch.tensor([False, False, True, False, False], device=device)
    right = rule(products, correction)
    found = rule.on_gpu(products, correction, is_padding)
    assert found.weights.dtype == right.weights.dtype
    right.experts[2] = NOWHERE
    assert torch.equal(found.experts, right.experts)
    torch.testing.assert_close(found.weights, right.weights, atol=1e-3, rtol=1e-3)


def test_each_choice_is_one_expert_whatever_the_scores(device: str) -> None:
    nan, inf = float("nan"), float("inf")
    scores = [
        [1.0, 2.0, 2.0, 1.0, 2.0],
        [nan, -nan, 0.0, nan, 1.0],
        [-inf] * 5,
        [-0.0, 0.0] * 2 + [-1.0],
    ]
    products = torch.tensor(scores, device=device)
    found = RoutingRule(3, Scores.NONE).on_gpu(
        products, None, torch.zeros(4, dtype=torch.bool, device=device)
    )
    assert found.experts[0].tolist() == [1, 2, 4]
    assert all(len(set(row)) == 3 and max(row) < 5 for row in found.experts.tolist())


@pytest.mark.parametrize("block", [None, 128])
def test_few_tokens_are_not_quantised(device: str, block: int | None) -> None:
    from quire.kernels.triton import TritonBackend

    torch.manual_seed(3)
    x, routing = torch.randn(2, 256).to(device, torch.float16), random_routing(2, device)
    gate_up, down = (random_codes(256, columns, device, block) for columns in (256, 128))
    right = expected(x, routing, mlps_of(gate_up[1], down[1], None, None))
    found = TritonBackend().experts(x, routing, mlps_of(gate_up[1], down[1], gate_up[0], down[0]))
    torch.testing.assert_close(found, right, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize(
    ("tokens", "size", "block"), [(7, 16, None), (7, 16, 128), (20, 16, 128), (20, 64, 128)]
)
def test_products_of_codes_by_codes(device: str, tokens: int, size: int, block: int | None) -> None:
    from quire.kernels.triton.experts.grouped import gated_product, product
    from quire.kernels.triton.experts.order import sort_by_expert
    from quire.kernels.triton.experts.tiles import Tile

    torch.manual_seed(tokens)
    experts = random_routing(tokens, device).experts
    blocks = sort_by_expert(experts, COUNT, size)
    live = [(e, begin, end) for e, begin, end in blocks.table.t().tolist() if e >= 0]
    x = quantise(torch.randn(tokens, 256).to(device, torch.float16), CodeFormat(block))
    codes, weights = random_codes(512, 256, device, block)
    tile = Tile(64, 128, 4, 3)
    found = gated_product(x, codes, blocks, TOP_K, Activation.SILU, None, tile)
    for expert, begin, end in live:
        rows = blocks.order[begin:end].long() // TOP_K
        gate, up = (x.dense()[rows] @ weights[expert].float().T).half().chunk(2, dim=1)
        right = F.silu(gate) * up
        torch.testing.assert_close(found[begin:end], right, atol=5e-3, rtol=5e-3)

    hidden = quantise(found.nan_to_num(0.0), CodeFormat(block))
    codes, weights = random_codes(256, 256, device, block)
    found = product(hidden, codes, blocks, None, tile)
    for expert, begin, end in live:
        right = (hidden.dense()[begin:end] @ weights[expert].float().T).half()
        pairs = blocks.order[begin:end].long()
        torch.testing.assert_close(found[pairs], right, atol=5e-3, rtol=5e-3)


def random_codes(
    rows: int, columns: int, device: str, block: int | None
) -> tuple[CodedExperts, Tensor]:
    """And the numbers that they stand for."""
    flat = torch.randn(COUNT * rows, columns) * columns**-0.5
    height, width = (1, columns) if block is None else (block, block)
    codes, scales = (made.to(device) for made in to_fp8(flat, height, width))
    spread = scales.repeat_interleave(height, 0).repeat_interleave(width, 1)
    shape = (COUNT, rows, columns)
    numbers = (codes.float() * spread).to(torch.float16).view(shape)
    return CodedExperts(codes.view(shape), BlockScales(scales, height, width)), numbers


def mlps_of(
    gate_up: Tensor, down: Tensor, coded: CodedExperts | None, coded_down: CodedExperts | None
) -> ExpertMLPs:
    def matrices(weights: Tensor, codes: CodedExperts | None) -> ExpertMatrices:
        return ExpertMatrices(lambda expert, x: x @ weights[expert].T, None, packed=codes)

    down_matrices = matrices(down, coded_down)
    return ExpertMLPs(COUNT, matrices(gate_up, coded), Activation.SILU, down_matrices)


@pytest.mark.parametrize("kind", ["mxfp4", "whole", "zeros"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_of_four_bits(device: str, dtype: torch.dtype, kind: str) -> None:
    """Of columns that are no four times 32: their quarters are filled up."""
    from quire.kernels.triton.experts.grouped_fours import gated_product, product
    from quire.kernels.triton.experts.order import sort_by_expert
    from quire.kernels.triton.experts.tiles import Tile

    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter has no bfloat16")
    torch.manual_seed(5)
    blocks = sort_by_expert(random_routing(20, device).experts, COUNT, 16)
    live = [(e, begin, end) for e, begin, end in blocks.table.t().tolist() if e >= 0]
    tolerance = 5e-3 if dtype == torch.float16 else 2e-2
    close = {"atol": tolerance, "rtol": tolerance}
    columns = 160
    x = torch.randn(20, columns).to(device, dtype)
    codes, weights = random_fours(2 * columns, columns, device, kind, dtype)
    found = gated_product(x, codes, blocks, TOP_K, Activation.SILU, None, Tile(64, 64, 4, 3))
    for expert, begin, end in live:
        rows = blocks.order[begin:end].long() // TOP_K
        gate, up = (x[rows].float() @ weights[expert].T).to(dtype).chunk(2, dim=1)
        torch.testing.assert_close(found[begin:end], F.silu(gate) * up, **close)

    codes, weights = random_fours(100, columns, device, kind, dtype)
    hidden = found.nan_to_num(0.0)
    found = product(hidden, codes, blocks, None, Tile(64, 64, 4, 3))
    for expert, begin, end in live:
        right = (hidden[begin:end].float() @ weights[expert].T).to(dtype)
        torch.testing.assert_close(found[blocks.order[begin:end].long()], right, **close)


def random_fours(
    rows: int, columns: int, device: str, kind: str, dtype: torch.dtype
) -> tuple[FourBitExperts, Tensor]:
    """And the numbers that they stand for."""
    numbers = torch.randn(COUNT * rows, columns) * columns**-0.5
    shape = (COUNT, rows, columns)
    if kind == "mxfp4":
        numbers *= torch.exp2(torch.randint(-9, 3, (COUNT * rows, 1)))  # scales of many sizes
        packed, exponents = to_mxfp4(numbers, 32)
        stands_for = from_fp4(unpack_nibbles(packed), spread(from_e8m0(exponents), 32, columns))
        words, scale_dtype, zeros = (
            exponent_words(exponents.view(COUNT, rows, -1), columns),
            None,
            None,
        )
    else:
        packed, scales, *zero = to_groups(numbers, 4, 32, kind == "zeros", dtype)
        by_column = spread(zero[0], 32, columns) if zero else None
        codes = unpack_nibbles(packed)
        stands_for = from_codes(codes, spread(scales, 32, columns), by_column, middle=8)
        words, scale_dtype = scale_words(scales.view(COUNT, rows, -1), 32, columns), dtype
        zeros = scale_words(zero[0].short().view(COUNT, rows, -1), 32, columns) if zero else None
    codes = to_quarters(packed, kind != "mxfp4")
    assert torch.equal(from_quarters(codes, columns, kind != "mxfp4"), packed)
    experts = FourBitExperts(
        codes.view(COUNT, rows, -1).to(device),
        words.to(device),
        scale_dtype,
        None if zeros is None else zeros.to(device),
    )
    return experts, stands_for.view(shape).to(device)


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [
        *(("mxfp4", tokens) for tokens in (2, 21, 50, 90, 200, 1000)),
        *((kind, tokens) for kind in ("whole", "zeros") for tokens in (1, 2, 3, 50)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_experts_of_four_bits(
    device: str, dtype: torch.dtype, kind: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire.kernels.triton import TritonBackend
    from quire.kernels.triton.experts import grouped_fours

    if tokens <= 2:  # which read their experts for themselves
        monkeypatch.delattr(grouped_fours, "gated_product")
    if device == "cpu" and (dtype == torch.bfloat16 or tokens > 2):
        pytest.skip("the interpreter has no bfloat16, and is slow")
    torch.manual_seed(8)
    hidden, features = 160, 96
    x, routing = torch.randn(tokens, hidden).to(device, dtype), random_routing(tokens, device)
    matrices = []
    for rows, columns in ((2 * features, hidden), (hidden, features)):
        codes, weights = random_fours(rows, columns, device, kind, dtype)
        weights = weights.to(dtype).float()  # as they are multiplied
        bias = torch.randn(COUNT, rows).to(device, dtype)

        def multiply(expert: int, x: Tensor, w: Tensor = weights, b: Tensor = bias) -> Tensor:
            return (x.float() @ w[expert].T + b[expert].float()).to(x.dtype)

        matrices.append(ExpertMatrices(multiply, None, bias, codes))
    mlps = ExpertMLPs(COUNT, matrices[0], ClampedSwiGLU(1.702, 7.0), matrices[1])
    found = TritonBackend().experts(x, routing, mlps)
    right = expected(x, routing, mlps)
    tolerance = 1e-2 if dtype == torch.float16 else 3e-2
    torch.testing.assert_close(found, right, atol=tolerance, rtol=tolerance)


OUTPUTS = 64  # few: each eight are a program, which the interpreter takes long for


@pytest.mark.diagonal
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(("warps", "together", "ahead"), [(1, 1, 2), (4, 4, 1), (2, 4, 3)])
@pytest.mark.parametrize(("hidden", "features"), [(160, 96), (544, 32)])
def test_one_or_two_tokens_of_mxfp4_by_tensor_cores(
    device: str, hidden: int, features: int, warps: int, together: int, ahead: int, fast: bool
) -> None:
    """Rows whose last step is half a tile's, or has no tile for some warps."""
    from quire.kernels.triton.experts import hopper_few_fours

    if fast and device == "cpu":
        pytest.skip("the interpreter has no instructions of a GPU")
    if fast and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("for Hopper GPUs")
    torch.manual_seed(features)
    dtype = torch.bfloat16 if fast else torch.float16
    shape = hopper_few_fours.Shape(warps, together, ahead)
    x, routing = torch.randn(2, hidden).to(device, dtype), random_routing(2, device)
    gating, matrices = ClampedSwiGLU(1.702, 7.0), []
    for rows, columns, missing in (
        (2 * features, hidden, 0),
        (OUTPUTS, features, hidden - OUTPUTS),
    ):
        codes, weights = random_fours(rows, columns, device, "mxfp4", dtype)
        bias = torch.randn(COUNT, rows).to(device, dtype)

        def multiply(
            expert: int, x: Tensor, w: Tensor = weights, b: Tensor = bias, missing: int = missing
        ) -> Tensor:
            found = x.float() @ w[expert].T + b[expert].float()
            return F.pad(found, (0, missing)).to(x.dtype)  # the reference wants all outputs

        matrices.append(ExpertMatrices(multiply, None, bias, codes))
    first, second = matrices
    assert isinstance(first.packed, FourBitExperts) and isinstance(second.packed, FourBitExperts)
    between = hopper_few_fours.few_gated(x, first.packed, routing, gating, first.bias, shape, fast)
    found = hopper_few_fours.few_summed(between, second.packed, routing, second.bias, shape, fast)
    right = expected(x, routing, ExpertMLPs(COUNT, first, gating, second))[:, :OUTPUTS]
    tolerance = 3e-2 if fast else 1e-2
    torch.testing.assert_close(found, right, atol=tolerance, rtol=tolerance)


def test_the_tiles_of_the_nearest_shape() -> None:
    from quire.kernels.triton.experts.tiles import (
        Problem,
        block_on_hopper,
        few_shapes,
        tiles_for,
    )

    cpu = torch.device("cpu")
    few, many = (tiles_for("numbers", Problem(2048, 768, n), 2, cpu) for n in (0.1, 1000))
    assert few.block == 16 and many.block == 128
    wide = tiles_for("numbers", Problem(4096, 12_000, 1500), 2, cpu)
    assert wide.block == 256  # as Mixtral's
    assert few_shapes("numbers", 2048, 700) == few_shapes("numbers", 2048, 768)
    blocks = [block_on_hopper(pairs) for pairs in (0.1, 15, 40, 5000)]
    assert blocks == [32, 32, 64, 128]


@pytest.mark.diagonal
@pytest.mark.parametrize("gating", GATINGS)
@pytest.mark.parametrize("tokens", [3, 40])  # pairs that are not sorted, and that are
def test_each_pair_of_a_token_and_an_expert_has_its_adapter(
    device: str, tokens: int, gating: str
) -> None:
    torch.manual_seed(tokens)
    mlps = random_mlps(torch.float32, device, *GATINGS[gating])
    check_adapted(torch.randn(tokens, HIDDEN).to(device), mlps, FEATURES, 1e-3)


@pytest.mark.parametrize("block", [None, 128])
def test_experts_of_codes_have_adapters(
    device: str, block: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adapters multiply numbers, their experts those that the codes of these stand for."""
    from quire.kernels.triton.experts import adapted

    if device == "cpu":  # the interpreter does not round to FP8, it cuts off
        monkeypatch.setattr(adapted, "quantise", quantise)
    torch.manual_seed(4)
    gate_up, down = (random_codes(rows, 256, device, block) for rows in (512, 256))

    def matrices(codes: CodedExperts, weights: Tensor) -> ExpertMatrices:
        def multiply(expert: int, x: Tensor) -> Tensor:
            return (quantise(x, CodeFormat(block)).dense() @ weights[expert].float().T).half()

        return ExpertMatrices(multiply, None, packed=codes)

    mlps = ExpertMLPs(COUNT, matrices(*gate_up), Activation.SILU, matrices(*down))
    check_adapted(torch.randn(5, 256).to(device, torch.float16), mlps, 256, 2e-2)


@pytest.mark.parametrize("kind", ["mxfp4", "whole", "zeros"])
def test_experts_of_four_bits_have_adapters(device: str, kind: str) -> None:
    torch.manual_seed(6)
    hidden, features = 160, 96

    def matrices(rows: int, columns: int) -> ExpertMatrices:
        codes, weights = random_fours(rows, columns, device, kind, torch.float16)

        def multiply(expert: int, x: Tensor) -> Tensor:
            return (x.float() @ weights[expert].float().T).to(x.dtype)

        return ExpertMatrices(multiply, None, packed=codes)

    gate_up, down = matrices(2 * features, hidden), matrices(hidden, features)
    mlps = ExpertMLPs(COUNT, gate_up, Activation.SILU, down)
    check_adapted(torch.randn(5, hidden).to(device, torch.float16), mlps, features, 2e-2)


def check_adapted(x: Tensor, mlps: ExpertMLPs, features: int, near: float) -> None:
    """Against the plain sums; rows of `x` use three slots, or none."""
    from quire.kernels.triton.experts.adapted import adapted_experts

    (tokens, hidden), device = x.shape, str(x.device)
    routing = random_routing(tokens, device)
    rows = [(5 * token) % 4 - 1 for token in range(tokens)]
    gate_up = random_slots(3, [features] * 2, hidden, 5, 0, x.dtype, experts=COUNT)
    down = random_slots(3, [hidden], features, 20, 1, x.dtype, experts=COUNT)
    gate_up, batch = on(device, gate_up, random_batch(rows, 3))
    down, _ = on(device, down, batch)
    adapted = replace(mlps, adapters=ExpertAdapters(gate_up, down, batch))
    found = adapted_experts(x, routing, adapted)
    wanted = expected(x, routing, adapted)
    torch.testing.assert_close(found, wanted, rtol=near, atol=near)
    without = expected(x, routing, mlps)
    assert (wanted - without).abs().max() > 0.1
    bare = [row for row, slot in enumerate(rows) if slot == -1]
    torch.testing.assert_close(wanted[bare], without[bare], rtol=0, atol=0)
