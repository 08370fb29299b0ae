[ -d /root/demo/pkgs ] || sh scratch/plan/o0.sh
export PYTHONPATH=$PWD/src PYTHONUNBUFFERED=1
mkdir -p /root/base && tar xf scratch/small/base.tar -C /root/base
s="timeout 60 python3 scratch/small/s1.py"
b="env PYTHONPATH=/root/base/src $s"
$b qwen3-30b-a3b 256 quantization=fp8 2>&1 | tail -1
$s qwen3-30b-a3b 256 quantization=fp8 2>&1 | tail -1
QP=2 $s qwen3-30b-a3b 256 quantization=fp8 2>&1 | tail -1
