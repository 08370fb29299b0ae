[ -d /root/demo/pkgs ] || sh scratch/plan/o0.sh
export PYTHONPATH=$PWD/src PYTHONUNBUFFERED=1
mkdir -p /root/base && tar xf scratch/small/base.tar -C /root/base
timeout 90 python3 -m pytest -q -n 8 -m gpu -W ignore tests/kernels/test_gpu_experts.py tests/kernels/test_triton_experts.py tests/kernels/test_code_products.py tests/layers/test_experts.py tests/models/test_few_launches.py 2>&1 | tail -8 | cut -c1-300
s="timeout 60 python3 scratch/small/s1.py"
b="env PYTHONPATH=/root/base/src $s"
for i in 1 2; do
$b qwen3-30b-a3b 1,256 quantization=fp8 2>&1 | tail -1
$s qwen3-30b-a3b 1,256 quantization=fp8 2>&1 | tail -1
done
PYTHONPATH=$PWD/src timeout 150 python3 -m quire bench throughput qwen3-30b-a3b --quantization fp8 --load-format dummy --workload nano --repeat 3 2>&1 | grep -E "^quire  "
