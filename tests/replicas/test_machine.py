"""What each replica gets of the machine."""

import pytest

from quire.config import EngineConfig
from quire.replicas.machine import replica_config, replica_environment, start_order


def test_each_has_its_own_folders():
    config = EngineConfig(ssd_cache_dir="/a, /b", ssd_cache_bytes="1GB")
    assert replica_config(config, 2, 3, 0).ssd_cache_dir == "/a/replica-2,/b/replica-2"


def test_each_has_a_gpu_or_its_part_of_one(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    config = EngineConfig(gpu_memory_utilization=0.8)
    shares = [replica_config(config, n, 3, 2).gpu_memory_utilization for n in range(3)]
    assert shares == pytest.approx([0.4, 0.8, 0.8])  # 0 and 2 are on one; 2 sees 0's as taken
    gpus = [replica_environment(n, 3, ["4", "7"])["CUDA_VISIBLE_DEVICES"] for n in range(3)]
    assert gpus == ["4", "7", "4"]
    assert int(replica_environment(0, 10_000, [])["OMP_NUM_THREADS"]) == 1


@pytest.mark.parametrize(
    ("count", "num_gpus", "groups"),
    [
        (3, 0, [[0], [1, 2]]),
        (2, 1, [[0], [1]]),
        (5, 2, [[0], [1], [2, 3], [4]]),
        (2, 8, [[0], [1]]),
    ],
)
def test_those_on_one_gpu_are_started_in_turn(count, num_gpus, groups):
    assert [list(group) for group in start_order(count, num_gpus)] == groups
