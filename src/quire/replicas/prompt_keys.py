"""The keys of a prompt's blocks, as the engines' events have them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quire.kv.events import SHORT_KEY
from quire.kv.keys import Namespace, adapter_namespace, chain_keys


def prompt_keys(
    namespace: Namespace,
    token_ids: Sequence[int] | npt.NDArray[np.int32],
    salt: str = "",
    adapter: str = "",
) -> list[bytes]:
    """The keys of its full blocks, but for one that ends it: the last token is always computed.

    `adapter` is the fingerprint of that which they are computed with.
    """
    packed = np.asarray(token_ids, dtype="<i4").tobytes()
    width = 4 * namespace.block_size
    tokens = [packed[at : at + width] for at in range(0, len(packed) - width, width)]
    root = namespace.root_of(adapter_namespace(salt, adapter))
    return [key[:SHORT_KEY] for key in chain_keys(root, tokens)]
