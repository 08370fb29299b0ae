"""`quire bench speculation`: what speculative decoding gains, with and without it in turn."""

from __future__ import annotations

import argparse
import random
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.bench.options import add_run_flags, checked, count, counts, listed
from quire.bench.report.progress import announce_model, runs_bar
from quire.bench.report.sample import Sample
from quire.bench.report.table import check_json_path, publish
from quire.errors import ConfigError
from quire.kv.index import TokenIds
from quire.params import SamplingParams
from quire.speculative.drafter import NO_TOKENS, Outlook, Wanted

if TYPE_CHECKING:
    from quire.api.llm import LLM
    from quire.bench.engine.session import Session
    from quire.engine.draws.speculation import Speculation

SAYS = {
    "quote": "a text that is to be said again word for word, by n-grams or --speculative MODEL",
    "free": "random text that does not repeat: drafting must not cost anything",
    "replay": "the answers themselves, recorded before, with a share of the tokens spoilt",
}
EXAMPLES = f"""examples:
  quire bench speculation --workload quote
  quire bench speculation --workload free --batch 1,8
  quire bench speculation qwen3-8b --load-format dummy --workload replay --batch 1,2,4,8

workloads:
{listed(SAYS)}"""

LENGTH = {"quote": 128, "free": 128, "replay": 256}
REPLAY_PROMPT = 512
TEXT = (
    "harbour ledger cork salted lantern Bergen copper weather almanac ferry tobacco granite seven "
    "orchard rope signal Lisbon amber winter mason barrel quarry thirty canal velvet Tuesday iron"
)
# The one token that dummy weights answer with: by themselves their best tokens are so close that
# rounding decides, and no recording would hold.
ONLY = 7


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument(
        "--workload", choices=SAYS, default="quote", help="what is answered (default: quote)"
    )
    parser.add_argument(
        "--batch",
        type=counts,
        default=[1],
        metavar="N,N",
        help="requests at once, one table row each (default: 1)",
    )
    parser.add_argument(
        "--length", type=count, metavar="N", help="tokens of an answer (default: 128; replay 256)"
    )
    parser.add_argument(
        "--spoilt",
        type=checked(float, "a share such as 0.3"),
        default=0.3,
        metavar="SHARE",
        help="of the replayed tokens, so many are wrong (default: 0.3)",
    )
    add_run_flags(parser, repeat=5)


def run(args: argparse.Namespace, settings: dict[str, Any]) -> int:
    check_json_path(args.json)
    announce_model(settings)

    from quire.bench.engine.session import open_session

    with open_session(settings) as session:
        rows = [_compare(session, args, batch) for batch in args.batch]
        result = session.report(args.workload, SAYS[args.workload])
    notes = ["each pair one behind the other, on one engine; the ratio is of tokens a second"]
    publish({"benchmark": "speculation", **result, "rows": rows, "notes": notes}, args.json)
    return 0


def _compare(session: Session, args: argparse.Namespace, batch: int) -> dict[str, Any]:
    from quire.bench.engine.timing import generate_seconds
    from quire.engine.build_drafter import NGRAM_DRAFTS
    from quire.engine.draws.speculation import NO_SPECULATION, Speculation
    from quire.speculative.ngram import NgramDrafter

    llm, scheduler = session.llm, session.llm.engine.scheduler
    own = scheduler.speculation
    prompts = _prompts(llm, args.workload, batch)
    length = args.length or LENGTH[args.workload]
    params = [_params(llm, args.workload, length, seed) for seed in range(batch)]
    speculation = own if isinstance(own, Speculation) else Speculation(NgramDrafter(), NGRAM_DRAFTS)
    if args.workload == "replay":
        speculation = _replay(llm, prompts, params, args.spoilt)
    seconds: dict[str, list[float]] = {"plain": [], "drafts": []}
    try:
        with runs_bar(f"{args.workload} × {batch}", args.repeat) as bar:
            for number in range(args.repeat + 1):  # the first is a warm-up
                for name in seconds:
                    llm.reset_prefix_cache()
                    scheduler.speculation = speculation if name == "drafts" else NO_SPECULATION
                    took = generate_seconds(llm, prompts, params)
                    seconds[name] += [took] if number else []
                bar.update(bool(number))
    finally:
        scheduler.speculation = own
    fared = speculation.stats()
    rates = {
        name: Sample(batch * length / each for each in times) for name, times in seconds.items()
    }
    pairs = zip(seconds["plain"], seconds["drafts"], strict=True)
    return {
        "requests": batch,
        "plain tok/s": rates["plain"],
        "with drafts": rates["drafts"],
        "ratio": Sample(plain / drafts for plain, drafts in pairs),
        "drafted": fared["drafted"],
        "accepted": fared["accepted"],
        "mean accepted": fared["mean_accepted"],
    }


def _params(llm: LLM, workload: str, length: int, seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=1.0 if workload == "free" else 0.0,
        seed=seed,
        max_tokens=length,
        ignore_eos=True,
        logit_bias={ONLY: 100.0} if llm.tokenizer is None else None,
    )


def _prompts(llm: LLM, workload: str, batch: int) -> list[list[int]]:
    choose = random.Random(0)
    if workload == "replay":
        most = min(llm.engine.model.vocab_size, 100_000)
        return [[choose.randrange(most) for _ in range(REPLAY_PROMPT)] for _ in range(batch)]
    if llm.tokenizer is None:
        raise ConfigError("This model has no tokenizer; use --workload replay.")
    if workload == "free":
        return [llm.tokenizer.encode(f"Chapter {i}. ") for i in range(1, batch + 1)]
    words = TEXT.split()
    texts = (" ".join(choose.choice(words) for _ in range(120)) for _ in range(batch))
    # The text, and the beginning of the text again: any model goes on with what it has seen.
    return [llm.tokenizer.encode(f"{text}.\n{text}.\n{text[:60]}") for text in texts]


def _replay(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams], spoilt: float
) -> Speculation:
    """Drafts from the answers as they are without any."""
    from quire.engine.build_drafter import MODEL_DRAFTS
    from quire.engine.draws.speculation import Speculation

    outputs = llm.generate(prompts, params, use_tqdm=False)
    answers = [output.outputs[0].token_ids for output in outputs]
    script = {
        tuple(prompt): [*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)
    }
    return Speculation(Replay(script, spoilt, llm.engine.model.vocab_size), MODEL_DRAFTS)


class Replay:
    """Knows the answer to each prompt, and spoils some of its tokens, always the same ones."""

    def __init__(
        self, script: dict[tuple[int, ...], list[int]], spoilt: float, vocab_size: int
    ) -> None:
        self._script = {
            prompt: _spoil(ids, len(prompt), spoilt, vocab_size, seed)
            for seed, (prompt, ids) in enumerate(script.items())
        }
        self._prompt_len = len(next(iter(script)))
        self._by_name: dict[Hashable, TokenIds] = {}

    def look(self, name: Hashable, token_ids: TokenIds) -> Outlook:
        return Outlook(is_ready=True)

    def propose(self, wanted: Sequence[Wanted]) -> list[TokenIds]:
        return [self._drafts(each.name, each.token_ids, each.most) for each in wanted]

    def forget(self, name: Hashable) -> None:
        self._by_name.pop(name, None)

    def _drafts(self, name: Hashable, token_ids: TokenIds, most: int) -> TokenIds:
        script = self._by_name.get(name)
        if script is None:
            prompt = tuple(token_ids[: self._prompt_len].tolist())
            script = self._by_name[name] = self._script.get(prompt, NO_TOKENS)
        return script[len(token_ids) : len(token_ids) + most]


def _spoil(ids: list[int], start: int, share: float, vocab_size: int, seed: int) -> TokenIds:
    token_ids = np.array(ids, dtype=np.int32)
    wrong = np.random.default_rng(seed).random(len(ids)) < share
    wrong[:start] = False
    token_ids[wrong] = (token_ids[wrong] + 1) % vocab_size
    return token_ids
