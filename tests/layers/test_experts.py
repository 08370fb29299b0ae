"""The experts of a layer: every backend against a formula, every format against its numbers."""

from __future__ import annotations

import importlib.util
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels import linear
from quire.kernels.activation import ClampedSwiGLU
from quire.kernels.backend import Backend, backend_for
from quire.kernels.cpu import CpuBackend
from quire.kernels.experts import NOWHERE, Routing
from quire.kernels.reference import ReferenceBackend
from quire.layers.experts import ExpertNames, Experts
from quire.layers.formats import Dense, MatrixFormat, StackedMatrix
from quire.layers.matrix import Matrix
from quire.layers.quantized.fp4 import Mxfp4, Mxfp4Matrix, Nvfp4
from quire.layers.quantized.grouped import Grouped, GroupedMatrix
from quire.layers.quantized.scaled import Fp8, Int8
from quire.layers.tp import SINGLE, TensorParallel
from quire.layers.weights import make_room, ranges

CPU = torch.device("cpu")
HIDDEN, FEATURES, COUNT, TOP_K = 64, 32, 5, 2


def compiled() -> Backend:
    pytest.importorskip("numba")
    from quire.kernels.numba import NumbaBackend

    return NumbaBackend()


BACKENDS = {"reference": ReferenceBackend, "cpu": CpuBackend, "numba": compiled}


def interpreted() -> Backend:
    from quire.kernels.triton import TritonBackend

    return TritonBackend()


@pytest.fixture(
    params=[
        *BACKENDS.values(),
        pytest.param(
            interpreted,
            marks=pytest.mark.skipif(
                torch.cuda.is_available() or importlib.util.find_spec("triton") is None,
                reason="needs Triton, and no GPU (its kernels are tested there)",
            ),
        ),
    ],
    ids=[*BACKENDS, "interpreter"],
)
def backend(request: pytest.FixtureRequest) -> Backend:
    made: Backend = request.param()
    return made


def tensors() -> dict[str, Tensor]:
    torch.manual_seed(7)
    shapes = {"gate": (FEATURES, HIDDEN), "up": (FEATURES, HIDDEN), "down": (HIDDEN, FEATURES)}
    return {
        f"mlp.experts.{expert}.{name}_proj.weight": 0.2 * torch.randn(shape)
        for expert, (name, shape) in product(range(COUNT), shapes.items())
    }


class All:
    """Every matrix in one format."""

    def __init__(self, kind: MatrixFormat) -> None:
        self.kind = kind

    def of(self, *names: str) -> MatrixFormat:
        return self.kind


def experts_with(
    numbers: dict[str, Tensor], kind: MatrixFormat | None = None, tp: TensorParallel = SINGLE
) -> Experts:
    experts = Experts(HIDDEN, FEATURES, COUNT, tp)
    experts.store_in(All(kind or Dense()), "mlp.experts")
    make_room(experts, torch.float32, CPU)
    for weight in experts.weights("mlp.experts"):
        assert weight.shape == tuple(numbers[weight.name].shape)
        if all(ranges(weight.shape, weight.part)):
            weight.fill(numbers[weight.name][weight.part])
    return experts


def routing(tokens: int, seed: int = 0) -> Routing:
    """The last expert has no token, the first has many."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, COUNT - 1, generator=generator)
    scores[: tokens // 2, 0] += 1
    weights, chosen = scores.topk(TOP_K)
    return Routing(chosen, weights)


def formula(x: Tensor, chosen: Routing, numbers: dict[str, Tensor]) -> Tensor:
    out = torch.zeros_like(x)
    for token, slot in product(range(len(x)), range(TOP_K)):
        expert = int(chosen.experts[token, slot])
        if expert == NOWHERE:
            continue
        gate, up, down = (
            numbers[f"mlp.experts.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down")
        )
        hidden = F.silu(gate @ x[token]) * (up @ x[token])
        out[token] += chosen.weights[token, slot] * (down @ hidden)
    return out


CLAMPED = ClampedSwiGLU(alpha=1.702, limit=0.5)  # so low that many numbers reach it
INTERLEAVED = ExpertNames(interleaved=True)


def with_biases(numbers: dict[str, Tensor]) -> dict[str, Tensor]:
    biases = {
        f"{name.removesuffix('weight')}bias": torch.randn(len(numbers[name])) for name in numbers
    }
    return {**numbers, **biases}


def clamped_formula(x: Tensor, chosen: Routing, numbers: dict[str, Tensor]) -> Tensor:
    """As gpt-oss has it, in the words of its paper's code."""
    out = torch.zeros_like(x)
    for token, slot in product(range(len(x)), range(TOP_K)):
        stem = f"mlp.experts.{int(chosen.experts[token, slot])}"

        def linear(name: str, of: Tensor, stem: str = stem) -> Tensor:
            return numbers[f"{stem}.{name}_proj.weight"] @ of + numbers[f"{stem}.{name}_proj.bias"]

        gate = linear("gate", x[token]).clamp(max=CLAMPED.limit)
        up = linear("up", x[token]).clamp(-CLAMPED.limit, CLAMPED.limit)
        hidden = gate * torch.sigmoid(CLAMPED.alpha * gate) * (up + 1)
        out[token] += chosen.weights[token, slot] * linear("down", hidden)
    return out


def clamped_experts(numbers: dict[str, Tensor], tp: TensorParallel = SINGLE) -> Experts:
    experts = Experts(HIDDEN, FEATURES, COUNT, tp, INTERLEAVED, CLAMPED, bias=True)
    make_room(experts, torch.float32, CPU)
    for weight in experts.weights("mlp.experts"):
        if all(ranges(weight.shape, weight.part)):
            weight.fill(numbers[weight.name][weight.part])
    return experts


@pytest.mark.parametrize("tokens", [1, 33, 70])
def test_biases_and_a_clamped_gate(backend: Backend, tokens: int) -> None:
    numbers = with_biases(tensors())
    x, chosen = torch.randn(tokens, HIDDEN), routing(tokens)
    found = clamped_experts(numbers)(x, chosen, backend)
    wanted = clamped_formula(x, chosen, numbers)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("size", "expert_parallel"), [(2, False), (5, True)])
def test_ranks_add_each_bias_once(size: int, expert_parallel: bool) -> None:
    numbers, x, chosen = with_biases(tensors()), torch.randn(7, HIDDEN), routing(7)
    total = torch.zeros(7, HIDDEN)
    for rank in range(size):
        tp = TensorParallel(rank, size, expert_parallel=expert_parallel)
        total += clamped_experts(numbers, tp)(x, chosen, CpuBackend())
    wanted = clamped_formula(x, chosen, numbers)
    torch.testing.assert_close(total, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tokens", [0, 1, 2, 33, 70])
def test_each_token_goes_through_its_experts(backend: Backend, tokens: int) -> None:
    numbers = tensors()
    x, chosen = torch.randn(tokens, HIDDEN), routing(tokens)
    found = experts_with(numbers)(x, chosen, backend)
    torch.testing.assert_close(found, formula(x, chosen, numbers), atol=1e-5, rtol=1e-4)


def test_padding_is_zero_and_changes_nothing(backend: Backend) -> None:
    experts, x, chosen = experts_with(tensors()), torch.randn(9, HIDDEN), routing(9)
    alone = experts(x[:6], Routing(chosen.experts[:6], chosen.weights[:6]), backend)
    chosen.experts[6:] = NOWHERE
    x[6:] = 1e30
    found = experts(x, chosen, backend)
    torch.testing.assert_close(found[:6], alone)
    assert not found[6:].any()


@pytest.mark.parametrize(("size", "expert_parallel"), [(2, False), (4, False), (5, True)])
def test_ranks_add_up(backend: Backend, size: int, expert_parallel: bool) -> None:
    numbers, x, chosen = tensors(), torch.randn(7, HIDDEN), routing(7)
    total = torch.zeros(7, HIDDEN)
    for rank in range(size):
        tp = TensorParallel(rank, size, expert_parallel=expert_parallel)
        total += experts_with(numbers, tp=tp)(x, chosen, backend)
    torch.testing.assert_close(total, formula(x, chosen, numbers), atol=1e-5, rtol=1e-4)


FORMATS: dict[str, MatrixFormat] = {
    "fp8": Fp8(makes=True),
    "fp8-blocks": Fp8(makes=True, block=(16, 16)),
    "fp8-blocks-apart": Fp8(makes=True, block=(24, 16)),
    "int8": Int8(makes=True),
    "int4": Grouped(makes=True, bits=4, group=16, has_zeros=True),
    "mxfp4": Mxfp4(makes=True),
    "nvfp4": Nvfp4(makes=True),
}


def dense(matrix: Matrix) -> Tensor:
    if isinstance(matrix, StackedMatrix):
        return torch.cat([dense(part) for part in matrix.parts])
    found: Tensor = matrix.dense()  # type: ignore[operator]
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str) -> None:
    """Experts compute with the numbers that their codes stand for, each with its own."""
    numbers = tensors()
    experts = experts_with(numbers, FORMATS[name])
    assert isinstance(experts.gate_up, StackedMatrix) == name.endswith("apart")
    stored = dict(numbers)
    both = dense(experts.gate_up).unflatten(0, (COUNT, 2, FEATURES))
    downs = dense(experts.down).unflatten(0, (COUNT, HIDDEN))
    for expert in range(COUNT):
        kept = {"gate": both[expert, 0], "up": both[expert, 1], "down": downs[expert]}
        for matrix, found in kept.items():
            tensor = f"mlp.experts.{expert}.{matrix}_proj.weight"
            assert (found - numbers[tensor]).abs().max() < 0.25 * numbers[tensor].abs().max()
            stored[tensor] = found
    x, chosen = torch.randn(11, HIDDEN), routing(11)
    found = experts(x, chosen, CpuBackend())
    torch.testing.assert_close(found, formula(x, chosen, stored), atol=1e-4, rtol=1e-3)


def test_only_chosen_experts_are_computed() -> None:
    """One token touches the matrices of its own experts, each once, and no others."""
    experts = experts_with(tensors())
    touched: list[int] = []
    for number, matrix in enumerate(experts.each[0]):
        multiply = matrix.multiply
        matrix.multiply = lambda *args, n=number, f=multiply: (touched.append(n), f(*args))[1]  # type: ignore[method-assign]
    one = Routing(torch.tensor([[3, 1]]), torch.tensor([[0.5, 0.5]]))
    x = torch.randn(1, HIDDEN)
    found = experts(x, one, CpuBackend())
    assert sorted(touched) == [1, 3]
    touched.clear()
    experts(torch.randn(32, HIDDEN), routing(32), CpuBackend())
    assert sorted(touched) == sorted(set(touched)) == [0, 1, 2, 3]
    for other in (0, 2, 4):
        experts.each[0][other].weight.fill_(torch.nan)
    torch.testing.assert_close(experts(x, one, backend_for(CPU)), found)


@pytest.fixture
def interleaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 matrices are packed as on a CPU with AVX-512, for which alone it is faster."""
    pytest.importorskip("numba")
    monkeypatch.setattr(linear, "_has_float_kernel", lambda: True)


@pytest.mark.usefixtures("interleaves")
@pytest.mark.parametrize("tokens", [0, 1, 2, 33, 200])
def test_interleaved_experts(tokens: int) -> None:
    """With 200 tokens they are too many for the kernels, and torch multiplies."""
    numbers, x, chosen = tensors(), torch.randn(tokens, HIDDEN), routing(tokens)
    experts = experts_with(numbers)
    experts.pack()
    assert experts.mlps.gate_up.interleaved and experts.mlps.down.interleaved
    for each in (compiled(), CpuBackend()):
        found = experts(x, chosen, each)
        torch.testing.assert_close(found, formula(x, chosen, numbers), atol=1e-5, rtol=1e-4)


@pytest.mark.usefixtures("interleaves")
def test_interleaved_experts_of_one_token_are_those_it_chose() -> None:
    numbers = tensors()
    x, one = torch.randn(1, HIDDEN), Routing(torch.tensor([[3, 1]]), torch.tensor([[0.5, 0.5]]))
    wanted = formula(x, one, numbers)
    for name, matrix in numbers.items():
        if int(name.split(".")[2]) not in (1, 3):
            matrix.fill_(torch.nan)
    experts = experts_with(numbers)
    experts.pack()
    torch.testing.assert_close(experts(x, one, compiled()), wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.usefixtures("interleaves")
def test_interleaved_experts_do_not_see_a_tokens_neighbours() -> None:
    experts, x, chosen = experts_with(tensors()), torch.randn(33, HIDDEN), routing(33)
    experts.pack()
    together = experts(x, chosen, compiled())
    for first, count in ((0, 1), (7, 2), (12, 13)):
        part = slice(first, first + count)
        alone = Routing(chosen.experts[part], chosen.weights[part])
        assert torch.equal(experts(x[part], alone, compiled()), together[part])
    chosen.experts[6:] = NOWHERE
    found = experts(x, chosen, compiled())
    assert torch.equal(found[:6], together[:6]) and not found[6:].any()


@pytest.mark.usefixtures("interleaves")
@pytest.mark.parametrize(("size", "expert_parallel"), [(2, False), (5, True)])
def test_ranks_of_interleaved_experts_add_up(size: int, expert_parallel: bool) -> None:
    numbers, x, chosen = tensors(), torch.randn(7, HIDDEN), routing(7)
    total = torch.zeros(7, HIDDEN)
    for rank in range(size):
        tp = TensorParallel(rank, size, expert_parallel=expert_parallel)
        experts = experts_with(numbers, tp=tp)
        experts.pack()
        assert experts.mlps.gate_up.interleaved
        total += experts(x, chosen, compiled())
    torch.testing.assert_close(total, formula(x, chosen, numbers), atol=1e-5, rtol=1e-4)


@pytest.mark.usefixtures("interleaves")
@pytest.mark.parametrize("tokens", [1, 33])
def test_interleaved_experts_with_biases_and_a_clamped_gate(tokens: int) -> None:
    numbers, x, chosen = with_biases(tensors()), torch.randn(tokens, HIDDEN), routing(tokens)
    experts = clamped_experts(numbers)
    experts.pack()
    found = experts(x, chosen, compiled())
    wanted = clamped_formula(x, chosen, numbers)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_packed_experts_compute_the_same() -> None:
    experts, x, chosen = experts_with(tensors()), torch.randn(33, HIDDEN), routing(33)
    before = experts(x, chosen, CpuBackend())
    experts.pack()
    torch.testing.assert_close(experts(x, chosen, CpuBackend()), before, atol=1e-5, rtol=1e-4)


def test_experts_of_four_bits_in_the_order_of_a_gpu() -> None:
    """Their tiles are those of each expert: all matrices of a layer have one memory."""
    experts = Experts(128, 16, 3, SINGLE)
    experts.store_in(All(Grouped(makes=True, group=32)), "mlp.experts")
    make_room(experts, torch.float32, CPU)
    torch.manual_seed(0)
    for weight in experts.weights("mlp.experts"):
        weight.fill(torch.randn(weight.shape))
    gates_and_ups, _ = experts.each
    before, stored = [matrix.dense() for matrix in gates_and_ups], experts.gate_up.weight.clone()
    for matrix in gates_and_ups:
        assert isinstance(matrix, GroupedMatrix)
        matrix.lay_in_tiles()
    assert not torch.equal(experts.gate_up.weight, stored)
    assert all(map(torch.equal, (matrix.dense() for matrix in gates_and_ups), before))


@pytest.mark.parametrize("shape", [(2, 16), (34, 64), (96, 48)])
def test_the_kernel_of_several_matrices(shape: tuple[int, int]) -> None:
    """Experts with no token, one, an odd number; in any company a token has the same sums."""
    pytest.importorskip("numba")
    from quire.kernels.numba.grouped_linear import grouped_linear

    rows, size = shape
    sizes = [0, 1, 5, 0, 2, 8]
    weights, x = torch.randn(len(sizes), rows, size), torch.randn(sum(sizes), size)
    found = grouped_linear(weights, x, sizes, threads=2)
    wanted = [part @ matrix.T for part, matrix in zip(x.split(sizes), weights, strict=True)]
    torch.testing.assert_close(found, torch.cat(wanted), atol=1e-4, rtol=1e-4)
    alone = grouped_linear(weights, x[1:2], [0, 0, 1, 0, 0, 0], threads=1)
    assert torch.equal(alone[0], found[1])


@pytest.mark.skipif(
    torch.cuda.is_available() or importlib.util.find_spec("triton") is None,
    reason="needs Triton, and no GPU (its kernels are tested there)",
)
@pytest.mark.parametrize(
    "kind",
    [
        Mxfp4(makes=True),
        Grouped(makes=True, group=32, scale_dtype=torch.float16),
        Grouped(makes=True, group=32, has_zeros=True, scale_dtype=torch.float16),
    ],
    ids=["MXFP4", "groups", "zeros"],
)
def test_four_bits_in_the_order_of_grouped_products(kind: MatrixFormat) -> None:
    """As a GPU has it: what was loaded is the same, and so is what is computed."""
    experts = Experts(HIDDEN, HIDDEN, COUNT, SINGLE)
    experts.store_in(All(kind), "mlp.experts")
    make_room(experts, torch.float16, CPU)
    torch.manual_seed(3)
    for weight in experts.weights("mlp.experts"):
        weight.fill(0.2 * torch.randn(weight.shape))
    x, chosen = torch.randn(6, HIDDEN).half(), routing(6)
    right = ReferenceBackend().experts(x, chosen, experts.mlps)
    del experts.mlps
    for whole, parts in zip((experts.gate_up, experts.down), experts.each, strict=True):
        assert isinstance(whole, Mxfp4Matrix | GroupedMatrix)
        whole.lay_in_quarters(parts)
    assert torch.equal(ReferenceBackend().experts(x, chosen, experts.mlps), right)
    found = interpreted().experts(x, chosen, experts.mlps)
    torch.testing.assert_close(found, right, atol=2e-3, rtol=2e-3)
