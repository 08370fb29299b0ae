"""Engines over adapters that `peft` made, and `peft`'s own judgement of what they answer."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from peft_adapters import randomise, save
from torch import Tensor, nn

from quire import LLM, LoRARequest, SamplingParams

CLOSE = 1e-4  # of logarithms of probabilities; nearer than this, either of two best tokens is right
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)


class PeftModels:
    """A base model of `transformers` with random adapters, each in a folder of its own."""

    def __init__(
        self, base: nn.Module, folder: Path, configs: Mapping[str, dict[str, Any]]
    ) -> None:
        import peft

        self.base = base
        self.requests: dict[str, LoRARequest] = {}
        self._models: dict[str, Any] = {}
        for number, (name, config) in enumerate(configs.items(), start=1):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = peft.get_peft_model(deepcopy(base), peft.LoraConfig(**config)).eval()
                randomise(model, seed=number)
                save(model, folder / name)
            self._models[name] = model
            self.requests[name] = LoRARequest(name, number, str(folder / name))

    def logprobs(self, name: str | None, ids: Sequence[int]) -> Tensor:
        """Of every token behind each of these; without a name, the base model's."""
        model = self.base if name is None else self._models[name]
        with torch.no_grad():
            found: Tensor = model(torch.tensor([list(ids)])).logits[0].log_softmax(-1)
        return found

    def generate(
        self,
        llm: LLM,
        work: Sequence[tuple[str | None, list[int]]],
        params: SamplingParams = GREEDY,
    ) -> list[Any]:
        """Answers to prompts, each with one of the adapters or none, all in one batch; checked."""
        chosen = [self.requests[name] if name else None for name, _ in work]
        prompts = [prompt for _, prompt in work]
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=chosen)
        for (name, prompt), output in zip(work, outputs, strict=True):
            self.check(name, prompt, output)
            assert len(output.outputs[0].token_ids) == params.max_tokens
        return outputs

    def check(self, name: str | None, prompt: list[int], output: Any) -> None:
        """Each token is the best one of `peft`'s, and as likely."""
        assert not output.error, output.error
        [sample] = output.outputs
        wanted = self.logprobs(name, [*prompt, *sample.token_ids])
        for position, token in enumerate(sample.token_ids):
            of_next = wanted[len(prompt) - 1 + position]
            found = sample.logprobs[position][token].logprob
            assert abs(found - of_next[token].item()) < CLOSE, (name, position)
            assert of_next.max().item() - of_next[token].item() < CLOSE, (name, position)
        for position, entry in enumerate(output.prompt_logprobs or ()):
            if entry is not None:
                token = prompt[position]
                expected = wanted[position - 1, token].item()
                assert abs(entry[token].logprob - expected) < CLOSE, (name, position)
