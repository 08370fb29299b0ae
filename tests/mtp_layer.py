"""A tiny DeepSeek V3 with an MTP layer, and what that layer guesses, said plainly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from expert_checkpoints import one_by_one
from families import Oracle
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

LAYER = 3  # behind the last of three


class MTPOracle(Oracle):
    """`transformers` leaves the layer out; its decoder layer, norms and rotations are theirs."""

    def __init__(self, folder: Path, **more: Any) -> None:
        from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

        super().__init__("deepseek-v3", folder, **more)
        config, norm = self.model.config, theirs.DeepseekV3RMSNorm
        size, vocab = config.hidden_size, config.vocab_size
        torch.manual_seed(1)
        self.decoder = theirs.DeepseekV3DecoderLayer(config, LAYER).eval()
        self.enorm, self.hnorm, self.norm = norm(size), norm(size), norm(size)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.head = self.model.lm_head  # of which checkpoints have a copy
        self.modules = {
            "": self.decoder,
            "enorm.": self.enorm,
            "hnorm.": self.hnorm,
            "eh_proj.": self.eh_proj,
            "shared_head.norm.": self.norm,
        }
        for module in self.modules.values():
            for parameter in module.parameters():
                parameter.data = torch.randn_like(parameter).mul_(0.25).add_(parameter.dim() == 1)
        for name, buffer in self.decoder.named_buffers():
            assert name.endswith("correction_bias")
            buffer.normal_()
        assert vocab == len(self.model.lm_head.weight)

    def save(self) -> None:
        """Add the layer to the model's checkpoint, under the names that published ones have."""
        own = {
            f"model.layers.{LAYER}.{prefix}{name}": tensor
            for prefix, module in self.modules.items()
            for name, tensor in module.state_dict().items()
        }
        own[f"model.layers.{LAYER}.embed_tokens.weight"] = self.model.model.embed_tokens.weight
        own[f"model.layers.{LAYER}.shared_head.head.weight"] = self.model.lm_head.weight
        file = self.folder / "model.safetensors"
        own = {name: tensor.detach().clone() for name, tensor in one_by_one(own)}
        save_file({**load_file(file), **own}, file, {"format": "pt"})
        config = self.folder / "config.json"
        raw = json.loads(config.read_text())
        config.write_text(json.dumps({**raw, "num_nextn_predict_layers": 1}))

    @torch.no_grad()
    def guesses(self, token_ids: list[int], count: int) -> list[int]:
        """The tokens behind a text; each further one behind the one before."""
        ids = torch.tensor(token_ids)
        hidden = self.model.model(ids[None]).last_hidden_state[0]
        inputs = self._join(ids[1:], hidden[:-1])
        found: list[int] = []
        for _ in range(count):
            state = self._run(inputs)[-1:]
            found.append(int(self.head(state).argmax()))
            inputs = torch.cat((inputs, self._join(torch.tensor(found[-1:]), state)))
        return found

    def _join(self, next_ids: Tensor, hidden: Tensor) -> Tensor:
        embedded = self.model.model.embed_tokens(next_ids)
        joined: Tensor = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), 1))
        return joined

    def _run(self, inputs: Tensor) -> Tensor:
        count = len(inputs)
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        out = self.decoder(
            inputs[None],
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=self.model.model.rotary_emb(inputs[None], positions),
        )
        normed: Tensor = self.norm(out if isinstance(out, Tensor) else out[0])[0]
        return normed


def make_bigrams(oracle: MTPOracle) -> None:
    """A model whose next token depends on the last one alone, and an MTP layer that copies it.

    Layers add nothing, and norms do nothing more than normalise; the layer hands the token on.
    """
    for module in (oracle.model.model, *oracle.modules.values()):
        for name, parameter in module.named_parameters():
            if "norm" in name or parameter.dim() == 1:
                parameter.data.fill_(1)
            elif "o_proj" in name or "down_proj" in name:
                parameter.data.zero_()
    size = oracle.model.config.hidden_size
    oracle.eh_proj.weight.data = torch.cat((torch.eye(size), torch.zeros(size, size)), 1)
    oracle.model.save_pretrained(oracle.folder)
