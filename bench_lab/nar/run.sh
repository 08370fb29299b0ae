# narrow kernels: base and candidates, and ablations; then four bits; about 120 s. carry scratch/nar
mkdir -p /root/nar; tar xJf scratch/nar/trees.tar.xz -C /root/nar
for t in base half4 early new nounpack nox nocodes loadsonly; do python3 scratch/nar/lab.py /root/nar/$t compile > /tmp/c_$t.log 2>&1 & done
for t in base new; do python3 scratch/nar/int4.py /root/nar/$t > /dev/null 2>&1 & done; wait
for t in base half4 early new base new nounpack nox nocodes loadsonly; do timeout 40 python3 scratch/nar/lab.py /root/nar/$t 2>&1 | tail -12; done
for t in base new base new; do timeout 30 python3 scratch/nar/int4.py /root/nar/$t; done
