"""Texts laid end to end, against lists of them."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.runner.pooling_batch import text_tensors
from quire.runner.text_batch import TextBatch

Texts = list[tuple[list[int], int | None]]


@st.composite
def some_texts(draw: st.DrawFn) -> Texts:
    ids = draw(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=5), min_size=1))
    return [(each, draw(st.none() | st.integers(0, len(each) - 1))) for each in ids]


def batch_of(texts: Texts) -> TextBatch:
    return TextBatch.of([ids for ids, _ in texts], [second for _, second in texts])


def listed(batch: TextBatch) -> Texts:
    parts = np.split(batch.token_ids, batch.lengths.cumsum()[:-1])
    return [
        (ids.tolist(), None if second == len(ids) else int(second))
        for ids, second in zip(parts, batch.seconds, strict=True)
    ]


@given(texts=some_texts(), others=some_texts(), data=st.data())
def test_parts_and_orders_are_those_of_lists(
    texts: Texts, others: Texts, data: st.DataObject
) -> None:
    batch = batch_of(texts)
    assert listed(TextBatch.joined([batch, batch_of(others)])) == texts + others
    order = data.draw(st.permutations(range(len(texts))))
    assert listed(batch.in_order(np.array(order))) == [texts[i] for i in order]
    first = data.draw(st.integers(0, len(texts) - 1))
    last = data.draw(st.integers(first + 1, len(texts)))
    assert listed(batch.part(range(first, last))) == texts[first:last]


def test_positions_and_types_of_tokens() -> None:
    found = text_tensors(batch_of([([5, 6, 7], 1), ([8, 9], None)]), torch.device("cpu"))
    assert found.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert found.positions.tolist() == [0, 1, 2, 0, 1]
    assert found.types is not None
    assert found.types.tolist() == [0, 1, 1, 0, 0]
    assert found.texts.starts.tolist() == [0, 3, 5]
    assert text_tensors(batch_of([([5], None)]), torch.device("cpu")).types is None
