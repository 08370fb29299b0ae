"""Settings in a sentence become flags where it speaks of them, and nowhere else."""

from __future__ import annotations

import pytest

from quire.api.flag_names import fields_of, in_flags
from quire.api.server.settings import ServerConfig
from quire.config import EngineConfig
from quire.params import SamplingParams

SENTENCES = [
    (
        "max_num_seqs must be a whole number, not 0.",
        "--max-num-seqs must be a whole number, not 0.",
    ),
    (
        "device='cuda' was asked for and torch finds no CUDA device; use 'cpu'.",
        "--device cuda was asked for and torch finds no CUDA device; use 'cpu'.",
    ),
    (
        "max_model_len=40,960 is more than the 8,192 positions the model was made for.",
        "--max-model-len 40,960 is more than the 8,192 positions the model was made for.",
    ),
    (
        "num_speculative_tokens needs a drafter; set speculative to ngram or to a model.",
        "--num-speculative-tokens needs a drafter; set --speculative to ngram or to a model.",
    ),
    (
        "speculative=Org/some-7b has a vocabulary of 9 tokens and the model one of 8.",
        "--speculative Org/some-7b has a vocabulary of 9 tokens and the model one of 8.",
    ),
    (
        "An SSD cache needs both ssd_cache_dir and ssd_cache_bytes; set both.",
        "An SSD cache needs both --ssd-cache-dir and --ssd-cache-bytes; set both.",
    ),
    (
        "ssd_cache_dir /data/num_blocks cannot be used; see block_size.txt and --block-size.",
        "--ssd-cache-dir /data/num_blocks cannot be used; see block_size.txt and --block-size.",
    ),
]
UNTOUCHED = [
    "The model runs on one device; a host has a port, a page and a seed to stop at.",
    "Cannot listen on 127.0.0.1 port 80: Permission denied; choose others with --host and --port.",
    "./my_num_blocks_model has no config.json.",
    "--max-num-seqs must be a whole number.",
]
NAMES = fields_of(EngineConfig, SamplingParams, ServerConfig)


@pytest.mark.parametrize(("sentence", "wanted"), SENTENCES)
def test_settings_are_flags(sentence: str, wanted: str) -> None:
    assert in_flags(sentence, NAMES) == wanted
    assert in_flags(wanted, NAMES) == wanted


@pytest.mark.parametrize("sentence", UNTOUCHED)
def test_words_are_words(sentence: str) -> None:
    assert in_flags(sentence, NAMES) == sentence


def test_a_command_that_has_no_such_flag_says_it_as_it_was() -> None:
    assert in_flags("block_size must be 16.", ["max_num_seqs"]) == "block_size must be 16."
