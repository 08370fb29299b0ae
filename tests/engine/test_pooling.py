"""The engine that pools, over a runner that only adds up: who goes when, and what failures do."""

from __future__ import annotations

import numpy as np
import pytest

from quire.config import StepLimits
from quire.engine.limits import Limits
from quire.engine.pooling.engine import NOT_A_NUMBER, PoolingEngine
from quire.errors import PromptTooLong, RequestError
from quire.models.pooling.facts import EMBED, IDENTITY, NORMALIZE, PoolingFacts
from quire.params import SamplingParams
from quire.pooling_params import PoolingParams
from quire.request_options import RequestOptions
from quire.runner.text_batch import TextBatch

POISON, NOT_FINITE = 13, 14  # tokens that break a step, and that give no number


class Fetched:
    def __init__(self, vectors: np.ndarray) -> None:
        self.vectors = vectors

    def wait(self) -> np.ndarray:
        return self.vectors


class AddingRunner:
    """A text's vector is the sum of its ids, and their count."""

    def __init__(self) -> None:
        self.steps: list[list[list[int]]] = []
        self.freed = 0

    def launch(self, batch: TextBatch) -> Fetched:
        texts = [ids.tolist() for ids in np.split(batch.token_ids, batch.lengths.cumsum()[:-1])]
        if any(POISON in ids for ids in texts):
            raise MemoryError("too much")
        self.steps.append(texts)
        rows = [[np.nan if NOT_FINITE in ids else sum(ids), len(ids)] for ids in texts]
        return Fetched(np.array(rows, dtype=np.float32))

    def free_memory(self) -> None:
        self.freed += 1


def make(policy: str = "fcfs", activation: str = IDENTITY, overlap: bool = False) -> PoolingEngine:
    return PoolingEngine(
        AddingRunner(),
        PoolingFacts(EMBED, 2, activation),
        Limits(100, 20, policy, task=EMBED),
        StepLimits(tokens=10, sequences=4),
        overlap=overlap,
    )


def add(engine: PoolingEngine, name: str, *texts: list[int], **options: int) -> None:
    batch = TextBatch.of(texts)
    engine.submit(engine.make_request(name, batch, PoolingParams(), RequestOptions(**options)))


def run(engine: PoolingEngine) -> dict[str, list[float] | str]:
    """The first vector of each request, or its error."""
    return {name: texts[0] for name, texts in run_all(engine).items()}


def run_all(engine: PoolingEngine) -> dict[str, list[list[float] | str]]:
    found: dict[str, list[list[float] | str]] = {}
    for _ in range(100):
        for output in engine.step():
            assert output.request_id not in found
            assert output.finished
            rows = [] if output.vectors is None else output.vectors.tolist()
            places = range(max(len(rows), len(output.errors)))
            found[output.request_id] = [output.errors.get(i) or rows[i] for i in places]
        if not engine.stats()["requests"]["waiting"] and not engine._requests:
            return found
    raise AssertionError("it does not end")


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_takes_what_fits_and_every_text_ends_once(overlap: bool) -> None:
    engine = make(overlap=overlap)
    texts = {f"t{i}": [1] * length for i, length in enumerate([3, 9, 1, 12, 2, 2, 2, 2, 2])}
    for name, ids in texts.items():
        add(engine, name, ids)
    assert run(engine) == {name: [len(ids), len(ids)] for name, ids in texts.items()}
    sizes = [[len(ids) for ids in step] for step in engine.runner.steps]
    # In order of arrival, sorted within a step; a text longer than a step goes alone.
    assert sizes == [[3], [1, 9], [12], [2, 2, 2, 2], [2]]
    assert engine.stats()["tokens"]["computed"] == sum(map(len, texts.values()))


@pytest.mark.parametrize("overlap", [False, True])
def test_many_texts_of_a_request_are_dealt_out_to_steps(overlap: bool) -> None:
    engine = make(overlap=overlap)
    lengths = [3, 9, 1, 12, 2, 2, 2, 2, 2]
    texts = [[n] * length for n, length in enumerate(lengths, 20)]
    add(engine, "many", *texts)
    add(engine, "few", [1], [2, 2])
    assert run_all(engine) == {
        "many": [[sum(ids), len(ids)] for ids in texts],
        "few": [[1, 1], [4, 2]],
    }
    sizes = [[len(ids) for ids in step] for step in engine.runner.steps]
    assert sizes == [[3], [1, 2], [1, 9], [12], [2, 2, 2, 2], [2]]
    assert engine.stats()["requests"] == {"running": 0, "loading": 0, "waiting": 0}


def test_a_text_does_not_wait_for_all_texts_of_a_request_before_it() -> None:
    engine = make()
    add(engine, "many", *[[20]] * 40)
    engine.step()
    add(engine, "one", [1])
    assert engine.stats()["requests"] == {"running": 1, "loading": 0, "waiting": 1}
    assert [len(engine.step()) for _ in range(2)] == [0, 1], "its turn comes after one more step"
    add(engine, "other many", *[[30]] * 40)
    ended = [output.request_id for _ in range(40) for output in engine.step()]
    assert ended == ["many", "other many"]
    firsts = [texts[0] for texts in engine.runner.steps[3:7]]
    assert firsts == [[20], [30], [20], [30]], "they take turns"


def test_a_text_longer_than_a_step_goes_ahead_of_a_request_that_is_begun() -> None:
    engine = make("priority")
    texts = [[n] * 3 for n in range(20, 29)]
    add(engine, "begun", *texts)
    engine.step()
    add(engine, "long", [7] * 19, priority=-1)
    assert run_all(engine) == {
        "begun": [[sum(ids), len(ids)] for ids in texts],
        "long": [[133, 19]],
    }


def test_lower_priorities_go_first() -> None:
    engine = make("priority")
    add(engine, "later", [5] * 6, priority=3)
    add(engine, "sooner", [7] * 6, priority=-1)
    run(engine)
    assert engine.runner.steps == [[[7] * 6], [[5] * 6]]


def test_the_background_waits_behind_all_others_and_in_its_turn() -> None:
    engine = make()
    for name, token, turn in [("a", 1, 0), ("b", 2, 1), ("c", 3, 0)]:
        add(engine, name, [token] * 9, background=True, turn=turn)
    add(engine, "first", [4] * 9)
    run(engine)
    assert [step[0][0] for step in engine.runner.steps] == [4, 1, 3, 2]


def test_one_text_that_breaks_a_step_ends_alone() -> None:
    engine = make()
    for name, ids in {"a": [1], "b": [2, POISON], "c": [3], "d": [4]}.items():
        add(engine, name, ids)
    found = run(engine)
    assert "MemoryError" in str(found.pop("b"))
    assert found == {"a": [1, 1], "c": [3, 1], "d": [4, 1]}
    assert engine.stats()["recovery"]["failed_steps"] == 3  # all four, one half, the text itself
    assert engine.runner.freed == 3


def test_the_other_texts_of_a_request_outlive_one_that_breaks_a_step() -> None:
    engine = make()
    add(engine, "many", [1], [NOT_FINITE], [2, POISON], [3], [4], [5])
    add(engine, "other", [6])
    found = run_all(engine)
    assert "MemoryError" in str(found["many"].pop(2))
    assert found == {"many": [[1, 1], NOT_A_NUMBER, [3, 1], [4, 1], [5, 1]], "other": [[6, 1]]}


def test_numbers_that_are_none_end_one_request() -> None:
    engine = make()
    add(engine, "good", [1, 2])
    add(engine, "bad", [NOT_FINITE])
    assert run(engine) == {"good": [3, 2], "bad": NOT_A_NUMBER}


@pytest.mark.parametrize("overlap", [False, True])
def test_an_abort_ends_a_request_whenever_it_comes(overlap: bool) -> None:
    engine = make(overlap=overlap)
    for name in "abc":
        add(engine, name, [1] * 8)
    assert engine.abort_request("b") is not None
    engine.step()  # overlapped, the first is now under way
    engine.abort_request("a")
    assert engine.abort_request("a") is None
    assert "c" in run(engine)
    assert engine.find_request("c") is None
    add(engine, "half", [1] * 8, [1] * 8)
    add(engine, "next", [1])
    engine.step()
    assert engine.abort_request("half") is not None  # one of its texts is begun, or has ended
    assert set(run(engine)) == {"next"}


def test_an_interrupt_leaves_nothing_behind() -> None:
    engine = make(overlap=True)
    for name in "abc":
        add(engine, name, [1] * 8, [2] * 8)
    for _ in range(2):
        engine.step()
    assert engine.find_request("a").num_ended == 1
    engine.begin_again()
    both = [[8, 8], [16, 8]]
    assert run_all(engine) == {"a": both, "b": both, "c": both}


def test_a_vector_is_cut_before_it_is_normalised() -> None:
    engine = make(activation=NORMALIZE)
    asked = {
        "as the model says": PoolingParams(),
        "cut": PoolingParams(dimensions=1),
        "plain": PoolingParams(use_activation=False),
        "the same": PoolingParams(),
    }
    for name, params in asked.items():
        engine.submit(engine.make_request(name, TextBatch.of([[1, 2]]), params))
    found = run(engine)
    assert engine.stats()["steps"] == 1
    unit = pytest.approx([3 / 13**0.5, 2 / 13**0.5])
    assert found == {"as the model says": unit, "cut": [1.0], "plain": [3.0, 2.0], "the same": unit}


def test_what_cannot_be_computed_is_refused() -> None:
    engine = make()
    with pytest.raises(PromptTooLong, match=r"21 tokens, .* length is 20 tokens"):
        add(engine, "x", [1] * 21)
    with pytest.raises(RequestError, match="Token id 100 is outside the model's vocabulary"):
        add(engine, "x", [1], [2, 100])
    with pytest.raises(RequestError, match="empty"):
        add(engine, "x", [1], [])
    with pytest.raises(RequestError, match="more than the 2 numbers"):
        engine.make_request("x", TextBatch.of([[1]]), PoolingParams(dimensions=3))
    with pytest.raises(RequestError, match="scheduling_policy"):
        add(engine, "x", [1], priority=1)
    with pytest.raises(RequestError, match="writes no text"):
        engine.limits.check([1], SamplingParams(), RequestOptions())
    add(engine, "x", [1])
    with pytest.raises(RequestError, match="already running"):
        add(engine, "x", [1])
