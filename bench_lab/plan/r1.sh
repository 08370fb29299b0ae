# 21: the branch "tail" beside main; carry the plan's packages and those of vLLM 0.26 (built by build.sh for x86).
# 1. check the branch out in the working tree, then: tests of it, and vLLM with it (about 150 s)
sh scratch/plan/o0.sh; export PYTHONUNBUFFERED=1 V=/tmp/v VLLM_USE_FLASHINFER_SAMPLER=0; mkdir -p $V /tmp/logs; python3 -W ignore -m tarfile -e scratch/vllm26/pkgs.tar.xz $V
PYTHONPATH=$PWD/src timeout 60 python3 -m pytest -q -n 8 -m gpu -W ignore tests/kv/pools tests/kv/test_pool.py tests/kernels/test_stream_moves.py 2>&1 | tail -3
PYTHONPATH=$V:$PWD/src timeout -k 5 195 python3 scripts/compare_vllm.py --time-limit 190 --logs /tmp/logs --engines plain,quire --turns 0 --rounds 11 --engine-args '{"max_num_seqs": 64}' 2>&1 | tee $OUT/compare.txt | tail -30; cp /tmp/logs/*.log $OUT/
PYTHONPATH=$PWD/src timeout 60 python3 scratch/small/rate.py 2>&1 | tail -12
