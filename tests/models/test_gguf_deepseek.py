"""DeepSeek's models as llama.cpp's converter writes them: logits are those of `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from families import Oracle
from gguf import GGMLQuantizationType as Type
from gguf.quants import quantize
from paged import PagedModel

from quire.errors import ModelError
from quire.kernels.backend import backend_for
from quire.layers.formats import AllDense
from quire.models.checkpoints.gguf import GGUFSource
from quire.models.source import build_model, open_model

CPU = torch.device("cpu")


def write(path: Path, model: Any, apart: bool, kept: Type = Type.F32) -> Path:
    """`apart`: parts of kv_b are two tensors, and sizes are those of latents; else as in old files.
    Matrices whose rows are blocks of `kept` are of that type, routers too."""
    config = model.config
    writer = gguf.GGUFWriter(path, "deepseek2")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    rank, nope = config.kv_lora_rank, config.qk_nope_head_dim
    rope, values = config.qk_rope_head_dim, config.v_head_dim
    writer.add_kv_lora_rank(rank)
    writer.add_head_count_kv(1 if apart else config.num_attention_heads)
    writer.add_key_length(rank + rope if apart else nope + rope)
    writer.add_value_length(rank if apart else values)
    if apart:
        writer.add_key_length_mla(nope + rope)
        writer.add_value_length_mla(values)
    writer.add_rope_dimension_count(rope)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    if config.model_type == "deepseek_v3":
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    else:
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)
    settings = config.rope_parameters
    writer.add_rope_freq_base(settings["rope_theta"])
    if settings["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(settings["factor"])
        writer.add_rope_scaling_orig_ctx_len(settings["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * settings["mscale_all_dim"])
    for name, tensor in parts(model, apart).items():
        if tensor.dim() > 1 and tensor.shape[-1] % 32 == 0:
            writer.add_tensor(name, quantize(tensor.numpy(), kept), raw_dtype=kept)
        else:
            writer.add_tensor(name, tensor.numpy())
    for finish in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{finish}_to_file")()
    writer.close()
    return path


def parts(model: Any, apart: bool) -> dict[str, torch.Tensor]:
    """All tensors by their names in GGUF."""
    config = model.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.DEEPSEEK2, config.num_hidden_layers)
    found = {}
    for name, tensor in model.state_dict().items():
        tensor = tensor.detach()
        if name.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, dim=1)
            stem = name.removesuffix("gate_up_proj")
            found |= {f"{stem}gate_proj.weight": gate, f"{stem}up_proj.weight": up}
        elif apart and name.endswith("kv_b_proj.weight"):
            by_head = tensor.unflatten(0, (config.num_attention_heads, -1))
            k, v = by_head.split((config.qk_nope_head_dim, config.v_head_dim), dim=1)
            found[name.replace("kv_b", "k_b")] = k.transpose(1, 2)
            found[name.replace("kv_b", "v_b")] = v
        elif name.endswith("e_score_correction_bias"):
            found[name.replace("e_score_correction_bias", "e_score_correction.bias")] = tensor
        else:
            found[name if name.endswith("weight") else f"{name}.weight"] = tensor
    named = {names.get_name(n, try_suffixes=(".weight", ".bias")): t for n, t in found.items()}
    assert None not in named
    return {name: tensor.contiguous() for name, tensor in named.items()}


@pytest.mark.parametrize("apart", [True, False], ids=["k-and-v-apart", "together"])
@pytest.mark.parametrize("case", ["deepseek-v2-lite", "deepseek-v3"])
def test_logits(case: str, apart: bool, tmp_path: Path) -> None:
    changes = {}
    if case == "deepseek-v2-lite":  # files have one number for both
        yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0}
        both = {"mscale": 0.7, "mscale_all_dim": 0.7, "original_max_position_embeddings": 32}
        changes["rope_parameters"] = {**yarn, **both}
    oracle = Oracle(case, tmp_path / "theirs", **changes)
    path = write(tmp_path / "x.gguf", oracle.model, apart)
    model = build_model(open_model(str(path)), torch.float32, CPU, progress=False)
    paged = PagedModel(model, backend_for(CPU))
    oracle.check(paged.step({"a": oracle.ids[:30]})["a"], 0)
    oracle.check(paged.step({"a": oracle.ids[30:31]})["a"], 30)


def test_what_a_file_does_not_say_it_has_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = Oracle(
        "deepseek-v3", tmp_path / "theirs", norm_topk_prob=False, routed_scaling_factor=1.0
    )
    for key in ("norm", "scale"):
        monkeypatch.setattr(gguf.GGUFWriter, f"add_expert_weights_{key}", lambda *_: None)
    path = write(tmp_path / "x.gguf", oracle.model, apart=True)
    model = build_model(open_model(str(path)), torch.float32, CPU, progress=False)
    oracle.check(PagedModel(model, backend_for(CPU)).step({"a": oracle.ids[:30]})["a"], 0)


def test_a_mixture_that_does_not_say_how_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = Oracle("deepseek-v3", tmp_path / "theirs")
    monkeypatch.setattr(gguf.GGUFWriter, "add_expert_count", lambda *_: None)
    path = write(tmp_path / "x.gguf", oracle.model, apart=True)
    with pytest.raises(ModelError, match=r"how many experts it has \(deepseek2\.expert_count\)"):
        open_model(str(path))


def test_types_that_are_kept(tmp_path: Path) -> None:
    """Matrices stay as the file has them, but for kv_b, which is multiplied in several ways, and
    routers, which no format quantises."""
    sizes = {"hidden_size": 96, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 32}
    oracle = Oracle("deepseek-v3", tmp_path / "theirs", **sizes)
    path = write(tmp_path / "x.gguf", oracle.model, apart=True, kept=Type.Q8_0)
    logits = []
    for keeps_types in (True, False):
        source = GGUFSource(path, keeps_types)
        assert isinstance(source.config.formats, AllDense) != keeps_types
        model = build_model(source, torch.float32, CPU, progress=False)
        paged = PagedModel(model, backend_for(CPU))
        logits.append(paged.step({"a": oracle.ids[:30]})["a"])
    torch.testing.assert_close(*logits, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("part", ["attn_k_b", "attn_v_b"])
@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor[0],
        lambda tensor: tensor[None],
        lambda tensor: tensor[1:],
        lambda tensor: tensor[:, :3, :3],
        lambda tensor: None,
    ],
    ids=["two", "four", "fewer-heads", "smaller", "missing"],
)
def test_parts_of_heads_that_do_not_fit(
    part: str, change: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = Oracle("deepseek-v3", tmp_path / "theirs")
    name = f"blk.1.{part}.weight"
    tensors = parts(oracle.model, apart=True)
    changed = change(tensors.pop(name))
    if changed is not None:
        tensors[name] = changed.contiguous()
    monkeypatch.setitem(globals(), "parts", lambda *_: tensors)
    path = write(tmp_path / "x.gguf", oracle.model, apart=True)
    with pytest.raises(ModelError, match=rf"blk\.1\.{part}|kv_b") as error:
        build_model(open_model(str(path)), torch.float32, CPU, progress=False)
    assert "\n" not in str(error.value)
