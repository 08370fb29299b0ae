"""The parsers by name, for settings, which must not import them."""

AUTO, OFF, HARMONY = "auto", "off", "harmony"

# vLLM's names, and which of ours does the same: where a thought begins is seen in the prompt.
ALIASES = {
    "deepseek_v3": "think",
    "glm45": "think",
    "holo2": "think",
    "kimi_k2": "think",
    "minimax_m2": "deepseek_r1",
    "nemotron_v3": "think",
    "olmo3": "think",
    "openai_gptoss": HARMONY,
    "qwen3": "think",
    "step3": "deepseek_r1",
}
TAGGED_NAMES = ("think", "deepseek_r1", "mistral", "seed_oss")
PARSER_NAMES = (*TAGGED_NAMES, HARMONY, *ALIASES)
