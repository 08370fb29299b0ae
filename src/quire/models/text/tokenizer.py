"""Text to token ids and back, over the `tokenizers` library, from a folder or from a GGUF file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from tokenizers import AddedToken, Encoding, decoders
from tokenizers import Tokenizer as Backend

from quire.errors import ModelError, RequestError
from quire.models.checkpoints.git_lfs import refuse_pointer
from quire.models.checkpoints.json_fields import flag, mapping, refusal, text
from quire.models.checkpoints.json_file import read_json, read_text
from quire.models.text import chat_template
from quire.models.text.gguf_tokenizer import build_tokenizer, check_fields, token_text
from quire.models.text.tokenizer_checks import check_backend, refuse

MOST_BYTES = 256 << 20  # of tokenizer.json: the largest today have 33 million
SPECIAL_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "mask_token")
GGUF_ROLES = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
}


class Tokenizer:
    """`special_tokens` maps roles (`bos_token`, ...) to texts, as chat templates see them."""

    def __init__(
        self, backend: Backend, special_tokens: Mapping[str, Any], chat_template: str | None
    ) -> None:
        self.backend = backend
        self.special_tokens = dict(special_tokens)
        self.chat_template = chat_template
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.is_byte_level = isinstance(backend.decoder, decoders.ByteLevel)

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """The tokenizer of a Hugging Face folder, read as `transformers` reads it.

        What is put around a text is tokenizer.json's to say; `add_bos_token` does not override it.
        """
        config = _read_json(folder / "tokenizer_config.json")
        backend = _read_backend(folder)
        special_tokens = _special_tokens(config, _read_json(folder / "special_tokens_map.json"))
        _add_missing_tokens(backend, config, special_tokens)
        return cls(backend, special_tokens, _chat_template(folder, config))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """The tokenizer that a GGUF file's metadata describes."""
        check_fields(metadata)
        texts = {role: token_text(metadata, name) for role, name in GGUF_ROLES.items()}
        backend = build_tokenizer(metadata)
        special_tokens = {role: text for role, text in texts.items() if text is not None}
        return cls(backend, special_tokens, metadata.get("tokenizer.chat_template"))

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Tokenizer:
        """What `to_plain` of another process wrote."""
        backend = Backend.from_str(plain["backend"])
        return cls(backend, plain["special_tokens"], plain["chat_template"])

    def to_plain(self) -> dict[str, Any]:
        """All of it as plain data, whatever files it was read from."""
        return {
            "backend": self.backend.to_str(),
            "special_tokens": self.special_tokens,
            "chat_template": self.chat_template,
        }

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return _encode(self.backend, text, add_special_tokens)

    def encode_all(
        self, texts: Sequence[str | tuple[str, str]], add_special_tokens: bool = True
    ) -> list[Encoding]:
        """Texts, or pairs of them, by several threads; all that the library says but the places of
        tokens in their texts, which nothing here asks for."""
        try:
            found: list[Encoding] = self.backend.encode_batch_fast(
                list(texts), add_special_tokens=add_special_tokens
            )
        except BaseException as error:
            _refuse_text(error)
        return found

    def encode_as_text(self, text: str) -> list[int]:
        """Without any special token, whatever the text spells."""
        return _encode(self._backend_for_text, text, add_special_tokens=False)

    @cached_property
    def _backend_for_text(self) -> Backend:
        backend = Backend.from_str(self.backend.to_str())
        backend.encode_special_tokens = True  # by their letters
        return backend

    @cached_property
    def special_spelling(self) -> re.Pattern[str]:
        """Finds the texts of special tokens, the longest first; nothing where there are none."""
        added = self.backend.get_added_tokens_decoder().values()
        texts = sorted((token.content for token in added if token.special), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, filter(None, texts))) or r"(?!)")

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        try:
            return str(self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens))
        except BaseException as error:
            refuse(error, _undecodable)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for, which may be a part of a character; none if unknown."""
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if self.is_byte_level:
            return _bytes_of_byte_level(token)
        return _bytes_of_piece(token)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the greatest token id."""
        return max(self.backend.get_vocab().values(), default=-1) + 1

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation; encode it with `add_special_tokens=False`.

        `variables` are for the template; users may name them as they like.
        """
        if self.chat_template is None:
            raise RequestError("This model has no chat template; give a prompt instead of a chat.")
        chat_template.refuse_reserved(variables or {})
        named = {**self.special_tokens, **(variables or {})}
        return chat_template.render(self.chat_template, messages, add_generation_prompt, named)

    def _id_of(self, role: str) -> int | None:
        text = self.special_tokens.get(role)
        return None if text is None else self.backend.token_to_id(text)


def _encode(backend: Backend, text: str, add_special_tokens: bool) -> list[int]:
    try:
        ids: list[int] = backend.encode(text, add_special_tokens=add_special_tokens).ids
    except BaseException as error:
        _refuse_text(error)
    return ids


def _refuse_text(error: BaseException) -> NoReturn:
    if isinstance(error, TypeError):
        raise RequestError(
            "The prompt must be a string without lone surrogates; decode it as UTF-8 first."
        ) from error
    refuse(error, _unencodable)


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones are themselves, the others follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


def _bytes_of_byte_level(token: str) -> bytes:
    # As the library's decoder does it: a token with any other character is plain text.
    try:
        return bytes([_ALPHABET[char] for char in token])
    except KeyError:
        return token.encode()


def _bytes_of_piece(token: str) -> bytes:
    """SentencePiece: `▁` is a space, `<0x0A>` a byte."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    return token.replace("▁", " ").encode()


def _unencodable(why: str) -> RequestError:
    return RequestError(f"The model's tokenizer cannot read this text ({why}); give token ids.")


def _undecodable(why: str) -> RequestError:
    return RequestError(f"The model's tokenizer cannot write these tokens ({why}).")


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _read_backend(folder: Path) -> Backend:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{folder} has no tokenizer.json; save one there with transformers:"
            " AutoTokenizer.from_pretrained(folder).save_pretrained(folder)."
        )

    def unreadable(why: str) -> ModelError:
        return ModelError(
            f"{path} is not a tokenizer that Quire can read ({why}); download it again."
        )

    if path.stat().st_size > MOST_BYTES:
        raise unreadable(f"it has more than {MOST_BYTES >> 20} MiB")
    try:
        with path.open("rb") as file:
            refuse_pointer(path, file.peek())
        backend = Backend.from_file(str(path))
        backend.no_truncation()
        backend.no_padding()
        check_backend(backend)
    except BaseException as error:
        refuse(error, unreadable)
    return backend


def _special_tokens(*sources: Mapping[str, Any]) -> dict[str, Any]:
    """Role to text from the first source that names it, a token written as text or as an object."""
    found: dict[str, Any] = {}
    for source in sources:
        for role in SPECIAL_ROLES:
            if source.get(role) is not None:
                found.setdefault(role, _content(role, source[role]))
        if source.get("additional_special_tokens"):
            texts = _texts("additional_special_tokens", source["additional_special_tokens"])
            found.setdefault("additional_special_tokens", texts)
    return found


def _texts(name: str, tokens: Any) -> list[str]:
    if not isinstance(tokens, list):
        raise refusal(name, tokens, "a list of tokens")
    return [_content(name, token) for token in tokens]


def _content(name: str, token: Any) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise refusal(name, token, "a token's text")
    return text


def _add_missing_tokens(
    backend: Backend, config: Mapping[str, Any], special_tokens: Mapping[str, Any]
) -> None:
    """Older folders name tokens in tokenizer_config.json that tokenizer.json lacks."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    declared = _declared_tokens(config)
    missing = [token for token in declared if token.content not in known]
    backend.add_tokens(missing)
    known |= {token.content for token in missing}
    named = [text for text in special_tokens.values() if isinstance(text, str)]
    named += special_tokens.get("additional_special_tokens", [])
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in named if text not in known]
    )


def _declared_tokens(config: Mapping[str, Any]) -> list[AddedToken]:
    """`added_tokens_decoder`, in order of its ids."""
    name = "added_tokens_decoder"
    declared = mapping(config, name)
    if not all(key.isdecimal() and isinstance(token, dict) for key, token in declared.items()):
        raise refusal(name, declared, "tokens by their ids")
    flags = ("special", "normalized", "lstrip", "rstrip", "single_word")
    return [
        AddedToken(_content(name, token), **{each: flag(token, each) for each in flags})
        for _, token in sorted(declared.items(), key=lambda item: int(item[0]))
    ]


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """A template file wins over one in the configuration; of several, the default one."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return read_text(file, MOST_BYTES)
        except UnicodeDecodeError:
            raise ModelError(f"{file} is not in UTF-8: download it again.") from None
    template = config.get("chat_template")
    template = template or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict)]
        template = {str(entry.get("name")): entry.get("template") for entry in named}.get("default")
    return text({"chat_template": template}, "chat_template")
