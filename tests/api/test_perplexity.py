"""In 16 and 8 bits nothing is exact: how well a fixed text is foretold is compared instead."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers_demo import transformers_demo

from quire import LLM, SamplingParams
from quire.kernels.fp8 import dequantise, quantise
from quire.models.source import open_model

ROOT = Path(__file__).parents[2]
GOLDEN = json.loads((ROOT / "tests" / "golden" / "smollm2.json").read_text())
TEXTS = [
    (ROOT / "tests" / "golden" / "prose.txt").read_text(),
    (ROOT / "LICENSE").read_text(),
    *(prompt["text"] for prompt in GOLDEN["prompts"] if len(prompt["ids"]) >= 100),
]

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    """Long ones and many of them: the errors of 16 bits are noise, which averages out."""
    tokenizer = open_model("smollm2", progress=False).tokenizer()
    assert tokenizer is not None
    encoded = [tokenizer.encode(text)[:4096] for text in TEXTS]
    assert sum(map(len, encoded)) > 6000
    return encoded


@pytest.fixture(scope="module")
def oracle(texts: list[list[int]]) -> Callable[..., float]:
    """The perplexity that transformers finds in bfloat16, with K and V rounded by `rounded`."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model, _ = transformers_demo()
    model = model.to("cuda", torch.bfloat16)
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def find(rounded: Callable[[Tensor], Tensor] = lambda x: x) -> float:
        def attend(module, q, k, v, *rest, **more):
            return plain(module, q, rounded(k), rounded(v), *rest, **more)

        losses = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", attend)
            for token_ids in texts:
                ids = torch.tensor([token_ids], device="cuda")
                with torch.inference_mode():
                    logits = model(ids).logits[0, :-1].float()
                losses.append(cross_entropy(logits, ids[0, 1:], reduction="none"))
        return math.exp(float(torch.cat(losses).mean()))

    return find


def perplexity(texts: list[list[int]], **settings) -> float:
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    settings |= {"dtype": "bfloat16", "num_blocks": 4096}
    with LLM("smollm2", device="cuda", use_tqdm=False, **settings) as llm:
        outputs = llm.generate(texts, params, use_tqdm=False)
    losses = [
        -entry[i].logprob
        for output, token_ids in zip(outputs, texts, strict=True)
        for entry, i in zip(output.prompt_logprobs[1:], token_ids[1:], strict=True)
    ]
    return math.exp(sum(losses) / len(losses))


def test_bfloat16_is_as_good_as_in_transformers(texts, oracle):
    found, right = perplexity(texts), oracle()
    print(f"perplexity {found:.4f}, transformers {right:.4f}: {found / right - 1:+.3%}")
    assert found / right == pytest.approx(1, abs=1e-3)


def test_chunks_and_a_cached_prefix_foretell_no_worse(texts, oracle):
    found = perplexity(texts, max_num_batched_tokens=512)
    assert found / oracle() == pytest.approx(1, abs=1e-3)


def test_fp8_costs_what_the_format_costs(texts, oracle):
    """Chunks of 256: each sees what came before it in fp8, as exact attention over it would."""
    found = perplexity(texts, kv_cache_dtype="fp8", max_num_batched_tokens=256)
    plain, exact = oracle(), oracle(lambda x: dequantise(*quantise(x)).to(x.dtype))
    print(f"perplexity in fp8 {found:.4f} ({found / plain - 1:+.3%}), exactly {exact:.4f}")
    assert found / exact == pytest.approx(1, abs=5e-3)
    assert found / plain == pytest.approx(1, abs=2e-2)
