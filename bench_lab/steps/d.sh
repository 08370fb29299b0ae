export PYTHONUNBUFFERED=1 G=$HOME/gpu; mkdir -p $G; python3 -W ignore -m tarfile -e build/gpu/pkgs.tar.xz $G
export PYTHONPATH=$PWD/src:$PWD/tests:$G/pkgs
profile=1 timeout -k 5 60 python3 d.py qwen3-8b 1 quantization=int4 2>&1 | grep -v "^ *[a-z ]*:.*step\|measuring" | tail -45
timeout -k 5 40 python3 d.py qwen3-0.6b 1,200 2>&1 | tail -3
