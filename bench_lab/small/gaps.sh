[ -d /root/demo/pkgs ] || sh scratch/plan/o0.sh
export PYTHONPATH=$PWD/src PYTHONUNBUFFERED=1
timeout 110 python3 scratch/small/gaps.py qwen3-30b-a3b quantization=fp8 2>&1 | grep -v Warn
