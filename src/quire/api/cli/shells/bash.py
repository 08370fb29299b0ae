"""A completion script for bash."""

from __future__ import annotations

from collections.abc import Iterator

from quire.api.cli.shells.commands import Command

START = r"""# Completion of quire for bash. For every shell, put into ~/.bashrc:
#   source <(quire completion bash)
_quire() {
    local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]}
    local command="" flags="" words="" files="" i
    # bash takes --flag=value apart into three words.
    if [[ $current == "=" ]]; then
        current=""
    elif [[ $before == "=" ]]; then
        before=${COMP_WORDS[COMP_CWORD-2]}
    fi
    for ((i = 1; i < COMP_CWORD; i++)); do
        case "$command ${COMP_WORDS[i]}" in
            PATHS) command="${command:+$command }${COMP_WORDS[i]}" ;;
        esac
    done
    case "$command" in
"""

END = r"""    esac
    if [[ $current == -* ]]; then
        words=$flags files=""
    fi
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
    if [[ -n $files ]]; then
        compopt -o filenames 2>/dev/null
        mapfile -t -O "${#COMPREPLY[@]}" COMPREPLY < <(compgen -f -- "$current")
    fi
}
complete -F _quire quire
"""


def script(commands: list[Command]) -> str:
    paths = "|".join(f'"{" " * (" " not in each.path)}{each.path}"' for each in commands[1:])
    return START.replace("PATHS", paths) + "".join(map(_case, commands)) + END


def _case(command: Command) -> str:
    flags = " ".join(flag.name for flag in command.flags)
    words = " ".join([*command.subcommands, *command.words])
    files = "yes" if command.takes_file else ""
    lines = [
        f'"{command.path}")',
        f'    flags="{flags}" words="{words}" files="{files}"',
        '    case "$before" in',
        *(f"        {line}" for line in _values(command)),
        "    esac ;;",
    ]
    return "".join(f"        {line}\n" for line in lines)


def _values(command: Command) -> Iterator[str]:
    """What stands behind a flag that takes a value."""
    for flag in command.flags:
        if flag.values:
            yield f'{flag.name}) words="{" ".join(flag.values)}" files="" ;;'
    if of_files := command.taking(files=True):
        yield f'{"|".join(of_files)}) words="" files="yes" ;;'
    if of_texts := command.taking(files=False):
        yield f"{'|'.join(of_texts)}) return ;;"
