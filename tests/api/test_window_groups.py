"""Layers with a window give blocks back while a sequence runs; what it answers stays the same."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from effort import effort
from tiny_ranks import open_ranks, ranks_in_threads, write_weights

from quire import LLM, SamplingParams
from quire.ranks import rank_model

WINDOW = 24
FAMILIES = {
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": WINDOW},
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 2,
    },
}
GROUPS = {"mistral": (WINDOW,), "qwen2": (None, WINDOW, WINDOW)}
POOLS = {
    "roomy": {"num_blocks": 400},
    "chunked": {"num_blocks": 400, "max_num_batched_tokens": 16},
    "tight": {"num_blocks": 80, "max_num_batched_tokens": 32},
    "drafts": {"num_blocks": 400, "speculative": "ngram"},
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"num_hidden_layers": 6, "max_position_embeddings": 512}
    return write_weights(tmp_path_factory.mktemp(family), **FAMILIES[family] | shape)


def prompts() -> list[list[int]]:
    """Some share more than a window, some less, and some begin another's."""
    dice = random.Random(0)
    shared = [dice.randrange(3, 199) for _ in range(90)]
    return [
        shared[: dice.randint(10, 90)]
        + [dice.randrange(3, 199) for _ in range(dice.randint(1, 60))]
        for _ in range(effort(4, 7))
    ] + [shared]


def answers(llm: LLM) -> list[list[int]]:
    """Greedy, cold and warm; and three samples of one prompt, which share its blocks."""
    greedy = SamplingParams(temperature=0, max_tokens=WINDOW + 4, ignore_eos=True)
    samples = SamplingParams(n=3, temperature=0.8, seed=3, max_tokens=20, ignore_eos=True)
    asked = prompts()
    found = [
        output.token_ids
        for params, some in ((greedy, asked), (greedy, asked), (samples, asked[:1]))
        for request in llm.generate(some, params, use_tqdm=False)
        for output in request.outputs
    ]
    assert found[: len(asked)] == found[len(asked) : 2 * len(asked)]
    return found


@pytest.fixture(scope="module")
def of_one_full_group(folder: Path) -> list[list[int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_model, "WINDOW_GROUPS", False)
        with open_ranks(folder, 1, num_blocks=400) as llm:
            assert llm.engine.runner.cache.layout.windows == (None,)
            return answers(llm)


@pytest.mark.diagonal
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("pool", POOLS)
def test_answers_are_those_of_one_full_group(
    family: str, folder: Path, pool: str, overlap: bool, of_one_full_group: list[list[int]]
) -> None:
    """With `overlap` the next step is planned while one runs, as on a GPU."""
    with open_ranks(folder, 1, **POOLS[pool]) as llm:
        llm.engine.overlap = overlap
        assert llm.engine.runner.cache.layout.windows == GROUPS[family]
        assert answers(llm) == of_one_full_group


def test_two_ranks_answer_the_same(
    family: str, folder: Path, of_one_full_group: list[list[int]]
) -> None:
    with ranks_in_threads(), open_ranks(folder, 2, num_blocks=400) as llm:
        assert llm.engine.runner.cache.layout.windows == GROUPS[family]
        assert answers(llm) == of_one_full_group
