"""How many multiprocessors a GPU has: so many programs run at once, or a few times as many."""

from __future__ import annotations

from functools import cache as memoise

import torch


@memoise
def processors(device: torch.device, interpreted: int = 8) -> int:
    """`interpreted`: for how many a kernel is launched where there is no GPU."""
    if device.type != "cuda":
        return interpreted
    return torch.cuda.get_device_properties(device).multi_processor_count
