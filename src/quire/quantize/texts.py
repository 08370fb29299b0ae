"""Texts to watch a model over: its own words, or a file of the user's."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from quire.errors import ConfigError
from quire.params import SamplingParams
from quire.quantize.calibrate import WatchedLLM
from quire.quantize.settings import FEWEST_TOKENS, CalibrationConfig


def texts_for(llm: WatchedLLM, config: CalibrationConfig) -> list[list[int]]:
    if config.text is None:
        return own_words(llm, config.calibration_tokens, config.seed)
    return from_file(llm, Path(config.text), config.calibration_tokens)


def own_words(llm: WatchedLLM, tokens: int, seed: int) -> list[list[int]]:
    """Texts that the model makes up, each from a token drawn at random.

    They are near to what the model was made of, and nobody has to find a file.
    """
    chooser, words, start = random.Random(seed), llm.engine.model.vocab_size, beginning(llm)
    prompts = [[*start, chooser.randrange(words)] for _ in range(-(-tokens // llm.text_length))]
    params = [
        SamplingParams(max_tokens=llm.text_length - len(prompts[0]), ignore_eos=True, seed=seed + i)
        for i in range(len(prompts))
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        [*prompt, *output.outputs[0].token_ids]
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def from_file(llm: WatchedLLM, path: Path, tokens: int) -> list[list[int]]:
    """Parts of a file, from all over it."""
    if llm.tokenizer is None:
        raise ConfigError("The model has no tokenizer to read the text with: leave it out.")
    try:
        ids = llm.tokenizer.encode(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text in UTF-8: name another file.") from None
    if len(ids) < FEWEST_TOKENS:
        raise ConfigError(
            f"{path} has {len(ids):,} tokens, and {FEWEST_TOKENS} are the fewest that tell "
            f"something: name a longer one, or leave it out."
        )
    start = beginning(llm)
    parts = spread(ids[len(start) :], llm.text_length - len(start), tokens)
    return [[*start, *part] for part in parts]


def beginning(llm: WatchedLLM) -> list[int]:
    """The tokens that every text of this model begins with, if there are any."""
    return [] if llm.tokenizer is None else llm.tokenizer.encode("")


def spread(ids: Sequence[int], length: int, tokens: int) -> list[list[int]]:
    """As many texts as have so many tokens, at even distances."""
    parts = [list(ids[start : start + length]) for start in range(0, len(ids), length)]
    wanted = min(len(parts), -(-tokens // length))
    return [parts[i * len(parts) // wanted] for i in range(wanted)]
