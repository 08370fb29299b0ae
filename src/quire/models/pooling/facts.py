"""What callers need to know of a model that pools; plain data, which another process may have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

AUTO, GENERATE, EMBED, CLASSIFY, SCORE = "auto", "generate", "embed", "classify", "score"
NORMALIZE, SIGMOID, SOFTMAX, IDENTITY = "normalize", "sigmoid", "softmax", "identity"

# How Qwen3-Reranker was trained to be asked; the last token's logits of "yes" and "no" answer.
QWEN3_RERANKER = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n",
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


@dataclass(frozen=True)
class PoolingFacts:
    task: str  # EMBED or CLASSIFY, which scores too
    size: int  # numbers of an embedding, or classes
    activation: str  # what they go through, unless a caller asks for them as they are
    labels: tuple[str, ...] = ()  # of the classes
    prompts: dict[str, str] = field(default_factory=dict)  # what may be put before a text, by name
    default_prompt: str | None = None
    lower_case: bool = False  # texts are, before they are tokenized
    has_types: bool = False  # the model tells the two texts of a pair apart by the types of tokens
    asks_yes_or_no: bool = False  # pairs are put into the prompt of Qwen3-Reranker

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> PoolingFacts:
        return cls(**{**plain, "labels": tuple(plain["labels"])})
