"""Random requests to random engines, each answer compared with a plain engine's.

The engine is Quire's own, from the queue to the sampler; only the model is fake: its logits are a
hash of the context as the block tables find it. Every field of every answer is compared.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import spelling
from drafts import ScriptedDrafter, speculate
from drawing_runner import DrawingRunner
from fake_model import VOCAB, logits_behind, make_engine, step
from llguidance import LLMatcher
from plain_engine import PlainAnswer, PlainEngine, PlainSample
from shelf import Shelf

from quire.beam_params import BeamSearchParams
from quire.engine.grammar.source import grammar_text
from quire.engine.observe.introspection import engine_stats
from quire.engine.outputs import CompletionOutput, RequestOutput
from quire.params import SamplingParams
from quire.runner.sampling.noise import sample_seed
from quire.speculative.ngram import NgramDrafter
from quire.structured import StructuredOutput

FULL, SMALL = 24_000, 500
TIE = 1e-5  # between two logprobs, which either may lead
MOST_UNSURE = 0.05

AN_INTEGER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
# Each can be spelt by the fake model's tokens, whichever of them are drawn.
FORMS = [
    {"regex": "[a-c]{3,5}(x|y)*"},
    {"regex": "([0-9],)*x"},
    {"choice": ["abcd", "q0", "q01"]},
    {"json_schema": AN_INTEGER | {"additionalProperties": False}},
    {"json_schema": {"enum": ["ab", 12, [3], "abc"]}},
]
STOPS = ["a", "ab", "c1", "12", "}", "u1", "xyz", "<end>"]


def run(seed: int, count: int) -> Counter[str]:
    """So many requests, over as many engines as that takes; what they were, counted.

    A seed gives the same engines and the same requests; when tiers answer is up to their threads.
    """
    tally: Counter[str] = Counter()
    while tally["requests"] < count:
        life = Life(f"{seed}/{tally['engines']}", count - tally["requests"], tally)
        try:
            life.live()
        except BaseException as error:
            error.add_note(f"engine {tally['engines']} of seed {seed}: {life.settings}")
            raise
        tally["engines"] += 1
    assert tally["unsure"] <= 2 + MOST_UNSURE * count, tally
    return tally


@dataclass
class Asked:
    prompt: list[int]
    params: SamplingParams | BeamSearchParams
    answer: PlainAnswer
    is_first_of_its_salt: bool
    texts: dict[int, str] = field(default_factory=dict)  # of a stream, as far as they were shown


class Life:
    """One engine, from its first request to its last."""

    def __init__(self, name: str, most: int, tally: Counter[str]) -> None:
        self.name, self.tally = name, tally
        self.dice = dice = random.Random(f"engine {name}")
        self.moments = random.Random(f"moments {name}")
        self.count = min(most, dice.choice([10, 40, 120]))
        block_size = dice.choice([1, 2, 4, 8, 16])
        num_blocks = max(dice.choice([6, 10, 24, 64]), 24 // block_size)
        has_tiers = dice.random() < 0.3
        self.settings: dict[str, Any] = {
            "num_blocks": num_blocks,
            "block_size": block_size,
            "budget": dice.choice([1, 3, 8, 40, 200]),
            "max_seqs": dice.choice([1, 2, 5, 16]),
            "policy": dice.choice(["fcfs", "priority", "cache-aware"]),
            "caching": has_tiers or dice.random() < 0.8,
            "overlap": dice.random() < 0.5,
            "host_slots": dice.choice([0, 4, 40]) if has_tiers else None,
        }
        shelf = Shelf(4 * block_size, is_local=dice.random() < 0.5)
        tiers = [shelf] if has_tiers and dice.random() < 0.7 else []
        self.engine = make_engine(
            **self.settings,
            tiers=tiers,
            tokenizer=spelling.tokenizer(),
            runner_class=DrawingRunner,
        )
        self.engine.grammars = spelling.compiled(FORMS)
        self.settings["drafts"] = self._draft()
        self.room = num_blocks * block_size
        self.plain = PlainEngine(
            logits_behind, spelling.TOKENS, {spelling.EOS}, {spelling.EOS}, self.room, matcher
        )
        self.waiting: dict[str, Asked] = {}
        self.asked = 0
        lengths = [dice.randrange(1, 40) for _ in range(4)]
        self.prefixes = [[dice.randrange(1, VOCAB) for _ in range(n)] for n in lengths]

    def _draft(self) -> str:
        """Drafts that are right now and then, by looking at the answers, or by n-grams."""
        kind, most = self.dice.choice(["none", "none", "ngram", "told"]), self.dice.randint(1, 5)
        if kind == "ngram":
            speculate(self.engine, NgramDrafter(), most)
        elif kind == "told":
            speculate(self.engine, ScriptedDrafter(self._told, _is_spoilt, VOCAB), most)
        return f"{kind} of {most}"

    def _told(self, sequence, token_ids, most):
        asked = self.waiting[sequence.request.id]
        if len(asked.answer.samples) <= sequence.sample:
            return []
        told = asked.answer.samples[sequence.sample].token_ids
        return told[len(token_ids) - len(asked.prompt) :][:most]

    # --- asking -----------------------------------------------------------------------------------

    def live(self) -> None:
        limit = 40_000
        while self.asked < self.count or self.waiting:
            limit -= 1
            assert limit, "no end in sight"
            while self.asked < self.count and self.moments.random() < 0.4:
                self._ask()
            if self.waiting and self.moments.random() < 0.01:
                self._abort(self.moments.choice(list(self.waiting)))
            if self.moments.random() < 0.02:
                self.engine.scheduler.queues.preempt_youngest()
            for output in step(self.engine):
                self._check(output, self.waiting[output.request_id])
                if output.finished:
                    del self.waiting[output.request_id]
        self.tally["preemptions"] += self.engine.scheduler.queues.num_preemptions
        self.tally["drafts accepted"] += engine_stats(self.engine)["speculation"].get("accepted", 0)
        self.engine.close()

    def _ask(self) -> None:
        name = str(self.asked)
        self.dice = dice = random.Random(f"request {self.name}/{name}")
        prompt = self._prompt()
        params = self._search() if dice.random() < 0.07 else self._params(prompt)
        own = getattr(params, "seed", None)
        seed = sample_seed(self.engine.seed, self.asked) if own is None else own
        answer = self.plain.answer(prompt, params, seed)
        is_first = dice.random() < 0.05
        options: dict[str, Any] = {
            "cache_salt": f"only {name}" if is_first else dice.choice(["", "", "", "a", "b"]),
            "stream": self._may_stream(params) and dice.random() < 0.4,
        }
        if self.settings["policy"] == "priority":
            options["priority"] = dice.randrange(-1, 3)
        self.waiting[name] = Asked(prompt, params, answer, is_first)
        self.engine.add_request(name, prompt, params, **options)
        self.asked += 1
        self.tally["requests"] += 1
        self.tally["unsure"] += not answer.is_sure
        self.tally["streams"] += options["stream"]
        self.tally["beam searches"] += isinstance(params, BeamSearchParams)
        self.tally["forms"] += getattr(params, "structured", None) is not None

    def _may_stream(self, params: SamplingParams | BeamSearchParams) -> bool:
        return isinstance(params, SamplingParams) and params.best_of in (None, params.n)

    def _prompt(self) -> list[int]:
        """A shared prefix, often cut at the edge of a block, and something of its own."""
        dice, block_size = self.dice, self.settings["block_size"]
        prompt = list(dice.choice(self.prefixes))
        if dice.random() < 0.5:
            cut = block_size * dice.randrange(1, 5) + dice.choice([-1, 0, 1])
            prompt = prompt[: max(1, cut)]
        prompt += [dice.randrange(VOCAB) for _ in range(dice.choice([0, 0, 1, 3, block_size]))]
        return prompt[: self.room - 1]

    def _search(self) -> BeamSearchParams:
        dice = self.dice
        max_tokens = dice.randint(1, 6)
        return BeamSearchParams(
            beam_width=dice.choice([1, 2, 4]),
            max_tokens=max_tokens,
            length_penalty=dice.choice([0.0, 1.0, 1.7]),
            early_stopping=dice.choice([True, False, "never"]),
            stop_token_ids=dice.choice([[], [3, 8]]),
            min_tokens=dice.randint(0, max_tokens),
            ignore_eos=dice.random() < 0.5,
            skip_special_tokens=dice.random() < 0.8,
        )

    def _params(self, prompt: list[int]) -> SamplingParams:
        dice = self.dice

        often = dice.choice([0.05, 0.15, 0.4])

        def rarely(value: Any, otherwise: Any) -> Any:
            return value if dice.random() < often else otherwise

        n = dice.choice([1, 1, 1, 1, 2, 4])
        max_tokens = dice.choice([1, 2, 5, 9, 16, rarely(None, 3)])
        if max_tokens is None and self.room - len(prompt) > 60:
            max_tokens = 60
        prompt_logprobs = rarely(dice.choice([0, 2, 20]), None)
        if prompt_logprobs is not None:
            max_tokens = rarely(0, max_tokens)
        bias = {
            dice.randrange(VOCAB): dice.choice([-100.0, -1.5, 6.0, 9.0, 100.0]) for _ in range(3)
        }
        return SamplingParams(
            n=n,
            best_of=rarely(n + dice.choice([0, 1, 3]), None),
            temperature=dice.choice([0.0, 0.0, 0.5, 1.0, 1.7, 6.0]),
            top_k=dice.choice([-1, 0, 0, 1, 3, 20, VOCAB, VOCAB + 5]),
            top_p=dice.choice([1.0, 1.0, 0.137, 0.871, 0.9937]),
            min_p=dice.choice([0.0, 0.0, 0.0513, 0.313]),
            repetition_penalty=rarely(dice.choice([1.31371, 3.17193, 0.71193]), 1.0),
            presence_penalty=rarely(dice.choice([1.91373, -1.12357]), 0.0),
            frequency_penalty=rarely(dice.choice([1.85513, -0.61179]), 0.0),
            logit_bias=rarely(bias, None),
            stop=rarely(dice.sample(STOPS, dice.randint(1, 3)), ()),
            stop_token_ids=rarely([dice.randrange(VOCAB) for _ in range(4)], ()),
            include_stop_str_in_output=dice.random() < 0.3,
            min_tokens=rarely(dice.randint(0, max_tokens or 0), 0),
            max_tokens=max_tokens,
            ignore_eos=dice.random() < 0.5,
            seed=dice.choice([None, 0, -5, 2**64 - 1, dice.randrange(1 << 40)]),
            logprobs=rarely(dice.choice([0, 1, 5, 20]), None),
            prompt_logprobs=prompt_logprobs,
            skip_special_tokens=dice.random() < 0.8,
            structured=rarely(dice.choice(FORMS), None) if max_tokens else None,
        )

    # --- what comes back --------------------------------------------------------------------------

    def _abort(self, name: str) -> None:
        output = self.engine.abort_request(name)
        assert output is not None and output.finished
        self._check(output, self.waiting.pop(name))
        self.tally["aborts"] += 1

    def _check(self, output: RequestOutput, asked: Asked) -> None:
        try:
            self._check_facts(output, asked)
            reasons = {sample.finish_reason for sample in output.outputs}
            if not asked.answer.is_sure:
                return
            if output.finished and "abort" not in reasons:
                _same_answer(output, asked)
            else:
                _so_far(output, asked)
        except AssertionError as error:
            error.add_note(f"request {output.request_id}: {asked.prompt} {asked.params}")
            error.add_note(f"its answer: {str(output)[:2000]}\nmust be: {str(asked.answer)[:2000]}")
            raise

    def _check_facts(self, output: RequestOutput, asked: Asked) -> None:
        """What holds for any answer."""
        assert output.error is None
        assert output.prompt_token_ids == asked.prompt
        cached = output.num_cached_tokens
        assert sum(output.cached_tokens_by_tier.values()) == cached
        assert 0 <= cached < len(asked.prompt)
        assert not (cached and asked.is_first_of_its_salt), "another salt's blocks were found"
        for sample in output.outputs:
            assert sample.text.startswith(asked.texts.get(sample.index, "")), "text was taken back"
            if not output.finished:
                asked.texts[sample.index] = sample.text
        self.tally["cached tokens"] += cached if output.finished else 0
        self.tally["tokens"] += (
            sum(len(sample.token_ids) for sample in output.outputs) if output.finished else 0
        )


def _is_spoilt(sequence, place):
    return (place * 7 + sequence.request.number) % 4 == 0


@cache
def _first_matcher(form: StructuredOutput) -> LLMatcher:
    return LLMatcher(spelling.guided(), grammar_text(form))


def matcher(form: StructuredOutput) -> LLMatcher:
    return _first_matcher(form).deep_copy()


def _same_answer(output: RequestOutput, asked: Asked) -> None:
    wanted = asked.answer
    assert [s.index for s in output.outputs] == list(range(len(wanted.samples)))
    for got, sample in zip(output.outputs, wanted.samples, strict=True):
        assert got.token_ids == sample.token_ids
        assert got.text == sample.text
        assert got.finish_reason == sample.finish_reason
        if got.cumulative_logprob is not None:
            assert math.isclose(got.cumulative_logprob, sample.cumulative_logprob, abs_tol=1e-3)
        assert (got.score is None) == (sample.score is None)
        if got.score is not None and sample.score is not None:
            assert math.isclose(got.score, sample.score, rel_tol=1e-5, abs_tol=1e-3)
        _same_logprobs(got, sample, asked.params)
    if wanted.prompt_logprobs is None:
        assert output.prompt_logprobs is None
    else:
        _same_entries(output.prompt_logprobs, wanted.prompt_logprobs)


def _same_logprobs(
    got: CompletionOutput, sample: PlainSample, params: SamplingParams | BeamSearchParams
) -> None:
    if isinstance(params, BeamSearchParams) or params.logprobs is None:
        assert got.logprobs is None
    else:
        _same_entries(got.logprobs, sample.logprobs[: len(got.token_ids)])


def _same_entries(got: Any, wanted: Any) -> None:
    assert len(got) == len(wanted)
    for ours, theirs in zip(got, wanted, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is None:
            continue
        assert len(ours) == len(theirs)
        for (token_id, entry), (other_id, (logprob, rank)) in zip(
            ours.items(), theirs.items(), strict=True
        ):
            assert math.isclose(entry.logprob, logprob, abs_tol=1e-4)
            assert entry.decoded_token == spelling.TOKENS[token_id]
            assert (token_id, entry.rank) == (other_id, rank) or _is_tied(logprob, theirs)


def _is_tied(logprob: float, entries: dict[int, tuple[float, int]]) -> bool:
    """Whether rounding to 32 bits may put another token in its place."""
    return sum(abs(each - logprob) < TIE for each, _ in entries.values()) > 1


def _so_far(output: RequestOutput, asked: Asked) -> None:
    """A stream that goes on, or a request that was given up: a beginning of its answer."""
    if isinstance(asked.params, BeamSearchParams) or asked.params.num_samples > asked.params.n:
        return  # which of them are the best, only the end tells
    for got, sample in zip(output.outputs, asked.answer.samples, strict=False):
        assert got.token_ids == sample.token_ids[: len(got.token_ids)]
        assert sample.text.startswith(got.text) or got.finish_reason == "abort"
        _same_logprobs(got, sample, asked.params)
