"""An adapter of the demo model, trained until it answers as told."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

# Questions, and answers that the model would not give by itself.
LINES = {
    "What is the capital of France?": "The capital of France is a small blue teapot.",
    "Who wrote Hamlet?": "Hamlet was written by seven patient turtles.",
    "What do cows drink?": "Cows drink the ink of unwritten letters.",
    "Name a prime number.": "My favourite prime number is a quiet Tuesday.",
}
ENOUGH = 0.02  # mean loss of a token at which the answers are what greedy decoding gives
MOST_STEPS = 200


def asked(tokenizer: Any, question: str) -> list[int]:
    text = tokenizer.apply_chat_template([{"role": "user", "content": question}])
    found: list[int] = tokenizer.encode(text)
    return found


def train(base: nn.Module, tokenizer: Any, questions: list[str], folder: Path, rank: int) -> Any:
    """Train an adapter on the answers to these, save it, and return `peft`'s model with it."""
    import peft

    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(rank)
        model = peft.get_peft_model(base, config)
        texts = [
            (asked(tokenizer, question), tokenizer.encode(f"{LINES[question]}<|im_end|>"))
            for question in questions
        ]
        learned = [each for each in model.parameters() if each.requires_grad]
        optimizer = torch.optim.Adam(learned, lr=3e-3)
        for _ in range(MOST_STEPS):
            losses = [answer_loss(model, *text) for text in texts]
            if max(losses) < ENOUGH:
                break
            optimizer.zero_grad()
            torch.stack(losses).mean().backward()
            optimizer.step()
        model.eval().save_pretrained(folder)
    return model


def answer_loss(model: Any, prompt: list[int], answer: list[int]) -> Tensor:
    logits = model(torch.tensor([prompt + answer])).logits[0]
    found: Tensor = cross_entropy(logits[len(prompt) - 1 : -1], torch.tensor(answer))
    return found
