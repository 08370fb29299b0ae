import sys; sys.argv=["x","none","",""]
exec(open("comp_a.py").read().split('import quire.kernels.triton.gguf.few as few')[0])
import quire.kernels.triton.int4.few_digits as fd
from quire.kernels.int4_tiles import Int4Tiles
fd.pdl_launch=lambda d:{"PDL":True,"launch_pdl":True}
from quire.kernels.activation import Activation
for rows, cols, act in ((6144, 4096, None), (24576, 4096, Activation.SILU), (4096, 12288, None)):
    m = Int4Tiles(torch.zeros(rows, cols // 4, dtype=torch.int16), torch.zeros(rows, cols // 128, dtype=torch.bfloat16), None, 128)
    fd.few_rows(torch.zeros(1, cols, dtype=torch.bfloat16), m, None, act, True)
    import subprocess
    print(subprocess.run("grep -cE '/\\*[0-9a-f]{4}\\*/' i4d.sass", shell=True, capture_output=True, text=True).stdout.strip())
