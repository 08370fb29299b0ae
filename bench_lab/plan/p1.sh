# GPU tests of the candidate (main with lnorm and oss1), and it beside main: about 330 s. carry: scratch/plan
sh scratch/plan/o0.sh; mkdir -p /root/cand; tar xJf scratch/plan/cand.tar.xz -C /root/cand
cd /root/cand; t=tests/kernels; export PYTHONPATH=$PWD/src
timeout 200 python3 -m pytest -q -n 10 -m gpu $t/test_tried.py $t/test_fp8.py $t/test_gpu.py $t/test_gpu_experts.py $t/test_triton_adapters.py $t/test_triton_experts.py $t/test_choose.py $t/test_norm_products.py $t/test_rotated_decode.py $t/test_gemv.py $t/test_linear.py tests/layers/test_adapted_matrix.py tests/runner/test_warmup.py tests/runner/test_adapters.py 2>&1 | tail -12
timeout 100 python3 scripts/compare_trees.py /root/new /root/cand gpt-oss-20b --case stream1 --rounds 6 --set load_format=dummy --set num_blocks=4000 --set max_model_len=4096 2>/dev/null
for t in new cand; do echo $t; PYTHONPATH=/root/$t/src timeout 110 python3 -m quire bench adapters qwen3-8b --load-format dummy --workload nano --adapters 64 --max-loras 32 --repeat 1 2>&1 | tail -3; done
