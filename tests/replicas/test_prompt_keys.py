from quire.kv.events import SHORT_KEY
from quire.kv.keys import Namespace, block_key
from quire.replicas.prompt_keys import prompt_keys

NAMESPACE = Namespace("model", "float32", "float32", 4, "layout", "rope")


def test_they_are_those_of_the_full_blocks_that_something_follows():
    first = block_key(NAMESPACE.root_key(), [1, 2, 3, 4])
    second = block_key(first, [5, 6, 7, 8])
    assert prompt_keys(NAMESPACE, [1, 2, 3, 4]) == []
    assert prompt_keys(NAMESPACE, range(1, 9)) == [first[:SHORT_KEY]]
    assert prompt_keys(NAMESPACE, range(1, 10)) == [first[:SHORT_KEY], second[:SHORT_KEY]]


def test_each_salt_has_its_own():
    ours, theirs = (prompt_keys(NAMESPACE, range(9), salt) for salt in ("a", "b"))
    assert len(ours) == 2 and not set(ours) & set(theirs)


def test_each_adapter_has_its_own():
    found = [
        prompt_keys(NAMESPACE, range(9), salt, adapter)
        for salt in ("", "a")
        for adapter in ("", "f1", "f2")
    ]
    assert len({key for keys in found for key in keys}) == 2 * len(found)
    assert prompt_keys(NAMESPACE, range(9), "a", "") == prompt_keys(NAMESPACE, range(9), "a")
