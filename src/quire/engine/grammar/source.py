"""A form of output as a grammar in the text that `llguidance` compiles."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from quire.errors import RequestError
from quire.structured import StructuredOutput

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# JSON as `json.dumps` writes it, the spaces optional: a model that may write any white space can
# go on with it for ever. A schema's own "x-guidance" comes first.
JSON_STYLE: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}
ANY_OBJECT = '{"type":"object"}'

_NOTE = "//: "
_AT_LINE = re.compile(r"at (\d+)\(\d+\): ")

# Names in capitals are terminals, which are put into each other when a grammar is compiled: the
# time it takes grows with the cube of how many there are.
MOST_TERMINALS = 256
MOST_BLANK_LINES = 1_000
_TERMINAL = re.compile(
    r"^[_?!]*[A-Z][A-Z0-9_]*(?:\.-?\d+)?(?:[^\S\n]*\[[^\]\n]*\])?[^\S\n]*:", re.MULTILINE
)


def grammar_text(form: StructuredOutput) -> str:
    """What is left to find out is whether it compiles."""
    try:
        return _grammar_text(form)
    except ValueError as error:
        if isinstance(error, RequestError):
            raise
        raise cannot_be_used(form, error) from None


def cannot_be_used(form: StructuredOutput, why: object) -> RequestError:
    where = _AT_LINE.match(str(why))
    what = _named(form, int(where[1])) if where else _named(form)
    reason = one_line(why)
    if what is None:
        return RequestError(f"The {form.kind} cannot be used ({reason}); change it.")
    reason = _AT_LINE.sub("", reason).removeprefix("failed to compile JSON schema: ")
    return RequestError(f"{what} cannot be used ({reason}); change it.")


def note(what: str) -> str:
    """A comment in a grammar that Quire writes: what the next line is, if an error must name it."""
    return f"{_NOTE}{what}"


def _named(form: StructuredOutput, line: int = 1) -> str | None:
    """What the last note before a line says; None where there is none."""
    if form.grammar is None:
        return None
    before = form.grammar.split("\n")[:line]
    notes = [each.removeprefix(_NOTE) for each in before if each.startswith(_NOTE)]
    return notes[-1] if notes else None


def _grammar_text(form: StructuredOutput) -> str:
    text = _form_text(form)
    return text if form.preamble is None else _behind(form.preamble, text)


def _behind(preamble: str, form: str) -> str:
    """Both as grammars of their own, so that no name in one can be meant by the other."""
    first = {"lark_grammar": _as_lark(f"start: preamble @form\n{preamble}")}
    is_json = form.startswith("{")  # a list of grammars, which Lark's notation cannot begin with
    then = json.loads(form)["grammars"][0] if is_json else {"lark_grammar": form}
    return json.dumps({"grammars": [first, {**then, "name": "form"}]})


def _form_text(form: StructuredOutput) -> str:
    from llguidance import LLMatcher

    match form.kind:
        case "json_object":
            return str(LLMatcher.grammar_from_json_schema(ANY_OBJECT, JSON_STYLE))
        case "json_schema":
            return str(LLMatcher.grammar_from_json_schema(str(form.json_schema), JSON_STYLE))
        case "regex":
            return str(LLMatcher.grammar_from_regex(str(form.regex)))
        case "choice":
            assert form.choice is not None
            choices = " | ".join(quoted(text) for text in form.choice)
            return str(LLMatcher.grammar_from_lark(f"start: {choices}"))
        case _:
            return str(LLMatcher.grammar_from_lark(_as_lark(str(form.grammar))))


def quoted(text: str) -> str:
    """A text as a literal of a Lark grammar, whose escapes are JSON's."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _without_blank_lines(grammar: str) -> str:
    """Where there are many: the converter's time grows with the square of their number."""
    lines = grammar.split("\n")
    written = [line for line in lines if line.strip()]
    return "\n".join(written) if len(lines) - len(written) > MOST_BLANK_LINES else grammar


def _num_terminals(lark: str) -> int:
    """In time that grows with the text's length: who wrote it is not to be trusted."""
    lines = (line.strip() for line in lark.splitlines())
    return len(_TERMINAL.findall("\n".join(filter(None, lines)).replace("\n:", ":")))


def _as_lark(grammar: str) -> str:
    """GBNF and EBNF (`root ::= …`) in Lark's notation; Lark as it is."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        lark = str(any_to_lark(_without_blank_lines(grammar)))
    except Exception as error:  # the converter raises whatever it stumbles over
        raise RequestError(
            f"The grammar cannot be read ({one_line(error)}); write it as Lark or GBNF does."
        ) from None
    if _num_terminals(lark) > MOST_TERMINALS:
        raise RequestError(
            f"The grammar has more than {MOST_TERMINALS} terminals; write some of them as rules, "
            "in small letters."
        )
    return lark


def one_line(error: object, most: int = 200) -> str:
    """The gist of a message that may be long: compilers show the place, then say what is wrong."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    said = [line.removeprefix("error:") for line in lines if line.startswith("error:")]
    text = " ".join((said or lines)[0].split()).rstrip(".")
    if text.startswith("NoExtension") or "forced bytes" in text:  # words for a dead end
        text = "the model's tokens cannot spell it"
    return text if len(text) <= most else text[:most] + "…"
