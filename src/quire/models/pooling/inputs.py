"""From texts and pairs of texts to token ids, as a model that pools was trained to have them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from quire.errors import RequestError
from quire.models.pooling.facts import INSTRUCTION, QWEN3_RERANKER, PoolingFacts
from quire.models.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tokenizers import Encoding

MODELS_LENGTH = -1  # as `truncate_prompt_tokens`: the most that the model takes
QUERY, DOCUMENT = "query", "document"  # names of prompts
UNKNOWN_WORD = 128  # characters: more than a word has that WordPiece makes one token of


@dataclass(frozen=True)
class TextInput:
    token_ids: Sequence[int]
    second_text: int | None = None  # where the second text of a pair begins, if the model is told


class TextReader:
    def __init__(self, tokenizer: Tokenizer | None, facts: PoolingFacts, max_len: int) -> None:
        self._tokenizer = tokenizer
        self._facts = facts
        self._max_len = max_len

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError("This model has no tokenizer; give token ids.")
        return self._tokenizer

    def prompt(self, name: str | None) -> str:
        """What is put before a text: the prompt of this name, or the model's default."""
        prompts = self._facts.prompts
        if name is None:
            return prompts.get(self._facts.default_prompt or "", "")
        if name not in prompts and name not in (QUERY, DOCUMENT):
            known = ", ".join(prompts) or "none"
            raise RequestError(f"There is no prompt {name[:100]!r}; this model has {known}.")
        return prompts.get(name, "")

    def texts(
        self,
        inputs: Sequence[str | Sequence[int]],
        *,
        prompt_name: str | None = None,
        truncate: int | None = None,
        add_special_tokens: bool = True,
    ) -> list[TextInput]:
        """`truncate`: cut longer ones to so many tokens; special ones at the end are kept."""
        most, prompt = self._most(truncate), self.prompt(prompt_name)
        spelled = [self._prepare(prompt + each, most) for each in inputs if isinstance(each, str)]
        encoded: Iterator[Encoding] = iter(())
        if spelled:
            encoded = iter(self.tokenizer.encode_all(spelled, add_special_tokens))
        return [
            TextInput(_cut(next(encoded), most)[0] if isinstance(each, str) else each[:most])
            for each in inputs
        ]

    def pairs(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        truncate: int | None = None,
        instruction: str | None = None,
    ) -> list[TextInput]:
        """For a model that reads both texts at once; of a pair that is too long, the second is cut
        where `truncate` asks for it."""
        most = self._most(truncate)
        ready = [(self._prepare(a, most), self._prepare(b, most)) for a, b in pairs]
        if self._facts.asks_yes_or_no:
            return [self._question(a, b, most, instruction or INSTRUCTION) for a, b in ready]
        found = [_cut(each, most) for each in self.tokenizer.encode_all(ready)]
        has_types = self._facts.has_types
        return [TextInput(ids, second if has_types else None) for ids, second in found]

    def _question(self, query: str, document: str, most: int | None, instruction: str) -> TextInput:
        """What texts spell counts as plain text there, even where it is a special token."""
        _, asked, _ = QWEN3_RERANKER
        words = {"instruction": instruction, "query": query, "document": document}
        middle = self.tokenizer.encode_as_text(asked.format(**words))
        before, after = self._around_questions
        if most is not None:
            middle = middle[: max(0, most - len(before) - len(after))]
        return TextInput([*before, *middle, *after])

    @cached_property
    def _around_questions(self) -> tuple[list[int], list[int]]:
        before, _, after = QWEN3_RERANKER
        encode = self.tokenizer.encode
        return encode(before, add_special_tokens=False), encode(after, add_special_tokens=False)

    def _most(self, truncate: int | None) -> int | None:
        if truncate is None:
            return None
        if truncate == MODELS_LENGTH:
            return self._max_len
        if not 1 <= truncate <= self._max_len:
            raise RequestError(
                f"truncate_prompt_tokens={truncate} must be from 1 to max_model_len, which is "
                f"{self._max_len:,}, or -1 for that."
            )
        return truncate

    def _prepare(self, text: str, most: int | None) -> str:
        """Refuse, untokenized, a text that is too long even if every token were the longest."""
        limit = self._max_len * max(self._longest_token, UNKNOWN_WORD)
        if most is None and len(text) > limit:
            raise RequestError(
                f"The text has {len(text):,} characters, more than {self._max_len:,} tokens can "
                f"hold; shorten it, or have it cut with truncate_prompt_tokens."
            )
        return text.lower() if self._facts.lower_case else text

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self.tokenizer.backend.get_vocab()), default=1)


def _cut(encoding: Any, most: int | None) -> tuple[list[int], int | None]:
    """Its ids without the last tokens of the last text, if there are more than `most`; and where
    the second text begins."""
    ids, types = encoding.ids, encoding.type_ids
    if most is not None and len(ids) > most:
        owners = encoding.sequence_ids  # None: a token that was put around the texts
        last = max((owner for owner in owners if owner is not None), default=0)
        places = [place for place, owner in enumerate(owners) if owner == last]
        gone = set(places[-(len(ids) - most) :])
        ids = [each for place, each in enumerate(ids) if place not in gone]
        types = [each for place, each in enumerate(types) if place not in gone]
    return ids, types.index(1) if 1 in types else None
