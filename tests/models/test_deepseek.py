"""What only DeepSeek's families have: prompts expanded, a layer that guesses, bad configs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import GROUPED, LATENT, Oracle
from paged import PagedModel
from quantized_models import METHODS, Method, QuantizedModel
from safetensors.torch import load_file, save_file
from tiny_ranks import ranks_in_threads

from quire import LLM, SamplingParams
from quire.errors import ConfigError, ModelError
from quire.kernels.backend import backend_for
from quire.kernels.fp8 import dequantise_groups, quantise_groups
from quire.kernels.reference import ReferenceBackend
from quire.kv_groups import KVGroup, KVStream
from quire.layers import latent
from quire.layers.matrix import DenseMatrix
from quire.layers.quantized.matrix import QuantizedMatrix
from quire.layers.tp import SINGLE
from quire.models.quantization.making import quantized_while_loading
from quire.models.source import build_model, open_model, shapes

CPU = torch.device("cpu")
CASES = ["deepseek-v2", "deepseek-v2-lite", "deepseek-v3"]


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda case: Oracle(case, tmp_path_factory.mktemp(case)))


def load(folder: Path) -> Any:
    return build_model(open_model(str(folder)), torch.float32, CPU, progress=False)


@pytest.mark.parametrize("room", [1, 1 << 28], ids=["a-head-at-once", "all-heads"])
@pytest.mark.parametrize("backend", [backend_for(CPU), ReferenceBackend()], ids=lambda b: b.name)
@pytest.mark.parametrize("case", CASES)
def test_expanded_chunks(case, backend, room, oracles, monkeypatch):
    """Chunks above and below the limit, alone and beside each other, behind what is cached."""
    monkeypatch.setattr(latent, "MOST_ABSORBED", 5)
    monkeypatch.setattr(latent, "ROOM_BYTES", room)
    oracle = oracles(case)
    paged = PagedModel(load(oracle.folder), backend, block_size=4)
    done = {"a": 0, "b": 0, "c": 0}
    for sizes in ((17, 9, 6), (1, 12, 3), (13, 1, 20), (2, 5, 1)):
        work = {
            name: oracle.ids[done[name] : done[name] + size]
            for name, size in zip(done, sizes, strict=True)
        }
        for name, logits in paged.step(work).items():
            oracle.check(logits, done[name])
            done[name] += len(logits)


def test_one_stream_for_all_heads(oracles):
    groups = load(oracles("deepseek-v2").folder).kv_groups(SINGLE)
    assert groups == (KVGroup((0, 1, 2), (KVStream(1, 20, rank=16),)),)


def test_v2_turns_neighbours_whatever_its_config_says(oracles, tmp_path):
    """`rope_interleave` is a field of V3 alone."""
    oracle, says_halves = oracles("deepseek-v2"), {"rope_interleave": False}
    model = load(rewritten(oracle.folder, tmp_path, says_halves))
    oracle.check(PagedModel(model, backend_for(CPU), 4).step({"a": oracle.ids[:20]})["a"], 0)
    v3 = rewritten(oracles("deepseek-v3").folder, tmp_path, says_halves)
    assert not open_model(str(v3)).config.interleaved


class AllMatrices(Method):
    """DeepSeek's own checkpoints: `kv_a_proj_with_mqa` is quantised, too."""

    def of(self, name):
        return super().of(name.removesuffix("_with_mqa"))


@pytest.mark.parametrize("size", [(8, 4), (64, 64), (128, 64)], ids=str)
def test_blocks_of_fp8(size, tmp_path):
    """128 x 128: rows that turn change places within a block, and kv_b is dequantised."""
    method = AllMatrices(**vars(METHODS["fp8-blocks"]))
    sizes = {"qk_nope_head_dim": size[0], "qk_rope_head_dim": size[1], "num_key_value_heads": 4}
    sizes |= {"kv_lora_rank": 128, "q_lora_rank": 128, "v_head_dim": 64, "head_dim": size[1]}
    sizes |= {"moe_intermediate_size": 128, "num_hidden_layers": 2}
    made = QuantizedModel(method, tmp_path, "DeepseekV3", **{**LATENT, **GROUPED, **sizes})
    model = load(tmp_path)
    assert isinstance(model.model.layers[1].self_attn.up.matrix, DenseMatrix)
    ids = [5, 17, 99, 3, 42, 130, 0, 77, 8, 21]
    paged = PagedModel(model, backend_for(CPU), block_size=4)
    found = torch.cat([paged.step({"a": ids[:7]})["a"], paged.step({"a": ids[7:]})["a"]])
    right = made.logits(ids)
    assert (found - right).abs().max() < 1e-3 * right.abs().max()


def test_quantised_while_loading(oracles):
    """But for kv_b, which would have to be dequantised again."""
    config = open_model(str(oracles("deepseek-v3").folder)).config
    config = quantized_while_loading(config, "a model", "int8")
    attention = shapes(config).model.layers[1].self_attn
    assert isinstance(attention.up.matrix, DenseMatrix)
    assert isinstance(attention.o_proj.matrix, QuantizedMatrix)


def rewritten(source: Path, folder: Path, fields: dict[str, Any], *more: str) -> Path:
    """A checkpoint whose config has other fields (None: not those), and that has more tensors."""
    raw = json.loads((source / "config.json").read_text()) | fields
    raw = {key: value for key, value in raw.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = load_file(source / "model.safetensors")
    tensors |= {name: torch.zeros(2, 3) for name in more}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


MTP = ("model.layers.3.eh_proj.weight", "model.layers.3.mlp.down_proj.weight")
LEFT_OUT = "The MTP layer (2 tensors) is not loaded"


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (1, f"{LEFT_OUT}; speculative=mtp drafts with it."),
        (None, f"{LEFT_OUT}; speculative=mtp drafts with it."),  # what transformers takes it for
        (0, f"{LEFT_OUT}."),
    ],
)
def test_the_layer_that_guesses_is_left_out(count, said, oracles, tmp_path, caplog):
    fields = {"num_nextn_predict_layers": count}
    rewritten(oracles("deepseek-v3").folder, tmp_path, fields, *MTP)
    with caplog.at_level("WARNING", "quire"):
        load(tmp_path)
    assert [record.getMessage() for record in caplog.records] == [said]


@pytest.mark.parametrize("count", [0, 1, None])
def test_layers_that_the_config_does_not_count_are_no_mtp_layers(count, oracles, tmp_path):
    """Without them the model would answer, and wrongly."""
    fields = {"num_hidden_layers": 2, "num_nextn_predict_layers": count}
    rewritten(oracles("deepseek-v3").folder, tmp_path, fields)
    with pytest.raises(ModelError, match=r"unexpected: model\.layers\.2\.input_layernorm\.weight"):
        load(tmp_path)


@pytest.mark.parametrize(
    "name", ["model.layers.77.foo.weight", "model.layers.4.eh_proj.weight", "model.layers.3.a.b"]
)
def test_tensors_of_no_layer_are_refused(name, oracles, tmp_path):
    rewritten(oracles("deepseek-v3").folder, tmp_path, {}, name)
    with pytest.raises(ModelError, match=f"unexpected: {re.escape(name)}"):
        load(tmp_path)


@pytest.mark.parametrize("ending", ["weight", "e_score_correction_bias"])
def test_a_router_of_what_is_not_a_number_is_refused_by_name(ending, oracles, tmp_path):
    """It would choose some experts, and answer."""
    folder, name = oracles("deepseek-v3").folder, f"model.layers.2.mlp.gate.{ending}"
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(-1)[3] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=f"^{re.escape(name)} has numbers that are no finite"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"kv_lora_rank": 0}, "kv_lora_rank"),
        ({"topk_method": "noaux_tc"}, "topk_method"),
        ({"topk_method": "group_limited_greedy", "n_group": 3}, "n_group"),
        (
            {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 2},
            "3 experts from 2 groups of 1",
        ),
        ({"num_experts_per_tok": 9}, "9 of 8 experts"),
        ({"qk_rope_head_dim": 5, "qk_nope_head_dim": 7}, "qk_rope_head_dim=5, which cannot be rot"),
    ],
)
def test_bad_configs(changes, said, oracles, tmp_path):
    check_refused("deepseek-v2", changes, said, oracles, tmp_path)


def test_a_group_that_is_too_small_for_its_score(oracles, tmp_path):
    groups = {"n_group": 8, "topk_group": 4}
    check_refused("deepseek-v3", groups, "by the 2 best of each", oracles, tmp_path)


def check_refused(case, changes, said, oracles, tmp_path):
    raw = json.loads((oracles(case).folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, **changes}))
    with pytest.raises(ModelError, match=said):
        open_model(str(tmp_path))


def test_latents_in_fp8(oracles, tmp_path):
    """As in a model of `transformers` that rounds them alike, whatever happens to them."""
    oracle, folder = Oracle("deepseek-v3", tmp_path), str(tmp_path / "ssd")
    prompt, other = oracle.ids[:50], oracle.ids[20:45]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=0)
    unscored = replace(params, prompt_logprobs=None)
    basics = {"dtype": "float32", "device": "cpu", "block_size": 4, "num_blocks": 60}
    cases = {
        "plain": {"kv_cache_dtype": "auto"},
        "cold": {"ssd_cache_dir": folder, "ssd_cache_bytes": "8MiB"},
        "restored": {"ssd_cache_dir": folder, "ssd_cache_bytes": "8MiB"},
        "in chunks": {"max_num_batched_tokens": 7},
        "on two ranks": {"tensor_parallel_size": 2},
    }
    texts, scores = {}, {}
    for case, settings in cases.items():
        settings = {**basics, "kv_cache_dtype": "fp8"} | settings
        with ranks_in_threads(), LLM(str(oracle.folder), use_tqdm=False, **settings) as llm:
            if case == "restored":
                [output] = llm.generate([prompt], unscored, use_tqdm=False)
                assert output.cached_tokens_by_tier["ssd"] >= 44
            else:
                output, _ = llm.generate([prompt, other], params, use_tqdm=False)
                [again] = llm.generate([prompt], unscored, use_tqdm=False)
                assert again.outputs[0].token_ids == output.outputs[0].token_ids
                scored = zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
                scores[case] = [each[token].logprob for each, token in scored]
            texts[case] = output.outputs[0].token_ids
            token_bytes = 4 * 20 if case == "plain" else 16 + 4 + 4 * 4  # values, scale, rotated
            assert llm.engine.observed.block_bytes == 3 * 4 * token_bytes
    rounded = [texts[case] for case in cases if case != "plain"]
    assert rounded == rounded[:1] * len(rounded)
    expected = {"plain": scores_of(oracle.model, prompt)}
    for layer in oracle.model.model.layers:  # where latents come from
        layer.self_attn.kv_a_layernorm.register_forward_hook(lambda _, __, out: as_fp8(out))
    expected["cold"] = expected["in chunks"] = scores_of(oracle.model, prompt)
    assert np.abs(np.subtract(expected["cold"], expected["plain"])).mean() > 0.01
    for case, wanted in expected.items():
        assert np.median(np.abs(np.subtract(scores[case], wanted))) < 1e-4


@pytest.mark.parametrize(
    "shape",
    [
        {"qk_nope_head_dim": 7},
        {"qk_nope_head_dim": 7, "v_head_dim": 9},
        {"num_attention_heads": 16, "num_key_value_heads": 16},  # of 48 / 16 features
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", [backend_for(CPU), ReferenceBackend()], ids=lambda b: b.name)
def test_what_never_turns_may_be_odd(shape, backend, tmp_path, monkeypatch):
    """Absorbed and expanded, and where no `head_dim` is said."""
    monkeypatch.setattr(latent, "MOST_ABSORBED", 5)
    oracle = Oracle("deepseek-v3", tmp_path, **shape)
    model = load(rewritten(tmp_path, tmp_path, {"head_dim": None}))
    paged = PagedModel(model, backend, block_size=4)
    for start, end in ((0, 4), (4, 17), (17, 18)):
        oracle.check(paged.step({"a": oracle.ids[start:end]})["a"], start)


@pytest.mark.parametrize("rank", [17, 18])
def test_ragged_latents_are_refused_in_fp8(rank, oracles, tmp_path):
    """Before a tensor is looked at: there are none."""
    raw = json.loads((oracles("deepseek-v3").folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "kv_lora_rank": rank}))
    settings = {"load_format": "dummy", "device": "cpu", "kv_cache_dtype": "fp8"}
    with pytest.raises(ConfigError, match=f"the model has kv_lora_rank={rank}; leave it"):
        LLM(str(tmp_path), use_tqdm=False, **settings)


def as_fp8(latents):
    return dequantise_groups(*quantise_groups(latents))


@torch.no_grad()
def scores_of(model, ids):
    """The log-probability of each token but the first."""
    logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return logprobs[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].numpy()
