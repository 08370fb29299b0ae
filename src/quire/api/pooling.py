"""Embeddings, scores and classes from Python, under vLLM's names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

from quire.api.prompts import Prompt, as_list, kind_name, plain_prompt
from quire.api.read_ahead import read_ahead
from quire.api.shared_engine import Inbox, SharedEngine
from quire.engine.limits import checked_ids
from quire.engine.pooling.engine import PoolingEngine
from quire.engine.pooling.request import PoolingOutput, PoolingRequest, Vector, Vectors
from quire.errors import QuireError, RequestError
from quire.gc_control import full_collections_held_off
from quire.models.pooling.facts import CLASSIFY, EMBED, PoolingFacts
from quire.models.pooling.inputs import ListName, TextInput, TextReader
from quire.models.pooling.scoring import Scoring
from quire.pooling_params import PoolingParams
from quire.runner.text_batch import TextBatch

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
        return self._pool(
            prompts,
            pooling_params,
            lambda vector: EmbeddingOutput(vector.tolist()),
            truncate=truncate_prompt_tokens,
            prompt_name=prompt_name,
            use_tqdm=use_tqdm,
        )

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
        return self._pool(
            prompts,
            pooling_params,
            lambda vector: ClassificationOutput(vector.tolist(), labels[int(vector.argmax())]),
            truncate=truncate_prompt_tokens,
            use_tqdm=use_tqdm,
        )

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
        return self._pool(
            prompts,
            pooling_params,
            PooledOutput,
            truncate=truncate_prompt_tokens,
            prompt_name=prompt_name,
            use_tqdm=use_tqdm,
        )

    @full_collections_held_off()
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
        left, right = _texts(data_1), _texts(data_2)
        scoring = Scoring.of(
            self._reader, self._facts, left, right, truncate=truncate_prompt_tokens
        )
        params = _params(pooling_params)
        if scoring.by_cosine:
            params = replace(params, use_activation=True)
        found = self._compute([scoring.inputs], len(scoring.inputs), params, use_tqdm)
        scores = scoring.scores([vector for _, vector in found])
        return [
            PoolingRequestOutput(self._name(), scoring.token_ids(i), ScoringOutput(score))
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

    @full_collections_held_off()  # the outputs are many objects, and none of them is garbage
    def _pool(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: PoolingParams | None,
        shown: Callable[[Vector], T],
        *,
        truncate: int | None,
        prompt_name: str | None = None,
        use_tqdm: bool,
    ) -> list[PoolingRequestOutput[T]]:
        asked = _params(params)
        inputs = [self._checked(plain_prompt(each)) for each in as_list(prompts)]

        def read(places: Sequence[int]) -> list[TextInput]:
            return self._reader.texts(
                [inputs[place] for place in places],
                prompt_name=prompt_name,
                truncate=truncate,
                named=ListName("prompts", places[0]),
            )

        with closing(read_ahead(read, range(len(inputs)))) as parts:
            found = self._compute(parts, len(inputs), asked, use_tqdm)
            return [
                PoolingRequestOutput(self._name(), text.token_ids, shown(vector))
                for text, vector in found
            ]

    def _compute(
        self, parts: Iterable[list[TextInput]], total: int, params: PoolingParams, use_tqdm: bool
    ) -> list[tuple[TextInput, Vector]]:
        """Each part is one request, submitted as soon as it is there."""
        shared = self._pooling
        texts: list[TextInput] = []
        calls: list[tuple[PoolingRequest, Inbox]] = []
        with ExitStack() as stack:
            bar = stack.enter_context(_progress_bar(total, use_tqdm))

            def advance(inbox: Inbox) -> None:
                shared.advance(inbox)
                bar.update(sum(request.num_ended for request, _ in calls) - bar.n)

            for part in parts:
                texts += part
                request = shared.engine.make_request(self._name(), _batch(part), params)
                inbox = stack.enter_context(shared.submitted([request]))
                calls.append((request, inbox))
                advance(inbox)
                shared.hand_over()  # to another thread, until the next part is there
            for _, inbox in calls:
                while not inbox.outputs:
                    advance(inbox)
        vectors = [row for request, inbox in calls for row in _rows(inbox.outputs[request.id])]
        return list(zip(texts, vectors, strict=True))

    def _checked(self, prompt: str | list[int]) -> str | list[int]:
        """Token ids that a caller gives; those of a tokenizer are not in doubt."""
        if isinstance(prompt, str):
            return prompt
        ids: list[int] = checked_ids(prompt, self._pooling.engine.limits.vocab_size).tolist()
        return ids

    def _name(self) -> str:
        return f"text-{next(self._numbers)}"


def _params(given: PoolingParams | None) -> PoolingParams:
    if given is not None and not isinstance(given, PoolingParams):
        raise RequestError(
            f"pooling_params is one PoolingParams for all texts, not {kind_name(given)}."
        )
    return given or PoolingParams()


def _texts(given: str | Sequence[str]) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, Sequence) or not all(isinstance(each, str) for each in texts):
        raise RequestError("What is scored is a text, or a list of texts.")
    return list(texts)


def _batch(texts: list[TextInput]) -> TextBatch:
    return TextBatch.of([text.token_ids for text in texts], [text.second_text for text in texts])


def _rows(output: PoolingOutput) -> Vectors:
    if output.vectors is None or output.errors:
        raise QuireError(next(iter(output.errors.values()), "The texts were not computed."))
    return output.vectors


def _progress_bar(total: int, use_tqdm: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc="texts", unit="text", disable=not use_tqdm)
