[ -d /root/demo/pkgs ] || sh scratch/plan/o0.sh
export PYTHONPATH=$PWD/src PYTHONUNBUFFERED=1
timeout 60 python3 -m pytest -q -n 4 -m gpu -W ignore tests/kv/pools 2>&1 | tail -2
for m in "gpt-oss-20b" "qwen3-30b-a3b" "qwen3-30b-a3b quantization=fp8" "deepseek-v2-lite" "qwen3-8b quantization=fp8 kv_cache_dtype=fp8" "qwen3-8b quantization=int4"; do timeout 100 python3 scratch/small/ns.py $m 2>/dev/null; done
