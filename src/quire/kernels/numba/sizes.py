"""Sizes on which kernels and their launches agree."""

from __future__ import annotations

LANES = 16  # numbers of a SIMD vector

SPLIT = 128  # tokens: enough to be worth a claim, few enough for two threads to share a sequence

GROUPED_TILE = 2  # rows of an expert's matrix, and tokens

# A prompt's attention (`code/prompt_attention.py`).
PROMPT_ROWS = 8  # of q, computed together
PROMPT_ITEM = 32  # rows of q of one head, as a thread claims them
PROMPT_CHUNK = 256  # tokens whose scores are computed before their weights

FLOAT_COLUMNS = 4  # of a float32 matrix, at a time

# Activations as products with GGUF's types take them (`code/gguf/activations.py`).
STEP = 32  # that have a scale in common
DIGITS = 2  # bytes of an activation's code; those of eight bits have one
TILE = 8  # tokens at most


def token_bytes(digits: int) -> int:
    """Of a step: codes, their scale, two words."""
    return digits * STEP + 4 + 8
