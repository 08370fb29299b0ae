"""Results of products that are larger than a core's caches, by kernels that write past these."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("numba")

from quire.kernels.gguf_blocks import TYPES
from quire.kernels.gguf_product import Product, product_with
from quire.kernels.numba.float_product import FloatProduct
from quire.kernels.numba.results import LARGE, is_large

SIZE, ROWS, TOKENS = 256, 1024, 300
PIECE = 60  # tokens, whose results are small


def product_of(kind: str) -> Product | FloatProduct:
    torch.manual_seed(0)
    if kind == "float32":
        return FloatProduct(torch.randn(1, ROWS, SIZE))
    type_ = TYPES[kind]
    if kind == "F16":
        weights = torch.randn(ROWS // 16, SIZE // type_.values, 16 * type_.values).half()
        return product_with(type_, weights.view(torch.uint8), ROWS)
    shape = ROWS // 16, SIZE // type_.values, 16 * type_.bytes
    weights = torch.randint(0, 0x3C, shape, dtype=torch.uint8)  # no scale is above 1
    return product_with(type_, weights, ROWS)


def in_pieces(product: Product | FloatProduct, x: Tensor, gated: bool) -> Tensor:
    return torch.cat([product(part, None, gated=gated) for part in x.split(PIECE)])


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "F16", "float32"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.usefixtures("threads")
def test_they_are_those_of_few_tokens(kind: str, gated: bool) -> None:
    product = product_of(kind)
    x = torch.randn(2 * TOKENS if gated else TOKENS, SIZE)
    together = product(x, None, gated=gated)
    apart = in_pieces(product, x, gated)
    assert is_large(together) and not is_large(product(x[:PIECE], None, gated=gated))
    assert together.isfinite().all() and together.count_nonzero() > together.numel() // 2
    assert torch.equal(together, apart)


@pytest.mark.parametrize("first_column", [0, 16, 3])
def test_columns_of_a_tensor(first_column: int) -> None:
    """Whole cache lines are written only where a column begins with one."""
    product = product_of("Q8_0")
    assert product.is_whole
    x, whole = torch.randn(TOKENS, SIZE), torch.full((TOKENS, ROWS + 32), 7.0)
    into = whole[:, first_column : first_column + ROWS]
    assert is_large(into) == (first_column % 16 == 0)
    product(x, None, into=into)
    assert torch.equal(into, in_pieces(product, x, gated=False))
    assert (whole[:, :first_column] == 7).all() and (whole[:, first_column + ROWS :] == 7).all()


def test_what_is_large() -> None:
    rows = LARGE // 64
    assert is_large(torch.empty(rows, 16)) and not is_large(torch.empty(rows - 1, 16))
    assert not is_large(torch.empty(rows, 24)), "every second row begins within a line"
    assert not is_large(torch.empty(1, LARGE)), "the logits of one token are read at once"
