"""`POST /v1/rerank` and `POST /v1/score`: how well texts fit each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request

from quire.api.server.answers.pooled import Pooled
from quire.api.server.schema.pooling import RerankRequest, ScoreRequest
from quire.api.server.state import Caller, State
from quire.models.pooling.scoring import Scoring

router = APIRouter()


@router.post("/v1/rerank")
@router.post("/rerank", include_in_schema=False)
@router.post("/v2/rerank", include_in_schema=False)
async def rerank(
    request: Request, body: RerankRequest, state: State, caller: Caller
) -> dict[str, Any]:
    """Documents by how well they answer a query, the best first; as Jina and Cohere answer."""
    pooled = Pooled(state, body, caller, "rerank")
    documents: list[str] = body.documents
    scores = await _scores(request, pooled, body, [body.query], documents)
    best = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n]
    results: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in best]
    # Cohere's second version sends none back.
    is_second = request.url.path.startswith("/v2")
    if body.return_documents if body.return_documents is not None else not is_second:
        for result in results:
            result["document"] = {"text": documents[result["index"]]}
    return {"id": pooled.id, "model": pooled.model, "results": results, "usage": pooled.usage()}


@router.post("/v1/score")
@router.post("/score", include_in_schema=False)
async def score(
    request: Request, body: ScoreRequest, state: State, caller: Caller
) -> dict[str, Any]:
    """A score for each pair of texts; as vLLM answers."""
    pooled = Pooled(state, body, caller, "score")
    left, right = body.sides()
    scores = await _scores(request, pooled, body, left, right)
    data = [{"index": i, "object": "score", "score": each} for i, each in enumerate(scores)]
    return {**pooled.head(object="list"), "data": data, "usage": pooled.usage()}


async def _scores(
    request: Request,
    pooled: Pooled,
    body: RerankRequest | ScoreRequest,
    left: list[str],
    right: list[str],
) -> list[float]:
    scoring = await pooled.read(
        lambda reader: Scoring.of(
            reader,
            pooled.facts,
            left,
            right,
            truncate=body.truncate_prompt_tokens,
            instruction=body.instruction,
            names=body.SIDES,
        ),
        [*left, *right],
    )
    params = body.params()
    if scoring.by_cosine:
        params = replace(params, use_activation=True)
    return scoring.scores(await pooled.vectors(request, scoring.inputs, params))
