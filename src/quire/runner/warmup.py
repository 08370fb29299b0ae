"""Compiles every kernel before the first request, on as many cores as there are.

A kernel is compiled when it is first launched, which takes up to seconds. So steps of all kinds are
run over a pool of one block: what they compute is nonsense, what they launch is all there is.

Loading weights takes seconds too. So a model of the same shape, but with one layer of each kind,
asks for its kernels while they are loaded; the whole model then finds them compiled.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch

from quire.kernels.adapter_slots import NO_ADAPTER
from quire.kernels.backend import backend_for
from quire.kv.layout import KVLayout
from quire.kv.pool import PagedKVCache
from quire.layers.formats import AllDense
from quire.layers.tp import SINGLE, TensorParallel
from quire.models.causal_lm import CausalLM
from quire.models.config import ModelConfig
from quire.models.pool_groups import pool_groups
from quire.models.source import empty_model
from quire.params import SamplingParams
from quire.runner.adapters import RunnerAdapters
from quire.runner.graphs import StepGraphs
from quire.runner.plan import GroupTables, StepPlan, empty_plan
from quire.runner.runner import LaunchedStep, ModelRunner
from quire.runner.sampling.masks import TokenMasks
from quire.runner.sampling.sampler import SampleRow
from quire.runner.transfer import BY_COPY_ENGINES, HostLink

GREEDY = SamplingParams(temperature=0)
RANDOM = SamplingParams(temperature=0.7)
FILTERED = SamplingParams(top_k=5, top_p=0.9, min_p=0.01)
LONG = 4096  # tokens of a prompt that has kernels of its own
SHORT_RUNS = [LONG // 16] * 8  # prompts of several adapters: as many rows, and no long run of one

Step = tuple[list[int], SamplingParams, bool]

# The lengths of a step's sequences, how their tokens are drawn, and whether masks rule some out.
STEPS: list[Step] = [
    ([LONG], GREEDY, False),
    ([40], GREEDY, False),
    ([1], GREEDY, True),
    ([1] * 20, GREEDY, False),
    ([1, 1], RANDOM, True),
    ([1, 1, 1], FILTERED, False),
    ([2, 40], RANDOM, False),
    ([2] + [1] * 20, GREEDY, False),
    ([1] * 200, GREEDY, False),
]
# A library multiplies by dense matrices; kernels for others, and for adapters, differ by the rows.
MORE_ROWS: list[Step] = [
    ([LONG // 16], GREEDY, False),
    ([LONG // 32], GREEDY, False),
    ([1] * 9, GREEDY, False),
    ([1] * 90, GREEDY, False),
    ([1] * 150, GREEDY, False),
    ([1] * 190, GREEDY, False),
    ([320], GREEDY, False),
    ([448], GREEDY, False),
    ([576], GREEDY, False),
    ([832], GREEDY, False),
]
THREADS = 3  # with more, they hold each other up: as a rule nothing is left to compile


def compile_ahead(
    config: ModelConfig,
    layout: KVLayout,
    dtype: torch.dtype,
    device: torch.device,
    max_tokens: int,
    tp: TensorParallel = SINGLE,
) -> Future[None]:
    """Begin to compile what a model of this shape needs, before it is there.

    `tp` has no group: what one rank compiles is no business of the others.
    """

    def compile_all() -> None:
        import triton

        if not hasattr(triton, "AsyncCompileMode"):  # before 3.5: `warm_up` compiles all
            return
        from quire.kernels.triton.dry_run import DryRun

        thin = config.with_one_layer_of_each_kind()
        if not (DryRun.is_first() and _has_room_for(thin, dtype, device)):
            return
        # A stream of its own: whatever waits for the device would wait for the weights, too.
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            model = empty_model(thin, dtype, device, tp)
            model.freeze()
            model.reserve(2 * LONG, device)
            pages = replace(layout, groups=pool_groups(thin, tp, window_groups=any(layout.windows)))
            with DryRun():
                for step in _steps(thin, max_tokens):
                    _launch(model, pages, device, BY_COPY_ENGINES, *step)
                _launch_as_recorded(model, pages, device)
            stream.synchronize()  # before what it computed with is gone

    thread = ThreadPoolExecutor(1)
    future = thread.submit(compile_all)
    thread.shutdown(wait=False)
    return future


def _has_room_for(thin: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the weights that are being loaded will hardly miss what the thin model takes."""
    features = 2 * thin.vocab_size + 4 * thin.intermediate_size
    if thin.experts is not None:
        features += 3 * thin.experts.count * thin.experts.features
    size = dtype.itemsize * thin.hidden_size * features
    return torch.cuda.mem_get_info(device)[0] > 16 * size


def warm_up(
    model: CausalLM,
    layout: KVLayout,
    device: torch.device,
    max_tokens: int,
    link: HostLink,
    adapters: RunnerAdapters | None = None,
) -> None:
    """Run steps of all kinds, in some threads: what is not compiled yet is now.

    With adapters in their rows they follow one by one, as a model has only one pass with adapters
    at a time. Little is left to compile then.
    """
    model.reserve(2 * LONG, device)

    def run(step: Step) -> None:
        with torch.cuda.stream(torch.cuda.Stream(device)):
            for launched in _launch(model, layout, device, link, *step):
                launched.result()

    steps = _steps(model.config, max_tokens)
    with ThreadPoolExecutor(THREADS) as threads:
        for ran in [threads.submit(run, step) for step in steps]:
            ran.result()
    if adapters is not None:
        every = _short_enough(STEPS + MORE_ROWS, max_tokens)
        together = [([0] * len(lengths), lengths) for lengths, *_ in every]
        if sum(SHORT_RUNS) <= max_tokens:
            together.append(([0, NO_ADAPTER] * (len(SHORT_RUNS) // 2), SHORT_RUNS))
        for slots, lengths in together:
            cache = PagedKVCache(layout, 1, device, backend_for(device))
            plan = nonsense_step(layout, lengths, GREEDY)
            plan = replace(plan, adapter_slots=np.array(slots, dtype=np.int32))
            ModelRunner(model, cache, link=link, adapters=adapters).launch(plan).result()


def _steps(config: ModelConfig, max_tokens: int) -> list[Step]:
    is_plain = isinstance(config.formats, AllDense) and config.experts is None
    return _short_enough(STEPS if is_plain else STEPS + MORE_ROWS, max_tokens)


def _short_enough(steps: list[Step], max_tokens: int) -> list[Step]:
    return [step for step in steps if sum(step[0]) <= max_tokens]


def _launch(
    model: CausalLM,
    layout: KVLayout,
    device: torch.device,
    link: HostLink,
    lengths: list[int],
    params: SamplingParams,
    is_masked: bool,
) -> list[LaunchedStep]:
    """The step, and once more with masks where it is to have some too."""
    runner = ModelRunner(model, PagedKVCache(layout, 1, device, backend_for(device)), link=link)
    runner.copy_blocks([(0, 0)])  # forks do, which has a kernel too
    plan = nonsense_step(layout, lengths, params)
    launched = [runner.launch(plan)]
    if is_masked and model.tp.rank == 0:  # the others draw nothing
        launched.append(runner.launch(replace(plan, is_masked=True)))
        launched[1].draw(_open_masks(len(lengths), model.config.vocab_size))
    return launched


def _launch_as_recorded(model: CausalLM, layout: KVLayout, device: torch.device) -> None:
    """A step whose inputs are laid out on the device."""
    cache = PagedKVCache(layout, 1, device, backend_for(device))
    graphs = StepGraphs(model, cache, 1, 1, layout.block_size)
    with torch.inference_mode():
        drawn = torch.empty(0, dtype=torch.int64, device=device)
        plan = empty_plan(len(layout.groups))
        graphs.replay(graphs.shapes[0], plan, drawn, instead=cache.backend)


def _open_masks(rows: int, vocab_size: int) -> TokenMasks:
    """Masks that allow everything."""
    words = np.full((rows, -(-vocab_size // 32)), -1, dtype=np.int32)
    return TokenMasks(np.arange(rows, dtype=np.int32), words)


def nonsense_step(layout: KVLayout, lengths: list[int], params: SamplingParams) -> StepPlan:
    """New prompts of these lengths; all their positions share block 0."""
    counts = np.array(lengths, dtype=np.int32)
    blocks = np.zeros((len(counts), layout.blocks_for(max(lengths))), dtype=np.int32)
    return StepPlan(
        token_ids=np.zeros(counts.sum(), dtype=np.int32),
        starts=np.zeros(len(counts), dtype=np.int32),
        counts=counts,
        tables=(GroupTables(blocks),) * len(layout.groups),
        samples=[SampleRow(params, seed=i, position=0) for i in range(len(counts))],
        sample_rows=np.cumsum(counts, dtype=np.int32) - 1,
    )
