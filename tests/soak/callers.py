"""Callers: random requests over a few shared prefixes, and what each must be answered."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from functools import cached_property

from fake_model import VOCAB, expected, greedy, logprobs_behind, next_token
from patience import PATIENCE_S
from plain_beams import plain_beams

from quire.beam_params import BeamSearchParams
from quire.engine.engine import Engine
from quire.engine.outputs import RequestOutput
from quire.params import SamplingParams
from quire.runner.sampling.noise import sample_seed
from soak.tally import Tally
from soak.violation import require

LONGEST_WAIT_S = PATIENCE_S  # from a request to its last token, whatever fails in between
FORGIVABLE = (
    "The step of this request failed",
    "no usable logits",
    "out of memory even for one token",
)
SALTS = ["", "", "", "tenant a", "tenant b"]


@dataclass
class Asked:
    prompt: list[int]
    params: SamplingParams | BeamSearchParams
    room: int  # tokens that fit behind the prompt
    is_first_of_its_salt: bool
    since: float = field(default_factory=time.monotonic)
    seen: list[int] = field(default_factory=list)  # tokens of each sample, of a stream

    @cached_property
    def answers(self) -> list[list[int]]:
        """What the samples must be; shorter where the request did not get to its end."""
        params, count = self.params, min(self.params.max_tokens or 0, self.room)
        if isinstance(params, BeamSearchParams):
            room = self.room + len(self.prompt)
            beams = plain_beams(self.prompt, params, logprobs_behind, room)
            return [tokens for tokens, _ in beams]
        if params.is_greedy:
            return [expected(self.prompt, count)] * params.n
        assert params.seed is not None
        return [self._drawn(sample_seed(params.seed, i), count) for i in range(params.n)]

    def _drawn(self, seed: int, count: int) -> list[int]:
        tokens = list(self.prompt)
        for position in range(count):
            tokens.append(next_token(tokens, seed + position, sampled=True))
        return tokens[len(self.prompt) :]


class Callers:
    """Adds and aborts requests of one engine, and checks all that comes back."""

    def __init__(self, engine: Engine, dice: random.Random, tally: Tally, name: str) -> None:
        self.engine, self.dice, self.tally, self.name = engine, dice, tally, name
        self.waiting: dict[str, Asked] = {}
        self.most = 2 * engine.scheduler.max_num_seqs + 4
        self._has_priorities = engine.scheduler.waiting.policy == "priority"
        self._number = 0
        longest = engine.model.max_model_len * 3 // 4
        # The same in every round, so that what is on disk is asked for after a restart.
        prefixes = random.Random("prefixes")
        lengths = [prefixes.randrange(4, 64) for _ in range(5)]
        self._prefixes = [[prefixes.randrange(1, VOCAB) for _ in range(n)] for n in lengths]
        self._prefixes = [prefix[:longest] for prefix in self._prefixes]

    def act(self) -> None:
        """Between two steps: perhaps a few requests more, perhaps one less."""
        while len(self.waiting) < self.most and self.dice.random() < 0.4:
            self._ask()
        if self.waiting and self.dice.random() < 0.01:
            self._abort(self.dice.choice(list(self.waiting)))

    def _ask(self) -> None:
        dice = self.dice
        self._number += 1
        request_id = f"{self.name}/{self._number}"
        prompt = list(dice.choice(self._prefixes))
        if dice.random() < 0.3:
            prompt = prompt[: dice.randrange(1, len(prompt) + 1)]
        prompt += [dice.randrange(1, VOCAB) for _ in range(dice.choice([0, 1, 3, 9]))]
        room = self.engine.model.max_model_len
        prompt = prompt[: room - 1]
        params = self._params(min(dice.choice([1, 2, 5, 12, 24]), room - len(prompt)))
        is_first_of_its_salt = dice.random() < 0.03
        salt = f"once {request_id}" if is_first_of_its_salt else dice.choice(SALTS)
        options = {"priority": dice.randrange(3)} if self._has_priorities else {}
        is_search = isinstance(params, BeamSearchParams)
        is_stream = dice.random() < 0.3 and not is_search
        self.engine.add_request(
            request_id, prompt, params, stream=is_stream, cache_salt=salt, **options
        )
        asked = Asked(prompt, params, room - len(prompt), is_first_of_its_salt)
        self.waiting[request_id] = asked
        self.tally.counts["requests"] += 1
        self.tally.counts["streams"] += is_stream
        self.tally.counts["beam searches"] += is_search

    def _params(self, max_tokens: int) -> SamplingParams | BeamSearchParams:
        if self.dice.random() < 0.1:
            width = self.dice.choice([1, 2, 4])
            return BeamSearchParams(beam_width=width, max_tokens=max_tokens, ignore_eos=True)
        n = self.dice.choice([1, 1, 1, 1, 2, 4])
        if self.dice.random() < 0.7:
            return greedy(max_tokens, n=n)
        seed = self.dice.randrange(1 << 30)
        return SamplingParams(n=n, max_tokens=max_tokens, seed=seed, ignore_eos=True)

    def _abort(self, request_id: str) -> None:
        output = self.engine.abort_request(request_id)
        require(output is not None, f"Request {request_id} could not be aborted.")
        assert output is not None
        self._check(output, self.waiting.pop(request_id))
        self.tally.counts["aborts"] += 1

    def take(self, outputs: list[RequestOutput]) -> None:
        """What a step gave."""
        for output in outputs:
            asked = self.waiting.get(output.request_id)
            require(asked, f"Request {output.request_id} was answered after its end.")
            assert asked is not None
            self._check(output, asked)
            if output.finished:
                del self.waiting[output.request_id]
                self._count(output, asked)
        self._check_waits()

    def _check(self, output: RequestOutput, asked: Asked) -> None:
        name = output.request_id
        answers, got = asked.answers, [sample.token_ids for sample in output.outputs]
        ended_well = output.finished and all(s.finish_reason == "length" for s in output.outputs)
        if ended_well:
            require(got == answers, f"Request {name} was answered {got}, not {answers}.")
        is_search = isinstance(asked.params, BeamSearchParams)
        for sample, tokens in enumerate([] if is_search else got):  # beams come and go
            right = tokens == answers[sample][: len(tokens)]
            require(right, f"Request {name} was answered {tokens}, not {answers[sample]}.")
        lengths = [len(tokens) for tokens in got]
        shrank = any(new < old for new, old in zip(lengths, asked.seen, strict=False))
        require(not shrank, f"The stream of request {name} took tokens back.")
        asked.seen = lengths
        leaked = asked.is_first_of_its_salt and output.num_cached_tokens
        require(not leaked, f"Request {name} found blocks under a salt that was new.")
        if output.error is not None:
            known = any(reason in output.error for reason in FORGIVABLE)
            require(known, f"Request {name} ended with an error: {output.error}")

    def _count(self, output: RequestOutput, asked: Asked) -> None:
        counts, waited = self.tally.counts, time.monotonic() - asked.since
        counts["ended by a broken step" if output.error else "answered"] += 1
        counts["prompt tokens"] += len(asked.prompt)
        counts["tokens generated"] += sum(len(sample.token_ids) for sample in output.outputs)
        self.tally.hits.update(output.cached_tokens_by_tier)
        self.tally.longest_wait = max(self.tally.longest_wait, waited)

    def _check_waits(self) -> None:
        now = time.monotonic()
        for name, asked in self.waiting.items():
            fair = now - asked.since < LONGEST_WAIT_S
            require(fair, f"Request {name} has waited for more than {LONGEST_WAIT_S:.0f} s.")
