"""Make beams.json: beam search by `transformers` on the demo model, in float32.

    PYTHONPATH=tests python tests/golden/make_beams.py

Its weights are read by Quire's reader, which `make_smollm2.py` holds to that of another. Takes
minutes.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
import transformers
from transformers_beams import beams_of_transformers

from quire import BeamSearchParams
from quire.bench.engine.transformers_peer import TransformersPeer
from quire.models.source import open_model

GOLDEN = Path(__file__).parent / "beams.json"
END_OF_TEXT = 2
CASES = [
    ("The capital of France is", {"beam_width": 4, "max_tokens": 12}),
    ("Once upon a time, there was a", {"beam_width": 8, "length_penalty": 2.0, "max_tokens": 12}),
    ("2 + 2 =", {"beam_width": 2, "length_penalty": -1.0, "max_tokens": 16}),
    ("def fibonacci(n):", {"beam_width": 1, "length_penalty": 0.0, "max_tokens": 12}),
    ("Water boils at", {"beam_width": 4, "early_stopping": True, "max_tokens": 20}),
    (
        "<|im_start|>user\nSay yes.<|im_end|>\n<|im_start|>assistant\n",
        {"beam_width": 8, "early_stopping": True, "max_tokens": 16},
    ),
    (
        "<|im_start|>user\nIs the sky blue?<|im_end|>\n<|im_start|>assistant\n",
        {"beam_width": 4, "early_stopping": "never", "length_penalty": 0.0, "max_tokens": 16},
    ),
]


def main() -> None:
    source = open_model("smollm2")
    tokenizer = source.tokenizer()
    assert tokenizer is not None
    model = TransformersPeer(source, torch.float32, torch.device("cpu")).model
    cases = []
    for text, settings in CASES:
        ids = tokenizer.encode(text)
        params = BeamSearchParams(**settings)
        beams = beams_of_transformers(model, ids, params, [END_OF_TEXT])
        cases.append({"prompt": ids, "params": asdict(params), "beams": beams})
    made = {"transformers": transformers.__version__, "cases": cases}
    GOLDEN.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
