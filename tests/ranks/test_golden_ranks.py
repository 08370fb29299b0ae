"""The demo model over three ranks: token for token what `transformers` says."""

from __future__ import annotations

import json
from pathlib import Path

from effort import effort

from quire import LLM, SamplingParams

GOLDEN = Path(__file__).parent.parent / "golden" / "smollm2.json"
TOKENS = 8


def test_three_ranks_answer_as_transformers_does() -> None:
    """Its nine heads and three KV heads can be dealt out to three ranks, and not to two."""
    prompts = json.loads(GOLDEN.read_text())["prompts"]
    some = [prompt for prompt in prompts if 10 <= len(prompt["ids"]) <= 100][: effort(2, 4)]
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    settings = {"dtype": "float32", "device": "cpu", "num_blocks": 200, "use_tqdm": False}
    with LLM("smollm2", tensor_parallel_size=3, **settings) as llm:
        for _ in ("cold", "warm"):
            outputs = llm.generate([each["ids"] for each in some], params, use_tqdm=False)
            for each, output in zip(some, outputs, strict=True):
                assert output.outputs[0].token_ids == each["new_ids"][:TOKENS], each["name"]
