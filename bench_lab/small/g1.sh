[ -d /root/demo/pkgs ] || sh scratch/plan/o0.sh
export PYTHONPATH=$PWD/src PYTHONUNBUFFERED=1
timeout 170 python3 -m pytest -q -n 8 -m gpu -W ignore tests/kv tests/engine tests/runner tests/api/test_tiers.py tests/api/test_window_tiers.py 2>&1 | tail -12
for m in "qwen3-30b-a3b" "qwen3-30b-a3b quantization=fp8" "gpt-oss-20b" "qwen3-8b quantization=int4" "qwen3-8b quantization=fp8 kv_cache_dtype=fp8"; do timeout 100 python3 scratch/small/p2.py $m 2>/dev/null; done
