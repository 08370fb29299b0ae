"""What a setting may be: a phrase for people, and a function that normalises a value or raises.

`EngineConfig` and `SamplingParams` are dataclasses whose fields are made by `setting`: default,
check and help in one place. Their constructors call `apply_checks`, which holds every
value to its check.
"""

from __future__ import annotations

import numbers
import operator
import reprlib
from collections.abc import Callable, Iterable
from dataclasses import field, fields
from typing import Any, NamedTuple

from quire.errors import QuireError

INT32_MAX = 2**31 - 1  # ids, lengths and slots of a step travel as int32


class Check(NamedTuple):
    """`accept` returns the value as it is kept, or raises TypeError or ValueError."""

    says: str
    accept: Callable[[Any], Any]
    choices: tuple[str, ...] = ()
    is_size: bool = False
    takes_several: bool = False  # a flag has several words behind it, and not one


def setting(default: Any, check: Check, help: str, *, optional: bool = False) -> Any:
    """A field of a settings dataclass; None is one of its values if `optional`, or the default."""
    metadata = {"check": check, "help": help, "optional": optional or default is None}
    return field(default=default, metadata=metadata)


def apply_checks(settings: Any, error: type[QuireError]) -> None:
    """Hold every field of a frozen dataclass to its check, and keep the normalised value."""
    for spec in fields(settings):
        name, value = spec.name, getattr(settings, spec.name)
        if value is None and spec.metadata["optional"]:
            continue
        check: Check = spec.metadata["check"]
        try:
            accepted = check.accept(value)
        except QuireError:
            raise  # says more than the check does
        except (TypeError, ValueError, OverflowError):
            raise error(f"{name} must be {check.says}, not {shown(value)}.") from None
        object.__setattr__(settings, name, accepted)


def refuse_unknown(
    settings: type, names: Iterable[str], error: type[QuireError], what: str
) -> None:
    """Raise for a name that is no field, with the field it looks like, or all of them."""
    known = [spec.name for spec in fields(settings)]
    for name in names:
        if name not in known:
            mend = did_you_mean(name, known) or f"; there are {', '.join(known)}."
            raise error(f"There is no {what} {name}{mend}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error sentence: the known name that looks most like `name`, if any does."""
    import difflib

    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else ""


def whole(value: Any, low: int, high: int) -> int:
    if isinstance(value, bool):  # an int to Python, a slip here
        raise TypeError(value)
    found = operator.index(value)  # numpy's integers have one too
    if not low <= found <= high:
        raise ValueError(value)
    return found


def real(value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(value)
    found = float(value)
    if not low <= found <= high:  # false for NaN as well
        raise ValueError(value)
    return found


def whole_number(low: int, high: int, *, also: str = "") -> Check:
    says = f"a whole number from {low:,} to {high:,}{also}"
    return Check(says, lambda value: whole(value, low, high))


def number(low: float, high: float) -> Check:
    return Check(f"a number from {low:g} to {high:g}", lambda value: real(value, low, high))


def share() -> Check:
    def accept(value: Any) -> float:
        fraction = real(value, 0, 1)
        if fraction == 0:
            raise ValueError(value)
        return fraction

    return Check("a number above 0 and at most 1", accept)


def flag() -> Check:
    def accept(value: Any) -> bool:
        if not isinstance(value, bool):
            raise TypeError(value)
        return value

    return Check("True or False", accept)


def shown(value: Any) -> str:
    """A short picture of a value, however large or deep it is."""
    try:
        return shorten(reprlib.repr(value))
    except ValueError:  # Python refuses to write out ints of thousands of digits
        return "a number of thousands of digits"


def shorten(text: str, most: int = 100) -> str:
    """Text out of a file for an error's sentence: one line, and no longer than a reader wants."""
    line = "".join(c if c.isprintable() else " " for c in text[: most + 1])
    return line if len(line) <= most else f"{line[: most - 1]}…"
