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
from quire.runner.pooling_batch import TextBatch

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
        texts = [ids.tolist() for ids in batch.token_ids]
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


def add(engine: PoolingEngine, name: str, ids: list[int], **options: int) -> None:
    params = PoolingParams()
    engine.submit(engine.make_request(name, ids, params, RequestOptions(**options)))


def run(engine: PoolingEngine) -> dict[str, list[float] | str]:
    found: dict[str, list[float] | str] = {}
    for _ in range(100):
        for output in engine.step():
            assert output.request_id not in found
            assert output.finished
            found[output.request_id] = output.error if output.data is None else output.data.tolist()
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


def test_an_interrupt_leaves_nothing_behind() -> None:
    engine = make(overlap=True)
    for name in "abc":
        add(engine, name, [1] * 8)
    engine.step()
    engine.begin_again()
    assert set(run(engine)) == {"a", "b", "c"}


def test_a_vector_is_cut_before_it_is_normalised() -> None:
    engine = make(activation=NORMALIZE)

    def vector(**params: object) -> list[float]:
        request = engine.make_request("x", [1, 2], PoolingParams(**params))
        engine.submit(request)
        run(engine)
        return request.result.tolist()

    assert vector() == pytest.approx([3 / 13**0.5, 2 / 13**0.5])
    assert vector(dimensions=1) == [1.0]
    assert vector(use_activation=False) == [3.0, 2.0]


def test_what_cannot_be_computed_is_refused() -> None:
    engine = make()
    with pytest.raises(PromptTooLong, match="21 tokens and max_model_len is 20"):
        add(engine, "x", [1] * 21)
    with pytest.raises(RequestError, match="outside the model's vocabulary"):
        add(engine, "x", [100])
    with pytest.raises(RequestError, match="more than the 2 numbers"):
        engine.make_request("x", [1], PoolingParams(dimensions=3))
    with pytest.raises(RequestError, match="scheduling_policy"):
        add(engine, "x", [1], priority=1)
    with pytest.raises(RequestError, match="writes no text"):
        engine.limits.check([1], SamplingParams(), RequestOptions())
    add(engine, "x", [1])
    with pytest.raises(RequestError, match="already running"):
        add(engine, "x", [1])
