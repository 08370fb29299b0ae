"""Sentences about settings, said again with the flags that set them.

Errors name a setting as Python has it (`max_num_seqs`); who typed `--max-num-seqs` reads that.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields
from functools import partial

UNMISTAKABLE = r"(?<![\w./'-]){}(?![\w/=-]|\.\w)"
PLAIN_WORD = r"(?:^|(?<=\bset )){}(?= must be | to )"


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def fields_of(*settings: type) -> list[str]:
    return [spec.name for each in settings for spec in fields(each)]


def in_flags(sentence: str, names: Iterable[str]) -> str:
    """`sentence` with the settings in `names` as flags, where it clearly speaks of them.

    `block_size` is unmistakable wherever it stands. `device` is a word, too: it is taken for the
    setting in `device='cuda'`, in `set device to`, and where a sentence begins `device must be`.
    """
    for name in sorted(names, key=len, reverse=True):
        flag, word = flag_of(name), re.escape(name)
        value = rf"(?<![\w./-]){word}=(?:'([^']*)'|([\w.,/+-]*\w))"
        sentence = re.sub(value, partial(_with_value, flag), sentence)
        alone = PLAIN_WORD if "_" not in name else UNMISTAKABLE
        sentence = re.sub(alone.format(word), flag, sentence)
    return sentence


def _with_value(flag: str, found: re.Match[str]) -> str:
    return f"{flag} {found[1] or found[2]}"
