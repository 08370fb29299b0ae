"""Adapters that `peft` made: what is read and added to the weights gives `peft`'s logits."""

from __future__ import annotations

import json
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from families import GROUPS, IN_MXFP4, MIXTURES, Oracle
from paged import PagedModel
from peft_adapters import STACKED, PeftAdapter, every_matrix, merge
from safetensors.torch import load_file, save_file

from quire.kernels.reference import ReferenceBackend
from quire.layers.tp import SINGLE, TensorParallel
from quire.models.adapters.adapter import EMBEDDING, HEAD, Adapter
from quire.models.adapters.config import CONFIG
from quire.models.adapters.reader import AdapterReader
from quire.models.adapters.tensors import TENSORS
from quire.models.source import build_model, open_model

CPU = torch.device("cpu")
DENSE = [case for case in [*GROUPS, "llama-grouped", "qwen3-qk-norm"] if case not in IN_MXFP4]
SMALL: dict[str, Any] = {"r": 4, "lora_alpha": 6}
ALL: dict[str, Any] = {**SMALL, "target_modules": "all-linear"}


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda case: Oracle(case, tmp_path_factory.mktemp(case)))


def load(folder: Path, tp: TensorParallel = SINGLE) -> Any:
    return build_model(open_model(str(folder)), torch.float32, CPU, progress=False, tp=tp)


def read(base: Path, adapter: Path, tp: TensorParallel = SINGLE, max_rank: int = 64) -> Adapter:
    return AdapterReader(open_model(str(base)).config, tp, torch.float32, max_rank).read(adapter)


def check(oracle: Oracle, made: PeftAdapter) -> Adapter:
    """Adds what is read to a model, and holds its logits against `peft`'s."""
    adapter = read(oracle.folder, made.folder)
    model = load(oracle.folder)
    merge(model, adapter)
    made.check(PagedModel(model, ReferenceBackend(), block_size=16).step({"a": oracle.ids})["a"])
    assert (made.logits[0] - oracle.logits).abs().max() > 0.1
    return adapter


@pytest.mark.parametrize("case", DENSE)
def test_every_matrix_of_every_family(case: str, oracles: Any, tmp_path: Path) -> None:
    oracle = oracles(case)
    made = PeftAdapter(oracle.model, tmp_path / "adapter", oracle.ids, **every_matrix(case))
    adapter = check(oracle, made)
    # A rank's part of the sum is its part of a checkpoint that has the sum.
    made.merged.save_pretrained(tmp_path / "merged")
    for expert_parallel in {False, case in MIXTURES}:
        tp = TensorParallel(1, 2, expert_parallel=expert_parallel)
        part = read(oracle.folder, made.folder, tp)
        assert part.fingerprint == adapter.fingerprint
        found, wanted = load(oracle.folder, tp), load(tmp_path / "merged", tp)
        merge(found, part)
        layers = zip(found.model.layers.parameters(), wanted.model.layers.parameters(), strict=True)
        for one, other in layers:
            torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


LISTED = {"target_modules": ["q_proj", "v_proj", "up_proj"]}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "one matrix of a fused layer": ("llama-grouped", {"target_modules": ["k_proj"]}),
    "rslora": ("llama-grouped", {**LISTED, "use_rslora": True, "lora_alpha": 3}),
    "a rank of 64": ("llama-grouped", {**LISTED, "r": 64}),
    "pattern": (
        "llama-grouped",
        {"target_modules": r"model\.layers\.(0|2)\.(?:mlp\.gate|self_attn\.[ov])_proj"},
    ),
    "pattern of what is left out": (
        "llama-grouped",
        {"target_modules": "all-linear", "exclude_modules": r".*\.1\..*|.*o_proj"},
    ),
    "names of what is left out": (
        "llama-grouped",
        {**LISTED, "exclude_modules": ["v_proj", "layers.1.mlp.up_proj"]},
    ),
    "some layers": ("llama-grouped", {**LISTED, "layers_to_transform": [0, 2]}),
    "one layer by its list's name": (
        "llama-grouped",
        {**LISTED, "layers_to_transform": 1, "layers_pattern": "layers"},
    ),
    "other ranks and alphas": (
        "llama-grouped",
        {
            **LISTED,
            "rank_pattern": {"q_proj": 7, r"layers\.[12]\.mlp\.up_proj": 2},
            "alpha_pattern": {"^model.layers.0.self_attn.q_proj": 11, "up_proj": 1.5},
        },
    ),
    "parameters of linear layers": (
        "llama-grouped",
        {
            "target_modules": [],
            "target_parameters": ["q_proj.weight", "down_proj.weight"],
            "rank_pattern": {r"q_proj\.weight": 3},
        },
    ),
    "biases": ("llama-bias", {**LISTED, "lora_bias": True}),
    "embedding and head": (
        "llama-grouped",
        {"target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    ),
    "whole embedding and head": (
        "llama-grouped",
        {**LISTED, "modules_to_save": ["embed_tokens", "lm_head"]},
    ),
    "whole embedding of a tied model": ("gemma2", {**LISTED, "modules_to_save": ["embed_tokens"]}),
    "one parameter of experts": (
        "qwen3-moe",
        {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj"]},
    ),
    "ranks of experts": (
        "gpt-oss",
        {
            "target_modules": [],
            "target_parameters": STACKED,
            "rank_pattern": {r"experts\.down_proj": 3},
            "alpha_pattern": {r"layers\.1\..*\.gate_up_proj": 5},
        },
    ),
    "router": ("qwen3-moe", {"target_modules": [], "target_parameters": ["mlp.gate.weight"]}),
    "router with a bias": (
        "gpt-oss",
        {"target_modules": ["o_proj"], "target_parameters": ["mlp.router.weight"]},
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_what_a_config_can_say(name: str, oracles: Any, tmp_path: Path) -> None:
    case, config = CONFIGS[name]
    oracle = oracles(case)
    check(oracle, PeftAdapter(oracle.model, tmp_path, oracle.ids, **{**SMALL, **config}))


# A bias where the base model has none; and a matrix that is the embedding's and the head's, of
# which the adapter changes what one of them sees.
UNMERGED: dict[str, tuple[str, dict[str, Any]]] = {
    "a new bias": ("llama-grouped", {**LISTED, "lora_bias": True}),
    "a tied embedding": ("qwen2-tied", {"target_modules": ["embed_tokens", "q_proj"]}),
    "a tied head": ("qwen2-tied", {"target_modules": ["lm_head", "q_proj"]}),
}


@pytest.mark.parametrize("name", UNMERGED)
def test_what_peft_cannot_merge(name: str, oracles: Any, tmp_path: Path) -> None:
    case, config = UNMERGED[name]
    oracle = oracles(case)
    config = {**SMALL, **config}
    check(oracle, PeftAdapter(oracle.model, tmp_path, oracle.ids, merges=False, **config))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_of_16_bits(dtype: torch.dtype, oracles: Any, tmp_path: Path) -> None:
    oracle = oracles("llama-grouped")
    made = PeftAdapter(oracle.model, tmp_path, oracle.ids, **ALL)
    tensors = load_file(tmp_path / TENSORS)
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, tmp_path / TENSORS)
    check(oracle, made.loaded(oracle.model, oracle.ids))


def test_experts_that_are_modules(oracles: Any, tmp_path: Path) -> None:
    """As they were before `transformers` 5; `peft` still reads such adapters of Mixtral."""
    oracle = oracles("mixtral")
    made = PeftAdapter(oracle.model, tmp_path, oracle.ids, **SMALL, target_modules=["q_proj"])
    config, tensors = oracle.model.config, load_file(tmp_path / TENSORS)
    sizes = [config.hidden_size, config.intermediate_size]
    for layer, expert in product(range(config.num_hidden_layers), range(config.num_local_experts)):
        for name, (ins, outs) in {"w1": sizes, "w3": sizes, "w2": sizes[::-1]}.items():
            module = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}"
            tensors[f"base_model.model.{module}.lora_A.weight"] = 0.2 * torch.randn(4, ins)
            tensors[f"base_model.model.{module}.lora_B.weight"] = 0.05 * torch.randn(outs, 4)
    save_file(tensors, tmp_path / TENSORS)
    said = json.loads((tmp_path / CONFIG).read_text())
    said["target_modules"] = ["q_proj", "w1", "w2", "w3"]
    (tmp_path / CONFIG).write_text(json.dumps(said))
    check(oracle, made.loaded(oracle.model, oracle.ids))


def test_what_is_of_the_embedding_and_the_head(oracles: Any, tmp_path: Path) -> None:
    """Beside an adapter of them the file has copies of the base model's, which are not kept."""
    oracle = oracles("llama-grouped")
    config = {**SMALL, "target_modules": ["embed_tokens", "lm_head"]}
    made = PeftAdapter(oracle.model, tmp_path, oracle.ids, **config)
    assert any("base_layer" in name for name in load_file(tmp_path / TENSORS))
    adapter = check(oracle, made)
    assert adapter.layers.keys() == {HEAD} and adapter.embedding and not adapter.replaced
    vocab, hidden = oracle.model.config.vocab_size, oracle.model.config.hidden_size
    assert adapter.embedding.a.shape == (4, vocab) and adapter.embedding.b.shape == (hidden, 4)
    parts = [read(oracle.folder, tmp_path, TensorParallel(rank, 2)) for rank in range(2)]
    heads = [part.layers[HEAD][0] for part in parts]
    assert torch.equal(torch.cat([head.b for head in heads if head]), adapter.layers[HEAD][0].b)
    columns = [part.embedding.a for part in parts if part.embedding]
    assert torch.equal(torch.cat(columns, dim=1), adapter.embedding.a)


def test_whole_matrices_of_ranks(oracles: Any, tmp_path: Path) -> None:
    oracle = oracles("llama-grouped")
    config = {**SMALL, **LISTED, "modules_to_save": ["embed_tokens", "lm_head"]}
    PeftAdapter(oracle.model, tmp_path, oracle.ids, **config)
    whole = read(oracle.folder, tmp_path)
    parts = [read(oracle.folder, tmp_path, TensorParallel(rank, 2)) for rank in range(2)]
    for name in (EMBEDDING, HEAD):
        together = torch.cat([part.replaced[name] for part in parts])
        assert torch.equal(together, whole.replaced[name])
