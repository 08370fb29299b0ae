set -o pipefail; export PYTHONUNBUFFERED=1 G=$HOME/gpu; mkdir -p $G; python3 -W ignore -m tarfile -e build/gpu/pkgs.tar.xz $G
export PYTHONPATH=$PWD/src:$PWD/tests:$G/pkgs
t(){ echo "== $(date +%T) $*"; timeout -k 5 -s INT "$@" 2>&1; }
t 40 python3 -m quire bench latency qwen3-8b --load-format dummy --quantization int4 --workload stream1 > $OUT/s_int4.log; tail -12 $OUT/s_int4.log
for m in "qwen3-8b --quantization int4" "qwen3-8b" "qwen3-30b-a3b --quantization fp8" "qwen3-30b-a3b"; do
n=$(echo $m | tr -d ' -'); t 75 python3 -m quire bench throughput $m --load-format dummy --workload nano --repeat 2 > $OUT/n_$n.log; echo "$m"; tail -12 $OUT/n_$n.log; done
t 65 python3 -m pytest -q -n 8 -m gpu -p no:cacheprovider tests/runner tests/kernels/test_latent.py tests/kernels/test_kv_splits.py tests/kernels/test_contract.py > $OUT/tests.log; tail -15 $OUT/tests.log
date +%T
