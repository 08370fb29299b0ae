"""Mixtures of experts out of checkpoints: all that files hold, and files that do not hold it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from effort import effort
from families import PROMPT, Oracle
from golden_text import PROMPTS
from paged import PagedModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire import LLM, SamplingParams
from quire.errors import ConfigError, ModelError
from quire.kernels.backend import backend_for
from quire.layers.experts import Experts
from quire.layers.matrix import DenseMatrix
from quire.layers.quantized.gguf import GGUFMatrix
from quire.layers.quantized.matrix import QuantizedMatrix
from quire.layers.router import Router
from quire.layers.tp import TensorParallel
from quire.models.causal_lm import CausalLM
from quire.models.checkpoints.gguf_file import NATIVE_DTYPES, GGUFFile
from quire.models.source import build_model, open_model

CPU = torch.device("cpu")
Tensors = dict[str, Tensor]
OSS, MX = "model.layers.1.mlp.experts", ("blocks", "scales")


def one_more(tensors: Tensors, matrix: str) -> Tensors:
    """The MXFP4 tensors of a matrix with one more expert."""
    stored = {name: tensors[name] for name in (f"{OSS}.{matrix}_{each}" for each in MX)}
    return {name: torch.cat((tensor, tensor[:1])) for name, tensor in stored.items()}


def load(path: Path, tp: TensorParallel = TensorParallel(), **settings: Any) -> CausalLM:  # noqa: B008
    return build_model(open_model(str(path), **settings), torch.float32, CPU, False, tp)


def logits(model: CausalLM, ids: list[int]) -> Tensor:
    return PagedModel(model, backend_for(CPU), block_size=16).step({"a": ids})["a"]


def rewrite(folder: Path, change: Callable[[Tensors], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    stored = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors")


@pytest.mark.parametrize("case", ["qwen3-moe", "mixtral"])
def test_all_experts_of_a_layer_in_one_tensor(case: str, tmp_path: Path) -> None:
    """As `transformers` 5 has them in memory, and may save them."""
    oracle = Oracle(case, tmp_path)

    def fuse(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            del tensors[name]
        own = oracle.model.state_dict()
        tensors.update({name: own[name] for name in own if ".experts." in name})

    rewrite(tmp_path, fuse)
    assert any(
        name.endswith("experts.gate_up_proj") for name, _ in open_model(str(tmp_path)).tensors()
    )
    oracle.check(logits(load(tmp_path), oracle.ids[:PROMPT]), 0)


@pytest.mark.parametrize(
    ("case", "change", "reason"),
    [
        (
            "mixtral",
            lambda t: t.pop("model.layers.1.block_sparse_moe.experts.3.w2.weight"),
            r"missing: model\.layers\.1\.block_sparse_moe\.experts\.3\.w2\.weight\)",
        ),
        (
            "qwen3-moe",
            lambda t: t.update(
                {"model.layers.0.mlp.experts.6.up_proj.weight": torch.zeros(32, 48)}
            ),
            r"unexpected: model\.layers\.0\.mlp\.experts\.6\.up_proj\.weight\)",
        ),
        (
            "qwen3-moe",
            lambda t: t.update({"model.layers.2.mlp.gate.weight": torch.zeros(5, 48)}),
            r"unfit: model\.layers\.2\.mlp\.gate\.weight is \[5, 48\], not \[6, 48\]\)",
        ),
        (
            "qwen2-moe",
            lambda t: t.update(
                {"model.layers.2.mlp.experts.5.down_proj.weight": torch.zeros(48, 31)}
            ),
            r"unfit: .*\.5\.down_proj\.weight is \[48, 31\], not \[48, 32\]\)",
        ),
        (
            "gpt-oss-mxfp4",
            lambda t: t.update({f"{OSS}.down_proj_{k}": t[f"{OSS}.down_proj_{k}"][:5] for k in MX}),
            r"unfit: .*\.down_proj_blocks is of 5 experts, not 6, .*\.down_proj_scales is of 5",
        ),
        (
            "gpt-oss-mxfp4",
            lambda t: t.update(
                {f"{OSS}.gate_up_proj_bias": torch.zeros(7, 256), **one_more(t, "gate_up_proj")}
            ),
            r"unfit: .*\.experts\.gate_up_proj_bias is of 7 experts, not 6, .*_blocks is of 7",
        ),
        (
            "gpt-oss-mxfp4",
            lambda t: t.update({"model.layers.2.mlp.router.weight": torch.zeros(6, 65)}),
            r"unfit: model\.layers\.2\.mlp\.router\.weight is \[6, 65\], not \[6, 64\]\)",
        ),
        (
            "gpt-oss-mxfp4",
            lambda t: t.pop(f"{OSS}.gate_up_proj_scales"),
            r"\(missing: model\.layers\.1\.mlp\.experts\.gate_up_proj_scales\)",
        ),
        (
            "gpt-oss-mxfp4",
            lambda t: t[f"{OSS}.gate_up_proj_scales"][3].fill_(255),
            rf"^{OSS}\.gate_up_proj_scales has scales that are no finite numbers",
        ),
        (
            "gpt-oss-mxfp4",
            lambda t: t.update({f"{OSS}.down_proj_blocks": t[f"{OSS}.down_proj_blocks"][:, 1:]}),
            r"unfit: .*\.down_proj_blocks has \[\d+, 64\] for an expert, not \[\d+, 64\]\)",
        ),
        (
            "gpt-oss",
            lambda t: t.pop(f"{OSS}.gate_up_proj"),
            r"\(missing: model\.layers\.1\.mlp\.experts\.gate_up_proj\)",
        ),
        (
            "gpt-oss",
            lambda t: t.update({f"{OSS}.gate_up_proj": torch.zeros(6, 48, 158)}),
            r"unfit: .*\.experts\.gate_up_proj has \[158, 48\] for an expert, not \[160, 48\]\)",
        ),
    ],
    ids=[
        "missing",
        "one-more",
        "router",
        "shape",
        "mxfp4-missing",
        "mxfp4-one-more",
        "mxfp4-router",
        "mxfp4-scales",
        "mxfp4-no-number",
        "mxfp4-shape",
        "transposed-missing",
        "transposed-shape",
    ],
)
def test_tensors_that_do_not_fit_are_named(
    case: str, change: Callable[[Tensors], None], reason: str, tmp_path: Path
) -> None:
    oracle = Oracle(case, tmp_path)
    rewrite(tmp_path, change)
    for tp in (TensorParallel(), TensorParallel(1, 2, expert_parallel=True)):
        with pytest.raises(ModelError, match=reason):
            load(oracle.folder, tp)


def test_a_rank_reads_its_own_experts_alone(tmp_path: Path) -> None:
    Oracle("mixtral", tmp_path, hidden_size=192, intermediate_size=256)
    read = []
    for expert_parallel in (False, True):
        source = open_model(str(tmp_path))
        tp = TensorParallel(1, 2, expert_parallel=expert_parallel)
        build_model(source, torch.float32, CPU, False, tp)
        read.append(source.bytes_read)  # type: ignore[attr-defined]
    assert read[0] == read[1]


def test_a_dense_model_has_no_experts_to_deal_out() -> None:
    with pytest.raises(ConfigError, match="enable_expert_parallel is for mixtures of experts"):
        LLM("qwen3-0.6b", load_format="dummy", device="cpu", enable_expert_parallel=True)


@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
def test_quantised_while_loading(quantization: str, tmp_path: Path) -> None:
    """All but the router, which decides."""
    oracle = Oracle("qwen2-moe", tmp_path)
    model = load(tmp_path, quantization=quantization)
    layers = [module for module in model.modules() if isinstance(module, Experts)]
    assert len(layers) == 3
    for each in layers:
        assert isinstance(each.gate_up, QuantizedMatrix) and isinstance(each.down, QuantizedMatrix)
    routers = [module for module in model.modules() if isinstance(module, Router)]
    own = oracle.model.state_dict()
    for number, router in enumerate(routers):
        assert torch.equal(router.weight, own[f"model.layers.{number}.mlp.gate.weight"])
    assert logits(model, oracle.ids).isfinite().all()


# --- the demo model as a mixture ----------------------------------------------------------------

COPIES, TOP_K = 8, 2


def write_as_experts(dense: Path, target: Path) -> Path:
    """A GGUF file with a random router, and of each MLP as many copies as there are experts."""
    file = GGUFFile(dense)
    writer = gguf.GGUFWriter(target, "llama")
    add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32}
    for key, value in file.metadata.items():
        if key != "general.architecture":
            kind = writer.add_array if isinstance(value, list) else add.get(type(value))
            (kind or writer.add_float32)(key, value)
    writer.add_expert_count(COPIES)
    writer.add_expert_used_count(TOP_K)
    rng = np.random.default_rng(0)
    for name, info in file.tensors.items():
        native = info.type.name in NATIVE_DTYPES
        stored = (file.tensor(name) if native else file.rows(name))[()].numpy()
        if name.split(".")[-2] in ("ffn_gate", "ffn_up", "ffn_down"):
            name = name.replace(".weight", "_exps.weight")
            stored = np.broadcast_to(stored, (COPIES, *stored.shape))
        writer.add_tensor(name, np.ascontiguousarray(stored), raw_dtype=info.type)
        if name.endswith("ffn_norm.weight"):
            router = rng.standard_normal((COPIES, len(stored)), dtype=np.float32)
            writer.add_tensor(name.replace("ffn_norm", "ffn_gate_inp"), router)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def test_the_demo_model_made_into_experts_answers_as_before(
    smollm2_path: Path, tmp_path: Path
) -> None:
    """As they are stored; in long tests all in float32, where rounding turns no near tie."""
    path = write_as_experts(smollm2_path, tmp_path / "experts.gguf")
    settings = {"dtype": effort("auto", "float32"), "device": "cpu", "num_blocks": 300}
    params = SamplingParams(temperature=0, max_tokens=effort(5, 24), ignore_eos=True)
    prompts = [prompt["ids"] for prompt in PROMPTS[6 : effort(8, 26)]]
    texts = []
    for model in (smollm2_path, path):
        with LLM(str(model), use_tqdm=False, **settings) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            texts.append([output.outputs[0].token_ids for output in outputs])
            loaded = llm.engine.runner.model
    experts = [module for module in loaded.modules() if isinstance(module, Experts)]
    kind = effort(GGUFMatrix, DenseMatrix)
    assert len(experts) == 30 and all(isinstance(each.down, kind) for each in experts)
    assert texts[0] == texts[1]
