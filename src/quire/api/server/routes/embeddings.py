"""`POST /v1/embeddings` and `POST /classify`: numbers for each text by itself."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from quire.api.server.answers.pooled import Pooled
from quire.api.server.errors import bad_request
from quire.api.server.schema.pooling import ClassifyRequest, EmbeddingRequest
from quire.api.server.state import Caller, State
from quire.engine.pooling.request import Vector
from quire.models.pooling.facts import CLASSIFY, EMBED
from quire.models.pooling.inputs import ListName

router = APIRouter()

INPUT = ListName("input")

MANY_NUMBERS = 50_000  # from which to write them would hold up other requests


@router.post("/v1/embeddings")
@router.post("/embeddings", include_in_schema=False)
async def embeddings(
    request: Request, body: EmbeddingRequest, state: State, caller: Caller
) -> Response:
    """An embedding for each text, as OpenAI's clients ask for them."""
    pooled = Pooled(state, body, caller, "embd")
    if pooled.facts.task != EMBED:
        raise bad_request("This model gives classes and scores, and no embeddings.", param="model")
    texts, special = body.texts(), body.add_special_tokens is not False
    inputs = await pooled.read(
        lambda reader: reader.texts(
            texts,
            prompt_name=body.prompt(),
            truncate=body.truncate_prompt_tokens,
            add_special_tokens=special,
            named=INPUT,
        ),
        texts,
    )
    vectors = await pooled.vectors(request, inputs, body.params())
    write = _as_base64 if body.encoding_format == "base64" else _as_list

    def respond() -> Response:
        data = [
            {"object": "embedding", "index": i, "embedding": write(vector)}
            for i, vector in enumerate(vectors)
        ]
        head = pooled.head(object="list")
        return JSONResponse({**head, "data": data, "usage": pooled.usage()})

    if sum(map(len, vectors)) < MANY_NUMBERS:
        return respond()
    return await asyncio.to_thread(respond)


@router.post("/classify")
@router.post("/v1/classify", include_in_schema=False)
async def classify(
    request: Request, body: ClassifyRequest, state: State, caller: Caller
) -> dict[str, Any]:
    """The probability of each class, for each text; as vLLM answers."""
    pooled = Pooled(state, body, caller, "classify")
    if pooled.facts.task != CLASSIFY:
        raise bad_request("This model gives embeddings, and no classes.", param="model")
    texts, special = body.texts(), body.add_special_tokens is not False
    inputs = await pooled.read(
        lambda reader: reader.texts(
            texts,
            truncate=body.truncate_prompt_tokens,
            add_special_tokens=special,
            named=INPUT,
        ),
        texts,
    )
    vectors = await pooled.vectors(request, inputs, body.params())
    labels = pooled.facts.labels
    data = [
        {
            "index": i,
            "label": labels[int(vector.argmax())],
            "probs": vector.tolist(),
            "num_classes": len(labels),
        }
        for i, vector in enumerate(vectors)
    ]
    return {**pooled.head(object="list"), "data": data, "usage": pooled.usage()}


def _as_base64(vector: Vector) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def _as_list(vector: Vector) -> list[float]:
    numbers: list[float] = vector.tolist()
    return numbers
