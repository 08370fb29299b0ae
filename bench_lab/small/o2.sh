# 17, 18: the start, 200 s; then 64 adapters over 32 slots, 80 s
timeout 260 python3 scripts/compare_trees.py /root/old /root/new qwen3-0.6b --case start --rounds 12 --set load_format=dummy --set max_model_len=4096 --set num_blocks=20000 2>/dev/null
export PYTHONPATH=$PWD/src
timeout 160 python3 -m quire bench adapters qwen3-8b --load-format dummy --workload nano --adapters 64 --max-loras 32 --repeat 1 2>&1 | tail -3
