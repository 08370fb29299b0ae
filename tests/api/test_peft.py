"""Adapters through the engine: what `peft` computes, for every family, however it is batched."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from families import GROUPS, MIXTURES, Oracle
from peft_adapters import every_matrix
from peft_engine import GREEDY, PeftModels
from preempted import preempted_adapters
from torch import Tensor

from quire import LLM
from quire.kernels import gguf_product
from quire.layers import latent
from quire.layers.experts import Experts
from quire.layers.linear import ColumnLinear, Linear
from quire.layers.weights import sibling
from quire.models.source import build_model, open_model

CASES = [*GROUPS, "llama-grouped", "qwen3-qk-norm"]
LISTED = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "use_tqdm": False,
    "enable_lora": True,
    "block_size": 8,
    "num_blocks": 256,
}


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda case: Oracle(case, tmp_path_factory.mktemp(case)))


@pytest.mark.parametrize("case", CASES)
def test_every_family(case: str, oracles: Any, tmp_path: Path) -> None:
    oracle = oracles(case)
    configs = {"one": every_matrix(case), "two": every_matrix(case, rank=7)}
    models = PeftModels(oracle.model, tmp_path, configs)
    prompt = oracle.ids[:40]
    work = [("one", prompt), (None, prompt), ("two", prompt), ("one", oracle.ids[5:45])]
    with LLM(str(oracle.folder), **SETTINGS) as llm:
        models.generate(llm, work, replace(GREEDY, prompt_logprobs=0))


@pytest.mark.parametrize("most_absorbed", [0, 20, latent.MOST_ABSORBED])
def test_latents_absorbed_and_expanded(
    most_absorbed: int, oracles: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the number of new tokens, in one step or in several; with a bias for K and V, too."""
    monkeypatch.setattr(latent, "MOST_ABSORBED", most_absorbed)
    oracle = oracles("deepseek-v2")
    biased = {"r": 5, "lora_alpha": 9, "target_modules": ["kv_b_proj"], "lora_bias": True}
    models = PeftModels(oracle.model, tmp_path, {"one": every_matrix("deepseek-v2"), "two": biased})
    long, short = oracle.ids[:40], oracle.ids[3:15]
    work = [("two", long), ("one", short), (None, long), ("two", short), ("one", long)]
    with LLM(str(oracle.folder), **SETTINGS) as llm:
        models.generate(llm, work, replace(GREEDY, prompt_logprobs=0))


ENDS: dict[str, dict[str, Any]] = {
    "embedding and head": {"target_modules": ["embed_tokens", "lm_head", "k_proj"]},
    "whole ones": {"target_modules": ["k_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "biases": {"target_modules": LISTED, "lora_bias": True},
    "rslora": {"target_modules": LISTED, "use_rslora": True},
    "ranks": {"target_modules": LISTED, "rank_pattern": {"q_proj": 13, "down_proj": 1}},
}


@pytest.mark.parametrize("case", ["llama-grouped", "qwen2-tied"])
def test_embeddings_heads_and_biases(case: str, oracles: Any, tmp_path: Path) -> None:
    """Adapters that differ in what they change, in one batch."""
    oracle = oracles(case)
    models = PeftModels(oracle.model, tmp_path, ENDS)
    with LLM(str(oracle.folder), **SETTINGS) as llm:
        work = [(name, oracle.ids[:30]) for name in (None, *ENDS)]
        models.generate(llm, work, replace(GREEDY, prompt_logprobs=0))


class TestSixteen:
    """Sixteen adapters of different ranks over one model."""

    @pytest.fixture(scope="class")
    def oracle(self, oracles: Any) -> Oracle:
        return oracles("llama-grouped")

    @pytest.fixture(scope="class")
    def models(self, oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> PeftModels:
        configs = {
            f"n{i}": {"r": 1 + i, "lora_alpha": 2 * i + 1, "target_modules": LISTED[i % 3 :]}
            for i in range(16)
        }
        return PeftModels(oracle.model, tmp_path_factory.mktemp("sixteen"), configs)

    def work(self, oracle: Oracle, count: int) -> list[tuple[str | None, list[int]]]:
        """Prompts with so many adapters, some with the same, and two without."""
        names = [
            None,
            *(f"n{i}" for i in range(count)),
            *(f"n{i}" for i in range(0, count, 4)),
            None,
        ]
        return [(name, oracle.ids[i % 3 : 18 + i]) for i, name in enumerate(names)]

    @pytest.mark.parametrize("slots", [16, 3])
    def test_mixed_batches_cold_and_warm(
        self, slots: int, oracle: Oracle, models: PeftModels
    ) -> None:
        with LLM(str(oracle.folder), **SETTINGS, max_loras=slots) as llm:
            for count in (0, 1, 5, 16):
                models.generate(llm, self.work(oracle, count))
            outputs = models.generate(llm, self.work(oracle, 16))
            assert all(output.num_cached_tokens > 0 for output in outputs)

    def test_chunked_preempted_and_from_a_disk(
        self, oracle: Oracle, models: PeftModels, tmp_path: Path
    ) -> None:
        tight = {"num_blocks": 14, "max_num_batched_tokens": 11, "max_loras": 4}
        tight |= {"ssd_cache_dir": str(tmp_path / "ssd"), "ssd_cache_bytes": "64MB"}
        longer = replace(GREEDY, max_tokens=20)
        for _ in ("cold", "from the disk"):
            with LLM(str(oracle.folder), **SETTINGS | tight) as llm:
                preempted = preempted_adapters(llm)
                outputs = models.generate(llm, self.work(oracle, 6), longer)
                assert len(set(preempted) - {None}) > 1
        by_tier = [output.cached_tokens_by_tier for output in outputs]
        assert all(by_tier) and sum("ssd" in tiers for tiers in by_tier) >= 6


@pytest.mark.parametrize("experts", ["in parts", "whole, half of them each"])
def test_two_ranks(experts: str, oracles: Any, tmp_path: Path) -> None:
    """Of a model with experts, whose heads make K and V from latents."""
    case = "deepseek-v3"
    oracle = oracles(case)
    models = PeftModels(oracle.model, tmp_path, {"one": every_matrix(case)})
    ranks = {"tensor_parallel_size": 2, "enable_expert_parallel": experts != "in parts"}
    with LLM(str(oracle.folder), **SETTINGS, **ranks) as llm:
        models.generate(llm, [("one", oracle.ids[:30]), (None, oracle.ids[:30])])


QUANTISED = [
    ("llama-grouped", "int8"),
    ("llama-grouped", "int4"),
    ("qwen3-moe-some-dense", "fp8"),
    ("qwen3-moe-some-dense", "int4"),
]


@pytest.mark.parametrize(("case", "quantization"), QUANTISED)
def test_quantised_bases(
    case: str, quantization: str, oracles: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose numbers `peft` is given, dequantised; of experts, too."""
    if case in MIXTURES:  # by the reference's products: a kernel rounds, and routers see that
        monkeypatch.setattr(gguf_product.kernels, "compile", lambda kind: False)
    oracle = oracles(case)
    source = open_model(str(oracle.folder), quantization=quantization)
    quantised = build_model(source, torch.float32, torch.device("cpu"), progress=False)
    base = deepcopy(oracle.model)
    base.load_state_dict(dequantised(quantised), strict=False)
    assert (base(torch.tensor([oracle.ids])).logits[0] - oracle.logits).abs().max() > 0.01
    models = PeftModels(base, tmp_path, {"one": every_matrix(case), "two": every_matrix(case, 7)})
    with LLM(str(oracle.folder), **SETTINGS, quantization=quantization) as llm:
        models.generate(llm, [(name, oracle.ids[:30]) for name in ("one", None, "two")])


def dequantised(model: Any) -> dict[str, Tensor]:
    """The matrices of a model in the checkpoint's names."""
    found = {}
    for path, layer in model.named_modules():
        if isinstance(layer, Linear):
            numbers = layer.matrix.rows(torch.arange(layer.matrix.out_features))
            if isinstance(layer, ColumnLinear):
                parts = zip(layer.outputs, numbers.split(layer.sizes), strict=True)
                found |= {sibling(path, f"{each.name}.weight"): part for each, part in parts}
            else:
                found[f"{path}.weight"] = numbers
        elif isinstance(layer, Experts):
            for name, each in zip(("gate_up_proj", "down_proj"), layer.each, strict=True):
                numbers = [matrix.rows(torch.arange(matrix.out_features)) for matrix in each]
                found[f"{path}.{name}"] = torch.stack(numbers)
    return found
