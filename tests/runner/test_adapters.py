"""Steps whose sequences have adapters: each as if its adapter were merged into the weights."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from adapted_model import adapted_runner, make_model, plan, random_adapter, runner_of
from families import CASES, SHAPE
from peft_adapters import merge
from tiny_llm import CONFIG
from torch import Tensor

from quire.kernels.adapted_product import AdaptedProduct
from quire.layers import latent
from quire.layers.adapters.matrix import AdaptedMatrix
from quire.models.adapters.adapter import Adapter
from quire.models.adapters.model_adapters import ModelAdapters
from quire.runner.plan import StepPlan
from quire.runner.runner import ModelRunner

PROMPTS = [[3, 14, 15, 92, 65], [35, 89], [79, 32, 38, 46, 26, 43, 38], [33, 83, 27, 95]]
SLOTS, NO_SLOTS = [2, -1, 0, 2], [-1] * 4
interpreted = pytest.mark.skipif(
    torch.cuda.is_available() or importlib.util.find_spec("triton") is None,
    reason="needs Triton, and no GPU",
)


@torch.inference_mode()
def logits(runner: ModelRunner, step: StepPlan) -> Tensor:
    """Behind each sequence of a step."""
    found = runner._logits(runner._forward(step), step)
    assert found is not None
    return found


def steps(slots: list[int]) -> list[StepPlan]:
    """Prompts, in two chunks, then decodes."""
    first = plan([prompt[:1] for prompt in PROMPTS], [0] * len(PROMPTS), slots)
    rest = plan([prompt[1:] for prompt in PROMPTS], [1] * len(PROMPTS), slots)
    decodes = [
        plan([[7 + i]] * len(PROMPTS), [len(prompt) + i for prompt in PROMPTS], slots)
        for i in range(2)
    ]
    return [first, rest, *decodes]


@pytest.fixture(params=[False, True], ids=["tied", "not tied"])
def raw(request: pytest.FixtureRequest) -> dict[str, Any]:
    return CONFIG | {"tie_word_embeddings": not request.param}


def made(
    raw: dict[str, Any], ends: bool = False, rank: int = 16
) -> tuple[ModelRunner, list[Adapter]]:
    """A runner with an adapter in slot 0 and another one, of this rank, in slot 2."""
    slots = ModelAdapters(make_model(raw), 4, rank, torch.float32, torch.device("cpu"))
    adapters = [random_adapter(slots, 1, min(5, rank), ends), random_adapter(slots, 2, rank)]
    runner = adapted_runner(make_model(raw), {each.fingerprint: each for each in adapters}, rank)
    for adapter, slot in zip(adapters, (0, 2), strict=True):
        runner.load_adapter(adapter.fingerprint, slot)
    return runner, adapters


def test_each_sequence_is_computed_as_with_merged_weights(raw: dict[str, Any]) -> None:
    check_merged(raw)


@pytest.mark.parametrize("case", ["mixtral", "qwen2-moe", "deepseek-v2", "deepseek-v3", "gpt-oss"])
def test_experts_routers_and_latents_have_adapters(case: str) -> None:
    name, changes = CASES[case]
    layers = {"num_hidden_layers": 2, "sliding_window": None}
    check_merged({"architectures": [f"{name}ForCausalLM"], **SHAPE, **changes, **layers})


@pytest.mark.parametrize("most", [0, 3])
def test_latents_of_prompts_are_expanded_with_adapters(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All sequences of a step, or those with more new tokens."""
    monkeypatch.setattr(latent, "MOST_ABSORBED", most)
    name, changes = CASES["deepseek-v3"]
    check_merged({"architectures": [f"{name}ForCausalLM"], **SHAPE, **changes})


def check_merged(raw: dict[str, Any]) -> None:
    runner, adapters = made(raw)
    for up in runner.adapters.slots.ups.values():
        assert up.absorbing.slots.bias.nbytes == 0  # a bias of K would change nothing
    alone = {-1: runner_of(make_model(raw))}
    for slot, adapter in zip((0, 2), adapters, strict=True):
        model = make_model(raw)
        merge(model, adapter)
        alone[slot] = runner_of(model)
    for step, without in zip(steps(SLOTS), steps(NO_SLOTS), strict=True):
        found = logits(runner, step)
        for slot, other in alone.items():
            rows = [row for row, own in enumerate(SLOTS) if own == slot]
            wanted = logits(other, without)
            torch.testing.assert_close(found[rows], wanted[rows], rtol=1e-4, atol=1e-4)
    assert not torch.equal(found[0], found[3])


@interpreted
@pytest.mark.parametrize("case", ["llama-grouped", "qwen2-moe", "granite", "deepseek-v2"])
def test_norms_of_a_model_add_what_adapters_do(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where slots are joined with their matrices."""
    found: list[AdaptedProduct] = []
    add = AdaptedProduct.add_rms_norm

    def counted(product: AdaptedProduct, *args: Any) -> Tensor:
        found.append(product)
        return add(product, *args)

    monkeypatch.setattr(AdaptedProduct, "add_rms_norm", counted)
    name, changes = CASES[case]
    raw = {"architectures": [f"{name}ForCausalLM"], **SHAPE, **changes}
    apart, joined = (made(raw, rank=2)[0] for _ in range(2))
    for module in joined.model.modules():
        if isinstance(module, AdaptedMatrix):
            module.join()
    for step in steps(SLOTS):
        torch.testing.assert_close(logits(joined, step), logits(apart, step), rtol=1e-4, atol=1e-4)
    assert bool(found) == (case != "granite")  # whose outputs are multiplied first


def test_a_step_without_adapters_is_that_of_a_model_without_slots(raw: dict[str, Any]) -> None:
    runner, _ = made(raw)
    plain = runner_of(make_model(raw))
    for step in steps(NO_SLOTS):
        assert torch.equal(logits(runner, step), logits(plain, step))


def test_an_adapter_may_replace_embeddings_and_head(raw: dict[str, Any]) -> None:
    runner, [adapter, _] = made(raw, ends=True)
    model = make_model(raw)
    merge(model, adapter)
    merged = runner_of(model)
    slots = [0, -1, 2, 0]
    plain = runner_of(make_model(raw))
    for step, without in zip(steps(slots), steps(NO_SLOTS), strict=True):
        found = logits(runner, step)
        wanted = logits(merged, without)
        torch.testing.assert_close(found[[0, 3]], wanted[[0, 3]], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found[1], logits(plain, without)[1], rtol=1e-5, atol=1e-5)


def test_a_slot_has_the_last_adapter_that_was_loaded(raw: dict[str, Any]) -> None:
    runner, [first, second] = made(raw, ends=True)
    only, *_ = steps([2, 2, 2, 2])
    wanted = logits(runner, only)
    runner.load_adapter(first.fingerprint, 2)
    assert not torch.equal(logits(runner, only), wanted)
    runner.load_adapter(second.fingerprint, 2)
    runner.forget_adapter(second.fingerprint)
    assert torch.equal(logits(runner, only), wanted)
