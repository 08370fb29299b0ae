[ -d /root/demo/pkgs ] || sh scratch/plan/o0.sh; export PYTHONUNBUFFERED=1 V=/tmp/v VLLM_USE_FLASHINFER_SAMPLER=0; mkdir -p $V /tmp/logs; [ -d $V/vllm ] || python3 -W ignore -m tarfile -e scratch/vllm26/pkgs.tar.xz $V
PYTHONPATH=$PWD/src timeout 60 python3 -m pytest -q -n 6 -m gpu -W ignore tests/kv/pools tests/kv/test_pool.py tests/kernels/test_stream_moves.py 2>&1 | tail -12
PYTHONPATH=$V:$PWD/src timeout -k 5 195 python3 scripts/compare_vllm.py --time-limit 190 --logs /tmp/logs --engines plain,quire --turns 0 --rounds 15 --engine-args '{"max_num_seqs": 64}' 2>&1 | tee $OUT/compare.txt | tail -12; cp /tmp/logs/*.log $OUT/
export PYTHONPATH=$PWD/src
b="timeout 150 python3 -m quire bench throughput --load-format dummy --workload square --repeat 1"
for m in "gpt-oss-20b --max-num-seqs 512 --profile $OUT" "gpt-oss-20b --max-num-seqs 256" "gpt-oss-120b --max-num-seqs 512"; do echo "== $m"; date +%s; $b $m 2>&1 | tail -14; done; date +%s
