"""`LLM.beam_search` on the demo model: the beams of `transformers`, their text, stop strings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers_beams import check_beams

from quire import LLM, BeamSearchParams, RequestError, SamplingParams

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "beams.json").read_text())
PROMPTS = ["The capital of France is", "Once upon a time, there was a"]


@pytest.fixture(scope="module")
def llm(smollm2_path):
    with LLM("smollm2", device="cpu", dtype="float32", num_blocks=400, use_tqdm=False) as llm:
        yield llm
        assert llm.stats()["blocks"]["in_use"] == 0


def beams(llm, prompts, **settings):
    return llm.beam_search(prompts, BeamSearchParams(**settings), use_tqdm=False)


def test_the_beams_of_transformers(llm):
    prompts = [case["prompt"] for case in GOLDEN["cases"]]
    params = [BeamSearchParams(**case["params"]) for case in GOLDEN["cases"]]
    outputs = llm.beam_search(prompts, params, use_tqdm=False)
    for output, case in zip(outputs, GOLDEN["cases"], strict=True):
        check_beams(output, case["beams"], case["params"]["length_penalty"])
        for beam in output.outputs:
            ids = beam.token_ids[:-1] if beam.finish_reason == "stop" else beam.token_ids
            assert beam.text == llm.tokenizer.decode(ids)
    reasons = {beam.finish_reason for output in outputs for beam in output.outputs}
    assert reasons == {"stop", "length"}


def test_a_stop_string_ends_a_beam_like_the_end_of_the_text(llm):
    """Each beam that meets one ends there, with the score that its tokens have."""
    asked = {"beam_width": 4, "max_tokens": 10, "length_penalty": 0.0}
    [plain] = beams(llm, PROMPTS[1], **asked)
    word = plain.outputs[0].text.split()[2]
    [stopped] = beams(llm, PROMPTS[1], stop=[word], **asked)
    [shown] = beams(llm, PROMPTS[1], stop=[word], include_stop_str_in_output=True, **asked)
    assert "stop" in {beam.finish_reason for beam in stopped.outputs}
    for beam, same in zip(stopped.outputs, shown.outputs, strict=True):
        whole = llm.tokenizer.decode(beam.token_ids)
        assert (word in whole) == (beam.finish_reason == "stop")
        assert word not in beam.text and whole.startswith(beam.text)
        assert beam.score == beam.cumulative_logprob
        assert beam.token_ids == same.token_ids
        assert same.text.endswith(word) == (same.finish_reason == "stop")


def test_one_or_one_each_and_checked_first(llm):
    [few, more] = llm.beam_search(
        PROMPTS, [BeamSearchParams(beam_width=w, max_tokens=3) for w in (1, 3)], use_tqdm=False
    )
    assert [len(few.outputs), len(more.outputs)] == [1, 3]
    assert [beam.index for beam in more.outputs] == [0, 1, 2]
    assert more.outputs[0].score >= more.outputs[1].score >= more.outputs[2].score
    with pytest.raises(RequestError, match="2 prompts came with 1 BeamSearchParams"):
        llm.beam_search(PROMPTS, [BeamSearchParams()])
    with pytest.raises(RequestError, match="are a BeamSearchParams"):
        llm.beam_search(PROMPTS[0], SamplingParams())
    with pytest.raises(RequestError, match="are a SamplingParams"):
        llm.generate(PROMPTS[0], BeamSearchParams())
