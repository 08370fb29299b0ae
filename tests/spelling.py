"""A tokenizer of fifty tokens for the fake model, and what it must write under a grammar."""

from __future__ import annotations

from functools import cache

import numpy as np
from fake_model import VOCAB, next_token, seen
from llguidance import LLMatcher
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from quire.engine.grammar.compiler import GrammarCompiler
from quire.engine.grammar.source import grammar_text
from quire.engine.grammar.vocabulary import Vocabulary
from quire.models.text.tokenizer import Tokenizer
from quire.structured import StructuredOutput

EOS = 0
TOKENS = ["<end>", *'{}[]":,0123456789abcdefghijklmnopq', "ab", "abc", "12", '{"', '":', '",', '"}']
TOKENS += ["true", "false", "null", "x", "y", "z", "-", "."]
TOKENS += [f"u{i}" for i in range(VOCAB - len(TOKENS))]


@cache
def tokenizer() -> Tokenizer:
    backend = Backend(models.BPE(vocab={text: i for i, text in enumerate(TOKENS)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    return Tokenizer(backend, {"eos_token": "<end>"}, None)


@cache
def guided():
    return Vocabulary(tokenizer(), VOCAB, [EOS]).guided()


class SharedCompiler(GrammarCompiler):
    """It outlives the engines that it is lent to, which close their compilers."""

    def close(self) -> None:
        return


_compiler: list[GrammarCompiler] = []


def compiled(forms) -> GrammarCompiler:
    """One compiler for all engines, with these done: then requests do not wait for threads."""
    if not _compiler:
        _compiler.append(SharedCompiler(tokenizer(), VOCAB, (EOS,)))
    for form in forms:
        _compiler[0].compile(StructuredOutput(**form)).check()
    return _compiler[0]


def written(prompt, max_tokens, form, **wishes):
    """What a greedy request must give under a grammar, worked out token by token."""
    matcher = LLMatcher(guided(), grammar_text(StructuredOutput(**form)))
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens and not matcher.is_stopped():
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")[:VOCAB])
        may_end = len(tokens) - len(prompt) >= wishes.get("min_tokens", 0)
        if not may_end or wishes.get("ignore_eos"):
            allowed = allowed[allowed != EOS] if len(allowed) > 1 else allowed
        tokens.append(next_token(seen(tokens), choices=allowed))
        if tokens[-1] == EOS:
            break
        assert matcher.consume_token(tokens[-1])
    return tokens[len(prompt) :]
