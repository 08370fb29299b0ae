"""The same requests on Hugging Face `transformers`, for comparison in one process."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from quire.bench.engine.workloads import Workload
from quire.errors import ConfigError
from quire.models.checkpoints.dummy import DummySource
from quire.models.source import ModelSource, read_whole


class TransformersPeer:
    """A batch padded on the left, generated with its KV cache: what its users do."""

    name = "transformers"
    says = "quire is {} times as fast as transformers"

    def __init__(self, source: ModelSource, dtype: torch.dtype, device: torch.device) -> None:
        try:
            import transformers
        except ImportError:
            raise ConfigError(
                "--compare transformers needs the package; pip install transformers."
            ) from None
        self.version = transformers.__version__
        self.device = device
        self.model = _build(transformers, source, dtype, device).eval()

    def seconds(self, workload: Workload) -> float:
        """Wall time for the workload, all requests in one batch."""
        new = max(each.max_tokens or 1 for each in workload.params)
        started = time.perf_counter()
        self._generate(workload.prompts, new, workload.beam_width)
        return time.perf_counter() - started

    def step_processor_seconds(self, prompts: list[list[int]], steps: int) -> float:
        """Processor time of a decode step, from runs with and without the steps."""
        found = []
        for new in (steps + 1, 1):
            started = time.process_time()
            self._generate(prompts, new)
            found.append(time.process_time() - started)
        whole, first = found
        return (whole - first) / steps

    @torch.inference_mode()
    def _generate(self, prompts: list[list[int]], new: int, width: int = 1) -> None:
        ids, mask = self._padded(prompts)
        self.model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            num_beams=width,
            num_return_sequences=width,
        )
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def close(self) -> None:
        """Nothing is open."""

    def _padded(self, prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
        width = max(map(len, prompts))
        ids = torch.zeros((len(prompts), width), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        return ids.to(self.device), mask.to(self.device)


def _build(transformers: Any, source: ModelSource, dtype: torch.dtype, device: torch.device) -> Any:
    config = source.config
    family = getattr(transformers, config.architecture)
    settings = family.config_class(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=config.rope.theta,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=config.tie_word_embeddings,
        eos_token_id=None,
        pad_token_id=0,
        **_expert_settings(source),
    )
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):  # many gigabytes are made where they stay
            model = family(settings)
    finally:
        torch.set_default_dtype(usual)
    if not isinstance(source, DummySource):  # random weights it has already
        model.load_state_dict(read_whole(source), strict=False)
    model.tie_weights()
    return model


def _expert_settings(source: ModelSource) -> dict[str, Any]:
    """As configs name them; a family that has no such field takes no notice of it."""
    experts = source.config.experts
    if experts is None:
        return {}
    if not isinstance(source, DummySource):
        raise ConfigError(
            "--compare transformers of a mixture of experts needs random weights; add "
            "--load-format dummy."
        )
    return {
        "num_local_experts": experts.count,
        "num_experts": experts.count,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.features,
        "shared_expert_intermediate_size": experts.shared_features,
        "mlp_only_layers": [i for i, sparse in enumerate(experts.layers) if not sparse],
    }
