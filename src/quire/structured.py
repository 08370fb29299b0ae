"""What a request may ask of its output's form: JSON, a schema, a pattern, a choice or a grammar."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

from quire.checks import Check, apply_checks, flag, refuse_unknown, setting
from quire.errors import RequestError

MAX_SCHEMA_CHARS = 128 * 1024
MAX_REGEX_CHARS = 16 * 1024
MAX_CHOICES = 1024
MAX_CHOICE_CHARS = 1024
MAX_GRAMMAR_CHARS = 64 * 1024


def _schema() -> Check:
    def accept(value: Any) -> str:
        """A schema is kept as its text: plain, comparable, and in the order it was written."""
        try:
            schema = json.loads(value) if isinstance(value, str) else value
            text = json.dumps(schema, separators=(",", ":"), allow_nan=False)
        except RecursionError:
            raise ValueError("too deep") from None
        if not isinstance(schema, Mapping) or len(text) > MAX_SCHEMA_CHARS:
            raise ValueError(value)
        return text

    return Check(
        f"a JSON schema, as a dict or as JSON text, of up to {MAX_SCHEMA_CHARS:,} characters",
        accept,
    )


def _text(what: str, most: int) -> Check:
    def accept(value: Any) -> str:
        if not isinstance(value, str):
            raise TypeError(value)
        value.encode()  # a lone surrogate is no text
        if not 1 <= len(value) <= most:
            raise ValueError(value)
        return value

    return Check(f"{what} of 1 to {most:,} characters", accept)


def _choices() -> Check:
    one = _text("a choice", MAX_CHOICE_CHARS)

    def accept(value: Any) -> tuple[str, ...]:
        if not isinstance(value, Collection) or isinstance(value, (str, bytes, Mapping)):
            raise TypeError(value)
        if not 1 <= len(value) <= MAX_CHOICES:
            raise ValueError(value)
        return tuple(dict.fromkeys(one.accept(item) for item in value))

    return Check(
        f"a list of 1 to {MAX_CHOICES:,} strings, each of 1 to {MAX_CHOICE_CHARS:,} characters",
        accept,
    )


@dataclass(frozen=True, kw_only=True)
class StructuredOutput:
    """Exactly one of its fields but the last is set, and the output has that form.

    With a `preamble`, such as the thoughts of a model, the form begins behind it. A form has a
    size limit: 131,072 characters of schema, 16,384 of pattern, 65,536 of grammar, 1,024 choices
    of 1,024 characters.
    """

    json_object: bool = setting(False, flag(), "any JSON object")
    json_schema: str | Mapping[str, Any] | None = setting(
        None, _schema(), "JSON that is valid by this schema"
    )
    regex: str | None = setting(
        None, _text("a regular expression", MAX_REGEX_CHARS), "text that matches as a whole"
    )
    choice: Collection[str] | None = setting(None, _choices(), "one of these texts")
    grammar: str | None = setting(
        None,
        _text("a grammar", MAX_GRAMMAR_CHARS),
        "text of a grammar in Lark's or GBNF's notation",
    )
    preamble: str | None = setting(
        None,
        _text("a grammar", MAX_GRAMMAR_CHARS),
        "what comes first: rules in Lark's notation, of which the first is called preamble",
    )

    def __post_init__(self) -> None:
        apply_checks(self, RequestError)
        asked = [name for name, _ in self._set() if name != "preamble"]
        if len(asked) != 1:
            names = ", ".join(spec.name for spec in fields(self) if spec.name != "preamble")
            found = " and ".join(asked) or "none"
            raise RequestError(f"structured takes exactly one of {names}, not {found}.")

    def _set(self) -> list[tuple[str, Any]]:
        both = ((spec.name, getattr(self, spec.name)) for spec in fields(self))
        return [(name, value) for name, value in both if value is not None and value is not False]

    @property
    def kind(self) -> str:
        """The name of the field that is set, which is none but the preamble's."""
        return self._set()[0][0]

    def as_dict(self) -> dict[str, Any]:
        """What is set, as plain data from which it can be made again."""
        return dict(self._set())


def structured_output() -> Check:
    def accept(value: Any) -> StructuredOutput:
        if isinstance(value, StructuredOutput):
            return value
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise TypeError(value)
        refuse_unknown(StructuredOutput, value, RequestError, "form of structured output")
        return StructuredOutput(**value)

    return Check('a StructuredOutput, or a dict such as {"regex": "[0-9]+"}', accept)
