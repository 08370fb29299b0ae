"""The engine's beams against `transformers`, on a model without arithmetic."""

from __future__ import annotations

import fake_model
import numpy as np
import pytest
import torch
from fake_model import VOCAB, make_engine, run
from plain_beams import plain_beams
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from quire import BeamSearchParams

WIDTHS, PENALTIES, ENDINGS = (1, 2, 4, 8), (-1.0, 0.0, 1.0, 2.0), (True, False, "never")


class FakeLM(PreTrainedModel, GenerationMixin):
    """`fake_model` as transformers sees a model."""

    config_class = PretrainedConfig
    main_input_name = "input_ids"

    def __init__(self):
        super().__init__(PretrainedConfig(vocab_size=VOCAB))
        self.anything = torch.nn.Parameter(torch.zeros(1))

    def forward(self, input_ids, attention_mask=None, **_):
        rows = np.stack([fake_model.logprobs_behind(ids) for ids in input_ids.tolist()])
        return CausalLMOutput(logits=torch.from_numpy(rows).float()[:, None])

    def prepare_inputs_for_generation(self, input_ids, **_):
        return {"input_ids": input_ids}


def search(model, input_ids, logits_processor, stopping_criteria, generation_config, **_):
    """`generate` goes another way for a single beam."""
    return model._beam_search(
        input_ids, logits_processor, stopping_criteria, generation_config, use_cache=False
    )


def beams_of_transformers(prompt, params, eos=(0,)):
    width = params.beam_width
    ids = torch.tensor([prompt])
    found = FakeLM().generate(
        ids,
        custom_generate=search,
        use_cache=False,
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=params.max_tokens,
        min_new_tokens=params.min_tokens or None,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=[*eos, *params.stop_token_ids],
        pad_token_id=0,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    sequences, places = found.sequences[:, len(prompt) :].tolist(), found.beam_indices.tolist()
    tokens = [
        [token for token, place in zip(*row, strict=True) if place >= 0]
        for row in zip(sequences, places, strict=True)
    ]
    return list(zip(tokens, found.sequences_scores.tolist(), strict=True))


def same(output, expected):
    assert [beam.token_ids for beam in output.outputs] == [tokens for tokens, _ in expected]
    for beam, (tokens, score) in zip(output.outputs, expected, strict=True):
        assert beam.score == pytest.approx(score, abs=1e-4)
        total = beam.score * len(tokens) ** output.length_penalty
        assert beam.cumulative_logprob == pytest.approx(total, abs=1e-6)


def ask(engine, prompt, params):
    engine.add_request("beams", prompt, params)
    output = run(engine)["beams"]
    output.length_penalty = params.length_penalty
    return output


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("power", PENALTIES)
@pytest.mark.parametrize("ending", ENDINGS)
def test_the_rule_is_that_of_transformers(width, power, ending):
    for salt in range(3):
        prompt = [3, 1, salt]
        params = BeamSearchParams(
            beam_width=width,
            max_tokens=9,
            length_penalty=power,
            early_stopping=ending,
            stop_token_ids=[5, 7] if salt == 1 else [],
            min_tokens=3 if salt == 2 else 0,
        )
        expected = beams_of_transformers(prompt, params)
        plain = plain_beams(prompt, params, fake_model.logprobs_behind)
        assert [tokens for tokens, _ in plain] == [tokens for tokens, _ in expected]
        output = ask(make_engine(num_blocks=40), prompt, params)
        same(output, expected)
        stops = {0, *params.stop_token_ids}
        for beam in output.outputs:
            assert beam.finish_reason == ("stop" if beam.token_ids[-1] in stops else "length")
