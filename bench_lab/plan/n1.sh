# 1: GPU tests of main's last changes (90 s), the lab of MXFP4 and four bits (150 s), then nano of gpt-oss by both trees (60 s).
# carry scratch/plan scratch/nar
sh scratch/plan/o0.sh; sh scratch/nar/run.sh > $OUT/lab.txt 2>&1; cat $OUT/lab.txt | tail -90
export PYTHONPATH=$PWD/src; t=tests
timeout 150 python3 -m pytest -q -n 12 -m gpu -W ignore $t/kv/tiers/test_memory.py $t/kernels/test_choose.py $t/kernels/test_triton_adapters.py $t/layers/test_adapted_matrix.py $t/runner/test_warmup.py $t/runner/test_adapters.py $t/kernels/test_rotated_decode.py $t/kernels/test_norm_products.py 2>&1 | tail -6
for t in base new; do echo $t; PYTHONPATH=/root/nar/$t/src timeout 70 python3 -m quire bench throughput gpt-oss-20b --load-format dummy --workload nano --repeat 1 2>&1 | tail -4; done
