"""The encoders Quire knows: what their checkpoints call things, and the heads they come with."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.models.checkpoints.json_fields import Raw
from quire.models.encoders.config import EncoderConfig, read_encoder_config
from quire.models.encoders.encoder import EncoderNames

CLASSIFIER = "ForSequenceClassification"
BODIES = ("Model", "ForMaskedLM")  # behind a family's name, for a checkpoint without a head of use


@dataclass(frozen=True)
class HeadNames:
    """A layer on the first token of a text, and one number a class behind it."""

    dense: str
    activation: str
    out: str


@dataclass(frozen=True)
class EncoderFamily:
    prefix: str  # of the encoder's tensors, in a checkpoint that has a head, too
    names: EncoderNames
    head: HeadNames
    counts_from_padding: bool = False
    # config.json's own names for common fields, and what it may leave unsaid
    fields: dict[str, str] = field(default_factory=dict)
    defaults: dict[str, int] = field(default_factory=dict)

    def config(self, raw: Raw, architecture: str) -> EncoderConfig:
        named = {common: raw.get(own) for common, own in self.fields.items()}
        given = {key: value for key, value in {**raw, **named}.items() if value is not None}
        return read_encoder_config(
            {**self.defaults, **given}, architecture, self.counts_from_padding
        )


BERT_NAMES = EncoderNames(
    layers="encoder.layer",
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    attention_output="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    up="intermediate.dense",
    down="output.dense",
    output_norm="output.LayerNorm",
)
DISTILBERT_NAMES = EncoderNames(
    layers="transformer.layer",
    qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    attention_output="attention.out_lin",
    attention_norm="sa_layer_norm",
    up="ffn.lin1",
    down="ffn.lin2",
    output_norm="output_layer_norm",
)
ROBERTA = EncoderFamily(
    prefix="roberta.",
    names=BERT_NAMES,
    head=HeadNames("classifier.dense", "tanh", "classifier.out_proj"),
    counts_from_padding=True,
    defaults={"type_vocab_size": 2},
)
ENCODERS = {
    "Bert": EncoderFamily(
        prefix="bert.",
        names=BERT_NAMES,
        head=HeadNames("pooler.dense", "tanh", "classifier"),
        defaults={"type_vocab_size": 2},
    ),
    "Roberta": ROBERTA,
    "XLMRoberta": ROBERTA,
    "DistilBert": EncoderFamily(
        prefix="distilbert.",
        names=DISTILBERT_NAMES,
        head=HeadNames("pre_classifier", "relu", "classifier"),
        fields={
            "hidden_size": "dim",
            "intermediate_size": "hidden_dim",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "hidden_act": "activation",
        },
        defaults={"type_vocab_size": 0},
    ),
}


def encoder_family(architecture: str) -> EncoderFamily | None:
    """The family of an encoder's architecture, such as `BertModel`; None: it is another model's."""
    for ending in (CLASSIFIER, *BODIES):
        if architecture.endswith(ending):
            return ENCODERS.get(architecture.removesuffix(ending))
    return None
