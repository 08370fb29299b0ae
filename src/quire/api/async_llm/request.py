"""One request of an `AsyncLLM`: from the engine's updates to outputs with the whole text so far."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace

from quire.api.reasoning.python_chats import ThinkingChat
from quire.api.server.answers.choices import Choice, Delta
from quire.api.server.answers.logprobs import Entry
from quire.api.server.answers.prompts import Prompt
from quire.api.tools.events import CallArguments, Reasoning, Text
from quire.engine.outputs import CompletionOutput, RequestOutput
from quire.engine.process.request_handle import Admission, Update
from quire.engine.sequence import Logprob, TokenLogprobs
from quire.errors import QuireError
from quire.models.text.tokenizer import Tokenizer
from quire.params import SamplingParams
from quire.runner.sampling.logprobs import Logprobs


class Mailbox:
    """The latest output of a request, on its way from the thread of the engine's client to the
    loop that waits for it. An output that comes before the last one was taken replaces it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._latest: deque[RequestOutput | QuireError] = deque(maxlen=1)

    def put(self, output: RequestOutput | QuireError) -> bool:
        """From any thread; False if the loop has been closed, so that nothing waits any more."""
        self._latest.append(output)
        try:
            self._loop.call_soon_threadsafe(self._arrived.set)
        except RuntimeError:
            return False
        return True

    async def take(self) -> RequestOutput:
        while not self._latest:
            self._arrived.clear()
            await self._arrived.wait()
        output = self._latest.popleft()
        if isinstance(output, QuireError):
            raise output
        return output


class GrowingOutput:
    """The samples of one request, and the outputs made of them."""

    def __init__(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        chat: ThinkingChat | None = None,
    ) -> None:
        """With `chat`, `text` has only a model's words, and `reasoning` its thoughts."""
        self._tokenizer = tokenizer
        self._samples = [
            GrowingSample(Choice(i, 0, prompt, params, tokenizer), params, tokenizer, chat)
            for i in range(params.n)
        ]
        self._prompt_ids: list[int] = prompt.token_ids.tolist()
        self._has_prompt_logprobs = params.prompt_logprobs is not None
        self._output = RequestOutput(request_id, prompt.text, self._prompt_ids, [], False)
        self._prompt_logprobs: list[TokenLogprobs | None] = [None]

    def grow(self, update: Update, admission: Admission | None) -> RequestOutput:
        for number, sample in update.samples.items():
            grown = self._samples[number]
            grown.push(grown.choice.push(sample))
        scored = len(self._prompt_logprobs)
        self._prompt_logprobs += named(
            self._prompt_ids[scored:], update.prompt_logprobs, self._tokenizer
        )
        return self._now(update.finished, admission or Admission())

    def abort(self, admission: Admission | None) -> RequestOutput:
        """The last output of a request that its caller has ended."""
        for sample in self._samples:
            sample.abort()
        return self._now(True, admission or Admission())

    def _now(self, finished: bool, admission: Admission) -> RequestOutput:
        return replace(
            self._output,
            outputs=[sample.output() for sample in self._samples],
            finished=finished,
            num_cached_tokens=admission.num_cached_tokens,
            cached_tokens_by_tier=dict(admission.cached_tokens_by_tier),
            miss_reason=admission.miss_reason,
            prompt_logprobs=list(self._prompt_logprobs) if self._has_prompt_logprobs else None,
        )


class GrowingSample:
    def __init__(
        self,
        choice: Choice,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        chat: ThinkingChat | None,
    ) -> None:
        self.choice = choice
        self._tokenizer = tokenizer
        self._parser = chat.parser() if chat is not None else None
        self._so_far = CompletionOutput(choice.index, "", [])
        if params.logprobs is not None:
            self._so_far.logprobs, self._so_far.cumulative_logprob = [], 0.0

    def push(self, delta: Delta) -> None:
        grown = self._so_far
        grown.token_ids += delta.token_ids
        grown.finish_reason = delta.finish_reason
        self._push_text(delta)
        if grown.logprobs is not None and grown.cumulative_logprob is not None:
            grown.logprobs += named(delta.token_ids, delta.entries, self._tokenizer)
            grown.cumulative_logprob += sum(entry[0] for entry in delta.entries)

    def _push_text(self, delta: Delta) -> None:
        if self._parser is None:
            self._so_far.text += delta.text
            return
        events = self._parser.push(delta.text)
        if delta.finish_reason is not None:
            events += self._parser.flush(is_cut=delta.finish_reason == "length")
        for event in events:
            if isinstance(event, Reasoning):
                self._so_far.reasoning = (self._so_far.reasoning or "") + event.text
            elif isinstance(event, (Text, CallArguments)):  # no tool was offered: it is words
                self._so_far.text += event.text

    def abort(self) -> None:
        self._so_far.finish_reason = self._so_far.finish_reason or "abort"

    def output(self) -> CompletionOutput:
        """A copy, which does not grow."""
        so_far = self._so_far
        logprobs = None if so_far.logprobs is None else list(so_far.logprobs)
        return replace(so_far, token_ids=list(so_far.token_ids), logprobs=logprobs)


def named(
    token_ids: list[int], entries: list[Entry], tokenizer: Tokenizer | None
) -> list[TokenLogprobs]:
    """Log-probabilities with their tokens' texts; there are as many `token_ids`, or more."""

    def name(token_id: int) -> str | None:
        return tokenizer.decode([token_id], skip_special_tokens=False) if tokenizer else None

    return [
        {i: Logprob(value, rank, name(i)) for i, value, rank in Logprobs(own, *entry).entries()}
        for own, entry in zip(token_ids, entries, strict=False)
    ]
