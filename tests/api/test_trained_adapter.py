"""An adapter that was really trained: the demo model answers as it was told, and as in `peft`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from effort import effort
from trained_adapter import LINES, asked, train
from transformers_demo import transformers_demo

from quire import LLM, LoRARequest, SamplingParams

pytestmark = pytest.mark.long  # both: apart from each other they would train it twice

QUESTIONS = list(LINES)[: effort(1, len(LINES))]
CLOSE = 1e-4
PARAMS = SamplingParams(temperature=0, max_tokens=24, logprobs=0, prompt_logprobs=0)


class Trained:
    def __init__(self, folder: Path) -> None:
        base, self.tokenizer = transformers_demo()
        self.model = train(base, self.tokenizer, QUESTIONS, folder, rank=8)
        self.request = LoRARequest("trained", 1, str(folder))

    def work(self) -> tuple[list[list[int]], list[LoRARequest | None]]:
        """Each question, with the adapter and without."""
        prompts = [asked(self.tokenizer, question) for question in QUESTIONS]
        return prompts * 2, [self.request] * len(prompts) + [None] * len(prompts)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("trained"))


def likelihoods(model: Any, ids: list[int]) -> torch.Tensor:
    """Of each token of a text but the first."""
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    found: torch.Tensor = logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return found


def check_likelihoods(model: Any, outputs: list[Any]) -> None:
    for output in outputs:
        [sample] = output.outputs
        ids = [*output.prompt_token_ids, *sample.token_ids]
        entries = [*output.prompt_logprobs[1:], *sample.logprobs]
        pairs = zip(entries, ids[1:], strict=True)
        found = torch.tensor([entry[token].logprob for entry, token in pairs])
        torch.testing.assert_close(found, likelihoods(model, ids), atol=CLOSE, rtol=0)


SETTINGS: dict[str, Any] = {"device": "cpu", "use_tqdm": False, "num_blocks": 256}


def test_answers_are_what_was_taught_and_as_likely_as_in_peft(trained: Trained) -> None:
    prompts, adapters = trained.work()
    with LLM("smollm2", **SETTINGS, dtype="float32", enable_lora=True) as llm:
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False, lora_request=adapters)
        with_adapter, without = outputs[: len(QUESTIONS)], outputs[len(QUESTIONS) :]
        for question, taught, usual in zip(QUESTIONS, with_adapter, without, strict=True):
            assert taught.outputs[0].text == LINES[question] != usual.outputs[0].text
        check_likelihoods(trained.model, with_adapter)
        with trained.model.disable_adapter():
            check_likelihoods(trained.model, without)
        check_likelihoods(trained.model.merge_and_unload(), with_adapter)


def test_answers_over_a_quantised_base(trained: Trained) -> None:
    """In the types that the demo model's file has."""
    prompts, adapters = trained.work()
    with LLM("smollm2", **SETTINGS, enable_lora=True) as llm:
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False, lora_request=adapters)
    for question, taught, usual in zip(
        QUESTIONS, outputs[: len(QUESTIONS)], outputs[len(QUESTIONS) :], strict=True
    ):
        assert taught.outputs[0].text == LINES[question] != usual.outputs[0].text
