"""Grammars from what people write: good, bad and hostile."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from effort import examples
from grammar_walk import text_of
from hypothesis import given, settings
from hypothesis import strategies as st
from spelling import TOKENS, tokenizer

from quire.engine.grammar import compiler as compiler_module
from quire.engine.grammar.compiler import GrammarCompiler
from quire.engine.grammar.state import GrammarState
from quire.errors import RequestError
from quire.models.source import open_model
from quire.structured import StructuredOutput

EOS = 2  # of the real model


@pytest.fixture(scope="module")
def small():
    compiler = GrammarCompiler(tokenizer(), len(TOKENS), (0,))
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def real():
    """Over the vocabulary of a real model."""
    source = open_model("smollm2", progress=False)
    compiler = GrammarCompiler(source.tokenizer(), source.config.vocab_size, (EOS,))
    yield compiler
    compiler.close()


TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "number", "minimum": -5, "maximum": 5},
                "left": {"$ref": "#/$defs/node"},
            },
            "required": ["value"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}


@pytest.mark.parametrize("seed", range(5))
def test_texts_have_their_form(real, seed):
    assert re.fullmatch(r"[a-f]{2,6}\d", text_of(real, {"regex": r"[a-f]{2,6}\d"}, seed))
    assert text_of(real, {"choice": ["né", "a\tb", '"\\']}, seed) in ("né", "a\tb", '"\\')
    lark = {"grammar": 'start: item ("," item){1,3}\nitem: /[0-9]{1,3}/'}
    assert re.fullmatch(r"\d{1,3}(,\d{1,3}){1,3}", text_of(real, lark, seed))
    gbnf = {"grammar": 'root ::= "<" word ">"\nword ::= [a-z] | [a-z] [a-z]'}
    assert re.fullmatch("<[a-z]{1,2}>", text_of(real, gbnf, seed))
    tree = text_of(real, {"json_schema": TREE}, seed)
    if tree is not None:
        assert -5 <= json.loads(tree)["value"] <= 5


def test_any_object_is_an_object(real):
    found = [text_of(real, {"json_object": True}, seed, most=40) for seed in range(12)]
    ended = [json.loads(text) for text in found if text is not None]
    assert ended and all(isinstance(each, dict) for each in ended)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=4, unique=True))
def test_any_text_can_be_a_choice(real, choices):
    choices = [text for text in choices if can_be_spelt(text)] or ["\x7f\x00"]
    assert text_of(real, {"choice": choices}) in choices


def can_be_spelt(text):
    """The model's vocabulary lacks a few bytes."""
    return not set(text.encode()) & {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2, 0xF3}


def test_what_the_model_cannot_spell_is_refused(real):
    with pytest.raises(RequestError, match="tokens cannot spell it"):
        real.compile(StructuredOutput(choice=["\x04"])).check()


def test_white_space_cannot_go_on_for_ever(real):
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    texts = {text_of(real, {"json_schema": schema}, seed) for seed in range(12)}
    assert texts <= {'{"a":1}', '{"a": 1}'}


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"regex": "[a-"}, "The regex cannot be used (unclosed character class); change it."),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": "(" * 5000 + "a" + ")" * 5000}, "nested"),
        ({"json_schema": {"type": "word"}}, "Invalid type: word"),
        ({"json_schema": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json_schema": {"$ref": "http://example.com/schema"}}, "example.com"),
        ({"json_schema": {"$ref": "#/$defs/nowhere"}}, "nowhere"),
        ({"json_schema": {"anyOf": []}}, "The json_schema cannot be used"),
        ({"json_schema": '{"items":' * 300 + "{}" + "}" * 300}, "recursion limit"),
        ({"json_schema": {"allOf": [{"$ref": "#"}]}}, "The json_schema cannot be used"),
        ({"grammar": "start: nothing"}, 'unknown name: "nothing"'),
        ({"grammar": "root ::= nothing"}, "The grammar cannot be read"),
        ({"grammar": "start: " + "(" * 9000 + '"a"' + ")" * 9000}, "nested"),
        ({"grammar": "root ::= " + "(" * 9000 + '"a"' + ")" * 9000}, "The grammar cannot be read"),
        (
            {"grammar": "start: T0\n" + "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(999))},
            "more than 256 terminals",
        ),
        (
            {
                "grammar": "start: T0\n"
                + "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(40))
                + '\nT40: "a"'
            },
            "to compile",
        ),
        ({"json_schema": {"type": "integer", "multipleOf": 982451653}}, "fuel"),
        ({"json_schema": {"type": "integer", "multipleOf": 999983}}, "to compile"),
        ({"json_schema": {"type": "number", "multipleOf": 99999989}}, "to compile"),
        ({"json_schema": {"allOf": [{"multipleOf": m} for m in (997, 991, 983)]}}, "to compile"),
    ],
    ids=lambda value: None if isinstance(value, str) else next(iter(value)),
)
def test_what_cannot_be_had_is_refused_in_one_sentence(real, form, says):
    with pytest.raises(RequestError) as caught:
        real.compile(StructuredOutput(**form)).check()
    message = str(caught.value)
    assert says in message and "\n" not in message and len(message) < 300


# Forms that would be a burden to a plain compiler, and what becomes of each: a pattern that all of
# its texts have, or the end of a text because its grammar grew too large on the way.
TOO_LARGE = "grows too large"
HOSTILE = {
    "repeats": ({"regex": "((a{0,100}){0,100}){0,100}"}, "a*"),
    "remembers": ({"regex": "[ab]*a[ab]{18}"}, "[ab]*a[ab]{18}"),
    "backtracks": ({"regex": "(x+x+)+y"}, "x{2,}y"),
    "ambiguous": ({"grammar": 'start: x\nx: x x | "a" | "aa" | "aaa"'}, "a+"),
    "wide": (
        {
            "json_schema": {
                "type": "object",
                "properties": {f"p{i}": {"type": "string"} for i in range(600)},
            }
        },
        TOO_LARGE,
    ),
    "doubles": (
        {
            "json_schema": {
                "$defs": {
                    **{f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)},
                    "d40": {"type": "integer"},
                },
                "$ref": "#/$defs/d0",
            }
        },
        "-?[0-9]+",
    ),
    "long": ({"json_schema": {"type": "string", "minLength": 10**6, "maxLength": 10**7}}, '"[^"]*'),
    "many": ({"choice": [f"{i:04}" * 200 for i in range(1000)]}, "([0-9]{4})\\1*[0-9]{0,3}"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_work_or_say_that_they_grow(real, name):
    form, pattern = HOSTILE[name]
    grammar = real.compile(StructuredOutput(**form))
    grammar.check()
    state, rng, ids = GrammarState(grammar), np.random.default_rng(0), []
    for _ in range(60):
        bits = np.frombuffer(state.matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        if state.is_complete or (token := int(rng.choice(allowed))) == EOS:
            break
        ids.append(token)
        state.follow(np.array(ids, dtype=np.int32))
    text = b"".join(real._vocabulary.tokens[i] for i in ids).decode(errors="ignore")
    if pattern is TOO_LARGE:
        assert state.matcher.is_error() and text == '{"'
    else:
        assert not state.matcher.is_error() and len(text) > 4
        assert re.fullmatch(pattern, text, re.DOTALL), text


def test_the_same_form_is_compiled_once(small):
    form = StructuredOutput(regex="[ab]+")
    first = small.compile(form)
    assert small.compile(StructuredOutput(regex="[ab]+")) is first
    assert small.compile(StructuredOutput(choice=["[ab]+"])) is not first


def test_what_is_kept_is_bounded_by_number_and_by_bytes(monkeypatch):
    monkeypatch.setattr(compiler_module, "MOST_KEPT", 3)
    compiler = GrammarCompiler(tokenizer(), len(TOKENS), (0,))
    for count in range(1, 8):
        compiler.compile(StructuredOutput(regex=f"a{{{count}}}")).check()
    assert [form.regex for form in compiler._kept] == ["a{5}", "a{6}", "a{7}"]
    large = StructuredOutput(json_schema={"type": "integer", "multipleOf": 19997})
    grammar = compiler.compile(large)
    grammar.check()
    assert 5 << 20 < grammar.num_bytes < 20 << 20  # as measured; its schema has forty characters
    monkeypatch.setattr(compiler_module, "MOST_KEPT_BYTES", 2 * grammar.num_bytes)
    other = StructuredOutput(json_schema={"type": "integer", "multipleOf": 19993})
    compiler.compile(other).check()
    assert compiler.compile(StructuredOutput(regex="b")).error is None
    assert large not in compiler._kept and other in compiler._kept
    compiler.close()


def test_a_grammar_counts_what_it_grows_by(small):
    grammar = small.compile(StructuredOutput(regex="[ab]*"))
    grammar.check()
    before, state = grammar.num_bytes, GrammarState(grammar)
    state.follow(np.full(100, TOKENS.index("a"), dtype=np.int32))
    assert grammar.num_bytes >= before + 100 * 1024
    state.follow(np.full(10_000, TOKENS.index("a"), dtype=np.int32))
    assert grammar.num_bytes <= before + (32 << 20)


def test_a_grammar_whose_lexer_is_full_is_compiled_anew(small):
    """The texts of one form share its lexer: it must not be full for all that come later."""
    form = StructuredOutput(regex="[ab]*a[ab]{17}")
    grammar, rng = small.compile(form), np.random.default_rng(0)
    tokens = [TOKENS.index("a"), TOKENS.index("b")]
    for _ in range(10):
        state, text = GrammarState(grammar), rng.choice(tokens, size=4000).astype(np.int32)
        state.follow(text)
        if state.error is not None:
            break
    assert "lexer error: too many" in state.error
    again = small.compile(form)
    assert again is not grammar
    state = GrammarState(again)
    state.follow(text[:100])
    assert state.error is None


def test_states_of_one_grammar_do_not_touch_each_other(small):
    grammar = small.compile(StructuredOutput(regex="a+b"))
    grammar.check()
    one, other = GrammarState(grammar), GrammarState(grammar)
    a, b = TOKENS.index("a"), TOKENS.index("b")
    one.follow(np.array([a, b], dtype=np.int32))
    assert one.is_complete and not other.is_complete
    other.follow(np.array([a], dtype=np.int32))
    other.invalidate()
    other.follow(np.array([a, a, b], dtype=np.int32))
    assert other.is_complete and other.error is None


def test_a_token_that_breaks_the_form_is_an_error_not_a_crash(small):
    grammar = small.compile(StructuredOutput(regex="a+b"))
    grammar.check()
    state = GrammarState(grammar)
    state.follow(np.array([TOKENS.index("q")], dtype=np.int32))
    assert state.error is not None and "\n" not in state.error


def test_a_model_without_a_tokenizer_is_told_so():
    with pytest.raises(RequestError, match="has no tokenizer"):
        GrammarCompiler(None, 50, (0,)).compile(StructuredOutput(regex="a"))


def test_a_model_without_an_end_is_told_so():
    plain = type(tokenizer())(tokenizer().backend, {}, None)
    compiler = GrammarCompiler(plain, 50, ())
    with pytest.raises(RequestError, match="no end-of-text token"):
        compiler.compile(StructuredOutput(regex="a")).check()
    compiler.close()


def test_a_library_that_fails_in_another_way_ends_the_request(monkeypatch):
    """An older `llguidance` does not take all arguments; the request must not wait for ever."""

    def does_not_know(*_):
        raise TypeError("an unexpected keyword")

    monkeypatch.setattr(compiler_module, "Vocabulary", does_not_know)
    compiler = GrammarCompiler(tokenizer(), len(TOKENS), (0,))
    try:
        grammar = compiler.compile(StructuredOutput(regex="a"))
        grammar.wait(timeout=60)
        assert grammar.is_done
        assert "the compiler failed" in str(grammar.error)
    finally:
        compiler.close()


def test_a_compiler_that_is_closed_says_so_at_once():
    compiler = GrammarCompiler(tokenizer(), len(TOKENS), (0,))
    compiler.close()
    with pytest.raises(RequestError, match="has been closed"):
        compiler.compile(StructuredOutput(regex="[a-c]")).check()
