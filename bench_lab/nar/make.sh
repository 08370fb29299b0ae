# trees for the lab: make.sh; needs branch narrow2
set -e
T=/tmp/trees; rm -rf $T; mkdir -p $T
cd $ROOT  # the checkout
put() { mkdir -p $T/$1; git archive $2 src | tar x -C $T/$1; }
put base 3a60b8ff
put half4 narrow2~1
put early narrow2~2
put new narrow2
for v in nounpack nox nocodes loadsonly; do cp -r $T/new $T/$v; touch $T/$v/ABLATED; done
python3 - <<'P'
import re
T="/tmp/trees/"; E="/src/quire/kernels/triton/experts/"
def sub(tree, file, pairs):
    p=T+tree+E+file; s=open(p).read()
    for a,b in pairs:
        assert a in s, (tree, a); s=s.replace(a,b)
    open(p,"w").write(s)
sub("nounpack","hopper_unpack.py",[('lines = (_by_pairs(quarter, _EACH[quarter].value) for quarter in (first, first + 1))','lines = ("xor.b32 $0, $2, $3;", "xor.b32 $1, $2, $5;")')])
sub("nox","hopper_narrow_copies.py",[("                    mbarrier.expect(bar, 4 * inputs.block_type.nbytes)\n                    for i in gl.static_range(4):\n                        _fetch(inputs, [begin, i * quarter + k * 64], bar, xs.index(4 * at + i))\n","                    mbarrier.arrive(bar, count=1)\n")])
s="""                    mbarrier.expect(bar, 2 * codes.block_type.nbytes)
                    for part in gl.static_range(2):
                        row = first + part * between
                        _fetch(codes, [expert * height + row, k * 64], bar, cs.index(2 * at + part))
                        for sub in gl.static_range(2):
                            group = gl.minimum(2 * k + sub, groups - 1)
                            source = of_expert + group * height + row + lane
                            to = ws.index(4 * at + 2 * part + sub)
                            _copy(to, source, mask=row + lane < height)
                    async_copy.mbarrier_arrive(bar, increment_count=False)
"""
sub("nocodes","hopper_narrow_copies.py",[(s,"                    mbarrier.arrive(bar, count=1)\n                    async_copy.mbarrier_arrive(bar, increment_count=False)\n")])
p=T+"loadsonly"+E+"hopper_narrow.py"; s=open(p).read()
i=s.index("        parts = packed_parts(cs, ws, at, 0, WARPGROUP)\n"); j=s.index("        mbarrier.arrive(free.index(at), count=1)\n    # One step")
s=s[:i]+"        mbarrier.wait(has_x.index(at), (i // STAGES) & 1)\n"+s[j:]
open(p,"w").write(s)
P
tar cJf scratch/nar/trees.tar.xz -C $T .
ls -la scratch/nar
