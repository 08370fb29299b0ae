# From the root of the repository, or of a folder with its src/.
export PYTHONPATH="$PWD/src:${PYTHONPATH:-}" TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-/tmp/fp8kv_lab_cache}"
export LAB_SECONDS="${LAB_SECONDS:-43}"
exec timeout -k 1 "$((LAB_SECONDS + 4))" python3 bench_lab/fp8kv/lab.py
