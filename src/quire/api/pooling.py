"""Embeddings, scores and classes from Python, under vLLM's names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, TypeVar

from quire.api.prompts import Prompt, as_list, plain_prompt
from quire.api.shared_engine import Inbox, SharedEngine
from quire.engine.pooling.engine import PoolingEngine
from quire.engine.pooling.request import PoolingOutput, Vector
from quire.errors import QuireError, RequestError
from quire.gc_control import full_collections_held_off
from quire.models.pooling.facts import CLASSIFY, EMBED, PoolingFacts
from quire.models.pooling.inputs import TextInput, TextReader
from quire.models.pooling.scoring import Scoring
from quire.pooling_params import PoolingParams

T = TypeVar("T")


@dataclass(frozen=True)
class EmbeddingOutput:
    embedding: list[float]


@dataclass(frozen=True)
class ClassificationOutput:
    probs: list[float]
    label: str  # of the likeliest class

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(frozen=True)
class ScoringOutput:
    score: float


@dataclass(frozen=True)
class PooledOutput:
    data: Vector


@dataclass(frozen=True)
class PoolingRequestOutput(Generic[T]):
    """A text's token ids, or those of a pair, and what became of it."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: T
    finished: bool = True


class PoolingCalls:
    """What an `LLM` with a model for it can do besides writing."""

    _numbers: Iterator[int]

    @property
    def _pooling(self) -> SharedEngine[PoolingEngine]:
        """QuireError if the model writes text."""
        raise NotImplementedError

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        prompt_name: str | None = None,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """An embedding for each text; `prompt_name` is that of a prompt to put before all."""
        self._expect(EMBED, "embeddings")
        found = self._pool(prompts, truncate_prompt_tokens, prompt_name, use_tqdm, pooling_params)
        return [_shown(each, EmbeddingOutput(_data(each).tolist())) for each in found]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """The probability of each class, for each text."""
        labels = self._expect(CLASSIFY, "classes").labels
        found = self._pool(prompts, truncate_prompt_tokens, None, use_tqdm, pooling_params)
        return [
            _shown(
                each,
                ClassificationOutput(_data(each).tolist(), labels[int(_data(each).argmax())]),
            )
            for each in found
        ]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        prompt_name: str | None = None,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput[PooledOutput]]:
        """What the model makes of each text, whichever that is, as an array."""
        found = self._pool(prompts, truncate_prompt_tokens, prompt_name, use_tqdm, pooling_params)
        return [_shown(each, PooledOutput(_data(each))) for each in found]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """How well the texts of each pair fit: by a reranker, or by the cosine of embeddings.

        One text on the left goes with each on the right.
        """
        left = [data_1] if isinstance(data_1, str) else list(data_1)
        right = [data_2] if isinstance(data_2, str) else list(data_2)
        scoring = Scoring.of(
            self._reader, self._facts, left, right, truncate=truncate_prompt_tokens
        )
        params = pooling_params or PoolingParams()
        if scoring.by_cosine:
            params = replace(params, use_activation=True)
        found = self._run_pooling(scoring.inputs, params, use_tqdm)
        scores = scoring.scores([_data(each) for each in found])
        return [
            PoolingRequestOutput(found[i].request_id, scoring.token_ids(i), ScoringOutput(score))
            for i, score in enumerate(scores)
        ]

    # --- how ------------------------------------------------------------------------------------

    @property
    def _facts(self) -> PoolingFacts:
        return self._pooling.engine.facts

    @cached_property
    def _reader(self) -> TextReader:
        engine = self._pooling.engine
        return TextReader(engine.tokenizer, engine.facts, engine.limits.max_model_len)

    def _expect(self, task: str, what: str) -> PoolingFacts:
        if self._facts.task != task:
            raise RequestError(f"This model gives no {what}; encode and score are what it has.")
        return self._facts

    def _pool(
        self,
        prompts: Prompt | Sequence[Prompt],
        truncate: int | None,
        prompt_name: str | None,
        use_tqdm: bool,
        params: PoolingParams | None,
    ) -> list[PoolingOutput]:
        inputs = [plain_prompt(each) for each in as_list(prompts)]
        texts = self._reader.texts(inputs, prompt_name=prompt_name, truncate=truncate)
        return self._run_pooling(texts, params or PoolingParams(), use_tqdm)

    def _run_pooling(
        self, texts: list[TextInput], params: PoolingParams, use_tqdm: bool
    ) -> list[PoolingOutput]:
        """Every text is checked before any is started."""
        shared = self._pooling
        with full_collections_held_off():
            requests = [
                shared.engine.make_request(
                    f"text-{next(self._numbers)}", text.token_ids, _params_of(text, params)
                )
                for text in texts
            ]
            with shared.submitted(requests) as inbox:
                for _ in _progress(inbox, len(requests), use_tqdm):
                    shared.advance(inbox)
        return [inbox.outputs[request.id] for request in requests]


def _params_of(text: TextInput, params: PoolingParams) -> PoolingParams:
    """The same object for all texts that are no pairs: there may be thousands."""
    return params if text.second_text is None else replace(params, second_text=text.second_text)


def _progress(inbox: Inbox, total: int, use_tqdm: bool) -> Iterator[None]:
    from tqdm import tqdm

    with tqdm(total=total, desc="texts", unit="text", disable=not use_tqdm) as bar:
        while len(inbox.outputs) < total:
            yield
            bar.update(len(inbox.outputs) - bar.n)


def _data(output: PoolingOutput) -> Vector:
    if output.data is None:
        raise QuireError(output.error or "The text was not computed.")
    return output.data


def _shown(output: PoolingOutput, outputs: T) -> PoolingRequestOutput[T]:
    return PoolingRequestOutput(output.request_id, output.prompt_token_ids, outputs)
