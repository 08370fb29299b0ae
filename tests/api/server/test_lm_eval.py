"""lm-eval over HTTP finds the same log-likelihoods as transformers, in float32."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from server_process import ServerProcess

from quire.models.source import open_model

pytest.importorskip("lm_eval")

QUESTIONS = [
    ("The capital of France is", [" Paris", " London", " a small village"], 0),
    ("Two plus two is", [" five", " four", " purple"], 1),
    ("The opposite of hot is", [" cold", " hot soup", " naïve 😀"], 0),
    ("Water freezes at", [" zero degrees Celsius", " noon", " one hundred degrees"], 0),
    ("She opened the door and", [" walked in", " banana", " the the the"], 0),
]
TASK = """
task: quire_small
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list:
  - metric: acc
"""


@pytest.fixture(scope="module")
def oracle():
    """The log-likelihood of some tokens behind others, by transformers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    source = open_model("smollm2", progress=False)
    config = source.config
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            rope_theta=config.rope.theta,
            tie_word_embeddings=True,
        )
    )
    model.load_state_dict(dict(source.tensors()), strict=False)
    model.tie_weights()
    tokenizer = source.tokenizer()

    def likelihood(context: str, rest: str) -> float:
        start = len(tokenizer.encode(context))
        ids = torch.tensor([tokenizer.encode(context + rest)])
        with torch.inference_mode():
            logprobs = model(ids).logits[0, :-1].float().log_softmax(-1)
        own = logprobs.gather(1, ids[0, 1:, None])[:, 0]
        return float(own[start - 1 :].sum())

    return likelihood


def evaluate(server: ServerProcess, folder: Path) -> list[dict]:
    """Run lm-eval as its users do; what it found for each question."""
    file = folder / "questions.jsonl"
    lines = [{"question": q, "choices": c, "answer": a} for q, c, a in QUESTIONS]
    file.write_text("\n".join(map(json.dumps, lines)))
    (folder / "quire_small.yaml").write_text(TASK.format(file=file))
    model = {
        "model": "smollm2",
        "base_url": f"{server.url}/v1/completions",
        "tokenizer_backend": "remote",
        "max_retries": "1",
    }
    flags = {
        "--model": "local-completions",
        "--model_args": ",".join(f"{name}={value}" for name, value in model.items()),
        "--tasks": "quire_small",
        "--include_path": str(folder),
        "--output_path": str(folder / "out"),
        "--batch_size": "4",
    }
    words = [word for pair in flags.items() for word in pair]
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", *words, "--log_samples"],
        env=os.environ | {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    [samples] = (folder / "out").rglob("samples_quire_small_*.jsonl")
    return [json.loads(line) for line in samples.read_text().splitlines()]


def test_the_same_likelihoods_as_transformers(server, oracle, tmp_path):
    samples = evaluate(server, tmp_path)
    assert len(samples) == len(QUESTIONS)
    for sample in samples:
        question, choices, _ = QUESTIONS[sample["doc_id"]]
        for choice, [[likelihood, _]] in zip(choices, sample["resps"], strict=True):
            expected = oracle(question, choice)
            assert float(likelihood) == pytest.approx(expected, abs=1e-3), (question, choice)
