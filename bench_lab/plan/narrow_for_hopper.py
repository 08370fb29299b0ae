import sys; sys.path.insert(0, "/work/main/bench_lab"); sys.path.insert(0, sys.argv[1] + "/src")
exec(open("/tmp/tri/comp.py").read())
import subprocess, importlib
m = importlib.import_module(sys.argv[2])
from quire.kernels.activation import *
from quire.kernels.four_bits import FourBitExperts
from quire.kernels.triton.experts.order import Blocks
m.pdl_launch = lambda d: {"PDL": True, "launch_pdl": True}
m.processors = lambda d: 132
def res(name):
    cu = __import__("glob").glob("/tmp/tri/v36/lib/python3*/site-packages/triton/backends/nvidia/bin/cuobjdump")[0]
    print(name, subprocess.run(f"{cu} -res-usage /tmp/tri/k.cubin 2>&1 | grep REG; {cu} -sass /tmp/tri/k.cubin > /tmp/tri/{name}.sass; grep -cE 'STL|LDL' /tmp/tri/{name}.sass; grep -c HGMMA /tmp/tri/{name}.sass; grep -cE '^ +/.[0-9a-f]{{4,5}}./' /tmp/tri/{name}.sass", shell=True, capture_output=True, text=True).stdout)
E, F = 32, 2880
def w(R): return FourBitExperts(torch.zeros(E, R, 736, dtype=torch.int16), torch.zeros(E, 23, R, dtype=torch.int32))
block = int(sys.argv[3])
table = torch.zeros(3, 48, dtype=torch.int32); order = torch.zeros(1024, dtype=torch.int32)
blocks = Blocks(order, table, block)
x = torch.zeros(48 * 128, 2880, dtype=torch.bfloat16)
bias = torch.zeros(E, 2 * F, dtype=torch.bfloat16)
m.product(x, w(2 * F), blocks, ClampedSwiGLU(1.702, 7.0), bias); res("gated")
m.product(x, w(F), blocks, None, bias[:, :F].contiguous()); res("plain")
