"""Runs a model that pools over the texts of a step; nothing is kept behind them.

A decoder writes its KV to pages, as it does where it generates. Here every text is computed whole,
so a layer's KV is of no use once the layer is done: all layers share the pages of one.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.errors import ModelError
from quire.kernels.backend import Backend, backend_for
from quire.kernels.batch import AttentionBatch
from quire.kv.layout import KVLayout
from quire.kv.pool import PagedKVCache
from quire.kv_groups import KVGroup
from quire.layers.attention import Step
from quire.layers.tp import SINGLE
from quire.models.causal_lm import CausalLM
from quire.models.encoders.encoder import Encoder
from quire.models.pooling.model import PoolingModel
from quire.runner.device import free_cached_memory
from quire.runner.pooling_batch import TextTensors, text_tensors
from quire.runner.text_batch import TextBatch
from quire.runner.transfer import BY_COPY_ENGINES, Fetch

BLOCK = 16  # tokens of a page


class PoolingRunner:
    def __init__(self, model: PoolingModel, device: torch.device, dtype: torch.dtype) -> None:
        self.model = model
        self.device = device
        body = model.body
        self._shared_pages = (
            SharedPages(body, device, dtype) if isinstance(body, CausalLM) else None
        )

    @torch.inference_mode()
    def launch(self, batch: TextBatch) -> Fetch:
        """Begin to compute; the result is `[texts, size]` in float32."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # each thread has its own, and any may take a step
        tensors = text_tensors(batch, self.device)
        return BY_COPY_ENGINES.fetch(self.model.pooled(self._hidden(tensors), tensors.texts))

    def _hidden(self, tensors: TextTensors) -> Tensor:
        body = self.model.body
        if isinstance(body, Encoder):
            return body.forward(tensors.token_ids, tensors.positions, tensors.types, tensors.texts)
        assert self._shared_pages is not None
        return body.forward(tensors.token_ids, tensors.positions, self._shared_pages.step(tensors))

    def free_memory(self) -> None:
        """Give back what the device's allocator keeps for later."""
        free_cached_memory()


class SharedPages:
    """Room for the KV of one layer, which all layers of a pass use in turn."""

    def __init__(self, model: CausalLM, device: torch.device, dtype: torch.dtype) -> None:
        streams = {group.streams for group in model.kv_groups(SINGLE)}
        if len(streams) > 1:
            raise ModelError(
                "The layers of this model store KV of several shapes, which Quire does not pool "
                "with: choose another model."
            )
        self._layout = KVLayout((KVGroup((0,), streams.pop()),), BLOCK, dtype)
        self._num_layers = model.config.num_layers
        self._device = device
        self._backend: Backend = backend_for(device)
        self._backend.prepare(dtype)
        self._pool: PagedKVCache | None = None

    def step(self, tensors: TextTensors) -> Step:
        """Each text has pages of its own, one behind the other."""
        lengths = np.array(tensors.texts.lengths)
        blocks = -(-lengths // BLOCK)
        firsts = np.cumsum(blocks) - blocks
        pages = self._pages(int(blocks.sum()))
        tables = firsts[:, None] + np.arange(blocks.max())
        tables[tables >= (firsts + blocks)[:, None]] = 0
        starts = np.cumsum(lengths) - lengths
        slots = np.arange(lengths.sum()) + np.repeat(firsts * BLOCK - starts, lengths)
        on_device = BY_COPY_ENGINES.all_to_device(
            [slots, tables.astype(np.int32), lengths.astype(np.int32)], self._device
        )
        batch = AttentionBatch(
            slot_mapping=on_device[0],
            block_tables=on_device[1],
            query_starts=tensors.texts.starts,
            context_lens=on_device[2],
            query_lens=tensors.texts.lengths,
            contexts=tensors.texts.lengths,
        )
        return Step((batch,), pages.layers * self._num_layers, self._backend)

    def _pages(self, blocks: int) -> PagedKVCache:
        """Enough of them; those of the largest step so far are kept."""
        if self._pool is None or self._pool.images.shape[0] < blocks:
            self._pool = None  # its memory may be needed for the larger one
            self._pool = PagedKVCache(self._layout, blocks, self._device, self._backend)
        return self._pool
