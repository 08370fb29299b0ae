"""Random weights of a model's shape, for benchmarks: right in size and speed, wrong in all else."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quire.models.config import ModelConfig
from quire.models.llama import CausalLM
from quire.models.registry import family

if TYPE_CHECKING:
    from quire.models.tokenizer import Tokenizer

SEED = 0


def qwen3(**shape: int | bool) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151_936,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 40_960,
        "dtype": "bfloat16",
        **shape,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": qwen3(
        num_hidden_layers=28,
        hidden_size=1024,
        intermediate_size=3072,
        num_attention_heads=16,
        tie_word_embeddings=True,
    ),
    "qwen3-8b": qwen3(
        num_hidden_layers=36,
        hidden_size=4096,
        intermediate_size=12_288,
        num_attention_heads=32,
        tie_word_embeddings=False,
    ),
}


class DummySource:
    """A model that was never trained. Its text means nothing, its steps cost what real ones do."""

    def __init__(
        self, config: ModelConfig, tokenizer: Callable[[], Tokenizer | None] = lambda: None
    ) -> None:
        self.config = config
        self.fingerprint = hashlib.sha256(f"dummy {SEED} {config}".encode()).hexdigest()
        self.tokenizer = tokenizer

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        with torch.device("meta"):
            model = family(self.config.architecture)(self.config)
        noise = Noise(torch.device("cpu"))
        for weight in model.weights():
            if weight.same_as is None:
                tensor = torch.empty(weight.shape, device="cpu")
                noise.fill(weight.name, tensor)
                yield weight.name, tensor

    def fill(self, model: CausalLM) -> None:
        """Make the weights where they are to stay: many gigabytes take a second on a GPU."""
        noise = Noise(next(model.parameters()).device)
        for name, parameter in model.named_parameters():
            noise.fill(name, parameter)


class Noise:
    """The same random numbers again and again, because a CPU is slow to draw new ones.

    Their count is a prime, so that no two rows of a matrix are alike, and each tensor starts at
    another of them, so that no two layers are.
    """

    COUNT = 1_000_003
    STRIDE = 7_919

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(SEED)
        self.numbers = torch.randn(self.COUNT, generator=generator, device=device)

    def fill(self, name: str, tensor: Tensor) -> None:
        """Norms do nothing, biases are none, products keep the size of what they multiply."""
        if "norm" in name:
            tensor.fill_(1.0)
        elif name.endswith(".bias"):
            tensor.zero_()
        else:
            self.numbers = self.numbers.roll(self.STRIDE)
            self._repeat(self.numbers * tensor.shape[-1] ** -0.5, tensor.view(-1))

    def _repeat(self, numbers: Tensor, flat: Tensor) -> None:
        filled = min(len(numbers), len(flat))
        flat[:filled] = numbers[:filled]
        while filled < len(flat):  # doubling what there is keeps the number of copies small
            count = min(filled, len(flat) - filled)
            flat[filled : filled + count] = flat[:count]
            filled += count
