"""Puts the drafter of an engine together: n-grams, the model's MTP layer, or another model."""

from __future__ import annotations

import torch

from quire.config import EngineConfig, StepLimits
from quire.engine.build_store import has_tiers
from quire.engine.draws.speculation import NO_SPECULATION, NoSpeculation, Speculation
from quire.errors import ConfigError, ModelError
from quire.host_memory import free_host_memory
from quire.kernels.backend import backend_for
from quire.kv.layout import KVLayout
from quire.kv.pool import PagedKVCache
from quire.models.pool_groups import pool_groups
from quire.models.source import NUMBERS, ModelSource, build_model, open_model
from quire.ranks.rank_model import MTP
from quire.runner.device import keeps_types
from quire.runner.draft_layer import DraftLayer
from quire.runner.graphs import StepGraphs
from quire.runner.runner import ModelRunner
from quire.runner.transfer import HostLink
from quire.speculative.draft_model import DraftModel
from quire.speculative.drafter import Drafter
from quire.speculative.mtp import MTPDrafter
from quire.speculative.ngram import NgramDrafter

NGRAM = "ngram"
# At most, where nothing is said. DeepSeek's MTP layer was trained for one.
NGRAM_DRAFTS, MTP_DRAFTS, MODEL_DRAFTS = 8, 1, 4
MOST_SEQUENCES = 64  # above, a GPU has enough to do without guesses
POOL_TOKENS = 65_536  # pages of the draft model: for so many tokens …
POOL_SHARE = 0.1  # … or in so much of the free memory
PROBE = "The quick brown fox: déjà vu, 12,345 times!\n\tдля 日本"


def build_speculation(
    config: EngineConfig,
    target: ModelSource,
    dtype: torch.dtype,
    device: torch.device,
    limits: StepLimits,
    progress: bool,
) -> Speculation | NoSpeculation:
    """The pool is sized later: what a draft model takes is gone then."""
    if config.speculative is None:
        if config.num_speculative_tokens is not None:
            raise ConfigError(
                "num_speculative_tokens needs a drafter; set speculative to ngram, mtp or a model."
            )
        return NO_SPECULATION
    if config.speculative == MTP:
        return NO_SPECULATION  # until there is a pool, which the layer's KV lies in
    if config.speculative == NGRAM:
        drafter: Drafter = NgramDrafter()
        return Speculation(drafter, config.num_speculative_tokens or NGRAM_DRAFTS)
    try:
        kept = keeps_types(config.dtype, device)
        source = open_model(
            config.speculative,
            config.load_format,
            progress,
            # Little would be saved by quantising it; numbers alone are asked for of every model.
            quantization=NUMBERS if config.quantization == NUMBERS else None,
            keeps_types=kept,
            on_gpu=device.type == "cuda",
        )
    except ModelError as error:
        raise ConfigError(
            f"speculative={config.speculative} is neither ngram nor mtp: {error}"
        ) from error
    _check_vocabulary(config.speculative, source, target)
    model = build_model(source, dtype, device, progress)
    if device.type == "cpu":
        model.pack()
    shape = source.config
    # Its tables are the drafter's own, which keeps all tokens of a sequence.
    layout = KVLayout(pool_groups(shape, window_groups=False), config.block_size, dtype)
    pool = PagedKVCache(layout, _num_blocks(layout, device), device, backend_for(device))
    room = pool.num_blocks * layout.block_size
    max_len = min(shape.max_position_embeddings, room)
    graphs, link = None, HostLink(by_kernels=has_tiers(config))
    if device.type == "cuda" and not config.enforce_eager:
        sequences = min(limits.sequences, MOST_SEQUENCES)
        graphs = StepGraphs(model, pool, sequences, limits.tokens, max_len)
        graphs.record()
    drafter = DraftModel(ModelRunner(model, pool, graphs, link=link), limits.tokens, max_len)
    return Speculation(drafter, config.num_speculative_tokens or MODEL_DRAFTS)


def mtp_speculation(config: EngineConfig, layer: DraftLayer) -> Speculation:
    return Speculation(MTPDrafter(layer), config.num_speculative_tokens or MTP_DRAFTS)


def _num_blocks(layout: KVLayout, device: torch.device) -> int:
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_memory()
    most = -(-POOL_TOKENS // layout.block_size)
    return max(1, min(most, int(free * POOL_SHARE) // layout.block_bytes))


def _check_vocabulary(name: str, source: ModelSource, target: ModelSource) -> None:
    ours, theirs = source.config.vocab_size, target.config.vocab_size
    if ours != theirs:
        raise ConfigError(
            f"speculative={name} has a vocabulary of {ours:,} tokens and the model one of "
            f"{theirs:,}; use a model of the same family."
        )
    guesser, answerer = source.tokenizer(), target.tokenizer()
    if guesser is None or answerer is None:
        return
    if guesser.encode(PROBE) != answerer.encode(PROBE):
        raise ConfigError(
            f"speculative={name} cuts text into other tokens than the model; "
            "use a model of the same family."
        )
