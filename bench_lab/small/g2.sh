[ -d /root/demo/pkgs ] || sh scratch/plan/o0.sh
export PYTHONPATH=$PWD/src PYTHONUNBUFFERED=1
mkdir -p /root/base && tar xf scratch/small/base.tar -C /root/base
timeout 60 python3 -m pytest -q -n 6 -m gpu -W ignore tests/runner/test_graphs.py tests/kernels/test_gemv.py tests/kernels/test_code_products.py 2>&1 | tail -30 | cut -c1-300
s="timeout 60 python3 scratch/small/s1.py"
b="env PYTHONPATH=/root/base/src $s"
$b qwen3-8b 1 quantization=fp8 2>&1 | tail -1
for p in 0 1024 2048 4096 8192; do QUIRE_PF_GEMV=$p $s qwen3-8b 1 quantization=fp8 2>&1 | tail -1; done
for p in 0 4096 8192; do QUIRE_PF_GEMV=$p $s qwen3-8b 1 2>&1 | tail -1; done
for p in 0 16384 65536; do QUIRE_PF_INT4=$p $s qwen3-8b 1 quantization=int4 2>&1 | tail -1; done
$b qwen3-30b-a3b 1,256 quantization=fp8 2>&1 | tail -1
for p in 0 65536 131072 262144; do QUIRE_PF_GEMV=2048 QUIRE_PF_MOE=$p $s qwen3-30b-a3b 1,256 quantization=fp8 2>&1 | tail -1; done
for p in 0 131072; do QUIRE_PF_GEMV=2048 QUIRE_PF_MOE=$p $s qwen3-30b-a3b 1,256 2>&1 | tail -1; done
