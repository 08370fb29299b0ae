"""The classes that a config.json names, and what their numbers go through."""

from __future__ import annotations

from quire.errors import ModelError
from quire.models.checkpoints.json_fields import MOST_FEATURES, Raw, mapping, text, whole_number
from quire.models.pooling.facts import IDENTITY, SIGMOID, SOFTMAX

# By the names of torch's classes, as sentence-transformers writes them into a config.json.
ACTIVATIONS = {"Sigmoid": SIGMOID, "Identity": IDENTITY, "Softmax": SOFTMAX}


def class_names(raw: Raw) -> tuple[str, ...]:
    """From `id2label`, or numbered."""
    names = mapping(raw, "id2label")
    count = whole_number(raw, "num_labels", len(names) or 2, most=MOST_FEATURES)
    return tuple(str(names.get(str(i), f"LABEL_{i}")) for i in range(count))


def score_activation(raw: Raw, count: int) -> str:
    """As sentence-transformers chose it, or what suits one class, several, or several at once."""
    told = text(mapping(raw, "sentence_transformers"), "activation_fn")
    told = told or text(raw, "sbert_ce_default_activation_function")
    if told is not None:
        name = told.rpartition(".")[2]
        if name not in ACTIVATIONS:
            raise ModelError(
                f"The model's scores go through {name[:80]}, which Quire does not compute; it "
                f"knows {', '.join(ACTIVATIONS)}."
            )
        return ACTIVATIONS[name]
    is_each = count == 1 or raw.get("problem_type") == "multi_label_classification"
    return SIGMOID if is_each else SOFTMAX
