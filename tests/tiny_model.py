"""A model small enough to start at once: random weights, the demo model's words."""

from __future__ import annotations

import json
from pathlib import Path

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49_152,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "torch_dtype": "float32",
}


def write_tiny_model(folder: Path, words: Path) -> Path:
    """A Hugging Face folder without weights, for `load_format="dummy"`; `words` is a GGUF file."""
    from quire.models.checkpoints.gguf import GGUFSource

    tokenizer = GGUFSource(words).tokenizer()
    assert tokenizer is not None
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    settings = {**tokenizer.special_tokens, "chat_template": tokenizer.chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


THINKING_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% elif opens is not defined or opens %}<think>
{% endif %}
{%- endif -%}"""
THINKING_TAGS = {"<repo_name>": "<think>", "<reponame>": "</think>"}  # what stands for them: 3, 4


def write_thinking_model(folder: Path, words: Path) -> Path:
    """The same with tags for thoughts, as Qwen has them: tokens, and no special ones."""
    write_tiny_model(folder, words)
    path = folder / "tokenizer.json"
    spec = json.loads(path.read_text())
    for token in spec["added_tokens"]:
        if token["content"] in THINKING_TAGS:
            token.update(content=THINKING_TAGS[token["content"]], special=False)
    vocab = spec["model"]["vocab"]
    for old, new in THINKING_TAGS.items():
        vocab[new] = vocab.pop(old)
    path.write_text(json.dumps(spec))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = THINKING_TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
