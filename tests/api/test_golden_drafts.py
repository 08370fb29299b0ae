"""With drafts, right and wrong, the demo model's greedy text still equals `transformers`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from drafts import ScriptedDrafter, always_draft, speculate
from effort import effort
from golden_text import DEVICES, FEW, PARAMS, PROMPTS, check, generate, open_llm

from quire.engine import build_drafter
from quire.models.checkpoints.digest import Fingerprint
from quire.models.source import open_model

BY_LENGTH = sorted(PROMPTS, key=lambda prompt: len(prompt["ids"]))[:-1]  # but for the longest
BRIEF = [prompt for prompt in BY_LENGTH if len(prompt["ids"]) < 60]
SOME = effort(BRIEF[-3:], BY_LENGTH[-8:])
TIGHT = effort((14, 160), (40, 600))  # holds one of them, and no two
TOKENS = effort(40, 64)
DRAFTED = replace(PARAMS, max_tokens=TOKENS)


def replay(spoil):
    """Every answer is known; which tokens are spoilt differs from row to row."""
    script = {tuple(p["ids"]): [*p["ids"], *p["new_ids"]] for p in PROMPTS}

    def next_tokens(sequence, token_ids, most):
        known = script[tuple(sequence.request.prompt_ids.tolist())]
        return known[len(token_ids) : len(token_ids) + most]

    def is_spoilt(sequence, place):
        return (place + sequence.request.number) % spoil == 0

    return ScriptedDrafter(next_tokens, is_spoilt, vocab=49_152)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("settings", "most"),
    [
        pytest.param({"block_size": 8, "max_num_batched_tokens": 64}, 16, id="16, blocks of 8"),
        pytest.param({"num_blocks": TIGHT[0], "max_model_len": TIGHT[1]}, 5, id="five, preempted"),
    ],
)
def test_recorded_answers_with_some_tokens_spoilt(device, settings, most):
    with open_llm(device, **settings) as llm:
        speculation = speculate(llm.engine, replay(spoil=6), most)
        check(generate(llm, SOME, DRAFTED), SOME, DRAFTED)
        assert speculation.total.accepted > 30 / 64 * TOKENS * len(SOME)
        assert "num_blocks" not in settings or llm.stats()["preemptions"] > 0


@pytest.mark.parametrize("device", DEVICES)
def test_n_grams(device):
    with open_llm(device, speculative="ngram") as llm:
        always_draft(llm.engine)
        check(generate(llm, SOME, DRAFTED), SOME, DRAFTED)
        assert llm.stats()["speculation"]["accepted"] > 5


class FirstLayers:
    """A model with the demo model's words, and its first layers alone."""

    def __init__(self, count):
        self._whole = open_model("smollm2")
        windows = self._whole.config.windows[:count]
        self.config = replace(self._whole.config, num_layers=count, windows=windows)
        self.fingerprint = Fingerprint("first layers")
        self._kept = count

    def tokenizer(self):
        return self._whole.tokenizer()

    def tensors(self):
        for name, tensor in self._whole.tensors():
            layer = name.removeprefix("model.layers.").partition(".")[0]
            if not layer.isdigit() or int(layer) < self._kept:
                yield name, tensor


@pytest.mark.parametrize("device", DEVICES)
def test_a_draft_model_of_the_first_layers(device, monkeypatch):
    monkeypatch.setattr(build_drafter, "open_model", lambda *_, **__: FirstLayers(28))
    with open_llm(device, speculative="its first layers", num_speculative_tokens=3) as llm:
        always_draft(llm.engine)
        some, params = effort((BY_LENGTH[30:32], FEW), (SOME[:4], PARAMS))
        check(generate(llm, some, params), some, params)
        assert llm.stats()["speculation"]["accepted"] > 0
