#!/bin/sh
# Makes pkgs.tar.xz: vLLM 0.26.0 cut down to what a dense bf16 model with heads of 128 needs on sm_90, and the
# packages that the GPU machine lacks. Needs Python 3.12 with pip and a registry. Usage: build.sh FOLDER [PYTHON]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1" && cd "$1"
python=${2:-python3.12}

# 1. The wheel: built for CUDA 13 and torch 2.11, stable ABI from Python 3.8 on.
$python -m pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --abi abi3 \
    --platform manylinux_2_28_x86_64 -d wheels vllm==0.26.0
rm -rf pkgs && mkdir pkgs
$python -m zipfile -e wheels/vllm-0.26.0-*.whl pkgs

# 2. What is never imported, or imported in a `try`.
cd pkgs/vllm
rm -rf vllm-rs benchmarks entrypoints/serve/instrumentator/static \
    third_party/deep_gemm third_party/fmha_sm100 third_party/tml_fa4 \
    vllm_flash_attn/_vllm_fa2_C.abi3.so _flashmla_C.abi3.so _flashmla_extension_C.abi3.so _qutlass_C.abi3.so \
    _rust_tool_parser.abi3.so
rm -rf ../vllm-0.26.0.data

# 3. Code for other GPUs, and of FlashAttention 3 for other types and head sizes, becomes zeros.
for so in _C_stable_libtorch _moe_C_stable_libtorch cumem_allocator spinloop fs_io_C; do
    $python "$here/prune_fatbins.py" $so.abi3.so
done
$python "$here/prune_fatbins.py" vllm_flash_attn/_vllm_fa3_C.abi3.so \
    --only 'FlashAttnFwdCombine|prepare_varlen|ELi128ENS_10bfloat16_tEf'
cd ../..

# 4. The packages that are not on the machine. No torch, triton, numpy, transformers, tokenizers, pillow.
$python -m pip install --no-compile --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --platform manylinux_2_39_x86_64 --platform manylinux_2_34_x86_64 --platform manylinux_2_31_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux1_x86_64 --target pkgs -r "$here/requirements.txt"
rm -rf pkgs/bin

# 5. Packages that vLLM imports without need here: xgrammar and llguidance (grammars), cv2 (videos).
for name in xgrammar llguidance cv2 cv2/videoio_registry; do
    mkdir -p pkgs/$name && cp "$here/stub.py" pkgs/$name/__init__.py
done

find pkgs -name __pycache__ -prune -exec rm -rf {} +
tar -C pkgs --sort=name --owner=0 --group=0 --mtime=2026-01-01 -cf - . | xz -6 -T0 > "$here/pkgs.tar.xz"
ls -l "$here/pkgs.tar.xz"
