"""A completion script for fish."""

from __future__ import annotations

from collections.abc import Iterator

from quire.api.cli.shells.commands import Command, Flag

START = r"""# Completion of quire for fish. To have it in every shell:
#   quire completion fish > ~/.config/fish/completions/quire.fish
function __quire_is
    set -l command ""
    for word in (commandline -opc)[2..-1]
        switch "$command $word"
            case PATHS
                set command (string trim -- "$command $word")
        end
    end
    test "$command" = "$argv"
end
complete -c quire -f
"""


def script(commands: list[Command]) -> str:
    paths = " ".join(f"'{' ' * (' ' not in each.path)}{each.path}'" for each in commands[1:])
    lines = [line for command in commands for line in _lines(command)]
    return START.replace("PATHS", paths) + "".join(f"{line}\n" for line in lines)


def _lines(command: Command) -> Iterator[str]:
    here = f"complete -c quire -n '__quire_is {command.path}'"
    for name, says in command.subcommands.items():
        yield f"{here} -a {name} -d {_quoted(says)}"
    if command.words:
        yield f"{here} -a {_quoted(' '.join(command.words))}"
    if command.takes_file:
        yield f"{here} -F"
    for flag in command.flags:
        yield f"{here} -l {flag.name[2:]}{_value(flag)} -d {_quoted(flag.help)}"


def _value(flag: Flag) -> str:
    """-x wants a value and offers no files, -r -F wants a value and does."""
    if not flag.takes_value:
        return ""
    if flag.values:
        return f" -x -a {_quoted(' '.join(flag.values))}"
    return " -r -F" if flag.takes_file else " -x"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", r"\'") + "'"
