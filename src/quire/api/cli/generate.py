"""`quire generate`: texts for one prompt or many, for people or as JSON lines for machines."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any

from quire.api.cli.engine import adapter, add_adapter_argument, add_engine_arguments, open_llm
from quire.api.cli.flags import add_flags, given
from quire.api.cli.parser import CommandParser, UsageError
from quire.api.cli.terminal import note, one_line
from quire.api.flag_names import flag_of
from quire.beam_params import BeamSearchParams
from quire.lora_request import LoRARequest
from quire.params import SamplingParams

if TYPE_CHECKING:
    from quire.api.llm import LLM
    from quire.engine.outputs import CompletionOutput, RequestOutput

EXAMPLES = """examples:
  quire generate --prompt "The capital of France is" --temperature 0
  quire generate --prompt "One" --prompt "Two" --max-tokens 32 --json
  quire generate --prompt-file questions.txt --stop "Q:"
  quire generate --prompt "To be, or" --beam-width 4 --max-tokens 32
  quire generate --lora-modules sql=./sql-adapter --prompt "Which orders are late?"
  cat report.txt | quire generate --max-tokens 100
  quire generate qwen3-0.6b --load-format dummy --prompt-ids 1,2,3
"""


def add_arguments(parser: CommandParser) -> None:
    parser.usage = "quire generate [MODEL] --prompt TEXT [flags]"
    parser.epilog = EXAMPLES
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="a prompt; give it again for more; - reads one from standard input, and so does a "
        "pipe without any prompt",
    )
    parser.add_argument("--prompt-file", metavar="FILE", help="a file with one prompt on each line")
    parser.add_argument(
        "--prompt-ids",
        action="append",
        default=[],
        type=_token_ids,
        metavar="IDS",
        help="a prompt as token ids with commas, for models without a tokenizer",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object for each text, on one line"
    )
    # Sampling comes first: --seed is the request's own, and seeds the engine too.
    add_flags(parser, SamplingParams, "sampling")
    add_flags(parser, BeamSearchParams, "beam search, with --beam-width")
    add_adapter_argument(parser)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    prompts = _read_prompts(args)
    beams = _beam_search(args)
    params = SamplingParams(**given(SamplingParams, args))
    if not args.json and (params.logprobs is not None or params.prompt_logprobs is not None):
        raise UsageError("Logprobs are shown only with --json.")
    lora = adapter(args)
    with open_llm(args) as llm:
        started = time.perf_counter()
        if beams is not None:
            outputs = llm.beam_search(prompts, beams, sys.stderr.isatty(), lora_request=lora)
            _print_all(outputs, args.json)
        elif _can_stream(args, prompts, params) and llm.tokenizer is not None:
            outputs = [_stream(llm, prompts[0], params, lora)]
        else:
            outputs = llm.generate(prompts, params, sys.stderr.isatty(), lora_request=lora)
            _print_all(outputs, args.json)
        seconds = time.perf_counter() - started
    note(_summary(outputs, seconds))
    return _report_failures(outputs)


def _can_stream(args: argparse.Namespace, prompts: list[Any], params: SamplingParams) -> bool:
    """One text for people, which a terminal shows as it grows."""
    return len(prompts) == 1 and params.num_samples == 1 and not args.json


def _beam_search(args: argparse.Namespace) -> BeamSearchParams | None:
    """None without --beam-width, and then without the flags that only it has."""
    asked, sampling = given(BeamSearchParams, args), given(SamplingParams, args)
    if "beam_width" not in asked:
        for name in asked.keys() - sampling.keys():
            raise UsageError(f"{flag_of(name)} needs --beam-width.")
        return None
    for name in sorted(sampling.keys() - asked.keys() - {"seed"}):
        raise UsageError(f"{flag_of(name)} cannot be combined with --beam-width; leave it out.")
    return BeamSearchParams(**asked)


def _token_ids(text: str) -> dict[str, list[int]]:
    try:
        return {"prompt_token_ids": [int(word) for word in text.replace(",", " ").split()]}
    except ValueError:
        raise argparse.ArgumentTypeError(f"takes whole numbers with commas, not {text!r}") from None


def _read_prompts(args: argparse.Namespace) -> list[Any]:
    prompts: list[Any] = [_piped() if text == "-" else text for text in args.prompt]
    if args.prompt_file is not None:
        try:
            with open(args.prompt_file, encoding="utf-8") as file:
                prompts += [line for line in file.read().splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"Cannot read the prompts in {args.prompt_file}: {error}.") from None
    prompts += args.prompt_ids
    if not prompts and args.prompt_file is None and not sys.stdin.isatty():
        prompts = [text for text in [_piped()] if text]
    if not prompts:
        raise UsageError(
            "There is nothing to generate; give --prompt TEXT or --prompt-file FILE, or pipe a "
            "text into the command."
        )
    return prompts


def _piped() -> str:
    """All of standard input, less the newline that `echo` and editors end a text with."""
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"Standard input is not text: {error}.") from None


def _stream(
    llm: LLM, prompt: Any, params: SamplingParams, lora: LoRARequest | None
) -> RequestOutput:
    shown = ""
    for output in llm.stream(prompt, params, lora_request=lora):
        text = output.outputs[0].text
        print(text[len(shown) :], end="", flush=True)
        shown = text
    print()
    return output


def _print_all(outputs: list[RequestOutput], as_json: bool) -> None:
    for number, output in enumerate(outputs, start=1):
        for choice in output.outputs:
            if as_json:
                print(json.dumps(_as_dict(output, choice), ensure_ascii=False))
                continue
            sample = f".{choice.index + 1}" if len(output.outputs) > 1 else ""
            prompt = output.prompt or f"{len(output.prompt_token_ids)} token ids"
            print(f"[{number}{sample}] {one_line(prompt)}")
            print(f"{choice.text or choice.token_ids}\n")


def _as_dict(output: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
    prompt_tokens, new_tokens = len(output.prompt_token_ids), len(choice.token_ids)
    record: dict[str, Any] = {
        "prompt": output.prompt,
        "index": choice.index,
        "text": choice.text,
        "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason,
        "num_cached_tokens": output.num_cached_tokens,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": new_tokens,
            "total_tokens": prompt_tokens + new_tokens,
        },
    }
    extras = {
        "prompt_logprobs": output.prompt_logprobs,
        "logprobs": choice.logprobs,
        "cumulative_logprob": choice.cumulative_logprob,
        "score": choice.score,
        "error": choice.error,
    }
    return record | {name: _plain(value) for name, value in extras.items() if value is not None}


def _plain(value: Any) -> Any:
    """Dataclasses inside lists and dicts, as JSON can hold them."""
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _summary(outputs: list[RequestOutput], seconds: float) -> str:
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    new = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    return (
        f"{new} tokens in {seconds:.2f} s, {new / seconds:.1f} tokens/s; "
        f"{cached} of {prompt_tokens} prompt tokens came from the cache"
    )


def _report_failures(outputs: list[RequestOutput]) -> int:
    failures = list(_failures(outputs))
    for line in failures:
        print(f"error: {line}", file=sys.stderr)
    return 1 if failures else 0


def _failures(outputs: list[RequestOutput]) -> Iterator[str]:
    for number, output in enumerate(outputs, start=1):
        for choice in output.outputs:
            if choice.finish_reason == "error":
                yield f"prompt {number}: {choice.error or output.error}"
