"""Steps of a CPU recorded once and replayed: hundreds of launches become one.

Of a step in which each sequence has one new token, the layers are recorded, for each number of
sequences by itself, when a second step has it. Embeddings and rotations are read as ever and put
where the recording expects them. A model whose layers need more than kernels of our own is run as
ever, too.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from quire.kernels.batch import AttentionBatch
from quire.kernels.plain import Rotation
from quire.kv.pool import PagedKVCache
from quire.layers.attention import Step
from quire.models.causal_lm import CausalLM
from quire.models.decoder import Decoder, DecoderForCausalLM
from quire.runner.inputs import StepInputs

if TYPE_CHECKING:  # where there is no Numba, nothing is recorded
    from quire.kernels.numba.backend import NumbaBackend
    from quire.kernels.numba.recording import Recording

log = logging.getLogger("quire")

FIRST_ROOM = 1024  # tokens of a sequence; twice as many when that was not enough
MOST_SEQUENCES = 32  # with more, kernels take far longer than the Python around them
MOST_RECORDED = 8  # numbers of sequences: each has memory of its own


def recorded_steps(model: CausalLM, cache: PagedKVCache) -> RecordedSteps | None:
    """Those of a model alone on a CPU, whose backend can record."""
    if not isinstance(model, DecoderForCausalLM) or model.tp.size > 1:
        return None
    if cache.backend.name != "numba":
        return None
    return RecordedSteps(model.model, cache, cast("NumbaBackend", cache.backend))


class RecordedSteps:
    """A decoder's layers over decodes, for every number of sequences that there has been."""

    def __init__(self, decoder: Decoder, cache: PagedKVCache, backend: NumbaBackend) -> None:
        self.decoder, self.cache, self.backend = decoder, cache, backend
        self.recorded: dict[tuple[int, int], _Recorded] = {}  # by sequences and threads
        self._can_record = True
        self._last = 0, 0  # sequences and threads

    def with_no_recordings(self) -> RecordedSteps:
        """For steps of another kind of the same decoder, whose layers launch other kernels."""
        return RecordedSteps(self.decoder, self.cache, self.backend)

    def takes(self, inputs: StepInputs) -> bool:
        return self._can_record and all(
            len(batch.query_lens) <= MOST_SEQUENCES
            and max(batch.query_lens, default=0) == min(batch.query_lens, default=0) == 1
            for batch in inputs.batches
        )

    def run(self, inputs: StepInputs) -> Tensor:
        """The hidden states behind a step that it takes, valid until the next."""
        step = Step(inputs.batches, self.cache.layers, self.backend, inputs.num_positions)
        stream, rotations = self.decoder.enter(inputs.token_ids, inputs.positions, step)
        key = len(stream), torch.get_num_threads()
        is_again, self._last = key == self._last, key
        recorded = self.recorded.pop(key, None)
        if recorded is not None and recorded.load(stream, rotations, inputs.batches):
            recorded.recording.replay()
        elif is_again:
            recorded = self._record(stream, rotations, step)
        else:
            recorded = None
        if recorded is None:
            return self.decoder.run_layers(stream, rotations, step)
        self.recorded[key] = recorded  # the last one used is the last one forgotten
        if len(self.recorded) > MOST_RECORDED:
            del self.recorded[next(iter(self.recorded))]
        return recorded.hidden

    def _record(self, stream: Tensor, rotations: list[Rotation], step: Step) -> _Recorded | None:
        """Run the step, record it with another input, and hold a replay to what was computed
        first; None: the layers cannot be recorded, and what they have written is to be written
        again."""
        longest = FIRST_ROOM
        while longest < step.max_context_len:
            longest *= 2
        batches = tuple(
            _with_room(batch, longest, self.cache.layout.block_size) for batch in step.batches
        )
        own = [Rotation(*(part.clone() for part in rotation)) for rotation in rotations]
        own_step = Step(batches, step.pages, self.backend, longest)
        for batch in batches:
            self.backend.leave_room(batch, longest)
        recorded = _Recorded(
            stream.clone(), own, batches, self.backend, self.backend.recording(), torch.empty(0)
        )
        wanted = self.decoder.run_layers(recorded.stream, own, own_step)  # and plan what they need
        recorded.stream.copy_(stream.flip(1))
        with recorded.recording.record():
            recorded.hidden = self.decoder.run_layers(recorded.stream, own, own_step)
        if recorded.recording.is_whole:
            recorded.stream.copy_(stream)
            recorded.recording.replay()
            if torch.equal(recorded.hidden, wanted):
                return recorded
            log.warning("Steps on this CPU are not recorded, as a replay computed other numbers.")
        self._can_record = False
        self.recorded.clear()
        return None


@dataclass
class _Recorded:
    stream: Tensor
    rotations: list[Rotation]
    batches: tuple[AttentionBatch, ...]
    backend: NumbaBackend
    recording: Recording
    hidden: Tensor

    def load(
        self, stream: Tensor, rotations: list[Rotation], batches: tuple[AttentionBatch, ...]
    ) -> bool:
        """Put a step where the recording reads it; whether there was room for it."""
        self.stream.copy_(stream)
        for own, rotation in zip(self.rotations, rotations, strict=True):
            own.cos.copy_(rotation.cos)
            own.sin.copy_(rotation.sin)
        for own_batch, batch in zip(self.batches, batches, strict=True):
            width = batch.block_tables.shape[1]
            if width > own_batch.block_tables.shape[1] or not self.backend.renew(own_batch, batch):
                return False
            own_batch.block_tables[:, :width] = batch.block_tables
            own_batch.slot_mapping.copy_(batch.slot_mapping)
        return True


def _with_room(batch: AttentionBatch, longest: int, block_size: int) -> AttentionBatch:
    """The same batch in memory of its own, with tables for sequences of this length."""
    sequences, width = batch.block_tables.shape
    tables = torch.zeros((sequences, max(width, -(-longest // block_size))), dtype=torch.int32)
    tables[:, :width] = batch.block_tables
    return replace(batch, slot_mapping=batch.slot_mapping.clone(), block_tables=tables)
