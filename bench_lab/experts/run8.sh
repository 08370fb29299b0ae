R=$1; cd /tmp/w/lab && python mk.py $R/src
for v in base padx; do L=1 COMPILE=1 timeout 60 python nb.py 256:64,128:32,16:16 $v 2>&1 | grep -i fail & done
cd /tmp/w/lab2; for s in 0 1 2 3 4 5; do SLICE=$s timeout 60 python sweep2.py $R/src 2>&1 | grep -v "^$" | grep -v Invalid & done; wait
timeout 60 python sweep3.py $R/src
cd /tmp/w/lab; timeout 60 python nb.py 256:64,192:64,128:32,96:32,64:16,16:16 base,padx
