"""`quire bench structured`: whether outputs have the form that was asked for, and its cost."""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING, Any

from quire.bench.engine.random_schemas import random_schema
from quire.bench.options import add_run_flags, count, listed
from quire.bench.report.progress import announce_model, runs_bar
from quire.bench.report.sample import Sample
from quire.bench.report.table import check_json_path, publish
from quire.errors import ConfigError
from quire.params import SamplingParams
from quire.progress import say_step
from quire.structured import StructuredOutput

if TYPE_CHECKING:
    from quire.api.llm import LLM
    from quire.bench.engine.session import Session
    from quire.engine.outputs import RequestOutput

SAYS = {
    "cost": "requests of a fixed length with a schema and without, turn by turn: the ratio",
    "validity": "random schemas, one a request: how many answers are valid by their own",
}
EXAMPLES = f"""examples:
  quire bench structured --workload cost --max-num-seqs 16
  quire bench structured --workload validity --requests 200 --max-num-seqs 16

workloads:
{listed(SAYS)}"""

LENGTH = 48  # tokens of an answer whose cost is measured
LONGEST = 700  # tokens of an answer to a random schema, and more than any needs
# It cannot end within LENGTH tokens, and has a bit of everything.
ENDLESS = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["new", "old", "lost"]}, "maxItems": 3},
            "note": {"type": "string"},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument(
        "--workload", choices=SAYS, default="cost", help="what is measured (default: cost)"
    )
    parser.add_argument(
        "--requests", type=count, metavar="N", help="requests (default: 16, or 200 schemas)"
    )
    add_run_flags(parser, repeat=5)


def run(args: argparse.Namespace, settings: dict[str, Any]) -> int:
    check_json_path(args.json)
    if args.workload == "validity":
        _validator()  # before anything takes long
    announce_model(settings)

    from quire.bench.engine.session import open_session

    with open_session(settings) as session:
        measured = _cost(session, args) if args.workload == "cost" else _validity(session, args)
        result = session.report(args.workload, SAYS[args.workload]) | measured
    publish({"benchmark": "structured", **result}, args.json)
    return 0


def _cost(session: Session, args: argparse.Namespace) -> dict[str, Any]:
    from quire.bench.engine.timing import generate_seconds

    llm, requests = session.llm, args.requests or 16
    prompts = [llm.tokenizer.encode(_prompt(i)) for i in range(requests)] if llm.tokenizer else []
    if not prompts:
        raise ConfigError("This model has no tokenizer, which structured output needs.")
    plain = SamplingParams(seed=1, max_tokens=LENGTH, ignore_eos=True)
    forced = SamplingParams(
        seed=1, max_tokens=LENGTH, ignore_eos=True, structured=StructuredOutput(json_schema=ENDLESS)
    )
    walls: dict[str, list[float]] = {"plain": [], "schema": []}
    works: dict[str, list[float]] = {"plain": [], "schema": []}
    with runs_bar("cost", args.repeat) as bar:
        for number in range(args.repeat + 1):  # the first is a warm-up
            for name, params in (("plain", plain), ("schema", forced)):
                llm.reset_prefix_cache()
                before = time.process_time()
                seconds = generate_seconds(llm, prompts, [params] * requests)
                walls[name] += [seconds] if number else []
                works[name] += [time.process_time() - before] if number else []
            bar.update(bool(number))
    tokens = requests * LENGTH
    rows: list[dict[str, Any]] = [
        {"requests": requests, "output": name, "tokens/s": Sample(each).map(lambda s: tokens / s)}
        for name, each in walls.items()
    ]
    ratios = {"of plain": _ratios(walls), "by CPU time": _ratios(works)}
    rows[1] |= ratios
    notes = ["each pair one behind the other; by CPU time, what else the machine does counts less"]
    return {"rows": rows, "notes": notes} | ratios


def _ratios(times: dict[str, list[float]]) -> Sample:
    return Sample(a / b for a, b in zip(times["plain"], times["schema"], strict=True))


def _validity(session: Session, args: argparse.Namespace) -> dict[str, Any]:
    requests = args.requests or 200
    schemas = [random_schema(seed) for seed in range(requests)]
    say_step(f"validity: {requests:,} answers, all at once")
    started = time.perf_counter()
    outputs = ask_for(session.llm, schemas)
    seconds = time.perf_counter() - started
    valid = sum(is_valid(output, schema) for output, schema in zip(outputs, schemas, strict=True))
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    row = {
        "schemas": requests,
        "valid": valid,
        "tokens out": tokens,
        "tokens/s": tokens / seconds,
    }
    return {"rows": [row], "notes": []}


def ask_for(llm: LLM, schemas: list[dict[str, Any]]) -> list[RequestOutput]:
    """One answer to each schema, all at once."""
    prompts = [_prompt(i) for i in range(len(schemas))]
    params = [
        SamplingParams(seed=i, max_tokens=LONGEST, structured=StructuredOutput(json_schema=schema))
        for i, schema in enumerate(schemas)
    ]
    return llm.generate(prompts, params, use_tqdm=False)


def is_valid(output: RequestOutput, schema: dict[str, Any]) -> bool:
    """By a validator that knows nothing of how the answer was made."""
    validator = _validator()(schema)
    answer = output.outputs[0]
    if answer.finish_reason != "stop":
        return False
    try:
        value = json.loads(answer.text)
    except ValueError:
        return False
    return bool(validator.is_valid(value))


def _validator() -> Any:
    try:
        from jsonschema import Draft202012Validator
    except ImportError:
        raise ConfigError(
            "Answers are judged by the package jsonschema; install it with pip install jsonschema."
        ) from None
    return Draft202012Validator


def _prompt(number: int) -> str:
    return f"Record {number} of the harbour's register, as JSON:\n"
