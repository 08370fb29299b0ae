"""Adapters over two ranks: each holds its part of them, and answers are those of one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_adapters import write_adapter
from tiny_llm import open_tiny, write_config

from quire import LoRARequest, SamplingParams
from quire.errors import QuireError


def test_two_ranks_answer_as_one(tmp_path: Path) -> None:
    model = write_config(tmp_path / "model")
    loras = [
        LoRARequest(f"a{i}", i, str(write_adapter(tmp_path / f"a{i}", seed=i))) for i in (1, 2, 3)
    ]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    prompts = [[1, 2, 3, 4, 5]] * 4
    answers = []
    for size in (1, 2):
        settings = {"enable_lora": True, "max_loras": 2, "num_blocks": 64, "block_size": 4}
        with open_tiny(model, "cpu", tensor_parallel_size=size, **settings) as llm:
            # Three adapters take turns in two slots.
            outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=[None, *loras])
            answers.append([output.outputs[0].token_ids for output in outputs])
            nowhere = LoRARequest("nowhere", 4, str(tmp_path / "nowhere"))
            with pytest.raises(QuireError, match="nowhere"):
                llm.generate(prompts[:1], params, use_tqdm=False, lora_request=[nowhere])
    assert answers[0] == answers[1]
    assert len({tuple(answer) for answer in answers[0]}) == 4
