cd "$(dirname "$0")"
export TRITON_CACHE_DIR="$PWD/cache"
exec python3 mla.py
