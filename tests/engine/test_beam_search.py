"""The rule of beam search against `transformers`, on a model without arithmetic."""

from __future__ import annotations

import fake_model
import numpy as np
import pytest
import torch
from fake_model import VOCAB, make_engine, run
from plain_beams import plain_beams
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers_beams import beams_of_transformers, check_beams

from quire import BeamSearchParams


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

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **_):
        return {"input_ids": input_ids}


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("power", [-1.0, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("ending", [True, False, "never"])
def test_the_rule_is_that_of_transformers(width, power, ending):
    model = FakeLM()
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
        expected = beams_of_transformers(model, prompt, params, use_cache=False)
        plain = plain_beams(prompt, params, fake_model.logprobs_behind)
        assert [tokens for tokens, _ in plain] == [tokens for tokens, _ in expected]
        engine = make_engine(num_blocks=40)
        engine.add_request("beams", prompt, params)
        output = run(engine)["beams"]
        check_beams(output, expected, power)
        stops = {0, *params.stop_token_ids}
        for beam in output.outputs:
            assert beam.finish_reason == ("stop" if beam.token_ids[-1] in stops else "length")
