export PYTHONUNBUFFERED=1 V=/tmp/v VLLM_USE_FLASHINFER_SAMPLER=0; mkdir -p $V /tmp/logs; python3 -W ignore -m tarfile -e scratch/vllm26/pkgs.tar.xz $V
PYTHONPATH=$V:$PWD/src timeout -k 5 260 python3 scripts/compare_vllm.py --time-limit 252 --logs /tmp/logs --engine-args '{"max_num_seqs": 256}' 2>&1 | tee $OUT/compare.txt | tail -30; cp /tmp/logs/*.log $OUT/
timeout 100 python3 scripts/compare_trees.py . . qwen3-8b --set load_format=dummy --set num_blocks=12000 --set max_model_len=17000 --set-second host_cache_bytes=8GiB --case prefill:16000 --case prefill:512 --rounds 15 2>/dev/null
