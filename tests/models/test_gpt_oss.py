"""gpt-oss out of the files that people have: MXFP4 in safetensors and in GGUF, and 16 bits."""

from __future__ import annotations

from pathlib import Path
from shutil import copytree

import gguf
import numpy as np
import pytest
import torch
from families import PROMPT, Oracle
from gguf import GGMLQuantizationType as Type
from paged import PagedModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire import LLM, SamplingParams
from quire.errors import ModelError
from quire.kernels.backend import backend_for
from quire.kernels.four_bits import FourBitExperts
from quire.layers.experts import Experts, split
from quire.layers.matrix import DenseMatrix
from quire.layers.quantized.fp4 import Mxfp4Matrix
from quire.layers.quantized.gguf import GGUFMatrix
from quire.layers.quantized.mxfp4_blocks import Mxfp4BlocksMatrix
from quire.layers.tp import TensorParallel
from quire.layers.weights import room_needed
from quire.models.causal_lm import CausalLM
from quire.models.checkpoints.dummy import SHAPES
from quire.models.checkpoints.gguf import GGUFSource
from quire.models.hf_config import read_hf_config
from quire.models.source import build_model, open_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """With the limit that GGUF files leave unsaid."""
    return Oracle("gpt-oss-mxfp4", tmp_path_factory.mktemp("gpt-oss"), swiglu_limit=7.0)


def logits(model: CausalLM, ids: list[int]) -> Tensor:
    return PagedModel(model, backend_for(CPU), block_size=16).step({"a": ids})["a"]


def experts_of(model: CausalLM) -> list[Experts]:
    return [module for module in model.modules() if isinstance(module, Experts)]


def as_gguf(blocks: Tensor, scales: Tensor) -> np.ndarray:
    """Rows of GGUF's blocks: a byte of scale, then number `i` beside number `i + 16`."""
    pairs = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    first, second = pairs.chunk(2, dim=-1)
    whole = torch.cat((scales[..., None], first | (second << 4)), dim=-1)
    return np.ascontiguousarray(whole.flatten(-2).numpy())


def write_gguf(oracle: Oracle, path: Path) -> Path:
    """As llama.cpp's converter does."""
    config = oracle.model.config
    writer = gguf.GGUFWriter(path, "gpt-oss")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_sliding_window(config.sliding_window)
    rope = config.rope_parameters
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT_OSS, config.num_hidden_layers)
    tensors = load_file(oracle.folder / "model.safetensors")

    def add(name: str, numbers: np.ndarray, type_: Type = Type.F32) -> None:
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        writer.add_tensor(found, np.ascontiguousarray(numbers), raw_dtype=type_)

    for name, tensor in tensors.items():
        stem, _, part = name.rpartition(".")
        if name.endswith("_blocks"):
            matrix = name.removesuffix("_blocks")
            rows = as_gguf(tensor, tensors[f"{matrix}_scales"])
            halves = {"gate_proj": rows[:, 0::2], "up_proj": rows[:, 1::2]}
            parts = halves if part == "gate_up_proj_blocks" else {"down_proj": rows}
            for each, some in parts.items():
                add(f"{stem}.{each}.weight", some, Type.MXFP4)
        elif part == "gate_up_proj_bias":
            add(f"{stem}.gate_proj.bias", tensor[:, 0::2].numpy())
            add(f"{stem}.up_proj.bias", tensor[:, 1::2].numpy())
        elif part == "down_proj_bias":
            add(f"{stem}.down_proj.bias", tensor.numpy())
        elif not name.endswith("_scales"):
            add(f"{name}.weight" if part == "sinks" else name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("keeps_types", [False, True])
def test_a_gguf_file(oracle: Oracle, keeps_types: bool, tmp_path: Path) -> None:
    """On a CPU experts stay in MXFP4, and activations are rounded to 16 bits."""
    source = GGUFSource(write_gguf(oracle, tmp_path / "x.gguf"), keeps_types)
    model = build_model(source, torch.float32, CPU, False)
    kind = GGUFMatrix if keeps_types else DenseMatrix
    for experts in experts_of(model):
        assert isinstance(experts.gate_up, kind) and isinstance(experts.down, kind)
    found = logits(model, oracle.ids[:PROMPT])
    if keeps_types:
        torch.testing.assert_close(found, oracle.logits[:PROMPT], atol=5e-3, rtol=0)
    else:
        oracle.check(found, 0)


@pytest.mark.parametrize(("ranks", "expert_parallel"), [(1, False), (2, False), (2, True)])
def test_a_gguf_file_has_a_checkpoints_matrices_for_a_gpu(
    oracle: Oracle, ranks: int, expert_parallel: bool, tmp_path: Path
) -> None:
    """Which grouped products multiply; here they are dequantised."""
    files = GGUFSource(write_gguf(oracle, tmp_path / "x.gguf"), True, on_gpu=True)
    for rank in range(ranks):
        tp = TensorParallel(rank, ranks, expert_parallel=expert_parallel)
        built = [
            build_model(source, torch.float32, CPU, False, tp)
            for source in (files, open_model(str(oracle.folder)))
        ]
        for ours, right in zip(*map(experts_of, built), strict=True):
            for matrix, wanted in ((ours.gate_up, right.gate_up), (ours.down, right.down)):
                assert isinstance(matrix, Mxfp4Matrix)
                assert torch.equal(matrix.dense(), wanted.dense())
                assert room_needed(matrix, torch.float32) == room_needed(wanted, torch.float32)
                for part in split(matrix, len(ours.mine)):
                    assert isinstance(part, Mxfp4Matrix)
                matrix.lay_in_quarters(split(matrix, len(ours.mine)))
                assert isinstance(matrix.as_experts(len(ours.mine)), FourBitExperts)
                assert torch.equal(matrix.dense(), wanted.dense())


@pytest.mark.gpu
def test_a_gguf_file_on_a_gpu(oracle: Oracle, tmp_path: Path) -> None:
    """Answers as the checkpoint does, by the same kernels."""
    path, prompt = write_gguf(oracle, tmp_path / "x.gguf"), oracle.ids[:PROMPT]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
    found = []
    for name in (str(path), str(oracle.folder)):
        with LLM(name, device="cuda", num_blocks=64, use_tqdm=False) as llm:
            for experts in experts_of(llm.engine.runner.model):
                assert experts.mlps.gate_up.packed is not None, "no grouped product"
            [output] = llm.generate([prompt], params, use_tqdm=False)
            found.append(output.outputs[0].token_ids)
    assert found[0] == found[1]


@pytest.mark.parametrize("keeps_types", [False, True])
def test_a_checkpoint_stays_in_four_bits(oracle: Oracle, keeps_types: bool) -> None:
    """With `keeps_types` in the order of the CPU's kernels: the same numbers."""
    source = open_model(str(oracle.folder), keeps_types=keeps_types)
    model = build_model(source, torch.float32, CPU, False)
    kind = Mxfp4BlocksMatrix if keeps_types else Mxfp4Matrix
    own = oracle.model.state_dict()
    for i, experts in enumerate(experts_of(model)):
        assert isinstance(experts.gate_up, kind) and isinstance(experts.down, kind)
        stored = [own[f"model.layers.{i}.mlp.experts.{part}_proj"] for part in ("gate_up", "down")]
        both, down = (tensor.mT.float() for tensor in stored)
        wanted = torch.cat((both[:, 0::2], both[:, 1::2]), dim=1)
        assert torch.equal(experts.gate_up.dense(), wanted.flatten(0, 1))
        assert torch.equal(experts.down.dense(), down.flatten(0, 1))
        held = room_needed(experts.gate_up, torch.float32)
        assert held == wanted.numel() * 17 // 32
    found = logits(model, oracle.ids[:PROMPT])
    torch.testing.assert_close(found, oracle.logits[:PROMPT], atol=5e-3, rtol=0)


def test_sinks_that_are_no_numbers_are_refused(oracle: Oracle, tmp_path: Path) -> None:
    copytree(oracle.folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(oracle.folder / "model.safetensors")
    tensors["model.layers.1.self_attn.sinks"][0] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"^model\.layers\.1\.\S+sinks has numbers that are no"):
        build_model(open_model(str(tmp_path)), torch.float32, CPU, False)


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_ranks_have_their_part_in_blocks(oracle: Oracle, expert_parallel: bool) -> None:
    source = open_model(str(oracle.folder), keeps_types=True)
    whole = build_model(source, torch.float32, CPU, False)
    for rank in range(2):
        tp = TensorParallel(rank, 2, expert_parallel=expert_parallel)
        part = build_model(source, torch.float32, CPU, False, tp)
        for ours, all_of_it in zip(experts_of(part), experts_of(whole), strict=True):
            shape = (all_of_it.count, 2, all_of_it.features, -1)
            numbers = all_of_it.gate_up.dense().view(shape)[list(ours.mine)]
            numbers = numbers[:, :, list(ours.part)]
            assert torch.equal(ours.gate_up.dense(), numbers.flatten(0, 2))
            numbers = all_of_it.down.dense().unflatten(0, (all_of_it.count, -1))[list(ours.mine)]
            numbers = numbers[..., list(ours.part)]
            assert torch.equal(ours.down.dense(), numbers.flatten(0, 1))


def test_its_shapes() -> None:
    """As the published configs have them, where nothing but this is said."""
    config = read_hf_config(SHAPES["gpt-oss-20b"])
    assert config.windows == (128, None) * 12
    assert (config.rope.factor, config.rope.truncate, config.rope.theta) == (32.0, False, 150_000.0)
    assert config.gate.limit == 7.0 and config.attention_bias  # type: ignore[attr-defined]


def test_an_engine_on_a_cpu_multiplies_experts_as_they_are_stored(oracle: Oracle) -> None:
    with LLM(str(oracle.folder), device="cpu", num_blocks=64, use_tqdm=False) as llm:
        for experts in experts_of(llm.engine.runner.model):
            assert isinstance(experts.down, Mxfp4BlocksMatrix)
        prompt = oracle.ids[:PROMPT]
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        [output] = llm.generate([prompt], params, use_tqdm=False)
    best = oracle.logits[PROMPT - 1].max()
    assert oracle.logits[PROMPT - 1][output.outputs[0].token_ids[0]] > best - 0.1


@pytest.mark.parametrize("case", ["gpt-oss", "gpt-oss-mxfp4"])
def test_each_byte_is_read_once(case: str, tmp_path: Path) -> None:
    """Rows that take turns come out of one tensor, and out of a transposed one."""
    Oracle(case, tmp_path)
    source = open_model(str(tmp_path))
    build_model(source, torch.float32, CPU, False)
    stored = load_file(tmp_path / "model.safetensors").values()
    assert source.bytes_read == sum(tensor.nbytes for tensor in stored)  # type: ignore[attr-defined]


def test_random_weights_have_its_formats(oracle: Oracle) -> None:
    model = build_model(open_model(str(oracle.folder), "dummy"), torch.float32, CPU, False)
    for experts in experts_of(model):
        assert isinstance(experts.gate_up, Mxfp4Matrix)
        assert experts.gate_up.dense().std() == pytest.approx(64**-0.5, rel=0.1)
    assert logits(model, oracle.ids[:PROMPT]).isfinite().all()
