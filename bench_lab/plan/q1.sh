# GPU tests of main with the narrow kernels, 64 adapters over 32, kernels of gpt-oss's steps
sh scratch/plan/o0.sh
export PYTHONPATH=$PWD/src; t=tests
timeout 200 python3 -m pytest -q -n 12 -m gpu -W ignore $t/kv/tiers/test_memory.py $t/kernels/test_choose.py $t/kernels/test_triton_adapters.py $t/layers/test_adapted_matrix.py $t/runner/test_warmup.py $t/runner/test_adapters.py $t/kernels/test_rotated_decode.py $t/kernels/test_norm_products.py $t/kernels/test_triton_experts.py $t/kernels/test_gpu_experts.py $t/kernels/test_int4.py $t/kernels/test_hopper_narrow.py > $OUT/tests.txt 2>&1; tail -12 $OUT/tests.txt
timeout 120 python3 -m quire bench adapters qwen3-8b --load-format dummy --workload nano --adapters 64 --max-loras 32 --repeat 1 2>&1 | tail -5
for b in 128 256; do timeout 60 python3 scratch/plan/prof.py gpt-oss-20b $b 600 2>&1 | grep -v Warn | tail -26; done
