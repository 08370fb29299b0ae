# cpu.sh SRC TYPES...: Quire and llama.cpp on all cores
mkdir -p /tmp/w/np /tmp/w/lp; tar xJf build/gpu/numba.txz -C /tmp/w/np; tar xJf build/gpu/llama.txz -C /tmp/w/lp
export PYTHONPATH=$PWD/src:$PWD/scripts:/tmp/w/pkgs:/tmp/w/np/numba_pkgs:/tmp/w/lp CUDA_VISIBLE_DEVICES= LD_LIBRARY_PATH=/tmp/w/lp/llama_cpp/lib
lscpu | grep "Model name"; grep -o "amx[a-z_0-9]*\|avx512_vnni\|avx_vnni\|avx512_bf16" /proc/cpuinfo | sort | uniq -c | head; nproc
cat > /tmp/w/cmp.py <<'P'
import sys
if __name__ == "__main__":
    import quire.models.checkpoints.demo as demo
    demo.fetch = lambda *a: "build/gpu/tok.gguf"
    import compare_llama_cpp
    sys.exit(compare_llama_cpp.main())
P
for t in $TYPES; do echo "== $t"; timeout ${LIMIT:-130} python /tmp/w/cmp.py --random $t --threads ${T:-16} --rounds ${R:-2} ${CASES} 2>&1 | tail -25; done
