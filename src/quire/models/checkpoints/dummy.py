"""Random weights of a model's shape, for benchmarks: right in size and speed, wrong in all else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quire.layers.weights import TensorPlace, Weight, ranges
from quire.models.causal_lm import CheckpointModel
from quire.models.checkpoints.digest import Fingerprint
from quire.models.config import ModelConfig
from quire.models.registry import family

if TYPE_CHECKING:
    from quire.models.text.tokenizer import Tokenizer

SEED = 0


def qwen3(**shape: Any) -> dict[str, Any]:
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


def gpt_oss(**shape: Any) -> dict[str, Any]:
    """With experts in MXFP4, as published."""
    return {
        "architectures": ["GptOssForCausalLM"],
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "mxfp4"},
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
    "qwen3-30b-a3b": qwen3(
        architectures=["Qwen3MoeForCausalLM"],
        num_hidden_layers=48,
        hidden_size=2048,
        intermediate_size=6144,
        num_attention_heads=32,
        num_key_value_heads=4,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    ),
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "vocab_size": 102_400,
        "num_hidden_layers": 27,
        "hidden_size": 2048,
        "intermediate_size": 10_944,
        "num_attention_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
        "max_position_embeddings": 163_840,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"],
        "vocab_size": 32_000,
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
    "small-experts": {  # Mixtral's layers, for a CPU
        "architectures": ["MixtralForCausalLM"],
        "vocab_size": 10_240,  # benchmarks' prompts have tokens of up to 10,000
        "num_hidden_layers": 8,
        "hidden_size": 512,
        "intermediate_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "dtype": "float32",
    },
    "gpt-oss-20b": gpt_oss(num_hidden_layers=24, num_local_experts=32),
    "gpt-oss-120b": gpt_oss(num_hidden_layers=36, num_local_experts=128),
}


class DummySource:
    """A model that was never trained. Its text means nothing, its steps cost what real ones do."""

    def __init__(
        self, config: ModelConfig, tokenizer: Callable[[], Tokenizer | None] = lambda: None
    ) -> None:
        self.config = config
        self.fingerprint = Fingerprint(f"dummy {SEED} {config}")
        self.tokenizer = tokenizer

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        with torch.device("meta"):
            model = family(self.config.architecture)(self.config)
        noise = Noise(torch.device("cpu"))
        for weight in model.weights():
            if weight.same_as is None:
                numbers = torch.empty(weight.shape, device="cpu")
                noise.fill(replace(weight, place=TensorPlace(numbers)))
                yield weight.name, numbers.sub_(weight.offset)


def fill_at_random(model: CheckpointModel) -> None:
    """Make the weights where they are to stay: many gigabytes take a second on a GPU."""
    noise = Noise(next(model.parameters()).device)
    for weight in model.weights():
        if weight.same_as is None:
            noise.fill(weight)


class Noise:
    """The same random numbers again and again, because a CPU is slow to draw new ones.

    A matrix has them row by row, end to end. Their count is a prime, so that no two rows are alike,
    and each matrix starts at another of them, so that no two layers are. Where a number stands says
    which it is, so that a rank makes its part and no more.
    """

    COUNT = 1_000_003
    STRIDE = 7_919
    ROWS = 4096  # made at once

    def __init__(self, device: torch.device) -> None:
        self.numbers = drawn(self.COUNT).to(device)
        self.first = 0
        self._made: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def fill(self, weight: Weight) -> None:
        """Norms do nothing, biases and sinks are zeros, products keep the size of what they
        multiply."""
        if "norm" in weight.name.lower() and not weight.name.endswith(".bias"):
            weight.place.store(self.numbers.new_ones(1))
        elif len(weight.shape) == 1:
            weight.place.store(self.numbers.new_zeros(1))
        else:
            self.first += self.STRIDE
            self._fill_matrix(weight)

    def _fill_matrix(self, weight: Weight) -> None:
        width = weight.shape[1]
        rows, columns = ranges(weight.shape, weight.part)
        windows = self._windows(width, len(columns), weight.place.dtype)
        starts = self._rows(rows, weight.order) * width + columns.start + self.first
        starts %= self.COUNT
        for i in range(0, len(rows), self.ROWS):
            chunk = starts[i : i + self.ROWS]
            weight.place.rows(i, i + len(chunk)).store(torch.index_select(windows, 0, chunk))

    def _windows(self, width: int, count: int, dtype: torch.dtype) -> Tensor:
        """Of matrices so wide, as many columns: the window at `i` is the row that begins there.

        A model has matrices of two or three widths, so what is made for one serves all like it.
        """
        key = width, count, dtype
        if key not in self._made:
            numbers = (self.numbers * width**-0.5).to(dtype)
            self._made[key] = numbers.repeat(count // self.COUNT + 2).unfold(0, count, 1)
        return self._made[key]

    def _rows(self, rows: range, order: tuple[int, ...]) -> Tensor:
        """Which of the checkpoint's rows lies where."""
        numbers = torch.arange(rows.start, rows.stop, device=self.numbers.device)
        if order:
            numbers = numbers.unflatten(0, (-1, len(order)))[:, list(order)].flatten()
        return numbers


@cache
def drawn(count: int) -> Tensor:
    """By the CPU: a GPU would draw others, and be another model of the same name."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randn(count, generator=generator, device="cpu")
