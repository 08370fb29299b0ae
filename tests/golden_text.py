"""The demo model's greedy text by `transformers` in float32, and how to compare with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire import LLM, SamplingParams

GOLDEN = json.loads((Path(__file__).parent / "golden" / "smollm2.json").read_text())
PROMPTS = GOLDEN["prompts"]
CLOSE = 1e-4  # nearer than this, either of the two best tokens is right
PARAMS = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
FEW = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)  # where all 64 take long

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


GPU_TOKENS = 65_536  # in the pool: 3 GB


def open_llm(device, **settings):
    """On a GPU its pool is small, since other tests open engines there at the same time."""
    if device == "cuda":
        settings = {"num_blocks": GPU_TOKENS // settings.get("block_size", 16)} | settings
    return LLM("smollm2", device=device, dtype="float32", use_tqdm=False, **settings)


def generate(llm, prompts, params=PARAMS):
    ids = [prompt["ids"] for prompt in prompts]
    return llm.generate(ids, params, use_tqdm=False)


def check(outputs, prompts=PROMPTS, params=PARAMS):
    assert len(outputs) == len(prompts)
    for output, prompt in zip(outputs, prompts, strict=True):
        got = output.outputs[0].token_ids
        want = prompt["new_ids"][: params.max_tokens]
        assert len(got) == len(want)
        for at, (mine, right) in enumerate(zip(got, want, strict=True)):
            if mine != right:
                name = f"{prompt['name']!r}, token {at}, margin {prompt['margins'][at]}"
                assert prompt["margins"][at] < CLOSE, name
                assert mine == prompt["runners_up"][str(at)], name
                break  # from here on the texts differ, and both are right
