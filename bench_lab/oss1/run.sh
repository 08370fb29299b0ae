cd "$(dirname "$0")"
export PYTHONPATH="$PWD/src" TRITON_CACHE_DIR="$PWD/cache" OMP_NUM_THREADS=1
timeout -k 2 ${LAB_LIMIT:-44} python3 lab.py
