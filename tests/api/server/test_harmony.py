"""Chats with a model that writes in channels: what is shown to it, and what is made of its text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from quire import LLM
from quire.api.reasoning.answer_format import AnswerFormat
from quire.api.server.answers.call_writer import CallWriter
from quire.api.server.answers.choices import Delta
from quire.api.server.answers.prompts import Prompt
from quire.api.server.answers.tool_use import ToolUse
from quire.api.tools.formats import FORMATS
from quire.api.tools.harmony import ENDS, MESSAGE
from quire.engine.outputs import CompletionOutput, RequestOutput
from quire.engine.text.detokenizer import Detokenizer
from quire.models.source import open_model
from quire.models.text.tokenizer import Tokenizer
from quire.params import SamplingParams

CLOCK = {"type": "function", "function": {"name": "clock"}}
TEMPLATE = "{{ tools }}<|start|>assistant<|channel|>final<|message|>{{ messages[0].content }}"
THOUGHT = "<|channel|>analysis<|message|>Hm, <b>.<|end|><|start|>assistant"
ANSWER = f"{THOUGHT}<|channel|>final<|message|>It is late.\n"
CALL = f'{THOUGHT}<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{{"a": 1}}'
FORMAT = FORMATS["harmony"]
PROMPT = Prompt(np.arange(4, dtype=np.int32))


@pytest.fixture(scope="module")
def backend() -> Backend:
    found = open_model("smollm2", progress=False).tokenizer().backend
    found.add_special_tokens([AddedToken(tag, special=True) for tag in (*ENDS, MESSAGE)])
    return found


def use(backend: Backend, choice: str | None, tools: list[Any]) -> ToolUse:
    tokenizer = Tokenizer(backend, {}, TEMPLATE)
    return ToolUse.read(tokenizer, AnswerFormat.choose(TEMPLATE), tools, choice, None)


@pytest.mark.parametrize("choice", [None, "auto"])
def test_thoughts_may_stay_in_the_words(backend: Backend, choice: str | None) -> None:
    found = use(backend, choice, [CLOCK] if choice else [])
    found.tells_thoughts_apart = False
    assert found.writer(0).message(delta(ANSWER, "stop")) == {
        "content": "Hm, <b>.\n\nIt is late.\n"
    }
    called = found.writer(1).message(delta(CALL, "stop"))
    if choice is None:
        assert called == {"content": 'Hm, <b>.{"a": 1}'}
    else:
        assert called["content"] == "Hm, <b>." and len(called["tool_calls"]) == 1


def test_headers_are_not_searched_for_stop_strings(backend: Backend) -> None:
    """Clients do not see headers; thoughts and words are searched, and words without a header."""
    found = use(backend, None, [])
    params = found.params(SamplingParams(stop=["final", "analysis"]), PROMPT)
    tokenizer = Tokenizer(backend, {}, TEMPLATE)

    def read(answer: str) -> tuple[str, str | None]:
        detokenizer = Detokenizer(tokenizer, params, PROMPT.token_ids)
        pieces = [detokenizer.push([each]) for each in tokenizer.encode(answer, False)]
        return "".join([*pieces, detokenizer.flush()]), detokenizer.stop

    assert read(ANSWER) == (ANSWER, None)
    assert read(f"{ANSWER}The final word.") == (f"{ANSWER}The ", "final")
    assert read("The final word.") == ("The ", "final")
    thought = "<|channel|>analysis<|message|>An "
    assert read(f"{thought}analysis.<|end|>") == (thought, "analysis")


def delta(text: str, reason: str | None = None) -> Delta:
    return Delta(0, 0, False, text, [], finish_reason=reason)


@pytest.mark.parametrize(("choice", "tools"), [(None, []), ("none", [CLOCK]), ("auto", [CLOCK])])
def test_channels_are_read_with_tools_and_without(
    backend: Backend, choice: str | None, tools: list[Any]
) -> None:
    found = use(backend, choice, tools)
    assert found.tool_format is FORMAT and found.reads_answers
    assert not found.params(SamplingParams(), PROMPT).skip_special_tokens
    message = found.writer(0).message(delta(ANSWER, "stop"))
    thoughts = {"reasoning_content": "Hm, <b>.", "reasoning": "Hm, <b>."}
    assert message == {"content": "It is late.\n", **thoughts}
    called = found.writer(1).message(delta(CALL, "stop"))
    if choice == "auto":
        assert called["content"] is None and called["reasoning"] == "Hm, <b>."
        [call] = called["tool_calls"]
        assert call["function"] == {"name": "clock", "arguments": '{"a": 1}'}
    else:
        assert called == {"content": '{"a": 1}', **thoughts}
    reason = "tool_calls" if choice == "auto" else "stop"
    assert found.writer(1).finish_reason("stop") == reason
    assert found.writer(0).finish_reason("stop") == "stop"


def test_a_form_is_that_of_the_answer(backend: Backend) -> None:
    """Whatever form it is, it is asked of the last channel, behind the thoughts."""
    found = use(backend, None, [])
    for form in ({"json_object": True}, {"regex": "a"}):
        asked = found.params(SamplingParams(structured=form), PROMPT).structured  # type: ignore[arg-type]
        assert asked is not None and asked.kind in form and '"final"' in str(asked.preamble)


@pytest.mark.parametrize("text", [ANSWER, CALL])
@pytest.mark.parametrize("may_call", [True, False])
def test_deltas_are_the_message(text: str, may_call: bool) -> None:
    whole = CallWriter(FORMAT.parser(), FORMAT, may_call=may_call).message(delta(text, "stop"))
    writer = CallWriter(FORMAT.parser(), FORMAT, may_call=may_call)
    deltas = [each for char in text for each in writer.deltas(delta(char))]
    deltas += writer.deltas(delta("", "stop"))
    for name in ("content", "reasoning", "reasoning_content"):
        assert "".join(each.get(name, "") for each in deltas) == (whole[name] or "")
    pieces = [each["tool_calls"][0]["function"] for each in deltas if "tool_calls" in each]
    calls = [each["function"] for each in whole.get("tool_calls", [])]
    assert [each["name"] for each in pieces if "name" in each] == [c["name"] for c in calls]
    assert "".join(p["arguments"] for p in pieces) == "".join(c["arguments"] for c in calls)


def test_thoughts_that_are_sent_back_are_shown_to_the_template(backend: Backend) -> None:
    call = {"function": {"name": "clock", "arguments": '{"a": 1}'}}
    sent = [
        {"role": "user", "content": "When?", "reasoning": "mine"},
        {"role": "assistant", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "assistant", "content": "Late.", "reasoning": "Hm."},
    ]
    messages, _ = use(backend, None, []).conversation(sent, {})
    assert [message.get("thinking") for message in messages] == [None, "Hm.", None]
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}


def test_a_chat_has_words_and_thoughts_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the server's answer has them; a text that is cut within its thoughts has no words."""
    texts = {ANSWER: "It is late.\n", CALL: '{"a": 1}', THOUGHT.partition("<|end|>")[0]: ""}

    def generate(self: Any, prompts: Any, params: Any, *_: Any, **__: Any) -> Any:
        answers = [
            CompletionOutput(0, text, [], "stop" if words else "length")
            for text, words in texts.items()
        ]
        return [RequestOutput("1", None, [], answers, True)]

    monkeypatch.setattr(LLM, "generate", generate)
    with LLM("smollm2", num_blocks=8, device="cpu", use_tqdm=False) as llm:
        llm.tokenizer.chat_template = TEMPLATE
        [output] = llm.chat([{"role": "user", "content": "When?"}])
    assert [answer.text for answer in output.outputs] == list(texts.values())
    assert [answer.reasoning for answer in output.outputs] == ["Hm, <b>."] * 3
