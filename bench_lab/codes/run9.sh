export PYTHON=python3 PATH=/opt/torch/.venv/bin:$PATH
P=$PYTHONPATH; export PYTHONPATH=/tmp/w/pkgs
(timeout 150 make test-gpu PYTHON=python LANES=10 PYTEST_ARGS="tests/kernels/test_code_products.py tests/kernels/test_codes.py tests/kernels/test_gpu.py tests/kernels/test_tried.py tests/kernels/test_fp8.py -q" 2>&1 | tail -12)
export PYTHONPATH=$PWD/src:/tmp/w/pkgs
nano() { timeout 70 python -m quire bench throughput $1 --load-format dummy --workload nano --repeat $2 $3 2>/dev/null | grep -E "^quire|^copies|idle" | sed "s/^/$1 $3: /"; }
nano qwen3-8b 1
nano qwen3-8b 2 "--quantization fp8 --kv-cache-dtype fp8"
nano qwen3-8b 2 "--quantization fp8"
nano qwen3-8b 1
nano qwen3-8b 1 "--quantization fp8 --kv-cache-dtype fp8"
nano qwen3-30b-a3b 1 "--quantization fp8"
export PYTHONPATH=/tmp/w/pkgs
(timeout 130 make test-gpu PYTHON=python LANES=10 PYTEST_ARGS="tests/runner tests/layers tests/models -q" 2>&1 | tail -8)
