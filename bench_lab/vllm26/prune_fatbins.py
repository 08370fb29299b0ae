"""Blank, in place, what an extension of vLLM carries for other GPUs than sm_90.

    python prune_fatbins.py FILE.so [--only REGEX]

Nothing is moved: payloads of fatbin entries are overwritten with zeros, and so are the symbol tables that the
dynamic linker does not read, and xz makes them nothing. A container's headers stay, so the CUDA runtime
registers it as before, and loads its module when a kernel of it is first launched: one whose entry was blanked
fails then.
  - of a container with code for sm_90, all but that is blanked; one without has only code for other GPUs (or PTX
    of quantised kernels), and all is blanked;
  - --only REGEX keeps of the sm_90 entries (uncompressed ones, as FlashAttention 3 has) those with a kernel whose
    mangled name matches.
"""
import re, struct, sys

MAGIC, ELF = 0xBA55ED50, 2

def sections(data):
    shoff, = struct.unpack_from("<Q", data, 0x28)
    size, num, names = struct.unpack_from("<HHH", data, 0x3A)
    raw = [struct.unpack_from("<IIQQQQ", data, shoff + i * size) for i in range(num)]
    base = raw[names][4]
    return {bytes(data[base + n : data.index(b"\0", base + n)]).decode(): (off, length)
            for n, _, _, _, off, length in raw}

def containers(data, at, end):
    while at < end - 16:
        magic, _, header, size = struct.unpack_from("<IHHQ", data, at)
        if magic != MAGIC:
            at += 8
            continue
        entries, each, stop = [], at + header, at + header + size
        while each < stop:
            kind, _, length, payload = struct.unpack_from("<HHIQ", data, each)
            arch, = struct.unpack_from("<I", data, each + 28)
            entries.append((kind, arch, each + length, payload))
            each += length + payload
        yield entries
        at = stop

def main():
    path = sys.argv[1]
    only = re.compile(sys.argv[3].encode()) if len(sys.argv) > 3 else None
    data = bytearray(open(path, "rb").read())
    parts = sections(data)
    kept = blanked = 0
    if ".nv_fatbin" in parts:
        off, length = parts[".nv_fatbin"]
        for entries in containers(data, off, off + length):
            for kind, arch, at, size in entries:
                keep = kind == ELF and arch == 90
                if keep and only:
                    kernels = re.findall(rb"\.text\.([_A-Za-z0-9]+)", data[at : at + size])
                    keep = any(map(only.search, kernels))
                if keep:
                    kept += size
                else:
                    data[at : at + size] = bytes(size)
                    blanked += size
    for name in (".symtab", ".strtab"):
        if name in parts:
            off, length = parts[name]
            data[off : off + length] = bytes(length)
    open(path, "wb").write(data)
    print(f"{path}: {kept:,} bytes of sm_90 kept, {blanked:,} blanked")

main()
