"""Bodies of the routes that answer with numbers: embeddings, scores, classes."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema

from quire.api.server.errors import bad_request
from quire.api.server.keys import Tenant
from quire.api.server.schema.completions import PROMPTS_SCHEMA, Prompt, read_prompts
from quire.pooling_params import PoolingParams
from quire.request_options import RequestOptions

MAX_TEXTS = 2048

Inputs = Annotated[Any, AfterValidator(partial(read_prompts, most=MAX_TEXTS)), PROMPTS_SCHEMA]

# What embedding services call the two sides of a search, as sentence-transformers calls them.
INPUT_TYPES = {
    "query": "query",
    "search_query": "query",
    "document": "document",
    "passage": "document",
    "search_document": "document",
}


class PoolingFields(BaseModel):
    """Fields of every request that reads texts only."""

    model_config = ConfigDict(strict=True, extra="allow")

    # Other servers', which would change the answer, and what to use instead.
    NOT_SUPPORTED: ClassVar[dict[str, str]] = {}

    model: str | None = None
    user: str | None = None
    priority: int | None = None
    truncate_prompt_tokens: int | None = None
    use_activation: bool | None = None

    def unknown_fields(self) -> list[str]:
        """Names that Quire does not read; ApiError for those that it would have to."""
        extra = self.model_extra or {}
        if extra.get("stream"):
            raise bad_request(
                "stream is for answers that are written; vectors and scores come all at once.",
                param="stream",
                code="unsupported_parameter",
            )
        for name, instead in self.NOT_SUPPORTED.items():
            if extra.get(name) is not None:
                raise bad_request(
                    f"{name} is not supported by this server; {instead}.",
                    param=name,
                    code="unsupported_parameter",
                )
        return list(extra)

    def options(self, caller: Tenant, name: str, queue_s: float) -> RequestOptions:
        """How the caller's request is served; `name` is the answer's id."""
        return RequestOptions(
            priority=self.priority or 0,
            cache_salt=caller.namespace(""),
            tenant=caller.salt or None,
            name=name,
            background=caller.in_background,
            turn=caller.turn,
            queue_s=None if caller.in_background else queue_s,
        )

    def params(self) -> PoolingParams:
        return PoolingParams(use_activation=self.use_activation)


class EmbeddingRequest(PoolingFields):
    NOT_SUPPORTED: ClassVar[dict[str, str]] = {
        "messages": "send input",
        "embed_dtype": "use encoding_format",
    }

    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    prompt_name: str | None = None
    input_type: str | None = None
    add_special_tokens: bool | None = None

    def texts(self) -> list[Prompt]:
        texts: list[Prompt] = self.input
        return texts

    def prompt(self) -> str | None:
        """The name of the prompt to put before each text."""
        if self.input_type is None:
            return self.prompt_name
        if self.prompt_name is not None or self.input_type not in INPUT_TYPES:
            raise bad_request(
                f"input_type is one of {', '.join(INPUT_TYPES)}, without prompt_name.",
                param="input_type",
            )
        return INPUT_TYPES[self.input_type]

    def params(self) -> PoolingParams:
        activation = self.normalize if self.use_activation is None else self.use_activation
        return PoolingParams(dimensions=self.dimensions, use_activation=activation)


class ClassifyRequest(PoolingFields):
    input: Inputs
    add_special_tokens: bool | None = None

    def texts(self) -> list[Prompt]:
        texts: list[Prompt] = self.input
        return texts


def _texts(value: Any) -> list[str]:
    """One text, or several; Jina and Cohere also have objects with a `text`."""
    texts = [value] if isinstance(value, (str, dict)) else value
    if not isinstance(texts, list) or not texts:
        raise ValueError("it must be a text or a list of texts, and not be empty")
    if len(texts) > MAX_TEXTS:
        raise ValueError(f"{len(texts):,} texts came at once; send at most {MAX_TEXTS:,}")
    found: list[Any] = [each.get("text") if isinstance(each, dict) else each for each in texts]
    if not all(isinstance(each, str) for each in found):
        raise ValueError("each must be a text, or an object with a text")
    return found


_TEXT = {"type": "string"}
_TEXT_OBJECT = {"type": "object", "properties": {"text": _TEXT}, "required": ["text"]}
_DOCUMENT = {"anyOf": [_TEXT, _TEXT_OBJECT]}
_MANY = {"type": "array", "items": _DOCUMENT, "minItems": 1}
Texts = Annotated[
    Any, AfterValidator(_texts), WithJsonSchema({"anyOf": [*_DOCUMENT["anyOf"], _MANY]})
]
Documents = Annotated[Any, AfterValidator(_texts), WithJsonSchema(_MANY)]


class RerankRequest(PoolingFields):
    SIDES: ClassVar[tuple[str, str]] = ("query", "documents")
    NOT_SUPPORTED: ClassVar[dict[str, str]] = {
        "max_tokens_per_doc": "use truncate_prompt_tokens, which counts the query, too",
        "max_chunks_per_doc": "send chunks as documents of their own",
    }

    query: str
    documents: Documents
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None
    instruction: str | None = None


class ScoreRequest(PoolingFields):
    """`text_1` and `text_2`; newer versions of vLLM say `queries` and `documents`."""

    SIDES: ClassVar[tuple[str, str]] = ("text_1", "text_2")

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    instruction: str | None = None

    def sides(self) -> tuple[list[str], list[str]]:
        left = self.text_1 if self.text_1 is not None else self.queries
        right = self.text_2 if self.text_2 is not None else self.documents
        if left is None or right is None:
            raise bad_request("Give text_1 and text_2, or queries and documents.", param="text_1")
        return left, right
