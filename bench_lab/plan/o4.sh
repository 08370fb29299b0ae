# 21: vLLM 0.26 (250 s; carry scratch/vllm26/pkgs.tar.xz), then tiers that miss (120 s)
export PYTHONUNBUFFERED=1 V=/tmp/v; mkdir -p $V /tmp/logs; python3 -m tarfile -e scratch/vllm26/pkgs.tar.xz $V
PYTHONPATH=$V:$PWD/src timeout -k 5 245 python3 scripts/compare_vllm.py --time-limit 240 --logs /tmp/logs 2>&1 | tee $OUT/compare.txt | tail -30; cp /tmp/logs/*.log $OUT/
timeout 150 python3 scripts/compare_trees.py . . qwen3-8b --set load_format=dummy --set num_blocks=12000 --set max_model_len=17000 --set-second host_cache_bytes=8GiB --case prefill:512 --case prefill:4096 --case nano --rounds 5 2>/dev/null
