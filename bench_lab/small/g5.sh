[ -d /root/demo/pkgs ] || sh scratch/plan/o0.sh
export PYTHONPATH=$PWD/src PYTHONUNBUFFERED=1
mkdir -p /root/base && tar xf scratch/small/base.tar -C /root/base
timeout 80 python3 -m pytest -q -n 8 -m gpu -W ignore tests/kernels/test_rotated_decode.py tests/kernels/test_code_products.py tests/models/test_few_launches.py tests/runner/test_graphs.py 2>&1 | tail -8 | cut -c1-300
s="timeout 60 python3 scratch/small/s1.py"
b="env PYTHONPATH=/root/base/src $s"
for m in "qwen3-8b 1 quantization=int4" "qwen3-8b 1 quantization=fp8" "qwen3-8b 1" "qwen3-30b-a3b 1" "qwen3-30b-a3b 1 quantization=fp8"; do $b $m 2>&1 | tail -1;  $s $m 2>&1 | tail -1; done
