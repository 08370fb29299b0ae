"""The flags of `quire bench serve`."""

from __future__ import annotations

import argparse
import math
from typing import Any

from quire.bench.options import checked, count, listed
from quire.bench.report.table import STDOUT
from quire.errors import ConfigError

DEFAULT_INPUT, DEFAULT_OUTPUT = (512, 512), (128, 128)

SAYS = {
    "random": "prompts of random words that share nothing; --input-len, --output-len, --rate",
    "nano": "256 requests, 100 to 1,024 tokens in and out, token ids, all at once",
}

EXAMPLES = f"""examples:
  quire bench serve --rate 4 --num-requests 200 --slo-ttft 200 --slo-itl 30
  quire bench serve --url http://127.0.0.1:8000 --workload nano --json nano.json
  quire bench serve --trace requests.jsonl --time-scale 0.1 --plot latency.png
  quire bench serve --url https://api.example.com --model some-model --api chat --rate 2

workloads:
{listed(SAYS)}
The load is open: requests leave when they are due, whether or not others were answered, and waiting
counts from the moment they were due. Each line of a --trace is a JSON object with `timestamp` (ms),
`input_length` and `output_length` (tokens) and `hash_ids`, names of the prompt's blocks of 512
tokens: equal names make equal text, so that prefix caches have something to find.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    _add_server_flags(parser.add_argument_group("server"))
    _add_load_flags(parser.add_argument_group("load"))
    _add_report_flags(parser.add_argument_group("report"))


def _add_server_flags(group: Any) -> None:
    group.add_argument(
        "--url", default="http://127.0.0.1:8000", help="where it is (default: %(default)s)"
    )
    group.add_argument("--model", help="default: the first that the server has")
    group.add_argument("--api-key", metavar="KEY", help="default: $QUIRE_API_KEY, if it is set")
    group.add_argument(
        "--api",
        choices=["completions", "chat"],
        default="completions",
        help="(default: %(default)s)",
    )
    group.add_argument(
        "--timeout",
        type=_positive("a number of seconds above 0"),
        default=600.0,
        metavar="S",
        help="a request has failed when nothing of it came for so long (default: %(default)g)",
    )


def _add_load_flags(group: Any) -> None:
    group.add_argument("--workload", choices=SAYS, help="which requests (default: random)")
    group.add_argument("--trace", metavar="FILE", help="requests and their times from FILE")
    group.add_argument(
        "--time-scale",
        type=_positive("a number above 0"),
        metavar="X",
        help="the times of --trace are multiplied by X: 0.1 is ten times as fast (default: 1)",
    )
    group.add_argument(
        "--rate",
        type=_positive("requests a second above 0, or inf"),
        metavar="R",
        help="requests a second, at random moments (Poisson); inf is all at once "
        "(default: 1, and inf for nano)",
    )
    group.add_argument(
        "--num-requests", type=count, metavar="N", help="default: 100, or all that there are"
    )
    lengths = checked(_lengths, "a number of tokens such as 512, or a range such as 100-1024")
    for name, tokens in (("input", DEFAULT_INPUT), ("output", DEFAULT_OUTPUT)):
        group.add_argument(
            f"--{name}-len",
            type=lengths,
            metavar="N[-M]",
            help=f"{name} tokens of random (default: {tokens[0]})",
        )
        group.add_argument(
            f"--max-{name}-len", type=count, metavar="N", help=f"cut the {name}s of --trace to this"
        )
    group.add_argument(
        "--prompts",
        choices=["text", "ids"],
        help="as text, or as token ids with their exact number, which not every server takes "
        "(default: text)",
    )
    group.add_argument("--temperature", type=float, help="default: 0; 0.6 for nano")
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="answers of full length, from servers that know this field (default: only for nano)",
    )
    group.add_argument("--seed", type=int, default=0, help="of lengths and moments (default: 0)")
    group.add_argument(
        "--processes",
        type=count,
        metavar="N",
        help="of the client (default: a quarter of the cores)",
    )


def _add_report_flags(group: Any) -> None:
    objective = _positive("milliseconds above 0")
    group.add_argument(
        "--slo-ttft", type=objective, metavar="MS", help="goodput: the first token within this time"
    )
    group.add_argument(
        "--slo-itl",
        type=objective,
        metavar="MS",
        help="goodput: this time for each token after the first, on average over a request",
    )
    group.add_argument(
        "--json",
        metavar="FILE",
        nargs="?",
        const=STDOUT,
        help="write all figures to FILE; without FILE, or with -, to standard output",
    )
    group.add_argument(
        "--plot", metavar="FILE", help="draw the latencies into FILE.png, .svg, .pdf"
    )


def check_flags(args: argparse.Namespace) -> None:
    """A flag that would be ignored is a mistake; those that were left out get their values."""
    of_trace = ("time_scale", "max_input_len", "max_output_len")
    of_random = ("input_len", "output_len")
    if args.trace is not None:
        _refuse(args, ("workload", "rate", *of_random), "has no effect with --trace")
    else:
        _refuse(args, of_trace, "is for --trace FILE")
        if args.workload == "nano":
            _refuse(args, of_random, "is for --workload random")
    if args.temperature is not None and not 0 <= args.temperature < math.inf:
        raise ConfigError("--temperature takes a number from 0.")
    args.time_scale = args.time_scale or 1.0
    args.input_len = args.input_len or DEFAULT_INPUT
    args.output_len = args.output_len or DEFAULT_OUTPUT


def _refuse(args: argparse.Namespace, names: tuple[str, ...], says: str) -> None:
    for name in names:
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} {says}; leave it out.")


def _positive(says: str) -> Any:
    def read(text: str) -> float:
        value = float(text)
        if not value > 0 or (math.isinf(value) and "inf" not in says):
            raise ValueError
        return value

    return checked(read, says)


def _lengths(text: str) -> tuple[int, int]:
    least, _, most = text.partition("-")
    found = int(least), int(most or least)
    if not 1 <= found[0] <= found[1]:
        raise ValueError
    return found
