"""Command-line flags from the fields of a dataclass: one source for name, type, default and help.

A field `block_size: int` becomes `--block-size N`. Only what the user typed lands in the
namespace, so the dataclass's own defaults and checks stay in charge.
"""

from __future__ import annotations

import argparse
import json
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from quire.api.cli.parser import CommandParser
from quire.api.flag_names import flag_of


def add_flags(
    parser: CommandParser,
    settings: type,
    title: str,
    *,
    skip: Collection[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Give `parser` a flag for every field of `settings` that it has no flag for yet.

    Two dataclasses may share a name (`seed`): the flag is made once and both read it.
    """
    group = parser.add_argument_group(title)
    hints = get_type_hints(settings)
    for spec in fields(settings):
        flag = flag_of(spec.name)
        if spec.name in skip or flag in parser.flags():
            continue
        default = (defaults or {}).get(spec.name, spec.default)
        group.add_argument(
            flag,
            dest=spec.name,
            default=argparse.SUPPRESS,
            help=_help(spec, default),
            **_how_to_read(spec, hints[spec.name]),
        )


def given(settings: type, args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `settings` that were given as flags, ready to be keyword arguments."""
    names = (spec.name for spec in fields(settings))
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def _help(spec: Field[Any], default: Any) -> str:
    text = str(spec.metadata.get("help", ""))
    if default is not MISSING and default not in (None, (), "") and "(default" not in text:
        text += f" (default: {default})"
    return text.replace("%", "%%")  # argparse formats help texts with %


def _how_to_read(spec: Field[Any], hint: Any) -> dict[str, Any]:
    """The argparse keywords that read this field's text."""
    check = spec.metadata.get("check")
    if getattr(check, "is_size", False):
        return {"metavar": "SIZE"}  # the check itself reads 8GiB
    if choices := getattr(check, "choices", ()):
        return {"metavar": "{" + ",".join(choices) + "}"}
    kinds = _alternatives(hint)
    words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    if bool in kinds and words:
        return {"type": _yes_no_or, "metavar": "{" + ",".join(["true", "false", *words]) + "}"}
    if bool in kinds:
        return {"action": argparse.BooleanOptionalAction}
    for kind in kinds:
        if get_origin(kind) in (dict, Mapping) or is_dataclass(kind):
            return {"type": _json_object, "metavar": "JSON"}
    for kind in kinds:
        if get_origin(kind) in (list, tuple, Collection):
            several = {"action": "extend", "nargs": "+"}
            how = several if getattr(check, "takes_several", False) else {"action": "append"}
            return {**how, **_scalar(get_args(kind)[0])}
    return _scalar(kinds[0])


def _alternatives(hint: Any) -> list[Any]:
    """`int | None` is [int]; a plain type is itself."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return [option for option in options if option is not type(None)]


def _scalar(kind: Any) -> dict[str, Any]:
    if kind is int:
        return {"type": _reader(int, "a whole number"), "metavar": "N"}
    if kind is float:
        return {"type": _reader(float, "a number"), "metavar": "X"}
    return {"metavar": "TEXT"}


def _reader(convert: Callable[[str], Any], says: str) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return convert(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"takes {says}, not {text!r}") from None

    return read


def _yes_no_or(text: str) -> bool | str:
    """The field's own check knows its other words."""
    return {"true": True, "false": False}.get(text.lower(), text)


def _json_object(text: str) -> dict[Any, Any]:
    """JSON has only string keys; those that are whole numbers become ints (token ids)."""
    says = argparse.ArgumentTypeError(f'takes a JSON object such as {{"42": -1.5}}, not {text!r}')
    try:
        value = json.loads(text)
    except ValueError:
        raise says from None
    if not isinstance(value, dict):
        raise says
    return {int(key) if key.lstrip("-").isdecimal() else key: item for key, item in value.items()}
