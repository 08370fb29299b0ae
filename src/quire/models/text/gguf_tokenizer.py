"""The tokenizer that a GGUF file describes in its metadata, rebuilt for the `tokenizers` library.

The file has the vocabulary and the merges; how text is cut into words before the merges apply it
only names (`tokenizer.ggml.pre`), so the cuts of the supported families are written down here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from quire.checks import shorten, shown
from quire.errors import ModelError

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # values of tokenizer.ggml.token_type

_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_PUNCTUATION}|{_TAIL}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
)


@dataclass(frozen=True)
class Scheme:
    """What a name in `tokenizer.ggml.pre` stands for; no `split` means GPT-2's own."""

    split: str | None = None
    single_digits: bool = False
    nfc: bool = False
    whole_words_first: bool = False  # a word that is a token is taken as it is, merges or not
    adds_bos: bool = False  # unless the file says otherwise

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.single_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if self.split is not None:
            steps.append(pre_tokenizers.Split(Regex(self.split), behavior="isolated"))
        own_split = self.split is None
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own_split))
        return pre_tokenizers.Sequence(steps)


_GPT2_SCHEME = Scheme()
_LLAMA3_SCHEME = Scheme(_LLAMA3, whole_words_first=True, adds_bos=True)
_QWEN2_SCHEME = Scheme(_QWEN2, nfc=True)

SCHEMES = {
    "gpt-2": _GPT2_SCHEME,
    "gpt2": _GPT2_SCHEME,
    "default": _GPT2_SCHEME,
    "smollm": Scheme(single_digits=True),
    "llama-bpe": _LLAMA3_SCHEME,
    "llama-v3": _LLAMA3_SCHEME,
    "llama3": _LLAMA3_SCHEME,
    "qwen2": _QWEN2_SCHEME,
    "deepseek-r1-qwen": _QWEN2_SCHEME,
    "tekken": Scheme(_TEKKEN, whole_words_first=True, adds_bos=True),
    "gpt-4o": Scheme(_GPT4O, whole_words_first=True),
}


# What each field of the metadata is, where it is there.
LISTS = {"tokens": str, "merges": str, "scores": float, "token_type": int}
FLAGS = ("add_bos_token", "add_eos_token", "add_space_prefix")
ROLES = ("bos", "eos", "unknown", "padding")
MOST_CUTS = 1 << 28  # characters looked at to find the merges that a SentencePiece file leaves out


def check_fields(metadata: Mapping[str, Any]) -> None:
    """Raise `ModelError` if a field that `build_tokenizer` reads is not of its type."""
    fields: dict[str, Any] = {
        name: metadata.get(f"tokenizer.ggml.{name}") for name in (*LISTS, *FLAGS)
    }
    for name, kind in LISTS.items():
        given = fields[name]
        if given is None:
            continue
        if not isinstance(given, list) or not all(type(item) is kind for item in given):
            raise damaged(f"{name} is not a list of {kind.__name__}")
        if name in ("scores", "token_type") and len(given) != len(fields["tokens"]):
            raise damaged(f"{name} has {len(given):,} entries for {len(fields['tokens']):,} tokens")
    for name in FLAGS:
        if fields[name] not in (None, True, False):
            raise damaged(f"{name} is not true or false")
    for role in ROLES:
        if type(metadata.get(f"tokenizer.ggml.{role}_token_id", 0)) is not int:
            raise damaged(f"{role}_token_id is not a number")
    if not isinstance(metadata.get("tokenizer.chat_template", ""), str):
        raise damaged("the chat template is not a text")


def damaged(why: str) -> ModelError:
    return ModelError(f"The file's tokenizer is damaged ({why}); download the file again.")


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a file whose metadata has `tokenizer.ggml.tokens`."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        return _byte_level(metadata)
    if kind == "llama":
        return _sentencepiece(metadata)
    raise ModelError(
        f"The file's tokenizer is of the kind {shown(kind)} and Quire reads 'gpt2' and 'llama';"
        " use the model's Hugging Face folder with tokenizer.json."
    )


def token_text(metadata: Mapping[str, Any], role: str) -> str | None:
    """The text of the token that `tokenizer.ggml.<role>_token_id` names."""
    token_id = metadata.get(f"tokenizer.ggml.{role}_token_id")
    tokens = metadata["tokenizer.ggml.tokens"]
    return tokens[token_id] if token_id is not None and 0 <= token_id < len(tokens) else None


def _byte_level(metadata: Mapping[str, Any]) -> Tokenizer:
    name = metadata.get("tokenizer.ggml.pre")
    scheme = SCHEMES.get(str(name))
    if scheme is None:
        raise ModelError(
            f"The file asks for the pre-tokenizer {shown(name)} and Quire knows"
            f" {', '.join(SCHEMES)}; use the model's Hugging Face folder with tokenizer.json."
        )
    merges = [tuple(pair.split(" ", 1)) for pair in metadata.get("tokenizer.ggml.merges", ())]
    if any(len(pair) != 2 for pair in merges):
        raise damaged("a merge is not of two parts")
    tokenizer = _bpe(metadata, merges, ignore_merges=scheme.whole_words_first)
    if scheme.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = scheme.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    _frame(tokenizer, metadata, adds_bos=scheme.adds_bos)
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
    """SentencePiece BPE: pieces with scores; the better score is merged first."""
    tokenizer = _bpe(
        metadata,
        _merges_by_score(metadata),
        unk_token=token_text(metadata, "unknown"),
        fuse_unk=True,
        byte_fallback=True,
    )
    mark_spaces = normalizers.Replace(" ", "▁")
    decode = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), mark_spaces])
        decode.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = mark_spaces
    tokenizer.decoder = decoders.Sequence(decode)
    _frame(tokenizer, metadata, adds_bos=True)
    return tokenizer


def _merges_by_score(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Every way to put a piece together from two others, best pieces first."""
    pieces: list[str] = metadata["tokenizer.ggml.tokens"]
    scores: list[float] = metadata.get("tokenizer.ggml.scores", [0.0] * len(pieces))
    kinds: list[int] = metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(pieces))
    usable = {
        piece: score
        for piece, score, kind in zip(pieces, scores, kinds, strict=True)
        if kind in (NORMAL, USER_DEFINED)
    }
    if sum(len(piece) ** 2 for piece in usable) > MOST_CUTS:
        raise damaged("its tokens are too long")
    merges = []
    for piece in sorted(usable, key=lambda piece: -usable[piece]):
        cuts = ((piece[:i], piece[i:]) for i in range(1, len(piece)))
        merges += [(left, right) for left, right in cuts if left in usable and right in usable]
    return merges


def _bpe(metadata: Mapping[str, Any], merges: list[Any], **options: Any) -> Tokenizer:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **options))
    except Exception as error:  # the library raises bare Exceptions
        raise damaged(shorten(str(error))) from error
    added = [
        AddedToken(token, special=kind == CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (CONTROL, USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    return tokenizer


def _frame(tokenizer: Tokenizer, metadata: Mapping[str, Any], adds_bos: bool) -> None:
    """Set what encoding puts before and after a text."""
    bos = token_text(metadata, "bos")
    eos = token_text(metadata, "eos")
    before = [bos] if bos and metadata.get("tokenizer.ggml.add_bos_token", adds_bos) else []
    after = [eos] if eos and metadata.get("tokenizer.ggml.add_eos_token", False) else []
    single = [*before, "$A", *after]
    special = [(token, tokenizer.token_to_id(token)) for token in (*before, *after)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=[*single, "$B:1"], special_tokens=special
    )
