import re, sys, collections
lines = []
for l in open(sys.argv[1]):
    m = re.match(r"\s+/\*([0-9a-f]{4,5})\*/\s+(.*?);", l)
    if m: lines.append((int(m[1], 16), m[2]))
addr = {a: i for i, (a, _) in enumerate(lines)}
for i, (a, t) in enumerate(lines):
    m = re.search(r"BRA(?:\.U)? (?:`\(.*?\) |)(0x[0-9a-f]+)", t)
    if m:
        to = int(m[1], 16)
        if to < a and a - to < 0x8000:
            body = [x for _, x in lines[addr[to]:i + 1]]
            n = sum("GMMA" in x for x in body)
            if n:
                c = collections.Counter(re.sub(r"^@!?U?P\d+ ", "", x.strip()).split()[0].split(".")[0] for x in body)
                print(hex(to), hex(a), "instr", len(body), "mma", n, dict(c.most_common(16)))
