# 2: 21: vLLM 0.26 (carry scratch/vllm26/pkgs.tar.xz; 250 s), then tiers that miss: the longest prompt first, which waits for memory to be pinned (200 s)
export PYTHONUNBUFFERED=1 V=/tmp/v VLLM_USE_FLASHINFER_SAMPLER=0; mkdir -p $V /tmp/logs; python3 -m tarfile -e scratch/vllm26/pkgs.tar.xz $V
PYTHONPATH=$V:$PWD/src timeout -k 5 250 python3 scripts/compare_vllm.py --time-limit 242 --logs /tmp/logs --engine-args '{"max_num_seqs": 256}' 2>&1 | tee $OUT/compare.txt | tail -30; cp /tmp/logs/*.log $OUT/
timeout 220 python3 scripts/compare_trees.py . . qwen3-8b --set load_format=dummy --set num_blocks=12000 --set max_model_len=17000 --set-second host_cache_bytes=8GiB --case prefill:16000 --case prefill:512 --case prefill:4096 --case nano:256 --rounds 5 2>/dev/null
