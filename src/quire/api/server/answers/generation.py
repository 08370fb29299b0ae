"""All that one HTTP request has in the engine: its prompts, their samples, what they used."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from quire.api.server.answers.choices import Choice, Delta
from quire.api.server.answers.logprobs import Entry
from quire.api.server.answers.prompts import Prompt
from quire.api.server.keys import Tenant
from quire.api.server.state import ServerState
from quire.beam_params import BeamSearchParams
from quire.engine.process.request_handle import RequestHandle, Update
from quire.params import SamplingParams
from quire.request_options import RequestOptions


class Generation:
    """Use it in a `with` block: whatever has not ended when the block is left is aborted."""

    def __init__(
        self,
        state: ServerState,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        options: RequestOptions,
        caller: Tenant,
        *,
        beams: BeamSearchParams | None = None,
        token_by_token: bool = False,
    ) -> None:
        """Raises RequestError for prompts and params that the engine would refuse.

        With `beams` the answer is found by beam search; `params` then say how many choices there
        are, and how each becomes text. With `token_by_token` each delta has one token, also where
        several come at once.
        """
        self.options = options = replace(options, lora_request=state.models.adapter(options.model))
        self._state = state
        self._params = params
        self._asked = beams or params
        self.prompts = prompts
        self.prompt_logprobs: list[list[Entry]] = [[] for _ in prompts]
        for prompt in prompts:
            state.client.limits.check(prompt.token_ids, params, options)
        self._changed = asyncio.Event()
        self._choices: dict[int, Choice] = {}
        self._handles: list[RequestHandle] = []
        self._caller = caller
        self._token_by_token = token_by_token

    @property
    def id(self) -> str:
        """The answer's id, which logs have, too."""
        return self.options.name

    @property
    def max_tokens(self) -> int | None:
        """How many were asked for, of each choice; the model's length may end one before."""
        return self._params.max_tokens

    def __enter__(self) -> Generation:
        # Nothing is awaited between the check and the start, so no other request takes the place.
        if not self.options.background:
            num_tokens = sum(len(prompt.token_ids) for prompt in self.prompts)
            self._state.admission.check(len(self.prompts), num_tokens)
        for prompt in self.prompts:
            handle = self._state.client.submit(
                prompt.token_ids, self._asked, self.options, changed=self._changed
            )
            self._handles.append(handle)
        return self

    def __exit__(self, *_: object) -> None:
        for i, handle in enumerate(self._handles):
            self._state.client.close(handle)
            shown = [c.num_tokens for c in self._choices.values() if c.prompt_index == i]
            self._state.observer.ended(self.options, handle, self._params, self._caller.name, shown)

    async def deltas(self, quiet_s: float | None = None) -> AsyncIterator[list[Delta]]:
        """The tokens as they come; those of several steps at once if the reader is slow.

        With `quiet_s`, an empty list wherever nothing has come for so many seconds.
        """
        loop = asyncio.get_running_loop()
        open_handles = dict(enumerate(self._handles))
        while open_handles:
            if quiet_s is not None:
                alarm = loop.call_later(quiet_s, self._changed.set)
            await self._changed.wait()
            if quiet_s is not None:
                alarm.cancel()
            self._changed.clear()
            deltas: list[Delta] = []
            for i, handle in list(open_handles.items()):
                if (update := handle.take()) is None:
                    continue
                deltas += self._grown(i, update)
                if update.finished:
                    del open_handles[i]
                    self._state.note_admission(handle, self.options)
            if deltas or quiet_s is not None:
                yield deltas

    def _grown(self, prompt_index: int, update: Update) -> list[Delta]:
        self.prompt_logprobs[prompt_index] += update.prompt_logprobs
        return [
            self._choice(prompt_index, number).push(part)
            for number, sample in update.samples.items()
            for part in (sample.each_token() if self._token_by_token else [sample])
        ]

    def _choice(self, prompt_index: int, sample: int) -> Choice:
        index = prompt_index * self._params.n + sample
        if index not in self._choices:
            prompt = self.prompts[prompt_index]
            tokenizer = self._state.client.tokenizer
            self._choices[index] = Choice(index, prompt_index, prompt, self._params, tokenizer)
        return self._choices[index]

    @property
    def num_tokens(self) -> int:
        """Those that were drawn so far, of all choices."""
        return sum(choice.num_tokens for choice in self._choices.values())

    def usage(self) -> dict[str, Any]:
        prompt_tokens = sum(len(prompt.token_ids) for prompt in self.prompts)
        new = self.num_tokens
        by_tier: dict[str, int] = {}
        cached = 0
        for handle in self._handles:
            if handle.admission is not None:
                cached += handle.admission.num_cached_tokens
                for tier, count in handle.admission.cached_tokens_by_tier.items():
                    by_tier[tier] = by_tier.get(tier, 0) + count
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": new,
            "total_tokens": prompt_tokens + new,
            "prompt_tokens_details": {"cached_tokens": cached, "cached_tokens_by_tier": by_tier},
        }
