"""Which layers a checkpoint's config means by a name, a pattern, or a class.

The config comes from strangers, and so do its regular expressions: only those are tried that cannot
take for ever.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from quire.checks import shown
from quire.errors import ModelError
from quire.models.checkpoints.json_fields import Raw, refusal

MOST_NAMES = 1 << 14
REGEX = "re:"
MOST_REGEX_CHARACTERS = 300
MOST_REPEATS = 6  # with so many, names of a hundred letters are still matched at once
REPEATED_GROUP = re.compile(r"\)[*+{]")
MODEL, LANGUAGE_MODEL = "model.", "language_model."
EMBEDDING = "embed_tokens"
HEADS = ("lm_head", "head")  # a model's own, and that of its MTP layer
JOINING = "eh_proj"  # that layer's first matrix, which DeepSeek leaves in 16 bits


def read_names(raw: Raw, key: str) -> tuple[str, ...]:
    """A list of names, or nothing."""
    value: Any = raw.get(key)
    value = [] if value is None else value
    is_list = isinstance(value, list) and len(value) <= MOST_NAMES
    if not is_list or not all(isinstance(name, str) and name for name in value):
        raise refusal(f"quantization_config.{key}", value, "a list of names")
    for name in value:
        if name.startswith(REGEX):
            compiled(name.removeprefix(REGEX))
    return tuple(value)


def is_named(names: Sequence[str], listed: Sequence[str]) -> bool:
    """Whether one of a layer's names is listed, or a part of it between dots is."""
    full = spellings(names)
    dotted = [f".{name}." for name in full]
    return any(
        any(matches(entry, name) for name in full)
        if entry.startswith(REGEX) or "*" in entry
        else any(f".{entry.strip('.')}." in name for name in dotted)
        for entry in listed
    )


def spellings(names: Sequence[str]) -> Sequence[str]:
    """What checkpoints that hold more than a language model may call its layers, too: before
    `model.` or, as `transformers` 5 writes them, behind it."""
    outer = [LANGUAGE_MODEL + name for name in names]
    inner = [MODEL + LANGUAGE_MODEL + name.removeprefix(MODEL) for name in names]
    return [*names, *outer, *(MODEL + name for name in outer), *inner]


def matches(pattern: str, name: str) -> bool:
    """By a regular expression (`re:…`) from the name's start, by `*`, or by being the same."""
    if pattern.startswith(REGEX):
        return compiled(pattern.removeprefix(REGEX)).match(name) is not None
    if "*" in pattern:
        pieces = [re.escape(piece) for piece in pattern.split("*")]
        return compiled(".*".join(pieces) + "$").match(name) is not None
    return pattern == name


@lru_cache(maxsize=1024)
def compiled(pattern: str) -> re.Pattern[str]:
    repeats = sum(pattern.count(sign) for sign in "*+{")
    too_long = len(pattern) > MOST_REGEX_CHARACTERS or repeats > MOST_REPEATS
    if too_long or REPEATED_GROUP.search(pattern):
        raise ModelError(
            f"The model's quantization_config has the pattern {shown(pattern)}, which could take "
            f"for ever to try: name the layers one by one."
        )
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        raise ModelError(
            f"The model's quantization_config has the pattern {shown(pattern)}, which is no "
            f"regular expression: download it again, or choose another model."
        ) from None


def is_embedding(names: Sequence[str]) -> bool:
    return any(name.rpartition(".")[2] == EMBEDDING for name in names)


def stays_dense(names: Sequence[str]) -> bool:
    """Whether checkpoints leave a layer as numbers, unless they say otherwise."""
    return is_head(names) or any(name.rpartition(".")[2] == JOINING for name in names)


def is_head(names: Sequence[str]) -> bool:
    return any(name.rpartition(".")[2] in HEADS for name in names)
