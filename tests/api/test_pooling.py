"""`LLM.embed`, `score` and `classify` against sentence-transformers and transformers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from minilm import minilm_path
from patience import PATIENCE_S
from pooling_models import write_model

from quire import LLM, PoolingParams, SamplingParams
from quire.api import read_ahead
from quire.engine.pooling.engine import PoolingEngine
from quire.errors import ConfigError, ModelError, RequestError
from quire.models.pooling.facts import INSTRUCTION, QWEN3_RERANKER
from quire.models.pooling.inputs import TextReader

PROSE = (Path(__file__).parents[1] / "golden" / "prose.txt").read_text()
SENTENCES = [part.strip() for part in PROSE.replace("\n", " ").split(".") if part.strip()][:24]
TEXTS = ["the cat sat on the mat", "dog", "a red old dog ran far", "sun moon", "the blue tree"]


def load(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), use_tqdm=False, dtype="float32", device="cpu", **settings)


def embeddings(llm: LLM, texts: Any, **options: Any) -> Any:
    found = llm.embed(texts, use_tqdm=False, **options)
    return np.array([each.outputs.embedding for each in found])


def sentence_transformer(folder: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu")


@pytest.fixture(scope="module")
def minilm() -> Iterator[LLM]:
    with load(minilm_path()) as llm:
        yield llm


def test_real_embeddings_are_those_of_sentence_transformers(minilm: LLM) -> None:
    expected = sentence_transformer(minilm_path()).encode(SENTENCES)
    assert np.abs(embeddings(minilm, SENTENCES) - expected).max() < 1e-5


def test_texts_are_cut_only_if_asked(minilm: LLM) -> None:
    long = PROSE[:8000]
    with pytest.raises(RequestError, match="length is 256 tokens"):
        minilm.embed(long)
    [output] = minilm.embed(long, truncate_prompt_tokens=-1, use_tqdm=False)
    assert len(output.prompt_token_ids) == 256
    expected = sentence_transformer(minilm_path()).encode([long])  # which cuts unasked
    assert np.abs(np.array(output.outputs.embedding) - expected).max() < 1e-5
    [short] = minilm.embed(long, truncate_prompt_tokens=5, use_tqdm=False)
    assert short.prompt_token_ids == [*output.prompt_token_ids[:4], output.prompt_token_ids[-1]]
    with pytest.raises(RequestError, match="from 1 to max_model_len"):
        minilm.embed("x", truncate_prompt_tokens=257)


def test_dimensions_are_the_first_ones_made_length_1(minilm: LLM) -> None:
    whole = embeddings(minilm, SENTENCES[:3])[:, :16]
    params = PoolingParams(dimensions=16)
    cut = embeddings(minilm, SENTENCES[:3], pooling_params=params)
    np.testing.assert_allclose(cut, whole / np.linalg.norm(whole, axis=1)[:, None], atol=1e-6)


def test_a_score_of_embeddings_is_their_cosine(minilm: LLM) -> None:
    one, *others = embeddings(minilm, SENTENCES[:4])
    scores = minilm.score(SENTENCES[0], SENTENCES[1:4], use_tqdm=False)
    assert [each.outputs.score for each in scores] == pytest.approx([one @ o for o in others])
    with pytest.raises(RequestError, match="2 texts cannot be paired with 3"):
        minilm.score(["a", "b"], ["c", "d", "e"])


def test_token_ids_are_texts_too(minilm: LLM) -> None:
    ids = [each.prompt_token_ids for each in minilm.embed(SENTENCES[:2], use_tqdm=False)]
    np.testing.assert_array_equal(embeddings(minilm, ids), embeddings(minilm, SENTENCES[:2]))


def test_many_threads_share_the_steps(minilm: LLM) -> None:
    expected = embeddings(minilm, SENTENCES)
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda text: embeddings(minilm, text)[0], SENTENCES))
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_texts_are_read_while_others_are_computed(
    minilm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = embeddings(minilm, SENTENCES)
    monkeypatch.setattr(read_ahead, "FIRST", 2)
    monkeypatch.setattr(read_ahead, "PART", 5)
    assert [*read_ahead.read_ahead(sum, range(10))] == [1, 2 + 3 + 4 + 5 + 6, 7 + 8 + 9]
    assert [*read_ahead.read_ahead(sum, [])] == []
    ids = [each.prompt_token_ids for each in minilm.embed(SENTENCES[:3], use_tqdm=False)]
    found = embeddings(minilm, [*ids, *SENTENCES[3:]])
    np.testing.assert_allclose(found, expected, atol=1e-6)
    with pytest.raises(RequestError, match=rf"text prompts\[{len(SENTENCES)}\] is too long"):
        minilm.embed([*SENTENCES, PROSE[:8000]], use_tqdm=False)
    np.testing.assert_allclose(embeddings(minilm, SENTENCES[0])[0], expected[0], atol=1e-6)


def test_a_call_that_breaks_off_reads_no_further(
    minilm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "FIRST", 1)
    monkeypatch.setattr(read_ahead, "PART", 1)
    begun, texts, step = threading.Event(), TextReader.texts, PoolingEngine.step
    num_read = 0

    def slowly(reader: TextReader, *args: Any, **options: Any) -> Any:
        nonlocal num_read
        num_read += 1
        if num_read > 3:
            begun.wait(PATIENCE_S)
            time.sleep(0.01)
        return texts(reader, *args, **options)

    def interrupted(engine: PoolingEngine) -> Any:
        begun.set()
        raise KeyboardInterrupt

    monkeypatch.setattr(TextReader, "texts", slowly)
    monkeypatch.setattr(PoolingEngine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt) as kept:
        minilm.embed(["word"] * 1000, use_tqdm=False)
    assert kept.tb is not None  # a kept error keeps all that its frames refer to
    assert not any(each.name.startswith("quire-read-ahead") for each in threading.enumerate())
    assert num_read < 1000
    monkeypatch.setattr(PoolingEngine, "step", step)
    assert len(embeddings(minilm, ["word"])) == 1


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda llm: llm.embed("a", pooling_params=[PoolingParams()]), "one PoolingParams for all"),
        (lambda llm: llm.embed("a", truncate_prompt_tokens="5"), "from 1 to max_model_len"),
        (lambda llm: llm.score("a", 5), "a text, or a list of texts"),
        (lambda llm: llm.score(["a"], [["b"]]), "a text, or a list of texts"),
    ],
)
def test_what_is_no_text_or_parameter_is_refused(
    minilm: LLM, call: Callable[[LLM], object], says: str
) -> None:
    with pytest.raises(RequestError, match=says):
        call(minilm)


def test_a_model_that_only_reads_writes_nothing(minilm: LLM) -> None:
    with pytest.raises(RequestError, match="writes no text"):
        minilm.generate("Once", SamplingParams(max_tokens=1))
    with pytest.raises(RequestError, match="no classes"):
        minilm.classify("Once")


# --- every kind of folder ----------------------------------------------------------------------

MODES = ["cls", "mean", "max", "lasttoken", "mean_sqrt_len_tokens", "weightedmean", ("cls", "max")]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    write_model(folder, "BertModel")
    return folder


def write_modules(bert: Path, folder: Path, *modules: Any, **options: Any) -> Any:
    """The tiny BERT with these modules behind it, as sentence-transformers saves them."""
    from sentence_transformers import SentenceTransformer, models

    model = SentenceTransformer(
        modules=[models.Transformer(str(bert)), *modules], device="cpu", **options
    )
    model.save(str(folder))
    return model


@pytest.mark.parametrize("mode", MODES)
def test_every_way_of_pooling(mode: Any, bert: Path, tmp_path: Path) -> None:
    from sentence_transformers import models

    expected = write_modules(bert, tmp_path, models.Pooling(24, mode)).encode(TEXTS)
    with load(tmp_path) as llm:
        np.testing.assert_allclose(embeddings(llm, TEXTS), expected, atol=1e-5)


def test_dense_layers_norms_and_prompts(bert: Path, tmp_path: Path) -> None:
    from sentence_transformers import models

    modules = [models.Pooling(24, "mean"), models.Dense(24, 10), models.Normalize()]
    prompts = {"query": "old ", "document": ""}
    model = write_modules(bert, tmp_path, *modules, prompts=prompts, default_prompt_name="query")
    with load(tmp_path) as llm:
        np.testing.assert_allclose(embeddings(llm, TEXTS), model.encode(TEXTS), atol=1e-5)
        plain = model.encode(TEXTS, prompt_name="document")
        named = embeddings(llm, TEXTS, prompt_name="document")
        np.testing.assert_allclose(named, plain, atol=1e-5)
        with pytest.raises(RequestError, match="no prompt 'other'; this model has query"):
            llm.embed("x", prompt_name="other")
        # Queries and documents get their prompts by themselves.
        query = model.encode(["dog"], prompt_name="query")
        [score] = llm.score("dog", TEXTS[0], use_tqdm=False)
        assert score.outputs.score == pytest.approx((query @ plain[0]).item(), abs=1e-5)


@pytest.mark.parametrize(
    ("modules", "says"),
    [
        ([{"type": "x.Transformer", "path": "../elsewhere"}], "a folder beside"),
        ([{"type": "x.Pooling", "path": ""}], "does not begin with a Transformer"),
        ([{"type": "x.Transformer", "path": ""}, {"type": "x.LSTM", "path": ""}], "'LSTM'"),
        ([7], "a list of modules"),
        ({}, "JSON list"),
    ],
)
def test_modules_that_quire_cannot_follow(
    modules: Any, says: str, bert: Path, tmp_path: Path
) -> None:
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelError, match=says):
        load(tmp_path)


@pytest.mark.parametrize("family", ["Bert", "XLMRoberta"])
def test_pairs_are_scored_as_by_a_cross_encoder(family: str, tmp_path: Path) -> None:
    from sentence_transformers import CrossEncoder

    write_model(tmp_path, f"{family}ForSequenceClassification", num_labels=1)
    oracle = CrossEncoder(str(tmp_path), device="cpu")
    expected = oracle.predict([(TEXTS[0], text) for text in TEXTS[1:]])
    with load(tmp_path) as llm:
        scores = llm.score(TEXTS[0], TEXTS[1:], use_tqdm=False)
        found = [each.outputs.score for each in scores]
        np.testing.assert_allclose(found, expected, atol=1e-5)
        # Where a pair is too long, the second text gives way.
        [cut] = llm.score(TEXTS[0], " ".join(TEXTS * 4), truncate_prompt_tokens=16, use_tqdm=False)
        assert len(cut.prompt_token_ids) == 16
        with pytest.raises(RequestError, match="no embeddings"):
            llm.embed("x")


def test_classes_have_probabilities_and_names(tmp_path: Path) -> None:
    names = {0: "bad", 1: "good", 2: "so so"}
    model = write_model(tmp_path, "DistilBertForSequenceClassification", id2label=names)
    with load(tmp_path) as llm:
        found = llm.classify(TEXTS, use_tqdm=False)
        ids = [torch.tensor([each.prompt_token_ids]) for each in found]
        with torch.no_grad():
            expected = torch.cat([model(each).logits for each in ids]).softmax(-1)
        probs = np.array([each.outputs.probs for each in found])
        np.testing.assert_allclose(probs, expected.numpy(), atol=1e-5)
        labels = [names[int(i)] for i in expected.argmax(-1)]
        assert [each.outputs.label for each in found] == labels
        with pytest.raises(RequestError, match="3 classes"):
            llm.score("a", "b")
        raw = llm.encode(TEXTS[0], PoolingParams(use_activation=False), use_tqdm=False)
        assert raw[0].outputs.data.sum() != pytest.approx(1.0)


@torch.no_grad()
def test_a_reranker_is_asked_for_yes_or_no(tmp_path: Path) -> None:
    model = write_model(tmp_path, "Qwen3ForCausalLM")
    with load(tmp_path, task="score") as llm:
        scores = llm.score("red dog", TEXTS, use_tqdm=False)
        tokenizer = llm.tokenizer
    assert tokenizer is not None
    before, asked, after = QWEN3_RERANKER
    for text, score in zip(TEXTS, scores, strict=True):
        words = asked.format(instruction=INSTRUCTION, query="red dog", document=text)
        parts = [
            tokenizer.encode(part, add_special_tokens=False) for part in (before, words, after)
        ]
        ids = [each for part in parts for each in part]
        assert score.prompt_token_ids == ids
        logits = model(torch.tensor([ids])).logits[0, -1]
        expected = logits[[13, 12]].softmax(-1)[1]  # the tokens "no" and "yes"
        assert score.outputs.score == pytest.approx(expected.item(), abs=1e-5)


def test_settings_that_would_do_nothing_are_refused(bert: Path) -> None:
    with pytest.raises(ConfigError, match="host_cache_bytes is for models that generate"):
        load(bert, host_cache_bytes=1 << 20)
    with pytest.raises(ConfigError, match="kv_cache_dtype is for models that generate"):
        load(bert, kv_cache_dtype="fp8")
    with pytest.raises(ConfigError, match="49 is more than the 48 positions"):
        load(bert, max_model_len=49)
