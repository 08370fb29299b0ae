"""Quantised models through the engine: texts go on as `transformers` does with the same numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from continued import BEAMS, GREEDY, NEW_TOKENS, Continued
from disturbed import before_each_step, preempt
from drafts import ScriptedDrafter, always_draft, one_in_four, speculate
from effort import effort
from gguf import GGMLQuantizationType as Type
from quantized_models import METHODS, SHAPE, QuantizedModel
from tiny_gguf import write_gguf
from tiny_ranks import ranks_in_threads
from transformers_beams import check_beams

from quire import LLM
from quire.errors import ModelError
from quire.layers.quantized.gguf import GGUFMatrix
from quire.layers.quantized.matrix import QuantizedMatrix

FORMATS = {"fp8 of a row": "fbgemm", "fp8 in blocks": "fp8-blocks", "4 bits with zeros": "gptq"}
GGUF = "GGUF"
BLOCK = 4
every_format = pytest.mark.parametrize("name", [*FORMATS, GGUF])
in_processes = pytest.mark.parametrize("name", effort(["4 bits with zeros"], [*FORMATS, GGUF]))
Oracles = Callable[[str], Continued]


@dataclass
class Stored:
    model: Any
    folder: Path
    ids: list[int]


def store(name: str, folder: Path) -> Stored:
    if name == GGUF:
        stored = folder / "model.gguf"
        model = written_as_gguf(stored)
    else:
        made = QuantizedModel(METHODS[FORMATS[name]], folder)
        stored, model = made.folder, made.oracle
    ids = torch.randint(0, SHAPE["vocab_size"], (80,), generator=torch.Generator().manual_seed(1))
    return Stored(model, stored, ids.tolist())


def written_as_gguf(path: Path) -> Any:
    """A file in Q4_1, and the model of `transformers` with what its blocks stand for."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(2)
    config = Qwen3Config(**SHAPE, architectures=["Qwen3ForCausalLM"])
    model = Qwen3ForCausalLM(config).eval()
    write_gguf(path, config.to_dict(), model.state_dict(), Type.Q4_1)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            blocks = gguf.quants.quantize(parameter.detach().numpy(), Type.Q4_1)
            parameter.data = torch.from_numpy(gguf.quants.dequantize(blocks, Type.Q4_1))
    return model


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> Oracles:
    return cache(lambda name: Continued(store(name, tmp_path_factory.mktemp("stored"))))


def open_llm(oracle: Continued, **settings: Any) -> LLM:
    """GGUF's matrices stay as they are where no `dtype` is asked for."""
    basics: dict[str, Any] = {"device": "cpu", "block_size": BLOCK, "num_blocks": 300}
    if oracle.folder.suffix != ".gguf":
        basics["dtype"] = "float32"
    llm = LLM(str(oracle.folder), use_tqdm=False, **basics | settings)
    llm.engine.overlap = True
    return llm


@every_format
def test_cold_warm_and_in_chunks(name: str, oracles: Oracles) -> None:
    oracle = oracles(name)
    with open_llm(oracle, max_num_batched_tokens=11) as llm:
        kind = GGUFMatrix if name == GGUF else QuantizedMatrix
        assert any(isinstance(each, kind) for each in llm.engine.runner.model.modules())
        for _ in ("cold", "warm"):
            oracle.check(llm)
        assert llm.stats()["prefix"]["hits"] > sum(map(len, oracle.prompts)) - 4 * BLOCK


@every_format
def test_preempted_in_a_tiny_pool(name: str, oracles: Oracles) -> None:
    oracle = oracles(name)
    longest = max(map(len, oracle.prompts)) + NEW_TOKENS
    settings = {"num_blocks": -(-longest // BLOCK) + 4, "max_model_len": longest}
    with open_llm(oracle, **settings) as llm:
        before_each_step(llm.engine, preempt, every=7)
        oracle.check(llm)
        assert llm.stats()["preemptions"] > 2


@every_format
def test_restored_from_the_ssd_after_a_restart(name: str, oracles: Oracles, tmp_path: Path) -> None:
    """And by no model in another format, which would have computed other KV."""
    oracle = oracles(name)
    other = oracles("fp8 in blocks" if name == GGUF else GGUF)
    settings = {"ssd_cache_dir": str(tmp_path), "ssd_cache_bytes": "64MiB"}
    with open_llm(oracle, **settings) as llm:
        oracle.check(llm)
    for restarted, is_found in ((other, False), (oracle, True)):
        with open_llm(restarted, **settings) as llm:
            outputs = llm.generate(oracle.prompts, GREEDY, use_tqdm=False)
            found: Counter[str] = Counter()
            for output in outputs:
                found.update(output.cached_tokens_by_tier)
            assert (found["ssd"] > max(map(len, oracle.prompts)) / 2) == is_found
    assert [output.outputs[0].token_ids for output in outputs] == oracle.answers


@every_format
def test_on_two_ranks(name: str, oracles: Oracles) -> None:
    with ranks_in_threads(), open_llm(oracles(name), tensor_parallel_size=2) as llm:
        oracles(name).check(llm)


@in_processes
def test_on_two_ranks_in_processes(name: str, oracles: Oracles) -> None:
    with open_llm(oracles(name), tensor_parallel_size=2) as llm:
        oracles(name).check(llm)


def test_ranks_that_would_cut_a_group_never_start(tmp_path: Path) -> None:
    made = QuantizedModel(METHODS["gptq"], tmp_path, intermediate_size=192, num_hidden_layers=1)
    words = r"mlp.down_proj is quantised in blocks of 64 inputs, and a part of 96 of its 192 begins"
    with ranks_in_threads(), pytest.raises(ModelError, match=words):
        LLM(str(made.folder), device="cpu", tensor_parallel_size=2, use_tqdm=False)


@every_format
def test_forks_and_beams(name: str, oracles: Oracles) -> None:
    oracle = oracles(name)
    with open_llm(oracle) as llm:
        [output] = llm.generate(oracle.prompts[:1], replace(GREEDY, n=3), use_tqdm=False)
        assert [sample.token_ids for sample in output.outputs] == oracle.answers[:1] * 3
        assert llm.stats()["forks"]["copied_blocks"] > 0
        [output] = llm.beam_search(oracle.prompts[0], BEAMS, use_tqdm=False)
        check_beams(output, oracle.beams(), BEAMS.length_penalty)


@every_format
def test_drafts(name: str, oracles: Oracles) -> None:
    """Of every four drafts one is wrong, so that what they wrote is rolled back."""
    oracle = oracles(name)
    with open_llm(oracle) as llm:
        drafter = ScriptedDrafter(oracle.next_tokens, one_in_four, SHAPE["vocab_size"])
        speculation = speculate(llm.engine, drafter, 5)
        oracle.check(llm)
        assert 0 < speculation.total.accepted < speculation.total.drafted


@pytest.mark.parametrize("drafter", [GGUF, "ngram"])
def test_drafters(drafter: str, oracles: Oracles) -> None:
    """A draft model may be quantised in a way of its own."""
    oracle = oracles("4 bits with zeros")
    named = drafter if drafter == "ngram" else str(oracles(drafter).folder)
    with open_llm(oracle, speculative=named, num_speculative_tokens=3) as llm:
        always_draft(llm.engine)
        oracle.check(llm)
        assert drafter == "ngram" or llm.engine.scheduler.speculation.total.drafted > 0
