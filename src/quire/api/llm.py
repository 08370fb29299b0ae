"""The Python interface: prompts in, texts out."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any

from quire.beam_params import BeamSearchParams
from quire.config import EngineConfig
from quire.engine.build import build_engine
from quire.engine.engine import Engine
from quire.engine.outputs import RequestOutput
from quire.engine.sequence import Request
from quire.errors import QuireError, RequestError
from quire.garbage import full_collections_held_off
from quire.models.quoting import Quotes
from quire.models.tokenizer import Tokenizer
from quire.params import SamplingParams
from quire.runner.device import free_cached_memory

Prompt = str | Sequence[int] | dict[str, Any]
Message = dict[str, Any]


class LLM:
    """A model, ready to generate. Use it in a `with` block, or `close` it.

    `LLM("smollm2", block_size=16, max_num_seqs=64)` takes every setting of `EngineConfig`.
    """

    def __init__(self, model: str = "smollm2", *, use_tqdm: bool = True, **settings: Any) -> None:
        self.config = EngineConfig.create(model=model, **settings)
        self._engine = self._build_engine(use_tqdm)
        self._end = weakref.finalize(self, self._engine.close)  # also of one that nobody closes
        self._closed = False
        self._num_requests = 0
        self._inboxes: dict[str, list[RequestOutput]] = {}

    def _build_engine(self, progress: bool) -> Engine:
        return build_engine(self.config, progress)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the model and the pool; their memory is free when this returns.

        What is on its way to a disk or a remote cache is written first, within half a minute.
        """
        if not self._closed:
            self._closed = True
            self._end()
            del self._engine
            gc.collect()  # the engine's parts refer to each other
            free_cached_memory()

    @property
    def engine(self) -> Engine:
        if self._closed:
            raise QuireError("This LLM is closed; make a new one.")
        return self._engine

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Answer prompts, together; the outputs are in their order.

        Every prompt is checked before any is started.
        """
        prompts = _as_list(prompts)
        requests = self._requests(prompts, sampling_params, SamplingParams, priority, cache_salt)
        return self._run(requests, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
        cache_salt: str = "",
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, through the model's chat template."""
        many = bool(messages) and not isinstance(messages[0], dict)
        conversations: Any = messages if many else [messages]
        prompts = [self._chat_prompt(each, chat_template_kwargs) for each in conversations]
        return self.generate(
            prompts, sampling_params, use_tqdm, priority=priority, cache_salt=cache_salt
        )

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """As `generate`, by beam search: each output's `outputs` are its beams, best first."""
        prompts = _as_list(prompts)
        requests = self._requests(prompts, params, BeamSearchParams, priority, cache_salt)
        return self._run(requests, use_tqdm)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Iterator[RequestOutput]:
        """Answer one prompt, token by token: each output has the whole text so far.

        Leaving the loop early aborts the request.
        """
        params = sampling_params or SamplingParams()
        request = self._request(
            prompt, params, stream=True, priority=priority, cache_salt=cache_salt
        )
        with self._submitted([request]) as inbox:
            while not request.finished:
                self._step()
                while inbox:
                    yield inbox.pop(0)

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        chat_template_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> Iterator[RequestOutput]:
        """Answer a conversation, token by token; `options` are those of `stream`."""
        prompt = self._chat_prompt(messages, chat_template_kwargs)
        return self.stream(prompt, sampling_params, **options)

    def stats(self) -> dict[str, Any]:
        """Blocks, cache hits and counters, as a plain dict."""
        return self.engine.stats()

    def reset_prefix_cache(self, device_only: bool = False) -> int:
        """Forget all cached blocks that no request holds; returns how many the device had.

        What host memory keeps is forgotten too, but not what is on disks or in a remote cache.
        """
        scheduler = self.engine.scheduler
        if scheduler.tiering is not None:
            scheduler.tiering.settle(timeout=10.0)
            if not device_only:
                scheduler.tiering.store.host.clear()
        return scheduler.cache.clear()

    def describe_pool(self, width: int = 64) -> str:
        """The block pool as a small picture in text."""
        from quire.api.picture import pool_picture

        return pool_picture(self.engine.scheduler.cache.allocator, width)

    def _requests(
        self,
        prompts: list[Prompt],
        params: Any,
        kind: type[SamplingParams | BeamSearchParams],
        priority: Sequence[int] | None,
        cache_salt: str,
    ) -> list[Request]:
        each = _one_each(params, kind, len(prompts))
        priorities = list(priority) if priority is not None else [0] * len(prompts)
        if len(priorities) != len(prompts):
            raise RequestError(
                f"{len(prompts)} prompts came with {len(priorities)} priorities; give one each."
            )
        return [
            self._request(prompt, p, priority=order, cache_salt=cache_salt)
            for prompt, p, order in zip(prompts, each, priorities, strict=True)
        ]

    def _request(
        self, prompt: Prompt, params: SamplingParams | BeamSearchParams, **options: Any
    ) -> Request:
        self._num_requests += 1
        name = f"request-{self._num_requests}"
        request = self.engine.make_request(name, _plain(prompt), params, **options)
        if request.grammar is not None:
            request.grammar.check()
        return request

    def _chat_prompt(
        self, messages: Sequence[Message], variables: dict[str, Any] | None
    ) -> list[int]:
        if self.tokenizer is None:
            raise RequestError("This model has no tokenizer, so it cannot chat; use generate.")
        quotes = Quotes(self.tokenizer)
        hidden = quotes.hide(list(messages)), quotes.hide(variables or {})
        return quotes.encode(self.tokenizer.apply_chat_template(hidden[0], **hidden[1]))

    def _run(self, requests: list[Request], use_tqdm: bool) -> list[RequestOutput]:
        from tqdm import tqdm

        engine, outputs = self.engine, dict[str, RequestOutput]()
        before = engine.num_generated_tokens
        with (
            tqdm(total=len(requests), desc="requests", unit="req", disable=not use_tqdm) as bar,
            self._submitted(requests) as inbox,
            full_collections_held_off(),
        ):
            while len(outputs) < len(requests):
                self._step()
                outputs.update((output.request_id, output) for output in inbox)
                inbox.clear()
                if use_tqdm:
                    rate = (engine.num_generated_tokens - before) / bar.format_dict["elapsed"]
                    bar.set_postfix_str(f"{rate:,.0f} tok/s", refresh=False)
                    bar.update(len(outputs) - bar.n)
        return [outputs[request.id] for request in requests]

    @contextmanager
    def _submitted(self, requests: list[Request]) -> Iterator[list[RequestOutput]]:
        """Start requests; their outputs land in the list. Whatever is unfinished is aborted."""
        inbox: list[RequestOutput] = []
        try:
            for request in requests:
                self.engine.submit(request)
                self._inboxes[request.id] = inbox
            yield inbox
        finally:
            for request in requests:
                self._inboxes.pop(request.id, None)
                if not self._closed:
                    self.engine.abort_request(request.id)

    def _step(self) -> None:
        """One step of the engine, for whoever waits: a stream may be open while others run."""
        for output in self.engine.step():
            if (inbox := self._inboxes.get(output.request_id)) is not None:
                inbox.append(output)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single prompt is a list of one; a flat list of ids is one prompt."""
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise RequestError(f"Prompts are strings or lists of token ids, not {_kind(prompts)}.")
    listed: list[Any] = list(prompts)
    if listed and all(isinstance(item, Integral) for item in listed):
        return [listed]
    return listed


def _plain(prompt: Prompt) -> str | list[int]:
    if isinstance(prompt, dict):
        if set(prompt) - {"prompt", "prompt_token_ids"} or not prompt:
            raise RequestError(
                "A prompt dict has 'prompt_token_ids' or 'prompt', and no other key."
            )
        return _plain(prompt["prompt_token_ids" if "prompt_token_ids" in prompt else "prompt"])
    if isinstance(prompt, str):
        return prompt
    is_list = isinstance(prompt, Sequence) or hasattr(prompt, "tolist")  # or an array
    if is_list and not isinstance(prompt, bytes):
        return [*prompt]
    raise RequestError(f"A prompt is a string or a list of token ids, not {_kind(prompt)}.")


def _kind(value: object) -> str:
    return type(value).__name__


def _one_each(
    params: Any, kind: type[SamplingParams | BeamSearchParams], count: int
) -> list[SamplingParams | BeamSearchParams]:
    name = kind.__name__
    if params is None:
        params = kind()
    if isinstance(params, kind):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(p, kind) for p in params):
        raise RequestError(f"The parameters are a {name}, or a list with one each.")
    if len(params) != count:
        raise RequestError(
            f"{count} prompts came with {len(params)} {name}; give one, or one each."
        )
    return list(params)
