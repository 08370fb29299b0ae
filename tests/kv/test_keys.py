import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quire.kv.image import BlockName
from quire.kv.keys import Namespace, block_key, chain_keys, group_key, group_keys, group_name

VECTORS = Path(__file__).with_name("block_keys.json")
BASE = Namespace(
    model="m", dtype="float32", kv_dtype="float32", block_size=4, layout="2x3x8/1", rope="1e4"
)


def chain(namespace, blocks):
    keys = [namespace.root_key()]
    for tokens in blocks:
        keys.append(block_key(keys[-1], tokens))
    return [key.hex() for key in keys]


def vectors():
    return {
        "plain": chain(BASE, [[1, 2, 3, 4], [5, 6, 7, 8]]),
        "salted": chain(replace(BASE, salt="tenant"), [[1, 2, 3, 4]]),
        "adapter": chain(replace(BASE, adapter="lora"), [[1, 2, 3, 4]]),
        "large ids": chain(BASE, [[0, 2**31 - 1, 151_935, 49_151]]),
        "three groups": in_groups(chain(BASE, [[1, 2, 3, 4], [5, 6, 7, 8]])[1:]),
    }


def in_groups(keys):
    return [group_key(bytes.fromhex(key), group).hex() for key in keys for group in range(3)]


def test_frozen_vectors():
    assert vectors() == json.loads(VECTORS.read_text())


def test_another_process_with_another_hash_seed_makes_the_same_keys():
    script = (
        "from quire.kv.keys import Namespace, block_key;"
        "n = Namespace('m', 'float32', 'float32', 4, '2x3x8/1', '1e4');"
        "print(block_key(n.root_key(), [1, 2, 3, 4]).hex())"
    )
    env = {**os.environ, "PYTHONHASHSEED": "12345", "LC_ALL": "C"}
    out = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == vectors()["plain"][1]


def test_groups_share_all_of_a_name_but_the_key():
    plain = BlockName(b"k" * 32, b"p" * 32, b"r" * 32, b"tokens", b"t" * 16)
    assert group_name(plain, 0) is plain
    names = [group_name(plain, group) for group in range(9)]
    assert len({name.key for name in names}) == 9
    assert {name[1:-1] for name in names} == {plain[1:-1]}
    assert [name.group for name in names] == list(range(9))


def test_keys_of_a_group_along_a_chain_are_those_of_each_place():
    chain = [bytes([place]) * 32 for place in range(5)]
    for group in (0, 1, 12):
        assert group_keys(chain, group) == [group_key(key, group) for key in chain]
    assert group_keys([], 3) == []


@pytest.mark.parametrize(
    "change",
    [
        {"model": "n"},
        {"dtype": "bfloat16"},
        {"kv_dtype": "fp8"},
        {"block_size": 8},
        {"layout": "2x3x8/2"},
        {"rope": "1e5"},
        {"adapter": "a"},
        {"salt": "s"},
        {"layout_version": 2},
    ],
)
def test_every_field_changes_every_key(change):
    changed = replace(BASE, **change)
    assert not set(chain(BASE, [[1, 2]])) & set(chain(changed, [[1, 2]]))
    assert chain(changed, [[1, 2]]) == chain(replace(BASE, **change), [[1, 2]])


def test_fields_do_not_run_into_each_other():
    a = replace(BASE, adapter="org_1", salt="2345")
    b = replace(BASE, adapter="org_12345", salt="")
    c = replace(BASE, adapter="", salt="org_12345")
    assert len({n.root_key() for n in (a, b, c)}) == 3


def test_keys_are_chained():
    root = BASE.root_key()
    assert block_key(block_key(root, [1]), [2]) != block_key(block_key(root, [2]), [2])
    assert block_key(root, [1, 2]) != block_key(block_key(root, [1]), [2])


def test_a_chain_of_keys_is_what_each_key_is():
    root = BASE.root_key()
    ids = [[7, 2**31 - 1, 0, 5], [1, 2, 3, 4], [1, 2, 3, 4]]
    packed = [np.array(each, dtype="<i4").tobytes() for each in ids]
    expected, parent = [], root
    for each in ids:
        parent = block_key(parent, each)
        expected.append(parent)
    assert chain_keys(root, packed) == expected
    assert chain_keys(root, []) == []
