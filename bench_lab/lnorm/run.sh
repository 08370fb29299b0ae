# One H200, nothing compiled yet: checks of all shapes side by side, then the table.
cd "$(dirname "$0")"
export PYTHONPATH="$PWD/src:/root/demo/pkgs${PYTHONPATH:+:$PYTHONPATH}" TRITON_CACHE_DIR="$PWD/cache" OMP_NUM_THREADS=1
began=$(date +%s)
for config in "32 32" "64 32" "96 32" "128 32" "24 8" "32 8" "1 8"; do
    (timeout -k 1 24 python3 lab.py check $config || echo "FAILED: $config (status $?)") 2>&1 | tail -n 12 &
done
wait
echo "checked after $(($(date +%s) - began)) s"
timeout -k 1 19 python3 lab.py time || echo "FAILED: time (status $?)"
echo "done after $(($(date +%s) - began)) s"
