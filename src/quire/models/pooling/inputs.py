"""From texts and pairs of texts to token ids, as a model that pools was trained to have them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.errors import PromptTooLong, RequestError
from quire.models.pooling.facts import INSTRUCTION, QWEN3_RERANKER, PoolingFacts
from quire.models.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tokenizers import Encoding

MODELS_LENGTH = -1  # as `truncate_prompt_tokens`: the most that the model takes
QUERY, DOCUMENT = "query", "document"  # names of prompts
UNKNOWN_WORD = 128  # characters: more than a word has that WordPiece makes one token of


class TextInput(NamedTuple):
    token_ids: list[int]
    second_text: int | None = None  # where the second text of a pair begins, if the model is told


class ListName(NamedTuple):
    """What the caller calls the list that some texts are from, for errors."""

    name: str
    first: int = 0  # the place of the first of them

    def of(self, place: int, count: int) -> str:
        """Of one of `count` texts; a text that is the only one may not be in a list."""
        return self.name if self.first + count == 1 else f"{self.name}[{self.first + place}]"


PROMPTS = ListName("prompts")


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
        named: ListName = PROMPTS,
    ) -> list[TextInput]:
        """`truncate`: cut longer ones to so many tokens; special ones at the end are kept."""
        most, prompt = self._most(truncate), self.prompt(prompt_name)
        if most is None:
            sizes = [len(each) if isinstance(each, str) else 0 for each in inputs]
            self._check(sizes, "characters", named)
        spelled = [self._cased(prompt + each) for each in inputs if isinstance(each, str)]
        encoded: Iterator[Encoding] = iter(())
        if spelled:
            encoded = iter(self.tokenizer.encode_all(spelled, add_special_tokens))
        found = [
            TextInput(_cut(next(encoded), most) if isinstance(each, str) else [*each[:most]])
            for each in inputs
        ]
        self._check([len(each.token_ids) for each in found], "tokens", named)
        return found

    def pairs(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        truncate: int | None = None,
        instruction: str | None = None,
        named: ListName = PROMPTS,
    ) -> list[TextInput]:
        """For a model that reads both texts at once; of a pair that is too long, the second is cut
        where `truncate` asks for it. `named`: the second texts."""
        most = self._most(truncate)
        if most is None:
            self._check([max(map(len, pair)) for pair in pairs], "characters", named)
        ready = [(self._cased(a), self._cased(b)) for a, b in pairs]
        if self._facts.asks_yes_or_no:
            asked = instruction or INSTRUCTION
            found = [self._question(a, b, most, asked) for a, b in ready]
        else:
            tells = self._facts.has_types
            found = [
                TextInput(_cut(each, most), _second_text(each) if tells else None)
                for each in self.tokenizer.encode_all(ready)
            ]
        self._check([len(each.token_ids) for each in found], "tokens", named)
        return found

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
        if not isinstance(truncate, int) or not 1 <= truncate <= self._max_len:
            raise RequestError(
                f"truncate_prompt_tokens={truncate} must be from 1 to max_model_len, which is "
                f"{self._max_len:,}, or -1 for that."
            )
        return truncate

    def _check(self, sizes: list[int], unit: str, named: ListName) -> None:
        """Refuse a text that is too long: untokenized, if it were even with the longest tokens."""
        limit = self._max_len
        if unit == "characters":
            limit *= max(self._longest_token, UNKNOWN_WORD)
        for place, size in enumerate(sizes):
            if size > limit:
                what = f"text {named.of(place, len(sizes))}"
                mend = "shorten it, or have it cut with truncate_prompt_tokens"
                raise PromptTooLong.of(what, f"{size:,} {unit}", self._max_len, mend)

    def _cased(self, text: str) -> str:
        return text.lower() if self._facts.lower_case else text

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self.tokenizer.backend.get_vocab()), default=1)


def _cut(encoding: Any, most: int | None) -> list[int]:
    """Its ids, without the last tokens of the last text if there are more than `most`."""
    ids: list[int] = encoding.ids
    if most is None or len(ids) <= most:
        return ids
    owners = encoding.sequence_ids  # None: a token that was put around the texts
    last = max((owner for owner in owners if owner is not None), default=0)
    places = [place for place, owner in enumerate(owners) if owner == last]
    gone = set(places[-(len(ids) - most) :])
    return [each for place, each in enumerate(ids) if place not in gone]


def _second_text(encoding: Any) -> int | None:
    """Where it begins: what is cut comes behind."""
    types = encoding.type_ids
    return types.index(1) if 1 in types else None
