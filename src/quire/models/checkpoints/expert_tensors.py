"""Tensors that hold the matrices of all experts of a layer, seen as one for each.

…experts.down_proj.weight  [experts, outputs, inputs]       GGUF files, some checkpoints
…experts.gate_up_proj      [experts, 2 * outputs, inputs]   the gate's rows, then those of up
…experts.3.down_proj.weight  [outputs, inputs]              what layers ask for
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from quire.models.checkpoints.json_fields import MOST_EXPERTS
from quire.models.checkpoints.lazy_tensor import LazyTensor
from quire.models.checkpoints.tensor_views import Inner, RowSlice

OF_ALL_EXPERTS = re.compile(r"(.*\.experts)\.([a-z]\w*)(\.\w+)?")
GATE_AND_UP, GATE, UP = "gate_up_proj", "gate_proj", "up_proj"


def one_by_one(
    tensors: Iterable[tuple[str, LazyTensor]],
) -> Iterator[tuple[str, LazyTensor]]:
    """All tensors, those of experts each by itself; nothing is read."""
    for name, tensor in tensors:
        found = OF_ALL_EXPERTS.fullmatch(name)
        if found is None or len(tensor.shape) != 3 or tensor.shape[0] > MOST_EXPERTS:
            yield name, tensor
            continue
        experts, matrix, ending = found.groups(".weight")
        for index in range(tensor.shape[0]):
            for part, rows in matrices(matrix, Inner(tensor, index)):
                yield f"{experts}.{index}.{part}{ending}", rows


def matrices(name: str, stored: LazyTensor) -> Iterator[tuple[str, LazyTensor]]:
    if name != GATE_AND_UP:
        yield name, stored
        return
    rows = stored.shape[0]
    yield GATE, RowSlice(stored, 0, rows // 2)
    yield UP, RowSlice(stored, rows // 2, rows - rows // 2)
