"""Products of weights in eight bits, held against float64 of the numbers that they stand for."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from activations import EXACT
from exact_products import check as check_within
from exact_products import exact
from torch import Tensor

from quire.kernels import scaled_product
from quire.kernels.activation import Activation
from quire.kernels.codes import BlockScales, CodeFormat, Codes, quantise, with_spare
from quire.kernels.fp8 import FP8

BLOCKS = [None, (128, 128), (1, 64)]
SHAPES = [(48, 1024), (20, 2064), (1, 16)]
check = partial(check_within, slack=4)


def matrix(
    features: int,
    columns: int,
    dtype: torch.dtype,
    block: tuple[int, int] | None,
    device: str = "cpu",
) -> tuple[Tensor, BlockScales, Tensor]:
    """Codes, scales, and the numbers in float64."""
    torch.manual_seed(features + columns)
    weight = (torch.randn(features, columns, device=device) * 40).clamp_(-127, 127).to(dtype)
    rows, across = block or (1, columns)
    sizes = -(-features // rows), -(-columns // across)
    scales = torch.rand(sizes, device=device) / (40 * columns**0.5)
    spread = scales.repeat_interleave(rows, 0).repeat_interleave(across, 1)
    return weight, BlockScales(scales, rows, across), weight.double() * spread[:features, :columns]


def on(device: str, scales: BlockScales) -> BlockScales:
    return scales._replace(values=scales.values.to(device))


@pytest.mark.parametrize("codes", [FP8, torch.int8], ids=str)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
class TestRowsAsTheyAre:
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    @pytest.mark.parametrize("rows", [1, 2])
    def test_is_a_linear_layer(self, triton_device, rows, shape, block, codes):
        from quire.kernels.triton.codes.gemv import gemv, is_few

        weight, scales, numbers = matrix(*shape, codes, block)
        x, bias = torch.randn(rows, shape[1]).half(), torch.randn(shape[0]).half()
        moved = [each.to(triton_device) for each in (x, weight, bias)]
        scales = on(triton_device, scales)
        assert is_few(moved[0], moved[1], scales)
        for added in (None, bias):
            out = gemv(moved[0], moved[1], scales, None if added is None else moved[2])
            check(out, exact(x, numbers, added))

    @pytest.mark.parametrize("rows", [1, 2])
    def test_is_added_to_what_is_there(self, triton_device, rows, block, codes):
        from quire.kernels.triton.codes.gemv import gemv

        weight, scales, numbers = matrix(72, 1024, codes, block)
        x, bias, there = (torch.randn(*shape).half() for shape in ((rows, 1024), (72,), (rows, 72)))
        wanted = exact(x, numbers, bias) + there.double()
        out, scales = there.to(triton_device), on(triton_device, scales)
        moved = [each.to(triton_device) for each in (x, weight, bias)]
        assert gemv(moved[0], moved[1], scales, moved[2], add_to=out) is out
        check(out, wanted)

    @pytest.mark.parametrize("activation", Activation)
    def test_with_its_gate(self, triton_device, activation, block, codes):
        from quire.kernels.triton.codes.gemv import gemv

        weight, scales, numbers = matrix(256, 1040 if block is None else 1024, codes, block)
        x = torch.randn(2, weight.shape[1]).half()
        gate, up = exact(x, numbers, None).chunk(2, dim=-1)
        scales = on(triton_device, scales)
        out = gemv(x.to(triton_device), weight.to(triton_device), scales, None, activation)
        check(out, EXACT[activation](gate) * up, slack=8)


@pytest.mark.parametrize(
    ("x", "columns"),
    [
        pytest.param(torch.zeros(3, 64).half(), 64, id="three rows"),
        pytest.param(torch.zeros(1, 64), 64, id="float32"),
        pytest.param(torch.zeros(1, 72).half(), 64, id="odd columns"),
        pytest.param(torch.zeros(1, 64).half(), 24, id="blocks that cut a vector"),
    ],
)
def test_rows_that_no_kernel_takes_as_they_are(triton_device, x, columns):
    from quire.kernels.triton.codes.gemv import is_few

    weight = torch.zeros(8, x.shape[1], dtype=torch.int8)
    assert not is_few(x, weight, BlockScales(torch.ones(8, -(-64 // columns)), 1, columns))


CODES = [  # what both sides of a product of codes are, and the blocks that share a scale
    pytest.param(FP8, None, id="fp8 by rows"),
    pytest.param(FP8, (128, 128), id="fp8 in blocks"),
    pytest.param(torch.int8, None, id="int8 by rows"),
]


def made_of(
    rows: int, columns: int, codes: torch.dtype, block: tuple[int, int] | None, dtype: torch.dtype
) -> Codes:
    torch.manual_seed(rows)
    return quantise(torch.randn(rows, columns).to(dtype), CodeFormat(block and block[1], codes))


def moved(x: Codes, device: str) -> Codes:
    return Codes(x.values.to(device), x.scales.t().to(device).t(), x.dtype)


@pytest.mark.parametrize(("codes", "block"), CODES)
@pytest.mark.parametrize("rows", [1, 3, 16, 21])
@pytest.mark.parametrize("shape", [(48, 1024), (20, 640), (256, 2048)], ids=str)
def test_few_rows_of_codes(triton_device, shape, rows, codes, block):
    from quire.kernels.triton.codes.few_rows import multiply_few

    weight, scales, numbers = matrix(*shape, codes, block)
    x, bias = made_of(rows, shape[1], codes, block, torch.float16), torch.randn(shape[0]).half()
    there, device = moved(x, triton_device), triton_device
    for added in (None, bias):
        given = None if added is None else added.to(device)
        out = multiply_few(there, weight.to(device), on(device, scales), given)
        check(out, exact(x.dense(), numbers, added))


@pytest.mark.parametrize(("codes", "block"), CODES)
@pytest.mark.parametrize("rows", [17, 64, 130])
@pytest.mark.parametrize("shape", [(128, 1024), (32, 640), (256, 384)], ids=str)
def test_rows_of_codes_in_tiles(triton_device, shape, rows, codes, block):
    """Interpreted, up to four tiles are in two parts each."""
    from quire.kernels.triton.codes.tiles_product import multiply_tiles

    weight, scales, numbers = matrix(*shape, codes, block)
    x, bias = made_of(rows, shape[1], codes, block, torch.float16), torch.randn(shape[0]).half()
    there, device = moved(x, triton_device), triton_device
    for added in (None, bias):
        given = None if added is None else added.to(device)
        out = multiply_tiles(there, weight.to(device), on(device, scales), given)
        check(out, exact(x.dense(), numbers, added))


@pytest.mark.parametrize("codes", [FP8, torch.int8])
@pytest.mark.parametrize(("rows", "columns"), [(17, 384), (130, 4224)])
def test_rows_to_spare_count_for_nothing(triton_device, rows, columns, codes):
    """Interpreted, more than 4,096 columns are in tiles of 128."""
    from quire.kernels.triton.codes.quantise import room_for
    from quire.kernels.triton.codes.tiles_product import multiply_tiles

    weight, scales, numbers = matrix(128, columns, codes, None)
    x = made_of(rows, columns, codes, None, torch.float16)
    there = room_for(rows, columns, CodeFormat(dtype=codes), torch.empty(0, device=triton_device))
    there = replace(there, dtype=torch.float16)
    assert there.spare == {17: 111, 130: 126}[rows]
    filled = there.filled_up(256)
    filled.values.view(torch.uint8).fill_(0x7F)  # NaN in fp8
    filled.scales.fill_(math.nan)
    there.values.copy_(x.values)
    there.scales.copy_(x.scales)
    out = multiply_tiles(there, weight.to(triton_device), on(triton_device, scales), None)
    check(out, exact(x.dense(), numbers, None))


def test_rows_to_spare():
    values, scales = torch.zeros(192, 32), torch.zeros(1, 192).t()
    x = Codes(values[:130], scales[:130], torch.bfloat16, 62)
    assert [len(x.filled_up(n)) for n in (1, 64, 128, 256)] == [130, 192, 192, 192]
    assert [x.filled_up(n).spare for n in (1, 64)] == [62, 0]
    assert x.filled_up(64).values.data_ptr() == values.data_ptr()
    assert x.filled_up(64).scales.shape == (192, 1)
    assert [with_spare(n) for n in (0, 1, 128, 129, 257)] == [0, 128, 128, 256, 384]


def test_a_cpu_takes_numbers():
    weight, scales, _ = matrix(64, 128, FP8, None)
    assert scaled_product.wanted_codes(weight, scales, 64, torch.bfloat16) is None


@pytest.mark.gpu
@pytest.mark.parametrize(("codes", "block"), CODES)
@pytest.mark.parametrize("rows", [3, 16, 17, 96, 160, 256, 1001])
@pytest.mark.parametrize("shape", [(512, 512), (6144, 4096), (1024, 12288)], ids=str)
def test_rows_of_codes_on_a_gpu(shape, rows, codes, block):
    weight, scales, numbers = matrix(*shape, codes, block, "cuda")
    form = scaled_product.wanted_codes(weight, scales, rows, torch.bfloat16)
    assert form == CodeFormat(block and 128, codes)
    x = torch.randn(rows, shape[1], device="cuda").bfloat16()
    bias = torch.randn(shape[0], device="cuda").bfloat16()
    given = scaled_product.quantise(x, form)
    for added in (None, bias):
        out = scaled_product.multiply_codes(given, weight, scales, added)
        check(out, exact(given.dense(), numbers, added).cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("codes", [FP8, torch.int8], ids=str)
@pytest.mark.parametrize("shape", [(6144, 4096), (24576, 4096), (4096, 12288)], ids=str)
def test_the_shapes_of_models(shape, codes, block, rows):
    from quire.kernels.triton.codes.gemv import gemv

    weight, scales, numbers = matrix(*shape, codes, block, "cuda")
    x = torch.randn(rows, shape[1], device="cuda").bfloat16()
    wanted = exact(x, numbers, None).cpu()
    check(gemv(x, weight, scales, None), wanted)
    gate, up = wanted.chunk(2, dim=-1)
    check(gemv(x, weight, scales, None, Activation.SILU), F.silu(gate) * up, slack=8)


@pytest.mark.gpu
@pytest.mark.parametrize("block", [None, (128, 128)], ids=str)
def test_a_chain_replayed_from_a_graph(block):
    """Kernels of a chain start early; none may see what the one before has not written yet."""
    from quire.kernels.triton import TritonBackend
    from quire.layers.quantized.scaled import Fp8
    from quire.layers.weights import Weight, make_room

    hidden, features, layers = 1024, 3072, 8
    backend, dtype, cuda = TritonBackend(), torch.bfloat16, torch.device("cuda")
    torch.manual_seed(0)

    def made(rows: int, columns: int):
        with torch.device("meta"):
            made = Fp8(makes=True, block=block).matrix(rows, columns)
        make_room(made, dtype, cuda)
        (weight,) = made.weights(Weight("layer", (rows, columns)), slice(None))
        weight.fill(torch.randn(rows, columns, device=cuda) / columns**0.5)
        return made

    norm = torch.ones(hidden, dtype=dtype, device=cuda)
    matrices = [(made(2 * features, hidden), made(hidden, features)) for _ in range(layers)]

    def forward(x: Tensor) -> Tensor:
        stream, delta = x.clone(), None
        for gate, down in matrices:
            form = gate.takes(len(x), dtype)
            if form is None:
                normed = backend.add_rms_norm(stream, delta, norm, 1e-6)
                delta = down.multiply(gate.gated(normed, None, backend, Activation.SILU), None)
            else:
                codes = backend.quantised_norm(stream, delta, norm, 1e-6, form)
                gate_up = gate.multiply_codes(codes, None)
                codes = backend.quantised_gate(gate_up, Activation.SILU, form)
                delta = down.multiply_codes(codes, None)
        return backend.add_rms_norm(stream, delta, norm, 1e-6)

    for rows in (1, 2, 4, 16, 40, 250):
        given = torch.zeros(rows, hidden, dtype=dtype, device=cuda)
        forward(given)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = forward(given)
        inputs = torch.randn(20, rows, hidden, dtype=dtype, device=cuda)
        replayed = []
        for x in inputs:  # one after another, with nothing waited for in between
            given.copy_(x)
            graph.replay()
            replayed.append(out.clone())
        for x, got in zip(inputs, replayed, strict=True):
            wanted = forward(x)
            torch.cuda.synchronize()
            assert torch.equal(got, wanted)
