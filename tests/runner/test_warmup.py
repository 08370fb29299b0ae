"""Once an engine is ready, no request has to wait for a compiler."""

from __future__ import annotations

import subprocess
import sys

import pytest

# In a process of its own: what other tests have compiled is there already in this one.
SCRIPT = """
import random, sys
import triton
from quire import LLM, SamplingParams

settings = dict(load_format="dummy", use_tqdm=False, max_model_len=12000, num_blocks=8000)
llm = LLM("qwen3-0.6b", kv_cache_dtype=sys.argv[1], **settings)
late = []
def note(*, src, **_):
    late.append(getattr(src, "name", None) or src.fn.__name__)
triton.knobs.compilation.listener = note

draw = random.Random(0)
def answer(count, lengths, **params):
    prompts = [[draw.randrange(9000) for _ in range(draw.choice(lengths))] for _ in range(count)]
    before = len(late)
    wanted = SamplingParams(ignore_eos=True, max_tokens=9, **params)
    llm.generate(prompts, wanted, use_tqdm=False)
    if late[before:]:
        print(count, "of up to", max(lengths), params, "compiled", *late[before:])

for length in (1, 2, 15, 16, 17, 130, 513, 4095, 4097, 8193, 9001, 9130):
    answer(1, [length])
answer(256, [200], temperature=0.6)
answer(40, range(1, 3000), temperature=0.6)
answer(37, [1, 2, 3, 17, 40, 500], temperature=0.6, top_k=20, top_p=0.9, min_p=0.01)
answer(9, range(1, 300), presence_penalty=0.5, repetition_penalty=1.1)
answer(7, range(1, 300), logprobs=3, prompt_logprobs=2)
answer(7, range(1, 300), n=3, temperature=0.8)
answer(7, range(1, 300), logit_bias={5: 1.0}, min_tokens=3)
"""


@pytest.mark.gpu
@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_nothing_is_compiled_behind_the_start(kv):
    told = subprocess.run(
        [sys.executable, "-c", SCRIPT, kv], capture_output=True, text=True, timeout=300
    )
    assert told.returncode == 0, told.stderr[-2000:]
    assert told.stdout == ""
