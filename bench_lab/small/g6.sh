[ -d /root/demo/pkgs ] || sh scratch/plan/o0.sh
export PYTHONPATH=$PWD/src PYTHONUNBUFFERED=1
python3 scratch/small/sweep.py 256 75 2>&1 | tail -40
