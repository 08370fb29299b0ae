"""The routes that answer with numbers, as real clients and curl call them."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from server_process import ServerProcess

TEXTS = ["the cat sat", "a dog", "old sun", "the red dog ran on the mat"]
KEY = {"Authorization": "Bearer sk-one"}


@pytest.fixture(scope="module")
def embed(embedder: ServerProcess) -> openai.OpenAI:
    return embedder.openai()


@pytest.fixture(scope="module")
def http(embedder: ServerProcess) -> Iterator[httpx.Client]:
    with embedder.http() as client:
        yield client


@pytest.fixture(scope="module")
def keyed(reranker: ServerProcess) -> Iterator[httpx.Client]:
    with reranker.http(headers=KEY) as client:
        yield client


def vectors(client: openai.OpenAI, texts: Any, **options: Any) -> np.ndarray:
    found = client.embeddings.create(model="tiny", input=texts, **options)
    assert [each.index for each in found.data] == list(range(len(found.data)))
    return np.array([each.embedding for each in found.data])


def answer(client: httpx.Client, route: str, **body: Any) -> Any:
    response = client.post(route, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def refusal(client: httpx.Client, route: str, **body: Any) -> str:
    response = client.post(route, json=body)
    assert response.status_code == 400, response.text
    message: str = response.json()["error"]["message"]
    return message


def test_openais_client_embeds(embed: openai.OpenAI) -> None:
    found = embed.embeddings.create(model="tiny", input=TEXTS)
    assert found.model == "tiny"
    assert found.usage.prompt_tokens == found.usage.total_tokens == 5 + 4 + 4 + 9
    asked_for = vectors(embed, TEXTS)  # which the client has sent as base64
    assert asked_for.shape == (4, 24)
    np.testing.assert_allclose(np.linalg.norm(asked_for, axis=1), 1, atol=1e-6)
    np.testing.assert_array_equal(asked_for, vectors(embed, TEXTS, encoding_format="float"))
    for text, vector in zip(TEXTS, asked_for, strict=True):
        np.testing.assert_allclose(vectors(embed, text)[0], vector, atol=1e-6)


def test_every_shape_of_input(embed: openai.OpenAI, http: httpx.Client) -> None:
    ids = answer(http, "/tokenize", prompt=TEXTS[0])["tokens"]
    expected = vectors(embed, TEXTS[0])
    for same in (ids, [ids], [TEXTS[0]]):
        np.testing.assert_allclose(vectors(embed, same), expected, atol=1e-6)


def test_base64_is_little_endian_float32(http: httpx.Client) -> None:
    plain, coded = (
        answer(http, "/v1/embeddings", input="a dog", encoding_format=form)["data"][0]["embedding"]
        for form in ("float", "base64")
    )
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(coded), "<f4"), plain)


def test_dimensions_and_norms(embed: openai.OpenAI, http: httpx.Client) -> None:
    whole, cut = vectors(embed, "a dog")[0], vectors(embed, "a dog", dimensions=6)[0]
    np.testing.assert_allclose(cut, whole[:6] / np.linalg.norm(whole[:6]), atol=1e-6)
    raw = answer(http, "/v1/embeddings", input="a dog", normalize=False)["data"][0]["embedding"]
    assert np.linalg.norm(raw) != pytest.approx(1)
    np.testing.assert_allclose(raw / np.linalg.norm(raw), whole, atol=1e-6)
    with pytest.raises(openai.BadRequestError, match="more than the 24 numbers"):
        vectors(embed, "a dog", dimensions=25)


def test_long_texts_are_cut_only_if_asked(http: httpx.Client) -> None:
    long = " ".join(["dog"] * 100)
    response = http.post("/v1/embeddings", json={"input": long})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert "The text input is too long: it has 102 tokens" in response.json()["error"]["message"]
    for texts in (["a", long], [[5], [5] * 49], ["a", "x" * 100_000]):
        assert "The text input[1] is too long" in refusal(http, "/v1/embeddings", input=texts)
    scored = {"query": "a", "documents": ["b", "c", long]}
    assert "The text documents[2] is too long" in refusal(http, "/v1/rerank", **scored)
    found = answer(http, "/v1/embeddings", input=long, truncate_prompt_tokens=-1)
    assert found["usage"]["prompt_tokens"] == 48
    found = answer(http, "/v1/embeddings", input=[long, "a"], truncate_prompt_tokens=7)
    assert found["usage"]["prompt_tokens"] == 7 + 3


def test_many_clients_at_once(embed: openai.OpenAI) -> None:
    expected = vectors(embed, TEXTS)
    with ThreadPoolExecutor(8) as pool:
        each = list(pool.map(lambda i: vectors(embed, TEXTS[i % 4])[0], range(32)))
    np.testing.assert_allclose(each, expected[[i % 4 for i in range(32)]], atol=1e-6)


def test_what_this_model_does_not_do(http: httpx.Client) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    assert "writes no text" in refusal(http, "/v1/completions", prompt="a")
    assert "writes no text" in refusal(http, "/v1/chat/completions", **chat)
    assert "writes no text" in refusal(http, "/v1/messages", **chat)
    assert "writes no text" in refusal(http, "/v1/responses", input="a")
    assert "no classes" in refusal(http, "/classify", input="a")
    assert "no prompt 'x'" in refusal(http, "/v1/embeddings", input="a", prompt_name="x")
    assert "not be empty" in refusal(http, "/v1/embeddings", input=[])
    assert "at most 2,048" in refusal(http, "/v1/embeddings", input=["a"] * 2049)
    assert "priority" in refusal(http, "/v1/embeddings", input="a", priority=1)
    assert "stream is for answers" in refusal(http, "/v1/embeddings", input="a", stream=True)
    answer(http, "/v1/embeddings", input="a", stream=False)
    assert "input_type is one of" in refusal(http, "/v1/embeddings", input="a", input_type="x")
    assert http.get("/").status_code == 404  # the page has a chat, and blocks


def test_a_model_that_writes_embeds_nothing(quick: ServerProcess) -> None:
    with quick.http() as client:
        assert "writes text" in refusal(client, "/v1/embeddings", input="a")
        assert "writes text" in refusal(client, "/v1/rerank", query="a", documents=["b"])


@pytest.mark.parametrize("route", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_rerank_puts_the_best_first(route: str, keyed: httpx.Client) -> None:
    documents = [*TEXTS[:2], {"text": TEXTS[2]}]
    found = answer(keyed, route, model="tiny", query="red dog", documents=documents)
    results = found["results"]
    scores = [each["relevance_score"] for each in results]
    assert scores == sorted(scores, reverse=True)
    assert sorted(each["index"] for each in results) == [0, 1, 2]
    assert found["usage"]["total_tokens"] == sum((5 + 3, 5 + 2, 5 + 2))
    for each in results:
        # Cohere's second version sends no documents back.
        expected = None if route.startswith("/v2") else {"text": TEXTS[each["index"]]}
        assert each.get("document") == expected
    one = answer(
        keyed, route, query="red dog", documents=documents, top_n=1, return_documents=False
    )
    assert one["results"] == [{k: v for k, v in results[0].items() if k != "document"}]


def test_scores_are_those_of_rerank(keyed: httpx.Client) -> None:
    ranked = answer(keyed, "/v1/rerank", query="red dog", documents=TEXTS)["results"]
    expected = {each["index"]: each["relevance_score"] for each in ranked}
    named = {"text_1": "red dog", "text_2": TEXTS}, {"queries": "red dog", "documents": TEXTS}
    for body in named:
        found = answer(keyed, "/score", **body)
        assert found["data"][0]["object"] == "score"
        scores = {each["index"]: each["score"] for each in found["data"]}
        assert scores == pytest.approx(expected)
    assert "cannot be paired" in refusal(keyed, "/score", text_1=["a", "b"], text_2=["c", "d", "e"])
    alone = [answer(keyed, "/score", text_1="red dog", text_2=each)["data"][0] for each in TEXTS]
    assert [each["score"] for each in alone] == pytest.approx([expected[i] for i in range(4)])
    assert "text_1 and text_2" in refusal(keyed, "/score", text_1="a")
    long = ["a", " ".join(["dog"] * 100)]
    assert "text_2[1] is too long" in refusal(keyed, "/score", text_1="a", text_2=long)
    assert "stream is for" in refusal(keyed, "/score", text_1="a", text_2="b", stream=True)
    assert "stream is for" in refusal(keyed, "/rerank", query="a", documents=["b"], stream=True)
    assert "max_tokens_per_doc" in refusal(
        keyed, "/rerank", query="a", documents=["b"], max_tokens_per_doc=10
    )


def test_classes_as_vllm_answers(keyed: httpx.Client) -> None:
    found = answer(keyed, "/classify", input=TEXTS, priority=-3)
    assert [each["label"] for each in found["data"]] == ["fits"] * 4
    assert all(each["num_classes"] == 1 for each in found["data"])
    assert all(0 < each["probs"][0] < 1 for each in found["data"])
    assert "no embeddings" in refusal(keyed, "/v1/embeddings", input="a")


def test_keys_are_asked_for(reranker: ServerProcess) -> None:
    with reranker.http() as client:
        assert client.post("/v1/rerank", json={}).status_code == 401
        assert client.post("/classify", json={}).status_code == 401


def test_requests_are_counted(http: httpx.Client) -> None:
    def counted(name: str) -> float:
        lines = http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    names = ("quire_computed_tokens_total", "vllm:e2e_request_latency_seconds_count")
    before = [counted(name) for name in names]
    answer(http, "/v1/embeddings", input=["a dog", "sun"])
    # What the engine says is kept for a moment.
    assert counted(names[1]) == before[1] + 1
    assert counted("quire_steps_total") > 0
    assert "quire_num_blocks" not in http.get("/metrics").text
