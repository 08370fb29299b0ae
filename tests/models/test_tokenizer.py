"""Tokens are those of `transformers`, from a GGUF file's metadata and from a folder."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from effort import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from patience import PATIENCE_S
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from quire.errors import ModelError, RequestError
from quire.models.checkpoints.gguf_file import GGUFFile
from quire.models.text.gguf_tokenizer import SCHEMES
from quire.models.text.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[1] / "golden"

FRAGMENTS = [
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", "  ", "\n", "\t", "\r\n", "12"),
    *("9", "don't", " I'LL", "Ünï", "汉字", "ไทย", "👩\u200d👩\u200d👧", "e\u0301", "½", "٣"),
    *("XMLParser", "/", " ...\n"),
]
TEXTS = st.text(max_size=60) | st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)


@pytest.fixture(scope="module")
def metadata(smollm2_path: Path) -> dict[str, Any]:
    return GGUFFile(smollm2_path).metadata


@pytest.fixture(scope="module")
def smollm2(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(metadata)


@pytest.fixture(scope="module")
def oracle(metadata: dict[str, Any]) -> PreTrainedTokenizerFast:
    """SmolLM2's tokenizer.json, built here from its parts, in `transformers`' hands."""
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(pair.split(" ")) for pair in metadata["tokenizer.ggml.merges"]]
    backend = Backend(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([t for t, k in zip(tokens, kinds, strict=True) if k == 3])
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)


def test_digits_are_single(smollm2: Tokenizer) -> None:
    assert smollm2.encode("a  1") == [81, 256, 33]


def test_golden_prompts(smollm2: Tokenizer) -> None:
    golden = json.loads((GOLDEN / "smollm2.json").read_text(encoding="utf-8"))
    assert len(golden["prompts"]) >= 44
    for prompt in golden["prompts"]:
        assert smollm2.encode(prompt["text"]) == prompt["ids"], prompt["name"]
        assert smollm2.decode(prompt["ids"], skip_special_tokens=False) == prompt["text"]


@settings(max_examples=examples(300), deadline=None)
@given(text=TEXTS, add_special_tokens=st.booleans())
@example(text="<|im_start|>user\n12 34<|im_end|>", add_special_tokens=True)
def test_equals_transformers(
    smollm2: Tokenizer, oracle: PreTrainedTokenizerFast, text: str, add_special_tokens: bool
) -> None:
    ids = oracle.encode(text, add_special_tokens=add_special_tokens)
    assert smollm2.encode(text, add_special_tokens) == ids
    for skip in (True, False):
        assert smollm2.decode(ids, skip) == oracle.decode(ids, skip_special_tokens=skip)


@settings(max_examples=examples(300), deadline=None)
@given(ids=st.lists(st.integers(0, 49_151) | st.integers(0, 300), max_size=24))
def test_bytes_of_tokens_join_to_the_text(smollm2: Tokenizer, ids: list[int]) -> None:
    assert smollm2.is_byte_level
    joined = b"".join(smollm2.token_bytes(i) for i in ids)
    assert joined.decode("utf-8", "replace") == smollm2.decode(ids, skip_special_tokens=False)
    plain = b"".join(smollm2.token_bytes(i) for i in ids if i not in smollm2.special_ids)
    assert plain.decode("utf-8", "replace") == smollm2.decode(ids)


def test_what_the_file_says(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49_152
    assert (smollm2.bos_token_id, smollm2.eos_token_id) == (1, 2)
    assert smollm2.special_ids == frozenset(range(17))
    assert smollm2.token_bytes(2) == b"<|im_end|>"
    assert smollm2.token_bytes(49_152) == b""
    assert smollm2.chat_template is not None


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", 7, None])
def test_what_is_no_text_is_refused(smollm2: Tokenizer, text: Any) -> None:
    with pytest.raises(RequestError, match="surrogates"):
        smollm2.encode(text)


@pytest.mark.parametrize("unit", ["a", " ", "1", "\n", "汉", "word, ", "abcdefgh", "<|im_end|>"])
def test_long_texts_take_linear_time(smollm2: Tokenizer, unit: str) -> None:
    start = time.perf_counter()
    ids = smollm2.encode(unit * (200_000 // len(unit)))
    assert time.perf_counter() - start < PATIENCE_S  # linear is tenths of a second
    assert len(ids) > 3_000


# --- the pre-tokenizers that other files ask for ------------------------------------------------

# As the tokenizer.json files of Llama 3, Qwen2, Mistral Nemo and gpt-oss have them.
PATTERNS = {
    "llama-bpe": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "tekken": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "gpt-4o": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
ALIASES = {
    "llama-v3": "llama-bpe",
    "llama3": "llama-bpe",
    "deepseek-r1-qwen": "qwen2",
    "gpt2": "gpt-2",
    "default": "gpt-2",
}
CUTS = {
    "gpt-2": ["12345", " don", "'t"],
    "smollm": ["1", "2", "3", "4", "5", " don", "'t"],
    "llama-bpe": ["123", "45", " don", "'t"],
    "qwen2": ["1", "2", "3", "4", "5", " don", "'t"],
    "tekken": ["1", "2", "3", "4", "5", " don", "'t"],
    "gpt-4o": ["123", "45", " don't"],
}


@pytest.fixture(scope="module")
def small() -> dict[str, Any]:
    """The metadata of a small byte-level vocabulary, with control and user-defined tokens."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([(GOLDEN / "prose.txt").read_text(encoding="utf-8")], trainer)
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    kinds = [1] * len(tokens) + [3, 3, 4]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*tokens, "<s>", "</s>", "<think>"],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [
            pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]
        ],
        "tokenizer.ggml.bos_token_id": len(tokens),
        "tokenizer.ggml.eos_token_id": len(tokens) + 1,
    }


def expected_backend(small: dict[str, Any], pre: str) -> Backend:
    tokens = small["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in small["tokenizer.ggml.merges"]]
    whole_words = pre in ("llama-bpe", "tekken", "gpt-4o")
    model = models.BPE({t: i for i, t in enumerate(tokens)}, merges, ignore_merges=whole_words)
    backend = Backend(model)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    if pre in PATTERNS:
        split = pre_tokenizers.Split(Regex(PATTERNS[pre]), behavior="isolated", invert=False)
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    else:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        digits = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
        backend.pre_tokenizer = pre_tokenizers.Sequence([*digits, byte_level])
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in ("<s>", "</s>")])
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    return backend


@pytest.mark.parametrize("pre", CUTS)
def test_pre_tokenizers(small: dict[str, Any], pre: str) -> None:
    tokenizer = Tokenizer.from_gguf({**small, "tokenizer.ggml.pre": pre})
    expected = expected_backend(small, pre)

    @settings(max_examples=examples(100), deadline=None)
    @given(TEXTS)
    def check(text: str) -> None:
        ids = expected.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special_tokens=False) == ids

    check()


def test_other_names_of_pre_tokenizers() -> None:
    assert SCHEMES.keys() == CUTS.keys() | ALIASES.keys()
    assert all(SCHEMES[alias] == SCHEMES[name] for alias, name in ALIASES.items())


@pytest.mark.parametrize("pre", CUTS)
def test_where_words_are_cut(small: dict[str, Any], pre: str) -> None:
    backend = Tokenizer.from_gguf({**small, "tokenizer.ggml.pre": pre}).backend
    pieces = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("12345 don't")]
    assert pieces == [cut.replace(" ", "Ġ") for cut in CUTS[pre]]


@pytest.mark.parametrize(
    ("pre", "flags", "framed"),
    [
        ("qwen2", {}, "x"),
        ("llama-bpe", {}, "<s>x"),
        ("tekken", {}, "<s>x"),
        ("llama-bpe", {"add_bos_token": False}, "x"),
        ("smollm", {"add_bos_token": True, "add_eos_token": True}, "<s>x</s>"),
        ("gpt-2", {"add_eos_token": True}, "x</s>"),
    ],
)
def test_what_is_put_around_a_text(
    small: dict[str, Any], pre: str, flags: dict[str, bool], framed: str
) -> None:
    flags = {f"tokenizer.ggml.{name}": value for name, value in flags.items()}
    tokenizer = Tokenizer.from_gguf({**small, "tokenizer.ggml.pre": pre, **flags})
    assert tokenizer.decode(tokenizer.encode("x"), skip_special_tokens=False) == framed
    assert tokenizer.encode(framed, add_special_tokens=False) == tokenizer.encode("x")
    bare = tokenizer.encode("x", add_special_tokens=False)
    assert tokenizer.decode(bare, skip_special_tokens=False) == "x"


def test_control_tokens_are_special_and_user_defined_are_not(small: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf({**small, "tokenizer.ggml.pre": "gpt-2"})
    ids = tokenizer.encode("<think>a</s>")
    assert len(ids) == 3
    assert tokenizer.decode(ids) == "<think>a"
    assert tokenizer.special_ids == {ids[2], ids[2] - 1}


@pytest.mark.parametrize("pre", ["command-r", "", None])
def test_an_unknown_pre_tokenizer_is_refused(small: dict[str, Any], pre: str | None) -> None:
    with pytest.raises(ModelError, match=r"smollm.*llama-bpe.*qwen2.*tekken"):
        Tokenizer.from_gguf({**small, "tokenizer.ggml.pre": pre})


@pytest.mark.parametrize("kind", ["bert", "t5", None])
def test_an_unknown_kind_of_tokenizer_is_refused(small: dict[str, Any], kind: str | None) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.from_gguf({**small, "tokenizer.ggml.model": kind})


@pytest.mark.parametrize(
    "change",
    [
        {"merges": ["no such"]},
        {"merges": ["single"]},
        {"merges": [1]},
        {"token_type": [1]},
        {"bos_token_id": "first"},
        {"tokens": "abc"},
    ],
)
def test_a_damaged_tokenizer_is_refused(small: dict[str, Any], change: dict[str, Any]) -> None:
    change = {f"tokenizer.ggml.{name}": value for name, value in change.items()}
    with pytest.raises(ModelError, match="damaged") as caught:
        Tokenizer.from_gguf({**small, "tokenizer.ggml.pre": "gpt-2", **change})
    assert "\n" not in str(caught.value)


# --- SentencePiece ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pieces() -> dict[str, Any]:
    """The metadata of a small SentencePiece vocabulary: the earlier a piece, the better."""
    backend = Backend(models.BPE())
    backend.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False, max_token_length=8)
    lines = (GOLDEN / "prose.txt").read_text(encoding="utf-8").split(".")
    backend.train_from_iterator(lines, trainer)
    vocabulary = backend.get_vocab()
    learned = sorted(vocabulary, key=vocabulary.__getitem__)
    data = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *data, *learned]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(learned))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(learned),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


@pytest.fixture(scope="module")
def spm(pieces: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(pieces)


def sentencepiece(metadata: dict[str, Any], text: str) -> list[int]:
    """The algorithm, slow and obvious: join the neighbours that make the best piece, again."""
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {token: i for i, token in enumerate(tokens)}
    scores = dict(zip(tokens[259:], metadata["tokenizer.ggml.scores"][259:], strict=True))
    symbols = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        joined = [a + b for a, b in pairwise(symbols)]
        best = max((scores[piece] for piece in joined if piece in scores), default=None)
        if best is None:
            break
        at = next(i for i, piece in enumerate(joined) if scores.get(piece) == best)
        symbols[at : at + 2] = [joined[at]]
    found = []
    for symbol in symbols:
        known = [ids[symbol]] if symbol in ids else []
        found += known or [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return found


@settings(max_examples=examples(300), deadline=None)
@given(st.text(max_size=30) | st.text("abcdefghinorst ▁", max_size=60))
@example("the lighthouse  at\nCarrow é 汉 🍐")
def test_sentencepiece(pieces: dict[str, Any], spm: Tokenizer, text: str) -> None:
    assert spm.encode(text, add_special_tokens=False) == sentencepiece(pieces, text)


def test_sentencepiece_back_to_text(spm: Tokenizer) -> None:
    text = "the lighthouse  at\nCarrow é 汉 🍐"
    ids = spm.encode(text)
    assert ids[0] == spm.bos_token_id == 1
    assert spm.decode(ids) == text
    assert not spm.is_byte_level
    assert b"".join(map(spm.token_bytes, ids[1:])) == b" " + text.encode()


# --- folders ------------------------------------------------------------------------------------


def write_folder(folder: Path, backend: Backend, **config: Any) -> None:
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


ADDED = {"content": "<extra>", "special": False, "normalized": False}
ADDED |= {"lstrip": False, "rstrip": False, "single_word": False}


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"bos_token": "<s>", "eos_token": {"content": "</s>", "__type": "AddedToken"}},
        {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True},
        {"bos_token": "<s>", "post_processor": True, "add_bos_token": False},
        {"eos_token": "<new end>", "pad_token": "<s>"},
        {"added_tokens_decoder": {"603": ADDED}},
    ],
)
def test_a_folder_reads_as_transformers_reads_it(
    small: dict[str, Any], tmp_path: Path, config: dict[str, Any]
) -> None:
    backend = expected_backend(small, "llama-bpe")
    backend.decoder = decoders.ByteLevel()
    config = dict(config)
    if config.pop("post_processor", False):
        bos = ("<s>", small["tokenizer.ggml.bos_token_id"])
        backend.post_processor = processors.TemplateProcessing("<s> $A", "$A $B", [bos])
    write_folder(tmp_path, backend, **config)
    oracle, tokenizer = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.from_folder(tmp_path)
    for text in ("", "the 12345", "<s>a</s><think> <extra> <new end>"):
        ids = oracle.encode(text)
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
        bare = oracle.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text, add_special_tokens=False) == bare
    assert tokenizer.eos_token_id == oracle.eos_token_id
    assert tokenizer.bos_token_id == oracle.bos_token_id
    assert tokenizer.vocab_size == len(oracle)


def test_a_folder_saved_from_gguf_is_the_same(smollm2: Tokenizer, tmp_path: Path) -> None:
    write_folder(tmp_path, smollm2.backend, eos_token="<|im_end|>", bos_token="<|im_start|>")
    again = Tokenizer.from_folder(tmp_path)
    text = "a  1<|im_end|> Thai ไทย 🍐"
    assert again.encode(text) == smollm2.encode(text)
    assert again.special_ids == smollm2.special_ids
    assert again.eos_token_id == smollm2.eos_token_id


def test_a_special_tokens_map_helps_out(small: dict[str, Any], tmp_path: Path) -> None:
    write_folder(tmp_path, expected_backend(small, "gpt-2"))
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>"}}')
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.eos_token_id == small["tokenizer.ggml.eos_token_id"]


def test_truncation_and_padding_in_the_file_do_not_apply(
    small: dict[str, Any], tmp_path: Path
) -> None:
    backend = expected_backend(small, "gpt-2")
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    write_folder(tmp_path, backend)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert len(tokenizer.encode("ab" * 50)) > 8
    assert len(tokenizer.encode("q")) == 1


@pytest.mark.parametrize("content", [None, "", "{}", "not json"])
def test_a_folder_without_a_tokenizer_json_is_refused(tmp_path: Path, content: str | None) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"sentencepiece")
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json") as caught:
        Tokenizer.from_folder(tmp_path)
    assert "\n" not in str(caught.value)


def test_another_process_gets_the_same_tokenizer(smollm2: Tokenizer, spm: Tokenizer) -> None:
    text = "".join(FRAGMENTS)
    for tokenizer in (smollm2, spm):
        other = Tokenizer.from_plain(json.loads(json.dumps(tokenizer.to_plain())))
        ids = tokenizer.encode(text)
        assert other.encode(text) == ids
        assert other.decode(ids, False) == tokenizer.decode(ids, False)
        assert other.special_ids == tokenizer.special_ids
        assert other.is_byte_level == tokenizer.is_byte_level
        assert other.chat_template == tokenizer.chat_template
        assert (other.bos_token_id, other.eos_token_id) == (
            tokenizer.bos_token_id,
            tokenizer.eos_token_id,
        )
