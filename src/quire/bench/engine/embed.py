"""`quire bench embed`: texts a second that become embeddings, and sentence-transformers beside it.

Texts differ in length as real ones do: most are short, some are long. The two take turns, so that
what else the machine does meets both, and the ratio is that of each pair of turns.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from quire.bench.options import add_run_flags, count
from quire.bench.report.progress import announce_model, runs_bar
from quire.bench.report.sample import Sample
from quire.bench.report.table import check_json_path, publish
from quire.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from quire.api.llm import LLM

SAYS = "texts of {least} to {most} words, all at once"
EXAMPLES = """examples:
  quire bench embed BAAI/bge-small-en-v1.5 --compare sentence-transformers
  quire bench embed ./all-MiniLM-L6-v2 --dtype float32 --texts 512 --most-words 100
"""
PEER = "sentence-transformers"
LEAST_WORDS = 3
PROSE = (
    "the keeper of a lighthouse on the coast wrote down each ship that passed in fog or in clear "
    "weather and what it carried because people asked him later when something had been lost"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument(
        "--texts", type=count, default=256, metavar="N", help="texts (default: 256)"
    )
    parser.add_argument(
        "--most-words", type=count, default=120, metavar="N", help="of a text (default: 120)"
    )
    parser.add_argument("--compare", choices=[PEER], help="measure this in turn, on the same texts")
    parser.add_argument(
        "--batch-size",
        type=count,
        default=32,
        metavar="N",
        help=f"texts that {PEER} computes at once (default: 32, its own)",
    )
    add_run_flags(parser, repeat=5)


def run(args: argparse.Namespace, settings: dict[str, Any]) -> int:
    check_json_path(args.json)
    announce_model(settings)

    from quire.api.llm import LLM
    from quire.bench.report.machine import in_words, machine_facts

    texts = random_texts(args.texts, max(LEAST_WORDS, args.most_words))
    with LLM(**settings) as llm:
        device = llm._pooling.engine.runner.device
        dtype = next(llm._pooling.engine.runner.model.parameters()).dtype
        turns: dict[str, Callable[[], Any]] = {"quire": lambda: _embed(llm, texts)}
        if args.compare:
            turns[PEER] = _peer(settings["model"], device, dtype, texts, args.batch_size)
        measured = _measure(turns, len(texts), args.repeat)
        tokens = sum(len(each.prompt_token_ids) for each in llm.embed(texts, use_tqdm=False))
    name = str(dtype).removeprefix("torch.")
    says = SAYS.format(least=LEAST_WORDS, most=args.most_words)
    facts = machine_facts(device)
    measured["rows"][0]["tokens/s"] = measured["rows"][0]["texts/s"].median * tokens / len(texts)
    result = {
        "benchmark": "embed",
        "says": f"{len(texts):,} {says}; {settings['model']} in {name}",
        "on": in_words(facts),
        "machine": facts,
        **measured,
    }
    publish(result, args.json)
    return 0


def random_texts(count: int, most: int) -> list[str]:
    """Lengths are even on a logarithmic scale."""
    draw, words = random.Random(1), PROSE.split()
    lengths = [int(LEAST_WORDS * (most / LEAST_WORDS) ** draw.random()) for _ in range(count)]
    return [" ".join(draw.choices(words, k=length)) for length in lengths]


def _embed(llm: LLM, texts: list[str]) -> npt.NDArray[np.float32]:
    import numpy as np

    return np.stack([each.outputs.data for each in llm.encode(texts, use_tqdm=False)])


def _peer(
    model: str, device: Any, dtype: Any, texts: list[str], batch_size: int
) -> Callable[[], Any]:
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        raise ConfigError(f"--compare needs {PEER}; install it with pip install {PEER}.") from None
    peer = SentenceTransformer(model, device=str(device), model_kwargs={"dtype": dtype})
    return lambda: peer.encode(texts, batch_size=batch_size, show_progress_bar=False)


def _measure(turns: dict[str, Callable[[], Any]], texts: int, repeat: int) -> dict[str, Any]:
    walls: dict[str, list[float]] = {name: [] for name in turns}
    works: dict[str, list[float]] = {name: [] for name in turns}  # time of all threads
    found: dict[str, Any] = {}
    with runs_bar("embed", repeat) as bar:
        for number in range(repeat + 1):  # the first is a warm-up
            for name, turn in turns.items():
                started, before = time.perf_counter(), time.process_time()
                found[name] = turn()
                walls[name] += [time.perf_counter() - started] if number else []
                works[name] += [time.process_time() - before] if number else []
            bar.update(bool(number))
    rows: list[dict[str, Any]] = [
        {"by": name, "texts/s": Sample(each).map(lambda s: texts / s)}
        for name, each in walls.items()
    ]
    if PEER not in turns:
        return {"rows": rows, "notes": []}
    ratios = {f"of {PEER}": _ratios(walls), "by CPU time": _ratios(works)}
    rows[0] |= ratios
    difference = float(abs(found["quire"] - found[PEER]).max())
    notes = [
        "each pair one behind the other; by CPU time, what else the machine does counts less",
        f"embeddings differ by at most {difference:.1e}",
    ]
    return {"rows": rows, "notes": notes, "difference": difference} | ratios


def _ratios(times: dict[str, list[float]]) -> Sample:
    return Sample(a / b for a, b in zip(times[PEER], times["quire"], strict=True))
