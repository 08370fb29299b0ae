"""What is compiled: the code of the CPU's kernels, in Numba's part of Python and in LLVM's terms.

Only the compiler imports it. A process that finds its kernels compiled needs neither.
"""
