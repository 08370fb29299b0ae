"""Make gptqmodel.safetensors: one layer in each format that `gptqmodel` (7.7.0) writes.

    python tests/golden/make_gptqmodel.py

Beside its tensors each layer has `dense`, the numbers that `gptqmodel` reads back from them. The
library is too large to be installed for tests; this needs it, and takes seconds.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module
from safetensors.torch import save_file
from torch import Tensor, nn

GOLDEN = Path(__file__).parent / "gptqmodel.safetensors"
INPUTS, OUTPUTS, GROUP = 96, 32, 32


def scales_and_zeros(
    weight: Tensor, bits: int, symmetric: bool, index: Tensor
) -> tuple[Tensor, Tensor]:
    """`[outputs, groups]` each: from the lowest to the highest number, as without calibration."""
    columns = [index == group for group in range(int(index.max()) + 1)]
    low = torch.stack([weight[:, each].amin(1).clamp(max=0) for each in columns], 1)
    high = torch.stack([weight[:, each].amax(1).clamp(min=0) for each in columns], 1)
    last = 2**bits - 1
    if symmetric:
        largest = torch.maximum(-low, high)
        return (2 * largest / last).half().float(), torch.full_like(low, (last + 1) // 2)
    scale = ((high - low) / last).half().float()
    return scale, (-low / scale).round().clamp(1, last)


def gptq(bits: int, version: int, symmetric: bool, desc_act: bool) -> dict[str, Tensor]:
    linear = nn.Linear(INPUTS, OUTPUTS, bias=False)
    index = (torch.arange(INPUTS) // GROUP).int()
    if desc_act:
        index = index[torch.randperm(INPUTS)]
    packed = TorchLinear(
        bits=bits,
        group_size=GROUP,
        sym=symmetric,
        desc_act=desc_act,
        in_features=INPUTS,
        out_features=OUTPUTS,
    )
    scales, zeros = scales_and_zeros(linear.weight.data, bits, symmetric, index)
    packed.pack_original(linear, scales, zeros, index)
    packed.post_init()
    dense = packed.dequantize_weight().T
    if version == 1:
        config = SimpleNamespace(bits=bits, pack_dtype=torch.int32)
        convert_gptq_v2_to_v1_format_module(packed, config)
    names = ("qweight", "qzeros", "scales", "g_idx")
    return {"dense": dense} | {name: getattr(packed, name) for name in names}


def awq() -> dict[str, Tensor]:
    linear = nn.Linear(INPUTS, OUTPUTS, bias=False)
    packed = AwqTorchLinear(
        bits=4,
        group_size=GROUP,
        sym=False,
        desc_act=False,
        in_features=INPUTS,
        out_features=OUTPUTS,
        register_buffers=True,
    )
    index = torch.arange(INPUTS) // GROUP
    scales, zeros = scales_and_zeros(linear.weight.data, 4, False, index)
    packed.pack(linear, scales, zeros)
    tensors = {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales")}
    dense = dequantize_gemm(tensors["qweight"], tensors["qzeros"], tensors["scales"], 4, GROUP)
    return {"dense": dense.T, **tensors}


def main() -> None:
    torch.manual_seed(19)
    layers = {
        "gptq_v1": gptq(4, 1, symmetric=False, desc_act=False),
        "gptq_v1_symmetric": gptq(4, 1, symmetric=True, desc_act=False),
        "gptq_v1_desc_act": gptq(4, 1, symmetric=False, desc_act=True),
        "gptq_v1_8_bits": gptq(8, 1, symmetric=True, desc_act=False),
        "gptq_v2": gptq(4, 2, symmetric=False, desc_act=False),
        "gptq_v2_8_bits": gptq(8, 2, symmetric=False, desc_act=False),
        "awq": awq(),
    }
    tensors = {
        f"{layer}.{name}": tensor.detach().contiguous()
        for layer, found in layers.items()
        for name, tensor in found.items()
    }
    save_file(tensors, GOLDEN)
    GOLDEN.chmod(0o644)


if __name__ == "__main__":
    main()
