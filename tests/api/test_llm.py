"""The Python interface as its users meet it: on a tiny model, and on the demo model's words."""

from __future__ import annotations

import math
import re
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
from tiny_llm import open_tiny, write_config
from tiny_model import VOCAB_SIZE, write_tiny_model

import quire
from quire import LLM, ConfigError, RequestError, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory, smollm2_path):
    """The demo model's words and random weights: what it says means nothing, and comes at once."""
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"), smollm2_path)
    yield from opened(str(folder), load_format="dummy")


@pytest.fixture(scope="module")
def demo():
    """For what depends on what is said."""
    yield from opened("smollm2")


def opened(model, **settings):
    basics = {"dtype": "float32", "device": "cpu", "num_blocks": 64, "use_tqdm": False}
    with LLM(model, **basics, **settings) as llm:
        yield llm
        stats = llm.stats()
        assert stats["blocks"]["in_use"] == 0
        assert sum(stats["blocks"][k] for k in ("free", "cached", "in_use")) == 64


def texts(outputs):
    return [output.outputs[0].text for output in outputs]


def test_every_kind_of_prompt_gives_the_same(llm):
    ids = llm.tokenizer.encode("The capital of France is")
    [expected] = texts(llm.generate("The capital of France is", GREEDY, use_tqdm=False))
    for prompts in (
        ["The capital of France is"],
        [ids],
        ids,
        [{"prompt_token_ids": ids}],
        [{"prompt": "The capital of France is"}],
    ):
        assert texts(llm.generate(prompts, GREEDY, use_tqdm=False)) == [expected]


def test_outputs_come_in_the_order_of_the_prompts_with_their_own_params(llm):
    prompts = ["One", "Two", "Three"]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 1, 4)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 1, 4]
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}


def test_no_prompts_give_no_outputs(llm):
    assert llm.generate([], GREEDY, use_tqdm=False) == []


@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        ([""], "empty"),
        ([[]], "empty"),
        ([[1, 2, VOCAB_SIZE]], f"outside the model's vocabulary of {VOCAB_SIZE:,}"),
        ([[-1]], "Token id -1"),
        ([[1.5]], "string or a list of token ids"),
        ([["a", "b"]], "string or a list of token ids"),
        ([None], "string or a list of token ids"),
        ([{"prompt_tokens": [1]}], "no other key"),
        ([{"prompt_token_ids": []}], "empty"),
        ([{"prompt_token_ids": [[1, 2], [3]]}], "string or a list of token ids"),
        ([b"hello"], "not bytes"),
        (["hello", [3] * 1024], "1,024 tokens, and this model's maximum context length is 1,024"),
        ([[3] * 100_000], "100,000 tokens"),
    ],
)
def test_a_bad_prompt_raises_before_any_is_started(llm, prompts, says):
    before = llm.stats()
    with pytest.raises(RequestError, match=says) as error:
        llm.generate(["a good one", *prompts], GREEDY, use_tqdm=False)
    assert "\n" not in str(error.value)
    assert llm.stats()["steps"] == before["steps"]


@pytest.mark.parametrize("prompts", [None, 5, b"hello"])
def test_what_is_no_prompt_at_all(llm, prompts):
    with pytest.raises(RequestError, match="strings or lists of token ids"):
        llm.generate(prompts, GREEDY, use_tqdm=False)


def test_arrays_are_prompts(llm):
    lists = [[1, 2, 3], [4, 5]]
    arrays = [np.array(each) for each in lists]
    expected = texts(llm.generate(lists, GREEDY, use_tqdm=False))
    assert texts(llm.generate(arrays, GREEDY, use_tqdm=False)) == expected
    as_dict = [{"prompt_token_ids": each} for each in arrays]
    assert texts(llm.generate(as_dict, GREEDY, use_tqdm=False)) == expected


def test_params_of_another_kind(llm):
    with pytest.raises(RequestError, match="are a SamplingParams, or a list"):
        llm.generate("a", {"temperature": 0}, use_tqdm=False)


def test_a_chat_with_another_salt_shares_nothing(llm):
    messages = [{"role": "user", "content": "What is the tide table for the month of May? " * 3}]
    hits = [
        llm.chat(messages, GREEDY, use_tqdm=False, cache_salt=salt)[0].num_cached_tokens > 32
        for salt in ("x", "x", "y")
    ]
    assert hits == [False, True, False]


def test_wrong_numbers_of_params_or_priorities(llm):
    with pytest.raises(RequestError, match="2 prompts came with 1 SamplingParams"):
        llm.generate(["a", "b"], [GREEDY], use_tqdm=False)
    with pytest.raises(RequestError, match="priorities"):
        llm.generate(["a", "b"], GREEDY, use_tqdm=False, priority=[1])


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"top_p": 0.0},
        {"max_tokens": 0},
        {"n": 0},
        {"temprature": 1.0},
    ],
)
def test_bad_sampling_parameters(params):
    with pytest.raises(RequestError):
        SamplingParams(**params)


def test_ids_outside_the_vocabulary_in_params(llm):
    with pytest.raises(RequestError):
        llm.generate("a", SamplingParams(logit_bias={VOCAB_SIZE: 1.0}), use_tqdm=False)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"blok_size": 16}, "did you mean block_size"),
        ({"block_size": 24}, "power of two"),
        ({"max_model_len": 100_000}, "8,192 positions"),
        ({"max_model_len": 600, "num_blocks": 4}, "hold 64 tokens"),
        ({"num_blocks": 1, "block_size": 1}, "cannot hold a prompt and an answer"),
        ({"num_blocks": 99_999_999}, r"takes \d+\.\d GiB, more than is free .* lower num_blocks"),
        ({"tensor_parallel_size": 2}, "does not divide the model's 9 attention heads"),
        ({"device": "cuda"}, "no CUDA device"),
    ],
)
def test_bad_settings(settings, says, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=says):
        LLM("smollm2", load_format="dummy", use_tqdm=False, **settings)


def test_a_warm_prompt_says_how_much_was_cached(llm):
    prompt = "a long prompt about the sea " * 10
    llm.reset_prefix_cache()
    cold = llm.generate(prompt, GREEDY, use_tqdm=False)[0]
    warm = llm.generate(prompt, GREEDY, use_tqdm=False)[0]
    length, full = len(cold.prompt_token_ids), (len(cold.prompt_token_ids) + 7) // 16 * 16
    assert cold.num_cached_tokens == 0 and cold.miss_reason is not None
    assert warm.num_cached_tokens == min(full, length - 1)  # with the blocks that the answer filled
    assert warm.cached_tokens_by_tier == {"device": warm.num_cached_tokens}
    assert warm.miss_reason is None
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids


def test_seeds_fix_the_samples_whatever_the_neighbours(llm):
    params = SamplingParams(temperature=1.0, max_tokens=12, seed=7, n=3, ignore_eos=True)
    alone = llm.generate("Once upon a time", params, use_tqdm=False)[0]
    crowd = llm.generate(
        ["Hello", "Once upon a time", "The sea"],
        [GREEDY, params, SamplingParams(max_tokens=9, ignore_eos=True)],
        use_tqdm=False,
    )[1]
    samples = [o.token_ids for o in alone.outputs]
    assert samples == [o.token_ids for o in crowd.outputs]
    assert len({tuple(s) for s in samples}) == 3


def test_best_of_returns_the_likeliest(llm):
    params = {"temperature": 1.0, "max_tokens": 6, "seed": 1, "ignore_eos": True, "logprobs": 0}
    every = llm.generate("My name is", SamplingParams(n=5, **params), use_tqdm=False)[0]
    best = llm.generate("My name is", SamplingParams(n=2, best_of=5, **params), use_tqdm=False)[0]
    ranked = sorted((o.cumulative_logprob for o in every.outputs), reverse=True)
    assert [o.cumulative_logprob for o in best.outputs] == pytest.approx(ranked[:2])
    assert [o.index for o in best.outputs] == [0, 1]


def test_logprobs_are_of_the_drawn_tokens(llm):
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=3, ignore_eos=True)
    [output] = llm.generate("The sky is", params, use_tqdm=False)[0].outputs
    assert len(output.logprobs) == 4
    for token_id, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert entry[token_id].rank == 1 and len(entry) == 3
        assert max(e.logprob for e in entry.values()) == entry[token_id].logprob
    assert output.cumulative_logprob == pytest.approx(
        sum(e[t].logprob for t, e in zip(output.token_ids, output.logprobs, strict=True))
    )


@pytest.mark.parametrize("budget", [2048, 7])
def test_prompt_logprobs_cold_warm_and_chunked(llm, budget, monkeypatch):
    monkeypatch.setattr(llm.engine.scheduler, "budget", budget)
    prompt = "It was a bright cold day in April, and the clocks were striking thirteen."
    ids = llm.tokenizer.encode(prompt)
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2, ignore_eos=True)
    llm.reset_prefix_cache()
    runs = [llm.generate(prompt, params, use_tqdm=False)[0] for _ in range(2)]
    for run in runs:
        assert len(run.prompt_logprobs) == len(ids) and run.prompt_logprobs[0] is None
        assert run.num_cached_tokens == 0
    for first, second in zip(runs[0].prompt_logprobs[1:], runs[1].prompt_logprobs[1:], strict=True):
        assert first.keys() == second.keys()
        for token_id in first:
            assert first[token_id].logprob == pytest.approx(second[token_id].logprob, abs=1e-4)
    only = llm.generate(prompt, SamplingParams(max_tokens=0, prompt_logprobs=2), use_tqdm=False)[0]
    assert only.outputs[0].token_ids == [] and only.outputs[0].finish_reason == "length"
    for mine, other in zip(only.prompt_logprobs[1:], runs[0].prompt_logprobs[1:], strict=True):
        assert mine.keys() == other.keys()


def test_stop_strings_and_streams(demo):
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    whole = demo.generate("Once upon a time", params, use_tqdm=False)[0].outputs[0].text
    stop = whole[20:24]
    cut = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=[stop])
    [stopped] = demo.generate("Once upon a time", cut, use_tqdm=False)[0].outputs
    assert stopped.text == whole[: whole.index(stop)]
    assert stopped.finish_reason == "stop"
    streamed = [o.outputs[0].text for o in demo.stream("Once upon a time", cut)]
    assert streamed[-1] == stopped.text
    assert all(b.startswith(a) for a, b in pairwise(streamed))
    assert [o.outputs[0].text for o in demo.stream("Once upon a time", params)][-1] == whole


def test_leaving_a_stream_early_frees_its_blocks(llm):
    for _ in llm.stream("Once upon a time", SamplingParams(max_tokens=50, ignore_eos=True)):
        break
    assert llm.stats()["blocks"]["in_use"] == 0
    assert llm.stats()["requests"] == {"running": 0, "loading": 0, "waiting": 0}
    assert texts(llm.generate("Hello", GREEDY, use_tqdm=False))


def test_other_work_inside_a_stream_disturbs_nobody(llm):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    [whole] = texts(llm.generate("Once upon a time", params, use_tqdm=False))
    seen, inside = [], []
    for output in llm.stream("Once upon a time", params):
        seen.append(output.outputs[0].text)
        if len(seen) == 3:
            inside = texts(llm.generate(["Hello", "Once upon a time"], params, use_tqdm=False))
    assert seen[-1] == whole == inside[1]


def test_threads_that_chat_stream_and_ask_for_a_form(llm):
    messages = [{"role": "user", "content": "Say hello."}]
    form = SamplingParams(temperature=0, max_tokens=8, structured={"regex": "[0-9]{2} years"})
    calls = [
        lambda: texts(llm.chat([messages, messages], GREEDY, use_tqdm=False)),
        lambda: texts(llm.generate("Bob is", form, use_tqdm=False)),
        lambda: [[o.outputs[0].text for o in llm.stream_chat(messages, GREEDY)][-1]],
        lambda: texts(llm.generate(["Once", "upon"], GREEDY, use_tqdm=False)),
    ]
    alone = [call() for call in calls]
    assert re.fullmatch("[0-9]{2} years", alone[1][0])
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda call: call(), calls * 2))
    assert together == alone * 2


def test_chat_ends_with_the_end_of_text_token(demo):
    messages = [{"role": "user", "content": "Say hello."}]
    params = SamplingParams(temperature=0, max_tokens=60)
    [output] = demo.chat(messages, params, use_tqdm=False)
    [answer] = output.outputs
    assert answer.finish_reason == "stop"
    assert answer.token_ids[-1] == demo.tokenizer.eos_token_id
    assert "<|im_end|>" not in answer.text
    both = demo.chat([messages, messages], params, use_tqdm=False)
    assert texts(both) == [answer.text] * 2


def test_min_tokens_keeps_the_end_away(demo):
    messages = [{"role": "user", "content": "Say hello."}]
    params = SamplingParams(temperature=0, max_tokens=40, min_tokens=35)
    [answer] = demo.chat(messages, params, use_tqdm=False)[0].outputs
    assert len(answer.token_ids) >= 35
    assert demo.tokenizer.eos_token_id not in answer.token_ids[:35]


def test_an_interrupt_in_mid_run_leaves_the_engine_usable(llm, monkeypatch):
    engine, calls = llm.engine, []
    step = engine.step

    def interrupted():
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    monkeypatch.undo()
    assert llm.stats()["blocks"]["in_use"] == 0 and not engine.has_unfinished_requests()


def test_a_closed_llm_says_so_and_gives_the_memory_back(tmp_path):
    llm = open_tiny(write_config(tmp_path), "cpu", num_blocks=64)
    pool = weakref.ref(llm.engine.runner.cache)
    llm.close()
    assert pool() is None
    with pytest.raises(quire.QuireError, match="closed"):
        llm.generate([[1, 2]], GREEDY)


def test_a_prompt_whose_logits_are_nan_fails_alone(llm, monkeypatch):
    model = llm.engine.runner.model
    whole = model.forward

    def spoilt(token_ids, positions, step):
        hidden = whole(token_ids, positions, step)
        return hidden.masked_fill((token_ids == 4242)[:, None], float("nan"))

    monkeypatch.setattr(model, "forward", spoilt)
    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=1, ignore_eos=True)
    bad, good = llm.generate([[1, 4242, 7], [1, 2, 3]], params, use_tqdm=False)
    assert bad.outputs[0].finish_reason == "error" and "no usable logits" in bad.error
    assert good.outputs[0].finish_reason == "length" and len(good.outputs[0].token_ids) == 4
