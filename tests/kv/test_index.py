import random

import numpy as np
import pytest

from quire.kv.index import GONE, MOST_COMPARED, PrefixIndex

TOKENS = np.arange(100, dtype=np.int32)


def publish_all(index, tokens, blocks, namespace=""):
    nodes = []
    index.publish(namespace, nodes, tokens[: len(blocks) * index.block_size], blocks)
    return nodes


def matched(index, tokens, namespace=""):
    return [node.block for node in index.match(namespace, np.asarray(tokens, dtype=np.int32))]


def test_matches_full_blocks_only_and_stops_at_the_first_difference():
    index = PrefixIndex(4)
    publish_all(index, TOKENS, [7, 3, 9])
    assert matched(index, TOKENS[:12]) == [7, 3, 9]
    assert matched(index, TOKENS[:11]) == [7, 3]
    assert matched(index, TOKENS[:3]) == []
    changed = TOKENS[:12].copy()
    changed[5] = 99
    assert matched(index, changed) == [7]


def test_equal_tokens_behind_another_prefix_do_not_match():
    index = PrefixIndex(2)
    publish_all(index, np.array([1, 2, 3, 4], dtype=np.int32), [0, 1])
    assert matched(index, [3, 4]) == []
    assert matched(index, [5, 6, 3, 4]) == []


def test_namespaces_share_nothing():
    index = PrefixIndex(4)
    publish_all(index, TOKENS, [1], "org_1")
    publish_all(index, TOKENS, [2], "org_12345")
    assert matched(index, TOKENS, "org_1") == [1]
    assert matched(index, TOKENS, "org_12345") == [2]
    assert matched(index, TOKENS, "") == []


def test_colliding_hashes_never_serve_a_block():
    """Keys that all hash alike: tokens are compared, so nothing foreign is found."""

    class Colliding(bytes):
        def __hash__(self):
            return 1

    index = PrefixIndex(2)
    nodes = publish_all(index, np.array([1, 2], dtype=np.int32), [5])
    root = nodes[0].parent
    root.children = {Colliding(key): node for key, node in root.children.items()}
    other = Colliding(np.array([1, 3], dtype=np.int32).tobytes())
    assert root.children.get(other) is None
    assert root.children.get(Colliding(nodes[0].tokens)) is nodes[0]


def test_the_first_block_with_a_content_keeps_it():
    index = PrefixIndex(4)
    [first] = publish_all(index, TOKENS, [1])
    [second] = publish_all(index, TOKENS, [2])
    assert second is first and first.block == 1 and 2 not in index


def test_a_forgotten_block_and_all_behind_it_are_missed():
    index = PrefixIndex(4)
    nodes = publish_all(index, TOKENS, [0, 1, 2])
    index.forget(1)
    assert matched(index, TOKENS) == [0]
    assert nodes[1].block == GONE
    index.forget(2)  # evicted in its turn, though it could not be reached
    index.forget(0)
    assert len(index) == 0 and index._roots == {}


def test_nothing_is_published_behind_a_dead_parent():
    index = PrefixIndex(4)
    nodes = publish_all(index, TOKENS, [0])
    index.forget(0)
    index.publish("", nodes, TOKENS[4:12], [1, 2])
    assert [node.block for node in nodes] == [GONE] * 3
    assert 1 not in index and 2 not in index


def test_a_known_chain_is_not_walked_again():
    index = PrefixIndex(4)
    nodes = publish_all(index, TOKENS, [0, 1, 2])
    garbage = np.full(12, -5, dtype=np.int32)
    assert index.match("", garbage, known=nodes) == nodes
    assert index.match("", TOKENS[:12], known=nodes[:1]) == nodes
    index.forget(2)
    assert index.match("", TOKENS[:12], known=nodes) == nodes[:2]


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5])
def test_short_prompts(length):
    index = PrefixIndex(4)
    publish_all(index, TOKENS, [0])
    assert matched(index, TOKENS[:length]) == ([0] if length >= 4 else [])


def row(*tokens):
    return np.array(tokens, dtype=np.int32)


def common(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(b))


@pytest.mark.parametrize("least", [1, 3])
def test_the_nearest_block_is_the_one_with_the_longest_common_start(least):
    dice = random.Random(least)
    for _ in range(200):
        index = PrefixIndex(6)
        chain = publish_all(index, row(*range(6)), [0]) if dice.random() < 0.5 else []
        blocks = [[dice.randint(0, 1) for _ in range(6)] for _ in range(dice.randint(0, 12))]
        for block, tokens in enumerate(blocks, 1):
            index.publish("", list(chain), row(*tokens), [block])
        wanted = [dice.randint(0, 1) for _ in range(dice.randint(0, 6))]
        best = max((common(tokens, wanted) for tokens in blocks), default=0)
        node, count = index.nearest("", chain, row(*wanted), least)
        assert count == (best if best >= least else 0)
        assert (node is None) == (count == 0)
        assert node is None or common(blocks[node.block - 1], wanted) == count


def test_only_the_latest_blocks_are_looked_at_and_what_is_preferred_is_one_of_them():
    index = PrefixIndex(2)
    [first] = publish_all(index, row(1, 0), [0])
    for i in range(MOST_COMPARED):
        assert index.nearest("", [], row(1))[0] is first
        publish_all(index, row(2, i), [1 + i])
    assert index.nearest("", [], row(1)) == (None, 0)
    index.prefer(first)
    assert index.nearest("", [], row(1)) == (first, 1)
    assert index.nearest("", [], row(1), apart_from={first}) == (None, 0)
    assert matched(index, [1, 0]) == [0] and len(index) == MOST_COMPARED + 1
    index.forget(0)
    assert index.nearest("", [], row(1)) == (None, 0)
