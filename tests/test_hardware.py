"""What is asked of CUDA's driver, by one that is not there; `quire info`'s test asks a real one."""

from __future__ import annotations

from typing import Any

import pytest

from quire.hardware import Gpu, gpus_of

NO_DEVICE = 100


class Driver:
    """As much of libcuda as is asked."""

    def __init__(self, gpus: list[Gpu], version: int = 13_000, error: int = 0) -> None:
        self.gpus, self.version, self.error = gpus, version, error

    def cuInit(self, flags: int) -> int:
        return self.error

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = self.version
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self.gpus)
        return 0

    def cuDeviceGet(self, device: Any, number: int) -> int:
        device._obj.value = 10 + number
        return 0

    def cuDeviceGetName(self, name: Any, size: int, device: Any) -> int:
        name.value = self.gpus[device.value - 10].name.encode()[: size - 1]
        return 0

    def cuDeviceTotalMem_v2(self, memory: Any, device: Any) -> int:
        memory._obj.value = self.gpus[device.value - 10].memory
        return 0


TWO = [Gpu("NVIDIA H200", 150_754_820_096), Gpu("NVIDIA L4", 23_800_000_000)]


def test_each_gpu_with_its_memory() -> None:
    assert gpus_of(Driver(TWO), version=13) == TWO
    assert gpus_of(Driver([]), version=13) == []


@pytest.mark.parametrize("driver", [Driver(TWO, error=NO_DEVICE), Driver(TWO, version=12_080)])
def test_none_where_torch_would_find_none(driver: Driver) -> None:
    assert gpus_of(driver, version=13) == []
