"""Greedy text of the demo model in float32 equals `transformers`, however it is computed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from effort import effort
from golden_text import DEVICES, FEW, GOLDEN, PARAMS, PROMPTS, check, generate, open_llm

from quire import SamplingParams

# All prompts but the longest, which takes a CPU longer than all others together.
SHORT = [prompt for prompt in PROMPTS if len(prompt["ids"]) < 400]
BRIEF = [prompt for prompt in SHORT if len(prompt["ids"]) < 60]
# Of the brief ones, and of those in between, which take longer, one in four.
MOST = [*BRIEF[1::4], *[prompt for prompt in SHORT if prompt not in BRIEF][::4]]


@pytest.fixture(scope="module", params=DEVICES)
def llm(request):
    """With all settings as they come, but half of a GPU, where other tests run, too."""
    half = {"num_blocks": None, "gpu_memory_utilization": 0.5} if request.param == "cuda" else {}
    with open_llm(request.param, **half) as llm:
        yield llm


def test_the_golden_set_is_large_and_mixed():
    assert len(PROMPTS) >= 40
    assert any(2900 <= len(prompt["ids"]) <= 3100 for prompt in PROMPTS)
    assert all(len(prompt["new_ids"]) == 64 for prompt in PROMPTS)


def test_tokenisation_and_chat_template():
    from quire.models.source import open_model

    tokenizer = open_model("smollm2").tokenizer()
    for prompt in PROMPTS:
        assert tokenizer.encode(prompt["text"]) == prompt["ids"]
    for chat in GOLDEN["chats"]:
        ask = chat["add_generation_prompt"]
        got = tokenizer.apply_chat_template(chat["messages"], add_generation_prompt=ask)
        assert got == chat["text"]


def test_one_by_one_then_all_at_once_then_on_a_warm_cache(llm):
    prompts = effort(MOST, PROMPTS) if llm.config.device == "cpu" else PROMPTS
    by_length = sorted(prompts, key=lambda prompt: len(prompt["ids"]))
    some = by_length[: 39 : effort(13, 3)]
    check([generate(llm, [prompt], FEW)[0] for prompt in some], some, FEW)
    params = effort(FEW, PARAMS)
    check(generate(llm, prompts, params), prompts, params)
    warm = by_length[::-1]
    outputs = generate(llm, warm, FEW)
    check(outputs, warm, FEW)
    block = llm.config.block_size
    full_blocks = [(len(prompt["ids"]) - 1) // block * block for prompt in warm]
    assert sum(output.num_cached_tokens for output in outputs) >= sum(full_blocks) > 500


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("prompts", "settings"),
    [
        pytest.param(
            effort(SHORT[4::12], SHORT),
            {"block_size": 8, "max_num_batched_tokens": 32},
            id="blocks of 8, chunks of 32",
        ),
        pytest.param(
            effort(SHORT[5::12], SHORT[1:]),
            {"block_size": 128, "enable_prefix_caching": False},
            id="of 128, no cache",
        ),
    ],
)
def test_all_at_once_cold(device, prompts, settings):
    with open_llm(device, **settings) as llm:
        check(generate(llm, prompts, FEW), prompts, FEW)


@pytest.mark.parametrize("device", DEVICES)
def test_preempted_many_times(device):
    """A pool that holds the longest request and little else."""
    prompts, tokens, pool = effort(
        (BRIEF[3::4], 16, {"block_size": 4, "num_blocks": 32, "max_model_len": 96}),
        (SHORT, 64, {"num_blocks": 44, "max_model_len": 600}),
    )
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    with open_llm(device, **pool) as llm:
        check(generate(llm, prompts, params), prompts, params)
        assert llm.stats()["preemptions"] >= effort(3, 20)


def test_long_prose_has_the_loss_of_the_oracle_and_goes_on_as_it_does(llm):
    """Rows of q and k left in the file's order would still answer short prompts."""
    prose = GOLDEN["prose"]
    assert prose["mean_loss_if_permuted"] > prose["mean_loss"] + 1
    ids = llm.tokenizer.encode(prose["text"])[: prose["num_tokens"]]
    params = replace(effort(FEW, PARAMS), prompt_logprobs=0)
    [output] = llm.generate([ids], params, use_tqdm=False)
    check([output], [prose], params)
    logprobs = [
        entry[token].logprob
        for token, entry in zip(ids[1:], output.prompt_logprobs[1:], strict=True)
    ]
    assert -sum(logprobs) / len(logprobs) == pytest.approx(prose["mean_loss"], abs=2e-4)
