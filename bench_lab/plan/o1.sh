# GPU tests of what changed since, labs of unmerged branches: about 200 s. carry: scratch/plan scratch/labs5
R=$PWD; sh scratch/plan/o0.sh; export PYTHONPATH=$PWD/src
timeout 200 python3 -m pytest -q -n 10 -m gpu tests/kernels/test_tried.py tests/kernels/test_fp8.py tests/kernels/test_gpu.py tests/kernels/test_triton_adapters.py tests/runner/test_warmup.py tests/runner/test_adapters.py tests/kernels/test_latent.py 2>&1 | tail -8
unset PYTHONPATH
for n in lnorm oss1; do mkdir -p $HOME/l/$n; tar xJf $R/scratch/labs5/${n}_lab.tar.xz -C $HOME/l/$n; cd $HOME/l/$n; s=$(date +%s); LAB_LIMIT=60 LAB_SECONDS=55 timeout -k 2 75 sh run.sh > $OUT/$n.txt 2>&1; echo "$n rc $? $(( $(date +%s) - s )) s"; tail -c 3500 $OUT/$n.txt; done
