"""The loop: requests in, steps, outputs out."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import count
from typing import Any

from quire.beam_params import BeamSearchParams
from quire.engine.adapters.catalog import AdapterCatalog
from quire.engine.adapters.source import AdapterSource
from quire.engine.commit import Commit
from quire.engine.draws.beam_search import BeamSearch
from quire.engine.endings import fail_request, finish_request
from quire.engine.fast_forward import repeat_decode, steps_alike
from quire.engine.grammar.compiler import GrammarCompiler
from quire.engine.grammar.grammar import Grammar
from quire.engine.grammar.masks import MaskWriter
from quire.engine.limits import Limits, checked_ids
from quire.engine.model_facts import ModelFacts, Observed
from quire.engine.observe.journal import Journal
from quire.engine.outputs import RequestOutput, request_output
from quire.engine.preparing import Preparing
from quire.engine.recovery import Recovery, Runner, StepFailed, StepUnderWay
from quire.engine.schedule.chunk import Schedule
from quire.engine.schedule.prefill_rate import PrefillRate
from quire.engine.schedule.scheduler import Scheduler
from quire.engine.sequence import Request, Sequence, Status, new_sequence
from quire.errors import RequestError
from quire.kv.block_log import BlockLog
from quire.kv.foreground import Foreground
from quire.kv.index import TokenIds
from quire.lora_request import LoRARequest
from quire.params import SamplingParams
from quire.request_options import DEFAULT_OPTIONS, RequestOptions
from quire.runner.sampling.noise import sample_seed

WAIT_FOR_TIERS_S = 0.05
WAIT_FOR_PREPARED_S = 0.05
BUDGET_WITHOUT_MARKERS = (
    "thinking_token_budget needs a chat with a model that thinks, whose template shows where it "
    "does; leave it out, or give thought_markers."
)


class Engine:
    """Owns the requests. `add_request` and `abort_request` between calls of `step`."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        model: ModelFacts,
        seed: int = 0,
        overlap: bool = False,
        observed: Observed | None = None,
        adapters: AdapterCatalog | None = None,
    ) -> None:
        """With `overlap` a step is planned and launched while the one before it runs.

        `adapters` are those over the model, whose slots the scheduler has, too.
        """
        self.scheduler = scheduler
        self.runner = runner
        self.recovery = Recovery(scheduler, runner)
        self.model = model
        self.adapters = adapters
        self.limits = Limits(
            model.vocab_size,
            model.max_model_len,
            scheduler.waiting.policy,
            takes_adapters=adapters is not None,
        )
        self.seed = seed
        self.overlap = overlap
        self.observed = observed or Observed()
        self._requests: dict[str, Request] = {}
        self._arrivals = count()
        self._under_way: list[StepUnderWay] = []  # oldest first
        self._has_begun_again = False
        self._preparing = Preparing(scheduler, adapters, lambda each: self.grammars.abandon(each))
        self.grammars = GrammarCompiler(model.tokenizer, model.vocab_size, model.eos_token_ids)
        self._masks = MaskWriter(model.vocab_size, model.eos_token_ids)
        self._prefill_rate = PrefillRate(scheduler.tiering.rates, scheduler.clock)
        self.commit = Commit(scheduler, model.tokenizer, self._prefill_rate)
        # Without overlap a step is computed by its launch, and others need not wait for that.
        self._foreground = scheduler.tiering.foreground if overlap else Foreground()

    # --- requests -----------------------------------------------------------------------------

    def make_request(
        self,
        request_id: str,
        prompt: str | list[int] | TokenIds,
        params: SamplingParams | BeamSearchParams,
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> Request:
        """Check a prompt and its parameters; raises RequestError, and changes nothing.

        Whether the form that `structured` asks for can be had is known when `grammar` is done, and
        whether the adapter can when `lora` is.
        """
        self._foreground.begin()
        token_ids = self._encode(prompt)
        tenant = options.cache_salt if options.tenant is None else options.tenant
        beams = None
        if isinstance(params, BeamSearchParams):
            if options.stream:
                raise RequestError("Beam search cannot stream: its end decides which are best.")
            beams, params = params, params.sampling
        self.limits.check(token_ids, params, options)
        if params.thinking_token_budget is not None and params.thought_markers is None:
            raise RequestError(BUDGET_WITHOUT_MARKERS)
        room = self.model.max_model_len - len(token_ids)
        eos = () if params.ignore_eos else self.model.eos_token_ids
        request = Request(
            id=request_id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_ids=token_ids,
            params=params,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            stop_ids=frozenset(eos) | frozenset(params.stop_token_ids),
            grammar=self._grammar(params, tenant),
            lora=self._source(options.lora_request),
            streaming=options.stream,
            with_text=options.with_text,
            priority=options.priority,
            is_background=options.background,
            turn=options.turn,
            namespace=options.cache_salt,
            tenant=tenant,
            name=options.name,
            is_handed_over=options.handed_over,
        )
        if beams is not None:
            request.search = BeamSearch(beams, request.max_tokens, len(request.stop_ids))
        return request

    def add_request(
        self,
        request_id: str,
        prompt: str | list[int] | TokenIds,
        params: SamplingParams | BeamSearchParams,
        **options: Any,
    ) -> None:
        """Check and start a request; `options` are the fields of `RequestOptions`."""
        self.submit(self.make_request(request_id, prompt, params, RequestOptions(**options)))

    def submit(self, request: Request) -> None:
        if request.id in self._requests:
            raise RequestError(f"A request {request.id!r} is already running; use another id.")
        request.number = next(self._arrivals)
        own_seed = request.params.seed
        request.seed = sample_seed(self.seed, request.number) if own_seed is None else own_seed
        request.sequences = [new_sequence(request, 0, self.model.tokenizer)]
        self.scheduler.watch.queued(request)
        self._preparing.add(request)
        self._requests[request.id] = request

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request now; its blocks are free when this returns.

        Returns what there is of its answer; None if no such request is running.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        self._preparing.drop(request)
        finish_request(self.scheduler, request, "abort")
        del self._requests[request_id]
        self._release(request)
        return self.output(request)

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def _encode(self, prompt: str | list[int] | TokenIds) -> TokenIds:
        if isinstance(prompt, str):
            tokenizer = self.model.tokenizer
            if tokenizer is None:
                raise RequestError("This model has no tokenizer; give the prompt as token ids.")
            prompt = tokenizer.encode(prompt)
        return checked_ids(prompt, self.model.vocab_size)

    def _grammar(self, params: SamplingParams, tenant: str) -> Grammar | None:
        form = params.structured
        return None if form is None else self.grammars.compile(form, tenant)

    def _source(self, asked: LoRARequest | None) -> AdapterSource | None:
        if asked is None:
            return None
        assert self.adapters is not None, "`limits` refuses it"
        return self.adapters.find(asked)

    def _release(self, request: Request) -> None:
        """The request has ended: what it had beside blocks is for others."""
        request.release_grammar()
        if self.adapters is not None:
            self.adapters.detach(request)

    # --- steps --------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Launch a step and finish one; with overlap, that is the one before.

        Returns the requests that ended, and those that stream and grew.
        """
        return [self.output(request) for request in self.advance()]

    def advance(self) -> list[Request]:
        """As `step`, for callers who read the requests themselves."""
        try:
            touched = self._step()
        except BaseException:  # an interrupt, or a bug: what was planned cannot be trusted
            self.begin_again()
            raise
        if not self._requests:
            self._under_way.clear()  # no request waits for what they draw
        # Where two steps ended at once, a request may have grown in one and ended in the other.
        return list(dict.fromkeys(touched))

    def begin_again(self) -> None:
        """After an interrupt, wherever it struck: every sequence goes on from the tokens it has."""
        self._under_way.clear()
        unfinished = self._unfinished()
        for sequence in unfinished:
            if sequence.grammar is not None:
                sequence.grammar.invalidate()
            if sequence.thought is not None:
                sequence.thought.invalidate()
        self.commit.take_last_back(unfinished)
        self.scheduler.reset(unfinished)
        self._has_begun_again = True

    def _step(self) -> list[Request]:
        """Plan, launch, and commit; returns the requests that have news."""
        self._foreground.begin()
        news = self._take_prepared()
        if self._has_begun_again:  # some may have ended in the step that broke off
            news += self._forget_finished(list(self._requests.values()))
            self._has_begun_again = False
        schedule = self.scheduler.plan(self.recovery.suspects)
        before = self._under_way[-1] if self._under_way else None
        if before is None:
            self._prefill_rate.begin()
        step = self.recovery.launch(schedule, before)
        self.scheduler.tiering.tell_uses()
        if step is not None:
            self._under_way.append(step)
        elif before is None:
            # Nothing can be computed before something is loaded.
            self.scheduler.tiering.wait(WAIT_FOR_TIERS_S)
        if step is None and before is None:
            self._preparing.wait(WAIT_FOR_PREPARED_S)
        if step is not None and step.awaits_masks:
            news += self._finish_steps(keep=1)
            step = self._draw_last()
        may_wait = step is not None and step.is_running and not self.recovery.is_careful
        may_wait = may_wait and self.overlap and not schedule.is_awaited
        return news + self._finish_steps(keep=int(may_wait))

    def _take_prepared(self) -> list[Request]:
        """Let those begin whose grammars and adapters are there; those that fail are the news."""
        if not self._preparing and (self.adapters is None or not self.adapters.is_reading):
            return []
        return self._forget_finished(self._preparing.take_done(self._requests.values()))

    def _draw_last(self) -> StepUnderWay | None:
        """Let the last step draw: what that depends on is known now, and it is running already.

        None if the step before it has failed, and taken it along.
        """
        if not self._under_way:
            return None
        self._under_way[-1] = self.recovery.draw(self._under_way[-1], self._masks.masks)
        return self._under_way[-1]

    def _finish_steps(self, keep: int) -> list[Request]:
        """Wait for all steps under way but the last `keep`."""
        news: list[Request] = []
        while len(self._under_way) > keep:
            step = self._under_way.pop(0)
            self._foreground.end()
            try:
                result = self.recovery.finish(step)
            except StepFailed as failed:
                return [*news, *self._take_back(failed)]
            finally:
                self._foreground.begin()
            self.commit.step(step.schedule, result)
            news += self._news(step.schedule)
        return news

    def _take_back(self, failed: StepFailed) -> list[Request]:
        """Undo a step and end the requests that cannot go on; those are the news."""
        later, self._under_way = self._under_way, []
        self.recovery.take_back(failed, self._unfinished() if later else None)
        broken = self.recovery.take_broken()
        for sequence, reason in broken:
            fail_request(self.scheduler, sequence.request, reason)
        return self._forget_finished(sequence.request for sequence, _ in broken)

    def _unfinished(self) -> list[Sequence]:
        sequences = (s for request in self._requests.values() for s in request.sequences)
        absent = (Status.FINISHED, Status.PREPARING)
        return [s for s in sequences if s.status not in absent]

    def _news(self, schedule: Schedule) -> list[Request]:
        """Requests of this step that ended, which are forgotten now, or that stream."""
        chunks = schedule.chunks
        over = (c.sequence.request for c in chunks if c.sequence.status is Status.FINISHED)
        ended = self._forget_finished(over)
        drawn = (c.sequence.request for c in chunks if c.draw.count)
        grown = [r for r in dict.fromkeys(drawn) if r.streaming and not r.finished]
        return ended + grown

    def _forget_finished(self, requests: Iterable[Request]) -> list[Request]:
        """Those that have ended, each of which is told of once."""
        ended = [r for r in dict.fromkeys(requests) if r.finished]
        for request in ended:
            self._release(request)
        return [r for r in ended if self._requests.pop(r.id, None) is not None]

    # --- many steps at once ---------------------------------------------------------------------

    def steps_alike(self) -> int:
        """How many of the next steps can be made by `fast_forward`."""
        if self.overlap and len(self._under_way) != 1:
            return 0
        return steps_alike(self.scheduler, self._schedule_under_way)

    def fast_forward(self, tokens: list[int], num_steps: int) -> None:
        """Make `num_steps` of `steps_alike`: in each, every running sequence draws its token.

        For a runner that computes nothing, in an engine without drafts. The clock is to show the
        end of the last of these steps. Histograms of `stats` do not count them.
        """
        repeat_decode(self.scheduler, self._schedule_under_way, tokens, num_steps)
        self.commit.skip(num_steps, len(tokens))

    @property
    def _schedule_under_way(self) -> Schedule | None:
        return self._under_way[-1].schedule if self._under_way else None

    def close(self) -> None:
        """Let go of what lasts longer than the engine: files, connections, threads, processes."""
        self.grammars.close()
        if self.adapters is not None:
            self.adapters.close()
        self.scheduler.tiering.close()
        self.runner.close()

    def check(self) -> None:
        """Raise what has ended the engine, if anything has, though no request is there."""
        self.runner.check()

    # --- what is going on -----------------------------------------------------------------------

    def keep_journal(self) -> None:
        """Write down what happens to each request; call it while none is there."""
        self.scheduler.watch = Journal(self.scheduler.cache)

    def publish_events(self) -> BlockLog:
        """From now on, which blocks its own tiers hold; call it while no request is there."""
        namespace = self.observed.namespace
        assert namespace is not None, "an engine without a namespace has no keys to tell"
        log = BlockLog()
        self.scheduler.cache.publish_events(log, namespace)
        self.scheduler.tiering.publish_events(log)
        return log

    @property
    def num_waiting(self) -> int:
        """Requests that have not begun, those that are being prepared too."""
        return len(self.scheduler.waiting) + len(self._preparing)

    @property
    def num_generated_tokens(self) -> int:
        return self.commit.num_generated_tokens

    def output(self, request: Request) -> RequestOutput:
        """What there is of a request's answer."""
        return request_output(request, self.model.tokenizer)

    @property
    def requests(self) -> Collection[Request]:
        """Those that have not ended."""
        return self._requests.values()

    def find_request(self, request_id: str) -> Request | None:
        """None if it has ended."""
        return self._requests.get(request_id)
