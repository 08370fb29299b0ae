"""All that adapters change in a model, and the slots that hold the adapters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import torch

from quire.kernels.adapter_slots import AdapterBatch
from quire.kernels.adapters import has_cpu_kernel
from quire.layers.adapters.active import ActiveAdapters
from quire.layers.adapters.image import ALIGNMENT, AdapterImage
from quire.layers.adapters.matrix import AdaptedMatrix
from quire.layers.adapters.matrix_adapters import Copy, MatrixAdapters, copy_all
from quire.layers.adapters.up_adapters import UpAdapters
from quire.layers.adapters.vocabulary import AdaptedVocabulary
from quire.layers.embedding import Vocabulary
from quire.layers.experts import Experts
from quire.layers.linear import ColumnLinear, Linear
from quire.layers.router import Router
from quire.layers.up_projection import UpProjection
from quire.models.adapters.adapter import EMBEDDING, HEAD, Adapter
from quire.models.blocks import GatedMLP
from quire.models.causal_lm import CausalLM
from quire.models.sparse import TokenGate


class ModelAdapters:
    """Slots beside the matrices of a model, which is loaded."""

    def __init__(
        self, model: CausalLM, count: int, rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.count, self.rank, self.device = count, rank, device
        self.active = ActiveAdapters()
        self.matrices: dict[str, MatrixAdapters] = {}
        self.ups: dict[str, UpAdapters] = {}  # of latent attention; their matrices are among those
        # A head that shares the embedding's matrix is found under both names.
        found = dict(model.named_modules(remove_duplicate=False))
        self.embedding = self._of_vocabulary(found[EMBEDDING])
        self.head = self._of_vocabulary(found[HEAD])
        gated: list[GatedMLP] = []
        for path, layer in found.items():
            if isinstance(layer, UpProjection):
                self._adapt_up(path, layer)
            elif isinstance(layer, Linear) and not isinstance(layer, Vocabulary):
                sizes = layer.sizes if isinstance(layer, ColumnLinear) else None
                self._adapt_linear(path, layer, sizes or [layer.matrix.out_features])
            elif isinstance(layer, Experts):
                self._adapt_experts(path, layer)
            elif isinstance(layer, GatedMLP):
                gated.append(layer)
            elif isinstance(layer, Router | TokenGate):
                features, inputs = layer.weight.shape
                layer.adapters = self._make(path, inputs, [features])
        for mlp in gated:
            gate_up, down = mlp.gate_up.matrix, mlp.down_proj.matrix
            assert isinstance(gate_up, AdaptedMatrix) and isinstance(down, AdaptedMatrix)
            gate_up.reader = down.adapters
        widths = [matrix.table_width for matrix in self.matrices.values()]
        # What each slot of each matrix holds: one tensor, so that one copy says it.
        self._table = torch.zeros(count, sum(widths), dtype=torch.int32, device=device)
        tables = self._table.split(widths, dim=1)
        for matrix, table in zip(self.matrices.values(), tables, strict=True):
            matrix.make_slots(rank, dtype, table)
        if device.type == "cpu":
            has_cpu_kernel(dtype)  # compiled now, so that no step has to wait
        for module in model.modules():
            if isinstance(module, AdaptedMatrix) and device.type == "cuda":
                module.join()
        model.freeze()

    def _of_vocabulary(self, layer: torch.nn.Module) -> AdaptedVocabulary:
        assert isinstance(layer, Vocabulary)
        if not isinstance(layer.matrix, AdaptedVocabulary):
            layer.matrix = AdaptedVocabulary(layer.matrix, self.active)
        return layer.matrix

    def _adapt_linear(self, path: str, layer: Linear, sizes: Sequence[int]) -> None:
        matrix = layer.matrix
        layer.matrix = AdaptedMatrix(matrix, self._make(path, matrix.in_features, sizes))

    def _adapt_experts(self, path: str, layer: Experts) -> None:
        count, features = len(layer.mine), len(layer.part)
        gate_up = self._make(f"{path}.gate_up", layer.hidden_size, [features] * 2, count)
        down = self._make(f"{path}.down", features, [layer.hidden_size], count)
        layer.adapters = gate_up, down

    def _adapt_up(self, path: str, layer: UpProjection) -> None:
        heads, rank = layer.matrix.out_features // layer.width, layer.in_features
        absorbing = self._make(f"{path}.absorbing", layer.nope, [rank], heads, has_bias=False)
        values = self._make(f"{path}.values", rank, [layer.width - layer.nope], heads)
        layer.adapters = self.ups[path] = UpAdapters(absorbing, values)

    def _make(
        self,
        path: str,
        in_features: int,
        sizes: Sequence[int],
        experts: int | None = None,
        has_bias: bool = True,
    ) -> MatrixAdapters:
        made = MatrixAdapters(in_features, sizes, self.active, experts, has_bias)
        self.matrices[path] = made
        return made

    @property
    def num_bytes(self) -> int:
        """What the slots take."""
        return sum(matrix.num_bytes for matrix in self.matrices.values())

    @property
    def packed_bytes(self) -> int:
        """What is for one slot takes at most, in one piece of memory."""
        tensors = 1 + 3 * len(self.matrices)
        return self._table[0].nbytes + self.num_bytes // self.count + tensors * ALIGNMENT

    def image(self, adapter: Adapter) -> AdapterImage:
        """An adapter as a slot will hold it."""
        layers = dict(adapter.layers)
        (of_head,) = layers.pop(HEAD, (None,))
        replaced = adapter.replaced
        for path in layers.keys() & self.ups.keys():
            [whole] = layers.pop(path)
            assert whole is not None
            absorbing, values = self.ups[path].split(whole)
            layers |= {f"{path}.absorbing": (absorbing,), f"{path}.values": (values,)}
        matrices = {path: self.matrices[path].image(outputs) for path, outputs in layers.items()}
        rows = [matrix.table_row(matrices.get(path)) for path, matrix in self.matrices.items()]
        return AdapterImage(
            torch.tensor([*chain(*rows)], dtype=torch.int32),
            matrices,
            self.embedding.image_of_rows(adapter.embedding, replaced.get(EMBEDDING)),
            self.head.image_of_head(of_head, replaced.get(HEAD)),
        )

    def store(self, slot: int, image: AdapterImage) -> None:
        """Put an adapter, whose matrices are on the device, into a slot in place of another."""
        self._table[slot].copy_(image.table)
        copies: list[Copy] = []
        for path, matrix in self.matrices.items():
            copies += matrix.store(slot, image.matrices.get(path))
        copy_all(copies)
        self.embedding.of_rows.store(slot, image.embedding, self.device)
        self.head.of_head.store(slot, image.head, self.device)

    @contextmanager
    def over(self, batch: AdapterBatch | None) -> Iterator[None]:
        """Around a pass whose rows have these adapters."""
        self.active.batch = batch
        try:
            yield
        finally:
            self.active.batch = None
