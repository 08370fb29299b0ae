"""Tokens of every kind of tokenizer mean the same bytes to the grammar as to the model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from quire.engine.grammar.source import grammar_text
from quire.engine.grammar.vocabulary import Vocabulary
from quire.models.text.tokenizer import Tokenizer
from quire.structured import StructuredOutput

PROSE = (Path(__file__).parents[2] / "golden" / "prose.txt").read_text(encoding="utf-8")
ADDED = [
    AddedToken("<|end|>", special=True, normalized=False),
    AddedToken("<tool_call>", special=False, normalized=False),
    AddedToken("[CALLS]", special=True, normalized=False),
]


def byte_level() -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator([PROSE], trainer)
    backend.add_tokens(ADDED)
    return Tokenizer(backend, {"eos_token": "<|end|>"}, None)


def sentencepiece(by: str) -> Tokenizer:
    """Spaces marked by the normalizer, as older files have it, or by the pre-tokenizer."""
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if by == "normalizer":
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        backend.normalizer = normalizers.Sequence(steps)
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        show_progress=False,
        max_token_length=8,
        special_tokens=["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)]],
    )
    backend.train_from_iterator(PROSE.split("."), trainer)
    fresh = Backend.from_str(json.dumps({**json.loads(backend.to_str()), "added_tokens": []}))
    fresh.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    fresh.add_tokens(ADDED)
    return Tokenizer(fresh, {"eos_token": "<|end|>"}, None)


KINDS = {
    "byte-level": byte_level,
    "sentencepiece": lambda: sentencepiece("normalizer"),
    "metaspace": lambda: sentencepiece("pre-tokenizer"),
}


@pytest.fixture(scope="module", params=KINDS)
def vocabulary(request) -> Vocabulary:
    tokenizer = KINDS[request.param]()
    end = tokenizer.backend.token_to_id("<|end|>")
    return Vocabulary(tokenizer, tokenizer.vocab_size + 7, [end, end - 1])


TEXTS = [
    "the lighthouse",
    " the  lighthouse ",
    "né 漢字 😀\n",
    '{"a": [1, 2]}',
    "<tool_call>\n{}",
    "<|end|>",
    "[CALLS]x",
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_without_choice_is_written_as_it_is(vocabulary, text) -> None:
    """Also where it spells a special token: the grammar asks for the text, not for the token."""
    form = StructuredOutput(choice=[text])
    matcher = LLMatcher(vocabulary.guided(), grammar_text(form))
    written = b""
    while not matcher.is_stopped():
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
        assert allowed and not set(allowed) & set(vocabulary.special_token_ids)
        assert matcher.consume_token(allowed[-1])
        written += vocabulary.tokens[allowed[-1]]
    assert written.decode() == text and not matcher.is_error()


def test_forced_text_takes_the_tokens_that_the_model_would_expect(vocabulary) -> None:
    ids = vocabulary("the lighthouse")
    assert b"".join(vocabulary.tokens[i] for i in ids) == b"the lighthouse"
    assert len(ids) < len("the lighthouse")


def test_an_added_token_that_is_not_special_is_text(vocabulary) -> None:
    assert vocabulary("<tool_call>") == [vocabulary.tokens.index(b"<tool_call>")]


def test_ids_beyond_the_tokenizer_are_never_allowed(vocabulary) -> None:
    matcher = LLMatcher(vocabulary.guided(), grammar_text(StructuredOutput(regex=r"(?s:.*)")))
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
    assert allowed.max() < len(vocabulary.tokens) - 7
    assert set(vocabulary.eos_token_ids) <= set(allowed.tolist())  # all of them, as it may end


def test_a_special_token_can_be_asked_for_by_its_id(vocabulary) -> None:
    special = vocabulary.tokens.index(b"[CALLS]")
    matcher = LLMatcher(
        vocabulary.guided(), LLMatcher.grammar_from_lark(f'start: <[{special}]> "x"')
    )
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    assert np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist() == [special]
