"""Make smollm2.json: what `transformers` computes for the demo model, in float32.

    python tests/golden/make_smollm2.py [--folder DIR]

The oracle is a Hugging Face folder made here from the GGUF file, by a way that shares no code with
Quire: the `gguf` package's reader, its dequantisation, the q and k rows put back in order, and a
tokenizer with the pre-tokenizer of SmolLM2's own tokenizer.json (`transformers`' GGUF tokenizer
drops its split of digits). It is then checked that Quire's reader agrees with it. Takes minutes.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf.quants import dequantize
from prompts import CHAT_PROMPTS, CONVERSATIONS, PROSE, text_prompts
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from quire.models.checkpoints.demo import MODEL_SHA256, fetch
from quire.models.checkpoints.gguf import GGUFSource
from quire.models.source import read_whole

GOLDEN = Path(__file__).parent / "smollm2.json"
NEW_TOKENS = 64
PROSE_TOKENS = 1024
CLOSE = 1e-3  # below this margin the runner-up is recorded too

HEADS, KV_HEADS = 9, 3
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def in_order(rows: np.ndarray, heads: int) -> np.ndarray:
    """From (a0 b0 a1 b1 ...) to (a0 a1 ... b0 b1 ...) within each head."""
    by_head = rows.reshape(heads, -1, rows.shape[-1])
    return np.concatenate([by_head[:, 0::2], by_head[:, 1::2]], axis=1).reshape(rows.shape)


def weights(reader: gguf.GGUFReader, ordered: bool = True) -> dict[str, torch.Tensor]:
    found = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")
        if part[0] == "blk":
            if ordered and part[2] in ("attn_q", "attn_k"):
                values = in_order(values, HEADS if part[2] == "attn_q" else KV_HEADS)
            name = f"model.layers.{part[1]}.{NAMES[part[2]]}.weight"
        else:
            name = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[part[0]]
            name += ".weight"
        found[name] = torch.from_numpy(np.array(values, dtype=np.float32))
    return found


def tokenizer_json(reader: gguf.GGUFReader) -> str:
    def field(name: str) -> Any:
        return reader.fields[f"tokenizer.ggml.{name}"].contents()

    tokens, kinds = field("tokens"), field("token_type")
    merges = [tuple(merge.split(" ")) for merge in field("merges")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [
        AddedToken(t, special=True, normalized=False)
        for t, k in zip(tokens, kinds, strict=True)
        if k == 3
    ]
    tokenizer.add_special_tokens(special)
    return str(tokenizer.to_str())


def make_folder(model: Path, folder: Path) -> None:
    """The Hugging Face folder of the demo model."""
    reader = gguf.GGUFReader(model)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights(reader), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": reader.fields["tokenizer.chat_template"].contents(),
    }
    generation = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    for name, content in {
        "config.json": CONFIG,
        "generation_config.json": generation,
        "tokenizer_config.json": tokenizer_config,
    }.items():
        (folder / name).write_text(json.dumps(content, indent=2), encoding="utf-8")
    (folder / "tokenizer.json").write_text(tokenizer_json(reader), encoding="utf-8")


def check_quire(model: Path, folder: Path) -> None:
    """Quire's reading of the file and this script's must be one and the same."""
    source = GGUFSource(model)
    mine, theirs = read_whole(source), weights(gguf.GGUFReader(model))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    tokenizer = source.tokenizer()
    assert tokenizer is not None
    oracle = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in [*text_prompts().values(), PROSE, "a  1"]:
        assert tokenizer.encode(text) == oracle.encode(text).ids, text
    assert tokenizer.encode("a  1") == [81, 256, 33]


@torch.inference_mode()
def greedy(model: Any, ids: list[int]) -> dict[str, Any]:
    """Exactly NEW_TOKENS tokens of the best logit each, whatever they are, and how close it was."""
    new_ids: list[int] = []
    margins: list[float] = []
    runners_up: dict[str, int] = {}
    past, tokens = None, torch.tensor([ids])
    for step in range(NEW_TOKENS):
        out = model(tokens, past_key_values=past, use_cache=True, logits_to_keep=1)
        past = out.past_key_values
        best = torch.topk(out.logits[0, -1].double(), 2)
        margin = float(best.values[0] - best.values[1])
        new_ids.append(int(best.indices[0]))
        margins.append(round(margin, 5))
        if margin < CLOSE:
            runners_up[str(step)] = int(best.indices[1])
        tokens = best.indices[:1].view(1, 1)
    return {"new_ids": new_ids, "margins": margins, "runners_up": runners_up}


@torch.inference_mode()
def mean_loss(model: Any, ids: list[int]) -> float:
    tokens = torch.tensor([ids])
    return round(float(model(tokens, labels=tokens).loss), 5)


def make_golden(model_file: Path, folder: Path) -> dict[str, Any]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts = text_prompts()
    for name, messages in CHAT_PROMPTS.items():
        texts[name] = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
    prompts = []
    for name, text in texts.items():
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        prompts.append({"name": name, "text": text, "ids": ids, **greedy(model, ids)})
        print(f"{name}: {len(ids)} tokens, least margin {min(prompts[-1]['margins'])}", flush=True)
    chats = [
        {
            "messages": messages,
            "add_generation_prompt": ask,
            "text": tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=ask
            ),
        }
        for messages in CONVERSATIONS
        for ask in (True, False)
    ]
    prose_ids = tokenizer(PROSE)["input_ids"][:PROSE_TOKENS]
    assert len(prose_ids) == PROSE_TOKENS
    loss, continued = mean_loss(model, prose_ids), greedy(model, prose_ids)
    model.load_state_dict(weights(gguf.GGUFReader(model_file), ordered=False), strict=False)
    return {
        "made_with": {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "machine": platform.machine(),
            "model_sha256": MODEL_SHA256,
        },
        "prompts": prompts,
        "chats": chats,
        "prose": {
            "text": PROSE,
            "num_tokens": PROSE_TOKENS,
            "mean_loss": loss,
            "mean_loss_if_permuted": mean_loss(model, prose_ids),
            "name": "prose, continued",
            **continued,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="keep the Hugging Face folder here")
    args = parser.parse_args()
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        model_file = fetch()
        make_folder(model_file, folder)
        check_quire(model_file, folder)
        golden = make_golden(model_file, folder)
    text = json.dumps(golden, ensure_ascii=False, separators=(",", ":"))
    GOLDEN.write_text(text.replace('{"name":', '\n{"name":') + "\n", encoding="utf-8")
    total = sum(len(prompt["ids"]) for prompt in golden["prompts"])
    loss = golden["prose"]["mean_loss"]
    print(f"{GOLDEN}: {len(golden['prompts'])} prompts, {total} tokens, prose loss {loss}")


if __name__ == "__main__":
    main()
