"""A completion script for zsh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from quire.api.cli.shells.commands import Command

START = r"""#compdef quire
# Completion of quire for zsh. Either keep it as _quire in a folder of $fpath, or put into ~/.zshrc,
# behind compinit:  source <(quire completion zsh)
_quire() {
    local command="" before=${words[CURRENT-1]} i
    local -a flags below values
    local files=""
    for ((i = 2; i < CURRENT; i++)); do
        case "$command ${words[i]}" in
            (PATHS) command="${command:+$command }${words[i]}" ;;
        esac
    done
    if [[ ${words[CURRENT]} == --*=* ]]; then
        before=${words[CURRENT]%%=*}
        compset -P '*='
    fi
    case "$command" in
"""

END = r"""    esac
    if [[ $PREFIX == -* ]]; then
        _describe -o 'flag' flags
        return
    fi
    (( ${#below} )) && _describe 'command' below
    (( ${#values} )) && compadd -a values
    [[ -n $files ]] && _files
    (( compstate[nmatches] ))
}
if [[ ${funcstack[1]} == _quire ]]; then
    _quire "$@"
else
    compdef _quire quire
fi
"""


def script(commands: list[Command]) -> str:
    paths = "|".join(f'"{" " * (" " not in each.path)}{each.path}"' for each in commands[1:])
    return START.replace("PATHS", paths) + "".join(map(_case, commands)) + END


def _case(command: Command) -> str:
    flags = _described({flag.name: flag.help for flag in command.flags})
    lines = [
        f'("{command.path}")',
        f"    flags=({flags})",
        f"    below=({_described(command.subcommands)})",
        f"    values=({' '.join(command.words)}) files={'yes' if command.takes_file else ''}",
        '    case "$before" in',
        *(f"        {line}" for line in _values(command)),
        "    esac ;;",
    ]
    return "".join(f"        {line}\n" for line in lines)


def _values(command: Command) -> Iterator[str]:
    """What stands behind a flag that takes a value."""
    for flag in command.flags:
        if flag.values:
            yield f"({flag.name}) below=() files='' values=({' '.join(flag.values)}) ;;"
    if of_files := command.taking(files=True):
        yield f"({'|'.join(of_files)}) below=() values=() files=yes ;;"
    if of_texts := command.taking(files=False):
        yield f"({'|'.join(of_texts)}) return ;;"


def _described(names: Mapping[str, str]) -> str:
    return " ".join(_quoted(f"{name}:{says}") for name, says in names.items())


def _quoted(text: str) -> str:
    return "'" + text.replace("'", r"'\''") + "'"
