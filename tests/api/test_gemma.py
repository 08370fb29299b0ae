"""Gemma through the engine: texts of several windows continue as `transformers` continues them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from families import Oracle

from quire import LLM, SamplingParams

NEW_TOKENS = 30
WINDOW, BLOCK = 7, 4
CASES = {"gemma2": (WINDOW, None), "gemma3": (WINDOW, WINDOW, None)}
POOLS = {
    "roomy": {"num_blocks": 400},
    "chunked": {"num_blocks": 400, "max_num_batched_tokens": 11},
    "tight": {"num_blocks": 44, "max_model_len": 108, "max_num_batched_tokens": 8},
}


class Continued(NamedTuple):
    folder: Path
    prompts: list[list[int]]
    answers: list[list[int]]


@torch.no_grad()
def continued(case: str, folder: Path) -> Continued:
    """Prompts of which some share more than a window, and what follows them greedily."""
    import transformers

    ids = Oracle(case, folder).ids
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    prompts = [ids, ids[:41] + ids[10:45], ids[:9] + ids[30:60], ids[20:63]]
    answers = []
    for prompt in prompts:
        tokens = torch.tensor([prompt])
        out = model.generate(tokens, do_sample=False, max_new_tokens=NEW_TOKENS)
        answers.append(out[0, len(prompt) :].tolist())
    return Continued(folder, prompts, answers)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Continued]:
    return cache(lambda case: continued(case, tmp_path_factory.mktemp(case)))


def generate(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [request.outputs[0].token_ids for request in outputs]


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("case", CASES)
def test_cold_and_warm(case: str, pool: str, oracle: Callable[[str], Continued]) -> None:
    folder, prompts, answers = oracle(case)
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "block_size": BLOCK}
    with LLM(str(folder), use_tqdm=False, **settings, **POOLS[pool]) as llm:
        assert set(llm.engine.runner.cache.layout.windows) == {None, WINDOW}
        assert generate(llm, prompts) == answers
        assert generate(llm, prompts) == answers
        for prompt, answer in zip(prompts, answers, strict=True):  # alone, each from its prefix
            assert generate(llm, [prompt]) == [answer]
        stats = llm.stats()
        assert (stats["preemptions"] > 0) == (pool == "tight")
