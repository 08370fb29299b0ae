"""lm-eval over HTTP finds the same log-likelihoods as transformers, in float32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import ServerProcess
from transformers_demo import transformers_demo

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
  cache_dir: {cache}
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


def likelihoods() -> dict[tuple[str, str], float]:
    """Of each choice behind its question, by transformers; all in one batch, padded behind."""
    import torch

    model, tokenizer = transformers_demo()
    pairs = [(question, choice) for question, choices, _ in QUESTIONS for choice in choices]
    rows = [tokenizer.encode(question + choice) for question, choice in pairs]
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
    with torch.inference_mode():
        logprobs = model(ids).logits[:, :-1].log_softmax(-1)
    own = logprobs.gather(2, ids[:, 1:, None])[..., 0]
    found = {}
    for i, (question, choice) in enumerate(pairs):
        start = len(tokenizer.encode(question))
        found[question, choice] = float(own[i, start - 1 : len(rows[i]) - 1].sum())
    return found


def evaluate(server: ServerProcess, folder: Path) -> list[dict]:
    """Run lm-eval; what it found for each question. Its own tasks, thousands, are not read."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    file = folder / "questions.jsonl"
    lines = [{"question": q, "choices": c, "answer": a} for q, c, a in QUESTIONS]
    file.write_text("\n".join(map(json.dumps, lines)))
    (folder / "quire_small.yaml").write_text(TASK.format(file=file, cache=folder / "cache"))
    found = simple_evaluate(
        model="local-completions",
        model_args={
            "model": "smollm2",
            "base_url": f"{server.url}/v1/completions",
            "tokenizer_backend": "remote",
            "max_retries": 1,
        },
        tasks=["quire_small"],
        batch_size=4,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        log_samples=True,
    )
    return found["samples"]["quire_small"]


@pytest.fixture
def exact() -> Iterator[ServerProcess]:
    """In float32, as `transformers` computes here."""
    server = ServerProcess()
    yield server
    assert server.stop() == 0, server.log


def test_the_same_likelihoods_as_transformers(exact, tmp_path):
    samples = evaluate(exact, tmp_path)
    assert len(samples) == len(QUESTIONS)
    expected = likelihoods()
    for sample in samples:
        question, choices, _ = QUESTIONS[sample["doc_id"]]
        for choice, [[likelihood, _]] in zip(choices, sample["resps"], strict=True):
            assert float(likelihood) == pytest.approx(expected[question, choice], abs=1e-3)
