"""Texts of several windows, and how `transformers` continues them with a tiny model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers_beams import beams_of_transformers

from quire import LLM, BeamSearchParams, SamplingParams

NEW_TOKENS = 10
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
BEAMS = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
LONG, REST = 62, 30  # tokens of the first prompt, and of each other behind what it shares
SHARED = (5, 18, 41)  # tokens of the first prompt that the others begin with
CLEARLY = 1e-3  # by which the best token leads the next


class Original(Protocol):
    """A model of `transformers`, where it is stored, and a random text."""

    model: Any
    folder: Path
    ids: list[int]


class Continued:
    """A model's folder, prompts, and their greedy answers, of which rounding changes none."""

    def __init__(self, oracle: Original) -> None:
        self.folder, self.model = oracle.folder, oracle.model
        self.model.generation_config.eos_token_id = None
        self.prompts: list[list[int]] = []
        self.answers: list[list[int]] = []
        self._add(oracle.ids[: LONG - 1], [])
        for shared in SHARED:
            self._add(oracle.ids[:shared], oracle.ids[shared + 1 : shared + REST - 1])

    def _add(self, head: list[int], rest: list[int]) -> None:
        """A prompt with a token behind the head that the first one does not have there.

        It also ends the prompt: where all layers have windows, the answer depends on none before.
        """
        taken = [prompt[len(head)] for prompt in self.prompts[:1]]
        for token in set(range(self.model.config.vocab_size)).difference(taken):
            prompt = [*head, token, *rest, token] if rest else [*head, token]
            answer, lead = self._continue(prompt)
            if lead > CLEARLY and len(set(answer)) > NEW_TOKENS / 2:
                break
        else:
            raise AssertionError("no prompt has a clear answer")
        self.prompts.append(prompt)
        self.answers.append(answer)

    @torch.no_grad()
    def _continue(self, prompt: list[int]) -> tuple[list[int], float]:
        """The answer, and by how much its tokens lead, the least of them."""
        wanted = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
        mask = torch.ones(1, len(prompt))
        [text] = self.model.generate(torch.tensor([prompt]), attention_mask=mask, **wanted).tolist()
        best, second = self.model(torch.tensor([text[:-1]])).logits[0].topk(2).values.T
        return text[len(prompt) :], (best - second)[len(prompt) - 1 :].min().item()

    def next_tokens(self, sequence: Any, token_ids: Any, most: int) -> list[int]:
        """What a drafter would say that knows all answers."""
        at = self.prompts.index(sequence.request.prompt_ids.tolist())
        text = [*self.prompts[at], *self.answers[at]]
        return text[len(token_ids) : len(token_ids) + most]

    def beams(self) -> list[tuple[list[int], float]]:
        return beams_of_transformers(self.model, self.prompts[0], BEAMS, eos=[-1])

    def check(self, llm: LLM, which: Sequence[int] = range(1 + len(SHARED))) -> None:
        """All at once; the answers are the right ones."""
        outputs = llm.generate([self.prompts[i] for i in which], GREEDY, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == [self.answers[i] for i in which]
