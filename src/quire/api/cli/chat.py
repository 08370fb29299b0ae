"""`quire chat`: a conversation in the terminal; what was said before comes from the cache."""

from __future__ import annotations

import argparse
import re
import sys
import time
from typing import TYPE_CHECKING, Any

from quire.api.cli.engine import adapter, add_adapter_argument, add_engine_arguments, open_llm
from quire.api.cli.flags import add_flags, given
from quire.api.cli.parser import CommandParser
from quire.api.cli.screen import Screen
from quire.api.cli.terminal import StopOnInterrupt, note
from quire.api.flag_names import fields_of, in_flags
from quire.checks import did_you_mean
from quire.config import EngineConfig
from quire.errors import RequestError
from quire.lora_request import LoRARequest
from quire.params import SamplingParams

if TYPE_CHECKING:
    from quire.api.llm import LLM
    from quire.engine.outputs import RequestOutput

EXAMPLES = """examples:
  quire chat
  quire chat Qwen/Qwen3-0.6B --system "Answer in one sentence."
  quire chat --temperature 0 --max-tokens 200
  echo "What is a page table?" | quire chat

in the chat: /help says what there is, /reset forgets the conversation, /exit or Ctrl-D leaves,
Ctrl-C stops an answer.
"""

COMMANDS = {
    "/help": "says this",
    "/reset": "forgets the conversation, but not --system",
    "/exit": "leaves; so does Ctrl-D",
}
COMMAND = re.compile(r"/\w+(?!\S)")  # a path such as /etc/hosts is something to talk about
KEYS = "Ctrl-C stops an answer; all else is said to the model"

# An answer ends by itself, so it gets more room than a completion, and a calmer temperature.
DEFAULTS: dict[str, Any] = {"max_tokens": 1024, "temperature": 0.7}
# They have no meaning in a chat, or are found in its template.
NOT_OF_CHATS = ("n", "best_of", "logprobs", "prompt_logprobs", "thought_markers")


def add_arguments(parser: CommandParser) -> None:
    parser.usage = "quire chat [MODEL] [flags]"
    parser.epilog = EXAMPLES
    parser.add_argument("--system", metavar="TEXT", help="instructions that open the conversation")
    add_flags(parser, SamplingParams, "sampling", skip=NOT_OF_CHATS, defaults=DEFAULTS)
    add_adapter_argument(parser)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    params = SamplingParams(**(DEFAULTS | given(SamplingParams, args)))
    with open_llm(args) as llm:
        conversation = Conversation(llm, params, args.system, adapter(args))
        if sys.stdin.isatty():
            note("/help says what there is, /exit or Ctrl-D leaves, Ctrl-C stops an answer")
        while (line := _read_line()) is not None and line != "/exit":
            if COMMAND.match(line):
                _obey(line.split()[0], conversation)
            elif line:
                conversation.say(line)
    return 0


def _obey(command: str, conversation: Conversation) -> None:
    if command == "/reset":
        conversation.reset()
        note("the conversation is forgotten")
    elif command == "/help":
        for name, says in COMMANDS.items():
            note(f"{name:<8}{says}")
        note(KEYS)
    else:
        mend = did_you_mean(command, COMMANDS) or f"; there are {', '.join(COMMANDS)}"
        note(f"There is no command {command}{mend}")


def _read_line() -> str | None:
    """The next line, or None at the end of the input; Ctrl-C gives up the line, not the chat."""
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  # importing it gives input() its editing and history
    try:
        return input("\n> " if interactive else "").strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        if not interactive:
            raise
        note("\nCtrl-D or /exit leaves")
        return ""


class Conversation:
    """The messages so far, and the model that continues them."""

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        system: str | None,
        lora: LoRARequest | None = None,
    ) -> None:
        self._llm = llm
        self._lora = lora
        self._params = params
        self._opening = [{"role": "system", "content": system}] if system else []
        self.reset()

    def reset(self) -> None:
        self._messages: list[dict[str, Any]] = list(self._opening)

    def say(self, text: str) -> None:
        """One turn. What the model cannot take is reported, and the turn taken back."""
        self._messages.append({"role": "user", "content": text})
        started = time.perf_counter()
        try:
            output, words = self._stream_answer()
        except RequestError as error:
            self._messages.pop()
            says = in_flags(str(error), fields_of(SamplingParams, EngineConfig))
            print(f"error: {says} (/reset starts anew)", file=sys.stderr)
            return
        answer = output.outputs[0]
        if answer.finish_reason == "error":
            self._messages.pop()  # the turn did not happen
        else:
            self._messages.append({"role": "assistant", "content": words})
        note(_turn_summary(output, time.perf_counter() - started))

    def _stream_answer(self) -> tuple[RequestOutput, str]:
        """All that the model said, and of that the words, where it tells them from thoughts."""
        shown = ""
        screen = None
        with StopOnInterrupt() as interrupt:
            stream = self._llm.stream_chat(self._messages, self._params, lora_request=self._lora)
            for output in stream:
                if screen is None:
                    chat = self._llm.thinking_chat(output.prompt_token_ids)
                    screen = Screen(chat.parser() if chat else None)
                text = output.outputs[0].text
                screen.show(text[len(shown) :])
                shown = text
                if interrupt.asked:
                    break
        assert screen is not None  # a stream has at least one output
        screen.end()
        return output, screen.words


def _turn_summary(output: RequestOutput, seconds: float) -> str:
    answer = output.outputs[0]
    new, asked = len(answer.token_ids), len(output.prompt_token_ids)
    ending = {
        "length": ", cut at the limit",
        "error": f", failed: {answer.error or output.error}",
        "stop": "",
    }.get(answer.finish_reason or "abort", ", stopped")
    return (
        f"[{new} tokens, {new / seconds:.1f} tokens/s, "
        f"{output.num_cached_tokens} of {asked} prompt tokens cached{ending}]"
    )
