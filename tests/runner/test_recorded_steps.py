"""Decodes of a CPU from recordings: the same numbers as without, whatever comes between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from tiny_adapters import adapters
from tiny_gguf import write_gguf
from tiny_llm import write_config

from quire import LLM, LoRARequest, SamplingParams
from quire.kernels import linear
from quire.layers.quantized import gguf as gguf_matrices
from quire.models.hf_config import read_hf_config
from quire.models.source import shapes
from quire.ranks import rank_model
from quire.runner import device, recorded_steps
from quire.runner.attention_clock import AttentionClock

pytest.importorskip("numba")

from quire.kernels.numba.recording import Recording

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
SETTINGS: dict[str, Any] = {"device": "cpu", "block_size": 4, "num_blocks": 300, "use_tqdm": False}


@pytest.fixture(autouse=True)
def _float32_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (device, gguf_matrices):
        monkeypatch.setattr(module, "is_made_for_bfloat16", lambda: False)


@pytest.fixture(
    scope="module", params=[("Llama", Type.Q4_0), ("Qwen3", Type.Q4_0), ("Qwen3", Type.BF16)]
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return written(tmp_path_factory.mktemp("model"), *request.param)


def written(
    folder: Path, name: str, type_: Type, other_types: dict[str, Type] | None = None
) -> str:
    torch.manual_seed(5)
    raw = {"architectures": [f"{name}ForCausalLM"], **SHAPE}
    weights = shapes(read_hf_config(raw)).weights()
    tensors = {weight.name: 0.2 * torch.randn(weight.shape) for weight in weights}
    return str(write_gguf(folder / "model.gguf", raw, tensors, type_, other_types))


def answers(
    llm: LLM, counts: list[int], loras: list[LoRARequest | None] | None = None
) -> list[list[tuple[int, float]]]:
    """Of prompts with several lengths, which end one after another."""
    prompts = [[(3 * i + 7 * j) % 96 for j in range(1 + 9 * i)] for i in range(len(counts))]
    params = [
        SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, logprobs=0)
        for count in counts
    ]
    found = []
    for output in llm.generate(prompts, params, lora_request=loras, use_tqdm=False):
        [best] = output.outputs
        assert best.logprobs is not None
        steps = zip(best.token_ids, best.logprobs, strict=True)
        found.append([(token, logprobs[token].logprob) for token, logprobs in steps])
    return found


@pytest.mark.parametrize("threads", [1, 2])
def test_answers_are_those_of_steps_that_are_not_recorded(
    model: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded_steps, "FIRST_ROOM", 16)  # which some outgrow, once and twice
    monkeypatch.setattr(recorded_steps, "MOST_RECORDED", 3)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with LLM(model, **SETTINGS) as llm, LLM(model, enforce_eager=True, **SETTINGS) as eager:
            assert eager.engine.runner.recorded is None
            for counts in ([40], [5, 9, 30, 3, 3], [40]):
                assert answers(llm, counts) == answers(eager, counts)
            recorded = llm.engine.runner.recorded
            assert [sequences for sequences, _ in recorded.recorded] == [3, 2, 1]  # not 5 any more
    finally:
        torch.set_num_threads(before)


def test_attention_of_recorded_steps_is_timed_now_and_then(model: str) -> None:
    """Such a step is computed launch by launch: its tokens are the same."""
    with LLM(model, **SETTINGS) as llm:
        plain = answers(llm, [20, 9])
        assert llm.engine.runner.recorded.recorded
        noted: list[float] = []
        clock = AttentionClock(torch.device("cpu"), noted.append, every=3600, replayed_every=0.0)
        llm.engine.runner.clock = clock
        clock.over(llm.engine.runner.cache.backend)  # so that no step beside replays is timed
        llm.reset_prefix_cache()
        assert answers(llm, [20, 9]) == plain
        assert len(noted) == SHAPE["num_hidden_layers"] * 19 and min(noted) > 0


def test_steps_of_matrices_of_several_types_are_recorded(tmp_path: Path) -> None:
    """As in files whose v is more precise than q and k."""
    types = {f"model.layers.{layer}.self_attn.v_proj.weight": Type.Q8_0 for layer in range(3)}
    file = written(tmp_path, "Llama", Type.Q4_0, types)
    with LLM(file, **SETTINGS) as llm, LLM(file, enforce_eager=True, **SETTINGS) as eager:
        assert answers(llm, [20, 9]) == answers(eager, [20, 9])
        assert llm.engine.runner.recorded.recorded


def test_steps_with_adapters_have_recordings_of_their_own(model: str, tmp_path: Path) -> None:
    """Which hold for every choice of slots, and for other adapters in the same ones."""
    one, two, three = adapters(tmp_path, 3, SHAPE)
    settings = SETTINGS | {"enable_lora": True, "max_loras": 2, "max_lora_rank": 6}
    with LLM(model, **settings) as llm, LLM(model, enforce_eager=True, **settings) as eager:
        for loras in ([one, None, two], [two, two, None], None, [three, one, three]):
            assert answers(llm, [8, 8, 6], loras) == answers(eager, [8, 8, 6], loras)
        runner = llm.engine.runner
        assert [sequences for sequences, _ in runner.recorded.recorded] == [3, 2]
        assert [sequences for sequences, _ in runner.recorded_with_adapters.recorded] == [3, 2]
        assert answers(llm, [6], [one]) != answers(llm, [6], [two]) != answers(llm, [6])


def test_more_threads_than_before(model: str) -> None:
    before = torch.get_num_threads()
    try:
        with LLM(model, **SETTINGS) as llm:
            torch.set_num_threads(1)
            one = answers(llm, [20])
            torch.set_num_threads(3)
            assert answers(llm, [20]) == one
    finally:
        torch.set_num_threads(before)


def test_what_torch_turns_into_another_type_is_not_recorded(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 products turn their input into float32."""
    monkeypatch.setattr(rank_model, "choose_dtype", lambda *_: torch.bfloat16)
    with LLM(model, **SETTINGS) as llm, LLM(model, enforce_eager=True, **SETTINGS) as eager:
        for _ in range(2):
            assert answers(llm, [4, 9]) == answers(eager, [4, 9])
        assert not llm.engine.runner.recorded.recorded


def test_a_cpu_made_for_bfloat16_records_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (device, gguf_matrices):
        monkeypatch.setattr(module, "is_made_for_bfloat16", lambda: True)
    path = written(tmp_path, "Llama", Type.Q4_0)
    with LLM(path, **SETTINGS) as llm:
        answers(llm, [4, 9])
        assert llm.engine.runner.cache.layout.dtype == torch.float32
        assert llm.engine.runner.recorded.recorded


def test_a_recording_that_computes_something_else_is_not_used(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recording, "replay", lambda self: None)
    with LLM(model, **SETTINGS) as llm, LLM(model, enforce_eager=True, **SETTINGS) as eager:
        assert answers(llm, [4, 9]) == answers(eager, [4, 9])
        assert not llm.engine.runner.recorded.recorded


def test_a_model_that_needs_torch_is_not_recorded(tmp_path: Path) -> None:
    folder = write_config(tmp_path)
    settings = SETTINGS | {"load_format": "dummy", "dtype": "float32"}
    with LLM(str(folder), **settings) as llm, LLM(str(folder), enforce_eager=True, **settings) as e:
        assert answers(llm, [4, 9]) == answers(e, [4, 9])
        assert not llm.engine.runner.recorded.recorded


EXPERTS = {"num_local_experts": 8, "num_experts": 8, "num_experts_per_tok": 3}
FAMILIES = {
    "Llama": {},
    "Qwen2": {},  # with biases
    "Mixtral": EXPERTS,
    "Qwen3Moe": EXPERTS | {"moe_intermediate_size": 64, "norm_topk_prob": True},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("threads", [1, 2])
def test_models_in_float32_are_recorded_where_matrices_are_interleaved(
    family: str, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CPUs with AVX-512; experts are chosen again in each replay."""
    monkeypatch.setattr(linear, "_has_float_kernel", lambda: True)
    raw = {"architectures": [f"{family}ForCausalLM"], **SHAPE, **FAMILIES[family]}
    folder = write_config(tmp_path, **raw)
    settings = SETTINGS | {"load_format": "dummy", "dtype": "float32"}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with LLM(str(folder), **settings) as llm:
            recorded = answers(llm, [40, 9, 30])
            sequences = [number for number, _ in llm.engine.runner.recorded.recorded]
            assert sequences == [3, 2, 1]
        with LLM(str(folder), enforce_eager=True, **settings) as eager:
            assert answers(eager, [40, 9, 30]) == recorded
    finally:
        torch.set_num_threads(before)
