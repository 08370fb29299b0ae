"""One choice of an answer: what the engine says of its tokens becomes text."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.api.server.answers.logprobs import Entry
from quire.api.server.answers.prompts import Prompt
from quire.engine.process.request_handle import Sample
from quire.engine.text.detokenizer import Detokenizer
from quire.models.text.tokenizer import Tokenizer
from quire.params import SamplingParams


@dataclass
class Delta:
    """The new tokens and text of one choice; all of them if the answer is not streamed."""

    index: int
    prompt_index: int
    is_first: bool
    text: str
    token_ids: list[int]
    entries: list[Entry] = field(default_factory=list)  # logprobs, one for each token if asked for
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    scores: dict[str, float] = field(default_factory=dict)  # of a beam

    @property
    def ended_by_token(self) -> bool:
        """Whether the last token is a stop token, which has no text."""
        return self.finish_reason == "stop" and isinstance(self.stop_reason, int)

    @property
    def is_cut(self) -> bool:
        """Whether a limit or a stop string ended the text, and not the model."""
        is_stopped = self.finish_reason == "stop" and isinstance(self.stop_reason, str)
        return is_stopped or self.finish_reason == "length"

    @property
    def is_empty(self) -> bool:
        return not (self.text or self.entries or self.is_first or self.finish_reason)


class Choice:
    def __init__(
        self,
        index: int,
        prompt_index: int,
        prompt: Prompt,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.index = index
        self.prompt_index = prompt_index
        self.num_tokens = 0
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None:
            self._detokenizer = Detokenizer(tokenizer, params, prompt.token_ids)

    def push(self, sample: Sample) -> Delta:
        delta = Delta(
            self.index,
            self.prompt_index,
            is_first=self.num_tokens == 0,
            text="",
            token_ids=sample.token_ids,
            entries=sample.logprobs,
            finish_reason=sample.finish_reason,
            stop_reason=sample.stop_reason,
            scores=sample.scores,
        )
        self.num_tokens += len(sample.token_ids)
        delta.text = self._text(delta)
        return delta

    def _text(self, delta: Delta) -> str:
        detokenizer = self._detokenizer
        if detokenizer is None:
            return ""
        shown = delta.token_ids[:-1] if delta.ended_by_token else delta.token_ids
        text = detokenizer.push(shown)
        if delta.finish_reason is not None:
            text += detokenizer.flush()
        return text
