"""Texts of a form at random, as a model that knows nothing would write them."""

from __future__ import annotations

import numpy as np

from quire.engine.grammar.compiler import GrammarCompiler
from quire.engine.grammar.state import GrammarState
from quire.structured import StructuredOutput


def text_of(compiler: GrammarCompiler, form, seed: int = 0, most: int = 300) -> str | None:
    """A random text of the form, token by token; None if it does not end."""
    ids = ids_of(compiler, form, seed, most)
    if ids is None:
        return None
    assert compiler._vocabulary is not None
    return b"".join(compiler._vocabulary.tokens[i] for i in ids).decode()


def ids_of(compiler: GrammarCompiler, form, seed: int = 0, most: int = 300) -> list[int] | None:
    asked = form if isinstance(form, StructuredOutput) else StructuredOutput(**form)
    grammar = compiler.compile(asked)
    grammar.check()
    matcher, vocabulary = GrammarState(grammar).matcher, compiler._vocabulary
    assert vocabulary is not None
    rng, ids = np.random.default_rng(seed), list[int]()
    while not matcher.is_stopped():
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        token = int(rng.choice(allowed))
        if token in vocabulary.eos_token_ids:
            assert matcher.is_accepting()
            break
        ids.append(token)
        assert matcher.consume_token(token)
        if len(ids) > most:
            return None
    return ids
