"""Beams over real pages: those of `transformers`, however they are computed."""

from __future__ import annotations

import itertools

import pytest
import torch
from effort import effort
from transformers import LlamaConfig, LlamaForCausalLM
from transformers_beams import beams_of_transformers, check_beams

from quire import LLM, BeamSearchParams, SamplingParams

VOCAB, BLOCK = 199, 8
EOS = list(range(0, VOCAB, 11))  # many, so that beams of all lengths end
CONFIG = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=512,
    tie_word_embeddings=True,
    initializer_range=0.2,  # far enough apart that no two beams are as likely
    eos_token_id=EOS,
    bos_token_id=1,
)
DEVICES = ["cpu", "cpu-overlapped", pytest.param("cuda", marks=pytest.mark.gpu)]
CASES = [
    BeamSearchParams(beam_width=width, max_tokens=14, length_penalty=power, early_stopping=ending)
    for width, power, ending in itertools.product(
        (1, 2, 4, 8), (-1.0, 0.0, 1.0, 2.0), (True, False)
    )
][:: effort(3, 1)]  # of which a third has every value, too


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The reference, the folder it is in, and what it gives for each case."""
    torch.manual_seed(0)
    reference = LlamaForCausalLM(CONFIG).eval()
    folder = tmp_path_factory.mktemp("model")
    reference.save_pretrained(folder)
    prompts = [[(7 * i * i + 3 * i + salt) % VOCAB for i in range(21 + salt)] for salt in range(3)]
    pairs = list(zip(itertools.cycle(prompts), CASES, strict=False))
    expected = [beams_of_transformers(reference, prompt, p, EOS) for prompt, p in pairs]
    assert any(len(tokens) < 14 for beams in expected for tokens, _ in beams)
    return folder, [prompt for prompt, _ in pairs], expected


@pytest.fixture(params=DEVICES)
def open_llm(request, model):
    opened = []

    def opens(**settings):
        device, _, overlapped = request.param.partition("-")
        settings = {"block_size": BLOCK, "num_blocks": 400, **settings}
        llm = LLM(str(model[0]), dtype="float32", device=device, use_tqdm=False, **settings)
        llm.engine.overlap |= bool(overlapped)
        opened.append(llm)
        return llm

    yield opens
    for llm in opened:
        assert llm.stats()["blocks"]["in_use"] == 0
        llm.close()


def check(llm, model):
    _, prompts, expected = model
    outputs = llm.beam_search(prompts, CASES, use_tqdm=False)
    for output, beams, params in zip(outputs, expected, CASES, strict=True):
        check_beams(output, beams, params.length_penalty)


def test_each_alone_cold(open_llm, model):
    llm = open_llm(enable_prefix_caching=False)
    for prompt, beams, params in zip(*model[1:], CASES, strict=True):
        [output] = llm.beam_search(prompt, params, use_tqdm=False)
        check_beams(output, beams, params.length_penalty)


def test_all_together_cold_and_warm(open_llm, model):
    llm = open_llm()
    for _ in range(2):
        check(llm, model)
    assert llm.stats()["prefix"]["hits"] > 0


@pytest.mark.parametrize("caching", [True, False])
def test_in_a_small_pool_in_chunks(open_llm, model, caching):
    blocks = effort(17, 24)  # fewer beams at once fill fewer
    llm = open_llm(
        num_blocks=blocks, max_num_batched_tokens=10, max_num_seqs=12, enable_prefix_caching=caching
    )
    check(llm, model)
    assert llm.stats()["preemptions"] > 0


def test_beside_other_requests(open_llm, model):
    """In one batch with greedy and with sampled ones, which are as they are alone."""
    llm = open_llm(num_blocks=60, max_num_batched_tokens=40)
    _, prompts, expected = model
    params = [SamplingParams(temperature=t, seed=1, n=2, max_tokens=20) for t in (0, 1)]
    alone = [llm.generate(prompts[0], each, use_tqdm=False)[0] for each in params]
    engine = llm.engine
    for name, (prompt, case) in enumerate(zip(prompts[:12], CASES, strict=False)):
        engine.add_request(f"beams-{name}", prompt, case)
        engine.add_request(f"other-{name}", prompts[0], params[name % 2])
    outputs = {}
    while engine.has_unfinished_requests():
        outputs.update((output.request_id, output) for output in engine.step())
    for name, (beams, case) in enumerate(zip(expected[:12], CASES, strict=False)):
        check_beams(outputs[f"beams-{name}"], beams, case.length_penalty)
        mine, right = outputs[f"other-{name}"], alone[name % 2]
        assert [s.token_ids for s in mine.outputs] == [s.token_ids for s in right.outputs]


def test_beams_of_a_long_prompt_share_its_blocks(open_llm):
    """Width 8 on 400 tokens: one sequence's blocks, and what each beam writes behind them."""
    llm = open_llm(max_model_len=512)
    llm.engine.add_request(
        "beams",
        [i % 190 for i in range(401)],
        BeamSearchParams(beam_width=8, max_tokens=24, ignore_eos=True),
    )
    most = 0
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
        most = max(most, llm.stats()["blocks"]["in_use"])
    one, own = -(-401 // BLOCK), 8 * (24 // BLOCK)
    assert most <= 1.15 * one + own
    forks = llm.stats()["forks"]
    assert forks["count"] >= 7 and forks["shared_blocks"] >= 50 * forks["count"]
    assert forks["copied_blocks"] <= forks["count"] + 24
