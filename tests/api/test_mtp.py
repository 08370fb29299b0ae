"""`speculative="mtp"`: guesses are those of a plain reference, and answers those without any."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from continued import GREEDY, NEW_TOKENS, Continued
from disturbed import before_each_step, poison_free_blocks, preempt
from drafts import always_draft
from mtp_layer import LAYER, MTPOracle, make_bigrams
from quantized_models import METHODS
from safetensors.torch import load_file, save_file
from tiny_ranks import ranks_in_threads
from torch import Tensor, nn

from quire import LLM, SamplingParams
from quire.errors import ConfigError

DRAFTS = 3
Proposed = list[tuple[list[int], list[int]]]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> MTPOracle:
    oracle = MTPOracle(tmp_path_factory.mktemp("mtp"), tie_word_embeddings=False)
    oracle.save()
    return oracle


@pytest.fixture(scope="module")
def texts(oracle: MTPOracle) -> Continued:
    return Continued(oracle)


@contextmanager
def open_llm(folder: Path, **settings: Any) -> Iterator[tuple[LLM, Proposed]]:
    """An engine that always drafts, and what it has drafted behind which tokens."""
    basics = {"dtype": "float32", "device": "cpu", "block_size": 4, "num_blocks": 300}
    basics |= {"speculative": "mtp", "num_speculative_tokens": DRAFTS}
    with LLM(str(folder), use_tqdm=False, **basics | settings) as llm:
        llm.engine.overlap = True
        always_draft(llm.engine)
        drafter, proposed = llm.engine.scheduler.speculation.drafter, []
        propose = drafter.propose

        def recording(wanted: Any) -> Any:
            found = propose(wanted)
            for each, guesses in zip(wanted, found, strict=True):
                proposed.append((each.token_ids.tolist(), guesses.tolist()))
            return found

        drafter.propose = recording
        yield llm, proposed
        assert not llm.engine.scheduler.speculation.is_off


def check(oracle: MTPOracle, proposed: Proposed, least: int) -> None:
    """Every guess is the reference's, and there were at least so many."""
    assert sum(len(guesses) for _, guesses in proposed) >= least
    for token_ids, guesses in proposed:
        assert guesses == oracle.guesses(token_ids, len(guesses))


# Prompts that share nothing: where texts part, the KV of the token before has seen one of them.
APART = [0]


def test_guesses_cold_and_warm(oracle: MTPOracle, texts: Continued) -> None:
    with open_llm(oracle.folder) as (llm, proposed):
        before_each_step(llm.engine, poison_free_blocks)
        for _ in ("cold", "warm"):
            texts.check(llm, APART)
            check(oracle, proposed, least=DRAFTS * (NEW_TOKENS - 5))
            proposed.clear()
        texts.check(llm)


def test_in_chunks_and_preempted(oracle: MTPOracle, texts: Continued) -> None:
    with open_llm(oracle.folder, max_num_batched_tokens=7, num_blocks=40) as (llm, proposed):
        before_each_step(llm.engine, poison_free_blocks)
        before_each_step(llm.engine, preempt, every=12)
        texts.check(llm, APART)
        assert llm.stats()["preemptions"] > 0
        check(oracle, proposed, least=NEW_TOKENS)
        texts.check(llm)


def test_restored_from_the_ssd(oracle: MTPOracle, texts: Continued, tmp_path: Path) -> None:
    """The layer's KV is restored with the model's."""
    settings = {"ssd_cache_dir": str(tmp_path), "ssd_cache_bytes": "64MiB"}
    with open_llm(oracle.folder, **settings) as (llm, _):
        texts.check(llm, APART)
    with open_llm(oracle.folder, **settings) as (llm, proposed):
        [output] = llm.generate([texts.prompts[0]], GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == texts.answers[0]
        assert output.cached_tokens_by_tier["ssd"] > len(texts.prompts[0]) / 2
        check(oracle, proposed, least=NEW_TOKENS)


def test_on_two_ranks(oracle: MTPOracle, texts: Continued) -> None:
    with ranks_in_threads(), open_llm(oracle.folder, tensor_parallel_size=2) as (llm, proposed):
        texts.check(llm, APART)
        check(oracle, proposed, least=NEW_TOKENS)


def test_samples_are_those_without_drafts(oracle: MTPOracle, texts: Continued) -> None:
    """Alone, and forked."""
    drawn = SamplingParams(temperature=1.0, seed=5, max_tokens=NEW_TOKENS, ignore_eos=True)
    samples = []
    for speculative in ({}, {"speculative": None, "num_speculative_tokens": None}):
        settings = {"dtype": "float32", "device": "cpu", "block_size": 4, "num_blocks": 300}
        settings |= {"speculative": "mtp", "num_speculative_tokens": DRAFTS} | speculative
        with LLM(str(oracle.folder), use_tqdm=False, **settings) as llm:
            if not speculative:
                always_draft(llm.engine)
            found = []
            for params in (drawn, replace(drawn, n=3)):
                outputs = llm.generate(texts.prompts, params, use_tqdm=False)
                found.append([[s.token_ids for s in output.outputs] for output in outputs])
            samples.append(found)
    assert samples[0] == samples[1]


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_layer_that_copies_the_model_is_always_right(temperature: float, tmp_path: Path) -> None:
    oracle = MTPOracle(tmp_path, tie_word_embeddings=False)
    make_bigrams(oracle)
    if temperature:  # one token is certain
        oracle.model.lm_head.weight.data.mul_(1e4)
        oracle.model.save_pretrained(tmp_path)
    oracle.save()
    params = SamplingParams(temperature=temperature, max_tokens=24, ignore_eos=True)
    with open_llm(tmp_path) as (llm, proposed):
        llm.generate([oracle.ids[:20], oracle.ids[30:41]], params, use_tqdm=False)
        stats = llm.stats()["speculation"]
        check(oracle, proposed, least=30)
    assert stats["drafted"] == stats["accepted"] > 30


def rewrite(folder: Path, tensors: dict[str, Tensor]) -> None:
    file = folder / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, {"format": "pt"})


def test_a_head_of_its_own_guesses(tmp_path: Path) -> None:
    """Published checkpoints have a copy of the model's; a layer trained on may have another."""
    oracle = MTPOracle(tmp_path, tie_word_embeddings=False)
    oracle.save()
    oracle.head = nn.Linear(*reversed(oracle.model.lm_head.weight.shape), bias=False)
    rewrite(tmp_path, {f"model.layers.{LAYER}.shared_head.head.weight": oracle.head.weight.data})
    with open_llm(tmp_path) as (llm, proposed):
        Continued(oracle).check(llm, APART)
        check(oracle, proposed, least=NEW_TOKENS)


QUANTISED = {
    "fp8-blocks": ("fp8-blocks", "eh_proj", "shared_head.head"),
    "awq": ("awq", "eh_proj"),
    "pack-quantized": ("pack-quantized", "eh_proj", "shared_head.head"),
}


@pytest.mark.parametrize("case", QUANTISED)
def test_a_quantised_layer_guesses_by_what_its_codes_stand_for(case: str, tmp_path: Path) -> None:
    """DeepSeek leaves these two in 16 bits, and who quantises its models may not."""
    method, *layers = QUANTISED[case]
    oracle = MTPOracle(tmp_path, tie_word_embeddings=False, hidden_size=64, vocab_size=136)
    oracle.save()
    oracle.head = nn.Linear(*reversed(oracle.model.lm_head.weight.shape), bias=False)
    own = {"eh_proj": oracle.eh_proj, "shared_head.head": oracle.head}
    rewrite(tmp_path, {f"model.layers.{LAYER}.shared_head.head.weight": oracle.head.weight.data})
    found = load_file(tmp_path / "model.safetensors")
    for layer in layers:
        name, weight = f"model.layers.{LAYER}.{layer}", own[layer].weight
        codes, weight.data = METHODS[method].encode(name, weight.data)
        del found[f"{name}.weight"]
        found |= {f"{name}.{end}": tensor.contiguous() for end, tensor in codes.items()}
    save_file(found, tmp_path / "model.safetensors", {"format": "pt"})
    config = tmp_path / "config.json"
    raw = json.loads(config.read_text()) | {"quantization_config": METHODS[method].config}
    config.write_text(json.dumps(raw))
    with open_llm(tmp_path) as (llm, proposed):
        Continued(oracle).check(llm, APART)
        check(oracle, proposed, least=NEW_TOKENS)


def test_a_model_without_the_layer_is_refused(tmp_path: Path) -> None:
    for name in ("qwen3-0.6b", "deepseek-v2-lite"):
        with pytest.raises(ConfigError, match="speculative='mtp' drafts with the MTP layer"):
            LLM(name, load_format="dummy", device="cpu", speculative="mtp")


@pytest.mark.parametrize("fields", [{}, {"num_nextn_predict_layers": 1}], ids=["unsaid", "one"])
def test_a_layer_that_only_the_config_counts_is_refused(
    fields: dict[str, int], tmp_path: Path
) -> None:
    """Who converts a checkpoint may leave the layer out, and the config as it was."""
    MTPOracle(tmp_path)
    config = tmp_path / "config.json"
    raw = json.loads(config.read_text())
    raw.pop("num_nextn_predict_layers", None)
    config.write_text(json.dumps(raw | fields))
    with pytest.raises(ConfigError, match="speculative='mtp' drafts with the MTP layer"):
        LLM(str(tmp_path), device="cpu", num_blocks=16, speculative="mtp", use_tqdm=False)
