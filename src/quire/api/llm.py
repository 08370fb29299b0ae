"""The Python interface: prompts in, texts out."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from quire.api.picture import pool_picture
from quire.api.pooling import PoolingCalls
from quire.api.prompts import Prompt, as_list, plain_prompt
from quire.api.reasoning.python_chats import ThinkingChat, chat_params
from quire.api.shared_engine import LOOK_AGAIN_S, Inbox, SharedEngine
from quire.beam_params import BeamSearchParams
from quire.config import EngineConfig
from quire.engine.engine import Engine
from quire.engine.observe.introspection import engine_stats
from quire.engine.outputs import RequestOutput
from quire.engine.pooling.build import build_any_engine
from quire.engine.pooling.engine import PoolingEngine
from quire.engine.sequence import Request
from quire.errors import RequestError
from quire.gc_control import full_collections_held_off
from quire.host_memory import own_memory
from quire.lora_request import LoRARequest
from quire.models.text.quoting import Quotes
from quire.models.text.tokenizer import Tokenizer
from quire.params import SamplingParams
from quire.request_options import RequestOptions
from quire.runner.device import free_cached_memory, wait_until_freed

Adapters = LoRARequest | Sequence[LoRARequest | None] | None
ChatMessage = dict[str, Any]


class LLM(PoolingCalls):
    """A model, ready to generate, or to embed and score. Use it in a `with` block, or `close` it.

    `LLM("smollm2", block_size=16, max_num_seqs=64)` takes every setting of `EngineConfig`. Any
    number of threads may use it at once: their requests are batched together.
    """

    def __init__(self, model: str = "smollm2", *, use_tqdm: bool = True, **settings: Any) -> None:
        self.config = EngineConfig.create(model=model, **settings)
        self._memory_before = own_memory()
        with full_collections_held_off():
            engine = self._build_engine(use_tqdm)
        # One of the two, as the model is.
        self._generating: SharedEngine[Engine] | None = None
        self._embedding: SharedEngine[PoolingEngine] | None = None
        if isinstance(engine, PoolingEngine):
            self._embedding = SharedEngine(engine)
        else:
            self._generating = SharedEngine(engine)
        self._numbers = count(1)

    def _build_engine(self, progress: bool) -> Engine | PoolingEngine:
        return build_any_engine(self.config, progress)

    @property
    def _shared(self) -> SharedEngine[Engine]:
        if self._generating is None:
            raise RequestError("This model writes no text; use embed, encode, score or classify.")
        return self._generating

    @property
    def _pooling(self) -> SharedEngine[PoolingEngine]:
        if self._embedding is None:
            raise RequestError(
                "This model writes text; load it with task='embed' or task='score', or another."
            )
        return self._embedding

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the model and the pool; when this returns, the system has their memory back.

        Imported libraries and compiled kernels stay, because another LLM would need them again.
        Blocks on their way to a disk or a remote cache are written first, within half a minute.
        Open calls of other threads end with a `QuireError` after the step that is under way.
        """
        for shared in (self._generating, self._embedding):
            if shared is not None:
                shared.close()
        gc.collect()  # the engine's parts refer to each other
        free_cached_memory()
        wait_until_freed(self._memory_before)

    @property
    def engine(self) -> Engine:
        """To be inspected, or stepped by hand while no other thread uses this LLM."""
        return self._shared.between_steps(lambda engine: engine)

    @property
    def tokenizer(self) -> Tokenizer | None:
        if self._embedding is not None:
            return self._embedding.engine.tokenizer
        return self._shared.engine.model.tokenizer

    @full_collections_held_off()
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: Adapters = None,
        priority: Sequence[int] | None = None,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Answer prompts, together; the outputs are in their order.

        Every prompt is checked before any is started. `lora_request` is the adapter of all prompts,
        or a list with one, or None, for each.
        """
        prompts = as_list(prompts)
        params = _one_each(sampling_params, SamplingParams, len(prompts))
        options = _options(len(prompts), priority, cache_salt, lora_request)
        return self._run(self._requests(prompts, params, options), use_tqdm)

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: Adapters = None,
        priority: Sequence[int] | None = None,
        cache_salt: str = "",
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, through the model's chat template.

        Of a model that thinks, `text` is the words and `reasoning` the thoughts; a form that
        `structured` asks for begins behind them.
        """
        many = bool(messages) and not isinstance(messages[0], dict)
        conversations: Any = messages if many else [messages]
        prompts = [self._chat_prompt(each, chat_template_kwargs) for each in conversations]
        chats = [self.thinking_chat(prompt) for prompt in prompts]
        each: Any = _one_each(sampling_params, SamplingParams, len(prompts))
        outputs = self.generate(
            prompts,
            list(map(chat_params, each, chats)),
            use_tqdm,
            lora_request=lora_request,
            priority=priority,
            cache_salt=cache_salt,
        )
        for chat, output in zip(chats, outputs, strict=True):
            if chat is not None:
                chat.read(output)
        return outputs

    def thinking_chat(self, prompt_ids: Sequence[int]) -> ThinkingChat | None:
        """What tells thoughts from words in the answer to a chat; None if the model has none."""
        return ThinkingChat.of(self.tokenizer, prompt_ids)

    @full_collections_held_off()
    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams] | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: Adapters = None,
        priority: Sequence[int] | None = None,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Like `generate`, by beam search: the `outputs` of each output are beams, best first."""
        prompts = as_list(prompts)
        each = _one_each(params, BeamSearchParams, len(prompts))
        options = _options(len(prompts), priority, cache_salt, lora_request)
        return self._run(self._requests(prompts, each, options), use_tqdm)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Iterator[RequestOutput]:
        """Answer one prompt, token by token: each output has the whole text so far.

        While other threads generate, their steps advance this request, too; the next output then
        has the tokens of several steps.
        Leaving the loop early aborts the request.
        """
        params = sampling_params or SamplingParams()
        options = RequestOptions(
            stream=True, priority=priority, cache_salt=cache_salt, lora_request=lora_request
        )
        request = self._request(prompt, params, options)
        output = None
        with self._shared.submitted([request]) as inbox:
            while output is None or not output.finished:
                output = inbox.outputs.pop(request.id, None)
                if output is None:
                    self._shared.advance(inbox)
                else:
                    self._shared.hand_over()
                    yield output

    def stream_chat(
        self,
        messages: Sequence[ChatMessage],
        sampling_params: SamplingParams | None = None,
        *,
        chat_template_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> Iterator[RequestOutput]:
        """Answer a conversation, token by token; `options` are those of `stream`.

        The text is all that the model writes, tags and all; `thinking_chat` can read it.
        """
        prompt = self._chat_prompt(messages, chat_template_kwargs)
        params = chat_params(sampling_params or SamplingParams(), self.thinking_chat(prompt))
        return self.stream(prompt, params, **options)

    def stats(self) -> dict[str, Any]:
        """Blocks, cache hits and counters, as a plain dict."""
        if self._embedding is not None:
            return self._embedding.between_steps(lambda engine: engine.stats())
        return self._shared.between_steps(engine_stats)

    def reset_prefix_cache(self, device_only: bool = False) -> int:
        """Forget all cached blocks that no request holds; returns how many the device had.

        What host memory keeps is forgotten too, but not what is on disks or in a remote cache.
        """

        def forget(engine: Engine) -> int:
            scheduler = engine.scheduler
            scheduler.tiering.wait_for_copies(timeout=10.0)
            if not device_only:
                scheduler.tiering.clear_host()
            return scheduler.cache.clear()

        return self._shared.between_steps(forget)

    def describe_pool(self, width: int = 64) -> str:
        """The block pool as a small picture in text."""
        return self._shared.between_steps(
            lambda engine: pool_picture(engine.scheduler.cache.allocator, width)
        )

    def _requests(
        self,
        prompts: list[Prompt],
        params: list[SamplingParams | BeamSearchParams],
        options: list[RequestOptions],
    ) -> list[Request]:
        return [self._request(*each) for each in zip(prompts, params, options, strict=True)]

    def _request(
        self,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams,
        options: RequestOptions,
    ) -> Request:
        name = f"request-{next(self._numbers)}"
        request = self._shared.engine.make_request(name, plain_prompt(prompt), params, options)
        if request.grammar is not None:
            while not request.grammar.is_done:
                request.grammar.wait(LOOK_AGAIN_S)
                self._shared.check()
            request.grammar.check()
        if request.lora is not None:
            while not request.lora.is_read:
                request.lora.wait(LOOK_AGAIN_S)
                self._shared.check()
            request.lora.check()
        return request

    def _chat_prompt(
        self, messages: Sequence[ChatMessage], variables: dict[str, Any] | None
    ) -> list[int]:
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise RequestError("This model has no tokenizer, so it cannot chat; use generate.")
        quotes = Quotes(tokenizer)
        shown = quotes.hide(list(messages))
        return quotes.encode(tokenizer.apply_chat_template(shown, variables=quotes.hide(variables)))

    def _run(self, requests: list[Request], use_tqdm: bool) -> list[RequestOutput]:
        with self._shared.submitted(requests) as inbox:
            for _ in self._progress(inbox, len(requests), use_tqdm):
                self._shared.advance(inbox)
        return [inbox.outputs[request.id] for request in requests]

    def _progress(self, inbox: Inbox, total: int, use_tqdm: bool) -> Iterator[None]:
        """Step until all outputs are there; a bar shows how many are, and at what rate."""
        if not use_tqdm:
            while len(inbox.outputs) < total:
                yield
            return
        from tqdm import tqdm

        before = self._shared.num_generated_tokens
        with tqdm(total=total, desc="requests", unit="req") as bar:
            while len(inbox.outputs) < total:
                yield
                rate = (self._shared.num_generated_tokens - before) / bar.format_dict["elapsed"]
                bar.set_postfix_str(f"{rate:,.0f} tok/s", refresh=False)
                bar.update(len(inbox.outputs) - bar.n)


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


def _options(
    count: int, priority: Sequence[int] | None, cache_salt: str, adapters: Adapters
) -> list[RequestOptions]:
    priorities = list(priority) if priority is not None else [0] * count
    if len(priorities) != count:
        raise RequestError(
            f"{count} prompts came with {len(priorities)} priorities; give one each."
        )
    each = list(adapters) if isinstance(adapters, Sequence) else [adapters] * count
    if len(each) != count:
        raise RequestError(
            f"{count} prompts came with {len(each)} adapters; give one, or one each."
        )
    return [
        RequestOptions(priority=first, cache_salt=cache_salt, lora_request=adapter)
        for first, adapter in zip(priorities, each, strict=True)
    ]
