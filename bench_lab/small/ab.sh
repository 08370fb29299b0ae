[ -d /root/demo/pkgs ] || sh scratch/plan/o0.sh
export PYTHONUNBUFFERED=1
mkdir -p /root/base && tar xf scratch/small/base.tar -C /root/base
PYTHONPATH=$PWD/src timeout 100 python3 -m pytest -q -n 8 -m gpu -W ignore tests/kernels/test_gpu_experts.py tests/layers/test_experts.py tests/models/test_few_launches.py 2>&1 | tail -3
b(){ echo "== $*"; PYTHONPATH=$1 timeout 120 python3 -m quire bench throughput $2 --load-format dummy --workload nano --repeat $3 2>&1 | grep -E "^quire  "; }
for i in 1; do b /root/base/src "qwen3-30b-a3b --quantization fp8" 2; b $PWD/src "qwen3-30b-a3b --quantization fp8" 2; b /root/base/src gpt-oss-20b 2; b $PWD/src gpt-oss-20b 2; b $PWD/src qwen3-30b-a3b 2; done
