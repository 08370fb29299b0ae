"""What a process really holds of a GGUF file, which the CPU multiplies as it is stored."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import nn

from quire.kernels.linear import pack
from quire.layers.matrix import DenseMatrix
from quire.models.causal_lm import CausalLM
from quire.runner.memory import cpu_budget

POOL_BLOCKS = 64

# Kernels are there before: it is the model that is weighed, not the compiler.
MEASURE = """
import sys
import torch
from quire import LLM, SamplingParams
from quire.host_memory import own_memory
from quire.kernels.gguf_product import kernels
from quire.kernels.numba import NumbaBackend

NumbaBackend().compile(torch.float32)
for kind in ("Q4_1", "Q8_0"):
    kernels.compile(kind)
before = own_memory()
llm = LLM(sys.argv[1], device="cpu", dtype=sys.argv[2], num_blocks=int(sys.argv[3]), use_tqdm=False)
llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
print(own_memory() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what a process holds")
def test_weights_are_held_once_and_as_they_are_stored(smollm2_path: Path) -> None:
    """A second copy, or numbers of 16 bits, would be twice the bound and more."""
    held = _held(smollm2_path, "auto")
    weights = smollm2_path.stat().st_size
    pool = POOL_BLOCKS * 16 * 30 * 2 * 3 * 64 * 4  # layers, K and V, heads, their width, float32
    assert weights < held < 1.5 * weights + pool


def test_packed_copies_are_in_the_memory_table() -> None:
    """oneDNN packs float32 on ARM, bfloat16 elsewhere; where there is none, nothing is packed."""
    model = nn.Sequential(*(DenseMatrix(64, 32) for _ in range(2)))
    for matrix in model:
        matrix.make_room(torch.float32, torch.device("cpu"))
        matrix.pack()
    budget = cpu_budget(cast("CausalLM", model))
    copies = 0 if pack(torch.zeros(64, 32)) is None else 2
    assert budget.packed == copies * 64 * 32 * 4
    assert ("packed copies" in str(budget)) == (copies > 0)


def _held(model: Path, dtype: str) -> int:
    command = [sys.executable, "-c", MEASURE, str(model), dtype, str(POOL_BLOCKS)]
    found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    return int(found.stdout.split()[-1])
