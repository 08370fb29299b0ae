"""Greedy text of the demo model in float32 equals `transformers`, however it is computed."""

from __future__ import annotations

import pytest
from effort import effort
from golden_text import DEVICES, FEW, GOLDEN, PARAMS, PROMPTS, check, generate, open_llm

from quire import SamplingParams

# All prompts but the longest, which takes as long as all others together.
SHORT = [prompt for prompt in PROMPTS if len(prompt["ids"]) < 400]


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


@pytest.mark.parametrize("device", DEVICES)
def test_one_by_one_then_all_at_once_then_on_a_warm_cache(device):
    with open_llm(device, block_size=16) as llm:
        by_length = sorted(PROMPTS, key=lambda prompt: len(prompt["ids"]))
        some = by_length[: 39 : effort(13, 3)]
        check([generate(llm, [prompt], FEW)[0] for prompt in some], some, FEW)
        params = effort(FEW, PARAMS)
        check(generate(llm, PROMPTS, params), PROMPTS, params)
        warm = by_length[:: -effort(4, 1)]
        outputs = generate(llm, warm, FEW)
        check(outputs, warm, FEW)
        assert sum(output.num_cached_tokens for output in outputs) > 3000


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("prompts", "settings"),
    [
        pytest.param(
            SHORT[:: effort(4, 1)],
            {"block_size": 8, "max_num_batched_tokens": 32},
            id="blocks of 8, chunks of 32",
        ),
        pytest.param(
            SHORT[1 :: effort(4, 1)],
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
    with open_llm(device, num_blocks=44, max_model_len=600) as llm:
        prompts, tokens = effort((SHORT[2::3], 40), (SHORT, 64))
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        check(generate(llm, prompts, params), prompts, params)
        assert llm.stats()["preemptions"] >= effort(5, 20)


@pytest.mark.parametrize("device", DEVICES)
def test_long_prose_has_the_loss_of_the_oracle(device):
    """Rows of q and k left in the file's order would still answer short prompts."""
    prose = GOLDEN["prose"]
    assert prose["mean_loss_if_permuted"] > prose["mean_loss"] + 1
    with open_llm(device) as llm:
        ids = llm.tokenizer.encode(prose["text"])[: prose["num_tokens"]]
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        [output] = llm.generate([ids], params, use_tqdm=False)
    logprobs = [
        entry[token].logprob
        for token, entry in zip(ids[1:], output.prompt_logprobs[1:], strict=True)
    ]
    assert -sum(logprobs) / len(logprobs) == pytest.approx(prose["mean_loss"], abs=2e-4)
