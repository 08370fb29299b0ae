"""Tensors that hold the matrices, or the biases, of all experts of a layer, seen as one for each.

…experts.down_proj.weight    [experts, outputs, inputs]     GGUF files, quantised checkpoints
…experts.down_proj           the same; or, in some families, [experts, inputs, outputs]
…experts.down_proj_bias      [experts, outputs]             or `down_proj.bias`
…experts.3.down_proj.weight  [outputs, inputs]              what layers ask for
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from quire.models.checkpoints.json_fields import MOST_EXPERTS
from quire.models.checkpoints.lazy_tensor import LazyTensor
from quire.models.checkpoints.tensor_views import Inner, Transposed

OF_ALL_EXPERTS = re.compile(r"(.*\.experts)\.([a-z]\w*?)(\.\w+|_bias)?")
DIMENSIONS = {".bias": 2}  # of others, 3


def one_by_one(
    tensors: Iterable[tuple[str, LazyTensor]], transposed: bool = False
) -> Iterator[tuple[str, LazyTensor]]:
    """All tensors, those of experts each by itself; nothing is read.

    `transposed`: tensors that have the bare names of parameters have outputs along columns.
    """
    for name, tensor in tensors:
        found = OF_ALL_EXPERTS.fullmatch(name)
        if found is None:
            yield name, tensor
            continue
        experts, matrix, written = found.groups()
        ending = ".bias" if written == "_bias" else written or ".weight"
        if len(tensor.shape) != DIMENSIONS.get(ending, 3) or tensor.shape[0] > MOST_EXPERTS:
            yield name, tensor
            continue
        for index in range(tensor.shape[0]):
            of_one: LazyTensor = Inner(tensor, index)
            if transposed and written is None:
                of_one = Transposed(of_one)
            yield f"{experts}.{index}.{matrix}{ending}", of_one
